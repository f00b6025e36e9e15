"""How a lesson grades: it plays traces against what the student wrote, and shows the smallest that breaks a rule.

The traces are an example of the lesson's own and then random ones, drawn by number, so that nobody passes by heart. One
that fails is made smaller as long as it breaks the same rule."""

from __future__ import annotations

import copy
import random
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from repro.course.shadow import Fault
from repro.engine.sequence import Request
from repro.errors import UserError
from repro.sampling_params import SamplingParams
from repro.words import count

#: code in these folders, the package and the standard library, is not the student's
NOT_THEIRS = (Path(__file__).parents[1], Path(sysconfig.get_path("stdlib")))


@dataclass(frozen=True)
class Ask:
    """One request: its prompt as token ids (None stands for one that nobody chose), output tokens, sequences, and when
    it comes (in iterations)."""

    prompt: tuple[int | None, ...]
    output: int
    n: int = 1
    beam: bool = False
    arrival: int = 0

    def __str__(self) -> str:
        chosen = f" {list(self.prompt)}" if any(token is not None for token in self.prompt) else ""
        kind = "beams" if self.beam else "sequences"
        several = f" x {self.n} {kind}" if self.n > 1 else ""
        comes = f", comes in iteration {self.arrival}" if self.arrival else ""
        return f"{len(self.prompt)}{chosen} + {count(self.output, 'token')}{several}{comes}"


@dataclass(frozen=True)
class Case:
    """A trace, and the pool that it runs in. `budget`: tokens of an iteration, where prompts are cut."""

    asks: tuple[Ask, ...]
    num_blocks: int
    block_size: int
    cpu_blocks: int = 0
    budget: int = 0
    seed: int = 0

    def requests(self) -> list[tuple[Request, tuple[int, ...] | None]]:
        """The requests in the order of their arrival, each with its prompt's token ids if somebody chose them."""
        made = []
        for number, ask in enumerate(sorted(self.asks, key=lambda ask: ask.arrival)):
            sampling = SamplingParams(n=ask.n, use_beam_search=ask.beam)
            prompt = None if None in ask.prompt else ask.prompt
            made.append((Request(number, float(ask.arrival), len(ask.prompt), ask.output, sampling), prompt))
        return made

    def __str__(self) -> str:
        swap = f", {self.cpu_blocks} in CPU memory" if self.cpu_blocks else ""
        budget = f"; at most {count(self.budget, 'token')} an iteration" if self.budget else ""
        asks = "; ".join(f"request {n}: {ask}" for n, ask in enumerate(sorted(self.asks, key=lambda ask: ask.arrival)))
        pool = f"{count(self.num_blocks, 'block')} of {count(self.block_size, 'slot')}"
        return f"{pool}{swap}{budget}. {asks}"


def unchosen(prompt: int, output: int, n: int = 1, beam: bool = False, arrival: int = 0) -> Ask:
    """A request whose prompt has so many tokens, all different from all others."""
    return Ask((None,) * prompt, output, n, beam, arrival)


def drawn(seed: int, sequences: int = 1, swap: bool = False, tight: bool = False) -> Case:
    """A random trace of the paged engine: up to four requests of up to `sequences` sequences, in a small pool; `tight`:
    so small that requests drive each other out."""
    rng = random.Random(seed)
    size = rng.choice((1, 2, 4))
    asks = []
    for _ in range(rng.randint(1, 4)):
        n = rng.randint(1, sequences)
        beam = n > 1 and rng.random() < 0.5
        asks.append(unchosen(rng.randint(1, 3 * size), rng.randint(1, 3 * size), n, beam, rng.randint(0, 3)))
    widest = max(ask.n * -(-(len(ask.prompt) + ask.output) // size) for ask in asks)
    blocks = widest + rng.randint(0, 2) if tight else 4 * widest
    return Case(tuple(asks), blocks, size, blocks if swap else 0, seed=seed)


def smaller(case: Case) -> Iterator[Case]:
    """The same trace with one thing less."""
    for at, ask in enumerate(case.asks):
        others = case.asks[:at], case.asks[at + 1 :]
        if len(case.asks) > 1:
            yield replace(case, asks=others[0] + others[1])
        less = [
            replace(ask, prompt=ask.prompt[:-1]) if len(ask.prompt) > 1 else ask,
            replace(ask, output=ask.output - 1) if ask.output > 1 else ask,
            replace(ask, n=ask.n - 1, beam=ask.beam and ask.n > 2) if ask.n > 1 else ask,
            replace(ask, arrival=ask.arrival - 1) if ask.arrival else ask,
        ]
        for one in less:
            if one is not ask:
                yield replace(case, asks=(*others[0], one, *others[1]))
    if all(ask.arrival for ask in case.asks):
        yield replace(case, asks=tuple(replace(ask, arrival=ask.arrival - 1) for ask in case.asks))
    for name in ("num_blocks", "cpu_blocks", "budget"):
        if getattr(case, name) > 1:
            yield replace(case, **{name: getattr(case, name) - 1})


@dataclass(frozen=True)
class Grade:
    """What a check says. `rule` is the broken one, None if all is well; `shown` is the trace, or the question,
    that shows it."""

    task: str
    rule: str | None
    found: str
    shown: str = ""

    @property
    def passed(self) -> bool:
        return self.rule is None

    def __repr__(self) -> str:
        head = f"{'PASSED' if self.passed else 'NOT YET'} ({self.task}): {self.found}"
        return f"{head}\n  {self.shown}" if self.shown else head

    def _repr_html_(self) -> str:
        color = "#1b7f3b" if self.passed else "#b3261e"
        word = "Passed" if self.passed else f"Not yet ({escape(self.rule)})"
        shown = f"<br>{escape(self.shown)}" if self.shown else ""
        return (
            f'<div style="border-left: 4px solid {color}; padding: 0.3em 0.8em; white-space: normal">'
            f'<b style="color: {color}">{word}.</b> {escape(self.found)}{shown}</div>'
        )


def fault(play: Callable[[Case], None], case: Case) -> Fault | None:
    """What is wrong when this trace is played; what the student's code raises is a fault, too."""
    try:
        play(case)
    except Fault as found:
        return found
    except Exception as error:
        return Fault("raises", raised(error))
    return None


def raised(error: Exception) -> str:
    """What went wrong in the student's code, and in which function of theirs; or in the engine, with what it got."""
    if isinstance(error, UserError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not any(Path(frame.filename).is_relative_to(one) for one in NOT_THEIRS)]
    what = f"{type(error).__name__}: {error}"
    if not theirs:
        return f"The engine cannot use what your code returned ({what})"
    return f"Your code raises {what}, in {theirs[-1].name}, line {theirs[-1].lineno}"


def grade(
    task: str,
    play: Callable[[Case], None],
    cases: Iterable[Case],
    student: object = None,
    base: type | None = None,
    method: str = "",
) -> Grade:
    """Play the cases until one breaks a rule, and make that one small.

    Where the task is a `method`, the `student`'s class must derive from the lesson's `base` and define it itself."""
    if base is not None and not (isinstance(student, type) and issubclass(student, base)):
        lesson = base.__module__.rpartition(".")[2]
        return Grade(task, "missing", f"Give a class that derives from {base.__name__} of repro.course.{lesson}.")
    if base is not None and method not in vars(student):
        return Grade(task, "missing", f"{student.__name__} does not define {method}, which is the task.")
    count = 0
    for case in cases:
        count += 1
        if (found := fault(play, case)) is None:
            continue
        candidates = smaller(case)
        while (candidate := next(candidates, None)) is not None:
            less = fault(play, candidate)
            if less is not None and less.rule == found.rule:
                case, found, candidates = candidate, less, smaller(candidate)
        return Grade(task, found.rule, f"{found}.", f"The smallest trace that shows it: {case}.")
    return Grade(task, None, f"{count} traces, and the shadow store is silent.")


def ask_all(
    task: str, rule: str, function: Callable[..., object], questions: Iterable[tuple[tuple, object, str]]
) -> Grade:
    """Ask a function of the student's: arguments, the right answer, and the question in words; easy ones come first."""
    count = 0
    for arguments, right, asked in questions:
        count += 1
        try:
            said = function(*copy.deepcopy(arguments))
        except Exception as error:
            return Grade(task, "raises", f"{raised(error)}.", f"Asked: {asked}.")
        if said != right:
            return Grade(task, rule, f"You say {said}, and it is {right}.", f"Asked: {asked}.")
    return Grade(task, None, f"{count} questions, and all answers are right.")
