"""Runs SchedulerOutput for real: moves blocks, runs the model, chooses tokens, and says who stopped.

On a GPU, when nothing in a batch depends on its tokens (no stop tokens, no beams), a step is only queued and the one
before it is waited for, so that the host prepares a step while the GPU runs another; scheduling is the same either way.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repro.engine.executor import Executor, ParentChoices, StepResult
from repro.engine.memory import KVCacheManager
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.errors import UserError
from repro.llm.attention import attach
from repro.llm.batch import Batch, BatchBuilder, Chunks, GroupRows
from repro.llm.beams import BeamStep, advance_beams, extend_beams, is_over
from repro.llm.kv_store import KVStore
from repro.llm.models import LoadedModel
from repro.llm.parallel import runner_for
from repro.llm.requests import check_request, token_ids_of, vocabulary_of
from repro.llm.sampler import SamplingPlan, best_logprobs, logprobs, sample
from repro.llm.state import Best, RequestState, SequenceState
from repro.llm.transfer import download, upload

#: prompt tokens whose logits are looked at together
PROMPT_PIECE = 256


@dataclass(slots=True)
class _Step:
    """An iteration that is queued on the device: its tokens and log-probabilities on their way to the host.

    `best` are the best log-probabilities of each row and their tokens, where some request asks for them."""

    batch: Batch
    tokens: Tensor
    logprobs: Tensor | None
    best: tuple[Tensor, Tensor] | None
    beams: list[tuple[GroupRows, BeamStep]]
    done: torch.cuda.Event | None


def within_memory(work: Callable[[], Any], doing: str) -> Any:
    """`work()`; UserError if the GPU's memory does not suffice."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
    # Raised out here, or the error would hold on to all that the failed step has allocated.
    raise UserError(f"out of GPU memory {doing}: use a smaller K/V pool or a lower max_num_batched_tokens ({reason})")


class TorchExecutor(Executor):
    """One model, one pool, one memory manager. Give each request its prompt with `submit` before the engine sees it.

    Results appear in `finished` by request id; `flush` first, so that the last step's are there. `with_logprobs` also
    keeps each token's log-probability under the model. `on_token` is called with each sequence that has got a token, as
    soon as the host knows it; beams have theirs at the end only."""

    on_token: Callable[[SequenceState], None] | None = None

    def __init__(
        self,
        loaded: LoadedModel,
        manager: KVCacheManager,
        store: KVStore,
        *,
        max_num_seqs: int = 256,
        with_logprobs: bool = True,
        graphs: bool = True,
        compiled: bool = False,
    ) -> None:
        self.loaded, self.store = loaded, store
        self.with_logprobs = with_logprobs
        self.queues_ahead = loaded.device.type == "cuda"
        self._max_num_seqs = max_num_seqs
        width = manager.cdiv(loaded.config.max_model_len)
        self.runner = runner_for(store, loaded, manager.block_size, max_num_seqs, width, graphs, compiled)
        self.reset(manager)

    def reset(self, manager: KVCacheManager, beams: ParentChoices | None = None) -> None:
        """Begin anew with another manager of the same pool; whatever was running is given up.

        With `beams`, beams continue where it says and not where the model would: with random weights, all is computed
        as always and as much is shared as by the model that was recorded (see repro.simulate.beams). The model is given
        this executor's pool: several executors may share a model, but only the one begun last runs (another one's next
        iteration is a UserError)."""
        self._run = self.loaded.turns.begin()
        attach(self.loaded.model, self.store.caches)
        self.manager, self._replayed_beams = manager, beams
        self.builder = BatchBuilder(manager, self._max_num_seqs, manager.cdiv(self.loaded.config.max_model_len))
        self.finished: dict[int, RequestState] = {}
        self._states: dict[int, RequestState] = {}
        self._prefixes: dict[str, np.ndarray] = {}
        self.on_settled: Callable[[Batch], None] | None = None  # told of a step when the host knows its tokens
        self.waited_s = 0.0  # for the device; what else a step takes is the host's own time
        self._plan: SamplingPlan | None = None
        self._queued: list[_Step] = []

    # Requests

    def submit(
        self, request: Request, token_ids: Items[int] | np.ndarray, sample: int = 0, name: str | None = None
    ) -> None:
        """The prompt of a request, which counts its outputs' tokens from then on; its samples are numbered from
        `sample`. Messages call it `name`.

        UserError if it cannot be run: too long, unknown tokens, not its declared prefix, settings beyond the model."""
        name = name or f"request {request.request_id}"
        prompt = token_ids_of(token_ids, name, vocabulary_of(self.loaded))
        stops = check_request(self.loaded, request, prompt, name)
        prefix = self._prefixes.get(request.prefix_id, prompt[:0])
        if not np.array_equal(prompt[: len(prefix)], prefix):
            raise UserError(f"{name}: its prompt does not begin with the stored prefix {request.prefix_id!r} it names")
        self._states[request.request_id] = RequestState(request, prompt, stops, first_sample=sample)

    def block_hashes(self, request: Request) -> list[bytes]:
        """What the blocks of a submitted request hold, for a memory manager that finds them by that."""
        return self._states[request.request_id].block_hashes(self.manager.block_size)

    def forget(self, request_id: int) -> None:
        """The request was taken back, or its result was fetched."""
        self._states.pop(request_id, None)
        self.finished.pop(request_id, None)

    def store_prefix(self, prefix_id: str, token_ids: Items[int] | np.ndarray) -> int:
        """Compute and keep a shared prefix (§4.4). Returns the tokens that are shared: whole blocks."""
        count = self.manager.store_prefix(prefix_id, len(token_ids))
        prefix = self._prefixes[prefix_id] = np.asarray(token_ids, np.int64)[:count]
        if count:
            table = np.array(self.manager.prefix_blocks(prefix_id), np.int32)
            positions, size = np.arange(count), self.manager.block_size
            slots = table[positions // size].astype(np.int64) * size + positions % size
            first, ends = np.array([0]), np.array([0, count], np.int32)
            chunks = Chunks(first, ends[1:], ends, prefix, positions, slots, first)
            nobody = RequestState(Request(-1, 0.0, count, 1, SamplingParams(temperature=0)), prefix).sequences
            empty = np.zeros(0, np.int32)
            batch = Batch([], nobody, [], 0, np.array([-1]), empty, empty, np.ones(1, bool), table[None], chunks, 1)
            self.flush()
            self.builder.forget()
            self.runner.load(batch, np.zeros(1, np.int64))
            within_memory(lambda: self.runner.prefill(batch), f"for a prefix of {count} tokens")
        return count

    # One iteration

    def execute(self, output: SchedulerOutput) -> StepResult:
        start = time.perf_counter()
        result = within_memory(
            lambda: self._execute(output),
            f"in an iteration of {output.num_decode_seqs} sequences and {output.num_prefill_tokens} prompt tokens",
        )
        seconds = time.perf_counter() - start
        result.durations_s = [seconds / output.num_iterations] * output.num_iterations
        return result

    def _execute(self, output: SchedulerOutput) -> StepResult:
        self.loaded.turns.check(self._run)
        result = StepResult([])
        self.store.apply(output.cache_ops)
        for prefill in (*output.prefills, *output.chunks):
            self._admit(prefill.group)
        batch = self.builder.build(output)
        if not batch.rows and batch.chunks is None:
            self.flush()
            return result
        if batch.source is not None or self._plan is None:
            self._plan = SamplingPlan.of(batch.rows)
        self.runner.load(batch, self._host_tokens(batch))
        if batch.num_iterations > 1 and self._plan.waits:
            raise ValueError("iterations in which a sequence may stop or a beam may fork cannot be run together")
        for iteration in range(batch.num_iterations):
            logits = self.runner.prefill(batch) if batch.chunks else self.runner.decode(batch)
            self._queued.append(self._choose(batch, logits, iteration))
        for rows in batch.groups[len(output.decodes) :]:
            if rows.state.prompt_logprobs is None and rows.state.request.sampling.prompt_logprobs is not None:
                rows.state.prompt_logprobs = self._prompt_logprobs(batch, rows)
        ahead = self.queues_ahead and not self._plan.waits
        while len(self._queued) > ahead:
            self._settle(self._queued.pop(0), result)
        return result

    def flush(self) -> None:
        """Wait for everything queued; afterwards all tokens so far are known to the host."""
        while self._queued:
            self._settle(self._queued.pop(0), StepResult([]))

    def _admit(self, group: SequenceGroup) -> None:
        if group not in self.builder.states:
            state = self._states[group.request.request_id]
            state.by_seq = dict(zip(group.seqs, state.sequences))
            self.builder.states[group] = state

    def _host_tokens(self, batch: Batch) -> np.ndarray:
        """The newest tokens of rows that were not in the last batch (swapped in); 0 elsewhere.

        Only the last step may still be queued, and a row that it did not have has all its tokens here already. For the
        same reason a prompt can be recomputed without waiting."""
        tokens = np.zeros(len(batch.rows), np.int64)
        if batch.source is not None:
            for row in np.flatnonzero(batch.source[: batch.num_decodes] < 0):
                tokens[row] = batch.rows[row].tokens[-1]
        return tokens

    def _choose(self, batch: Batch, logits: Tensor, iteration: int) -> _Step:
        """The next token of every row, left in the runner's `token_ids` for the next step."""
        plan, count = self._plan, len(batch.rows)
        tokens = self.runner.token_ids[:count]
        if not plan.all_greedy or plan.adjusted:
            stored = batch.context_lens
            if batch.chunks:
                stored = np.concatenate([stored, batch.chunks.context_lens[batch.chunks.logits_of]])
            tokens.copy_(sample(logits, plan, stored - plan.prompt_tokens + iteration))
        beams = self._advance_beams(batch, logits, tokens) if plan.has_beams else []
        chosen = logprobs(logits, tokens) if self.with_logprobs or plan.num_best is not None else None
        best = None if plan.num_best is None else tuple(map(download, best_logprobs(logits, plan.num_best)))
        tokens, chosen = download(tokens), None if chosen is None else download(chosen)
        done = torch.cuda.Event() if self.loaded.device.type == "cuda" else None
        if done is not None:
            done.record()
        return _Step(batch, tokens, chosen, best, beams, done)

    def _prompt_logprobs(self, batch: Batch, rows: GroupRows) -> list[dict[int, float] | None]:
        """The model's log-probabilities of a prompt whose K/V has just been stored: its tokens run once more."""
        prompt, count = rows.state.prompt, rows.state.request.sampling.prompt_logprobs
        found: list[dict[int, float] | None] = [None]
        empty, first, nowhere = np.zeros(0, np.int32), np.array([rows.first]), np.array([0])
        for start in range(0, len(prompt) - 1, PROMPT_PIECE):
            stop = min(start + PROMPT_PIECE, len(prompt) - 1)
            positions, ends = np.arange(start, stop), np.array([0, stop - start], np.int32)
            stored = np.full(stop - start, -1)
            chunks = Chunks(first, np.array([stop], np.int32), ends, prompt[start:stop], positions, stored, nowhere)
            logits = self.runner.score(Batch([], [], [], 0, None, empty, empty, empty, batch.tables, chunks, 1))
            chosen = logprobs(logits, upload(prompt[start + 1 : stop + 1], logits.device)).tolist()
            following = zip(prompt[start + 1 : stop + 1].tolist(), chosen)
            found += [one.of(count, *own) for one, own in zip(Best.rows(*best_logprobs(logits, count)), following)]
        return found

    def _advance_beams(self, batch: Batch, logits: Tensor, tokens: Tensor) -> list[tuple[GroupRows, BeamStep]]:
        """The steps of all groups of beams, those of one width together; their tokens are put into `tokens`."""
        if logits.is_cuda:
            self._wait_for(torch.cuda.current_stream())
        by_width: dict[int, list[GroupRows]] = {}
        for rows in batch.groups:
            if rows.group.is_beam and batch.live[rows.first]:
                by_width.setdefault(rows.count, []).append(rows)
        found = []
        for width, groups in by_width.items():
            places = upload(np.add.outer([rows.first for rows in groups], np.arange(width)), logits.device)
            steps = advance_beams([rows.state for rows in groups], logits[places])
            tokens[places] = upload(np.array([step.tokens for step in steps]), logits.device)
            found += zip(groups, steps)
        return found

    # After it has run

    def _wait_for(self, queued: torch.cuda.Event | torch.cuda.Stream) -> None:
        start = time.perf_counter()
        if self.loaded.workers is None:
            queued.synchronize()
        else:
            self.loaded.workers.wait_for(queued)
        self.waited_s += time.perf_counter() - start

    def _settle(self, step: _Step, result: StepResult) -> None:
        """Hand out a step's tokens; note who stopped and which beams moved."""
        if step.done is not None:
            self._wait_for(step.done)
        batch = step.batch
        if self.on_settled is not None:
            self.on_settled(batch)
        tokens = step.tokens.tolist()
        values = step.logprobs.tolist() if step.logprobs is not None else None
        best = None if step.best is None else Best.rows(*step.best)
        for rows, beam in step.beams:
            self._settle_beams(rows, beam, best, result)
        for rows in batch.groups:
            if rows.group.is_beam:
                continue
            request, state = rows.state.request, rows.state
            count = request.sampling.logprobs
            for index in range(rows.first, rows.first + rows.count):
                if not batch.live[index]:
                    continue
                row = batch.rows[index]
                row.tokens.append(tokens[index])
                if values is not None:
                    row.logprobs.append(values[index])
                    if count is not None:
                        row.best_logprobs.append(best[index].of(count, tokens[index], values[index]))
                if state.can_stop and row.stops(self.loaded.tokenizer):
                    row.stopped = True
                    if len(row.tokens) < request.output_tokens:
                        result.stopped.append((rows.group, batch.seqs[index]))
                if self.on_token is not None:
                    self.on_token(row)
                if row.stopped or len(row.tokens) == request.output_tokens:
                    self._end(state)

    def _settle_beams(self, rows: GroupRows, beam: BeamStep, best: list[Best] | None, result: StepResult) -> None:
        state, parents, unmoved = rows.state, beam.parents, list(range(rows.count))
        step = len(state.sequences[0].tokens) - 1  # decoding steps count from the first token, which the prompt gave
        if self._replayed_beams is not None and step >= 0:
            parents = self._replayed_beams.parents(state.request.request_id, rows.count, step) or unmoved
        extend_beams(state, beam, parents, best and best[rows.first : rows.first + rows.count])
        if is_over(state):
            for row, seq in zip(state.sequences, rows.group.seqs):
                row.stopped = True
                self._end(state)
                if len(row.tokens) < state.request.output_tokens:
                    result.stopped.append((rows.group, seq))
        elif parents != unmoved:
            result.parents[rows.group] = parents

    def _end(self, state: RequestState) -> None:
        state.num_unfinished -= 1
        if not state.num_unfinished:
            self._states.pop(state.request.request_id, None)
            self.finished[state.request.request_id] = state
