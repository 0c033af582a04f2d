"""A smoke test on uvloop: signals, siblings, waiters and timeouts on another event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import CooldownResource, PoolExhausted, Resource, ResourcePool
from tests.support.resources.support import ident, in_flight, keys

uvloop = pytest.importorskip("uvloop", reason="pip install headgate[speed]")
uvloop.new_event_loop().close()  # libuv opens a pipe of its own, once for the process: not a leak of any test


def run(main: Any) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def test_a_sibling_is_cancelled_and_moved() -> None:
    async def main() -> None:
        pool = keys("a", "b", strategy="primary_backup")
        started, fail = asyncio.Event(), asyncio.Event()

        async def elder(resource: Resource[str]) -> str:
            if resource.resource_id == "b":
                return "b"
            started.set()
            await fail.wait()
            raise CooldownResource(60)

        async def younger(resource: Resource[str]) -> str:
            if resource.resource_id == "b":
                return "moved"
            await asyncio.sleep(60)
            raise AssertionError("unreachable")

        first = asyncio.create_task(pool.run(elder, retry_delay=0))
        await started.wait()
        second = asyncio.create_task(pool.run(younger, retry_delay=0))
        await asyncio.sleep(0)
        fail.set()
        assert await first == "b"
        assert await second == "moved"
        assert in_flight(pool) == 0

    run(main)


def test_waiters_cooldowns_and_timeouts() -> None:
    async def main() -> None:
        pool = ResourcePool([Resource("only", 1, 1)])

        async def limited(resource: Resource[int]) -> None:
            raise CooldownResource(0.02)

        with pytest.raises(PoolExhausted):
            await pool.run(limited)
        results = await asyncio.gather(*[pool.run(ident, wait_for_capacity=True) for _ in range(10)])
        assert results == ["only"] * 10

        async def slow(resource: Resource[int]) -> None:
            await asyncio.sleep(60)

        with pytest.raises(PoolExhausted) as caught:
            await pool.run(slow, timeout=0.01, max_attempts=2, retry_delay=0)
        assert isinstance(caught.value.__cause__, TimeoutError)

    run(main)
