"""What the tests of observation share."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headgate import CooldownResource, Resource, ResourcePool, TaskPool, registry
from headgate.observe import publishing
from tests.system.observe.support import SECRET, eventually


class Program:
    """Pools at work on an event loop in a thread, as in a program that somebody looks at."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="program")
        self._thread.start()
        self.keys: ResourcePool[str]
        self.pool: TaskPool

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run this on the loop of the program."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture(autouse=True)
def published_no_longer(leaves_nothing_behind: None) -> Iterator[None]:
    """A test that fails leaves no publication to the next one."""
    yield
    if publishing._published is not None:
        publishing._published.close()


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    """Pools at work, for one test."""
    gc.collect()  # pools of earlier tests have keys of the same names, and are seen until they are collected
    if registry.pools():  # garbage that was frozen together with what is used
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    with at_work(request.node.name[:40]) as program:
        yield program


@contextmanager
def at_work(name: str) -> Iterator[Program]:
    """Two keys, one of which cools down, tasks that run, wait and have failed, for hostile and plain tenants."""
    program = Program()
    gate = asyncio.Event()

    async def call(key: Resource[str], what: str) -> str:
        if what == "fail":
            raise ValueError(f"refused by {key.value} </script><img src=x onerror=alert(1)>")
        if what == "cool":
            raise CooldownResource(300, f"slow down {key.value}")
        if what == "hold":
            await gate.wait()
        return what

    async def begin() -> None:
        program.keys = ResourcePool(
            [Resource("key-1", SECRET, max_in_flight=4), Resource("key-2", SECRET[::-1], max_in_flight=4)],
            name=f"keys {name}",
            max_attempts=5,
        )
        program.pool = TaskPool(
            f"calls {name}", max_concurrent=2, resources=program.keys, queue="fair_round_robin", keep_failed=10
        )
        await program.pool.submit(call, "fail", key="ann")
        for _ in range(3):
            await (await program.pool.submit(call, "quick", key="ann"))
        await (await program.pool.submit(call, "once", key="bob"))
        for tenant in ("ann", "bob", "<b>eve</b>", "bob"):
            await program.pool.submit(call, "hold", key=tenant)
        await program.keys.cool("key-2", 300, "asked to")

    program.do(begin())
    eventually(lambda: program.pool.snapshot().active == 2)
    yield program

    async def end() -> None:
        gate.set()
        await program.pool.close(cancel=True)

    program.do(end())
    program.close()
    del program.keys, program.pool
    gc.collect()  # else later tests would see these pools too
