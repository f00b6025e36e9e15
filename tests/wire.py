"""A client of few lines over plain sockets, so that what is measured, or put under load, is the server.

It speaks as much HTTP as this project's server does: one request after the other on a connection that stays open, an
answer with a length or in chunks."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

#: bytes of an answer read at once
_PIECE = 2**16


@dataclass
class Reply:
    """An answer: its status, its body without HTTP's own framing, and when each piece of it came (seconds, loop's)."""

    status: int
    body: bytes = b""
    times_s: list[float] = field(default_factory=list)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """What a stream has said, but for its last word. AssertionError if it was cut off."""
        *events, done, rest = self.body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b""), self.body[-200:]
        return [json.loads(event.removeprefix(b"data: ")) for event in events]


class Wire:
    """A connection to the server at `address`, such as http://127.0.0.1:8000."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._place = parts.hostname, parts.port
        self._host = f"{parts.hostname}:{parts.port}"

    async def __aenter__(self) -> Wire:
        self.reader, self.writer = await asyncio.open_connection(*self._place, limit=2**24)
        return self

    async def __aexit__(self, *unused: object) -> None:
        self.writer.transport.abort()  # whatever is under way

    def send(self, path: str, body: object) -> None:
        """Ask, without waiting for the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)

    async def head(self) -> tuple[int, dict[bytes, bytes]]:
        """Status and headers of an answer."""
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
        headers = dict(line.lower().split(b": ", 1) for line in lines)
        return int(status.split()[1]), headers

    async def ask(self, path: str, body: object) -> Reply:
        """The whole answer."""
        self.send(path, body)
        status, headers = await self.head()
        reply, clock = Reply(status), asyncio.get_running_loop().time
        if b"content-length" in headers:
            reply.body = await self.reader.readexactly(int(headers[b"content-length"]))
            return reply
        pieces, rest = [], b""
        while True:
            rest += await self.reader.read(_PIECE)
            reply.times_s.append(clock())
            while (end := rest.find(b"\r\n")) >= 0:
                size = int(rest[:end], 16)
                if len(rest) < end + 4 + size:
                    break
                pieces.append(rest[end + 2 : end + 2 + size])
                rest = rest[end + 4 + size :]
                if not size:
                    reply.body = b"".join(pieces)
                    return reply
            assert not self.reader.at_eof(), "the answer was cut off"
