"""Random schedules of sibling cancellation on the virtual loop: one seed, one small world of pools, checked as it runs.

    PYTHONPATH=src python tests/integration/resources/schedules.py --seeds 0:300
    PYTHONPATH=src python tests/integration/resources/schedules.py --seeds 17:18 -v

Needs nothing but the standard library and headgate, so that any Python can run it.

A seed makes one to three pools (some share resources), three to fifteen callers, and *monkeys* that cancel tasks at
bad moments: times lie on a grid of quarter seconds so that things collide, and some victims are cancelled from outside
in the very turn in which a sibling asks them to stop, in both orders. What callers and operations do is a random
program in a small language of awaits (`Author` writes it, `World.play` performs it).

The judge is not the implementation. Every task counts what was done to it (`CountingTask`), every use of a resource is
an `Attempt` that notes what its operation did, and when a call ends `World.judge` holds its outcome against both:

  R60  only strictly younger uses of the same resource are asked to stop, and all of them that can be
  R61  an operation that ends in CancelledError, asked and not cancelled from outside, is retried, unseen by its caller
  R62  one that was cancelled from outside and lets it out ends the call in CancelledError, asked or not
  R63  what an operation returns, or raises by itself, is what the caller gets
  R64  leases, plain awaitables and open streams are never asked
  R41  `timeout=` and a sibling's asking reach the operation in the very moment, not at its next natural resume
  R20  no operation begins on a resource that is out of use, or above its limit
  R30  a cancelled use gives no verdict, and its slot is given back when it has ended, not before
  end  cancelling() is what the tasks' own history says, nothing is in flight, nobody waits, every pool still works
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import platform
import random
import sys
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from headgate import CooldownResource, DisableResource, PoolExhausted, Resource, ResourcePool, RetryOperation, subscribe
from headgate.core.events import Event
from headgate.resources import ResourceAcquired, ResourceReleased, SiblingCancelled
from headgate.resources.stats import check
from headgate.testing import Hang, Leak, run

SIGNALS = (CooldownResource, DisableResource, RetryOperation)
GRID = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)

Body = list[tuple[Any, ...]]
Op = Callable[[Resource[Any]], Any]


class Violation(AssertionError):
    """Something the specification forbids."""


# -- what is written down ----------------------------------------------------------------------------------------------


class CountingTask(asyncio.Task[Any]):
    """A task that remembers who cancelled it: "+" cancel, "-" uncancel, "~" an old cancellation delivered once more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.moves: list[str] = []
        self.moved_at: list[float] = []
        self.moved_by: list[Attempt | None] = []  # whose operation did it, by a TaskGroup of its own
        self.is_unsettled = False  # something was delivered later than it was asked for
        self.waits_on_children: list[list[float]] = []  # from and to
        self.shared_hits = 0  # of these, where others await the same and may have been meant
        self.hits = 0  # CancelledErrors that arrived where this task awaits something
        super().__init__(*args, **kwargs)

    def cancel(self, msg: Any = None) -> bool:
        if not self.get_loop().is_running():
            return super().cancel(msg)  # the story is over, its loop is being closed
        asker = sys._getframe(1)
        by = asker.f_locals.get("self")
        if asker.f_globals.get("__name__") == "headgate.core.cancellation" and getattr(by, "_task", None) is self:
            raise Violation("R62: headgate cancelled the caller's own task")
        done = super().cancel(msg)
        if done and asker.f_code.co_name == "__aexit__" and self.moves[-1:] == ["-"]:
            self.moves[-1] = "~"  # TaskGroup of 3.13: uncancel() and cancel() at once, so that the next await sees it
            self.is_unsettled = True
        elif done:
            self.moves.append("+")
            self.moved_at.append(now())
            self.moved_by.append(getattr(by, "owner", None))
            if asyncio.current_task() is self:
                self.is_unsettled = True  # a TaskGroup whose child failed in its eager first step
        return done

    def uncancel(self) -> int:
        if self.cancelling():
            self.moves.append("-")
            self.moved_at.append(now())
            self.moved_by.append(None)
        return super().uncancel()


def is_cancelled(moves: list[str]) -> bool:
    """Is a cancellation of this stretch of history still standing? An uncancel takes back the newest one."""
    standing = 0
    for move in moves:
        standing = max(0, standing + {"+": 1, "-": -1, "~": 0}[move])
    return standing > 0


@dataclass(eq=False)
class Attempt:
    """One use of a resource, as its operation saw it."""

    call: Call
    number: int
    kind: str
    resource: Resource[Any]
    task: CountingTask
    usage: int
    started: float
    history: int  # length of the task's moves when it began
    history_end: int = 0  # and when it ended
    asked: float | None = None
    seen: list[float] = field(default_factory=list)  # when CancelledError reached the operation
    below: list[tuple[float, Attempt]] = field(default_factory=list)  # when one reached an operation inside this one
    ended: float | None = None
    outcome: object = None
    cancelled: bool = False  # from outside, when it ended
    is_open: bool = False  # a stream that gave an item
    future: asyncio.Future[Any] | None = None

    @property
    def due(self) -> float | None:
        """When `timeout=` interrupts it."""
        timeout = self.call.options.get("timeout")
        return None if timeout is None else self.started + float(timeout)

    def was_asked(self) -> bool:
        """By a sibling or by its timeout, until it ended."""
        end = now() if self.ended is None else self.ended
        return self.asked is not None or (self.due is not None and end >= self.due and self.kind != "lease")

    def ended_by_asking(self, at: float) -> bool:
        """Did it end at this moment in a CancelledError that its call could take for its own?"""
        return self.ended == at and self.was_asked() and isinstance(self.outcome, asyncio.CancelledError)

    def can_be_asked(self) -> bool:
        if self.kind in ("coroutine", "future"):
            return self.ended is None
        return self.kind == "stream" and not self.is_open and self.ended is None

    def __str__(self) -> str:
        return f"{self.call}.{self.number}@{self.resource.resource_id}"


@dataclass(eq=False)
class Call:
    """One call of a pool by one task."""

    number: int
    pool: ResourcePool[Any]
    how: str
    options: dict[str, Any]
    bodies: list[Body]
    kinds: list[str]
    inside: Attempt | None  # the use whose operation makes this call, in the same task
    attempts: list[Attempt] = field(default_factory=list)

    def is_stopped_from_above(self) -> bool:
        """Was an operation around this call asked to stop? Then a CancelledError passes through, on its way up."""
        above = self.inside
        return above is not None and (above.was_asked() or above.call.is_stopped_from_above())

    def __str__(self) -> str:
        return f"{self.how}#{self.number}"


# -- who writes the programs -------------------------------------------------------------------------------------------


class Author:
    """Writes what callers and operations do."""

    LEAVES = (
        "sleep",
        "sleep",
        "turn",
        "turns",
        "event",
        "queue",
        "lock",
        "future",
        "shared",
        "ready",
        "custom",
        "bare",
    )
    SCOPES = ("timeout", "group", "gather", "shield", "wait_for", "child", "swallow", "swallow", "cleanup", "rename")

    def __init__(self, dice: random.Random, pools: int) -> None:
        self.dice = dice
        self.pools = pools

    def body(self, depth: int) -> Body:
        return [self.statement(depth) for _ in range(self.dice.randint(1, 3))]

    def statement(self, depth: int) -> tuple[Any, ...]:
        dice = self.dice
        roll = dice.random()
        if depth > 0 and roll < 0.1:
            return self.call(depth - 1)
        if depth > 0 and roll < 0.4:
            return self.scope(dice.choice(self.SCOPES), depth - 1)
        return dice.choice(self.LEAVES), dice.choice(GRID)

    def scope(self, kind: str, depth: int, inside: Body | None = None) -> tuple[Any, ...]:
        dice = self.dice
        inside = inside or self.body(depth)
        if kind in ("timeout", "wait_for"):
            return kind, dice.choice(GRID), inside, dice.random() < 0.5
        if kind in ("group", "gather"):
            children = [self.child(depth) for _ in range(dice.randint(1, 2))]
            return kind, inside, children, dice.random() < 0.5
        if kind == "swallow":
            return kind, inside, dice.choice(("uncancel", "keep")), self.body(0), dice.random() < 0.1
        if kind == "cleanup":
            return kind, inside, self.body(0)
        return kind, inside

    def child(self, depth: int) -> Body:
        return self.body(depth) + ([("raise", self.end())] if self.dice.random() < 0.25 else [])

    def end(self) -> str:
        kinds = ("ValueError", "cool 0", "cool 0.5", "cool table", "retry", "disable")
        return self.dice.choices(kinds, (4, 8, 4, 8, 4, 1))[0]

    def operation(self, depth: int) -> Body:
        dice = self.dice
        if dice.random() < 0.3:  # one that soon finds the resource overloaded, while others have just begun
            return [("sleep", dice.choice(GRID)), ("raise", self.end())]
        body = [("forget",)] * (dice.random() < 0.1) + self.body(depth)
        if dice.random() < 0.25:
            body.append(("raise", self.end()))
        elif dice.random() < 0.05:
            body.append(("raise", "CancelledError"))
        return body

    def call(self, depth: int, *, top: bool = False) -> tuple[Any, ...]:
        dice = self.dice
        how = dice.choice(("run", "run", "run", "run", "use", "stream", "lease"))
        options: dict[str, Any] = {}
        if how != "lease":
            options = {"retry_delay": dice.choice((0, 0, 0, 0.5)), "max_attempts": dice.randint(1, 4)}
            if dice.random() < 0.3:
                options["timeout"] = dice.choice(GRID)
            if dice.random() < 0.15 and how != "stream":
                options["isolate"] = True
        mode = dice.random()
        if mode < 0.3:
            options["wait_for_capacity" if mode < 0.2 else "wait_for_cooldown"] = True
            if not top or dice.random() < 0.5:
                options["within"] = dice.choice((1.0, 2.0, 4.0))  # else one may wait for a slot it holds itself
        bodies = [self.operation(depth) for _ in range(3)]
        kinds = [dice.choice(("coroutine",) * 8 + ("future", "awaitable", "raises")) for _ in bodies]
        return "call", dice.randrange(self.pools), how, options, bodies, kinds, (dice.randint(1, 3), self.body(0))

    def caller(self) -> Body:
        """Calls, bare or inside something."""
        body: Body = []
        for _ in range(self.dice.randint(1, 4)):
            call = self.call(self.dice.choice((0, 1, 1, 2)), top=True)
            around = self.dice.choice((None, None, None, "timeout", "group", "swallow", "wait_for", "child", "cleanup"))
            body.append(call if around is None else self.scope(around, 0, [call]))
        return body


# -- where they are performed ------------------------------------------------------------------------------------------


class World:
    """One seed's pools, tasks and judge."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(seed)
        self.trace: list[str] = []
        self.problems: list[str] = []
        self.active: dict[int, Attempt] = {}
        self.granted: dict[object, int] = {}  # the usage a task was given last
        self.signaller: dict[object, Attempt] = {}
        self.expected: dict[int, set[int]] = {}  # by usage of the signaller: whom it must ask to stop
        self.tasks: list[asyncio.Task[Any]] = []
        self.shared: asyncio.Future[Any] | None = None
        self.numbers = iter(range(1, 1_000_000))
        self.attempts: list[Attempt] = []
        self.sibling_cancels = self.outer_cancels = 0

    def run(self) -> None:
        unsubscribe = subscribe(self.hear, "resources.usage")
        try:
            run(self.main, seed=self.seed, limit=10_000)
        except (Hang, Leak) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        finally:
            unsubscribe()
        if self.problems:
            raise Violation("\n".join(self.problems[:3]))

    def note(self, text: str) -> None:
        task = asyncio.current_task()
        self.trace.append(f"{now():7.3f}  {task.get_name() if task else '(callback)':12} {text}")

    def wrong(self, text: str) -> None:
        self.note(f"WRONG {text}")
        self.problems.append(text)

    # -- the frame of the story --

    async def main(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.wrong(f"unhandled: {_told(context)}"))
        loop.set_task_factory(self.task_factory())
        pools = self.make_pools()
        author = Author(self.dice, len(pools))
        self.events = [asyncio.Event() for _ in range(3)]
        for event in self.events:
            loop.call_later(self.dice.choice(GRID) * 2, event.set)
        self.queue: asyncio.Queue[int] = asyncio.Queue()
        self.lock = asyncio.Lock()
        callers: list[asyncio.Task[Any]] = []
        for number in range(self.dice.randint(3, 15)):
            older, delay = self.dice.choice((0, 0, 0, 1, 2)), self.dice.choice((0, 0, 0, 0.25, 1.0))
            story = self.caller(author.caller(), older, delay)
            callers.append(asyncio.create_task(story, name=f"caller-{number}"))
        callers += [asyncio.create_task(self.monkey(), name=f"monkey-{i}") for i in range(self.dice.randint(0, 5))]
        await asyncio.wait(callers)
        while left := [task for task in self.tasks if not task.done()]:  # what was shielded, or cancelled in wait_for
            await asyncio.wait(left)
        await self.check_the_end()

    def task_factory(self) -> Any:
        if hasattr(asyncio, "create_eager_task_factory") and self.dice.random() < 0.2:
            self.note("tasks start eagerly")
            make = asyncio.create_eager_task_factory(CountingTask)
        else:

            def make(loop: Any, coro: Any, **kwargs: Any) -> Any:
                return CountingTask(coro, loop=loop, **kwargs)

        def remembered(loop: Any, coro: Any, **kwargs: Any) -> Any:
            if not kwargs.get("name", ""):
                kwargs["name"] = f"task-{len(self.tasks)}"
            task = make(loop, coro, **kwargs)
            task.add_done_callback(_look_at)  # wait_for of 3.11 may leave one behind that fails unseen
            self.tasks.append(task)
            return task

        return remembered

    def make_pools(self) -> list[ResourcePool[Any]]:
        dice = self.dice
        resources = [Resource(f"r{i}", i, dice.choice((None, None, None, 1, 2, 4))) for i in range(dice.randint(1, 4))]
        self.pools: list[ResourcePool[Any]] = []
        for number in range(dice.randint(1, 3)):
            members = [r for r in resources if dice.random() < 0.7] or [resources[0]]
            self.pools.append(
                ResourcePool(
                    members,
                    max_attempts=dice.randint(1, 4),
                    cooldown_table=(0.25, 0.5, 1.0),
                    strategy=dice.choice(("round_robin", "primary_backup", "primary_backup")),
                    cancel_siblings=dice.random() < 0.9,
                    probe_on_recovery=dice.random() < 0.3,
                    name=f"pool-{number}",
                )
            )
        for pool in self.pools:
            self.note(f"{pool.name}: {[(r, s['max_in_flight']) for r, s in pool.snapshot().items()]}")
        return self.pools

    async def caller(self, body: Body, older: int, delay: float) -> None:
        task = counting()
        await asyncio.sleep(delay)
        for _ in range(older):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        task.is_unsettled = False
        for statement in body:
            begun = len(task.moves)
            try:
                await self.play([statement], None)
            except asyncio.CancelledError:
                self.note("ends cancelled")
                if "+" not in task.moves[begun:] and not task.is_unsettled and not self.may_cancel_itself(statement):
                    self.wrong("R61: a caller that nobody cancelled sees CancelledError")
                return
            except (Exception, BaseExceptionGroup) as error:
                self.note(f"caught {error!r:.80}")

    @staticmethod
    def may_cancel_itself(statement: tuple[Any, ...]) -> bool:
        """Somewhere in it a CancelledError is raised by hand, or a task is awaited that may have been cancelled."""
        text = repr(statement)
        return any(
            word in text
            for word in ("CancelledError", "'gather'", "'shield'", "'child'", "'wait_for'", "'future'", "'shared'")
        )

    async def monkey(self) -> None:
        await asyncio.sleep(self.dice.choice(GRID) * self.dice.choice((0.5, 1, 1, 2)))
        for _ in range(self.dice.randint(0, 4)):
            await asyncio.sleep(0)
        alive = [task for task in self.tasks if not task.done() and not task.get_name().startswith("monkey")]
        if alive:
            self.cancel(self.dice.choice(alive))

    def cancel(self, task: asyncio.Task[Any]) -> None:
        if not task.done():
            self.outer_cancels += 1
            self.note(f"cancels {task.get_name()}")
            task.cancel()

    async def check_the_end(self) -> None:
        for pool in self.pools:
            for resource_id, seen in pool.snapshot().items():
                if seen["in_flight"]:
                    self.wrong(f"{seen['in_flight']} in flight at the end on {resource_id} of {pool.name}")
            if len(pool._engine.rotation.wait_queue):
                self.wrong(f"somebody still stands in the line of {pool.name}")
            check(pool._engine.rotation, now())
        for task in self.tasks:
            assert isinstance(task, CountingTask)
            mine = [attempt for attempt in self.attempts if attempt.task is task]
            asked = sum((attempt.asked is not None) + (attempt.due is not None) for attempt in mine)
            # Twice: what a timeout or a group inside the operation took for its own is delivered once more.
            if task.hits - task.shared_hits > len(task.moves) - task.moves.count("-") + 2 * asked:
                self.wrong(f"{task.get_name()} was interrupted {task.hits} times, asked {asked}, moves {task.moves}")
        if self.active:
            self.wrong(f"never given back: {', '.join(map(str, self.active.values()))}")
        await asyncio.sleep(100)
        for pool in self.pools:
            for resource_id, seen in pool.snapshot().items():
                others = [other for other in pool.snapshot() if other != resource_id]
                if seen["status"] != "disabled" and await pool.run(_ident, exclude=others) != resource_id:
                    self.wrong(f"{resource_id} of {pool.name} cannot be had any more")

    # -- performing --

    async def play(self, body: Body, attempt: Attempt | None) -> None:
        for statement in body:
            try:
                await self.step(statement, attempt)
            except asyncio.CancelledError:
                if attempt is not None and asyncio.current_task() is attempt.task:
                    self.note_seen(attempt)
                raise

    @staticmethod
    def note_seen(attempt: Attempt) -> None:
        at = now()
        attempt.seen.append(at)
        above = attempt.call.inside
        while above is not None:
            above.below.append((at, attempt))
            above = above.call.inside

    async def step(self, statement: tuple[Any, ...], attempt: Attempt | None) -> None:
        kind, *rest = statement
        if kind == "call":
            await self.make_call(attempt, *rest)
        elif kind in Author.SCOPES:
            await getattr(self, f"do_{kind}")(attempt, *rest)
        elif kind == "forget":
            counting().uncancel()
        elif kind == "raise":
            self.note(f"raises {rest[0]}")
            raise _error(rest[0])
        else:
            try:
                await self.leaf(kind, *rest)
            except asyncio.CancelledError:
                counting().hits += 1
                counting().shared_hits += kind == "shared"
                self.note(f"interrupted in {kind}")
                raise

    def leaf(self, kind: str, seconds: float) -> Awaitable[Any]:
        loop = asyncio.get_running_loop()
        if kind == "sleep":
            return asyncio.sleep(seconds)
        if kind == "turn":
            return asyncio.sleep(0)
        if kind == "turns":
            return _turns(5)
        if kind == "event":
            return self.dice.choice(self.events).wait()
        if kind == "queue":
            loop.call_later(seconds, self.queue.put_nowait, 1)
            return self.queue.get()
        if kind == "lock":
            return self.hold(seconds)
        if kind == "shared":
            return self.shared_future(seconds)
        future = loop.create_future()
        if kind == "ready":  # done one turn before the one who awaits it resumes
            loop.call_soon(_resolve, future)
        else:
            loop.call_later(seconds, _resolve, future, ConnectionError() if self.dice.random() < 0.1 else 1)
        return _Custom(future, bare=kind == "bare") if kind in ("custom", "bare") else _forgiving(future)

    def shared_future(self, seconds: float) -> asyncio.Future[Any]:
        """One future for all who ask for it until it is done: whoever is cancelled cancels it for the others too."""
        if self.shared is None or self.shared.done():
            self.shared = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(seconds, _resolve, self.shared)
        return self.shared

    async def hold(self, seconds: float) -> None:
        async with self.lock:
            await asyncio.sleep(seconds)

    def spawn(self, body: Body, attempt: Attempt | None) -> asyncio.Task[Any]:
        return asyncio.create_task(self.play(body, attempt))

    @contextlib.contextmanager
    def waiting_on_children(self) -> Iterator[None]:
        """What is asked now arrives when the children have ended, which may take as long as they like."""
        stretch = [now(), float("inf")]
        counting().waits_on_children.append(stretch)
        try:
            yield
        finally:
            stretch[1] = now()

    async def do_timeout(self, attempt: Attempt | None, seconds: float, inside: Body, quiet: bool) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.play(inside, attempt)
        except TimeoutError:
            self.note("asyncio.timeout went off")
            if not quiet:
                raise

    async def do_wait_for(self, attempt: Attempt | None, seconds: float, inside: Body, quiet: bool) -> None:
        try:
            with self.waiting_on_children():
                await asyncio.wait_for(self.play(inside, attempt), seconds)
        except TimeoutError:
            if not quiet:
                raise

    async def do_group(self, attempt: Attempt | None, inside: Body, children: list[Body], quiet: bool) -> None:
        try:
            with self.waiting_on_children():
                async with asyncio.TaskGroup() as group:
                    group.owner = attempt  # type: ignore[attr-defined]
                    for child in children:
                        playing = self.play(child, attempt)
                        try:
                            group.create_task(playing)
                        except RuntimeError:  # an eager sibling has failed already
                            playing.close()
                            raise
                    await self.play(inside, attempt)
        except ExceptionGroup:
            if not quiet:
                raise

    async def do_gather(self, attempt: Attempt | None, inside: Body, children: list[Body], quiet: bool) -> None:
        tasks = [self.spawn(body, attempt) for body in (inside, *children)]
        with self.waiting_on_children():
            await asyncio.gather(*tasks, return_exceptions=quiet)

    async def do_shield(self, attempt: Attempt | None, inside: Body) -> None:
        await asyncio.shield(self.spawn(inside, attempt))

    async def do_child(self, attempt: Attempt | None, inside: Body) -> None:
        with self.waiting_on_children():
            await self.spawn(inside, attempt)

    async def do_swallow(self, attempt: Attempt | None, inside: Body, how: str, then: Body, signal: bool) -> None:
        try:
            await self.play(inside, attempt)
        except asyncio.CancelledError:
            if how == "uncancel":
                counting().uncancel()
            self.note(f"swallows CancelledError ({how})")
            if signal:
                raise RetryOperation("instead of a CancelledError") from None
            await self.play(then, attempt)

    async def do_cleanup(self, attempt: Attempt | None, inside: Body, cleaning: Body) -> None:
        try:
            await self.play(inside, attempt)
        finally:
            await self.play(cleaning, attempt)

    async def do_rename(self, attempt: Attempt | None, inside: Body) -> None:
        try:
            await self.play(inside, attempt)
        except asyncio.CancelledError:
            raise asyncio.CancelledError("another one") from None

    # -- calling a pool --

    async def make_call(
        self,
        attempt: Attempt | None,
        pool: int,
        how: str,
        options: dict[str, Any],
        bodies: list[Body],
        kinds: list[str],
        consumer: tuple[int, Body],
    ) -> None:
        task = counting()
        inside = attempt if attempt is not None and attempt.task is task else None
        call = Call(next(self.numbers), self.pools[pool], how, options, bodies, kinds, inside)
        begun, count = len(task.moves), task.cancelling()
        outcome: object
        self.note(f"{call} on {call.pool.name} {options}")
        try:
            outcome = await self.calling(call, attempt, consumer)
        except BaseException as error:
            outcome = error
        self.note(f"{call} -> {outcome!r:.90}")
        moves = task.moves[begun:]
        if task.cancelling() != count + moves.count("+") - moves.count("-"):
            self.wrong(f"R62: cancelling() is {task.cancelling()} after {call}, was {count}, moves {moves}")
        self.judge(call, outcome, task.moves, begun)
        if isinstance(outcome, BaseException):
            raise outcome

    async def calling(self, call: Call, attempt: Attempt | None, consumer: tuple[int, Body]) -> object:
        pool, options = call.pool, call.options
        if call.how == "run":
            return await pool.run(self.operation(call), **options)
        if call.how == "use":
            return await pool.use(**options)(self.operation(call))()
        if call.how == "lease":
            async with pool.lease(**options) as resource:
                leased = self.begin(call, resource, "lease")
                with self.ending(leased):
                    await self.play(call.bodies[0], attempt)
            return leased.outcome
        most, between = consumer
        async with contextlib.aclosing(pool.stream(self.streaming(call), **options)) as stream:
            async for _ in stream:
                most -= 1
                if not most:
                    return "enough"
                await self.play(between, attempt)  # a sibling must not hit this
        return "all"

    def operation(self, call: Call) -> Op:
        def operation(resource: Resource[Any]) -> Any:
            number = min(len(call.attempts), len(call.bodies) - 1)
            kind, body = call.kinds[number], call.bodies[number]
            attempt = self.begin(call, resource, kind)
            if kind == "coroutine":
                return self.perform(attempt, body)
            if kind == "raises":
                with self.ending(attempt):
                    raise _error(body[-1][1] if body[-1][0] == "raise" else "ValueError")
            loop = asyncio.get_running_loop()
            attempt.future = loop.create_future()
            loop.call_later(self.dice.choice(GRID), _resolve, attempt.future, f"result of {attempt}")
            return attempt.future if kind == "future" else _Custom(attempt.future)

        return operation

    async def perform(self, attempt: Attempt, body: Body) -> object:
        with self.ending(attempt):
            await self.play(body, attempt)
        return attempt.outcome

    def streaming(self, call: Call) -> Callable[[Resource[Any]], AsyncGenerator[object, None]]:
        async def operation(resource: Resource[Any]) -> AsyncGenerator[object, None]:
            attempt = self.begin(call, resource, "stream")
            body = call.bodies[min(len(call.attempts) - 1, len(call.bodies) - 1)]
            with self.ending(attempt):
                await self.play(body[:1], attempt)
                attempt.is_open = True
                try:
                    yield 1
                    await self.play(body[1:], attempt)
                    yield 2
                finally:
                    await asyncio.sleep(0.25)

        return operation

    def begin(self, call: Call, resource: Resource[Any], kind: str) -> Attempt:
        task = counting()
        usage, number = self.granted.pop(task), len(call.attempts) + 1
        attempt = Attempt(call, number, kind, resource, task, usage, now(), len(task.moves))
        self.attempts.append(attempt)
        self.note(f"{attempt} begins ({kind})")
        for before in call.attempts[-1:]:
            self.check_retried(before, task.moves)
        call.attempts.append(attempt)
        self.active[attempt.usage] = attempt
        together = sum(other.resource is resource for other in self.active.values())
        if resource.max_in_flight is not None and together > resource.max_in_flight:
            self.wrong(f"R20: {attempt} is number {together} on a resource for {resource.max_in_flight}")
        if resource.status == "disabled" or (resource.status == "cooling_down" and resource.cooldown_until > now()):
            self.wrong(f"R20, R60: {attempt} begins on a resource that is {resource.status}")
        return attempt

    @contextlib.contextmanager
    def ending(self, attempt: Attempt) -> Iterator[None]:
        """Note how an operation ends, in the very step in which the pool will see it."""
        try:
            yield
        except BaseException as error:
            attempt.outcome = error
            raise
        else:
            attempt.outcome = f"result of {attempt}"
        finally:
            self.end(attempt)

    def end(self, attempt: Attempt) -> None:
        attempt.ended = now()
        attempt.history_end = len(attempt.task.moves)
        attempt.cancelled = is_cancelled(attempt.task.moves[attempt.history :])
        self.note(f"{attempt} ends: {attempt.outcome!r:.80}{' (cancelled)' if attempt.cancelled else ''}")
        signal = _signal_of(attempt.outcome)[0]
        if signal is not None:
            self.signaller[attempt.task] = attempt
            self.expected[attempt.usage] = self.younger(attempt, signal)
        self.check_prompt(attempt)

    def younger(self, attempt: Attempt, signal: BaseException) -> set[int]:
        """Whom a signal must ask to stop."""
        if isinstance(signal, RetryOperation) or not attempt.call.pool._engine.rotation.cancel_siblings:
            return set()
        if attempt.resource.status == "disabled" and isinstance(signal, CooldownResource):
            return set()
        return {
            other.usage
            for other in self.active.values()
            if other.resource is attempt.resource
            and other.usage > attempt.usage
            and other.asked is None
            and other.can_be_asked()
            and other.call.pool._engine.rotation.cancel_siblings
        }

    # -- judging --

    def hear(self, event: Event) -> None:
        task = asyncio.current_task()
        if isinstance(event, ResourceAcquired):
            self.granted[task] = event.usage.id
        elif isinstance(event, SiblingCancelled):
            self.hear_cancelled(event.usage.id, self.signaller.get(task))
        elif isinstance(event, ResourceReleased):
            attempt = self.active.pop(event.usage.id, None)
            if attempt is not None:
                self.hear_released(attempt, event.outcome)

    def hear_cancelled(self, usage: int, signaller: Attempt | None) -> None:
        victim = self.active.get(usage)
        self.sibling_cancels += 1
        self.note(f"{signaller} asks {victim} to stop")
        if signaller is None or victim is None:
            self.wrong(f"R60: {victim} is asked to stop, and nobody signalled or it is not in flight")
            return
        self.expected[signaller.usage].discard(usage)
        if usage <= signaller.usage or victim.resource is not signaller.resource:
            self.wrong(f"R60: {victim} is not a younger use of the resource of {signaller}")
        if not victim.can_be_asked():
            self.wrong(f"R60, R64: {victim} ({victim.kind}, open: {victim.is_open}) must not be asked to stop")
        victim.asked = now()
        roll = self.dice.random()
        if roll < 0.1:
            self.cancel(victim.task)  # from outside, before the sibling's cancellation arrives
        elif roll < 0.2:
            asyncio.get_running_loop().call_soon(self.cancel, victim.task)  # in the same turn, after it

    def hear_released(self, attempt: Attempt, outcome: str) -> None:
        if attempt.future is not None:
            # Its end is seen only here: a future that was done may still have been overtaken by a cancellation.
            attempt.outcome = f"result of {attempt}" if outcome == "ok" else asyncio.CancelledError()
            self.end(attempt)
            asked = attempt.was_asked() or attempt.cancelled
            if outcome != "ok" and not asked and not self.is_due(attempt.call, attempt.task.moves, attempt.history):
                self.wrong(f"R63: {attempt} was interrupted by nobody")
        elif attempt.ended is None:
            self.wrong(f"R30: the slot of {attempt} was given back while its operation still runs")
        self.signaller.pop(attempt.task, None)
        if missed := self.expected.pop(attempt.usage, None):
            self.wrong(f"R60: {attempt} did not ask {', '.join(str(self.active[usage]) for usage in missed)} to stop")
        if isinstance(attempt.outcome, asyncio.CancelledError) and attempt.cancelled and outcome != "no_verdict":
            self.wrong(f"R30: {attempt} was cancelled from outside, and is told as {outcome}")

    def check_prompt(self, attempt: Attempt) -> None:
        """Whoever is asked to stop hears of it in that moment (R41, R60), unless its children take their time."""
        assert attempt.ended is not None
        for why, at in (("its sibling asked", attempt.asked), ("its timeout ended", attempt.due)):
            if at is None or attempt.ended <= at or at in attempt.seen:
                continue
            if attempt.kind == "stream" and (attempt.is_open or why == "its timeout ended"):
                continue
            if attempt.future is not None or attempt.kind == "lease":
                continue
            if any(seen_at == at and not inner.ended_by_asking(at) for seen_at, inner in attempt.below):
                continue  # swallowed by an operation inside; but a call inside may not take it for its own
            if any(since <= at <= until for since, until in attempt.task.waits_on_children):
                continue
            if attempt.seen and attempt.seen[0] < at:
                continue  # it swallowed one before, which may have been asked for before it began and still counts
            moves = zip(attempt.task.moves[attempt.history :], attempt.task.moved_at[attempt.history :], strict=True)
            if attempt.task.is_unsettled or is_cancelled([move for move, moved_at in moves if moved_at <= at]):
                continue  # it swallowed a cancellation, or a TaskGroup of 3.11 left one behind: taken for a clean-up
            self.wrong(
                f"R41, R60: {attempt} heard at {attempt.seen} and not at {at}, when {why}; ended {attempt.ended}"
            )

    def check_retried(self, attempt: Attempt, moves: list[str]) -> None:
        """`attempt` was followed by another: rightly?"""
        if isinstance(attempt.outcome, asyncio.CancelledError):
            if attempt.cancelled:
                self.wrong(f"R62: {attempt} was cancelled from outside, and its call went on")
            elif not attempt.was_asked():
                self.wrong(f"R61: {attempt} ended in a CancelledError nobody asked for, and its call went on")
        elif not _signal_of(attempt.outcome)[1]:
            self.wrong(f"R30: {attempt} ended in {attempt.outcome!r}, and was tried again")

    def judge(self, call: Call, outcome: object, moves: list[str], begun: int) -> None:
        """Does what the caller gets follow from what the operation did?"""
        cancelled_between = isinstance(outcome, asyncio.CancelledError)  # right if somebody cancelled in a pause
        if len(call.attempts) > int(call.options.get("max_attempts", 4)):
            self.wrong(f"R12: {call} made {len(call.attempts)} attempts")
        if not call.attempts:
            if not isinstance(outcome, PoolExhausted) and not (cancelled_between and self.is_due(call, moves, begun)):
                self.wrong(f"{call} ended in {outcome!r} without an attempt")
            return
        last = call.attempts[-1]
        if last.ended is None:
            self.wrong(f"{last} has not ended, and {call} has")
            return
        if call.how == "stream" and last.is_open:
            self.judge_open_stream(call, last, outcome)
            return
        own, retriable = last.outcome, _signal_of(last.outcome)[1]
        if isinstance(own, asyncio.CancelledError):
            if last.cancelled or not last.was_asked():
                if not isinstance(outcome, asyncio.CancelledError):
                    self.wrong(f"R62: {last} was cancelled from outside, and {call} ended in {outcome!r}")
                return
            if cancelled_between and (self.ambiguous(last) or self.is_due(call, moves, last.history)):
                return
            retriable = True
        if call.how == "lease":
            if outcome is not own:
                self.wrong(f"R75: the block of {call} ended in {own!r}, the lease in {outcome!r}")
        elif retriable:
            if cancelled_between and (self.is_due(call, moves, last.history_end) or self.was_cancelled_by_others(last)):
                return
            if not isinstance(outcome, PoolExhausted):
                self.wrong(f"R61: {last} ended in {own!r}, asked {last.asked}, and {call} in {outcome!r}")
        elif call.how == "stream" and not isinstance(own, BaseException):
            if outcome != "all":
                self.wrong(f"R64: an empty stream ended in {outcome!r}")
        elif outcome is not own and outcome != own:
            self.wrong(f"R63: {last} ended in {own!r}, and {call} in {outcome!r}")

    @staticmethod
    def is_due(call: Call, moves: list[str], since: int) -> bool:
        """May a CancelledError come out of `call`, other than by its operation?"""
        return is_cancelled(moves[since:]) or counting().is_unsettled or call.is_stopped_from_above()

    @staticmethod
    def was_cancelled_by_others(attempt: Attempt) -> bool:
        """Since it began, and not by a TaskGroup inside it: that alone, which 3.11 forgets to take back, is nothing."""
        stretch = slice(attempt.history, attempt.history_end)
        moves = zip(attempt.task.moves[stretch], attempt.task.moved_by[stretch], strict=True)
        return any(move == "+" and by is not attempt for move, by in moves)

    def ambiguous(self, attempt: Attempt) -> bool:
        """It raised a CancelledError of its own at the very moment its timeout ended: either reading is right."""
        return attempt.asked is None and attempt.ended == attempt.due

    def judge_open_stream(self, call: Call, last: Attempt, outcome: object) -> None:
        own = last.outcome
        if isinstance(own, GeneratorExit):
            return  # closed by its consumer, whose own affair the outcome is
        if isinstance(own, BaseException) and outcome is not own and not isinstance(outcome, asyncio.CancelledError):
            self.wrong(f"R64: the open stream of {call} ended in {own!r}, its consumer in {outcome!r}")


# -- small things ------------------------------------------------------------------------------------------------------


def now() -> float:
    return asyncio.get_running_loop().time()


def counting() -> CountingTask:
    task = asyncio.current_task()
    assert isinstance(task, CountingTask)
    return task


def _error(name: str) -> BaseException:
    if name == "CancelledError":
        return asyncio.CancelledError("by hand")
    if name == "ValueError":
        return ValueError("the operation's own")
    if name == "disable":
        return DisableResource()
    if name == "retry":
        return RetryOperation()
    return CooldownResource({"cool 0": 0, "cool 0.5": 0.5}.get(name))


def _signal_of(outcome: object) -> tuple[BaseException | None, bool]:
    """The gravest signal in it, and whether it is nothing but signals. Written anew: it judges headgate's own."""
    if isinstance(outcome, SIGNALS):
        return outcome, True
    if not isinstance(outcome, BaseExceptionGroup):
        return None, False
    signals, others = outcome.split(SIGNALS)
    if signals is None:
        return None, False
    for kind in (DisableResource, CooldownResource, RetryOperation):
        found = signals.subgroup(kind)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if found is not None:
            return found, others is None
    return None, False


async def _ident(resource: Resource[Any]) -> str:
    return resource.resource_id


async def _turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def _forgiving(future: asyncio.Future[Any]) -> None:
    with contextlib.suppress(ConnectionError):
        await future


def _resolve(future: asyncio.Future[Any], outcome: object = None) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
        future.exception()  # its waiter may have been cancelled in this very turn, and then nobody looks at it
    else:
        future.set_result(outcome)


def _look_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _told(context: dict[str, Any]) -> str:
    error = context.get("exception")
    told = "".join(traceback.format_exception(error)) if error is not None else ""
    return f"{context.get('message')} {told}"


class _Custom:
    """An awaitable of no known kind."""

    def __init__(self, future: asyncio.Future[Any], *, bare: bool = False) -> None:
        self.future = future
        self.bare = bare

    def __await__(self) -> Generator[Any, Any, Any]:
        if self.bare:
            yield
        try:
            return (yield from self.future.__await__())
        except ConnectionError:
            yield
            return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:300", help="from:to")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each trace")
    parser.add_argument("--all", action="store_true", help="do not stop at the first failure")
    options = parser.parse_args()
    logging.getLogger("headgate").setLevel(logging.CRITICAL)
    first, last = map(int, options.seeds.split(":"))
    failed = attempts = asked = outer = 0
    for seed in range(first, last):
        world = World(seed)
        problem = None
        try:
            world.run()
        except Exception as error:
            problem = str(error) if isinstance(error, Violation) else traceback.format_exc()
        if options.verbose or (problem and not options.all):
            sys.stdout.write("\n".join(world.trace) + "\n")
        if problem:
            failed += 1
            sys.stdout.write(f"seed {seed} failed on Python {platform.python_version()}: {problem}\n")
            if not options.all:
                sys.stdout.write(f"again: python {sys.argv[0]} --seeds {seed}:{seed + 1} -v\n")
                return 1
        attempts += len(world.attempts)
        asked += world.sibling_cancels
        outer += world.outer_cancels
    sys.stdout.write(
        f"{last - first} schedules on Python {platform.python_version()}: {attempts} attempts, "
        f"{asked} asked to stop, {outer} cancelled from outside, {failed} failed\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
