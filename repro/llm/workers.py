"""The other GPUs' processes: started with a model, told what to do through a pipe each, and ended.

A pipe also tells when a process has ended: a worker whose pipe closes ends, and a worker that ends is named in a
UserError here. What workers do is in `repro.llm.parallel`."""

import contextlib
import dataclasses
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed

from repro.checks import whole
from repro.errors import UserError
from repro.llm import models, shards
from repro.llm.models import LoadedModel
from repro.llm.parts import Source, source_of

MOST_GPUS = 64
#: a worker whose pipe or collective failed is given so long to end
PATIENCE_S = 5.0
#: how often processes look whether another one is alive, where nothing else tells
ALIVE_S = 1.0
REMEDY = "make the LLM anew"


class Workers:
    """The processes of ranks 1 and up, started for one source; they end with this object, `close`, or this process."""

    def __init__(self, source: Source, num_gpus: int, device: str) -> None:
        self.num_gpus, self.why_ended = num_gpus, ""
        self._numbers, self._given_up = itertools.count(), list[int]()
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environ = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.processes, self._pipes = list[subprocess.Popen](), list[Connection]()
        self._ends = weakref.finalize(self, _end, self.processes, self._pipes)
        for rank in range(1, num_gpus):
            ours, theirs = Pipe()
            with theirs:
                command = [sys.executable, "-c", f"from repro.llm.parallel import serve; serve({theirs.fileno()})"]
                # A session of its own: Ctrl-C is for this process, which then ends its workers or goes on with them.
                options = {"pass_fds": [theirs.fileno()], "start_new_session": True}
                self.processes.append(subprocess.Popen(command, env=os.environ | environ, **options))
            self._pipes.append(ours)
            own = dataclasses.replace(source, tokenizer=None), shards.Part(rank, num_gpus), _place(device, rank)
            self._send(ours, pickle.dumps((*own, self._store.port)))

    def meet(self, device: torch.device) -> shards.Ranks:
        """Wait for all parts to be loaded. UserError if one cannot be."""
        with self.together():
            self._answers()
            self.ranks = shards.Ranks(shards.Part(0, self.num_gpus), device, self._store)
        if device.type == "cuda":
            threading.Thread(target=_watch, args=(weakref.ref(self), self.processes), daemon=True).start()
        return self.ranks

    def tell(self, method: str, *given: object, wants_answer: bool = False) -> None:
        """Have all workers call a method. UserError if one has ended."""
        self.check()
        given_up, self._given_up = self._given_up, []
        message = pickle.dumps((method, given, given_up, wants_answer))
        for pipe in self._pipes:
            self._send(pipe, message)

    def ask(self, method: str, *given: object) -> None:
        """The same, and wait until it is done. UserError with what a worker says against it; all go on."""
        with _ctrl_c_afterwards():
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

    def wait_for(self, queued: torch.cuda.Event | torch.cuda.Stream) -> None:
        """UserError if a worker has ended meanwhile: what the device has then computed is nothing."""
        with self.together():
            queued.synchronize()
        self.check()

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
        codes = {rank: one.poll() for rank, one in enumerate(self.processes, start=1)}
        ended = sorted((code >= 0, rank) for rank, code in codes.items() if code is not None)
        if not ended:
            return ""
        _, rank = ended[0]
        how = f"exit code {codes[rank]}" if codes[rank] >= 0 else signal.Signals(-codes[rank]).name
        with contextlib.suppress(EOFError, OSError):
            while self._pipes[rank - 1].poll():
                how = self._pipes[rank - 1].recv() or how
        return f"the process of rank {rank} of {self.num_gpus} (process {self.processes[rank - 1].pid}) ended: {how}"


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
    name: str | Path, device: str = "cpu", dtype: str | None = None, *, num_gpus: int = 1, hub: bool = False
) -> LoadedModel:
    """A model as `models.load` has it, on so many GPUs. UserError if it cannot be."""
    if whole("num_gpus", num_gpus, 1, MOST_GPUS) == 1:
        return models.load(name, device, dtype, hub=hub)
    if hub:
        raise UserError(f"num_gpus = {num_gpus} reads files on this machine; fetch the model with num_gpus=1 first")
    return split(source_of(name, device, dtype, num_gpus=num_gpus), num_gpus, device)


def split(source: Source, num_gpus: int, device: str = "cpu") -> LoadedModel:
    """A model on so many GPUs of this machine, the first ones, or with "cpu" in so many processes.

    UserError, before any process is started, if the model cannot be split so, or if there are not as many GPUs."""
    whole("num_gpus", num_gpus, 2, MOST_GPUS)
    if device not in ("cpu", "cuda"):
        raise UserError(f"device = {device!r}: a model on several GPUs takes the first ones; use 'cuda', or 'cpu'")
    if device == "cuda" and num_gpus > (found := torch.cuda.device_count()):
        raise UserError(f"num_gpus = {num_gpus}: torch finds {found} here; use num_gpus of 1 to {found}")
    _, plan = source.empty(num_gpus)
    workers = Workers(source, num_gpus, device)
    try:
        loaded = source.part(shards.Part(0, num_gpus), _place(device, 0))
        shards.join(loaded.model, plan, workers.meet(loaded.device))
    except BaseException:
        workers.close()
        raise
    return dataclasses.replace(loaded, workers=workers)


def _place(device: str, rank: int) -> str:
    return f"cuda:{rank}" if device == "cuda" else device
