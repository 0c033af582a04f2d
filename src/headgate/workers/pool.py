"""`WorkerPool`: starts workers, replaces those that end, and lets routines find them.

It is thin: processes are the keeper's business (`spawning`), calls are the proxies' (one for each event loop).
In between stands a discovery, here the pool's own list: proxies know workers only from it.
What is not needed to start processes is imported while they start.

A worker that ends is replaced for as long as the pool is open. Where that fails, `restarts` says when the next try is
and when callers are told; one worker is started then as a trial, and the others when it is ready.
"""

from __future__ import annotations

import asyncio
import inspect
import marshal
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextvars import Token
from types import TracebackType
from typing import Any, Self

from headgate import registry
from headgate.core.checks import (
    checked_optional_count,
    checked_optional_seconds,
    checked_positive_seconds,
    named_options,
    usable_as_balancer,
)
from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import (
    InvalidArgument,
    InvalidType,
    NoActivePool,
    NoWorkersAvailable,
    PoolClosed,
    WorkerStartFailed,
)
from headgate.workers.model import Limits, WorkerMetadata, WorkerView
from headgate.workers.processes.exit_status import ending_of, why_replaced
from headgate.workers.processes.keeper_client import KeeperClient, end_strays
from headgate.workers.processes.local_worker import LocalWorker, exit_text, start_failure
from headgate.workers.processes.members import Member, is_dead
from headgate.workers.processes.restarts import DEATHS, LONGEST, WITHIN, Starts
from headgate.workers.routines import ACTIVE, CALLER, OPEN, dispatch_limit

MAX_OVERDUE = 30.0
"""Seconds that calls past their own timeout may hold a worker before it is replaced, unless the pool says otherwise."""
_NOT_FORKED = "Start the child as a new program: subprocess, or multiprocessing with the spawn method."
_LAST = 2.0  # seconds for workers to go by themselves when nothing runs any more


class WorkerPool:
    """Worker processes that run routines called in this block: ``async with WorkerPool(spawn=4): await add(1, 2)``."""

    @named_options
    def __init__(
        self,
        *tags: str,
        spawn: int | None = None,
        discovery: Any = None,
        lease: int | None = None,
        lazy: bool = True,
        loadbalancer: Any = None,
        credentials: Any = None,
        worker: Callable[..., Any] | None = None,
        quorum: int = 1,
        quorum_timeout: float | None = 60,
        shutdown_timeout: float | None = 60,
        max_payload: int = 2**30,
        max_overdue: float | None = MAX_OVERDUE,
        max_blocked: float | None = None,
    ) -> None:
        self.tags: tuple[str, ...] = tags
        if tags and isinstance(tags[0], int):
            raise InvalidType(
                f"tags must be strings, got {type(tags[0]).__name__}",
                remedy=f"Did you mean WorkerPool(spawn={tags[0]})?",
            )
        LocalWorker(*tags)  # its checks are ours
        if discovery is not None or credentials is not None:
            raise InvalidArgument(
                "discovery= and credentials= are not there yet", remedy="Leave them out and use `spawn=`."
            )
        checked_optional_count("spawn", spawn, 1)
        checked_optional_count("lease", lease, 0)
        checked_optional_count("quorum", quorum, 1)
        if quorum is None:
            raise InvalidType("quorum must be a whole number, got NoneType")
        self._size = spawn if spawn is not None else (os.cpu_count() or 1)
        if quorum > self._size:
            raise InvalidArgument(
                f"quorum must be at most the capacity of the pool ({self._size}), got {quorum}",
                remedy="Lower quorum, or spawn more workers.",
            )
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
        if worker is not None and not callable(worker):
            raise InvalidType(f"worker must be a factory of workers, got {type(worker).__name__}")
        if loadbalancer is not None and not usable_as_balancer(loadbalancer):
            raise InvalidType(
                f"loadbalancer must have order() and report(), or make something that has, got {loadbalancer!r}"
            )
        self._balancer: Any = loadbalancer
        self._factory: Callable[..., Any] = worker if worker is not None else LocalWorker
        self._lazy, self._quorum = lazy, quorum
        self._id = clock.token()[:12]
        self._state = "new"
        self._members: dict[str, Member] = {}
        self._leaving: dict[str, Member] = {}
        self._starts = Starts()
        self._next_try: asyncio.TimerHandle | None = None
        self._trouble = ""  # why the last start failed
        self._failure: WorkerStartFailed | None = None  # what callers are told who find no worker
        self._changed: list[asyncio.Future[None]] = []
        self._proxies: dict[asyncio.AbstractEventLoop, Any] = {}
        self._discovery: Any = None
        self._spawner: KeeperClient | None = None
        self._keeper_ended = False  # and there is no other yet
        self._forks = True  # workers are forks of a template
        self._loop: asyncio.AbstractEventLoop | None = None
        self._token: Token[Any] | None = None
        self._outer: WorkerPool | None = None  # the pool that was active around this one
        self._resizing = asyncio.Lock()
        self._contexts: list[Any] = []
        self._farewell: asyncio.Task[None] | None = None  # of a keeper that was killed

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
        registry.register(self, "workers", WorkerPool.workers)
        self._loop = asyncio.get_running_loop()
        try:
            self._start_keeper()
            from headgate.discovery.in_process import OwnDiscovery  # while the template of the workers is loaded
            from headgate.workers.client import dispatcher  # noqa: F401 - imports grpc

            self._discovery = OwnDiscovery()
            for _ in range(self._size):
                self._spawn_one()
            self._balancer = await self._resolved(self._balancer)
            await self._until_ready()
            self._state = "open"
            if not self._lazy:
                await self.__dispatcher__().connect(sum(member.view == "ready" for member in self._members.values()))
        except BaseException:
            self._state = "closed"
            await self._finish(hurry=True)
            raise
        OPEN.add(self)
        self._outer = ACTIVE.get()
        self._token = ACTIVE.set(self)
        return self

    def _start_keeper(self) -> None:
        folder = None if self._spawner is None else self._spawner.folder
        spawner = KeeperClient(self._on_report, several=self._forks, folder=folder)
        spawner.start()
        spawner.listen()
        self._spawner, self._keeper_ended = spawner, False

    def _spawn_one(self) -> None:
        worker = self._factory(*self.tags, credentials=None)
        if not isinstance(worker, LocalWorker):
            raise InvalidType(
                f"worker= must make LocalWorkers, it made a {type(worker).__name__}",
                remedy="worker=lambda *tags, credentials=None: LocalWorker(*tags, credentials=credentials)",
            )
        if worker.uid in self._members:
            raise InvalidArgument("worker= made the same worker twice", remedy="Make a new one at each call.")
        assert self._spawner is not None, "the keeper was started"
        worker.spawn(self._spawner, self._limits)
        self._members[worker.uid] = Member(worker)

    async def _until_ready(self) -> None:
        """All that were started are ready; or, when that takes too long or fails, as many as the quorum asks."""
        deadline = clock.now() + (math.inf if self._quorum_timeout is None else self._quorum_timeout)
        while True:
            if self._failure is not None:
                raise self._failure
            if self._state not in ("starting", "open"):
                raise PoolClosed("the pool was closed while it waited for workers")
            ready = sum(member.view == "ready" for member in self._members.values())
            if ready >= self._size:
                return
            left = deadline - clock.now()
            if ready >= self._quorum and (left <= 0 or self._starts.keeps_failing(clock.now())):
                return
            if left <= 0:
                raise NoWorkersAvailable(
                    f"{ready} of {self._size} workers were ready within quorum_timeout={self._quorum_timeout:g} s"
                    + self._why_none()
                )
            await self._change(left)

    async def _change(self, timeout: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._changed.append(future)
        await asyncio.wait((future,), timeout=None if timeout == math.inf else timeout)

    async def _resolved(self, balancer: Any) -> Any:
        """The balancer itself: given, made by a factory, or by entering a context manager."""
        if balancer is None:
            from headgate.workers.client.balancing import RoundRobinLoadBalancer

            return RoundRobinLoadBalancer()
        for _ in range(3):
            if hasattr(balancer, "order") and hasattr(balancer, "report") and not isinstance(balancer, type):
                return balancer
            if hasattr(type(balancer), "__aenter__"):
                manager, balancer = balancer, await balancer.__aenter__()
                self._contexts.append(manager)
            elif hasattr(type(balancer), "__enter__"):
                manager, balancer = balancer, balancer.__enter__()
                self._contexts.append(manager)
            elif callable(balancer):
                balancer = balancer()
                if inspect.isawaitable(balancer):
                    balancer = await balancer
        if hasattr(balancer, "order") and hasattr(balancer, "report"):
            return balancer
        raise InvalidType(f"loadbalancer gave a {type(balancer).__name__}, which has no order() and report()")

    # -- for routines -------------------------------------------------------------------------------------------------

    def __open_pool__(self) -> WorkerPool:
        """Return this pool; if it is closed, the nearest open pool around it, or else itself. `routines` asks."""
        if self._state != "closed":
            return self
        outer: WorkerPool | None = self._outer
        while outer is not None and outer._state == "closed":
            outer = outer._outer
        return self if outer is None else outer

    def __dispatcher__(self) -> Any:
        """The proxy of the running loop."""
        loop = asyncio.get_running_loop()
        proxy = self._proxies.get(loop)
        if proxy is None:
            proxy = self._make_proxy(loop)
        if self._spawner is None or self._spawner.forgotten:
            self._refuse()
        return proxy

    def _refuse(self) -> None:
        if self._spawner is not None and self._spawner.forgotten:
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

    def _make_proxy(self, loop: asyncio.AbstractEventLoop) -> Any:
        from headgate.workers.client.dispatcher import Dispatcher

        if self._state != "open" or self._spawner is None:
            self._refuse()
        for other in [other for other in self._proxies if other.is_closed()]:
            self._proxies.pop(other).abandon()
        proxy = self._proxies[loop] = Dispatcher(
            self._balancer,
            quorum=self._quorum,
            quorum_timeout=self._quorum_timeout,
            on_lost=self._on_lost,
            pool=self._id,
            max_payload=self._max_payload,
            awaits_endings=True,
            limits=self._limits,
            on_retiring=self._on_retiring,
        )
        proxy.why_none = self._why_none
        if self._failure is not None:
            proxy.fail(self._failure)
        proxy.follow(self._discovery.subscribe())
        return proxy

    def workers(self) -> list[WorkerView]:
        """The workers of this pool, with state and load."""
        found = []
        for member in list(self._members.values()):  # `registry` may ask from another thread
            worker = member.worker
            state, load = member.view, 0
            if state == "ready" and is_dead(worker.pid):  # and its keeper has not said so yet
                state = "lost"
            for proxy in list(self._proxies.values()):
                for view in proxy.views():
                    if view.uid == worker.uid:
                        load += view.in_flight
                        state = view.state if state == "ready" else state
            if member.replaced:
                state = "lost"
            found.append(WorkerView(worker.described(), "stopping" if member.stopping else state, load))
        return found

    async def broadcast(self, routine: Callable[..., Any], /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run a routine once on each worker that is there now; what each returned, by the worker's uid.

        All of them end before it does. If some failed, the failure of the first is raised, and names its worker.
        """
        from headgate.workers.mapping import routine_for

        found = routine_for(routine, "broadcast()")
        if (bound := getattr(routine, "__self__", None)) is not None:
            args = (bound, *args)
        self._require_open()
        proxy, running, limit = self.__dispatcher__(), CALLER.get(), dispatch_limit()
        await proxy.until_known([uid for uid, member in self._members.items() if member.view == "ready"])
        caller = "" if running is None else running.id
        uids = [view.uid for view in self.workers() if view.state not in ("starting", "stopping", "lost")]
        tasks = [asyncio.ensure_future(proxy.call(found, args, kwargs, limit, caller, to=uid)) for uid in uids]
        await asyncio.gather(*tasks, return_exceptions=True)
        for uid, task in zip(uids, tasks, strict=True):
            error = None if task.cancelled() else task.exception()
            if error is not None:
                error.add_note(f"It was broadcast to {len(uids)} workers; this was {uid}.")
                raise error
        return {uid: task.result() for uid, task in zip(uids, tasks, strict=True)}

    async def resize(self, size: int) -> None:
        """So many workers from now on; returns when they are ready, or those that leave have finished."""
        checked_optional_count("size", size, 1)
        if size is None:
            raise InvalidType("size must be a whole number, got NoneType")
        async with self._resizing:
            self._require_open()
            self._size = size
            while len(self._members) < size:
                self._spawn_one()
            surplus = list(self._members.values())[size:]
            for member in surplus:
                member.stopping = True
                del self._members[member.worker.uid]
                self._leaving[member.worker.uid] = member
            await asyncio.gather(*(self._dismiss(member) for member in surplus))
            await self._until_ready()
            if len(self._members) < size and self._starts.keeps_failing(clock.now()):
                raise WorkerStartFailed(
                    f"{len(self._members)} of {size} workers are there, and starting more keeps failing: "
                    f"{self._trouble}. The pool goes on trying"
                )

    async def _dismiss(self, member: Member) -> None:
        """Let one finish what it has, and go."""
        from headgate.workers.processes.local_worker import stop_remotely

        uid = member.worker.uid
        deadline = clock.now()
        if member.worker.pid and member.view == "ready":
            self._discovery.announce("worker-dropped", member.worker.described())
            timeout = -1.0 if self._shutdown_timeout is None else self._shutdown_timeout
            await stop_remotely(member.worker.described().address, timeout)
            deadline = clock.now() + _LAST
        while uid in self._leaving and clock.now() < deadline:
            await self._change(0.1)
        if uid in self._leaving and self._spawner is not None:
            self._spawner.signal(uid, signal.SIGKILL)

    def _require_open(self) -> None:
        if self._state != "open":
            state = "not entered" if self._state in ("new", "starting") else "closed"
            raise PoolClosed(f"the pool is {state}", remedy="Use it inside its `async with` block.")

    # -- processes ----------------------------------------------------------------------------------------------------

    def _on_report(self, report: Mapping[str, Any]) -> None:
        """The keeper tells something."""
        event = report["event"]
        if event == "gone":
            self._keeper_gone()
        else:
            member = self._members.get(report["uid"]) or self._leaving.get(report["uid"])
            if member is None:
                return
            if event == "started":
                member.worker.pid = report["pid"]
                _emit("WorkerStarted", member.worker)
            elif event == "said":
                self._said(member, marshal.loads(report["said"]))
            elif event == "exited":
                self._exited(member, report)
        self._tell_change()

    def _tell_change(self) -> None:
        """Wake those who wait for workers to come or go."""
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)

    def _said(self, member: Member, said: Mapping[str, Any]) -> None:
        if not said.get("ready"):
            member.failure = str(said["cause"])
            return
        member.view = "ready"
        if member.stopping:
            return
        self._discovery.announce("worker-added", member.worker.described())
        _emit("WorkerReady", member.worker, failed_tries=self._starts.failed_tries)
        self._start_works()

    def _exited(self, member: Member, report: Mapping[str, Any]) -> None:
        worker = member.worker
        self._members.pop(worker.uid, None)
        self._leaving.pop(worker.uid, None)
        ending = ending_of(report)
        for loop, proxy in list(self._proxies.items()):
            _on(loop, proxy.learn, worker.uid, ending)
        was_ready = member.view == "ready"
        if was_ready:
            self._discovery.announce("worker-dropped", worker.described())
        if member.stopping or self._state not in ("open", "starting"):
            _emit("WorkerStopped", worker)
            return
        if not was_ready:
            self._start_failed(start_failure(member.failure, report), worker)
            return
        restarted = len(self._members) < self._size and self._start_workers(1)
        replaced = member.replaced or why_replaced(ending)
        if report.get("code") == 0 and not (member.lost or replaced):  # somebody told it to stop
            _emit("WorkerStopped", worker)
        else:
            reason = exit_text(report["code"]) if "code" in report else "its keeper is gone"
            if member.lost and report.get("code") == -signal.SIGKILL:  # else it had ended by itself
                reason = f"it was ended, being out of reach: {member.lost}"
            reason = f"it was ended, to be replaced: {replaced}" if replaced else reason
            _emit("WorkerLostEvent", worker, reason=redact(reason), restarted=restarted)

    def _start_workers(self, count: int) -> bool:
        """Start so many, and the keeper if it has ended. False: that failed, and is tried again later."""
        try:
            if self._keeper_ended:
                self._start_keeper()
            for _ in range(count):
                self._spawn_one()
        except WorkerStartFailed as error:
            self._start_failed(error)
            return False
        except Exception as error:  # a factory that fails now and did not before
            failure = WorkerStartFailed(f"a worker could not be started: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._start_failed(failure)
            return False
        return True

    def _start_failed(self, failure: WorkerStartFailed, worker: LocalWorker | None = None) -> None:
        """A worker did not become ready: try again later, and see what to tell those who wait for one."""
        now, starts = clock.now(), self._starts
        pause = starts.failed(now)
        self._trouble = failure.message
        if starts.hopeless and not self._members:
            self._stop_trying()
            failure.args = (f"{failure.args[0]}. It was the {DEATHS}th to do so within {WITHIN:g} s",)
            self._tell_waiting(failure)
        else:
            self._try_again_in(pause)
            left = any(member.view == "ready" for member in self._members.values())
            if self._state == "open" and not left and starts.keeps_failing(now):
                text = f"no worker is left, and starting one has failed {starts.failed_tries} times in a row"
                failure.args = (f"{text}: {failure.args[0]}. The pool tries again in {pause:.1f} s",)
                self._tell_waiting(failure)
        if worker is not None and self._spawner is not None:
            worker.clean_up(self._spawner)
        retry_in = None if self._next_try is None else pause
        reason, tries = redact(self._trouble), starts.failed_tries
        _emit("WorkerNotStarted", worker, reason=reason, failed_tries=tries, retry_in=retry_in)

    def _try_again_in(self, seconds: float) -> None:
        self._stop_trying()
        self._next_try = asyncio.get_running_loop().call_later(seconds, self._try_again)

    def _try_again(self) -> None:
        """A pause is over: start one worker as a trial. The others follow when it is ready."""
        self._next_try = None
        self._starts.trying()
        if self._state in ("starting", "open") and len(self._members) < self._size:
            if self._start_workers(1):
                self._try_again_in(LONGEST)  # one that hangs while it starts does not keep the others from being tried
            self._tell_change()

    def _why_none(self) -> str:
        """Why there may be no worker: the last start failed. Called on other threads too."""
        return f"; the last start of a worker failed: {self._trouble}" if self._starts.failed_tries else ""

    def _start_works(self) -> None:
        """A worker is ready: start whatever is missing, at once."""
        self._starts.ready()
        self._stop_trying()
        if self._failure is not None:
            self._tell_waiting(None)
        if self._state in ("starting", "open") and len(self._members) < self._size:
            self._start_workers(self._size - len(self._members))

    def _stop_trying(self) -> None:
        timer, self._next_try = self._next_try, None
        if timer is not None:
            timer.cancel()

    def _tell_waiting(self, error: WorkerStartFailed | None) -> None:
        """Have callers who find no worker raise this; None: have them wait for one, as usual."""
        self._failure = error
        for loop, proxy in list(self._proxies.items()):
            _on(loop, proxy.fail, error)

    def _keeper_gone(self) -> None:
        """The keeper was killed, and the kernel has killed its workers: begin anew."""
        if self._state not in ("open", "starting") or self._spawner is None:
            return
        old = self._spawner
        members = [*self._members.values(), *self._leaving.values()]
        self._keeper_ended = True
        self._forks = any(member.view == "ready" for member in members)  # else it may have been the template's fault
        self._farewell = asyncio.get_running_loop().create_task(old.close())
        for member in members:
            self._members.pop(member.worker.uid, None)
        for member in members:
            self._exited(member, {"event": "gone"})
        end_strays(old.directory)

    def _on_lost(self, metadata: WorkerMetadata, reason: str) -> None:
        """A proxy cannot reach a worker of ours: it is replaced, so it must not live on."""
        if self._loop is not None and not self._loop.is_closed():
            _on(self._loop, self._kill, metadata.uid, reason)

    def _kill(self, uid: str, reason: str) -> None:
        member = self._members.get(uid) or self._leaving.get(uid)
        if self._spawner is not None and self._state == "open" and member is not None:
            if not is_dead(member.worker.pid):
                member.lost = member.lost or reason
            self._spawner.signal(uid, signal.SIGKILL)

    def _on_retiring(self, uid: str, reason: str, at_once: bool) -> None:
        """Routines keep a worker of ours from its work, as it says itself, or as is seen from outside."""
        if self._loop is not None and not self._loop.is_closed():
            _on(self._loop, self._retire, uid, reason, at_once)

    def _retire(self, uid: str, reason: str, at_once: bool) -> None:
        """Put another in its place: when it has ended, or, if it finishes what it has, now."""
        member = self._members.get(uid) or self._leaving.get(uid)
        if member is None or self._spawner is None or self._state != "open":
            return
        if at_once:
            member.replaced = member.replaced or reason
            self._spawner.signal(uid, signal.SIGKILL)
        if at_once or member.stopping:
            return
        member.stopping = True
        del self._members[uid]
        self._leaving[uid] = member
        self._discovery.announce("worker-dropped", member.worker.described())
        _emit("WorkerReplaced", member.worker, reason=redact(reason))
        if self._failure is None and len(self._members) < self._size:
            self._start_workers(1)

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
        if self._loop is not asyncio.get_running_loop():
            self._abandon()
            return
        hurry = kind is not None and not issubclass(kind, Exception)
        closing = asyncio.get_running_loop().create_task(self._finish(hurry=hurry))
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

    def _abandon(self) -> None:
        """It is left on another loop than it was entered on: the keeper ends everything."""
        self._state = "closed"
        registry.unregister(self)
        if self._spawner is not None:
            self._spawner.let_go()
            self._spawner.wait()

    async def _finish(self, *, hurry: bool) -> None:
        """Refuse, drain, cancel, drop, stop, close: in this order."""
        self._stop_trying()
        try:
            for loop, proxy in list(self._proxies.items()):
                _on(loop, proxy.refuse, "it is closing")
            patience = math.inf if self._shutdown_timeout is None else self._shutdown_timeout
            deadline = clock.now() + (0.0 if hurry else patience)
            while self._calls() and clock.now() < deadline and self._state != "hurrying":  # noqa: ASYNC110 - calls of several loops end here
                await asyncio.sleep(0.005)
            await asyncio.gather(
                *(_close_on(loop, proxy) for loop, proxy in list(self._proxies.items())), return_exceptions=True
            )
            if self._discovery is not None:
                for member in list(self._members.values()):
                    if member.view == "ready":
                        self._discovery.announce("worker-dropped", member.worker.described())
            await self._stop_workers()
        finally:
            self._state = "closed"
            registry.unregister(self)
            if self._discovery is not None:
                self._discovery.close()
            if self._spawner is not None:
                await self._spawner.close()
            for context in reversed(self._contexts):
                left = getattr(type(context), "__aexit__", None)
                if left is not None:
                    await left(context, None, None, None)
                else:
                    type(context).__exit__(context, None, None, None)

    def _calls(self) -> int:
        return sum(proxy.calls for loop, proxy in self._proxies.items() if not loop.is_closed())

    async def _stop_workers(self) -> None:
        if self._spawner is None:
            return
        for member in self._members.values():
            member.stopping = True
            self._spawner.signal(member.worker.uid, signal.SIGTERM)
        deadline = clock.now() + _LAST
        while (self._members or self._leaving) and clock.now() < deadline:
            await self._change(deadline - clock.now())
        for uid in (*self._members, *self._leaving):
            self._spawner.signal(uid, signal.SIGKILL)

    def __repr__(self) -> str:
        states = [view.state for view in self.workers()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"<WorkerPool {self._state}{': ' + counts if counts else ''}>"


def _emit(name: str, worker: LocalWorker | None, **fields: Any) -> None:
    """Tell whoever listens to workers. None: it concerns one that was not even made."""
    from headgate.workers import events

    if events.WORKERS.listeners:
        uid, pid = ("", 0) if worker is None else (worker.uid, worker.pid)
        event = getattr(events, name)(at=clock.wall(), uid=uid, pid=pid, **fields)
        events.WORKERS.emit(event)


def _on(loop: asyncio.AbstractEventLoop, fn: Callable[..., Any], *args: Any) -> None:
    """Call it on that loop, at once if that is this one."""
    if asyncio._get_running_loop() is loop:
        fn(*args)
        return
    try:
        loop.call_soon_threadsafe(fn, *args)
    except RuntimeError:  # it is closed
        pass


async def _close_on(loop: asyncio.AbstractEventLoop, proxy: Any) -> None:
    """Close a proxy on its own loop. One that is busy or ends meanwhile is not waited for."""
    if loop.is_closed():
        proxy.abandon()
    elif loop is asyncio.get_running_loop():
        await proxy.close("it was closed")
    elif loop.is_running():
        closing = asyncio.run_coroutine_threadsafe(proxy.close("it was closed"), loop)
        await asyncio.wait([asyncio.wrap_future(closing)], timeout=_LAST)
