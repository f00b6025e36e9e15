"""Who uses a model now. Its layers hold the pool of one engine at a time, so a second call must wait or be refused."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from repro.errors import UserError
from repro.llm.pace import Pace


class Turns:
    """The turns of all engines that share a model: `take` one for a whole call, `begin` another executor's run.

    `pace` is what they found on a CPU, so that all run with as many threads and round alike."""

    pace: Pace | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._num_runs = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait until no other thread has the model. UserError if this thread has it already: it would wait for good."""
        if self._owner == threading.get_ident():
            raise UserError(
                "this model is generating, or in a block of llm.decoding(), and what runs there (an observer?) has "
                "asked for it; ask afterwards"
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def begin(self) -> int:
        """The number of a run that begins now, and ends those before."""
        self._num_runs += 1
        return self._num_runs

    def check(self, run: int) -> None:
        """UserError if another run has begun since."""
        if run != self._num_runs:
            raise UserError("another executor has begun with this model since, and has its pool; reset this one first")
