"""The three tenants of the demo, one of which floods: how long each waited, and how long it would have in one line.

The comparison is a run too: the same tasks, at the same times and as long as they took, go through a pool that serves
first in first out, on a virtual clock.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from headgate.tasks import PoolStats, TaskPool, TaskSnapshot, fifo
from headgate.testing import run

FLOOD, SMALL = "flood", ("ann", "bob")
TENANTS = (FLOOD, *SMALL)
BURSTS = 4


async def submit_all(pool: TaskPool, call: Callable[[str, str], Awaitable[None]], calls: int) -> None:
    """The flood at once; the others a few calls at a time, the first of them right behind the flood."""
    each = calls // 9
    numbers = iter(range(1, calls + 1))
    for count in range(1, calls - each * len(SMALL) + 1):
        await pool.submit(call, FLOOD, f"call {next(numbers)}", key=FLOOD)
        if count % 100 == 0:
            await asyncio.sleep(0)  # the first calls are under way meanwhile
    for burst in range(BURSTS):
        await asyncio.sleep(min(1.2, calls / 450) if burst else 0)
        for _ in range(each * burst // BURSTS, each * (burst + 1) // BURSTS):
            for tenant in SMALL:
                await pool.submit(call, tenant, f"call {next(numbers)}", key=tenant)


@dataclass
class Service:
    """How the tenants were served."""

    order: list[str] = field(default_factory=list)
    """Whose task started first, whose next, and so on."""
    stats: PoolStats | None = None

    def waited(self, tenant: str) -> tuple[float, float]:
        """How long its tasks queued: in the middle, and nearly at worst (p99)."""
        ages = self.stats.keys if self.stats is not None else ()
        return next(((age.p50, age.p99) for age in ages if age.key == tenant), (0.0, 0.0))

    def early(self, first: int) -> Counter[str]:
        """How many of the first so many starts were whose."""
        return Counter(self.order[:first])

    @property
    def jain(self) -> float:
        """Jain's index of fairness."""
        return self.stats.jain if self.stats is not None else 1.0


def in_one_line(tasks: Sequence[TaskSnapshot], slots: int) -> Service:
    """How these tasks would have been served first in first out."""
    return run(_replay(sorted(tasks, key=lambda task: task.submitted_at), slots), check_leaks=False)


async def _replay(tasks: Sequence[TaskSnapshot], slots: int) -> Service:
    service = Service()

    async def again(task: TaskSnapshot) -> None:
        service.order.append(str(task.key))
        await asyncio.sleep((task.finished_at or 0.0) - (task.started_at or 0.0))

    loop = asyncio.get_running_loop()
    began = loop.time() - tasks[0].submitted_at if tasks else 0.0
    async with TaskPool("in one line", max_concurrent=slots, queue=fifo()) as pool:
        for task in tasks:
            await asyncio.sleep(max(0.0, began + task.submitted_at - loop.time()))
            await pool.submit(again, task, key=task.key)
    service.stats = pool.stats()
    return service


def comparison_of(fair: Service, line: Service, first: int) -> str:
    """Both, tenant by tenant."""
    calls = Counter(fair.order)
    head = f"{'p50':>8}{'p99':>8}{f'first {first}':>12}"
    lines = [
        "",
        "How the tenants were served in turn; and the same calls again, first in first out, on a virtual clock",
        f"  {'':<8}{'':>5}  {'waited in turn':>28}  {'waited in one line':>28}",
        f"  {'tenant':<8}{'calls':>5}  {head}  {head}",
    ]
    for tenant in TENANTS:
        both = "  ".join(_row(service, tenant, first) for service in (fair, line))
        lines.append(f"  {tenant:<8}{calls[tenant]:>5}  {both}")
    lines.append(f"  Jain's index of fairness: {fair.jain:.2f} in turn, {line.jain:.2f} in one line")
    return "\n".join(lines)


def _row(service: Service, tenant: str, first: int) -> str:
    p50, p99 = service.waited(tenant)
    return f"{p50:>6.1f} s{p99:>6.1f} s{service.early(first)[tenant]:>12}"
