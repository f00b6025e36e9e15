"""Claims beside ours, one line a key: for a notebook's table and for the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from repro.hashing import sha256_text
from repro.report.claims.claim import Judgement, load
from repro.report.claims.ledger import Entry, contribution, entry
from repro.report.claims.rules import KeyPath, Leaf, Tree, Verdict, at, deviation, leaves

if TYPE_CHECKING:
    import pandas as pd
    from pandas.io.formats.style import Styler

COLUMNS = ("claim", "key", "paper", "ours", "interval", "deviation_percent", "verdict", "evidence")
#: The colours of the verdicts; an input judges nothing and has none.
COLOR = {
    Verdict.REPRODUCED: "#1b7f4b",
    Verdict.DIFFERS: "#b3261e",
    Verdict.CONTRADICTORY: "#8a4fbd",
    Verdict.REPORTED: "#2166ac",
    Verdict.CALIBRATION: "#8a6d1c",
    Verdict.NOT_RUN: "#8b939d",
}


def compare(judged: Iterable[Judgement | Entry]) -> pd.DataFrame:
    """Judgements, or entries of the ledger, as a table with `COLUMNS`: one line for each key of their claims.

    `paper` and `ours` are numbers, words or flags in the claim's unit; `interval` is (lowest, highest) over seeds or
    readings, or None; `deviation_percent` is (ours - paper) / |paper|, NaN where there is none. A key that a judgement
    leaves out is "not run". Raises KeyError for an unknown claim, ValueError for a key that the claim does not have."""
    import pandas as pd

    claims = load()
    entries = [
        entry(claims[item.claim_id], [contribution(item, "")]) if isinstance(item, Judgement) else item
        for item in judged
    ]
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
        .format(written, subset=["paper", "ours"])
        .format(written_interval, subset=["interval"])
        .format("{:+.1f} %", na_rep="", subset=["deviation_percent"])
        .format(na_rep="", subset=["evidence"])
        .format_index(lambda name: name.removesuffix("_percent"), axis="columns")
        .set_table_styles(dict.fromkeys(("claim", "key", "verdict", "evidence"), left))
        .map(lambda verdict: looks.get(verdict, ""), subset=["verdict"])
    )


def lines(judged: Entry) -> Iterator[dict[str, Any]]:
    """The keys of one entry of the ledger, each as a line with `COLUMNS`."""
    for path, paper in leaves(judged["paper"]):
        ours, interval = at(judged["ours"], path), at(judged["interval"], path)
        yield {
            "claim": judged["id"],
            "key": _in_words(judged["paper"], path),
            "paper": paper,
            "ours": ours,
            "interval": tuple(interval) if isinstance(interval, list) else None,
            "deviation_percent": deviation(paper, ours),
            "verdict": _verdict(judged["verdicts"], path),
            "evidence": None if ours is None else judged["evidence"],
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


def _in_words(tree: Tree, path: KeyPath) -> str:
    """The path of a key; items of a list count from one."""
    steps = []
    for step in path:
        steps.append(f"({int(step) + 1})" if isinstance(tree, list) else step)
        tree = at(tree, (step,))
    return " · ".join(steps)


def _verdict(verdicts: Tree, path: KeyPath) -> str:
    """The verdict that covers a key: its own, or that of the group that a quorum judged as one."""
    for step in path:
        if isinstance(verdicts, str):
            break
        verdicts = at(verdicts, (step,))
    return verdicts
