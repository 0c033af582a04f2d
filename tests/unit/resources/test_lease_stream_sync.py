"""R50, R75-R77: other ways to use a pool."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headgate import (
    CooldownResource,
    DisableResource,
    InvalidType,
    PoolExhausted,
    Resource,
    ResourcePool,
    RetryOperation,
)
from headgate.core.clock import clock
from headgate.testing import capture_events, settle, virtual
from tests.support.resources.support import always, by_id, ident, in_flight, keys, rate_limited, status

# -- R50: the decorator ---------------------------------------------------------------


@virtual
async def test_r50_the_resource_is_injected_first_and_the_rest_forwarded() -> None:
    pool = keys("a")

    @pool.use(max_attempts=2, retry_delay=0)
    async def fetch(resource: Resource[str], url: str, *, times: int = 1) -> str:
        """Fetch it."""
        return f"{resource.value} {url} {times}"

    assert await fetch("/x", times=3) == "secret-a /x 3"
    assert fetch.__name__ == "fetch"
    assert fetch.__doc__ == "Fetch it."
    assert inspect.iscoroutinefunction(fetch)


@virtual
async def test_r50_any_callable_that_returns_an_awaitable() -> None:
    pool = keys("a")

    @pool.use()
    def coroutine(resource: Resource[str]) -> Any:
        return ident(resource)

    @pool.use()
    def future(resource: Resource[str]) -> Any:
        return asyncio.ensure_future(ident(resource))

    @pool.use()
    def awaitable(resource: Resource[str]) -> Any:
        class Later:
            def __await__(self) -> Any:
                return ident(resource).__await__()

        return Later()

    @pool.use()
    def wrong(resource: Resource[str]) -> Any:
        return 3

    assert [await coroutine(), await future(), await awaitable()] == ["a", "a", "a"]
    with pytest.raises(InvalidType, match="operation must return an Awaitable, got int"):
        await wrong()


@virtual
async def test_r50_every_call_retries_and_within_starts_with_each() -> None:
    pool = keys("a", "b", strategy="primary_backup")

    @pool.use(retry_delay=0, within=5)
    async def call(resource: Resource[str]) -> str:
        if resource.resource_id == "a":
            raise rate_limited()
        return resource.resource_id

    assert await call() == "b"
    await asyncio.sleep(100)
    assert await call() == "b"


def test_r50_request_id_is_refused() -> None:
    with pytest.raises(InvalidType, match=r"use\(\) takes no option 'request_id'. It is different for each call"):
        keys("a").use(request_id="r")  # type: ignore[call-arg]


def test_r50_used_without_parentheses_is_explained() -> None:
    with pytest.raises(InvalidType, match=r"Write @pool.use\(\) with parentheses"):
        keys("a").use(ident)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="use\\(\\) decorates a function, got int"):
        keys("a").use()(3)  # type: ignore[arg-type]


# -- R75: leases ---------------------------------------------------------------


@virtual
async def test_r75_a_lease_holds_a_resource_for_a_block() -> None:
    pool = keys("a")
    async with pool.lease() as resource:
        assert resource.value == "secret-a"
        assert in_flight(pool) == 1
    assert in_flight(pool) == 0
    assert pool.stats().successes == 1


@virtual
async def test_r75_a_signal_in_the_block_updates_health_and_propagates() -> None:
    pool = keys("a", "b", strategy="primary_backup")
    with pytest.raises(CooldownResource):
        async with pool.lease():
            raise CooldownResource(9)
    assert pool.snapshot()["a"]["cooldown_seconds_remaining"] == 9
    with pytest.raises(DisableResource):
        async with pool.lease():
            raise DisableResource
    assert status(pool, "b") == "disabled"
    with pytest.raises(PoolExhausted):
        async with pool.lease():
            raise AssertionError("unreachable")


@virtual
async def test_r75_a_lease_may_wait_its_turn() -> None:
    pool = ResourcePool([Resource("browser", 1, 1)])
    turns: list[int] = []

    async def work(number: int) -> None:
        async with pool.lease(wait_for_capacity=True):
            turns.append(number)
            await asyncio.sleep(1)

    await asyncio.gather(*[work(number) for number in range(4)])
    assert turns == [0, 1, 2, 3]
    assert clock.now() == 4


@virtual
async def test_r75_a_cancelled_block_gives_the_resource_back_without_a_verdict() -> None:
    pool = keys("a")
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(1)))
    await asyncio.sleep(1)

    async def work() -> None:
        async with pool.lease():
            await asyncio.sleep(100)

    task = asyncio.create_task(work())
    await settle()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert in_flight(pool) == 0
    assert pool.snapshot()["a"]["consecutive_cooldown"] == 1


@virtual
async def test_r75_a_lease_is_entered_once() -> None:
    lease = keys("a").lease()
    async with lease:
        with pytest.raises(InvalidType, match="a lease is entered once"):
            async with lease:
                pass


# -- R75: streams ---------------------------------------------------------------


async def collect(stream: AsyncIterator[Any], into: list[Any]) -> None:
    async for item in stream:
        into.append(item)


def numbers(fail: dict[str, Exception], after: int = 0, count: int = 3) -> Any:
    async def stream(resource: Resource[str]) -> AsyncIterator[str]:
        for number in range(count):
            if number == after and resource.resource_id in fail:
                raise fail[resource.resource_id]
            await asyncio.sleep(1)
            yield f"{resource.resource_id}{number}"

    return stream


@virtual
async def test_r75_a_stream_fails_over_until_its_first_item() -> None:
    pool = keys("a", "b", strategy="primary_backup")
    items = [item async for item in pool.stream(numbers({"a": rate_limited()}), retry_delay=0)]
    assert items == ["b0", "b1", "b2"]
    assert status(pool, "a") == "cooling_down"
    assert in_flight(pool) == 0
    assert pool.stats().runs_ok == 1


@virtual
async def test_r75_and_never_after_it() -> None:
    pool = keys("a", "b", strategy="primary_backup")
    items: list[str] = []
    with pytest.raises(CooldownResource):
        await collect(pool.stream(numbers({"a": CooldownResource(7)}, after=2)), items)
    assert items == ["a0", "a1"]
    assert pool.snapshot()["a"]["cooldown_seconds_remaining"] == 7
    assert in_flight(pool) == 0


@virtual
async def test_r75_leaving_a_stream_runs_its_clean_up_and_frees_the_resource() -> None:
    pool, ended = keys("a"), []

    async def endless(resource: Resource[str]) -> AsyncIterator[int]:
        try:
            for number in range(10**6):
                yield number
        finally:
            await asyncio.sleep(1)
            ended.append(resource.resource_id)

    stream = pool.stream(endless)
    async for item in stream:
        assert in_flight(pool) == 1
        if item == 3:
            break
    await stream.aclose()
    assert ended == ["a"]
    assert in_flight(pool) == 0


@virtual
async def test_r75_a_stream_without_items_succeeds() -> None:
    async def nothing(resource: Resource[str]) -> AsyncIterator[int]:
        return
        yield 1

    assert [item async for item in keys("a").stream(nothing)] == []


@virtual
async def test_r75_a_timeout_bounds_the_first_item() -> None:
    async def slow(resource: Resource[str]) -> AsyncIterator[str]:
        await asyncio.sleep(50 if resource.resource_id == "a" else 1)
        yield resource.resource_id
        await asyncio.sleep(50)
        yield "late items are fine"

    pool = keys("a", "b", strategy="primary_backup")
    items = [item async for item in pool.stream(slow, timeout=5, retry_delay=0)]
    assert items == ["b", "late items are fine"]


@virtual
async def test_r75_a_stream_of_the_wrong_kind_is_refused() -> None:
    for wrong, shown in ((ident, "coroutine"), (lambda resource: [1, 2], "list")):
        with pytest.raises(InvalidType, match=f"operation must return an async iterator, got {shown}"):
            await collect(keys("a").stream(wrong), [])  # type: ignore[arg-type]


@virtual
async def test_r75_an_exhausted_stream_says_what_was_tried() -> None:
    pool = keys("a", "b")
    failing = numbers({"a": rate_limited(), "b": RetryOperation()})
    with pytest.raises(PoolExhausted, match="max_attempts=2 exhausted"):
        await collect(pool.stream(failing, max_attempts=2, retry_delay=0), [])
    assert pool.stats().runs_exhausted == 1


@virtual
async def test_r75_an_iterator_that_raises_before_it_awaits_is_no_trouble() -> None:
    class Refusing:
        def __aiter__(self) -> Any:
            return self

        def __anext__(self) -> Any:
            raise rate_limited()  # a plain def: `anext(it, default)` crashes the interpreter on this

    pool = keys("a", "b", strategy="primary_backup")
    fine = numbers({})
    items: list[str] = []
    stream = pool.stream(lambda r: Refusing() if r.resource_id == "a" else fine(r), retry_delay=0)
    await collect(stream, items)
    assert items == ["b0", "b1", "b2"]


def test_r44_streams_and_threads_have_one_request_id_too() -> None:
    pool = keys("a")
    with capture_events("resources") as events:
        pool.run_sync(lambda resource: 1)
    assert len({(e.to_dict().get("usage") or e.to_dict())["request_id"] for e in events}) == 1

    @virtual
    async def stream() -> None:
        with capture_events("resources") as seen:
            await collect(pool.stream(numbers({})), [])
        assert seen.names == ["resource_acquired", "resource_released", "run_finished"]
        assert len({(e.to_dict().get("usage") or e.to_dict())["request_id"] for e in seen}) == 1

    stream()


# -- R76: threads and loops ---------------------------------------------------------------


def test_r76_run_sync_needs_no_loop() -> None:
    pool = keys("a", "b", strategy="primary_backup")

    def fetch(resource: Resource[str]) -> str:
        if resource.resource_id == "a":
            raise rate_limited()
        return resource.value

    with capture_events("resources.run") as events:
        assert pool.run_sync(fetch, retry_delay=0, request_id="r") == "secret-b"
    assert events.names == ["run_finished"]
    assert events[0].to_dict()["attempts"] == 2
    with pytest.raises(PoolExhausted, match="max_attempts=1 exhausted"):
        pool.run_sync(lambda resource: by_sync(DisableResource()), max_attempts=1)
    with pytest.raises(ValueError, match="mine"):
        keys("a").run_sync(lambda resource: by_sync(ValueError("mine")))


def by_sync(error: Exception) -> Any:
    raise error


def test_r76_run_sync_refuses_what_cannot_work() -> None:
    with pytest.raises(InvalidType, match="returned an awaitable"):
        keys("a").run_sync(ident)
    with pytest.raises(InvalidType, match="A thread cannot be interrupted"):
        keys("a").run_sync(lambda resource: 1, timeout=3)  # type: ignore[call-arg]

    async def on_a_loop() -> None:
        keys("a").run_sync(lambda resource: 1)

    with pytest.raises(InvalidType, match="would block the event loop"):
        asyncio.run(on_a_loop())


def test_r76_run_sync_pauses_and_isolates() -> None:
    import contextvars

    slept: list[float] = []
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    def fetch(resource: Resource[str]) -> str:
        variable.set("set")
        if not slept:
            raise RetryOperation
        return "ok"

    with clock.replaced(sleep=slept.append, uniform=lambda low, high: 1.0):
        assert keys("a").run_sync(fetch, isolate=True, retry_delay=3) == "ok"
    assert slept == [3.0]
    assert variable.get() == "unset"


def test_r76_run_sync_waits_for_a_slot_and_for_a_cooldown() -> None:
    pool = ResourcePool([Resource("only", 1, 1)])
    entered, leave = threading.Event(), threading.Event()

    def hold(resource: Resource[int]) -> str:
        entered.set()
        leave.wait(10)
        return "held"

    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(pool.run_sync(hold)))]
    threads[0].start()
    assert entered.wait(10)
    with pytest.raises(PoolExhausted, match="deadline exceeded"):
        pool.run_sync(lambda resource: 1, wait_for_capacity=True, within=0.02)
    threads.append(threading.Thread(target=lambda: results.append(pool.run_sync(lambda r: 7, wait_for_capacity=True))))
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join(10)
    assert results == ["held", 7]

    with pytest.raises(PoolExhausted):
        pool.run_sync(lambda resource: by_sync(CooldownResource(0.05)), max_attempts=1)
    assert pool.run_sync(lambda resource: "rested", wait_for_cooldown=True) == "rested"


def test_r76_loops_and_threads_share_one_pool(scale: float) -> None:
    """Several loops and plain threads hammer a pool with limits: counts are exact, limits hold, nobody is forgotten."""
    limits = {"a": 1, "b": 2, "c": None}
    pool: ResourcePool[str] = ResourcePool([Resource(name, name, limit) for name, limit in limits.items()])
    calls = int(400 * max(scale, 0.1))
    inside = dict.fromkeys(limits, 0)
    worst = dict.fromkeys(limits, 0)
    lock = threading.Lock()
    done: list[int] = []
    failures: list[BaseException] = []

    def enter(name: str) -> None:
        with lock:
            inside[name] += 1
            worst[name] = max(worst[name], inside[name])

    def leave(name: str) -> None:
        with lock:
            inside[name] -= 1

    async def operation(resource: Resource[str]) -> None:
        enter(resource.resource_id)
        try:
            await asyncio.sleep(0)
        finally:
            leave(resource.resource_id)

    def plain(resource: Resource[str]) -> None:
        enter(resource.resource_id)
        leave(resource.resource_id)

    async def on_a_loop() -> None:
        await asyncio.gather(*[pool.run(operation, wait_for_capacity=True, exclude=["c"]) for _ in range(calls)])

    def thread(kind: int) -> None:
        try:
            if kind % 2:
                asyncio.run(on_a_loop())
            else:
                for _ in range(calls):
                    pool.run_sync(plain, wait_for_capacity=True, exclude=["c"])
            done.append(kind)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=thread, args=(kind,)) for kind in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert failures == []
    assert sorted(done) == [0, 1, 2, 3]
    assert worst["a"] <= 1
    assert worst["b"] <= 2
    assert in_flight(pool) == 0
    assert pool.stats().attempts == 4 * calls
    assert pool.stats().runs_ok == 4 * calls


def test_r76_a_waiter_whose_loop_died_does_not_hold_up_the_line() -> None:
    pool, gate = ResourcePool([Resource("only", 1, 1)]), threading.Event()
    entered = threading.Event()

    def hold(resource: Resource[int]) -> None:
        entered.set()
        gate.wait(10)

    holder = threading.Thread(target=pool.run_sync, args=(hold,))
    holder.start()
    entered.wait(10)
    loop = asyncio.new_event_loop()
    dead = loop.create_task(pool.run(ident, wait_for_capacity=True))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    results: list[object] = []
    second = threading.Thread(target=lambda: results.append(pool.run_sync(lambda r: "served", wait_for_capacity=True)))
    second.start()
    while pool._engine.rotation.wait_queue and len(pool._engine.rotation.wait_queue) < 2:
        pass
    gate.set()
    holder.join(10)
    second.join(10)
    assert results == ["served"]
    dead.get_coro().close()  # type: ignore[union-attr]
    dead._log_destroy_pending = False  # type: ignore[attr-defined]
    assert in_flight(pool) == 0


# -- R77: the classifier ---------------------------------------------------------------


@virtual(start=1.0)
async def test_r77_a_dead_proxy_does_not_attract_traffic() -> None:
    """Without a classifier a proxy that fails at once is always the least busy, and gets everything."""
    hits = {"dead": 0, "fine": 0}

    async def fetch(resource: Resource[str]) -> str:
        hits[resource.resource_id] += 1
        if resource.resource_id == "dead":
            raise ConnectionError("refused")
        await asyncio.sleep(1)
        return "page"

    def classify(outcome: object) -> CooldownResource | None:
        return CooldownResource(60, "connection") if isinstance(outcome, ConnectionError) else None

    pool = keys("dead", "fine", classify=classify)
    assert await asyncio.gather(*[pool.run(fetch, retry_delay=0) for _ in range(20)]) == ["page"] * 20
    assert hits["dead"] == 1
    assert status(pool, "dead") == "cooling_down"


@virtual
async def test_r77_results_are_classified_too_and_classes_will_do() -> None:
    def classify(outcome: object) -> Any:
        return {429: CooldownResource(5), 401: DisableResource, 502: RetryOperation()}.get(outcome)  # type: ignore[call-overload]

    pool = keys("a", "b", "c", classify=classify, strategy="primary_backup")
    assert await pool.run(by_id(a=429, b=401, c=200), retry_delay=0) == 200
    assert (status(pool, "a"), status(pool, "b")) == ("cooling_down", "disabled")
    with pytest.raises(PoolExhausted) as caught:
        await pool.run(by_id(c=502), max_attempts=1)
    assert isinstance(caught.value.__cause__, RetryOperation)


@virtual
async def test_r77_the_cause_of_a_classified_exception_is_kept() -> None:
    error = ConnectionError("refused")
    pool = keys("a", classify=lambda outcome: RetryOperation("dead") if isinstance(outcome, OSError) else None)
    with pytest.raises(PoolExhausted) as caught:
        await pool.run(always(error), max_attempts=1)
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__cause__ is error


@virtual
async def test_r77_a_broken_classifier_is_logged_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(outcome: object) -> Any:
        raise RuntimeError("classifier")

    assert await keys("a", classify=broken).run(always("ok")) == "ok"
    assert await keys("a", classify=lambda outcome: "429").run(always("ok")) == "ok"  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="mine"):
        await keys("a", classify=broken).run(always(ValueError("mine")))
    messages = [record.getMessage() for record in caplog.records]
    assert any("failed on str; taken as no signal" in message for message in messages)
    assert any("returned str instead of a signal or None" in message for message in messages)


def test_r77_run_sync_and_leases_ask_it_too() -> None:
    pool = keys("a", classify=lambda outcome: CooldownResource(5) if outcome == 429 else None)
    with pytest.raises(PoolExhausted):
        pool.run_sync(lambda resource: 429, retry_delay=0)
    assert status(pool, "a") == "cooling_down"

    async def main() -> None:
        second = keys("a", classify=lambda outcome: DisableResource() if isinstance(outcome, OSError) else None)
        with pytest.raises(OSError, match="refused"):
            async with second.lease():
                raise OSError("refused")
        assert status(second, "a") == "disabled"

    asyncio.run(main())


def test_r77_an_async_classifier_is_refused() -> None:
    async def classify(outcome: object) -> None: ...

    with pytest.raises(InvalidType, match="classify must be a plain function, got an async one"):
        ResourcePool({"a": 1}, classify=classify)  # type: ignore[arg-type]


@virtual
async def test_r31_a_reason_of_several_lines_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    pool = ResourcePool({"a": 1, "b": 2}, name="openai")

    async def refused(resource: Resource[int]) -> None:
        if resource.resource_id == "a":
            raise CooldownResource(1, "429\nfor more information")

    await pool.run(refused)
    assert caplog.messages == ["openai: a cools down for 1.0 s (1 in a row): 429 for more information"]
