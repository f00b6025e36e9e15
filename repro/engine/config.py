"""Models, devices and the paper's three deployments (Table 1): arithmetic only, no behaviour.

Everything that follows from a configuration alone is computed here from the architecture, so that "exact" numbers have
one source. What a step costs in time is not known here."""

from __future__ import annotations

from dataclasses import dataclass

from repro.checks import Named, by_name, instance, user_facing, whole
from repro.errors import UserError

GIB = 2**30
GB = 10**9


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, as far as memory and arithmetic are concerned.

    `num_parameters` counts weights and embeddings; `bytes_per_value` is the storage of weights and K/V (2 for FP16)."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    max_model_len: int = 2048
    bytes_per_value: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token keeps in all layers (§3: 800 KB for OPT-13B)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.bytes_per_value

    @property
    def flops_per_token(self) -> int:
        """Forward FLOPs of one token outside attention: a multiplication and an addition per parameter."""
        return 2 * self.num_parameters


def _opt(name: str, num_layers: int, hidden: int, num_heads: int) -> ModelConfig:
    # Per layer: 4 h^2 attention and 8 h^2 feed-forward weights, 9 h biases, 4 h of two layer norms; then tied
    # embeddings (50,272 words, 2,050 positions) and the last layer norm.
    parameters = num_layers * (12 * hidden**2 + 13 * hidden) + (50_272 + 2_050) * hidden + 2 * hidden
    return ModelConfig(name, num_layers, hidden, num_heads, num_heads, hidden // num_heads, parameters)


def _llama(
    name: str, num_layers: int, hidden: int, num_heads: int, num_kv_heads: int, ffn: int, vocab: int, max_model_len: int
) -> ModelConfig:
    # Per layer: Q and O, K and V (narrower with grouped queries), three feed-forward matrices, two RMS norms; then
    # input and output embeddings (not tied) and the last norm.
    head_dim = hidden // num_heads
    layer = 2 * hidden**2 + 2 * hidden * num_kv_heads * head_dim + 3 * hidden * ffn + 2 * hidden
    parameters = num_layers * layer + 2 * vocab * hidden + hidden
    return ModelConfig(name, num_layers, hidden, num_heads, num_kv_heads, head_dim, parameters, max_model_len)


MODELS: dict[str, ModelConfig] = by_name(
    _opt("opt-125m", 12, 768, 12),
    _opt("opt-1.3b", 24, 2048, 32),
    _opt("opt-2.7b", 32, 2560, 32),
    _opt("opt-6.7b", 32, 4096, 32),
    _opt("opt-13b", 40, 5120, 40),
    _opt("opt-30b", 48, 7168, 56),
    _opt("opt-66b", 64, 9216, 72),
    _opt("opt-175b", 96, 12288, 96),
    _llama("llama-7b", 32, 4096, 32, 32, 11008, 32_000, 2048),
    _llama("llama-13b", 40, 5120, 40, 40, 13824, 32_000, 2048),
    _llama("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128_256, 131_072),
)


@dataclass(frozen=True)
class DeviceConfig:
    """One GPU by its vendor's datasheet: rates in bytes/s and FLOP/s (dense FP16/BF16)."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float  # between CPU and GPU, one direction


DEVICES: dict[str, DeviceConfig] = by_name(
    DeviceConfig("a100-40gb", 1.555e12, 312e12, 32e9),
    DeviceConfig("a100-80gb", 2.039e12, 312e12, 32e9),
    DeviceConfig("h100", 3.35e12, 989e12, 64e9),
    DeviceConfig("h200", 4.8e12, 989e12, 64e9),
)


@user_facing
@dataclass(frozen=True)
class Deployment:
    """A row of Table 1: a model on its GPUs and the K/V slots (tokens) that are left for requests."""

    model: ModelConfig
    device: DeviceConfig
    num_gpus: int
    kv_slots: int

    def __post_init__(self) -> None:
        instance("model", self.model, ModelConfig, "a ModelConfig")
        instance("device", self.device, DeviceConfig, "a DeviceConfig")
        whole("num_gpus", self.num_gpus, 1)
        whole("kv_slots", self.kv_slots, 1)

    def num_blocks(self, block_size: int) -> int:
        return self.kv_slots // block_size


def _deployment(model: str, device: str, num_gpus: int, gib: int) -> Deployment:
    """As many slots as so much memory for K/V holds."""
    slots = gib * GIB // MODELS[model].kv_bytes_per_token
    return Deployment(MODELS[model], DEVICES[device], num_gpus, slots)


# Table 1 contradicts itself: 66B's printed 21 GB hold 9,557 slots, but it prints 9.7K, which the runs use.
DEPLOYMENTS: dict[str, Deployment] = Named(
    "deployment",
    {
        "opt-13b": _deployment("opt-13b", "a100-40gb", 1, 12),
        "opt-66b": Deployment(MODELS["opt-66b"], DEVICES["a100-40gb"], 4, 9_700),
        "opt-175b": _deployment("opt-175b", "a100-80gb", 8, 264),
        "llama-13b": _deployment("llama-13b", "a100-40gb", 1, 12),
    },
)


def check_block_size(block_size: int) -> int:
    """The block size itself, if it is one of 1, 2, 4 ... 256 (the sizes of Fig. 18b); else a UserError."""
    if whole("block_size", block_size, 1, 256).bit_count() != 1:
        raise UserError(f"block_size = {block_size} is not supported; use a power of two, such as 16")
    return int(block_size)
