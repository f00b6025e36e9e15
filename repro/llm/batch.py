"""From a SchedulerOutput to arrays: who is in the batch, at which lengths, and where each token's K and V go.

A batch has a row per sequence: first those that decode, then those of the groups that run their prompt. Prompts of
which only a part runs get no token; their block tables come behind. Rows keep their block tables from step to step, so
that a step costs what has changed in it. Numpy only; no device is known here."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from repro.engine.memory.interface import KVCacheManager
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import Sequence, SequenceGroup, Status
from repro.llm.state import RequestState, SequenceState


class GroupRows(NamedTuple):
    """The `count` rows of a group's sequences, from row `first` on."""

    group: SequenceGroup
    state: RequestState
    first: int
    count: int


@dataclass(slots=True)
class Chunks:
    """Prompts to run, whole or in part, flattened: `rows` has the row of the block tables that each uses; see also
    PagedInputs.

    `token_ids`, `positions` and `slots` are int64 [tokens]; `logits_of` int64 [rows] maps each prompt row of the batch
    to the chunk whose last token predicts its next one (fresh samples of one prompt share a chunk)."""

    rows: np.ndarray
    context_lens: np.ndarray
    cu_chunks: np.ndarray
    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    logits_of: np.ndarray

    @property
    def longest(self) -> int:
        return int(np.diff(self.cu_chunks).max())


@dataclass(slots=True)
class Batch:
    """One step's inputs; arrays are views that live until the next `build`.

    seqs, rows    the sequences and their states; the first `num_decodes` decode
    source        int32 [rows]       the row's place in the previous batch, -1 if it was not there; None: all as before
    context_lens  int32 [decodes]    stored tokens once the step has run
    grow          int32 [decodes]    1 if another token may follow in this step, else 0
    live          bool [rows]        whether its token counts: finished members of a static batch are computed along
    tables        int32 [rows + parts of prompts, max_blocks]"""

    seqs: list[Sequence]
    rows: list[SequenceState]
    groups: list[GroupRows]
    num_decodes: int
    source: np.ndarray | None
    context_lens: np.ndarray
    grow: np.ndarray
    live: np.ndarray
    tables: np.ndarray
    chunks: Chunks | None
    num_iterations: int

    @property
    def max_context(self) -> int:
        """Longest context of a decoding sequence, at the end of the last iteration."""
        return int(self.context_lens.max()) + self.num_iterations - 1 if self.num_decodes else 0


class BatchBuilder:
    """Remembers the rows of the last batch. `max_blocks` is the width of the block tables."""

    def __init__(self, manager: KVCacheManager, max_rows: int, max_blocks: int) -> None:
        self.manager = manager
        self.block_size = manager.block_size
        self.states: dict[SequenceGroup, RequestState] = {}
        self._tables = np.zeros((max_rows, max_blocks), np.int32)
        self._counts = np.zeros(max_rows, np.int32)  # blocks that each row has copied from its table
        self._context = np.zeros(max_rows, np.int32)
        self._limit = np.zeros(max_rows, np.int32)
        self._seqs: list[Sequence] = []
        self._last: Batch | None = None

    def build(self, output: SchedulerOutput) -> Batch:
        seqs = [seq for group in output.decodes for seq in group.seqs]
        num_decodes = len(seqs)
        for prefill in output.prefills:
            seqs += prefill.group.seqs
        last = self._last
        prompts = output.prefills or output.chunks
        repeats = last is not None and seqs == self._seqs and last.chunks is None and not prompts
        if repeats and not any(row.stopped for row in last.rows):
            self._context[:num_decodes] += last.num_iterations
            source, rows, groups = None, last.rows, last.groups
        else:
            source = self._rearrange(seqs)
            rows, groups = self._describe(output)
        context, limit = self._context[:num_decodes], self._limit[:num_decodes]
        live = np.ones(len(seqs), bool)
        live[:num_decodes] = context <= limit
        np.minimum(context, limit, out=context)
        self._refresh(groups, seqs, num_decodes, output.num_iterations)
        chunks = self._chunks(output, groups[len(output.decodes) :], len(seqs)) if prompts else None
        grow, tables = (context < limit).astype(np.int32), self._tables[: len(seqs) + len(output.chunks)]
        batch = Batch(
            seqs, rows, groups, num_decodes, source, context.copy(), grow, live, tables, chunks, output.num_iterations
        )
        self._seqs, self._last = seqs, batch
        return batch

    def forget(self) -> None:
        """Start the next batch anew: the rows have been used for something else."""
        self._seqs, self._last = [], None

    def _rearrange(self, seqs: list[Sequence]) -> np.ndarray:
        """Bring what is known of each sequence to its new row; the old rows, -1 where there was none."""
        self.states = {group: state for group, state in self.states.items() if group.status is not Status.FINISHED}
        place = {seq: row for row, seq in enumerate(self._seqs)}
        source = np.array([place.get(seq, -1) for seq in seqs], np.int32)
        self._tables[: len(seqs)] = self._tables[source]
        self._counts[: len(seqs)] = np.where(source < 0, 0, self._counts[source])
        return source

    def _describe(self, output: SchedulerOutput) -> tuple[list[SequenceState], list[GroupRows]]:
        """States of all rows and groups; contexts and limits of the decoding ones."""
        rows: list[SequenceState] = []
        groups: list[GroupRows] = []
        for group in output.decodes:
            state = self.states[group]
            groups.append(GroupRows(group, state, len(rows), len(group.seqs)))
            stored = group.num_stored(output.iteration)
            for seq in group.seqs:
                row = state.by_seq[seq]
                limit = state.request.prompt_tokens + len(row.tokens) - 1 if row.stopped else state.last_stored
                self._context[len(rows)], self._limit[len(rows)] = stored, limit
                rows.append(row)
        for prefill in output.prefills:
            state = self.states[prefill.group]
            groups.append(GroupRows(prefill.group, state, len(rows), len(prefill.group.seqs)))
            rows += [state.by_seq[seq] for seq in prefill.group.seqs]
        return rows, groups

    def _refresh(self, groups: list[GroupRows], seqs: list[Sequence], num_decodes: int, num_iterations: int) -> None:
        """Copy the block tables that have changed: those that grew, and any of several sequences (copy on write)."""
        needed = -(-(self._context[:num_decodes] + num_iterations - 1) // self.block_size)
        stale = set(np.flatnonzero(self._counts[:num_decodes] < needed).tolist())
        for _, _, first, count in groups:
            if count > 1:
                stale.update(range(first, first + count))
        stale.update(range(num_decodes, len(seqs)))
        for row in stale:
            self._counts[row] = self._copy_table(row, seqs[row])

    def _copy_table(self, row: int, seq: Sequence) -> int:
        """Bring a sequence's block table to a row; its blocks, as many as there is room for."""
        table = self.manager.block_table(seq)[: self._tables.shape[1]]
        self._tables[row, : len(table)] = table
        return len(table)

    def _chunks(self, output: SchedulerOutput, groups: list[GroupRows], behind: int) -> Chunks:
        """The prompts of `groups`, and the parts of others, whose block tables go `behind` those of the batch."""
        rows, starts, stops, logits_of = [], [], [], []
        token_ids, positions = [], []

        def add(row: int, seq: Sequence, state: RequestState, start: int, stop: int) -> None:
            rows.append(row)
            starts.append(start)
            stops.append(stop)
            token_ids.append(state.by_seq[seq].token_ids(start, stop))
            positions.append(np.arange(start, stop))

        for prefill, (group, state, first, _) in zip(output.prefills, groups):
            fresh = prefill.num_tokens == state.request.prompt_tokens
            for index, seq in enumerate(group.seqs):
                if index == 0:
                    start = prefill.num_cached
                elif fresh:  # the same prompt: its K/V is shared, or copied before the next step
                    logits_of.append(len(rows) - 1)
                    continue
                else:  # recomputed after they diverged: the first computes the prompt's shared blocks
                    start = self._common_blocks(first, first + index) * self.block_size
                add(first + index, seq, state, start, prefill.num_tokens)
                logits_of.append(len(rows) - 1)
        for row, part in enumerate(output.chunks, start=behind):
            (seq,) = part.group.seqs
            self._copy_table(row, seq)
            add(row, seq, self.states[part.group], part.num_cached, part.num_tokens)
        lengths = np.subtract(stops, starts)
        flat = np.concatenate(positions)
        owner = np.repeat(rows, lengths)
        slots = self._tables[owner, flat // self.block_size].astype(np.int64) * self.block_size + flat % self.block_size
        return Chunks(
            np.array(rows, np.int64),
            np.array(stops, np.int32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            np.concatenate(token_ids),
            flat,
            slots,
            np.array(logits_of, np.int64),
        )

    def _common_blocks(self, row: int, other: int) -> int:
        """Leading blocks that two rows of a group share."""
        count = min(self._counts[row], self._counts[other])
        different = np.flatnonzero(self._tables[row, :count] != self._tables[other, :count])
        return int(different[0]) if len(different) else int(count)
