"""What a GPU's part of a model is made from: random weights, or the files of a checkpoint."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from repro.engine.config import MODELS
from repro.llm import acceptance, models, shards
from repro.llm.models import DTYPES, EMBEDDED, LoadedModel


@dataclass(frozen=True)
class Source:
    """Random weights by the names of modules (`seed`), or with `place` a checkpoint's folder or GGUF file."""

    name: str
    config: PretrainedConfig
    dtype: str
    seed: int = 0
    place: Path | None = None
    tokenizer: Any | None = None
    eos: frozenset[int] = frozenset()

    def empty(self, num_gpus: int) -> tuple[PreTrainedModel, dict[str, str]]:
        """The model without storage, and how it is split. UserError if it cannot be."""
        with models.building(self.name, models.what_to_use(hub=False)):
            model = shards.without_storage(copy.deepcopy(self.config), DTYPES[self.dtype], acceptance.PROBE)
            return model, shards.plan_of(model, self.name, num_gpus)

    def part(self, part: shards.Part, device: str) -> LoadedModel:
        """A rank's part, which computes what the model does once it has joined the others (`shards.join`)."""
        model, plan = self.empty(part.size)
        num_parameters, place = model.num_parameters(), torch.device(device)
        with models.building(self.name, models.what_to_use(hub=False)):
            shards.fill(model, plan, part, place, self._weights(model, place))
        return models.checked(model, self.tokenizer, self.name, self.eos, part.size, num_parameters)

    def _weights(self, model: PreTrainedModel, device: torch.device) -> Callable[[str, nn.Module], dict[str, Any]]:
        if self.place is None:
            return shards.drawn(model, self.name, self.seed, device)
        if self.place.is_dir() and (files := sorted(self.place.glob("*.safetensors"))):
            return shards.read(files, model.base_model_prefix)
        # Other files have no parts that could be read alone.
        place, options = models.reading(self.name, self.place)
        whole = AutoModelForCausalLM.from_pretrained(place, dtype=DTYPES[self.dtype], weights_only=True, **options)
        return lambda path, module: dict(whole.get_submodule(path).named_parameters(recurse=False))


def source_of(
    name: str | Path, device: str = "cpu", dtype: str | None = None, *, seed: int = 0, num_gpus: int = 1
) -> Source:
    """What `models.load` would load, if it is on this machine. UserError as there."""
    called, path, exists, dtype = models.asked_for(name, device, dtype)
    if called in MODELS and not exists:
        models.check_size(MODELS[called], device, dtype, num_gpus)
        return Source(called, models.architecture(MODELS[called]), dtype, seed)
    if called == EMBEDDED and not exists:
        place = models.embedded_file()
    else:
        place = Path(path if exists else models.by_hub_id(called, path, hub=False))
    where, options = models.reading(called, place)
    with models.building(called, models.what_to_use(hub=False)):
        config = AutoConfig.from_pretrained(where, **options)
        own = place.is_dir() and (place / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(where) if own else GenerationConfig.from_model_config(config)
        tokenizer, eos = models.words_of(place, generation)
    return Source(models.name_of(called, place), config, dtype, seed, place, tokenizer, eos)
