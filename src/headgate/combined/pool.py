"""The line: slot, resource, worker. The one place where the three pools meet.

    submit -> TaskPool: whose turn is it? -> ResourcePool: with which key? -> WorkerPool: on which worker? -> run
    result <-  record, event              <-  what it said about the key   <-  result, exception, stream

A `TaskPool` of this module is the one of `headgate.tasks` with `resources=` and `workers=`. It runs its tasks through a
`Line`, which reserves a resource in the same moment in which a task gets its slot (neither is held while waiting for
the other), calls the function with the resource as first argument, here or on a worker, and tells the ResourcePool what
that call said about it.

What ends an attempt:

    returned, raised          the task's own outcome; the resource is in order
    CooldownResource, ...     a verdict: the resource rests, the task goes back to the head of its partition, and one of
                              its `max_attempts` is spent
    an older use failed       the task goes back as well, and nothing is spent: it was not its fault
    its worker was lost       the task's own failure, which says nothing about the resource
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from datetime import timedelta
from inspect import CO_COROUTINE
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, overload

from headgate.core.cancellation import Steered, primed
from headgate.core.checks import checked_affinity, checked_attempts, checked_names, named_options
from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import (
    DispatchTimeout,
    InvalidArgument,
    InvalidType,
    NoActivePool,
    NoWorkersAvailable,
    PoolClosed,
    RemoteError,
    RoutineTimeout,
    RpcError,
    WorkerLost,
)
from headgate.resources import events
from headgate.resources.allocator import Allocator
from headgate.resources.attempts import Call
from headgate.resources.members import ANY, CANCEL_REQUESTED, Requirement, Use
from headgate.resources.model import Resource
from headgate.resources.pool import ResourcePool
from headgate.resources.signals import Signal
from headgate.tasks.model import PLAIN, Scope, TaskRecord
from headgate.tasks.pool import TaskPool as PlainTaskPool
from headgate.tasks.pool import pool_from
from headgate.tasks.runtime.functions import explain, is_async
from headgate.tasks.runtime.nested_waits import CURRENT
from headgate.tasks.runtime.ports import Again, Runner, Supply, Taskless
from headgate.tasks.strategies import Strategy
from headgate.tasks.streams import StreamBody

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterable, AsyncIterator, Iterable

    from headgate.stores.port import Store
    from headgate.tasks.admission import Policy
    from headgate.tasks.handle import TaskHandle
    from headgate.tasks.runtime.executor import Executor
    from headgate.workers.client.any_function import Placing
    from headgate.workers.pool import WorkerPool

__all__ = ["TaskPool", "pool_create"]

T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_SAYS_NOTHING = (
    WorkerLost,
    NoWorkersAvailable,
    NoActivePool,
    PoolClosed,
    DispatchTimeout,
    RoutineTimeout,
    RemoteError,
    RpcError,
)
"""Failures on the way to a worker and back, and ends of patience: they say nothing about the resource."""


class TaskPool(PlainTaskPool):
    """Runs at most `max_concurrent` tasks at a time, each with a resource and on a worker if it was given such.

    With `resources=` (a ResourcePool) a task starts when there is a slot and a resource for it, and its function gets
    the resource as first argument; CooldownResource, DisableResource and RetryOperation teach that pool, and the task
    runs again with another. With `workers=` (a WorkerPool) it runs on one of its worker processes. Everything else is
    as in `headgate.tasks.TaskPool`.
    """

    @named_options
    def __init__(
        self,
        name: str | None = None,
        *,
        max_concurrent: int = 1,
        queue: Strategy | str | Mapping[str, Any] | Callable[[], Strategy] = "priority",
        backpressure: Policy | str | Mapping[str, Any] | Callable[[], Policy] | None = None,
        scope: Scope = "session",
        pipeline_id: str | None = None,
        stale_after: float | timedelta = 30.0,
        store: Store | None = None,
        keep: int = 10_000,
        max_concurrent_per_key: int | Mapping[Any, int] | None = None,
        audit: str | os.PathLike[str] | None = None,
        runner: Runner | None = None,
        resources: ResourcePool[Any] | None = None,
        workers: WorkerPool | None = None,
    ) -> None:
        self._line = _line_of(resources, workers, runner)
        super().__init__(
            name,
            max_concurrent=max_concurrent,
            queue=queue,
            backpressure=backpressure,
            scope=scope,
            pipeline_id=pipeline_id,
            stale_after=stale_after,
            store=store,
            keep=keep,
            max_concurrent_per_key=max_concurrent_per_key,
            audit=audit,
            runner=runner,
        )
        if self._line is not None and self._fair in self._line.options:
            self._let_go()
            raise InvalidArgument(
                f"key cannot be {self._fair!r}: with resources= that is an option of submit() of another meaning",
                remedy='Use "key", or a name of yours such as "tenant_id".',
            )

    if TYPE_CHECKING:
        # With `resources=` a function takes one argument more than it is submitted with.
        @overload
        async def submit(self, fn: Callable[[*Ts], Awaitable[R]], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
        @overload
        async def submit(self, fn: Callable[[*Ts], R], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
        @overload
        async def submit(
            self, fn: Callable[[Resource[Any], *Ts], Awaitable[R]], /, *args: *Ts, **options: Any
        ) -> TaskHandle[R]: ...
        @overload
        async def submit(
            self, fn: Callable[[Resource[Any], *Ts], R], /, *args: *Ts, **options: Any
        ) -> TaskHandle[R]: ...
        async def submit(self, fn: Any, /, *args: Any, **options: Any) -> TaskHandle[Any]: ...  # type: ignore[misc]

        @overload
        def submit_nowait(self, fn: Callable[[*Ts], Awaitable[R]], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
        @overload
        def submit_nowait(self, fn: Callable[[*Ts], R], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
        @overload
        def submit_nowait(
            self, fn: Callable[[Resource[Any], *Ts], Awaitable[R]], /, *args: *Ts, **options: Any
        ) -> TaskHandle[R]: ...
        @overload
        def submit_nowait(
            self, fn: Callable[[Resource[Any], *Ts], R], /, *args: *Ts, **options: Any
        ) -> TaskHandle[R]: ...
        def submit_nowait(self, fn: Any, /, *args: Any, **options: Any) -> TaskHandle[Any]: ...  # type: ignore[misc]

        @overload
        def map(
            self, fn: Callable[[T], Awaitable[R]], items: Iterable[T] | AsyncIterable[T], /, **options: Any
        ) -> AsyncIterator[R]: ...
        @overload
        def map(
            self, fn: Callable[[T], R], items: Iterable[T] | AsyncIterable[T], /, **options: Any
        ) -> AsyncIterator[R]: ...
        @overload
        def map(
            self,
            fn: Callable[[Resource[Any], T], Awaitable[R]],
            items: Iterable[T] | AsyncIterable[T],
            /,
            **options: Any,
        ) -> AsyncIterator[R]: ...
        @overload
        def map(
            self, fn: Callable[[Resource[Any], T], R], items: Iterable[T] | AsyncIterable[T], /, **options: Any
        ) -> AsyncIterator[R]: ...
        def map(self, fn: Any, items: Any, /, **options: Any) -> AsyncIterator[Any]: ...

    def _supply_of(self, runner: Runner | None) -> Supply | None:
        return self._line if self._line is not None else super()._supply_of(runner)


def pool_create(options: Mapping[str, Any] | None = None, /, **keywords: Any) -> TaskPool:
    """A `TaskPool` from keywords, or from one mapping of them; what is None counts as not given.

    `stale_after_ms` is `stale_after` in milliseconds, `scope_id` and `run_id` are `pipeline_id`, `strategy` is `queue`.
    """
    return pool_from(TaskPool, options, keywords)


def _line_of(resources: Any, workers: Any, runner: Any) -> Line | None:
    if resources is None and workers is None:
        return None
    if runner is not None:
        raise InvalidArgument(
            "runner cannot be given together with resources or workers",
            remedy="Leave it out: they bring their own.",
        )
    if resources is not None and not isinstance(resources, ResourcePool):
        raise InvalidType(
            f"resources must be a ResourcePool, got {type(resources).__name__}",
            remedy='Make one: ResourcePool({"key-1": "sk-aaa"}).',
        )
    if workers is not None:
        from headgate.workers.pool import WorkerPool  # not above: it is slow to import, and most pools need none

        if not isinstance(workers, WorkerPool):
            raise InvalidType(
                f"workers must be a WorkerPool, got {type(workers).__name__}",
                remedy="Pass what `async with headgate.WorkerPool() as workers:` gives.",
            )
    return Line(resources, workers)


class Permit:
    """What one attempt of a task runs with. Also the handle by which an older use of its resource stops it."""

    # No slots: one is made for each attempt, and what most never have is not set.
    worker: str | None = None
    max_calls: int = 0  # see `workers.exchange.Request`
    here: bool = False
    """Did it run here although there are workers?"""
    doomed: bool = False
    """Was it told to stop, because an older use of the resource failed?"""
    running: Any = None
    """What stops it, and knows whether a CancelledError came from that: a `Steered` or a `Direct`; None: not yet."""

    def __init__(self, task: TaskRecord, flight: Use | None, resource: Any) -> None:
        self.task: TaskRecord | None = task
        self.flight: Use | None = flight
        """The use of its resource; None when it has ended, or there is none."""
        self.resource: Any = resource

    @property
    def resource_id(self) -> str | None:
        """What it runs with."""
        return None if self.resource is None else str(self.resource.resource_id)

    @property
    def request_id(self) -> str:
        """The id of its task."""
        task = self.task
        return "" if task is None else f"{task.owner.id}/{task.number}"

    @property
    def tenant(self) -> str:
        """The fairness key of its task."""
        partition = None if self.task is None else self.task.partition
        return partition if isinstance(partition, str) else "" if partition is None else str(partition)

    @property
    def holds(self) -> bool:
        """Is a resource in use until it has ended?"""
        return self.flight is not None

    def placed(self, uid: str) -> None:
        """A worker was given the call."""
        self.worker = uid

    def interrupt(self, why: str) -> None:
        """Stop it soon. From any thread."""
        task = self.task
        loop = None if task is None else task.owner._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._stop)
            except RuntimeError:
                pass  # its loop is closed: nothing runs there any more

    def _stop(self) -> None:
        task = self.task
        if task is None or self.flight is None or task.permit is not self or _is_open(task):
            return
        if task in task.owner._asked:
            return  # it is being cancelled: do not disturb its clean-up
        self.doomed = True
        if self.running is not None:
            self.running.stop(_STOP)


_STOP = "headgate: an older use of its resource failed"


class _Doomed(asyncio.CancelledError):
    """It was told to stop before its function was called."""


def _is_open(task: TaskRecord) -> bool:
    """Is it a stream that has given out an item?"""
    return isinstance(task.fn, StreamBody) and task.fn.opened


def _opened(permit: Permit, flight: Use) -> None:
    """Its first item is out: from here on it is not interrupted for others."""
    flight.request_id = permit.request_id
    flight.handle = None
    if permit.running is not None:
        permit.running.spare()


Past = tuple[str | None, str | None]
"""What remains of a permit when its task has ended: resource and worker."""


class Line(Supply):
    """Runs tasks with resources of a ResourcePool, on workers of a WorkerPool, or both."""

    def __init__(self, resources: ResourcePool[Any] | None, workers: WorkerPool | None) -> None:
        super().__init__(None)
        self._leases: Allocator | None = None
        self._placing: Placing | None = None
        self._pool: Any = None
        self._vacating = False  # a task that ends gives back its resource now, and its slot next
        self._calls: dict[TaskRecord, Call] = {}  # of tasks that have had a verdict
        if workers is not None:
            from headgate.workers.client.any_function import Placing  # not above: see `_line_of`

            self._placing = Placing(workers)
        if resources is not None:
            self._leases = Allocator(resources, self._came_free, self._lost_one, self._is_full)
            self.options: tuple[str, ...] = ("tags", "exclude", "affinity", "max_attempts")

    def attach(self, pool: Any) -> None:
        """This is the pool that it serves."""
        self._pool = pool

    def bound(self, loop: asyncio.AbstractEventLoop) -> None:
        """And this its loop."""
        if self._leases is not None:
            self._leases.on(loop)

    # -- what a task asks for ------------------------------------------------------------------------------------------

    def asks(self, options: Mapping[str, Any]) -> tuple[Hashable, Any]:
        """A want, if it is not just any resource, and an affinity or a number of attempts."""
        tags, exclude = options.get("tags") or (), options.get("exclude") or ()
        tags, exclude = checked_names("tags", tags), checked_names("exclude", exclude)
        attempts, affinity = options.get("max_attempts"), checked_affinity(options.get("affinity"))
        if attempts is not None:
            checked_attempts(attempts)
        wish = None if attempts is None and affinity is None else (affinity, attempts)
        return Requirement(tags, exclude) if tags or exclude else None, wish

    @property
    def doubtful(self) -> bool:
        """Might there be no resource for anybody?"""
        return self._leases is not None and self._leases.doubt

    def hopeless(self, task: TaskRecord) -> Exception | None:
        """Is there no resource that it could ever have?"""
        leases = self._leases
        return None if leases is None else leases.hopeless(_want(task), self._calls.get(task))

    def reserve(self, task: TaskRecord, *, stand: bool) -> Permit | None:
        """A resource for it, if there is one now."""
        leases = self._leases
        if leases is None:
            return Permit(task, None, None)
        call = self._calls.get(task) if self._calls else None
        terms, want, affinity = task.terms, ANY, None
        if terms is not PLAIN:
            want, affinity = _want(task), None if terms.wish is None else terms.wish[0]
        flight = leases.take(want, call, affinity, self._pool._loop if stand else None)
        if flight is None:
            return None
        permit = Permit(task, flight, flight.member.resource)
        if isinstance(task.fn, StreamBody):
            task.fn.when_open = functools.partial(_opened, permit, flight)
        code = getattr(task.fn, "__code__", None)
        if (code is not None and code.co_flags & CO_COROUTINE and self._placing is None) or self._can_stop(task.fn):
            if flight.handle is CANCEL_REQUESTED:
                permit.doomed = True
            flight.handle = permit
        else:
            flight.request_id = permit.request_id  # a thread cannot be interrupted: it has no handle
        return permit

    def _can_stop(self, fn: Any) -> bool:
        """Can it be interrupted, here or on a worker?"""
        if self._placing is not None and fn.__class__ is FunctionType:
            return self._placing.can_stop(fn)
        return is_async(fn) and (self._placing is None or self._placing.can_stop(fn))

    def confirmed(self, task: TaskRecord) -> bool:
        """Is its resource still in order?"""
        permit: Permit = task.permit
        return not permit.doomed and (permit.flight is None or permit.resource.status == "healthy")

    def started(self, task: TaskRecord) -> None:
        """Tell what it was given: not before, for who hears of it may do anything to the task."""
        leases, permit = self._leases, task.permit
        if leases and events.USAGE.listeners and isinstance(permit, Permit) and permit.flight is not None:
            permit.flight.request_id = permit.request_id
            leases.engine.reporter.acquired(permit.flight)
        if self._placing is not None:
            self._placing.announce(task.task)

    def release(self, permit: Permit) -> None:
        """It was not used."""
        flight, permit.flight, permit.task = permit.flight, None, None
        if flight is not None and self._leases is not None:
            self._leases.returned(flight)

    def leave(self, need: Hashable) -> bool:
        """Let others have what comes free."""
        if self._leases is not None:
            self._leases.leave(_as_want(need))
        return True

    def _came_free(self, wants: list[Requirement], resource: Resource[Any] | None) -> None:
        pool, needs = self._pool, [None if want == ANY else want for want in wants]
        if resource is not None:  # for whoever is next of all who can use it, not only of those who wanted it first
            pool._serve([need for need in pool._desk.shut if _as_want(need).fits(resource)])
        pool._reopen(*needs)

    def _lost_one(self) -> None:
        self._pool._look_for_doomed()

    def _is_full(self) -> bool:
        return not self._vacating and bool(self._pool._desk.slots.exhausted)

    # -- running -------------------------------------------------------------------------------------------------------

    async def drive(self, pool: Executor, task: TaskRecord) -> None:
        """Call its function with the resource, here or on a worker, and learn from how that ends: in one coroutine."""
        permit: Permit = task.permit
        flight = permit.flight
        try:
            await primed()
            CURRENT.set(task)
            if permit.doomed:
                raise _Doomed
            fn: Any = task.fn
            args = task.args if flight is None else (permit.resource, *task.args)
            if self._placing is not None:
                made: Any = self._place(self._placing, pool, task, args, permit)
            elif fn.__class__ is FunctionType and fn.__code__.co_flags & CO_COROUTINE:
                made = fn(*args)
            else:
                made = pool._call(task, args)
            if flight is None or flight.handle is not permit:
                result = await made
            else:  # it may be interrupted, as an operation of `ResourcePool.run`: only if it suspends
                try:
                    first = made.send(None)
                except StopIteration as done:
                    result = done.value
                else:
                    permit.running = Steered(made, first, patient=True)
                    result = await permit.running
            self._succeed(task, permit, result)
        except BaseException as error:
            if not pool._ended_badly(task, self._outcome(task, permit, error)):
                raise
        else:
            pool._end(task, "completed", result)
        finally:
            del task  # see `PoolShell._drive`

    def begin(self, pool: Executor, task: TaskRecord) -> Any:
        """Send it to a worker, if that is all there is to do here."""
        permit, context = task.permit, task.context
        if self._placing is None or permit.doomed or context is None or task.fn.__class__ is not FunctionType:
            return None
        args = task.args if permit.flight is None else (permit.resource, *task.args)
        sent = self._placing.send(task.fn, args, permit, context, Taskless(self, pool, task, permit))
        permit.running = sent
        return sent

    def _place(
        self, placing: Placing, pool: Executor, task: TaskRecord, args: tuple[Any, ...], permit: Permit
    ) -> Awaitable[Any]:
        """Call it on a worker, or here if it dispatches itself: what to await."""
        body = task.fn if isinstance(task.fn, StreamBody) else None
        called: Any = placing.stream(body.fn, args, permit) if body is not None else placing.call(task.fn, args, permit)
        if called is placing.here:
            permit.here = True
            called = pool._call(task, args)
        elif body is not None:
            called = body.feed(called)
        return called  # type: ignore[no-any-return]

    def _succeed(self, task: TaskRecord, permit: Permit, result: Any) -> None:
        """It returned. Raises if the pool's classifier finds a signal in that."""
        leases, flight = self._leases, permit.flight
        if leases is not None and flight is not None:
            judges = leases.engine.classify is not None and not isinstance(task.fn, StreamBody)
            if judges and (signal := leases.judged(flight, result)) is not None:
                permit.flight = None
                raise self._after(leases, task, flight, signal, signal)
            permit.flight = None
            if events.USAGE.listeners or events.RUN.listeners:
                flight.request_id = permit.request_id
            self._vacating = True
            try:
                leases.succeeded(flight, task.attempt)
            finally:
                self._vacating = False
            if self._calls:
                self._calls.pop(task, None)
        task.permit = (permit.resource_id, permit.worker)
        permit.task = None  # the last answer of a worker is held until its next, and with it the permit

    def _outcome(self, task: TaskRecord, permit: Permit, error: BaseException) -> BaseException:
        """It raised: what its task is to raise."""
        if isinstance(error, WorkerLost) and self._placing is not None and error.worker == permit.worker:
            self._placing.losses.note(permit.request_id, task.terms.retries + 1 - self.failures(task), error.neighbours)
        leases, flight = self._leases, permit.flight
        if leases is None or flight is None:
            return error
        self._vacating = True
        try:
            return self._learn(leases, task, permit, flight, error)
        except Exception as broken:  # a signal with a text for a number, or the like: the task ends all the same
            return broken
        finally:
            self._vacating = False
            permit.running = None  # it holds the Task, which may hold the exception, whose traceback holds the permit
            leases.dropped(flight)  # if nothing else has ended it

    def _learn(
        self, leases: Allocator, task: TaskRecord, permit: Permit, flight: Use, error: BaseException
    ) -> BaseException:
        """An attempt raised: tell the resource pool, and return what its task is to raise."""
        flight.request_id = permit.request_id
        permit.flight = None
        if isinstance(error, asyncio.CancelledError):
            # Not by what it says: whatever it passed on its way may have raised another in its place.
            running = permit.running
            ours = isinstance(error, _Doomed) or (running is not None and running.is_ours(error))
            if not ours or not permit.doomed or task in self._pool._asked or _is_open(task):
                leases.dropped(flight)
                return error
            leases.stopped(flight)
            return Again(
                f"{permit.resource_id}: cancelled by a sibling, an older use of it failed",
                spent=False,
                resource_id=permit.resource_id,
            )
        unplaced = self._placing is not None and permit.worker is None and not permit.here
        if isinstance(error, _SAYS_NOTHING) or unplaced:
            leases.dropped(flight)
            return error
        signal = leases.failed(flight, error)
        if isinstance(error, TypeError):
            explain(error, task.fn, (flight.member.resource, *task.args))
        return error if signal is None else self._after(leases, task, flight, signal, error)

    def _after(
        self, leases: Allocator, task: TaskRecord, flight: Use, signal: Signal, error: BaseException
    ) -> BaseException:
        """A verdict: is there another attempt?"""
        if _is_open(task):
            return error
        call = self._calls.get(task)
        if call is None:
            call = self._calls[task] = leases.call(_want(task), None if task.terms.wish is None else task.terms.wish[1])
        resource_id = flight.member.resource.resource_id
        reason = f"{resource_id}: {redact(_text(signal))} ({type(signal).__name__})"
        if call.failed(flight, signal, clock.now()):
            self._pool._tell_attempt(task, reason, clock.wall())
            return leases.exhausted(call)
        return Again(reason, spent=True, resource_id=resource_id)

    def failures(self, task: TaskRecord) -> int:
        """Attempts that were not verdicts; one whose verdicts are spent has no other, whatever its `retries`."""
        call = self._calls.get(task) if self._calls else None
        if call is None:
            return task.attempt
        verdicts = len(call.attempts)
        return task.attempt - verdicts if verdicts < call.plan.max_attempts else sys.maxsize

    def forget(self, task: TaskRecord) -> None:
        """It has ended, and not with a result."""
        permit: Permit | None = task.permit
        error = task.outcome.error if task.status == "failed" else None
        if permit is not None:
            task.permit = (permit.resource_id, permit.worker)
            permit.task = permit.resource = None
        if self._calls:
            self._calls.pop(task, None)
        if task.started is not None and self._leases is not None:
            self._leases.finished(f"{task.owner.id}/{task.number}", error, task.attempt)

    # -- looking -------------------------------------------------------------------------------------------------------

    def held(self, task: TaskRecord, waiting: Collection[TaskRecord]) -> list[str]:
        """All resources that could serve it, if each is in full use by tasks that wait, and for nothing else.

        `waiting` wait for it. Others count too if all they wait for is held up in the same way.
        """
        if self._leases is None:
            return []
        users = {flight.handle.task for *_, flights in self._usable(task) for flight in flights if _waits(flight)}
        others = users - set(waiting)
        while True:
            stuck = {*waiting, *others}
            held = self._full(task, stuck)
            free = {one for one in others if not all(self._is_held_up(on, stuck) for on in one.waits.on)}
            if not held or not free:
                return held
            others -= free

    def _usable(self, task: TaskRecord) -> list[tuple[str, int | None, bool, list[Use]]]:
        return [] if self._leases is None else self._leases.matching(_want(task))

    def _full(self, task: TaskRecord, stuck: Collection[TaskRecord]) -> list[str]:
        uses = {one.permit.flight for one in stuck if isinstance(one.permit, Permit)}
        full = []
        for resource_id, limit, shut, flights in self._usable(task):
            held = sum(flight in uses for flight in flights)
            if not (limit is not None and held >= limit) and not (shut and held == len(flights)):
                return []
            full.append(resource_id)
        return full

    def _is_held_up(self, task: TaskRecord, stuck: Collection[TaskRecord]) -> bool:
        """Does it wait itself, or for what those have who do?"""
        line = task.owner._supply
        queues = task.status == "queued" and isinstance(line, Line)
        return task in stuck or (queues and bool(line._full(task, stuck)))

    def why_not(self, task: TaskRecord) -> str:
        """How the resources are that could serve it."""
        if self._leases is None:
            return ""
        want = _want(task)
        seconds = self._leases.back_in(want)
        soon = "" if seconds is None else f", the first for {seconds:.1f} s more"
        return f"no resource of {self._leases.pool.name} is free: {self._leases.describe(want)}{soon}"

    def waiting_for(self, needs: Collection[Hashable]) -> dict[str, Any]:
        """The first cooldown to end, or just any resource."""
        if self._leases is None:
            return {"cause": "workers", "seconds": None}
        times = [self._leases.back_in(_as_want(need)) for need in needs]
        if not times or None in times:
            return {"cause": "resources", "seconds": None}
        return {"cause": "cooldown", "seconds": min(time for time in times if time is not None)}

    def describe(self, permit: Permit | Past) -> str:
        """With which resource, on which worker."""
        resource_id, worker = (permit.resource_id, permit.worker) if isinstance(permit, Permit) else permit
        with_what = "" if resource_id is None else f" with {resource_id}"
        return with_what + ("" if worker is None else f" on worker {worker}")


def _text(signal: Signal) -> str:
    """What a signal says; its class may be anybody's."""
    try:
        return str(signal.reason or signal)
    except Exception:
        return "it cannot be shown"


def _waits(flight: Use) -> bool:
    """Is it of a task that waits for others, and does nothing else?"""
    task = flight.handle.task if isinstance(flight.handle, Permit) else None
    return task is not None and task.slot is None and task.waits is not None and bool(task.waits.on)


def _want(task: TaskRecord) -> Requirement:
    return _as_want(task.terms.need)


def _as_want(need: Any) -> Requirement:
    return ANY if need is None else need
