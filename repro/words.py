"""The leaf for words: a number and its thing."""

from __future__ import annotations


def count(number: int, what: str) -> str:
    """The number and its thing, in the plural if need be."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
