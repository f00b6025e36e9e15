"""One independent piece of an experiment's work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """One independent piece of work: the call `function(**arguments)`, which returns one row or a list of rows of the
    study's table `table`; without a table it returns a mapping, table -> rows.

    `weight` is its cost relative to the other points. A point marked `alone` measures wall-clock time: nothing else of
    the experiment runs beside it, and its threads are not limited."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    table: str | None = None
    weight: float = 1.0
    alone: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"a point needs a function, not {self.function!r}")
        if not self.weight > 0:
            raise ValueError(f"a point's weight must be positive, not {self.weight!r}")

    @property
    def label(self) -> str:
        """The point in one line, for messages."""
        inner = ", ".join(f"{name}={in_short(value)}" for name, value in self.arguments.items())
        return f"{getattr(self.function, '__name__', 'call')}({inner})"


def in_short(value: Any) -> str:
    """A value in at most 60 characters: text as it is, what has a name by its name."""
    named = value if isinstance(value, str) else getattr(value, "name", None) or getattr(value, "__name__", None)
    text = named if isinstance(named, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def spread(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Arguments in words, one with a name by that; mappings and other records in place of themselves by their parts."""
    words = {}
    for name, value in arguments.items():
        if is_dataclass(value) and not hasattr(value, "name"):
            value = {part.name: getattr(value, part.name) for part in fields(value)}
        words |= spread(value) if isinstance(value, Mapping) else {name: in_short(value)}
    return words
