"""When a client gets its tokens: as the host knows them, which on a GPU is while the next iteration runs already.

The engine's own clock says when an iteration was queued and the one before it had ended. That is right for rates, but
calls a prompt's first token one iteration too early."""

from collections.abc import Iterable, Sequence

import numpy as np

from repro.engine.clock import Clock
from repro.llm.batch import Batch, GroupRows


class TokenTimes:
    """Seconds on `clock` of every token of every request; samples and beams of one count together. `note` is for
    `TorchExecutor.on_settled`, and costs a running engine next to nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: list[tuple[float, list[GroupRows], np.ndarray]] = []

    def note(self, batch: Batch) -> None:
        self._steps.append((self._clock.now, batch.groups, batch.live))

    def of_requests(self) -> dict[int, list[float]]:
        """Request id -> when its tokens came; of a static batch only those that it asked for."""
        found: dict[int, list[float]] = {}
        for now, groups, live in self._steps:
            for rows in groups:
                if live[rows.first]:
                    found.setdefault(rows.group.request.request_id, []).append(now)
        return found


def gaps(times: Iterable[Sequence[float]], start_s: float, stop_s: float) -> np.ndarray:
    """Seconds between consecutive tokens of each request, of tokens that came from `start_s` to `stop_s`."""
    pieces = [np.empty(0)]
    for own in map(np.asarray, times):
        pieces.append(np.diff(own)[(own[1:] >= start_s) & (own[1:] <= stop_s)])
    return np.concatenate(pieces)


def quantile(values: Sequence[float] | np.ndarray, share: float) -> float | None:
    """The value that this share of all values does not exceed; None if there are none."""
    return float(np.quantile(values, share, method="inverted_cdf")) if len(values) else None
