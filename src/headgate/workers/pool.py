"""`WorkerPool`: has workers started, and lets routines find them.

It is thin. A placement starts worker processes, replaces those that end and ends all of them. Calls are made by
dispatchers, one for each event loop, which learn from the placement which workers there are. The pool checks arguments,
waits for enough workers, and closes all of it in the right order.

What is not needed to start processes is imported while they start.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from headgate import registry
from headgate._version import __version__
from headgate.core.checks import (
    checked_memory,
    checked_name,
    checked_optional_count,
    checked_optional_seconds,
    checked_positive_seconds,
    named_options,
    usable_as_balancer,
    usable_as_discovery,
)
from headgate.core.clock import clock
from headgate.core.kept_locks import KeptLocks
from headgate.errors import (
    HeadgateError,
    InvalidArgument,
    InvalidType,
    NoActivePool,
    NoWorkersAvailable,
    PoolClosed,
    WorkerStartFailed,
)
from headgate.workers.client.other_loops import close_on, on, turns
from headgate.workers.finding import Announcer, Finder
from headgate.workers.membership import Membership
from headgate.workers.model import UNREPORTED, Follower, Lifetime, Limits, WorkerMetadata, WorkerView, check_tags
from headgate.workers.options import checked_credentials
from headgate.workers.pool_size import checked_placed, checked_size, refuse_for_discovered
from headgate.workers.processes.local_placement import LocalPlacement
from headgate.workers.processes.placement import Launch, Placement, Retirement
from headgate.workers.routines import ACTIVE, CALLER, OPEN, dispatch_limit
from headgate.workers.setup import check_functions, dumped

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from headgate.core.pool_executor import PoolExecutor
    from headgate.core.views import WorkerPoolView
    from headgate.discovery.port import DiscoveryLike
    from headgate.workers.client.balancing import LoadBalancerLike
    from headgate.workers.client.dispatcher import Dispatcher
    from headgate.workers.client.peers import Introductions
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.processes.exit_status import Ending
    from headgate.workers.processes.restarts import Trouble

    # A factory may give a load balancer, an awaitable of one, or a context manager that gives one.
    BalancerSource = (
        LoadBalancerLike | Callable[[], Any] | AbstractContextManager[Any] | AbstractAsyncContextManager[Any]
    )
    # The same for a discovery.
    DiscoverySource = DiscoveryLike | Callable[[], Any] | AbstractContextManager[Any] | AbstractAsyncContextManager[Any]

MAX_OVERDUE = 30.0
"""Seconds that calls past their own timeout may hold a worker before it is replaced, unless the pool says otherwise."""
_NOT_FORKED = "Start the child as a new program: subprocess, or multiprocessing with the spawn method."
_LOOPBACK = "127.0.0.1"
_SHOWN = 5  # workers that were found and are not used, in an error


class WorkerPool:
    """Worker processes that run routines called in this block: ``async with WorkerPool(spawn=4): await add(1, 2)``."""

    @named_options
    def __init__(
        self,
        *tags: str,
        spawn: int | None = None,
        placement: Placement | None = None,
        discovery: DiscoverySource | None = None,
        lease: int | None = None,
        lazy: bool = True,
        loadbalancer: BalancerSource | None = None,
        credentials: WorkerCredentials | None = None,
        worker: Callable[..., Any] | None = None,
        quorum: int = 1,
        quorum_timeout: float | None = 60,
        shutdown_timeout: float | None = 60,
        max_payload: int = 2**30,
        max_overdue: float | None = MAX_OVERDUE,
        max_blocked: float | None = None,
        max_tasks_per_worker: int | None = None,
        max_memory_per_worker: float | str | None = None,
        setup: Callable[[], Any] | AbstractAsyncContextManager[Any] | AbstractContextManager[Any] | None = None,
        teardown: Callable[[], Any] | None = None,
        name: str | None = None,
    ) -> None:
        self.tags: tuple[str, ...] = tags
        self.name: str = checked_name(name, None)
        if tags and isinstance(tags[0], int):
            raise InvalidType(
                f"tags must be strings, got {type(tags[0]).__name__}",
                remedy=f"Did you mean WorkerPool(spawn={tags[0]})?",
            )
        check_tags(tags)
        self._discovery_source, self._credentials = discovery, checked_credentials(credentials)
        self._placement: Placement
        if placement is None:
            size = checked_size(spawn, lease, quorum, durable=discovery is not None)
            self._placement = LocalPlacement(size, worker=worker)
        else:
            durable, secure = discovery is not None, self._credentials is not None
            size = checked_placed(placement, lease, quorum, durable=durable, secure=secure, spawn=spawn, worker=worker)
            self._placement = placement
        self._losses = 0  # workers that ended without being told to
        self._size = size  # workers of its own that it is to have; of a placement that does not know yet 1, at first
        if discovery is not None and not usable_as_discovery(discovery):
            raise InvalidType(
                f"discovery must have publisher and subscribe(), or make something that has, got {discovery!r}"
            )
        self._lease = lease
        if not isinstance(lazy, bool):
            raise InvalidType(f"lazy must be True or False, got {lazy!r}")
        self._quorum_timeout = checked_optional_seconds("quorum_timeout", quorum_timeout)
        self._shutdown_timeout = checked_optional_seconds("shutdown_timeout", shutdown_timeout)
        checked_optional_count("max_payload", max_payload, 1)
        if max_payload is None:
            raise InvalidType("max_payload must be a number of bytes, got NoneType")
        self._max_payload = max_payload
        self._limits = Limits(
            checked_positive_seconds("max_overdue", max_overdue), checked_positive_seconds("max_blocked", max_blocked)
        )
        checked_optional_count("max_tasks_per_worker", max_tasks_per_worker, 1)
        self._lifetime = Lifetime(max_tasks_per_worker, checked_memory("max_memory_per_worker", max_memory_per_worker))
        check_functions(setup, teardown)
        self._setup, self._teardown = setup, teardown
        if not self._size:
            refuse_for_discovered(
                max_tasks_per_worker=max_tasks_per_worker,
                max_memory_per_worker=max_memory_per_worker,
                setup=setup,
                teardown=teardown,
            )
        if loadbalancer is not None and not usable_as_balancer(loadbalancer):
            raise InvalidType(
                f"loadbalancer must have order() and report(), or make something that has, got {loadbalancer!r}"
            )
        self._balancer_source = loadbalancer
        self._balancer: LoadBalancerLike
        self.kept_locks: KeptLocks = KeptLocks()
        """Locks by which shared stores count this process as alive, held until its workers have ended too."""
        self._followers: WeakSet[Follower] = WeakSet()
        self._finder: Finder | None = None
        self._announcer: Announcer | None = None
        self._lazy, self._quorum = lazy, quorum
        self._id = clock.token()[:12]
        self._state = "new"
        self._forked = False  # this process is a child of the one that opened the pool
        self._ready = 0  # workers that take calls
        self._trouble: Trouble | None = None  # the last start failed
        self._failure: WorkerStartFailed | None = None  # what callers are told who find no worker
        self._changed: list[asyncio.Future[None]] = []
        self._dispatchers: dict[asyncio.AbstractEventLoop, Dispatcher] = {}
        self._introductions: Introductions  # what all of them tell the workers of each other
        self._loop: asyncio.AbstractEventLoop | None = None
        self._token: Token[Any] | None = None
        self._outer: WorkerPool | None = None  # the pool that was active around this one
        self._resizing = asyncio.Lock()
        self._contexts: list[Any] = []

    # -- entering -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise RuntimeError("a WorkerPool is entered once: make a new one")
        rpc = sys.modules.get("headgate.workers.protocol.transport")
        if rpc is not None and os.getpid() != rpc.LOADED_IN:
            raise WorkerStartFailed(
                "this process was forked from one that had loaded gRPC, which hangs in such a child", remedy=_NOT_FORKED
            )
        self._state = "starting"
        registry.register(self, "workers", WorkerPool.workers, view=WorkerPool._view, home=lambda pool: pool._loop)
        self._loop = asyncio.get_running_loop()
        try:
            discovery = await self._resolved_discovery()
            await self._placement.open(
                Launch(
                    workers=self._placement.num_workers,
                    tags=self.tags,
                    limits=self._limits,
                    stop_timeout=self._shutdown_timeout,
                    credentials=self._credentials,
                    host=None if discovery is None else _bind_host(discovery, secure=self._credentials is not None),
                    on_change=self._on_change,
                    on_ended=self._on_ended,
                    on_trouble=self._on_trouble,
                    on_lost=self._count_loss,
                    lifetime=self._lifetime,
                    setup=dumped(self._setup, self._teardown, self._quorum_timeout),
                    kept_locks=self.kept_locks,
                )
            )
            self._size, self._credentials = self._placement.num_workers or 0, self._placement.credentials
            from headgate.workers.client import dispatcher  # noqa: F401 - imports grpc, while the workers start
            from headgate.workers.client.peers import Introductions

            self._introductions = Introductions(self._id)
            self._balancer = await self._resolved_balancer()
            await self._until_ready()
            await self._announce()
            self._state = "open"
            if not self._lazy:
                await self._connect()
        except BaseException:
            self._state = "closed"
            await self._finish(hurry=True)
            raise
        OPEN.add(self)
        self._outer = ACTIVE.get()
        self._token = ACTIVE.set(self)
        return self

    async def _until_ready(self) -> None:
        """Wait until all workers are ready; or, when that takes too long or fails, as many as the quorum asks."""
        deadline = clock.now() + (math.inf if self._quorum_timeout is None else self._quorum_timeout)
        while True:
            if self._failure is not None:
                raise self._failure
            if self._state not in ("starting", "open"):
                raise PoolClosed("the pool was closed while it waited for workers")
            ready = self._ready
            if ready >= self._size:
                return
            left = deadline - clock.now()
            if ready >= self._quorum and (left <= 0 or self._keeps_failing()):
                return
            if left <= 0:
                raise self._too_late()
            await self._change(left)

    def _too_late(self) -> HeadgateError:
        """Return the error that says why the pool has too few workers when `quorum_timeout` is over."""
        trouble, limit = self._trouble, f"within quorum_timeout={self._quorum_timeout:g} s"
        if trouble is not None and not self._ready and trouble.failure.__cause__ is not None:
            failure = trouble.failure
            failure.args = (f"no worker was ready {limit}, after {trouble.failed_tries} tries: {failure.args[0]}",)
            return failure
        runs = "" if self._setup is None else "; setup runs before a worker is ready"
        return NoWorkersAvailable(f"{self._ready} of {self._size} workers were ready {limit}{runs}{self._why_none()}")

    async def _change(self, timeout: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._changed.append(future)
        await asyncio.wait((future,), timeout=None if timeout == math.inf else timeout)

    async def _connect(self) -> None:
        """Connect now, not at the first call; with a discovery, to as many workers as the quorum asks."""
        connecting = self.__dispatcher__().connect(max(self._ready, self._quorum))
        try:
            async with asyncio.timeout(self._quorum_timeout):
                await connecting
        except TimeoutError:
            raise NoWorkersAvailable(
                f"fewer than quorum={self._quorum} workers could be connected within "
                f"quorum_timeout={self._quorum_timeout:g} s: {self.__dispatcher__().standing()}"
            ) from None

    async def _announce(self) -> None:
        """Publish the pool's own workers that are ready, and from now on what becomes of them."""
        if self._announcer is not None and self._size and not self._announcer.is_open:
            await self._announcer.open()
            await self._announcer.announce([view.metadata for view in self._placement.workers()])
            self._announcer.follow(self._placement.subscribe())

    async def _resolved_balancer(self) -> LoadBalancerLike:
        """Return the load balancer itself."""
        if self._balancer_source is None:
            from headgate.workers.client.balancing import LeastLoadedLoadBalancer

            return LeastLoadedLoadBalancer()
        balancer: LoadBalancerLike = await self._resolved("loadbalancer", self._balancer_source, ("order", "report"))
        return balancer

    async def _resolved_discovery(self) -> DiscoveryLike | None:
        """Return the discovery itself, and have it followed when the first call is made, or now."""
        if self._discovery_source is None:
            return None
        discovery: DiscoveryLike = await self._resolved("discovery", self._discovery_source, ("publisher", "subscribe"))
        membership = Membership(
            tags=self.tags, lease=self._lease, secure=self._credentials is not None, version=__version__
        )
        self._finder = Finder(discovery, membership, self._wake)
        if getattr(discovery, "publishes", True):
            self._announcer = Announcer(discovery, self._finder.owns)
        return discovery

    async def _resolved(self, what: str, source: Any, names: tuple[str, str]) -> Any:
        """Return what was given, what a factory made, or what a context manager gave: it must have these attributes."""
        for _ in range(3):
            if all(hasattr(source, name) for name in names) and not isinstance(source, type):
                return source
            if hasattr(type(source), "__aenter__"):
                manager, source = source, await source.__aenter__()
                self._contexts.append(manager)
            elif hasattr(type(source), "__enter__"):
                manager, source = source, source.__enter__()
                self._contexts.append(manager)
            elif callable(source):
                source = source()
                if inspect.isawaitable(source):
                    source = await source
        if not all(hasattr(source, name) for name in names):
            raise InvalidType(f"{what} gave a {type(source).__name__}, which has no {names[0]} and {names[1]}")
        return source

    # -- for routines -------------------------------------------------------------------------------------------------

    def __open_pool__(self) -> WorkerPool:
        """Return this pool; if it is closed, the nearest open pool around it, or else itself. `routines` asks."""
        if self._state != "closed":
            return self
        outer: WorkerPool | None = self._outer
        while outer is not None and outer._state == "closed":
            outer = outer._outer
        return self if outer is None else outer

    def __follow_workers__(self, follower: Follower) -> None:
        """Tell the follower when workers come or go. A TaskPool that uses this pool asks for it."""
        self._followers.add(follower)

    def __dispatcher__(self) -> Dispatcher:
        """Return the dispatcher of the running loop, made at its first call. `routines` asks."""
        loop = asyncio.get_running_loop()
        dispatcher = self._dispatchers.get(loop)
        if dispatcher is None:
            dispatcher = self._make_dispatcher(loop)
        if self._forked:
            self._refuse()
        return dispatcher

    def _refuse(self) -> None:
        if self._forked:
            raise NoActivePool(
                "this process was forked from the one that opened the pool, and cannot use its workers",
                remedy=_NOT_FORKED,
            )
        if self._state == "closed":
            raise PoolClosed("the WorkerPool of this context is closed", remedy="Call routines inside its block.")
        raise PoolClosed(
            "the WorkerPool was not opened",
            remedy="Put `async with` around its use: `async with WorkerPool() as workers:`.",
        )

    def _make_dispatcher(self, loop: asyncio.AbstractEventLoop) -> Dispatcher:
        from headgate.workers.client.dispatcher import Dispatcher

        if self._state != "open":
            self._refuse()
        for other in [other for other in self._dispatchers if other.is_closed()]:
            self._dispatchers.pop(other).abandon()
        dispatcher = self._dispatchers[loop] = Dispatcher(
            self._balancer,
            quorum=self._quorum,
            quorum_timeout=self._quorum_timeout,
            on_lost=self._on_lost,
            introductions=self._introductions,
            max_payload=self._max_payload,
            awaits_endings=True,
            limits=self._limits,
            on_retiring=self._on_retiring,
            credentials=self._credentials,
            places=None if self._finder is None else self._finder.places,
        )
        dispatcher.why_none = self._why_none
        if self._failure is not None:
            dispatcher.fail(self._failure)
        dispatcher.connections.follow(self._placement.subscribe())
        if self._finder is not None and self._loop is not None:
            dispatcher.connections.follow(self._finder.subscribe(), discovered=True)
            on(self._loop, self._finder.start)
        return dispatcher

    def workers(self) -> list[WorkerView]:
        """Return the workers of this pool, with their state and their load.

        A discovered worker is "starting" until a session with it is open, and "lost" while it cannot be reached.
        """
        seen: dict[str, list[WorkerView]] = {}
        for dispatcher in list(self._dispatchers.values()):
            for view in dispatcher.connections.views():
                seen.setdefault(view.uid, []).append(view)
        failing = {uid for one in list(self._dispatchers.values()) for uid in one.connections.out_of_reach}
        found = []
        for placed in self._placement.workers():
            views = seen.get(placed.uid, [])
            state = views[-1].state if views and placed.state == "ready" else placed.state
            in_flight = sum(view.in_flight for view in views)
            process = views[-1].process if views else placed.process
            found.append(WorkerView(placed.metadata, state, in_flight, placed.replaced_because, process))
        for metadata in () if self._finder is None else self._finder.membership.admitted:
            views = seen.get(metadata.uid, [])
            state = views[-1].state if views else "lost" if metadata.uid in failing else "starting"
            process = views[-1].process if views else UNREPORTED
            found.append(WorkerView(metadata, state, sum(view.in_flight for view in views), process=process))
        return found

    def as_executor(self, max_concurrent: int | None = None) -> PoolExecutor:
        """Return a `concurrent.futures.Executor` whose calls run on the workers; others wait in it, in order.

        At most `max_concurrent` are out at a time, by default two for each worker. It can be used from any thread.
        ``with WorkerPool(...).as_executor() as executor:`` opens the pool in a thread of its own, and closes it.
        """
        from headgate.core.pool_executor import PoolExecutor
        from headgate.workers.client.calls import WorkerCalls

        checked_optional_count("max_concurrent", max_concurrent, 1)
        calls = WorkerCalls(self, self._home, max_concurrent)
        if (3, 12) <= sys.version_info < (3, 12, 3):
            # They start no thread once the main thread has ended (CPython's gh-113964), and gRPC crashes then. The end
            # of the program waits for what was submitted, and that may not have been sent yet.
            from headgate.workers.protocol import transport

            transport.start_threads()
            calls.on_close = ended = weakref.finalize(calls, transport.let_threads_end)
            ended.atexit = False
        return PoolExecutor(calls, f"workers {self._id}")

    def _home(self) -> asyncio.AbstractEventLoop | None:
        """Return the loop on which the pool is open; None: it was not entered yet."""
        if self._state == "closed":
            self._refuse()
        return self._loop

    def _view(self, rows: int) -> WorkerPoolView:
        """Return what pages, terminals and metrics show."""
        from headgate.workers.view import pool_view

        workers, losses, expected = self._seen(), self._losses, self._size
        if self._finder is not None:
            losses += self._finder.missing.losses
            expected += len(workers) - len(self._placement.workers())
        return pool_view(workers, self._state, self._size, expected, losses, rows)

    def _seen(self) -> list[WorkerView]:
        """Return the workers of this pool, and as "lost" those that their discovery dropped and nothing replaced."""
        absent = () if self._finder is None else self._finder.missing.absent(clock.now())
        return [*self.workers(), *(WorkerView(metadata, "lost") for metadata in absent)]

    async def broadcast(self, routine: Callable[..., Any], /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run a routine once on each worker that is there now; return what each returned, by the uid of the worker.

        All of them end before it does. If some failed, the failure of the first is raised, and names its worker.
        """
        from headgate.workers.mapping import routine_for

        found = routine_for(routine, "broadcast()")
        if (bound := getattr(routine, "__self__", None)) is not None:
            args = (bound, *args)
        self._require_open()
        dispatcher, running, limit = self.__dispatcher__(), CALLER.get(), dispatch_limit()
        if self._finder is not None:
            await self._connect()
        await dispatcher.connections.until_known(
            [view.uid for view in self._placement.workers() if view.state == "ready"]
        )
        caller = "" if running is None else running.id
        uids = [view.uid for view in self.workers() if view.state not in ("starting", "stopping", "lost")]
        tasks = [asyncio.ensure_future(dispatcher.call(found, args, kwargs, limit, caller, to=uid)) for uid in uids]
        await asyncio.gather(*tasks, return_exceptions=True)
        for uid, task in zip(uids, tasks, strict=True):
            error = None if task.cancelled() else task.exception()
            if error is not None:
                error.add_note(f"It was broadcast to {len(uids)} workers; this was {uid}.")
                raise error
        return {uid: task.result() for uid, task in zip(uids, tasks, strict=True)}

    async def resize(self, size: int) -> None:
        """Have so many workers from now on; return when they are ready, or when those that leave have finished.

        InvalidArgument: the pool starts no workers, it only discovers those that others started.
        """
        checked_optional_count("size", size, 1)
        if size is None:
            raise InvalidType("size must be a whole number, got NoneType")
        if not self._size and isinstance(self._placement, LocalPlacement):
            raise InvalidArgument(
                "a pool that only discovers workers cannot be resized: it starts none itself",
                remedy="Start or stop workers where they run (`headgate worker`), or open the pool with spawn= too.",
            )
        async with self._resizing:
            self._require_open()
            self._size = size
            await self._placement.scale(size)
            await self._until_ready()
            await self._announce()
            there = len(self._placement.workers())
            if there < size and self._trouble is not None and self._keeps_failing():
                raise WorkerStartFailed(
                    f"{there} of {size} workers are there, and starting more keeps failing: "
                    f"{self._trouble.reason}. The pool goes on trying"
                )

    def _require_open(self) -> None:
        if self._state != "open":
            state = "not entered" if self._state in ("new", "starting") else "closed"
            raise PoolClosed(f"the pool is {state}", remedy="Use it inside its `async with` block.")

    # -- what the placement and the dispatchers tell -------------------------------------------------------------------

    def _on_change(self, ready: int) -> None:
        """Note how many workers of the pool's own are ready."""
        self._ready = ready
        self._wake()

    def _wake(self) -> None:
        """Wake those who wait for workers to come or go."""
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)
        for follower in list(self._followers):
            follower.look()

    def _on_ended(self, uid: str, ending: Ending) -> None:
        """Tell each dispatcher how the process of a worker ended: the errors of calls lost with it say that."""
        for loop, dispatcher in list(self._dispatchers.items()):
            on(loop, dispatcher.connections.learn, uid, ending)

    def _count_loss(self) -> None:
        self._losses += 1

    def _on_trouble(self, trouble: Trouble | None) -> None:
        """Decide what callers are told who find no worker, when a start failed or starting works again."""
        self._trouble = trouble
        if trouble is None:
            if self._failure is not None:
                self._tell_waiting(None)
            return
        failure = trouble.failure
        if trouble.retry_in is None:
            self._tell_waiting(failure)
        elif self._state == "open" and not self._ready and self._keeps_failing():
            text = f"no worker is left, and starting one has failed {trouble.failed_tries} times in a row"
            failure.args = (f"{text}: {failure.args[0]}. The pool tries again in {trouble.retry_in:.1f} s",)
            self._tell_waiting(failure)

    def _keeps_failing(self) -> bool:
        return self._trouble is not None and self._trouble.keeps_failing(clock.now())

    def _why_none(self) -> str:
        """Say why there may be no worker: starting one failed, or those that were found may not be used. Called on
        other threads too."""
        trouble, refused = self._trouble, {} if self._finder is None else self._finder.membership.refused
        failed = "" if trouble is None else f"; the last start of a worker failed: {trouble.reason}"
        shown = "; ".join(f"{uid}: {reason}" for uid, reason in list(refused.items())[-_SHOWN:])
        asked = "" if self._finder is None else f" ({self._finder.discovery!r} was asked)"
        return f"{asked}{failed}; found and not used: {shown}" if refused else asked + failed

    def _tell_waiting(self, error: WorkerStartFailed | None) -> None:
        """Have callers who find no worker raise this; None: have them wait for one, as usual."""
        self._failure = error
        for loop, dispatcher in list(self._dispatchers.items()):
            on(loop, dispatcher.fail, error)

    def _on_lost(self, metadata: WorkerMetadata, reason: str) -> None:
        """Have a worker ended and replaced that a dispatcher cannot reach: it must not live on."""
        self._retire(metadata.uid, reason, "unreachable")

    def _on_retiring(self, uid: str, reason: str, at_once: bool) -> None:
        """Have a worker replaced that routines keep from its work, as it says itself, or as is seen from outside."""
        self._retire(uid, reason, "end" if at_once else "finish")

    def _retire(self, uid: str, reason: str, how: Retirement) -> None:
        if self._loop is not None and not self._loop.is_closed():
            on(self._loop, self._placement.retire, uid, reason, how)

    # -- leaving ------------------------------------------------------------------------------------------------------

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = "closing"
        OPEN.discard(self)
        if self._token is not None and ACTIVE.get() is self:  # else it is left before one that was entered later
            try:
                ACTIVE.reset(self._token)
            except ValueError:  # left in another context than it was entered in
                ACTIVE.set(self._outer)
        hurry = kind is not None and not issubclass(kind, Exception)
        closing: asyncio.Future[None]
        if self._loop is None or self._loop is asyncio.get_running_loop():
            closing = asyncio.get_running_loop().create_task(self._finish(hurry=hurry))
        elif await turns(self._loop):
            closing = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._finish(hurry=hurry), self._loop))
        else:
            await self._forsake(self._loop)
            return
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as again:
                if closing.cancelled():
                    raise
                cancelled = again
                self._state = "hurrying"
        closing.result()
        if cancelled is not None:
            raise cancelled

    async def _finish(self, *, hurry: bool) -> None:
        """Refuse, drain, cancel, drop, stop, close: in this order."""
        try:
            await self._placement.close(self._drain(hurry=hurry))
        finally:
            self._closed()
            if self._finder is not None:
                await self._finder.close()
            for context in reversed(self._contexts):
                left = getattr(type(context), "__aexit__", None)
                if left is not None:
                    await left(context, None, None, None)
                else:
                    type(context).__exit__(context, None, None, None)

    async def _forsake(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the workers, because the loop on which the pool was entered does not run. Calls are not waited for."""
        self._closed()
        if self._finder is not None:
            on(loop, self._finder.stop)
        for other, dispatcher in list(self._dispatchers.items()):
            if other is not loop:
                await close_on(other, dispatcher)
            elif loop.is_closed():
                dispatcher.abandon()
            else:
                on(loop, dispatcher.refuse, "its event loop does not run")
        await self._placement.close(asyncio.sleep(0))
        if not loop.is_closed():
            warnings.warn(
                "a WorkerPool was left on another event loop than it was entered on, and that one does not run. Its "
                "workers have ended; calls that were under way there, and its tasks, end when that loop runs again. "
                "Leave a pool on the loop on which it was entered.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _closed(self) -> None:
        self._state = "closed"
        registry.unregister(self)

    async def _drain(self, *, hurry: bool) -> None:
        """Refuse new calls, let those under way end for a while, and close the dispatchers."""
        for loop, dispatcher in list(self._dispatchers.items()):
            on(loop, dispatcher.refuse, "it is closing")
        patience = math.inf if self._shutdown_timeout is None else self._shutdown_timeout
        deadline = clock.now() + (0.0 if hurry else patience)
        # It looks again and again: calls end on several loops and threads, and to tell the pool of each end would make
        # every call dearer for the sake of this one wait.
        while self._calls() and clock.now() < deadline and self._state != "hurrying":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        closings = [close_on(loop, dispatcher) for loop, dispatcher in list(self._dispatchers.items())]
        await asyncio.gather(*closings, return_exceptions=True)
        if self._announcer is not None:
            await self._announcer.close()

    def _calls(self) -> int:
        return sum(dispatcher.calls for loop, dispatcher in self._dispatchers.items() if not loop.is_closed())

    def __repr__(self) -> str:
        states = [view.state for view in self._seen()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"<WorkerPool {self._state}{': ' + counts if counts else ''}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the workers."""
        from headgate.core.html import card

        rows = [
            (one.uid, one.state, one.pid or "", one.in_flight, ", ".join(sorted(one.tags))) for one in self.workers()
        ]
        return card(repr(self), ("worker", "state", "pid", "in flight", "tags"), rows)


def _bind_host(discovery: DiscoveryLike, *, secure: bool) -> str | None:
    """Return where workers that are announced through a discovery listen: beyond this machine only with TLS; None: on a
    Unix socket, where all who hear of them are of this user."""
    wanted: str | None = getattr(discovery, "bind_host", _LOOPBACK)
    if secure:
        return wanted or _LOOPBACK
    return None if wanted is None else _LOOPBACK


def _after_fork() -> None:
    for pool in list(OPEN):
        pool._forked = True


os.register_at_fork(after_in_child=_after_fork)
