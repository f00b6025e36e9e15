"""Several GPUs (§4.6): one process a GPU, each with its heads of the pool, all with the same block numbers.

This process has the engine, the scheduler, the memory manager, the states of all requests and the sampling; it is also
rank 0, which holds the first part of the model. So the logits are where they are sampled, and one GPU less waits for a
message. Before each forward pass one message goes to the other ranks: the operations on blocks since the last one, what
changed in the block tables, lengths and positions. Tokens follow on the device (see `shards.join`), so a pass can be
queued before the tokens of the one before it are known, as with one GPU."""

import contextlib
import dataclasses
import gc
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from repro.engine.memory.interface import CacheOp, OpKind
from repro.errors import UserError
from repro.llm import shards
from repro.llm.attention import attach, detach
from repro.llm.batch import Batch
from repro.llm.kv_store import KVStore
from repro.llm.model_runner import ModelRunner
from repro.llm.models import LoadedModel
from repro.llm.workers import ALIVE_S

_KINDS = list(OpKind)
_NOTHING = np.zeros((0, 0), np.int32)


class Pass(NamedTuple):
    """What another rank has to know of a forward pass.

    `method` is ModelRunner's; `ops` int32 [operations, 3] (kind, from, to) come first. `batch` has no tables but the
    places that changed since the last one, int32 [2, changes]; None: the batch before, once more."""

    method: str
    ops: np.ndarray
    batch: Batch | None = None
    changes: np.ndarray | None = None


class Tables:
    """The block tables as the other ranks have them, to tell and to follow what changes."""

    def __init__(self, max_rows: int, max_blocks: int) -> None:
        self._held = np.zeros((max_rows, max_blocks), np.int32)

    def changes(self, batch: Batch) -> np.ndarray:
        """Places (row by row) and blocks that differ, and from now on do not."""
        self._move(batch)
        height, width = batch.tables.shape
        held = self._held[:height, :width]
        rows, columns = np.nonzero(held != batch.tables)
        held[rows, columns] = blocks = batch.tables[rows, columns]
        return np.stack([rows * self._held.shape[1] + columns, blocks]).astype(np.int32)

    def follow(self, batch: Batch, changes: np.ndarray) -> np.ndarray:
        """The batch's tables."""
        self._move(batch)
        self._held.reshape(-1)[changes[0]] = changes[1]
        return self._held[: len(batch.rows) + (len(batch.chunks.rows) if batch.chunks else 0)]

    def _move(self, batch: Batch) -> None:
        if batch.source is not None:
            self._held[: len(batch.source)] = self._held[batch.source]


class ParallelStore(KVStore):
    """Rank 0's part of a pool; the other ranks make theirs."""

    def __init__(self, loaded: LoadedModel, *sizes: int) -> None:
        self.untold: list[CacheOp] = []
        super().__init__(loaded.held, *sizes, loaded.dtype, loaded.device)
        self.pool = loaded.workers.new_pool()
        weakref.finalize(self, loaded.workers.give_up, self.pool)
        loaded.workers.ask("make_store", self.pool, *sizes)

    def apply(self, ops: list[CacheOp]) -> None:
        super().apply(ops)
        self.untold += ops


class ParallelRunner(ModelRunner):
    """Tells the other ranks of each pass, and takes part in it."""

    def __init__(self, store: ParallelStore, loaded: LoadedModel, *sizes: Any) -> None:
        super().__init__(loaded, *sizes)
        self._store, self._workers = store, loaded.workers
        self._workers.ask("make_runner", store.pool, *sizes)
        self._known, self._due = Tables(*self._tables.shape), None

    def load(self, batch: Batch, host_tokens: np.ndarray) -> None:
        super().load(batch, host_tokens)
        self._due = batch

    def decode(self, batch: Batch) -> Tensor:
        return self._together(lambda: super(ParallelRunner, self).decode(batch), "run", "decode")

    def prefill(self, batch: Batch) -> Tensor:
        return self._together(lambda: super(ParallelRunner, self).prefill(batch), "run", "prefill")

    def score(self, batch: Batch) -> Tensor:
        return self._together(lambda: super(ParallelRunner, self).score(batch), "run", "score", batch)

    def idle(self) -> None:
        self._together(super().idle, "call", "idle")

    def capture_all(self, max_context: int) -> None:
        self._together(lambda: super(ParallelRunner, self).capture_all(max_context), "call", "capture_all", max_context)

    def _together(self, compute: Callable[[], Any], method: str, *given: Any) -> Any:
        with self._workers.together():
            told = self._pass(*given) if method == "run" else given
            self._workers.tell(method, self._store.pool, *told)
            return compute()

    def _pass(self, method: str, scored: Batch | None = None) -> tuple[Pass]:
        """What the others do not know yet. Found out when it is sent, so that none of it is lost by an interruption."""
        ops, self._store.untold = self._store.untold, []
        rows = [(_KINDS.index(op.kind), op.src, op.dst) for op in ops]
        batch, self._due = self._due, None
        changes = None if batch is None else self._known.changes(batch)
        batch = scored or batch
        return (Pass(method, np.array(rows, np.int32), None if batch is None else _bare(batch), changes),)


def _bare(batch: Batch) -> Batch:
    """What of a batch the model runner of another rank reads, but for the block tables."""
    rows = range(len(batch.rows))
    return dataclasses.replace(batch, seqs=[], rows=rows, groups=[], live=_NOTHING, tables=_NOTHING)


def store_for(loaded: LoadedModel, num_blocks: int, block_size: int, num_cpu_blocks: int) -> KVStore:
    """A pool on the GPUs of a model. UserError if it does not fit."""
    sizes = num_blocks, block_size, num_cpu_blocks
    if loaded.workers is not None:
        return ParallelStore(loaded, *sizes)
    return KVStore(loaded.held, *sizes, loaded.dtype, loaded.device)


def runner_for(store: KVStore, loaded: LoadedModel, *sizes: Any) -> ModelRunner:
    return ParallelRunner(store, loaded, *sizes) if loaded.workers else ModelRunner(loaded, *sizes)


# In a worker


class _Pool:
    """One executor's pool and model runner on this rank, and the batch that is loaded."""

    batch: Batch | None = None

    def __init__(self, loaded: LoadedModel, *sizes: int) -> None:
        self._loaded = loaded
        self.store = KVStore(loaded.held, *sizes, loaded.dtype, loaded.device)

    def make_runner(self, *sizes: Any) -> None:
        self.runner = ModelRunner(self._loaded, *sizes)
        self._tables = Tables(*self.runner._tables.shape)

    def run(self, told: Pass) -> None:
        self.store.apply([CacheOp(_KINDS[kind], src, dst) for kind, src, dst in told.ops.tolist()])
        if told.changes is not None:
            self.batch = dataclasses.replace(told.batch, tables=self._tables.follow(told.batch, told.changes))
            self.runner.load(self.batch, np.zeros(len(self.batch.rows), np.int64))
        scored = told.batch if told.changes is None else None
        getattr(self.runner, told.method)(scored or self.batch)

    def call(self, method: str, *given: object) -> None:
        getattr(self.runner, method)(*given)


class _Worker:
    """Does what rank 0 tells: makes pools, by number, and has them called."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._pools, self._attached = loaded, dict[int, _Pool](), -1

    def do(self, method: str, pool: int, *given: Any) -> None:
        if method == "make_store":
            self._pools[pool] = _Pool(self._loaded, *given)
            return
        if pool != self._attached:
            attach(self._loaded.model, self._pools[pool].store.caches)
            self._attached = pool
        getattr(self._pools[pool], method)(*given)

    def free(self, pools: list[int]) -> None:
        for pool in pools:
            self._pools.pop(pool, None)
            if pool == self._attached:
                detach(self._loaded.model)
                self._attached = -1
        if pools:
            gc.collect()
            if self._loaded.device.type == "cuda":
                torch.cuda.empty_cache()


def serve(descriptor: int) -> None:
    """The life of a worker, until its pipe closes. It says None, or why not, of its part and of what it is asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    pipe, code = Connection(descriptor), 0
    try:
        _serve(pipe)
    except EOFError:
        pass
    except BaseException as error:  # noqa: BLE001 - rank 0 tells the user
        code = 1
        with contextlib.suppress(OSError):
            pipe.send(_said(error))
    os._exit(code)  # without waiting for a collective that another rank will not join


def _serve(pipe: Connection) -> None:
    source, part, device, port = pickle.loads(pipe.recv_bytes())
    if device != "cpu":
        torch.cuda.set_device(device)
    loaded = source.part(part, device)
    pipe.send(None)
    ranks = shards.Ranks(part, loaded.device, torch.distributed.TCPStore("127.0.0.1", port))
    shards.join(loaded.model, source.empty(part.size)[1], ranks)
    worker = _Worker(loaded)
    while True:
        method, given, given_up, wants_answer = pickle.loads(pipe.recv_bytes())
        worker.free(given_up)
        if not wants_answer:
            worker.do(method, *given)
            continue
        said = None
        try:
            worker.do(method, *given)
        except (UserError, torch.OutOfMemoryError) as error:
            said = _said(error)
        pipe.send(said)


def _said(error: BaseException) -> str:
    text = next(iter(str(error).splitlines()), "")
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def _end_with(parent: int) -> None:
    """A rank that waits in a collective does not see its pipe close."""
    while os.getppid() == parent:
        time.sleep(ALIVE_S)
    os._exit(1)
