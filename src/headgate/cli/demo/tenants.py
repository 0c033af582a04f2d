"""The three tenants of the demo, one of which submits too much: how long each waited, in turn and first in first out.

The comparison is computed: the same tasks are submitted at the same times to a queue that serves first in first out,
and one starts there whenever one started in the run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headgate.gate.rounds import Backlogs

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
    """How these tasks would have been served first in first out.

    The same tasks are submitted at the same times, and one starts whenever one started in the run.
    """
    queue = sorted(turns, key=lambda turn: turn.submitted)
    submits = [(turn.submitted, 0, turn) for turn in queue]
    starts = [(start, 1, turn) for start, turn in zip(sorted(turn.started for turn in turns), queue, strict=True)]
    backlogs, served = Backlogs(), list[Turn]()
    for at, starting, turn in sorted(submits + starts, key=lambda event: event[:2]):
        if starting:
            backlogs.left(turn.tenant, started=True)
            served.append(turn._replace(started=at))
        else:
            backlogs.joined(turn.tenant)
    return Service(served, backlogs.rounds.index())


def comparison_of(fair: Service, unfair: Service, first: int) -> str:
    """Compare both orders, tenant by tenant."""
    calls = Counter(turn.tenant for turn in fair.turns)
    head = f"{'p50':>8}{'p99':>8}{f'first {first}':>12}"
    lines = [
        "",
        "How the tenants were served in turn, and how first in first out would have served the same calls",
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
