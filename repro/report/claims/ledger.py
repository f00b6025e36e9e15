"""claims.json: every claim, what each experiment contributed to it, and the verdict that follows.

An entry keeps the contributions of its experiments, so that one experiment can be judged again without touching the
others and the keys of several add up; all the other fields follow from the claim and these contributions. Where two
experiments give the same key, the one that fares worse counts. The file has no clock and no path in it: equal
judgements give equal bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.engine.errors import UserError
from repro.hashing import write_atomically
from repro.report.claims.claim import EVIDENCE, Claim, Judgement, judge_entry, load
from repro.report.claims.rules import KeyPath, Leaf, Tree, Verdict, at, deviation, is_number, leaves, mapped

if TYPE_CHECKING:
    import pandas as pd

FILE_NAME = "claims.json"
Entry = dict[str, Any]
Contribution = dict[str, Any]
_SHOWN = ["id", "where", "evidence", "paper", "ours", "interval", "verdict", "note"]


def record(judgements: Iterable[Judgement], experiment: str, directory: Path) -> pd.DataFrame:
    """Merge an experiment's judgements into `directory`/claims.json and return the entries they touch as a table.

    Earlier contributions of this experiment are dropped first. Raises KeyError for an unknown claim and ValueError for
    a claim judged twice or for keys that the claim does not have (all bugs), UserError for a broken ledger file."""
    import pandas as pd

    claims = load()
    fresh: dict[str, Contribution] = {}
    for judgement in judgements:
        if judgement.claim_id in fresh:
            raise ValueError(f"{experiment} judges claim {judgement.claim_id} twice")
        fresh[judgement.claim_id] = contribution(judgement, experiment)
    entries = []
    for earlier in read(directory):
        claim = claims[earlier["id"]]
        parts = [part for part in earlier["contributions"] if part["experiment"] != experiment]
        parts += [fresh[claim.id]] if claim.id in fresh else []
        entries.append(entry(claim, sorted(parts, key=lambda part: part["experiment"])))
    text = json.dumps(entries, indent=1, ensure_ascii=False) + "\n"
    write_atomically(directory / FILE_NAME, text.encode())
    return pd.DataFrame([item for item in entries if item["id"] in fresh], columns=_SHOWN)


def read(directory: Path) -> list[Entry]:
    """The entries of `directory`/claims.json, one for each known claim; all "not run" where there is no file yet."""
    path = directory / FILE_NAME
    stored: dict[str, list[Contribution]] = {}
    if path.exists():
        try:
            stored = {item["id"]: item["contributions"] for item in json.loads(path.read_text(encoding="utf-8"))}
        except (ValueError, KeyError, TypeError) as error:
            again = "delete it and run the experiments again"
            raise UserError(f"{path} is not a claims ledger ({error}); {again}") from None
    return [entry(claim, stored.get(claim.id, [])) for claim in load().values()]


def contribution(judgement: Judgement, experiment: str) -> Contribution:
    """What the ledger keeps of one judgement; KeyError for an unknown claim, ValueError for a key that it lacks."""
    judge_entry(load()[judgement.claim_id], judgement.ours)
    kept = {name: getattr(judgement, name) for name in ("evidence", "ours", "interval", "note")}
    return {"experiment": experiment, **kept}


def entry(claim: Claim, parts: list[Contribution]) -> Entry:
    """The ledger's entry for a claim, from what the experiments contributed."""
    chosen = {path: _worst_part(claim, path, value, parts) for path, value in leaves(claim.value)}

    def pick(field: str) -> Tree:
        return mapped(claim.value, lambda path, _: at(chosen[path][field], path) if chosen[path] else None)

    ours, interval = pick("ours"), pick("interval")
    verdict, verdicts = judge_entry(claim, ours)
    used = [part for part in parts if any(part is other for other in chosen.values())]
    notes = [part["note"] for part in used if part["note"]] + _misses(claim, ours)
    return {
        "id": claim.id,
        "where": claim.where,
        "kind": claim.kind,
        "says": claim.says,
        "evidence": max((part["evidence"] for part in used), key=EVIDENCE.index, default=None),
        "printed": claim.printed,
        "paper": claim.value,
        "ours": ours if used else None,
        "interval": interval if any(leaf is not None for _, leaf in leaves(interval)) else None,
        "unit": claim.unit,
        "rule": claim.rule,
        "verdict": verdict,
        "verdicts": verdicts,
        "note": " ".join(notes),
        "experiment": ", ".join(part["experiment"] for part in used) or None,
        "contributions": parts,
    }


def _worst_part(claim: Claim, path: KeyPath, value: Leaf, parts: list[Contribution]) -> Contribution | None:
    """The contribution that counts for one key: of those that have it, the one that fares worst, else lies farthest."""

    def badness(part: Contribution) -> tuple[int, float]:
        ours = at(part["ours"], path)
        return claim.rule_of(path).leaf(value, ours).severity, abs(deviation(value, ours) or 0.0)

    return max((part for part in parts if at(part["ours"], path) is not None), key=badness, default=None)


def _misses(claim: Claim, ours: Tree) -> list[str]:
    """A quorum allows a few misses: name each of them with its deviation."""
    missed = [
        f"{' '.join(path[1:])} {deviation(value, found):+.0f} %"
        for path, value in leaves(claim.value)
        if claim.rule_of(path).type == "quorum"
        and is_number(found := at(ours, path))
        and claim.rule_of(path).leaf(value, found) is Verdict.DIFFERS
    ]
    return [f"Outside: {', '.join(missed)}."] if missed else []
