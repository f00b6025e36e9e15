"""What a user calls a run, as a recipe: a simulated one, a real model's, or a server's by its log."""

from __future__ import annotations

import os
from dataclasses import replace

from repro.checks import shown, user_facing
from repro.engine.memory.prefix_cache import Hashes
from repro.engine.systems import system
from repro.errors import UserError
from repro.history.memory_map import MemoryMap
from repro.history.recipe import Recipe, Setup
from repro.history.recorded import Ends, Recorded
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
    head = log.head
    chosen = replace(system(head["system"]), watermark=head["watermark"]).with_scheduler(**head["scheduler"])
    contents = {line["request"]: [str(one).encode() for one in line["hash_ids"]] for line in log.lines}
    hashes: Hashes = lambda request: contents[request.request_id]
    sizes = head["num_blocks"], head["block_size"], head["max_model_len"], head["num_cpu_blocks"]
    setup = Setup(chosen, *sizes, hashes if chosen.prefix_caching else None)
    ends = {line["request"]: Ends(line["output_lengths"], line["stopped"]) for line in log.lines}
    timing = None if log.cost_model is None else SimulatedExecutor(log.cost_model)
    return Recorded(setup, log.requests, log.events, ends, timing)
