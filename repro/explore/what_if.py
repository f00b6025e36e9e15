"""The same arrivals with one setting or one decision changed: where the two histories part, and what it costs.

    served = repro.serve("vllm", "opt-13b", trace)
    repro.what_if(served, preemption="swap")  # a setting
    repro.what_if(served, at=812, victim=17)  # one decision of one iteration

Both runs are made anew. The first must come out as it did."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from repro.checks import known_names, lookup, shown, user_facing, whole
from repro.engine.config import check_block_size
from repro.engine.events import Event
from repro.engine.memory import Reservation, reserve_max, reserve_oracle, reserve_pow2
from repro.engine.systems import System
from repro.errors import UserError
from repro.explore.decision import Deciding, Decision
from repro.explore.difference import Difference, History
from repro.explore.runs import recipe_of
from repro.feed.receipts import Receipts
from repro.history.memory_map import MemoryMap
from repro.history.recipe import Recipe, Rerun

#: the least of each
_LEAST = {"num_blocks": 1, "num_cpu_blocks": 0}
_POOL = ("system", "block_size", *_LEAST)
_SYSTEM = ("watermark", "reservation", "prefix_caching")
_RESERVATIONS: dict[str, Reservation] = {"max": reserve_max, "pow2": reserve_pow2, "oracle": reserve_oracle}


@user_facing
def what_if(run: object, *, at: int | None = None, **changes: Any) -> Difference:
    """What would have come of a run with something changed. `run` is what `repro.serve` or `LLM.generate` returned, or
    the file name of a server's log.

    Settings: `system`; the pool's `num_blocks`, `block_size` (in as many slots) and `num_cpu_blocks`; `watermark`,
    `reservation` (a function, or "max", "pow2", "oracle"; None pages), `prefix_caching`; and any setting of the
    scheduler, such as `max_num_seqs`, `max_num_batched_tokens`, `preemption`, `victim`, `order`.

    With `at`, an iteration, one decision: `victim=17` drives out request 17 first; `preemption="swap"` (or "recompute")
    preempts the first one driven out in this way; `hold=5` does not start request 5.

    UserError, before the changed run, for what is not known or cannot be."""
    recipe = recipe_of(run)
    if at is None:
        return _parted(Version(recipe), Version(_changed(recipe, changes)), _said(changes))
    decision = Decision.of(at, changes)
    decision.check_setup(recipe.setup)
    return _parted(Version(recipe, at), Version(recipe, at, decision), str(decision))


@dataclass(frozen=True)
class Version:
    """One of the two runs, which can be made as often as one likes. With `at` it is known who could be driven out in
    this iteration, and there `decision` is taken, if one is given."""

    recipe: Recipe
    at: int | None = None
    decision: Decision | None = None

    def history(self) -> tuple[History, list[int]]:
        """What came of it; who could be driven out. UserError if that is known, and something else does."""
        receipts, log = Receipts(), list[Event]()
        ran, candidates = self._run(log, receipts)
        if self.decision is None:
            self.recipe.check(ran, log)
        ends = {number: one.finish_s for number, one in ran.outcomes.items() if not math.isnan(one.finish_s)}
        found = {number: receipts.of(number) for number in ends}
        return History(self.recipe, log, ends, found, ran.engine.scheduler.iteration), candidates

    def memory_map(self) -> MemoryMap:
        memory = MemoryMap()
        memory.unit = self.recipe.unit
        self._run([], memory)
        return memory

    def _run(self, log: list[Event], observer: MemoryMap | Receipts) -> tuple[Rerun, list[int]]:
        taken_back = {"taken_back": observer.end} if isinstance(observer, Receipts) else {}
        if self.at is None:
            return self.recipe.run(log, (observer,), **taken_back), []
        deciding = Deciding(self.at, self.decision)
        scheduler = deciding.scheduler(self.recipe.setup, log)
        ran = self.recipe.run(log, (observer, deciding), scheduler, **taken_back)
        return ran, deciding.candidates


def _parted(before: Version, after: Version, said: str) -> Difference:
    first, candidates = before.history()
    if after.decision is not None:
        after.decision.check(first.events, candidates)
    second, _ = after.history()
    return Difference(said, first, second, (before.memory_map, after.memory_map))


def _changed(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """The recipe with other settings. UserError for what cannot be, or if a request then could never run."""
    setup = recipe.setup
    given = dict(changes)
    chosen = given.pop("system", setup.system)
    if not isinstance(chosen, System | str):
        raise UserError(f"system = {shown(chosen)} cannot be used; give a System, or the name of one")
    size = check_block_size(given.pop("block_size", setup.block_size))
    made = recipe
    if chosen is not setup.system or size != setup.block_size:
        made = recipe.remade(chosen, size)
    setup = made.setup
    scheduler = [one.name for one in fields(setup.system.scheduler)]
    known_names("what_if", given, [*_POOL, *_SYSTEM, *scheduler])
    sizes = {name: whole(name, given.pop(name), least) for name, least in _LEAST.items() if name in given}
    if isinstance(given.get("reservation"), str):
        given["reservation"] = lookup("reservation", _RESERVATIONS, given["reservation"])
    of_system = {name: given.pop(name) for name in _SYSTEM if name in given}
    changed = replace(setup.system, **of_system)
    changed = changed.with_scheduler(**given) if given else changed
    setup = replace(setup, **sizes, system=changed)
    if [turn.request_id for turn in made.turns] != [turn.request_id for turn in recipe.turns]:
        raise UserError(
            f"system = {changed.name!r} runs n samples as other requests than {recipe.setup.system.name!r}; take n = 1"
        )
    trial = setup.scheduler()
    for turn in made.turns:
        if turn.request is not None:
            trial.add(turn.request)
    return replace(made, setup=setup, events=None, outcomes=None)


def _said(changes: dict[str, Any]) -> str:
    """The changes in words."""
    if not changes:
        return "nothing is changed"
    return ", ".join(f"{name} = {_named(value)}" for name, value in changes.items())


def _named(value: object) -> str:
    return str(getattr(value, "value", getattr(value, "__name__", getattr(value, "name", value))))
