"""The endpoints. What a client hands in is read by `protocol`; what it gets is put into words by `answers`.

Nothing here waits in the event loop: prompts are encoded in a thread of their own, and the engine has its own, too. A
client that goes away takes its requests with it, whether it streams or waits."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from repro import __version__
from repro.errors import UserError
from repro.feed.driver import EngineEnded
from repro.feed.feed import QueueFull
from repro.feed.handle import Handle, all_ended, together
from repro.server.answers import Answers
from repro.server.backend import Backend
from repro.server.protocol import Ask, WrongInput, body_of, chat_of, completion_of, with_room

LARGEST_BODY = 4 * 2**20  # bytes
#: of a body that is too large so much is read, so that its sender gets to read the answer
_MOST_READ = 64 * 2**20
SLOWEST_BODY_S = 60.0  # so long may a client take to send it


class Json(Response):
    """JSON in ASCII: also half a character that a client sent can be named in an error."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode("ascii")


def error_of(message: str, status: int, param: str | None = None, code: str | None = None) -> Json:
    """OpenAI's error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    headers = {408: {"Connection": "close"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}
    return Json({"error": error}, status, headers.get(status))


def make_app(backend: Backend, *, api_key: str | None = None) -> FastAPI:
    """The server's application. With `api_key`, what lies below /v1 asks for it.

    Its end takes back what still runs and closes the backend's feed."""
    encoding = ThreadPoolExecutor(1, "encode")  # one: tokenizers do not like two threads

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(backend.feed.close)
        encoding.shutdown(wait=False, cancel_futures=True)

    guard = [] if api_key is None else [Middleware(Guard, api_key=api_key)]
    plain = {"openapi_url": None, "redirect_slashes": False}  # no page that fetches scripts from elsewhere
    app = FastAPI(lifespan=lifespan, middleware=guard, **plain)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:200]
        if error.status_code == 404:
            return error_of(f"there is no {path}; there are /v1/models, /v1/completions, /v1/chat/completions", 404)
        return error_of(f"{request.method} {path}: {error.detail}", error.status_code)

    @app.exception_handler(UserError)
    async def wrong(request: Request, error: UserError) -> Response:
        return _answer_to(error)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _answer_to(error)

    def check_model(name: str | None) -> None:
        if name is not None and name != backend.name:
            shown = name if len(name) <= 80 else f"{name[:77]}..."
            raise WrongInput(f"there is no model {shown!r}; there is {backend.name!r}", "model", 404, "model_not_found")

    async def serve(request: Request, read: Callable[[dict[str, Any]], Ask]) -> Response:
        try:
            data, loop = await _body(request), asyncio.get_running_loop()
            arrival_s = backend.feed.engine.clock.now  # before it is read, and before its prompts are encoded
        except ClientDisconnect:
            return Response()

        def added() -> tuple[Ask, Future[list[Handle]]]:
            ask = read(body_of(data))
            check_model(ask.model)
            if ask.is_chat:
                ids = [backend.render(one) for one in ask.prompts]
            else:
                ids = [backend.encode(one, f"prompt {place}") for place, one in enumerate(ask.prompts)]
            sampling = [with_room(ask, len(one), backend.room(len(one), ask.sampling.n)) for one in ids]
            return ask, backend.feed.add_all(ids, sampling, ask.priority, arrival_s)

        ask, adding = await loop.run_in_executor(encoding, added)
        handles = await asyncio.wrap_future(adding)
        return Answering(Answers(ask, backend, handles), handles, ask.stream)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await serve(request, completion_of)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await serve(request, chat_of)

    def card() -> dict[str, Any]:
        about = {"owned_by": "repro", "max_model_len": backend.max_model_len}
        return {"id": backend.name, "object": "model", "created": 0} | about

    @app.get("/v1/models")
    async def models() -> Response:
        return Json({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(name)
        return Json(card())

    @app.get("/version")
    async def version() -> Response:
        return Json({"version": __version__})

    @app.get("/health")
    async def health() -> Response:
        await asyncio.wrap_future(backend.feed.driver.later(lambda: None))
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        page = await asyncio.wrap_future(backend.feed.driver.later(backend.metrics.page))
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _answer_to(error: Exception) -> Json:
    """A request that was refused, or has come to no good end."""
    if isinstance(error, WrongInput):
        return error_of(str(error), error.status, error.param, error.code)
    if isinstance(error, QueueFull):
        return error_of(str(error), 429, code="queue_full")
    if isinstance(error, EngineEnded):
        return error_of(str(error), 503)
    if isinstance(error, UserError):
        return error_of(str(error), 400)
    logging.getLogger("uvicorn.error").error("the engine has failed", exc_info=error)  # where the server's own go
    return error_of(f"the engine has failed: {type(error).__name__}", 500)


async def _body(request: Request) -> bytes:
    """The body. WrongInput if it is too large, or does not come."""
    data, size = bytearray(), 0
    try:
        async with asyncio.timeout(SLOWEST_BODY_S):
            async for piece in request.stream():
                size += len(piece)
                if size <= LARGEST_BODY:
                    data += piece
                if size > _MOST_READ:
                    break
    except TimeoutError:
        raise WrongInput(f"the body has not come within {SLOWEST_BODY_S:g} s; send all of it", status=408) from None
    if size > LARGEST_BODY:
        said = f"the body has more than {LARGEST_BODY:,} bytes; send less"
        raise WrongInput(said, status=413, code="request_too_large")
    return bytes(data)


class Guard:
    """Lets nobody below /v1 who does not have the key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._key = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._key):  # as long for a nearly right key as for any other
                said = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
                await error_of(said, 401, code="invalid_api_key")(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Crowd:
    """Answers 503 below /v1 while more than `most` clients are connected: soon none could be accepted any more."""

    def __init__(self, app: ASGIApp, connections: Collection[object], most: int) -> None:
        self._app, self._connections, self._most = app, connections, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._connections) > self._most and scope["type"] == "http" and scope["path"].startswith("/v1"):
            said = f"{self._most} clients are connected, and this process may open no more files; try again later"
            refusal = error_of(f"{said}, or have the limit raised (ulimit -n)", 503, code="too_many_connections")
            refusal.headers["connection"] = "close"
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class Answering(Response):
    """Sends what comes, as JSON or as a stream of events, for as long as somebody listens."""

    def __init__(self, answers: Answers, handles: list[Handle], streams: bool) -> None:
        super().__init__()
        self._answers, self._handles, self._streams = answers, handles, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future((self._stream if self._streams else self._whole)(scope, receive, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for handle in self._handles:
                handle.give_up()
            gone.cancel()
            if not sending.done():
                sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        await all_ended(self._handles)
        failure = self._failure()
        await (_answer_to(failure) if failure else Json(self._answers.whole()))(scope, receive, send)

    def _failure(self) -> Exception | None:
        """What has ended a handle before its end."""
        for handle in self._handles:
            try:
                handle.result(0)
            except UserError as error:  # nothing is wrong with the request, or it would not run
                return EngineEnded(str(error))
            except Exception as error:  # noqa: BLE001 - of the engine
                return error
        return None

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def events(said: Iterable[str | None], more: bool = True) -> None:
            if body := "".join([f"data: {data}\n\n" for data in said if data is not None]):
                await send({"type": "http.response.body", "body": body.encode("ascii"), "more_body": more})

        await events(map(json.dumps, self._answers.opening()))
        async for batch in together(self._handles):
            await events(self._answers.piece(*one) for one in batch)
        failure = self._failure()
        last = [_answer_to(failure).body.decode()] if failure else map(json.dumps, self._answers.closing())
        await events([*last, "[DONE]"], more=False)


async def _gone(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
