"""The artifact appendix against the ledger: its claims, experiments, figures and verdicts are those that are
committed."""

from __future__ import annotations

import json
import re
from collections import Counter

from committed import committed

from repro.setup.environment import ROOT

TEXT = (ROOT / "docs" / "artifact.md").read_text(encoding="utf-8")


def test_the_table_of_claims_says_what_the_ledger_says() -> None:
    ledger = {
        entry["id"]: entry for entry in json.loads((ROOT / "figures" / "claims.json").read_text(encoding="utf-8"))
    }
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| ")
    ]
    claims = [row for row in rows if row[0] in ledger]
    assert len(claims) >= 20 and {row[-1] for row in rows if len(row) == 7} <= {
        "verdict",
        "---",
        *(e["verdict"] for e in ledger.values()),
    }
    for identity, experiment, figure, _, expected, _, verdict in claims:
        entry = ledger[identity]
        assert experiment in entry["experiment"], identity
        assert (ROOT / "figures" / f"{figure}.svg").is_file(), identity
        assert verdict == entry["verdict"], identity
        numbers = re.findall(r"\d+\.\d+|\d+", expected)
        if isinstance(entry["ours"], (int, float)) and numbers:
            digits = len(numbers[0].partition(".")[2])
            assert round(entry["ours"], digits) == float(numbers[0]), identity
        elif isinstance(entry["ours"], dict) and len(numbers) == len(entry["ours"]):
            for value, number in zip(entry["ours"].values(), numbers, strict=True):
                assert round(value, len(number.partition(".")[2])) == float(number), (identity, value, number)


def test_the_commands_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"`make ([a-z]+)", TEXT))
    assert named and named <= set(targets)
    cli = (ROOT / "repro" / "cli.py").read_text(encoding="utf-8")
    assert all(f'"{command}"' in cli for command in re.findall(r"python -m repro ([a-z]+)", TEXT))
    for name in re.findall(r"\]\(([a-z]+\.md)\)", TEXT):
        assert (ROOT / "docs" / name).is_file(), name


def test_the_counts_in_the_texts_are_those_of_the_ledger_and_of_the_experiments() -> None:
    entries = json.loads((ROOT / "figures" / "claims.json").read_text(encoding="utf-8"))
    counts = Counter(entry["verdict"] for entry in entries)
    experiments = len(list((committed() / "experiments").glob("*.yaml")))
    assert f"{experiments} experiments; a ledger of {len(entries)} claims" in TEXT
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    said = (
        f"**All {len(entries)} claims are in the ledger**: {counts['reproduced']} reproduce, {counts['differs']} "
        f"differ, {counts['contradictory in the source']} contradict themselves in the source, {counts['reported']} "
        f"are reported, {counts['calibration']} are calibrations."
    )
    assert said in " ".join(readme.split()) and sum(counts.values()) == len(entries)
    listed = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    assert all(f"notebooks/{path.stem}.ipynb" in listed for path in (committed() / "experiments").glob("*.yaml"))
