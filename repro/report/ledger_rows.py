"""An entry of the ledger as the page's table shows it: values as people write them, in short and key by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from repro.report.claims.compare import lines, written, written_interval
from repro.report.claims.ledger import Entry
from repro.report.claims.rules import Verdict

#: A claim with no more keys than this shows them all in its line.
_FEW = 3


def sources(entry: Entry) -> list[str]:
    """The experiments whose contributions count for an entry."""
    return entry["experiment"].split(", ") if entry["experiment"] else []


def row(entry: Entry) -> dict[str, Any]:
    """The entry with its `keys` (a line each, as text) and them in short, its `sources`, and the `second` verdict.

    `apart` is the deviation that is largest, as text, and `farthest` its size in percent."""
    keys = [
        {
            "key": line["key"].replace("_", " "),
            "paper": written(line["paper"]),
            "ours": written(line["ours"], line["paper"]),
            "interval": written_interval(line["interval"], line["paper"]) if _has_spread(line["interval"]) else "",
            "apart": _apart(line["deviation_percent"]),
            "percent": line["deviation_percent"],
            "verdict": line["verdict"],
            "measured": "" if line.get("measured") is None else written(line["measured"], line["paper"]),
        }
        for line in lines(entry)
    ]
    judged = [key for key in keys if key["verdict"] != Verdict.INPUT]
    decided = [key["verdict"] for key in judged if key["verdict"] in (Verdict.REPRODUCED, Verdict.DIFFERS)]
    met = f"{decided.count(Verdict.REPRODUCED)} of {len(decided)} meet the rule"
    farthest = max((key["percent"] or 0 for key in judged), key=abs, default=0)
    few = len(keys) <= _FEW
    return {
        **entry,
        "keys": keys,
        "few": few,
        "in_short": met if decided else f"{len(keys)} values",
        "farthest": round(abs(farthest), 1),
        "apart": _apart(farthest),
        "sources": sources(entry),
        "second": _second(entry.get("measured") or {}),
    }


def _second(measured: Mapping[str, Any]) -> dict[str, str]:
    """The verdict on measured rows, what they are, and the note on it; empty where there is none."""
    keys = f"{measured['keys']} keys" if measured.get("keys") else None
    rows = ", ".join(filter(None, (measured.get("evidence"), measured.get("device"), keys)))
    return {"verdict": measured.get("verdict") or "", "rows": rows, "note": measured.get("note") or ""}


def _has_spread(interval: tuple[Any, ...] | None) -> bool:
    """Whether an interval is more than one seed's value."""
    return bool(interval) and min(interval) < max(interval)


def _apart(percent: float | None) -> str:
    """A deviation as people write it; nothing where there is none to speak of."""
    if percent is None or abs(percent) < 0.05:
        return ""
    return f"{percent:+.{1 if abs(percent) < 10 else 0}f} %".replace("-", "−")
