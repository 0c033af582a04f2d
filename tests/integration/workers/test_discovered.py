"""Pools that use workers which they did not start: durable and hybrid ones, tags, lease, quorum, admission."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Self

import pytest

import headgate
from headgate import LocalWorker, RoundRobinLoadBalancer, WorkerMetadata, WorkerPool
from headgate.discovery import DiscoveryEvent, OwnDiscovery
from headgate.errors import InvalidArgument, InvalidType, NoWorkersAvailable
from headgate.workers.client.dispatcher import Dispatcher
from headgate.workers.client.peers import usable_peers
from headgate.workers.mapping import routine_for
from headgate.workers.protocol.messages import Introduction, Peer
from tests.support.workers import jobs
from tests.support.workers.support import Shared, run, until


class Fleet:
    """Three workers that were started elsewhere and listen on TCP ports, for all tests of this file."""

    def __init__(self) -> None:
        self.shared = Shared(spawn=3, worker=lambda *tags, credentials=None: LocalWorker("fleet", host="127.0.0.1"))
        self.shared.open()
        self.workers = [view.metadata for view in self.shared.pool.workers()]
        self.pids = {metadata.pid for metadata in self.workers}

    def discovery(self, count: int = 3, **fields: Any) -> OwnDiscovery:
        """A discovery that tells of some of them."""
        discovery = OwnDiscovery()
        for metadata in self.workers[:count]:
            discovery.announce("worker-added", replace(metadata, **fields))
        return discovery


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.shared.close()


async def reached(count: int = 12) -> set[int]:
    """The pids of the workers that answer."""
    return set(await asyncio.gather(*(jobs.pid() for _ in range(count))))


async def reach(pids: set[int], seconds: float = 10.0) -> None:
    """Wait until exactly these workers answer."""
    async with asyncio.timeout(seconds):
        while await reached() != pids:  # noqa: ASYNC110 - what it waits for are answers of other processes
            await asyncio.sleep(0.01)


# -- four modes -------------------------------------------------------------------------------------------------------


def test_w20_a_durable_pool_spawns_none_and_uses_those_that_are_found(fleet: Fleet) -> None:
    async def main() -> None:
        async with WorkerPool(discovery=fleet.discovery()) as pool:
            await reach(fleet.pids)
            assert {view.pid for view in pool.workers()} == fleet.pids
            assert {view.state for view in pool.workers()} == {"ready"}

    run(main)


def test_w20_a_hybrid_pool_uses_its_own_workers_and_those_that_are_found_and_announces_its_own(fleet: Fleet) -> None:
    discovery = fleet.discovery(2)

    async def main() -> None:
        async with WorkerPool("mine", "fleet", spawn=1, discovery=discovery) as pool:
            own = [view for view in pool.workers() if "mine" in view.tags]
            assert len(own) == 1
            await reach({own[0].pid, *(one.pid for one in fleet.workers[:2])})
            assert not own[0].address.startswith("unix:"), "others could not reach it"
            assert [uid async for uid in uids_in(discovery, 3)].count(own[0].uid) == 1
            async with WorkerPool("mine", discovery=discovery):
                assert await reached() == {own[0].pid}, "it serves two pools"
        assert own[0].uid not in [uid async for uid in uids_in(discovery, 2)]

    run(main)


def test_w66_a_hybrid_pool_over_local_discovery_listens_on_unix_sockets_that_only_this_user_reaches() -> None:
    async def main() -> None:
        discovery = headgate.LocalDiscovery()
        async with WorkerPool(spawn=1, discovery=discovery) as pool:
            own = pool.workers()[0]
            assert own.address.startswith("unix:")
            assert os.stat(os.path.dirname(own.address.removeprefix("unix:"))).st_mode & 0o777 == 0o700
            assert await reached() == {own.pid}
            async with WorkerPool(discovery=discovery):
                assert await reached() == {own.pid}, "other programs of this user find it there"
                assert await jobs.pid_of_a_peer() == own.pid

    run(main)


async def uids_in(discovery: OwnDiscovery, count: int) -> AsyncIterator[str]:
    found = 0
    subscription = discovery.subscribe()
    async for event in subscription:
        yield event.metadata.uid
        found += 1
        if found == count:
            break
    await subscription.aclose()  # type: ignore[attr-defined]


def test_w20_the_lease_caps_discovered_workers_and_not_those_that_were_spawned(fleet: Fleet) -> None:
    async def main() -> None:
        async with WorkerPool(discovery=fleet.discovery(), lease=2) as pool:
            assert len(await reached()) <= 2
            await until(lambda: len(pool.workers()) == 2)
        async with WorkerPool(spawn=1, discovery=fleet.discovery(), lease=1) as pool:
            own = pool.workers()[0].pid
            await until(lambda: len(pool.workers()) == 1 + (len(pool.workers()) > 1))
            await reach({own, fleet.workers[0].pid})

    run(main)


def test_w20_a_lease_without_a_discovery_has_no_effect() -> None:
    assert WorkerPool(spawn=1, lease=0).workers() == []


def test_w20_w26_a_pool_that_only_discovers_workers_is_not_resized(fleet: Fleet) -> None:
    async def main() -> None:
        async with WorkerPool(discovery=fleet.discovery(1)) as pool:
            await reach({fleet.workers[0].pid})
            with pytest.raises(InvalidArgument, match=r"only discovers workers cannot be resized.*`headgate worker`"):
                await pool.resize(1)
            assert [view.pid for view in pool.workers()] == [fleet.workers[0].pid], "none was started here"
        async with WorkerPool(spawn=1, discovery=fleet.discovery(1)) as pool:
            await pool.resize(2)
            assert len([view for view in pool.workers() if view.pid not in fleet.pids]) == 2

    run(main)


def test_w21_tags_select_discovered_workers_by_any_match(fleet: Fleet) -> None:
    discovery = OwnDiscovery()
    for metadata, tags in zip(fleet.workers, (["gpu"], ["big", "old"], ["small"]), strict=True):
        discovery.announce("worker-added", replace(metadata, tags=frozenset(tags)))

    async def main() -> None:
        async with WorkerPool("gpu", "big", discovery=discovery) as pool:
            await reach({one.pid for one in fleet.workers[:2]})
            assert len(pool.workers()) == 2

    run(main)


# -- lazy, forms, arguments -------------------------------------------------------------------------------------------


class Counting:
    """A discovery that counts subscriptions."""

    def __init__(self, inner: OwnDiscovery) -> None:
        self.inner = inner
        self.subscriptions = 0
        self.publisher = inner

    def subscribe(self, filter: Any = None) -> AsyncIterator[DiscoveryEvent]:
        self.subscriptions += 1
        return self.inner.subscribe(filter)


def test_w22_lazy_follows_the_discovery_at_the_first_call_and_else_before(fleet: Fleet) -> None:
    async def main() -> None:
        lazy, eager = Counting(fleet.discovery(1)), Counting(fleet.discovery())
        async with WorkerPool(discovery=lazy):
            await asyncio.sleep(0.02)
            assert lazy.subscriptions == 0
            await jobs.pid()
            assert lazy.subscriptions == 1
        async with WorkerPool(discovery=eager, lazy=False, quorum=3) as pool:
            assert eager.subscriptions == 1
            assert [view.state for view in pool.workers()] == ["ready"] * 3, "they are connected"

    run(main)


def test_w22_w24_a_pool_that_is_not_lazy_says_at_its_start_that_nobody_came(fleet: Fleet) -> None:
    async def main() -> None:
        with pytest.raises(NoWorkersAvailable, match=r"quorum=2.*quorum_timeout=0.3"):
            async with WorkerPool(discovery=fleet.discovery(1), lazy=False, quorum=2, quorum_timeout=0.3):
                pass

    run(main)


def forms() -> list[tuple[str, Callable[[OwnDiscovery], Any]]]:
    @contextlib.contextmanager
    def plain(discovery: OwnDiscovery) -> Iterator[OwnDiscovery]:
        yield discovery

    @contextlib.asynccontextmanager
    async def asynchronous(discovery: OwnDiscovery) -> AsyncIterator[OwnDiscovery]:
        yield discovery

    async def awaited(discovery: OwnDiscovery) -> OwnDiscovery:
        return discovery

    return [
        ("instance", lambda discovery: discovery),
        ("factory", lambda discovery: lambda: discovery),
        ("async factory", lambda discovery: lambda: awaited(discovery)),
        ("context manager", plain),
        ("async context manager", asynchronous),
        ("factory of a context manager", lambda discovery: lambda: asynchronous(discovery)),
    ]


@pytest.mark.parametrize(("form", "make"), forms(), ids=[form for form, _ in forms()])
def test_w23_a_discovery_may_be_given_in_several_forms(fleet: Fleet, form: str, make: Callable[..., Any]) -> None:
    async def main() -> None:
        async with WorkerPool(discovery=make(fleet.discovery(1))):
            assert await jobs.pid() == fleet.workers[0].pid

    run(main)


def test_w23_what_is_no_discovery_is_refused() -> None:
    with pytest.raises(InvalidType, match="publisher and subscribe"):
        WorkerPool(discovery=7)  # type: ignore[arg-type]

    async def main() -> None:
        with pytest.raises(InvalidType, match="discovery gave a int"):
            async with WorkerPool(discovery=lambda: 7):
                pass

    run(main)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"spawn": -1}, "spawn"),
        ({"lease": -1}, "lease"),
        ({"spawn": 0}, "spawn"),
        ({"spawn": 2, "quorum": 3}, "quorum"),
        ({"spawn": 2, "lease": 5, "quorum": 3}, "quorum"),  # the lease has no effect without a discovery
        ({"discovery": True, "spawn": -1}, "spawn"),
        ({"discovery": True, "lease": 0}, "lease"),
        ({"discovery": True, "lease": 0, "spawn": 0}, "lease"),
        ({"discovery": True, "lease": 2, "quorum": 3}, "quorum"),
        ({"discovery": True, "lease": 2, "spawn": 1, "quorum": 4}, "quorum"),
    ],
    ids=str,
)
def test_w24_numbers_that_cannot_go_together_are_refused_at_construction(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        pool_with(options)


@pytest.mark.parametrize(
    "options",
    [
        {"discovery": True, "quorum": 100},
        {"discovery": True, "lease": 2, "spawn": 1, "quorum": 3},
        {"discovery": True, "lease": 0, "spawn": 1},
        {"discovery": True, "spawn": 0},
    ],
    ids=str,
)
def test_w24_numbers_that_go_together_are_taken(options: dict[str, Any]) -> None:
    pool_with(options)


def pool_with(options: dict[str, Any]) -> WorkerPool:
    return WorkerPool(**({**options, "discovery": OwnDiscovery()} if "discovery" in options else options))


# -- waiting for workers ----------------------------------------------------------------------------------------------


def test_w24_a_call_waits_for_the_first_worker_and_for_the_quorum(fleet: Fleet) -> None:
    async def main() -> None:
        discovery = OwnDiscovery()
        async with WorkerPool(discovery=discovery, quorum=2):
            call = asyncio.ensure_future(jobs.pid())
            await asyncio.sleep(0.05)
            discovery.announce("worker-added", fleet.workers[0])
            await asyncio.sleep(0.2)
            assert not call.done(), "one is not two"
            discovery.announce("worker-added", fleet.workers[1])
            assert await call in fleet.pids

    run(main)


def test_w24_a_call_that_finds_no_worker_says_so_after_the_quorum_timeout() -> None:
    async def main() -> None:
        async with WorkerPool(discovery=OwnDiscovery(), quorum_timeout=0.1):
            with pytest.raises(NoWorkersAvailable, match=r"quorum_timeout=0.1 s: none is there"):
                await jobs.pid()

    run(main)


def test_w24_a_call_that_finds_fewer_workers_than_the_quorum_names_it(fleet: Fleet) -> None:
    async def main() -> None:
        async with WorkerPool(discovery=fleet.discovery(1), quorum=2, quorum_timeout=1.0):
            uid = fleet.workers[0].uid
            says = rf"fewer than quorum=2 workers for .* within quorum_timeout=1 s: {uid}: ready"
            with pytest.raises(NoWorkersAvailable, match=says):
                await jobs.pid()

    run(main)


def test_w24_a_worker_that_is_not_there_gets_no_call_and_is_named(fleet: Fleet) -> None:
    async def main() -> None:
        discovery = fleet.discovery(1)
        nobody = replace(fleet.workers[0], uid="nobody", address="127.0.0.1:9")
        discovery.announce("worker-added", nobody)
        async with WorkerPool(discovery=discovery) as pool:
            assert await reached(50) == {fleet.workers[0].pid}
            discovery.announce("worker-dropped", fleet.workers[0])
            await until(lambda: [view.uid for view in pool.workers()] == ["nobody"])
            with pytest.raises(headgate.DispatchTimeout, match=r"nobody: .*127.0.0.1:9"):
                with headgate.RuntimeContext(dispatch_timeout=1.0):
                    await jobs.pid()
            assert pool.workers()[0].state == "lost"

    run(main)


def test_w66_a_fake_worker_does_not_keep_a_place_of_the_lease(fleet: Fleet) -> None:
    async def main() -> None:
        discovery = OwnDiscovery()
        for number in range(3):
            fake = replace(fleet.workers[0], uid=f"fake-{number}", address=f"127.0.0.1:{number + 1}")
            discovery.announce("worker-added", fake)
        async with WorkerPool(discovery=discovery, lease=1):
            call = asyncio.ensure_future(jobs.pid())
            await asyncio.sleep(0.05)
            discovery.announce("worker-added", fleet.workers[0])
            assert await call == fleet.workers[0].pid

    run(main)


def test_w66_a_lease_among_silent_addresses_finds_the_workers_that_answer(fleet: Fleet) -> None:
    """Fifty ports that take connections and say nothing, before the two workers that are there."""

    async def main(port: int) -> None:
        discovery = OwnDiscovery()
        for number in range(50):
            fake = replace(fleet.workers[0], uid=f"silent-{number}", address=f"127.0.0.1:{port}")
            discovery.announce("worker-added", fake)
        for metadata in fleet.workers[:2]:
            discovery.announce("worker-added", metadata)
        async with WorkerPool(discovery=discovery, lease=2) as pool:
            async with asyncio.timeout(15):  # one after the other they would take 40 seconds
                await jobs.pid()
                await until(lambda: len({view.uid for view in pool.workers() if view.state == "ready"}) == 2)
            assert await reached(50) == {metadata.pid for metadata in fleet.workers[:2]}

    with socket.create_server(("127.0.0.1", 0), backlog=256) as silent:
        run(lambda: main(silent.getsockname()[1]), patience=90)


def test_w24_w41_a_worker_that_is_killed_and_started_again_at_its_address_is_found_again() -> None:
    """The discovery says nothing in between, as a list of addresses would not. With retries no call fails."""

    async def main() -> None:
        async with LocalWorker(host="127.0.0.1") as first:
            assert first.metadata is not None
            port = int(first.metadata.address.rpartition(":")[2])
            discovery = OwnDiscovery()
            discovery.announce("worker-added", first.metadata)
            async with WorkerPool(discovery=discovery):
                results = []

                async def caller() -> None:
                    while len(results) < 300:
                        results.append(await jobs.patient_pid())

                callers = [asyncio.ensure_future(caller()) for _ in range(4)]
                await until(lambda: len(results) > 50)
                os.kill(first.pid, signal.SIGKILL)
                await first.stop()
                async with LocalWorker(host="127.0.0.1", port=port) as second:
                    await asyncio.gather(*callers)
                    assert set(results) == {results[0], second.pid}

    run(main)


# -- admission --------------------------------------------------------------------------------------------------------


def test_w64_only_insecure_workers_are_used_without_credentials_and_an_update_counts(fleet: Fleet) -> None:
    async def main() -> None:
        discovery = fleet.discovery(2)
        discovery.announce("worker-updated", replace(fleet.workers[1], secure=True))
        async with WorkerPool(discovery=discovery) as pool:
            assert await reached() == {fleet.workers[0].pid}
            discovery.announce("worker-updated", replace(fleet.workers[0], secure=True))
            await until(lambda: not pool.workers())
            says = f"{fleet.workers[0].uid}: it has credentials, and a pool"
            with pytest.raises(headgate.DispatchTimeout, match=says):
                with headgate.RuntimeContext(dispatch_timeout=0.1):
                    await jobs.pid()
            discovery.announce("worker-updated", fleet.workers[1])
            await until(lambda: [view.pid for view in pool.workers()] == [fleet.workers[1].pid])
            await reach({fleet.workers[1].pid})

    run(main)


@pytest.mark.parametrize("version", ["99.0.0", "nonsense", ""])
def test_w66_a_version_that_does_not_fit_is_never_used(fleet: Fleet, version: str) -> None:
    async def main() -> None:
        discovery = fleet.discovery(2)
        discovery.announce("worker-updated", replace(fleet.workers[0], version=version))
        async with WorkerPool(discovery=discovery, lease=1) as pool:
            await reach({fleet.workers[1].pid})
            discovery.announce("worker-updated", fleet.workers[0])
            discovery.announce("worker-dropped", fleet.workers[1])
            await reach({fleet.workers[0].pid})
            assert len(pool.workers()) == 1

    run(main)


def test_w66_an_updated_address_redirects_calls(fleet: Fleet) -> None:
    async def main() -> None:
        one, other, _ = fleet.workers
        discovery = OwnDiscovery()
        discovery.announce("worker-added", one)
        async with WorkerPool(discovery=discovery) as pool:
            assert await reached() == {one.pid}
            slow = asyncio.ensure_future(jobs.sleep_and_pid(0.3))
            await asyncio.sleep(0.05)
            discovery.announce("worker-updated", replace(one, address=other.address))
            await reach({other.pid})
            assert len(pool.workers()) == 1
            assert await slow == one.pid, "what had begun ends where it is"

    run(main)


def test_w66_a_refresh_neither_repeats_nor_skips_a_worker(fleet: Fleet) -> None:
    async def main() -> None:
        discovery = fleet.discovery()
        async with WorkerPool(discovery=discovery, lazy=False, quorum=3):
            order = [await jobs.pid() for _ in range(3)]
            assert set(order) == fleet.pids
            for number in range(12):
                refreshed = replace(fleet.workers[number % 3], extra={"number": number})
                discovery.announce("worker-updated", refreshed)
                await asyncio.sleep(0)
                assert await jobs.pid() == order[number % 3]

    run(main)


def test_w66_w41_an_evicted_worker_that_is_announced_again_is_used_again(fleet: Fleet) -> None:
    async def main() -> None:
        discovery = OwnDiscovery()
        wrong = replace(fleet.workers[0], address="no address at all")
        discovery.announce("worker-added", wrong)
        async with WorkerPool(discovery=discovery):
            with pytest.raises(NoWorkersAvailable, match=r"all that are known refuse.*is not the address of a worker"):
                await jobs.pid()
            discovery.announce("worker-updated", fleet.workers[0])
            assert await jobs.pid() == fleet.workers[0].pid

    run(main)


def test_w66_two_pools_share_one_discovery_and_one_worker_serves_both(fleet: Fleet) -> None:
    async def main() -> None:
        discovery = fleet.discovery(1)
        async with WorkerPool(discovery=discovery), WorkerPool(discovery=discovery):
            assert await reached() == {fleet.workers[0].pid}

    run(main)


class Troubled:
    """A discovery whose announcements fail or hang."""

    def __init__(self, trouble: str) -> None:
        self.trouble = trouble
        self.publisher = self
        self.published: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.trouble == "exit fails":
            raise OSError("cannot leave")

    async def publish(self, type: str, metadata: WorkerMetadata) -> None:
        self.published.append(type)
        if type == "worker-dropped" and self.trouble == "fails":
            raise OSError("cannot publish")
        if type == "worker-dropped" and self.trouble == "hangs":
            await asyncio.sleep(3600)
        if type == "worker-added" and self.trouble == "added fails":
            raise TimeoutError("the namespace is locked")

    async def subscribe(self, filter: Any = None) -> AsyncIterator[DiscoveryEvent]:
        await asyncio.sleep(3600)
        yield  # type: ignore[misc]


@pytest.mark.parametrize("trouble", [pytest.param("fails", marks=pytest.mark.soak), "hangs", "exit fails"])
def test_w66_w35_workers_end_although_the_announcement_of_it_fails_or_hangs(
    trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> list[int]:
        async with WorkerPool(spawn=2, discovery=Troubled(trouble)) as pool:
            await jobs.pid()
            return [view.pid for view in pool.workers()]

    with caplog.at_level(logging.WARNING, "headgate.workers"):
        pids = run(main)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert {"fails": "cannot publish", "hangs": "could not be taken back", "exit fails": "cannot leave"}[
        trouble
    ] in said


def test_w61a_a_pool_whose_workers_cannot_be_announced_does_not_open_and_ends_them() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError, match="the namespace is locked"):
            async with WorkerPool(spawn=1, discovery=Troubled("added fails")):
                pass

    run(main)  # and `no_leaks` looks for children


def test_w60_a_discovery_that_fails_is_asked_again(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Counting):
        async def subscribe(self, filter: Any = None) -> AsyncIterator[DiscoveryEvent]:
            self.subscriptions += 1
            if self.subscriptions == 1:
                yield DiscoveryEvent("worker-added", fleet.workers[0])
                raise OSError("the network is down")
            async for event in self.inner.subscribe(filter):
                yield event

    async def main() -> None:
        async with WorkerPool(discovery=Failing(fleet.discovery())):
            assert await jobs.pid() == fleet.workers[0].pid
            await reach(fleet.pids)

    run(main)
    assert "the network is down" in caplog.text


# -- nested calls -----------------------------------------------------------------------------------------------------


def test_w20_w04_routines_on_discovered_workers_call_their_peers(fleet: Fleet) -> None:
    async def main() -> None:
        async with WorkerPool(discovery=fleet.discovery(), lazy=False, quorum=3):
            assert await jobs.fib(8) == 21
            peers: set[int] = set()
            async with asyncio.timeout(10):
                while len(peers) < 2:  # a worker connects its peers one after the other
                    peers |= set(await asyncio.gather(*(jobs.pid_of_a_peer() for _ in range(30))))
            assert peers <= fleet.pids

    run(main)


def test_w20_w04_each_worker_comes_to_call_all_workers_of_the_pool(fleet: Fleet, scale: float) -> None:
    """Workers connect to each other one after the other. What one has reached so far must not become the list of
    another: some would call only themselves, and now and then two would leave each other without anybody to call."""

    async def main() -> None:
        async with WorkerPool(discovery=fleet.discovery(), lazy=False, quorum=3) as pool:
            assert await jobs.fib(8) == 21
            async with asyncio.timeout(10):
                while True:
                    called = (await pool.broadcast(jobs.leaves, 9)).values()
                    if all({*pids} == fleet.pids for _, pids in called):
                        return

    for _ in range(max(4, int(40 * scale))):
        run(main)


def test_w04_a_worker_passes_on_the_list_of_the_client_and_an_older_one_changes_nothing(fleet: Fleet) -> None:
    """Not those that it has reached: of these two it reaches one."""
    here = fleet.workers[0]
    both = [Peer(here.uid, here.address), Peer("w-nobody", "127.0.0.1:9")]

    async def told(number: int, peers: list[Peer]) -> list[str]:
        """What a worker knows after another, which has this list, called a routine there."""
        dispatcher = Dispatcher(RoundRobinLoadBalancer(), pool=pool, here="w-elsewhere")
        dispatcher.connections.set_members(usable_peers(peers, secure=False), Introduction(pool, peers, number))
        try:
            known: list[str] = await dispatcher.call(routine_for(jobs.known_peers, "this test"), (), {}, None, "")
            return known
        finally:
            await dispatcher.close("the test is over")

    async def main() -> None:
        client = Dispatcher(RoundRobinLoadBalancer(), pool=pool)  # so that the worker does not forget the pool
        client.connections.set_members([here], Introduction(pool, both[:1], 6))
        assert await client.call(routine_for(jobs.known_peers, "this test"), (), {}, None, "") == [here.uid]
        assert await told(7, both) == [here.uid, "w-nobody"]
        assert await told(6, both[:1]) == [here.uid, "w-nobody"], "it has a newer one"
        assert await told(8, both[:1]) == [here.uid]
        assert await told(0, both) == [here.uid, "w-nobody"], "of a sender that does not number its lists"
        await client.close("the test is over")

    pool = "a pool of this test"
    run(main)


def test_w04_the_first_nested_calls_over_tcp_are_spread_over_all_workers() -> None:
    """Also when one is connected a moment before the others."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(LocalWorker(host="127.0.0.1")) for _ in range(3)]
            discovery = OwnDiscovery()
            for worker in workers:
                assert worker.metadata is not None
                discovery.announce("worker-added", worker.metadata)
            async with WorkerPool(discovery=discovery, lazy=False, quorum=3):
                reached = Counter(await jobs.pids_of_peers(30))
            assert len(reached) == 3, reached

    run(main)


def test_w04_another_loop_of_the_pool_that_reached_one_worker_takes_none_from_the_others(fleet: Fleet) -> None:
    async def main() -> None:
        async with WorkerPool(discovery=fleet.discovery(), lazy=False, quorum=3) as pool:
            every = {one.uid for one in fleet.workers}
            for _ in range(5):
                context = contextvars.copy_context()
                assert await asyncio.to_thread(context.run, asyncio.run, elsewhere(pool)) in fleet.pids
                for known in (await pool.broadcast(jobs.known_peers)).values():
                    assert {*known} == every

    async def elsewhere(pool: WorkerPool) -> int:
        pool._quorum = 1  # of dispatchers that are made from now on: this one calls the worker that it reaches first
        return await jobs.pid()

    run(main)


def test_w62_fake_workers_get_no_task_and_do_not_keep_the_real_one_from_its_work(fleet: Fleet, scale: float) -> None:
    """A thousand addresses at which nobody listens, and some that take connections and say nothing."""

    async def main(port: int) -> None:
        discovery = OwnDiscovery()
        for number in range(int(1000 * scale)):
            address = f"127.0.0.1:{port}" if number % 20 == 0 else "127.0.0.1:9"
            fake = replace(fleet.workers[0], uid=f"fake-{number}", address=address)
            discovery.announce("worker-added", fake)
        discovery.announce("worker-added", fleet.workers[0])
        async with WorkerPool(discovery=discovery):
            assert await reached(50) == {fleet.workers[0].pid}

    with socket.create_server(("127.0.0.1", 0), backlog=256) as silent:
        run(lambda: main(silent.getsockname()[1]), patience=120)


# -- what an attack found ---------------------------------------------------------------------------------------------


def test_w31_a_worker_that_stops_runs_what_its_own_calls_call() -> None:
    """Else a routine that calls others could not end while its worker drains."""

    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            pid = pool.workers()[0].pid
            call = asyncio.ensure_future(jobs.sleep_and_pid_of_a_peer(0.4))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGTERM)
            assert await call is not None

    run(main)


def test_w92_w63_a_call_that_runs_alone_calls_others_although_only_the_address_of_its_worker_was_known() -> None:
    """A list of addresses does not know how workers call themselves."""

    async def main() -> None:
        async with LocalWorker(host="127.0.0.1") as first:
            assert first.metadata is not None
            address = first.metadata.address
            async with WorkerPool(discovery=headgate.StaticDiscovery([address])):
                call = asyncio.ensure_future(jobs.patient_pid_of_a_peer(0.5))
                await asyncio.sleep(0.2)
                os.kill(first.pid, signal.SIGKILL)
                await first.stop()
                async with LocalWorker(host="127.0.0.1", port=int(address.rpartition(":")[2])) as second:
                    assert await call == second.pid

    run(main)


def test_w10_w22_broadcast_in_a_durable_pool_waits_for_its_workers(fleet: Fleet) -> None:
    async def main() -> None:
        async with WorkerPool(discovery=fleet.discovery(), quorum=3) as pool:
            assert set((await pool.broadcast(jobs.pid)).values()) == fleet.pids

    run(main)


def test_w60_a_discovery_that_raises_at_once_or_tells_nonsense_is_outlived(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Counting):
        def subscribe(self, filter: Any = None) -> AsyncIterator[DiscoveryEvent]:
            self.subscriptions += 1
            if self.subscriptions == 1:
                raise OSError("the registry is down")
            return self._events()

        async def _events(self) -> AsyncIterator[DiscoveryEvent]:
            for nonsense in (None, 42, DiscoveryEvent("worker-added", None), DiscoveryEvent("new", fleet.workers[0])):  # type: ignore[arg-type]
                yield nonsense  # type: ignore[misc]
            async for event in self.inner.subscribe():
                yield event

    async def main() -> None:
        async with WorkerPool(discovery=Odd(fleet.discovery(1))):
            assert await jobs.pid() == fleet.workers[0].pid

    run(main)
    assert "the registry is down" in caplog.text
    assert caplog.text.count("which is no event") == 4


def test_w66_workers_that_a_discovery_forgot_while_it_failed_leave_their_places(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.workers.finding.AGAIN", 0.05)
    monkeypatch.setattr("headgate.workers.finding.SETTLING", 0.1)

    class Failing(Counting):
        async def subscribe(self, filter: Any = None) -> AsyncIterator[DiscoveryEvent]:
            self.subscriptions += 1
            yield DiscoveryEvent("worker-added", fleet.workers[min(self.subscriptions, 2) - 1])
            if self.subscriptions == 1:
                raise OSError("the network is down")
            await asyncio.sleep(3600)

    async def main() -> None:
        async with WorkerPool(discovery=Failing(fleet.discovery()), lease=1):
            await reach({fleet.workers[1].pid})

    run(main)


def test_w60_that_no_worker_was_found_is_logged_and_the_error_names_the_discovery(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headgate.workers.finding.SILENT", 0.05)

    async def main() -> None:
        async with WorkerPool(discovery=headgate.LocalDiscovery("nobody-is-here"), quorum_timeout=0.3):
            with pytest.raises(NoWorkersAvailable, match=r"LocalDiscovery\('nobody-is-here'\) was asked"):
                await jobs.pid()

    run(main)
    assert "LocalDiscovery('nobody-is-here') has told of no worker" in caplog.text


def test_w41_o20_a_worker_of_which_only_the_address_was_known_tells_its_host_pid_and_memory() -> None:
    events: list[Any] = []

    async def main() -> None:
        async with LocalWorker(host="127.0.0.1") as worker:
            assert worker.metadata is not None
            discovery = headgate.StaticDiscovery([worker.metadata.address])
            async with WorkerPool(discovery=discovery, name="listed") as pool:
                before = pool.workers()
                assert [(view.pid, view.process.host) for view in before] in ([], [(0, "")]), "nobody is connected"
                assert await jobs.pid() == worker.pid
                [view] = pool.workers()
                assert (view.pid, view.process.host, view.metadata.pid) == (worker.pid, socket.gethostname(), 0)
                assert f"pid {worker.pid} ready" in repr(view)
                [seen] = [one for one in headgate.registry.snapshot()["pools"] if one["name"] == "listed"]
                [row] = seen["workers"]
                assert (row["pid"], row["host"], row["address"]) == (worker.pid, socket.gethostname(), view.address)
                assert row["memory"] == seen["memory"] > 1_000_000
                hungry = asyncio.ensure_future(jobs.hold_memory(200_000_000, 60.0))
                await until(lambda: (pool.workers()[0].process.memory or 0) > row["memory"] + 150_000_000)
                hungry.cancel()
                os.kill(worker.pid, signal.SIGKILL)
                await until(lambda: "worker_lost" in [event.name for event in events])
            assert {event.pid for event in events if event.uid == view.uid} == {worker.pid}

    unsubscribe = headgate.subscribe(events.append, "workers.lifecycle")
    try:
        run(main)
    finally:
        unsubscribe()


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "worker_lost"), (signal.SIGTERM, "worker_stopped")], ids=["lost", "stopped"]
)
def test_w41_a_discovered_worker_that_comes_and_goes_is_an_event(number: int, name: str) -> None:
    events: list[tuple[str, str]] = []

    async def main() -> None:
        async with LocalWorker(host="127.0.0.1") as worker:
            assert worker.metadata is not None
            discovery = OwnDiscovery()
            discovery.announce("worker-added", worker.metadata)
            async with WorkerPool(discovery=discovery):
                await jobs.pid()
                os.kill(worker.pid, number)
                await until(lambda: (name, worker.uid) in events)
            assert [event for event, uid in events if uid == worker.uid] == ["worker_ready", name]

    unsubscribe = headgate.subscribe(lambda event: events.append((event.name, event.uid)), "workers.lifecycle")
    try:
        run(main)
    finally:
        unsubscribe()


def test_w70a_a_second_worker_does_not_take_the_socket_of_the_first(tmp_path: Any) -> None:
    from headgate.workers.protocol.transport import is_listening

    path = os.path.join("/tmp", f"hg-{os.urandom(6).hex()}")
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            assert not is_listening(path)
            server.listen()
            assert is_listening(path)
        assert not is_listening(path)
    finally:
        os.unlink(path)
