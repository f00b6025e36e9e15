"""What a benchmark is: steps that give rows, and what has to be ready for them.

It does not write: `repro.bench.run` works through the steps and records their rows."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from repro.bench.rows import Recording, Row
from repro.errors import UserError


@dataclass(frozen=True)
class Step:
    """One point: `key` names its rows in the recording, `expected_s` is what it will take. `measure` is None as long as
    rows that it needs are not there."""

    key: str
    expected_s: float
    measure: Callable[[], Iterable[Row]] | None

    @property
    def kind(self) -> str:
        return self.key.partition("/")[0]


class Benchmark:
    """Made from the options of its description. UserError for what cannot be measured here, before any work.

    `setting` is what all rows are measured with: columns of each of them. Rows of different settings, or of different
    source of what `measures` names (functions, modules), do not count as the same measurement. `method` goes into the
    manifest; the columns `shown` of a few rows are printed at the end."""

    measures: ClassVar[Sequence[Any]]
    method: ClassVar[str]
    shown: ClassVar[Sequence[str]] = ()

    def __init__(self, options: Any) -> None:
        self.options = options
        self.budget_s = seconds_of(options.budget)
        self.setting: Row = {}

    def start(self, recording: Recording) -> dict[str, Any]:
        """Get ready to measure; what the manifest says of that."""
        return {}

    def steps(self, recording: Recording) -> Iterator[Step]:
        """Every point in order, those that are recorded as well. Called more than once; it measures nothing itself."""
        raise NotImplementedError

    def finish(self, recording: Recording) -> dict[str, Any]:
        """Called after the last step; what the manifest says of the end."""
        return {}


def seconds_of(text: str) -> float:
    """A length of time as a user writes it: 90s, 30m, 2h; 0, with or without a unit, for none. UserError otherwise."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smh])", "0s" if text.strip() == "0" else text.strip(), re.ASCII)
    if found:
        return float(found[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[found[2]]
    raise UserError(f"budget {text!r} is no length of time; write a number and s, m or h, such as 30m, or 0 for none")


def require_gpu(name: str, remedy: str = "run it on a machine with one") -> None:
    """UserError without a CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            f"no CUDA GPU here, and bench {name} needs one: {remedy}; rows recorded on an H200 are in "
            f"experiments/recorded/h200/{name}"
        )
