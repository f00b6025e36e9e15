"""How large a K/V pool to make: given in blocks, slots or bytes, or as a share of the memory that is free.

A fixed size emulates another card: 12 GiB on any GPU is the pool that Table 1 leaves for OPT-13B on an A100."""

import bisect
from dataclasses import dataclass

import torch

from repro.checks import number, user_facing, whole
from repro.engine.config import GIB, ModelConfig
from repro.engine.memory import KVCacheManager
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.errors import UserError
from repro.llm.models import LoadedModel
from repro.llm.pace import Pace

#: on a CPU, where no amount is set aside for the pool
DEFAULT_CPU_GIB = 0.5
DEFAULT_FREE_SHARE = 0.9
MOST_GIB = 2**20  # a size beyond this is a slip of the keyboard


@user_facing
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
            if name in ("num_blocks", "kv_slots"):
                whole(name, value, 1, 2**48)
            else:
                number(name, value, 0, MOST_GIB if name == "kv_gib" else 1, above=True)

    def blocks(self, model: ModelConfig, block_size: int, device: torch.device, num_gpus: int = 1) -> int:
        """Blocks of the pool, each of which lies on all GPUs. UserError if not even one fits.

        Sizes are those of the whole pool; the free memory is that of the first GPU, and as much of each other one."""
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
            count = int(num_gpus * free * (self.free_share or DEFAULT_FREE_SHARE)) // block_bytes
        if count < 1:
            raise UserError(
                f"the K/V pool asked for holds no block: one of {block_size} tokens of {model.name} takes "
                f"{block_bytes:,} bytes; give it more memory or use a smaller model"
            )
        return count


def longest_request(manager: KVCacheManager, cap: int | None, max_model_len: int) -> tuple[int, int]:
    """Tokens that one request may have in an empty pool: of prompt and output together, and of its prompt.

    `cap` is the scheduler's longest prompt."""

    def prompt(tokens: int) -> int:
        return min(tokens - 1, cap or max_model_len)

    def is_too_long(tokens: int) -> bool:
        request = Request(0, 0.0, prompt(tokens), tokens - prompt(tokens), SamplingParams())
        return not manager.fits(SequenceGroup(request))

    tokens = bisect.bisect_left(range(2, max_model_len + 1), True, key=is_too_long) + 1
    return tokens, prompt(tokens)


def boot_line(loaded: LoadedModel, manager: KVCacheManager, cap: int | None, pace: Pace | None) -> str:
    """What the pool comes to, what one request may have of it, and on a CPU the pace, in one line."""
    model, tokens = loaded.config, manager.num_blocks * manager.block_size
    longest, prompt = longest_request(manager, cap, model.max_model_len)
    place = loaded.device if loaded.num_gpus == 1 else f"{loaded.num_gpus} x {loaded.device.type}"
    line = (
        f"{model.name} on {place} in {str(loaded.dtype).removeprefix('torch.')}, KV cache size: {tokens:,} "
        f"tokens ({manager.num_blocks:,} blocks of {manager.block_size}, "
        f"{tokens * model.kv_bytes_per_token / GIB:.2f} GiB), "
    )
    if longest < 2:
        return line + "which is too small for any request"
    line += f"maximum concurrency for {longest:,} tokens per request: {tokens / longest:.2f}x"
    if prompt < longest - 1:
        line += f", prompts of up to {prompt:,} (max_num_batched_tokens)"
    if longest == model.max_model_len and loaded.limit:
        line += f" ({loaded.limit})"
    return line if pace is None else f"{line}; {pace}"
