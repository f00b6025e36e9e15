"""Several GPUs (§4.6): one process a GPU, each with its heads of the pool, all with the same block numbers.

This process has the engine, the scheduler, the memory manager, the states of all requests and the sampling; it is also
rank 0, which holds the first part of the model. So the logits are where they are sampled, and one GPU less waits for a
message. Before each forward pass one message goes to the other ranks: the operations on blocks since the last one, what
changed in the block tables, lengths and positions. Tokens follow on the device (see `shards.join`), so a pass can be
queued before the tokens of the one before it are known, as with one GPU.

Messages go through a pipe to each worker, which also tells when a process has ended: a worker whose pipe closes ends,
and a worker that ends is named in a UserError here."""

import contextlib
import dataclasses
import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from repro.checks import whole
from repro.engine.memory.interface import CacheOp, OpKind
from repro.errors import UserError
from repro.llm import models, shards
from repro.llm.attention import attach, detach
from repro.llm.batch import Batch
from repro.llm.kv_store import KVStore
from repro.llm.model_runner import ModelRunner
from repro.llm.models import LoadedModel

MOST_GPUS = 64
#: a worker that was told to end is given so long, and one whose collective failed to say why
PATIENCE_S = 5.0
#: a loop of a worker without work looks so often whether the process that started it is alive
ALIVE_S = 1.0
REMEDY = "make the LLM anew"
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


class Workers:
    """The processes of ranks 1 and up, started for one source; they end with this object, `close`, or this process."""

    def __init__(self, source: models.Source, num_gpus: int, device: str) -> None:
        self.num_gpus, self.why_ended = num_gpus, ""
        self._numbers, self._given_up = itertools.count(), list[int]()
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._processes, self._pipes = list[subprocess.Popen](), list[Connection]()
        self._ends = weakref.finalize(self, _end, self._processes, self._pipes)
        for rank in range(1, num_gpus):
            ours, theirs = Pipe()
            with theirs:
                command = [sys.executable, "-c", f"from repro.llm.parallel import serve; serve({theirs.fileno()})"]
                # A session of its own: Ctrl-C is for this process, which then ends its workers or goes on with them.
                options = {"pass_fds": [theirs.fileno()], "start_new_session": True}
                self._processes.append(subprocess.Popen(command, env=os.environ | environ, **options))
            self._pipes.append(ours)
            setup = source, shards.Part(rank, num_gpus), _place(device, rank), self._store.port
            self._send(ours, pickle.dumps(setup))

    def meet(self, device: torch.device) -> shards.Ranks:
        """Wait for all parts to be loaded. UserError if one cannot be."""
        with self.together():
            self._answers()
            self.ranks = shards.Ranks(shards.Part(0, self.num_gpus), device, self._store)
        if device.type == "cuda":
            threading.Thread(target=_watch, args=(weakref.ref(self), self._processes), daemon=True).start()
        return self.ranks

    def tell(self, method: str, *given: object, wants_answer: bool = False) -> None:
        """Have all workers call a method. UserError if one has ended."""
        self.check()
        given_up, self._given_up = self._given_up, []
        message = pickle.dumps((method, given, given_up, wants_answer))
        for pipe in self._pipes:
            self._send(pipe, message)

    def ask(self, method: str, *given: object) -> None:
        """The same, and wait until it is done. UserError with what a worker says against it."""
        self.tell(method, *given, wants_answer=True)
        self._answers()

    def new_pool(self) -> int:
        return next(self._numbers)

    def give_up(self, pool: int) -> None:
        """Have a pool freed with the next message (this may be called at any moment, by the garbage collector)."""
        self._given_up.append(pool)

    def check(self) -> None:
        """UserError if a worker has ended."""
        if not self.why_ended:
            self.why_ended = self._ended()
        if self.why_ended:
            self._ends()
            raise UserError(f"{self.why_ended}; {REMEDY}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What all ranks do at the same time: Ctrl-C waits for its end, and if it fails here, all end.

        UserError if it failed because a worker ended."""
        with _ctrl_c_afterwards():
            try:
                yield
            except BaseException as error:
                if self.why_ended:  # and said
                    raise
                is_theirs = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
                why = self._ended_within(PATIENCE_S if is_theirs else 0.0)
                self.why_ended = why or f"the GPUs' processes were ended, as rank 0 failed ({type(error).__name__})"
                self._ends()
                if why:
                    raise UserError(f"{why}; {REMEDY}") from None
                raise

    def close(self) -> None:
        """End the workers."""
        self.why_ended = self.why_ended or "the GPUs' processes have been ended (close)"
        self._ends()

    def _send(self, pipe: Connection, message: bytes) -> None:
        try:
            pipe.send_bytes(message)
        except OSError:
            self._await_end()

    def _answers(self) -> None:
        said = []
        for pipe in self._pipes:
            try:
                said.append(pipe.recv())
            except (EOFError, OSError):
                self._await_end()
        for why in said:
            if why is not None:
                raise UserError(why)

    def _await_end(self) -> None:
        """UserError, when it is known how the worker whose pipe is closed has ended."""
        self.why_ended = self._ended_within(PATIENCE_S) or "a worker closed its pipe"
        self.check()

    def _ended_within(self, seconds: float) -> str:
        until = time.monotonic() + seconds
        while not (why := self._ended()) and time.monotonic() < until:
            time.sleep(0.02)
        return why

    def _ended(self) -> str:
        """How a worker has ended, if one has; of several the one that others may have ended with."""
        codes = {rank: one.poll() for rank, one in enumerate(self._processes, start=1)}
        ended = sorted((code >= 0, rank) for rank, code in codes.items() if code is not None)
        if not ended:
            return ""
        _, rank = ended[0]
        how = f"exit code {codes[rank]}" if codes[rank] >= 0 else signal.Signals(-codes[rank]).name
        with contextlib.suppress(EOFError, OSError):
            while self._pipes[rank - 1].poll():
                how = self._pipes[rank - 1].recv() or how
        return f"the process of rank {rank} of {self.num_gpus} (process {self._processes[rank - 1].pid}) ended: {how}"


def _end(processes: list[subprocess.Popen], pipes: list[Connection]) -> None:
    """Workers end when their pipes close; those that do not, as they wait for others, are killed."""
    for pipe in pipes:
        pipe.close()
    until = time.monotonic() + PATIENCE_S
    for process in processes:
        try:
            process.wait(max(0.0, min(until - time.monotonic(), 0.5)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _watch(workers: "weakref.ref[Workers]", processes: list[subprocess.Popen]) -> None:
    """NCCL waits for a rank that has ended until TIMEOUT, gloo does not: have it give up at once."""
    while all(process.poll() is None for process in processes):
        time.sleep(ALIVE_S)
    if (found := workers()) is not None and not found.why_ended:
        found.ranks.group.abort()


@contextlib.contextmanager
def _ctrl_c_afterwards() -> Iterator[None]:
    """An interruption in the midst of this comes at its end. Signals are the main thread's."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


def load(
    name: str | Path, num_gpus: int, device: str = "cpu", dtype: str | None = None, *, seed: int = 0, hub: bool = False
) -> LoadedModel:
    """A model as `models.load` has it, on so many GPUs of this machine, or with "cpu" in so many processes."""
    return on_gpus(models.source_of(name, device, dtype, seed, hub), num_gpus, device)


def on_gpus(source: models.Source, num_gpus: int, device: str = "cpu") -> LoadedModel:
    """UserError, before any process is started, if the model cannot be split so, or if there are not as many GPUs."""
    whole("num_gpus", num_gpus, 2, MOST_GPUS)
    if device not in ("cpu", "cuda"):
        raise UserError(f"device = {device!r}: a model on several GPUs takes the first ones; use 'cuda', or 'cpu'")
    if device == "cuda" and num_gpus > (found := torch.cuda.device_count()):
        raise UserError(f"num_gpus = {num_gpus}: torch finds {found} here; use num_gpus of 1 to {found}")
    _, plan = source.empty(num_gpus)
    workers = Workers(source, num_gpus, device)
    try:
        loaded = models.part_of(source, shards.Part(0, num_gpus), _place(device, 0))
        shards.join(loaded.model, plan, workers.meet(loaded.device))
    except BaseException:
        workers.close()
        raise
    return dataclasses.replace(loaded, workers=workers)


def _place(device: str, rank: int) -> str:
    return f"cuda:{rank}" if device == "cuda" else device


# On both sides


class ParallelStore(KVStore):
    """Rank 0's part of a pool; the other ranks make theirs."""

    def __init__(self, loaded: LoadedModel, *sizes: int) -> None:
        self.untold: list[CacheOp] = []
        super().__init__(loaded.held, *sizes, loaded.dtype, loaded.device)
        self.pool = loaded.workers.new_pool()
        loaded.workers.ask("make_store", self.pool, *sizes)
        weakref.finalize(self, loaded.workers.give_up, self.pool)

    def apply(self, ops: list[CacheOp]) -> None:
        super().apply(ops)
        self.untold += ops


class ParallelRunner(ModelRunner):
    """Tells the other ranks of each pass, and takes part in it."""

    def __init__(self, store: ParallelStore, loaded: LoadedModel, *sizes: Any) -> None:
        super().__init__(loaded, *sizes)
        self._store, self._workers = store, loaded.workers
        self._workers.ask("make_runner", store.pool, *sizes)
        self._known = Tables(*self._tables.shape)
        self._news: tuple[Batch, np.ndarray | None] | tuple[()] = ()

    def load(self, batch: Batch, host_tokens: np.ndarray) -> None:
        super().load(batch, host_tokens)
        self._news = _bare(batch), self._known.changes(batch)

    def decode(self, batch: Batch) -> Tensor:
        return self._pass("decode", lambda: super(ParallelRunner, self).decode(batch))

    def prefill(self, batch: Batch) -> Tensor:
        return self._pass("prefill", lambda: super(ParallelRunner, self).prefill(batch))

    def score(self, batch: Batch) -> Tensor:
        self._news = _bare(batch), None
        return self._pass("score", lambda: super(ParallelRunner, self).score(batch))

    def idle(self) -> None:
        self._together(super().idle, "call", "idle")

    def capture_all(self, max_context: int) -> None:
        self._together(lambda: super(ParallelRunner, self).capture_all(max_context), "call", "capture_all", max_context)

    def _pass(self, method: str, compute: Callable[[], Tensor]) -> Tensor:
        ops, self._store.untold = self._store.untold, []
        rows = [(_KINDS.index(op.kind), op.src, op.dst) for op in ops]
        told, self._news = Pass(method, np.array(rows, np.int32), *self._news), ()
        return self._together(compute, "run", told)

    def _together(self, compute: Callable[[], Any], method: str, *given: object) -> Any:
        with self._workers.together():
            self._workers.tell(method, self._store.pool, *given)
            return compute()


def _bare(batch: Batch) -> Batch:
    """What of a batch the model runner of another rank reads, but for the block tables."""
    rows = range(len(batch.rows))
    return dataclasses.replace(batch, seqs=[], rows=rows, groups=[], live=_NOTHING, tables=_NOTHING)


def store_for(loaded: LoadedModel, num_blocks: int, block_size: int, num_cpu_blocks: int) -> KVStore:
    """A pool on the GPUs of a model. UserError if it does not fit."""
    sizes = num_blocks, block_size, num_cpu_blocks
    return (
        ParallelStore(loaded, *sizes) if loaded.workers else KVStore(loaded.held, *sizes, loaded.dtype, loaded.device)
    )


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
            del self._pools[pool]
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
    loaded = models.part_of(source, part, device)
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
