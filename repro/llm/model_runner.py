"""The forward pass over a batch: static buffers on the device, and CUDA graphs.

The newest token of every row stays on the device, where the next step takes it from, so the host can prepare a step
while the last one runs. A step is a function of static buffers; on a GPU it is captured once per bucket of sizes, and
replayed: launching its kernels one by one takes the host longer than the GPU needs for them. Steps with prompts are
padded to buckets of rows and of prompt tokens. What tokens mean and when a request ends is not known here."""

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import torch.fx.experimental._config
from torch import Tensor

from repro.llm.attention import PagedInputs
from repro.llm.batch import Batch
from repro.llm.fuse import compile_layers
from repro.llm.models import LoadedModel
from repro.llm.transfer import upload

#: batch sizes for which decoding is captured: matrix products cost the same within such a step
BATCH_BUCKETS = (2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
SMALLEST_CONTEXT_BUCKET = 512
#: steps with prompts: decoding rows, and tokens of at most MAX_CHUNKS prompts; larger ones run as they are (more tokens
#: keep a GPU busy for longer than the launches take)
ROW_BUCKETS = (8, 64, 128, 256)
TOKEN_BUCKETS = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560)
MAX_CHUNKS = 16
#: steps with more prompts, all short: every tenth or twentieth step of a busy server with short requests. Each place
#: for a prompt costs as many programs of the kernel as WIDE_LONGEST tokens need, also where it stays empty.
WIDE_TOKEN_BUCKETS, WIDE_CHUNKS, WIDE_LONGEST = (384, 512, 768, 1024), 64, 256
MIXED_CONTEXT_BUCKET = 2048


class MixedShape(NamedTuple):
    """Sizes of a step with prompts: decoding rows, prompt tokens, chunks; bounds of a context and of a chunk. A bucket
    stands for all steps that fit into it."""

    rows: int
    tokens: int
    chunks: int
    context: int
    longest: int
    is_bucket: bool = False

    @classmethod
    def bucket(cls, rows: int, tokens: int, context: int) -> "MixedShape":
        return cls(rows, tokens, MAX_CHUNKS, context, tokens, True)

    @classmethod
    def wide(cls, rows: int, tokens: int, context: int) -> "MixedShape":
        """A bucket of many short chunks."""
        return cls(rows, tokens, WIDE_CHUNKS, context, WIDE_LONGEST, True)

    @property
    def size(self) -> int:
        return 5 * self.rows + 3 * self.tokens + 4 * self.chunks + 1

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        """token ids [tokens]; positions and slots [rows + tokens]; last tokens, block table rows and contexts [rows +
        chunks]; first tokens [chunks + 1]."""
        both, ends = self.rows + self.tokens, self.rows + self.chunks
        return packed.split([self.tokens, both, both, ends, ends, ends, self.chunks + 1])


class ModelRunner:
    """`max_rows` sequences at most; block tables `max_blocks` wide.

    `graphs`: capture decoding on a GPU. `compiled`: see `fuse`; it changes the model in place."""

    def __init__(
        self, loaded: LoadedModel, block_size: int, max_rows: int, max_blocks: int, graphs: bool, compiled: bool
    ) -> None:
        device = self.device = loaded.device
        self.loaded, self.block_size = loaded, block_size
        self.graphs = graphs and device.type == "cuda"
        max_rows = _bucket(BATCH_BUCKETS, max_rows)
        if compiled:
            compile_layers(loaded.model)
        self.token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._context = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._grow = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._workspace = torch.zeros(max_rows * loaded.config.num_heads, dtype=torch.int32, device=device)
        self._no_chunks = torch.zeros(2, dtype=torch.int32, device=device)
        self.pads = device.type == "cuda"  # with or without graphs, so that both compute the same
        self._captured: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory = None  # shared by all graphs: they never run at the same time
        self._row_buckets = tuple(size for size in ROW_BUCKETS if size < max_rows) + (min(max_rows, ROW_BUCKETS[-1]),)
        largest = MixedShape.bucket(self._row_buckets[-1], TOKEN_BUCKETS[-1], 0)
        self._packed = torch.zeros(largest.size, dtype=torch.int64, device=device)
        # Without duck shaping, sizes that happen to be equal once are not taken to be equal ever after. Made once: each
        # patch leaves a context variable behind.
        self._sizes_apart = torch.fx.experimental._config.patch(use_duck_shape=False)
        self._mixed_logits: Tensor | None = None  # one buffer for all graphs

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self.device)

    def load(self, batch: Batch, host_tokens: np.ndarray) -> None:
        """Bring a batch into the buffers. `host_tokens` int64 [rows] has the newest token of rows new to the batch."""
        count = len(batch.rows)
        if batch.source is not None:
            source = self._upload(batch.source.astype(np.int64))
            kept = self.token_ids[source.clamp(min=0)]
            self.token_ids[:count] = torch.where(source >= 0, kept, self._upload(host_tokens))
        lengths = np.zeros((2, len(self._context)), np.int32)
        lengths[0, : batch.num_decodes], lengths[1, : batch.num_decodes] = batch.context_lens, batch.grow
        lengths = self._upload(lengths)
        self._context.copy_(lengths[0])
        self._grow.copy_(lengths[1])
        height, width = batch.tables.shape
        self._tables[:height, :width] = self._upload(batch.tables)

    @torch.no_grad()
    def decode(self, batch: Batch) -> Tensor:
        """One token for every row: logits [rows, vocabulary]. `token_ids` has the greedy tokens, contexts have grown.

        On a GPU the batch is padded to a bucket, with or without graphs, so that both compute the same."""
        count, max_context = batch.num_decodes, batch.max_context
        if self.device.type == "cpu" or count > BATCH_BUCKETS[-1]:
            return self._decode(count, max_context)
        bucket, context = _bucket(BATCH_BUCKETS, count), _context_bucket(max_context)
        if not self.graphs:
            return self._decode(bucket, context)[:count]
        if (bucket, context) not in self._captured:
            self._capture(bucket, context)
        graph, logits = self._captured[bucket, context]
        graph.replay()
        return logits[:count]

    @torch.no_grad()
    def idle(self) -> None:
        """An iteration of one sequence that stores nothing, to be timed."""
        self._context.zero_()
        self._decode(1, 1)

    def capture_all(self, max_context: int) -> None:
        """Capture every bucket up to a context length now, so that no step has to."""
        if not self.graphs:
            return
        contexts = sorted({_context_bucket(length) for length in range(1, max_context + 1)})
        for bucket in sorted(BATCH_BUCKETS, reverse=True):
            for context in contexts if bucket <= len(self.token_ids) else ():
                if (bucket, context) not in self._captured:
                    self._capture(bucket, context)
        for context in sorted({max(context, MIXED_CONTEXT_BUCKET) for context in contexts}):
            shapes = [
                MixedShape.bucket(*sizes, context) for sizes in itertools.product(self._row_buckets, TOKEN_BUCKETS)
            ]
            wide = itertools.product(self._row_buckets, WIDE_TOKEN_BUCKETS)
            for shape in [*shapes, *(MixedShape.wide(*sizes, context) for sizes in wide)]:
                if shape not in self._captured:
                    self._packed.zero_()  # no context, empty chunks,
                    shape.split(self._packed[: shape.size])[2].fill_(-1)  # and nothing is stored
                    self._record(shape, lambda shape=shape: self._kept(self._mixed(self._packed[: shape.size], shape)))

    def _decode(self, count: int, max_context: int) -> Tensor:
        context, tables = self._context[:count], self._tables[:count]
        positions = (context - 1).clamp(min=0)
        blocks = tables.gather(1, (positions // self.block_size).long()[:, None])[:, 0].long()
        slots = torch.where(context > 0, blocks * self.block_size + positions % self.block_size, -1)
        sizes = torch.tensor([count, max_context, 0])
        paged = PagedInputs(slots, tables, context, self._no_chunks, sizes, self._workspace)
        logits = self._forward(self.token_ids[:count], positions.long(), paged, 0)
        self.token_ids[:count] = logits.argmax(-1)
        context += self._grow[:count]
        return logits

    @torch.no_grad()
    def prefill(self, batch: Batch) -> Tensor:
        """Decoding rows and chunks of prompts in one pass: logits [rows, vocabulary].

        On a GPU padded to buckets as far as they reach, with or without graphs, so that both compute the same."""
        chunks, count = batch.chunks, batch.num_decodes
        shape = self._mixed_shape(batch)
        packed = self._upload(_packed(batch, shape, self.block_size))
        if self.graphs and shape.is_bucket:
            self._packed[: shape.size] = packed
            if shape not in self._captured:
                self._record(shape, lambda: self._kept(self._mixed(self._packed[: shape.size], shape)))
            graph, logits = self._captured[shape]
            graph.replay()
        else:
            logits = self._mixed(packed, shape)
        ends = np.concatenate([np.arange(count), shape.rows + chunks.logits_of])
        if len(ends) != len(logits) or (np.diff(ends) != 1).any():
            logits = logits[self._upload(ends)]
        self.token_ids[: len(batch.rows)] = logits.argmax(-1)
        return logits

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        """Logits of every token of the chunks, [tokens, vocabulary], of a batch that has nothing else; no buffer
        changes. The block tables are those loaded last."""
        chunks = batch.chunks
        shape = MixedShape(0, len(chunks.token_ids), len(chunks.rows), MIXED_CONTEXT_BUCKET, chunks.longest)
        return self._mixed(self._upload(_packed(batch, shape, self.block_size)), shape, every=True)

    def _mixed_shape(self, batch: Batch) -> MixedShape:
        """The smallest bucket that holds the batch, or its own sizes."""
        count, tokens, chunks = batch.num_decodes, len(batch.chunks.token_ids), len(batch.chunks.rows)
        context, longest = max(_context_bucket(batch.max_context), MIXED_CONTEXT_BUCKET), batch.chunks.longest
        if self.pads and count <= self._row_buckets[-1]:
            rows = _bucket(self._row_buckets, count)
            if chunks <= MAX_CHUNKS and tokens <= TOKEN_BUCKETS[-1]:
                return MixedShape.bucket(rows, _bucket(TOKEN_BUCKETS, tokens), context)
            if MAX_CHUNKS < chunks <= WIDE_CHUNKS and longest <= WIDE_LONGEST and tokens <= WIDE_TOKEN_BUCKETS[-1]:
                return MixedShape.wide(rows, _bucket(WIDE_TOKEN_BUCKETS, tokens), context)
        return MixedShape(count, tokens, chunks, context, longest)

    def _mixed(self, packed: Tensor, shape: MixedShape, every: bool = False) -> Tensor:
        """Logits of every decoding row and of every chunk's last token, [rows + chunks, vocabulary], or of every
        token."""
        ids, positions, slots, last, table_rows, contexts, firsts = shape.split(packed)
        sizes, tables = torch.tensor([shape.rows, shape.context, shape.longest]), self._tables[table_rows]
        paged = PagedInputs(slots, tables, contexts.int(), firsts.int(), sizes, self._workspace)
        return self._forward(torch.cat([self.token_ids[: shape.rows], ids]), positions, paged, 0 if every else last)

    def _forward(self, token_ids: Tensor, positions: Tensor, paged: PagedInputs, keep: Tensor | int) -> Tensor:
        tokens = {"input_ids": token_ids[None], "position_ids": positions[None]}
        with self._sizes_apart:
            return self.loaded.model(**tokens, use_cache=False, paged=paged, logits_to_keep=keep).logits[0]

    def _kept(self, logits: Tensor) -> Tensor:
        """The logits in a buffer that all graphs of steps with prompts share."""
        if self._mixed_logits is None:
            count = self._row_buckets[-1] + WIDE_CHUNKS
            self._mixed_logits = torch.empty(count, logits.shape[-1], dtype=logits.dtype, device=self.device)
        return self._mixed_logits[: len(logits)].copy_(logits)

    def _capture(self, bucket: int, context: int) -> None:
        """Record decoding once. Nothing is stored meanwhile: with lengths of 0 every row is padding."""
        saved = self.token_ids.clone(), self._context.clone()
        self._context.zero_()
        self._record((bucket, context), lambda: self._decode(bucket, context))
        self.token_ids.copy_(saved[0])
        self._context.copy_(saved[1])

    def _record(self, key: tuple[int, ...], step: Callable[[], Tensor]) -> None:
        """Run a step once, which compiles kernels and sets up libraries (a capture must not see that); capture it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _collector_paused(), torch.cuda.graph(graph, pool=self._memory):
            logits = step()
        self._memory = graph.pool()
        self._captured[key] = graph, logits


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile: graphs of an engine given up, freed in the midst of a capture, end it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _packed(batch: Batch, shape: MixedShape, block_size: int) -> np.ndarray:
    """The inputs of a step with prompts as MixedShape.split takes them, int64; what is padded is stored nowhere."""
    chunks, count = batch.chunks, batch.num_decodes
    tokens, num_chunks = len(chunks.token_ids), len(chunks.rows)
    packed = np.zeros(shape.size, np.int64)
    both, ends = shape.rows + shape.tokens, shape.rows + shape.chunks
    parts = np.split(packed, np.cumsum([shape.tokens, both, both, ends, ends, ends]))
    ids, positions, slots, last, table_rows, contexts, firsts = parts
    own, rows = batch.context_lens.astype(np.int64) - 1, np.arange(count)
    ids[:tokens] = chunks.token_ids
    positions[:count], positions[shape.rows :][:tokens] = own, chunks.positions
    slots[:] = -1
    slots[:count] = batch.tables[rows, own // block_size].astype(np.int64) * block_size + own % block_size
    slots[shape.rows :][:tokens] = chunks.slots
    last[:count], last[shape.rows :][:num_chunks] = rows, shape.rows + chunks.cu_chunks[1:] - 1
    table_rows[:count], table_rows[shape.rows :][:num_chunks] = rows, chunks.rows
    contexts[:count], contexts[shape.rows :][:num_chunks] = batch.context_lens, chunks.context_lens
    firsts[: num_chunks + 1], firsts[num_chunks + 1 :] = chunks.cu_chunks, chunks.cu_chunks[-1]
    return packed


def _bucket(sizes: tuple[int, ...], count: int) -> int:
    """The smallest of the sizes that holds the count; the count itself if none does."""
    return next((size for size in sizes if size >= count), count)


def _context_bucket(length: int) -> int:
    return max(SMALLEST_CONTEXT_BUCKET, 1 << max(length - 1, 0).bit_length())
