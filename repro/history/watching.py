"""An observer that watches one run from its beginning."""

from __future__ import annotations

from repro.engine.loop import Engine, Observer
from repro.engine.scheduler import SchedulerOutput
from repro.errors import UserError


class OfOneRun(Observer):
    """UserError, in the run, if it has watched another engine, or if that has run before."""

    _engine: Engine | None = None

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        """A subclass calls this first."""
        if engine is self._engine:
            return
        if self._engine is not None or output.iteration:
            said = "it has watched another run" if self._engine else "this engine has run before"
            raise UserError(f"{type(self).__name__}: {said}; give each run one of its own, from its beginning")
        self._engine = engine
        self.begin(engine)

    def begin(self, engine: Engine) -> None:
        """The first output of the run has run."""
