"""Every decoder architecture of the installed transformers, tiny, on this engine: right, or refused when it is loaded.

Each is built from its own default configuration with small sizes, and with weights large enough for every part of it to
matter. Right means: greedy tokens of two prompts, each alone and both in one batch, are those of transformers' own
generate. Run as a program (`make architectures`) it prints a line for each architecture and the counts, and fails if
one is neither. EQUAL are those that the suite holds to.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from typing import Any

from repro.setup.environment import prepare_environment

prepare_environment(os.environ)

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from repro.engine.sequence import SamplingParams
from repro.errors import UserError
from repro.llm import LLM, models
from repro.llm.pool import PoolSize

_EQUAL = (
    "afmoe apertus apertus1p5_text arcee aria_text beam biogpt bitnet codegen cohere cohere2 cohere2_moe ctrl cwm "
    "emu3 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo gemma gemma3_text glm glm4 glm4_moe gpt-sw3 "
    "gpt2 gpt_bigcode gpt_neox gptj granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe "
    "hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm2 llama llama4 llama4_text mellum "
    "minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama moshi nanochat olmo olmo2 olmo3 "
    "olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_moe seed_oss "
    "smollm3 solar_open starcoder2"
)
#: what the suite holds to, where the installed transformers has it
EQUAL = _EQUAL.split()

_SIZES = {
    2: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers depth num_key_value_heads "
    "num_experts_per_tok moe_k",
    4: "num_attention_heads n_head num_heads n_heads decoder_attention_heads encoder_attention_heads num_local_experts "
    "num_experts n_routed_experts moe_num_experts",
    8: "rotary_dim",
    16: "head_dim attention_head_dim",
    64: "hidden_size n_embd d_model dim embed_dim word_embed_proj_dim embedding_size emb_dim",
    96: "intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim d_ff ffn_hidden_size moe_intermediate_size "
    "shared_expert_intermediate_size shared_intermediate_size feed_forward_size intermediate_size_mlp",
    128: "max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length",
    211: "vocab_size vocab_size_per_layer_input n_words",
}
_SMALL: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()}
_TOKENS = {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": None}
_OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
LARGEST = 30_000_000  # parameters; what stays larger has sizes under names of its own
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [99, 98, 97, 96]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class NotBuilt(Exception):
    """No tiny model of the architecture can be had from its default configuration, or none that generates."""


def tiny_config(model_type: str) -> transformers.PretrainedConfig:
    """The default configuration of an architecture with small sizes, also in its parts."""

    def small(config: transformers.PretrainedConfig) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in config.to_dict().items():
            if isinstance(value, dict) and "model_type" in value and getattr(config, name, None) is not None:
                values[name] = small(getattr(config, name))
            elif name in _TOKENS:
                values[name] = _TOKENS[name]
            elif name in _SMALL and (value is not None or name == "head_dim"):
                values[name] = _SMALL[name]
        return values

    try:
        config_class = CONFIG_MAPPING[model_type]
        config = config_class(**(small(config_class()) | _OWN.get(model_type, {})))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}") from None
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > LARGEST:
        raise NotBuilt(f"it has {count:,} parameters with small sizes")
    return config


def spread(model: torch.nn.Module) -> None:
    """Weights large enough for every part of a model to matter, the same in every run."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * (1.3 / parameter.shape[-1] ** 0.5))


def by_definition(loaded: models.LoadedModel) -> list[list[int]]:
    """The tokens of transformers' own generate, one prompt at a time."""
    config = type(loaded.model.config).from_dict(loaded.model.config.to_dict())
    model = type(loaded.model)._from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(loaded.model.state_dict())
    options = dict(max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS]


def by_engine(loaded: models.LoadedModel) -> list[list[list[int]]]:
    """The engine's tokens: each prompt alone, both together, and both the other way round."""
    llm = LLM(loaded, block_size=4, pool=PoolSize(num_blocks=100), quiet=True)

    def tokens(prompts: list[list[int]]) -> list[list[int]]:
        return [one.token_ids[0] for one in llm.generate(prompts, GREEDY, progress=False)]

    alone = [tokens([prompt])[0] for prompt in PROMPTS]
    return [alone, tokens(PROMPTS), tokens(PROMPTS[::-1])[::-1]]


def outcome(model_type: str) -> tuple[str, str]:
    """What becomes of an architecture: "equal", "refused", "not built", or a fault; and why."""
    try:
        config = tiny_config(model_type)
    except NotBuilt as reason:
        return "not built", str(reason)
    try:
        loaded = models.from_config(config, model_type)
    except UserError as refusal:
        return ("refused" if "\n" not in str(refusal) else "REFUSED IN MORE THAN A LINE"), str(refusal)
    except Exception as error:
        return "ERROR AT LOAD", repr(error)
    spread(loaded.model)
    try:
        found = by_engine(loaded)
    except Exception as error:
        return "ERROR AFTER LOAD", repr(error)
    try:
        expected = by_definition(loaded)
    except Exception as error:
        return "not built", f"transformers' own generate: {error!r}"
    return ("equal" if all(one == expected for one in found) else "WRONG"), f"{expected} {found}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="only these architectures")
    names = parser.parse_args().only or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for name in names:
        kind, why = outcome(name)
        counts[kind] += 1
        print(f"{name:<28} {kind:<10} {'' if kind == 'equal' else why}", flush=True)
    print(f"transformers {transformers.__version__}:", ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(any(kind.isupper() for kind in counts))


if __name__ == "__main__":
    sys.exit(main())
