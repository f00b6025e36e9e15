"""From what the command line says to a ledger that is written."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httpx

from repro.checks import number, shown, whole
from repro.errors import UserError
from repro.judge import ledger
from repro.judge.claims import CLAIMS, Finding
from repro.judge.client import Client, Gone
from repro.judge.suite import PROBES, judge

#: Below this many seconds no claim could be decided on any server.
LEAST_BUDGET_S = 5.0


class Progress(Protocol):
    """As `repro.harness.progress.Progress`."""

    def start(self, key: str, kind: str, cost: float, label: str = "") -> None: ...
    def finish(self, key: str, seconds: float | None = None) -> None: ...
    def show(self) -> None: ...
    def close(self) -> None: ...


#: from a name, and the kind and cost of what is to be done
ProgressOf = Callable[[str, list[tuple[str, float]]], Progress]


def address(target: str) -> str:
    """A server's address without a path. UserError for what is none."""
    try:
        parts = urlsplit(target)
        usable = parts.scheme in ("http", "https") and parts.hostname and not re.search(r"[\s?#@]", target)
        _ = parts.port
        httpx.URL(target)
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable:
        raise UserError(f"--target {shown(target)} is no address; give one such as http://127.0.0.1:8000")
    return re.sub(r"(/v1)?/*$", "", target)


def names_of(targets: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Name in the ledger -> address; without names, host and port. UserError for names that do not fit."""
    if not targets:
        raise UserError("no server is named; give its address with --target, or --show for the ledger as it is")
    addresses = [address(target) for target in targets]
    if names and len(names) != len(targets):
        raise UserError(f"{len(names)} names for {len(targets)} targets; give --name as many as --target")
    chosen = [name.strip() for name in names] if names else [urlsplit(one).netloc for one in addresses]
    if "" in chosen or len(set(chosen)) < len(chosen):
        raise UserError(
            f"the names {', '.join(map(repr, chosen))} do not tell the servers apart; give others by --name"
        )
    return dict(zip(chosen, addresses))


def main(options: argparse.Namespace, budget_s: float, folder: Path, progress_of: ProgressOf) -> int:
    """Judge, and print the ledger; the exit code. `folder` is for a ledger that the user does not name."""
    out, code = ledger.file_of(options.out or folder), 0
    if not options.show:
        servers = names_of(options.target, options.name)
        asked = Asked(budget_s, options.seed, options.model, options.api_key)
        try:
            for error in judge_all(servers, out, asked, progress_of):
                print(f"repro: {error}", file=sys.stderr)
                code = 1
        except KeyboardInterrupt:
            print("\nrepro: interrupted; the claims judged so far are kept", file=sys.stderr)
            code = 130
    print(f"{ledger.in_words(ledger.read(out))}\n\nledger: {out}")
    return code


@dataclass(frozen=True)
class Asked:
    """How to judge. `budget_s` is for each server; `model` None is the first that the server lists.

    UserError for what cannot be."""

    budget_s: float
    seed: int = 0
    model: str | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        whole("--seed", self.seed)
        number("--budget, in seconds,", self.budget_s, LEAST_BUDGET_S)
        if not (self.api_key or "").isprintable():
            raise UserError("the API key cannot be sent, for it is no line of text; give another one with --api-key")

    def http(self, url: str) -> httpx.AsyncClient:
        """A client with the key, as many connections as it takes, and time for whatever a model computes."""
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}".encode()}
        limits, waits = httpx.Limits(max_connections=None), httpx.Timeout(10.0, read=None, pool=None)
        return httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=waits)


def judge_all(servers: dict[str, str], out: Path, asked: Asked, progress_of: ProgressOf) -> list[Gone]:
    """Judge servers one after the other, and write what is found at once: an error, and an interrupt, leave what was
    found before. What is returned says of servers that went away meanwhile.

    UserError for what cannot be, and for a server that does not answer, before any is judged."""
    rows = ledger.read(out)
    for url in servers.values():
        asyncio.run(_look(url, asked))
    ledger.write(out, rows)  # whether it can be is better known now
    gone = []
    for name, url in servers.items():
        progress = progress_of(f"judge {name}", [("claim", CLAIMS[claim].share) for claim in PROBES])
        findings: list[Finding] = []
        try:
            asyncio.run(_judge_one(name, url, out, asked, progress, findings))
        except Gone as error:
            gone.append(Gone(f"{name}: {error} {len(findings)} of {len(PROBES)} claims were judged before"))
        finally:
            progress.close()
    return gone


async def _look(url: str, asked: Asked) -> None:
    async with asked.http(url) as http:
        await Client(http, asked.model).open()


async def _judge_one(name: str, url: str, out: Path, asked: Asked, progress: Progress, findings: list[Finding]) -> None:
    """Judge one server; `findings` grows, and the ledger with it."""

    def begun(claim: str) -> None:
        progress.start(claim, "claim", CLAIMS[claim].share)
        progress.show()

    def found(finding: Finding) -> None:
        progress.finish(finding.claim)
        findings.append(finding)
        ledger.record(out, name, findings)

    async def redraw() -> None:
        while True:
            await asyncio.sleep(1)
            progress.show()

    drawing = asyncio.ensure_future(redraw())
    try:
        async with asked.http(url) as http:
            await judge(Client(http, asked.model), name, asked.budget_s, asked.seed, found, begun)
    finally:
        drawing.cancel()
