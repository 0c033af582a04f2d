"""Random schedules of interrupted tasks on the virtual loop: one seed, one small pool of tasks with keys.

    PYTHONPATH=src:. python -m tests.integration.combined.schedules --seeds 0:300

The language of bodies is that of `tests/integration/resources/schedules.py`, where `ResourcePool.run` is driven by it;
scopes of anyio come along where it is installed. Tasks are cancelled by their handles, by their own time limit, and
directly (the Task of asyncio in which they run), at random times and in the very turn in which a sibling's verdict
interrupts them.

The judge is not the implementation. Each attempt (`Try`) knows which cancellations of its Task still stand when its
body ends, and the end of each task is held against that:

  R61  an attempt that ends in CancelledError, interrupted and not cancelled, is repeated, and costs nothing
  R62  one that was cancelled and lets that out ends its task, interrupted or not
  R63  what a body returns, or raises by itself, is the task's
  end  each task has one end, no key is in use, nobody waits, all slots are free, and the pool still works
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import platform
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from headgate import PoolExhausted, Resource, ResourcePool, TaskHandle, TaskPool, subscribe
from headgate.resources import SiblingCancelled
from headgate.testing import Hang, Leak, run
from tests.integration.resources import schedules
from tests.integration.resources.schedules import GRID, Body, CountingTask, Violation, _look_at, _signal_of, _told, now

try:
    import anyio
except ImportError:  # it is no dependency of ours
    anyio = None  # type: ignore[assignment]

__all__ = ["Violation", "World"]


class LineTask(CountingTask):
    """A Task that knows which of its cancellations still stand, and whose they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.standing: list[str] = []
        self.taken_back = "inner"
        super().__init__(*args, **kwargs)

    def cancel(self, msg: Any = None) -> bool:
        asker = sys._getframe(1).f_code.co_name
        done = asyncio.Task.cancel(self, msg)
        if done and asker == "__aexit__":  # a TaskGroup of 3.13 takes one back and asks again, so that it is delivered
            self.standing.append(self.taken_back)
        elif done:
            self.standing.append({"_interrupt": "pool", "cancel_directly": "direct"}.get(asker, "inner"))
        return done

    def uncancel(self) -> int:
        if self.standing:
            self.taken_back = self.standing.pop()
        return asyncio.Task.uncancel(self)


@dataclass(eq=False)
class Try:
    """One attempt of a task, as its body saw it."""

    task: LineTask
    asked: float | None = None
    ended: bool = False
    outcome: object = None
    standing: frozenset[str] = frozenset()
    """Whose cancellations stood when it ended."""
    was_cancelled: bool = False
    """Was its handle, or had its time limit come, when it ended?"""

    @property
    def interrupted(self) -> bool:
        """Must it be repeated? It was asked to stop, did, and nobody else wanted that."""
        return self.asked is not None and self.is_cancelled and not self.standing and not self.was_cancelled

    @property
    def is_cancelled(self) -> bool:
        return isinstance(self.outcome, asyncio.CancelledError)

    @property
    def is_outer(self) -> bool:
        """Did it end in the cancellation of somebody who is no part of it?"""
        return self.is_cancelled and (self.was_cancelled or bool({"pool", "direct"} & self.standing))


@dataclass(eq=False)
class Job:
    """One task of the pool."""

    bodies: list[Body]
    tries: list[Try] = field(default_factory=list)
    handle: TaskHandle[Any] | None = None
    cancelled: bool = False
    ends: list[str] = field(default_factory=list)
    begun: int = 0
    unspent: int = 0
    asked: float | None = None
    """When it was asked to stop, before its body began."""


class Author(schedules.Author):
    """Writes bodies: those of `run`, without what ends in CancelledError by itself."""

    LEAVES = tuple(leaf for leaf in schedules.Author.LEAVES if leaf != "shared")

    def call(self, depth: int, *, top: bool = False) -> tuple[Any, ...]:
        if anyio is not None and self.dice.random() < 0.7:
            kind = self.dice.choice(("anyio_group", "anyio_move_on", "anyio_shield"))
            return kind, self.dice.choice(GRID), [self.body(0) for _ in range(2)]
        return "nested", self.dice.choice(GRID)

    def operation(self, depth: int) -> Body:
        body = super().operation(depth)
        return [one for one in body if one != ("raise", "CancelledError")]


class World(schedules.World):
    """One seed's pool, tasks and judge."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.jobs: list[Job] = []
        self.interrupted = 0

    def run(self) -> None:
        stop = [subscribe(self.hear, "resources.usage"), subscribe(self.hear_task, "lifecycle.pool.audit")]
        try:
            run(self.main, seed=self.seed, limit=10_000)
        except (Hang, Leak) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        finally:
            for unsubscribe in stop:
                unsubscribe()
        if self.problems:
            raise Violation("\n".join(self.problems[:3]))

    async def main(self) -> None:
        loop, dice = asyncio.get_running_loop(), self.dice
        loop.set_exception_handler(lambda _, context: self.wrong(f"unhandled: {_told(context)}"))
        loop.set_task_factory(self.make_task)
        members = [Resource(f"r{i}", i, dice.choice((None, None, 2, 4))) for i in range(dice.randint(1, 4))]
        self.keys: ResourcePool[int] = ResourcePool(
            members,
            cooldown_table=(0.25, 0.5, 1.0),
            strategy=dice.choice(("round_robin", "primary_backup")),
            probe_on_recovery=dice.random() < 0.3,
        )
        self.inner: ResourcePool[int] = ResourcePool({"inner": 1})
        self.pool = TaskPool(max_concurrent=dice.choice((2, 4, 8, 16)), resources=self.keys)
        self.pool._executor.launcher.here.make_task = LineTask
        self.events = [asyncio.Event() for _ in range(3)]
        for event in self.events:
            loop.call_later(dice.choice(GRID) * 2, event.set)
        self.queue, self.lock = asyncio.Queue(), asyncio.Lock()
        author = Author(dice, 1)
        await asyncio.gather(*(self.submitter(author) for _ in range(dice.randint(4, 15))), self.monkeys())
        await self.pool.drain()
        while left := [task for task in self.tasks if not task.done() and task is not asyncio.current_task()]:
            await asyncio.wait(left)  # what was shielded, or cancelled in wait_for
        self.judge_all()
        await self.check_the_end()
        await self.pool.close()

    def make_task(self, loop: Any, coro: Any, **kwargs: Any) -> Any:
        task = LineTask(coro, loop=loop, **kwargs)
        task.add_done_callback(_look_at)
        self.tasks.append(task)
        return task

    async def submitter(self, author: Author) -> None:
        dice = self.dice
        await asyncio.sleep(dice.choice((0, 0, 0, 0.25, 1.0)))
        job = Job([author.operation(dice.choice((0, 1, 2))) for _ in range(3)])
        options: dict[str, Any] = {"max_attempts": dice.randint(1, 4)}
        if dice.random() < 0.15:
            options["timeout"] = dice.choice(GRID)
        self.jobs.append(job)
        job.handle = await self.pool.submit(self.body, job, **options)

    async def body(self, key: Resource[Any], job: Job) -> str:
        task = asyncio.current_task()
        assert isinstance(task, LineTask)
        attempt, job.asked = Try(task, job.asked), None
        job.tries.append(attempt)
        self.note(f"job {self.jobs.index(job)} begins on {key.resource_id}")
        program = job.bodies[min(len(job.tries), len(job.bodies)) - 1]
        try:
            await self.play(program, None)
        except BaseException as error:
            attempt.outcome = error
            raise
        else:
            attempt.outcome = f"result {len(job.tries)}"
            return attempt.outcome
        finally:
            attempt.ended = True
            attempt.standing = frozenset(task.standing)
            attempt.was_cancelled = job.handle is not None and self.pool._executor.asked(job.handle) is not None
            self.note(f"job {self.jobs.index(job)} ends: {attempt.outcome!r:.60} {task.standing} asked {attempt.asked}")

    # -- who cancels --

    async def monkeys(self) -> None:
        for _ in range(self.dice.randint(0, 5)):
            await asyncio.sleep(self.dice.choice(GRID) * self.dice.choice((0.5, 1)))
            for _ in range(self.dice.randint(0, 3)):
                await asyncio.sleep(0)
            jobs = [job for job in self.jobs if job.handle is not None and not job.handle.finished]
            if jobs:
                self.dice.choice((self.cancel_directly, self.cancel_handle))(self.dice.choice(jobs))

    def cancel_directly(self, job: Job) -> None:
        if job.tries and not job.tries[-1].ended:
            self.outer_cancels += 1
            self.note(f"cancels the Task of job {self.jobs.index(job)}")
            job.tries[-1].task.cancel()

    def cancel_handle(self, job: Job) -> None:
        if job.handle is not None and job.handle.cancel():
            self.outer_cancels += 1
            self.note(f"cancels job {self.jobs.index(job)}")
            job.cancelled = True

    # -- what is heard --

    def job_of(self, task_id: str) -> Job | None:
        return next((job for job in self.jobs if job.handle is not None and job.handle.id == task_id), None)

    def hear(self, event: Any) -> None:
        if not isinstance(event, SiblingCancelled) or event.pool != self.keys.name:
            return
        self.sibling_cancels += 1
        job = self.job_of(event.usage.request_id)
        if job is None:
            return
        self.note(f"job {self.jobs.index(job)} is asked to stop")
        if job.tries and not job.tries[-1].ended:
            job.tries[-1].asked = now()
        else:
            job.asked = now()
        loop, dice = asyncio.get_running_loop(), self.dice
        if dice.random() < 0.3:
            cancel = dice.choice((self.cancel_directly, self.cancel_handle))
            if dice.random() < 0.5:
                cancel(job)  # before the interruption arrives
            else:
                loop.call_soon(cancel, job)  # in the same turn, after it

    def hear_task(self, event: Any) -> None:
        job = self.job_of(event.task_id)
        if job is None:
            for job in self.jobs:
                if job.handle is None:
                    break  # it starts while it is submitted
            else:
                return
        if event.name == "pool_dequeue":
            job.begun += 1
        elif event.name == "pool_requeue":
            job.asked = None
            job.unspent += not event.spent
            self.interrupted += not event.spent
        elif event.name == "pool_finish":
            job.ends.append(event.status)

    # -- what bodies do besides --

    async def step(self, statement: tuple[Any, ...], attempt: Any) -> None:
        kind = statement[0]
        if kind == "nested":

            async def operation(key: Resource[Any]) -> None:
                try:
                    await asyncio.sleep(statement[1])
                except asyncio.CancelledError:
                    raise asyncio.CancelledError("a client's own") from None

            await self.inner.run(operation)
        elif kind.startswith("anyio"):
            await self.in_anyio(kind, *statement[1:])
        else:
            await super().step(statement, attempt)

    async def in_anyio(self, kind: str, seconds: float, bodies: list[Body]) -> None:
        if kind == "anyio_group":
            async with anyio.create_task_group() as group:
                group.start_soon(self.play, bodies[0], None)
                await self.play(bodies[1], None)
        elif kind == "anyio_move_on":
            with anyio.move_on_after(seconds):
                await self.play(bodies[0], None)
        else:
            try:
                await self.play(bodies[0], None)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.25)

    # -- judging --

    def judge_all(self) -> None:
        for number, job in enumerate(self.jobs):
            assert job.handle is not None, "it was submitted"
            status = job.handle.status
            who = f"job {number} ({status})"
            if job.ends != [status]:
                self.wrong(f"{who} was told to end {job.ends}")
            if job.handle.snapshot().attempt != job.begun - job.unspent:
                self.wrong(
                    f"R61: {who} counts {job.handle.attempt} attempts, {job.begun} began, {job.unspent} for free"
                )
            for attempt in job.tries[:-1]:
                self.judge_repeated(who, attempt)
            if job.tries:
                self.judge_last(who, job, job.handle, job.tries[-1])
            elif status == "completed" or (status == "cancelled" and not job.cancelled):
                self.wrong(f"R62: {who} never began")

    def judge_repeated(self, who: str, attempt: Try) -> None:
        if attempt.is_outer:
            self.wrong(f"R62: {who} was cancelled ({set(attempt.standing)}), and ran again")
        elif attempt.is_cancelled and attempt.asked is None:
            self.wrong(f"R61: {who} ended in a CancelledError that nobody asked for, and ran again")
        elif not attempt.is_cancelled and not _signal_of(attempt.outcome)[1]:
            self.wrong(f"R63: {who} ended in {attempt.outcome!r}, and ran again")

    def judge_last(self, who: str, job: Job, handle: TaskHandle[Any], last: Try) -> None:
        status, error = handle.status, handle.snapshot().error
        in_queue = (status == "cancelled" and job.cancelled) or isinstance(error, PoolExhausted)
        if isinstance(last.outcome, str):
            if (status, handle.snapshot().result) != ("completed", last.outcome):
                self.wrong(f"R63: {who} returned {last.outcome}")
        elif last.is_outer:
            if status != "cancelled" and not isinstance(error, TimeoutError):
                self.wrong(f"R62: {who} was cancelled, and failed with {error!r}")
        elif last.interrupted:
            if not in_queue:
                self.wrong(f"R61: {who} was interrupted, and nobody cancelled it")
        elif last.is_cancelled:
            if status != "cancelled" and not in_queue:
                self.wrong(f"R63: {who} ended in a CancelledError of its own")
        elif _signal_of(last.outcome)[1]:
            if not in_queue and status != "cancelled":
                self.wrong(f"{who} ended in a verdict, and with {error!r}")
        elif status != "failed" or error is not last.outcome:
            self.wrong(f"R63: {who} raised {last.outcome!r}, and failed with {error!r}")

    async def check_the_end(self) -> None:
        seen = self.pool.snapshot(0)
        if (seen.active, seen.waiting, seen.queued) != (0, 0, 0):
            self.wrong(f"the pool is not idle: {self.pool!r}")
        stats = self.keys.stats()
        if stats.in_flight or stats.waiting:
            self.wrong(f"{stats.in_flight} uses of keys are left, {stats.waiting} wait")
        if self.pool._executor._asked:
            self.wrong("tasks that have ended are still to be cancelled")
        await asyncio.sleep(100)
        for resource_id, key in self.keys.snapshot().items():
            others = [other for other in self.keys.snapshot() if other != resource_id]
            if key["status"] != "disabled" and await (await self.pool.submit(_ident, exclude=others)) != resource_id:
                self.wrong(f"{resource_id} cannot be had any more")


async def _ident(key: Resource[Any]) -> str:
    return key.resource_id


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:300", help="from:to")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each trace")
    options = parser.parse_args()
    logging.getLogger("headgate").setLevel(logging.CRITICAL)
    first, last = map(int, options.seeds.split(":"))
    counted: Counter[str] = Counter()
    for seed in range(first, last):
        world = World(seed)
        try:
            world.run()
        except Violation as violation:
            sys.stdout.write("\n".join(world.trace) + f"\nseed {seed} failed: {violation}\n")
            return 1
        if options.verbose:
            sys.stdout.write("\n".join(world.trace) + "\n")
        counted["asked to stop"] += world.sibling_cancels
        counted["cancelled from outside"] += world.outer_cancels
        counted["run again"] += world.interrupted
    told = ", ".join(f"{count} {what}" for what, count in counted.items())
    sys.stdout.write(f"{last - first} schedules on Python {platform.python_version()}: {told}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
