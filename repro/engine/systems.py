"""The systems that the paper compares, as data: how K/V memory is managed and how requests are batched.

Caps and limits are those of the authors' artifact of August 2023. What runs on a GPU of today has later vLLM's cap of
256 sequences instead (`of_today`).

Adding one is adding an entry (`register`): everything else takes the name. docs/extending.md walks through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from repro.checks import Named, by_name, instance, lookup, user_facing
from repro.engine.memory import ContiguousKVCacheManager, KVCacheManager, PagedKVCacheManager, Reservation
from repro.engine.memory.contiguous import check_reservation, reserve_max, reserve_oracle, reserve_pow2
from repro.engine.scheduler import Batching, SchedulerConfig
from repro.errors import UserError

_POLICY = "a function (request, max_model_len) -> output tokens"


@user_facing
@dataclass(frozen=True, repr=False)
class System:
    """`reservation` None means paged memory; otherwise a contiguous chunk of prompt + reservation per sequence."""

    name: str
    label: str
    scheduler: SchedulerConfig
    reservation: Reservation | None = None

    def __post_init__(self) -> None:
        for name in ("name", "label"):
            if not instance(f"{name} of a system", getattr(self, name), str, "a text"):
                raise UserError(f"the {name} of a system is empty; give it one")
        instance("scheduler", self.scheduler, SchedulerConfig, "a SchedulerConfig")
        if self.reservation is not None:
            check_reservation(instance("reservation", self.reservation, Callable, _POLICY))

    def __repr__(self) -> str:
        """What makes it different from the others, in one line."""
        policy = getattr(self.reservation, "__name__", self.reservation)
        memory = "paged memory" if policy is None else f"contiguous memory reserved by {policy}"
        usual, ours = vars(SchedulerConfig()), vars(self.scheduler)
        others = [f"{name} = {getattr(ours[name], 'value', ours[name])}" for name in ours if ours[name] != usual[name]]
        return f"{self.label} ({self.name}): " + ", ".join([memory, *others])

    def manager(self, num_blocks: int, block_size: int, max_model_len: int, num_cpu_blocks: int = 0) -> KVCacheManager:
        if self.reservation is None:
            return PagedKVCacheManager(num_blocks, block_size, num_cpu_blocks=num_cpu_blocks)
        return ContiguousKVCacheManager(
            num_blocks, block_size, reservation=self.reservation, max_model_len=max_model_len
        )

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
    ),
)
_PAPERS_OWN = tuple(SYSTEMS)


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

    UserError for the name of one of the paper's systems."""
    if instance("system", new, System, "a System, such as contiguous_system makes").name in _PAPERS_OWN:
        raise UserError(f"{new.name!r} is one of the paper's systems ({', '.join(_PAPERS_OWN)}); choose another name")
    SYSTEMS[new.name] = new
    return new


@user_facing
def contiguous_system(name: str, reservation: Reservation, label: str | None = None) -> System:
    """An Orca-style system with a reservation policy of your own: (request, max_model_len) -> output tokens."""
    instance("reservation", reservation, Callable, _POLICY)
    return System(name, name if label is None else label, _OF_2023, reservation)
