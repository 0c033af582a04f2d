"""What `headgate demo` runs: three tenants, six keys, two workers, one of them killed. No call is lost.

The whole demo is one TaskPool with `resources=` and `workers=`. One tenant submits too much, and the tenants take
turns. A call starts when there is a slot and a key for it, and runs on a worker process. If its key is rate-limited or
revoked, the call is queued again and uses another key. When a third of the calls are answered, one worker is killed,
and its calls are queued again too. A terminal shows live tables, a pipe plain lines. At the end the demo prints how
long each tenant waited, and how long it would have waited with first in first out; the story of the call with the most
attempts; and how many calls were lost. There is no network: the API is `upstream`, on a Unix socket.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from headgate.cli.demo.ask import ask
from headgate.cli.demo.screen import Cell, Column, Frame, Grid, Screen, bar
from headgate.cli.demo.tenants import TENANTS, Service, Turn, comparison_of, first_in_first_out, submit_all
from headgate.cli.demo.upstream import Bucket, Upstream
from headgate.core.clock import clock
from headgate.core.topics import subscribe
from headgate.resources import (
    Resource,
    ResourceCooled,
    ResourceDisabled,
    ResourcePool,
    ResourceRecovered,
    ResourceReleased,
    ResourceSnapshot,
)
from headgate.tasks import KeyAge, PoolDequeue, PoolFinish, PoolRequeue, TaskHandle, fair_round_robin
from headgate.tasks.pool import TaskPool
from headgate.workers.events import WorkerLostEvent, WorkerReady
from headgate.workers.pool import WorkerPool
from headgate.workers.processes.local_placement import LocalPlacement

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.cli.demo.clusters import Theatre

BUCKETS = {
    "sk-a": Bucket(rate=18, burst=24),
    "sk-b": Bucket(rate=14, burst=22),
    "sk-c": Bucket(rate=12, burst=20, tells_when=False),
    "sk-d": Bucket(rate=4, burst=8, tells_when=False),
    "sk-e": Bucket(rate=12, burst=30),
    "sk-f": Bucket(rate=9, burst=16),
}
REVOKED = "sk-e"
WORKERS = 2
ROWS = len(BUCKETS) + len(TENANTS) + 14
"""Lines of a terminal that a table needs."""


def make_keys() -> ResourcePool[str]:
    """Make six keys. After a 429 without Retry-After a key cools down as the table says: here seconds, not minutes.

    `max_in_flight` prevents that forty waiting calls all use the first key that is back.
    """
    keys = [Resource(f"key-{number}", secret, max_in_flight=4) for number, secret in enumerate(BUCKETS, 1)]
    return ResourcePool(keys, max_attempts=50, cooldown_table=(1.0, 2.0, 3.0), name="demo")


@dataclass
class Stage:
    """The pools and the API of one run."""

    keys: ResourcePool[str]
    workers: WorkerPool
    tasks: TaskPool
    upstream: Upstream
    api: str
    chronicle: Chronicle
    kill_node: Callable[[], str] | None = None
    """Kills a node of the cluster on which the workers run; None: they run on this machine."""
    handles: list[TaskHandle[str]] = field(default_factory=list)

    async def submit(self, tenant: str, number: int) -> None:
        """Submit one call. It may run twice, so it has `retries`: if its worker is lost, it runs on another."""
        handle = await self.tasks.submit(ask, self.api, f"call {number}", key=tenant, retries=5)
        self.handles.append(handle)
        handle.on_end(self.ended)

    def ended(self, handle: TaskHandle[str]) -> None:
        """Kill a worker when a third of the calls are answered, and revoke a key when half of them are."""
        chronicle = self.chronicle
        if handle.status != "completed":
            return
        chronicle.answered += 1
        if chronicle.answered == chronicle.calls // 3:
            self.kill_a_worker()
        if chronicle.answered == chronicle.calls // 2:
            self.upstream.revoke(REVOKED)

    def kill_a_worker(self) -> None:
        """Kill the worker with the most calls in flight, or a node of the cluster."""
        self.chronicle.counts["killed"] += 1
        if self.kill_node is not None:
            self.chronicle.tell(f"{self.kill_node()} is killed")
            return
        victim = max(self.workers.workers(), key=lambda worker: worker.in_flight)
        self.chronicle.tell(f"worker {victim.pid} is killed, with {victim.in_flight} calls in flight")
        os.kill(victim.pid, signal.SIGKILL)

    def served(self) -> Service:
        """How the tenants were served."""
        turns = [
            Turn(str(handle.key), handle.submitted_at, self.chronicle.starts[handle.id])
            for handle in self.handles
            if handle.id in self.chronicle.starts
        ]
        return Service(sorted(turns, key=lambda turn: turn.started), self.tasks.stats().jain)

    def unlucky(self) -> TaskHandle[str]:
        """The call with the most attempts, and among those the one with the longest story."""
        return max(self.handles, key=lambda handle: (handle.attempt, handle.story().count("\n")))

    def right(self) -> int:
        """How many calls have the answer to their own question."""
        results = (handle.snapshot().result for handle in self.handles)
        return sum(result == f"answer to call {number}" for number, result in enumerate(results, 1))


# -- what happens ------------------------------------------------------------------------------------------------------

SHORT = {"ok": "ok", "cooldown": "429", "disable": "401", "retry": "502", "sibling_cancelled": "stopped"}


@dataclass
class Chronicle:
    """What happened so far, collected from events. All events of one call have the id of its handle."""

    calls: int
    screen: Screen
    began: float = field(default_factory=clock.now)
    ended: float = 0.0
    """After how many seconds the last call ended."""
    answered: int = 0
    lost: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    rests: dict[str, float] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    routes: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def hear(self, event: object) -> None:
        """The listener of `headgate.subscribe`."""
        match event:
            case PoolDequeue(request_id=call, at=at):
                self.starts.setdefault(call, at)
            case ResourceReleased(request_id=call, usage=usage, outcome=outcome):
                stop = (usage.resource_id, SHORT.get(outcome, "lost"))
                self.outcomes[stop] += 1
                self.routes.setdefault(call, []).append(stop)
            case PoolRequeue(reason=reason):
                self.counts["queued again"] += 1
                self.counts["run again"] += reason.startswith("WorkerLost")
            case PoolFinish(request_id=call, status=status, error=error):
                number = call.rpartition("/")[2]
                self.follow(number, self.routes.pop(call, []))
                if status == "failed":
                    self.lost += 1
                    self.tell(f"call {number} is lost: {error}")
            case ResourceCooled(resource_id=key, old_status=before, seconds=seconds, consecutive=consecutive):
                self.rests[key] = seconds
                if before == "healthy":
                    self.counts["cooldowns"] += 1
                    again = f", {consecutive} in a row" if consecutive > 1 else ""
                    self.tell(f"{key} cools down for {seconds:.1f} s: {event.reason}{again}")
            case ResourceDisabled(resource_id=key):
                self.counts["disabled"] += 1
                self.tell(f"{key} is disabled: {event.reason}")
            case ResourceRecovered(resource_id=key):
                self.tell(f"{key} is back")
            case WorkerLostEvent(pid=pid, reason=reason):
                self.tell(f"worker {pid} is lost: {reason}")
            case WorkerReady(pid=pid):
                if self.counts["killed"]:
                    self.tell(f"worker {pid} takes its place")

    def follow(self, number: str, route: list[tuple[str, str]]) -> None:
        """Report which keys a finished call has used."""
        if len(route) > 1:
            self.counts["failovers"] += sum(one[0] != other[0] for one, other in pairwise(route))
            self.tell(f"call {number}: " + " -> ".join(f"{key} {outcome}" for key, outcome in route))

    def tell(self, news: str) -> None:
        self.screen.tell(f"{self.seconds:5.1f} s  {news}")

    @property
    def seconds(self) -> float:
        return clock.now() - self.began


# -- showing it -------------------------------------------------------------------------------------------------------

KEYS = (
    Column("key", 5),
    Column("status", 10),
    Column("cooling", 12, needs=79),
    Column("left", 5, right=True),
    Column("in flight", 9, right=True, needs=50),
    *(Column(outcome, max(3, len(outcome)), right=True) for outcome in SHORT.values()),
)
BAR = KEYS[2].width
COLOURS = {"healthy": "green", "cooling_down": "yellow", "disabled": "red"}

QUEUES = (
    Column("tenant", 6),
    Column("started", 7, right=True),
    Column("waited, p50", 11, right=True),
    Column("p99", 6, right=True),
    Column("oldest in the queue", 19, right=True),
)


def frame_of(stage: Stage, title: str) -> Frame:
    keys = [row_of(key, seen, stage.chronicle) for key, seen in stage.keys.snapshot().items()]
    grids = (Grid(KEYS, keys), Grid(QUEUES, queues_of(stage.tasks)))
    return Frame(title, grids, totals_of(stage.chronicle), workers_of(stage.workers))


def workers_of(pool: WorkerPool) -> str:
    seen = (f"{worker.pid} {worker.state}, {worker.in_flight} in flight" for worker in pool.workers())
    return f"         workers: {'; '.join(seen)}"


def queues_of(tasks: TaskPool) -> list[list[Cell]]:
    ages = {age.key: age for age in tasks.stats().keys}
    return [queue_of(tenant, ages.get(tenant, KeyAge(tenant, 0, 0.0, 0.0, 0.0))) for tenant in TENANTS]


def queue_of(tenant: str, age: KeyAge) -> list[Cell]:
    return [
        Cell(tenant, "bold"),
        Cell(str(age.count)),
        Cell(f"{age.p50:.1f} s"),
        Cell(f"{age.p99:.1f} s"),
        Cell(f"{age.lag:.1f} s" if age.lag else "", "yellow" if age.lag > 2 else ""),
    ]


def row_of(key: str, seen: ResourceSnapshot, chronicle: Chronicle) -> list[Cell]:
    status, left = seen["status"], seen["cooldown_seconds_remaining"]
    again = f" x{seen['consecutive_cooldown']}" if left and seen["consecutive_cooldown"] != 1 else ""
    return [
        Cell(key, "bold"),
        Cell(status.removesuffix("_down") + again, COLOURS[status]),
        Cell(bar(left / max(left, chronicle.rests.get(key, left)), BAR) if left else "", COLOURS[status]),
        Cell(f"{left:.1f} s" if left else ""),
        Cell(str(seen["in_flight"])),
        *(Cell(str(chronicle.outcomes[key, outcome] or "")) for outcome in SHORT.values()),
    ]


def totals_of(chronicle: Chronicle) -> str:
    counted = ", ".join(f"{chronicle.counts[what]} {what}" for what in ("failovers", "cooldowns", "disabled"))
    answered = f"{chronicle.answered} of {chronicle.calls} answered, {chronicle.lost} lost"
    return f"{chronicle.seconds:5.1f} s  {answered}, {counted}"


async def keep_drawing(stage: Stage, title: str) -> None:
    while True:
        stage.chronicle.screen.draw(frame_of(stage, title))
        await asyncio.sleep(stage.chronicle.screen.pace)


def counted(stage: Stage) -> dict[str, tuple[int, str]]:
    """The figures of the summary, each with its meaning."""
    chronicle, counts, answered = stage.chronicle, stage.chronicle.counts, stage.right()
    lost = chronicle.calls - answered
    return {
        "calls": (chronicle.calls, ""),
        "answered": (answered, f"{answered / max(0.001, chronicle.ended):.0f} a second"),
        "failovers": (counts["failovers"], "attempts that went on with another key"),
        "cooldowns": (counts["cooldowns"], "a key was rate-limited and left to rest"),
        "disabled": (counts["disabled"], "a key was revoked and is not asked again"),
        "sibling cancels": (stage.keys.stats().sibling_cancels, "doomed requests stopped early, and sent elsewhere"),
        "workers killed": (counts["killed"], "and replaced at once"),
        "run again": (counts["run again"], "calls that a killed worker had, on another"),
        "queued again": (counts["queued again"], "attempts that were not the last, for all these reasons"),
        "lost results": (lost, "" if lost else "every call has its answer"),
    }


def summary_of(stage: Stage) -> str:
    lines = counted(stage)
    table = "\n".join(f"  {name:<16}{count:>5}   {meaning}".rstrip() for name, (count, meaning) in lines.items())
    return f"\nWhat happened in {stage.chronicle.ended:.1f} s\n{table}"


# -- running it -------------------------------------------------------------------------------------------------------


async def play(
    keys: ResourcePool[str], upstream: Upstream, chronicle: Chronicle, slots: int, theatre: Theatre | None = None
) -> Stage:
    """Run all calls to their end."""
    unsubscribe = [subscribe(chronicle.hear, topic) for topic in ("lifecycle", "resources", "workers")]
    try:
        with tempfile.TemporaryDirectory(prefix="headgate-demo-") as folder:
            api = os.path.join(folder, "api")
            placement = LocalPlacement(WORKERS) if theatre is None else theatre.placement
            async with upstream.listening(api), WorkerPool(placement=placement) as workers:
                tasks = TaskPool(
                    "calls",
                    max_concurrent=slots,
                    queue=fair_round_robin(),
                    resources=keys,
                    workers=workers,
                )
                kill = None if theatre is None else theatre.kill
                stage = Stage(keys, workers, tasks, upstream, api, chronicle, kill)
                await perform(stage)
                return stage
    finally:
        for leave in unsubscribe:
            leave()


async def perform(stage: Stage) -> None:
    chronicle = stage.chronicle
    chronicle.began = clock.now()
    who = f"{len(TENANTS)} tenants, {len(BUCKETS)} keys, {len(stage.workers.workers())} workers, one API"
    title = f"headgate: {chronicle.calls} calls, {who}"
    painter = asyncio.create_task(keep_drawing(stage, title))
    try:
        async with stage.tasks:
            await submit_all(stage.submit, chronicle.calls)
        chronicle.ended = chronicle.seconds
        chronicle.screen.draw(frame_of(stage, title))
    finally:
        painter.cancel()
        chronicle.screen.close()


@dataclass(frozen=True)
class Ending:
    """What is printed at the end of a run, and its figures."""

    text: str
    figures: dict[str, int | float]
    right: bool
    """Has every call the answer to its own question?"""


def run(chronicle: Chronicle, *, slots: int, seed: int, theatre: Theatre | None = None) -> Ending:
    """Run the demo to its end, on this machine or on a cluster; KeyboardInterrupt: it was stopped by Ctrl-C."""
    stage = asyncio.run(play(make_keys(), Upstream(BUCKETS, seed=seed), chronicle, slots, theatre))
    served = stage.served()
    parts = [comparison_of(served, first_in_first_out(served.turns), first=3 * slots)]
    if stage.handles:
        parts.append(f"\nThe call that had most trouble\n{stage.unlucky().story()}")
    parts.append(summary_of(stage))
    figures = {name.replace(" ", "_"): count for name, (count, _) in counted(stage).items()}
    return Ending("\n".join(parts), {"seconds": round(chronicle.ended, 3), **figures}, stage.right() == chronicle.calls)
