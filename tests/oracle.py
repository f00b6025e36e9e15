"""Published code as the oracle: our memory manager and schedulers against vLLM's own, operation by operation.

    python tests/oracle.py --runs 1000 --seed 0

`make oracle` fetches vLLM by name from the Python package index, unpacks it into a cache outside the checkout and
imports its memory managers and schedulers, nothing else. Both sides are given the same random operations and the same
random runs with too little memory. A run's number is its seed. What 0.1.7 decides otherwise is a list of settings
(published/rules2023.py): with all of them on, nothing may differ; each is then turned off in turn, and the runs that
differ are counted. The first difference is printed in one message. Without a network it says so and does nothing.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable

from fuzz import Ask, Case, smallest
from published import paged2023, trials
from published.fetch import NotFetched
from published.rules2023 import KINDS, NAMES, OURS, Manager2023, Rules2023, Scheduler2023
from published.same import Difference
from published.sides import OurManager, OurScheduler

from repro.harness.progress import Progress

#: 0.1.7 in everything
ALL = Rules2023()


def our_manager(case: Case) -> Manager2023:
    return Manager2023(case.num_blocks, case.block_size, case.watermark, case.cpu_blocks)


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


def each(name: str, numbers: range) -> Iterable[int]:
    """Runs, with a line of progress."""
    progress = Progress(name, [("run", 1.0)] * len(numbers))
    for number in numbers:
        progress.start("run", "run", 1.0)
        yield number
        progress.finish("run")
        progress.show()
    progress.close()


def counts(seen: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(seen.items()))


def compare_2023(published: paged2023.Published, numbers: range) -> bool:
    """Whether vLLM 0.1.7 and ours are the same where they should be."""

    def operate(seed: int) -> Counter[str]:
        case = pools(seed)
        return trials.operations(case, OurManager(our_manager(case)), paged2023.TheirManager(published, case))

    def run(case: Case, rules: Rules2023) -> Counter[str]:
        theirs = paged2023.TheirScheduler(published, case)
        return trials.run(case, trials.taken(case), our_scheduler(case, rules), theirs)

    def difference(case: Case, rules: Rules2023 = ALL) -> str | None:
        try:
            run(case, rules)
        except Difference as found:
            return str(found)
        return None

    seen: Counter[str] = Counter()
    for seed in each("memory", numbers):
        try:
            seen += operate(seed)
        except Difference as found:
            print(f"DIFFERENT, memory manager of vLLM {paged2023.VERSION}: {found}")
            return False
    asked = Counter({what: seen.pop(what) for what in list(seen) if ": " in what})
    print(f"memory manager of vLLM {paged2023.VERSION}: {len(numbers):,} runs, {seen.total():,} operations: equal")
    print(f"  {counts(seen)}\n  {counts(asked)}")

    seen, apart, first = Counter(), Counter(), {}
    as_it_is = 0
    for seed in each("scheduler", numbers):
        case = trials.draw(seed)
        try:
            seen += run(case, ALL)
        except Difference as found:
            least = smallest(case, lambda one: difference(one) is not None)
            print(f"DIFFERENT, scheduler of vLLM {paged2023.VERSION}, all settings on: {found}")
            print(f"as small as it gets:\n{least}\n{difference(least)}")
            return False
        for name in NAMES:
            found = difference(case, ALL.without(name))
            apart[name] += found is not None
            if found:
                first.setdefault(name, found)
        as_it_is += difference(case, OURS) is None
    print(
        f"scheduler of vLLM {paged2023.VERSION}: {len(numbers):,} runs, {seen['steps']:,} steps: equal with its "
        f"settings on; {as_it_is:,} runs also without any\n  {counts(seen)}\n"
        "  one setting off, runs that differ, and the first of them:"
    )
    for name in NAMES:
        print(f"  {name:<18} {apart[name]:>5}  0.1.7 {KINDS[name]}\n{'':<27}{first.get(name, 'not met')}")
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help="how many of each comparison (default 1,000)")
    parser.add_argument("--seed", type=int, default=0, help="the first run's number")
    parser.add_argument("--only", nargs="+", choices=("2023", "v1"), default=("2023", "v1"), help="one of the two")
    options = parser.parse_args(arguments)
    numbers = range(options.seed, options.seed + options.runs)
    started = time.monotonic()
    print(f"runs {numbers.start:,} to {numbers.stop - 1:,}")
    same = True
    try:
        if "2023" in options.only:
            same = compare_2023(paged2023.published(), numbers)
    except NotFetched as reason:
        print(f"skipped: {reason}")
    print(f"{time.monotonic() - started:.0f} s")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
