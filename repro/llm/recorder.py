"""What a run of the engine is watched for: the batch, the pool, the progress bar."""

from dataclasses import dataclass, field

from repro.engine.loop import Engine, Observer
from repro.engine.scheduler import SchedulerOutput
from repro.llm.executor import TorchExecutor


@dataclass
class Recorder(Observer):
    """Batch, pool usage and time of every iteration, the prompt tokens computed in all, and the progress bar."""

    executor: TorchExecutor
    progress: bool
    total: int = 0
    batch: list[int] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)
    times_s: list[tuple[float, float]] = field(default_factory=list)
    computed: int = 0

    def __enter__(self) -> "Recorder":
        from tqdm import tqdm

        self._bar = tqdm(total=self.total, unit=" requests", disable=not self.progress)
        return self

    def __exit__(self, *unused: object) -> None:
        self._bar.update(len(self.executor.finished) - self._bar.n)
        self._bar.close()

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        manager = engine.scheduler.manager
        self.batch.append(output.num_decode_seqs + sum(len(prefill.group.seqs) for prefill in output.prefills))
        self.usage.append(1 - manager.num_free_blocks / manager.num_blocks)
        self.times_s.append((start_s, engine.clock.now))
        self.computed += output.num_prefill_tokens
        self._bar.update(len(self.executor.finished) - self._bar.n)
