"""A length of time as a user writes it: 90s, 30m, 2h; 0, with or without a unit, for none."""

from __future__ import annotations

import re

from repro.engine.errors import UserError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(text: str) -> float:
    """UserError unless it is a number and s, m or h, or 0."""
    if text.strip() == "0":
        return 0.0
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smh])", text.strip(), re.ASCII)
    if not found:
        raise UserError(
            f"budget {text!r} is no length of time; write a number and s, m or h, such as 30m, or 0 for none"
        )
    return float(found[1]) * _UNITS[found[2]]
