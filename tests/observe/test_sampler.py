"""The sampler: what it counts, what it shows of pools that give no answer, and what it costs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headgate import TaskPool, registry
from headgate.observe import sampler
from headgate.observe.sampler import Sampler
from tests.observe.conftest import Program
from tests.observe.support import eventually


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

    def view(_: object, rows: int) -> dict[str, Any]:
        looks.append(rows)
        return {}

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

    def view(_: object, rows: int) -> dict[str, Any]:
        given_up.wait(0.1)
        return {"rows": rows}

    with shown("tasks", view, busy.loop) as first, shown("resources", view, busy.loop) as second:
        seen = watched.look()
        assert [view_of(seen, one.name).get("rows") for one in (first, second)] == [sampler.ROWS] * 2
