"""H10, H12: quotas that processes share. Members of one `SharedMemory` play the processes."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate
from headgate import Cost, PoolExhausted, Quota, Resource, ResourcePool, TaskPool
from headgate.core.clock import clock
from headgate.resources.leased_budget import LeasedBudget
from headgate.resources.quota_exchange import SHARED_QUOTA, Report, Want
from headgate.sharing.memory import MemoryState, SharedMemory
from headgate.sharing.protocol import Message, Reply, exchange
from headgate.sharing.states import Seen, timed
from headgate.testing import settle, virtual
from tests.conftest import SCALE
from tests.support.resources.support import Gate, at_once, ident
from tests.unit.resources.test_learned_quotas import Response, Service, slow
from tests.unit.resources.test_quotas import Upstream
from tests.unit.resources.test_shared_health import count_exchanges


@pytest.fixture(autouse=True)
def nothing_is_left_to_report() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "headgate-reports":
            thread.join(10)


def share(place: SharedMemory | MemoryState, quota: Any, *names: str, **options: Any) -> ResourcePool[str]:
    """A pool as another process has it."""
    store = place.member() if isinstance(place, SharedMemory) else place
    resources = [Resource(name, f"secret-{name}") for name in names or ("a",)]
    return ResourcePool(resources, name="keys", store=store, quota=quota, **options)


async def use_up(pool: ResourcePool[str], upstream: Upstream | None = None) -> int:
    """Call until there is no more, and return how often that was."""
    used = 0
    while True:
        try:
            await pool.run(ident)
        except PoolExhausted:
            return used
        used += 1
        if upstream is not None:
            upstream.arrive("a", 0)


# -- quotas that are given --------------------------------------------------------------------------------------------


@virtual
async def test_h10_processes_share_one_quota() -> None:
    place = SharedMemory()
    pools = [share(place, at_once(requests=6, per=60.0)) for _ in range(3)]
    for pool in pools * 2:
        assert await pool.run(ident) == "a"
    for pool in pools:
        with pytest.raises(PoolExhausted, match="1 with a spent quota"):
            await pool.run(ident)


@virtual
async def test_h10_waiting_calls_of_all_processes_are_served_when_the_window_has_passed() -> None:
    place, upstream = SharedMemory(), Upstream(10, None, 60.0)
    pools = [share(place, at_once(requests=10, per=60.0)) for _ in range(3)]
    by_pool = [0, 0, 0]

    async def call(number: int) -> None:
        async def operation(key: Resource[str]) -> None:
            upstream.arrive("a", 0)
            await asyncio.sleep(0.2)

        await pools[number].run(operation, wait_for_capacity=True)
        by_pool[number] += 1

    await asyncio.gather(*(call(number) for number in range(3) for _ in range(20)))
    assert upstream.exceeded == []
    assert by_pool == [20, 20, 20]
    assert clock.now() <= 5 * 62


@virtual
async def test_h10_most_calls_need_no_exchange() -> None:
    place = SharedMemory()
    store = place.member()
    pool = share(store, at_once(requests=1000, per=60.0))
    asked = count_exchanges(store)
    for _ in range(900):
        await pool.run(ident)
    assert len([key for key in asked if key.startswith("quotas/")]) <= 40


@virtual
async def test_h10_what_a_process_does_not_use_goes_to_others() -> None:
    place = SharedMemory()
    idle, busy = share(place, at_once(requests=100, per=60.0)), share(place, at_once(requests=100, per=60.0))
    await idle.run(ident)
    await asyncio.sleep(2)
    for _ in range(99):
        await busy.run(ident, wait_for_capacity=True, within=5)
    assert clock.now() <= 3
    with pytest.raises(PoolExhausted):
        await busy.run(ident)


@virtual
async def test_h10_a_process_that_is_gone_counts_as_having_used_what_it_held() -> None:
    place, upstream = SharedMemory(), Upstream(10, None, 60.0)
    store = place.member()
    gone, other = share(store, at_once(requests=10, per=60.0)), share(place, at_once(requests=10, per=60.0))
    await gone.run(ident)
    upstream.arrive("a", 0)
    store.close()
    used = await use_up(other, upstream)
    assert 0 < used <= 9
    assert await other.run(ident, wait_for_capacity=True) == "a"
    assert upstream.exceeded == []


@virtual
async def test_h10_tokens_are_shared_and_settled() -> None:
    place = SharedMemory()
    one, other = share(place, at_once(tokens=1000, per=60.0)), share(place, at_once(tokens=1000, per=60.0))

    async def cheaper(key: Resource[str]) -> None:
        key.spent(100)

    await one.run(cheaper, cost=400)
    await other.run(cheaper, cost=400)
    assert await one.run(ident, cost=800, wait_for_capacity=True, within=1) == "a"
    with pytest.raises(PoolExhausted):
        await other.run(ident, cost=1)


@virtual
async def test_h10_a_cost_that_was_more_than_the_quota_fails_at_once() -> None:
    pool = share(SharedMemory(), at_once(tokens=1000))
    with pytest.raises(PoolExhausted, match="cost=1001"):
        await pool.run(ident, cost=1001, wait_for_capacity=True)


@virtual
async def test_h10_a_resource_that_is_added_shares_its_quota_too() -> None:
    place = SharedMemory()
    pools = [share(place, at_once(requests=2)) for _ in range(2)]
    for pool in pools:
        await pool.add("b", "secret-b")
    for pool in pools * 2:
        await pool.run(ident, wait_for_capacity=True)
    for pool in pools:
        with pytest.raises(PoolExhausted, match="2 with a spent quota"):
            await pool.run(ident)


@virtual
async def test_h10_quotas_that_differ_are_warned_of_and_the_first_counts(caplog: pytest.LogCaptureFixture) -> None:
    place = SharedMemory()
    first = share(place, at_once(requests=2, per=60.0))
    with caplog.at_level(logging.WARNING, "headgate.resources"):
        second = share(place, at_once(requests=50, per=60.0))
        for thread in threading.enumerate():
            if thread.name == "headgate-reports":
                thread.join(10)
    assert "other processes share Quota(requests=2" in caplog.text
    assert [await pool.run(ident) for pool in (first, second)] == ["a", "a"]
    with pytest.raises(PoolExhausted):
        await second.run(ident)


@virtual
async def test_h10_tasks_of_several_processes_wait_for_one_quota() -> None:
    place, upstream = SharedMemory(), Upstream(5, None, 10.0)

    async def ask(key: Resource[str]) -> None:
        upstream.arrive("a", 0)

    async with (
        TaskPool("one", max_concurrent=8, resources=share(place, at_once(requests=5, per=10.0))) as one,
        TaskPool("two", max_concurrent=8, resources=share(place, at_once(requests=5, per=10.0))) as two,
    ):
        handles = [await pool.submit(ask) for pool in (one, two) for _ in range(10)]
        for handle in handles:
            await handle
    assert upstream.exceeded == []
    assert clock.now() <= 45


@virtual
async def test_h10_a_task_waits_for_a_shared_quota_that_its_pool_has_spent() -> None:
    pool = share(store := SharedMemory().member(), at_once(tokens=100, per=10.0, delay=0.0))
    asked = count_exchanges(store)

    async def slow(key: Resource[str]) -> None:
        await asyncio.sleep(1)

    async with TaskPool(max_concurrent=2, resources=pool) as tasks:
        call = asyncio.create_task(pool.run(ident, cost=10, wait_for_capacity=True))
        await tasks.submit(slow, cost=1)
        large = await tasks.submit(ident, cost=90)
        assert await call == await large == "a"
        assert clock.now() == pytest.approx(10.0, abs=0.2)
    assert len(asked) < 50


@virtual
async def test_h10_a_store_that_cannot_be_reached_gives_nothing_more() -> None:
    """No fallback to a limit for each process: what is held may be used, and then calls wait."""
    place = SharedMemory()
    store = place.member()
    pool = share(store, at_once(requests=100, per=60.0))
    await pool.run(ident)
    store.cut_off()
    used = await use_up(pool)
    assert used < 99
    waiting = asyncio.create_task(pool.run(ident, wait_for_capacity=True))
    await asyncio.sleep(5)
    assert not waiting.done()
    store.reconnect()
    assert await waiting == "a"


# -- quotas that are learned ------------------------------------------------------------------------------------------


async def three_processes(service: Service, calls: int, cost: int = 0, operation: Any = None) -> None:
    """Three processes with a backlog each, on one key of a service."""
    place = SharedMemory()
    options: dict[str, Any] = {"classify": headgate.http_errors, "cancel_siblings": False}
    pools = [share(place, "learn", **options) for _ in range(3)]

    async def quick(key: Resource[str]) -> Response:
        await asyncio.sleep(0.01)
        answer = service.call(cost)
        await asyncio.sleep(0.04)
        return answer

    operation = operation or quick
    how: dict[str, Any] = {"wait_for_capacity": True, "max_attempts": 50, "cost": cost}
    await asyncio.gather(*(pool.run(operation, **how) for pool in pools for _ in range(calls)))


def utilisation(service: Service) -> float:
    windows = [service.by_window[window] for window in sorted(service.by_window)][:-1]
    return sum(windows) / (len(windows) * service.limits["requests"])


@virtual
async def test_h12_three_processes_learn_one_quota_with_one_refusal_per_reset() -> None:
    calls = 500 if SCALE >= 1 else 150
    service = Service(2 * calls // 5, per=60.0)
    await three_processes(service, calls)
    assert service.served == 3 * calls
    assert service.refused <= len(service.by_window)
    assert utilisation(service) >= 0.95


@pytest.mark.parametrize("seconds", [5.0, pytest.param(40.0, marks=pytest.mark.soak)])
def test_h12_three_processes_learn_one_quota_from_slow_answers(seconds: float) -> None:
    @virtual
    async def scenario() -> None:
        service = Service(50, per=60.0)
        await three_processes(service, 130, operation=slow(service, seconds))
        assert service.served == 390
        assert service.refused <= 1
        assert utilisation(service) >= 0.95

    scenario()


@virtual
async def test_h12_three_processes_learn_one_quota_of_tokens() -> None:
    service = Service(100_000, per=60.0, tokens=10_000)
    await three_processes(service, 100, cost=100)
    assert service.served == 300
    assert service.refused <= len(service.by_window)
    assert clock.now() <= 3 * 60 + 1  # all but a few calls fit into three windows


@virtual
async def test_h12_three_processes_on_a_limit_that_fills_up_steadily() -> None:
    calls = 200 if SCALE >= 1 else 100
    service = Service(120, per=60.0, fills=True)
    await three_processes(service, calls)
    assert service.served == 3 * calls
    assert service.refused <= clock.now() // 60 + 1
    assert clock.now() <= 1.25 * (3 * calls - 120) / 2  # 120 at once, and then two a second


@virtual
async def test_h12_one_call_of_all_processes_finds_out_what_there_is() -> None:
    place = SharedMemory()
    pools = [share(place, "learn") for _ in range(3)]
    gate = Gate()
    calls = [asyncio.create_task(pool.run(gate, wait_for_capacity=True)) for pool in pools for _ in range(2)]
    await settle()
    assert len(gate.entered) == 1
    gate.finish(0, Response(200, {"x-ratelimit-remaining-requests": "9", "x-ratelimit-reset-requests": "60s"}))
    await asyncio.sleep(0.1)
    assert len(gate.entered) > 1
    for number in range(1, 6):
        gate.finish(number, Response(200, {"x-ratelimit-remaining-requests": f"{9 - number}"}))
        await asyncio.sleep(0.1)
    await asyncio.gather(*calls)


@virtual
async def test_h12_the_call_that_finds_out_may_be_of_a_process_that_dies() -> None:
    place = SharedMemory()
    store = place.member()
    first, second = share(store, "learn"), share(place, "learn")
    gate = Gate()
    lost = asyncio.create_task(first.run(gate, wait_for_capacity=True))
    waiting = asyncio.create_task(second.run(ident, wait_for_capacity=True))
    await settle()
    assert not waiting.done()
    store.close()
    assert await waiting == "a"
    lost.cancel()
    await asyncio.wait([lost])


# -- the step, by chance ----------------------------------------------------------------------------------------------


class Process:
    """One process: its budget, and the calls that it runs."""

    def __init__(self, name: str, quotas: tuple[Quota, ...]) -> None:
        self.name = name
        self.budget = LeasedBudget(quotas, lambda: None)
        self.answered: str | None = None
        self.running: list[tuple[dict[str, float], float]] = []
        self.gone = False


@given(
    quotas=st.lists(
        st.builds(
            Quota,
            requests=st.integers(1, 8),
            tokens=st.none() | st.integers(10, 60),
            output_tokens=st.none() | st.integers(5, 40),
            per=st.sampled_from([10.0, 10.0, 2.0]),
            burst=st.none() | st.just(1.0),
        ),
        min_size=1,
        max_size=2,
        unique_by=lambda quota: quota.per,
    ).map(tuple),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 9), st.floats(0, 3)), max_size=120),
    pauses=st.lists(st.sampled_from([0.0, 0.0, 0.3, 4.0]), min_size=1, max_size=7),
)
@settings(max_examples=max(60, int(1500 * SCALE**1.4)))
def test_h10_h05_l02_no_schedule_of_processes_exceeds_a_quota(
    quotas: tuple[Quota, ...], steps: list[tuple[int, int, int, float]], pauses: list[float]
) -> None:
    """Processes call, end, die, pause, and send messages that are lost, doubled or late; an upstream counts."""
    processes = [Process(f"m{number}", quotas) for number in range(4)]
    text: str | None = None
    now = 100.0
    arrived: list[tuple[float, Cost]] = []
    paused = itertools.cycle(pauses)

    def is_gone(member: str) -> bool:
        return next(one for one in processes if one.name == member).gone

    def send(process: Process, *, lose_answer: bool) -> None:
        nonlocal text, now
        report = process.budget.message(looks=True)
        assert report is not None
        message = Message("t", process.answered, report)
        step = timed(lambda text, seen: exchange(SHARED_QUOTA, text, seen, message), now)
        for _ in range(2 if lose_answer else 1):
            now += next(paused)
            seen = Seen(now, process.name, is_gone)
            now += next(paused)
            with clock.replaced(now=partial(float, now)):
                outcome = step(text, seen)
            text = text if outcome.state is None else outcome.state
        now += next(paused)
        if not lose_answer:
            reply, offset = outcome.reply
            process.answered = reply.member
            process.budget.take(report, reply.body, offset, now)
            if reply.body.is_wanted:
                process.budget.give_back(now)

    for who, what, cost, seconds in steps:
        process = processes[who]
        if process.gone:
            continue
        if what <= 2:
            tokens = Cost(input=cost, output=cost // 2)
            need = process.budget.need(tokens)
            if process.budget.can_ever_allow(need) and process.budget.allows(need, now):
                start, _ = process.budget.start(need, now)
                process.running.append((need, start))
                arrived.append((now, tokens))
                for quota in quotas:
                    recent = [one for at, one in arrived if at > now - quota.per]
                    assert len(recent) <= (quota.requests or math.inf)
                    assert sum(map(float, recent)) <= (quota.tokens or math.inf)
                    assert sum(one.output for one in recent) <= (quota.output_tokens or math.inf)
            else:
                process.budget.lack(need, now)
        elif what == 3 and process.running:
            need, start = process.running.pop(0)
            if cost % 3 == 1:
                process.budget.amend({name: -1.0 for name in need if "tokens" in name}, start, now)
        elif what in (4, 5):
            send(process, lose_answer=what == 5)
        elif who == 3 and cost == 0:
            process.gone = True
        now += seconds if what != 6 else 0.0


@pytest.mark.parametrize("dies", [False, True])
def test_h10_a_bucket_does_not_refill_for_the_time_in_which_it_was_full_of_what_was_held(dies: bool) -> None:
    """What is held for long is used at last: the bucket was full until then, and is empty now."""
    quota, want = (Quota(1, 10.0, window="bucket"),), Want({"requests": 1.0}, is_urgent=True)

    def say(text: str | None, member: str, now: float, report: Report) -> tuple[str | None, float]:
        seen = Seen(now, member, lambda one: dies and now > 1000.0 and one == "m1")
        outcome = exchange(SHARED_QUOTA, text, seen, Message("t", member, report))
        return outcome.state, outcome.reply.body.granted.get("requests", 0.0)

    text, granted = say(None, "m1", 1000.0, Report(1, quota, want=want))
    assert granted == 1.0
    if not dies:
        text, _ = say(text, "m1", 1009.1, Report(2, quota, {"requests": 1.0}, {"requests": [(1009.0, 1.0)]}))
    assert say(text, "m2", 1010.1, Report(1, quota, want=want))[1] == 0.0
    text, _ = say(text, "m2", 1010.1, Report(1, quota, want=want))
    assert say(text, "m2", 1020.2, Report(2, quota, want=want))[1] == 1.0


_NAMES = st.sampled_from(["v", "quota", "ledger", "parts", "probe", "fixed", "learned", "m1/t"])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_NAMES, inner, max_size=6),
    max_leaves=20,
)


@given(st.text(max_size=60) | _JSON.map(json.dumps))
@settings(max_examples=max(60, int(600 * SCALE)))
def test_g24_any_text_of_a_quota_gives_an_answer(text: str) -> None:
    message = Message("t", None, Report(1, (at_once(requests=5),)))
    outcome = exchange(SHARED_QUOTA, text, Seen(100.0, "m1", lambda member: False), message)
    assert isinstance(outcome.reply, Reply)


@virtual
async def test_g24_no_value_is_in_the_state_of_a_quota() -> None:
    place = SharedMemory()
    pool = share(place, at_once(requests=5))
    await pool.run(ident)
    assert any(key.startswith("quotas/pool/keys/") for key in place.texts)
    assert "secret" not in "".join([*place.texts, *place.texts.values()])
