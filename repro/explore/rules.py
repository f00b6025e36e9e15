"""A rule that a reader writes: for how much to reserve room, or which running group is driven out.

Whatever the reader's code does wrong becomes one line, with the line of the code that did it."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from typing import Any

from repro.engine.memory import Reservation
from repro.engine.memory.contiguous import check_reservation, reserve_oracle, reserve_pow2
from repro.engine.policies import Victim, last_in_order
from repro.engine.sequence import Request
from repro.errors import UserError
from repro.explore.settings import Settings

FILE = "<your rule>"
_CALLS = {"reservation": "reserve(request, max_model_len)", "preemption": "victim(running)"}


def reserve_declared(request: Request, max_model_len: int) -> int:
    """What a request declares as the most that it may generate: all that a server knows before."""
    return request.sampling.max_tokens


def reservation(settings: Settings) -> Reservation:
    """How many output tokens a contiguous policy reserves. UserError for a reader's rule that does not work."""
    if settings.policy != "yours":
        return {"max": reserve_declared, "pow2": reserve_pow2, "oracle": reserve_oracle}[settings.policy]
    check_reservation(rule := function(settings.code, "reservation"))
    return rule


def victim(settings: Settings) -> Victim:
    """Who is driven out of paged memory: as in the paper, or as a reader's rule says."""
    return function(settings.code, "preemption") if settings.policy == "yours" else last_in_order


def function(code: str, rule: str) -> Callable[..., Any]:
    """The function that a reader's code defines. UserError if there is none; the code itself may raise anything."""
    call = _CALLS[rule]
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)  # so that messages show its lines
    namespace: dict[str, Any] = {"__name__": "rule"}
    exec(compile(code, FILE, "exec"), namespace)
    if not callable(found := namespace.get(call.partition("(")[0])):
        raise UserError(f"your rule defines no function {call.partition('(')[0]}; write `def {call}:`")
    return found


def explained(error: Exception) -> UserError:
    """The one line for an error of a reader's code; any other error is raised again."""
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == FILE]
    if isinstance(error, SyntaxError) and error.filename == FILE:
        lines.append(error.lineno)
    if not lines:
        raise error
    text = linecache.getline(FILE, lines[-1]).strip()
    return UserError(
        f"your rule raised {type(error).__name__}: {getattr(error, 'msg', error)}, line {lines[-1]}: `{text}`"
    )
