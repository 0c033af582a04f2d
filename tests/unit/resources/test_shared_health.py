"""Health that pools of several processes share. Members of one `SharedMemory` play the processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import headgate
from headgate.core.clock import clock
from headgate.errors import InvalidArgument, PoolClosed, PoolExhausted
from headgate.resources import CooldownResource, DisableResource, Resource, ResourcePool
from headgate.resources.engine import engine_of
from headgate.sharing.memory import MemoryState, SharedMemory
from headgate.sharing.states import Step
from headgate.testing import settle, virtual
from tests.support.resources.support import Gate, always, by_id, ident, rate_limited, revoked, status

KEY = "resources/keys"


def reported() -> None:
    """Wait until users were told everything: that happens in a thread."""
    for thread in threading.enumerate():
        if thread.name == "headgate-reports":
            thread.join(10)


@pytest.fixture(autouse=True)
def nothing_is_left_to_report() -> Iterator[None]:
    yield
    reported()


def share(place: SharedMemory | MemoryState, *ids: str, **options: Any) -> ResourcePool[str]:
    """A pool as another process has it: Resource objects and a member of its own."""
    limit = options.pop("limit", None)
    store = place.member() if isinstance(place, SharedMemory) else place
    resources = [Resource(name, f"secret-{name}", limit) for name in ids or ("k1", "k2")]
    return ResourcePool(resources, name="keys", store=store, **options)


def cooldown(pool: ResourcePool[Any], name: str) -> tuple[str, int, float]:
    seen = pool.snapshot()[name]
    return seen["status"], seen["consecutive_cooldown"], round(seen["cooldown_seconds_remaining"], 6)


def count_exchanges(store: MemoryState) -> list[str]:
    """The keys of all exchanges from now on."""
    asked: list[str] = []
    transact = store.transact

    def counted(key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        asked.append(key)
        return transact(key, step, durable=durable)

    store.transact = counted  # type: ignore[method-assign]
    return asked


def in_flight(*pools: ResourcePool[Any]) -> int:
    return sum(one["in_flight"] for pool in pools for one in pool.snapshot().values())


# -- making ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "", 7])
def test_h01_a_store_needs_a_name(name: Any) -> None:
    with pytest.raises(InvalidArgument, match="store= needs a name="):
        ResourcePool({"k": "v"}, store=SharedMemory().member(), name=name)


@pytest.mark.parametrize("store", [7, object(), SharedMemory, "nonsense", "redis://x"])
def test_h01_what_is_no_store_is_refused(store: Any) -> None:
    with pytest.raises(InvalidArgument, match="store must be"):
        ResourcePool({"k": "v"}, store=store, name="keys")


def test_h01_true_takes_the_store_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADGATE_STORE", raising=False)
    with pytest.raises(InvalidArgument, match="HEADGATE_STORE"):
        ResourcePool({"k": "v"}, store=True, name="keys")
    monkeypatch.setenv("HEADGATE_STORE", "sqlite:///shared.db")
    ResourcePool({"k": "v"}, name="keys"), ResourcePool({"k": "v"}, store=False)  # nothing is shared unless asked for


# -- health ------------------------------------------------------------------------------------------------------------


@virtual
async def test_h01_a_cooldown_found_by_one_process_is_known_to_all() -> None:
    place = SharedMemory()
    one, other = share(place), share(place)
    await asyncio.sleep(5)
    assert await one.run(by_id(k1=CooldownResource(20), k2="fine"), retry_delay=0) == "fine"
    assert cooldown(one, "k1") == cooldown(other, "k1") == ("cooling_down", 1, 20.0)
    assert [await other.run(ident) for _ in range(3)] == ["k2"] * 3
    await asyncio.sleep(20)
    assert {await other.run(ident) for _ in range(2)} == {"k1", "k2"}


@virtual
async def test_h01_a_process_that_comes_later_knows_too() -> None:
    place = SharedMemory()
    one = share(place)
    await one.disable("k2")
    with pytest.raises(PoolExhausted):
        await one.run(always(CooldownResource(50)), retry_delay=0)
    await asyncio.sleep(10)
    late = share(place)
    assert cooldown(late, "k1") == ("cooling_down", 1, 40.0)
    assert status(late, "k2") == "disabled"
    added = await late.add(Resource("k3", "new"))
    assert added.status == "healthy"


@virtual
async def test_h01_pools_of_another_name_are_not_touched() -> None:
    place = SharedMemory()
    one = share(place)
    other = ResourcePool({"k1": "secret-k1"}, name="others", store=place.member())
    await one.disable("k1")
    assert status(other, "k1") == "healthy"


@virtual
async def test_h01_escalation_is_shared() -> None:
    place = SharedMemory()
    one, other = share(place, "k"), share(place, "k")
    for pool, seconds in ((one, 30.0), (other, 120.0), (one, 300.0), (other, 600.0), (one, 600.0)):
        with pytest.raises(PoolExhausted):
            await pool.run(always(rate_limited()))
        assert cooldown(one, "k") == cooldown(other, "k")
        assert cooldown(one, "k")[2] == seconds
        await asyncio.sleep(seconds)
    assert await other.run(ident) == "k"
    assert cooldown(one, "k") == cooldown(other, "k") == ("healthy", 0, 0.0)


@virtual
async def test_h01_a_process_whose_monotonic_clock_differs_sees_the_same_countdown() -> None:
    place = SharedMemory()
    one = share(place, "k")
    with pytest.raises(PoolExhausted):
        await one.run(always(CooldownResource(100)))
    await asyncio.sleep(10)
    now = clock.now
    with clock.replaced(now=lambda: now() + 5_000_000.0):
        assert cooldown(share(place, "k"), "k") == ("cooling_down", 1, 90.0)


@virtual
async def test_h01_calls_on_healthy_resources_do_not_ask_the_store() -> None:
    place = SharedMemory()
    store = place.member()
    pool = share(store)
    asked = count_exchanges(store)
    for _ in range(20):
        await pool.run(ident)
        await pool.run(ident, tags=())
    with pytest.raises(ValueError, match="of the caller"):
        await pool.run(always(ValueError("a mistake of the caller")))
    assert not asked
    with pytest.raises(PoolExhausted):
        await pool.run(always(rate_limited()), retry_delay=0)
    assert len(asked) == 2
    await asyncio.sleep(30)
    for _ in range(20):
        await pool.run(ident)
    assert len(asked) == 4, "each success after trouble is told once"


@virtual
async def test_h02_disable_and_enable_are_known_to_all() -> None:
    place = SharedMemory()
    pools = [share(place) for _ in range(3)]
    with pytest.raises(PoolExhausted):
        await pools[0].run(always(revoked()), retry_delay=0)
    assert [status(pool, "k1") for pool in pools] == ["disabled"] * 3
    await pools[2].enable("k1")
    assert [status(pool, "k1") for pool in pools] == ["healthy"] * 3
    assert [status(pool, "k2") for pool in pools] == ["disabled"] * 3


@virtual
async def test_h02_a_late_disable_of_before_enable_changes_nothing() -> None:
    place = SharedMemory()
    store = place.member()
    late, other = share(store), share(place)
    store.cut_off()
    await late.disable("k1")
    await other.enable("k1")
    assert status(late, "k1") == "disabled"
    store.reconnect()
    assert status(late, "k1") == status(other, "k1") == "healthy"


@virtual
async def test_h02_a_disable_long_after_enable_is_not_undone_by_who_was_cut_off_since() -> None:
    place = SharedMemory()
    store = place.member()
    one, late = share(place), share(store)
    await one.enable("k1")
    store.cut_off()
    await asyncio.sleep(4000)
    await one.enable("k2")
    await one.disable("k1")
    store.reconnect()
    assert status(late, "k1") == status(one, "k1") == "disabled"


@virtual
async def test_h02_r33_a_late_success_elsewhere_clears_nothing() -> None:
    place = SharedMemory()
    one, other, gate = share(place, "k"), share(place, "k"), Gate()
    old = asyncio.create_task(other.run(gate))
    await asyncio.sleep(1)
    with pytest.raises(PoolExhausted):
        await one.run(always(rate_limited()))
    gate.finish(0)
    assert await old == "done"
    assert cooldown(one, "k") == cooldown(other, "k") == ("cooling_down", 1, 30.0)


@virtual
async def test_h02_a_success_of_a_newer_call_clears_the_cooldown_everywhere() -> None:
    place = SharedMemory()
    store = place.member()
    one, late, gate = share(place, "k"), share(store, "k"), Gate()
    store.cut_off()
    with pytest.raises(PoolExhausted):
        await one.run(always(rate_limited()))
    await asyncio.sleep(1)
    assert await late.run(ident) == "k", "it has not heard of the cooldown"
    store.reconnect()
    assert cooldown(one, "k") == cooldown(late, "k") == ("cooling_down", 1, 29.0), "nothing to clear was known"
    await asyncio.sleep(29)
    used = asyncio.create_task(late.run(gate))
    await settle()
    gate.finish(0)
    await used
    assert cooldown(one, "k") == cooldown(late, "k") == ("healthy", 0, 0.0)


@virtual
async def test_h02_r35_one_outage_met_by_all_processes_escalates_once() -> None:
    place = SharedMemory()
    pools, gate = [share(place, "k", cancel_siblings=False) for _ in range(3)], Gate()
    calls = [asyncio.create_task(pool.run(gate)) for pool in pools for _ in range(2)]
    await asyncio.sleep(1)
    for number in range(6):
        gate.finish(number, CooldownResource(None, "429"))
        await asyncio.sleep(0.001)
    for call in calls:
        with pytest.raises(PoolExhausted):
            await call
    assert {cooldown(pool, "k")[:2] for pool in pools} == {("cooling_down", 1)}


@virtual
async def test_h02_r37_a_late_verdict_of_an_old_key_never_touches_the_new_one() -> None:
    place = SharedMemory()
    one, other, gate = share(place, "k"), share(place, "k"), Gate()
    late = asyncio.create_task(other.run(gate))
    mine = asyncio.create_task(one.run(gate))
    await settle()
    await one.remove("k")
    await one.add("k", "secret-new")
    gate.finish(0, DisableResource("401"))
    gate.finish(1, DisableResource("401"))
    for call in (late, mine):
        with pytest.raises(PoolExhausted):
            await call
    assert status(other, "k") == "disabled"
    assert status(one, "k") == "healthy"


@virtual
async def test_h02_calls_in_flight_here_are_left_alone_when_another_process_finds_a_limit() -> None:
    place = SharedMemory()
    one, other, gate = share(place, "k"), share(place, "k"), Gate()
    await asyncio.sleep(1)
    younger = asyncio.create_task(other.run(gate))
    await settle()
    with pytest.raises(PoolExhausted):
        await one.run(always(rate_limited()))
    await settle()
    gate.finish(0)
    assert await younger == "done"


@virtual
async def test_h02_waiters_are_woken_by_enable_and_told_by_disable_of_another_process() -> None:
    place = SharedMemory()
    one, other = share(place, "k"), share(place, "k")
    await one.disable("k")
    with pytest.raises(PoolExhausted, match="disabled"):
        await other.run(ident, wait_for_capacity=True)
    await one.enable("k")
    with pytest.raises(PoolExhausted):
        await one.run(always(rate_limited()))
    waiting = asyncio.create_task(other.run(ident, wait_for_capacity=True))
    await asyncio.sleep(1)
    await one.enable("k")
    assert await waiting == "k"
    assert clock.now() == 1.0


@virtual
async def test_r31_only_the_process_that_was_refused_warns(caplog: pytest.LogCaptureFixture) -> None:
    place = SharedMemory()
    one, others = share(place), [share(place) for _ in range(3)]
    with caplog.at_level(logging.DEBUG, "headgate.resources"):
        await one.run(by_id(k1=CooldownResource(20, "429"), k2="ok"), retry_delay=0)
        await others[0].disable("k2")
        reported()
    assert {status(pool, name) for pool in others for name in ("k1", "k2")} == {"cooling_down", "disabled"}
    lines = Counter((record.levelname, record.getMessage()) for record in caplog.records)
    assert lines == {
        ("WARNING", "keys: k1 cools down for 20.0 s (1 in a row): 429"): 1,
        ("DEBUG", "keys: k1 cools down for 20.0 s (1 in a row): reported by another process"): 3,
        ("WARNING", "keys: k2 is disabled: by hand"): 1,
        ("INFO", "keys: k2 is disabled: reported by another process"): 3,
    }


@virtual
async def test_h01_events_and_logs_say_that_another_process_found_it(caplog: pytest.LogCaptureFixture) -> None:
    place = SharedMemory()
    one, changes = share(place), []
    other = share(place, on_state_change=lambda *change: changes.append((*change, threading.current_thread().name)))
    seen: list[Any] = []
    stop = headgate.subscribe(seen.append, "resources.health")
    with caplog.at_level(logging.DEBUG, "headgate.resources"):
        await one.run(by_id(k1=CooldownResource(20, "secret-k1 is over its limit"), k2="ok"), retry_delay=0)
        await one.disable("k2")
        reported()
    stop()
    assert {(event.name, event.resource_id, event.reason) for event in seen} == {
        ("resource_cooled", "k1", "reported by another process"),
        ("resource_cooled", "k1", "<k1> is over its limit"),
        ("resource_disabled", "k2", "reported by another process"),
        ("resource_disabled", "k2", None),
    }
    told = [change[:4] for change in changes]
    assert told == [("k1", "healthy", "cooling_down", 1), ("k2", "healthy", "disabled", 2)]
    assert {change[4] for change in changes} == {"headgate-reports"}, "never in the thread of the store"
    assert sum("reported by another process" in record.getMessage() for record in caplog.records) == 2
    assert other.stats().cooldowns == other.stats().disables == 0, "counted where they were found"


@virtual
async def test_h01_one_resource_in_two_shared_pools_settles() -> None:
    place = SharedMemory()

    def process() -> tuple[ResourcePool[str], ResourcePool[str]]:
        key, store = Resource("k", "v"), place.member()
        return ResourcePool([key], name="a", store=store), ResourcePool([key], name="b", store=store)

    (a1, b1), (a2, b2) = process(), process()
    with pytest.raises(PoolExhausted):
        await a1.run(always(rate_limited()))
    assert {cooldown(pool, "k") for pool in (a1, b1, a2, b2)} == {("cooling_down", 1, 30.0)}
    await b2.enable("k")
    assert {cooldown(pool, "k") for pool in (a1, b1, a2, b2)} == {("healthy", 0, 0.0)}


@virtual
async def test_h01_two_pools_of_one_process_with_one_name_share_too() -> None:
    place = SharedMemory()
    store = place.member()
    one, other = share(store), share(store)
    await one.disable("k1")
    assert status(other, "k1") == "disabled"


# -- limits ------------------------------------------------------------------------------------------------------------


@virtual
async def test_h03_max_in_flight_holds_over_all_processes() -> None:
    place = SharedMemory()
    pools = [share(place, "k", limit=3) for _ in range(4)]
    most = 0

    async def work(key: Resource[str]) -> None:
        nonlocal most
        most = max(most, in_flight(*pools))
        await asyncio.sleep(1)

    calls = [pool.run(work, wait_for_capacity=True) for pool in pools for _ in range(6)]
    await asyncio.gather(*calls)
    assert most == 3
    assert clock.now() == 8.0, "24 calls of a second, 3 at a time: no permit was ever idle"


@virtual
async def test_h03_processes_take_turns_when_there_are_fewer_permits_than_processes() -> None:
    place = SharedMemory()
    pools = [share(place, "k", limit=1) for _ in range(3)]
    order: list[int] = []

    async def work(number: int) -> None:
        async def operation(key: Resource[str]) -> None:
            order.append(number)
            await asyncio.sleep(1)

        await pools[number].run(operation, wait_for_capacity=True)

    await asyncio.gather(*(work(number) for number in range(3) for _ in range(4)))
    assert all(sorted(order[at : at + 3]) == [0, 1, 2] for at in range(0, 12, 3)), order


@virtual
async def test_h03_a_call_without_a_wait_mode_gets_a_permit_that_another_process_does_not_use() -> None:
    place = SharedMemory()
    one, other = share(place, "k", limit=2), share(place, "k", limit=2)
    assert await one.run(ident) == "k"
    assert await other.run(ident) == "k"
    assert await asyncio.gather(one.run(ident), one.run(ident)) == ["k", "k"]
    assert clock.now() == 0.0


@virtual
async def test_h03_a_call_without_a_wait_mode_fails_when_all_are_in_use() -> None:
    place = SharedMemory()
    one, other, gate = share(place, "k", limit=1), share(place, "k", limit=1), Gate()
    using = asyncio.create_task(one.run(gate))
    await settle()
    with pytest.raises(PoolExhausted, match="1 in full use"):
        await other.run(ident)
    assert clock.now() == 0.5
    with pytest.raises(PoolExhausted):
        await other.run(ident)
    assert clock.now() == 0.5, "asked already: at once"
    gate.finish(0)
    await using
    assert await other.run(ident) == "k"


def test_h03_run_sync_gets_a_permit() -> None:
    place = SharedMemory()
    one, other = share(place, "k", limit=1), share(place, "k", limit=1)
    assert one.run_sync(lambda key: key.resource_id) == "k"
    assert other.run_sync(lambda key: key.resource_id) == "k"


@virtual
async def test_h03_a_process_that_is_alone_does_not_ask_again() -> None:
    place = SharedMemory()
    store = place.member()
    pool = share(store, "k", limit=5)
    asked = count_exchanges(store)
    for _ in range(20):
        await asyncio.gather(*(pool.run(ident, wait_for_capacity=True) for _ in range(10)))
    assert not asked


@virtual
async def test_h03_a_resource_is_leased_although_calls_can_do_without_it() -> None:
    place = SharedMemory()

    def process(store: MemoryState) -> ResourcePool[str]:
        keys = [Resource("paid", "v", 2), Resource("free", "v")]
        return ResourcePool(keys, strategy="primary_backup", name="keys", store=store)

    store = place.member()
    one, other, gate = process(store), process(place.member()), Gate()
    assert await one.run(ident) == await other.run(ident) == "paid"
    held = [asyncio.create_task(one.run(gate)) for _ in range(2)]
    await settle()
    assert gate.entered == ["paid", "free"], "the other process has the second permit"
    await asyncio.sleep(5)
    assert await one.run(ident) == "free"
    store.wake(None)  # as at a heartbeat
    assert await one.run(ident) == "paid", "which the other does not use"
    for number in range(2):
        gate.finish(number)
    await asyncio.gather(*held)


@virtual
async def test_h03_permits_of_a_process_that_died_come_back() -> None:
    place = SharedMemory()
    store = place.member()
    dying, other, gate = share(store, "k", limit=2), share(place, "k", limit=2), Gate()
    held = [asyncio.create_task(dying.run(gate)) for _ in range(2)]
    await settle()
    waiting = asyncio.create_task(other.run(ident, wait_for_capacity=True))
    await asyncio.sleep(1)
    assert not waiting.done()
    store.close()
    assert await waiting == "k"
    for number in range(2):
        gate.finish(number)
    await asyncio.gather(*held)


@virtual
async def test_h03_after_a_lost_lease_permits_are_leased_anew_and_calls_go_on() -> None:
    place = SharedMemory()
    store = place.member()
    one, gate = share(store, "k", limit=2), Gate()
    held = asyncio.create_task(one.run(gate))
    await settle()
    store.lose()
    assert "m1/" not in place.texts[KEY]
    assert await one.run(ident) == "k"
    assert in_flight(one) == 1
    gate.finish(0)
    assert await held == "done"


@virtual
async def test_h03_past_the_deadline_of_its_lease_a_process_begins_nothing_that_needs_a_permit() -> None:
    place = SharedMemory()
    store = place.member()
    store.deadline = 15.0
    one = ResourcePool([Resource("k", "v", 2), Resource("free", "v")], name="keys", store=store)

    async def used() -> set[str]:
        names = set()
        for _ in range(4):
            await asyncio.sleep(0.5)
            names.add(await one.run(ident))
        return names

    assert await used() == {"k", "free"}
    store.cut_off()
    await asyncio.sleep(10)
    assert await used() == {"k", "free"}
    await asyncio.sleep(2)
    assert await used() == {"free"}
    store.deadline = math.inf
    store.reconnect()
    assert await used() == {"k", "free"}


@virtual
async def test_h03_the_lowest_limit_counts_and_another_limit_is_followed() -> None:
    place = SharedMemory()
    one, other, gate = share(place, "k", limit=5), share(place, "k", limit=2), Gate()
    calls = [asyncio.create_task(pool.run(gate, wait_for_capacity=True)) for pool in (other, one) for _ in range(4)]
    await settle()
    assert in_flight(one, other) == 2
    await other.reconcile([Resource("k", "secret-k", 5)])
    await settle()
    assert in_flight(one, other) == 5
    for number in range(8):
        await settle()
        gate.finish(number)
    await asyncio.gather(*calls)


@virtual
async def test_h03_tasks_of_task_pools_keep_the_limit_and_hold_no_slot_while_they_wait_for_a_permit() -> None:
    place = SharedMemory()
    keys = [share(place, "k", limit=2) for _ in range(3)]
    most = 0

    async def work(key: Resource[str]) -> None:
        nonlocal most
        most = max(most, in_flight(*keys))
        await asyncio.sleep(1)

    async with contextlib.AsyncExitStack() as pools:
        tasks = [
            await pools.enter_async_context(headgate.TaskPool(f"permits-{nth}", max_concurrent=5, resources=one))
            for nth, one in enumerate(keys)
        ]
        handles = [await pool.submit(work) for pool in tasks for _ in range(4)]
        await settle()
        assert sum(pool.snapshot().active for pool in tasks) == 2
        await asyncio.gather(*handles)
    assert most == 2
    assert clock.now() == 6.0


@virtual
async def test_h03_tasks_that_wait_for_a_permit_go_on_although_more_was_asked_for_while_no_slot_was_free() -> None:
    place = SharedMemory()

    def process() -> ResourcePool[str]:
        resources = [Resource("a", "secret-a", 2, tags=["a"]), Resource("b", "secret-b", tags=["b"])]
        return ResourcePool(resources, name="keys", store=place.member())

    one, other = process(), process()
    elsewhere = Gate()
    held = [asyncio.create_task(other.run(elsewhere, tags=["a"])) for _ in range(2)]
    await settle()
    free = asyncio.Event()

    async def work(key: Resource[str]) -> str:
        if key.resource_id == "b":
            await free.wait()
        return key.resource_id

    async with headgate.TaskPool("tasks", max_concurrent=1, resources=one) as tasks:
        waits = await tasks.submit(work, tags=["a"])
        await settle()
        runs = await tasks.submit(work, tags=["b"])
        await settle()
        call = asyncio.create_task(one.run(ident, tags=["a"], wait_for_capacity=True))  # asks for a second permit
        await settle()
        free.set()
        assert await runs == "b"
        elsewhere.finish(0)
        elsewhere.finish(1)
        assert await asyncio.wait_for(call, 60) == "a"
        assert await asyncio.wait_for(waits, 60) == "a"
    await asyncio.gather(*held)


@virtual
async def test_h03_a_removed_resource_returns_its_permits() -> None:
    place = SharedMemory()
    one, other = share(place, limit=1), share(place, limit=1)
    assert await one.run(ident, exclude=["k2"]) == "k1"
    await one.remove("k1")
    assert await other.run(ident, exclude=["k2"]) == "k1"
    assert clock.now() == 0.0


@virtual
async def test_h03_one_probe_for_all_processes() -> None:
    place = SharedMemory()
    pools, gate = [share(place, "k", probe_on_recovery=True) for _ in range(3)], Gate()
    with pytest.raises(PoolExhausted):
        await pools[0].run(always(rate_limited()))
    await asyncio.sleep(30)
    calls = [asyncio.create_task(pool.run(gate, wait_for_capacity=True)) for pool in pools for _ in range(3)]
    await settle()
    assert len(gate.uses) == 1
    gate.finish(0)
    await settle()
    assert len(gate.uses) == 1 + 2 * 3, "after a success two at a time in each process"
    for number in range(1, 9):
        await settle()
        gate.finish(number)
    await asyncio.gather(*calls)


@virtual
async def test_h03_a_probe_that_fails_rests_the_resource_in_all_processes() -> None:
    place = SharedMemory()
    pools = [share(place, "k", probe_on_recovery=True) for _ in range(3)]
    probes = 0

    async def limited(key: Resource[str]) -> None:
        nonlocal probes
        probes += 1
        await asyncio.sleep(0.1)
        raise CooldownResource

    for seconds in (30, 120):
        before, probes = probes, 0
        calls = [pool.run(limited, wait_for_capacity=True, within=1, max_attempts=1) for pool in pools]
        await asyncio.gather(*calls, return_exceptions=True)
        assert probes == (3 if seconds == 30 else 1), before
        assert len({cooldown(pool, "k") for pool in pools}) == 1
        await asyncio.sleep(seconds)


def cut_off_with_cooldowns(place: SharedMemory) -> tuple[ResourcePool[str], ResourcePool[str], MemoryState]:
    """Two processes that do not hear of each other's cooldowns, and the store of the second one."""
    store = place.member()
    one, other = share(place, "k", probe_on_recovery=True), share(store, "k", probe_on_recovery=True)
    store.cut_off()
    return one, other, store


@virtual
async def test_h03_a_probe_goes_on_when_a_cooldown_is_told_that_was_over_before_it_began() -> None:
    one, other, store = cut_off_with_cooldowns(SharedMemory())
    gate = Gate()
    for pool in (one, other):
        with pytest.raises(PoolExhausted):
            await pool.run(always(rate_limited()))
        await asyncio.sleep(1)
    await asyncio.sleep(30)
    probing = asyncio.create_task(one.run(gate))
    await settle()
    store.reconnect()
    with pytest.raises(PoolExhausted):
        await one.run(ident)
    gate.finish(0)
    await probing
    assert cooldown(one, "k") == cooldown(other, "k") == ("healthy", 0, 0.0), "the probe proves that it is over"


@virtual
async def test_h03_a_call_of_before_the_end_of_a_cooldown_that_is_told_late_keeps_no_probe_out() -> None:
    one, other, store = cut_off_with_cooldowns(SharedMemory())
    gate = Gate()
    for pool in (one, other):
        with pytest.raises(PoolExhausted):
            await pool.run(always(rate_limited()))
        await asyncio.sleep(1)
    await asyncio.sleep(28.5)
    old = asyncio.create_task(one.run(gate))
    await asyncio.sleep(1)
    store.reconnect()
    assert await one.run(ident) == "k", "it does not wait for a call that proves nothing"
    gate.finish(0)
    await old


@virtual
async def test_h03_the_right_to_probe_goes_on_when_its_process_dies_or_has_nothing_to_do() -> None:
    place = SharedMemory()
    store = place.member()
    dying, idle, other = (share(one, "k", probe_on_recovery=True) for one in (store, place, place))
    gate = Gate()
    with pytest.raises(PoolExhausted):
        await dying.run(always(rate_limited()))
    await asyncio.sleep(30)
    probing = asyncio.create_task(dying.run(gate))
    await settle()
    waiting = asyncio.create_task(other.run(gate, wait_for_capacity=True))
    await settle()
    assert len(gate.uses) == 1
    store.close()
    await settle()
    assert len(gate.uses) == 2
    waiting.cancel()  # a probe without a verdict is offered again, to any process
    await settle()
    assert await idle.run(ident) == "k"
    gate.finish(0)
    await probing


# -- the store fails ---------------------------------------------------------------------------------------------------


@virtual
async def test_h04_cut_off_a_pool_learns_by_itself_and_joins_when_the_store_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = SharedMemory()
    store = place.member()
    one, other = share(store), share(place)
    seen: list[str] = []
    stop = headgate.subscribe(lambda event: seen.append(event.name), "resources.health")
    with caplog.at_level(logging.INFO, "headgate.resources"):
        store.cut_off()
        store.cut_off()
        await one.disable("k1")
        await other.disable("k2")
        assert (status(one, "k1"), status(one, "k2")) == ("disabled", "healthy")
        assert await one.run(ident) == "k2"
        store.reconnect()
        reported()
    stop()
    assert [status(pool, name) for pool in (one, other) for name in ("k1", "k2")] == ["disabled"] * 4
    assert (seen.count("health_unshared"), seen.count("health_shared")) == (1, 1)
    said = [record for record in caplog.records if "not shared" in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"]
    store.cut_off()
    reported()
    store.reconnect()


@virtual
async def test_h04_cut_off_permits_stay_usable_and_no_new_ones_come() -> None:
    place = SharedMemory()
    store = place.member()
    one, other, gate = share(store, "k", limit=4), share(place, "k", limit=4), Gate()
    held = [asyncio.create_task(other.run(gate)) for _ in range(2)]
    await settle()
    calls = [asyncio.create_task(one.run(gate, wait_for_capacity=True)) for _ in range(4)]
    await settle()
    assert in_flight(one) == 2
    store.cut_off()
    with pytest.raises(PoolExhausted):
        await one.run(ident)
    assert clock.now() == 0.0, "there is nobody to ask"
    for number in range(2, 4):
        gate.finish(number)
    await settle()
    assert in_flight(one, other) == 4, "its own permits go on"
    gate.finish(0)
    gate.finish(1)
    await asyncio.gather(*held)
    assert in_flight(one) == 2
    gate.finish(4)
    gate.finish(5)
    store.reconnect()
    await asyncio.gather(*calls)


@virtual
async def test_h04_cut_off_each_process_probes_by_itself() -> None:
    place = SharedMemory()
    store = place.member()
    one = share(store, "k", probe_on_recovery=True)
    with pytest.raises(PoolExhausted):
        await one.run(always(rate_limited()))
    store.cut_off()
    await asyncio.sleep(30)
    assert await one.run(ident) == "k"
    store.reconnect()
    assert cooldown(one, "k") == ("healthy", 0, 0.0)


@virtual
async def test_h04_a_store_that_cannot_write_is_tried_again_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    place = SharedMemory()
    store = place.member()
    one, other = share(store), share(place)
    transact: Callable[..., Any] = store.transact

    def full(*args: Any, **options: Any) -> Any:
        raise headgate.StoreWriteFailed("no space left on device")

    store.transact = full  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "headgate.resources"):
        await one.disable("k1")
        await one.disable("k2")
        reported()
    assert sum("could not be stored" in record.getMessage() for record in caplog.records) == 1
    assert status(other, "k1") == "healthy"
    store.transact = transact  # type: ignore[method-assign]
    store.wake(None)
    assert status(other, "k1") == status(other, "k2") == "disabled"


async def use_without_store(pool: ResourcePool[str]) -> None:
    """Use a pool whose store takes nothing any more."""
    await pool.disable("k1")
    await pool.disable("k2")
    await pool.enable("k2")
    assert await pool.run(ident) == "k2"
    reported()


@virtual
async def test_h04_a_store_that_the_program_closed_ends_the_sharing_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = SharedMemory().member()
    one = share(store)
    store.close()
    await use_without_store(one)
    assert not [record for record in caplog.records if "store" in record.getMessage()]


@virtual
async def test_h04_a_store_that_refuses_although_nobody_closed_it_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = SharedMemory().member()
    one = share(store)

    def refuse(*args: Any, **options: Any) -> Any:
        raise PoolClosed("the thread of the store cannot be started: there are too many")

    store.transact = refuse  # type: ignore[method-assign]
    await use_without_store(one)
    told = [record.getMessage() for record in caplog.records if "not shared any more" in record.getMessage()]
    assert len(told) == 1
    assert "cannot be started" in told[0]


@virtual
async def test_g24_garbage_in_the_store_is_warned_of_once_and_told_again(caplog: pytest.LogCaptureFixture) -> None:
    place = SharedMemory()
    one, other = share(place), share(place)
    await one.disable("k1")
    for text in ("os:system", '{"v": 1, "health": {"k": "os:system"}, "members": {}}', "os:system"):
        place.texts[KEY] = text
        for member in list(place.members.values()):
            member.wake(None)
    reported()
    assert status(one, "k1") == status(other, "k1") == status(share(place), "k1") == "disabled"
    said = [record.getMessage() for record in caplog.records if "unreadable" in record.getMessage()]
    assert len(said) == len(set(said)), "each cause once for each pool"
    assert said
    await other.disable("k2")
    assert status(one, "k2") == "disabled"


@virtual
async def test_g24_the_state_of_a_newer_release_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    place = SharedMemory()
    place.texts[KEY] = '{"v": 99}'
    one = share(place)
    await one.disable("k1")
    assert place.texts[KEY] == '{"v": 99}'
    assert await one.run(ident) == "k2"
    reported()
    assert sum("newer" in record.getMessage() for record in caplog.records) == 1


@virtual
async def test_g24_h01_no_value_and_no_reason_is_in_the_store() -> None:
    place = SharedMemory()
    planted = "sk-planted-0123456789"
    one = ResourcePool({"k1": planted, "k2": "other"}, name="keys", store=place.member())
    with pytest.raises(PoolExhausted):
        await one.run(always(CooldownResource(5, f"{planted} is over its limit")), retry_delay=0)
    text = place.texts[KEY]
    assert "k1" in text
    assert planted not in text
    assert "over its limit" not in text


@virtual
async def test_h01_state_stays_small() -> None:
    place = SharedMemory()
    one = ResourcePool({f"key-{number}": number for number in range(500)}, name="keys", store=place.member())
    for number in range(0, 500, 100):
        await one.disable(f"key-{number}")
    assert len(place.texts[KEY]) < 600
    for number in range(0, 500, 100):
        await one.enable(f"key-{number}")
    for number in range(1, 500, 2):
        await one.cool(f"key-{number}", 10.0)
    assert len(place.texts[KEY]) > 10_000
    await asyncio.sleep(90_000)
    await one.disable("key-2")
    assert len(place.texts[KEY]) < 600, "of what was well again for a day, only that was enabled by hand is known"


# -- a pool is dropped -------------------------------------------------------------------------------------------------


@virtual
async def test_h01_a_pool_that_is_dropped_is_not_kept_by_its_store() -> None:
    place = SharedMemory()
    store = place.member()
    other = share(place, "k", limit=1)
    dropped = share(store, "k", limit=1)
    assert await dropped.run(ident) == "k"
    gone = weakref.ref(engine_of(dropped))
    del dropped
    gc.collect()
    assert gone() is None
    assert await other.run(ident) == "k", "its permits are free, although its process lives"
    assert place.texts[KEY].count("/") == 1


@virtual
async def test_h04_a_pool_that_is_dropped_while_cut_off_is_not_kept_either() -> None:
    store = SharedMemory().member()
    dropped = share(store)
    store.cut_off()
    await dropped.disable("k1")
    gone = weakref.ref(engine_of(dropped))
    del dropped
    gc.collect()
    reported()
    gc.collect()
    assert gone() is None
    store.reconnect()
