"""Ways in which the line with workers was broken once: each is a test now."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    CooldownResource,
    DisableResource,
    Resource,
    ResourcePool,
    RoutineExited,
    RoutineTimeout,
    do_dispatch,
    routine,
    subscribe,
)
from headgate import TaskPool as Pool
from tests.support.combined.combined_support import Apart
from tests.support.workers.jobs import note
from tests.support.workers.support import lines, until


class Revoked(DisableResource):
    """A verdict with something that cannot travel."""

    def __init__(self) -> None:
        super().__init__("401")
        self.response = threading.Lock()


async def revoked(key: Resource[str]) -> str:
    if key.resource_id == "a":
        raise Revoked
    return key.resource_id


@dataclass(frozen=True)
class Ask:
    """Two of these may be equal, and do different things."""

    model: Any
    heat: float = field(default=0.0, compare=False)

    async def __call__(self, key: Resource[str]) -> tuple[Any, float]:
        return self.model, self.heat


async def limited(key: Resource[str]) -> str:
    if key.resource_id == "a":
        raise CooldownResource(60, "429")
    return key.resource_id


@routine
def plain(key: Resource[str], seconds: float) -> str:
    time.sleep(seconds)
    return key.resource_id


@routine(timeout=0.1)
def overdue(key: Resource[str], seconds: float) -> str:
    time.sleep(seconds)
    return key.resource_id


def keys(*limits: int) -> ResourcePool[str]:
    return ResourcePool(
        [Resource("ab"[n], f"secret-{n}", limit) for n, limit in enumerate(limits or (5, 5))], strategy="primary_backup"
    )


def test_r32_a_verdict_that_cannot_be_pickled_arrives_all_the_same(shared: Apart) -> None:
    async def main() -> None:
        chosen = keys()
        async with Pool(resources=chosen, workers=shared.pool) as pool:
            assert await (await pool.submit(revoked)) == "b"
        assert chosen.snapshot()["a"]["status"] == "disabled"

    shared(main)


def test_t81_callables_that_are_equal_are_not_the_same(shared: Apart) -> None:
    async def main() -> None:
        async with Pool(resources=keys(), workers=shared.pool) as pool:
            asks = [Ask("m", 0.1), Ask("m", 0.9), Ask(1), Ask(True), Ask(1.0)]
            found = [await (await pool.submit(ask)) for ask in asks]
            assert [(repr(model), heat) for model, heat in found] == [(repr(ask.model), ask.heat) for ask in asks]

    shared(main)


def test_t81_what_runs_here_although_there_are_workers_teaches_too(shared: Apart) -> None:
    async def main() -> None:
        chosen = keys()
        async with Pool(resources=chosen, workers=shared.pool) as pool:
            with do_dispatch(False):
                handle = await pool.submit(limited)
            assert await handle == "b"
        assert chosen.snapshot()["a"]["status"] == "cooling_down"

    shared(main)


def test_line_the_events_of_a_task_come_in_their_order_and_with_its_id(shared: Apart) -> None:
    async def main() -> None:
        heard: list[Any] = []
        async with Pool(resources=keys(), workers=shared.pool) as pool:
            await (await pool.submit(revoked))  # its worker knows the function now
            unsubscribe = subscribe(heard.append)
            try:
                handle = await pool.submit(revoked)
                await handle
            finally:
                unsubscribe()
        told = [event for event in heard if getattr(event, "request_id", None) is not None]
        assert {event.request_id for event in told} == {handle.id}
        assert [event.name for event in told] == [
            "pool_submit",
            "pool_dequeue",
            "resource_acquired",
            "task_dispatched",
            "task_finished",
            "resource_released",
            "run_finished",
            "pool_finish",
        ]

    shared(main)


LEAVES = """
import asyncio, sys, headgate

async def leaves(key):
    sys.exit(3)

def leaves_plainly(key):
    sys.exit(3)

async def interrupts(key):
    raise KeyboardInterrupt

async def main():
    keys = headgate.ResourcePool({"a": "secret-a"})
    where, what, how = sys.argv[1:]
    async with headgate.WorkerPool(spawn=1) as workers:
        async with headgate.TaskPool(resources=keys, workers=workers if where == "there" else None) as pool:
            ended = asyncio.Event()
            fn = globals()[what]
            if how == "Task":  # not sent at once, but awaited in a Task of the pool's
                fn = headgate.routine(timeout=50)(fn)
            handle = await pool.submit(fn)
            handle.on_end(lambda handle: (print(handle.status, flush=True), ended.set()))
            await asyncio.wait_for(ended.wait(), 40)
            for _ in range(100):
                await asyncio.sleep(0)
        print("went on", flush=True)

if __name__ == "__main__":
    asyncio.run(main())
"""


def left(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(LEAVES)
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.integration
@pytest.mark.parametrize("what", ["leaves", pytest.param("leaves_plainly", marks=pytest.mark.soak)])
def test_line_sys_exit_in_a_task_that_runs_here_ends_the_program_as_in_asyncio(tmp_path: Path, what: str) -> None:
    ran = left(tmp_path, "here", what, "")
    assert (ran.returncode, ran.stdout) == (3, "failed\n"), ran.stderr


@pytest.mark.integration
@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("leaves", "sent"),
        *(
            pytest.param(what, how, marks=pytest.mark.soak)
            for what, how in [
                ("leaves", "Task"),
                ("leaves_plainly", "sent"),
                ("leaves_plainly", "Task"),
                ("interrupts", "sent"),
                ("interrupts", "Task"),
            ]
        ),
    ],
)
def test_w43_sys_exit_in_a_task_on_a_worker_fails_that_task_alone(tmp_path: Path, what: str, how: str) -> None:
    ran = left(tmp_path, "there", what, how)
    assert (ran.returncode, ran.stdout) == (0, "failed\nwent on\n"), ran.stderr


async def exits(key: Resource[str], path: str) -> None:
    note(path, key.resource_id)
    sys.exit("no such file")


def test_w43_an_exit_is_an_exception_of_the_tasks_own(shared: Apart, log: str) -> None:
    async def main() -> None:
        chosen = keys()
        async with Pool(resources=chosen, workers=shared.pool) as pool:
            handle = await pool.submit(exits, log, retries=2)
            with pytest.raises(RoutineExited, match="no such file") as caught:
                await handle
        assert caught.value.exit_code == 1
        assert isinstance(caught.value.__cause__, SystemExit)
        assert "in exits" in caught.value.__notes__[-1]
        assert lines(log) == ["a"] * 3, "it was retried, and the key was in order"
        assert chosen.snapshot()["a"]["status"] == "healthy"

    shared(main)


async def meddling(key: Resource[str]) -> str:
    found, key.value = key.value, "changed"
    return found


def test_t81_the_copy_of_a_resource_is_one_for_each_call(shared: Apart) -> None:
    async def main() -> None:
        async with Pool(resources=keys(), workers=shared.pool) as pool:
            assert [await (await pool.submit(meddling)) for _ in range(6)] == ["secret-0"] * 6

    shared(main)


def test_r64_a_partial_of_a_plain_routine_is_not_interrupted_either(shared: Apart) -> None:
    async def main() -> None:
        async with Pool(resources=keys(), workers=shared.pool, max_concurrent=3) as pool:
            allocator: Any = pool._executor.allocator
            assert not allocator.can_stop(functools.partial(plain, seconds=1))
            assert allocator.can_stop(functools.partial(limited))

    shared(main)


@pytest.mark.parametrize("how", ["its own timeout", "the task's timeout", "cancel"])
def test_t15b_a_key_is_in_use_until_what_runs_with_it_has_ended(shared: Apart, how: str) -> None:
    async def main() -> None:
        chosen = keys(1)
        async with Pool(resources=chosen, workers=shared.pool, max_concurrent=3) as pool:
            began = time.monotonic()
            fn, options = (overdue, {}) if how == "its own timeout" else (plain, {})
            if how == "the task's timeout":
                options["timeout"] = 0.1
            handle = await pool.submit(fn, 0.6, **options)
            after = await pool.submit(limited, exclude=["b"], ttl=30)
            await asyncio.sleep(0.05)
            if how == "cancel":
                handle.cancel()
            with pytest.raises((RoutineTimeout, TimeoutError, Exception)):
                await handle
            assert time.monotonic() - began >= 0.55, "not before the thread has returned"
            await until(lambda: chosen.snapshot()["a"]["status"] == "cooling_down")  # `after` had the key next
            after.cancel()
        assert chosen.stats().in_flight == 0

    shared(main)
