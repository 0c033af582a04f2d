"""The three tenants of the demo, one of which submits too much: how long each waited, in turn and first in first out.

The comparison is a run too: the same tasks are submitted at the same times to a pool that serves first in first out, on
a virtual clock, and one starts there whenever one started here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headgate.tasks import TaskPool, fifo
from headgate.testing import run

FLOOD, SMALL = "flood", ("ann", "bob")
TENANTS = (FLOOD, *SMALL)
BURSTS = 4


async def submit_all(submit: Callable[[str, int], Awaitable[None]], calls: int) -> None:
    """Submit the calls of "flood" at once, and those of the others a few at a time, beginning right after it."""
    each = calls // 9
    numbers = iter(range(1, calls + 1))
    for count in range(1, calls - each * len(SMALL) + 1):
        await submit(FLOOD, next(numbers))
        if count % 20 == 0:
            await asyncio.sleep(0)  # so that the first calls can start
    for burst in range(BURSTS):
        await asyncio.sleep(min(1.2, calls / 450) if burst else 0)
        for _ in range(each * burst // BURSTS, each * (burst + 1) // BURSTS):
            for tenant in SMALL:
                await submit(tenant, next(numbers))


class Turn(NamedTuple):
    """A task, and when it first started, in seconds."""

    tenant: str
    submitted: float
    started: float


@dataclass
class Service:
    """How the tenants were served."""

    turns: list[Turn]
    """In the order of their starts."""
    jain: float
    """Jain's index of fairness."""

    def waited(self, tenant: str, share: float) -> float:
        """How long this share of the tenant's tasks queued at most."""
        waits = sorted(turn.started - turn.submitted for turn in self.turns if turn.tenant == tenant)
        return waits[min(len(waits) - 1, int(share * len(waits)))] if waits else 0.0

    def early(self, first: int) -> Counter[str]:
        """How many of the first starts belonged to each tenant."""
        return Counter(turn.tenant for turn in self.turns[:first])


def first_in_first_out(turns: Sequence[Turn]) -> Service:
    """How these tasks would have been served first in first out."""
    return run(_replay(sorted(turns, key=lambda turn: turn.submitted)), check_leaks=False)


async def _replay(turns: Sequence[Turn]) -> Service:
    loop = asyncio.get_running_loop()
    began = loop.time() - (turns[0].submitted if turns else 0.0)
    _, *later = sorted(turn.started for turn in turns) or [0.0]
    starts, served = iter(later), list[Turn]()

    async def until(time: float) -> None:
        await asyncio.sleep(max(0.0, began + time - loop.time()))

    async def again(turn: Turn) -> None:
        now = loop.time() - began
        served.append(turn._replace(started=now))
        await until(next(starts, now))  # then a slot was free for the next

    async with TaskPool("first in first out", max_concurrent=1, queue=fifo()) as pool:
        for turn in turns:
            await until(turn.submitted)
            await pool.submit(again, turn, key=turn.tenant)
    return Service(served, pool.stats().jain)


def comparison_of(fair: Service, unfair: Service, first: int) -> str:
    """Compare both orders, tenant by tenant."""
    calls = Counter(turn.tenant for turn in fair.turns)
    head = f"{'p50':>8}{'p99':>8}{f'first {first}':>12}"
    lines = [
        "",
        "How the tenants were served in turn; and the same calls again, first in first out, on a virtual clock",
        f"  {'':<8}{'':>5}  {'waited in turn':>28}  {'waited first in first out':>28}",
        f"  {'tenant':<8}{'calls':>5}  {head}  {head}",
    ]
    for tenant in TENANTS:
        both = "  ".join(_row(service, tenant, first) for service in (fair, unfair))
        lines.append(f"  {tenant:<8}{calls[tenant]:>5}  {both}")
    lines.append(f"  Jain's index of fairness: {fair.jain:.2f} in turn, {unfair.jain:.2f} first in first out")
    return "\n".join(lines)


def _row(service: Service, tenant: str, first: int) -> str:
    p50, p99 = service.waited(tenant, 0.5), service.waited(tenant, 0.99)
    return f"{p50:>6.1f} s{p99:>6.1f} s{service.early(first)[tenant]:>12}"
