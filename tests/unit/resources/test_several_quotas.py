"""L02: several quotas of one resource, and input and output tokens, in pools, tasks and processes."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import headgate
from headgate import (
    Cost,
    CostTooLarge,
    InvalidArgument,
    InvalidType,
    PoolExhausted,
    Quota,
    Resource,
    ResourcePool,
    TaskPool,
    fair_share,
)
from headgate.gate.windows import Bucket, FixedWindow, SlidingWindow
from headgate.resources.quota_exchange import SHARED_QUOTA, Report, Want
from headgate.sharing.memory import SharedMemory
from headgate.sharing.protocol import Message, exchange
from headgate.sharing.states import Seen
from headgate.testing import settle, virtual
from tests.support.resources.support import Gate, at_once, ident
from tests.unit.resources.test_learned_quotas import Response, learning
from tests.unit.resources.test_quotas import Upstream, limited, took

SPLIT = at_once(per=60.0, input_tokens=1000, output_tokens=200)


def time() -> float:
    return asyncio.get_running_loop().time()


def left(pool: ResourcePool[str], name: str = "a") -> dict[str, float | None]:
    return pool.snapshot()[name]["quota"]["left"]


# -- several windows --------------------------------------------------------------------------------------------------


@virtual
async def test_l02_all_windows_hold_at_once() -> None:
    """The upstream counts both, and neither is exceeded; the backlog uses the scarcer one to the full."""
    pool = limited("a", quota=[Quota(5, 1.0), Quota(120, 60.0)])
    upstreams = [Upstream(5, None, 1.0), Upstream(120, None, 60.0)]

    async def operation(key: Resource[str]) -> None:
        for upstream in upstreams:
            upstream.arrive(key.resource_id, 0)

    await asyncio.gather(*(pool.run(operation, wait_for_capacity=True) for _ in range(600)))
    assert [upstream.exceeded for upstream in upstreams] == [[], []]
    assert 600 / time() >= 0.97 * 2


@virtual
async def test_l02_the_window_that_is_spent_says_when_it_opens() -> None:
    pool = limited("a", quota=[at_once(2, 10.0), at_once(3, 100.0)])
    for _ in range(2):
        await took(pool)
    with pytest.raises(PoolExhausted) as caught:
        await took(pool)
    assert caught.value.retry_after == pytest.approx(10.0, abs=0.3)
    assert await took(pool, wait_for_capacity=True) == "a"
    with pytest.raises(PoolExhausted) as caught:
        await took(pool)
    assert time() == pytest.approx(10.0, abs=0.3)
    assert caught.value.retry_after == pytest.approx(90.0, abs=2.0)  # the longer window is spent


@virtual
async def test_l02_a_pool_and_a_group_may_have_several_quotas() -> None:
    quotas = [at_once(3, 60.0), at_once(per=3600.0, tokens=1000)]
    pool = ResourcePool({"a": "a", "b": "b"}, quota=tuple(quotas))
    assert pool.snapshot().keys() == {"a", "b"}
    assert left(pool) == {"requests": 3.0, "tokens": 1000.0}
    await took(pool, cost=400)
    assert left(pool) == {"requests": 2.0, "tokens": 600.0}
    assert left(pool, "b") == {"requests": 3.0, "tokens": 1000.0}
    one, other = (limited(name, quota=quotas, group="l02") for name in ("a", "b"))
    await took(one, cost=400)
    assert left(other, "b") == {"requests": 2.0, "tokens": 600.0}
    assert Resource("c", "c", quota_group="l02").quota == tuple(quotas)
    with pytest.raises(InvalidArgument, match=r"has the quota \(Quota\(.*cannot have Quota\(requests=3"):
        Resource("d", "d", quota=quotas[0], quota_group="l02")


def test_l02_a_resource_tells_its_quota_as_it_was_given() -> None:
    assert Resource("a", "a", quota=Quota(5)).quota == Quota(5)
    assert Resource("a", "a", quota=[Quota(5)]).quota == Quota(5)
    assert Resource("a", "a", quota=[Quota(5), Quota(50, 90.0)]).quota == (Quota(5), Quota(50, 90.0))


@virtual
async def test_l02_snapshots_and_stats_show_each_window() -> None:
    pool = limited("a", quota=[at_once(4, 1.0), Quota(60, 60.0, 500, window="bucket")])
    await took(pool, cost=200)
    soon = pytest.approx(1.0, abs=0.03)
    assert pool.snapshot()["a"]["quota"] == {
        "left": {"requests/second": 3.0, "requests/minute": 59.0, "tokens": 300.0},
        "windows": {
            "requests/second": {"left": 3.0, "limit": 4, "seconds_until_full": soon},
            "requests/minute": {"left": 59.0, "limit": 60, "seconds_until_full": soon},
            "tokens": {"left": 300.0, "limit": 500, "seconds_until_full": pytest.approx(24.0)},
        },
        "seconds_until_open": 0.0,
    }
    assert pool.stats().resources["a"].quota == pool.snapshot()["a"]["quota"]
    await asyncio.sleep(30)
    assert {one["seconds_until_full"] for one in pool.snapshot()["a"]["quota"]["windows"].values()} == {0.0}
    assert limited("b", quota=[Quota(5, window="fixed")]).stats().resources["b"].quota == {
        "left": {"requests": 5.0},
        "windows": {"requests": {"left": 5.0, "limit": 5, "seconds_until_full": 0.0}},
        "seconds_until_open": 0.0,
    }
    assert ResourcePool(["c"]).stats().resources["resource-0"].quota is None


# -- input and output -------------------------------------------------------------------------------------------------


@virtual
async def test_l02_input_and_output_are_reserved_and_settled_separately() -> None:
    pool = limited("a", quota=[SPLIT, at_once(per=60.0, tokens=1100)])
    gate = Gate()
    running = asyncio.create_task(pool.run(gate, cost=Cost(input=600, output=100)))
    await settle()
    assert left(pool) == {"input_tokens": 400.0, "output_tokens": 100.0, "tokens": 400.0}
    with pytest.raises(PoolExhausted):
        await took(pool, cost=Cost(input=10, output=101))
    with pytest.raises(PoolExhausted):
        await took(pool, cost=Cost(input=401, output=1))
    gate.finish(0)
    await running

    async def uses(key: Resource[str]) -> None:
        key.spent(input=50, output=20)
        key.spent(output=10)

    await pool.run(uses, cost=Cost(input=300, output=100))
    assert left(pool) == {"input_tokens": 350.0, "output_tokens": 70.0, "tokens": 320.0}


@virtual
async def test_l02_a_total_alone_counts_in_full_as_both() -> None:
    pool = limited("a", quota=[SPLIT, at_once(per=60.0, tokens=1000)])
    await took(pool, cost=150)
    assert left(pool) == {"input_tokens": 850.0, "output_tokens": 50.0, "tokens": 850.0}

    async def uses(key: Resource[str]) -> None:
        key.spent(30)

    await pool.run(uses, cost=50)
    assert left(pool) == {"input_tokens": 820.0, "output_tokens": 20.0, "tokens": 820.0}


@pytest.mark.parametrize(
    ("says", "used"),
    [
        (lambda key: None, {"input_tokens": 100, "output_tokens": 50, "tokens": 150}),
        (lambda key: key.spent(input=10), {"input_tokens": 10, "output_tokens": 50, "tokens": 150}),
        (lambda key: key.spent(output=60), {"input_tokens": 100, "output_tokens": 60, "tokens": 150}),
        (lambda key: key.spent(input=180), {"input_tokens": 180, "output_tokens": 50, "tokens": 180}),
        (lambda key: key.spent(input=10, output=0), {"input_tokens": 10, "output_tokens": 0, "tokens": 10}),
        (lambda key: key.spent(40, input=10), {"input_tokens": 10, "output_tokens": 30, "tokens": 40}),
        (lambda key: key.spent(40, output=5), {"input_tokens": 35, "output_tokens": 5, "tokens": 40}),
        (lambda key: key.spent(40, input=10, output=5), {"input_tokens": 10, "output_tokens": 5, "tokens": 40}),
        (lambda key: (key.spent(5), key.spent(input=1)), {"input_tokens": 6, "output_tokens": 5, "tokens": 6}),
        (lambda key: key.spent(0), {"input_tokens": 0, "output_tokens": 0, "tokens": 0}),
    ],
)
def test_l02_what_is_not_reported_stays_as_it_was_reserved(
    says: Callable[[Resource[str]], object], used: dict[str, int]
) -> None:
    pool = limited("a", quota=[SPLIT, at_once(per=60.0, tokens=1000)])
    pool.run_sync(says, cost=Cost(input=100, output=50))
    limits = {"input_tokens": 1000, "output_tokens": 200, "tokens": 1000}
    assert left(pool) == {name: limit - used[name] for name, limit in limits.items()}


@virtual
async def test_l02_tokens_outside_of_calls_count_too() -> None:
    key = Resource("a", "a", quota=SPLIT)
    pool = ResourcePool([key])
    key.spent(input=100, output=20)
    key.spent(input=1)
    assert left(pool) == {"input_tokens": 899.0, "output_tokens": 180.0}


@virtual
async def test_l02_a_call_takes_the_resource_with_enough_of_both() -> None:
    pool = limited("a", "b", quota=SPLIT)
    assert await took(pool, cost=Cost(input=10, output=150)) == "a"
    assert await took(pool, cost=Cost(input=900, output=100)) == "b"
    assert await took(pool, cost=Cost(input=900, output=50)) == "a"
    assert await took(pool, cost=Cost(input=10, output=90)) == "b"


@virtual
async def test_l02_a_large_answer_is_not_kept_out_by_small_ones() -> None:
    pool = limited("a", quota=Quota(per=10.0, input_tokens=1000, output_tokens=1000))
    done: list[str] = []

    async def call(name: str, cost: Cost) -> None:
        await took(pool, cost=cost, wait_for_capacity=True)
        done.append(name)

    small = [asyncio.create_task(call("small", Cost(input=1, output=90))) for _ in range(60)]
    await asyncio.sleep(5)
    large = asyncio.create_task(call("large", Cost(input=1, output=900)))
    small += [asyncio.create_task(call("later", Cost(input=1, output=90))) for _ in range(30)]
    await asyncio.gather(large, *small)
    assert done.index("large") <= 60


# -- tasks ------------------------------------------------------------------------------------------------------------


@virtual
async def test_l02_tasks_reserve_input_and_output() -> None:
    pool = limited("a", quota=at_once(per=10.0, input_tokens=1000, output_tokens=100))

    async def ask(key: Resource[str], written: int) -> float:
        key.spent(input=1, output=written)
        return time()

    async with TaskPool("asks", max_concurrent=10, resources=pool) as tasks:
        assert [await one for one in [await tasks.submit(ask, 1, cost=Cost(10, 60)) for _ in range(3)]] == [0.0] * 3
        assert left(pool) == {"input_tokens": 997.0, "output_tokens": 97.0}
        written = [at async for at in tasks.map(ask, [90, 90], cost=lambda tokens: Cost(input=1, output=tokens))]
        assert written == [0.0, pytest.approx(10.0, abs=0.2)]
        with pytest.raises(CostTooLarge, match=r"allows a task with cost=Cost\(input=1.0, output=101.0\)"):
            await (await tasks.submit(ask, 1, cost=Cost(1, 101)))


@virtual
async def test_l02_a_tenants_share_is_measured_by_all_tokens() -> None:
    order: list[str] = []

    async def work(tenant: str) -> None:
        order.append(tenant)

    async with TaskPool("asks", max_concurrent=1, queue=fair_share("key")) as tasks:
        for _ in range(6):
            await tasks.submit(work, "large", key="large", cost=Cost(input=20, output=10))
            await tasks.submit(work, "small", key="small", cost=Cost(input=4, output=6))
    assert order[:8].count("small") == 6


# -- what no window allows --------------------------------------------------------------------------------------------


@virtual
@pytest.mark.parametrize(
    ("quotas", "cost"),
    [
        ([at_once(5), at_once(per=3600.0, tokens=100)], 101),
        ([at_once(5), at_once(per=3600.0, tokens=100)], Cost(60, 41)),
        ([at_once(tokens=100), at_once(per=1.0, tokens=20)], 21),
        ([SPLIT], 201),
        ([SPLIT], Cost(1001, 1)),
        ([SPLIT], Cost(1, 201)),
        ([Quota(10, tokens=100, window="bucket", burst=1)], 11),
    ],
)
async def test_l02_a_call_that_one_window_never_allows_fails_at_once(quotas: list[Quota], cost: float | Cost) -> None:
    pools = [limited("a", "b", quota=quotas), limited("c", quota=quotas, name="keys", store=SharedMemory().member())]
    for pool in pools:
        for mode in ({}, {"wait_for_capacity": True}, {"wait_for_cooldown": True}):
            with pytest.raises(CostTooLarge, match=r"quota of none of them allows a call with cost=.*Quota\(tokens"):
                await took(pool, cost=cost, **mode)
    assert issubclass(CostTooLarge, InvalidArgument)
    assert issubclass(CostTooLarge, PoolExhausted)


@virtual
async def test_l02_a_large_call_goes_to_the_resource_that_allows_it() -> None:
    keys = [Resource("small", "s", quota=SPLIT), Resource("large", "l", quota=at_once(per=60.0, output_tokens=500))]
    pool = ResourcePool(keys)
    assert [await took(pool, cost=Cost(1, 300), wait_for_capacity=True) for _ in range(2)] == ["large", "large"]
    assert time() == pytest.approx(60.0, abs=2.0)


def test_l02_the_error_of_a_call_that_is_too_large_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(CostTooLarge("too large")))
    assert isinstance(error, CostTooLarge)
    assert error.reason == "no_eligible"


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Resource("a", "a", quota=[]), InvalidArgument, "list of quotas must not be empty"),
        (lambda: ResourcePool(["a"], quota=()), InvalidArgument, "list of quotas must not be empty"),
        (
            lambda: Resource("a", "a", quota=[Quota(5), "learn"]),
            InvalidType,
            "must hold Quota objects only, got 'learn'",
        ),
        (lambda: Resource("a", "a", quota=[Quota(5), None]), InvalidType, "must hold Quota objects only, got NoneType"),
        (lambda: Resource("a", "a", quota=[60]), InvalidType, "must hold Quota objects only, got int"),
        (lambda: Resource("a", "a", quota={"requests": 60}), InvalidType, "quota must be a Quota, a list of them"),
        (
            lambda: Resource("a", "a", quota=[Quota(5), Quota(6)]),
            InvalidArgument,
            "two quotas limit requests per 60 s, to 5",
        ),
        (
            lambda: Resource("a", "a", quota=[Quota(5), Quota(tokens=6, per=1), Quota(1, 1, 3, window="bucket")]),
            InvalidArgument,
            "two quotas limit tokens per 1 s, to 6 and 3",
        ),
        (lambda: Resource("a", "a", quota=[Quota(5)] * 2), InvalidArgument, "two quotas limit requests per 60 s"),
        (lambda: Quota(input_tokens=0), InvalidArgument, "input_tokens of a Quota must be a whole number >= 1"),
        (lambda: Quota(output_tokens=-1), InvalidArgument, "output_tokens of a Quota must be a whole number >= 1"),
        (lambda: Quota(words=5), TypeError, "words"),
        (lambda: Quota(input_tokens=5, burst=6), InvalidArgument, "burst of a Quota must be at most its limit of 5"),
        (lambda: Cost(-1), InvalidArgument, "input of a Cost must be a finite number of tokens >= 0, got -1"),
        (lambda: Cost(output=math.inf), InvalidArgument, "output of a Cost must be a finite number"),
        (lambda: Cost(output="many"), InvalidArgument, "output of a Cost must be a finite number"),
        (lambda: Cost(words=5), TypeError, "words"),
        (lambda: limited("a").run_sync(lambda key: None, cost="many"), InvalidArgument, "cost must be .* or a Cost"),
        (
            lambda: limited("a").run_sync(lambda key: None, cost={"input": 1}),
            InvalidArgument,
            "cost must be .* or a Cost",
        ),
        (lambda: Resource("a", "a").spent(), InvalidArgument, "spent.. needs a number of tokens"),
        (lambda: Resource("a", "a").spent(input=-1), InvalidArgument, "input of spent"),
        (lambda: Resource("a", "a").spent(output=math.nan), InvalidArgument, "output of spent"),
        (lambda: Resource("a", "a").spent(5, input=6), InvalidArgument, "all tokens of the call, got 5 with input=6"),
    ],
)
def test_l02_bad_input_is_named(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@virtual
async def test_l02_a_cost_of_nothing_is_named_by_submit() -> None:
    async with TaskPool("asks", resources=limited("a")) as tasks:
        with pytest.raises(InvalidArgument, match="cost must be > 0, got Cost"):
            await tasks.submit(ident, cost=Cost())


# -- learning ---------------------------------------------------------------------------------------------------------


class Split:
    """A provider that fills buckets of requests, input and output tokens, and says so as Anthropic does."""

    def __init__(self, per: float = 60.0, **limits: int) -> None:
        names = {name: name.replace("_", "-") for name in limits}
        self.buckets = {names[name]: Bucket(limit, per) for name, limit in limits.items()}
        self.served = self.refused = 0

    def call(self, **amounts: float) -> Response:
        now = time()
        need = {name.replace("_", "-"): amount for name, amount in amounts.items()}
        if any(self.buckets[name].left(now) < amount - 1e-6 for name, amount in need.items()):
            self.refused += 1
            return Response(429, {**self._headers(now), "retry-after": "1"})
        for name, amount in need.items():
            self.buckets[name].hold(amount, now)
            self.buckets[name].held = 0.0
        self.served += 1
        return Response(200, self._headers(now))

    def _headers(self, now: float) -> dict[str, str]:
        headers = {"date": datetime.fromtimestamp(now, UTC).isoformat()}
        for name, bucket in self.buckets.items():
            full = bucket.refilled_at(now)
            headers[f"anthropic-ratelimit-{name}-limit"] = str(int(bucket.limit))
            headers[f"anthropic-ratelimit-{name}-remaining"] = str(int(bucket.left(now)))
            headers[f"anthropic-ratelimit-{name}-reset"] = datetime.fromtimestamp(full, UTC).isoformat()
        return headers


@virtual
@pytest.mark.parametrize(("reads", "writes", "rate"), [(100, 10, 10.0), (10, 100, 2.0)])
async def test_l02_input_and_output_are_learned_separately(reads: int, writes: int, rate: float) -> None:
    """Whichever the service runs out of first sets the pace; the other one does not slow calls down."""
    pool, service = learning("a"), Split(requests=6000, input_tokens=60_000, output_tokens=12_000)
    calls = int(rate * 300)

    async def operation(key: Resource[str]) -> Response:
        await asyncio.sleep(0.01)
        answer = service.call(requests=1, input_tokens=reads, output_tokens=writes)
        await asyncio.sleep(0.04)
        return answer

    cost = Cost(input=reads, output=writes)
    await asyncio.gather(
        *(pool.run(operation, wait_for_capacity=True, max_attempts=20, cost=cost) for _ in range(calls))
    )
    assert left(pool).keys() == {"requests", "input_tokens", "output_tokens"}
    assert service.refused <= 3
    assert time() <= 1.06 * 300


class Untold:
    """A provider that counts requests and tokens per minute, and never says when they come back, as Mistral does."""

    def __init__(self, kind: type[SlidingWindow | Bucket | FixedWindow], **limits: int) -> None:
        self.windows = {name: kind(limit, 60.0, limit) for name, limit in limits.items()}
        self.served = self.refused = 0

    def call(self, **amounts: float) -> Response:
        now = time()
        if any(self.windows[name].left(now) < amount - 1e-6 for name, amount in amounts.items()):
            self.refused += 1
            return Response(429, self._headers(now))
        for name, amount in amounts.items():
            self.windows[name].hold(amount, now)
            self.windows[name].held = 0.0
            self.windows[name].count(amount, now, now)
        self.served += 1
        return Response(200, self._headers(now))

    def _headers(self, now: float) -> dict[str, str]:
        headers = {"x-ratelimit-limit-tokens-month": "1000000000", "x-ratelimit-remaining-tokens-month": "900000000"}
        for name, window in self.windows.items():
            headers[f"x-ratelimit-limit-{name}-minute"] = str(int(window.limit))
            headers[f"x-ratelimit-remaining-{name}-minute"] = str(int(window.left(now)))
        return headers


@virtual
@pytest.mark.parametrize("kind", [SlidingWindow, Bucket, FixedWindow])
@pytest.mark.parametrize(("requests", "tokens", "latency"), [(60, 10**6, 0.3), (600, 10**6, 2.0), (600, 20_000, 0.3)])
async def test_l02_windows_whose_end_is_not_told_are_spread_by_their_length(
    kind: type[SlidingWindow | Bucket | FixedWindow], requests: int, tokens: int, latency: float
) -> None:
    """However the provider counts, it refuses nothing, and nearly all of the scarcer window is used."""
    pool, service = learning("a"), Untold(kind, req=requests, tokens=tokens)
    calls = 5 * min(requests, tokens // 100)

    async def operation(key: Resource[str]) -> Response:
        await asyncio.sleep(0.01)
        answer = service.call(req=1, tokens=100)
        await asyncio.sleep(latency)
        return answer

    await asyncio.gather(*(pool.run(operation, wait_for_capacity=True, cost=Cost(60, 40)) for _ in range(calls)))
    assert left(pool).keys() == {"requests", "requests/minute", "tokens/minute", "tokens/month"}
    assert service.refused == 0
    assert time() <= 300 / 0.93


# -- many processes ---------------------------------------------------------------------------------------------------


def share(place: SharedMemory, quota: Any, name: str = "a") -> ResourcePool[str]:
    return ResourcePool([Resource(name, f"secret-{name}")], name="keys", store=place.member(), quota=quota)


@virtual
async def test_l02_processes_share_every_window() -> None:
    place = SharedMemory()
    quotas = [Quota(5, 1.0), Quota(120, 60.0), Quota(per=60.0, input_tokens=100_000, output_tokens=3000)]
    pools = [share(place, quotas) for _ in range(3)]
    upstreams = [Upstream(5, None, 1.0), Upstream(120, None, 60.0), Upstream(None, 3000, 60.0)]

    async def operation(key: Resource[str]) -> None:
        key.spent(input=8, output=40)
        for upstream in upstreams:
            upstream.arrive(key.resource_id, 40)

    cost = Cost(input=10, output=40)
    await asyncio.gather(
        *(pool.run(operation, cost=cost, wait_for_capacity=True) for pool in pools for _ in range(125))
    )
    assert [upstream.exceeded for upstream in upstreams] == [[], [], []]
    assert 375 / time() >= 0.9 * 3000 / 40 / 60  # the tokens of answers are what is scarce


@virtual
async def test_l02_what_one_process_has_used_of_a_window_the_others_lack() -> None:
    place = SharedMemory()
    quotas = [at_once(100, 60.0), at_once(per=60.0, input_tokens=1000, output_tokens=50)]
    one, other = share(place, quotas), share(place, quotas)
    await took(one, cost=Cost(input=10, output=45))
    with pytest.raises(PoolExhausted):
        await took(other, cost=Cost(input=10, output=10))
    assert await took(other, cost=Cost(input=900, output=5)) == "a"
    with pytest.raises(PoolExhausted):
        await took(one, cost=Cost(input=200, output=1))


_SHORT, _LONG = Quota(5, 1.0, burst=5), Quota(60, 60.0, burst=60)


@pytest.mark.parametrize(
    ("before", "after", "granted"),
    [
        ((_LONG,), (_SHORT, _LONG), {"requests/second": 2.0, "requests/minute": 20.0}),
        ((_SHORT, _LONG), (_LONG,), {"requests": 20.0}),
        ((Quota(60, burst=60),), (Quota(60, tokens=50, burst=60),), {"requests": 20.0, "tokens": 25.0}),
        ((_LONG,), (Quota(60, window="bucket"),), {"requests": 30.0}),  # counted in another way: nothing is known
        ((_LONG,), "learn", {"requests": 1.0}),
    ],
)
def test_l02_a_process_that_comes_back_with_other_quotas_counts_what_it_used(
    before: tuple[Quota, ...], after: Any, granted: dict[str, float]
) -> None:
    """The first process uses 20 requests and ends. What it used counts in the windows that both have."""

    def say(text: str | None, member: str, now: float, report: Report) -> tuple[str | None, Any]:
        seen = Seen(now, member, lambda one: one != member)
        outcome = exchange(SHARED_QUOTA, text, seen, Message("t", member, report))
        return outcome.state, outcome.reply.body

    text, told = say(None, "m1", 1000.0, Report(1, before, want=Want({}, is_urgent=True)))
    rows = {name: [(1000.0, 20.0)] for name in told.granted}
    text, _ = say(text, "m1", 1001.9, Report(2, before, told.granted, rows))
    _, told = say(text, "m2", 1002.0, Report(1, after, want=Want({}, is_urgent=True)))
    assert told.granted == granted


# -- at the root ------------------------------------------------------------------------------------------------------


def test_l02_cost_is_a_name_of_headgate() -> None:
    assert headgate.Cost is Cost
    assert repr(Cost(input=1)) == "Cost(input=1.0, output=0.0)"
    assert Cost(1, 2) == Cost(input=1, output=2) != Cost(2, 1)
    assert len({Cost(1, 2), Cost(2, 1), Cost(1.0, 2.0)}) == 2
    assert (bool(Cost()), bool(Cost(output=1)), float(Cost(1, 2))) == (False, True, 3.0)
    assert pickle.loads(pickle.dumps(Cost(1, 2))) == Cost(1, 2)
