"""Solution of lesson 1."""

from repro.course import waste


def account(stored: int, final: int, planned: int, held: int) -> dict[str, int]:
    needed = min(final, planned)  # a plan can be one slot shorter than the end: the last token is never an input
    return {"used": stored, "reserved": needed - stored, "internal": planned - needed, "rounding": held - planned}


def reserve(asked: waste.Asked, max_model_len: int) -> int:
    return asked.max_tokens
