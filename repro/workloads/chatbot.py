"""Chatbot requests (section 6.5, Fig. 17): each prompt is what fits of its conversation so far, and a new query.

With probability 0.1 a request opens a conversation, otherwise one of those that run gets its next round. The prompt is
the last 1024 tokens of history and query, the answer has at most 1016 tokens, and no K/V is kept from round to round.
Queries and answers are drawn like the ShareGPT-like requests of the other experiments, one pair a round.

A conversation ends after its own rounds and is then gone, as in the authors' script. How many prompts reach the full
1024 tokens decides the figure, and the paper does not say: it depends on how long ShareGPT's conversations are, and
only first rounds are known here. Their number is geometric, with ShareGPT's mean (330,239 rounds of 94,145
conversations, as a later survey counts them: arXiv:2512.17843); other means show how much hangs on it. As for the
authors, the next round may arrive before an answer is finished."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from repro.errors import UserError
from repro.workloads import length_source
from repro.workloads.lengths import LengthSource, SourceFacts
from repro.workloads.trace import Trace, build_trace

PROMPT_LIMIT, OUTPUT_LIMIT = 1024, 1016  # tokens; the authors keep 8 of 2048 free
SHAREGPT_ROUNDS = 3.51  # rounds of a conversation, on average
_CONVERSATIONS_STREAM = 2  # beside the streams of arrivals and lengths


@dataclass(frozen=True, eq=False)
class Conversations:
    """Lengths of a chatbot's requests, made of `rounds` (query and answer, in tokens)."""

    rounds: LengthSource
    new_probability: float = 0.1
    mean_rounds: float | None = SHAREGPT_ROUNDS

    def __post_init__(self) -> None:
        if not 0 <= self.new_probability <= 1:
            raise UserError(f"new_probability = {self.new_probability} must be a probability, from 0 to 1")
        if self.mean_rounds is not None and not 1 <= self.mean_rounds < math.inf:
            raise UserError(f"mean_rounds = {self.mean_rounds} must be at least 1, or None for no end at all")

    @cached_property
    def facts(self) -> SourceFacts:
        rounds = self.rounds.facts
        prompt, output = self.draw(2000, 0).mean(axis=0)
        length = "never ends" if self.mean_rounds is None else f"has {self.mean_rounds:g} rounds on average (geometric)"
        return SourceFacts(
            source=f"conversations of rounds from: {rounds.source}",
            recipe=f"a new conversation with probability {self.new_probability:g} or when none runs, else the next "
            f"round of a random one; a conversation {length}; means are those of 2,000 requests",
            filter=f"the last {PROMPT_LIMIT} tokens of history and query; at most {OUTPUT_LIMIT} of output; "
            f"{rounds.filter}",
            dropped_share=rounds.dropped_share,
            mean_prompt_tokens=float(prompt),
            mean_output_tokens=float(output),
        )

    def draw(self, num_pairs: int, seed: int) -> np.ndarray:
        """[num_pairs, 2] (prompt, output) tokens, in the order of arrival. A seed's draws of any length begin alike, if
        those of the rounds do."""
        rng = np.random.default_rng([seed, _CONVERSATIONS_STREAM])
        fresh, choice = rng.random((num_pairs, 2)).T
        num_rounds = np.full(num_pairs, math.inf)  # of the conversation that each request could open
        if self.mean_rounds is not None:
            rng = np.random.default_rng([seed, _CONVERSATIONS_STREAM, 1])
            num_rounds = rng.geometric(1 / self.mean_rounds, num_pairs)
        requests = self.rounds.draw(num_pairs, seed)
        running: list[list[float]] = []  # [tokens of history, rounds left]
        for index, (query, answer) in enumerate(requests.tolist()):
            if not running or fresh[index] < self.new_probability:
                place = len(running)
                running.append([0, num_rounds[index]])
            else:
                place = int(choice[index] * len(running))
            conversation = running[place]
            answer = min(answer, OUTPUT_LIMIT)
            requests[index] = min(conversation[0] + query, PROMPT_LIMIT), answer
            conversation[0] += query + answer
            conversation[1] -= 1
            if conversation[1] == 0:
                running[place] = running[-1]
                running.pop()
        return requests


def chatbot_trace(
    rate: float,
    duration_s: float,
    seed: int,
    lengths: str | None = None,
    new_probability: float = 0.1,
    mean_rounds: float | None = SHAREGPT_ROUNDS,
) -> Trace:
    """A trace of chatbot requests. `lengths` names another source of rounds, as for `make_trace("sharegpt", ...)`."""
    rounds = length_source("sharegpt", lengths)
    return build_trace("chatbot", Conversations(rounds, new_probability, mean_rounds), rate, duration_s, seed)
