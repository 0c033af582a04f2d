"""`TaskPool(resources=, workers=)`: slot, resource and worker together. The one place where the three pools meet.

    submit -> TaskPool: whose turn is it? -> ResourcePool: with which key? -> WorkerPool: on which worker? -> run
    result <-  record, event              <-  what it said about the key   <-  result, exception, stream

The pool of this module is the one of `headgate.tasks` with other ports: `allocator` reserves a resource in the same
moment in which a task gets its slot (neither is held while waiting for the other), `launcher` calls the function with
the resource as first argument, here or on a worker, `verdicts` tells the ResourcePool what that call said about it, and
`explainer` says what tasks wait for.

What ends an attempt:

    returned, raised          the task's own outcome; the resource is in order
    CooldownResource          a verdict: the resource rests, and the task goes back to the head of its partition. Only
                              very many of these end it: see `headgate.resources.attempts.Cooldowns`
    DisableResource, Retry... a verdict too, and one of the task's `max_attempts` is spent
    an older use failed       the task goes back as well, and nothing is spent: it was not its fault
    its worker was lost       the task's own failure, which says nothing about the resource
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, TypeVarTuple, overload

from headgate.combined.allocator import TaskAllocator
from headgate.combined.explainer import TaskExplainer
from headgate.combined.launcher import TaskLauncher
from headgate.combined.verdicts import Verdicts
from headgate.combined.workers_budget import WorkersBudget
from headgate.core.checks import named_options
from headgate.core.kept_locks import SharesLock
from headgate.errors import InvalidArgument, InvalidType
from headgate.resources.engine import engine_of
from headgate.resources.model import Resource
from headgate.resources.pool import ResourcePool
from headgate.tasks.creating import pool_from
from headgate.tasks.model import Scope
from headgate.tasks.pool import TaskPool as PlainTaskPool
from headgate.tasks.rates import RatePerTenant
from headgate.tasks.runtime.ending import OnSignal
from headgate.tasks.runtime.ports import Ports, Runner
from headgate.tasks.strategies import Strategy

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterable, AsyncIterator, Iterable

    from headgate.stores.port import Store
    from headgate.tasks.admission import Policy
    from headgate.tasks.handle import TaskHandle
    from headgate.tasks.runtime.results import OnOpaque
    from headgate.tasks.runtime.shared_budget import OnLeaseLost
    from headgate.tasks.scheduling.idempotency import OnConflict
    from headgate.workers.pool import WorkerPool

__all__ = ["TaskPool", "pool_create"]

T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


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
    ) -> None:
        if workers is not None and fencing is True:
            raise InvalidArgument(
                "fencing=True cannot be given together with workers: the number of a start is not known on a worker",
                remedy="Leave out workers=, and and let the task pass its headgate.current_task().fence to a routine.",
            )
        super().__init__(
            name,
            max_concurrent=max_concurrent,
            queue=queue,
            backpressure=backpressure,
            scope=scope,
            pipeline_id=pipeline_id,
            scope_id=scope_id,
            stale_after=stale_after,
            store=store,
            keep=keep,
            max_concurrent_per_key=max_concurrent_per_key,
            rate_per_tenant=rate_per_tenant,
            audit=audit,
            runner=_ports_of(resources, workers, runner, follows_workers=max_concurrent is None),
            fencing=fencing,
            on_lease_lost=on_lease_lost,
            on_signal=on_signal,
            result_types=result_types,
            on_opaque=on_opaque,
            on_conflict=on_conflict,
            keep_failed=keep_failed,
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
        async def run(self, fn: Callable[[*Ts], Awaitable[R]], /, *args: *Ts, **options: Any) -> R: ...
        @overload
        async def run(self, fn: Callable[[*Ts], R], /, *args: *Ts, **options: Any) -> R: ...
        @overload
        async def run(self, fn: Callable[[Resource[Any], *Ts], Awaitable[R]], /, *args: *Ts, **options: Any) -> R: ...
        @overload
        async def run(self, fn: Callable[[Resource[Any], *Ts], R], /, *args: *Ts, **options: Any) -> R: ...
        async def run(self, fn: Any, /, *args: Any, **options: Any) -> Any: ...  # type: ignore[misc]

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
            fn: Callable[[T], Awaitable[R]],
            items: Iterable[T] | AsyncIterable[T],
            /,
            **options: Any,
        ) -> AsyncIterator[R]: ...
        @overload
        def map(
            self,
            fn: Callable[[T], R],
            items: Iterable[T] | AsyncIterable[T],
            /,
            **options: Any,
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
            self,
            fn: Callable[[Resource[Any], T], R],
            items: Iterable[T] | AsyncIterable[T],
            /,
            **options: Any,
        ) -> AsyncIterator[R]: ...
        # It does handle them: pyright does not see through eight overloads whose functions differ by one argument.
        def map(self, fn: Any, items: Any, /, **options: Any) -> AsyncIterator[Any]: ...  # pyright: ignore[reportIncompatibleMethodOverride]


def pool_create(options: Mapping[str, Any] | None = None, /, **keywords: Any) -> TaskPool:
    """A `TaskPool` from keywords, or from one mapping of them; what is None counts as not given.

    `stale_after_ms` is `stale_after` in milliseconds, `run_id` is `pipeline_id`, `strategy` is `queue`.
    """
    return pool_from(TaskPool, options, keywords)


def _ports_of(
    resources: ResourcePool[Any] | None,
    workers: WorkerPool | None,
    runner: Runner | Ports | None,
    *,
    follows_workers: bool,
) -> Runner | Ports | None:
    """The ports of a pool with these resources and workers; without either, the runner."""
    if resources is None and workers is None:
        return runner
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
    placing = None
    if workers is not None:
        from headgate.workers.pool import WorkerPool  # not above: it is slow to import, and most pools need none

        if not isinstance(workers, WorkerPool):
            raise InvalidType(
                f"workers must be a WorkerPool, got {type(workers).__name__}",
                remedy="Pass what `async with headgate.WorkerPool() as workers:` gives.",
            )
        from headgate.workers.client.any_function import Placing

        placing = Placing(workers)
    allocator = TaskAllocator(resources, placing)
    budget = None
    if workers is not None:
        if follows_workers:
            budget = WorkersBudget(workers, allocator.loop)
            workers.__follow_workers__(budget)
        if resources is not None and (shared := engine_of(resources).shared) is not None:
            _share_lock(workers, shared.store)
    launcher = TaskLauncher(Verdicts(allocator, placing), placing)
    on_shared = None if workers is None else partial(_share_lock, workers)
    return Ports(launcher, allocator, TaskExplainer(allocator), budget, on_shared)


def _share_lock(workers: WorkerPool, store: object) -> None:
    """Have what this process holds in a store stay its own until its workers have ended, if it is killed."""
    if isinstance(store, SharesLock):
        store.share_lock(workers.kept_locks)
