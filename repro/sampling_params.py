"""How the outputs of a request are decoded (§4.4), as a user asks for it. The scheduler reads `n` and whether beams are
searched; the rest is for the executor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from repro.checks import flag, instance, number, several, shown, user_facing, whole
from repro.errors import UserError


@user_facing
@dataclass(frozen=True)
class SamplingParams:
    """The names are vLLM's. UserError for a value that cannot be, or that would be taken and ignored.

    n, use_beam_search     parallel samples, or beams of width `n`; with beams, what chooses tokens at random is refused
    temperature            0 is greedy
    top_k, top_p           only the k best tokens (0: all), then the fewest that hold p of what is left (1: all)
    seed                   any whole number, modulo 2**64; with it a request's samples depend neither on the run nor on
                           the batch. None: the run draws one, and reports it
    max_tokens, min_tokens lengths of an output; no stop token is chosen before `min_tokens`
    ignore_eos             go on after the model's own stop tokens
    stop, stop_token_ids   texts (cut off the output's text) and more tokens (kept) that end an output
    repetition_penalty     divides positive logits, and multiplies negative ones, of tokens of prompt and output
    presence_penalty, frequency_penalty   taken off the logits of the output's tokens: once, and times their count
    logprobs, prompt_logprobs   the so many best log-probabilities at each token of output and prompt, and its own
    length_penalty         a finished beam's score is its summed log-probability / its length ** length_penalty
    early_stopping         end a search with the n-th finished beam (True), when no better one is likely (False), or
                           when none is possible ("never"): as transformers' beam search"""

    n: int = 1
    use_beam_search: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        for name, (check, *bounds) in _CHECKS.items():
            if (value := getattr(self, name)) is not getattr(SamplingParams, name):  # the defaults are right
                object.__setattr__(self, name, check(name, value, *bounds))
        if self.top_p == 0:
            raise UserError("top_p = 0 would keep no token; use 0 < top_p <= 1, or temperature=0 for the best one")
        if self.seed is not None:
            object.__setattr__(self, "seed", self.seed % 2**64)
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens = {self.min_tokens} is more than max_tokens = {self.max_tokens}")
        if self.use_beam_search and self.n < 2:
            raise UserError("use_beam_search needs n (the beam width) of at least 2; use temperature=0 for greedy")
        if self.use_beam_search and self.temperature not in (0, 1):
            raise UserError(f"temperature = {self.temperature} does nothing in a beam search; leave it out")
        for name in _NOT_FOR_BEAMS if self.use_beam_search else _ONLY_FOR_BEAMS:
            if (value := getattr(self, name)) != getattr(SamplingParams, name):
                kind = "is not for" if self.use_beam_search else "is only for"
                raise UserError(f"{name} = {shown(value)} {kind} beam search; leave it out")

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn at random."""
        return self.temperature == 0 or self.use_beam_search

    @property
    def changes_logits(self) -> bool:
        """Whether a token depends on the output's length or tokens in more ways than through the model."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return self.min_tokens > 0 or penalties != (1, 0, 0)


def _texts(name: str, value: object) -> tuple[str, ...]:
    value = () if value is None else (value,) if isinstance(value, str) else value
    texts = several(name, value, str, "a text or a list of texts")
    if not all(texts):
        raise UserError(f"{name} = {shown(value)} has an empty text, which would end every output at once")
    return texts


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    value = () if value is None else value
    return tuple(whole(f"one of {name}", one) for one in several(name, value, object, "a list of token ids"))


def _early(name: str, value: object) -> bool | str:
    return value if value == "never" else instance(name, value, bool, "True, False or 'never'")


#: field -> its check and the bounds of the check
_CHECKS = {
    "n": (whole, 1, 256),
    "use_beam_search": (flag,),
    "temperature": (number, 0),
    "top_k": (whole, 0),
    "top_p": (number, 0, 1),
    "seed": (whole, -math.inf, math.inf),
    "max_tokens": (whole, 1),
    "ignore_eos": (flag,),
    "min_tokens": (whole, 0),
    "stop": (_texts,),
    "stop_token_ids": (_token_ids,),
    "repetition_penalty": (number, 0.01, 100),
    "presence_penalty": (number, -2, 2),
    "frequency_penalty": (number, -2, 2),
    "logprobs": (whole, 0),
    "prompt_logprobs": (whole, 0),
    "length_penalty": (number, -10, 10),
    "early_stopping": (_early,),
}
_NOT_FOR_BEAMS = ("top_k", "top_p", "stop", "repetition_penalty", "presence_penalty", "frequency_penalty")
_ONLY_FOR_BEAMS = ("length_penalty", "early_stopping")
