"""What an operator reads while an engine runs, in the words of vLLM V1's log: a line every few seconds.

Beside the usage of blocks, which every engine shows, stands the share of slots that hold a token: what a last block
has left empty, and what a contiguous chunk has reserved, counts as used in the first and not in the second."""

from __future__ import annotations

from collections.abc import Callable

from repro.checks import number
from repro.engine.loop import Engine, Observer
from repro.engine.scheduler import SchedulerOutput


class StatusLines(Observer):
    """Says a line at the end of the first iteration after every `every_s` seconds, and one at the first preemption.

    `say` gets each line. UserError for an interval that is not positive."""

    def __init__(self, every_s: float, say: Callable[[str], None]) -> None:
        self.every_s = number("status_every_s", every_s, 0, above=True)
        self.say = say
        self.next_s = self.every_s
        self._since_s = 0.0
        self._prompt_tokens = self._output_tokens = 0

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        self._prompt_tokens += output.num_prefill_tokens
        started = sum(len(prefill.group.seqs) for prefill in output.prefills)
        self._output_tokens += output.num_decode_seqs * output.num_iterations + started
        scheduler = engine.scheduler
        if output.preempted and scheduler.num_preemptions == len(output.preempted):
            first = next(iter(output.preempted)).request
            self.say(
                f"{engine.clock.now:.1f} s: {first} is driven out, since the K/V cache is full. It costs time, not "
                "tokens. A larger pool or a lower max_num_seqs avoids it; the count so far is in each line below"
            )
        if engine.clock.now >= self.next_s:
            self.say(self.line(engine, output))
            self._since_s, self._prompt_tokens, self._output_tokens = engine.clock.now, 0, 0
            self.next_s = engine.clock.now + self.every_s

    def line(self, engine: Engine, output: SchedulerOutput) -> str:
        scheduler, manager, now = engine.scheduler, engine.scheduler.manager, engine.clock.now
        last = output.iteration + output.num_iterations - 1
        usage, seconds = manager.usage(scheduler.stored_lengths(last)), now - self._since_s
        parts = [
            f"{now:.1f} s: Avg prompt throughput: {self._prompt_tokens / seconds:.1f} tokens/s",
            f"Avg generation throughput: {self._output_tokens / seconds:.1f} tokens/s",
            f"Running: {len(scheduler.holders())} reqs",
            f"Waiting: {len(scheduler.waiting)} reqs",
            f"Swapped: {len(scheduler.swapped)} reqs",
            f"KV cache usage: {100 * (1 - manager.num_free_blocks / manager.num_blocks):.1f}% of blocks, "
            f"{100 * usage.token_states / usage.total:.1f}% of slots hold a token",
            f"Preemptions: {scheduler.num_preemptions}",
        ]
        if manager.num_asked:
            parts.append(f"Prefix cache hit rate: {100 * manager.num_hit / manager.num_asked:.1f}%")
        return ", ".join(parts)
