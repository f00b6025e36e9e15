"""The cost model: its formula term by term, where its coefficients come from, and the anchors."""

from dataclasses import replace

import pytest

from repro.bench import kept
from repro.bench.anchors import solve_anchor, solve_extra
from repro.engine.config import DEPLOYMENTS, DEVICES
from repro.engine.memory import CacheOp, OpKind
from repro.engine.scheduler import Prefill, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.errors import UserError
from repro.report import paper
from repro.simulate.cost_model import CostModel, PaddedCostModel
from repro.simulate.profiles import a100_2023, context_splits, cost_model, faster_transformer_costs

OPT_13B = DEPLOYMENTS["opt-13b"]
UNIT = CostModel(
    "unit",
    fixed_s=1.0,
    per_seq_s=10.0,
    per_group_s=100.0,
    per_context_token_s=1000.0,
    per_prefill_token_s=2.0,
    weight_read_s=6.0,
    copy_per_block_s=1e5,
    swap_per_block_s=1e6,
)


def group(n=1):
    return SequenceGroup(Request(0, 0.0, 8, 8, SamplingParams(n=n, max_tokens=8)))


def first_s(costs, output):
    return next(costs.step_times(output))


def test_each_term_of_the_formula():
    output = SchedulerOutput(0, decodes=[group(3)], num_decode_seqs=3, context_tokens=7)
    assert first_s(UNIT, output) == 1 + 3 * 10 + 100 + 7 * 1000
    output.cache_ops = [CacheOp(OpKind.COPY, 0, 1), CacheOp(OpKind.SWAP_IN, 0, 1), CacheOp(OpKind.SWAP_OUT, 0, 1)]
    assert first_s(UNIT, output) == 1 + 3 * 10 + 100 + 7 * 1000 + 1e5 + 2e6


@pytest.mark.parametrize("tokens, seconds", [(1, 0), (3, 0), (4, 2), (10, 14)])
def test_prompts_hide_behind_the_pass_over_the_weights(tokens, seconds):
    output = SchedulerOutput(0, prefills=[Prefill(group(), tokens, 0)], num_prefill_tokens=tokens)
    assert first_s(UNIT, output) == 1 + 10 + 100 + seconds


def test_a_padded_batch_costs_what_its_longest_member_does():
    costs = PaddedCostModel(**vars(UNIT))
    short, long = (SequenceGroup(Request(number, 0.0, size, 8, SamplingParams())) for number, size in enumerate((3, 9)))
    prompts = SchedulerOutput(0, prefills=[Prefill(short, 3, 0), Prefill(long, 9, 0)], num_prefill_tokens=12)
    assert first_s(costs, prompts) == 1 + 2 * 10 + 2 * 100 + 2 * 9 * 2 - 6
    for each in (short, long):
        each.running_since = 0
    decoding = SchedulerOutput(4, decodes=[short, long], num_decode_seqs=2, context_tokens=20)
    times = costs.step_times(decoding)
    assert [next(times) - (1 + 20 + 200) for _ in range(2)] == [2 * 13 * 1000, 2 * 14 * 1000]


def test_faster_transformers_step_is_the_datasheets_and_one_extra():
    opt_66b = DEPLOYMENTS["opt-66b"]
    costs, bare = faster_transformer_costs(opt_66b), cost_model("datasheet", opt_66b)
    extra_ms = a100_2023()["faster_transformer_extra_ms"]["authors"]["opt-66b"]
    assert costs.fixed_s == pytest.approx(bare.weight_read_s + extra_ms / 1e3)
    assert costs.per_context_token_s == bare.per_context_token_s and costs.per_seq_s == costs.per_group_s == 0
    assert costs.per_prefill_token_s == pytest.approx(2 * bare.per_prefill_token_s)
    llama = faster_transformer_costs(DEPLOYMENTS["llama-13b"])  # as many layers as OPT-13B, and no extra of its own
    known = a100_2023()["faster_transformer_extra_ms"]["authors"]["opt-13b"]
    assert llama.fixed_s == pytest.approx(llama.weight_read_s + known / 1e3)


def test_context_grows_by_one_token_a_sequence_and_iteration():
    output = SchedulerOutput(0, decodes=[group()] * 5, num_decode_seqs=5, context_tokens=50, num_iterations=3)
    times = UNIT.step_times(output)
    assert [next(times) - (1 + 50 + 500) for _ in range(3)] == [50e3, 55e3, 60e3]


def test_the_line_is_the_best_one_through_fig_1():
    points = [(batch, 1e3 * batch / rate) for batch, rate in paper.points("fig1", "throughput_tok_s") if batch > 1]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    decode = a100_2023()["decode"]
    assert decode["per_seq_ms"] == pytest.approx(slope, rel=0.01)
    assert decode["fixed_ms"] == pytest.approx(mean_y - slope * mean_x, rel=0.01)
    assert all(abs(decode["fixed_ms"] + decode["per_seq_ms"] * x - y) < 0.03 * y for x, y in points)


def test_all_splits_of_the_slope_agree_at_fig_1s_own_context():
    decode = a100_2023()["decode"]
    context = decode["context_tokens"]
    for split in context_splits():
        costs = cost_model("a100-2023", OPT_13B, split=split)
        for batch in (1, 40):
            output = SchedulerOutput(0, num_decode_seqs=batch, context_tokens=batch * context)
            assert 1e3 * first_s(costs, output) == pytest.approx(decode["fixed_ms"] + decode["per_seq_ms"] * batch)
    shares = [cost_model("a100-2023", OPT_13B, split=split).per_context_token_s for split in context_splits()]
    assert shares == sorted(set(shares)) and shares[0] == 0


def test_every_panel_has_an_anchor_for_every_split_and_no_other_number():
    anchors = a100_2023()["anchors_ms"]
    assert set(anchors) == set(paper.figure("fig12"))
    assert all(set(values) == set(context_splits()) for values in anchors.values())


def test_an_anchor_solves_for_the_printed_latency():
    """The panel with the shortest traces; `python -m repro calibrate` does all of them."""
    solved = solve_anchor("opt-175b/sharegpt", "sequence", *paper.points("fig12", "opt-175b/sharegpt", "vllm")[0])
    assert solved == pytest.approx(a100_2023()["anchors_ms"]["opt-175b/sharegpt"]["sequence"], abs=0.02)


def test_datasheet_profile_is_the_roofline():
    for name, device in DEVICES.items():
        costs = cost_model("datasheet", replace(OPT_13B, device=device))
        assert costs.name == f"datasheet-{name}"
        assert costs.fixed_s == OPT_13B.model.weight_bytes / device.bytes_per_s
        assert costs.per_context_token_s == 819_200 / device.bytes_per_s
        assert costs.per_seq_s == costs.per_group_s == 0


@pytest.mark.parametrize(
    "arguments, named",
    [
        (dict(profile="a100-2032"), "a100-2032"),
        (dict(split="half"), "half"),
        (dict(anchor="opt-13b/wmt"), "opt-13b/wmt"),
        (dict(prefill_efficiency=0.0), "0.0"),
        (dict(prefill_efficiency=1.5), "1.5"),
        (dict(anchor_ms=-50.0), "fixed_s"),
    ],
)
def test_bad_settings_are_refused_by_name(arguments, named):
    if "split" in arguments:
        arguments["anchor"] = "opt-13b/sharegpt"
    with pytest.raises(UserError, match=named):
        cost_model(arguments.pop("profile", "a100-2023"), OPT_13B, **arguments)


@pytest.mark.parametrize("field", ["fixed_s", "per_seq_s", "swap_per_block_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_coefficients_are_finite_and_not_negative(field, value):
    with pytest.raises(UserError, match=field):
        replace(UNIT, **{field: value})


@pytest.mark.parametrize("model", ["opt-13b", "opt-66b", "opt-175b"])
@pytest.mark.parametrize("kind, seeds", [("embedded", (0, 1, 2)), ("authors", (0,))])
def test_faster_transformers_extras_can_be_solved_again(model, kind, seeds, request):
    folder = request.getfixturevalue("reference_dir") if kind == "authors" else None
    lengths = folder and str(folder / "data" / "sharegpt_lengths.csv")
    lowest = paper.points("fig12", f"{model}/sharegpt", "faster-transformer")[0]
    solved = solve_extra(model, *lowest, lengths, seeds)
    assert solved == pytest.approx(a100_2023()["faster_transformer_extra_ms"][kind][model], abs=0.05)


def test_the_shape_of_prefill_is_the_recorded_one_and_slows_few_tokens_only():
    rows = kept.read(*kept.find("h200", kept.SERVING))
    alone = [row for row in rows if row["kind"] == "prefill" and not row["seqs"]]
    shares = {row["prompt_tokens"]: row["share"] for row in alone if row["prompt"] == min(row["prompt_tokens"], 2047)}
    tokens, relative = a100_2023()["prefill_shapes"]["h200"]
    assert tokens == [size for size in shares if size >= 256]
    assert relative == [round(shares[size] / shares[2560], 2) for size in tokens]
    usual = cost_model("a100-2023", DEPLOYMENTS["opt-13b"])
    shaped = cost_model("a100-2023", DEPLOYMENTS["opt-13b"], prefill_shape="h200")
    # With 32 tokens reading the weights takes longer than their arithmetic either way.
    for size, is_slower in {32: False, 256: True, 700: True, 2560: False}.items():
        output = SchedulerOutput(0, num_prefill_tokens=size)
        assert (shaped.constant_s(output) > usual.constant_s(output)) == is_slower
