"""From what the command line says to a server that listens, and to its end."""

from __future__ import annotations

import argparse
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import uvicorn

from repro.checks import lookup, whole
from repro.engine.config import DEPLOYMENTS, check_block_size
from repro.errors import UserError
from repro.server.app import Crowd, make_app
from repro.server.backend import Backend, RealBackend, SimulatedBackend
from repro.server.log import RequestLog
from repro.simulate import profiles
from repro.simulate.panels import system_for

SLOWEST_READ_S = 60.0  # a client that reads nothing for so long, while there is something to read, is cut off
MOST_FILES = 65_536
_OWN_FILES = 128  # libraries, logs, the model's files


def simulated(
    model: str,
    profile: str,
    system: str,
    *,
    kv_slots: int | None,
    block_size: int,
    max_waiting: int | None,
    log: RequestLog | None,
) -> SimulatedBackend:
    """A simulated server's engine: one of DEPLOYMENTS under one of the cost model's profiles.

    `kv_slots` is the size of the pool in tokens (None: what Table 1 leaves). UserError for what cannot be."""
    deployment, block_size = lookup("deployment", DEPLOYMENTS, model), check_block_size(block_size)
    if kv_slots is not None:
        deployment = replace(deployment, kv_slots=whole("--kv-slots", kv_slots, block_size))
    cost_model = profiles.cost_model(profile, deployment, block_size)
    if system == "faster-transformer":
        cost_model = profiles.faster_transformer_costs(deployment)
    chosen = system_for(system, deployment, "sharegpt")
    return SimulatedBackend(deployment, chosen, cost_model, block_size, max_waiting=max_waiting, log=log)


def real(
    model: str,
    system: str,
    *,
    device: str | None,
    num_gpus: int | None,
    kv_slots: int | None,
    block_size: int,
    max_waiting: int | None,
    log: RequestLog | None,
) -> RealBackend:
    """A real model's engine, loaded (see `repro.LLM`). UserError for what cannot be."""
    from repro.llm import LLM
    from repro.llm.pool import PoolSize

    check_block_size(block_size)
    pool = PoolSize(kv_slots=None if kv_slots is None else whole("--kv-slots", kv_slots, block_size))
    given = {"device": device, "num_gpus": num_gpus, "block_size": block_size, "pool": pool}
    engine = LLM(model, system=system, **given, quiet=True)
    return RealBackend(engine, max_waiting=max_waiting, log=log)


def main(options: argparse.Namespace) -> int:
    """`repro serve`, with the options of `repro.cli`."""
    if options.max_waiting is not None:
        whole("--max-waiting", options.max_waiting, 1)
    shared = {"kv_slots": options.kv_slots, "block_size": options.block_size, "max_waiting": options.max_waiting}
    place = {"device": options.device, "num_gpus": options.num_gpus}
    if options.simulated is None:
        opened = partial(real, options.model, options.system, **place, **shared)
    elif given := [f"--{name.replace('_', '-')} {one}" for name, one in place.items() if one is not None]:
        raise UserError(f"{given[0]} is for a real model; leave out {given[0].split()[0]} or --simulated")
    else:
        opened = partial(simulated, options.model, options.simulated, options.system, **shared)
    with RequestLog(options.log) if options.log else nullcontext() as log:
        return serve(partial(opened, log=log), options.host, options.port, options.api_key)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any free one. UserError if it cannot."""
    whole("--port", port, 0, 65_535)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio lets small packets go at once, 40 ms earlier, only where the socket says its protocol.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections have it from this one; Linux only
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SLOWEST_READ_S))
        listening.bind(address)
        listening.listen(2048)
    except (OSError, UnicodeError) as error:  # the second for what cannot be a host's name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on {host}:{port}: {reason}; give another --host or --port") from None
    return listening


def most_clients() -> int:
    """How many clients can be connected: one a file that this process may open. The limit is raised as far as the
    system lets everybody raise it. UserError if it is too low to serve anybody."""
    given = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (MOST_FILES if one == resource.RLIM_INFINITY else one for one in given)
    limit = max(soft, min(hard, MOST_FILES))
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, given[1]))
    if limit < 2 * _OWN_FILES:
        raise UserError(
            f"this process may open {limit} files, too few for a server: each client takes one; raise the limit to at "
            f"least {2 * _OWN_FILES} (ulimit -n)"
        )
    return limit - _OWN_FILES


def server_of(backend: Backend, api_key: str | None, most: int) -> uvicorn.Server:
    """A server that has not begun: `run(sockets=[...])` runs it until `should_exit` is set. It takes as many as `most`
    clients at a time."""
    config = uvicorn.Config(make_app(backend, api_key=api_key), log_level="warning", access_log=False, lifespan="on")
    server = uvicorn.Server(config)
    config.app = Crowd(config.app, server.server_state.connections, most)
    return server


def serve(opened: Callable[[], Backend], host: str, port: int, api_key: str | None) -> int:
    """Serve until a signal ends it: no request is taken any more, those that run come to their end. The exit code.

    `opened` gives the engine, once it is sure that there is a place to listen."""
    most = most_clients()
    with listen(host, port) as listening:
        backend = opened()
        try:
            with _signals_are_handled():
                shown = f"[{host}]" if ":" in host else host
                print(backend.about)
                print(
                    f"{backend.name} at http://{shown}:{listening.getsockname()[1]}/v1; end it with ctrl-c", flush=True
                )
                server_of(backend, api_key, most).run(sockets=[listening])
        finally:
            backend.feed.close()
    return 0


@contextmanager
def _signals_are_handled() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more, when all is done: nobody is to die of it."""
    before = {one: signal.signal(one, lambda *unused: None) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
