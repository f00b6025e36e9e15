"""Published code as the oracle: our memory manager and schedulers against vLLM's own, operation by operation.

    python tests/oracle.py --runs 1000 --seed 0

`make oracle` fetches vLLM by name from the Python package index, unpacks it into a cache outside the checkout and
imports its memory managers and schedulers, nothing else. Both sides are given the same random operations and the same
random runs with too little memory. A run's number is its seed. What vLLM decides otherwise is a list of settings on our
side (published/rules2023.py, published/v1.py): with all of them on, nothing may differ; each is then turned off in
turn, and the runs that differ are counted. The first difference of a run is one message. Without a network it says so.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fuzz import Ask, Case, smallest
from published import paged2023, rules2023, trials, v1
from published.fetch import NotFetched
from published.rules2023 import Manager2023, Rules2023, Scheduler2023
from published.same import Difference
from published.sides import OurManager, OurScheduler

from repro.engine.chunked import ChunkedPrefillScheduler
from repro.errors import UserError
from repro.harness.progress import Progress


def our_manager(case: Case) -> Manager2023:
    return Manager2023(case.num_blocks, case.block_size, case.watermark, case.cpu_blocks)


def our_chunked(case: Case) -> v1.OurChunked:
    return v1.OurChunked(ChunkedPrefillScheduler(our_manager(case), v1.config(case)))


def our_scheduler(case: Case, rules: Rules2023) -> OurScheduler:
    return OurScheduler(Scheduler2023(our_manager(case), case.config(), rules))


def pools(seed: int) -> Case:
    """A pool for random operations."""
    rng = random.Random(f"pool {seed}")
    return Case(
        (Ask(1, 1),),
        block_size=rng.choice((1, 2, 4, 8, 16)),
        num_blocks=rng.randint(1, 30),
        cpu_blocks=rng.choice((0, 3, 30, 100)),
        watermark=rng.choice((0.0, 0.0, 0.01, 0.2)),
        seed=seed,
    )


def each(name: str, numbers: range) -> Iterator[int]:
    """Runs, with a line of progress."""
    progress = Progress(name, [("run", 1.0)] * len(numbers))
    for number in numbers:
        progress.start("run", "run", 1.0)
        yield number
        progress.finish("run")
        progress.show()
    progress.close()


def again(seed: int) -> str:
    return f"again: python tests/oracle.py --runs 1 --seed {seed}"


def counts(seen: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(seen.items()) if count)


@dataclass(frozen=True)
class Schedulers:
    """A comparison of schedulers: `run` a case with some of the settings (named in `kinds`) on."""

    name: str
    draw: Callable[[int], Case]
    run: Callable[[Case, Any], Counter[str]]
    every: Any
    none: Any
    kinds: Mapping[str, str]

    def difference(self, case: Case, rules: Any) -> str | None:
        """The first difference of a run, if there is one."""
        try:
            self.run(case, rules)
        except Difference as found:
            return str(found)
        except UserError:  # while a run is made smaller: nothing that could run
            return None
        return None

    def compare(self, numbers: range) -> bool:
        """Whether nothing differs with all settings on; and what does with one of them off."""
        seen, apart, first, as_it_is = Counter[str](), Counter[str](), dict[str, str](), 0
        for seed in each(self.name, numbers):
            case = self.draw(seed)
            try:
                seen += self.run(case, self.every)
            except Difference as found:
                print(f"DIFFERENT: {self.name}, all settings on: {found}\n{again(seed)}")
                least = smallest(case, lambda one: self.difference(one, self.every) is not None)
                print(f"as small as it gets:\n{least}\n{self.difference(least, self.every)}")
                return False
            for name in self.kinds:
                found = self.difference(case, self.every.without(name))
                if found is not None:
                    apart[name] += 1
                    first.setdefault(name, found)
            as_it_is += self.difference(case, self.none) is None
        print(f"{self.name}: {len(numbers):,} runs, {seen['steps']:,} steps: equal with the settings on")
        print(f"  {counts(seen)}")
        if self.kinds:
            print(f"  no setting on: {len(numbers) - as_it_is:,} runs differ; one off, and the first of them:")
        for name, kind in self.kinds.items():
            print(f"  {name:<24} {apart[name]:>5}  vLLM {kind}\n{'':33}{first.get(name, 'not met')}")
        return True


def compare_managers(published: paged2023.Published, numbers: range) -> bool:
    """Whether the memory managers of 0.1.7 and ours do the same."""
    name, seen = f"memory manager of vLLM {paged2023.VERSION}", Counter[str]()
    for seed in each(name, numbers):
        case = pools(seed)
        try:
            seen += trials.operations(case, OurManager(our_manager(case)), paged2023.TheirManager(published, case))
        except Difference as found:
            print(f"DIFFERENT: {name}: {found}\n{again(seed)}")
            return False
    asked = {what.removeprefix("may "): seen.pop(what) for what in list(seen) if what.startswith("may ")}
    no = {what.removeprefix("not "): seen.pop(what) for what in list(seen) if what.startswith("not ")}
    print(f"{name}: {len(numbers):,} runs, {seen.total():,} operations: equal\n  {counts(seen)}")
    for what in sorted(asked):
        print(f"  may a group {what}? {asked[what]:,} times asked; {no.get(what, 0):,} times only vLLM says no")
    return True


def compare_2023(numbers: range) -> bool:
    """vLLM 0.1.7: the memory manager, then the scheduler."""
    published = paged2023.published()

    def run(case: Case, rules: Rules2023) -> Counter[str]:
        theirs = paged2023.TheirScheduler(published, case)
        return trials.run(case, trials.taken(case), our_scheduler(case, rules), theirs)

    name = f"scheduler of vLLM {paged2023.VERSION}"
    schedulers = Schedulers(name, trials.draw, run, Rules2023(), rules2023.OURS, rules2023.KINDS)
    return compare_managers(published, numbers) and schedulers.compare(numbers)


def compare_v1(numbers: range) -> bool:
    """vLLM V1: the scheduler with its memory manager."""
    published = v1.published()

    def run(case: Case, rules: None) -> Counter[str]:
        plain = ChunkedPrefillScheduler(our_manager(case), v1.config(case))
        theirs = v1.TheirV1(published, case)
        return trials.run(case, trials.taken(case, plain), our_chunked(case), theirs)

    return Schedulers(f"scheduler of vLLM {v1.VERSION} (V1)", v1.draw, run, None, None, {}).compare(numbers)


COMPARISONS = {"2023": compare_2023, "v1": compare_v1}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help="how many of each comparison (default 1,000)")
    parser.add_argument("--seed", type=int, default=0, help="the first run's number")
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS), help="one of the two")
    options = parser.parse_args(arguments)
    numbers = range(options.seed, options.seed + options.runs)
    started, same = time.monotonic(), True
    print(f"runs {numbers.start} to {numbers.stop - 1}")
    for name in options.only:
        try:
            same &= COMPARISONS[name](numbers)
        except NotFetched as reason:
            print(f"skipped: {reason}")
    print(f"{time.monotonic() - started:.0f} s")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
