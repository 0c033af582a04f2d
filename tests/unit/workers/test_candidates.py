"""When workers that cannot be used are tried again: `workers/client/candidates.py`, on virtual time."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from headgate import WorkerMetadata
from headgate.testing import virtual
from headgate.workers.client.candidates import TRIES_A_SECOND, URGENT, Candidates


class Unreachable:
    """Candidates none of which can be connected, and when each was tried."""

    def __init__(self, workers: int = 1, *, refused: bool = False) -> None:
        self.tries: list[float] = []
        self.waited_for = False
        self.refused = refused
        self.candidates = Candidates(
            self._connect, _nothing, _nothing, _nothing, self._explain, lambda: self.waited_for
        )
        for number in range(workers):
            self.candidates.add(WorkerMetadata(f"w-{number}", f"10.0.0.{number % 250}:1", 1, "0.1.0"))

    def _connect(self, metadata: WorkerMetadata) -> Any:
        return _Connection(self, metadata)

    async def _explain(self, _: WorkerMetadata) -> None:
        return None

    @property
    def pauses(self) -> list[float]:
        return [round(after - before, 6) for before, after in pairwise(self.tries)]


class _Connection:
    def __init__(self, owner: Unreachable, metadata: WorkerMetadata) -> None:
        self.owner = owner
        self.metadata = metadata

    def open(self) -> None:
        loop = asyncio.get_running_loop()
        self.owner.tries.append(loop.time())
        happening: Any = "refused" if self.owner.refused else "lost"
        loop.call_soon(self.owner.candidates.heard, self, happening, "nothing listens there")

    async def close(self, _: str) -> None:
        pass


def _nothing(*_: Any) -> None:
    pass


@virtual
async def test_w63_a_worker_that_cannot_be_reached_is_tried_every_second() -> None:
    one = Unreachable()
    await asyncio.sleep(600)
    assert one.pauses[:3] == [0.1, 0.3, 1.0]
    assert set(one.pauses[3:]) == {1.0}
    await one.candidates.close()


@virtual
async def test_w63_a_call_that_begins_to_wait_has_workers_tried_at_once() -> None:
    one = Unreachable()
    await asyncio.sleep(60.25)
    before = len(one.tries)
    last = one.tries[-1]
    assert last + URGENT < 60.25 < last + 1, "it pauses"
    one.candidates.hurry()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(one.tries) == before + 1
    await one.candidates.close()


@virtual
async def test_w63_workers_are_tried_more_often_while_a_call_waits_and_no_oftener_for_more_calls() -> None:
    one = Unreachable()
    await asyncio.sleep(60)
    one.waited_for = True
    before = len(one.tries)
    for _ in range(1000):
        one.candidates.hurry()
        await asyncio.sleep(0.01)
    assert 0.9 * 10 / URGENT <= len(one.tries) - before <= 10 / URGENT + 1
    await one.candidates.close()


@virtual
async def test_w62_w63_the_more_workers_cannot_be_reached_the_rarer_is_each_tried() -> None:
    many = Unreachable(1000)
    many.waited_for = True
    await asyncio.sleep(100)
    before = len(many.tries)
    await asyncio.sleep(100)
    assert len(many.tries) - before <= 100 * TRIES_A_SECOND * 1.1
    await many.candidates.close()


@virtual
async def test_w71_a_worker_that_refuses_for_good_is_tried_rarely() -> None:
    """Its log tells of each try."""
    one = Unreachable(refused=True)
    await asyncio.sleep(600)
    assert max(one.pauses) == 30.0
    one.waited_for = True
    before = len(one.tries)
    one.candidates.hurry()
    await asyncio.sleep(60)
    assert len(one.tries) - before <= 3
    await one.candidates.close()
