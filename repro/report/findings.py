"""The findings with which the page begins: a sentence, a number and a small chart each, from entries of the ledger.

Which they are, and in what words, is an editor's choice and stands in findings.yaml; every number comes from the ledger
when the page is built."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Any

from repro.engine.systems import SYSTEMS
from repro.report.claims.compare import written
from repro.report.claims.ledger import Entry
from repro.report.claims.rules import at, is_number, leaves


def findings(entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
    """The findings whose claims have been judged in all their numbers: texts filled in, the entry, and the chart."""
    import yaml

    by_id = {entry["id"]: entry for entry in entries}
    for stated in yaml.safe_load(resources.files(__package__).joinpath("findings.yaml").read_text(encoding="utf-8")):
        entry = by_id[stated["claim"]]
        keys = [path for path, _ in leaves(entry["paper"])]
        ours, paper = ([at(entry[side], path) for path in keys] for side in ("ours", "paper"))
        if not all(map(is_number, ours)):
            continue
        facts = {"ours": entry["ours"], "paper": entry["paper"], "least": min(ours), "most": max(ours)}
        names = [stated.get("names", {}).get(path[-1]) or SYSTEMS[path[-1]].label for path in keys]
        yield {
            "number": _filled(stated["number"], facts),
            "sentence": _filled(stated["sentence"], facts),
            "figure": stated["figure"],
            "entry": entry,
            "chart": chart(names, ours, paper),
        }


def chart(names: list[str], ours: list[float], paper: list[float]) -> list[dict[str, Any]]:
    """A line for each name: both values as text, and their bars as (begin, length) in percent of the width."""
    low, high = min(0, *ours, *paper), max(0, *ours, *paper)

    def bar(value: float) -> tuple[float, float]:
        begin, end = sorted(100 * (end - low) / (high - low or 1) for end in (0, value))
        return round(begin, 2), round(end - begin, 2)

    return [
        {"name": name, "ours": written(a, b), "paper": written(b), "bar": bar(a), "rim": bar(b)}
        for name, a, b in zip(names, ours, paper, strict=True)
    ]


def _filled(text: str, facts: dict[str, Any]) -> str:
    return re.sub(r"(?<!\w)-(?=\d)", "−", text.format(**facts))
