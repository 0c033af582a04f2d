"""R43: waiting instead of failing; who is first is served first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import CooldownResource, DisableResource, PoolExhausted, Resource, ResourcePool
from headgate.core.clock import clock
from headgate.testing import settle, virtual
from tests.support.resources.support import Gate, always, ident, in_flight, keys, rate_limited


def exclusive(*names: str, **options: Any) -> ResourcePool[str]:
    return ResourcePool([Resource(name, name, max_in_flight=1) for name in names], **options)


async def cool(pool: ResourcePool[Any], seconds: float) -> None:
    with pytest.raises(PoolExhausted):
        await pool.run(always(CooldownResource(seconds)), max_attempts=1)


# -- wait_for_cooldown ---------------------------------------------------------------


@virtual
async def test_r43_fails_at_once_without_a_wait_mode() -> None:
    pool = keys("a")
    await cool(pool, 30)
    with pytest.raises(PoolExhausted, match="no eligible resource"):
        await pool.run(ident)
    assert clock.now() == 0


@virtual
async def test_r43_waits_to_the_earliest_expiry() -> None:
    pool = keys("a", "b", strategy="primary_backup")
    await cool(pool, 30)
    await cool(pool, 12.5)
    assert await pool.run(ident, wait_for_cooldown=True) == "b"
    assert clock.now() == 12.5


@virtual
async def test_r43_raises_at_once_if_nothing_cools() -> None:
    pool, gate = exclusive("a", "b"), Gate()
    busy = asyncio.create_task(pool.run(gate))
    await pool.disable("b")
    await settle()
    with pytest.raises(PoolExhausted, match=r"0 cooling down, 1 disabled, 1 in full use"):
        await pool.run(ident, wait_for_cooldown=True)
    gate.finish(0)
    await busy


@virtual
async def test_r43_raises_at_once_if_the_cooldown_ends_after_the_deadline() -> None:
    pool = keys("a")
    await cool(pool, 30)
    with pytest.raises(PoolExhausted, match=r"cooldown ends 10\.000 s after deadline") as caught:
        await pool.run(ident, wait_for_cooldown=True, within=20)
    assert caught.value.reason == "deadline"
    assert caught.value.retry_after == 30
    assert clock.now() == 0


@virtual
async def test_r43_a_waiter_gives_up_when_the_cooldown_moves_behind_its_deadline() -> None:
    pool, gate = keys("a", cancel_siblings=False), Gate()
    elder = asyncio.create_task(pool.run(gate, max_attempts=1))
    await settle()
    await cool(pool, 10)
    waiter = asyncio.create_task(pool.run(ident, wait_for_cooldown=True, within=20))
    await asyncio.sleep(5)
    gate.finish(0, CooldownResource(60))
    await asyncio.wait([elder, waiter])
    assert clock.now() == 5
    with pytest.raises(PoolExhausted, match="after deadline"):
        waiter.result()
    assert isinstance(elder.exception(), PoolExhausted)


@virtual
async def test_r43_a_waiter_sleeps_on_when_the_cooldown_is_extended() -> None:
    pool, gate = keys("a", cancel_siblings=False), Gate()
    elder = asyncio.create_task(pool.run(gate, max_attempts=1))
    await settle()
    await cool(pool, 10)
    waiter = asyncio.create_task(pool.run(ident, wait_for_cooldown=True))
    await asyncio.sleep(5)
    gate.finish(0, CooldownResource(60))
    assert await waiter == "a"
    assert clock.now() == 65
    assert isinstance(elder.exception(), PoolExhausted)


@virtual
async def test_r43_an_earlier_cooldown_that_begins_later_is_noticed() -> None:
    pool, gate = exclusive("a", "b", strategy="primary_backup"), Gate()
    await cool(pool, 600)
    busy = asyncio.create_task(pool.run(gate, max_attempts=1))
    await settle()
    waiter = asyncio.create_task(pool.run(ident, wait_for_cooldown=True))
    await asyncio.sleep(1)
    gate.finish(0, CooldownResource(2))
    assert await waiter == "b"
    assert clock.now() == 3
    assert isinstance(busy.exception(), PoolExhausted)


@pytest.mark.parametrize("mode", ["wait_for_cooldown", "wait_for_capacity"])
def test_r43_three_waiters_on_a_recovered_exclusive_resource_all_get_their_turn(mode: str) -> None:
    """The seed wakes all three, one takes the slot, and the others find nothing cooling and fail."""

    @virtual
    async def check() -> None:
        pool = exclusive("only")
        await cool(pool, 30)
        turns: list[tuple[int, float]] = []

        async def work(number: int) -> None:
            async def operation(resource: Resource[str]) -> None:
                turns.append((number, clock.now()))
                await asyncio.sleep(1)

            await pool.run(operation, **{mode: True})  # type: ignore[arg-type]

        await asyncio.gather(*[work(number) for number in range(3)])
        assert turns == [(0, 30.0), (1, 31.0), (2, 32.0)]

    check()


@pytest.mark.parametrize("mode", ["wait_for_cooldown", "wait_for_capacity"])
@pytest.mark.parametrize("how", ["signal", "disable", "remove"])
def test_r43_a_waiter_is_told_when_nothing_can_come_any_more(mode: str, how: str) -> None:
    @virtual
    async def check() -> None:
        pool, gate = keys("a", cancel_siblings=False), Gate()
        elder = asyncio.create_task(pool.run(gate, max_attempts=1))
        await settle()
        await cool(pool, 30)
        waiter = asyncio.create_task(pool.run(ident, **{mode: True}))  # type: ignore[arg-type]
        await asyncio.sleep(1)
        if how == "signal":
            gate.finish(0, DisableResource())
        else:
            await getattr(pool, how)("a")
        await asyncio.wait([waiter])
        assert clock.now() == 1
        assert isinstance(waiter.exception(), PoolExhausted)
        if how != "signal":
            gate.finish(0)
        await asyncio.wait([elder])
        elder.exception()

    check()


@pytest.mark.parametrize("mode", ["wait_for_cooldown", "wait_for_capacity"])
@pytest.mark.parametrize("how", ["enable", "add", "reconcile"])
def test_r72_steering_wakes_waiters(mode: str, how: str) -> None:
    @virtual
    async def check() -> None:
        pool = keys("a")
        await cool(pool, 600)
        waiter = asyncio.create_task(pool.run(ident, **{mode: True}))  # type: ignore[arg-type]
        await asyncio.sleep(1)
        if how == "enable":
            await pool.enable("a")
        elif how == "add":
            await pool.add("b", "secret-b")
        else:
            await pool.reconcile({"a": "secret-a", "b": "secret-b"})
        assert await waiter == ("a" if how == "enable" else "b")
        assert clock.now() == 1

    check()


# -- wait_for_capacity ---------------------------------------------------------------


@virtual
async def test_r43_a_freed_slot_goes_to_the_first_in_line() -> None:
    pool, gate = exclusive("only"), Gate()
    order: list[int] = []

    async def work(number: int) -> None:
        await pool.run(gate, wait_for_capacity=True)
        order.append(number)

    calls = [asyncio.create_task(work(number)) for number in range(5)]
    await settle()
    for number in range(5):
        assert len(gate.uses) == number + 1
        gate.finish(number)
        await settle()
    await asyncio.gather(*calls)
    assert order == [0, 1, 2, 3, 4]


@virtual
async def test_r43_a_later_comer_never_takes_what_suits_an_earlier_one() -> None:
    pool, gate = exclusive("only"), Gate()
    holder = asyncio.create_task(pool.run(gate))
    await settle()
    waiter = asyncio.create_task(pool.run(gate, wait_for_capacity=True))
    await settle()
    gate.finish(0)

    async def barge() -> None:  # runs in the very turn in which the slot is freed, before the waiter wakes
        with pytest.raises(PoolExhausted):
            await pool.run(ident)

    await holder
    await barge()
    await settle()
    assert gate.entered == ["only", "only"]
    gate.finish(1)
    await waiter


@virtual
async def test_r43_nor_at_the_moment_a_cooldown_ends() -> None:
    pool = exclusive("only")
    await cool(pool, 30)
    first = asyncio.create_task(pool.run(always("first"), wait_for_capacity=True))
    await settle()
    with clock.replaced(now=lambda: 31.0), pytest.raises(PoolExhausted):  # over, and no timer has fired yet
        await pool.run(always("second"))
    assert await first == "first"


@virtual
async def test_r43_a_release_goes_to_the_first_waiter_that_can_use_it() -> None:
    pool = ResourcePool([Resource("cpu", 1, 1, tags=["cpu"]), Resource("gpu", 2, 1, tags=["gpu"])])
    gate = Gate()
    holders = [asyncio.create_task(pool.run(gate, tags=[tag])) for tag in ("cpu", "gpu")]
    await settle()
    wants_gpu = asyncio.create_task(pool.run(ident, tags=["gpu"], wait_for_capacity=True))
    await settle()
    wants_any = asyncio.create_task(pool.run(ident, wait_for_capacity=True))
    await settle()
    gate.finish(0)
    assert await wants_any == "cpu"
    assert not wants_gpu.done()
    gate.finish(1)
    assert await wants_gpu == "gpu"
    await asyncio.gather(*holders)


@virtual
async def test_r43_one_that_wakes_and_does_not_take_hands_on() -> None:
    pool, gate = exclusive("only"), Gate()
    holder = asyncio.create_task(pool.run(gate))
    await settle()
    gone = asyncio.create_task(pool.run(ident, wait_for_capacity=True))
    heir = asyncio.create_task(pool.run(ident, wait_for_capacity=True))
    await settle()
    gate.finish(0)
    await asyncio.sleep(0)  # the holder ends: the slot is granted to the first waiter ...
    await asyncio.sleep(0)
    gone.cancel()  # ... who is cancelled in the same turn
    assert await heir == "only"
    await asyncio.wait([holder, gone])
    assert gone.cancelled() or gone.result() == "only"
    assert in_flight(pool) == 0


@virtual
async def test_r43_a_cancelled_waiter_leaves_the_line() -> None:
    pool, gate = exclusive("only"), Gate()
    holder = asyncio.create_task(pool.run(gate))
    await settle()
    waiters = [asyncio.create_task(pool.run(ident, wait_for_capacity=True)) for _ in range(3)]
    await settle()
    assert pool.stats().waiting == 3
    waiters[0].cancel()
    await settle()
    assert pool.stats().waiting == 2
    gate.finish(0)
    assert await waiters[1] == "only"
    assert await waiters[2] == "only"
    assert waiters[0].cancelled()
    await holder
    assert pool.stats().runs_cancelled == 1


@virtual
async def test_r43_a_deadline_ends_the_wait() -> None:
    pool, gate = exclusive("only"), Gate()
    holder = asyncio.create_task(pool.run(gate))
    await settle()
    with pytest.raises(PoolExhausted, match=r"deadline exceeded after 0 attempt\(s\)") as caught:
        await pool.run(ident, wait_for_capacity=True, within=7)
    assert caught.value.reason == "deadline"
    assert clock.now() == 7
    gate.finish(0)
    await holder
    assert await pool.run(ident) == "only"


@virtual
async def test_r43_waiting_costs_no_attempt() -> None:
    pool = keys("a", cooldown_table=(10.0, 20.0))
    outcomes: list[object] = [rate_limited(), rate_limited(), "ok"]

    async def operation(resource: Resource[str]) -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert await pool.run(operation, wait_for_capacity=True, retry_delay=0, max_attempts=3) == "ok"
    assert clock.now() == 30


@virtual
async def test_r43_a_thousand_waiters_are_not_a_herd() -> None:
    """Each release wakes one: nobody wakes, finds nothing and goes back to sleep."""
    pool = exclusive("a", "b")
    await cool(pool, 30)
    await cool(pool, 30)
    turns: list[float] = []

    async def operation(resource: Resource[str]) -> None:
        turns.append(clock.now())
        await asyncio.sleep(1)

    await asyncio.gather(*[pool.run(operation, wait_for_capacity=True) for _ in range(1000)])
    assert turns == sorted(turns)
    assert turns[-1] == 30 + 499
    assert pool.stats().attempts == 1002


@virtual
async def test_r43_nothing_that_could_match_fails_at_once_even_when_waiting() -> None:
    pool = keys("a")
    with pytest.raises(PoolExhausted, match=r"none of its 1 matches tags \['gpu'\]"):
        await pool.run(ident, tags=["gpu"], wait_for_capacity=True)


@virtual
async def test_a_pool_made_empty_fails_until_something_is_added() -> None:
    pool = keys("a")
    await pool.remove("a")
    with pytest.raises(PoolExhausted, match="no eligible resource"):
        await pool.run(ident)
    await pool.add("b", "secret-b")
    assert await pool.run(ident) == "b"


# -- nobody is forgotten ---------------------------------------------------------------


@virtual
async def test_r43_the_alarm_passes_on_when_the_first_in_line_leaves() -> None:
    pool = keys("a")
    await cool(pool, 10)
    first = asyncio.create_task(pool.run(ident, wait_for_cooldown=True))
    second = asyncio.create_task(pool.run(ident, wait_for_cooldown=True))
    await asyncio.sleep(1)
    first.cancel()
    assert await second == "a"
    assert clock.now() == 10
    assert first.cancelled()


@pytest.mark.parametrize("how", ["add", "reconcile"])
def test_r72_a_cooling_resource_that_joins_is_waited_for(how: str) -> None:
    @virtual
    async def check() -> None:
        pool = exclusive("a")
        resting = Resource("b", "b", status="cooling_down", cooldown_until=8.0)
        async with pool.lease():
            waiter = asyncio.create_task(pool.run(ident, wait_for_capacity=True))
            await asyncio.sleep(1)
            if how == "add":
                await pool.add(resting)
            else:
                await pool.reconcile([Resource("a", "a", 1), resting])
            assert await waiter == "b"
            assert clock.now() == 8

    check()


@virtual
async def test_r43_what_was_granted_is_taken_back_when_the_resource_fails_before_it_is_used() -> None:
    """The waiter holds a promise and has not begun: it must not begin on a key that is known to be cooling."""
    pool, gate = exclusive("a", "b", strategy="primary_backup"), Gate()
    holders = [asyncio.create_task(pool.run(gate)) for _ in range(2)]
    await settle()
    waiter = asyncio.create_task(pool.run(ident, wait_for_capacity=True))
    behind = asyncio.create_task(pool.run(ident, wait_for_capacity=True))
    await settle()
    gate.finish(0)
    gate.finish(1)
    await asyncio.sleep(0)  # both are free and granted, and neither waiter has run
    await pool.disable("a")
    assert await waiter == "b"
    assert await behind == "b"
    await asyncio.gather(*holders)
    assert in_flight(pool) == 0


@virtual
async def test_r41_a_granted_waiter_does_not_start_after_its_deadline() -> None:
    pool, gate = exclusive("a"), Gate()
    holder = asyncio.create_task(pool.run(gate))
    await settle()
    waiter = asyncio.create_task(pool.run(ident, wait_for_capacity=True, within=5))
    await settle()
    with clock.replaced(now=lambda: 6.0):  # its turn comes late: the loop was held up
        gate.finish(0)
        await asyncio.wait([waiter])
    assert isinstance(waiter.exception(), PoolExhausted)
    await holder
    assert in_flight(pool) == 0
