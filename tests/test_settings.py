"""Every setting of the public face is taken as what it is, or refused in one line that names it."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import repro
from repro.checks import number, shown, whole
from repro.engine.chunked import ChunkedPrefillConfig
from repro.engine.config import Deployment
from repro.engine.memory import ContiguousKVCacheManager, PagedKVCacheManager
from repro.engine.memory.contiguous import reserve_max
from repro.engine.scheduler import Batching, PreemptionMode, SchedulerConfig
from repro.simulate.cost_model import CostModel
from repro.workloads import Trace

Params = repro.SamplingParams
VLLM = repro.SYSTEMS["vllm"]

#: what no setting is, whatever its type
WRONG = (
    None,
    "x",
    "4",
    {},
    [1],
    1.5,
    True,
    math.nan,
    math.inf,
    -math.inf,
    Path("x"),
    10**400,
    object(),
    b"x",
    -(10**30),
)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return repro.make_trace("alpaca", 2.0, 5.0, 0)


def takes(work, *arguments, **settings) -> bool:
    """Whether it takes the settings; a refusal is one line that names the setting."""
    try:
        work(*arguments, **settings)
    except repro.UserError as refused:
        assert "\n" not in str(refused) and len(str(refused)) < 600
        assert next(iter(settings)) in str(refused)
        return False
    return True


@pytest.mark.parametrize("name", [field.name for field in fields(Params)])
def test_sampling_params_take_their_kind_only(name):
    kinds = {
        "use_beam_search": bool,
        "ignore_eos": bool,
        "early_stopping": bool,
        "temperature": (int, float),
        "top_p": (int, float),
        "length_penalty": (int, float),
        "stop": (str, type(None)),
        "stop_token_ids": (list, type(None)),
        "seed": (int, type(None)),
        "logprobs": type(None),
        "prompt_logprobs": type(None),
    }
    for value in WRONG:
        beams = {name: value} | {"n": 2, "use_beam_search": True} | {name: value}
        if takes(Params, **{name: value}) or takes(Params, **beams):
            kind = kinds.get(name, float if name.endswith("penalty") else int)
            assert isinstance(value, kind) and (isinstance(value, bool) == (kind is bool)), value


def test_sampling_params_at_their_edges():
    for good in (
        {"temperature": 5e-324},
        {"top_p": 5e-324},
        {"temperature": 1.7e308},
        {"n": np.int64(256)},
        {"top_p": np.float32(0.5)},
        {"max_tokens": 4, "min_tokens": 4},
        {"logprobs": 0},
    ):
        Params(**good)
    assert Params(seed=2**64 + 3).seed == 3 and Params(seed=-1).seed == 2**64 - 1
    assert Params(stop="x").stop == ("x",) and Params(stop_token_ids=[np.int32(4)]).stop_token_ids == (4,)
    assert hash(Params(stop=["a", "b"])) == hash(Params(stop=("a", "b")))
    assert type(Params(max_tokens=np.int64(4)).max_tokens) is int and type(Params(temperature=1).temperature) is float


@pytest.mark.parametrize(
    "message, settings",
    [
        ("did you mean max_tokens", {"max_token": 5}),
        ("n = 257 must be a whole number from 1 to 256", {"n": 257}),
        ("top_p = 0", {"top_p": 0}),
        ("top_p = 1.01", {"top_p": 1.01}),
        ("temperature = -1", {"temperature": -1}),
        ("min_tokens = 17 is more than max_tokens = 16", {"min_tokens": 17}),
        ("one of stop_token_ids = 5.9", {"stop_token_ids": [5.9]}),
        ("one of stop_token_ids = True", {"stop_token_ids": [True]}),
        ("empty text", {"stop": ["a", ""]}),
        ("one of stop = 5", {"stop": ["a", 5]}),
        ("repetition_penalty = 0 must", {"repetition_penalty": 0}),
        ("length_penalty = 2.0 is only for beam search", {"length_penalty": 2}),
        ("early_stopping = True is only for beam search", {"early_stopping": True}),
        ("n .the beam width. of at least 2", {"use_beam_search": True}),
        ("top_k = 5 is not for beam search", {"use_beam_search": True, "n": 2, "top_k": 5}),
        ("temperature = 0.7 does nothing in a beam search", {"use_beam_search": True, "n": 2, "temperature": 0.7}),
        ("stop = .'x',. is not for beam search", {"use_beam_search": True, "n": 2, "stop": "x"}),
        ("early_stopping = 'always'", {"use_beam_search": True, "n": 2, "early_stopping": "always"}),
    ],
)
def test_what_sampling_params_refuse(message, settings):
    with pytest.raises(repro.UserError, match=message):
        Params(**settings)


def test_modes_are_members_or_their_names():
    for mode in PreemptionMode:
        for given in (mode, mode.value, mode.name):
            assert VLLM.with_scheduler(preemption=given).scheduler.preemption is mode
    assert SchedulerConfig(batching="request").batching is Batching.REQUEST
    assert callable(VLLM.with_scheduler(preemption=lambda group: True).scheduler.preemption)  # a policy of one's own
    for wrong in (*WRONG, "nonsense", "swap ", PreemptionMode, Batching.REQUEST):
        assert not takes(VLLM.with_scheduler, preemption=wrong)
        assert not takes(SchedulerConfig, batching=wrong) or wrong is Batching.REQUEST
    with pytest.raises(repro.UserError, match="preemption = 'nonsense' .* 'recompute', 'swap', 'by_group'"):
        VLLM.with_scheduler(preemption="nonsense")


def test_scheduler_settings_are_counts_with_known_names():
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        for wrong in (*WRONG, 0, 64.0):
            assert not takes(VLLM.with_scheduler, **{name: wrong}) or (name, wrong) == ("max_num_batched_tokens", None)
    for wrong in WRONG:
        assert not takes(ChunkedPrefillConfig, max_model_len=wrong)
        assert not takes(ChunkedPrefillConfig, enable_chunked_prefill=wrong) or wrong is True
    with pytest.raises(repro.UserError, match="takes no 'preemtion' .did you mean preemption"):
        VLLM.with_scheduler(preemtion="swap")


def test_systems_and_deployments_are_known_by_name():
    for table, kind in ((repro.SYSTEMS, "system"), (repro.DEPLOYMENTS, "deployment")):
        with pytest.raises(repro.UserError, match=f"unknown {kind} 'vlm'; known: .*, "):
            table["vlm"]
        assert "vlm" not in table and table.get("vlm") is None
    for wrong in WRONG:
        assert not takes(repro.contiguous_system, reservation=wrong, name="mine")
        assert not takes(repro.contiguous_system, name=wrong, reservation=reserve_max) or isinstance(wrong, str)
        assert not takes(repro.System, scheduler=wrong, name="x", label="x")
        with pytest.raises(repro.UserError, match="system = .* give a System"):
            repro.register(wrong)
    with pytest.raises(repro.UserError, match="the name of a system is empty"):
        repro.contiguous_system("", reserve_max)


def test_pools_are_sized_by_counts():
    opt = repro.DEPLOYMENTS["opt-13b"]
    for wrong in (*WRONG, 0):
        assert not takes(PagedKVCacheManager, num_blocks=wrong)
        assert not takes(PagedKVCacheManager, num_cpu_blocks=wrong, num_blocks=4) or wrong == 0
        assert not takes(PagedKVCacheManager, watermark=wrong, num_blocks=4) or wrong == 0
        assert not takes(ContiguousKVCacheManager, max_model_len=wrong, num_blocks=4, reservation=reserve_max)
        assert not takes(Deployment, kv_slots=wrong, model=opt.model, device=opt.device, num_gpus=1)
        assert not takes(Deployment, num_gpus=wrong, model=opt.model, device=opt.device, kv_slots=1)


def test_a_serving_run_takes_its_kinds_only(trace):
    good = {"system": "vllm", "deployment": "opt-13b", "trace": trace}
    for name in ("system", "deployment", "trace", "block_size", "sampling", "observers", "shared_prefix_tokens"):
        for wrong in WRONG:
            assert not takes(repro.serve, **{name: wrong} | {key: good[key] for key in good if key != name})
    for name in ("cost_model", "log", "usage_every_s"):
        for wrong in WRONG:
            if wrong is not None and (name, wrong) not in (("log", [1]), ("usage_every_s", 1.5)):
                assert not takes(repro.serve, **{name: wrong}, **good)
    with pytest.raises(repro.UserError, match="serve takes no 'blocksize' .did you mean block_size"):
        repro.serve(**good, blocksize=16)
    with pytest.raises(repro.UserError, match="must be told which beams survive"):
        repro.serve(**good, sampling=Params(n=2, use_beam_search=True), beams="x")


def test_a_trace_takes_its_kinds_only(trace):
    good = {"workload": "alpaca", "rate": 1.0, "duration_s": 10.0, "seed": 0}
    for name in good:
        for wrong in WRONG:
            taken = takes(repro.make_trace, **{name: wrong} | {key: good[key] for key in good if key != name})
            assert taken == (wrong == {"rate": 1.5, "duration_s": 1.5, "seed": 10**400}.get(name, trace))
    assert len(repro.make_trace("alpaca", 1.0, 10.0, 2**70))
    for wrong in WRONG:
        assert not takes(repro.make_trace, max_model_len=wrong, **good)
        if wrong is not None and not isinstance(wrong, str | Path):
            assert not takes(repro.make_trace, lengths=wrong, **good)
    with pytest.raises(repro.UserError, match="missing a required argument: 'duration_s'"):
        repro.make_trace("alpaca", 1.0)
    for wrong in ([math.nan] * len(trace), [-1.0] * len(trace), [math.inf] * len(trace), [1.0, 0.0][: len(trace)]):
        with pytest.raises(repro.UserError, match="arrival_s|one value a request"):
            Trace("mine", np.array(wrong), trace.prompt_tokens, trace.output_tokens, trace.card)


def test_a_cost_model_takes_its_kinds_only():
    assert repro.cost_model("datasheet", "opt-13b") == repro.cost_model("datasheet", repro.DEPLOYMENTS["opt-13b"])
    good = {"profile": "a100-2023", "deployment": "opt-13b"}
    for name in good:
        for wrong in WRONG:
            assert not takes(repro.cost_model, **{name: wrong} | {key: good[key] for key in good if key != name})
    for wrong in WRONG:
        for name in ("block_size", "per_request_ms", "beam_search"):
            assert not takes(repro.cost_model, **{name: wrong}, **good) or (name, wrong) == ("beam_search", True)
        assert wrong is None or not takes(repro.cost_model, anchor=wrong, **good)
        assert wrong is None or not takes(repro.cost_model, prefill_efficiency=wrong, **good)
        assert wrong is None or wrong == 1.5 or not takes(repro.cost_model, anchor_ms=wrong, **good)
        assert wrong == 1.5 or not takes(CostModel, fixed_s=wrong, name="x", **dict.fromkeys(_RATES, 0.0))


_RATES = [field.name for field in fields(CostModel)[2:]]


def test_an_experiment_takes_its_kinds_only():
    for wrong in WRONG:
        assert not takes(repro.open, scale=wrong, stem="fig02_memory_waste")
        with pytest.raises(repro.UserError, match="unknown experiment"):
            repro.open(wrong)
    with pytest.raises(repro.UserError, match="open takes no 'overides' .did you mean overrides"):
        repro.open("fig02_memory_waste", overides={})


def test_the_checks_themselves():
    assert whole("x", np.int64(5)) == 5 and type(whole("x", np.int64(5))) is int
    assert number("x", np.float32(0.5), 0) == 0.5
    assert shown(10**5000) == "a int" and shown(np.zeros((2, 2))) == "array([[0., 0.], [0., 0.]])"
    assert len(shown("x" * 1000)) == 80
