"""Answers in OpenAI's JSON: whole, and as the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from repro.feed.handle import Handle, Piece
from repro.server.backend import Backend
from repro.server.protocol import Ask


class Answers:
    """What comes of one request: `handles`, one a prompt. Choice number prompt * n + sample is that sample of it."""

    def __init__(self, ask: Ask, backend: Backend, handles: list[Handle]) -> None:
        self._ask, self._backend, self._handles = ask, backend, handles
        prefix, self._kind = ("chatcmpl", "chat.completion") if ask.is_chat else ("cmpl", "text_completion")
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": backend.name}
        self._length = [0] * (len(handles) * ask.sampling.n)  # of each choice's text so far, in characters
        self._count = [0] * len(self._length)  # of each choice's tokens in chunks
        self._before, self._after = json.dumps(self._chunk(["|"])).split('"|"')  # of a chunk, around its choice

    # Whole

    def whole(self) -> dict[str, Any]:
        """All of it, once every handle has ended."""
        choices = []
        for prompt, handle in enumerate(self._handles):
            by_sample: list[list[Piece]] = [[] for _ in range(self._ask.sampling.n)]
            for piece in handle.pieces:
                by_sample[piece.sample].append(piece)
            choices += [self._choice(prompt, pieces) for pieces in by_sample]
        return {**self._head, "object": self._kind, "choices": choices, "usage": self.usage(), **self._receipt()}

    def _choice(self, prompt: int, pieces: list[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        ends = self._ends(prompt, pieces[-1])
        if self._ask.is_chat:
            ends["message"] = {"role": "assistant", "content": text}
        else:
            ends["text"] = text
        return {**ends, "logprobs": self._logprobs(ends["index"], pieces)}

    def usage(self) -> dict[str, Any]:
        """Tokens of prompts and outputs so far."""
        prompt = sum(handle.prompt_tokens for handle in self._handles)
        output = sum(handle.output_tokens for handle in self._handles)
        counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return {**counts, "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in self._handles)}}

    def _receipt(self) -> dict[str, Any]:
        """Where the time went, if that was asked for: a receipt for each of the engine's requests."""
        if not self._ask.include_receipt:
            return {}
        numbers = [(handle, one.request_id) for handle in self._handles for one in handle.requests]
        return {"receipt": [handle.receipts[number].to_dict() for handle, number in numbers]}

    def _ends(self, prompt: int, piece: Piece) -> dict[str, Any]:
        index = prompt * self._ask.sampling.n + piece.sample
        stop = {"stop_reason": piece.stop_reason} if piece.finish_reason else {}
        return {"index": index, "finish_reason": piece.finish_reason, **stop}

    # As a stream

    def opening(self) -> Iterator[dict[str, Any]]:
        """What comes before the first token: in a chat, whose turn it is."""
        if self._ask.is_chat:
            for index in range(len(self._length)):
                delta = {"role": "assistant", "content": ""}
                yield self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def piece(self, prompt: int, piece: Piece) -> str | None:
        """One token's chunk in JSON; None if there is nothing to say yet."""
        self._count[prompt * self._ask.sampling.n + piece.sample] += 1
        if not (piece.text or piece.finish_reason or self._ask.sampling.logprobs is not None):
            return None
        choice = self._ends(prompt, piece)
        if self._ask.is_chat:
            choice["delta"] = {"content": piece.text}
        else:
            choice["text"] = piece.text
        choice["logprobs"] = self._logprobs(choice["index"], [piece])
        after = self._after
        if self._ask.usage_so_far:
            after = after.replace("null", json.dumps(self._so_far(prompt, choice["index"])))
        return f"{self._before}{json.dumps(choice)}{after}"

    def _so_far(self, prompt: int, index: int) -> dict[str, int]:
        """Tokens of one choice up to this chunk. A beam has one chunk, when all is over."""
        handle = self._handles[prompt]
        output = handle.output_tokens if self._ask.sampling.use_beam_search else self._count[index]
        total = handle.prompt_tokens + output
        return {"prompt_tokens": handle.prompt_tokens, "completion_tokens": output, "total_tokens": total}

    def closing(self) -> Iterator[dict[str, Any]]:
        """What comes after the last token: the usage and the receipt, as far as they were asked for."""
        if self._ask.include_usage or self._ask.include_receipt:
            usage = {"usage": self.usage()} if self._ask.include_usage else {}
            yield {**self._chunk([]), **usage, **self._receipt()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = f"{self._kind}.chunk" if self._ask.is_chat else self._kind
        usage = {"usage": None} if self._ask.include_usage else {}
        return {**self._head, "object": kind, "choices": choices, **usage}

    # Log-probabilities

    def _logprobs(self, index: int, pieces: list[Piece]) -> dict[str, Any] | None:
        if self._ask.sampling.logprobs is None or any(piece.logprob is None for piece in pieces):
            return None
        if self._ask.is_chat:
            return {"content": [self._of_chat(piece) for piece in pieces], "refusal": None}
        tokens = [self._backend.token_text(piece.token_id) for piece in pieces]
        offsets = []
        for piece in pieces:
            offsets.append(self._length[index])
            self._length[index] += len(piece.text)
        best = [{self._backend.token_text(token): value for token, value in self._best(piece)} for piece in pieces]
        values = [piece.logprob for piece in pieces]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets}

    def _of_chat(self, piece: Piece) -> dict[str, Any]:
        best = [self._entry(*one) for one in self._best(piece)[: self._ask.sampling.logprobs]]
        return {**self._entry(piece.token_id, piece.logprob), "top_logprobs": best}

    def _best(self, piece: Piece) -> list[tuple[int, float]]:
        return list((piece.best_logprobs or {}).items())

    def _entry(self, token_id: int, value: float) -> dict[str, Any]:
        text = self._backend.token_text(token_id)
        return {"token": text, "logprob": value, "bytes": list(text.encode(errors="replace"))}
