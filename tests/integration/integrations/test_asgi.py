"""Pools in web services: lifespans, refusals and tenants, with real FastAPI and Starlette under real uvicorn."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import Depends, FastAPI, Request
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

import headgate
from headgate import (
    DispatchTimeout,
    HeadgateError,
    InvalidArgument,
    InvalidType,
    NoWorkersAvailable,
    PoolBusy,
    PoolClosed,
    PoolExhausted,
    QueueFull,
    ResourcePool,
    SubmitTimeout,
    TaskExpired,
    TaskPool,
    TaskRejected,
    WorkerLost,
    WorkerPool,
    backpressure_queue,
    fail_fast,
    fair_round_robin,
    fair_share,
)
from headgate.integrations import asgi
from headgate.tasks import current_tenant, tenant_scope
from headgate.testing import virtual
from tests.integration.integrations.asgi_server import Raw, client_of, fails_to_start
from tests.support.tasks.support import until

pytestmark = pytest.mark.integration


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


# -- lifespans --------------------------------------------------------------------------------------------------------


def test_c31_pools_are_open_while_fastapi_serves() -> None:
    async def main() -> None:
        workers = WorkerPool(spawn=1)
        pool, keys = TaskPool("web-open", max_concurrent=2, workers=workers), ResourcePool(["sk-a"])
        app = FastAPI(lifespan=asgi.lifespan(pool, workers, keys))  # the workers are opened first all the same

        @app.get("/double/{number}")
        async def endpoint(number: int) -> int:
            return await pool.run(double, number)

        async with client_of(app) as client:
            assert (await client.get("/double/21")).json() == 42
        with pytest.raises(PoolClosed):
            await pool.submit(double, 1)
        assert "web-open" not in headgate.pool_list()

    asyncio.run(main())


def test_c31_shutdown_waits_for_tasks_that_no_request_waits_for() -> None:
    async def main() -> None:
        pool, go, done = TaskPool("web-drain", max_concurrent=1), asyncio.Event(), []

        async def work(number: int) -> None:
            await go.wait()
            done.append(number)

        async def submit(request: Any) -> PlainTextResponse:
            for number in range(3):
                await pool.submit(work, number)
            return PlainTextResponse("accepted")

        app = Starlette(routes=[Route("/", submit)], lifespan=asgi.lifespan(pool))
        async with client_of(app) as client:
            assert (await client.get("/")).text == "accepted"
            asyncio.get_running_loop().call_later(0.15, go.set)  # while the application shuts down
        assert done == [0, 1, 2]

    asyncio.run(main())


def test_c31_after_the_drain_timeout_what_is_left_is_cancelled() -> None:
    async def main() -> None:
        pool = TaskPool(max_concurrent=1)
        lifespan = asgi.lifespan(pool, drain_timeout=0.01)
        async with lifespan(None):
            running, queued = [await pool.submit(asyncio.sleep, 3600) for _ in range(2)]
        assert (running.status, queued.status) == ("cancelled", "cancelled")

    asyncio.run(main())


def test_c31_an_application_that_is_cancelled_cancels_its_tasks() -> None:
    async def main() -> None:
        pool, handles = TaskPool(max_concurrent=1), []

        async def live() -> None:
            async with asgi.lifespan(pool)(None):
                handles.append(await pool.submit(asyncio.sleep, 3600))
                await asyncio.sleep(3600)

        task = asyncio.create_task(live())
        await until(lambda: handles and handles[0].status == "running")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert handles[0].status == "cancelled"

    asyncio.run(main())


def test_c31_an_own_lifespan_runs_inside_and_gives_its_state() -> None:
    async def main() -> None:
        pool = TaskPool("web-inside", max_concurrent=1)

        @asynccontextmanager
        async def own(app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
            app.state.doubled = await pool.run(double, 4)
            yield {"greeting": "hello"}
            app.state.at_the_end = await pool.run(double, 5)  # it is open still

        app = FastAPI(lifespan=asgi.lifespan(pool, inside=own))

        @app.get("/")
        async def endpoint(request: Request) -> list[Any]:
            return [request.app.state.doubled, request.state.greeting]

        async with client_of(app) as client:
            assert (await client.get("/")).json() == [8, "hello"]
        assert app.state.at_the_end == 10

    asyncio.run(main())


def test_c31_pools_may_be_made_at_each_start_up() -> None:
    async def main() -> None:
        def make() -> dict[str, Any]:
            return {"answers": TaskPool("web-anew", max_concurrent=1)}

        @asynccontextmanager
        async def own(app: Any) -> AsyncIterator[Mapping[str, Any]]:
            yield {"greeting": "hello"}

        async def endpoint(request: Request) -> PlainTextResponse:
            doubled = await request.state.answers.run(double, 4)
            return PlainTextResponse(f"{request.state.greeting} {doubled}")

        app = Starlette(routes=[Route("/", endpoint)], lifespan=asgi.lifespan_from(make, inside=own))
        for _ in range(2):
            async with client_of(app) as client:
                assert (await client.get("/")).text == "hello 8"
        async with asgi.lifespan_from(make)(app) as state:
            assert state["answers"].name == "web-anew"

    asyncio.run(main())


def test_c31_a_failed_start_up_says_what_failed_and_closes_what_was_opened(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        workers, closed = WorkerPool(spawn=1), TaskPool("web-closed", max_concurrent=1)
        await closed.close()
        assert await fails_to_start(FastAPI(lifespan=asgi.lifespan(closed, workers)))
        with pytest.raises(RuntimeError, match="entered once"):  # it was opened, and is closed: no process is left
            await workers.__aenter__()

    asyncio.run(main())
    assert "The TaskPool 'web-closed' could not be opened at the start-up of the application" in caplog.text


def test_c31_a_failed_start_up_frees_the_names_of_pools_that_were_not_reached(caplog: pytest.LogCaptureFixture) -> None:
    def nowhere() -> Any:
        raise OSError("there is no network")

    async def main() -> None:
        pool, broken = TaskPool("web-broken", max_concurrent=1), WorkerPool(discovery=nowhere)
        assert await fails_to_start(Starlette(lifespan=asgi.lifespan(pool, broken)))
        assert "web-broken" not in headgate.pool_list()

    asyncio.run(main())
    assert "there is no network" in caplog.text
    assert "The WorkerPool could not be opened at the start-up" in caplog.text


def test_c31_a_second_start_up_with_the_same_pools_says_what_to_do() -> None:
    async def main() -> None:
        lifespan = asgi.lifespan(TaskPool("web-twice", max_concurrent=1))
        async with lifespan(None):
            pass
        with pytest.raises(PoolClosed) as caught:
            async with lifespan(None):
                pass
        [note] = caught.value.__notes__
        assert note.startswith("The TaskPool 'web-twice' could not be opened")
        assert "lifespan_from()" in note

    asyncio.run(main())


def test_c31_an_own_lifespan_that_fails_closes_the_pools() -> None:
    async def main() -> None:
        @asynccontextmanager
        async def own(app: Any) -> AsyncIterator[None]:
            raise OSError("no database")
            yield

        with pytest.raises(OSError, match="no database"):
            async with asgi.lifespan(TaskPool("web-own-fails", max_concurrent=1), inside=own)(None):
                pass
        assert "web-own-fails" not in headgate.pool_list()

    asyncio.run(main())


def test_c31_what_is_no_pool_is_refused() -> None:
    with pytest.raises(InvalidType, match="takes a TaskPool, a WorkerPool or a ResourcePool, got str"):
        asgi.lifespan("pool")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="drain_timeout"):
        asgi.lifespan(drain_timeout=-1)

    async def main(made: Any) -> None:
        async with asgi.lifespan_from(lambda: made)(None):
            pass

    with pytest.raises(InvalidType, match="returns pools by name, got list"):
        asyncio.run(main([]))
    with pytest.raises(InvalidType, match="got int"):
        asyncio.run(main({"answers": 3}))


# -- an application without a framework -------------------------------------------------------------------------------


def test_c31_a_plain_application_is_given_a_lifespan() -> None:
    async def main() -> None:
        def make() -> dict[str, Any]:
            return {"answers": TaskPool("web-plain", max_concurrent=1)}

        async def plain(scope: Any, receive: Any, send: Any) -> None:
            assert scope["type"] == "http"
            body = str(await scope["state"]["answers"].run(double, 4)).encode()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})

        async with client_of(asgi.WithLifespan(plain, asgi.lifespan_from(make))) as client:
            assert (await client.get("/")).text == "8"
        assert "web-plain" not in headgate.pool_list()

    asyncio.run(main())


@pytest.mark.parametrize("lifespan", ["on", "auto"])
def test_c31_a_plain_application_does_not_start_without_its_pools(
    lifespan: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def plain(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it is never asked")

    async def main() -> None:
        closed = TaskPool("web-closed", max_concurrent=1)
        await closed.close()
        assert await fails_to_start(asgi.WithLifespan(plain, asgi.lifespan(closed)), lifespan=lifespan)

    asyncio.run(main())
    assert "The TaskPool 'web-closed' could not be opened" in caplog.text


def test_c31_a_shutdown_that_fails_is_told_to_the_server() -> None:
    @asynccontextmanager
    async def breaks(app: Any) -> AsyncIterator[None]:
        yield
        raise OSError("lost the disk")

    async def main() -> None:
        raw = Raw({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
        await asgi.WithLifespan(None, breaks)({"type": "lifespan"}, raw.receive, raw.send)  # type: ignore[arg-type]
        started, failed = raw.sent
        assert started["type"] == "lifespan.startup.complete"
        assert failed["type"] == "lifespan.shutdown.failed"
        assert "lost the disk" in failed["message"]

    asyncio.run(main())


# -- refusals ---------------------------------------------------------------------------------------------------------


def raising(error: BaseException, *, after_start: bool = False) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if after_start:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (QueueFull("full", retry_after=2.3), "3"),
        (QueueFull("full", retry_after=0.01), "1"),
        (QueueFull("full"), "1"),
        (QueueFull("full", retry_after=0.0), "1"),
        (QueueFull("full", retry_after=1e12), "86400"),
        (QueueFull("full", retry_after=math.inf), "86400"),
        (PoolBusy("busy", retry_after=30.0), "30"),
        (SubmitTimeout("late"), "1"),
        (TaskRejected("dropped"), "1"),
        (TaskExpired("too late"), "1"),
        (PoolExhausted("sk-secret is limited", retry_after=59.2), "60"),
        (PoolExhausted("sk-secret is disabled"), "1"),
        (NoWorkersAvailable("none"), "1"),
        (DispatchTimeout("none"), "1"),
        (PoolClosed("closing"), "1"),
        (ExceptionGroup("both", [PoolBusy("sk-secret", retry_after=4.0), ExceptionGroup("in", [QueueFull("q")])]), "4"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_c31_a_pool_without_room_is_a_503_with_retry_after(error: Exception, seconds: str) -> None:
    raw = Raw()
    asyncio.run(raw.get(asgi.PoolErrors(raising(error))))
    assert (raw.status, raw.headers["retry-after"]) == (503, seconds)
    assert raw.headers["content-length"] == str(len(raw.body))
    body = json.loads(raw.body)
    first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
    assert body == {
        "code": first.code,  # type: ignore[attr-defined]
        "detail": f"There is no capacity for this now. Try again in {seconds} s.",
    }
    assert b"sk-secret" not in raw.body


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        HeadgateError("x"),
        WorkerLost("it may have run"),
        InvalidArgument("x"),
        ExceptionGroup("mixed", [QueueFull("x"), ValueError("y")]),
        asyncio.CancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_c31_other_errors_go_on_as_they_are(error: BaseException) -> None:
    async def main() -> None:
        raw = Raw()
        with pytest.raises(type(error)) as caught:
            await raw.get(asgi.PoolErrors(raising(error)))
        assert caught.value is error
        assert raw.sent == []

    asyncio.run(main())


def test_c31_an_answer_that_has_begun_is_not_replaced() -> None:
    async def main() -> None:
        raw = Raw()
        with pytest.raises(QueueFull):
            await raw.get(asgi.PoolErrors(raising(QueueFull("x"), after_start=True)))
        assert [message["type"] for message in raw.sent] == ["http.response.start"]
        with pytest.raises(QueueFull):
            await raw.get(asgi.PoolErrors(raising(QueueFull("x"))), type="websocket")

    asyncio.run(main())


def test_c31_status_and_default_can_be_chosen() -> None:
    raw = Raw()
    asyncio.run(raw.get(asgi.PoolErrors(raising(SubmitTimeout("x")), status=429, retry_after=7)))
    assert (raw.status, raw.headers["retry-after"]) == (429, "7")
    for wrong in ({"status": 200}, {"retry_after": 0}, {"retry_after": "soon"}):
        with pytest.raises((InvalidArgument, InvalidType)):
            asgi.PoolErrors(raising(ValueError()), **wrong)  # type: ignore[arg-type]
        with pytest.raises((InvalidArgument, InvalidType)):
            asgi.exception_handlers(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["middleware", "handlers"])
def test_c31_an_overloaded_service_answers_503(way: str) -> None:
    async def main() -> None:
        go = asyncio.Event()
        busy = TaskPool(max_concurrent=1, backpressure=fail_fast())
        short = TaskPool(max_concurrent=1, backpressure=backpressure_queue(1, "fail_submitter"))
        patient = TaskPool(max_concurrent=1, backpressure=backpressure_queue(1))
        handlers = asgi.exception_handlers() if way == "handlers" else None
        app = FastAPI(lifespan=asgi.lifespan(busy, short, patient), exception_handlers=handlers)
        if way == "middleware":
            app.add_middleware(asgi.PoolErrors)

        async def wait() -> str:
            await go.wait()
            return "done"

        @app.get("/busy")
        async def of_busy() -> str:
            return await busy.run(wait)

        @app.get("/short")
        async def of_short() -> str:
            return await short.run(wait)

        @app.get("/patient")
        async def of_patient() -> str:
            return await patient.run(wait, wait_timeout=0.01)

        @app.get("/broken")
        async def broken() -> str:
            raise ZeroDivisionError

        async with client_of(app) as client:
            first = asyncio.create_task(client.get("/busy"))
            await until(busy.size)
            for pool in (short, patient):
                for _ in range(2):
                    await pool.submit(wait)
            for path, code in (("busy", "POL-002"), ("short", "POL-001"), ("patient", "POL-009")):
                answer = await client.get(path)
                assert answer.status_code == 503
                assert answer.json()["code"] == f"HEADGATE-{code}"
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.headers["content-type"] == "application/json"
            assert (await client.get("/broken")).status_code == 500
            go.set()
            assert (await first).json() == "done"

    asyncio.run(main())


def test_c31_retry_after_follows_what_the_pool_expects() -> None:
    """Tasks took 20 s lately, and the one that runs has run for 5 s."""

    @virtual()
    async def main() -> None:
        pool = TaskPool(max_concurrent=1, backpressure=fail_fast())
        async with pool:
            await pool.run(asyncio.sleep, 20)
            running = await pool.submit(asyncio.sleep, 20)
            await asyncio.sleep(5)

            async def app(scope: Any, receive: Any, send: Any) -> None:
                await pool.run(double, 1)

            raw = Raw()
            await raw.get(asgi.PoolErrors(app))
            assert (raw.status, raw.headers["retry-after"]) == (503, "15")
            await running

    main()


def test_c31_retry_after_is_how_long_the_queue_takes() -> None:
    """Ten tasks are queued and two start each second: 5.5 s, rounded up. A tenant with nothing queued waits less."""

    @virtual()
    async def main() -> None:
        full = backpressure_queue(10, "fail_submitter")
        async with TaskPool(max_concurrent=2, queue=fair_round_robin("tenant_id"), backpressure=full) as pool:
            for _ in range(12):
                await pool.submit(asyncio.sleep, 1, tenant_id="greedy")
            await asyncio.sleep(3.5)
            while pool.snapshot(0).queued < 10:
                await pool.submit(asyncio.sleep, 1, tenant_id="greedy")

            async def app(scope: Any, receive: Any, send: Any) -> None:
                await pool.run(double, 1)

            for tenant, seconds in ((b"greedy", "6"), (b"modest", "1")):
                raw = Raw()
                await raw.get(asgi.TenantHeader(asgi.PoolErrors(app)), ((b"x-tenant-id", tenant),))
                assert (raw.status, raw.headers["retry-after"]) == (503, seconds)

    main()


# -- tenants ----------------------------------------------------------------------------------------------------------


def test_c31_a_header_names_the_tenant_of_what_a_request_submits() -> None:
    async def main() -> None:
        pool = TaskPool("web-tenants", max_concurrent=4, queue=fair_round_robin("tenant_id"))
        app = FastAPI(lifespan=asgi.lifespan(pool))
        app.add_middleware(asgi.TenantHeader, default="nobody")

        async def tenants_seen() -> list[str | None]:
            inner = await pool.submit(double, 1)  # the tenant goes with the work
            await inner
            return [current_tenant(), inner.snapshot().partition]

        @app.get("/")
        async def endpoint(tenant: str = Depends(current_tenant)) -> list[Any]:
            other = await pool.submit(double, 1, tenant_id="explicit")
            return [tenant, *await pool.run(tenants_seen, priority=3), other.snapshot().partition]

        async with client_of(app) as client:
            for headers, tenant in (({"X-Tenant-Id": "acme"}, "acme"), ({}, "nobody")):
                answer = (await client.get("/", headers=headers)).json()
                assert answer == [tenant, tenant, tenant, "explicit"]
        assert current_tenant() is None

    asyncio.run(main())


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"x-tenant-id", b""),),
        ((b"x-tenant-id", b" acme"),),
        ((b"x-tenant-id", b"a" * 129),),
        ((b"x-tenant-id", b"acme\nx"),),
        ((b"x-tenant-id", "größe".encode()),),
        ((b"x-tenant-id", b"acme"), (b"x-tenant-id", b"bolt")),
        ((b"x-tenant-id", b"../etc"),),
    ],
    ids=repr,
)
def test_c31_a_request_without_a_valid_tenant_gets_a_400(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    raw = Raw()
    asyncio.run(raw.get(asgi.TenantHeader(raising(AssertionError())), headers))
    assert raw.status == 400
    body = json.loads(raw.body)
    assert body["code"] == "HEADGATE-ARG-001"
    assert "x-tenant-id" in body["detail"]
    assert "acme" not in body["detail"]


def test_c31_a_websocket_without_a_valid_tenant_is_closed() -> None:
    raw = Raw()
    asyncio.run(raw.get(asgi.TenantHeader(raising(AssertionError())), type="websocket"))
    assert raw.sent == [{"type": "websocket.close", "code": 1008, "reason": "no valid tenant"}]


def test_c31_the_tenant_may_come_from_the_scope() -> None:
    seen: list[str | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(current_tenant())

    async def main() -> None:
        for user, default in (("ann@acme", None), (None, "public"), (None, None), ("not valid", None), (3, None)):
            raw = Raw()
            middleware = asgi.TenantHeader(app, source=lambda scope: scope["user"], default=default)
            await raw.get(middleware, ((b"x-tenant-id", b"ignored"),), user=user)
            if raw.sent:
                seen.append(str(raw.status))
                assert b"x-tenant-id" not in raw.body
        await asgi.TenantHeader(app)({"type": "lifespan"}, raw.receive, raw.send)

    asyncio.run(main())
    assert seen == ["ann@acme", "public", "400", "400", "400", None]


def test_c31_the_middleware_of_tenants_checks_its_options() -> None:
    app = raising(AssertionError())
    for wrong in ({"header": "x tenant"}, {"header": 3}, {"source": "x"}, {"default": "not valid"}):
        with pytest.raises((InvalidArgument, InvalidType)):
            asgi.TenantHeader(app, **wrong)  # type: ignore[arg-type]
    assert asgi.TenantHeader(app, header="X-Customer")


@virtual()
async def test_c31_a_tenant_scope_holds_for_every_way_to_submit() -> None:
    pools = [
        TaskPool(max_concurrent=1),
        TaskPool(max_concurrent=1, queue=fair_round_robin("tenant_id")),
        TaskPool(max_concurrent=1, queue=fair_share("customer", weights={"acme": 2.0})),
    ]
    for pool in pools:
        async with pool:
            with tenant_scope("acme"):
                handles = [await pool.submit(double, 1), await pool.submit(double, 1, priority=2)]
                handles += [pool.submit_nowait(double, 1, labels={"x": 1})]
                handles += await pool.submit_many([(double, (1,)), (double, (2,), {"timeout": 5})])
                handles += [one async for one in pool.map(double, [1, 2], return_handles=True)]
                other = await pool.submit(double, 1, key="other")
                with tenant_scope("inner"):
                    inner = await pool.submit(double, 1)
            free = await pool.submit(double, 1)
        assert [handle.snapshot().partition for handle in handles] == ["acme"] * 7
        assert [other.snapshot().partition, inner.snapshot().partition, free.snapshot().partition] == [
            "other",
            "inner",
            None,
        ]


def test_c31_a_tenant_scope_wants_a_name() -> None:
    for wrong in ("", "  ", None, 3):
        with pytest.raises(InvalidArgument, match="tenant must be a non-blank string"):
            with tenant_scope(wrong):  # type: ignore[arg-type]
                pass


@virtual()
async def test_c31_requests_of_a_greedy_tenant_delay_only_their_own() -> None:
    pool = TaskPool(max_concurrent=1, queue=fair_round_robin("tenant_id"))
    order: list[str] = []

    async def work(tenant: str) -> None:
        await asyncio.sleep(1)
        order.append(tenant)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        tenant = current_tenant()
        assert tenant is not None
        await pool.run(work, tenant)

    async def request(tenant: bytes) -> None:
        await Raw().get(asgi.TenantHeader(app), ((b"x-tenant-id", tenant),))

    async with pool, asyncio.TaskGroup() as group:
        for tenant in (b"greedy",) * 6 + (b"ann", b"bob"):
            group.create_task(request(tenant))
    assert order[:4] == ["greedy", "greedy", "ann", "bob"]


# -- all of it together -----------------------------------------------------------------------------------------------


def test_c31_an_error_inside_a_stream_breaks_the_stream_off() -> None:
    async def main() -> None:
        async def parts() -> AsyncIterator[str]:
            yield "begun"
            raise QueueFull("too late to say so")

        async def endpoint(request: Any) -> StreamingResponse:
            return StreamingResponse(parts())

        app = Starlette(routes=[Route("/", endpoint)])
        app.add_middleware(asgi.PoolErrors)
        async with client_of(app) as client:
            with pytest.raises(Exception, match="peer closed connection"):
                await client.get("/")

    asyncio.run(main())


def test_c31_no_framework_is_imported() -> None:
    code = (
        "import sys; from headgate.integrations import asgi; "
        "print(sorted({'starlette', 'fastapi', 'uvicorn', 'grpc', 'anyio'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
