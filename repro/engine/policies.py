"""What a scheduler is told by a function: the order of the queue, whom to drive out, whether to swap or to recompute.

A policy is one function of what an engine knows of a group (`Seen`). A real engine does not know how long an output
will be; an experiment that lets a policy know it says so (`oracle` in SchedulerConfig). A policy that breaks its
contract is a UserError with its own line."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from numbers import Real
from typing import Any

from repro.checks import ask, lookup, shown, unfit
from repro.engine.sequence import SequenceGroup, by_rank
from repro.errors import UserError


class Seen:
    """What a policy sees of a group. Lengths in tokens, of each of its sequences.

    request_id, arrival_s, priority, prompt_tokens   of its request; `use_beam_search` and `num_seqs` say how it decodes
    num_generated      output tokens so far
    num_preemptions    how often it was driven out
    output_tokens      its true output length, in an experiment with `oracle`; else a UserError"""

    __slots__ = (
        "request_id",
        "arrival_s",
        "priority",
        "prompt_tokens",
        "use_beam_search",
        "num_seqs",
        "num_generated",
        "num_preemptions",
        "_output_tokens",
    )

    def __init__(self, group: SequenceGroup, iteration: int, oracle: bool) -> None:
        request = group.request
        self.request_id = request.request_id
        self.arrival_s = request.arrival_s
        self.priority = request.priority
        self.prompt_tokens = request.prompt_tokens
        self.use_beam_search = group.is_beam
        self.num_seqs = len(group.seqs)
        self.num_generated = group.num_generated(iteration)
        self.num_preemptions = group.num_preemptions
        self._output_tokens = request.output_tokens if oracle else None

    @property
    def output_tokens(self) -> int:
        if self._output_tokens is None:
            raise UserError(
                "a policy asks for output_tokens, which no engine knows; give the scheduler oracle=True in an "
                "experiment on what it would be worth"
            )
        return self._output_tokens

    def __repr__(self) -> str:
        return f"request {self.request_id} of {self.prompt_tokens} + {self.num_generated} tokens"


#: a group's place in the queue, asked once, when it arrives: a number or a tuple of numbers, the lowest first; equals
#: go by arrival. Preempted groups return to their place, and who is last by it is driven out first.
Order = Callable[[Seen], Any]
#: which of the groups that hold memory, and have not got this iteration's slot yet, is driven out when a slot lacks;
#: they are listed in the order of the queue
Victim = Callable[[Items[Seen]], Seen]
#: whether a group that is driven out is swapped; otherwise, or without room in CPU memory, it is recomputed
Swaps = Callable[[Seen], bool]


def first_come(group: Seen) -> tuple[()]:
    """First come, first served, as in the paper (§4.5)."""
    return ()


def by_priority(group: Seen) -> int:
    """The lowest priority number first, as in vLLM V1."""
    return group.priority


def shortest_prompt(group: Seen) -> int:
    return group.prompt_tokens


def shortest_output(group: Seen) -> int:
    """The shortest job first; only an oracle knows it."""
    return group.output_tokens


ORDERS: dict[str, Order] = {
    "fcfs": first_come,
    "priority": by_priority,
    "shortest_prompt": shortest_prompt,
    "shortest_output": shortest_output,
}


def last_in_order(groups: Items[Seen]) -> Seen:
    """Under first come, first served: the latest arrival, as in the paper (§4.5)."""
    return groups[-1]


VICTIMS: dict[str, Victim] = {"last": last_in_order}


def policy_of(name: str, given: object, known: dict[str, Any]) -> Any:
    """The function given, or the one of this name. UserError for anything else."""
    if isinstance(given, str):
        return lookup(name, known, given)
    if not callable(given) or isinstance(given, type):
        raise UserError(f"{name} = {shown(given)} cannot be used; give a function, or one of {', '.join(known)}")
    return given


_RANK = "it gets a group as it is seen and must return a finite number, or a tuple of such, the lowest first"
_VICTIM = "it gets the groups that hold memory, as they are seen, and must return one of them"
_SWAPS = "it gets a group as it is seen and must return True (swap) or False (recompute)"


def rank(policy: Order, group: SequenceGroup, iteration: int, oracle: bool) -> tuple[Any, ...]:
    """The group's place in the queue. UserError for a policy that does not say one."""
    if policy is first_come:
        return group.arrival
    key = ask("order policy", policy, _RANK, Seen(group, iteration, oracle))
    numbers = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(one, Real) and math.isfinite(one) for one in numbers):
        raise unfit("order policy", policy, f"returned {shown(key)}", _RANK)
    return (numbers, *group.arrival)


def victim(policy: Victim, groups: list[SequenceGroup], iteration: int, oracle: bool) -> SequenceGroup:
    """Who is driven out of `groups`. UserError for a policy that names none of them."""
    if policy is last_in_order:
        return max(groups, key=by_rank)
    groups = sorted(groups, key=by_rank)
    seen = [Seen(group, iteration, oracle) for group in groups]
    chosen = ask("victim policy", policy, _VICTIM, list(seen))
    place = next((place for place, one in enumerate(seen) if one is chosen), None)
    if place is None:
        raise unfit("victim policy", policy, f"returned {shown(chosen)}", _VICTIM)
    return groups[place]


def swaps(policy: Swaps, group: SequenceGroup, iteration: int, oracle: bool) -> bool:
    """Whether the group is to be swapped. UserError for a policy that does not say so."""
    answer = ask("preemption policy", policy, _SWAPS, Seen(group, iteration, oracle))
    if not isinstance(answer, bool):
        raise unfit("preemption policy", policy, f"returned {shown(answer)}", _SWAPS)
    return answer
