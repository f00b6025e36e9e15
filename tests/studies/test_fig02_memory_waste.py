"""Fig. 2 and 13: parameters are refused before any work, and a policy from a notebook cell is swept like the
paper's."""

import os

import nbformat
import pytest
from loads import parameters
from nbclient import NotebookClient

from repro.engine.config import DEPLOYMENTS
from repro.engine.systems import system
from repro.errors import UserError
from repro.report.claims import load
from repro.setup.environment import ROOT
from repro.simulate.metrics import PIECES
from repro.studies import fig02_memory_waste as study


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(usage_rate=0.0), "'usage_rate' must be above 0, not 0.0"),
        (dict(usage_rate=float("nan")), "nan"),
        (dict(usage_window_s=(-5.0, 900.0)), "usage_window_s.*is no window"),
        (dict(batch_window_s=(900.0, 900.0)), "batch_window_s.*is no window"),
        (dict(seeds=()), "seeds"),
        (dict(seeds=(1, 1)), "twice"),
        (dict(systems=("vlm",)), "unknown system 'vlm'; known: .*vllm"),
        (dict(model="opt-14b"), "unknown model 'opt-14b'; known: .*opt-13b"),
        (dict(profile="a100"), "unknown cost profile 'a100'; known"),
        (dict(block_size=24), "block_size = 24"),
        (dict(block_size=512), "block_size = 512"),
        (dict(kv_slots=2048), "kv_slots = 2048"),
        (dict(kv_slots=0), "kv_slots = 0 must be a whole number of at least 1"),
    ],
)
def test_bad_parameters_are_refused_by_name(changes, named):
    with pytest.raises(UserError, match=named):
        parameters("fig02_memory_waste", **changes)


def saturated(name, **changes):
    arguments = dict(
        system=system(name),
        model="opt-13b",
        workload="sharegpt",
        rate=4.0,
        window_s=(0.0, 600.0),
        seed=0,
        profile="a100-2023",
        block_size=16,
        kv_slots=None,
        lengths=None,
    )
    return study.saturated_run(**arguments | changes)


def test_pieces_add_up_and_order_the_systems():
    rows = {name: saturated(name) for name in parameters("fig02_memory_waste").systems}
    for row in rows.values():
        assert sum(row[piece] for piece in PIECES) == pytest.approx(100)
    states = [rows[name]["token_states"] for name in ("orca-max", "orca-pow2", "orca-oracle", "vllm")]
    assert states == sorted(states)
    assert rows["orca-oracle"]["internal"] == 0 and rows["orca-max"]["rounding"] == 0 and rows["vllm"]["rounding"] == 0
    assert rows["orca-max"]["batched_requests"] <= DEPLOYMENTS["opt-13b"].kv_slots // 2048


def test_with_the_papers_own_lengths_fig_2_is_the_papers(reference_dir):
    """All twelve pieces within 3 points, at least ten within 1 (a whole hour, one seed: 2 seconds)."""
    from repro.report import paper

    printed = paper.figure("fig2")
    deviations = []
    for name in ("orca-max", "orca-pow2", "orca-oracle"):
        row = saturated(name, window_s=(0.0, 3600.0), lengths=str(reference_dir / "data" / "sharegpt_lengths.csv"))
        assert row["equals_paper_trace"]
        ours = {
            "token states": row["token_states"],
            "reservation": row["reserved"],
            "internal": row["internal"],
            "external & others": row["rounding"] + row["free"],
        }
        deviations += [abs(ours[piece] - printed[name][piece]) for piece in ours]
    assert max(deviations) <= 3
    assert sum(deviation <= 1 for deviation in deviations) >= 10


def test_a_policy_defined_in_a_notebook_cell_is_swept_and_drawn(tmp_path):
    """As docs/extending.md has it; editing the policy changes its results' keys, and nothing else is computed again."""
    cell = """
from repro.harness import experiment
from repro.engine import systems
def mine(request, max_model_len):
    return request.output_tokens * {factor} // 2
systems.register(systems.contiguous_system("orca-mine", mine))
run = experiment.open("fig02_memory_waste", scale="smoke", overrides={{"systems": ["orca-max", "orca-mine"]}})
rows = run.rows()
figures = run.draw(rows)
assert run.judge(rows).empty
usage = rows["pool"].set_index("system")
print("internal", round(usage.loc["orca-mine", "internal"], 6), sorted(figures))
"""
    outputs = []
    for factor in (3, 4, 4):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.format(factor=factor))])
        environ = os.environ | {
            "REPRO_RESULTS_DIR": str(tmp_path / "results"),
            "REPRO_FIGURES_DIR": str(tmp_path / "figures"),
        }
        NotebookClient(notebook, kernel_name="python3").execute(cwd=ROOT, env=environ)  # raises a cell's error
        texts = (output for one in notebook.cells for output in one.outputs if output.output_type == "stream")
        outputs.append("".join(output.text for output in texts))
    assert "6 computed" in outputs[0]
    assert "3 computed" in outputs[1]  # orca-max's three points are kept
    assert "6/6 points, all kept" in outputs[2]
    reserved = [float(text.split("internal ")[1].split()[0]) for text in outputs]
    assert 0 < reserved[0] < reserved[1] == reserved[2]


@pytest.mark.parametrize(
    "claim_id, table, column, change, expected",
    [
        ("fig13-sharegpt", "batches", "batched_requests", {}, "reproduced"),
        (
            "fig13-sharegpt",
            "batches",
            "batched_requests",
            {"system": system("orca-max").with_scheduler(max_num_seqs=6)},
            "differs",
        ),
        ("fig2-token-states", "pool", "token_states", {}, "reproduced"),
        ("fig2-token-states", "pool", "token_states", {"window_s": (0.0, 10.0)}, "differs"),  # all of them are young
    ],
)
def test_a_wrong_limit_or_window_flips_the_verdict(claim_id, table, column, change, expected):
    windows = {"usage_window_s": [60.0, 260.0], "batch_window_s": [60.0, 260.0]}
    points = study.points(parameters("fig02_memory_waste", systems=["orca-max"], seeds=[0], **windows))
    point = next(one for one in points if one.table == table and one.arguments.get("workload") == "sharegpt")
    ours = study.saturated_run(**point.arguments | change)[column]
    claim = load()[claim_id]
    assert claim.rule_of(("orca-max",)).leaf(claim.value["orca-max"], ours) == expected
