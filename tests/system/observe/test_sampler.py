"""The sampler: what it counts, what it shows of pools that give no answer, and what it costs."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from headgate import ResourcePool, TaskPool, WorkerPool, registry, subscribe
from headgate.core.events import Event
from headgate.core.topics import topic_named
from headgate.core.views import Unread
from headgate.dashboard import serve
from headgate.observe import prometheus, rows, sampler
from headgate.observe.feed import Feed
from headgate.observe.sampler import Sampler
from tests.system.observe.conftest import Program
from tests.system.observe.support import eventually


@pytest.fixture
def watched() -> Iterator[Sampler]:
    yield sampler.acquire()
    sampler.release()


@pytest.fixture
def busy() -> Iterator[Program]:
    """An event loop in a thread, for pools of a test's own."""
    program = Program()
    yield program
    program.close()


@contextmanager
def shown(kind: Any, view: Callable[[Any, int], dict[str, Any]], loop: Any = None) -> Iterator[Any]:
    """A pool of this kind that shows what the test says."""

    class Pool:
        name = f"a pool of {kind}"

    pool = Pool()
    registry.register(pool, kind, lambda pool: None, view=view, home=lambda pool: loop)
    try:
        yield pool
    finally:
        registry.unregister(pool)


@contextmanager
def held(program: Program) -> Iterator[Callable[[], None]]:
    """Hold the loop of a program, until what this gives is called."""
    begun, free = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        free.wait()

    program.loop.call_soon_threadsafe(hold)
    begun.wait()
    try:
        yield free.set
    finally:
        free.set()


def view_of(seen: dict[str, Any], name: str) -> dict[str, Any]:
    """The view of the pool of this name."""
    [found] = [one for one in seen["pools"] if one["name"] == name]
    return found


def test_o30_tasks_that_end_before_a_look_that_is_given_up_are_counted_by_the_next(
    busy: Program, watched: Sampler
) -> None:
    async def begin() -> TaskPool:
        pool = TaskPool("o30-late")
        await worked(pool)
        return pool

    async def worked(pool: TaskPool) -> None:
        for _ in range(7):
            await pool.run(asyncio.sleep, 0, key="ann")

    pool = busy.do(begin())
    with held(busy) as free:
        assert view_of(watched.look(), pool.name)["held"]
        free()
        busy.do(worked(pool))  # after it a look that was given up would have had its turn
    eventually(lambda: view_of(watched.look(), pool.name)["held"] is None)
    history = watched.history[view_of(watched.latest, pool.name)["number"]]
    assert history.ended == {("ann", "completed"): 14}
    assert history.waits.cumulated()[-1] == ("+Inf", 14)
    busy.do(pool.close())


def test_o20_looks_at_a_loop_that_is_held_do_not_pile_up(busy: Program, watched: Sampler) -> None:
    looks: list[int] = []

    def view(_: object, rows: int) -> Unread:
        looks.append(rows)
        return Unread()

    with held(busy) as free, shown("tasks", view, busy.loop) as pool:
        for _ in range(3):
            assert view_of(watched.look(), pool.name)["held"]
        free()
        busy.do(asyncio.sleep(0))
        assert looks == []


def test_o20_a_look_that_takes_longer_than_a_loop_may_be_silent_is_no_held_loop(
    busy: Program, watched: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "PATIENCE", 0.05)
    given_up = threading.Event()

    def view(_: object, rows: int) -> Unread:
        given_up.wait(0.1)
        return Unread(state=f"{rows} rows")

    with shown("tasks", view, busy.loop) as first, shown("resources", view, busy.loop) as second:
        seen = watched.look()
        assert [view_of(seen, one.name)["state"] for one in (first, second)] == [f"{sampler.ROWS} rows"] * 2


# -- pools whose view cannot be made -----------------------------------------------------------------------------------


def fails(_: object, rows: int) -> Unread:
    raise ValueError("the engine is away")


def fails_too(_: object, rows: int) -> Unread:
    raise RuntimeError("the engine is away")


@pytest.mark.parametrize(("view", "name"), [(fails, "ValueError"), (fails_too, "RuntimeError")])
@pytest.mark.parametrize("kind", ["tasks", "resources", "workers"])
def test_o01_a_pool_that_cannot_be_shown_hides_no_other(
    kind: str, view: Any, name: str, program: Program, watched: Sampler, caplog: pytest.LogCaptureFixture
) -> None:
    with shown(kind, view) as broken:
        for seen in (registry.snapshot(), watched.look(), watched.look()):
            assert view_of(seen, broken.name)["broken"] == name
            assert "point" not in view_of(seen, broken.name)
            assert view_of(seen, program.pool.name)["active"] == 2
        text = prometheus.exposition(prometheus.PoolCollector(watched)).decode()
        assert broken.name not in text
        assert f'headgate_tasks_active{{pool="{program.pool.name}"}} 2.0' in text
        number = view_of(watched.latest, broken.name)["number"]
        asked = {"pool": f"#{number}", "list": "tenants"}
        assert program.do(rows.rows(asked)) == {"rows": [], "total": 0}
    assert [one.message for one in caplog.records] == [f"the pool 'a pool of {kind}' of {kind} cannot be shown"], (
        "once, with its traceback"
    )


def test_o01_a_pool_that_changes_all_the_time_is_not_broken(watched: Sampler) -> None:
    def changes(_: object, rows: int) -> Unread:
        known = dict.fromkeys(range(3))
        for one in known:
            del known[one]
        return Unread()

    with shown("tasks", changes) as pool:
        view = view_of(watched.look(), pool.name)
        assert view["changing"] is True
        assert not {"broken", "point"} & view.keys()


def test_o20_ctrl_c_in_a_look_is_for_the_program(watched: Sampler) -> None:
    def interrupted(_: object, rows: int) -> Unread:
        raise KeyboardInterrupt

    def look() -> None:
        with suppress(KeyboardInterrupt):
            watched.look()

    async def main() -> None:
        with shown("tasks", interrupted, asyncio.get_running_loop()):
            await asyncio.to_thread(look)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


def test_o20_a_page_that_cannot_be_opened_lets_go_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Sampler) -> None:
        raise ValueError("no look")

    monkeypatch.setattr(Sampler, "look", fail)
    with pytest.raises(ValueError, match="no look"):
        serve()
    assert sampler._shared is None


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_o30_workers_that_are_lost_between_two_looks_are_counted() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as workers:
            for lost in range(1, 4):
                [pid] = [one.pid for one in workers.workers()]
                os.kill(pid, signal.SIGKILL)
                while workers._view(10).losses < lost or not workers._view(10).ready:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.02)
            view = workers._view(0)
            assert (view.losses, view.workers) == (3, [])
            assert view.memory > 0 or sys.platform != "linux", "of all workers, and none is listed"

    asyncio.run(main())


# -- what looking costs ------------------------------------------------------------------------------------------------


class _Time:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.passed = 0.0

    def now(self) -> float:
        return self.passed

    wall = now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> _Time:
    time = _Time()
    monkeypatch.setattr(sampler, "clock", time)
    return time


def test_o24_the_pools_of_a_loop_together_take_a_hundredth_of_its_time(busy: Program, time: _Time) -> None:
    def view(_: object, rows: int) -> Unread:
        time.passed += 0.001
        return Unread()

    looks = 0
    with ExitStack() as pools:
        for _ in range(50):
            pools.enter_context(shown("tasks", view, busy.loop))
        watched = Sampler()
        began = time.passed
        for _ in range(100):
            watched.look()
            looks += 1
            assert watched.latest["cost"] == pytest.approx(0.05)
            time.passed += watched._pause()
        assert time.passed - began == pytest.approx(looks * 5.0, rel=0.05)


def test_o24_who_asks_often_gets_what_was_seen_last(busy: Program, time: _Time) -> None:
    looks: list[float] = []

    def view(_: object, rows: int) -> Unread:
        looks.append(time.passed)
        time.passed += 0.02
        return Unread()

    told: list[Any] = []
    with shown("tasks", view, busy.loop):
        watched = Sampler()
        watched.listen(told.append)
        for _ in range(2000):  # for 100 seconds
            assert watched.look() is watched.latest
            time.passed += 0.05
    assert len(looks) == len(told)
    assert len(looks) * 0.02 <= 0.01 * time.passed + sampler.AT_ONCE + 0.02
    assert len(looks) > 50, "and not less than it may"
    assert watched.latest["pause"] >= 20.0


def test_o24_looks_that_cost_little_are_new_for_everybody_who_asks(time: _Time) -> None:
    looks: list[int] = []

    def view(_: object, rows: int) -> Unread:
        looks.append(rows)
        time.passed += 0.0001
        return Unread()

    with shown("tasks", view):
        watched = Sampler()
        for number in range(1, 1001):
            watched.look()
            assert len(looks) == number
            time.passed += 0.02


def test_o24_a_destructor_that_asks_in_the_middle_of_a_look_gets_what_was_seen_last() -> None:
    asked: list[Any] = []

    def view(_: object, rows: int) -> Unread:
        asked.append(watched.look())
        return Unread()

    with shown("tasks", view):
        watched = Sampler()
        first = watched.latest
        assert watched.look() is not first
        assert asked == [first]


# -- destructors and forks ---------------------------------------------------------------------------------------------


def test_o20_an_event_of_a_destructor_that_the_collector_runs_while_events_are_read() -> None:
    class Emits:
        def __init__(self) -> None:
            self.me = self  # so that only the collector takes it away

        def __del__(self) -> None:
            topic_named("resources.health").emit(made)

    made, feed, known = event_of_a_resource(), Feed(), [0]
    feed.start()
    before = gc.get_threshold()
    try:
        for step in range(500):
            gc.disable()
            for _ in range(step % 12 + 1):
                Emits()
            gc.set_threshold(step % 25 + 1)
            gc.enable()
            last, events = feed.since(known[-1])
            assert last == max([known[-1], *(event["seq"] for event in events)])
            known += [event["seq"] for event in events]
        gc.collect()
        known += [event["seq"] for event in feed.since(known[-1])[1]]
        assert known == sorted(set(known))
        assert known[-1] == feed.counts["resource_disabled"] > 1000
    finally:
        gc.set_threshold(*before)
        gc.enable()
        feed.stop()


def event_of_a_resource() -> Event:
    """An event of a quiet topic."""
    told: list[Event] = []
    stop = subscribe(told.append, "resources.health")
    asyncio.run(ResourcePool({"key": "value"}).disable("key"))
    stop()
    [event] = told
    return event


FORKS = """
import asyncio, os, signal, sys, threading, warnings
from prometheus_client import CollectorRegistry, generate_latest
from headgate import TaskPool
from headgate.observe import prometheus, sampler

warnings.simplefilter("ignore")
begun, free, parents = threading.Event(), threading.Event(), CollectorRegistry()
uninstall = prometheus.install(parents)

async def main():
    pool = TaskPool("held")
    await pool.run(asyncio.sleep, 0)
    begun.set()
    free.wait()

program = threading.Thread(target=lambda: asyncio.run(main()))
program.start()
begun.wait()
looking = threading.Thread(target=sampler._shared.look)
looking.start()
while not sampler._shared._is_looking:
    pass
child = os.fork()
if not child:
    signal.alarm(20)
    assert b"headgate_observe_look_seconds" in generate_latest(parents)
    own = sampler.acquire()
    uninstall()
    assert (sampler._users, sampler._shared) == (1, own), "what a parent installed is not the child's"
    sampler.release()
    sampler.release()
    assert (sampler._users, sampler._shared) == (0, None)
    os._exit(0)
print(os.waitpid(child, 0)[1])
free.set()
looking.join()
program.join()
uninstall()
"""


@pytest.mark.integration
def test_o30_a_child_that_is_forked_during_a_look_has_metrics_and_a_sampler_of_its_own() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False, timeout=60)
    assert (ran.stdout, ran.stderr) == ("0\n", "")


def test_o30_events_of_single_tasks_are_not_counted_also_while_somebody_hears_them(
    busy: Program, watched: Sampler
) -> None:
    async def work() -> None:
        async with TaskPool("o30-heard") as pool:
            await pool.run(asyncio.sleep, 0)
        await ResourcePool({"key": "value"}).disable("key")

    watched.feed.want_tasks(True)
    watched.look()
    busy.do(work())
    assert {"pool_submit", "pool_finish", "resource_disabled"} <= {one["name"] for one in watched.feed.since(0)[1]}
    assert watched.feed.counts == {"resource_disabled": 1}
