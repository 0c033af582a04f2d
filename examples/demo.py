"""make demo: three tenants, six keys, two workers, one of them killed, and an API that pushes back. No call is lost.

One tenant floods. A TaskPool lets them take turns, forty calls at a time; each call asks a ResourcePool for a key and
runs on a worker process of a WorkerPool. On a terminal live tables show keys that cool down, calls that move to another
key, and tenants that wait; in a pipe, plain lines do. A third of the way one worker is killed, and the calls it had run
again on the other. At the end: how long each tenant waited, and how long it would have first in first out; then what
was lost. There is no network: the API is examples/upstream.py. Exit code 0, or 1 if a call was lost, or 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from screen import Cell, Column, Frame, Grid, Screen, bar, say, screen_for
from tenants import TENANTS, Service, comparison_of, in_one_line, submit_all
from upstream import Bucket, Upstream, request

import headgate
from headgate.resources import (
    CooldownResource,
    DisableResource,
    PoolExhausted,
    Resource,
    ResourceCooled,
    ResourceDisabled,
    ResourcePool,
    ResourceRecovered,
    ResourceReleased,
    RetryOperation,
    RunFinished,
    parse_retry_after,
)
from headgate.tasks import KeyAge, TaskPool, TaskSnapshot, fair_round_robin
from headgate.workers import WorkerPool
from headgate.workers.events import TaskDispatched, TaskFinished, WorkerLostEvent, WorkerReady

BUCKETS = {
    "sk-a": Bucket(rate=18, burst=24),
    "sk-b": Bucket(rate=14, burst=22),
    "sk-c": Bucket(rate=12, burst=20, tells_when=False),
    "sk-d": Bucket(rate=8, burst=12, tells_when=False),
    "sk-e": Bucket(rate=12, burst=30),
    "sk-f": Bucket(rate=9, burst=16),
}
REVOKED = "sk-e"
WORKERS = 2


def make_pool() -> ResourcePool[str]:
    """Six keys. A 429 that does not say for how long rests its key as the table says: here for seconds, not minutes.

    `max_in_flight` keeps forty waiting callers from falling upon the first key that is back.
    """
    keys = [Resource(f"key-{number}", secret, max_in_flight=4) for number, secret in enumerate(BUCKETS, 1)]
    return ResourcePool(keys, cooldown_table=(1.0, 2.0, 3.0), name="demo")


@headgate.routine(retries=5)
async def ask(api: str, key: str, question: str) -> str:
    """On a worker: one request, and what its answer says about the key. What it raises is raised at its caller.

    A question may be asked twice, so it has `retries`: if its worker is lost, it runs again on another.
    """
    answer = await request(api, key, question)
    if answer.status == 429:
        raise CooldownResource(parse_retry_after(answer.headers.get("retry-after")), "rate limited")
    if answer.status == 401:
        raise DisableResource("key revoked")
    if answer.status == 502:
        raise RetryOperation("bad gateway")
    return answer.body


# -- the story --------------------------------------------------------------------------------------------------------

SHORT = {"ok": "ok", "cooldown": "429", "disable": "401", "retry": "502", "sibling_cancelled": "stopped"}


@dataclass
class Story:
    """What happened so far: told by events, and by the callers themselves."""

    calls: int
    screen: Screen
    began: float = field(default_factory=time.monotonic)
    answered: int = 0
    lost: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    rests: dict[str, float] = field(default_factory=dict)
    routes: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    placed: Counter[str] = field(default_factory=Counter)
    service: Service = field(default_factory=Service)

    def hear(self, event: object) -> None:
        """The listener of `headgate.subscribe`."""
        match event:
            case ResourceReleased(usage=usage, outcome=outcome):
                stop = (usage.resource_id, SHORT.get(outcome, outcome))
                self.outcomes[stop] += 1
                self.routes.setdefault(usage.request_id, []).append(stop)
            case RunFinished(request_id=call):
                self.follow(call, self.routes.pop(call, []))
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
            case TaskDispatched(task=task):
                self.placed[task] += 1
                self.counts["run again"] += self.placed[task] > 1
            case TaskFinished(task=task):
                self.placed.pop(task, None)
            case WorkerLostEvent(pid=pid, reason=reason):
                self.tell(f"worker {pid} is lost: {reason}")
            case WorkerReady(pid=pid):
                if self.counts["killed"]:
                    self.tell(f"worker {pid} takes its place")

    def follow(self, call: str, route: list[tuple[str, str]]) -> None:
        """A call has ended: by way of which keys?"""
        if len(route) > 1:
            self.counts["failovers"] += sum(one[0] != other[0] for one, other in pairwise(route))
            self.tell(f"{call}: " + " -> ".join(f"{key} {outcome}" for key, outcome in route))

    def tell(self, news: str) -> None:
        self.screen.tell(f"{self.seconds:5.1f} s  {news}")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


@dataclass
class Stage:
    """Where the calls are played."""

    keys: ResourcePool[str]
    workers: WorkerPool
    upstream: Upstream
    api: str
    story: Story

    async def call_once(self, tenant: str, call: str) -> None:
        """A task: one call for one tenant. It looks neither at keys nor at workers, nor at whose turn it is."""
        story = self.story
        story.service.order.append(tenant)
        try:
            answer = await self.keys.run(
                lambda key: ask(self.api, key.value, call),
                max_attempts=50,
                retry_delay=0.02,
                wait_for_capacity=True,
                request_id=call,
            )
        except (PoolExhausted, headgate.WorkerLost) as error:
            story.lost += 1
            story.tell(f"{call} is lost: {error}")
            return
        assert answer == f"answer to {call}", "an answer went to the wrong caller"
        story.answered += 1
        if story.answered == story.calls // 3:
            self.kill_a_worker()
        if story.answered == story.calls // 2:
            self.upstream.revoke(REVOKED)

    def kill_a_worker(self) -> None:
        """The one that has most to lose."""
        victim = max(self.workers.workers(), key=lambda worker: worker.in_flight)
        self.story.tell(f"worker {victim.pid} is killed, with {victim.in_flight} calls in flight")
        self.story.counts["killed"] += 1
        os.kill(victim.pid, signal.SIGKILL)


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


def frame_of(stage: Stage, tasks: TaskPool, title: str) -> Frame:
    story = stage.story
    keys = [row_of(key, seen, story) for key, seen in stage.keys.snapshot().items()]
    grids = (Grid(KEYS, keys), Grid(QUEUES, queues_of(tasks)))
    return Frame(title, grids, totals_of(story), workers_of(stage.workers))


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


def row_of(key: str, seen: dict[str, Any], story: Story) -> list[Cell]:
    status, left = seen["status"], seen["cooldown_seconds_remaining"]
    again = f" x{seen['consecutive_cooldown']}" if left and seen["consecutive_cooldown"] != 1 else ""
    return [
        Cell(key, "bold"),
        Cell(status.removesuffix("_down") + again, COLOURS[status]),
        Cell(bar(left / max(left, story.rests.get(key, left)), BAR) if left else "", COLOURS[status]),
        Cell(f"{left:.1f} s" if left else ""),
        Cell(str(seen["in_flight"])),
        *(Cell(str(story.outcomes[key, outcome] or "")) for outcome in SHORT.values()),
    ]


def totals_of(story: Story) -> str:
    counted = ", ".join(f"{story.counts[what]} {what}" for what in ("failovers", "cooldowns", "disabled"))
    return f"{story.seconds:5.1f} s  {story.answered} of {story.calls} answered, {story.lost} lost, {counted}"


async def keep_drawing(stage: Stage, tasks: TaskPool, title: str) -> None:
    while True:
        stage.story.screen.draw(frame_of(stage, tasks, title))
        await asyncio.sleep(stage.story.screen.pace)


def summary_of(pool: ResourcePool[str], story: Story) -> str:
    lost = story.calls - story.answered
    lines = {
        "calls": (story.calls, ""),
        "answered": (story.answered, f"{story.answered / story.seconds:.0f} a second"),
        "failovers": (story.counts["failovers"], "attempts that went on with another key"),
        "cooldowns": (story.counts["cooldowns"], "a key was rate-limited and left to rest"),
        "disabled": (story.counts["disabled"], "a key was revoked and is not asked again"),
        "sibling cancels": (pool.stats().sibling_cancels, "doomed requests stopped early, and sent elsewhere"),
        "workers killed": (story.counts["killed"], "and replaced at once"),
        "run again": (story.counts["run again"], "calls that a killed worker had, on another"),
        "lost results": (lost, "" if lost else "every call has its answer"),
    }
    table = "\n".join(f"  {name:<16}{count:>5}   {meaning}".rstrip() for name, (count, meaning) in lines.items())
    return f"\nWhat happened in {story.seconds:.1f} s\n{table}"


# -- running it -------------------------------------------------------------------------------------------------------


async def play(keys: ResourcePool[str], upstream: Upstream, story: Story, slots: int) -> Sequence[TaskSnapshot]:
    """All calls, and what became of each."""
    unsubscribe = [headgate.subscribe(story.hear, topic) for topic in ("resources", "workers")]
    try:
        with tempfile.TemporaryDirectory(prefix="headgate-demo-") as folder:
            api = os.path.join(folder, "api")
            async with upstream.listening(api), WorkerPool(spawn=WORKERS) as workers:
                return await perform(Stage(keys, workers, upstream, api, story), slots)
    finally:
        for leave in unsubscribe:
            leave()


async def perform(stage: Stage, slots: int) -> Sequence[TaskSnapshot]:
    story = stage.story
    story.began = time.monotonic()
    title = f"headgate: {story.calls} calls, {len(TENANTS)} tenants, {len(BUCKETS)} keys, {WORKERS} workers, one API"
    tasks = TaskPool("calls", max_concurrent=slots, queue=fair_round_robin())
    painter = asyncio.create_task(keep_drawing(stage, tasks, title))
    try:
        async with tasks:
            await submit_all(tasks, stage.call_once, story.calls)
        story.screen.draw(frame_of(stage, tasks, title))
    finally:
        painter.cancel()
        story.screen.close()
    story.service.stats = tasks.stats()
    return tasks.snapshot(tasks=story.calls).tasks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=560)
    parser.add_argument("--slots", type=int, default=40, help="calls at a time")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--plain", action="store_true", help="lines, on a terminal too")
    options = parser.parse_args()
    logging.getLogger("headgate").setLevel(logging.ERROR)  # the screen tells what is logged as warnings
    screen = screen_for(sys.stdout, plain=options.plain, rows_needed=len(BUCKETS) + len(TENANTS) + 14)
    keys, upstream, story = make_pool(), Upstream(BUCKETS, seed=options.seed), Story(options.calls, screen)
    try:
        tasks = asyncio.run(play(keys, upstream, story, options.slots))
        summary = summary_of(keys, story)
        say(comparison_of(story.service, in_one_line(tasks, options.slots), first=3 * options.slots))
        say(summary)
    except KeyboardInterrupt:
        say(f"\nstopped by Ctrl-C: {story.answered} of {story.calls} calls were answered")
        return 130
    return 0 if story.answered == story.calls else 1


if __name__ == "__main__":
    sys.exit(main())
