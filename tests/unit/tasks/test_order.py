"""T20 to T24: who goes next, seen through the pool."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import (
    InvalidArgument,
    TaskPool,
    fair_round_robin,
    fair_share,
    pool_get,
    subscribe,
)
from headgate.testing import settle, virtual
from tests.support.tasks.support import AUDIT, EVERY_STRATEGY, Gate, Turns, counts, order_behind_a_gate, quick, slow


def jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


# -- T20 ---------------------------------------------------------------------------------


@virtual
async def test_t20_fifo_ignores_priority() -> None:
    async with TaskPool(queue="fifo") as pool:
        assert await order_behind_a_gate(pool, *[(n, {"priority": n % 3}) for n in range(9)]) == list(range(9))


@virtual
async def test_t20_lifo_is_newest_first_and_ignores_priority() -> None:
    async with TaskPool(queue="lifo") as pool:
        order = await order_behind_a_gate(pool, *[(n, {"priority": n % 3}) for n in range(9)])
    assert order == list(reversed(range(9)))


@virtual
async def test_t20_priority_is_the_default_highest_first_ties_in_order() -> None:
    async with TaskPool() as pool:
        order = await order_behind_a_gate(pool, *[((n % 3, n), {"priority": n % 3}) for n in range(9)])
    assert order == [(2, 2), (2, 5), (2, 8), (1, 1), (1, 4), (1, 7), (0, 0), (0, 3), (0, 6)]


@pytest.mark.parametrize("queue", EVERY_STRATEGY)
@virtual
async def test_t20_a_submit_at_the_very_end_of_a_task_does_not_pass_the_queue(queue: str) -> None:
    """A listener that submits while the slot is free for a moment finds others waiting, and must wait too."""
    async with TaskPool(queue=queue) as pool:
        gate, turns, barged = Gate(), Turns(), []
        await pool.submit(gate.wait, key="a")
        await pool.submit(turns.take, "queued", key="a", priority=5)

        def barge(event: Any) -> None:
            if event.name == "pool_finish" and not barged:
                barged.append(pool.submit_nowait(turns.take, "barger", key="a", priority=1))

        unsubscribe = subscribe(barge, AUDIT)
        gate.open()
        await pool.drain()
        unsubscribe()
    if queue == "lifo":
        assert sorted(turns.order) == ["barger", "queued"]
    else:
        assert turns.order == ["queued", "barger"]


# -- T21, T22 ----------------------------------------------------------------------------


@virtual
async def test_t21_partitions_rotate_first_in_first_out_inside_each() -> None:
    async with TaskPool(queue=fair_round_robin()) as pool:
        submits = [(name, {"key": name[0]}) for name in ("a1", "a2", "b1", "a3", "b2")]
        assert await order_behind_a_gate(pool, *submits) == ["a1", "b1", "a2", "b2", "a3"]


@virtual
async def test_t22_the_rotation_survives_a_partition_running_empty() -> None:
    async with TaskPool(queue=fair_round_robin()) as pool:
        gate, inner, turns = Gate(), Gate(), Turns()

        async def first() -> None:
            turns.order.append("a1")
            await inner.wait()

        await pool.submit(gate.wait)
        await pool.submit(first, key="a")
        for name in ("b1", "b2", "c1", "c2"):
            await pool.submit(turns.take, name, key=name[0])
        gate.open()
        await settle()
        await pool.submit(turns.take, "a2", key="a")  # a ran empty, and comes back behind b and c
        inner.open()
        await pool.drain()
    assert turns.order == ["a1", "b1", "c1", "a2", "b2", "c2"]


@virtual
async def test_t22_one_big_tenant_and_a_hundred_small_ones() -> None:
    async with TaskPool(queue=fair_round_robin("tenant_id")) as pool:
        submits = [("big", {"tenant_id": "big"})] * 200
        submits += [(f"small-{n}", {"tenant_id": f"small-{n}"}) for n in range(100)]
        order = await order_behind_a_gate(pool, *submits)
        assert order[:100].count("big") == 1
        assert jain([order[:101].count(name) for name in set(order)]) >= 0.99
        assert order[101:] == ["big"] * 199
        assert pool.stats().jain >= 0.99


@virtual
async def test_t22_a_newcomer_waits_at_most_one_round() -> None:
    async with TaskPool(queue=fair_round_robin()) as pool:
        turns = Turns()
        gate = Gate()
        await pool.submit(gate.wait)
        for key in "abcde":
            for number in range(20):
                await pool.submit(turns.take, f"{key}{number}", key=key)
        came = 0

        async def newcomer() -> None:
            nonlocal came
            await asyncio.sleep(0)
            came = len(turns.order)
            await pool.submit(turns.take, "new", key="new")

        submitter = asyncio.create_task(newcomer())
        gate.open()
        await submitter
        await pool.drain()
    assert turns.order.index("new") - came <= 5 + 1


@virtual
async def test_t22_steady_trickle_against_a_flood() -> None:
    """A tenant that always has just one task queued gets every second turn."""
    async with TaskPool(queue=fair_round_robin()) as pool:
        turns, left = Turns(), 20

        async def trickle() -> None:
            nonlocal left
            turns.order.append("trickle")
            left -= 1
            if left:
                pool.submit_nowait(trickle, key="trickle")

        gate = Gate()
        await pool.submit(gate.wait)
        for _ in range(100):
            await pool.submit(turns.take, "flood", key="flood")
        await pool.submit(trickle, key="trickle")
        gate.open()
        await pool.drain()
    assert turns.order[:40].count("trickle") >= 19


# -- T23 ---------------------------------------------------------------------------------


@virtual
async def test_t23_shares_follow_the_weights() -> None:
    async with TaskPool(queue=fair_share("tenant_id", weights={"a": 3.0, "b": 1.0})) as pool:
        submits = [(name, {"tenant_id": name}) for _ in range(60) for name in "ab"]
        order = await order_behind_a_gate(pool, *submits)
    for served in range(8, 80, 4):
        assert order[:served].count("a") == pytest.approx(served * 3 / 4, abs=1.5)


@virtual
async def test_t23_weights_may_be_a_function() -> None:
    async with TaskPool(queue=fair_share(weights=lambda key: 4 if key == "a" else 1)) as pool:
        order = await order_behind_a_gate(pool, *[(name, {"key": name}) for _ in range(50) for name in "ab"])
    assert order[:40].count("a") == pytest.approx(32, abs=2)


@pytest.mark.parametrize("how", ["option", "function"])
@virtual
async def test_t23_a_share_is_measured_by_cost(how: str) -> None:
    strategy = fair_share(cost=lambda name: 3.0 if name == "a" else 1.0) if how == "function" else fair_share()
    async with TaskPool(queue=strategy) as pool:
        gate, turns = Gate(), Turns()
        await pool.submit(lambda *_: gate.wait(), "gate")
        for _ in range(60):
            for name, cost in (("a", 3.0), ("b", 1.0)):
                await pool.submit(turns.take, name, key=name, **({"cost": cost} if how == "option" else {}))
        gate.open()
        await pool.drain()
    assert turns.order[:40].count("a") == pytest.approx(10, abs=2)


@virtual
async def test_t23_it_is_work_conserving() -> None:
    async with TaskPool(max_concurrent=4, queue=fair_share(weights={"a": 1, "b": 100})) as pool:
        handles = [await pool.submit(slow, 1, key="a") for _ in range(8)]
        assert [handle.status for handle in handles[:4]] == ["running"] * 4
        await pool.drain()
        assert asyncio.get_running_loop().time() == 2


@virtual
async def test_t23_running_work_counts() -> None:
    """Who has something expensive running already, has had its share."""
    async with TaskPool(max_concurrent=2, queue=fair_share()) as pool:
        gate, long, turns = Gate(), Gate(), Turns()
        await pool.submit(long.wait, key="a", cost=10)
        await pool.submit(gate.wait)
        for _ in range(20):
            await pool.submit(turns.take, "a", key="a")
            await pool.submit(turns.take, "b", key="b")
        gate.open()
        await settle()
        assert turns.order.index("a") == pytest.approx(10, abs=2)
        long.open()


@virtual
async def test_t23_one_who_was_idle_saves_nothing_up() -> None:
    async with TaskPool(queue=fair_share()) as pool:
        for _ in range(50):
            await (await pool.submit(quick, key="a"))
        order = await order_behind_a_gate(pool, *[(name, {"key": name}) for _ in range(20) for name in "ab"])
    assert order[:20].count("b") <= 12


@virtual
async def test_t23_a_weight_that_is_none_is_the_submitters_error() -> None:
    async with TaskPool(queue=fair_share(weights=lambda key: 0)) as pool:
        with pytest.raises(InvalidArgument, match="weight"):
            await pool.submit(quick, key="a")
        assert pool.snapshot().total == 0


# -- T24 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", EVERY_STRATEGY)
@virtual
async def test_t24_a_key_has_a_cap_of_its_own(queue: str) -> None:
    async with TaskPool(max_concurrent=4, queue=queue, max_concurrent_per_key=1) as pool:
        gate = Gate()
        handles = {name: await pool.submit(gate.wait, key=name[0]) for name in ("a1", "a2", "a3", "b1", "b2")}
        running = [name for name, handle in handles.items() if handle.status == "running"]
        assert running == ["a1", "b1"]
        assert counts(pool) == {"active": 2, "queued": 3}
        plain = await pool.submit(gate.wait)  # tasks without a key share nothing
        more = await pool.submit(gate.wait)
        assert (plain.status, more.status) == ("running", "running")
        gate.open()
        await pool.drain()
        assert {handle.status for handle in handles.values()} == {"completed"}


@virtual
async def test_t24_a_mapping_caps_some_keys() -> None:
    async with TaskPool(max_concurrent=6, max_concurrent_per_key={"a": 2}) as pool:
        gate = Gate()
        handles = [await pool.submit(gate.wait, key=key) for key in "aaabbb"]
        assert [handle.status for handle in handles] == ["running", "running", "queued", *["running"] * 3]
        gate.open()


@virtual
async def test_t24_a_finished_task_makes_room_for_the_next_of_its_key() -> None:
    async with TaskPool(max_concurrent=4, queue="fifo", max_concurrent_per_key=1) as pool:
        for key in "aaabbc":
            await pool.submit(slow, 1, key=key)
        await pool.drain()
        assert asyncio.get_running_loop().time() == 3


@pytest.mark.parametrize("queue", EVERY_STRATEGY)
@virtual
async def test_t24_caps_change_live(queue: str) -> None:
    async with TaskPool(max_concurrent=5, queue=queue, max_concurrent_per_key=1) as pool:
        gates = [Gate() for _ in range(4)]
        handles = [await pool.submit(gate.wait, key="a") for gate in gates]

        def running() -> int:
            return sum(handle.status == "running" for handle in handles)

        assert running() == 1
        pool.limit_keys(3)
        assert running() == 3
        pool.limit_keys({"a": 1})
        assert running() == 3  # what runs goes on
        gates[[handle.status for handle in handles].index("running")].open()
        await settle()
        assert running() == 2
        pool.limit_keys(None)
        assert running() == 3
        for gate in gates:
            gate.open()


@pytest.mark.parametrize("queue", EVERY_STRATEGY)
@virtual
async def test_t24_caps_that_come_and_go_keep_the_order(queue: str) -> None:
    async def order(change: bool) -> list[Any]:
        async with TaskPool(queue=queue) as pool:
            gate, turns = Gate(), Turns()
            await pool.submit(gate.wait)
            for number in range(12):
                await pool.submit(turns.take, number, key="abc"[number % 3], priority=number % 2)
                if change and number == 7:
                    pool.limit_keys(1)
                    pool.limit_keys({"a": 2})
                    pool.limit_keys(None)
            gate.open()
            await pool.drain()
        return turns.order

    assert await order(change=True) == await order(change=False)


@virtual
async def test_t24_the_cap_holds_for_the_key_the_strategy_names() -> None:
    async with TaskPool(max_concurrent=3, queue=fair_round_robin("tenant_id"), max_concurrent_per_key=1) as pool:
        gate = Gate()
        handles = [await pool.submit(gate.wait, tenant_id="t", key=key) for key in "xyz"]
        assert [handle.status for handle in handles] == ["running", "queued", "queued"]
        gate.open()


@pytest.mark.parametrize("bad", [0, -1, 1.5, "one", True, {"a": 0}, {"a": "x"}])
def test_t24_caps_are_checked(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_concurrent_per_key"):
        TaskPool("capped", max_concurrent_per_key=bad)
    assert pool_get("capped") is None

    @virtual
    async def live() -> None:
        async with TaskPool() as pool:
            with pytest.raises(InvalidArgument, match="max_concurrent_per_key"):
                pool.limit_keys(bad)

    live()


@virtual
async def test_t24_a_task_between_attempts_gives_its_key_back() -> None:
    async with TaskPool(max_concurrent=2, queue="fifo", max_concurrent_per_key=1) as pool:
        calls: list[str] = []

        async def flaky(name: str) -> None:
            calls.append(name)
            if calls.count(name) == 1:
                raise LookupError
            await asyncio.sleep(1)

        for name in ("a1", "a2"):
            await pool.submit(flaky, name, key="a", retries=1)
        await pool.drain()
        assert sorted(calls) == ["a1", "a1", "a2", "a2"]
        assert counts(pool) == {"completed": 2}
