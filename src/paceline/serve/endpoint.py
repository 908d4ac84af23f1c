"""Endpoint: OpenAI's API over HTTP, and what a site asks of a server.

| path | what |
|---|---|
| /v1/completions, /v1/chat/completions | texts |
| /v1/embeddings | texts as vectors |
| /v1/models, /v1/models/{name} | what is served |
| /health, /ready | the process lives; it takes requests |
| /metrics | for Prometheus |

Each answer that is no text is an error in OpenAI's form with the right status; nothing that a
client sends or leaves out ends the server, or keeps blocks that nobody waits for.
"""

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from paceline.serve.answers import (
    ChatAnswer,
    CompletionAnswer,
    Texts,
    TokenTexts,
    embeddings_answer,
)
from paceline.serve.bodies import Body, ChatBody, CompletionBody, Server, no_model
from paceline.serve.errors import ApiError
from paceline.serve.keys import Keys
from paceline.serve.metrics import Metrics, state
from paceline.serve.retrieval.retriever import BusyError, Found, Retriever
from paceline.serve.service import Request, Service, too_long

T = TypeVar("T")
Handler = Callable[[HttpRequest], Awaitable[Response]]

MOST_BODY_BYTES = 8 << 20
_BODY_S = 30.0
"""In which a body has to be here."""
_LAST_WORDS_S = 1.0
"""That a stream's error waits for its reader."""


class Endpoint:
    """Answers requests.

    Args:
        step: of the weights at the moment; None: nobody knows.
        is_local: whether only this host can ask; then its name has to be one of this host, for a
            page in a browser may ask by a name of its own that leads here.
        retriever: finds documents for prompts; None: there are none.
    """

    def __init__(
        self,
        server: Server,
        service: Service,
        keys: Keys,
        metrics: Metrics,
        step: Callable[[], int | None],
        *,
        is_local: bool,
        retriever: Retriever | None = None,
    ) -> None:
        self._retriever = retriever
        self._server, self._service, self._keys, self._metrics = server, service, keys, metrics
        self._step, self._is_local = step, is_local
        self._token_texts = TokenTexts(server.network.tokenizer)
        self._begun_s = int(time.time())
        metrics.show(
            lambda: state(
                server.network.name,
                service.engine.numbers(),
                step(),
                is_ready=not service.is_stopping and service.failure is None,
            )
        )

    def app(self) -> Starlette:
        """The application that uvicorn runs."""
        completions = partial(self._texts, CompletionBody, CompletionAnswer)
        chat = partial(self._texts, ChatBody, ChatAnswer)
        asked, told = ["POST"], ["GET"]
        return Starlette(
            routes=[
                Route("/v1/completions", self._counted(completions), methods=asked),
                Route("/v1/chat/completions", self._counted(chat), methods=asked),
                Route("/v1/embeddings", self._counted(self._embeddings), methods=asked),
                Route("/v1/models", self._guarded(self._models), methods=told),
                Route("/v1/models/{name:path}", self._guarded(self._model), methods=told),
                Route("/health", self._health, methods=told),
                Route("/ready", self._ready, methods=told),
                Route("/metrics", self._scrape, methods=told),
            ],
            exception_handlers={HTTPException: _no_route},
        )

    # ---- texts ----------------------------------------------------------------------------------

    async def _texts(
        self,
        body_of: type[Body],
        answer_of: type[CompletionAnswer],
        http: HttpRequest,
    ) -> Response:
        holder = self._holder(http)
        self._service.check_open()
        body = await asyncio.to_thread(self._server.read, body_of, await _body(http))
        found = await _while_wanted(self._found(body), http.receive)
        asked = await asyncio.to_thread(self._server.asked, body, holder, found)
        answer = answer_of(asked, self._server.network.name, self._token_texts)
        request = await _while_wanted(self._service.begin(asked), http.receive)
        if asked.is_streamed:
            return _Stream(request, self._events(request, answer), self._service, self._metrics)
        try:
            texts = await _while_wanted(_all_of(request), http.receive)
        finally:
            self._service.close(request)
        step = self._step()
        fingerprint = None if step is None else f"step-{step}"
        return _json(answer.answer(texts, fingerprint))

    async def _found(self, body: Body) -> list[Found]:
        """The chunks of documents that a request's prompt gets."""
        wanted = self._server.wanted(body)
        if wanted is None or self._retriever is None:
            return []
        with self._metrics.retrieval.time():
            try:
                async with asyncio.timeout(self._service.engine.serving.timeout_s):
                    return await asyncio.wrap_future(self._retriever.ask(*wanted))
            except BusyError:
                raise _busy() from None
            except TimeoutError:
                raise too_long(self._service.engine.serving.timeout_s) from None

    async def _events(self, request: Request, answer: CompletionAnswer) -> AsyncIterator[bytes]:
        """The chunks of a stream, as many at once as there are. What comes before all tokens comes
        with the first, for clients take it for that one."""
        asked, texts = request.asked, Texts(request.asked)
        chunks = answer.first_chunks()
        while not texts.is_over:
            pieces = await request.new_pieces()
            texts.add(pieces)
            chunks += [answer.chunk(piece) for piece in pieces]
            if texts.is_over:
                chunks[-1] |= answer.sources()
            yield b"".join(map(_event, chunks))
            chunks = []
        if asked.tells_usage:
            yield _event(answer.last_chunk(texts))
        yield b"data: [DONE]\n\n"

    async def _embeddings(self, http: HttpRequest) -> Response:
        self._holder(http)
        self._service.check_open()
        body, texts = await asyncio.to_thread(self._server.read_embeddings, await _body(http))
        vectors = await _while_wanted(self._service.embed(texts), http.receive)
        name, count = self._server.network.name, sum(map(len, texts))
        as_base64 = body.encoding_format == "base64"
        return _json(embeddings_answer(vectors, name, count, as_base64=as_base64))

    # ---- what is served, and how it is ----------------------------------------------------------

    async def _models(self, http: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._described()]})

    async def _model(self, http: HttpRequest) -> Response:
        if (name := http.path_params["name"]) != self._server.network.name:
            raise no_model(name, self._server.network.name)
        return _json(self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._server.network.name,
            "object": "model",
            "created": self._begun_s,
            "owned_by": "paceline",
            "max_model_len": self._server.longest,
            "step": self._step(),
        }

    async def _health(self, http: HttpRequest) -> Response:
        return _json({"status": "ok"})

    async def _ready(self, http: HttpRequest) -> Response:
        try:
            self._service.check_open()
        except ApiError as error:
            return _refusal(error)
        return _json({"status": "ready", "step": self._step()})

    async def _scrape(self, http: HttpRequest) -> Response:
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # ---- around them ----------------------------------------------------------------------------

    def _holder(self, http: HttpRequest) -> bytes:
        if self._is_local and not self._keys and not _names_this_host(http.headers.get("host")):
            raise ApiError(
                403,
                "The Host header names another host, and this server is for its own host alone: "
                "ask for localhost, or serve with API keys.",
            )
        return self._keys.holder(http.headers.get("authorization"))

    def _guarded(self, handler: Handler) -> Handler:
        """Only those who may ask, and errors in OpenAI's form."""

        async def handle(http: HttpRequest) -> Response:
            try:
                self._holder(http)
                return await handler(http)
            except ApiError as error:
                return _refusal(error)

        return handle

    def _counted(self, handler: Handler) -> Handler:
        """Errors in OpenAI's form, and how the request ended for the metrics; a stream counts
        itself."""

        async def handle(http: HttpRequest) -> Response:
            begun_s, outcome = time.perf_counter(), "done"
            try:
                response = await handler(http)
            except ApiError as error:
                response, outcome = _refusal(error), error.outcome
            except ClientDisconnect:
                response, outcome = Response(status_code=499), "cancelled"  # which nobody reads
            except Exception as error:
                traceback.print_exception(error)
                outcome = "failed"
                response = _refusal(ApiError(500, "The server has failed at this request."))
            if not isinstance(response, _Stream):
                self._metrics.ended(outcome, time.perf_counter() - begun_s)
            return response

        return handle


class _Stream(Response):
    """Server-sent events, for as long as somebody reads them."""

    media_type = "text/event-stream"

    def __init__(
        self, request: Request, events: AsyncIterator[bytes], service: Service, metrics: Metrics
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request, self._events = request, events
        self._service, self._metrics = service, metrics
        self._is_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        outcome = "cancelled"
        try:
            await _while_wanted(self._send(send), receive, self._request.given_up)
            outcome = "done"
        except ApiError as error:
            outcome = error.outcome
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._end(error, scope, receive, send)
        except ClientDisconnect:
            pass
        except Exception as error:
            traceback.print_exception(error)
            outcome = "failed"
        finally:
            self._service.close(self._request)
            self._metrics.ended(outcome, time.perf_counter() - self._request.begun_s)

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        self._is_begun = True
        async for part in self._events:
            await _send_part(send, part, more=True)
        await _send_part(send, b"", more=False)

    async def _end(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_begun:
            await _send_part(send, _event(error.body), more=False)
        else:
            await _refusal(error)(scope, receive, send)


def _busy() -> ApiError:
    return ApiError(
        429,
        "Too many requests wait for documents: ask again later.",
        code="too_many_waiting",
        outcome="busy",
        headers={"Retry-After": "1"},
    )


async def _send_part(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _all_of(request: Request) -> Texts:
    texts = Texts(request.asked)
    while not texts.is_over:
        getting = asyncio.ensure_future(request.new_pieces())
        try:
            await asyncio.wait((getting, request.given_up), return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                request.given_up.result()
            texts.add(getting.result())
        finally:
            getting.cancel()
    return texts


async def _while_wanted(
    work: Coroutine[Any, Any, T], receive: Receive, *others: asyncio.Future[None]
) -> T:
    """The result of some work, which ends when the client goes away or another future fails.

    Raises:
        ClientDisconnect: the client has gone.
    """
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        waited: tuple[asyncio.Future[Any], ...] = (doing, gone, *others)
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        for other in others:
            if other.done():
                other.result()
        raise ClientDisconnect
    finally:
        for each in (doing, gone):
            each.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(http: HttpRequest) -> bytes:
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"The body is {kind[:100]!r}: send JSON, with 'Content-Type: application/json'."
        )
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in http.stream():
                body += part
                if len(body) > MOST_BODY_BYTES:
                    raise ApiError(
                        413,
                        f"The body has more than {MOST_BODY_BYTES >> 20} MiB: send less.",
                        headers={"Connection": "close"},
                    )
    except TimeoutError:
        message = f"The body was not here after {_BODY_S:g} s: send it at once."
        raise ApiError(408, message, headers={"Connection": "close"}) from None
    return bytes(body)


def _names_this_host(host: str | None) -> bool:
    name = (host or "").rsplit(":", 1)[0] if not (host or "").endswith("]") else host or ""
    name = name.strip("[]").lower()
    if name == "localhost":
        return True
    with suppress(ValueError):
        return ip_address(name).is_loopback
    return False


async def _no_route(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {
        404: f"{http.url.path[:200]} is not a path of this server: docs/serving.md lists them.",
        405: f"{http.method} is not for {http.url.path[:200]}: see the Allow header.",
    }
    message = words.get(error.status_code, error.detail)
    return _refusal(ApiError(error.status_code, message, headers=error.headers))


def _refusal(error: ApiError) -> Response:
    return _json(error.body, error.status, dict(error.headers or {}))


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
