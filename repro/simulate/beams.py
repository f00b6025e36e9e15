"""Which beams survive a step of beam search (§4.4): recorded from a real model, replayed in simulations.

A simulated beam search needs to know, for every step, which beam each beam continues; that decides what is shared and
what is copied. `recording()` is what a real model chose (made by `repro.bench.beams`). `Turnover` is a made-up stand-in
with one parameter, to show how much hangs on those choices; no result rests on it. Lengths, blocks and token values are
not known here."""

import json
import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from repro.errors import UserError

WIDTHS = (2, 4, 6)  # the paper's beam widths
#: what kind of recorded prompts stands for a workload's
KINDS = {"alpaca": "instruction", "sharegpt": "chat"}
FORMAT = "beam-parents-1"
FILE = "parents.json"


@dataclass(frozen=True)
class Recording:
    """Parent choices of a real model for prompts of one kind: width -> one text for each prompt, one digit for each
    beam and step. UserError where that cannot be.

    A request replays the prompt that its number selects. An output longer than the recording repeats its later half:
    that is what steady search looks like, while the first steps have just left the prompt."""

    kind: str
    texts: dict[int, list[str]]
    manifest: dict[str, Any]

    def __post_init__(self) -> None:
        for width in self.texts:
            for parents in self._choices[width].values():
                if parents is not None and any(parent >= width or parents[parent] != parent for parent in parents):
                    raise UserError(f"beam recording, {self.kind}, width {width}: {parents} moves a beam that survives")

    @cached_property
    def _choices(self) -> dict[int, dict[str, list[int] | None]]:
        """width -> what each of its steps' texts means. Few differ: up to 300 prompts have 200,000 steps."""
        return {width: _choices(texts, width) for width, texts in self.texts.items()}

    def parents(self, request_id: int, width: int, step: int) -> list[int] | None:
        if width not in self.texts:
            raise UserError(f"no recording of {width} beams; recorded: {', '.join(map(str, self.texts))}")
        prompts = self.texts[width]
        # A multiplicative hash: neighbours in a trace replay different prompts, each prompt equally often.
        text = prompts[request_id * 2654435761 % 2**32 % len(prompts)]
        steps = len(text) // width
        if step >= steps:
            half = steps // 2
            step = half + (step - half) % (steps - half)
        return self._choices[width][text[step * width : (step + 1) * width]]

    def replaced_share(self, width: int) -> float:
        """Mean share of a step's beams that end and are replaced by a continuation of another one."""
        texts, choices = self.texts[width], self._choices[width].items()
        moves = {step: sum(child != old for child, old in enumerate(parents or [])) for step, parents in choices}
        return sum(moves[step] for text in texts for step in _steps(text, width)) / sum(map(len, texts))


def _steps(text: str, width: int) -> list[str]:
    if not text or len(text) % width or not text.isdecimal():
        raise UserError(f"beam recording: {len(text)} characters are no steps of {width} digits")
    return [text[start : start + width] for start in range(0, len(text), width)]


def _choices(texts: list[str], width: int) -> dict[str, list[int] | None]:
    unmoved = list(range(width))
    differ = {step for text in texts for step in _steps(text, width)}
    parsed = {step: [int(digit) for digit in step] for step in sorted(differ)}
    return {step: None if parents == unmoved else parents for step, parents in parsed.items()}


def recording(kind: str, path: str | Path | None = None) -> Recording:
    """The recording of a kind of prompt ("instruction" or "chat") from a file, by default the package's own. UserError
    if there is none."""
    path = Path(__file__).with_name(FILE) if path is None else Path(path)
    try:
        return _parsed(kind, path.read_bytes())
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path} holds no recording of the beams of {kind!r} prompts ({error!r}); make one with `python -m "
            "repro bench beams`"
        ) from error


@lru_cache(maxsize=8)  # by content: a file that has changed is parsed anew. Every run of a study asks for its recording
def _parsed(kind: str, file: bytes) -> Recording:
    content = json.loads(file.decode())
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r} is not {FORMAT!r}")
    texts = {int(width): texts for width, texts in content["parents"][kind].items()}
    return Recording(kind, texts, content["manifest"])


@dataclass(frozen=True)
class Turnover:
    """A stand-in for a model, to show sensitivity only: after each step every beam but the best (number 0) ends with
    probability `share` and is replaced by a continuation of one that lives, chosen evenly."""

    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UserError(f"turnover = {self.share}: the share of beams replaced at a step is from 0 to 1")

    def parents(self, request_id: int, width: int, step: int) -> list[int] | None:
        chance = random.Random(request_id * 1_000_003 + step * 31 + width)
        lives = [beam == 0 or chance.random() >= self.share for beam in range(width)]
        if all(lives):
            return None
        survivors = [beam for beam in range(width) if lives[beam]]
        return [beam if lives[beam] else chance.choice(survivors) for beam in range(width)]
