"""R60 to R64, and what else stops an operation: R30, R40, R41, R75, R76. Whose cancellation is it, case by case.

*Naive* below is what one writes first: ``task.cancel()`` on the victim's task, a flag "it was us", ``uncancel()`` when
the CancelledError arrives. `schedules.py` looks for what nobody thought of.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from functools import partial
from typing import Any

import pytest

import headgate
from headgate import CooldownResource, DisableResource, PoolExhausted, Resource, ResourcePool
from headgate.resources import ResourceReleased, SiblingCancelled
from headgate.testing import capture_events, run, settle, virtual
from tests.support.resources.support import Gate, always, ident, in_flight, keys, revoked, status

LONG = 1000.0


def now() -> float:
    return asyncio.get_running_loop().time()


def current() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def pair(**options: Any) -> ResourcePool[str]:
    """Two resources, of which "a" is always taken while it can be."""
    return keys("a", "b", strategy="primary_backup", **options)


async def carry(older: int) -> None:
    """Leave this task with so many cancellations that were swallowed and never taken back."""
    for _ in range(older):
        current().cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)


@contextlib.contextmanager
def when_asked(action: Callable[[], object]) -> Iterator[None]:
    """Do something as soon as somebody is asked to stop: the asking is on its way, and has not arrived."""
    off = headgate.subscribe(lambda event: action() if isinstance(event, SiblingCancelled) else None, "resources.usage")
    try:
        yield
    finally:
        off()


class Trouble:
    """An elder use of "a" that signals when told to, and the younger uses that suffer for it."""

    def __init__(self, pool: ResourcePool[str]) -> None:
        self.pool = pool
        self.end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[Any] | None = None

    async def begin(self) -> None:
        self.task = asyncio.create_task(self.pool.run(self._operation, retry_delay=0))
        await settle()
        assert in_flight(self.pool) == 1

    def signal(self, outcome: BaseException | None = None) -> None:
        self.end.set_exception(outcome or CooldownResource(LONG, "429"))

    async def _operation(self, resource: Resource[str]) -> str:
        return resource.resource_id if resource.resource_id != "a" else await self.end


class Heard:
    """An operation that waits on "a" and writes down when it is told to stop; elsewhere it returns where it is."""

    def __init__(self, wait: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(LONG)) -> None:
        self.wait = wait
        self.at: list[float] = []

    async def __call__(self, resource: Resource[str]) -> str:
        if resource.resource_id == "a":
            try:
                await self.wait()
            except asyncio.CancelledError:
                self.at.append(now())
                raise
            return "a, to its end"
        return resource.resource_id


async def calling(
    pool: ResourcePool[str], operation: Callable[[Resource[str]], Awaitable[Any]], **options: Any
) -> asyncio.Task[Any]:
    """A task inside `pool.run`, its operation suspended."""
    task = asyncio.create_task(pool.run(operation, **{"retry_delay": 0, **options}))
    await settle()
    return task


async def outcome_of(task: asyncio.Task[Any]) -> object:
    await asyncio.wait([task])
    return "cancelled" if task.cancelled() else task.exception() or task.result()


# -- R60, R61: who is asked, and what its caller sees ------------------------------------------------------------------


@pytest.mark.parametrize("signal", [partial(CooldownResource, LONG), DisableResource])
@virtual
async def test_r60_only_the_strictly_younger_are_asked(signal: Callable[[], BaseException]) -> None:
    pool = pair()
    elder, younger = Heard(), Heard()
    first = await calling(pool, elder)
    trouble = Trouble(pool)
    trouble.task = await calling(pool, trouble._operation)
    second = await calling(pool, younger)
    with capture_events("resources.usage") as events:
        trouble.signal(signal())
        assert await second == "b"
        assert await trouble.task == "b"  # the signaller went elsewhere, and was not asked itself
    assert [event.usage.resource_id for event in events.of(SiblingCancelled)] == ["a"]
    assert (elder.at, younger.at) == ([], [0.0])
    assert await first == "a, to its end"
    assert in_flight(pool) == 0


@virtual
async def test_r61_a_cancelled_use_costs_one_attempt() -> None:
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    victim = await calling(pool, Heard(), max_attempts=1)
    trouble.signal()
    error = await outcome_of(victim)
    assert isinstance(error, PoolExhausted)
    assert error.reason == "attempts"
    assert isinstance(error.__cause__, CooldownResource)
    assert victim.cancelling() == 0


@virtual
async def test_r08_siblings_are_cancelled_across_pools() -> None:
    shared = Resource("a", "secret")
    one = ResourcePool([shared])
    other = ResourcePool([shared, Resource("b", "secret")], strategy="primary_backup")
    trouble = Trouble(one)
    await trouble.begin()
    victim = await calling(other, Heard())
    trouble.signal()
    assert await victim == "b"
    assert trouble.task is not None
    await outcome_of(trouble.task)


@virtual
async def test_r63_cancel_siblings_false_lets_them_run() -> None:
    pool = pair(cancel_siblings=False)
    trouble = Trouble(pool)
    await trouble.begin()
    victim = await calling(pool, Heard())
    with capture_events("resources.usage") as events:
        trouble.signal()
        assert await victim == "a, to its end"
    assert events.of(SiblingCancelled) == []


# -- R62: an outer cancellation always propagates ----------------------------------------------------------------------


@pytest.mark.parametrize("older", [0, 1, 2])
@pytest.mark.parametrize("order", ["outer first", "sibling first"])
@virtual
async def test_r62_in_the_same_turn_as_a_siblings(order: str, older: int) -> None:
    # Naive: two cancel() merge into one CancelledError, the flag says "ours", the outer one is uncancelled and lost.
    # Comparing cancelling() with 0 instead of with what it was fails the other way round when `older` > 0.
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    heard = Heard()

    async def caller() -> str:
        await carry(older)
        return await pool.run(heard, retry_delay=0)

    victim = asyncio.create_task(caller())
    await settle()
    later = asyncio.get_running_loop().call_soon
    with when_asked(victim.cancel if order == "outer first" else lambda: later(victim.cancel)):
        trouble.signal()
        assert await outcome_of(victim) == "cancelled"
    assert heard.at == [0.0]
    assert victim.cancelling() == older + 1
    assert in_flight(pool) == 0


@pytest.mark.parametrize("older", [0, 1])
@virtual
async def test_r61_a_caller_that_carries_an_older_cancellation_is_not_cancelled(older: int) -> None:
    # Naive: "cancelling() > 0, so somebody outside wants it" hands the sibling's cancellation to such a caller.
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()

    async def caller() -> str:
        await carry(older)
        return await pool.run(Heard(), retry_delay=0)

    victim = asyncio.create_task(caller())
    await settle()
    trouble.signal()
    assert await victim == "b"
    assert victim.cancelling() == older


@virtual
async def test_r62_while_it_rests_between_two_attempts_and_while_it_waits_in_line() -> None:
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    resting = await calling(pool, Heard(), retry_delay=10)
    trouble.signal()
    await settle()
    resting.cancel()
    assert await outcome_of(resting) == "cancelled"
    await pool.disable("b")
    waiting = await calling(pool, Heard(), wait_for_capacity=True)
    waiting.cancel()
    assert await outcome_of(waiting) == "cancelled"
    assert in_flight(pool) == 0
    assert len(pool._engine.rotation.wait_queue) == 0


@pytest.mark.parametrize("first", ["timeout", "sibling"])
@virtual
async def test_r62_inside_asyncio_timeout(first: str) -> None:
    # Naive: its uncancel() takes the timeout's count, and what should be a TimeoutError comes out as a CancelledError.
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    loop = asyncio.get_running_loop()
    if first == "sibling":
        loop.call_later(1, trouble.signal)
    victim = asyncio.create_task(_within(1, pool.run(Heard(), retry_delay=0)))
    await settle()
    if first == "timeout":
        loop.call_later(1, trouble.signal)
    assert isinstance(await outcome_of(victim), TimeoutError)
    assert now() == 1.0
    assert victim.cancelling() == 0
    assert in_flight(pool) <= 1  # the signaller may still be on its way


async def _within(seconds: float, call: Awaitable[str]) -> str:
    async with asyncio.timeout(seconds):
        return await call


@virtual
async def test_r62_a_sibling_does_not_set_off_the_timeout_around_it() -> None:
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    victim = asyncio.create_task(_within(1, pool.run(Heard(), retry_delay=0)))
    await settle()
    trouble.signal()
    assert await victim == "b"


@virtual
async def test_r62_inside_a_task_group_that_fails() -> None:
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    heard = Heard()

    async def fail() -> None:
        await asyncio.sleep(1)
        raise ValueError

    asyncio.get_running_loop().call_later(1, trouble.signal)
    victims: list[asyncio.Task[str]] = []

    async def together() -> None:
        async with asyncio.TaskGroup() as group:
            victims.append(group.create_task(pool.run(heard, retry_delay=0)))
            group.create_task(fail())

    error = await outcome_of(asyncio.create_task(together()))
    assert isinstance(error, ExceptionGroup)
    assert [type(one) for one in error.exceptions] == [ValueError]
    assert victims[0].cancelled()
    assert heard.at == [1.0]


# -- scopes inside the operation: they cancel the task too, and take it back -------------------------------------------


@pytest.mark.parametrize("where", ["body", "exit"])
@virtual
async def test_a_victim_inside_a_task_group_of_its_own_ends_its_children(where: str) -> None:
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    ends: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(LONG)
        finally:
            ends.append("child")

    async def operation(resource: Resource[str]) -> str:
        if resource.resource_id == "a":
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
                if where == "body":
                    await asyncio.sleep(LONG)
        return resource.resource_id

    victim = await calling(pool, operation)
    trouble.signal()
    assert await victim == "b"
    assert ends == ["child"]
    assert victim.cancelling() == 0


@pytest.mark.parametrize("asked_by", ["sibling", "timeout="])
@pytest.mark.parametrize("first", ["the scope", "the asking"])
@virtual
async def test_r41_a_timeout_inside_the_operation_does_not_eat_the_asking(first: str, asked_by: str) -> None:
    # Both come in one turn: one CancelledError arrives, asyncio.timeout takes it for its own and the operation goes on
    # happily. It must be told once more. (A task can count: it would have been cancelled twice.)
    pool = pair()
    trouble = Trouble(pool)
    if asked_by == "sibling":
        await trouble.begin()
    if asked_by == "sibling" and first == "the asking":
        asyncio.get_running_loop().call_later(1, trouble.signal)
    heard: list[float] = []

    async def operation(resource: Resource[str]) -> str:
        if resource.resource_id != "a":
            return resource.resource_id
        if first == "the asking":
            await asyncio.sleep(0)  # the timer of timeout= is set when it first suspends
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.sleep(LONG)
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            heard.append(now())
            raise
        return "never told"

    victim = asyncio.create_task(pool.run(operation, retry_delay=0, timeout=1 if asked_by == "timeout=" else None))
    await asyncio.sleep(0)
    if asked_by == "sibling" and first == "the scope":
        asyncio.get_running_loop().call_later(1, trouble.signal)
    assert await outcome_of(victim) == "b"
    assert heard == [1.0]
    assert victim.cancelling() == 0


@virtual
async def test_a_count_that_a_task_group_leaves_behind_is_no_cancellation() -> None:
    # On 3.11 and 3.12 a TaskGroup whose child fails while it waits for its children forgets one uncancel(). An
    # operation that fans out and meets a 429 must fail over all the same.
    pool = pair()

    async def child(resource: Resource[str]) -> str:
        await asyncio.sleep(1)
        if resource.resource_id == "a":
            raise CooldownResource(5)
        return resource.resource_id

    async def operation(resource: Resource[str]) -> list[str]:
        async with asyncio.TaskGroup() as group:
            children = [group.create_task(child(resource)) for _ in range(3)]
        return [task.result() for task in children]

    for delay in (0, 1):
        await pool.enable("a")
        assert await asyncio.create_task(pool.run(operation, retry_delay=delay)) == ["b"] * 3


@virtual
async def test_r34_a_group_of_signals_from_a_victim_in_the_same_turn_counts_as_a_signal() -> None:
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()

    async def child() -> None:
        await asyncio.sleep(1)
        raise CooldownResource(5)

    async def operation(resource: Resource[str]) -> str:
        if resource.resource_id == "a":
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
                await asyncio.sleep(LONG)
        return resource.resource_id

    victim = await calling(pool, operation)
    asyncio.get_running_loop().call_later(1, trouble.signal)
    assert await victim == "b"
    assert in_flight(pool) == 0


# -- nested calls ------------------------------------------------------------------------------------------------------


@virtual
async def test_r62_nested_the_inner_use_is_the_victim() -> None:
    outer, inner = keys("o"), pair()
    trouble = Trouble(inner)
    await trouble.begin()

    async def operation(resource: Resource[str]) -> tuple[str, str]:
        return resource.resource_id, await inner.run(Heard(), retry_delay=0)

    victim = await calling(outer, operation)
    trouble.signal()
    assert await victim == ("o", "b")


@virtual
async def test_r62_nested_the_outer_use_is_the_victim() -> None:
    # The inner call sees a CancelledError that nobody asked *it* for, and must let it through.
    outer, inner = pair(), keys("i")
    trouble = Trouble(outer)
    await trouble.begin()
    heard = Heard()

    async def operation(resource: Resource[str]) -> tuple[str, str]:
        wait = asyncio.sleep if resource.resource_id == "a" else _at_once
        return resource.resource_id, await inner.run(lambda r: wait(LONG, r.resource_id), retry_delay=0)

    victim = await calling(outer, operation)
    trouble.signal()
    assert await victim == ("b", "i")
    assert heard.at == []
    assert in_flight(outer) == in_flight(inner) == 0


async def _at_once(seconds: float, result: str) -> str:
    return result


@virtual
async def test_r60_nested_both_are_victims_of_one_signal() -> None:
    # One pool, called again by its own operation: both uses are of "a", and one CancelledError arrives for two. The
    # inner call must not take it for its own and go on on "b", while the outer one, which holds "a", is never told.
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    heard: list[float] = []

    async def inner(resource: Resource[str]) -> str:
        await asyncio.sleep(LONG if resource.resource_id == "a" else 0)
        return resource.resource_id

    async def outer(resource: Resource[str]) -> tuple[str, str]:
        try:
            return resource.resource_id, await pool.run(inner, retry_delay=0)
        except asyncio.CancelledError:
            heard.append(now())
            raise

    victim = await calling(pool, outer)
    with capture_events("resources.usage") as events:
        asyncio.get_running_loop().call_later(1, trouble.signal)
        assert await victim == ("b", "b")
    assert len(events.of(SiblingCancelled)) == 2
    assert heard == [1.0]
    assert now() == 1.0


@virtual
async def test_r60_nested_both_are_victims_and_the_inner_one_cleans_up() -> None:
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()

    async def inner(resource: Resource[str]) -> str:
        try:
            await asyncio.sleep(LONG if resource.resource_id == "a" else 0)
        finally:
            await asyncio.sleep(1)
        return resource.resource_id

    async def outer(resource: Resource[str]) -> tuple[str, str]:
        return resource.resource_id, await pool.run(inner, retry_delay=0)

    victim = await calling(pool, outer)
    trouble.signal()
    assert await victim == ("b", "b")
    assert now() == 2.0


@pytest.mark.parametrize("inner_timeout", [5.0, 2.5])
@virtual
async def test_r41_nested_timeouts_that_end_together(inner_timeout: float) -> None:
    # The outer attempt is bounded by 5 s, whatever the inner one makes of the CancelledError that reaches both.
    outer, inner = keys("o"), keys("a", "b", "c")

    async def operation(resource: Resource[str]) -> str:
        await asyncio.sleep(5.0 - inner_timeout)
        return await inner.run(lambda _: asyncio.sleep(LONG, "never"), timeout=inner_timeout, retry_delay=0)

    with pytest.raises(PoolExhausted):
        await outer.run(operation, timeout=5, max_attempts=1)
    assert now() == 5.0
    assert in_flight(inner) == 0


# -- R63: operations that swallow --------------------------------------------------------------------------------------


def swallowing(uncancel: bool, then: float = 0.0) -> Callable[[Resource[str]], Awaitable[str]]:
    """An operation that takes no for an answer: it goes on, for `then` seconds, and returns."""

    async def operation(resource: Resource[str]) -> str:
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            if uncancel:
                current().uncancel()
            await asyncio.sleep(then)
        return f"{resource.resource_id}, all the same"

    return operation


@pytest.mark.parametrize("older", [0, 1])
@pytest.mark.parametrize("uncancel", [False, True])
@virtual
async def test_r63_what_it_returns_is_delivered(uncancel: bool, older: int) -> None:
    # Naive: "it was asked to stop, so this was no result", or an uncancel() of its own that drops an older count.
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()

    async def caller() -> str:
        await carry(older)
        return await pool.run(swallowing(uncancel), retry_delay=0)

    victim = asyncio.create_task(caller())
    await settle()
    trouble.signal()
    assert await victim == "a, all the same"
    assert victim.cancelling() == max(0, older - uncancel)
    assert in_flight(pool) == 0


@pytest.mark.parametrize("older", [0, 1])
@pytest.mark.parametrize("uncancel", [False, True])
@virtual
async def test_r63_a_later_outer_cancellation_still_propagates(uncancel: bool, older: int) -> None:
    # Naive: the operation's uncancel() has taken back the pool's cancel(); now the outer one arrives, the flag still
    # says "ours", and the pool's own uncancel() takes back a cancellation that was not its to take.
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()

    async def caller() -> str:
        await carry(older)
        return await pool.run(swallowing(uncancel, then=10), retry_delay=0)

    victim = asyncio.create_task(caller())
    await settle()
    trouble.signal()
    asyncio.get_running_loop().call_later(5, victim.cancel)
    assert await outcome_of(victim) == "cancelled"
    assert now() == 5.0
    assert victim.cancelling() == max(0, older - uncancel) + 1
    assert in_flight(pool) == 0


@pytest.mark.parametrize("order", ["outer first", "sibling first"])
@virtual
async def test_r62_an_operation_that_takes_back_an_older_count_in_its_first_step(order: str) -> None:
    # "What it was" is a moving mark: once the operation has lowered the count, one more cancellation is an outer one.
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()

    async def operation(resource: Resource[str]) -> str:
        current().uncancel()
        await asyncio.sleep(LONG if resource.resource_id == "a" else 0)
        return resource.resource_id

    async def caller() -> str:
        await carry(1)
        return await pool.run(operation, retry_delay=0)

    victim = asyncio.create_task(caller())
    await settle()
    later = asyncio.get_running_loop().call_soon
    with when_asked(victim.cancel if order == "outer first" else lambda: later(victim.cancel)):
        trouble.signal()
        assert await outcome_of(victim) == "cancelled"
    assert victim.cancelling() == 1


@pytest.mark.parametrize("older", [0, 1])
@virtual
async def test_a_cancellation_that_nobody_asked_for_is_the_operations_own(older: int) -> None:
    pool = pair()
    await carry(older)

    async def operation(resource: Resource[str]) -> None:
        await asyncio.sleep(1)
        raise asyncio.CancelledError("mine")

    with pytest.raises(asyncio.CancelledError, match="mine"):
        await pool.run(operation)
    assert status(pool, "a") == "healthy"
    assert in_flight(pool) == 0
    current().uncancel()


# -- R40: what is cancelled, and when ----------------------------------------------------------------------------------


@virtual
async def test_r40_a_future_is_cancelled_directly() -> None:
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def operation(resource: Resource[str]) -> Awaitable[str]:
        return future if resource.resource_id == "a" else ident(resource)

    victim = await calling(pool, operation)
    trouble.signal()
    assert await victim == "b"
    assert future.cancelled()


@virtual
async def test_r61_two_victims_that_await_one_and_the_same_future() -> None:
    # Coalesced requests do that. The first victim's interrupt cancels the future for both; each was asked, and neither
    # caller may see it.
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    shared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    one, other = Heard(lambda: shared), Heard(lambda: shared)
    victims = [await calling(pool, one), await calling(pool, other)]
    trouble.signal()
    assert [await outcome_of(victim) for victim in victims] == ["b", "b"]
    assert one.at == other.at == [0.0]


@virtual
async def test_r40_any_other_awaitable_runs_to_its_end() -> None:
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()

    class Later:
        def __await__(self) -> Generator[Any, Any, str]:
            yield from asyncio.sleep(1).__await__()
            return "to its end"

    victim = await calling(pool, lambda _: Later())
    with capture_events("resources.usage") as events:
        trouble.signal()
        assert await victim == "to its end"
    assert events.of(SiblingCancelled) == []


@virtual
async def test_an_operation_that_only_yields_is_interrupted_at_its_next_resume() -> None:
    # There is no future to cancel: it suspends on nothing.
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    turns = 0

    async def spin() -> None:
        nonlocal turns
        for _ in range(10_000):
            turns += 1
            await asyncio.sleep(0)

    heard = Heard(spin)
    victim = asyncio.create_task(pool.run(heard, retry_delay=0))
    await asyncio.sleep(0)
    trouble.signal()
    assert await victim == "b"
    assert len(heard.at) == 1
    assert turns < 10


@pytest.mark.parametrize("badly", [False, True])
@virtual
async def test_a_victim_whose_future_is_already_done(badly: bool) -> None:
    # It has been woken and has not run yet. The future cannot be cancelled any more, the operation can, and at once.
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        with contextlib.suppress(ConnectionError):
            await answer
        await asyncio.sleep(LONG)

    heard = Heard(wait)
    victim = await calling(pool, heard)

    def resolve() -> None:
        if badly:
            answer.set_exception(ConnectionError())
        else:
            answer.set_result(None)

    with when_asked(resolve):
        trouble.signal()
        assert await victim == "b"
    assert heard.at == [0.0]


@virtual
async def test_a_victim_that_ended_meanwhile_is_left_alone() -> None:
    # Asked, and finished before the asking arrives, all in one turn: its result stands and its task is not touched.
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    gate = Gate()

    async def caller() -> object:
        result = await pool.run(gate)
        await asyncio.sleep(10)  # what comes after the call is none of the pool's business
        return result

    victim = asyncio.create_task(caller())
    await settle()
    with capture_events("resources.usage") as events:
        trouble.signal()
        gate.finish(0, "just in time")
        assert await victim == "just in time"
    assert len(events.of(SiblingCancelled)) == 1
    assert victim.cancelling() == 0


@virtual
async def test_asked_twice_in_one_turn_is_asked_once() -> None:
    # A sibling and timeout= at the same moment: the clean-up that the first one begins is not cut off by the second.
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    story: list[str] = []

    async def operation(resource: Resource[str]) -> str:
        if resource.resource_id == "a":
            try:
                await asyncio.sleep(LONG)
            finally:
                story.append("asked")
                await asyncio.sleep(1)
                story.append("cleaned up")
        return resource.resource_id

    asyncio.get_running_loop().call_later(1, trouble.signal)
    victim = await calling(pool, operation, timeout=1)
    assert await victim == "b"
    assert story == ["asked", "cleaned up"]


# -- R64, R75: what is never cancelled ---------------------------------------------------------------------------------


@virtual
async def test_r64_leases_and_run_sync_are_never_cancelled() -> None:
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    entered, go = threading.Event(), threading.Event()

    def function(resource: Resource[str]) -> tuple[bool, str]:
        entered.set()
        return go.wait(10), resource.resource_id

    with capture_events("resources.usage") as events:
        async with pool.lease() as leased:
            in_thread = asyncio.create_task(asyncio.to_thread(pool.run_sync, function))
            await asyncio.to_thread(entered.wait, 10)
            assert in_flight(pool) == 3
            trouble.signal()
            go.set()
            assert await in_thread == (True, "a")
            await asyncio.sleep(10)
        assert leased.resource_id == "a"
    assert events.of(SiblingCancelled) == []
    assert in_flight(pool) == 0


class Streams:
    """An operation for `pool.stream` that waits before its first item and before its second."""

    def __init__(self, before_first: float, before_second: float) -> None:
        self.waits = before_first, before_second
        self.cleaned_up = False

    async def __call__(self, resource: Resource[str]) -> AsyncGenerator[str, None]:
        try:
            if resource.resource_id == "a":
                await asyncio.sleep(self.waits[0])
            yield f"{resource.resource_id}1"
            await asyncio.sleep(self.waits[1])
            yield f"{resource.resource_id}2"
        finally:
            await asyncio.sleep(0.5)
            self.cleaned_up = True


@virtual
async def test_r64_a_stream_fails_over_before_its_first_item() -> None:
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    asyncio.get_running_loop().call_later(1, trouble.signal)
    items = [item async for item in pool.stream(Streams(LONG, 0), retry_delay=0)]
    assert items == ["b1", "b2"]
    assert current().cancelling() == 0


@pytest.mark.parametrize("when", ["in its second __anext__", "between two items"])
@virtual
async def test_r64_an_open_stream_is_left_alone_and_so_is_its_consumer(when: str) -> None:
    # Naive: the task that began the stream is cancelled, and is hit between two items, inside somebody else's code.
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    items = []
    with capture_events("resources.usage") as events:
        asyncio.get_running_loop().call_later(1, trouble.signal)
        async for item in pool.stream(Streams(0, 2), retry_delay=0):
            items.append(item)
            await asyncio.sleep(5 if when == "between two items" else 0)
    assert items == ["a1", "a2"]
    assert events.of(SiblingCancelled) == []


@virtual
async def test_r62_an_outer_cancellation_of_a_streams_consumer() -> None:
    pool = pair()
    trouble = Trouble(pool)
    await trouble.begin()
    streams = Streams(LONG, 0)

    async def consume() -> list[str]:
        return [item async for item in pool.stream(streams, retry_delay=0)]

    victim = asyncio.create_task(consume())
    await settle()
    with when_asked(victim.cancel):
        trouble.signal()
        assert await outcome_of(victim) == "cancelled"
    assert streams.cleaned_up
    await asyncio.sleep(1)
    assert in_flight(pool) == 0


@virtual
async def test_r05_a_closed_stream_keeps_its_slot_until_it_has_cleaned_up() -> None:
    # The clean-up may still speak over the connection that an exclusive resource stands for.
    pool = ResourcePool([Resource("a", "secret", 1)])
    streams = Streams(0, 0)
    async with contextlib.aclosing(pool.stream(streams)) as stream:
        async for item in stream:
            assert item == "a1"
            break
        second = asyncio.create_task(pool.run(ident, wait_for_capacity=True))
        await settle()
        off = headgate.subscribe(lambda e: order.append(streams.cleaned_up), "resources.usage")
        order: list[bool] = []
    assert await second == "a"
    off()
    assert all(order)
    assert streams.cleaned_up


# -- R41: timeout= -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("older", [0, 1])
@virtual
async def test_r41_timeout_interrupts_and_counts_as_a_retry(older: int) -> None:
    pool = keys("a", "b", "c", strategy="primary_backup")
    tried: list[str] = []
    await carry(older)

    async def operation(resource: Resource[str]) -> None:
        tried.append(resource.resource_id)
        await asyncio.sleep(LONG)

    with pytest.raises(PoolExhausted) as caught:
        await pool.run(operation, timeout=2, retry_delay=0)
    assert now() == 6.0
    assert tried == ["a", "b", "c"]
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert [attempt.duration for attempt in caught.value.attempts] == [2.0, 2.0, 2.0]
    assert {status(pool, key) for key in "abc"} == {"healthy"}
    assert pool.stats().retries == 3
    assert current().cancelling() == older
    for _ in range(older):
        current().uncancel()


@virtual
async def test_r41_timeout_gives_way_to_an_outer_cancellation_and_to_a_result() -> None:
    pool = pair()
    loop = asyncio.get_running_loop()
    heard = Heard()
    outer_first: list[asyncio.Task[Any]] = []
    loop.call_later(1, lambda: outer_first[0].cancel())
    outer_first.append(await calling(pool, heard, timeout=1))
    timeout_first = await calling(pool, heard, timeout=1)
    loop.call_later(1, timeout_first.cancel)
    assert await outcome_of(outer_first[0]) == await outcome_of(timeout_first) == "cancelled"
    assert heard.at == [1.0, 1.0]
    assert await pool.run(swallowing(False, then=3), timeout=1) == "a, all the same"
    assert await pool.run(lambda r: asyncio.sleep(1, r.resource_id), timeout=1) in ("a", "b")
    assert in_flight(pool) == 0


# -- cancelled while waiting -------------------------------------------------------------------------------------------


@virtual
async def test_r43_a_cancelled_waiter_hands_on_the_alarm_it_kept() -> None:
    # The first in line wakes all at the end of a cooldown. Cancelled, it must not take the alarm with it.
    pool = keys("a")
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(10)))
    first = await calling(pool, ident, wait_for_capacity=True)
    second = await calling(pool, ident, wait_for_capacity=True)
    first.cancel()
    assert await outcome_of(second) == "a"
    assert now() == 10.0
    assert first.cancelled()


@virtual
async def test_r43_a_waiter_cancelled_in_the_turn_of_its_grant_hands_it_on() -> None:
    pool = ResourcePool([Resource("a", "secret", 1)])
    gate = Gate()
    holder = await calling(pool, gate)
    first = await calling(pool, ident, wait_for_capacity=True)
    second = await calling(pool, ident, wait_for_capacity=True)
    gate.finish(0)
    await holder
    first.cancel()
    assert await outcome_of(first) == "cancelled"
    assert await second == "a"
    assert in_flight(pool) == 0


@pytest.mark.parametrize("cools", [True, False], ids=["cooldown", "disable"])
@virtual
async def test_r60_a_use_that_was_granted_and_has_not_begun(cools: bool) -> None:
    # Two end in one turn: one gives its slot to the waiter, the other finds the resource overloaded or dead. The waiter
    # holds a younger use; it must not begin it, and it has not failed either.
    pool = ResourcePool([Resource("a", "secret", 2)])
    gate = Gate()
    good = await calling(pool, gate)
    bad = await calling(pool, gate)
    seen: list[str] = []

    async def operation(resource: Resource[str]) -> str:
        seen.append(resource.status)
        return resource.resource_id

    waiting = await calling(pool, operation, wait_for_capacity=True, max_attempts=1)
    gate.finish(0)
    gate.finish(1, CooldownResource(5) if cools else revoked())
    result = await outcome_of(waiting)
    assert result == "a" if cools else isinstance(result, PoolExhausted)
    assert seen == (["healthy"] if cools else [])
    await asyncio.wait([good, bad])
    assert isinstance(bad.exception(), PoolExhausted)


# -- R76: other loops, other threads -----------------------------------------------------------------------------------


class Elsewhere:
    """An event loop in a thread of its own, running one coroutine."""

    def __init__(self, main: Callable[[], Awaitable[Any]]) -> None:
        self.result: object = None
        self._main = main
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        async def main() -> None:
            self._task = current()
            self.result = await self._main()

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, contextlib.suppress(asyncio.CancelledError):
            runner.run(main())

    def join(self) -> object:
        """Its result. One that was never told to stop is stopped after 5 s: the test fails, and does not hang."""
        self._thread.join(5)
        told = not self._thread.is_alive()
        if not told:
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join()
        assert told, "it was not told"
        return self.result


@pytest.mark.integration
def test_r76_a_victim_on_another_loop_is_cancelled_at_once() -> None:
    # Naive: task.cancel() from another thread does not wake that loop: it sleeps on in its selector, here for an hour.
    pool = pair()
    inside = threading.Event()

    async def operation(resource: Resource[str]) -> str:
        if resource.resource_id == "a":
            inside.set()
            await asyncio.sleep(3600)
        return f"{resource.resource_id} in {threading.current_thread().name}"

    async def signal(resource: Resource[str]) -> None:
        if resource.resource_id == "a":
            elsewhere.append(Elsewhere(lambda: pool.run(operation, retry_delay=0)))
            await asyncio.to_thread(inside.wait, 10)
            raise CooldownResource(3600)

    elsewhere: list[Elsewhere] = []
    asyncio.run(pool.run(signal, retry_delay=0))
    result = str(elsewhere[0].join())
    assert result.startswith("b in ")
    assert threading.current_thread().name not in result
    assert in_flight(pool) == 0


@pytest.mark.integration
def test_r76_a_signal_during_the_first_step_of_a_younger_use() -> None:
    # The younger operation has not suspended yet: there is nothing to cancel, and no handle. It is told when there is.
    pool = pair()
    stepping, signalled = threading.Event(), threading.Event()

    async def operation(resource: Resource[str]) -> str:
        if resource.resource_id == "a":
            stepping.set()
            assert signalled.wait(10)
            await asyncio.sleep(3600)
        return resource.resource_id

    async def signal(resource: Resource[str]) -> None:
        if resource.resource_id == "a":
            elsewhere.append(Elsewhere(lambda: pool.run(operation, retry_delay=0)))
            await asyncio.to_thread(stepping.wait, 10)
            raise CooldownResource(3600)

    elsewhere: list[Elsewhere] = []
    try:
        asyncio.run(pool.run(signal, retry_delay=0))
    finally:
        signalled.set()
    assert elsewhere[0].join() == "b"


@pytest.mark.integration
def test_r76_a_stream_that_opens_while_it_is_being_asked() -> None:
    # Decided under the lock, carried out without it: in between a stream on another loop may have given its first item,
    # and may not be cancelled any more. Those who are asked after it must hear all the same.
    pool = pair()
    ready, go, opened, done = (threading.Event() for _ in range(4))

    async def generate(resource: Resource[str]) -> AsyncGenerator[str, None]:
        ready.set()
        await asyncio.to_thread(go.wait, 10)
        yield resource.resource_id
        await asyncio.to_thread(done.wait, 10)

    async def consume() -> list[str]:
        items = []
        async for item in pool.stream(generate):
            items.append(item)
            opened.set()
        return items

    async def main() -> str:
        trouble = Trouble(pool)
        trouble.task = asyncio.create_task(pool.run(trouble._operation, retry_delay=0))
        await asyncio.sleep(0)
        elsewhere.append(Elsewhere(consume))
        await asyncio.to_thread(ready.wait, 10)
        victim = asyncio.create_task(pool.run(Heard(), retry_delay=0))
        await asyncio.sleep(0)
        assert in_flight(pool) == 3
        while any(flight.handle is None for flight in pool._engine.rotation.in_flight("a")):  # noqa: ASYNC110 - a condition of another thread
            await asyncio.sleep(0.001)  # until all of them have suspended
        with when_asked(lambda: (go.set(), opened.wait(10))):  # the first event: the other victim has been asked
            trouble.signal()
            assert await trouble.task == "b"
        return str(await victim)

    elsewhere: list[Elsewhere] = []
    try:
        assert asyncio.run(main()) == "b"
    finally:
        go.set()
        done.set()
    assert elsewhere[0].join() == ["a"]


@pytest.mark.integration
def test_r76_a_closed_loop_is_ignored() -> None:
    pool = pair()
    dead = asyncio.new_event_loop()

    async def signal(resource: Resource[str]) -> str:
        if resource.resource_id == "a":
            await entered.wait()
            raise CooldownResource(3600)
        return resource.resource_id

    async def main() -> str:
        call = asyncio.create_task(pool.run(signal, retry_delay=0))
        await asyncio.sleep(0)
        await asyncio.to_thread(abandon)
        entered.set()
        return await call

    def abandon() -> None:
        task = dead.create_task(pool.run(Heard()))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        dead.run_until_complete(asyncio.sleep(0))
        assert in_flight(pool) == 2
        dead.close()

    entered = asyncio.Event()
    assert asyncio.run(main()) == "b"
    assert status(pool, "a") == "cooling_down"


# -- R30: no verdict ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "collect"])
@pytest.mark.parametrize("where", ["operation", "line"])
@virtual
async def test_r30_an_abandoned_call_gives_back_what_it_has(where: str, how: str) -> None:
    pool = ResourcePool([Resource("a", "secret", 1, consecutive_cooldown=2)])
    holder = None
    if where == "line":
        holder = await calling(pool, Gate())
    call = pool.run(Heard(), wait_for_capacity=True)
    call.send(None)
    assert in_flight(pool) == 1
    assert len(pool._engine.rotation.wait_queue) == (where == "line")
    if how == "close":
        call.close()
    else:
        del call
        gc.collect()
    assert len(pool._engine.rotation.wait_queue) == 0
    assert in_flight(pool) == (where == "line")
    assert pool.snapshot()["a"]["consecutive_cooldown"] == 2
    if holder is not None:
        holder.cancel()


@virtual
async def test_r30_an_abandoned_call_is_closed_in_the_context_it_ran_in() -> None:
    pool = keys("a")
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")
    ends: list[str] = []

    async def operation(resource: Resource[str]) -> None:
        token = name.set(resource.resource_id)
        try:
            await asyncio.sleep(LONG)
        finally:
            ends.append(name.get())
            name.reset(token)

    call = pool.run(operation, isolate=True)
    call.send(None)
    call.close()
    assert ends == ["a"]
    assert in_flight(pool) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_r30_keyboard_interrupt_gives_no_verdict(error: type[BaseException]) -> None:
    pool = ResourcePool([Resource("a", "secret", consecutive_cooldown=2)])

    async def operation(resource: Resource[str]) -> None:
        await asyncio.sleep(1)
        raise error

    with capture_events("resources.usage") as events, pytest.raises(error):
        run(lambda: pool.run(operation))
    assert [event.outcome for event in events.of(ResourceReleased)] == ["no_verdict"]
    assert in_flight(pool) == 0
    assert pool.snapshot()["a"]["consecutive_cooldown"] == 2
    run(lambda: pool.run(ident))
    assert pool.snapshot()["a"]["consecutive_cooldown"] == 0


@virtual
async def test_r30_a_probe_that_is_cancelled_is_offered_again() -> None:
    pool = keys("a", probe_on_recovery=True)
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(1)))
    await asyncio.sleep(1)
    probe = await calling(pool, Heard())
    with pytest.raises(PoolExhausted):
        await pool.run(ident)
    probe.cancel()
    assert await outcome_of(probe) == "cancelled"
    assert await pool.run(ident) == "a"
