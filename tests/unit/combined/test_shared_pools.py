"""Pools of several processes that share both their slots and their keys, each a member of a store in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from headgate import Quota, Resource, ResourcePool, TaskPool, fair_round_robin
from headgate.sharing.memory import SharedMemory
from headgate.testing import run, settle
from tests.unit.tasks.test_shared_pools import make

PROCESSES = 4


class Latency:
    """A member of a shared store whose answers take a moment, as those of a real one."""

    def __init__(self, member: Any) -> None:
        self._member = member
        self.is_slow = False
        """Not while pools are made: that blocks the loop."""

    @property
    def deadline(self) -> float:
        return float(self._member.deadline)

    @property
    def is_closed(self) -> bool:
        return bool(self._member.is_closed)

    def listen(self, key: str, listener: Any) -> Any:
        return self._member.listen(key, listener)

    def connect(self, timeout: float) -> None:
        self._member.connect(timeout)

    def transact(self, key: str, step: Any, *, durable: bool = False) -> Any:
        asked = self._member.transact(key, step, durable=durable)
        if not self.is_slow:
            return asked
        answer: Any = type(asked)()
        asyncio.get_running_loop().call_later(0.002, lambda: answer.set_result(asked.result()))
        return answer


def shared_by_all(slots: int, key: dict[str, Any]) -> list[tuple[TaskPool, ResourcePool[str]]]:
    place, made = SharedMemory(), []
    for _ in range(PROCESSES):
        store: Any = Latency(place.member())
        keys = ResourcePool([Resource("key", "secret", **key)], name="keys", store=store)
        pool, _ = make(place, store=store, max_concurrent=slots, resources=keys, queue=fair_round_robin("tenant"))
        store.is_slow = True
        made.append((pool, keys))
    return made


@pytest.mark.parametrize("slots", [5, 50])
@pytest.mark.parametrize(
    ("key", "possible"), [({"max_in_flight": 2}, 200), ({"quota": Quota(requests=100, per=5.0)}, 200)]
)
def test_t81_h03_h10_processes_that_share_slots_and_a_scarce_key_keep_it_busy_and_get_equal_parts(
    slots: int, key: dict[str, Any], possible: int
) -> None:
    async def main() -> None:
        done: Counter[int] = Counter()

        async def work(key: Resource[str], number: int) -> None:
            await asyncio.sleep(0.1)
            done[number] += 1

        pools = [pool for pool, _ in shared_by_all(slots, key)]
        for number, pool in enumerate(pools):
            for task in range(possible):
                pool.submit_nowait(work, number, tenant=f"{number}-{task % 5}")
        await asyncio.sleep(10.0)
        for pool in pools:
            await pool.close(cancel="queued")
        assert done.total() >= 0.9 * possible, done
        assert min(done[number] for number in range(PROCESSES)) >= 0.6 * done.total() / PROCESSES, done

    run(main)


def test_h03_a_key_that_waits_for_a_slot_is_given_back_when_no_task_wants_it_any_more() -> None:
    async def main() -> None:
        (one, keys), (_, other_keys), *others = shared_by_all(5, {"max_in_flight": 1})

        async def nothing(key: object) -> None: ...

        task = one.submit_nowait(nothing)
        task.cancel()
        await settle()
        await one.close()
        assert keys.snapshot()["key"]["in_flight"] == 0
        assert await other_keys.run(nothing) is None
        for pool, _ in others:
            await pool.close()

    run(main)
