"""The claims that the package accounts for, and what a judgement of ours makes of them.

The claims are stated in paper.yaml (the paper and its launch post) and later.yaml (later descriptions); `load` reads
both. An experiment returns `Judgement`s; `record` turns them into verdicts and merges them into the ledger file, and
`compare` lays them beside the claims in a table. A key that a judgement leaves out stays "not run"."""

from repro.report.claims.claim import Claim, Judgement, judge_entry, load
from repro.report.claims.compare import compare, filled, style
from repro.report.claims.ledger import read, record
from repro.report.claims.rules import Rule, Verdict

__all__ = [
    "Claim",
    "Judgement",
    "Rule",
    "Verdict",
    "compare",
    "filled",
    "judge_entry",
    "load",
    "read",
    "record",
    "style",
]
