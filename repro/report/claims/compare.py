"""Claims beside ours, one line a key: for a notebook's table and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from repro.hashing import sha256_text
from repro.report.claims.claim import Judgement, load
from repro.report.claims.ledger import Contribution, Entry, contribution, entry
from repro.report.claims.rules import Leaf, Verdict, at, deviation, in_words, leaves

if TYPE_CHECKING:
    import pandas as pd
    from pandas.io.formats.style import Styler

COLUMNS = ("claim", "key", "paper", "ours", "interval", "deviation_percent", "verdict", "evidence")
COLUMNS += ("measured", "measured_verdict")
#: The colours of the verdicts; an input judges nothing and has none.
COLOR = {
    Verdict.REPRODUCED: "#1b7f4b",
    Verdict.DIFFERS: "#b3261e",
    Verdict.CONTRADICTORY: "#8a4fbd",
    Verdict.REPORTED: "#2166ac",
    Verdict.NOT_COMPARABLE: "#5f6b76",
    Verdict.NOT_MEASURED: "#5f6b76",
    Verdict.CALIBRATION: "#8a6d1c",
    Verdict.NOT_RUN: "#8b939d",
}


def compare(judged: Sequence[Judgement | Entry]) -> pd.DataFrame:
    """Judgements, or entries of the ledger, as a table with `COLUMNS`: one line for each key of their claims.

    `paper` and `ours` are numbers, words or flags in the claim's unit; `interval` is (lowest, highest) over seeds or
    readings, or None; `deviation_percent` is (ours - paper) / |paper|, NaN where there is none. A key that a judgement
    leaves out is "not run". `measured` is what rows of a GPU have, `measured_verdict` what the same rule makes of it.
    Raises KeyError for an unknown claim, ValueError for a key that the claim does not have."""
    import pandas as pd

    entries = [item for item in judged if not isinstance(item, Judgement)]
    parts: dict[str, list[Contribution]] = {}
    for item in judged:
        if isinstance(item, Judgement):
            parts.setdefault(item.claim_id, []).append(contribution(item, ""))
    entries += [entry(load()[claim_id], found) for claim_id, found in parts.items()]
    table = pd.DataFrame([line for item in entries for line in lines(item)], columns=COLUMNS, dtype=object)
    return table.astype({"deviation_percent": float})


def style(table: pd.DataFrame) -> Styler:
    """The table of `compare` as a notebook shows it: numbers written for people, verdicts in their colours."""
    # White on a colour can be read in light and in dark themes.
    looks = {verdict: f"background-color: {color}; color: white" for verdict, color in COLOR.items()}
    left = [{"selector": tag, "props": "text-align: left"} for tag in ("th", "td")]
    return (
        table.style.set_uuid(sha256_text(table.to_csv())[:8])  # pandas' own is random
        .hide(axis="index")
        .format(written, subset=["paper", "ours", "measured"])
        .format(written_interval, subset=["interval"])
        .format("{:+.1f} %", na_rep="", subset=["deviation_percent"])
        .format(na_rep="", subset=["evidence", "measured_verdict"])
        .format_index(lambda name: name.removesuffix("_percent").replace("_", " "), axis="columns")
        .set_table_styles(dict.fromkeys(("claim", "key", "verdict", "evidence", "measured_verdict"), left))
        .map(lambda verdict: looks.get(verdict, ""), subset=["verdict", "measured_verdict"])
    )


def lines(judged: Entry) -> Iterator[dict[str, Any]]:
    """The keys of one entry of the ledger, each as a line with `COLUMNS`."""
    second = judged["measured"] or {"ours": None}
    for path, paper in leaves(judged["paper"]):
        ours, interval = at(judged["ours"], path), at(judged["interval"], path)
        yield {
            "claim": judged["id"],
            "key": in_words(judged["paper"], path),
            "paper": paper,
            "ours": ours,
            "interval": tuple(interval) if isinstance(interval, list) else None,
            "deviation_percent": deviation(paper, ours),
            "verdict": at(judged["verdicts"], path),
            "evidence": at(judged["rests_on"], path),
            "measured": at(second["ours"], path),
            "measured_verdict": at(second["verdicts"], path) if "verdicts" in second else second.get("verdict"),
        }


def written(value: Leaf) -> str:
    """A value as people write it: five digits, thousands apart."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "holds" if value else "does not hold"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.5g}"
    return value


def written_interval(interval: tuple[Leaf, Leaf] | None) -> str:
    return " … ".join(map(written, interval)) if interval else ""
