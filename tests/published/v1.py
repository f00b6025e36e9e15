"""The scheduler of vLLM V1 beside our chunked prefill: who gets how many tokens, who is driven out, block tables.

V1's scheduler is imported with its own block manager and requests. What it would need besides (models, devices,
configuration classes, connectors) is empty. Prefix caching is off: our chunked prefill has none of that kind. V1 treats
n samples as n requests, so all requests have one sequence.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fuzz import Ask, Case, _asks

from published.fetch import fetched, modules
from published.same import Memory
from published.sides import memory_of, moves, numbers
from published.trials import Decision, Outcome
from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.sequence import Request, SequenceGroup

VERSION = "0.33.0"
LEFT_OUT = [
    "cbor2",
    "cloudpickle",
    "msgspec",
    "pydantic",
    "regex",
    "torch",
    "uvloop",
    "vllm.compilation",
    "vllm.config",
    "vllm.distributed",
    "vllm.lora",
    "vllm.multimodal",
    "vllm.outputs",
    "vllm.platforms",
    "vllm.pooling_params",
    "vllm.sampling_params",
    "vllm.tokenizers",
    "vllm.usage",
    "vllm.utils.network_utils",
    "vllm.utils.system_utils",
    "vllm.utils.torch_utils",
    "vllm.v1.attention",
    "vllm.v1.metrics.perf",
    "vllm.v1.serial_utils",
    "vllm.v1.spec_decode",
    "vllm.v1.structured_output",
]
STOP = 0
#: longer than any request
LONGEST = 100


# Runs


def draw(seed: int) -> Case:
    """The run with this number: little memory, budgets that cut prompts. A budget above LONGEST cuts none."""
    rng = random.Random(f"v1 {seed}")
    budget = rng.choice((rng.randint(3, 12), rng.randint(3, 12), rng.randint(8, 60), rng.randint(LONGEST + 1, 150)))
    case = Case(
        (Ask(1, 1),),
        block_size=rng.choice((1, 2, 4, 8)),
        num_blocks=rng.choice((rng.randint(4, 12), rng.randint(8, 20), rng.randint(12, 60))),
        max_model_len=LONGEST,
        watermark=rng.choice((0.0, 0.0, 0.1, 0.3)),
        preemption="recompute",
        max_num_seqs=min(rng.choice((256, 4, 8)), budget),
        max_num_batched_tokens=budget,
        stop_rate=rng.choice((0.0, 0.0, 0.05)),
        seed=seed,
    )
    asks = [replace(ask, n=1, beam=False) for ask in _asks(case, rng)]
    for index, ask in enumerate(asks):
        if rng.random() < 0.4:  # a long prompt among others' long outputs
            asks[index] = replace(ask, prompt=max(ask.prompt, ask.output), output=min(ask.prompt, ask.output))
    return replace(case, asks=tuple(asks))


def cuts(case: Case) -> bool:
    return case.max_num_batched_tokens is not None and case.max_num_batched_tokens <= LONGEST


def config(case: Case) -> ChunkedPrefillConfig:
    return ChunkedPrefillConfig(
        max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=case.max_num_batched_tokens,
        max_model_len=LONGEST,
        enable_chunked_prefill=cuts(case),
    )


class OurChunked:
    """Our side."""

    def __init__(self, scheduler: ChunkedPrefillScheduler) -> None:
        self.scheduler = scheduler
        self._groups: dict[int, SequenceGroup] = {}

    def add(self, request: Request) -> None:
        self._groups[request.request_id] = self.scheduler.add(request)

    def schedule(self) -> Decision:
        self._output = output = self.scheduler.schedule()
        parts = [(prefill.group, prefill.num_tokens - prefill.num_cached) for prefill in output.chunks]
        ends = [(prefill.group, prefill.num_tokens - prefill.num_cached) for prefill in output.prefills]
        decoded = [(group, 1) for group in output.decodes]
        tokens = {group.request.request_id: count for group, count in parts + ends + decoded}
        return Decision(
            tokens=dict(sorted(tokens.items())),
            decodes=sorted(group.request.request_id for group, _ in ends + decoded),
            preempted=[(number, "recompute") for number in numbers(output.preempted)],
            running={number: [0] for number in sorted(numbers(self._running()))},
            waiting=numbers(self.scheduler.waiting),
            moves=moves(output.cache_ops),
        )

    def _running(self) -> list[SequenceGroup]:
        return [*self.scheduler.running, *self.scheduler.prefilling]

    def finish(self, outcomes: Mapping[int, Outcome]) -> list[int]:
        stopped = [self._groups[number] for number, outcome in outcomes.items() if outcome.stopped]
        return sorted(numbers(self.scheduler.update(self._output, stopped=[(g, g.seqs[0]) for g in stopped])))

    def memory(self) -> Memory:
        return memory_of(self.scheduler.manager, dict.fromkeys(self._running(), "gpu"))


# Theirs


class Published:
    """The modules of V1 that are compared."""

    def __init__(self, folder: Path) -> None:
        names = [
            "core.sched.scheduler",
            "core.single_type_kv_cache_manager",
            "kv_cache_interface",
            "outputs",
            "request",
        ]
        found = modules("vllm", folder, [f"vllm.v1.{name}" for name in names], LEFT_OUT)
        self.scheduler, managers, self.kv_cache_interface, self.outputs, self.request = found
        # It asks the device for more kinds of layers otherwise.
        managers.KVCacheSpecRegistry.register(managers.FullAttentionSpec, managers.FullAttentionManager)
        self.request.StructuredOutputRequest = SimpleNamespace(from_sampling_params=lambda parameters: None)
        logging.getLogger("vllm").setLevel(logging.ERROR)


def published() -> Published:
    return Published(fetched("vllm", VERSION, "3.12", "manylinux_2_28_x86_64"))


def _settings(case: Case, reserve: bool) -> SimpleNamespace:
    """What V1's scheduler reads of its configuration. All that is not named here is off."""
    names = SimpleNamespace
    return names(
        scheduler_config=names(
            policy="fcfs",
            max_num_seqs=case.max_num_seqs,
            max_num_active_seqs=None,
            max_num_batched_tokens=case.max_num_batched_tokens,
            max_num_scheduled_tokens=None,
            long_prefill_token_threshold=0,
            long_prefill_token_threshold_adaptive=False,
            enable_chunked_prefill=cuts(case),
            scheduler_reserve_full_isl=reserve,
            watermark=case.watermark,
            prefill_schedule_interval=1,
            async_scheduling=False,
            disable_chunked_mm_input=False,
        ),
        cache_config=names(
            block_size=case.block_size,
            num_gpu_blocks=case.num_blocks + 1,
            enable_prefix_caching=False,
            enable_mamba_shared_prefix_checkpoint=False,
            mamba_cache_mode="none",
        ),
        model_config=names(
            max_model_len=LONGEST,
            uses_mrope=False,
            is_encoder_decoder=False,
            is_diffusion=False,
            runner_type="generate",
            supports_multimodal_inputs=False,
            return_sampling_mask=False,
        ),
        parallel_config=names(
            data_parallel_index=0,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        observability_config=names(per_request_spec_decode_metrics="none", kv_cache_metrics=False),
        ec_manager_config=names(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=names(enabled=False),
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
        is_mm_encoder_only=False,
        max_concurrent_batches=1,
        max_in_flight_tokens=case.max_num_batched_tokens,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        num_hash_lookahead_tokens=0,
        use_v2_model_runner=False,
    )


class TheirV1:
    """V1's Scheduler with its KVCacheManager. `reserve` is its own setting of what whole_prompt_must_fit is here."""

    def __init__(self, modules: Published, case: Case, reserve: bool = True) -> None:
        self.modules = modules
        cache = modules.kv_cache_interface
        spec = cache.FullAttentionSpec(block_size=case.block_size, num_kv_heads=1, head_size=1, dtype=None)
        # It keeps block 0 for places that hold nothing, so it is given one more.
        blocks = cache.KVCacheConfig(case.num_blocks + 1, [], [cache.KVCacheGroupSpec(["layer"], spec)])
        grammars = SimpleNamespace(accept_tokens=lambda request, tokens: True)
        self.scheduler = modules.scheduler.Scheduler(_settings(case, reserve), blocks, grammars, case.block_size)
        self.manager = self.scheduler.kv_cache_manager
        self.manager.watermark_blocks = int(case.watermark * case.num_blocks)  # of the pool without that one
        self._tokens = itertools.count(STOP + 1)
        self._victims: list[int] = []
        preempt = self.scheduler._preempt_request

        def preempted(request: Any, *arguments: object, **named: object) -> None:
            self._victims.append(int(request.request_id))
            preempt(request, *arguments, **named)

        self.scheduler._preempt_request = preempted

    def add(self, request: Request) -> None:
        parameters = SimpleNamespace(
            max_tokens=request.output_tokens,
            min_tokens=0,
            eos_token_id=STOP,
            stop_token_ids=(),
            repetition_detection=None,
            extra_args=None,
            skip_reading_prefix_cache=None,
            num_logprobs=None,
            logprobs=None,
            prompt_logprobs=None,
        )
        prompt = [1] * request.prompt_tokens
        arrival = request.arrival_s + request.request_id / 1000
        self.scheduler.add_request(
            self.modules.request.Request(str(request.request_id), prompt, parameters, None, arrival_time=arrival)
        )

    def schedule(self) -> Decision:
        self._victims = []
        self._output = output = self.scheduler.schedule()
        tokens = {int(number): count for number, count in output.num_scheduled_tokens.items()}
        requests = {int(number): request for number, request in self.scheduler.requests.items()}
        return Decision(
            tokens=dict(sorted(tokens.items())),
            decodes=sorted(number for number in tokens if not requests[number].is_prefill_chunk),
            preempted=[(number, "recompute") for number in self._victims],
            running={number: [0] for number in sorted(int(one.request_id) for one in self.scheduler.running)},
            waiting=[int(one.request_id) for one in self.scheduler.waiting],
        )

    def finish(self, outcomes: Mapping[int, Outcome]) -> list[int]:
        ran = list(self._output.num_scheduled_tokens)
        sampled = []
        for number in map(int, ran):
            outcome = outcomes.get(number)
            token = STOP if outcome and outcome.stopped else next(self._tokens)
            sampled.append([] if outcome is None else [token])
        before = set(self.scheduler.requests)
        indices = {number: index for index, number in enumerate(ran)}
        self.scheduler.update_from_output(self._output, self.modules.outputs.ModelRunnerOutput(ran, indices, sampled))
        return sorted(int(number) for number in before - set(self.scheduler.requests))

    def memory(self) -> Memory:
        (kept,) = self.manager.coordinator.single_type_managers
        tables, references = {}, {}
        for request in self.scheduler.running:
            blocks = kept.req_to_blocks[request.request_id]
            tables[int(request.request_id), 0] = "gpu", [block.block_id for block in blocks]
            references |= {block.block_id: block.ref_cnt for block in blocks}
        free = self.manager.block_pool.get_num_free_blocks()
        return Memory(tables, {"gpu": references, "cpu": {}}, {"gpu": free, "cpu": 0})
