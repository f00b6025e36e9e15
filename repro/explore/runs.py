"""What a user calls a run, as a recipe: a simulated one, a real model's, or a server's by its log."""

from __future__ import annotations

import os

from repro.checks import shown, user_facing
from repro.errors import UserError
from repro.history.memory_map import MemoryMap
from repro.history.recipe import Recipe
from repro.history.recorded import Recorded
from repro.server.replay import Logged
from repro.simulate.executor import SimulatedExecutor


@user_facing
def memory_map(run: object) -> MemoryMap:
    """The memory map of what `repro.serve` or `LLM.generate` returned, or of a server's log, by its file name. The run
    is made again, watched."""
    return _run(run).memory_map()


def recipe_of(run: object) -> Recipe:
    """UserError for what is no run, or comes out otherwise when it is run again."""
    run = _run(run)
    if isinstance(run, Recipe):
        return run
    return run.recipe() if isinstance(run, Recorded) else run.recipe


def _run(run: object) -> object:
    """UserError for anything else."""
    if isinstance(run, str | os.PathLike):
        return logged(os.fspath(run))
    if not isinstance(run, Recipe) and not hasattr(run, "recipe"):
        raise UserError(
            f"run = {shown(run)} cannot be used; give what repro.serve(...) or LLM.generate(...) returned, or the file "
            "name of a server's log"
        )
    return run


def logged(path: str) -> Recorded:
    """A log of `repro serve --log`. A simulated server's times are those of its own cost model; a real one has none.

    UserError for another file, or if the server ended before its requests did."""
    log = Logged.read(path)
    if not log.is_whole:
        raise UserError(f"{path}: the server has ended before all of its requests did; their lengths are not known")
    timing = None if log.cost_model is None else SimulatedExecutor(log.cost_model)
    return Recorded(log.setup, log.requests, log.events, log.ends, timing)
