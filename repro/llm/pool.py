"""How large a K/V pool to make: given in blocks, slots or bytes, or as a share of the memory that is free.

A fixed size emulates another card: 12 GiB on any GPU is the pool that Table 1 leaves for OPT-13B on an A100."""

from dataclasses import dataclass

import torch

from repro.engine.config import GIB, ModelConfig
from repro.engine.errors import UserError

#: on a CPU, where no amount is set aside for the pool
DEFAULT_CPU_GIB = 0.5
DEFAULT_FREE_SHARE = 0.9


@dataclass(frozen=True)
class PoolSize:
    """At most one of the four; none means DEFAULT_FREE_SHARE of a GPU's free memory, or DEFAULT_CPU_GIB on a CPU."""

    num_blocks: int | None = None
    kv_slots: int | None = None
    kv_gib: float | None = None
    free_share: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) > 1:
            raise UserError(f"the K/V pool is sized twice ({', '.join(given)}); give one of {', '.join(vars(self))}")
        for name, value in given.items():
            if value <= 0 or (name == "free_share" and value > 1):
                raise UserError(
                    f"{name} = {value} must be positive" + (" and at most 1" if name == "free_share" else "")
                )

    def blocks(self, model: ModelConfig, block_size: int, device: torch.device) -> int:
        """Blocks of the pool. UserError if not even one fits."""
        block_bytes = block_size * model.kv_bytes_per_token
        if self.num_blocks is not None:
            count = self.num_blocks
        elif self.kv_slots is not None:
            count = self.kv_slots // block_size
        elif self.kv_gib is not None:
            count = int(self.kv_gib * GIB) // block_bytes
        elif device.type == "cpu":
            if self.free_share is not None:
                raise UserError("free_share is for GPUs; on a CPU give kv_gib, kv_slots or num_blocks")
            count = int(DEFAULT_CPU_GIB * GIB) // block_bytes
        else:
            free, _ = torch.cuda.mem_get_info(device)
            count = int(free * (self.free_share or DEFAULT_FREE_SHARE)) // block_bytes
        if count < 1:
            raise UserError(
                f"the K/V pool asked for holds no block: one of {block_size} tokens of {model.name} takes "
                f"{block_bytes:,} bytes; give it more memory or use a smaller model"
            )
        return count


def boot_line(model: ModelConfig, device: torch.device, dtype: torch.dtype, num_blocks: int, block_size: int) -> str:
    """What the pool comes to, in one line."""
    tokens = num_blocks * block_size
    return (
        f"{model.name} on {device} in {str(dtype).removeprefix('torch.')}: K/V pool of {tokens:,} tokens "
        f"({num_blocks:,} blocks of {block_size}, {tokens * model.kv_bytes_per_token / GIB:.2f} GiB), "
        f"{tokens / model.max_model_len:.1f} sequences of {model.max_model_len:,} tokens at once"
    )
