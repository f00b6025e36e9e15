"""A claim's line in the page's table, and the findings: short, in people's digits, and from the ledger alone."""

from repro.report import claims
from repro.report.claims import Judgement
from repro.report.claims.ledger import contribution, entry
from repro.report.claims.rules import leaves
from repro.report.findings import chart, findings
from repro.report.ledger_rows import row

CLAIMS = claims.load()


def judged(claim, ours, interval=None, **changes):
    judgement = Judgement(claim, ours, "modelled", interval)
    return {**entry(CLAIMS[claim], [contribution(judgement, "fig16_shared_prefix")]), "measured": None, **changes}


def test_few_keys_are_shown_with_the_largest_deviation():
    shown = row(judged("fig16-shared-prefix", {"1-shot-80": 1.5, "5-shot-341": 4.30985}, {"1-shot-80": [1.4, 1.6]}))
    assert [(key["key"], key["paper"], key["ours"], key["interval"]) for key in shown["keys"]] == [
        ("1-shot-80", "1.67", "1.50", "1.40 … 1.60"),
        ("5-shot-341", "3.58", "4.31", ""),
    ]
    assert shown["few"] and shown["apart"] == "+20 %" and shown["farthest"] == 20.4
    assert shown["sources"] == ["fig16_shared_prefix"]


def test_many_keys_are_counted_by_those_that_have_a_rule_to_meet():
    ours = CLAIMS["fig12-curves"].value
    shown = row(judged("fig12-curves", ours))
    assert not shown["few"] and shown["in_short"] == "26 of 26 meet the rule" and len(shown["keys"]) == 30
    assert row(judged("fig12-curves", {}))["in_short"] == "30 values"


def test_one_seed_has_no_spread():
    assert row(judged("waste-under-4-percent", 3.2, [3.2, 3.2]))["keys"][0]["interval"] == ""


def test_a_claim_that_nobody_judged_has_a_line_too():
    shown = row(entry(CLAIMS["hf-24x"], []))
    assert shown["keys"][0]["ours"] == "–" and shown["apart"] == "" and shown["sources"] == []


def test_a_measured_verdict_has_a_place():
    assert row(judged("hf-24x", 64.0))["second"] == {"verdict": "", "rows": "", "note": ""}
    measured = {
        "ours": 64.0,
        "verdict": "differs",
        "evidence": "recorded",
        "device": "NVIDIA H200",
        "keys": "1 of 2",
        "note": "Why.",
    }
    second = row(judged("hf-24x", 64.0, measured=measured))["second"]
    assert second == {"verdict": "differs", "rows": "recorded, NVIDIA H200, 1 of 2 keys", "note": "Why."}


def of_the_papers(factor):
    """A ledger in which every number is the paper's, times `factor`."""
    parts = {claim.id: claim.value for claim in CLAIMS.values()}
    scaled = {name: scale(value, factor) for name, value in parts.items()}
    return [judged(name, value) for name, value in scaled.items() if claims_numbers(value)]


def scale(value, factor):
    if isinstance(value, dict):
        return {key: scale(item, factor) for key, item in value.items()}
    if isinstance(value, list):
        return [scale(item, factor) for item in value]
    return value * factor if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def claims_numbers(value):
    return all(isinstance(leaf, (int, float)) and not isinstance(leaf, bool) for _, leaf in leaves(value))


def test_the_findings_are_five_and_take_every_number_from_the_ledger():
    """With another ledger every number of ours is another; the words stay."""
    one, other = list(findings(of_the_papers(1))), list(findings(of_the_papers(3)))
    assert len(one) == len(other) == 5
    for a, b in zip(one, other, strict=True):
        assert a["number"] != b["number"] and a["entry"]["id"] == b["entry"]["id"]
        assert [line["ours"] for line in a["chart"]] != [line["ours"] for line in b["chart"]]
        assert [line["paper"] for line in a["chart"]] == [line["paper"] for line in b["chart"]]


def test_a_finding_that_was_not_computed_is_left_out():
    assert list(findings([entry(claim, []) for claim in CLAIMS.values()])) == []


def test_bars_begin_at_zero_also_below_it():
    below, above = chart(["a", "b"], [-5, 10], [20, 20])
    assert below["bar"] == (0.0, 20.0) and below["rim"] == (20.0, 80.0)
    assert above["bar"] == (20.0, 40.0)
