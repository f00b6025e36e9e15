"""What the executor remembers about a request: its prompt and what its sequences have produced so far.

The scheduler works without ever seeing a token; the tokens are here."""

from dataclasses import dataclass, field

import numpy as np

from repro.engine.sequence import Request, Sequence


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence's output. `logprobs` are the model's own (temperature 1), empty if they are not asked for.

    `stopped` says that it ended before its length limit, by a stop token (which is kept as its last token)."""

    request: "RequestState"
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def cumulative_logprob(self) -> float:
        return float(sum(self.logprobs))

    def token_ids(self, start: int, stop: int) -> np.ndarray:
        """Tokens at positions start .. stop-1 of prompt and output, int64."""
        prompt = self.request.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        return np.concatenate([prompt, np.asarray(self.tokens, np.int64)])[start:stop]


@dataclass(eq=False)
class RequestState:
    """A request with its prompt's token ids, int64 [prompt_tokens]; `sequences` in the order of its samples;
    `beam_scores`, the sums of log-probabilities by which beams are ranked."""

    request: Request
    prompt: np.ndarray
    sequences: list[SequenceState] = field(default_factory=list)
    by_seq: dict[Sequence, SequenceState] = field(default_factory=dict)
    beam_scores: np.ndarray | None = None
    num_unfinished: int = 0

    def __post_init__(self) -> None:
        self.num_unfinished = self.request.sampling.n
        self.sequences = [SequenceState(self, index) for index in range(self.request.sampling.n)]

    @property
    def last_stored(self) -> int:
        """Tokens whose K/V is stored at the very end: the newest token's never is."""
        return self.request.prompt_tokens + self.request.output_tokens - 1

    @property
    def ranked(self) -> list[SequenceState]:
        """The sequences, best beam first."""
        if self.beam_scores is None:
            return self.sequences
        return [self.sequences[place] for place in np.argsort(-self.beam_scores, kind="stable")]
