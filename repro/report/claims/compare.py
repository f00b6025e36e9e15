"""Claims beside ours, one line a key: for a notebook's table and for the page."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

from repro.hashing import sha256_text
from repro.report.claims.claim import Judgement, load
from repro.report.claims.ledger import Contribution, Entry, contribution, entry
from repro.report.claims.rules import Leaf, Verdict, at, deviation, in_words, is_number, leaves

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
    shown = table.style.set_uuid(sha256_text(table.to_csv())[:8])  # pandas' own is random
    for index, paper in table["paper"].items():
        shown.format(partial(written, beside=paper), subset=(index, ["ours", "measured"]))
        shown.format(partial(written_interval, beside=paper), subset=(index, ["interval"]))
    return (
        shown.hide(axis="index")
        .format(written, subset=["paper"])
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


def written(value: Leaf, beside: Leaf = None) -> str:
    """A value as people write it: thousands apart, the source's numbers as printed, others to three digits.

    Ours, `beside` the source's, has the decimals that three digits of the larger need, and at least the source's."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "holds" if value else "does not hold"
    if not is_number(value):
        return value
    decimals = max(_decimals(max(value, beside, key=abs)), _printed(beside)) if is_number(beside) else _printed(value)
    text = f"{value:,.{0 if isinstance(value, int) else decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", "−")


def _printed(value: float) -> int:
    """The decimals of a number as its source prints it: two at most; more come from a curve and get three digits."""
    decimals = max(0, -Decimal(repr(value)).normalize().as_tuple().exponent)
    return decimals if decimals <= 2 and abs(value) < 10_000 else _decimals(value)


def _decimals(value: float) -> int:
    """The decimals that three digits of a value need."""
    return max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0


def written_interval(interval: tuple[Leaf, Leaf] | None, beside: Leaf = None) -> str:
    return " … ".join(written(end, beside) for end in interval) if interval else ""


class _Note(string.Formatter):
    """As `str.format`; a table of numbers is written as "6.9 (2), 10.4 (4)", one of lists as "2: 6.9, 10.4; 4: ..."."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Mapping):
            texts = {key: self.format_field(item, format_spec) for key, item in value.items()}
            if all(map(is_number, value.values())):
                return ", ".join(f"{text} ({key})" for key, text in texts.items())
            return "; ".join(f"{key}: {text}" for key, text in texts.items())
        if isinstance(value, (list, tuple)):
            return ", ".join(self.format_field(item, format_spec) for item in value)
        return super().format_field(value, format_spec)


def filled(note: str, facts: Mapping[str, Any]) -> str:
    """A note with its facts in their places."""
    return _Note().vformat(note, (), facts)
