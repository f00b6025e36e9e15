"""The systems that the paper compares, and today's vLLM, as data: how K/V memory is managed, how requests are batched.

Caps and limits of the paper's are those of the authors' artifact of August 2023. What runs on a GPU of today has later
vLLM's cap of 256 sequences instead (`of_today`).

Adding one is adding an entry (`register`): everything else takes the name. docs/extending.md walks through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from repro import display
from repro.checks import Named, by_name, flag, instance, lookup, user_facing
from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.events import Event
from repro.engine.memory import ContiguousKVCacheManager, KVCacheManager, PagedKVCacheManager, Reservation
from repro.engine.memory.contiguous import check_reservation, reserve_max, reserve_oracle, reserve_pow2
from repro.engine.memory.paged import check_watermark
from repro.engine.memory.prefix_cache import Hashes, PrefixCachingKVCacheManager
from repro.engine.scheduler import Scheduler
from repro.engine.scheduler_config import Batching, SchedulerConfig
from repro.errors import UserError

_POLICY = "a function (request, max_model_len) -> output tokens"


@user_facing
@dataclass(frozen=True, repr=False)
class System:
    """`reservation` None means paged memory; otherwise a contiguous chunk of prompt + reservation per sequence.

    Paged memory can find prefixes by their hash (`prefix_caching`). `watermark` is the share of it that admission
    leaves free."""

    name: str
    label: str
    scheduler: SchedulerConfig
    reservation: Reservation | None = None
    prefix_caching: bool = False
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name in ("name", "label"):
            if not instance(f"{name} of a system", getattr(self, name), str, "a text"):
                raise UserError(f"the {name} of a system is empty; give it one")
        instance("scheduler", self.scheduler, SchedulerConfig, "a SchedulerConfig")
        if self.reservation is not None:
            check_reservation(instance("reservation", self.reservation, Callable, _POLICY))
            if self.prefix_caching:
                raise UserError(f"system {self.name!r}: prefix_caching needs paged memory; leave out the reservation")
        flag("prefix_caching", self.prefix_caching)
        check_watermark(self.watermark)

    @property
    def splits_samples(self) -> bool:
        """Whether a request of n samples runs as n requests (`repro.engine.chunked.samples_of`)."""
        return isinstance(self.scheduler, ChunkedPrefillConfig)

    def __repr__(self) -> str:
        """What makes it different from the others, in one line."""
        policy = getattr(self.reservation, "__name__", self.reservation)
        memory = "paged memory" if policy is None else f"contiguous memory reserved by {policy}"
        memory += " with a prefix cache" if self.prefix_caching else ""
        usual, ours = vars(type(self.scheduler)()), vars(self.scheduler)
        others = [
            f"{name} = {getattr(value, 'value', getattr(value, '__name__', value))}"
            for name, value in ours.items()
            if value != usual[name]
        ]
        how = ["chunked prefill"] if self.splits_samples else []
        return f"{self.label} ({self.name}): " + ", ".join([memory, *how, *others])

    def _repr_html_(self) -> str:
        own = {name: value for name, value in vars(self).items() if name not in ("name", "label", "scheduler")}
        return display.fields(repr(self), own | vars(self.scheduler))

    def manager(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        num_cpu_blocks: int = 0,
        hashes: Hashes = lambda request: (),
    ) -> KVCacheManager:
        """The memory of this system. `hashes` says what the blocks of prompts hold, where prefixes are found by it."""
        if self.reservation is not None:
            return ContiguousKVCacheManager(
                num_blocks, block_size, reservation=self.reservation, max_model_len=max_model_len
            )
        paged = num_blocks, block_size, self.watermark, num_cpu_blocks
        if self.prefix_caching:
            return PrefixCachingKVCacheManager(*paged, hashes=hashes)
        return PagedKVCacheManager(*paged)

    def decide(self, manager: KVCacheManager, log: list[Event] | None = None) -> Scheduler:
        """The scheduler of this system, over a memory."""
        kind = ChunkedPrefillScheduler if self.splits_samples else Scheduler
        return kind(manager, self.scheduler, log)

    def for_length(self, max_model_len: int) -> System:
        """The same system for a model that takes so many tokens, which a scheduler of today has to know."""
        return self.with_scheduler(max_model_len=max_model_len) if self.splits_samples else self

    @user_facing
    def with_scheduler(self, **changes: object) -> System:
        """The same system with some scheduler settings changed; UserError as SchedulerConfig."""
        return replace(self, scheduler=replace(self.scheduler, **changes))


#: Both schedulers of the artifact have these tests: running groups plus the newcomer's sequences, at most 2,048, and
#: 2,560 tokens an iteration.
_OF_2023 = SchedulerConfig(max_num_seqs=2048, groups_count_once=True, max_num_batched_tokens=2560)
#: The authors' FasterTransformer pads prompts to the longest and cuts a batch before the first request with which
#: longest prompt + longest output would exceed 2,040.
_STATIC = SchedulerConfig(batching=Batching.REQUEST, max_num_batched_tokens=None, max_padded_len=2040)

SYSTEMS: dict[str, System] = Named(
    "system",
    by_name(
        System("vllm", "vLLM", _OF_2023),
        System("orca-oracle", "Orca (Oracle)", _OF_2023, reserve_oracle),
        System("orca-pow2", "Orca (Pow2)", _OF_2023, reserve_pow2),
        System("orca-max", "Orca (Max)", _OF_2023, reserve_max),
        System("faster-transformer", "FasterTransformer", _STATIC, reserve_max),
        System("vllm-v1", "vLLM V1", ChunkedPrefillConfig(max_num_seqs=256), prefix_caching=True, watermark=0.0),
    ),
)
_OURS = tuple(SYSTEMS)
#: the systems that the paper compares
OF_THE_PAPER = tuple(name for name in SYSTEMS if name != "vllm-v1")


def system(name: str) -> System:
    return lookup("system", SYSTEMS, name)


def of_today(chosen: System) -> System:
    """The same system with later vLLM's cap in place of the artifact's: 256 sequences, each of which counts."""
    if not chosen.scheduler.groups_count_once:
        return chosen
    return chosen.with_scheduler(max_num_seqs=256, groups_count_once=False)


@user_facing
def register(new: System) -> System:
    """Make a system known by its name, so that experiments can be asked for it; registering it again replaces it.

    UserError for the name of one of the project's own systems."""
    if instance("system", new, System, "a System, such as contiguous_system makes").name in _OURS:
        raise UserError(f"{new.name!r} is one of the project's systems ({', '.join(_OURS)}); choose another name")
    SYSTEMS[new.name] = new
    return new


@user_facing
def contiguous_system(name: str, reservation: Reservation, label: str | None = None) -> System:
    """An Orca-style system with a reservation policy of your own: (request, max_model_len) -> output tokens."""
    instance("reservation", reservation, Callable, _POLICY)
    return System(name, name if label is None else label, _OF_2023, reservation)


@user_facing
def paged_system(name: str, label: str | None = None, **scheduler: object) -> System:
    """The paper's vLLM with settings of your own, such as `order`, `victim` or `preemption` (see SchedulerConfig)."""
    return System(name, name if label is None else label, _OF_2023).with_scheduler(**scheduler)
