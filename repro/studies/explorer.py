"""The explorer as readers get it, as a page and in a notebook. What its room must not know comes from here: a study's
allocator, and the lengths that its seeds draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from repro.checks import instance, user_facing
from repro.engine.memory import Reservation
from repro.engine.memory.contiguous import check_reservation
from repro.engine.policies import Victim
from repro.errors import UserError
from repro.explore import page, queue
from repro.explore.settings import Settings
from repro.harness import experiment
from repro.studies import first_fit, saturated

if TYPE_CHECKING:
    from repro.explore.widget import Explorer

#: what a reader does not set: the cards and the box do
_CHOSEN = ("policy", "rule", "code")


def given() -> tuple[ModuleType, queue.Drawn]:
    """The module of first fit, and the lengths of the experiment's seeds."""
    params = experiment.open("saturated_queue").params
    return first_fit, page.drawn(partial(saturated.lengths, load=params.load), params.seeds)


@user_facing
def explorer(reservation: Reservation | None = None, victim: Victim | None = None, **settings: Any) -> Explorer:
    """The explorer as a widget: the controls and maps of figures/explorer.html, over runs of this kernel.

    `reservation` and `victim` are functions as `contiguous_system` and `paged_system` take them. The box shows them;
    when a reader has changed it, what it holds runs instead. `settings` are those of repro.explore.settings.Settings to
    begin with; without any, the pool of Fig. 2.

    UserError without anywidget, for a policy that is no function or does not work, and for settings that cannot be."""
    task = "a function, such as contiguous_system and paged_system take"
    policies = {}
    if reservation is not None:
        check_reservation(instance("reservation", reservation, Callable, task))
        policies["reservation"] = reservation
    if victim is not None:
        policies["preemption"] = instance("victim", victim, Callable, task)
    for name in _CHOSEN:
        if name in settings:
            raise UserError(f"{name} is chosen in the explorer itself; leave it out")
    Settings(**settings)
    try:
        from repro.explore.widget import Explorer
    except ModuleNotFoundError as error:
        if error.name != "anywidget":
            raise
        raise UserError(
            "the explorer in a notebook needs anywidget, which is not installed; run `make setup`, which adds it, or "
            "open figures/explorer.html"
        ) from None
    differs = settings or page.controls()["start"]["differs"]
    rule = next(iter(policies), "reservation")
    shown = ["max", "oracle", "paged"]
    if policies:
        shown = ["max", "paged", "yours"] if reservation else ["paged", "yours"]
    return Explorer(*given(), policies, {**differs, "rule": rule}, shown)
