"""What the scheduler decided, as a list of small records that other tools can replay.

    arrive   a request entered the queue                  admit    it got memory and runs its prompt (tokens)
    append   its sequences got new blocks (blocks)        copy     blocks copied on write or by a beam fork (blocks)
    resume   it was swapped in (blocks)                   fork     beams were re-parented (parents)
    finish   it ended (tokens)                            preempt  it was driven out (requester, mode, tokens or blocks)

Iterations, not seconds: the scheduler does not know the time."""

from __future__ import annotations

from typing import Any, NamedTuple

from repro import display


class Event(NamedTuple):
    iteration: int
    kind: str
    request_id: int
    detail: dict[str, object]

    def __str__(self) -> str:
        details = ", ".join(f"{name} {value}" for name, value in self.detail.items())
        return f"iteration {self.iteration:>4}  {self.kind:<8} request {self.request_id:>3}  {details}".rstrip()

    def row(self) -> dict[str, Any]:
        """As a row of a table: its details are columns."""
        return {"iteration": self.iteration, "kind": self.kind, "request_id": self.request_id, **self.detail}

    def _repr_html_(self) -> str:
        return display.fields(f"{self.kind} in iteration {self.iteration:,}", self.row())
