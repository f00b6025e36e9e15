"""What a user calls a run, as a recipe: a simulated one, a real model's, or a server's by its log."""

from __future__ import annotations

from repro.checks import shown, user_facing
from repro.errors import UserError
from repro.history.memory_map import MemoryMap
from repro.history.recipe import Recipe


def recipe_of(run: object) -> Recipe:
    """UserError for anything else."""
    recipe = run if isinstance(run, Recipe) else getattr(run, "recipe", None)
    if not isinstance(recipe, Recipe):
        raise UserError(
            f"run = {shown(run)} cannot be used; give what repro.serve(...) or LLM.generate(...) returned, or the file "
            "name of a server's log"
        )
    return recipe


@user_facing
def memory_map(run: object) -> MemoryMap:
    """The memory map of what `repro.serve` or `LLM.generate` returned, or of a server's log, by its file name. The run
    is made again, watched."""
    return recipe_of(run).memory_map()
