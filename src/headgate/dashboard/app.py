"""The answers of the page's server: the page itself, a stream of what is seen, rows, stories, actions, metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from importlib.resources import files
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headgate.core.clock import clock
from headgate.core.redaction import log_exception, redact
from headgate.dashboard.scraping import ProgramLabels, has_socket, joined
from headgate.dashboard.security import HEADERS, Guard
from headgate.dashboard.sources import Source, ThisProgram
from headgate.errors import HeadgateError, InvalidArgument
from headgate.observe.actions import ACTIONS_KNOWN
from headgate.observe.budgets import shared_budgets
from headgate.observe.history import POINTS
from headgate.observe.lines import said
from headgate.observe.prometheus import CONTENT_TYPE

ROWS: Final = 50
"""Rows of each list that are sent by themselves; the page asks for more."""
LONGEST: Final = 16 * 1024
"""Bytes that a request may have."""
SOONEST: Final = 0.2
"""Seconds between two messages of a stream."""
QUIET: Final = 10.0
"""Seconds after which a stream says that it is alive."""
ALIVE: Final = ": alive\n\n"
MOST_STREAMS: Final = 16
BODY_WITHIN: Final = 10.0
"""Seconds that a client has to send the body of a request."""
SCRAPED_WITHIN: Final = 1.5
"""Seconds that programs have to give their metrics, all at the same time."""
_TYPES: Final = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_LISTS: Final = ("tenants", "resources", "workers")


class Json(JSONResponse):
    """JSON in ASCII: names may have halves of characters, which UTF-8 cannot have."""

    def render(self, content: Any) -> bytes:
        """Return what is sent."""
        return json.dumps(content, separators=(",", ":")).encode()


class Hub:
    """Tells the open streams when something is new."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.labels: ProgramLabels | None = None if isinstance(source, ThisProgram) else ProgramLabels(has_socket)
        """For the metrics of a page of several programs."""
        self.streams: int = 0
        """How many streams are open."""
        self._waiting: set[asyncio.Event] = set()
        self.closed: bool = False

    def changed(self) -> None:
        """Wake all streams."""
        if self.labels is not None:
            self.labels.note(self.source.programs)
        for event in self._waiting:
            event.set()

    def close(self) -> None:
        """End all streams."""
        self.closed = True
        self.changed()

    async def messages(self, tasks: bool) -> AsyncGenerator[str]:
        """Give messages for one stream: first all that is known, then what is new."""
        event, sent = asyncio.Event(), _Sent()
        self._waiting.add(event)
        if tasks:
            self.source.want_tasks(True)
        try:
            yield sent.message(self.source)
            while not self.closed:
                try:
                    await asyncio.wait_for(event.wait(), QUIET)
                except TimeoutError:
                    yield ALIVE
                    continue
                event.clear()  # before the message is made: what comes after that is in the next one
                yield sent.message(self.source)
                await asyncio.sleep(SOONEST)
            if isinstance(self.source, ThisProgram):
                yield sent.message(self.source, is_last=True)
        finally:
            self._waiting.discard(event)
            if tasks:
                self.source.want_tasks(False)


class _Stream(Response):
    """An answer that goes on until the client leaves, if there are not too many of them."""

    def __init__(self, hub: Hub, tasks: bool) -> None:
        super().__init__()
        self._hub, self._tasks = hub, tasks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hub = self._hub
        if hub.streams >= MOST_STREAMS:
            await Json({"error": "too many pages are open"}, 503)(scope, receive, send)
            return
        hub.streams += 1  # no await since it was compared; and here it is given back whatever happens
        try:
            async with aclosing(hub.messages(self._tasks)) as messages:
                await StreamingResponse(messages, media_type="text/event-stream")(scope, receive, send)
        finally:
            hub.streams -= 1


class _Sent:
    """What one stream has sent already."""

    def __init__(self) -> None:
        self._looks: dict[str, int] = {}
        self._events: dict[str, int] = {}

    def message(self, source: Source, *, is_last: bool = False) -> str:
        """Return what is new as a server-sent event. The last one of a program says that it ends."""
        programs = source.programs
        told: dict[str, Any] = {
            "alive": [] if is_last else sorted(programs),
            "programs": [],
            "budgets": shared_budgets((name, seen.look) for name, seen in programs.items()),
            "looking": source.looking,
            "ended": is_last,
        }
        for name, seen in programs.items():
            if not seen.look or self._looks.get(name) == seen.number:
                continue
            is_new = name not in self._looks
            self._looks[name] = seen.number
            events = [one for one in seen.events if one["seq"] > self._events.get(name, 0)]
            if events:
                self._events[name] = events[-1]["seq"]
            age = round(clock.now() - seen.heard, 3)  # a program may be stopped: its last look is old
            one = {"id": name, "age": age, "look": _short(seen.look), "events": events}
            if is_new:
                one["history"] = {key: list(points)[-POINTS:] for key, points in seen.history.items()}
            told["programs"].append(one)
        return f"data: {json.dumps(told, separators=(',', ':'))}\n\n"


def _short(look: dict[str, Any]) -> dict[str, Any]:
    pools = []
    for view in look["pools"]:
        cut = {name: view[name][:ROWS] for name in _LISTS if isinstance(view.get(name), list)}
        pools.append({**view, **cut})
    return {**look, "pools": pools}


class Answers:
    """One method for each thing that the page asks for."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def stream(self, request: Request) -> Response:
        """A stream of what is seen."""
        return _Stream(self._hub, request.query_params.get("tasks") == "1")

    async def rows(self, request: Request) -> Response:
        """A page of a long list."""
        query = request.query_params
        asked: dict[str, Any] = {name: query.get(name, "") for name in ("pool", "list", "filter", "sort")}
        for name in ("offset", "limit"):
            if (text := query.get(name, "")).isdecimal():
                asked[name] = int(text[:9])
        return Json(await self._ask(query.get("program", ""), {"ask": "rows", **asked}))

    async def story(self, request: Request) -> Response:
        """What happened to a task."""
        query = request.query_params
        asked = {"ask": "story", "task": query.get("task", "")[:1000], "pool": query.get("pool", "")[:1000]}
        return Json({"story": await self._ask(query.get("program", ""), asked)})

    async def act(self, request: Request) -> Response:
        """Carry out an action."""
        body = b""
        try:
            async with asyncio.timeout(BODY_WITHIN):
                async for part in request.stream():
                    body += part
                    if len(body) > LONGEST:
                        return Json({"error": "the request is too long"}, 413)
        except TimeoutError:
            return Json({"error": "the request took too long to arrive"}, 408)
        try:
            asked = json.loads(body)
            texts = {name: asked.get(name, "") for name in ("program", "action", "target", "pool")}
        except (ValueError, AttributeError, RecursionError):
            return Json({"error": "the request is no JSON object"}, 400)
        if not all(isinstance(text, str) and len(text) <= 1000 for text in texts.values()):
            return Json({"error": "program, action, target and pool must be texts"}, 400)
        if texts["action"] not in ACTIONS_KNOWN:
            return Json({"error": f"action must be one of {', '.join(ACTIONS_KNOWN)}"}, 400)
        program = texts.pop("program")
        return Json({"done": await self._ask(program, {"ask": "act", **texts})})

    async def metrics(self, request: Request) -> Response:
        """What Prometheus scrapes: of this program as it is, of several with a label for each."""
        labels, programs = self._hub.labels, self._hub.source.programs
        if labels is None:
            return PlainTextResponse(await self._metrics_of(ThisProgram.ID), media_type=CONTENT_TYPE)
        labels.note(programs)
        shown = labels.given()
        texts = await asyncio.gather(*(self._metrics_of(one.id) for one in shown), return_exceptions=True)
        there = labels.given()  # without those that have ended meanwhile
        pairs = [
            (one, text if one.gone is None else None) for one, text in zip(shown, texts, strict=True) if one in there
        ]
        return PlainTextResponse(await asyncio.to_thread(joined, pairs), media_type=CONTENT_TYPE)

    async def _metrics_of(self, program: str) -> str:
        """The metrics of one program. One that is stopped must not keep the others out of a scrape."""
        try:
            async with asyncio.timeout(SCRAPED_WITHIN):
                return str(await self._ask(program, {"ask": "metrics"}))
        except TimeoutError as error:
            raise InvalidArgument(f"the program does not answer within {SCRAPED_WITHIN:g} s") from error

    async def healthz(self, request: Request) -> Response:
        """The server runs."""
        return PlainTextResponse("ok\n")

    async def readyz(self, request: Request) -> Response:
        """Something can be seen."""
        is_ready = any(seen.look for seen in self._hub.source.programs.values())
        return PlainTextResponse("ready\n" if is_ready else "no program can be seen\n", 200 if is_ready else 503)

    async def _ask(self, program: str, request: dict[str, Any]) -> Any:
        return await self._hub.source.ask(program, request)


def _page(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("headgate.dashboard").joinpath("page", name).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]]

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadgateError), "it is the handler of those"
    return Json({"error": redact(said(error))}, 409)


async def _broken(request: Request, error: Exception) -> Response:
    return Json({"error": "something went wrong here; the log of the dashboard says what"}, 500)


class Guarded:
    """Asks the guard before anything is answered, and gives each answer the headers of security."""

    def __init__(self, app: Any, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        named = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        headers = dict(named)
        for one in ("host", "origin", "authorization"):
            if sum(name == one for name, _ in named) > 1:
                headers[one] = ""  # which of them is meant?
        refusal = self._guard.refusal(scope["method"], scope["path"], headers)
        if refusal is not None:
            answer = Json({"error": refusal.reason}, refusal.status)
            await answer(scope, receive, with_headers)
            return
        try:
            await self._app(scope, receive, with_headers)
        except Exception:
            log_exception("headgate.dashboard", "answering %s failed", scope["path"])


def make_app(source: Source, guard: Guard) -> tuple[Guarded, Hub]:
    """Make the application, and the hub that tells its streams what is new."""
    hub = Hub(source)
    answers = Answers(hub)
    get = ["GET"]
    app = Starlette(
        routes=[
            Route("/", _page("index.html"), methods=get),
            *(Route(f"/{name}", _page(name), methods=get) for name in ("app.js", "plots.js", "app.css", "icon.svg")),
            Route("/api/stream", answers.stream, methods=get),
            Route("/api/rows", answers.rows, methods=get),
            Route("/api/story", answers.story, methods=get),
            Route("/api/act", answers.act, methods=["POST"]),
            Route("/metrics", answers.metrics, methods=get),
            Route("/healthz", answers.healthz, methods=get),
            Route("/readyz", answers.readyz, methods=get),
        ],
        exception_handlers={HeadgateError: _refused, Exception: _broken},
    )
    return Guarded(app, guard), hub
