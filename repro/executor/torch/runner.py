"""The forward pass over a batch: static buffers on the device, and CUDA graphs for steps that only decode.

The newest token of every row stays on the device, where the next step takes it from, so the host can prepare
a step while the last one runs. Decoding is one function of static buffers; on a GPU it is captured once per
bucket of batch size and context length, and replayed. What tokens mean and when a request ends is not known
here.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.fx.experimental._config
from torch import Tensor

from repro.executor.torch.attention import PagedInputs
from repro.executor.torch.batch import Batch
from repro.executor.torch.fuse import compile_layers
from repro.executor.torch.models import LoadedModel
from repro.executor.torch.transfer import upload

#: batch sizes for which decoding is captured: matrix products cost the same within such a step
BATCH_BUCKETS = (2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
SMALLEST_CONTEXT_BUCKET = 512


class ModelRunner:
    """`max_rows` sequences at most; block tables `max_blocks` wide.

    `graphs`: capture decoding on a GPU. `compiled`: see `fuse`; it changes the model in place.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        block_size: int,
        max_rows: int,
        max_blocks: int,
        graphs: bool,
        compiled: bool,
    ) -> None:
        device = self.device = loaded.device
        self.loaded, self.block_size = loaded, block_size
        self.graphs = graphs and device.type == "cuda"
        max_rows = _batch_bucket(max_rows)
        if compiled:
            compile_layers(loaded.model)
        self.token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._context = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._grow = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._workspace = torch.zeros(max_rows * loaded.config.num_heads, dtype=torch.int32, device=device)
        self._no_chunks = torch.zeros(2, dtype=torch.int32, device=device)
        self._captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory = None  # shared by all graphs: they never run at the same time

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self.device)

    def load(self, batch: Batch, host_tokens: np.ndarray) -> None:
        """Bring a batch into the buffers. `host_tokens` int64 [rows] has the newest token of rows new to the
        batch."""
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
        self._tables[:count, : batch.tables.shape[1]] = self._upload(batch.tables)

    @torch.no_grad()
    def decode(self, batch: Batch) -> Tensor:
        """One token for every row: logits [rows, vocabulary]. The greedy tokens are in `token_ids`, contexts
        have grown.

        On a GPU the batch is padded to a bucket, with or without graphs, so that both compute the same.
        """
        count, max_context = batch.num_decodes, batch.max_context
        if self.device.type == "cpu" or count > BATCH_BUCKETS[-1]:
            return self._decode(count, max_context)
        bucket, context = _batch_bucket(count), _context_bucket(max_context)
        if not self.graphs:
            return self._decode(bucket, context)[:count]
        if (bucket, context) not in self._captured:
            self._capture(bucket, context)
        graph, logits = self._captured[bucket, context]
        graph.replay()
        return logits[:count]

    def capture_all(self, max_context: int) -> None:
        """Capture every bucket up to a context length now, so that no step has to."""
        contexts = {_context_bucket(length) for length in range(1, max_context + 1)}
        for bucket in sorted(BATCH_BUCKETS, reverse=True):
            for context in contexts if self.graphs and bucket <= len(self.token_ids) else ():
                if (bucket, context) not in self._captured:
                    self._capture(bucket, context)

    def _decode(self, count: int, max_context: int) -> Tensor:
        context, tables = self._context[:count], self._tables[:count]
        positions = (context - 1).clamp(min=0)
        blocks = tables.gather(1, (positions // self.block_size).long()[:, None])[:, 0].long()
        slots = torch.where(context > 0, blocks * self.block_size + positions % self.block_size, -1)
        paged = PagedInputs(
            slots, tables, context, self._no_chunks, torch.tensor([count, max_context, 0]), self._workspace
        )
        logits = self._forward(self.token_ids[:count], positions.long(), paged, 0)
        self.token_ids[:count] = logits.argmax(-1)
        context += self._grow[:count]
        return logits

    @torch.no_grad()
    def prefill(self, batch: Batch) -> Tensor:
        """Decoding rows and chunks of prompts in one pass: logits [rows, vocabulary]."""
        chunks, count = batch.chunks, batch.num_decodes
        context = batch.context_lens.astype(np.int64)
        positions = np.concatenate([context - 1, chunks.positions])
        own_slots = (
            batch.tables[np.arange(count), (context - 1) // self.block_size].astype(np.int64)
            * self.block_size
            + (context - 1) % self.block_size
        )
        table_rows = self._upload(np.concatenate([np.arange(count), chunks.rows]))
        paged = PagedInputs(
            slots=self._upload(np.concatenate([own_slots, chunks.slots])),
            block_table=self._tables[table_rows],
            context_lens=self._upload(np.concatenate([batch.context_lens, chunks.context_lens])),
            cu_chunks=self._upload(chunks.cu_chunks),
            sizes=torch.tensor([count, _context_bucket(batch.max_context), chunks.longest]),
            workspace=self._workspace,
        )
        token_ids = torch.cat([self.token_ids[:count], self._upload(chunks.token_ids)])
        last = self._upload(
            np.concatenate([np.arange(count), count + chunks.cu_chunks[1:].astype(np.int64) - 1])
        )
        logits = self._forward(token_ids, self._upload(positions), paged, last)
        if len(chunks.logits_of) > len(chunks.rows):
            logits = logits[self._upload(np.concatenate([np.arange(count), count + chunks.logits_of]))]
        self.token_ids[: len(batch.rows)] = logits.argmax(-1)
        return logits

    def _forward(
        self, token_ids: Tensor, positions: Tensor, paged: PagedInputs, keep: Tensor | int
    ) -> Tensor:
        # Without duck shaping, sizes that happen to be equal once are not taken to be equal ever after.
        with torch.fx.experimental._config.patch(use_duck_shape=False):
            return self.loaded.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                paged=paged,
                logits_to_keep=keep,
            ).logits[0]

    def _capture(self, bucket: int, context: int) -> None:
        """Record decoding once. Nothing is stored meanwhile: with lengths of 0 every row is padding."""
        saved = self.token_ids.clone(), self._context.clone()
        self._context.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(
            stream
        ):  # compiles kernels and sets up libraries, which a capture must not see
            self._decode(bucket, context)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = self._decode(bucket, context)
        self._memory = graph.pool()
        self._captured[bucket, context] = graph, logits
        self.token_ids.copy_(saved[0])
        self._context.copy_(saved[1])


def _batch_bucket(count: int) -> int:
    return next((size for size in BATCH_BUCKETS if size >= count), count)


def _context_bucket(length: int) -> int:
    return max(SMALLEST_CONTEXT_BUCKET, 1 << max(length - 1, 0).bit_length())
