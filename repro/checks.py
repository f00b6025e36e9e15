"""What a user hands in, checked where it comes in: taken as what it is, or refused with a UserError.

Nothing is taken for something else: True is not 1, "4" is not 4, 64.0 is not a count. NumPy's numbers are numbers."""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import linecache
import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from types import TracebackType
from typing import Any, TypeVar

from repro import display
from repro.errors import UserError

T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)
LARGEST = 2**63 - 1  # of what is counted: a seed may be larger


def shown(value: object) -> str:
    """A value as a message shows it: one line, not too long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an object's own repr, or a number of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def whole(name: str, value: object, least: float = 0, most: float = LARGEST) -> int:
    """The value as an int, if it is a whole number from `least` to `most`."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if is_whole and least <= value <= most:
        return int(value)
    is_known = most < LARGEST or (is_whole and value > LARGEST)
    bounds = f"from {least:,} to {most:,}" if is_known else f"of at least {least:,}"
    raise UserError(f"{name} = {shown(value)} must be a whole number" + (f" {bounds}" if least > -math.inf else ""))


def number(name: str, value: object, least: float, most: float = math.inf, *, above: bool = False) -> float:
    """The value as a float, if it is finite, from `least` (with `above`: beyond it) to `most`."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            as_float = float(value)
        except OverflowError:
            as_float = math.inf
        if math.isfinite(as_float) and least <= as_float <= most and not (above and as_float == least):
            return as_float
    limit = "" if most == math.inf else f"{' and at most' if above else ' to'} {most:,g}"
    start = f"{'above' if above else 'of at least' if most == math.inf else 'from'} {least:,g}"
    raise UserError(f"{name} = {shown(value)} must be a finite number {start}{limit}")


def instance(name: str, value: object, kind: type[T] | tuple[type, ...], remedy: str) -> T:
    """The value, if it is of this kind; `remedy` says what to give."""
    if not isinstance(value, kind):
        raise UserError(f"{name} = {shown(value)} cannot be used; give {remedy}")
    return value


def several(name: str, value: object, kind: type[T] | tuple[type, ...], remedy: str) -> tuple[T, ...]:
    """A list, or another iterable, of values of one kind, as a tuple. A text or a dictionary is no list."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise UserError(f"{name} = {shown(value)} cannot be used; give {remedy}")
    return tuple(instance(f"one of {name}", one, kind, remedy) for one in value)


def flag(name: str, value: object) -> bool:
    return instance(name, value, bool, "True or False")


def member(name: str, value: object, kind: type[E]) -> E:
    """A member of an enum, or the one whose value a text names."""
    if isinstance(value, str):
        value = next((one for one in kind if one.value == value.lower()), value)
    known = ", ".join(repr(one.value) for one in kind)
    return instance(name, value, kind, f"one of {known} or a member of {kind.__name__}")


def known_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """UserError for the first name given that is not known."""
    known = list(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise UserError(f"{what} takes no {name!r}{hint}; it takes {', '.join(known)}")


class Named(dict[str, T]):
    """Things by their names. A name that is not there is a UserError that lists those that are."""

    def __init__(self, kind: str, things: Mapping[str, T]) -> None:
        super().__init__(things)
        self.kind = kind

    def __missing__(self, name: object) -> T:
        raise UserError(f"unknown {self.kind} {shown(name)}; known: {', '.join(sorted(self))}")

    def _repr_html_(self) -> str:
        return display.table(f"by {self.kind}", [{self.kind: name, "what": one} for name, one in self.items()], 100)


def by_name(*things: Any) -> dict[str, Any]:
    return {thing.name: thing for thing in things}


def lookup(kind: str, table: Mapping[str, T], name: object) -> T:
    """`table[name]`, or a UserError that lists the names that exist."""
    return table[name] if isinstance(name, str) and name in table else Named(kind, table).__missing__(name)


def unfit(kind: str, function: object, does: str, task: str, raised: TracebackType | None = None) -> UserError:
    """What to raise for a function of the user's that `does` something wrong: with its own line, and its `task`."""
    code = getattr(function, "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code else ("", 0)
    for frame, at in traceback.walk_tb(raised):
        if frame.f_code is code:
            line = at
    source = f", line {line}: `{text}`" if (text := linecache.getline(file, line).strip()) else ""
    return UserError(f"the {kind} {getattr(function, '__name__', repr(function))} {does}{source}; {task}")


def ask(kind: str, function: Callable[..., T], task: str, *given: object) -> T:
    """What a function of the user's returns; UserError as `unfit`, if it raises anything else."""
    try:
        return function(*given)
    except UserError:
        raise
    except Exception as error:
        does = f"raised {type(error).__name__}: {error}"
        raise unfit(kind, function, does, task, error.__traceback__) from error


def user_facing(what: T) -> T:
    """Decorates a function or a dataclass: a call that does not fit its signature is a UserError, not a TypeError."""
    function: Callable[..., Any] = what.__init__ if inspect.isclass(what) else what
    name = what.__qualname__.removesuffix(".__init__")
    signature = inspect.signature(function)
    known = [one for one in signature.parameters if one != "self"]
    is_open = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            known_names(name, () if is_open else kwargs, known)
            raise UserError(f"{name}: {error}; it takes {', '.join(known)}") from None
        return function(*args, **kwargs)

    if not inspect.isclass(what):
        return checked
    what.__init__ = checked
    return what
