"""What `generate` means: seeds, where an output ends, penalties and log-probabilities."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny import TINY, llm, tokens

from repro.llm.pool import PoolSize
from repro.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def untouched(tiny):
    """The same weights in transformers' own model."""
    model = transformers.AutoModelForCausalLM.from_config(TINY, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(tiny.model.state_dict())
    return model.eval()


def logits(model, ids: list[int]) -> np.ndarray:
    """Of every token, float64 [tokens, vocabulary], from the whole text at once."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().numpy()


def log_softmax(row: np.ndarray) -> np.ndarray:
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


# Seeds


def test_a_seed_of_any_size_depends_on_no_other_request(tiny):
    engine = llm(tiny)
    for seed, mate in ((2**63 + 1, 2), (2**62 + 1, 2**63), (-1, 5), (10**30, -(10**30))):
        alone = tokens(engine, [PROMPT], SamplingParams(seed=seed, max_tokens=8))
        both = [SamplingParams(seed=one, max_tokens=8) for one in (seed, mate)]
        assert tokens(engine, [PROMPT] * 2, both)[0] == alone[0]
    assert tokens(engine, [PROMPT], SamplingParams(seed=-1)) == tokens(engine, [PROMPT], SamplingParams(seed=2**64 - 1))


def test_calls_without_a_seed_differ_and_report_what_gives_them_again(tiny):
    engine, params = llm(tiny), SamplingParams(n=2, max_tokens=8)
    first, second = (engine.generate([PROMPT] * 3, params, progress=False) for _ in range(2))
    outputs = [one.token_ids for made in (first, second) for one in made]
    assert len({str(one) for one in outputs}) == 6
    assert tokens(engine, [PROMPT] * 3, params, seed=first.seed) == outputs[:3]
    again = [dataclasses.replace(params, seed=one.seed) for one in first]
    assert tokens(engine, [PROMPT] * 2, again[1:]) == outputs[1:3]
    assert tokens(engine, [PROMPT], dataclasses.replace(params, seed=1))[0] not in outputs


def test_a_filter_on_one_request_changes_no_other(tiny):
    engine, plain = llm(tiny), [SamplingParams(seed=index, max_tokens=12) for index in range(6)]
    alone = tokens(engine, [PROMPT] * 6, plain)
    others = [
        SamplingParams(top_k=1),
        SamplingParams(top_p=5e-324),
        SamplingParams(temperature=5e-324),
        SamplingParams(temperature=1e308, repetition_penalty=3),
        SamplingParams(logprobs=3, prompt_logprobs=2),
    ]
    assert tokens(engine, [PROMPT] * 11, plain + others)[:6] == alone


def test_the_smallest_temperature_and_top_p_are_greedy_and_the_largest_is_even(tiny):
    engine = llm(tiny)
    greedy = tokens(engine, [PROMPT], SamplingParams(temperature=0, max_tokens=12))
    for setting in ({"temperature": 5e-324}, {"temperature": 1e-30}, {"top_p": 5e-324}, {"top_k": 1}):
        assert tokens(engine, [PROMPT], SamplingParams(max_tokens=12, **setting)) == greedy
    hot = tokens(engine, [PROMPT], SamplingParams(temperature=1.7e308, n=40, max_tokens=10, seed=0))
    assert len({token for sample in hot[0] for token in sample}) > 90


# Where an output ends


def test_a_stop_token_at_the_limit_is_a_stop(tiny):
    first = tokens(llm(tiny), [PROMPT], SamplingParams(temperature=0, max_tokens=12))[0][0]
    place = next(place for place in range(2, 12) if first[place] not in first[:place])
    engines = llm(dataclasses.replace(tiny, eos=frozenset([first[place]]))), llm(tiny)
    for engine, more in zip(engines, ({}, {"stop_token_ids": [first[place]], "ignore_eos": True})):
        for limit in (place + 1, place + 2):
            params = SamplingParams(temperature=0, max_tokens=limit, **more)
            [sample] = engine.generate([PROMPT], params, progress=False)[0].samples
            assert (sample.token_ids, sample.finish_reason) == (first[: place + 1], "stop")
            assert sample.stop_reason == first[place]
        [cut] = engine.generate([PROMPT], dataclasses.replace(params, max_tokens=place), progress=False)[0].samples
        assert (cut.finish_reason, cut.stop_reason) == ("length", None)


def test_a_stop_text_ends_an_output_before_it(spoken):
    engine = llm(spoken)
    params = SamplingParams(temperature=0, max_tokens=20)
    text = engine.generate("hello", params, progress=False)[0].texts[0]
    assert len(text) >= 12
    for stop in (text[3:6], [text[8:10], text[4:7], "never in it!"]):
        ends = {one: text.find(one) + len(one) for one in ([stop] if isinstance(stop, str) else stop) if one in text}
        found = min(ends, key=ends.get)
        [sample] = engine.generate("hello", dataclasses.replace(params, stop=stop), progress=False)[0].samples
        assert (sample.text, sample.finish_reason, sample.stop_reason) == (text[: text.find(found)], "stop", found)
    late = dataclasses.replace(params, stop=text[0], min_tokens=4)
    [sample] = engine.generate("hello", late, progress=False)[0].samples
    expected = text.find(text[0], 3)
    assert sample.text == (text if expected < 0 else text[:expected])


# Penalties and log-probabilities


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7, "presence_penalty": 0.5},
        {"frequency_penalty": 1.2},
        {"presence_penalty": -1.5, "frequency_penalty": 0.3},
        {"min_tokens": 8, "stop_token_ids": range(0, 101, 3)},
    ],
    ids=str,
)
def test_penalties_are_their_definitions_also_among_others_and_after_preemption(tiny, untouched, setting):
    params = SamplingParams(temperature=0, max_tokens=14, **setting)
    prompts = [PROMPT, [1, 2, 1], [50] * 9]
    expected = []
    for prompt in prompts:
        made: list[int] = []
        while len(made) < 14 and not (len(made) >= params.min_tokens and made and made[-1] in params.stop_token_ids):
            row = logits(untouched, prompt + made)[-1]
            for token in {*prompt, *made}:
                row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
            for token in set(made):
                row[token] -= params.presence_penalty + params.frequency_penalty * made.count(token)
            if len(made) < params.min_tokens:
                row[list(params.stop_token_ids)] = -np.inf
            made.append(int(row.argmax()))
        expected.append([made])
    plain = SamplingParams(temperature=0, max_tokens=14)
    assert expected != tokens(llm(tiny), prompts, plain)
    mixed = [params, plain, params, SamplingParams(seed=3), params, SamplingParams(n=2, use_beam_search=True)]
    order = [prompts[0], PROMPT, prompts[1], PROMPT, prompts[2], PROMPT]
    for mode in ("swap", "recompute"):
        engine = llm(tiny, pool=PoolSize(num_blocks=18), preemption=mode)
        made = engine.generate(order, mixed, progress=False)
        assert [one.token_ids for one in made][::2] == expected and made.statistics.num_preemptions > 0


def test_repetition_penalty_is_that_of_transformers(tiny, untouched):
    ids = torch.tensor([PROMPT])
    made = untouched.generate(ids, do_sample=False, max_new_tokens=16, repetition_penalty=1.3, pad_token_id=1)
    params = SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.3)
    assert tokens(llm(tiny), [PROMPT], params)[0] == [made[0, len(PROMPT) :].tolist()]


@pytest.mark.parametrize(
    "setting", [{"temperature": 0}, {"n": 2, "seed": 4}, {"n": 3, "use_beam_search": True}], ids=str
)
def test_log_probabilities_are_the_models(tiny, untouched, setting):
    params = SamplingParams(max_tokens=6, logprobs=4, prompt_logprobs=2, **setting)
    prefix = list(range(30, 39))
    for options, prompt in (({}, PROMPT), ({"prefix": prefix}, prefix + PROMPT)):
        made = llm(tiny).generate([PROMPT, [3] * 4], [params, SamplingParams(seed=1)], progress=False, **options)
        result = made[0]
        assert result.prompt_token_ids == prompt and result.prompt_logprobs[0] is None
        assert made[1].prompt_logprobs is None and made[1].samples[0].best_logprobs is None
        rows = [log_softmax(row) for row in logits(untouched, prompt)]
        for row, token, found in zip(rows, prompt[1:], result.prompt_logprobs[1:], strict=False):
            assert set(found) == {*np.argsort(-row)[:2].tolist(), token}
            assert [found[one] for one in found] == pytest.approx([row[one] for one in found], abs=1e-4)
        assert len(result.prompt_logprobs) == len(prompt)
        for sample in result.samples:
            rows = [log_softmax(row) for row in logits(untouched, prompt + sample.token_ids)][len(prompt) - 1 :]
            assert len(sample.best_logprobs) == len(sample.token_ids) == 6
            for row, token, value, found in zip(rows, sample.token_ids, sample.logprobs, sample.best_logprobs):
                assert list(found)[:4] == np.argsort(-row)[:4].tolist() and set(found) == {*list(found)[:4], token}
                assert found[token] == value == pytest.approx(row[token], abs=1e-4)


def test_a_long_prompt_has_its_log_probabilities_in_pieces(tiny, untouched, monkeypatch):
    monkeypatch.setattr("repro.llm.executor.PROMPT_PIECE", 7)
    prompt = np.random.default_rng(0).integers(0, 101, 30).tolist()
    engine = llm(tiny)
    params = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=0)
    result = engine.generate([prompt], params, progress=False)[0]
    rows = logits(untouched, prompt)
    expected = [log_softmax(row)[token] for row, token in zip(rows, prompt[1:])]
    assert [one[token] for one, token in zip(result.prompt_logprobs[1:], prompt[1:])] == pytest.approx(
        expected, abs=1e-4
    )
    assert result.token_ids == tokens(engine, [prompt], SamplingParams(temperature=0, max_tokens=5))[0]
