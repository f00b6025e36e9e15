"""The comparison of oracle.py, without a network: ours beside ours is equal, and a planted fault is found.

`make oracle` puts published code on the other side. Here the other side is ours, too: its free blocks lie the other way
round, so that only a renaming of blocks makes both equal, and in turn it has one fault.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import oracle
import pytest
from fuzz import Case
from published import fetch, trials, v1
from published.rules2023 import KINDS, OURS, Manager2023, Rules2023, Scheduler2023
from published.same import Difference, Memory, Move, Renaming
from published.sides import ANSWERS, OurManager, OurScheduler

from repro.engine.chunked import ChunkedPrefillScheduler
from repro.engine.memory import CacheOp, PagedKVCacheManager
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.sequence import Sequence as EngineSequence
from repro.engine.sequence import SequenceGroup, by_rank
from repro.setup.environment import ROOT

RUNS = range(60)
ALL = Rules2023()


def other_manager(case: Case, kind: type[Manager2023] = Manager2023) -> Manager2023:
    """The other side's: its blocks are handed out in another order."""
    manager = kind(case.num_blocks, case.block_size, case.watermark, case.cpu_blocks)
    manager.gpu._free.reverse()
    manager.cpu._free.reverse()
    return manager


def operate(case: Case, kind: type[Manager2023] = Manager2023) -> None:
    ours = OurManager(oracle.our_manager(case))
    trials.operations(case, ours, OurManager(other_manager(case, kind), ANSWERS))


def run(case: Case, theirs: Scheduler2023, rules: Rules2023 = ALL) -> None:
    trials.run(case, trials.taken(case), oracle.our_scheduler(case, rules), OurScheduler(theirs))


def run_with(kind: type[Manager2023]) -> Callable[[Case], None]:
    return lambda case: run(case, Scheduler2023(other_manager(case, kind), case.config(), ALL))


def differences(compare: Callable[[Case], None], cases: Sequence[Case]) -> Iterator[str]:
    for case in cases:
        try:
            compare(case)
        except Difference as difference:
            yield str(difference)


POOLS = [oracle.pools(seed) for seed in RUNS]
CASES = [trials.draw(seed) for seed in RUNS]


def test_ours_beside_ours_is_equal() -> None:
    assert list(differences(operate, POOLS)) == []
    assert list(differences(run_with(Manager2023), CASES)) == []


def test_the_random_trials_do_everything() -> None:
    done, happened = Counter[str](), Counter[str]()
    for case in POOLS:
        other = OurManager(other_manager(case), ANSWERS)
        done += trials.operations(case, OurManager(oracle.our_manager(case)), other)
    for what in ("append", "fork", "start", "swap in", "swap out", "recompute", "end of a sequence"):
        assert done[what] >= 50, f"hardly any {what}"
    assert done["not append"] and done["not resume"] and not done["not start"] + done["not swap out"]
    for case in CASES:
        other = OurScheduler(Scheduler2023(other_manager(case), case.config(), ALL))
        happened += trials.run(case, trials.taken(case), oracle.our_scheduler(case, ALL), other)
    for what in ("beam steps", "blocks: copy", "blocks: swap in", "preempted by swap", "preempted by recompute"):
        assert happened[what] >= 20, f"hardly any {what}"


# Faults of the other side


class NoCopyOnWrite(Manager2023):
    def append_slots(self, group: SequenceGroup, num_tokens: int) -> list[CacheOp]:
        if (num_tokens - 1) % self.block_size == 0:
            return super().append_slots(group, num_tokens)
        return []


class CopyNotSaid(Manager2023):
    def append_slots(self, group: SequenceGroup, num_tokens: int) -> list[CacheOp]:
        return super().append_slots(group, num_tokens)[1:]


class CopyFromElsewhere(Manager2023):
    def append_slots(self, group: SequenceGroup, num_tokens: int) -> list[CacheOp]:
        return [CacheOp(op.kind, op.dst, op.src) for op in super().append_slots(group, num_tokens)]


class ForkNotCounted(Manager2023):
    def fork(self, group: SequenceGroup, parents: list[int], num_tokens: int) -> list[CacheOp]:
        ops = super().fork(group, parents, num_tokens)
        for child, parent in enumerate(parents):
            if child != parent:
                for block in self._tables[group.seqs[child]]:
                    self.gpu.ref_counts[block] -= 1
        return ops


class LastBlockKept(Manager2023):
    def free_sequence(self, seq: EngineSequence) -> None:
        self.gpu.release(self._tables.pop(seq)[:-1])


class WrongParent(Manager2023):
    def fork(self, group: SequenceGroup, parents: list[int], num_tokens: int) -> list[CacheOp]:
        first = min(parents)
        return super().fork(group, [i if i in parents else first for i in range(len(parents))], num_tokens)


class SwapSharesNothing(Manager2023):
    """A shared block goes out once for each of its holders."""

    def swap_out(self, group: SequenceGroup) -> list[CacheOp]:
        ops = super().swap_out(group)
        for seq in group.seqs[1:]:
            for place, block in enumerate(self._tables[seq]):
                if self.cpu.ref_counts[block] > 1 and self.cpu.num_free:
                    self.cpu.release([block])
                    self._tables[seq][place] = self.cpu.allocate()
        return ops


class NoWatermark(Manager2023):
    def can_allocate(self, group: SequenceGroup, num_tokens: int) -> bool:
        return self.blocks_needed(group, num_tokens) <= self.num_free_blocks


IN_MEMORY = [NoCopyOnWrite, CopyNotSaid, CopyFromElsewhere, ForkNotCounted, LastBlockKept, WrongParent]


@pytest.mark.parametrize("fault", [*IN_MEMORY, SwapSharesNothing, NoWatermark])
def test_a_fault_in_memory_is_found_by_operations(fault: type[Manager2023]) -> None:
    assert next(differences(lambda case: operate(case, fault), POOLS), "nothing") != "nothing"


@pytest.mark.parametrize("fault", [*IN_MEMORY, SwapSharesNothing, NoWatermark])
def test_a_fault_in_memory_is_found_by_runs(fault: type[Manager2023]) -> None:
    found = next(differences(run_with(fault), CASES), "nothing")
    assert found.startswith("run ") and ", step " in found and "\n" not in found  # one message


class OldestGoes(Scheduler2023):
    def holders(self) -> list[SequenceGroup]:
        return [min(super().holders(), key=by_rank)]


class NewestStartsFirst(Scheduler2023):
    def _admit(self, output: object) -> None:
        self.waiting.reverse()
        super()._admit(output)
        self.waiting.reverse()


@pytest.mark.parametrize("fault", [OldestGoes, NewestStartsFirst])
def test_a_fault_in_scheduling_is_found(fault: type[Scheduler2023]) -> None:
    found = differences(lambda case: run(case, fault(other_manager(case), case.config(), ALL)), CASES)
    assert next(found, "nothing") != "nothing"


# Settings


class Plain(Scheduler):
    """The scheduler itself, in the place of one with settings."""

    dropped: list[SequenceGroup] = []
    held_back: list[SequenceGroup] = []


def test_without_settings_it_is_our_scheduler() -> None:
    def beside_itself(case: Case) -> None:
        plain = PagedKVCacheManager(case.num_blocks, case.block_size, case.watermark, case.cpu_blocks)
        run(case, Plain(plain, case.config()), OURS)

    assert list(differences(beside_itself, CASES)) == []


@pytest.mark.parametrize("name", ["free_block_each", "prompts_apart", "singles_uncounted", "full_swap_fails"])
def test_a_setting_that_is_off_is_noticed(name: str) -> None:
    def without(case: Case) -> None:
        run(case, Scheduler2023(other_manager(case), case.config(), ALL.without(name)))

    assert next(differences(without, CASES), "nothing") != "nothing"


def test_every_setting_is_explained() -> None:
    assert [setting.name for setting in fields(Rules2023)] == list(KINDS)


# Chunked prefill


class ChunkIsTooLong(ChunkedPrefillScheduler):
    def _continue(self, output: SchedulerOutput, group: SequenceGroup, budget: int) -> int:
        return super()._continue(output, group, budget + 1)


class OldestIsDrivenOut(ChunkedPrefillScheduler):
    def holders(self) -> list[SequenceGroup]:
        return [min(super().holders(), key=by_rank)]


class StartsWithItsFirstPart(PagedKVCacheManager):
    """A prompt starts though not all of it fits."""

    def can_allocate(self, group: SequenceGroup, num_tokens: int) -> bool:
        return super().can_allocate(group, 1)


class WaitsWithWhatItHas(ChunkedPrefillScheduler):
    """A prompt that finds no block keeps those that it has."""

    def _continue(self, output: SchedulerOutput, group: SequenceGroup, budget: int) -> int:
        stored, size = self.prefilling[group], self.manager.block_size
        needed = self.manager.cdiv(min(stored + budget, group.num_stored(self.iteration))) - -(-stored // size)
        return 0 if needed > self.manager.num_free_blocks else super()._continue(output, group, budget)


def beside_chunked(
    kind: type[ChunkedPrefillScheduler], memory: type[PagedKVCacheManager] = PagedKVCacheManager
) -> Callable[[Case], None]:
    def compare(case: Case) -> None:
        manager = memory(case.num_blocks, case.block_size, case.watermark)
        manager.gpu._free.reverse()
        other = v1.OurChunked(kind(manager, v1.config(case)))
        requests = trials.taken(case, ChunkedPrefillScheduler(oracle.our_manager(case), v1.config(case)))
        trials.run(case, requests, oracle.our_chunked(case), other)

    return compare


def test_chunked_prefill_is_compared_too() -> None:
    cases = [v1.draw(seed) for seed in range(100)]
    assert list(differences(beside_chunked(ChunkedPrefillScheduler), cases)) == []
    for kinds in (
        (ChunkIsTooLong,),
        (OldestIsDrivenOut,),
        (ChunkedPrefillScheduler, StartsWithItsFirstPart),
        (WaitsWithWhatItHas,),
    ):
        assert next(differences(beside_chunked(*kinds), cases), "nothing") != "nothing", kinds


# Renaming


def memory(blocks: list[int], other: list[int]) -> Memory:
    references = Counter(blocks + other)
    return Memory(
        {(0, 0): ("gpu", blocks), (1, 0): ("gpu", other)},
        {"gpu": dict(references), "cpu": {}},
        {"gpu": 10 - len(references), "cpu": 0},
    )


def test_blocks_may_have_other_names_and_nothing_else() -> None:
    same = Renaming()
    same.check(memory([1, 2], [1, 3]), memory([7, 0], [7, 1]), [], [])
    same.check(memory([1, 2], [1, 4]), memory([7, 0], [7, 2]), [Move("copy", 2, 4)], [Move("copy", 0, 2)])
    with pytest.raises(Difference, match="elsewhere"):
        Renaming().check(memory([1, 2], [1, 3]), memory([7, 0], [6, 1]), [], [])
    with pytest.raises(Difference, match="keeps"):  # ours stays where it was, theirs has moved
        same.check(memory([1, 2], [1, 4]), memory([7, 3], [7, 2]), [], [])
    with pytest.raises(Difference, match="moved"):
        Renaming().check(memory([1, 2], [1, 3]), memory([1, 2], [1, 3]), [Move("copy", 2, 3)], [Move("copy", 3, 2)])
    with pytest.raises(Difference, match="references"):
        wrong = memory([1, 2], [1, 3])
        wrong.references["gpu"][1] = 1
        Renaming().check(memory([1, 2], [1, 3]), wrong, [], [])


# Fetching


def test_without_a_network_it_says_so_and_is_content(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPRO_ORACLE_DIR", str(tmp_path))
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: again\nERROR: nothing there\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *arguments, **named: failed)
    assert oracle.main(["--runs", "1"]) == 0
    skipped = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped: ")]
    assert skipped and all("cannot be fetched (nothing there)" in line for line in skipped)
    assert list(tmp_path.iterdir()) == []  # nothing half-made


def test_a_wheel_is_unpacked_and_not_fetched_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REPRO_ORACLE_DIR", str(tmp_path))
    calls = []

    def download(command: list[str], **named: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "thing-1.whl", "w") as wheel:
            wheel.writestr("thing/core.py", "x = 1")
            wheel.writestr("thing/large.so", "no Python")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", download)
    for _ in range(2):
        folder = fetch.fetched("thing", "1", "3.12", "any")
        assert [path.name for path in folder.rglob("*") if path.is_file()] == ["core.py"]
    assert len(calls) == 1 and "thing==1" in calls[0] and "--no-deps" in calls[0]
    assert [path.name for path in tmp_path.iterdir()] == ["thing-1"]


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REPRO_ORACLE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(fetch.NotFetched, match="cannot be kept"):
        fetch.fetched("thing", "1", "3.12", "any")


def test_a_package_is_imported_without_what_is_left_out(tmp_path: Path) -> None:
    package = tmp_path / "published_thing"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('not run')")
    (package / "core.py").write_text(
        "import absent.deep\nfrom absent import Tensor\nfrom published_thing.heavy import load\n"
        "class Layer(absent.deep.Module):\n    x: Tensor | None = None\n"
    )
    before = dict(sys.modules)
    (core,) = fetch.modules("published_thing", tmp_path, ["published_thing.core"], ["absent", "published_thing.heavy"])
    assert core.Layer().x is None and callable(core.load)
    assert sys.modules == before


def test_an_import_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "published_thing").mkdir()
    (tmp_path / "published_thing" / "core.py").write_text("import absent")
    with pytest.raises(fetch.NotFetched, match=r"core of .* does not import \(ModuleNotFoundError: .*'absent'\)"):
        fetch.modules("published_thing", tmp_path, ["published_thing.core"], [])
    assert "published_thing" not in sys.modules


def test_packages_are_kept_outside_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPRO_ORACLE_DIR", raising=False)
    assert ROOT not in fetch.cache().resolve().parents
