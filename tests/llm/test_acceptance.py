"""Which models are let in: those that the engine computes as transformers does, and no others, in one sentence."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from architectures import EQUAL, by_definition, by_engine, spread, tiny_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from repro.engine.sequence import SamplingParams
from repro.errors import UserError
from repro.llm import LLM, models
from repro.llm.definition import generate
from repro.llm.pool import PoolSize

pytestmark = pytest.mark.usefixtures("one_thread")

COMMON = dict(vocab_size=211, bos_token_id=1, eos_token_id=None, pad_token_id=0)
SHAPE = dict(
    **COMMON,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    max_position_embeddings=128,
)
FULL = ["full_attention", "full_attention"]


@pytest.mark.parametrize("model_type", EQUAL)
def test_an_architecture_writes_what_transformers_writes_alone_and_beside_others(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    loaded = models.from_config(tiny_config(model_type), model_type)
    spread(loaded.model)
    expected = by_definition(loaded)
    assert by_engine(loaded) == [expected] * 3


def test_at_least_52_architectures_are_held_to_it():
    assert len(set(EQUAL)) == len(EQUAL) >= 52


def refused(name: str, **settings: object) -> tuple:
    """A case: the configuration of a model that must be refused, if this transformers has it."""
    found = getattr(transformers, f"{name}Config", None)
    return pytest.param(found and found(**(SHAPE | settings)), marks=() if found else pytest.mark.skip("not there"))


@pytest.mark.parametrize(
    "fact, config",
    [
        (fact, *case.values)
        for fact, case in [
            ("in 1 of its 2 layers", refused("Lfm2", layer_types=["conv", "full_attention"], block_ff_dim=96)),
            ("in 1 of its 2 layers", refused("Lfm2", layer_types=["full_attention", "conv"], block_ff_dim=96)),
            (
                "in 1 of its 2 layers",
                refused(
                    "MiniMax", layer_types=["linear_attention", "full_attention"], head_dim=16, num_local_experts=2
                ),
            ),
            ("depend on others", refused("FalconH1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16)),
            ("depend on others", refused("Bart", d_model=64, decoder_layers=2, decoder_attention_heads=4)),
            ("depend on others", refused("Roberta", is_decoder=True)),  # its positions do not begin at 0
            ("later tokens", refused("Bert")),
            ("later tokens", refused("Gemma3Text", head_dim=16, layer_types=FULL, use_bidirectional_attention=True)),
            ("mask of its own", refused("Doge", keep_window_size=8)),
            ("more than once", refused("DiffLlama")),
            ("window 127", refused("Mistral", sliding_window=127)),
            (
                "window 8",
                refused("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0, layer_types=None),
            ),
            (
                "all of 128 tokens",
                refused(
                    "Llama4Text",
                    head_dim=16,
                    intermediate_size_mlp=96,
                    num_local_experts=2,
                    moe_layers=[],
                    attention_chunk_size=64,
                    layer_types=["chunked_attention", "full_attention"],
                ),
            ),
            ("softcap", refused("Gemma2", head_dim=16, layer_types=FULL)),
            ("s_aux", refused("GptOss", head_dim=16, layer_types=FULL, num_local_experts=2)),
            ("latent attention|different shapes", refused("DeepseekV3", kv_lora_rank=16, num_key_value_heads=4)),
            (
                "more than a decoder of text",
                refused("Gemma3", text_config=SHAPE | {"layer_types": FULL, "head_dim": 16}),
            ),
            ("block tables", refused("Nemotron", head_dim=16)),
            ("attention interface", refused("Bloom", n_layer=2, n_head=4)),
            ("attention interface", refused("Mamba")),
            ("attention interface", refused("Falcon")),
            ("attention interface", refused("GPTNeo", num_layers=2, attention_types=[[["global"], 2]], num_heads=4)),
            ("cannot be loaded", refused("T5", num_layers=2)),
            ("head size 512", refused("Llama", head_dim=512)),
        ]
        if case.values[0] is not None
    ],
)
def test_a_model_that_the_engine_does_not_compute_is_refused_when_it_is_loaded(fact, config):
    with pytest.raises(UserError, match=f"(?s)^(?!.*\n).*{fact}"):
        models.from_config(config, "other")


def rotary(**scaling: object) -> transformers.PretrainedConfig:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.5 + place for place in range(8)]}
    parameters = {
        "rope_theta": 1e4,
        "factor": 4.0,
        **(factors if scaling["rope_type"] == "longrope" else {}),
        **scaling,
    }
    return transformers.LlamaConfig(**SHAPE, rope_parameters=parameters)


@pytest.mark.parametrize(
    "scaling, limit",
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 32}, 32),
        ({"rope_type": "longrope", "original_max_position_embeddings": 100}, 100),
        ({"rope_type": "dynamic"}, 128),  # it switches where it ends
        ({"rope_type": "linear"}, 128),
        ({"rope_type": "yarn", "original_max_position_embeddings": 32}, 128),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rotary_embedding_that_changes_with_the_longest_in_the_batch_bounds_the_length(scaling, limit, dtype):
    loaded = models.from_config(rotary(**scaling), "rotary", dtype=dtype)
    assert loaded.config.max_model_len == limit
    assert ("longest in the batch" in loaded.limit) is (limit < 128)
    if limit < 128:
        assert f"concurrency for {limit} tokens" in LLM(loaded, quiet=True).boot_line
        assert "of the 128 that it states" in LLM(loaded, quiet=True).boot_line
        with pytest.raises(UserError, match=f"from 1 to {limit} of the 128 that it states"):
            LLM(loaded, max_model_len=128, quiet=True)


def test_up_to_that_length_a_token_is_the_same_beside_any_other():
    loaded = models.from_config(rotary(rope_type="longrope", original_max_position_embeddings=32), "rotary")
    spread(loaded.model)
    prompts = [list(range(5, 27)), [9, 8, 7]]
    expected, _ = generate(loaded, prompts[:1], 10)
    greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    llm = LLM(loaded, pool=PoolSize(kv_slots=512), quiet=True)
    assert llm.generate(prompts, greedy, progress=False)[0].token_ids == expected


def test_a_window_that_no_sequence_outgrows_is_none():
    loaded = models.from_config(transformers.MistralConfig(**SHAPE, sliding_window=128), "windowed")
    spread(loaded.model)
    assert by_engine(loaded) == [by_definition(loaded)] * 3
