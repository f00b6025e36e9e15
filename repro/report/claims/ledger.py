"""claims.json: every claim, what each experiment contributed to it, and the verdict that follows.

An entry keeps the contributions of its experiments, so that one experiment can be judged again without touching the
others and the keys of several add up; all the other fields follow from the claim and these contributions. Where two
experiments give the same key, the one that fares worse counts. What rows of a GPU say is kept apart as `measured`, the
second verdict; it stands in for the first where nothing else judges a key. The file has no clock and no path in it:
equal judgements give equal bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro import display
from repro.errors import UserError
from repro.hashing import write_atomically
from repro.report.claims.claim import EVIDENCE, SAME_RULE, Claim, Judgement, judge_entry, load
from repro.report.claims.rules import KeyPath, Leaf, Tree, Verdict, at, deviation, in_words, leaves, mapped, worst

if TYPE_CHECKING:
    import pandas as pd

FILE_NAME = "claims.json"
#: a pass that takes more than this share of its tolerance says so
CLOSE = 0.8
Entry = dict[str, Any]
Contribution = dict[str, Any]
_SHOWN = ["id", "where", "evidence", "paper", "ours", "interval", "verdict", "note"]


def record(judgements: Iterable[Judgement], experiment: str, directory: Path) -> pd.DataFrame:
    """Merge an experiment's judgements into `directory`/claims.json and return the entries they touch as a table.

    Earlier contributions of this experiment are dropped first. Raises KeyError for an unknown claim and ValueError for
    a claim judged twice (on a GPU or not) or for keys that the claim does not have (all bugs), UserError for a broken
    ledger file."""
    import pandas as pd

    claims = load()
    fresh: dict[str, list[Contribution]] = {}
    for judgement in judgements:
        others = fresh.setdefault(judgement.claim_id, [])
        if any(bool(other["device"]) == bool(judgement.device) for other in others):
            raise ValueError(f"{experiment} judges claim {judgement.claim_id} twice")
        others.append(contribution(judgement, experiment))
    entries = []
    for earlier in read(directory):
        claim = claims[earlier["id"]]
        parts = [part for part in earlier["contributions"] if part["experiment"] != experiment]
        parts += fresh.get(claim.id, [])
        entries.append(entry(claim, sorted(parts, key=lambda part: (part["experiment"], part.get("device") or ""))))
    text = json.dumps(entries, indent=1, ensure_ascii=False) + "\n"
    write_atomically(directory / FILE_NAME, text.encode())
    return pd.DataFrame([item for item in entries if item["id"] in fresh], columns=_SHOWN)


class Ledger(list[Entry]):
    """The entries of all claims."""

    def to_frame(self) -> pd.DataFrame:
        """A row for each key of each claim, with the columns of `compare`."""
        from repro.report.claims.compare import compare

        return compare(self)

    def _repr_html_(self) -> str:
        found = Counter(str(one["verdict"]) for one in self)
        said = ", ".join(f"{number} {verdict}" for verdict, number in found.items())
        return display.indexed(
            f"{len(self)} claims: {said}", len(self), lambda at: {name: self[at][name] for name in _SHOWN}
        )


def read(directory: Path) -> Ledger:
    """The entries of `directory`/claims.json, one for each known claim; all "not run" where there is no file yet."""
    path = directory / FILE_NAME
    stored: dict[str, list[Contribution]] = {}
    if path.exists():
        try:
            stored = {item["id"]: item["contributions"] for item in json.loads(path.read_text(encoding="utf-8"))}
        except (ValueError, KeyError, TypeError) as error:
            again = "delete it and run the experiments again"
            raise UserError(f"{path} is not a claims ledger ({error}); {again}") from None
    return Ledger(entry(claim, stored.get(claim.id, [])) for claim in load().values())


def contribution(judgement: Judgement, experiment: str) -> Contribution:
    """What the ledger keeps of one judgement; KeyError for an unknown claim, ValueError for a key that it lacks."""
    judge_entry(load()[judgement.claim_id], judgement.ours)
    kept = {name: getattr(judgement, name) for name in ("evidence", "device", "ours", "interval", "note")}
    return {"experiment": experiment, **kept}


def entry(claim: Claim, parts: list[Contribution]) -> Entry:
    """The ledger's entry for a claim, from what the experiments contributed."""
    on_gpu = [part for part in parts if part.get("device")]
    measured = _chosen(claim, on_gpu)
    chosen = _chosen(claim, [part for part in parts if not part.get("device")])
    return {
        "id": claim.id,
        "where": claim.where,
        "kind": claim.kind,
        "says": claim.says,
        "printed": claim.printed,
        "paper": claim.value,
        "unit": claim.unit,
        "rule": claim.rule,
        **_found(claim, {path: part or measured[path] for path, part in chosen.items()}),
        "measured": _measured(claim, measured),
        "contributions": parts,
    }


def _measured(claim: Claim, chosen: dict[KeyPath, Contribution | None]) -> dict[str, Any] | None:
    """The second verdict: by the same rule, over the keys that rows of a GPU have."""
    if claim.measured is None:
        return None
    if claim.measured != SAME_RULE:
        verdict, _, why = claim.measured.partition(": ")
        return dict.fromkeys(("ours", "evidence", "covers", "device")) | {"verdict": Verdict(verdict), "note": why}
    found = _found(claim, chosen)
    judged = [verdict for _, verdict in leaves(found["verdicts"]) if verdict is not Verdict.NOT_RUN]
    devices = sorted({part["device"] for part in chosen.values() if part})
    covers = f"{len(judged)} of {len(chosen)}" if 0 < len(judged) < len(chosen) else None
    verdict = worst(judged) if judged else Verdict.NOT_RUN
    return found | {"verdict": verdict, "covers": covers, "device": ", ".join(devices) or None}


def _found(claim: Claim, chosen: dict[KeyPath, Contribution | None]) -> dict[str, Any]:
    """What the contributions chosen for each key come to."""

    def pick(field: str) -> Tree:
        return mapped(claim.value, lambda path, _: at(chosen[path][field], path) if chosen[path] else None)

    used = sorted({id(part): part for part in chosen.values() if part}.values(), key=itemgetter("experiment"))
    ours, interval = pick("ours"), pick("interval")
    verdict, verdicts = judge_entry(claim, ours)
    notes = [part["note"] for part in used if part["note"]] + _remarks(claim, ours, interval)
    return {
        "evidence": max((part["evidence"] for part in used), key=EVIDENCE.index, default=None),
        "rests_on": mapped(claim.value, lambda path, _: chosen[path] and chosen[path]["evidence"]),
        "ours": ours if used else None,
        "interval": interval if any(leaf is not None for _, leaf in leaves(interval)) else None,
        "verdict": verdict,
        "verdicts": verdicts,
        "note": " ".join(notes),
        "experiment": ", ".join(dict.fromkeys(part["experiment"] for part in used)) or None,
    }


def _chosen(claim: Claim, parts: list[Contribution]) -> dict[KeyPath, Contribution | None]:
    return {path: _worst_part(claim, path, value, parts) for path, value in leaves(claim.value)}


def _worst_part(claim: Claim, path: KeyPath, value: Leaf, parts: list[Contribution]) -> Contribution | None:
    """The contribution that counts for one key: of those that have it, the one that fares worst, else lies farthest."""

    def badness(part: Contribution) -> tuple[int, float]:
        ours = at(part["ours"], path)
        return claim.rule_of(path).leaf(value, ours).severity, abs(deviation(value, ours) or 0.0)

    return max((part for part in parts if at(part["ours"], path) is not None), key=badness, default=None)


def _remarks(claim: Claim, ours: Tree, interval: Tree) -> list[str]:
    """What a verdict alone would hide: the misses that a quorum allows, passes that all but use up their tolerance, and
    verdicts that another seed or reading would turn."""
    missed, close, open_ = [], [], []
    for path, value in leaves(claim.value):
        rule, found, ends = claim.rule_of(path), at(ours, path), at(interval, path)
        verdict, used, name = rule.leaf(value, found), rule.used(value, found), in_words(claim.value, path)
        if rule.type == "quorum" and verdict is Verdict.DIFFERS:
            missed.append(f"{' '.join(path[1:])} {deviation(value, found):+.0f} %")
        if verdict is Verdict.REPRODUCED and used and abs(used[0]) > CLOSE * used[1]:
            close.append(f"{name} {used[0]:+.3g} of {used[1]:.3g}".strip())
        if isinstance(ends, list) and {rule.leaf(value, end) for end in ends} != {verdict}:
            open_.append(f"{name} {ends[0]:.4g} to {ends[1]:.4g}".strip())
    for key, members in claim.members(ours).items():
        group = next(iter(members))[:-1]
        for low, high in claim.judge[key].pairs():
            below, above = (at(interval, (*group, one)) for one in (low, high))
            if below and above and below[1] >= above[0]:
                open_.append(" ".join((*group, low, "<", high)))
    texts = {
        "Outside": missed,
        "Close to the limit": close,
        "Inside the spread, another seed or reading may decide otherwise": open_,
    }
    return [f"{text}: {', '.join(found)}." for text, found in texts.items() if found]
