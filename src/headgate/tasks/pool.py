"""`TaskPool`: who goes next? What callers see.

The way in is in `entrance`, what decides in `desk` (pure), what runs in `shell`; here are the constructor, looking, and
the end.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Mapping,
)
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from types import TracebackType
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, TypeVarTuple, overload

from headgate.core.checks import (
    check_store,
    checked_name,
    checked_stale_after,
    checked_whole,
    named_options,
    nearest,
    refuse_both,
    respell,
    seconds_of,
)
from headgate.core.clock import clock
from headgate.errors import InvalidArgument, InvalidType, PoolClosed, WaitCycle
from headgate.stores.jsonl.store import JsonLinesStore
from headgate.stores.port import Store
from headgate.tasks.admission import Policy, policy_of
from headgate.tasks.fairness import PoolStats
from headgate.tasks.handle import TaskHandle
from headgate.tasks.mapping import run_map
from headgate.tasks.model import Moment, PoolSnapshot, Scope, TaskRecord
from headgate.tasks.names import register, unregister
from headgate.tasks.runtime.durable import Records, described, restore
from headgate.tasks.runtime.nested_waits import enclosing, wait_for
from headgate.tasks.runtime.ports import Runner, Supply
from headgate.tasks.runtime.reporting import Reporter
from headgate.tasks.runtime.snapshots import pool_snapshot, pool_stats
from headgate.tasks.runtime.submit import Submitter
from headgate.tasks.scheduling.scheduler import Scheduler
from headgate.tasks.scheduling.slots import ancestors, checked_limits
from headgate.tasks.scheduling.states import TaskStates
from headgate.tasks.scheduling.submit_queue import Arrival
from headgate.tasks.scopes import checked_scope, identity, pipeline_of
from headgate.tasks.strategies import Strategy, strategy_of
from headgate.tasks.streams import run_stream

R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class TaskPool(Submitter):
    """Runs at most `max_concurrent` tasks at a time; the rest queue, in the order of a strategy.

    Made without an event loop, bound to the loop of its first submit. Its name is known in this process until it is
    closed. ``async with TaskPool(...) as pool:`` drains and closes it, or cancels everything if the block raises.
    """

    _type: ClassVar[Literal["pool"]] = "pool"

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
    ) -> None:
        self.scope: Scope = checked_scope(scope)
        check_store(store)
        scope_id = pipeline_of(self.scope, pipeline_id, store)
        self.name: str = checked_name(name, scope_id)
        strategy, policy = strategy_of(queue), policy_of(backpressure)
        limit = checked_whole("max_concurrent", max_concurrent, 1)
        key_limits = checked_limits(max_concurrent_per_key)
        kept = checked_whole("keep", keep, 0)
        seconds = checked_stale_after(stale_after)
        self.id: str
        self.id = identity(self.scope, scope_id, self.name)
        self._config: dict[str, Any] = {
            "name": name,
            "max_concurrent": max_concurrent,
            "queue": strategy.descriptor(),
            "backpressure": policy.descriptor(),
            "scope": scope,
            "pipeline_id": scope_id,
            "stale_after": seconds,
            "keep": keep,
            "max_concurrent_per_key": max_concurrent_per_key,
        }
        self._closing: asyncio.Future[None] | None = None
        self._loading: Future[None] | None = None
        self._cancels_all = False
        self._told_interrupted = False
        self._loop = None
        register(self)
        opened: list[Callable[[], None]] = []
        try:
            reporter = Reporter(self.id, self.name, audit)
            opened.append(reporter.close)
            records = self._open_records(store, kept)
            if records is not None:
                opened.append(records.abandon)
            desk = Scheduler(strategy, policy, limit, key_limits)
            ledger = TaskStates(kept, self._revived)
            super().__init__(strategy, desk, ledger, reporter, records, self._supply_of(runner), seconds)
            self._begin_to_load()
        except BaseException:
            for close in opened:
                close()
            unregister(self)
            raise

    def _supply_of(self, runner: Runner | None) -> Supply | None:
        return None if runner is None else Supply(runner)

    # -- submitting ----------------------------------------------------------------------------------------------------

    @overload
    async def submit(self, fn: Callable[[*Ts], Awaitable[R]], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
    @overload
    async def submit(self, fn: Callable[[*Ts], R], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
    async def submit(self, fn: Any, /, *args: Any, **options: Any) -> TaskHandle[Any]:  # type: ignore[misc] # it takes all
        """Run ``fn(*args)`` when its turn comes; returns a handle as soon as the task is accepted.

        `fn` is an async function, or a plain one that runs in a thread of the pool. Keywords are options: priority,
        key, idempotency_key, window, timeout, ttl, deadline, retries, delay, wait_timeout, cost, labels, and the
        fairness key that the queue's strategy names. Keyword arguments of `fn` go in with functools.partial.
        """
        if self._loading is not None:
            await self._loaded()
        entered = self._enter(fn, args, options, wait=True)
        if not isinstance(entered, Arrival):
            return entered  # type: ignore[return-value] # `cast` would be called
        return await self._accepted(entered, options.get("wait_timeout"))

    @overload
    def submit_nowait(self, fn: Callable[[*Ts], Awaitable[R]], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
    @overload
    def submit_nowait(self, fn: Callable[[*Ts], R], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
    def submit_nowait(self, fn: Any, /, *args: Any, **options: Any) -> TaskHandle[Any]:  # type: ignore[misc] # it takes all
        """The same without waiting: QueueFull where `submit` would wait for a place."""
        if self._records is not None:
            raise InvalidArgument(
                f"submit_nowait() cannot be used with the durable pool {self.name!r}: it would wait for the disk",
                remedy="Use `await pool.submit(...)`.",
            )
        return self._enter(fn, args, options, wait=False)  # type: ignore[return-value]

    @overload
    def map(
        self,
        fn: Callable[[T], Awaitable[R]],
        items: Iterable[T] | AsyncIterable[T],
        /,
        *,
        ordered: bool = True,
        window: int | None = None,
        return_exceptions: bool = False,
        progress: bool | str = False,
        **options: Any,
    ) -> AsyncIterator[R]: ...
    @overload
    def map(
        self,
        fn: Callable[[T], R],
        items: Iterable[T] | AsyncIterable[T],
        /,
        *,
        ordered: bool = True,
        window: int | None = None,
        return_exceptions: bool = False,
        progress: bool | str = False,
        **options: Any,
    ) -> AsyncIterator[R]: ...
    def map(
        self,
        fn: Callable[[Any], Any],
        items: Any,
        /,
        *,
        ordered: bool = True,
        window: int | None = None,
        return_exceptions: bool = False,
        progress: bool | str = False,
        **options: Any,
    ) -> AsyncIterator[Any]:
        """``async for result in pool.map(fn, items)``: run `fn` on every item of an iterable, async or not.

        At most `window` items are submitted and not yet handed out, so it runs in constant memory. Results come in the
        order of the items, or with ordered=False as they are done. With return_exceptions=True a failure is handed out
        like a result; otherwise the first one cancels what is outstanding and is raised. progress=True draws how far it
        is. Other keywords are options of `submit`.
        """
        return run_map(
            self,
            fn,
            items,
            ordered=ordered,
            window=window,
            return_exceptions=return_exceptions,
            progress=progress,
            options=options,
        )

    def stream(self, fn: Callable[..., AsyncIterator[R]], /, *args: Any, **options: Any) -> AsyncGenerator[R, None]:
        """``async for item in pool.stream(fn, ...)``: run an async generator as a task, and take its items one by one.

        It holds its slot until its last item, or until its consumer leaves. Keywords are options of `submit`. A failure
        is raised at the consumer; `retries` count until the first item, and not after it.
        """
        return run_stream(self, fn, args, options)

    # -- records -------------------------------------------------------------------------------------------------------

    def _open_records(self, store: Store | None, keep: int) -> Records | None:
        if self.scope == "session":
            return None
        chosen = JsonLinesStore() if store is None else store
        return Records(chosen.open(self.id, described(self._config), keep))

    def _begin_to_load(self) -> None:
        """Learn what the journal says: now, or in a thread if it is large and an event loop runs here."""
        if self._records is None:
            return
        if self._records.is_read or asyncio._get_running_loop() is None:
            self._load(self._records)
            return
        loading: Future[None] = Future()
        loading.set_running_or_notify_cancel()  # who waits for it may be cancelled, and it is not
        thread = Thread(target=self._load_in_thread, args=(self._records, loading), name=f"headgate open {self.name}")
        self._loading = loading
        try:
            thread.start()
        except RuntimeError:  # the machine has no more threads: then it is done here
            self._loading = None
            self._load(self._records)

    def _load_in_thread(self, records: Records, loading: Future[None]) -> None:
        """Until this is done nobody else looks at the ledger: submits and snapshots wait."""
        try:
            self._load(records)
        except BaseException as error:
            loading.set_exception(error)
        else:
            loading.set_result(None)

    async def _loaded(self) -> None:
        """Return when it is known what the journal says. If it cannot be read, the pool is closed."""
        if self._loading is None:
            return
        try:
            await asyncio.wrap_future(self._loading)
        except Exception:
            self._let_go()
            raise
        self._loading = None

    def _load(self, records: Records) -> None:
        highest, now = 0, Moment(clock.now(), clock.wall())
        for former, status, window, finished_at in records.found():
            highest = max(highest, former.number)
            if not former.key or not self._ledger.load_key(former, status, window, finished_at, now):
                self._ledger.load(self._revived(former.place), status, now)
        self._ledger.start_from(highest + 1)

    def _revived(self, place: int) -> TaskHandle[Any]:
        """The record of a task of a former run."""
        assert self._records is not None, "they are the only ones who know of it"
        stored, terms, status = self._records.revived(place)
        about, moment = stored["about"], Moment(0.0, stored["submitted_at"])
        key, partition = about.get("key"), about.get("partition")
        task: TaskHandle[Any] = TaskHandle(
            self, stored["task"], None, (), None, moment, None, about.get("priority", 0), key, partition, terms
        )
        restore(task, stored)
        task.status = status
        return task

    # -- looking -------------------------------------------------------------------------------------------------------

    def snapshot(self, tasks: int = 1000) -> PoolSnapshot:
        """How the pool stands, with its newest `tasks`. Waits until the journal of a durable pool is read."""
        if self._loading is not None:
            self._loading.result()
        return pool_snapshot(self, tasks)

    def stats(self) -> PoolStats:
        """Queue ages by key, and Jain's index of fairness, of the last few thousand tasks."""
        return pool_stats(self)

    def resize(self, max_concurrent: int) -> None:
        """So many tasks at a time from now on. What runs goes on."""
        limit = checked_whole("max_concurrent", max_concurrent, 1)
        if self._loop is not None:
            self._require_loop("resize()")
        self._desk.resize(limit)
        self._pump()

    def limit_keys(self, max_concurrent_per_key: int | Mapping[Any, int] | None) -> None:
        """Cap the active tasks of every key, or of some, from now on; None for no cap. What runs goes on."""
        limits: int | Mapping[Hashable, int] | None = checked_limits(max_concurrent_per_key)
        if self._loop is not None:
            self._require_loop("limit_keys()")
        self._desk.limit_keys(limits)
        self._pump()

    @property
    def max_concurrent(self) -> int:
        """How many tasks may be active."""
        return self._desk.slots.limit

    def __repr__(self) -> str:
        slots, counts = self._desk.slots, self._ledger.counts
        state = "" if self._state == "open" else f" {self._state}"
        waiting = f", {slots.waiting} waiting" if slots.waiting else ""
        return (
            f"<TaskPool {self.name!r}{state} {slots.active} of {slots.limit} active{waiting}, {self._desk.depth} queued"
            f" | {counts['completed']} completed, {counts['failed']} failed>"
        )

    # -- the end -------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Return when nothing is queued, running or at the door."""
        if self._loading is not None:
            await self._loaded()
        if self._loop is None:
            return
        self._require_loop("drain()")
        waiter = enclosing()
        if waiter is not None:
            await self._drain_inside(waiter)
            return
        while not self._is_idle():
            future = asyncio.get_running_loop().create_future()
            self._idle.append(future)
            await future

    async def _drain_inside(self, waiter: TaskRecord) -> None:
        """A task waits for a whole pool: it lends its slot, as it would for single tasks."""
        self._refuse_own(waiter)
        while not self._is_idle():
            await wait_for([*self._unfinished(), *self._desk.coming])
            await asyncio.sleep(0)

    def _refuse_own(self, waiter: TaskRecord | None) -> None:
        """WaitCycle, if a task of ours, or one below it, would wait for all of us."""
        for task in (waiter, *ancestors(waiter)) if waiter is not None else ():
            if task.owner is self:
                raise WaitCycle(
                    f"{waiter.label if waiter else ''} would wait for the pool {self.name!r} to drain, and so for "
                    f"{task.label}"
                )

    async def close(self, cancel: bool = False) -> None:
        """Take no more work, wait for what there is (or cancel it), and free the name."""
        if self._state == "closed":
            return
        if self._abandoned():
            self._let_go()
            return
        if self._loop is not None:
            self._require_loop("close()")
        if self._loading is not None:
            await self._loaded()
        self._refuse_own(enclosing())
        self._state = "closing"
        while (arrival := self._door.first()) is not None:
            self._door.leave(arrival.task)
            self._ledger.withdraw(arrival.task)
            self._welcome(arrival, PoolClosed(f"the pool {self.name!r} was closed before there was room for the task"))
        if cancel:
            self._cancels_all = True
            for task in [*self._unfinished(), *self._desk.coming]:
                self._cancel(task)
        await self.drain()
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._finish())
        await asyncio.shield(self._closing)

    async def _finish(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._report.unseen(self._unseen, self._forgotten)
        self._unseen.clear()
        if self._records is not None:
            await self._records.close()
        self._let_go()

    def _let_go(self) -> None:
        """Of the name, and of everything that is not Python's."""
        self._state = "closed"
        unregister(self)
        self._report.close()
        if self._records is not None:
            self._records.abandon()
        if self._threads is not None:
            self._threads.shutdown(wait=not self._in_threads)  # idle ones end at once

    def _left_over(self) -> str:
        """What was lost if the program ends here; "" if nothing was."""
        slots, queued = self._desk.slots, self._desk.depth + self._given_up
        running = slots.active + slots.waiting + self._cut_off
        return f"{running} running and {queued} queued tasks were lost" if running + queued else ""

    @property
    def _ends_early(self) -> bool:
        """Is all that it has being cancelled, by `close` or by Ctrl-C?"""
        return self._cancels_all or (self._interrupts is not None and self._interrupts.count > 0)

    def _tell_interrupted(self, error: BaseException | None) -> None:
        """One line, if the block is left because of Ctrl-C and there is something left to do."""
        pressed = 0 if self._interrupts is None else self._interrupts.count
        slots, queued = self._desk.slots, self._desk.depth
        running = slots.active + slots.waiting
        if self._told_interrupted or not (pressed or isinstance(error, KeyboardInterrupt)) or not running + queued:
            return
        import logging

        self._told_interrupted = True
        waits = f"; {self._in_threads} in threads, which end by themselves or with another Ctrl-C"
        logging.getLogger("headgate.tasks").warning(
            "%s was interrupted: %d running and %d queued tasks are cancelled%s",
            self.name,
            running,
            queued,
            waits if self._in_threads else "",
        )

    def _abandoned(self) -> bool:
        return self._loop is not None and self._loop.is_closed()

    async def __aenter__(self) -> Self:
        if self._state != "open":
            self._refuse(None)
        if self._loading is not None:
            await self._loaded()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._tell_interrupted(error)
            await self.close(cancel=error is not None)
        except asyncio.CancelledError:  # while it drained: as a TaskGroup does, end what is left and wait for that
            self._tell_interrupted(None)
            await self.close(cancel=True)
            raise

    def __getitem__(self, name: str) -> Any:
        """`_type`, `id` and `name`, also as keys."""
        if name not in ("_type", "id", "name"):
            raise KeyError(name)
        return getattr(self, name)

    __iter__ = None  # else Python would take its keys for a sequence

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InvalidType(
            f"the pool {self.name!r} cannot be pickled or copied: its budget belongs to this process",
            remedy="Make a pool where the work runs, or send results and submit here.",
        )


def pool_create(options: Mapping[str, Any] | None = None, /, **keywords: Any) -> TaskPool:
    """A `TaskPool` from keywords, or from one mapping of them; what is None counts as not given.

    `stale_after_ms` is `stale_after` in milliseconds, `scope_id` and `run_id` are `pipeline_id`, `strategy` is `queue`.
    """
    return pool_from(TaskPool, options, keywords)


_OTHER_NAMES = ("stale_after_ms", "strategy", "scope_id", "run_id")
PoolT = TypeVar("PoolT", bound=TaskPool)


def pool_from(kind: type[PoolT], options: Mapping[str, Any] | None, keywords: dict[str, Any]) -> PoolT:
    """A pool of this kind from these options."""
    known = list(inspect.signature(kind).parameters)
    if options is not None and not isinstance(options, Mapping):
        raise InvalidType(
            f"pool_create() takes one mapping of options, got {type(options).__name__}",
            remedy="Pass keywords: pool_create(name='review', max_concurrent=5).",
        )
    given = {**(options or {}), **keywords}
    for option in given:
        if option not in known and option not in _OTHER_NAMES:
            raise InvalidArgument(f"pool_create() has no option {option!r}", remedy=nearest(option, known))
    given = {name: value for name, value in given.items() if value is not None}
    if "stale_after_ms" in given:
        refuse_both("pool_create()", given, "stale_after", "stale_after_ms")
        given["stale_after"] = seconds_of(given.pop("stale_after_ms"))
    respell("pool_create()", given, "queue", "strategy")
    respell("pool_create()", given, "pipeline_id", "scope_id", "run_id")
    return kind(**given)
