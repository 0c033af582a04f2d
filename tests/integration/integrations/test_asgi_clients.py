"""Clients that go away, and a server that is told to end: real sockets, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import BackgroundTasks, FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from headgate import TaskPool, backpressure_queue
from headgate.integrations import asgi
from tests.integration.integrations.asgi_server import Hangup, Raw, client_of, serving
from tests.support.tasks.support import until

pytestmark = pytest.mark.integration


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


# -- clients that go away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_c31_a_client_that_goes_away_cancels_its_task(method: str) -> None:
    async def main() -> None:
        pool = TaskPool(max_concurrent=1)
        app = FastAPI(lifespan=asgi.lifespan(pool))
        app.add_middleware(asgi.CancelOnDisconnect)

        @app.get("/")
        async def get() -> None:
            await pool.run(for_ever)

        @app.post("/")
        async def post(asked: dict[str, Any]) -> None:
            assert asked == {"a": 1}
            await pool.run(for_ever)

        async with serving(app) as url:
            clients = []
            for _ in range(3):
                clients.append(Hangup(url, method, "/", b'{"a": 1}' if method == "POST" else b""))
                await until(lambda: pool.size() == len(clients))
            assert sorted(task.status for task in pool.snapshot().tasks) == ["queued", "queued", "running"]
            for left, client in ((2, clients[1]), (1, clients[0]), (0, clients[2])):  # queued, running, then running
                client.go()
                await until(lambda left=left: pool.size() == left)
            assert {task.status for task in pool.snapshot().tasks} == {"cancelled"}

    asyncio.run(main())


def test_c31_without_the_middleware_or_outside_its_choice_nothing_is_cancelled() -> None:
    async def main() -> None:
        pool, go = TaskPool(max_concurrent=1), asyncio.Event()
        app = FastAPI(lifespan=asgi.lifespan(pool))
        app.add_middleware(asgi.CancelOnDisconnect, only=lambda scope: scope["path"] != "/pay")

        @app.get("/pay")
        async def pay() -> None:
            await pool.run(go.wait)

        async with serving(app) as url:
            client = Hangup(url, path="/pay")
            await until(pool.size)
            client.go()
            async with httpx.AsyncClient(base_url=url) as other:
                assert (await other.get("/elsewhere")).status_code == 404  # the server has seen the end by now
            assert pool.size() == 1
            go.set()
        assert pool.snapshot(1).tasks[0].status == "completed"

    asyncio.run(main())


def test_c31_what_runs_after_the_answer_is_not_cancelled() -> None:
    async def main() -> None:
        pool, go, done = TaskPool(max_concurrent=1), asyncio.Event(), []
        app = FastAPI(lifespan=asgi.lifespan(pool))
        app.add_middleware(asgi.CancelOnDisconnect)

        async def afterwards() -> None:
            await go.wait()
            done.append(True)

        @app.get("/")
        async def get(background: BackgroundTasks) -> str:
            background.add_task(afterwards)
            return "answered"

        async with serving(app) as url:
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.get("/")).json() == "answered"
            go.set()
            await until(lambda: done)

    asyncio.run(main())


def test_c31_answers_and_bodies_pass_unchanged() -> None:
    async def main() -> None:
        async def echo(request: Request) -> StreamingResponse:
            chunks = [chunk async for chunk in request.stream()]

            async def parts() -> AsyncIterator[bytes]:
                for chunk in chunks:
                    yield chunk

            return StreamingResponse(parts())

        async def ignore(request: Request) -> PlainTextResponse:
            return PlainTextResponse("unread")

        async def fail(request: Request) -> PlainTextResponse:
            raise TimeoutError("of the application itself")

        app = Starlette(
            routes=[Route("/", echo, methods=["POST"]), Route("/no", ignore, methods=["POST"]), Route("/fail", fail)]
        )
        app.add_middleware(asgi.CancelOnDisconnect)
        body = bytes(range(256)) * 4096

        async def in_parts() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 65536):
                yield body[start : start + 65536]

        async with client_of(app) as client:
            assert (await client.post("/", content=body)).content == body
            assert (await client.post("/", content=in_parts())).content == body
            assert (await client.post("/no", content=body)).text == "unread"
            assert (await client.get("/fail")).status_code == 500

    asyncio.run(main())


def test_c31_a_stream_that_nobody_reads_any_more_is_cancelled() -> None:
    async def main() -> None:
        pool, ended = TaskPool(max_concurrent=1), []

        async def numbers() -> AsyncIterator[str]:
            try:
                yield "1"
                await for_ever()
            finally:
                ended.append(True)

        async def endpoint(request: Any) -> StreamingResponse:
            return StreamingResponse(pool.stream(numbers))

        app = Starlette(routes=[Route("/", endpoint)], lifespan=asgi.lifespan(pool))
        app.add_middleware(asgi.CancelOnDisconnect)
        async with serving(app) as url:
            client = Hangup(url)
            await until(pool.size)
            client.go()
            await until(lambda: ended and not pool.size())

    asyncio.run(main())


def test_c31_a_body_is_read_at_most_one_message_ahead() -> None:
    async def main() -> None:
        given: list[Any] = []
        raw = Raw(*({"type": "http.request", "body": b"%d" % n, "more_body": n < 3} for n in range(4)))

        async def receive() -> Any:
            given.append(message := await raw.receive())
            return message

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert given == []  # its length is announced, and the application may refuse it
            for number in range(4):
                assert (await receive())["body"] == b"%d" % number
                await asyncio.sleep(0.01)
                assert len(given) <= number + 2

        scope = {"type": "http", "headers": [(b"Content-Length", b"4")]}
        await asgi.CancelOnDisconnect(app)(scope, receive, raw.send)

    asyncio.run(main())


def test_c31_a_server_that_breaks_breaks_the_request() -> None:
    async def main() -> None:
        async def receive() -> Any:
            raise OSError("broken")

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()

        with pytest.raises(OSError, match="broken"):
            await asgi.CancelOnDisconnect(app)({"type": "http", "headers": []}, receive, Raw().send)
        await asgi.CancelOnDisconnect(asgi.PoolErrors(app))({"type": "lifespan"}, Raw({}).receive, Raw().send)

    asyncio.run(main())


def test_c31_a_cancellation_from_outside_is_not_swallowed() -> None:
    async def main() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await for_ever()

        task = asyncio.create_task(Raw().get(asgi.CancelOnDisconnect(app)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


# -- a process that is told to end ------------------------------------------------------------------------------------

SERVICE = """
import asyncio, sys
from fastapi import FastAPI
from headgate import TaskPool
from headgate.integrations import asgi

pool = TaskPool("service", max_concurrent=2)
app = FastAPI(lifespan=asgi.lifespan(pool))
app.add_middleware(asgi.PoolErrors)
go = asyncio.Event()

async def work(number):
    await go.wait()
    await asyncio.sleep(0.05)
    print("done", number, flush=True)
    return number

@app.get("/background/{number}")
async def background(number: int):
    await pool.submit(work, number)
    return pool.size()

@app.get("/wait/{number}")
async def wait(number: int):
    return await pool.run(work, number)

@app.get("/go")
async def let_go():
    go.set()
"""


@contextmanager
def service(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """uvicorn as a process of its own; gives it and its address."""
    (folder / "service.py").write_text(SERVICE, "utf-8")
    command = [sys.executable, "-m", "uvicorn", "service:app", "--port", "0", "--no-use-colors", "--no-access-log"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if "running on" in line:
                    yield process, line.split("running on ")[1].split()[0]
                    break
            else:
                raise AssertionError("it did not start")
        finally:
            process.kill()


def test_c31_sigterm_drains_what_runs_and_what_is_queued(tmp_path: Path) -> None:
    with service(tmp_path) as (process, url), httpx.Client(base_url=url, timeout=10) as client:
        assert [client.get(f"/background/{number}").json() for number in range(5)] == [1, 2, 3, 4, 5]
        client.get("/go")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert sorted(out.splitlines()) == [f"done {number}" for number in range(5)]
    assert "Application shutdown complete" in err
    assert process.returncode in (0, -signal.SIGTERM)  # uvicorn raises the signal again when it is done


# -- streams ----------------------------------------------------------------------------------------------------------


class Words:
    """The stream of docs/services.md: the first word is waited for before the answer begins."""

    def __init__(self, **options: Any) -> None:
        self.pool = TaskPool(max_concurrent=1, **options)
        self.go = asyncio.Event()
        self.app = FastAPI(lifespan=asgi.lifespan(self.pool))
        self.app.add_middleware(asgi.PoolErrors, status=429)
        self.app.add_middleware(asgi.CancelOnDisconnect)
        self.app.get("/")(self.answer)

    async def write(self, words: str) -> AsyncIterator[str]:
        for word in words.split():
            if word == "broken":
                raise LookupError(word)
            yield word
            await self.go.wait()

    async def answer(self, words: str) -> StreamingResponse:
        stream = self.pool.stream(self.write, words)
        first = await anext(stream, "")

        async def events() -> AsyncIterator[str]:
            async with aclosing(stream):
                yield f"data: {first}\n\n"
                async for word in stream:
                    yield f"data: {word}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


@pytest.mark.parametrize("on_full", ["refuse_fair", "fail_submitter", "drop_newest"])
def test_c31_a_stream_that_is_refused_is_a_429_and_not_a_broken_200(on_full: Any) -> None:
    async def main() -> None:
        service = Words(backpressure=backpressure_queue(1, on_full))
        async with client_of(service.app) as client, client.stream("GET", "/?words=a+b") as running:
            assert running.status_code == 200
            lines = running.aiter_lines()
            assert await anext(lines) == "data: a", "it arrives before the stream is over"
            queued = asyncio.create_task(client.get("/?words=c"))
            await until(lambda: service.pool.snapshot(0).queued == 1)
            refused = await client.get("/?words=d")
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["content-type"] == "application/json"
            service.go.set()
            assert [line async for line in lines if line] == ["data: b"]
            assert (await queued).text == "data: c\n\n"
        statuses = {"completed": 2, "rejected": int(on_full == "drop_newest")}
        assert {name: service.pool.snapshot(0)[name] for name in statuses} == statuses

    asyncio.run(main())


def test_c31_a_stream_that_fails_at_once_is_a_500_and_an_empty_one_is_empty() -> None:
    async def main() -> None:
        service = Words()
        service.go.set()
        async with client_of(service.app) as client:
            assert (await client.get("/?words=broken")).status_code == 500
            assert (await client.get("/?words=")).text == "data: \n\n"
        assert service.pool.size() == 0

    asyncio.run(main())


def test_c31_a_client_that_leaves_a_stream_ends_its_task() -> None:
    async def main() -> None:
        service = Words()
        async with serving(service.app) as url:
            client = Hangup(url, path="/?words=a+b")
            await until(lambda: service.pool.snapshot(0).active == 1)
            client.go()
            await until(lambda: service.pool.size() == 0)

    asyncio.run(main())
