"""The web application: routes, errors in OpenAI's format, the key, and streams that end when the client leaves."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as PlainHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.inference.serve.answers import Event, Reply
from selfspec.inference.serve.metrics import CONTENT_TYPE, Metrics
from selfspec.inference.serve.protocol import Ask, ChatAsk, CompletionAsk
from selfspec.inference.serve.scheduler import Refused, Scheduler
from selfspec.inference.serve.work import Kitchen, Order

_STATUS = {"full": 429, "stopping": 503, "timeout": 504, "failed": 500}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_CSP = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


@dataclass(frozen=True)
class Front:
    """How the server shows itself.

    Args:
        name: of the model, as clients say it.
        key: clients must send it as a bearer token; None lets everyone in.
        body: the most bytes of a request.
    """

    name: str
    key: str | None = None
    body: int = 4 << 20


def build(front: Front, scheduler: Scheduler, kitchen: Kitchen, metrics: Metrics) -> FastAPI:
    """The application; it starts the scheduler and waits for its end."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        yield
        scheduler.close(0)
        await asyncio.to_thread(scheduler.join, 30)

    app = FastAPI(title="selfspec", lifespan=life, docs_url=None, redoc_url=None)
    app.add_middleware(_Bounds, front=front, metrics=metrics)
    app.add_exception_handler(Refused, _on_refused)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(PlainHTTPException, _on_http)
    locked = [Depends(_key_check(front.key))]
    created = int(time.time())

    def checked(ask: Ask) -> None:
        if ask.model not in (None, front.name):
            raise HTTPException(404, f"there is no model {ask.model!r} here; this server has {front.name!r}")

    @app.get("/v1/models", dependencies=locked)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    def model_card() -> dict[str, Any]:
        return {
            "id": front.name,
            "object": "model",
            "created": created,
            "owned_by": "selfspec",
            "max_model_len": kitchen.longest,
            "chat": kitchen.chats,
            "draft": scheduler.draft.kind,
        }

    @app.get("/v1/models/{name:path}", dependencies=locked)
    async def model(name: str) -> dict[str, Any]:
        if name != front.name:
            raise HTTPException(404, f"there is no model {name!r} here; this server has {front.name!r}")
        return model_card()

    @app.post("/v1/completions", dependencies=locked)
    async def completions(ask: CompletionAsk, request: Request) -> Response:
        checked(ask)
        order = await kitchen.order(ask)
        reply = Reply("text_completion", front.name, order.answers, order.prompt_tokens, ask.origins)
        return await _respond(ask, order, reply, request, scheduler)

    @app.post("/v1/chat/completions", dependencies=locked)
    async def chat(ask: ChatAsk, request: Request) -> Response:
        checked(ask)
        order = await kitchen.order(ask)
        reply = Reply("chat.completion", front.name, order.answers, order.prompt_tokens, ask.origins)
        return await _respond(ask, order, reply, request, scheduler)

    @app.get("/health")
    async def health() -> Response:
        alive = scheduler.alive
        return JSONResponse({"status": "ok" if alive else "stopping"}, 200 if alive else 503)

    @app.get("/metrics")
    async def figures() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE)

    page = (resources.files("selfspec.inference.serve") / "page.html").read_text(encoding="utf-8")

    @app.get("/")
    async def index() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _CSP})

    return app


# Answers


async def _respond(ask: Ask, order: Order, reply: Reply, request: Request, scheduler: Scheduler) -> Response:
    echo = order.prompts if isinstance(ask, CompletionAsk) and ask.echo else []
    if ask.stream:
        parts = _stream(ask, order, reply, echo, scheduler)
        return StreamingResponse(
            parts, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
    try:
        events = await _unless_gone(request, _collect(order))
    finally:
        scheduler.cancel(order.jobs)
    return JSONResponse(reply.whole([*_echoed(ask, echo), *events]))


def _echoed(ask: Ask, prompts: list[str]) -> list[Event]:
    copies = ask.n or 1
    return [Event(i * copies + j, [(text, 0)]) for i, text in enumerate(prompts) for j in range(copies)]


async def _events(order: Order) -> AsyncIterator[Event]:
    while order.going:
        event = await order.queue.get()
        order.going -= event.finish is not None or event.error is not None
        yield event


async def _collect(order: Order) -> list[Event]:
    events = []
    async for event in _events(order):
        if event.error is not None:
            raise event.error
        events.append(event)
    return events


async def _unless_gone(request: Request, work: Awaitable[list[Event]]) -> list[Event]:
    """Wait for the answer, but not longer than the client does."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(499, "the client closed the connection")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, Refused):
                await one


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(ask: Ask, order: Order, reply: Reply, echo: list[str], scheduler: Scheduler) -> AsyncIterator[str]:
    """Server-sent events. Leaving early, as a closed connection makes it, cancels the jobs."""
    try:
        if reply.chat:
            for index in range(len(order.answers)):
                yield _sent(reply.first(index))
        for event in _echoed(ask, echo):
            yield _sent(reply.chunk(event))
        async for event in _events(order):
            if event.error is not None:
                yield _sent({"error": _error(_status(event.error), str(event.error), event.error.reason)})
                return
            if event.segments or event.said or event.finish is not None:
                yield _sent(reply.chunk(event))
        if ask.usage:
            yield _sent(reply.last())
        yield "data: [DONE]\n\n"
    finally:
        scheduler.cancel(order.jobs)


def _sent(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values, ensure_ascii=False, separators=(',', ':'))}\n\n"


# Errors, the key, bounds


def _error(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"message": message, "type": kind, "param": param, "code": code}


def _status(error: Refused) -> int:
    return _STATUS.get(error.reason, 400)


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    code = "context_length_exceeded" if error.reason == "too_long" else error.reason
    headers = {"Retry-After": "1"} if error.reason in ("full", "stopping") else None
    return JSONResponse({"error": _error(_status(error), str(error), code)}, _status(error), headers=headers)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = max(error.errors(), key=lambda found: len(found["loc"]))  # of a field of several types, the nearest miss
    place = [str(part) for part in first["loc"] if part != "body"]
    message = first["msg"].removeprefix("Value error, ")
    text = f"{'.'.join(place)}: {message}" if place and first["type"] != "json_invalid" else message
    return JSONResponse({"error": _error(400, text, first["type"], place[0] if place else None)}, 400)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, PlainHTTPException)
    code = "model_not_found" if error.status_code == 404 and "no model" in str(error.detail) else None
    content = {"error": _error(error.status_code, str(error.detail), code)}
    return JSONResponse(content, error.status_code, headers=dict(error.headers or {}))


def _key_check(key: str | None) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        if key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), key.encode())
        if scheme.lower() != "bearer" or not right:
            raise HTTPException(
                401, "a wrong key, or none; send it as 'Authorization: Bearer KEY'", {"WWW-Authenticate": "Bearer"}
            )

    return check


class _Bounds:
    """Refuses bodies that are too large, whatever their header says, and counts answers."""

    def __init__(self, app: ASGIApp, front: Front, metrics: Metrics) -> None:
        self.app = app
        self.front = front
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        read, too_large = 0, HTTPException(413, f"the request is larger than {self.front.body} bytes; send less")

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.front.body:
                raise too_large
            return message

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self.app(scope, bounded, counted)
