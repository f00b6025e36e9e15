"""The explorer's runs: counters as in the experiment's rows, blocks as the manager has them, rules of a reader."""

from __future__ import annotations

import csv
import json
import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from repro.errors import UserError
from repro.explore import queue
from repro.explore.page import SHOWN, drawn, first_runs
from repro.explore.recording import runs
from repro.explore.run import answer, run
from repro.explore.settings import SHAREGPT, Settings
from repro.harness import experiment
from repro.report import claims
from repro.setup.environment import ROOT
from repro.studies import saturated
from repro.studies.first_fit import FirstFitAllocator
from repro.studies.saturated_queue import PRINTED

PARAMS = experiment.open("saturated_queue").params
POLICY = {"contiguous": "max"}
SHORT = Settings(kv_slots=20_000, max_num_seqs=32, warmup_steps=50, steps=200)
TIGHT = replace(SHORT, kv_slots=4000, shortest_prompt=100, longest_prompt=200)  # sequences outgrow this pool
HALF_AGAIN = "def reserve(request, max_model_len):\n    return request.output_tokens * 3 // 2\n"


def settings_of(setup: saturated.Setup, seed: int) -> Settings:
    return Settings(
        policy=POLICY.get(setup.memory, setup.memory),
        declared=setup.declared,
        spread=setup.spread,
        block_size=setup.block_size,
        system_prompt=PARAMS.system_prompt if setup.prefix else 0,
        seed=seed,
    )


@pytest.fixture(scope="module")
def lengths() -> queue.Drawn:
    return drawn(lambda **what: saturated.lengths(load=PARAMS.load, **what), [0])


def made(settings: Settings, lengths: queue.Drawn | None = None) -> dict[str, Any]:
    return run(settings, FirstFitAllocator, lengths)


def test_what_is_not_set_is_as_in_the_experiment() -> None:
    ours = Settings()
    shared = ("kv_slots", "max_num_seqs", "max_model_len", "shortest_prompt", "longest_prompt", "mean_output", "steps")
    for name in (*shared, "warmup_steps"):
        assert getattr(ours, name) == getattr(PARAMS, name), name


@pytest.mark.parametrize("name", saturated.SETUPS)
def test_the_counters_are_those_of_the_committed_rows(name: str, lengths: queue.Drawn) -> None:
    with open(ROOT / "figures" / "saturated_queue.replay.csv", encoding="utf-8") as file:
        row = next(row for row in csv.DictReader(file) if row["setup"] == name and row["seed"] == "0")
    one = made(settings_of(saturated.SETUPS[name], 0), lengths)
    assert (one["trace_hash"], one["drawn_by"]) == (row["trace_hash"], "NumPy")
    assert len(one["counters"]) == 11
    for counter, value in one["counters"].items():
        assert value == pytest.approx(float(row[counter]), rel=1e-11), counter


def test_all_of_its_setups_are_on_the_page() -> None:
    shown = {replace(one, seed=0) for one in first_runs()}
    assert {settings_of(setup, 0).relevant for setup in saturated.SETUPS.values()} - shown == {
        settings_of(saturated.SETUPS["paged (256, shared)"], 0)
    }


def test_fig_2_is_met_on_its_lengths(lengths: queue.Drawn) -> None:
    """Seed 0 alone, in steps, without time: within 5 points of what the paper prints."""
    preset = SHOWN["presets"]["Fig. 2: OPT-13B, ShareGPT"]
    for policy, printed in preset["printed"].items():
        counters = made(Settings(**preset["differs"], policy=policy).relevant, lengths)["counters"]
        assert abs(counters["token_states"] - printed["token_states"]) < 5


def test_what_is_printed_beside_them_is_what_is_printed() -> None:
    entries = {entry["id"]: entry for entry in claims.read(ROOT / "figures")}
    presets = {name: preset["printed"] for name, preset in SHOWN["presets"].items()}
    first = presets.pop("Fig. 2: OPT-13B, ShareGPT")
    keys = {"token_states": "token-states", "reserved": "reservation", "internal": "internal"}
    names = {"max": "orca-max", "pow2": "orca-pow2", "oracle": "orca-oracle", "paged": "vllm"}
    for policy, printed in first.items():
        assert float(printed["sequences"]) == entries["fig13-sharegpt"]["paper"][names[policy]]
        for piece, key in keys.items():
            assert piece not in printed or float(printed[piece]) == entries[f"fig2-{key}"]["paper"][names[policy]]
    found = {
        tuple(float(printed[key]) for key in ("sequences", "token_states") if key in printed)
        for preset in presets.values()
        for printed in preset.values()
    }
    assert found <= set(PRINTED.values())


def replayed(one: dict[str, Any]) -> list[dict[int, list[int]]]:
    """What each request holds after each step, from the changes alone: its blocks, or its chunk's start and length."""
    steps, held, place = [], {}, 0
    for step in range(len(one["sequences"])):
        while place < len(one["changes"]) and one["changes"][place][0] <= step:
            _, kind, request, *what = one["changes"][place]
            if kind == "admit":
                held[request] = what[1]
            elif kind == "append":
                held[request] = [*held[request], what[0], 1]
            else:
                del held[request]
            place += 1
        steps.append(dict(held))
    return steps


@pytest.mark.parametrize("policy", ["max", "pow2", "oracle", "paged"])
@pytest.mark.parametrize("chunks", ["explainer", "buddy", "exact"])
def test_no_slot_has_two_owners_and_all_that_is_held_is_counted(policy: str, chunks: str) -> None:
    one = made(replace(SHORT, policy=policy, chunks=chunks))
    for step, held in enumerate(replayed(one)):
        assert len(held) == one["sequences"][step]
        slots = [slot for table in held.values() for slot in expanded(table)]
        assert len(slots) == len(set(slots)), step
        if step % one["sample_every"] == 0:
            free = one["usage"][step // one["sample_every"]][one["pieces"].index("free")]
            size = one["settings"]["block_size"] if policy == "paged" else 1
            assert free == (SHORT.kv_slots // size - len(slots)) * size


def expanded(table: list[int]) -> list[int]:
    pairs = zip(table[::2], table[1::2])
    return [first + math.copysign(1, length) * i for first, length in pairs for i in range(abs(length))]


def test_runs_of_blocks_unfold_to_the_same_blocks() -> None:
    assert runs([7, 8, 9, 3, 2]) == [7, 3, 3, -2] and runs([5]) == [5, 1]
    rng = random.Random(0)
    for _ in range(200):
        table = [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
        assert expanded(runs(table)) == table


def test_a_shared_system_prompt_is_in_every_table() -> None:
    one = made(replace(SHORT, system_prompt=1000))
    assert len(one["prefix"]) == 1000 // 16
    counts = Counter(block for table in replayed(one)[-1].values() for block in expanded(table))
    assert {counts[block] for block in one["prefix"]} == {one["sequences"][-1]}


def test_sentences_say_what_was_decided() -> None:
    paged = made(TIGHT)
    said = " ".join(text for _, text in paged["sentences"])
    assert said.count("driven out") == len(paged["preempted"]) > 0
    assert "No block is free for the next token of request" in said and "must be computed again" in said
    oracle = made(replace(SHORT, policy="oracle"))
    assert "in one piece" in " ".join(text for _, text in oracle["sentences"])
    assert [step for step, _ in oracle["sentences"]] == sorted(step for step, _ in oracle["sentences"])


def test_requests_that_arrive_wait_for_their_moment() -> None:
    one = made(replace(SHORT, arrivals=5))
    assert one["sequences"][0] == 0 and max(one["sequences"]) <= 20 and min(one["waiting"]) == 0
    with pytest.raises(UserError, match="no request arrives"):
        made(replace(SHORT, arrivals=1, warmup_steps=0, steps=10, seed=3))


def test_a_seed_of_the_readers_own_is_drawn_by_pythons_generator() -> None:
    """The lengths themselves are stated here, so that another build of CPython is held to them."""
    one = made(replace(SHORT, seed=77))
    prompts = random.Random("77 prompts")
    assert one["drawn_by"] == "random.Random"
    assert [prompt for prompt, _ in one["lengths"][:3]] == [prompts.randint(1000, 7000) for _ in range(3)]


def test_lengths_of_sharegpt_are_drawn_again_for_another_seed(lengths: queue.Drawn) -> None:
    sharegpt = Settings(lengths="sharegpt", **SHAREGPT, kv_slots=15_728, max_model_len=2048, steps=50)
    assert made(sharegpt, lengths)["drawn_by"] == "NumPy"
    assert made(replace(sharegpt, seed=1), lengths)["drawn_by"] == "random.Random"
    with pytest.raises(UserError, match="none have been drawn here"):
        made(sharegpt)


# Rules of a reader


def yours(code: str, rule: str = "reservation") -> Settings:
    return replace(SHORT if rule == "reservation" else TIGHT, policy="yours", rule=rule, code=code)


def test_a_reservation_is_obeyed() -> None:
    exact = "def reserve(request, max_model_len):\n    return request.output_tokens\n"
    oracle = made(replace(SHORT, policy="oracle", chunks="exact"))
    assert made(replace(yours(exact), chunks="exact"))["counters"] == oracle["counters"]
    assert made(yours(HALF_AGAIN))["counters"]["internal"] > 0


def test_a_preemption_rule_that_is_the_papers_changes_nothing() -> None:
    ours, rule = replace(TIGHT, policy="yours", rule="preemption"), "def victim(running):\n    return running[{}]\n"
    usual = made(TIGHT)
    assert made(replace(ours, code=rule.format(-1)))["changes"] == usual["changes"]
    assert made(replace(ours, code=rule.format(0)))["changes"] != usual["changes"]


@pytest.mark.parametrize("rule", SHOWN["examples"])
def test_the_examples_run(rule: str) -> None:
    assert made(yours(SHOWN["examples"][rule], rule))["counters"]["tokens_per_step"] > 0


@pytest.mark.parametrize(
    ("code", "rule", "said"),
    [
        (
            "def reserve(r, m)\n    return 1",
            "reservation",
            "your rule raised SyntaxError: expected ':', line 1: `def reserve(r, m)`",
        ),
        ("1 / 0", "reservation", "your rule raised ZeroDivisionError: division by zero, line 1: `1 / 0`"),
        ("x = 1", "reservation", "your rule defines no function reserve; write `def reserve(request, max_model_len):`"),
        ("def reserve(r, m): return 'x'", "reservation", "returned 'x' (str), line 1: `def reserve(r, m): return 'x'`"),
        ("def reserve(r, m): return r.no", "reservation", "AttributeError: 'Request' object has no attribute 'no'"),
        ("def reserve(r, m): return 9 // abs(r.output_tokens - 256)", "reservation", "ZeroDivisionError"),
        ("def reserve(r, m): return 1", "reservation", "a reservation must cover the output"),
        ("def victim(running): return 3", "preemption", "the victim policy victim returned 3, line 1"),
        (
            "def victim(running): return running[99]",
            "preemption",
            "the victim policy victim raised IndexError: list index out of range",
        ),
    ],
)
def test_an_error_of_the_readers_code_is_one_line(code: str, rule: str, said: str) -> None:
    error = json.loads(answer(json.dumps(vars(yours(code, rule)) | {"spread": 0}), FirstFitAllocator, {}))["error"]
    assert said in error and "\n" not in error


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": "both"}, "unknown policy 'both'; known: max, oracle, paged, pow2, yours"),
        ({"block_size": 24}, "block_size = 24 is not supported; use a power of two"),
        ({"kv_slots": 0}, "kv_slots = 0 must be a whole number from 1 to 2,000,000"),
        ({"kv_slots": 1000}, "does not fit into an empty pool"),
        ({"shortest_prompt": 8000}, "none of them may be longer than the next"),
        ({"max_model_len": 4000}, "a request can have 7511 tokens, more than max_model_len = 4000"),
        ({"slots": 3}, "takes no 'slots'"),
    ],
)
def test_settings_that_cannot_be_are_one_line(changes: dict[str, Any], said: str) -> None:
    error = json.loads(answer(json.dumps(vars(SHORT) | changes), FirstFitAllocator, {}))["error"]
    assert said in error and "\n" not in error
