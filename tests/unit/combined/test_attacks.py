"""Ways in which the line was broken once: each is a test now."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    CooldownResource,
    DisableResource,
    PoolExhausted,
    Resource,
    ResourcePool,
    RetryOperation,
    TaskPool,
    WaitCycle,
    subscribe,
)
from headgate.stores import JsonLinesStore
from headgate.testing import virtual

SECRET = "sk-SECRET-aaaa"


class Odd(CooldownResource):
    """A signal that has no text."""

    def __init__(self) -> None:
        pass

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Mute:
    """A reason that has none."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def text_for_seconds() -> CooldownResource:
    """A header as it came."""
    signal = CooldownResource(reason="429")
    signal.cooldown_seconds = "60"  # type: ignore[assignment]
    return signal


async def ok(key: Resource[str]) -> str:
    await asyncio.sleep(0.01)
    return "done"


def interrupted(*_: object) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("raised", [Odd, text_for_seconds, lambda: RetryOperation(Mute())])  # type: ignore[arg-type]
@virtual
async def test_line_a_signal_that_cannot_be_read_ends_its_task_and_nothing_else(raised: Any) -> None:
    keys = ResourcePool({"a": "va", "b": "vb"}, cooldown_table=(1.0,))

    async def bad(key: Resource[str]) -> None:
        raise raised()

    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(bad, max_attempts=2)
        assert await (await pool.submit(ok)) == "done"
        with pytest.raises((PoolExhausted, TypeError, RuntimeError)):
            await handle
        assert handle.story()
    assert keys.stats().in_flight == 0


@pytest.mark.parametrize("hook", ["on_state_change", "classify"])
@virtual
async def test_line_a_hook_that_raises_a_cancellation_cancels_nobody(hook: str) -> None:
    keys = ResourcePool({"a": "va", "b": "vb"}, **{hook: interrupted})  # type: ignore[arg-type]

    async def bad(key: Resource[str]) -> None:
        raise CooldownResource(1, "429") if hook == "on_state_change" else ValueError

    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(bad, max_attempts=1)
        assert await (await pool.submit(ok)) == "done"
        with pytest.raises((PoolExhausted, ValueError)):
            await handle
    assert keys.stats().in_flight == 0


def test_line_a_pool_whose_loop_is_closed_does_not_keep_the_alarm() -> None:
    keys = ResourcePool([Resource("only", SECRET, 1)])

    async def cool(key: Resource[str]) -> None:
        raise CooldownResource(0.1, "429")

    async def first() -> TaskPool:
        pool = TaskPool(resources=keys, max_concurrent=2)
        handle = await pool.submit(cool, max_attempts=5)
        await asyncio.sleep(0.02)
        assert (handle.status, keys.stats().waiting) == ("queued", 1)
        return pool

    async def second(pool: TaskPool) -> None:
        async with asyncio.timeout(20):
            assert await keys.run(ok, wait_for_capacity=True) == "done"
        await pool.close()

    pool = asyncio.run(first())
    asyncio.run(second(pool))


@virtual
async def test_line_who_hears_that_a_key_was_acquired_may_cancel_the_task() -> None:
    keys = ResourcePool([Resource("only", SECRET, 1)])
    handles: dict[str, Any] = {}

    def listener(event: Any) -> None:
        if event.name == "resource_acquired" and event.request_id in handles:
            handles[event.request_id].cancel()

    unsubscribe = subscribe(listener)
    try:
        async with TaskPool(resources=keys, max_concurrent=2) as pool:
            first = await pool.submit(ok)
            second = await pool.submit(ok)
            third = await pool.submit(ok)
            handles[second.id] = second
            assert await third == "done"
            assert (first.status, second.status) == ("completed", "cancelled")
    finally:
        unsubscribe()
    assert keys.stats().in_flight == 0


@virtual
async def test_line_a_hook_may_submit_when_a_key_recovers() -> None:
    more: list[Any] = []

    def hook(name: str, old: str, new: str, seq: int) -> None:
        if new == "healthy":
            more.append(pool.submit_nowait(ok))

    keys = ResourcePool([Resource("only", SECRET, 2)], on_state_change=hook)

    signals = [CooldownResource(0.05, "429")]

    async def cool(key: Resource[str]) -> str:
        if signals:
            raise signals.pop()
        return "cooled"

    pool = TaskPool(resources=keys, max_concurrent=1)
    assert await (await pool.submit(cool)) == "cooled"
    assert await (await pool.submit(ok)) == "done"
    await pool.close()
    assert [handle.status for handle in more] == ["completed"]
    assert keys.stats().in_flight == 0


@pytest.mark.parametrize("signal", [partial(CooldownResource, 0.05), partial(DisableResource, "401")])
@pytest.mark.parametrize("what", ["cancel", "submit"])
@virtual
async def test_line_who_hears_of_a_requeue_may_end_the_task(what: str, signal: Callable[[], Exception]) -> None:
    keys = ResourcePool([Resource("only", SECRET, 1)])
    handles: dict[str, Any] = {}

    def listener(event: Any) -> None:
        if event.name == "pool_requeue":
            if what == "cancel":
                handles[event.request_id].cancel()
            else:
                handles["more"] = pool.submit_nowait(ok)

    async def bad(key: Resource[str]) -> None:
        await asyncio.sleep(0.01)
        raise signal()

    unsubscribe = subscribe(listener)
    try:
        async with TaskPool(resources=keys, max_concurrent=2) as pool:
            handle = await pool.submit(bad, max_attempts=2)
            handles[handle.id] = handle
            other = await pool.submit(ok)
        assert {one.finished for one in (handle, other, *handles.values())} == {True}
        assert pool.size() == 0
    finally:
        unsubscribe()


@virtual
async def test_line_who_hears_of_a_hopeless_submit_may_change_the_pool() -> None:
    keys = ResourcePool({"a": SECRET})
    async with TaskPool(resources=keys, max_concurrent=2) as pool:
        unsubscribe = subscribe(lambda event: pool.resize(3) if event.name == "pool_submit" else None)
        try:
            assert (await pool.submit(ok, tags=["none"])).status == "failed"
        finally:
            unsubscribe()
        assert repr(pool)
        assert await (await pool.submit(ok)) == "done"


@virtual
async def test_line_a_main_task_that_was_cancelled_once_is_no_end_of_the_loop() -> None:
    keys = ResourcePool([Resource("k", SECRET, 2)])
    began = 0

    async def body(key: Resource[str], seconds: float) -> str:
        nonlocal began
        began += 1
        await asyncio.sleep(seconds)
        if began == 2:
            raise CooldownResource(1)
        return "done"

    main = asyncio.current_task()
    assert main is not None
    main.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(0)
    pool = TaskPool(max_concurrent=2, resources=keys)
    handles = [await pool.submit(body, seconds) for seconds in (1.0, 5.0, 1.0)]
    await pool.close()
    assert [handle.status for handle in handles] == ["completed"] * 3
    main.uncancel()


@virtual
async def test_line_nothing_is_granted_to_a_pool_that_has_no_slot_for_it() -> None:
    keys = ResourcePool([Resource("a", "va-secret", 1, tags=["x"]), Resource("b", "vb-secret", 1, tags=["y"])])

    async def hold(key: Resource[str]) -> None:
        await asyncio.sleep(10)

    async with TaskPool(resources=keys) as pool:
        lease = keys.lease(tags=["y"])
        await lease.__aenter__()
        parked = await pool.submit(ok, tags=["y"])
        await pool.submit(hold, tags=["x"])
        await lease.__aexit__(None, None, None)
        assert keys.snapshot()["b"]["in_flight"] == 0, "not even for a moment"
        assert await parked == "done"


@pytest.mark.parametrize("limit", [1, 2, None])
@virtual
async def test_t42_a_probe_that_waits_for_a_second_use_of_its_key_is_a_circle(limit: int | None) -> None:
    keys = ResourcePool([Resource("only", SECRET, limit)], probe_on_recovery=True)
    async with TaskPool(resources=keys, max_concurrent=5) as pool:
        first = [True]

        async def outer(key: Resource[str]) -> str:
            if first:
                first.pop()
                raise CooldownResource(0.05, "429")
            with pytest.raises(WaitCycle):
                await (await pool.submit(ok))
            return "noticed"

        assert await (await pool.submit(outer)) == "noticed"


@virtual
async def test_t42_a_circle_over_two_lines_is_noticed_when_a_key_goes() -> None:
    keys = ResourcePool([Resource("a", "va-secret", 1), Resource("b", "vb-secret", 1)], strategy="primary_backup")
    async with TaskPool(resources=keys, max_concurrent=3) as one, TaskPool(resources=keys, max_concurrent=3) as two:

        async def outer(key: Resource[str]) -> str:
            with pytest.raises(WaitCycle):
                await (await two.submit(ok))
            return "noticed"

        async with keys.lease(exclude=["a"]):
            handle = await one.submit(outer)
            await asyncio.sleep(1)
            await keys.disable("b")
            await asyncio.sleep(1)
        assert await handle == "noticed"


@virtual
async def test_r77_the_classifier_is_not_asked_about_the_end_of_a_stream() -> None:
    asked: list[object] = []

    def classify(outcome: object) -> type[CooldownResource] | None:
        asked.append(outcome)
        return CooldownResource if outcome is None else None

    async def items(key: Resource[str]) -> AsyncGenerator[int, None]:
        yield 1
        yield 2

    async with TaskPool(resources=ResourcePool({"a": SECRET}, classify=classify)) as pool:
        assert [item async for item in pool.stream(items)] == [1, 2]
    assert asked == []


@virtual
async def test_r75_who_closes_a_stream_hears_that_its_clean_up_failed() -> None:
    async def items(key: Resource[str]) -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            raise LookupError("in its clean-up")

    async with TaskPool(resources=ResourcePool({"a": SECRET})) as pool:
        stream = pool.stream(items)
        assert await anext(stream) == 1
        with pytest.raises(LookupError):
            await stream.aclose()


def test_line_the_journal_does_not_tell_a_key_that_a_classifier_made_a_signal_of(tmp_path: Path) -> None:
    def classify(outcome: object) -> DisableResource | None:
        return DisableResource("dead") if isinstance(outcome, OSError) else None

    async def bad(key: Resource[str]) -> None:
        raise OSError(f"401 for {key.value}")

    async def main() -> None:
        keys = ResourcePool({"a": SECRET}, classify=classify)
        store = JsonLinesStore(tmp_path)
        async with TaskPool("p", scope="pipeline", pipeline_id="x", store=store, resources=keys) as pool:
            handle = await pool.submit(bad, max_attempts=5)
            with pytest.raises(PoolExhausted):
                await handle
            assert SECRET not in handle.story()

    asyncio.run(main())
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert any("PoolExhausted" in text for text in written)
    assert not any(SECRET in text for text in written)


@pytest.mark.parametrize("text", ["{}", "x" * 190 + "{}", "first line\n{}"])
@virtual
async def test_line_a_key_in_the_text_of_an_error_is_not_shown(text: str) -> None:
    async def bad(key: Resource[str]) -> None:
        raise LookupError(text.format(key.value))

    events: list[str] = []
    unsubscribe = subscribe(lambda event: events.append(repr(event)))
    try:
        async with TaskPool(resources=ResourcePool({"a": SECRET})) as pool:
            handle = await pool.submit(bad, retries=2)
            with pytest.raises(LookupError):
                await handle
            story = handle.story()
    finally:
        unsubscribe()
    assert not any("SECRET" in text for text in (story, *events))


@virtual
async def test_r31_a_reason_with_the_key_in_it_is_told_without() -> None:
    async def bad(key: Resource[str]) -> None:
        raise CooldownResource(1, f"429 for {key.value}")

    told: list[str] = []
    unsubscribe = subscribe(lambda event: told.append(repr(event)))
    try:
        async with TaskPool(resources=ResourcePool({"a": SECRET, "b": "sk-other-secret"})) as pool:
            handle = await pool.submit(bad, max_attempts=2)
            with pytest.raises(PoolExhausted) as caught:
                await handle
    finally:
        unsubscribe()
    assert not any(SECRET in text for text in (str(caught.value), handle.story(), *told))
    assert any("429 for <a>" in text for text in told)


@virtual
async def test_line_a_function_without_a_place_for_the_key_is_told_so() -> None:
    async def nokey(question: str) -> str:
        return question

    async with TaskPool(resources=ResourcePool({"a": SECRET})) as pool:
        with pytest.raises(TypeError) as caught:
            await (await pool.submit(nokey, "q"))
    assert any("resource as first argument" in note for note in caught.value.__notes__)


@virtual
async def test_line_many_siblings_are_stopped_at_a_cost_that_grows_as_they_do() -> None:
    keys = ResourcePool({"a": SECRET})
    asked = 0
    all_tasks = asyncio.all_tasks

    def counted(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return all_tasks(*args)

    async def body(key: Resource[str], number: int) -> int:
        await asyncio.sleep(1 + number)
        if not number and key.consecutive_cooldown == 0 and not cooled:
            cooled.append(True)
            raise CooldownResource(1)
        return number

    cooled: list[bool] = []
    async with TaskPool(resources=keys, max_concurrent=300) as pool:
        handles = [await pool.submit(body, number) for number in range(300)]
        asyncio.all_tasks = counted
        try:
            assert [await handle for handle in handles] == list(range(300))
        finally:
            asyncio.all_tasks = all_tasks
    assert keys.stats().sibling_cancels == 299
    assert asked < 10


@pytest.mark.parametrize("ending", ["returned", "cancelled", "requeued"])
def test_line_a_task_that_has_ended_leaves_no_cycle(ending: str) -> None:
    async def body(key: Resource[str], seen: list[str]) -> str:
        await asyncio.sleep(0.001)
        if ending == "cancelled":
            await asyncio.sleep(60)
        if ending == "requeued" and not seen:
            seen.append("once")
            raise RetryOperation("502")
        return "done"

    async def main() -> None:
        async with TaskPool(resources=ResourcePool({"a": SECRET}), max_concurrent=5, keep=0) as pool:

            async def several() -> None:
                for _ in range(20):
                    handle = await pool.submit(body, [])
                    if ending == "cancelled":
                        await asyncio.sleep(0.002)
                        handle.cancel()
                    await asyncio.wait([asyncio.ensure_future(outcome_of(handle))])

            await several()
            gc.collect()
            gc.disable()
            try:
                await several()
                await asyncio.sleep(0)
                assert gc.collect() < 20, "one cycle for each task would be more"
            finally:
                gc.enable()

    asyncio.run(main())


async def outcome_of(handle: Any) -> None:
    try:
        await handle
    except Exception:
        pass
