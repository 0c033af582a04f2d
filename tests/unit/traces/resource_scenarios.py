"""What a ResourcePool does: verdicts, cooldowns, siblings, waiting, probes, streams, leases, strategies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from headgate import CooldownResource, DisableResource, Resource, ResourcePool, RetryOperation
from headgate.resources import least_latency, primary_backup, round_robin, sticky, weighted
from headgate.testing import settle
from tests.unit.traces.traces import Trace, scenario


def keys(*ids: str, limit: int | None = None, **options: Any) -> ResourcePool[str]:
    """Keys with values that stand in no other text."""
    return ResourcePool([Resource(name, f"sk-frozen-{name}", limit) for name in ids], name="keys", **options)


async def ident(key: Resource[str]) -> str:
    return key.resource_id


def raising(*errors: BaseException | None, seconds: float = 1.0) -> Any:
    """An operation that raises these, one at each attempt, and then returns the id of its resource."""
    left = list(errors)

    async def operation(key: Resource[str]) -> str:
        await asyncio.sleep(seconds)
        error = left.pop(0) if left else None
        if error is not None:
            raise error
        return key.resource_id

    return operation


@scenario
async def resources_cooldown_escalates(trace: Trace) -> None:
    changes: list[Any] = []
    pool = keys("a", "b", max_attempts=2, on_state_change=lambda *change: changes.append(list(change)))
    trace.look("new", pool)
    await trace.outcome("plain", pool.run(ident, request_id="r-0"))
    for turn in range(5):  # one more than the table has
        error = CooldownResource(reason=f"429 number {turn}")
        await trace.outcome(f"turn {turn}", pool.run(raising(error), tags=[], exclude=["b"], max_attempts=1))
        trace.look(f"after turn {turn}", pool)
        await asyncio.sleep(700)
    await trace.outcome("recovered", pool.run(raising(), exclude=["b"]))
    await trace.outcome("own seconds", pool.run(raising(CooldownResource(12.5, "told")), request_id="r-1"))
    trace.look("at the end", pool)
    trace.note("changes", changes)


@scenario
async def resources_disable_retry_and_fail(trace: Trace) -> None:
    pool = keys("a", "b", "c", max_attempts=3)
    await trace.outcome("disabled", pool.run(raising(DisableResource("revoked"))))
    await trace.outcome("retried", pool.run(raising(RetryOperation("odd answer"), RetryOperation()), retry_delay=2))
    await trace.outcome("own error", pool.run(raising(LookupError("nothing there"))))
    await trace.outcome("attempts", pool.run(raising(*[RetryOperation(f"no {n}") for n in range(3)]), retry_delay=0))
    await trace.outcome("all cool", pool.run(raising(CooldownResource(5), CooldownResource(7), CooldownResource(9))))
    trace.look("nothing left", pool)
    await trace.outcome("no eligible", pool.run(ident))
    await trace.outcome("deadline", pool.run(ident, wait_for_cooldown=True, within=1))
    await trace.outcome("waits", pool.run(ident, wait_for_cooldown=True))
    group = ExceptionGroup("both", [CooldownResource(3, "in a group"), DisableResource("graver")])
    await trace.outcome("group", pool.run(raising(group)))
    mixed = ExceptionGroup("mixed", [CooldownResource(3, "in a group"), LookupError("real")])
    await trace.outcome("mixed group", pool.run(raising(mixed), wait_for_cooldown=True))
    trace.look("at the end", pool)


@scenario
async def resources_members_are_steered(trace: Trace) -> None:
    pool = keys("a", "b")
    await pool.disable("a")
    await trace.outcome("b serves", pool.run(ident))
    await pool.enable("a")
    await trace.outcome("unknown", pool.enable("nobody"))
    await pool.add("c", "sk-frozen-c", max_in_flight=2, tags=["fast"], weight=2)
    await trace.outcome("tagged", pool.run(ident, tags=["fast"]))
    await trace.outcome("no such tag", pool.run(ident, tags=["slow"]))
    async with pool.lease(exclude=["a", "b"]):
        await pool.remove("c")
        trace.look("removed while in use", pool)
    await pool.reconcile([Resource("b", "sk-frozen-b", 3, tags=["kept"]), Resource("d", "sk-frozen-d")])
    trace.look("at the end", pool)


@scenario
async def resources_siblings_are_cancelled(trace: Trace) -> None:
    for cancels in (True, False):
        pool = keys("a", "b", strategy=primary_backup(), cancel_siblings=cancels)

        async def operation(key: Resource[str], name: str) -> str:
            await asyncio.sleep({"old": 3, "mid": 2, "new": 5}[name])
            if name == "mid" and key.resource_id == "a":
                raise CooldownResource(30, "overloaded")
            return f"{name} on {key.resource_id}"

        async def call(name: str, operation: Any = operation, pool: Any = pool) -> Any:
            return await trace.outcome(name, pool.run(lambda key: operation(key, name), request_id=name))

        calls = []
        for name in ("old", "mid", "new"):
            calls.append(asyncio.ensure_future(call(name)))
            await asyncio.sleep(0.5)
        trace.look("in flight", pool)
        await asyncio.gather(*calls)
        trace.look(f"cancel_siblings={cancels}", pool)


@scenario
async def resources_calls_wait(trace: Trace) -> None:
    pool = keys("a", limit=1)
    calls = []
    for number in range(3):
        run = pool.run(raising(seconds=10), wait_for_capacity=True, request_id=f"w-{number}")
        calls.append(asyncio.ensure_future(trace.outcome(f"w-{number}", run)))
        await settle()
    short = pool.run(ident, wait_for_capacity=True, within=5, request_id="short")
    calls.append(asyncio.ensure_future(trace.outcome("short", short)))
    gives_up = asyncio.ensure_future(pool.run(ident, wait_for_capacity=True, request_id="gone"))
    await asyncio.sleep(1)
    trace.look("a queue", pool)
    gives_up.cancel()
    await asyncio.gather(gives_up, return_exceptions=True)
    await trace.outcome("does not wait", pool.run(ident))
    await asyncio.gather(*calls)
    await trace.outcome("cooled", pool.run(raising(CooldownResource(40)), wait_for_capacity=True))
    await pool.disable("a")
    waits = asyncio.ensure_future(trace.outcome("until enabled", pool.run(ident, wait_for_capacity=True)))
    await asyncio.sleep(5)
    await pool.enable("a")
    await waits
    trace.look("at the end", pool)


@scenario
async def resources_probes(trace: Trace) -> None:
    pool = keys("a", probe_on_recovery=True)
    await trace.outcome("cools", pool.run(raising(CooldownResource(10)), max_attempts=1))
    await asyncio.sleep(20)

    async def one(name: str) -> None:
        await trace.outcome(name, pool.run(raising(), wait_for_capacity=True, request_id=name))

    calls = [asyncio.ensure_future(one(f"p-{number}")) for number in range(12)]
    await asyncio.sleep(0.5)
    trace.look("one probe", pool)
    await asyncio.sleep(1)
    trace.look("two", pool)
    await asyncio.gather(*calls)
    trace.look("at the end", pool)


@scenario
async def resources_streams_and_leases(trace: Trace) -> None:
    pool = keys("a", "b", "c", strategy="primary_backup")

    async def stream(key: Resource[str]) -> AsyncGenerator[str, None]:
        if key.resource_id == "a":
            raise CooldownResource(60, "before the first item")
        try:
            for number in range(3):
                await asyncio.sleep(1)
                yield f"{key.resource_id}{number}"
        finally:
            trace.note("stream closed")

    trace.note("items", [item async for item in pool.stream(stream, request_id="whole")])
    items = pool.stream(stream, request_id="left early")
    trace.note("first", await anext(items))
    trace.look("open", pool)
    await items.aclose()

    async def breaks(key: Resource[str]) -> AsyncGenerator[str, None]:
        yield key.resource_id
        raise DisableResource("in the middle")

    async def all_of() -> list[str]:
        return [item async for item in pool.stream(breaks)]

    await trace.outcome("broken", all_of())

    async def leased() -> str:
        async with pool.lease(request_id="lease") as key:
            await asyncio.sleep(2)
            raise CooldownResource(5, f"with {key.resource_id}")

    await trace.outcome("lease", leased())
    async with pool.lease(wait_for_cooldown=True) as key:
        trace.note("leased", key.resource_id)

    @pool.use(max_attempts=2, timeout=3)
    async def used(key: Resource[str], value: int) -> Any:
        await asyncio.sleep(value)
        return key.resource_id, value

    await trace.outcome("used", used(1))
    await trace.outcome("timed out", used(4))
    trace.look("at the end", pool)


@scenario
async def resources_strategies_choose(trace: Trace) -> None:
    chosen: dict[str, Any] = {
        "round_robin": round_robin(),
        "weighted": weighted(),
        "primary_backup": primary_backup(),
        "sticky": sticky(),
        "least_latency": least_latency(),
    }
    for name, strategy in chosen.items():
        pool = ResourcePool(
            [Resource(one, f"sk-frozen-{one}", 2, weight=weight) for one, weight in zip("abc", (1, 2, 3), strict=True)],
            strategy=strategy,
            name=name,
        )

        async def operation(key: Resource[str]) -> str:
            await asyncio.sleep({"a": 3, "b": 1, "c": 2}[key.resource_id])
            return key.resource_id

        picked = [await pool.run(operation, affinity=f"user-{number % 3}") for number in range(12)]
        together = [pool.run(operation, affinity=f"user-{number % 3}") for number in range(6)]
        trace.note(name, [picked, list(await asyncio.gather(*together))])
        trace.look(name, pool)


@scenario
async def resources_classify_timeouts_and_threads(trace: Trace) -> None:
    def classify(outcome: object) -> Any:
        if outcome == "b":
            return CooldownResource(20, "says so")
        if isinstance(outcome, ConnectionError):
            return RetryOperation(f"{outcome}")
        return None

    pool = keys("a", "b", classify=classify)
    await trace.outcome("classified error", pool.run(raising(ConnectionError("cut"))))
    await trace.outcome("classified result", pool.run(ident))
    await trace.outcome("timeout", pool.run(raising(seconds=60), timeout=2, max_attempts=2))

    def plain(key: Resource[str]) -> str:
        return key.resource_id

    await trace.outcome("in a thread", asyncio.to_thread(pool.run_sync, plain, max_attempts=4))
    call = asyncio.ensure_future(pool.run(raising(seconds=60)))
    await asyncio.sleep(1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    trace.look("at the end", pool)
