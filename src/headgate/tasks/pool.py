"""`TaskPool`, as callers see it: the constructor, submitting, snapshots, and the end.

A pool owns an `Executor`, which owns the scheduler and runs tasks, and a `Submitter`, which takes tasks in.
"""

from __future__ import annotations

import asyncio
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
    Sequence,
)
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NoReturn, Self, TypeVar, TypeVarTuple, overload

from headgate import registry
from headgate.calls.retry_budget import checked_retry_budget
from headgate.core.checks import (
    check_store,
    checked_flag,
    checked_name,
    checked_optional_seconds,
    checked_stale_after,
    checked_whole,
    named_options,
)
from headgate.core.clock import clock
from headgate.core.html import card
from headgate.core.pool_executor import PoolExecutor
from headgate.core.views import TaskPoolView, Unread
from headgate.errors import InvalidArgument, InvalidType, WaitCycle
from headgate.stores.codec import why_opaque
from headgate.stores.jsonl.store import JsonLinesStore
from headgate.stores.port import Store
from headgate.stores.result_types import ResultTypes
from headgate.tasks.admission import Policy, policy_of
from headgate.tasks.batches import calls_of
from headgate.tasks.calls import TaskCalls
from headgate.tasks.fairness import PoolStats
from headgate.tasks.handle import TaskHandle
from headgate.tasks.mapping import Wanted, Work, run_map
from headgate.tasks.model import PoolSnapshot, Scope, TaskRecord
from headgate.tasks.names import register, register_executor, unregister
from headgate.tasks.options import refuse_callables
from headgate.tasks.rates import RatePerTenant, checked_rates
from headgate.tasks.runtime.durable import Loading, Records, described
from headgate.tasks.runtime.ending import Cancel, OnSignal, checked_cancel, checked_on_signal
from headgate.tasks.runtime.executor import Executor
from headgate.tasks.runtime.failures import Failures
from headgate.tasks.runtime.local_launcher import LocalLauncher
from headgate.tasks.runtime.nested_waits import enclosing, is_awaited, wait_for
from headgate.tasks.runtime.ports import Ports, Runner
from headgate.tasks.runtime.reporting import Reporter
from headgate.tasks.runtime.results import OnOpaque, ResultPolicy
from headgate.tasks.runtime.runner import runner_ports
from headgate.tasks.runtime.shared_budget import (
    OnLeaseLost,
    SharedBudget,
    checked_limit,
    checked_sharing,
    shared_settings,
)
from headgate.tasks.runtime.shared_keys import SharedKeys
from headgate.tasks.runtime.signal_drain import SignalDrain, is_expected
from headgate.tasks.runtime.snapshots import About, pool_html, pool_snapshot, pool_stats
from headgate.tasks.runtime.submit import Submitter, together
from headgate.tasks.runtime.view import pool_view
from headgate.tasks.scheduling.budget import LocalBudget, SlotBudget
from headgate.tasks.scheduling.idempotency import OnConflict, checked_on_conflict, is_key
from headgate.tasks.scheduling.scheduler import Scheduler
from headgate.tasks.scheduling.slots import ancestors, checked_limits
from headgate.tasks.scheduling.submit_queue import Arrival
from headgate.tasks.scopes import checked_scope, identity, scope_id_of, shared_state_of
from headgate.tasks.strategies import Strategy, strategy_of
from headgate.tasks.streams import run_stream

if TYPE_CHECKING:
    from headgate.resources.model import Resource
    from headgate.resources.pool import ResourcePool
    from headgate.workers.pool import WorkerPool

AnyCall = tuple[Callable[..., Any], Sequence[Any]] | tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]
"""One call of `submit_many`: the function, its arguments, and the options of its submit."""

_SETTLING: Final = 5.0
"""Seconds that `close` waits for a shared store to know what became of idempotency keys."""
_SHOWN: Final = 10
"""Tasks that a notebook shows."""

R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class TaskPool:
    """Runs at most `max_concurrent` tasks at a time; the rest queue, in the order of a strategy.

    With `resources` (a ResourcePool) a task starts when there is a slot and a resource for it, and its function gets
    the resource as first argument; CooldownResource, DisableResource and RetryOperation teach that pool, and the task
    runs again with another. With `workers` (a WorkerPool) it runs on one of its worker processes.

    Made without an event loop, bound to the loop of its first submit. Its name is known in this process until it is
    closed. ``async with TaskPool(...) as pool:`` drains and closes it, or cancels everything if the block raises.
    """

    _type: ClassVar[Literal["pool"]] = "pool"

    @named_options
    def __init__(
        self,
        name: str | None = None,
        *,
        max_concurrent: int | None = None,
        queue: Strategy | str | Mapping[str, Any] | Callable[[], Strategy] = "priority",
        backpressure: Policy | str | Mapping[str, Any] | Callable[[], Policy] | None = None,
        scope: Scope = "session",
        pipeline_id: str | None = None,
        scope_id: str | None = None,
        stale_after: float | timedelta = 30.0,
        store: Store | str | None = None,
        keep: int = 10_000,
        max_concurrent_per_key: int | Mapping[Any, int] | None = None,
        rate_per_tenant: RatePerTenant | None = None,
        audit: str | os.PathLike[str] | None = None,
        runner: Runner | Ports | None = None,
        fencing: bool = False,
        on_lease_lost: OnLeaseLost = "finish",
        on_signal: OnSignal | None = None,
        result_types: Iterable[type] | None = None,
        on_opaque: OnOpaque = "hold",
        on_conflict: OnConflict = "error",
        keep_failed: int = 0,
        resources: ResourcePool[Any] | None = None,
        workers: WorkerPool | None = None,
        retry_budget: float | None = None,
    ) -> None:
        if workers is not None and fencing is True:
            raise InvalidArgument(
                "fencing=True cannot be given together with workers: the number of a start is not known on a worker",
                remedy="Leave out workers=, and let the task pass its headgate.current_task().fence to a routine.",
            )
        self.scope: Scope = checked_scope(scope)
        self._on_signal = checked_on_signal(on_signal)
        found_id = scope_id_of(self.scope, pipeline_id, scope_id, store)
        opened_store, state = shared_state_of(self.scope, store)
        check_store(opened_store, shares=state is not None)
        self.name: str = checked_name(name, found_id)
        strategy, policy = strategy_of(queue), policy_of(backpressure)
        limit = checked_limit(self.scope, max_concurrent)
        key_limits = checked_limits(max_concurrent_per_key)
        rates = checked_rates(rate_per_tenant, is_shared=state is not None)
        kept = checked_whole("keep", keep, 0)
        failures = Failures(checked_whole("keep_failed", keep_failed, 0))
        seconds = checked_stale_after(stale_after)
        fences, on_lost = checked_sharing(self.scope, fencing, on_lease_lost)
        results = ResultPolicy(self.name, self.scope, result_types, on_opaque)
        conflicts = checked_on_conflict(on_conflict)
        budget = checked_retry_budget(retry_budget)
        ports = _ports_of(runner, resources, workers, follows_workers=max_concurrent is None)
        if ports.allocator is not None and strategy.key in ports.allocator.options:
            raise InvalidArgument(
                f"key cannot be {strategy.key!r}: with resources= that is an option of submit() of another meaning",
                remedy='Use "key", or a name of yours such as "tenant_id".',
            )
        if budget is None and resources is not None:
            from headgate.resources.engine import engine_of  # not above: most pools have no resources

            budget = engine_of(resources).retry_budget
        self.id: str
        self.id = identity(self.scope, found_id, self.name)
        self._config: dict[str, Any] = {
            "name": name,
            "max_concurrent": (limit or 1) if ports.budget is None else limit,
            "queue": strategy.descriptor(),
            "backpressure": policy.descriptor(),
            "scope": scope,
            "pipeline_id": found_id,
            "stale_after": seconds,
            "keep": keep,
            "max_concurrent_per_key": max_concurrent_per_key,
        }
        self._about = About(self.scope, found_id, clock.wall(), self._config)
        self._closing: asyncio.Future[None] | None = None
        self._entered: asyncio.AbstractEventLoop | None = None  # the loop on which its block was entered
        self._block: asyncio.Task[Any] | None = None
        register(self)
        opened: list[Callable[[], None]] = []
        try:
            reporter = Reporter(self.id, self.name, audit)
            opened.append(reporter.close)
            records = self._open_records(opened_store, kept, results.types)
            if records is not None:
                opened.append(records.abandon)
            self._budget: SlotBudget = LocalBudget(limit or 1) if ports.budget is None else ports.budget
            self._shared: SharedBudget | None = None
            if state is not None:
                if ports.on_shared is not None:
                    ports.on_shared(state)
                settings = shared_settings(strategy, limit or 1, key_limits)
                self._shared = SharedBudget(
                    state, self.id, settings, counts=policy.shared, fencing=fences, on_lease_lost=on_lost
                )
                opened.append(self._shared.abandon)
                self._shared.join()
            scheduler = self._make_scheduler(strategy, policy, limit or 1, key_limits)
            self._executor = Executor(self.name, self.id, scheduler, reporter, ports, kept, records, failures, budget)
            if self._shared is not None:
                self._shared.attach(self._executor)
            if self._on_signal is not None:
                self._executor.on_bind = self.drain_on_signals
            register_executor(self._executor)
            self._executor.results = results.ask(why_opaque if records is None else records.why_lost)
            if rates is not None:
                self._executor.limit_rates(rates.window)
            self._submitter = Submitter(self._executor, strategy, seconds, results, conflicts, rates)
            self._keys: SharedKeys | None = None
            if state is not None and self._shared is not None:
                self._keys = SharedKeys(state, self._executor, self._submitter, self._shared, results, conflicts)
            self._loading = Loading(self._executor).begin()
            self._budget.on_change(self._on_budget)
        except BaseException:
            for close in opened:
                close()
            unregister(self)
            raise
        registry.register(self, "tasks", TaskPool.snapshot, view=TaskPool._view, home=TaskPool._home)

    # -- submitting ----------------------------------------------------------------------------------------------------

    @overload
    async def submit(self, fn: Callable[[*Ts], Awaitable[R]], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
    @overload
    async def submit(self, fn: Callable[[*Ts], R], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
    @overload  # with `resources` a function takes one argument more than it is submitted with
    async def submit(
        self, fn: Callable[[Resource[Any], *Ts], Awaitable[R]], /, *args: *Ts, **options: Any
    ) -> TaskHandle[R]: ...
    @overload
    async def submit(self, fn: Callable[[Resource[Any], *Ts], R], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
    async def submit(self, fn: Any, /, *args: Any, **options: Any) -> TaskHandle[Any]:  # type: ignore[misc] # it takes all
        """Run ``fn(*args)`` when its turn comes; returns a handle as soon as the task is accepted.

        `fn` is an async function, or a plain one that runs in a thread of the pool. Keywords are options: priority,
        key, idempotency_key, window, payload_id, timeout, ttl, deadline, retries, backoff, retry_on, delay,
        wait_timeout, cost, slots, labels, detached, and the fairness key that the queue's strategy names. Keyword
        arguments of `fn` go in with functools.partial. A task that another task submits is cancelled with it, unless
        detached=True.
        """
        if self._loading is not None:
            await self._loaded()
        if self._shared is not None:
            return await self._submit_shared(self._shared, fn, args, options)
        entered = self._submitter.enter(fn, args, options, wait=True)
        if not isinstance(entered, Arrival):
            return entered  # type: ignore[return-value] # `cast` would be called
        return await self._submitter.accepted(entered, options.get("wait_timeout"))

    async def _submit_shared(
        self, budget: SharedBudget, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> TaskHandle[Any]:
        """Do what `submit` does where other processes share the budget."""
        if self._executor.scheduler.policy.shared:
            await self._submitter.informed(budget)
        if self._keys is not None and is_key(options.get("idempotency_key")):
            return await self._keys.submit(fn, args, options)
        entered = self._submitter.enter(fn, args, options, wait=True)
        return await self._submitter.exchanged(entered, options.get("wait_timeout"), budget)

    @overload
    def submit_nowait(self, fn: Callable[[*Ts], Awaitable[R]], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
    @overload
    def submit_nowait(self, fn: Callable[[*Ts], R], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
    @overload
    def submit_nowait(
        self, fn: Callable[[Resource[Any], *Ts], Awaitable[R]], /, *args: *Ts, **options: Any
    ) -> TaskHandle[R]: ...
    @overload
    def submit_nowait(self, fn: Callable[[Resource[Any], *Ts], R], /, *args: *Ts, **options: Any) -> TaskHandle[R]: ...
    def submit_nowait(self, fn: Any, /, *args: Any, **options: Any) -> TaskHandle[Any]:  # type: ignore[misc] # it takes all
        """Do what `submit` does without waiting: raise QueueFull where `submit` would wait for a place."""
        if self._executor.records is not None:
            raise InvalidArgument(
                f"submit_nowait() cannot be used with the durable pool {self.name!r}: it would wait for the disk",
                remedy="Use `await pool.submit(...)`.",
            )
        if self._shared is not None:
            self._refuse_nowait(options)
        return self._submitter.enter(fn, args, options, wait=False)  # type: ignore[return-value]

    def _refuse_nowait(self, options: Mapping[str, Any]) -> None:
        """Raise InvalidArgument for what cannot be decided without asking the other processes."""
        why = "with fail_fast it would have to ask the other processes for a slot"
        if options.get("idempotency_key") is not None:
            why = "another process may have the idempotency_key"
        elif self._executor.scheduler.policy.answer != "busy":
            return
        raise InvalidArgument(
            f"submit_nowait() cannot be used with the shared pool {self.name!r} here: {why}",
            remedy="Use `await pool.submit(...)`.",
        )

    @overload
    async def run(self, fn: Callable[[*Ts], Awaitable[R]], /, *args: *Ts, **options: Any) -> R: ...
    @overload
    async def run(self, fn: Callable[[*Ts], R], /, *args: *Ts, **options: Any) -> R: ...
    @overload
    async def run(self, fn: Callable[[Resource[Any], *Ts], Awaitable[R]], /, *args: *Ts, **options: Any) -> R: ...
    @overload
    async def run(self, fn: Callable[[Resource[Any], *Ts], R], /, *args: *Ts, **options: Any) -> R: ...
    async def run(self, fn: Any, /, *args: Any, **options: Any) -> Any:  # type: ignore[misc] # it takes all
        """Submit, and return the result of the task.

        If the caller is cancelled or times out, the task is cancelled, unless another caller awaits it by the same
        key. With detached=True it continues.
        """
        handle = await self.submit(fn, *args, **options)
        try:
            return await handle
        except asyncio.CancelledError:
            if not is_awaited(handle) and not options.get("detached"):
                handle.cancel()
            raise

    @overload
    async def submit_many(self, calls: Iterable[AnyCall], /) -> list[TaskHandle[Any]]: ...
    @overload
    async def submit_many(
        self, fn: Callable[..., Awaitable[R]], arguments: Iterable[Sequence[Any]], /, **options: Any
    ) -> list[TaskHandle[R]]: ...
    @overload
    async def submit_many(
        self, fn: Callable[..., R], arguments: Iterable[Sequence[Any]], /, **options: Any
    ) -> list[TaskHandle[R]]: ...
    async def submit_many(self, calls: Any, arguments: Any = None, /, **options: Any) -> list[TaskHandle[Any]]:
        """Submit many tasks at once; returns their handles, in order. All are accepted, or none is.

        `calls` is an iterable of ``(fn, args, options)``; or a function and an iterable of argument tuples. In the
        second form options may be functions of the arguments, or names of fields of the first argument, as in `map`. A
        durable pool writes all of them in one group.
        """
        if self._loading is not None:
            await self._loaded()
        many = calls_of(calls, arguments, options, self._executor.scheduler.strategy.key)
        if self._shared is not None:
            return await together(self._submit_shared(self._shared, *call) for call in many)
        tasks = self._submitter.make_all(many)
        entered = self._submitter.enter_all(tasks)
        await self._submitter.accepted_all(entered, set(tasks))
        return [one.task if isinstance(one, Arrival) else one for one in entered]  # type: ignore[misc]

    @overload
    def map(
        self,
        fn: Callable[[T], Awaitable[R]],
        items: Iterable[T] | AsyncIterable[T],
        /,
        *,
        return_handles: Literal[True],
        **options: Any,
    ) -> AsyncIterator[TaskHandle[R]]: ...
    @overload
    def map(
        self,
        fn: Callable[[T], R],
        items: Iterable[T] | AsyncIterable[T],
        /,
        *,
        return_handles: Literal[True],
        **options: Any,
    ) -> AsyncIterator[TaskHandle[R]]: ...
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
    @overload
    def map(
        self,
        fn: Callable[[Resource[Any], T], Awaitable[R]],
        items: Iterable[T] | AsyncIterable[T],
        /,
        *,
        return_handles: Literal[True],
        **options: Any,
    ) -> AsyncIterator[TaskHandle[R]]: ...
    @overload
    def map(
        self,
        fn: Callable[[Resource[Any], T], R],
        items: Iterable[T] | AsyncIterable[T],
        /,
        *,
        return_handles: Literal[True],
        **options: Any,
    ) -> AsyncIterator[TaskHandle[R]]: ...
    @overload
    def map(
        self,
        fn: Callable[[Resource[Any], T], Awaitable[R]],
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
        fn: Callable[[Resource[Any], T], R],
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
        fn: Callable[..., Any],
        items: Iterable[Any] | AsyncIterable[Any],
        /,
        *,
        ordered: bool = True,
        window: int | None = None,
        return_exceptions: bool = False,
        return_handles: bool = False,
        progress: bool | str = False,
        **options: Any,
    ) -> AsyncIterator[Any]:
        """``async for result in pool.map(fn, items)``: run `fn` on every item of an iterable, async or not.

        At most `window` items are submitted and not yet handed out, so it runs in constant memory. Results come in the
        order of the items, or with ordered=False as they are done. With return_exceptions=True a failure is handed out
        like a result; otherwise the first one cancels what is outstanding (unless detached=True) and is raised. With
        return_handles=True the handles of the ended tasks are handed out instead. progress=True draws how far it is.

        Other keywords are options of `submit`. The tenant, key, priority, idempotency_key, cost, tags and affinity may
        be functions of the item, or the name of its field or attribute: ``tenant_id="customer"``.
        """
        wanted: Wanted = "results"
        if checked_flag("return_handles", return_handles):
            wanted = "handles"
        elif return_exceptions:
            wanted = "outcomes"
        if return_handles and return_exceptions:
            raise InvalidArgument(
                "return_handles and return_exceptions are both given: a handle tells its exception already",
                remedy="Leave out return_exceptions.",
            )
        work = Work(self, self._executor, self._submitter, fn, self._loaded)
        return run_map(work, items, ordered=ordered, window=window, wanted=wanted, progress=progress, options=options)

    def stream(self, fn: Callable[..., AsyncIterator[R]], /, *args: Any, **options: Any) -> AsyncGenerator[R, None]:
        """``async for item in pool.stream(fn, ...)``: run an async generator as a task, and take its items one by one.

        It holds its slot until its last item, or until its consumer leaves. Keywords are options of `submit`. A failure
        is raised at the consumer; `retries` count until the first item, and not after it.
        """
        return run_stream(self.submit, self._submitter, fn, args, options)

    def as_executor(self, **options: Any) -> PoolExecutor:
        """Return a `concurrent.futures.Executor` whose calls are tasks of this pool; keywords are options of `submit`.

        It can be used from any thread. A pool that no event loop has yet is opened in a thread of its own by
        ``with TaskPool(...).as_executor() as executor:``, and closed at the end of the block.
        """
        self._submitter.check_names(options, "as_executor()", (), None)
        refuse_callables(options)
        if "idempotency_key" in options:
            raise InvalidArgument(
                "as_executor() cannot take one idempotency_key for all calls", remedy="Use `await pool.submit(...)`."
            )
        if "detached" in options:
            raise InvalidArgument("as_executor() has no option 'detached': its calls are", remedy="Leave it out.")
        waits = self._executor.records is not None or self._shared is not None
        return PoolExecutor(TaskCalls(self, self._executor, lambda: self._entered, options, waits=waits), self.name)

    async def retry(self, task_id: str) -> TaskHandle[Any]:
        """Submit a failed task again, as a new one, with the function, arguments and options that it had.

        Only of the last tasks that ``TaskPool(keep_failed=n)`` keeps; InvalidArgument for any other.
        """
        pool_id, _, number = checked_name(task_id, None).rpartition("/")
        if pool_id not in (self.id, "") or not number.isdecimal():
            raise InvalidArgument(f"{task_id!r} is no task of the pool {self.name!r}: its ids begin with {self.id}/")
        kept = self._executor.failures.to_retry(int(number), self.name)
        self._executor.require_loop("retry()")
        handle = self._submitter.again(kept)
        if isinstance(handle, Arrival):
            handle = await self._submitter.accepted(handle, None)
        self._executor.failures.ran_again(int(number), handle.number)
        return handle  # type: ignore[return-value] # `cast` would be called

    # -- making --------------------------------------------------------------------------------------------------------

    def _make_scheduler(
        self, strategy: Strategy, policy: Policy, limit: int, key_limits: int | Mapping[Hashable, int] | None
    ) -> Scheduler:
        if self._shared is not None:
            return Scheduler(strategy, policy, limit, share=self._shared.share)
        return Scheduler(strategy, policy, self._budget.limit, key_limits)

    def _open_records(self, store: Any, keep: int, types: ResultTypes) -> Records | None:
        if self.scope != "pipeline":
            return None
        chosen: Store = JsonLinesStore() if store is None else store
        return Records(chosen.open(self.id, described(self._config), keep), types)

    async def _loaded(self) -> None:
        """Return when it is known what the journal says. If it cannot be read, the pool is closed."""
        if self._loading is None:
            return
        try:
            await self._loading.done()
        except Exception:
            self._let_go()
            raise
        self._loading = None

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def snapshot(self, tasks: int = 1000) -> PoolSnapshot:
        """Return counters, configuration and the newest `tasks`. Waits until the journal of a durable pool is read."""
        if self._loading is not None:
            self._loading.wait()
        shared = None if self._shared is None else self._shared.view()
        return pool_snapshot(self._executor, self._about, tasks, shared)

    def _view(self, rows: int) -> TaskPoolView | Unread:
        """Return what pages, terminals and metrics show."""
        if self._loading is not None and not self._loading.is_over():
            return Unread(id=self.id, state="loading")
        return pool_view(self._executor, rows, None if self._shared is None else self._shared.view())

    def _home(self) -> asyncio.AbstractEventLoop | None:
        return self._executor.loop

    def __executor__(self) -> Executor:
        """Return the executor, for other packages of headgate that show its tasks or act on them."""
        return self._executor

    def stats(self) -> PoolStats:
        """Return queue ages by tenant, and Jain's index of fairness, of the last few thousand tasks."""
        return pool_stats(self._executor, None if self._shared is None else self._shared.view())

    def resize(self, max_concurrent: int) -> None:
        """Run at most `max_concurrent` tasks at a time from now on, in all processes together. What runs goes on."""
        limit = checked_whole("max_concurrent", max_concurrent, 1)
        if self._executor.loop is not None:
            self._executor.require_loop("resize()")
        if self._shared is not None:
            self._shared.resize(limit)
        else:
            self._budget.resize(limit)

    def _on_budget(self, limit: int) -> None:
        """Go on with the limit that the budget says."""
        self._executor.scheduler.resize(limit)
        self._executor.pump()

    def limit_keys(self, max_concurrent_per_key: int | Mapping[Any, int] | None) -> None:
        """Limit the active tasks of every tenant, or of some, from now on; None for no limit. What runs goes on."""
        limits: int | Mapping[Hashable, int] | None = checked_limits(max_concurrent_per_key)
        executor = self._executor
        if executor.loop is not None:
            executor.require_loop("limit_keys()")
        if self._shared is not None:
            self._shared.limit_keys(limits)
            return
        executor.scheduler.limit_keys(limits)
        executor.pump()

    def pause(self) -> None:
        """Start no queued task until `resume`, in all processes together. What runs continues.

        Queued tasks can still expire or be cancelled. `drain` and `close` resume the pool first.
        """
        self._executor.pauses.set("pause()", paused=True)

    def resume(self) -> None:
        """Start queued tasks again after `pause`. Tenants that are paused stay so."""
        self._executor.pauses.set("resume()", paused=False)

    def pause_tenant(self, tenant: Hashable) -> None:
        """Start no queued task of this tenant until `resume_tenant`, as `pause` does for all."""
        self._executor.pauses.set_tenant("pause_tenant()", tenant, paused=True)

    def resume_tenant(self, tenant: Hashable) -> None:
        """Start queued tasks of this tenant again after `pause_tenant`."""
        self._executor.pauses.set_tenant("resume_tenant()", tenant, paused=False)

    def size(self) -> int:
        """How many tasks are unfinished: active, waiting and queued."""
        return self._executor.scheduler.size

    @property
    def max_concurrent(self) -> int:
        """How many tasks may be active at a time."""
        return self._executor.scheduler.limit

    def __repr__(self) -> str:
        scheduler, counts = self._executor.scheduler, self._executor.states.counts
        slots = scheduler.slots
        state = "" if self._executor.state == "open" else f" {self._executor.state}"
        waiting = f", {slots.waiting} waiting" if slots.waiting else ""
        return (
            f"<TaskPool {self.name!r}{state} {slots.active} of {scheduler.limit} active{waiting}, "
            f"{scheduler.depth} queued | {counts['completed']} completed, {counts['failed']} failed>"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the counters, and the newest tasks."""
        if self._loading is not None:  # nor does a notebook wait for the disk
            return card(repr(self), (), ())
        return pool_html(repr(self), self.snapshot(tasks=_SHOWN))

    # -- the end -------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Return when nothing is queued or running, and no submitter waits for a place.

        A paused pool, or a paused tenant, is resumed first; that is logged.
        """
        if self._loading is not None:
            await self._loaded()
        if self._executor.loop is None:
            return
        self._executor.require_loop("drain()")
        if self._shared is None or not self._submitter.is_idle():  # others may want their pause, and nothing waits here
            self._executor.pauses.end("drain()")
        waiter = enclosing()
        if waiter is not None:
            await self._drain_inside(waiter)
            return
        while not self._submitter.is_idle():
            await self._submitter.until_idle()

    async def _drain_inside(self, waiter: TaskRecord) -> None:
        """Wait for the whole pool inside a task of another: it lends its slot, as it would for single tasks."""
        self._refuse_own(waiter)
        scheduler = self._executor.scheduler
        while not self._submitter.is_idle():
            await wait_for([*scheduler.unfinished(), *scheduler.coming])
            # A turn of the loop, so that submitters who got a place by these ends go on. Only while a rejected task is
            # being written is there no task to wait for; `until_idle` would not lend the slot if others come meanwhile.
            await asyncio.sleep(0)

    def _refuse_own(self, waiter: TaskRecord | None) -> None:
        """Raise WaitCycle if a task of this pool, or one below it, would wait for the whole pool."""
        for task in (waiter, *ancestors(waiter)) if waiter is not None else ():
            if task.owner is self._executor:
                raise WaitCycle(
                    f"{waiter.label if waiter else ''} would wait for the pool {self.name!r} to drain, and so for "
                    f"{task.label}"
                )

    async def close(self, cancel: bool | Cancel = "none", timeout: float | None = None) -> None:
        """Take no more tasks, wait for those that there are, and free the name.

        `cancel` says what is given up: "none", "queued" (what is queued is cancelled, what runs finishes) or "all".
        True is "all", False is "none". After `timeout` seconds everything that is left is cancelled.
        """
        given_up, limit = checked_cancel(cancel), checked_optional_seconds("timeout", timeout)
        executor = self._executor
        if executor.state == "closed":
            return
        if executor.is_abandoned():
            self._let_go()
            return
        if executor.loop is not None:
            executor.require_loop("close()")
        if self._loading is not None:
            await self._loaded()
        self._refuse_own(enclosing())
        self._submitter.begin_to_close()
        if given_up == "all":
            executor.cancel_all()
        elif given_up == "queued":
            executor.drop_queue()
        patience = asyncio.timeout(limit)
        try:
            async with patience:
                await self.drain()
        except TimeoutError:
            if not patience.expired():
                raise
            executor.cancel_all()
            await self.drain()
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._finish())
        await asyncio.shield(self._closing)

    async def _finish(self) -> None:
        self._submitter.stop_beating()
        await self._executor.finish()
        if self._keys is not None:
            await self._keys.settled(_SETTLING)
        if self._shared is not None:
            await self._shared.leave()
        self._let_go()

    def drain_on_signals(self) -> None:
        """End the program on SIGINT or SIGTERM when what runs has finished; on the second one cancel what runs.

        What is queued is cancelled at once. The program ends by SystemExit with the code 130 or 143, raised by the
        block of the pool, or by `map` when it has handed out what has finished. Only on an event loop of the main
        thread. ``TaskPool(on_signal="drain")`` does the same.
        """
        executor = self._executor
        if executor.loop is None:
            executor.bind()
        executor.require_loop("drain_on_signals()")
        if executor.state != "open":
            self._submitter.refuse(None)
        if executor.ending.drain is None:
            executor.ending.drain = SignalDrain(executor, partial(self.close, "queued"))
            executor.ending.drain.block = self._block

    def _let_go(self) -> None:
        """Free the name, close files and end threads."""
        if self._executor.ending.drain is not None:
            self._executor.ending.drain.leave()
        if self._shared is not None:
            self._shared.abandon()
        registry.unregister(self)
        unregister(self)
        self._executor.let_go()

    async def __aenter__(self) -> Self:
        if self._executor.state != "open":
            self._submitter.refuse(None)
        if self._loading is not None:
            await self._loaded()
        self._entered = asyncio.get_running_loop()
        self._block = asyncio.current_task()
        if self._on_signal is not None:
            self.drain_on_signals()
        if self._executor.ending.drain is not None:
            self._executor.ending.drain.block = self._block
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        ending, self._block = self._executor.ending, None
        expected = is_expected(error)
        if ending.drain is not None:
            ending.drain.leaves_block = True
            if ending.exit_code is not None and expected:
                await ending.drain.finish()
        try:
            if error is not None:
                ending.tell_interrupted(error)
            await self.close(cancel="none" if error is None else "all")
        except asyncio.CancelledError:  # while it drained: as a TaskGroup does, end what is left and wait for that
            ending.tell_interrupted(None)
            await self.close(cancel="all")
            raise
        if ending.drain is not None and ending.exit_code is not None and expected:
            await ending.drain.finish()

    def __getitem__(self, name: str) -> Any:
        """Give `_type`, `id` and `name` as items too: ``pool["id"]``."""
        if name not in ("_type", "id", "name"):
            raise KeyError(name)
        return getattr(self, name)

    __iter__ = None  # else Python would take its keys for a sequence

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InvalidType(
            f"the pool {self.name!r} cannot be pickled or copied: its budget belongs to this process",
            remedy="Make a pool where the work runs, or send results and submit here.",
        )


def _ports_of(
    runner: Runner | Ports | None,
    resources: ResourcePool[Any] | None,
    workers: WorkerPool | None,
    *,
    follows_workers: bool,
) -> Ports:
    """Where tasks run, and what they need for that."""
    if resources is None and workers is None:
        if runner is None:
            return Ports(LocalLauncher())
        return runner if isinstance(runner, Ports) else runner_ports(runner)
    if runner is not None:
        raise InvalidArgument(
            "runner cannot be given together with resources or workers",
            remedy="Leave it out: they bring their own.",
        )
    from headgate.tasks.attempts.assembly import ports_with  # not above: most plain pools need none of it

    return ports_with(resources, workers, follows_workers=follows_workers)
