"""Virtual time of an engine that queues each iteration while the one before it runs, as the real one does on a GPU."""

from repro.engine.clock import VirtualClock


class QueuedClock(VirtualClock):
    """`now` is when the next iteration is decided: the last one has been queued, and the one before it has just ended.
    A request that arrives later waits for one iteration more. `known_s` is when the last one's tokens are known (s)."""

    known_s = 0.0

    def spend(self, durations_s: list[float]) -> None:
        ends = [max(self.now, self.known_s)]
        for seconds in durations_s:
            ends.append(ends[-1] + seconds)
        # To queue takes the host no time, but no iteration takes none.
        self.now, self.known_s = max(ends[-2], self.now + 1e-9), ends[-1]
