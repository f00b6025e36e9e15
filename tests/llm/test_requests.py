"""What `generate`, `chat` and `LLM` take: prompts and prefixes, and settings; what they refuse, and how they say so."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import letters, llm, tokens

from repro.errors import UserError
from repro.llm import LLM
from repro.llm.pool import PoolSize
from repro.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [5, 6, 7, 8, 9]


# Prompts and prefixes


@pytest.mark.parametrize(
    "prefix, prompt", [("hello ", "world"), ("hel", "lo world"), ("", ""), ("", "x"), ("hello b", "a")]
)
def test_prefix_and_prompt_are_one_text(spoken, prefix, prompt):
    """Also where the tokenizer joins the end of one and the beginning of the other."""
    engine, params = llm(spoken), SamplingParams(temperature=0, max_tokens=6)
    shared = engine.generate([prompt, "lo", "ab"], params, prefix=prefix, progress=False)
    plain = engine.generate([prefix + prompt, prefix + "lo", prefix + "ab"], params, progress=False)
    assert shared[0].prompt_token_ids == engine.tokenizer(prefix + prompt)["input_ids"]
    assert [one.token_ids for one in shared] == [one.token_ids for one in plain]


def test_a_prefix_of_text_goes_before_token_ids_and_the_other_way_round(spoken):
    engine, ids = llm(spoken), [40, 41, 42, 43, 44]
    assert engine.generate([ids], prefix="hello", progress=False)[0].prompt_token_ids == [
        *engine.tokenizer("hello")["input_ids"],
        *ids,
    ]
    found = engine.generate(["hello"], prefix=ids, progress=False)[0].prompt_token_ids
    assert found == ids + engine.tokenizer("hello", add_special_tokens=False)["input_ids"]


def test_arrays_and_tensors_are_token_ids(tiny):
    greedy = SamplingParams(temperature=0)
    expected = tokens(llm(tiny), [PROMPT] * 4, greedy)
    kinds = [np.array(PROMPT, np.uint8), torch.tensor(PROMPT), tuple(PROMPT), [np.int64(token) for token in PROMPT]]
    assert tokens(llm(tiny), kinds, greedy) == expected


def test_no_prompts_give_no_results(tiny):
    made = llm(tiny).generate([], progress=False)
    assert list(made) == [] and made.statistics.output_tokens == 0 and math.isnan(made.statistics.mean_batch)
    assert "prompt" in made._repr_html_()


BAD_PROMPTS = {
    "at least 1": [],
    "from 0 to 100, not 101": [101],
    "from 0 to 100, not -1": [1, -1],
    "not 1180591620717411303424": [2**70],
    "5.9 is no whole number": [5, 5.9],
    "True is no whole number": [True, 5],
    "'5' is no whole number": ["5"],
    r"\[5, 6\] is no whole number": [[5, 6]],
    "6.0 is no whole number": np.array([6.0, 7.0]),
    "exceed the 64": [1] * 60,
    "does not fit into an empty pool": [1] * 40,
    r"request 1 = None cannot": None,
    r"request 1 = \{'prompt'.* cannot": {"prompt": "x"},
    "no tokenizer": "text",
}


@pytest.mark.parametrize("message", BAD_PROMPTS)
def test_one_bad_prompt_is_refused_before_anything_runs_or_without_the_others(tiny, message):
    engine = llm(tiny, pool=PoolSize(num_blocks=12))
    prompts, params = [PROMPT, BAD_PROMPTS[message], [1, 2]], SamplingParams(temperature=0, max_tokens=10)
    with pytest.raises(UserError, match=f"{message}.*nothing has run"):
        engine.generate(prompts, params, progress=False)
    made = engine.generate(prompts, params, progress=False, errors="keep")
    assert [bool(one.error) for one in made] == [False, True, False]
    assert made[1].samples == [] and made[1].texts == [] and made[1].seed is None and "error" in repr(made[1])
    assert [one.token_ids for one in made][::2] == tokens(engine, prompts[::2], params)
    assert made.statistics.output_tokens == 20 and "request 1" in made._repr_html_()


@pytest.mark.parametrize(
    "message, arguments, options",
    [
        ("list of token ids; put", ([5, 6, 7],), {}),
        ("prompts = 5 cannot", (5,), {}),
        ("prompts = b'x' cannot", (b"x",), {}),
        ("prompts = {", ({"prompt": "x"},), {}),
        ("prompts = None cannot", (None,), {}),
        ("sampling = {'temperature': 0}", ([PROMPT], {"temperature": 0}), {}),
        ("one of sampling = None", ([PROMPT], [None]), {}),
        ("arrival_s = nan", ([PROMPT],), {"arrival_s": [math.nan]}),
        ("arrival_s = inf", ([PROMPT],), {"arrival_s": [math.inf]}),
        ("arrival_s = -1.0", ([PROMPT],), {"arrival_s": [-1.0]}),
        ("arrival_s = '0'", ([PROMPT],), {"arrival_s": ["0"]}),
        ("arrival_s = 0.5 cannot", ([PROMPT],), {"arrival_s": 0.5}),
        ("prefix = 5 cannot", ([PROMPT],), {"prefix": 5}),
        ("prefix = {}", ([PROMPT],), {"prefix": {}}),
        ("prefix: a token id of 1.5", ([PROMPT],), {"prefix": [1.5]}),
        ("prefix: its 64 tokens leave no room in the 64", ([],), {"prefix": [1] * 64}),
        ("seed = 1.5", ([PROMPT],), {"seed": 1.5}),
        ("progress = 'no'", ([PROMPT],), {"progress": "no"}),
        ("unknown way with errors 'ignore'; known: keep, raise", ([PROMPT],), {"errors": "ignore"}),
        ("observers = 5", ([PROMPT],), {"observers": 5}),
        ("generate takes no 'use_tqdm'", ([PROMPT],), {"use_tqdm": False}),
        ("missing a required argument: 'prompts'", (), {}),
        ("logprobs = 102, but there are 101", ([PROMPT], SamplingParams(logprobs=102)), {}),
        ("stop_token_ids must be from 0 to 100, not 101", ([PROMPT], SamplingParams(stop_token_ids=[101])), {}),
        ("stop texts need a tokenizer", ([PROMPT], SamplingParams(stop="x")), {}),
        ("every token is a stop token", ([PROMPT], SamplingParams(min_tokens=1, stop_token_ids=range(101))), {}),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(tiny, message, arguments, options):
    with pytest.raises(UserError, match=message.replace("(", r"\(")) as refused:
        llm(tiny).generate(*arguments, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("half", ["\ud800", "ab\udfff", "\udc80x"])
def test_half_a_character_is_refused(spoken, half):
    for prompts, options in (([half], {}), (["x"], {"prefix": half})):
        with pytest.raises(UserError, match="half of a character"):
            llm(spoken).generate(prompts, progress=False, **options)


def test_progress_can_be_turned_off(tiny, capfd):
    llm(tiny).generate([PROMPT], progress=False)
    assert capfd.readouterr() == ("", "")
    llm(tiny).generate([PROMPT])
    assert "1/1" in capfd.readouterr().err


# Chat

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}: {{ m.content }}]{% endfor %}{% if add_generation_prompt %}[assistant: {% endif %}"
)


def test_chat_fills_in_the_models_template(spoken):
    tokenizer = letters()
    tokenizer.chat_template = TEMPLATE
    engine, greedy = llm(dataclasses.replace(spoken, tokenizer=tokenizer)), SamplingParams(temperature=0, max_tokens=5)
    one = [{"role": "user", "content": "Hi"}]
    made = engine.chat(one, greedy, progress=False)
    assert made[0].prompt == "<s>[user: Hi][assistant: "
    assert made[0].prompt_token_ids == tokenizer("[user: Hi][assistant: ")["input_ids"]
    several = engine.chat([one, [{"role": "system", "content": "Be kind"}, *one]], greedy, progress=False)
    assert several[0].token_ids == made[0].token_ids and "Be kind" in several[1].prompt
    refusals = {
        "refuses the messages: no tools": [{"role": "tool", "content": "x"}],
        "content of a message = None": [{"role": "user"}],
        "role of a message = 5": [{"role": 5, "content": "x"}],
        "half of a character": [{"role": "user", "content": "\ud800"}],
        "messages = 'Hi' cannot": "Hi",
        "one of messages = 'Hi'": ["Hi"],
    }
    for message, messages in refusals.items():
        with pytest.raises(UserError, match=message):
            engine.chat(messages)
    with pytest.raises(UserError, match="takes no prefix"):
        engine.chat(one, prefix="x")
    with pytest.raises(UserError, match="has no chat template"):
        llm(spoken).chat(one)


# The constructor


@pytest.mark.parametrize(
    "message, options",
    [
        ("did you mean max_num_seqs", {"max_num_seq": 4}),
        ("did you mean block_size", {"blocksize": 4}),
        ("max_num_seqs = '4'", {"max_num_seqs": "4"}),
        ("max_num_seqs = 1.5", {"max_num_seqs": 1.5}),
        ("preemption = 'nonsense'", {"preemption": "nonsense"}),
        ("max_model_len = 64.0", {"max_model_len": 64.0}),
        ("block_size = 16.0", {"block_size": 16.0}),
        ("swap_gib = nan", {"swap_gib": math.nan}),
        ("swap_gib = -1", {"swap_gib": -1}),
        ("pool = 64 cannot", {"pool": 64}),
        ("quiet = 1", {"quiet": 1}),
        ("device = 'tpu'", {"device": "tpu"}),
        ("device = ''", {"device": ""}),
        ("device = 5", {"device": 5}),
        ("unknown dtype 'int8'", {"dtype": "int8"}),
        ("loaded in float32", {"dtype": "float16"}),
        ("unknown system None", {"system": None}),
        (r"unknown system \{\}", {"system": {}}),
    ],
)
def test_settings_of_an_engine_are_taken_or_refused(tiny, message, options):
    with pytest.raises(UserError, match=message):
        LLM(tiny, **{"quiet": True} | options)


@pytest.mark.parametrize("model", [None, 5, {}, ["smollm2"]])
def test_a_model_is_a_name_a_path_or_a_loaded_model(model):
    with pytest.raises(UserError, match="model = .* cannot be used; give a name"):
        LLM(model)


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 64.5},
        {"num_blocks": True},
        {"num_blocks": 0},
        {"kv_slots": "512"},
        {"kv_gib": math.nan},
        {"kv_gib": math.inf},
        {"kv_gib": 10**400},
        {"free_share": 1.1},
        {"gib": 4},
    ],
    ids=str,
)
def test_a_pool_of_no_size_is_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        PoolSize(**options)


def test_swapping_can_be_asked_for_in_words(tiny):
    params, prompts = SamplingParams(temperature=0, max_tokens=30), [[5 + index] * 8 for index in range(6)]
    made = llm(tiny, pool=PoolSize(num_blocks=24), preemption="swap").generate(prompts, params, progress=False)
    assert made.statistics.blocks_swapped_out > 0
