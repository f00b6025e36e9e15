"""OpenAI's two kinds of request, read: what is asked for, or one line that says what is wrong with it.

Names that neither OpenAI's interface nor vLLM's has are refused. What their clients send and nothing here depends on is
taken; what would change the answer and is not there is refused."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from repro.checks import flag, instance, known_names, shown, whole
from repro.errors import UserError
from repro.sampling_params import SamplingParams

MOST_PROMPTS = 256
MOST_CHOICES = 1024
MOST_STOPS = 64
LONGEST_STOP = 256  # characters: each token is compared with the beginnings of all of them
MOST_LOGPROBS = 20
#: nothing that a server does here depends on them
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
#: what is not there -> what can be given all the same
_NOT_THERE: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "suffix": (),
    "best_of": (1,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_SAMPLING = {
    "n",
    "use_beam_search",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "length_penalty",
    "early_stopping",
}
_COMMON = {"model", "stream", "stream_options", "priority", "logprobs", "receipt", *_SAMPLING, *_IGNORED, *_NOT_THERE}
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_receipt")
_COMPLETION = {"prompt", *_COMMON}
_CHAT = {"messages", "max_completion_tokens", "top_logprobs", *_COMMON}


class WrongInput(UserError):
    """A request that cannot be: `status` is HTTP's, `param` and `code` are those of OpenAI's error."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True)
class Ask:
    """A request that was read. `prompts` are texts or lists of token ids, or one conversation if `is_chat`.

    `max_tokens` None: as many as the model has room for."""

    is_chat: bool
    model: str | None
    prompts: list[object]
    sampling: SamplingParams
    max_tokens: int | None
    priority: int
    stream: bool
    include_usage: bool
    usage_so_far: bool  # in each chunk, vLLM's continuous_usage_stats
    include_receipt: bool


def body_of(data: bytes) -> dict[str, Any]:
    """The JSON object of a body. WrongInput for anything else."""
    try:
        body = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise WrongInput(f"the body is no JSON: {str(error)[:200]}; send a JSON object", code="invalid_json") from None
    if not isinstance(body, dict):
        raise WrongInput(f'the body is {shown(body)}; send a JSON object such as {{"prompt": "Hello"}}')
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def completion_of(body: dict[str, Any]) -> Ask:
    """A body of /v1/completions. WrongInput, which names the parameter."""
    given = _known(body, _COMPLETION)
    if "prompt" not in given:
        raise WrongInput(
            "prompt is missing; give a text, a list of texts, token ids, or a list of such lists", "prompt"
        )
    prompts = _prompts(given["prompt"])
    logprobs = _checked("logprobs", whole, given["logprobs"], 0, MOST_LOGPROBS) if "logprobs" in given else None
    return _ask(given, False, prompts, logprobs, given.get("max_tokens", SamplingParams.max_tokens))


def chat_of(body: dict[str, Any]) -> Ask:
    """A body of /v1/chat/completions. WrongInput, which names the parameter."""
    given = _known(body, _CHAT)
    if "messages" not in given:
        raise WrongInput('messages is missing; give a list such as [{"role": "user", "content": "Hello"}]', "messages")
    wanted = _checked("logprobs", flag, given.get("logprobs", False))
    best = _checked("top_logprobs", whole, given.get("top_logprobs", 0), 0, MOST_LOGPROBS)
    if best and not wanted:
        raise WrongInput(f"top_logprobs = {best} needs logprobs = true", "top_logprobs")
    longest = given.get("max_completion_tokens", given.get("max_tokens"))
    return _ask(given, True, [_messages(given["messages"])], best if wanted else None, longest)


def _known(body: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """What is given: null is as good as nothing."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in set(given) - known:
        try:
            known_names("a request", [name[:80]], sorted(known - _IGNORED - set(_NOT_THERE)))
        except UserError as error:
            raise WrongInput(str(error), name[:80], code="unknown_parameter") from None
    for name, harmless in _NOT_THERE.items():
        if name in given and given[name] not in harmless:
            raise WrongInput(f"{name} = {shown(given[name])} is not there; leave it out", name, code="unsupported")
    return given


def _checked(name: str, check: Any, value: object, *bounds: object) -> Any:
    try:
        return check(name, value, *bounds)
    except UserError as error:
        raise WrongInput(str(error), name) from None


def _ask(given: dict[str, Any], is_chat: bool, prompts: list[object], logprobs: int | None, longest: object) -> Ask:
    options = _checked("stream_options", instance, given.get("stream_options", {}), dict, "an object")
    for name in options:
        if name not in _STREAM_OPTIONS:
            said = f"stream_options takes {', '.join(_STREAM_OPTIONS)}, not {shown(name)}"
            raise WrongInput(said, "stream_options")
    stream = _checked("stream", flag, given.get("stream", False))
    if options and not stream:
        raise WrongInput("stream_options needs stream = true", "stream_options")
    asked = {name: _checked(name, flag, options.get(name, False)) for name in _STREAM_OPTIONS}
    include_receipt = _checked("receipt", flag, given.get("receipt", False)) or asked["include_receipt"]
    so_far = asked["include_usage"] and asked["continuous_usage_stats"]
    priority = _checked("priority", whole, given.get("priority", 0), -(2**63))
    if "model" in given:
        _checked("model", instance, given["model"], str, "a text")
    if longest is not None:
        longest = _checked("max_tokens", whole, longest, 1, 2**31)
    sampling = _sampling(given, logprobs, longest)
    if len(prompts) * sampling.n > MOST_CHOICES:
        said = (
            f"{len(prompts)} prompts x n = {sampling.n} are more than {MOST_CHOICES} choices; ask for fewer at a time"
        )
        raise WrongInput(said, "n")
    includes = asked["include_usage"], so_far, include_receipt
    return Ask(is_chat, given.get("model"), prompts, sampling, longest, priority, stream, *includes)


def _sampling(given: dict[str, Any], logprobs: int | None, longest: int | None) -> SamplingParams:
    """As long as `longest`, or as it takes for the settings to be checked."""
    settings = {name: value for name, value in given.items() if name in _SAMPLING}
    if settings.get("top_k") == -1:  # vLLM's way to say all of them
        settings["top_k"] = 0
    for name in settings:  # one by one, so that an error has the parameter's name
        if name not in ("n", "use_beam_search", "max_tokens", "min_tokens", "length_penalty", "early_stopping"):
            try:
                SamplingParams(**{name: settings[name]})
            except UserError as error:
                raise WrongInput(str(error), name) from None
    stops = settings.get("stop", [])
    if isinstance(stops, list) and len(stops) > MOST_STOPS:
        raise WrongInput(f"stop has {len(stops)} texts; give at most {MOST_STOPS}", "stop")
    for one in stops if isinstance(stops, list) else [stops]:
        if isinstance(one, str) and len(one) > LONGEST_STOP:
            raise WrongInput(f"stop: {shown(one)} has more than {LONGEST_STOP} characters; shorten it", "stop")
    settings["max_tokens"] = 2**31 if longest is None else longest
    try:
        return SamplingParams(**settings, logprobs=logprobs)
    except UserError as error:
        first = str(error).split()[0].rstrip(":,")
        raise WrongInput(str(error), first if first in _SAMPLING else None) from None


def _prompts(given: object) -> list[object]:
    if isinstance(given, str):
        prompts: list[object] = [given]
    elif isinstance(given, list) and given and all(type(one) is int for one in given):
        prompts = [given]
    else:
        prompts = list(_checked("prompt", instance, given, list, "a text, token ids, or a list of them"))
    if not 1 <= len(prompts) <= MOST_PROMPTS:
        raise WrongInput(f"prompt has {len(prompts)} prompts; give from 1 to {MOST_PROMPTS}", "prompt")
    for one in prompts:
        if isinstance(one, str):
            _text("prompt", one)
        elif not (isinstance(one, list) and one and all(type(token) is int for token in one)):
            raise WrongInput(f"prompt: {shown(one)} is neither a text nor a list of token ids", "prompt")
    return prompts


def _text(name: str, value: str) -> str:
    """JSON can write half a character, which is no text."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise WrongInput(f"{name}: character {error.start} is half of a character; remove it", name) from None
    return value


def _messages(given: object) -> list[dict[str, str]]:
    remedy = 'a list such as [{"role": "user", "content": "Hello"}]'
    messages = []
    for one in _checked("messages", instance, given, list, remedy):
        one = _checked("messages", instance, one, dict, remedy)
        role = _checked("messages", instance, one.get("role"), str, remedy)
        content = one.get("content")
        if isinstance(content, list):  # OpenAI's parts; only texts can be read
            for part in content:
                if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                    raise WrongInput(f"messages: {shown(part)} cannot be read; only parts of type text can", "messages")
            content = "".join(part["text"] for part in content)
        content = _checked("messages", instance, content, str, remedy)
        messages.append({"role": _text("messages", role), "content": _text("messages", content)})
    if not messages:
        raise WrongInput(f"messages is empty; give {remedy}", "messages")
    return messages


def with_room(ask: Ask, prompt_tokens: int, room: int) -> SamplingParams:
    """The settings of a prompt of so many tokens. Without a limit of its own an output may fill the `room` there is."""
    if ask.max_tokens is not None:
        return ask.sampling
    if room < 1:
        said = f"the prompt has {prompt_tokens} tokens, which leaves no room for an answer; shorten it"
        raise WrongInput(said, "messages", code="context_length_exceeded")
    if ask.sampling.min_tokens > room:
        raise WrongInput(f"min_tokens = {ask.sampling.min_tokens} is more than the {room} left", "min_tokens")
    return dataclasses.replace(ask.sampling, max_tokens=room)
