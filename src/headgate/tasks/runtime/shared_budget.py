"""The budget of a pool that other processes share: starts what the answers of the store allow.

`Share` decides what is said and what an answer means, and `sharing.link.Link` carries it: this connects both with the
executor. The event loop of the pool never waits for the store: an answer arrives in the thread of the store and is
posted to the loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from headgate.core.checks import checked_flag, checked_whole
from headgate.core.clock import clock
from headgate.core.fences import FENCED, Fenced
from headgate.errors import HeadgateError, InvalidArgument, StoreFormatTooNew
from headgate.sharing.link import CONNECT, Answer, Link
from headgate.sharing.slots import SLOTS, Said, Settings, Told
from headgate.sharing.states import ClockOffset, SharedState
from headgate.tasks.events import POOLS, PoolLeaseLost, PoolSettingsDiffer, PoolStoreTrouble
from headgate.tasks.model import Scope, TaskRecord, View
from headgate.tasks.scheduling.idempotency import work_of
from headgate.tasks.scheduling.share import Share
from headgate.tasks.scheduling.shared_queue import token_of
from headgate.tasks.strategies import FairRoundRobin, FairShare, Strategy

if TYPE_CHECKING:
    from headgate.tasks.runtime.executor import Executor

_LEAVING: Final = 2.0
_KEPT: Final = 0.05
"""Seconds that a slot is kept for tasks that are submitted soon, while there is no other member. Longer would gain
little, and who is stopped meanwhile (SIGSTOP) keeps such slots from those who come."""
_TURNS: Final = 2
"""Turns of the event loop that a message waits. Whoever awaits a task is told of its end in the next turn, and often
submits another one then: a message of its own for that would cost as much as the first, and in the same moment those
who are granted the slot exchange too (`benchmarks/shared.py`, slots busy)."""
_AGAIN: Final = 1.0
"""Seconds until a message is sent again that the store could not write."""

OnLeaseLost = Literal["finish", "cancel"]


class SharedBudget:
    """Connects one pool with the budget that it shares. Implements `sharing.link.Sharer` on the loop of the pool."""

    def __init__(
        self,
        state: SharedState,
        key: str,
        settings: Settings,
        *,
        counts: bool,
        fencing: bool,
        on_lease_lost: OnLeaseLost,
    ) -> None:
        """`counts` says whether backpressure counts the queued tasks of all members."""
        self.share: Share = Share(
            settings, self._changed, fencing=fencing, kept=self._on_kept, clock=lambda: clock.now()
        )
        self.fencing: bool = fencing
        self.reachable: bool = True
        """Did the store answer when it was last asked?"""
        self.as_of: float | None = None
        """When the newest answer came, in Unix seconds."""
        self._state = state
        self._link = Link(self, state, key, SLOTS, "no task starts", post=partial(_post, weakref.ref(self)))
        self._made_with = settings
        self._counts = counts
        self._on_lease_lost = on_lease_lost
        self._executor: Executor | None = None
        self._host = socket.gethostname()
        self._pid = os.getpid()
        self._scheduled = self._is_due = False
        self._told_trouble = False
        self._lost: list[TaskRecord] | None = None  # what ran when the lease was lost, if that is still to be told
        self._is_of_parent = False  # this is a forked child, and its parent has bound the pool to an event loop
        self._kept_at = 0.0  # when a slot was last kept, by the clock of the loop
        self._keeping: asyncio.TimerHandle | None = None
        self._trying: asyncio.TimerHandle | None = None

    # -- joining and leaving -------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Take part; blocks until the store has answered.

        Raises StoreUnreachable and whatever else `SharedState.connect` says.
        """
        self._state.connect(CONNECT)
        self._link.start(answer := Answer())
        if (error := answer.wait()) is not None:
            raise error

    def attach(self, executor: Executor) -> None:
        """Work for this executor from now on."""
        self._executor = executor
        self.share.queue.is_valid = self._is_valid
        self.share.has_returning = lambda: bool(executor.scheduler.slots.returning)
        if self.fencing:
            executor.before_each(self._set_fence)
        executor.pauses.shared_by(self._apply_now)
        executor.pauses.tell()
        stored, own = self.share.settings._replace(paused=False, paused_tenants=frozenset()), self._made_with
        if stored != own and POOLS.listeners:
            about = {"pool_id": executor.id, "pool": executor.name}
            POOLS.emit(PoolSettingsDiffer(at=clock.wall(), **about, own=_described(own), shared=_described(stored)))

    def _set_fence(self, task: TaskRecord) -> None:
        """Let `headgate.current_task().fence` be known to the code of a task."""
        fence = self.share.fences.get(task)
        if fence is not None and task.context is not None:
            parent, tenant = task.parent, task.partition
            caller = None if parent is None else f"{parent.owner.id}/{parent.number}"
            function = work_of(task.fn, ())[0].replace(":", ".")
            whose = tenant if tenant is None or isinstance(tenant, str) else repr(tenant)
            task.context.run(FENCED.set, Fenced(f"{task.owner.id}/{task.number}", caller, function, whose, fence))

    def _is_valid(self) -> bool:
        return not self._link.is_revoked and clock.now() < self._state.deadline

    async def leave(self) -> None:
        """Leave. Waits for the store, but not forever: a process that ends is gone anyway."""
        if self._link.is_stopped or self._executor is None:
            return
        try:
            async with asyncio.timeout(_LEAVING):
                while self._link.is_busy and self.reachable:
                    await self.settled()
                left = asyncio.wrap_future(self._leave())
                left.add_done_callback(lambda one: one.cancelled() or one.exception())  # nobody asks how it ended
                await asyncio.wait([left])
        except TimeoutError:
            self.abandon()

    def abandon(self) -> None:
        """Leave without waiting: the store is told when it answers."""
        if not self._link.is_stopped:
            self._leave()
        elif not self._link.has_left:
            self._link.abandon()

    def _leave(self) -> Future[Any]:
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        return self._link.leave(self._said(leaves=True))

    # -- sending -------------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Send a message soon: in the next turns of the loop more may change."""
        loop = None if self._executor is None else self._executor.loop
        if loop is None or self._link.is_stopped:
            return
        if loop.is_closed():
            self._outlived()
        elif not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._send_after, _TURNS, loop, context=Context())

    def _send_after(self, turns: int, loop: asyncio.AbstractEventLoop) -> None:
        if turns:
            loop.call_soon(self._send_after, turns - 1, loop)
        else:
            self._scheduled, self._is_due = False, True
            self._link.send()
            self._is_due = False

    def _on_kept(self) -> None:
        """Give kept slots back when none was kept or used for a while; at once if a lender waits for one."""
        executor = self._executor
        loop = None if executor is None else executor.loop
        if executor is None or loop is None or loop.is_closed() or executor.scheduler.slots.returning:
            self._changed()
        elif not self._link.is_stopped:
            self._kept_at = loop.time()
            if self._keeping is None:
                self._keeping = loop.call_later(_KEPT, self._look_at_kept, loop, context=Context())

    def _look_at_kept(self, loop: asyncio.AbstractEventLoop) -> None:
        self._keeping = None
        left = self._kept_at + _KEPT - loop.time()
        if self.share.kept and left > 0:
            self._keeping = loop.call_later(left, self._look_at_kept, loop)
        elif self.share.kept:
            self._changed()

    def _said(self, *, leaves: bool = False) -> Said:
        executor = self._executor
        returning = () if executor is None else list(executor.scheduler.slots.returning)
        blocked = self._counts and executor is not None and bool(executor.submit_queue.line)
        origin = (self._host, self._pid)
        return self.share.message(clock.now(), origin, returning, counts=self._counts, blocked=blocked, leaves=leaves)

    def post(self, callback: Callable[..., object], *args: Any) -> bool:
        """Call this on the loop of the pool. May be called from any thread. Returns False if there is no loop.

        A forked child leaves the loop of its parent alone: to wake it would wake the parent.
        """
        loop = None if self._executor is None or self._is_of_parent else self._executor.loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._outlived()
            return False
        return True

    def _outlived(self) -> None:
        """Take part no longer: the event loop was closed around the pool, and this process may go on for long.

        Called in any thread: nothing runs in the pool any more.
        """
        executor = self._executor
        if executor is not None and executor.state != "closed" and not self._is_of_parent:
            self.abandon()

    # -- what the link asks --------------------------------------------------------------------------------------------

    def message(self, now: float, *, looks: bool) -> Said | None:
        """What is to be told; None: that is told in a moment, with what happens until then."""
        if not looks and not self._is_due:
            self._changed()
        if looks:  # somebody else has changed something
            self.share.contended()
        return None if self._scheduled else self._said()

    def take(self, said: Said, told: Told, offset: ClockOffset, now: float, *, is_current: bool) -> bool:
        """Take an answer, unless it speaks of slots that are not ours any more."""
        self._told_trouble = False
        if is_current:
            self.reachable = True
            self.share.take(told, offset, now)
            self.as_of = clock.wall()
        return False

    def carry_out(self) -> None:
        """Start what may start, and give back what nothing here can use."""
        lost, self._lost = self._lost, None
        if self._executor is not None:
            if lost is not None:
                self._tell_lost(self._executor, lost)
            self._executor.pauses.tell()
            self._executor.pump()
        if self.share.has_unused():
            self._changed()

    def failed(self, said: Said, error: BaseException) -> None:
        """The store could not write, or was closed: nothing starts. It is tried again."""
        self.warn(error.message if isinstance(error, HeadgateError) else type(error).__qualname__)
        if isinstance(error, StoreFormatTooNew):  # pools of the newer release take part, and we do not hear of them
            self.share.contended()
        executor = self._executor
        loop = None if executor is None or executor.state == "closed" else executor.loop
        if loop is not None and self._trying is None:
            self._trying = loop.call_later(_AGAIN, self._try_again, context=Context())

    def _try_again(self) -> None:
        self._trying = None
        self._changed()

    def forget(self, now: float, *, forked: bool = False) -> None:
        """Take part anew: what this pool held belongs to others, and what runs is counted by nobody."""
        executor = self._executor
        running = [] if executor is None else list(executor.scheduler.slots.holders())
        was_member = bool(self.share.me)
        self.share.lose(running)
        if forked:
            self._pid, self._scheduled, self._lost = os.getpid(), False, None
            self._is_of_parent = executor is not None and executor.loop is not None
        elif was_member:
            self._lost = running

    def _tell_lost(self, executor: Executor, running: list[TaskRecord]) -> None:
        if POOLS.listeners:
            about = {"pool_id": executor.id, "pool": executor.name}
            POOLS.emit(PoolLeaseLost(at=clock.wall(), **about, running=len(running), action=self._on_lease_lost))
        if self._on_lease_lost == "cancel":
            for task in running:
                executor.cancel(task)

    def set_alone(self, now: float, *, alone: bool, why: Exception | None = None) -> None:
        """Start nothing while the store does not answer."""
        self.reachable = not alone
        if why is not None:
            self.warn(why.message if isinstance(why, HeadgateError) else type(why).__qualname__)
        elif alone:
            self.share.contended()
            self.share.end_blocks()

    def warn(self, what: str) -> None:
        """Report that the store does not answer, cannot write or cannot be used: once until it works again."""
        self.reachable = False
        self.share.end_blocks()
        executor = self._executor
        if executor is not None and not self._told_trouble and POOLS.listeners:
            self._told_trouble = True
            POOLS.emit(PoolStoreTrouble(at=clock.wall(), pool_id=executor.id, pool=executor.name, error=what))

    # -- what the pool asks --------------------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Return when an exchange is over that began after this call, or when the store does not answer."""
        self._changed()
        if self.reachable:
            future = asyncio.get_running_loop().create_future()
            self._link.wait_for_next(lambda error: None if future.done() else future.set_result(None))
            await future

    def resize(self, limit: int) -> None:
        """Set the limit, for all members."""
        self.share.resize(limit)
        self._apply_now()

    def limit_keys(self, limits: int | Mapping[Hashable, int] | None) -> None:
        """Set how many slots a tenant may hold, for all members."""
        self.share.limit_tenants(_caps_of(limits))
        self._apply_now()

    def _apply_now(self) -> None:
        """Have the others know of a change if no event loop will tell them soon."""
        executor = self._executor
        if executor is not None and executor.loop is None:
            self._link.send(looks=True, then=(answer := Answer()))
            if (error := answer.wait()) is not None:
                raise error

    def view(self) -> View:
        """What is known of all members: slots and queued tasks, together and of each."""
        share = self.share
        own = {"held": share.held, "queued": len(share.queue)}  # as it is now: not all is told at once
        members = [
            {**one._asdict(), **(own if one.id == share.me else {}), "is_this_pool": one.id == share.me}
            for one in share.members
        ]
        return View(
            {
                "active": sum(one["held"] for one in members),
                "queued": sum(one["queued"] for one in members),
                "members": tuple(View(one) for one in members),
                "held": share.held,
                "alone": share.alone,
                "reachable": self.reachable,
                "as_of": self.as_of,
            }
        )


def _post(budget: weakref.ref[SharedBudget], call: Callable[[], object]) -> bool:
    known = budget()
    return known is not None and known.post(call)


def shared_settings(strategy: Strategy, limit: int, key_limits: int | Mapping[Hashable, int] | None) -> Settings:
    """What a pool with this strategy and these limits shares.

    Raises InvalidArgument if the strategy cannot be shared as it is.
    """
    weights: dict[str, float] | None = None
    if isinstance(strategy, FairShare) and strategy.weights is not None:
        if not isinstance(strategy.weights, Mapping):
            raise InvalidArgument(
                "weights of a pool that processes share must be a mapping: a function cannot be known to the others",
                remedy='Pass something like {"acme": 3.0}.',
            )
        weights = {token_of(tenant): weight for tenant, weight in strategy.weights.items()}
    levels = isinstance(strategy, (FairRoundRobin, FairShare)) and strategy.levels
    return Settings(limit, strategy.kind, weights, _caps_of(key_limits), levels)


def _caps_of(limits: int | Mapping[Hashable, int] | None) -> int | dict[str, int] | None:
    return {token_of(key): cap for key, cap in limits.items()} if isinstance(limits, Mapping) else limits


def _described(settings: Settings) -> dict[str, Any]:
    return {
        "max_concurrent": settings.limit,
        "queue": settings.kind,
        "weights": settings.weights,
        "max_concurrent_per_key": settings.caps,
        **({"levels": True} if settings.levels else {}),
    }


def checked_limit(scope: Scope, max_concurrent: object) -> int | None:
    """How many tasks run at most; None: as many as the budget of the ports says, or one."""
    if max_concurrent is None and scope in ("tenant", "org"):
        raise InvalidArgument(
            f"max_concurrent is not given, and the scope {scope!r} shares it between processes",
            remedy="Pass how many tasks may run at a time in all of them together: max_concurrent=5.",
        )
    return None if max_concurrent is None else checked_whole("max_concurrent", max_concurrent, 1)


def checked_sharing(scope: Scope, fencing: object, on_lease_lost: object) -> tuple[bool, OnLeaseLost]:
    """Check the options that only pools of the scopes "tenant" and "org" have."""
    fences = checked_flag("fencing", fencing)
    if on_lease_lost not in ("finish", "cancel"):
        raise InvalidArgument(f"on_lease_lost must be 'finish' or 'cancel', got {on_lease_lost!r}")
    if scope not in ("tenant", "org") and (fences or on_lease_lost != "finish"):
        raise InvalidArgument(
            f"fencing= and on_lease_lost= are for budgets that processes share, and the scope is {scope!r}",
            remedy='Pass scope="tenant" or "org" too, or leave them out.',
        )
    return fences, on_lease_lost
