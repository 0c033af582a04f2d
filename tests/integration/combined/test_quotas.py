"""H10 in a TaskPool: what tasks have spent of a quota is counted, here and on workers."""

from __future__ import annotations

from typing import Any

import pytest

from headgate import Cost, PoolExhausted, Quota, ResourcePool
from tests.integration.combined import combined_jobs
from tests.support.combined.combined_support import Line
from tests.support.resources.support import keys

pytestmark = pytest.mark.integration

WITH_KEYS = pytest.mark.parametrize("line", ["resources", "both"], indirect=True)


def left(pool: ResourcePool[Any]) -> float | None:
    return pool.snapshot()["a"]["quota"]["left"]["tokens"]


@WITH_KEYS
@pytest.mark.parametrize("job", ["spends", "spends_in_a_thread"])
def test_h10_a_task_settles_what_it_has_spent(line: Line, job: str) -> None:
    async def main() -> None:
        pool = keys("a", quota=Quota(tokens=1000, burst=1000))
        async with line.pool(pool, name="work") as tasks:
            for spent in (100, 30):
                assert await (await tasks.submit(getattr(combined_jobs, job), spent, cost=500)) == "a"
            assert left(pool) == 870
            with pytest.raises(PoolExhausted, match="cost=1001"):
                await (await tasks.submit(getattr(combined_jobs, job), 1, cost=1001))

    line(main)


@WITH_KEYS
@pytest.mark.parametrize("job", ["spends_both", "spends_both_in_a_thread"])
def test_l02_a_task_settles_input_and_output(line: Line, job: str) -> None:
    async def main() -> None:
        pool = keys("a", quota=Quota(tokens=1000, input_tokens=1000, output_tokens=1000, burst=1000))
        async with line.pool(pool, name="work") as tasks:
            for _ in range(2):
                cost = Cost(input=300, output=200)
                assert await (await tasks.submit(getattr(combined_jobs, job), 100, 30, cost=cost)) == "a"
            assert pool.snapshot()["a"]["quota"]["left"] == {
                "tokens": 740.0,
                "input_tokens": 800.0,
                "output_tokens": 940.0,
            }

    line(main)


@WITH_KEYS
def test_h10_a_task_that_fails_settles_too(line: Line) -> None:
    async def main() -> None:
        pool = keys("a", quota=Quota(tokens=1000, burst=1000))
        async with line.pool(pool, name="work") as tasks:
            with pytest.raises(LookupError):
                await (await tasks.submit(combined_jobs.spends_and_fails, 100, cost=500))
            assert left(pool) == 900

    line(main)


@WITH_KEYS
def test_h10_what_a_part_of_a_task_has_spent_counts(line: Line) -> None:
    """An asyncio Task, a thread, and a routine on another worker that it calls with its key."""

    async def main() -> None:
        pool = keys("a", quota=Quota(tokens=1000, burst=1000))
        async with line.pool(pool, name="work") as tasks:
            assert await (await tasks.submit(combined_jobs.spends_in_parts, 100, line.places, cost=500)) == "a"
            assert left(pool) == (700 if line.places else 800)

    line(main)


@pytest.mark.parametrize("line", ["both"], indirect=True)
def test_h10_a_routine_that_is_called_by_hand_settles_too(line: Line) -> None:
    async def main() -> None:
        pool = keys("a", quota=Quota(tokens=1000, burst=1000))

        async def by_hand(key: Any) -> str:
            return await combined_jobs.spends_as_a_routine(key, 100)

        assert await pool.run(by_hand, cost=500) == "a"
        assert left(pool) == 900

    line(main)
