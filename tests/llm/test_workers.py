"""However a run ends, the other ranks' processes are gone, or ready for the next run; a dead one is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import TINY, llm, tokens

from repro.engine.loop import Observer
from repro.errors import UserError
from repro.llm import models, workers
from repro.llm.parts import Source
from repro.sampling_params import SamplingParams

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.heavy(30)]

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9], [20, 21], [30] * 11]
SOURCE = Source("tiny", TINY, "float32")
LIFE = """
from repro.llm import LLM, workers
from repro.llm.pool import PoolSize
from repro.sampling_params import SamplingParams
from test_workers import SOURCE

loaded = workers.split(SOURCE, 2)
llm = LLM(loaded, block_size=4, pool=PoolSize(num_blocks=50), quiet=True)
print(loaded.workers.processes[0].pid, flush=True)
while True:
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), progress=False)
"""


class After(Observer):
    """Does something once, after so many iterations."""

    next_s = 0.0

    def __init__(self, iterations, action):
        self.left, self.action = iterations, action

    def observe(self, engine, output, start_s):
        self.left -= 1
        if not self.left:
            self.action()


def is_there(pid):
    """Whether a process runs; what has ended and is not asked after yet does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_gone(pid, within_s=20.0):
    until = time.monotonic() + within_s
    while is_there(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_there(pid)


def test_a_run_that_ends_badly_leaves_workers_that_go_on_and_a_dead_worker_is_named():
    expected = tokens(llm(models.from_config(TINY, "tiny", by_name=True)), PROMPTS, GREEDY)
    engine = llm(workers.split(SOURCE, 2))
    (process,) = engine.loaded.workers.processes

    def is_whole():
        manager = engine.executor.manager
        return manager.num_free_blocks == manager.num_blocks == 200

    assert tokens(engine, PROMPTS, GREEDY) == expected
    assert is_whole()

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tokens(engine, PROMPTS, GREEDY, observers=[After(5, fail)])
    assert tokens(engine, PROMPTS, GREEDY) == expected
    assert is_whole()

    with pytest.raises(KeyboardInterrupt):
        tokens(engine, PROMPTS, GREEDY, observers=[After(5, lambda: os.kill(os.getpid(), signal.SIGINT))])
    with pytest.raises(KeyboardInterrupt), engine.loaded.workers.together():  # in the midst of a pass: at its end
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
    assert tokens(engine, PROMPTS, GREEDY) == expected
    assert is_whole()
    assert is_there(process.pid)

    other = llm(engine.loaded)  # has a pool of its own, on both ranks
    assert tokens(other, PROMPTS, GREEDY) == expected
    assert tokens(engine, PROMPTS, GREEDY) == expected

    with pytest.raises(UserError, match=rf"rank 1 of 2 \(process {process.pid}\) ended: SIGKILL; make the LLM anew"):
        tokens(engine, PROMPTS, GREEDY, observers=[After(5, lambda: os.kill(process.pid, signal.SIGKILL))])
    assert is_gone(process.pid)
    for again in (engine, other):
        with pytest.raises(UserError, match="rank 1 of 2 .*SIGKILL"):
            tokens(again, PROMPTS, GREEDY)


def test_workers_end_with_the_process_that_started_them():
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    lives = {
        how: subprocess.Popen([sys.executable, "-c", LIFE], env=environ, **pipes)
        for how in (signal.SIGINT, signal.SIGKILL)
    }
    for how, life in lives.items():
        pid = int(life.stdout.readline())
        assert is_there(pid)
        time.sleep(0.2)  # it is generating
        life.send_signal(how)
        life.communicate(timeout=60)
        assert life.returncode == -how
        assert is_gone(pid)
