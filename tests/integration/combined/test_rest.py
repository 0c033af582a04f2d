"""R81 in a TaskPool: a resource rests after a task that asked for it, here and on workers."""

from __future__ import annotations

from typing import Any

import pytest

from headgate import Quota, ResourcePool
from tests.integration.combined import combined_jobs
from tests.support.combined.combined_support import Line
from tests.support.resources.support import keys

pytestmark = pytest.mark.integration

WITH_KEYS = pytest.mark.parametrize("line", ["resources", "both"], indirect=True)


def left(pool: ResourcePool[Any]) -> dict[str, float]:
    return {
        name: one["cooldown_seconds_remaining"]
        for name, one in pool.snapshot().items()
        if one["status"] == "cooling_down"
    }


@WITH_KEYS
@pytest.mark.parametrize("job", ["rests", "rests_in_a_thread"])
def test_r81_a_task_keeps_its_result_and_its_resource_rests(line: Line, job: str) -> None:
    async def main() -> None:
        pool = keys("a", "b", strategy="primary_backup")
        async with line.pool(pool, name="work") as tasks:
            assert await (await tasks.submit(getattr(combined_jobs, job), 300.0)) == "a"
            assert 200.0 < left(pool)["a"] <= 300.0
            assert await (await tasks.submit(getattr(combined_jobs, job), 200.0)) == "b"
            assert sorted(left(pool)) == ["a", "b"]

    line(main)


@WITH_KEYS
def test_r81_a_task_that_fails_rests_its_resource_too(line: Line) -> None:
    async def main() -> None:
        pool = keys("a", "b", strategy="primary_backup")
        async with line.pool(pool, name="work") as tasks:
            with pytest.raises(LookupError):
                await (await tasks.submit(combined_jobs.rests_and_fails, 300.0))
            assert list(left(pool)) == ["a"]

    line(main)


@WITH_KEYS
def test_r81_a_stream_rests_its_resource_when_it_has_ended(line: Line) -> None:
    async def main() -> None:
        pool = keys("a", "b", strategy="primary_backup")
        async with line.pool(pool, name="work") as tasks:
            items = []
            async for item in tasks.stream(combined_jobs.rests_and_streams, 300.0):
                items.append(item)
                assert left(pool) == {}
            assert items == [1, 2]
            await tasks.drain()
            assert list(left(pool)) == ["a"]

    line(main)


@WITH_KEYS
def test_r81_an_old_rest_is_not_repeated_by_later_tasks(line: Line) -> None:
    async def main() -> None:
        pool = keys("a")
        async with line.pool(pool, name="work") as tasks:
            await (await tasks.submit(combined_jobs.rests, 300.0))
            await pool.enable("a")
            await (await tasks.submit(combined_jobs.rests, 0.0))
            assert left(pool) == {}

    line(main)


@pytest.mark.parametrize("line", ["both"], indirect=True)
def test_r81_a_routine_that_is_called_by_hand_rests_the_resource_it_was_given(line: Line) -> None:
    """It has no quota, and inside the call of another pool it is found although that has one of the same name."""

    async def main() -> None:
        one, other = ResourcePool({"a": "1"}), ResourcePool({"a": "2"}, quota=Quota(tokens=1000))

        async def by_hand(key: Any) -> str:
            return await other.run(lambda _: combined_jobs.rests_for_a_reason(key, "the quota is used up"))

        assert await one.run(by_hand) == "a"
        assert one.snapshot()["a"]["status"] == "cooling_down"
        assert other.snapshot()["a"]["status"] == "healthy"

    line(main)


@pytest.mark.parametrize("line", ["both"], indirect=True)
def test_r81_a_reason_of_any_kind_holds_up_no_worker(line: Line) -> None:
    """A reason may be an error, or text of an answer that was not UTF-8."""

    async def main() -> None:
        for reason in ("half of a character: \udc80", KeyError("quota"), 7, "x" * 1_000_000):
            pool = ResourcePool({"a": "1"})
            assert await pool.run(lambda key, why=reason: combined_jobs.rests_for_a_reason(key, why)) == "a"
            assert pool.snapshot()["a"]["status"] == "cooling_down"
        pool = ResourcePool({"a": "1"}, quota="learn")
        assert await pool.run(combined_jobs.learns_a_lot) == "learned"
        assert pool.snapshot()["a"]["status"] == "healthy"

    line(main)
