"""How a pool takes part in a shared budget: what it asks for, and that it does not ask for ever. All on one loop."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from headgate import SqliteStore, StoreWriteFailed, TaskPool
from headgate.sharing.memory import MemoryState, SharedMemory
from headgate.sharing.protocol import Message, exchange
from headgate.sharing.slots import SLOTS, Said, Settings, Told, Want
from headgate.sharing.states import ClockOffset, Seen
from headgate.tasks.names import unregister
from headgate.tasks.scheduling.share import Share
from headgate.testing import run, settle
from tests.unit.tasks.test_shared_pools import Work, make


def count_exchanges(member: MemoryState, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    counted: list[str] = []
    transact = member.transact

    def counting(key: str, *given: Any, **options: Any) -> Any:
        counted.append(key)
        return transact(key, *given, **options)

    monkeypatch.setattr(member, "transact", counting)
    return counted


def test_g20_after_a_lost_lease_it_asks_for_no_more_than_it_could_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        place, work = SharedMemory(), Work()
        pool, member = make(place, max_concurrent=2)
        first, second = await pool.submit(work, 1), await pool.submit(work, 2)
        queued = [await pool.submit(work, number) for number in (3, 4)]
        counted = count_exchanges(member, monkeypatch)
        member.lose()
        await settle()
        assert len(counted) < 10, "both of its slots are used by tasks that nobody counts"
        assert [handle.status for handle in queued] == ["queued", "queued"]
        work.let_go(1)
        await first
        await settle()
        assert [handle.status for handle in queued] == ["running", "queued"]
        assert len(counted) < 20
        work.let_go()
        await asyncio.gather(second, *queued)
        await pool.close()

    run(main)


def test_g20_past_its_deadline_it_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        place, work = SharedMemory(), Work()
        pool, member = make(place, max_concurrent=1)
        counted = count_exchanges(member, monkeypatch)
        member.deadline = -1.0
        queued = await pool.submit(work, 1)
        await settle()
        assert (queued.status, len(counted) < 10) == ("queued", True)
        member.deadline = float("inf")
        member.wake(None)
        await settle()
        assert queued.status == "running"
        work.let_go()
        await pool.close()

    run(main)


def test_g22_several_wakes_in_one_turn_of_the_loop_are_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        place, work = SharedMemory(), Work()
        pool, member = make(place, max_concurrent=1)
        member.wake(None)  # before it has a loop: that must not make it deaf to those that come
        running, queued = await pool.submit(work, 1), await pool.submit(work, 2)
        counted = count_exchanges(member, monkeypatch)
        for times in (1, 2):
            for _ in range(5):
                member.wake(None)
            await settle()
            assert len(counted) == times
        work.let_go()
        await asyncio.gather(running, queued)
        await pool.close()

    run(main)


def test_g04_a_resize_that_the_store_could_not_write_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        place, work = SharedMemory(), Work()
        one, member = make(place, max_concurrent=1)
        two, _ = make(place, max_concurrent=1)
        _ = await one.submit(work, 1)
        transact = member.transact

        def full(key: str, step: Any, **options: Any) -> Any:
            def failing(*_: object) -> Any:
                raise StoreWriteFailed("the disk is full")

            return transact(key, failing, **options)

        monkeypatch.setattr(member, "transact", full)
        one.resize(3)
        await settle()
        assert one.max_concurrent == 1
        monkeypatch.setattr(member, "transact", transact)
        await asyncio.sleep(2.0)  # on the virtual clock
        assert one.max_concurrent == 3
        _ = await two.submit(work, 2)
        assert two.max_concurrent == 3
        two.resize(2)
        await settle()
        member.wake(None)
        await settle()
        assert one.max_concurrent == 2, "it says its own only once"
        work.let_go()
        await asyncio.gather(one.close(), two.close())

    run(main)


def test_g11_the_clock_of_the_store_is_known_within_the_quickest_exchange() -> None:
    share = Share(Settings(1, "fifo"), lambda: None)

    def exchanged(sent: float, stored: float, received: float) -> float:
        share.message(sent, ("", 0), ())
        share.take(Told("m", share.settings), ClockOffset.read_between(sent, stored, received), received)
        (want,) = share.message(received, ("", 0), [Waiting()]).wants  # type: ignore[list-item]
        return want.at - received

    assert exchanged(10.0, 111.0, 12.0) == pytest.approx(100.0)
    assert exchanged(20.0, 120.1, 20.1) == pytest.approx(100.0)
    assert exchanged(30.0, 130.0, 80.0) == pytest.approx(100.0), "a reply that was long on its way changes nothing"
    assert exchanged(90.0, 190.5, 90.1) == pytest.approx(100.4), "clocks may drift"
    share.message(91.0, ("", 0), ())
    share.take(Told("m", share.settings), ClockOffset(7.0, 7.0), 92.0)
    (want,) = share.message(100.0, ("", 0), [Waiting()]).wants  # type: ignore[list-item]
    assert want.at == 107.0, "a store that knows it is believed"


def test_g21_after_the_state_was_lost_nothing_is_granted_before_all_have_spoken() -> None:
    settings, alive, text = Settings(3, "fifo"), {"m1", "m2", "m3"}, None

    def said(member: str, seq: int) -> Any:
        nonlocal text
        message = Message("t", member, Said(seq, settings, {"": 1}, [Want("", 5, 1.0)]))
        seen = Seen(1.0, member, lambda one: one not in alive, None, ("m1", "m2", "m3"))
        outcome = exchange(SLOTS, text, seen, message)
        text = outcome.state
        return outcome

    first = said("m1", 7)
    assert (first.reply.body.grants, first.reply.body.alone, first.wakes) == ((), False, {"m2", "m3"})
    second = said("m2", 9)
    assert second.reply.body.grants == ()
    assert "m3" in second.wakes
    alive.remove("m3")
    assert len(said("m1", 8).reply.body.grants) == 1, "the third is gone, and two slots are used"


class Waiting:
    """As much of a task as a queue asks for that has no tenants."""


@pytest.mark.integration
def test_g23_a_pool_whose_loop_was_closed_around_it_holds_nothing(tmp_path: Path) -> None:
    """As in a program that calls asyncio.run again and again, and forgets to close the pool in one of them."""
    mine, other = SqliteStore(tmp_path / "s.db", heartbeat=0.1), SqliteStore(tmp_path / "s.db", heartbeat=600.0)
    settings: dict[str, Any] = {"scope": "tenant", "scope_id": "acme", "max_concurrent": 2}
    left_pool = TaskPool("left", store=mine, **settings)

    async def leaves() -> None:
        for _ in range(3):
            _ = await left_pool.submit(asyncio.sleep, 100)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leaves())
    assert left_pool.snapshot().active == 2
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined] # it is what the test is about
    loop.close()
    for task in tasks:  # as the collector does with them some time
        task.get_coro().close()  # type: ignore[union-attr]

    async def goes_on() -> None:
        unregister(left_pool)
        async with TaskPool("left", store=other, **settings) as pool:
            await asyncio.wait_for(asyncio.gather(*[await pool.submit(asyncio.sleep, 0) for _ in range(4)]), 30)

    asyncio.run(goes_on())
    mine.close()
    other.close()


def test_g20_a_pool_that_is_alone_starts_nothing_after_its_store_was_closed(tmp_path: Path) -> None:
    async def main() -> None:
        work, options = Work(), {"max_concurrent": 1, "scope": "tenant", "scope_id": "acme"}
        with SqliteStore(tmp_path / "shared.db") as closed:
            pool = TaskPool("closed", store=closed, **options)  # type: ignore[arg-type]
            unregister(pool)
            first, second = [await pool.submit(work, number) for number in (1, 2)]
            assert pool.snapshot().shared.alone, "it uses its slot again without asking"
        work.let_go()
        await first
        await asyncio.sleep(0.1)
        assert (second.status, work.began) == ("queued", [1]), "its slot is free for others"
        assert not pool.snapshot().shared.reachable, "it has heard of it"
        await pool.close(cancel=True)

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_g06_a_forked_child_wakes_no_event_loop_of_its_parent(tmp_path: Path) -> None:
    options: dict[str, Any] = {"scope": "tenant", "max_concurrent": 1}
    with SqliteStore(tmp_path / "shared.db", heartbeat=0.05) as store:
        bound = TaskPool("bound", scope_id="a", store=store, **options)
        free = TaskPool("free", scope_id="b", store=store, **options)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(bound.submit(asyncio.sleep, 0))
        pid = os.fork()
        if pid == 0:
            planned = len(loop._ready)  # type: ignore[attr-defined]
            free.resize(2)  # from now on the store has a thread here too, which tells all pools to look
            time.sleep(0.5)
            os._exit(len(loop._ready) - planned)  # type: ignore[attr-defined]
        _, status = os.waitpid(pid, 0)
        loop.run_until_complete(bound.close())
        loop.run_until_complete(free.close())
        loop.close()
    assert os.waitstatus_to_exitcode(status) == 0
