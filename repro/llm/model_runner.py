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
#: steps with prompts: all tokens, decoding rows, and prompts or parts of them; larger ones run as they are. The sizes
#: are finest where most steps of a full server lie.
SIZES = (64, 128, *range(192, 512, 32), *range(512, 1024, 64), *range(1024, 2817, 128))
ROW_BUCKETS, CHUNKS = (64, 128, 256), 64
#: the same where more prompts run, all short: when a busy server begins, and when it has driven many out
MANY_CHUNKS, MANY_SIZES = 256, (1024, 1536, 2048, 2432, 2816)
MIXED_CONTEXT_BUCKET = 2048


class MixedShape(NamedTuple):
    """Sizes of a step with prompts: all its tokens, of which the first `rows` may decode; chunks; bounds of a context
    and of a chunk. A bucket stands for all steps that fit into it.

    Decoding rows and prompts lie side by side, so that only the sum of their tokens is padded."""

    tokens: int
    rows: int
    chunks: int
    context: int
    longest: int
    is_bucket: bool = False

    @classmethod
    def bucket(cls, tokens: int, rows: int, chunks: int, context: int) -> "MixedShape":
        return cls(tokens, min(rows, tokens), chunks, context, tokens, True)

    @property
    def size(self) -> int:
        return 3 * (self.tokens + self.rows) + 4 * self.chunks + 1

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Token ids, positions and slots [tokens]; last tokens, block table rows and contexts [rows + chunks]; first
        tokens [chunks + 1]. A negative token id is a decoding row's: the runner has its newest token. Last tokens are
        without gaps: after those of the rows that do decode come those of the chunks."""
        ends = self.rows + self.chunks
        return packed.split([self.tokens] * 3 + [ends] * 3 + [self.chunks + 1])


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
        self._packed = torch.zeros(
            max(shape.size for shape in self._mixed_buckets(0)), dtype=torch.int64, device=device
        )
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
            for shape in self._mixed_buckets(context):
                if shape not in self._captured:
                    self._packed.zero_()  # no context, empty chunks,
                    shape.split(self._packed[: shape.size])[2].fill_(-1)  # and nothing is stored
                    self._record(shape, lambda shape=shape: self._kept(self._mixed(self._packed[: shape.size], shape)))

    def _mixed_buckets(self, context: int) -> list[MixedShape]:
        """Every bucket of steps with prompts that `_mixed_shape` knows, once."""
        few = (MixedShape.bucket(*sizes, CHUNKS, context) for sizes in itertools.product(SIZES, self._row_buckets))
        many = (MixedShape.bucket(size, self._row_buckets[-1], MANY_CHUNKS, context) for size in MANY_SIZES)
        return list(dict.fromkeys([*few, *many]))

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
        ends = np.concatenate([np.arange(count), count + chunks.logits_of])
        if (np.diff(ends) != 1).any():
            logits = logits[self._upload(ends)]
        logits = logits[: len(ends)]
        self.token_ids[: len(batch.rows)] = logits.argmax(-1)
        return logits

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        """Logits of every token of the chunks, [tokens, vocabulary], of a batch that has nothing else; no buffer
        changes. The block tables are those loaded last."""
        chunks = batch.chunks
        shape = MixedShape(len(chunks.token_ids), 0, len(chunks.rows), MIXED_CONTEXT_BUCKET, chunks.longest)
        return self._mixed(self._upload(_packed(batch, shape, self.block_size)), shape, every=True)

    def _mixed_shape(self, batch: Batch) -> MixedShape:
        """The smallest bucket that holds the batch, or its own sizes."""
        count, chunks = batch.num_decodes, len(batch.chunks.rows)
        tokens, longest = count + len(batch.chunks.token_ids), batch.chunks.longest
        context = max(_context_bucket(batch.max_context), MIXED_CONTEXT_BUCKET)
        if self.pads and count <= self._row_buckets[-1]:
            if chunks <= CHUNKS and tokens <= SIZES[-1]:
                rows = _bucket(self._row_buckets, count)
                return MixedShape.bucket(_bucket(SIZES, tokens), rows, CHUNKS, context)
            if chunks <= MANY_CHUNKS and tokens <= MANY_SIZES[-1]:
                return MixedShape.bucket(_bucket(MANY_SIZES, tokens), self._row_buckets[-1], MANY_CHUNKS, context)
        return MixedShape(tokens, count, chunks, context, longest)

    def _mixed(self, packed: Tensor, shape: MixedShape, every: bool = False) -> Tensor:
        """Logits of every decoding row and of every chunk's last token, in this order, without gaps [rows + chunks,
        vocabulary], or of every token."""
        ids, positions, slots, last, table_rows, contexts, firsts = shape.split(packed)
        sizes, tables = torch.tensor([shape.rows, shape.context, shape.longest]), self._tables[table_rows]
        paged = PagedInputs(slots, tables, contexts.int(), firsts.int(), sizes, self._workspace)
        own, prompts = ids[: shape.rows], ids[shape.rows :]
        ids = torch.cat([torch.where(own < 0, self.token_ids[: shape.rows], own), prompts])
        return self._forward(ids, positions, paged, 0 if every else last)

    def _forward(self, token_ids: Tensor, positions: Tensor, paged: PagedInputs, keep: Tensor | int) -> Tensor:
        tokens = {"input_ids": token_ids[None], "position_ids": positions[None]}
        with self._sizes_apart:
            return self.loaded.model(**tokens, use_cache=False, paged=paged, logits_to_keep=keep).logits[0]

    def _kept(self, logits: Tensor) -> Tensor:
        """The logits in a buffer that all graphs of steps with prompts share."""
        if self._mixed_logits is None:
            count = self._row_buckets[-1] + MANY_CHUNKS
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
        # Between several GPUs a thread of NCCL's asks after earlier sums meanwhile, which a capture need not mind.
        mode = "global" if self.loaded.num_gpus == 1 else "thread_local"
        with _collector_paused(), torch.cuda.graph(graph, pool=self._memory, capture_error_mode=mode):
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
    packed = np.zeros(shape.size, np.int64)
    ends = shape.rows + shape.chunks
    parts = np.split(packed, np.cumsum([*[shape.tokens] * 3, *[ends] * 3]))
    ids, positions, slots, last, table_rows, contexts, firsts = parts
    own, rows = batch.context_lens.astype(np.int64) - 1, np.arange(count)
    prompts, behind = slice(count, count + len(chunks.token_ids)), slice(shape.rows, shape.rows + len(chunks.rows))
    ids[:count], ids[prompts] = -1, chunks.token_ids
    positions[:count], positions[prompts] = own, chunks.positions
    slots[:] = -1
    slots[:count] = batch.tables[rows, own // block_size].astype(np.int64) * block_size + own % block_size
    slots[prompts] = chunks.slots
    last[:count], last[count : count + len(chunks.rows)] = rows, count + chunks.cu_chunks[1:] - 1
    table_rows[:count], table_rows[behind] = rows, chunks.rows
    contexts[:count], contexts[behind] = batch.context_lens, chunks.context_lens
    firsts[:] = count + chunks.cu_chunks[-1]
    firsts[: len(chunks.cu_chunks)] = count + chunks.cu_chunks
    return packed


def _bucket(sizes: tuple[int, ...], count: int) -> int:
    """The smallest of the sizes that holds the count; the count itself if none does."""
    return next((size for size in sizes if size >= count), count)


def _context_bucket(length: int) -> int:
    return max(SMALLEST_CONTEXT_BUCKET, 1 << max(length - 1, 0).bit_length())
