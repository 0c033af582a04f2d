"""T70: from an event to a task in a named pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from headgate import (
    HeadgateError,
    InvalidArgument,
    InvalidType,
    PoolBusy,
    QueueFull,
    TaskHandle,
    TaskPool,
    backpressure_queue,
    fail_fast,
    fair_round_robin,
    ring_buffer,
    spawn_to_pool,
)
from headgate.testing import settle, virtual
from tests.support.tasks.support import Gate, Turns, counts, slow


def work(event: Any) -> Any:
    async def body() -> Any:
        return event

    return body


async def stream(*events: Any) -> AsyncIterator[Any]:
    for event in events:
        yield event


@virtual
async def test_t70_a_handler_submits_what_the_factory_makes() -> None:
    async with TaskPool("review"):
        handler = spawn_to_pool("review", work)
        handle = await handler({"pr": 7})
        assert isinstance(handle, TaskHandle)
        assert handle.pool == "review"
        assert await handle == {"pr": 7}
        assert handle.key is None
        assert handle.snapshot().priority == 0


@virtual
async def test_t70_every_kind_of_function_may_be_made() -> None:
    async with TaskPool("review"):
        assert await (await spawn_to_pool("review", lambda event: lambda: event + 1)(1)) == 2
        assert await (await spawn_to_pool("review", lambda event: lambda: slow(1, event))(3)) == 3


@pytest.mark.parametrize(
    ("path", "event", "found"),
    [
        ("key", {"key": "acme"}, "acme"),
        ("user.org.name", {"user": {"org": {"name": "acme"}}}, "acme"),
        ("labels.1.name", {"labels": [{"name": "a"}, {"name": "b"}]}, "b"),
        ("labels.0", {"labels": ["first"]}, "first"),
        ("rows.1.0", {"rows": [(1,), ("x",)]}, "x"),
        ("user.name", {"user": SimpleNamespace(name="obj")}, "obj"),
        ("missing", {"key": "acme"}, None),
        ("user.missing.deeper", {"user": {}}, None),
        ("labels.9", {"labels": ["first"]}, None),
        ("labels.name", {"labels": ["first"]}, None),
        ("key", {"key": None}, None),
        ("key", {"key": "  "}, None),
    ],
)
@virtual
async def test_t70_a_dotted_path_picks_the_key(path: str, event: Any, found: Any) -> None:
    async with TaskPool("review"):
        handle = await spawn_to_pool("review", work, key_from=path)(event)
        assert handle.key == found


@pytest.mark.parametrize(
    ("value", "priority"),
    [
        (5, 5),
        (-3, -3),
        (2.0, 2),
        (2.9, 2),
        ("7", 7),
        (" 7 ", 7),
        ("-7", -7),
        ("2.5", 2),
        (True, 1),
        (False, 0),
        ("high", 0),
        ("", 0),
        (None, 0),
        ([], 0),
        ({}, 0),
        (float("nan"), 0),
        (float("inf"), 0),
        ("nan", 0),
        ("1e999", 0),
        ("9007199254740993", 9007199254740993),
        pytest.param(10**400, 10**400, id="huge"),
    ],
)
@virtual
async def test_t70_priority_is_coerced(value: Any, priority: int) -> None:
    async with TaskPool("review"):
        handle = await spawn_to_pool("review", work, priority_from="pr.urgency")({"pr": {"urgency": value}})
        assert handle.snapshot().priority == priority
        assert type(handle.snapshot().priority) is int


@virtual
async def test_t70_a_missing_priority_is_zero() -> None:
    async with TaskPool("review"):
        assert (await spawn_to_pool("review", work, priority_from="a.0.b")({})).snapshot().priority == 0


@virtual
async def test_t70_the_strategy_is_not_bypassed() -> None:
    async with TaskPool("review") as pool:
        gate, turns = Gate(), Turns()
        await pool.submit(gate.wait)
        handler = spawn_to_pool("review", lambda event: lambda: turns.take(event["n"]), priority_from="p")
        for n, p in enumerate([0, 5, "9", 1]):
            await handler({"n": n, "p": p})
        gate.open()
        await pool.drain()
    assert turns.order == [2, 1, 3, 0]
    async with TaskPool("fair", queue=fair_round_robin()) as pool:
        gate, turns = Gate(), Turns()
        await pool.submit(gate.wait)
        handler = spawn_to_pool("fair", lambda event: lambda: turns.take(event), key_from="0")
        for event in ("a1", "a2", "b1", "a3", "b2"):
            await handler([event[0], event])
        gate.open()
        await pool.drain()
    assert [event[1] for event in turns.order] == ["a1", "b1", "a2", "b2", "a3"]


@virtual
async def test_t70_backpressure_is_not_bypassed() -> None:
    handler = spawn_to_pool("review", work)
    async with TaskPool("review", backpressure=backpressure_queue(1, "fail_submitter")) as pool:
        for _ in range(2):
            await pool.submit(slow, 1)
        with pytest.raises(QueueFull):
            await handler(1)
    async with TaskPool("review", backpressure=fail_fast()) as pool:
        await pool.submit(slow, 1)
        with pytest.raises(PoolBusy):
            await handler(1)
    async with TaskPool("review", backpressure=ring_buffer(1)) as pool:
        await pool.submit(slow, 1)
        first, _ = await handler(1), await handler(2)
        assert first.status == "rejected"
    async with TaskPool("review", backpressure=backpressure_queue(1)) as pool:
        for _ in range(2):
            await pool.submit(slow, 1)
        parked = asyncio.create_task(handler(1))
        await settle()
        assert pool.snapshot().blocked_submitters == 1
        assert await (await parked) == 1


@virtual
async def test_t70_a_missing_pool_raises_from_the_handler() -> None:
    handler = spawn_to_pool("nowhere", work)  # made before the pool is
    with pytest.raises(HeadgateError, match="nowhere"):
        await handler(1)
    async with TaskPool("nowhere"):
        assert await (await handler(1)) == 1
    with pytest.raises(HeadgateError, match="nowhere"):
        await handler(1)


@virtual
async def test_t70_a_failing_factory_raises_from_the_handler() -> None:
    async with TaskPool("review") as pool:
        with pytest.raises(ZeroDivisionError):
            await spawn_to_pool("review", lambda event: 1 / 0)(1)  # type: ignore[arg-type, return-value]
        for wrong in (None, 3):
            with pytest.raises(InvalidType, match="factory"):
                await spawn_to_pool("review", lambda event, wrong=wrong: wrong)(1)  # type: ignore[misc]
        with pytest.raises(InvalidType, match="factory"):
            await spawn_to_pool("review", lambda event: slow(1))(1)  # type: ignore[arg-type, return-value]
        assert pool.snapshot().total == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"pool_name": ""},
        {"pool_name": "  "},
        {"pool_name": None},
        {"factory": None},
        {"factory": "work"},
        {"priority_from": ""},
        {"priority_from": "a..b"},
        {"priority_from": 3},
        {"key_from": ".a"},
        {"key_from": []},
    ],
)
def test_t70_arguments_are_checked(bad: dict[str, Any]) -> None:
    good = {"pool_name": "review", "factory": work}
    with pytest.raises((InvalidArgument, InvalidType), match=next(iter(bad))):
        spawn_to_pool(**{**good, **bad})


# -- consume -----------------------------------------------------------------------------


@virtual
async def test_t70_consume_goes_on_with_the_next_event() -> None:
    def factory(event: int) -> Any:
        if event == 2:
            raise LookupError("event two")
        return work(event)

    async with TaskPool("review", max_concurrent=9) as pool:
        told: list[Any] = []
        handler = spawn_to_pool("review", factory)
        await handler.consume(stream(1, 2, 3), on_error=lambda event, error: told.append((event, str(error))))
        await pool.drain()
        assert told == [(2, "event two")]
        assert counts(pool) == {"completed": 2}


@virtual
async def test_t70_consume_tells_async_listeners_of_policies_too() -> None:
    async with TaskPool("review", backpressure=fail_fast()) as pool:
        told: list[Any] = []

        async def on_error(event: Any, error: Exception) -> None:
            await asyncio.sleep(1)
            told.append((event, type(error)))

        await pool.submit(slow, 60)
        await spawn_to_pool("review", work).consume(stream(1, 2), on_error=on_error)
        assert told == [(1, PoolBusy), (2, PoolBusy)]


def test_t70_consume_without_a_listener_logs(caplog: pytest.LogCaptureFixture) -> None:
    @virtual
    async def check() -> None:
        await spawn_to_pool("nowhere", work).consume(stream(1, 2))

    check()
    assert len([record for record in caplog.records if "nowhere" in record.getMessage()]) == 2


@virtual
async def test_t70_consume_is_held_back_by_the_pool() -> None:
    taken: list[int] = []

    async def events() -> AsyncIterator[int]:
        for number in range(10):
            taken.append(number)
            yield number

    async with TaskPool("review", backpressure=backpressure_queue(1)) as pool:
        consumer = asyncio.create_task(spawn_to_pool("review", lambda n: lambda: slow(1, n)).consume(events()))
        await settle()
        assert len(taken) == 3  # one runs, one queues, one waits to submit
        await consumer
        await pool.drain()
        assert counts(pool) == {"completed": 10}


@virtual
async def test_t70_consume_can_be_cancelled_and_a_broken_source_is_raised() -> None:
    async def broken_source() -> AsyncIterator[int]:
        yield 1
        raise LookupError("source")

    async with TaskPool("review") as pool:
        handler = spawn_to_pool("review", work)
        with pytest.raises(LookupError, match="source"):
            await handler.consume(broken_source(), on_error=lambda *_: None)
        await pool.drain()
        assert counts(pool) == {"completed": 1}
