"""A server's log: one line of JSON a request, enough for the simulator to decide the same (`repro.server.replay`).

The first line says what serves. The names of lengths and times are those of Mooncake's traces, so `python -m repro
trace FILE` reads a log, too: its first line counts there as a request without tokens. A line is written when its
request has ended:

    timestamp        ms from the engine's start until the request had come
    input_length, output_length   tokens of the prompt, and of the longest output; `output_lengths` has each sample's
    max_tokens, n, beams, priority
    hash_ids         what its full blocks hold, where prefixes are found by that: equal numbers, equal blocks up to here
    ended            stop, length or abort; null if the server ended first. `stopped` says so of each sample
    first_token_ms, end_ms   by the same clock; null if it never came to it
    events           what the scheduler decided of it: [number, iteration, kind, detail] (`repro.engine.events`)

There is no text in it, and no token: blocks are numbered by a hash with a key that is drawn anew and kept nowhere, so
that no guess can be tried. A request here is one of the engine's: V1 runs n samples as n requests."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import secrets
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from repro import __version__
from repro.engine.loop import Engine, Observer, Outcome
from repro.engine.memory.prefix_cache import block_hashes
from repro.engine.policies import ORDERS, VICTIMS
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import Request
from repro.engine.systems import System
from repro.errors import UserError
from repro.feed.feed import Feed
from repro.feed.handle import Handle
from repro.simulate.cost_model import CostModel

FORMAT = 1
#: which tokens the blocks of a handle's request are known to hold, given those of its output
Held = Callable[[Handle, list[int]], list[int]]
_POLICIES = {one: name for known in (ORDERS, VICTIMS) for name, one in known.items()}


class _Outputs:
    """What has come of a handle's samples; each piece is looked at once."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.stopped: set[int] = set()  # by a stop, and not by the length limit
        self._read = 0

    def read(self, handle: Handle) -> None:
        for piece in handle.pieces[self._read :]:
            self.tokens[piece.sample].append(piece.token_id)
            if piece.finish_reason == "stop":
                self.stopped.add(piece.sample)
            self._read += 1


@dataclass(eq=False)
class _Entry:
    """A request that has no line yet. `reason`: how it has ended; `ended_s`: when."""

    handle: Handle
    place: int
    outputs: _Outputs
    events: list[list[Any]] = field(default_factory=list)
    reason: str | None = None
    ended_s: float = math.nan


class RequestLog(Observer):
    """Give it to an engine as an observer, and to its feed as a watcher; a context that ends after the feed.

    A file that cannot be written any more ends the log with one line, not the server. UserError if it cannot be
    begun."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = open(path, "w", encoding="ascii", buffering=1)  # noqa: SIM115 - closed at the context's end
        except (OSError, ValueError) as error:  # the second for a NUL in the name
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"--log: cannot write {path!r}: {reason}; name another file") from None
        self._key, self._count = secrets.token_bytes(16), 0
        self._entries: dict[int, _Entry] = {}  # by request
        self._ending: list[int] = []  # those that may have a line

    def begin(self, feed: Feed, system: System, head: dict[str, Any], cost_model: CostModel | None, held: Held) -> None:
        """`head` says what serves. UserError, and the feed is closed, for what no replay could have: a policy without a
        name, a prefix cache that is older."""
        self._feed, self._events, self._held, self._finds = feed, feed.events, held, system.prefix_caching
        manager = feed.engine.scheduler.manager
        try:
            settings = _settings(system)
            if self._finds and manager.gpu.found:
                raise UserError("--log: the prefix cache knows earlier prompts; forget them with reset_prefix_cache()")
        except UserError:
            feed.close()
            raise
        cpu = getattr(manager, "cpu", None)
        about = {
            "format": FORMAT,
            "version": __version__,
            "python": platform.python_version(),
            **head,
            "system": system.name,
            "scheduler": settings,
            "watermark": system.watermark,
            "num_blocks": manager.num_blocks,
            "block_size": manager.block_size,
            "num_cpu_blocks": 0 if cpu is None else cpu.num_blocks,
            "cost_model": None if cost_model is None else {"kind": type(cost_model).__name__, **asdict(cost_model)},
        }
        self._write({"timestamp": 0, "input_length": 0, "output_length": 0, "served": about})

    def __enter__(self) -> RequestLog:
        return self

    def __exit__(self, *unused: object) -> None:
        """What has no line yet gets one."""
        if self._entries:
            self._take()
            for request_id in list(self._entries):
                self._line(request_id)
        if self._file is not None:
            self._file.close()

    # In the engine's thread

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        self._take()
        self._write_ended()

    def ended(self, request: Request, outcome: Outcome, reason: str) -> None:
        self._take()
        entry = self._entries[request.request_id]
        entry.reason, entry.ended_s = reason, self._feed.engine.clock.now
        self._ending.append(request.request_id)
        self._write_ended()

    def _take(self) -> None:
        """Hand the events to their requests, and keep them nowhere else. Where the engine has failed, the feed knows no
        handle for what came last."""
        for event in self._events:
            handle = self._feed.handles.get(event.request_id)
            if event.kind == "arrive" and handle is not None:
                place = [one.request_id for one in handle.requests].index(event.request_id)
                first = self._entries.get(handle.requests[0].request_id)
                self._entries[event.request_id] = _Entry(handle, place, first.outputs if first else _Outputs())
            if (entry := self._entries.get(event.request_id)) is not None:
                entry.events.append([self._count, event.iteration, event.kind, event.detail])
                self._count += 1
        self._events.clear()

    def _write_ended(self) -> None:
        """Those that have ended and all of whose events are there: a static batch returns when its last member has."""
        for request_id in self._ending:
            if self._entries[request_id].events[-1][2] in ("finish", "abort"):
                self._line(request_id)
        self._ending = [request_id for request_id in self._ending if request_id in self._entries]

    def _line(self, request_id: int) -> None:
        entry = self._entries.pop(request_id)
        request, outcome = entry.handle.requests[entry.place], entry.handle.outcomes[entry.place]
        n, is_beam, outputs = request.sampling.n, request.sampling.use_beam_search, entry.outputs
        outputs.read(entry.handle)
        if is_beam:  # their pieces come when all is over
            lengths = [entry.events[-1][3].get("tokens", 0)] * n
            stopped = [0 < lengths[0] < request.output_tokens] * n
        else:
            samples = range(entry.place, entry.place + n)
            lengths = [len(outputs.tokens[sample]) for sample in samples]
            stopped = [sample in outputs.stopped for sample in samples]
        hashes: list[int] = []
        if self._finds:
            known = self._held(entry.handle, outputs.tokens[entry.place] if n == 1 else [])
            size = self._feed.engine.scheduler.manager.block_size
            hashes = [self._number(one) for one in block_hashes(known, size)]
        self._write(
            {
                "timestamp": 1000 * request.arrival_s,
                "input_length": request.prompt_tokens,
                "output_length": max(lengths),
                "output_lengths": lengths,
                "stopped": stopped,
                "ended": entry.reason,
                "request": request_id,
                "max_tokens": request.output_tokens,
                "n": n,
                "beams": is_beam,
                "priority": request.priority,
                "first_token_ms": _ms(outcome.first_token_s),
                "end_ms": _ms(entry.ended_s if math.isnan(outcome.finish_s) else outcome.finish_s),
                "hash_ids": hashes,
                "events": entry.events,
            }
        )

    def _number(self, content: bytes) -> int:
        """Below 2**53, which every reader of JSON keeps exactly."""
        return int.from_bytes(hashlib.blake2b(content, key=self._key, digest_size=8).digest()) >> 11

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            print(f"repro: the log {self._path!r} ends here: {error.strerror}", file=sys.stderr, flush=True)
            self._file = None


def _ms(seconds: float) -> float | None:
    return None if math.isnan(seconds) else 1000 * seconds


def _settings(system: System) -> dict[str, Any]:
    """The scheduler's, as JSON. UserError for a function that has no name by which it could be found again."""
    found = {}
    for one in fields(system.scheduler):
        value = getattr(system.scheduler, one.name)
        if callable(value) and value not in _POLICIES:
            raise UserError(f"--log: {one.name} of system {system.name!r} is a function of your own; name a known one")
        found[one.name] = value.value if isinstance(value, Enum) else _POLICIES.get(value, value)
    return found


def lines_of(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What serves, and the requests of a log in the order in which they were queued. UserError for another file."""
    try:
        lines = [json.loads(text) for text in Path(path).read_text(encoding="ascii").splitlines()]
        head, lines = lines[0]["served"], sorted(lines[1:], key=lambda line: line["events"][0][0])
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the log {path!r}: {getattr(error, 'strerror', None) or 'it is no text'}"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is no JSON, a line a request ({error}); give a log of `repro serve --log`") from None
    except (KeyError, IndexError, TypeError):
        raise UserError(f"{path} is no log of `repro serve --log`") from None
    if head.get("format") != FORMAT:
        raise UserError(f"{path} has format {head.get('format')}; this version reads {FORMAT}")
    return head, lines
