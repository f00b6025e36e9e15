"""Texts that end an output, looked for as it grows: what is complete, and what may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


def found_in(text: str, stops: Sequence[str], searched: int) -> tuple[int, str] | None:
    """Where the first stop text begins that is complete now but was not in the first `searched` characters; and it."""
    places = [(text.find(one, max(0, searched - len(one) + 1)), one) for one in stops]
    return min((place for place in places if place[0] >= 0), default=None)


def begun_in(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may be the beginning of a stop text."""
    longest = max(map(len, stops), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        if any(len(one) > count and one.startswith(text[-count:]) for one in stops):
            return count
    return 0
