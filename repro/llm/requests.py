"""What a user hands to `LLM.generate`: prompts, prefixes and arrival times, checked before any work, as token ids."""

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral

import numpy as np

from repro.checks import instance, number, several, shown, whole
from repro.engine.sequence import Request
from repro.errors import UserError
from repro.llm.missed import common_tokens
from repro.llm.models import LoadedModel
from repro.sampling_params import SamplingParams

_LONGEST_WAIT_S = 1e9  # what a clock can wait for


def token_ids_of(given: object, name: str, vocabulary: int) -> np.ndarray:
    """Token ids as int64 [tokens]: a list, an array or a tensor of whole numbers. UserError for anything else."""
    ids = given
    if not (isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu"):
        ids = given.tolist() if hasattr(given, "tolist") else given
        if not isinstance(ids, list | tuple | range):
            raise UserError(f"{name} = {shown(given)} cannot be used; give a text or a list of token ids")
        for one in ids:
            if type(one) is not int and (isinstance(one, bool) or not isinstance(one, Integral)):
                raise UserError(f"{name}: a token id of {shown(one)} is no whole number")
        ids = np.array(ids, object)  # of any size
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    if len(outside):
        raise UserError(f"{name}: token ids must be from 0 to {vocabulary - 1}, not {shown(int(outside[0]))}")
    return ids.astype(np.int64)


def vocabulary_of(loaded: LoadedModel) -> int:
    return loaded.model.config.get_text_config().vocab_size


def check_request(loaded: LoadedModel, request: Request, prompt: np.ndarray, name: str) -> frozenset[int]:
    """The tokens that end its outputs. UserError if the model cannot run the request."""
    limit, vocabulary = loaded.config.max_model_len, vocabulary_of(loaded)
    if len(prompt) != request.prompt_tokens or not len(prompt):
        raise UserError(
            f"{name}: {len(prompt)} token ids for a prompt of {request.prompt_tokens}; need as many, at least 1"
        )
    if len(prompt) + request.output_tokens > limit:
        raise UserError(
            f"{name}: {len(prompt)} + {request.output_tokens} tokens exceed the {limit} that {loaded.config.name} can "
            "take; shorten the prompt or max_tokens"
        )
    sampling = request.sampling
    stops = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else loaded.eos)
    for asked in ("logprobs", "prompt_logprobs"):
        if (getattr(sampling, asked) or 0) > vocabulary:
            raise UserError(f"{name}: {asked} = {getattr(sampling, asked)}, but there are {vocabulary} tokens")
    if sampling.stop_token_ids and max(sampling.stop_token_ids) >= vocabulary:
        raise UserError(
            f"{name}: stop_token_ids must be from 0 to {vocabulary - 1}, not {max(sampling.stop_token_ids)}"
        )
    if sampling.stop and loaded.tokenizer is None:
        raise UserError(f"{name}: stop texts need a tokenizer, which {loaded.config.name} lacks; use stop_token_ids")
    if sampling.min_tokens and len(stops) >= vocabulary:
        raise UserError(f"{name}: min_tokens = {sampling.min_tokens}, but every token is a stop token")
    return frozenset(token for token in stops if token < vocabulary)


@dataclass
class Asked:
    """One of the prompts given: the request that it becomes (one a sample, in some systems), or why it cannot."""

    index: int
    prompt: object
    sampling: SamplingParams
    arrival_s: float
    priority: int
    ids: np.ndarray | None = None
    requests: list[Request] = field(default_factory=list)
    error: str | None = None

    @property
    def name(self) -> str:
        return f"request {self.index}"

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Notes a UserError as the reason."""
        try:
            yield
        except UserError as error:
            self.error = str(error)


def asked_of(prompts: object, sampling: object, arrival_s: object, priority: object = None) -> list[Asked]:
    """The prompts one by one, with their settings. What a prompt itself is, is checked when it is encoded."""
    prompts = _prompts(prompts)
    if sampling is None or isinstance(sampling, SamplingParams):
        params = (sampling or SamplingParams(),) * len(prompts)
    else:
        params = several("sampling", sampling, SamplingParams, "a SamplingParams, or a list with one for each prompt")
    times = (0.0,) * len(prompts)
    if arrival_s is not None:
        times = several("arrival_s", arrival_s, object, "a list of seconds, one for each prompt")
    arrivals = [number("one of arrival_s", moment, 0, _LONGEST_WAIT_S) for moment in times]
    ranks = [0] * len(prompts)
    if priority is not None:
        ranks = several("priority", priority, object, "a list of whole numbers, one for each prompt")
        ranks = [whole("one of priority", rank, -(2**63)) for rank in ranks]
    if not len(params) == len(prompts) == len(arrivals) == len(ranks):
        raise UserError(
            f"{len(prompts)} prompts, {len(params)} sampling parameters, {len(arrivals)} arrival times and "
            f"{len(ranks)} priorities: give as many of each, or one SamplingParams for all"
        )
    if sorted(arrivals) != arrivals:
        raise UserError("arrival_s must not decrease; sort the prompts by their arrival")
    return [Asked(index, *one) for index, one in enumerate(zip(prompts, params, arrivals, ranks))]


def _prompts(given: object) -> list[object]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, bytes | Mapping | Set) or not isinstance(given, Iterable):
        raise UserError(f"prompts = {shown(given)} cannot be used; give a text, or a list of texts or token id lists")
    prompts = list(given)
    if prompts and all(isinstance(one, Integral) for one in prompts):
        raise UserError(f"prompts = {shown(prompts)} is one list of token ids; put it into a list: [[...]]")
    return prompts


class Encoder:
    """Prompts as token ids, each after the prefix: put together as one text where both are texts, so that what a
    tokenizer adds to a text (a begin-of-text token) is added once."""

    def __init__(self, loaded: LoadedModel, prefix: object = None) -> None:
        self._loaded, self._prefix = loaded, prefix if isinstance(prefix, str) else ""
        is_empty = prefix is None or (isinstance(prefix, str) and not prefix)
        self._head = np.zeros(0, np.int64) if is_empty else self._ids(prefix, "prefix")
        limit = loaded.config.max_model_len
        if len(self._head) >= limit:
            raise UserError(
                f"prefix: its {len(self._head)} tokens leave no room in the {limit} of {loaded.config.name}"
            )

    def encode(self, prompt: object, name: str) -> np.ndarray:
        """int64 [tokens]. UserError for what is neither a text nor token ids."""
        if isinstance(prompt, str) and self._prefix:
            return self._ids(self._prefix + prompt, name)
        return np.concatenate([self._head, self._ids(prompt, name, special=not len(self._head))])

    def common(self, encoded: Iterable[np.ndarray]) -> np.ndarray:
        """How the prefix begins in all of the encoded prompts: a tokenizer may join its end to what follows."""
        head = self._head
        for ids in encoded:
            head = head[: common_tokens(head, ids)]
        return head

    def _ids(self, given: object, name: str, special: bool = True) -> np.ndarray:
        if not isinstance(given, str):
            return token_ids_of(given, name, vocabulary_of(self._loaded))
        if self._loaded.tokenizer is None:
            raise UserError(f"{name}: {self._loaded.config.name} has no tokenizer; give lists of token ids")
        return np.array(
            self._loaded.tokenizer(checked_text(given, name), add_special_tokens=special)["input_ids"], np.int64
        )


def checked_text(text: str, name: str) -> str:
    """The text, if it is one: not every str can be written."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise UserError(f"{name}: character {error.start} is {half!r}, half of a character; remove it") from None
    return str(text)


def conversations_of(given: object) -> list[list[dict[str, str]]]:
    """One conversation or several, each a list of messages with a role and a content."""
    remedy = 'a list of messages such as {"role": "user", "content": "Hello"}, or a list of such lists'
    outer = list(several("messages", given, (Mapping, list, tuple), remedy))
    conversations = [outer] if outer and isinstance(outer[0], Mapping) else outer
    for conversation in conversations:
        for message in several("messages", conversation, Mapping, remedy):
            instance("role of a message", message.get("role"), str, remedy)
            checked_text(instance("content of a message", message.get("content"), str, remedy), "content of a message")
    return conversations
