"""A rule that a reader writes: for how much to reserve room, or which running group is driven out. It comes as the text
in the box, or as a function of a notebook, whose text the box shows until the reader changes it.

Whatever the reader's code does wrong becomes one line, with the line of the code that did it."""

from __future__ import annotations

import inspect
import linecache
import textwrap
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from repro.engine.memory import Reservation
from repro.engine.memory.contiguous import check_reservation, reserve_oracle, reserve_pow2
from repro.engine.policies import Victim, last_in_order
from repro.engine.sequence import Request
from repro.errors import UserError
from repro.explore.settings import Settings

FILE = "<your rule>"
#: a notebook's functions: rule -> function
Policies = Mapping[str, Callable[..., Any]]
_CALLS = {"reservation": "reserve(request, max_model_len)", "preemption": "victim(running)"}


def reserve_declared(request: Request, max_model_len: int) -> int:
    """What a request declares as the most that it may generate: all that a server knows before."""
    return request.sampling.max_tokens


def reservation(settings: Settings, policies: Policies) -> Reservation:
    """How many output tokens a contiguous policy reserves. UserError for a reader's rule that does not work."""
    if settings.policy != "yours":
        return {"max": reserve_declared, "pow2": reserve_pow2, "oracle": reserve_oracle}[settings.policy]
    check_reservation(rule := function(settings.code, "reservation", policies))
    return rule


def victim(settings: Settings, policies: Policies) -> Victim:
    """Who is driven out of paged memory: as in the paper, or as a reader's rule says."""
    return function(settings.code, "preemption", policies) if settings.policy == "yours" else last_in_order


def text_of(policy: Callable[..., Any]) -> str:
    """What the box shows of a notebook's function: its source, or a line in place of one."""
    name = getattr(policy, "__name__", str(policy))
    try:
        text = textwrap.dedent(inspect.getsource(policy))
    except (OSError, TypeError):
        text = ""
    return text if text.lstrip().startswith(("def ", "@")) else f"# {name}, as its cell has it\n"


def function(code: str, rule: str, policies: Policies) -> Callable[..., Any]:
    """The function that a reader's code defines; code that shows a notebook's function stands for that function, and
    other code finds the names that it finds. UserError if there is none; the code itself may raise anything."""
    call, policy = _CALLS[rule], policies.get(rule)
    if policy is not None and code == text_of(policy):
        return policy
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)  # so that messages show its lines
    known = getattr(policy, "__globals__", {})
    namespace: dict[str, Any] = {**known, "__name__": "rule"}
    exec(compile(code, FILE, "exec"), namespace)
    for name in (asked := call.partition("(")[0], getattr(policy, "__name__", "")):
        found = namespace.get(name)
        if callable(found) and found is not known.get(name):
            return found
    raise UserError(f"your rule defines no function {asked}; write `def {call}:`")


def explained(error: Exception, policies: Policies) -> UserError:
    """The one line for an error of a reader's code; any other error is raised again."""
    files = {FILE, *(one.__code__.co_filename for one in policies.values() if hasattr(one, "__code__"))}
    lines = [(at.filename, at.lineno) for at in traceback.extract_tb(error.__traceback__) if at.filename in files]
    if isinstance(error, SyntaxError) and error.filename == FILE:
        lines.append((FILE, error.lineno))
    if not lines:
        raise error
    file, line = lines[-1]
    text = linecache.getline(file, line).strip()
    return UserError(f"your rule raised {type(error).__name__}: {getattr(error, 'msg', error)}, line {line}: `{text}`")
