"""A claim as its data file states it, a judgement as an experiment returns it, and the verdict between the two."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from repro.report import paper
from repro.report.claims.rules import KeyPath, Leaf, Rule, Tree, Verdict, at, leaves, mapped, worst

KINDS = ("exact", "trace", "memory", "serving", "kernel")
#: from the strongest to the weakest; rows on the authors' lengths were computed once and are kept
_COMPUTED = ("replayed", "replayed on the authors' lengths", "modelled", "modelled on the authors' lengths")
EVIDENCE = ("exact", "measured", "recorded", *_COMPUTED)
#: What a claim's `measured` says where its rule is applied to rows of another GPU, too.
SAME_RULE = "same rule"
_FILES = ("paper.yaml", "later.yaml")


@dataclass(frozen=True)
class Claim:
    """One claim. `value` is a number, a word, or nested dicts and lists of them. `judge` maps parts of it to rules, by
    their keys with dots between; the longest key counts, and "" is all of it. `measured` is what a GPU's rows are
    asked: SAME_RULE, or a verdict and why ("not comparable: ..."); None if no GPU could show what the claim is about.

    ValueError where the data file is inconsistent."""

    id: str
    where: str
    kind: str
    says: str
    value: Tree
    unit: str
    rule: str
    judge: Mapping[str, Rule]
    printed: str | None = None
    measured: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"claim {self.id}: kind {self.kind!r} is not one of {KINDS}")
        used = {self._key_of(path) for path, _ in leaves(self.value)}
        if used != set(self.judge):
            raise ValueError(
                f"claim {self.id}: rules for {sorted(self.judge)}, of which {sorted(map(str, used))} are used"
            )
        ends = {one for rule in self.judge.values() for pair in rule.pairs() for one in pair}
        if not ends <= {step for path, _ in leaves(self.value) for step in path[-1:]}:
            raise ValueError(f"claim {self.id}: an order names keys that its value lacks")
        if self.measured not in (None, SAME_RULE):
            Verdict(self.measured.partition(": ")[0])
        if all(rule.type == "input" for rule in self.judge.values()):
            raise ValueError(f"claim {self.id}: all of its keys are inputs")

    def _key_of(self, path: KeyPath) -> str | None:
        keys = (".".join(path[:length]) for length in range(len(path), -1, -1))
        return next((key for key in keys if key in self.judge), None)

    def rule_of(self, path: KeyPath) -> Rule:
        return self.judge[self._key_of(path)]

    def members(self, ours: Tree) -> dict[str, dict[KeyPath, tuple[Leaf, Leaf]]]:
        """rule's key -> path -> (the claim's value, ours) of what it judges."""
        found: dict[str, dict[KeyPath, tuple[Leaf, Leaf]]] = defaultdict(dict)
        for path, value in leaves(self.value):
            found[self._key_of(path)][path] = (value, at(ours, path))
        return found


@dataclass(frozen=True)
class Judgement:
    """What one experiment found for one claim.

    `ours` has the keys of the claim's value, in the same unit, or some of them (another experiment may add the rest; a
    key that is None or missing is "not run"). `interval` has the same shape with [low, high] in place of each number:
    the spread over seeds or readings. `facts` are the numbers for the places in the experiment's note on the claim.
    `device` is the GPU whose rows give the claim its second verdict; None: its first one. ValueError for an unknown
    evidence, and for a number that is not finite."""

    claim_id: str
    ours: Tree
    evidence: str
    interval: Tree = None
    note: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None

    def __post_init__(self) -> None:
        if self.evidence not in EVIDENCE:
            raise ValueError(f"claim {self.claim_id}: evidence {self.evidence!r} is not one of {EVIDENCE}")
        object.__setattr__(self, "ours", plain(self.ours))
        object.__setattr__(self, "interval", plain(self.interval))


def plain(tree: Tree) -> Tree:
    """JSON's own types: keys as text, whole numbers as they are, others to six significant digits.

    Rounding hides what the last bits of a sum may differ in between machines. ValueError for anything else."""
    if isinstance(tree, Mapping):
        return {str(key): plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain(value) for value in tree]
    if hasattr(tree, "item"):  # a numpy scalar
        tree = tree.item()
    if isinstance(tree, float):
        if not math.isfinite(tree):
            raise ValueError(f"{tree} is not a value that can be judged")
        return int(tree) if tree.is_integer() else float(f"{tree:.6g}")
    if tree is None or isinstance(tree, (bool, int, str)):
        return tree
    raise ValueError(f"{tree!r} ({type(tree).__name__}) is not a value that can be judged")


@cache
def load() -> Mapping[str, Claim]:
    """All claims by id, in the order of their files; read once in a process."""
    import yaml

    texts = [resources.files(__package__).joinpath(name).read_text(encoding="utf-8") for name in _FILES]
    entries = [entry for text in texts for entry in yaml.safe_load(text)]
    claims = {entry["id"]: _claim(entry) for entry in entries}
    if len(claims) != len(entries):
        raise ValueError("two claims have the same id")
    return claims


def _claim(entry: dict[str, Any]) -> Claim:
    if "curves" in entry:
        entry["value"] = _drawn_crossings(**entry.pop("curves"))
    rules = {"": entry["judge"]} if "type" in entry["judge"] else entry["judge"]
    entry["value"] = plain(entry["value"])
    entry["judge"] = {str(key): Rule.parse(rule) for key, rule in rules.items()}
    if entry.get("printed") is not None:
        entry["printed"] = str(entry["printed"])
    return Claim(**entry)


def _drawn_crossings(figure: str, apart: str | None = None, workload: str = "") -> Tree:
    """panel -> system -> req/s where the drawn curve reaches 0.5 s/token; with `apart` that system is a table of its
    own: {"crossings": panel -> system -> rate, apart: panel -> rate}. With a `workload`, its panels only."""
    found = paper.crossings(figure, 0.5)
    panels = {panel: systems for panel, systems in found.items() if panel.endswith(workload)}
    if apart is None:
        return panels
    alone = {panel: systems.pop(apart) for panel, systems in panels.items()}
    return {"crossings": panels, apart: alone}


def judge_entry(claim: Claim, ours: Tree) -> tuple[Verdict, Tree]:
    """The claim's verdict and those of its keys, in the shape of its value.

    `ours` is judged by the claim's rules; a key that is missing or None is "not run". ValueError if `ours` has a key
    that the claim does not have: such a judgement would otherwise be lost in silence."""
    ours = plain(ours)
    known = {path for path, _ in leaves(claim.value)}
    if stray := [path for path, leaf in leaves(ours) if leaf is not None and path not in known]:
        raise ValueError(f"claim {claim.id} has no key {'.'.join(stray[0])!r}; its value is {claim.value!r}")
    found: dict[KeyPath, Verdict] = {}
    for key, members in claim.members(ours).items():
        found |= claim.judge[key].verdicts(members)
    return worst(found.values()), mapped(claim.value, lambda path, _: found[path])
