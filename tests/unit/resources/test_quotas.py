"""H10: quotas limit ahead of refusals; calls take another resource or wait; no window is ever exceeded."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate
from headgate import (
    CooldownResource,
    InvalidArgument,
    InvalidType,
    PoolExhausted,
    Quota,
    Resource,
    ResourcePool,
    TaskPool,
)
from headgate.core.clock import clock
from headgate.testing import VirtualLoop, settle, virtual
from tests.conftest import SCALE
from tests.support.resources.support import Gate, at_once, ident


def limited(*names: str, quota: Any = None, group: str | None = None, **options: Any) -> ResourcePool[str]:
    """A pool of resources of these ids, each with this quota."""
    quota = at_once(requests=2, per=60.0) if quota is None else quota
    return ResourcePool([Resource(name, name, quota=quota, quota_group=group) for name in names], **options)


class Upstream:
    """A service that keeps sliding windows itself, and notes each call that its limits would have refused."""

    def __init__(self, requests: int | None, tokens: int | None, per: float) -> None:
        self.requests, self.tokens, self.per = requests, tokens, per
        self.exceeded: list[tuple[str, float]] = []
        self.answered = 0
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def arrive(self, key: str, tokens: int) -> None:
        """Count a request that arrives now."""
        seen = self._seen.setdefault(key, deque())
        while seen and seen[0][0] <= clock.now() - self.per + 1e-9:  # a sum of floats may be less than its parts
            seen.popleft()
        seen.append((clock.now(), tokens))
        over = self.requests is not None and len(seen) > self.requests
        if over or (self.tokens is not None and sum(one for _, one in seen) > self.tokens):
            self.exceeded.append((key, clock.now()))
        self.answered += 1


async def took(pool: ResourcePool[str], **options: Any) -> str:
    return await pool.run(ident, **options)


# -- requests ---------------------------------------------------------------------------------------------------------


@virtual
async def test_h10_a_spent_quota_takes_the_next_resource() -> None:
    pool = limited("a", "b")
    assert [await took(pool) for _ in range(4)] == ["a", "a", "b", "b"]
    with pytest.raises(PoolExhausted, match="0 disabled, 2 with a spent quota, 0 in full use") as caught:
        await took(pool)
    assert caught.value.retry_after == pytest.approx(60.0, abs=1.3)


@virtual
async def test_h10_a_call_with_a_wait_mode_waits_for_the_window() -> None:
    for mode in ("wait_for_cooldown", "wait_for_capacity"):
        pool, began = limited("a"), clock.now()
        for _ in range(3):
            assert await took(pool, **{mode: True}) == "a"
        assert clock.now() - began == pytest.approx(60.0, abs=1.3)


@virtual
async def test_h10_calls_wait_in_the_order_in_which_they_came() -> None:
    pool = limited("a")
    done: list[int] = []

    async def call(number: int) -> None:
        await took(pool, wait_for_capacity=True)
        done.append(number)

    await asyncio.gather(*(call(number) for number in range(8)))
    assert done == sorted(done)
    assert clock.now() == pytest.approx(210.0, abs=4)  # two at once, two in each minute after that, spaced


@virtual
async def test_h10_a_deadline_that_comes_before_the_window_ends_the_wait_at_once() -> None:
    pool = limited("a")
    for _ in range(2):
        await took(pool)
    with pytest.raises(PoolExhausted, match="deadline") as caught:
        await took(pool, wait_for_cooldown=True, within=10)
    assert clock.now() == 0
    assert caught.value.retry_after == pytest.approx(60.0, abs=1.3)


@virtual
async def test_l09_a_delay_is_added_to_every_count() -> None:
    """Promises count starts, however long a call takes; a call may reach the service up to `delay` after its start."""
    pool = limited("a", quota=at_once(requests=1, per=10.0, delay=2.0))

    async def operation(seconds: float) -> float:
        async def slow(_: object) -> float:
            began = clock.now()
            await asyncio.sleep(seconds)
            return began

        return await pool.run(slow, wait_for_capacity=True)

    assert await operation(1.0) == 0.0
    assert await operation(5.0) == pytest.approx(12.0, abs=0.13)
    assert await operation(0.0) == pytest.approx(24.0, abs=0.25)


@virtual
async def test_h10_a_long_call_does_not_keep_its_place_for_ever() -> None:
    pool, gate = limited("a", quota=at_once(requests=1, per=10.0, delay=1.0)), Gate()
    stream = asyncio.create_task(pool.run(gate))
    await settle()
    assert await took(pool, wait_for_capacity=True) == "a"
    assert clock.now() == pytest.approx(11.0, abs=0.11)
    gate.finish(0)
    await stream


@virtual
async def test_h10_resources_of_a_group_share_one_quota_in_all_pools() -> None:
    quota = at_once(requests=3, per=60.0)
    one = limited("a", "b", quota=quota, group="org-1")
    other = limited("c", quota=quota, group="org-1")
    alone = limited("d", quota=quota, group="org-2")
    assert [await took(one, tags=[]), await took(other), await took(one, exclude=["a"])] == ["a", "c", "b"]
    for pool in (one, other):
        with pytest.raises(PoolExhausted, match="spent quota"):
            await took(pool)
    assert await took(alone) == "d"
    waiting = asyncio.create_task(took(other, wait_for_capacity=True))
    assert await waiting == "c"
    assert clock.now() == pytest.approx(60.0, abs=1.3)


@virtual
async def test_h10_a_pool_gives_its_quota_to_resources_that_have_none() -> None:
    own = at_once(requests=5)
    pool = ResourcePool([Resource("a", "a"), Resource("b", "b", quota=own)], quota=at_once(requests=1))
    await pool.add("c", "c")
    await pool.add("d", "d", quota=None)
    snapshot = pool.snapshot()
    assert [snapshot[name].get("quota", {}).get("left") for name in "abcd"] == [
        {"requests": 1.0},
        {"requests": 5.0},
        {"requests": 1.0},
        None,
    ]


@virtual
async def test_h10_a_quota_goes_with_a_cooldown() -> None:
    """A key that cools and has no quota left opens when both are over."""
    pool = limited("a", quota=at_once(requests=1, per=10.0))

    async def refused(_: object) -> None:
        raise CooldownResource(30.0)

    with pytest.raises(PoolExhausted):
        await pool.run(refused)
    assert await took(pool, wait_for_capacity=True) == "a"
    assert clock.now() == 30.0
    assert await took(pool, wait_for_capacity=True) == "a"
    assert clock.now() == pytest.approx(40.0, abs=0.2)


@virtual
async def test_h10_reconcile_changes_a_quota_and_keeps_an_equal_one() -> None:
    pool = limited("a", quota=at_once(requests=1))
    await took(pool)
    await pool.reconcile([Resource("a", "a", quota=at_once(requests=1))])
    with pytest.raises(PoolExhausted):
        await took(pool)
    await pool.reconcile([Resource("a", "a", quota=at_once(requests=2))])
    assert await took(pool) == "a"


# -- tokens -----------------------------------------------------------------------------------------------------------


@virtual
async def test_h10_run_reserves_a_cost_and_spent_settles_it() -> None:
    pool = limited("a", quota=at_once(tokens=1000))

    async def cheaper(key: Resource[str]) -> None:
        key.spent(60)
        key.spent(40)

    await pool.run(cheaper, cost=900)
    assert pool.snapshot()["a"]["quota"]["left"] == {"tokens": 900.0}
    await took(pool, cost=900)
    with pytest.raises(PoolExhausted, match="spent quota"):
        await took(pool)


@virtual
async def test_h10_what_runs_counts_as_its_cost_until_it_is_settled() -> None:
    pool, gate = limited("a", quota=at_once(tokens=1000)), Gate()
    first = asyncio.create_task(pool.run(gate, cost=800))
    await settle()
    with pytest.raises(PoolExhausted):
        await took(pool, cost=300)
    assert await took(pool, cost=200) == "a"
    gate.finish(0)
    await first


@virtual
async def test_h10_a_call_takes_the_resource_that_has_enough() -> None:
    pool = limited("a", "b", quota=at_once(tokens=1000))
    assert await took(pool, cost=700) == "a"
    assert await took(pool, cost=700) == "b"
    assert await took(pool, cost=200) == "a"
    assert await took(pool, cost=300) == "b"
    assert await took(pool, cost=100) == "a"


@virtual
async def test_h10_spent_belongs_to_the_call_that_says_it() -> None:
    """Two calls of one key run at the same time, one in a task of its own."""
    pool = limited("a", quota=at_once(tokens=1000))
    both = asyncio.Event()

    async def call(key: Resource[str], tokens: int) -> None:
        await both.wait()
        await asyncio.create_task(say(key, tokens))

    async def say(key: Resource[str], tokens: int) -> None:
        key.spent(tokens)

    calls = [asyncio.create_task(pool.run(lambda key, n=n: call(key, n), cost=500)) for n in (10, 20)]
    await settle()
    assert pool.snapshot()["a"]["quota"]["left"] == {"tokens": 0.0}
    both.set()
    await asyncio.gather(*calls)
    assert pool.snapshot()["a"]["quota"]["left"] == {"tokens": 970.0}


@virtual
async def test_h10_spent_in_leases_streams_and_outside_of_calls() -> None:
    pool = limited("a", quota=at_once(tokens=1000))

    async def words(key: Resource[str]) -> Any:
        for _ in range(3):
            yield "word"
            key.spent(10)

    async with pool.lease(cost=500) as key:
        key.spent(100)
    assert [word async for word in pool.stream(words, cost=500)] == ["word"] * 3
    key.spent(70)
    assert pool.snapshot()["a"]["quota"]["left"] == {"tokens": 800.0}
    two = [pool.stream(words, cost=300), pool.stream(words, cost=300)]
    for items in two:
        assert await anext(items) == "word"
    for items in (*two, *two):
        await anext(items)
    for items in two:
        await items.aclose()
    assert pool.snapshot()["a"]["quota"]["left"] == {"tokens": 760.0}


def test_h10_spent_in_threads() -> None:
    pool = limited("a", quota=at_once(tokens=1000))
    pool.run_sync(lambda key: key.spent(100), cost=900)
    pool.run_sync(lambda key: key.spent(100), cost=900, isolate=True)
    assert pool.snapshot()["a"]["quota"]["left"] == {"tokens": 800.0}


@virtual
async def test_h10_a_large_call_is_not_kept_out_by_small_ones() -> None:
    """The small calls go on coming; the large one is served by the account that is kept for it."""
    pool = limited("a", quota=at_once(tokens=100, per=10.0))
    served: list[str] = []

    async def call(name: str, cost: float) -> None:
        await took(pool, cost=cost, wait_for_capacity=True)
        served.append(name)

    async def stream_of_small_calls() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(60):
                group.create_task(call(f"small {number}", 10))
                await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        group.create_task(stream_of_small_calls())
        await asyncio.sleep(3.25)
        group.create_task(call("large", 90))
    assert served.index("large") < 20


@virtual
async def test_h10_the_account_of_a_call_that_gave_up_serves_others_at_once() -> None:
    pool = limited("a", quota=at_once(tokens=100))
    await took(pool, cost=50)
    large = asyncio.create_task(took(pool, cost=100, wait_for_capacity=True))
    await settle()
    small = asyncio.create_task(took(pool, cost=50, wait_for_capacity=True))
    await settle()
    assert not small.done()  # the large one came first
    large.cancel()
    assert await small == "a"
    assert clock.now() == 0


@virtual
async def test_h10_a_large_call_without_a_wait_mode_is_held_back_by_the_limit_alone() -> None:
    pool = limited("a", quota=Quota(tokens=1000))  # of which 100 start at once, if calls wait
    await took(pool, cost=50)
    assert await took(pool, cost=600) == "a"
    with pytest.raises(PoolExhausted):
        await took(pool, cost=351)
    assert await took(pool, cost=350) == "a"


@virtual
async def test_h10_a_cost_that_no_window_allows_fails_at_once_and_says_why() -> None:
    pool = limited("a", "b", quota=at_once(tokens=100))
    for options in ({}, {"wait_for_capacity": True}, {"wait_for_cooldown": True}):
        with pytest.raises(PoolExhausted, match=r"quota of none of them allows a call with cost=101.*Quota\(tokens"):
            await took(pool, cost=101, **options)


# -- with a TaskPool --------------------------------------------------------------------------------------------------


@virtual
async def test_h10_tasks_wait_in_fair_order_and_hold_no_slot() -> None:
    pool = limited("a", quota=at_once(requests=4, per=10.0))
    order: list[str] = []

    async def ask(key: Resource[str], tenant: str) -> None:
        order.append(tenant)

    async with TaskPool("asks", max_concurrent=4, queue="fair_round_robin", resources=pool) as tasks:
        handles = [await tasks.submit(ask, "big", key="big") for _ in range(12)]
        await settle()
        assert tasks.snapshot().active == 0
        assert tasks.snapshot().waiting_for == {"cause": "quota", "seconds": pytest.approx(10.0, abs=0.2)}
        handles += [await tasks.submit(ask, "small", key="small") for _ in range(4)]
        for handle in handles:
            await handle
    assert order[4:12].count("small") == 4
    assert clock.now() == pytest.approx(37.5, abs=1)  # four at once, then one each 2.5 s


@virtual
async def test_h10_the_cost_of_a_task_is_reserved_and_settled() -> None:
    pool = limited("a", quota=at_once(tokens=1000, per=10.0))

    async def ask(key: Resource[str], tokens: int) -> float:
        key.spent(tokens)
        return clock.now()

    async with TaskPool("asks", max_concurrent=10, resources=pool) as tasks:
        first = [await tasks.submit(ask, 10, cost=500) for _ in range(4)]
        assert [await one for one in first] == [0.0] * 4
        assert pool.snapshot()["a"]["quota"]["left"] == {"tokens": 960.0}
        with pytest.raises(PoolExhausted, match="allows a task with cost=1001"):
            await (await tasks.submit(ask, 10, cost=1001))
        late = [await tasks.submit(ask, 900, cost=900) for _ in range(2)]
        assert [await one for one in late] == [0.0, pytest.approx(10.0, abs=0.2)]


@virtual
async def test_h10_tasks_of_different_costs_all_get_through() -> None:
    upstream = Upstream(None, 100, 10.0)
    pool = limited("a", "b", quota=at_once(tokens=100, per=10.0))

    async def ask(key: Resource[str], tokens: int) -> None:
        upstream.arrive(key.resource_id, tokens)
        await asyncio.sleep(0.1)

    async with TaskPool("asks", max_concurrent=8, resources=pool) as tasks:
        costs = [7, 93, 40, 61, 5, 100, 12, 50, 50, 99, 1, 33] * 3
        for handle in [await tasks.submit(ask, cost, cost=cost) for cost in costs]:
            await handle
    assert upstream.answered == len(costs)
    assert upstream.exceeded == []


# -- windows are never exceeded ---------------------------------------------------------------------------------------


@given(
    requests=st.none() | st.integers(1, 6),
    tokens=st.none() | st.integers(50, 200),
    keys=st.integers(1, 3),
    calls=st.lists(
        st.tuples(st.floats(0, 30), st.integers(0, 50), st.floats(0, 0.5), st.floats(0, 8)), min_size=1, max_size=40
    ),
)
@settings(max_examples=max(40, int(400 * SCALE)))
def test_h10_no_window_is_exceeded_whatever_comes(
    requests: int | None, tokens: int | None, keys: int, calls: list[tuple[float, int, float, float]]
) -> None:
    """Each call comes at some time, reaches the service within half a second, costs something, and takes its time."""
    if requests is None and tokens is None:
        return

    @virtual
    async def scenario() -> None:
        upstream = Upstream(requests, tokens, 10.0)
        quota = at_once(requests=requests, tokens=tokens, per=10.0, delay=0.5)
        pool = limited(*(f"key-{number}" for number in range(keys)), quota=quota)

        async def call(at: float, cost: int, way: float, seconds: float) -> None:
            async def operation(key: Resource[str]) -> None:
                await asyncio.sleep(way)
                upstream.arrive(key.resource_id, cost)
                await asyncio.sleep(seconds)

            await asyncio.sleep(at)
            await pool.run(operation, cost=cost, wait_for_capacity=True)

        await asyncio.gather(*(call(*one) for one in calls))
        assert upstream.answered == len(calls)
        assert upstream.exceeded == []
        assert all(one["in_flight"] == 0 for one in pool.snapshot().values())

    scenario()


@virtual
async def test_h10_a_quota_is_used_to_the_full() -> None:
    """Short calls and a backlog: nearly as many as the quota allows."""
    upstream = Upstream(60, None, 60.0)
    pool = limited("a", quota=at_once(requests=60, per=60.0))

    async def operation(key: Resource[str]) -> None:
        upstream.arrive(key.resource_id, 0)
        await asyncio.sleep(0.5)

    await asyncio.gather(*(pool.run(operation, wait_for_capacity=True) for _ in range(600)))
    assert upstream.exceeded == []
    assert 600 / (clock.now() / 60.0) >= 0.97 * 60


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Quota(), InvalidArgument, "limits nothing"),
        (lambda: Quota(requests=0), InvalidArgument, "requests of a Quota must be a whole number >= 1"),
        (lambda: Quota(requests=True), InvalidArgument, "requests of a Quota"),
        (lambda: Quota(tokens=1.5), InvalidArgument, "tokens of a Quota"),
        (lambda: Quota(requests=1, per=0), InvalidArgument, "per of a Quota"),
        (lambda: Quota(requests=1, per=math.nan), InvalidArgument, "per of a Quota"),
        (lambda: Quota(requests=1, delay=-1), InvalidArgument, "delay of a Quota"),
        (lambda: Resource("a", "a", quota="lern"), InvalidArgument, "got 'lern'"),
        (lambda: Resource("a", "a", quota=60), InvalidType, "quota must be a Quota"),
        (lambda: ResourcePool(["a"], quota=60), InvalidType, "quota must be a Quota"),
        (lambda: Resource("a", "a", quota="learn", quota_group=""), InvalidArgument, "quota_group must be"),
        (lambda: Resource("a", "a", quota_group="nobody"), InvalidArgument, "has no quota yet"),
        (lambda: Resource("a", "a").spent(-1), InvalidArgument, "tokens of spent"),
        (lambda: Resource("a", "a").spent("many"), InvalidArgument, "tokens of spent"),
        (lambda: limited("a").run_sync(lambda key: None, cost=-1), InvalidArgument, "cost must be"),
        (lambda: limited("a").run_sync(lambda key: None, cost=math.inf), InvalidArgument, "cost must be"),
    ],
)
def test_h10_bad_input_is_named(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_h10_a_group_has_one_quota() -> None:
    first = Resource("a", "a", quota=at_once(requests=1), quota_group="conflicting")
    joined = Resource("b", "b", quota_group="conflicting")
    assert joined.quota == first.quota
    with pytest.raises(InvalidArgument, match=r"has the quota Quota\(requests=1.*cannot have"):
        Resource("c", "c", quota=at_once(requests=2), quota_group="conflicting")


def test_h10_a_quota_does_not_travel_with_a_copy() -> None:
    import pickle

    class Own(Resource[str]):
        pass

    globals()["Own"] = Own
    Own.__qualname__ = "Own"
    try:
        for kind in (Resource, Own):
            copy = pickle.loads(pickle.dumps(kind("a", "secret", quota=at_once(requests=1), tags=["x"])))
            assert (copy.resource_id, copy.quota, copy.quota_group) == ("a", None, None)
            copy.spent(10)  # goes nowhere: no pool has it
            copy.learn({"x-ratelimit-remaining-requests": "0"})
    finally:
        del globals()["Own"]


def test_h10_quota_is_a_name_of_headgate() -> None:
    assert headgate.Quota is Quota
    assert repr(Quota(requests=60)) == (
        "Quota(requests=60, per=60.0, tokens=None, input_tokens=None, output_tokens=None, "
        "window='sliding', burst=None, delay=None)"
    )


@virtual
async def test_h10_what_a_call_gave_back_that_was_cancelled_serves_another_key_of_the_group() -> None:
    """The first waiter is granted key b, and is cancelled before it runs. The second can use key a only."""
    quota = at_once(requests=1, per=10.0)
    pool = limited("a", "b", quota=quota, group="given back")
    await took(pool)
    first = asyncio.create_task(took(pool, exclude=["a"], wait_for_capacity=True))
    await settle()
    second = asyncio.create_task(took(pool, exclude=["b"], wait_for_capacity=True))
    await settle()
    asyncio.get_running_loop().call_at(clock.now() + 10.2, first.cancel)
    await asyncio.wait([first, second])
    assert second.result() == "a"
    assert clock.now() <= 22


# -- a busy event loop ------------------------------------------------------------------------------------------------


@virtual
async def test_l09_calls_wait_instead_of_bursting_when_the_event_loop_lagged() -> None:
    """The first calls hold the loop before they send anything, as making a TLS context does."""
    pool, loop = limited("a", quota=Quota(requests=2, per=1.0)), asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    arrivals: list[float] = []
    held = [0.7, 0.7, 0.4]

    async def operation(_: object) -> None:
        await asyncio.sleep(0)
        if held:
            loop.sleep(held.pop())
        arrivals.append(clock.now())

    await asyncio.gather(*(pool.run(operation, wait_for_capacity=True) for _ in range(10)))
    assert all(later - earlier >= 0.99 for earlier, later in zip(arrivals, arrivals[2:], strict=False))
