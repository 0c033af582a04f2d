"""The budget of a pool that other processes share: sends messages to the store, and starts what the replies allow.

`Share` decides what is said and what a reply means; this carries it out. At most one exchange of a pool is under way,
and it carries everything since the one before. The event loop of the pool never waits for the store: a reply arrives in
the thread of the store and is posted to the loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from headgate.core.checks import checked_flag, checked_whole
from headgate.core.clock import clock
from headgate.core.fences import FENCED, Fenced
from headgate.errors import HeadgateError, InvalidArgument, StoreUnreachable
from headgate.sharing.slots import Message, Reply, Settings, exchange
from headgate.sharing.states import Outcome, Seen, SharedState
from headgate.tasks.events import POOLS, PoolLeaseLost, PoolSettingsDiffer, PoolStoreTrouble
from headgate.tasks.model import Scope, TaskRecord, View
from headgate.tasks.scheduling.idempotency import work_of
from headgate.tasks.scheduling.queues.shared import token_of
from headgate.tasks.scheduling.share import Share
from headgate.tasks.strategies import FairShare, Strategy

if TYPE_CHECKING:
    from headgate.tasks.runtime.executor import Executor

CONNECT: Final = 10.0
"""Seconds that the constructor of a pool waits for its store."""
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
    """Connects one pool with the budget that it shares."""

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
        """When the newest reply came, in Unix seconds."""
        self.revoked: bool = False
        """Was the lease lost, and the loop of the pool does not know yet? Set in the thread of the store."""
        self._state = state
        self._key = key
        self._made_with = settings
        self._counts = counts
        self._on_lease_lost = on_lease_lost
        self._executor: Executor | None = None
        self._pid = os.getpid()
        self._host = socket.gethostname()
        self._scheduled = False
        self._under_way = False
        self._again = False
        self._left = False
        self._epoch = 0  # of the membership: replies of an earlier one are not for us
        self._waiting: list[asyncio.Future[None]] = []  # who waits for the exchange that comes next
        self._told_trouble = False
        self._kept_at = 0.0  # when a slot was last kept, by the clock of the loop
        self._keeping: asyncio.TimerHandle | None = None
        self._stop_listening: Callable[[], None] | None = None

    # -- joining -------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Take part; blocks until the store has answered.

        Raises StoreUnreachable and whatever else `SharedState.connect` says.
        """
        self._state.connect(CONNECT)
        self._exchange_now()

    def _exchange_now(self) -> None:
        """Exchange, and block until the store has answered: there is no event loop yet."""
        self._check_process()
        reply = self._asked()
        if reply.lost:
            self._begin_anew()
            reply = self._asked()
        self.share.replied(reply, clock.now())
        self.as_of = clock.wall()

    def _asked(self) -> Reply:
        future: Future[Reply] = self._state.transact(self._key, partial(_step, self._message()))
        try:
            return future.result(CONNECT)
        except FutureTimeout:
            future.cancel()
            raise StoreUnreachable(
                f"{self._state!r} did not answer within {CONNECT:g} s",
                remedy="Look for what holds it up, then try again.",
            ) from None

    def _check_process(self) -> None:
        """Begin anew in a forked child: what the parent has is the parent's."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._begin_anew()
            self._listen()

    def attach(self, executor: Executor) -> None:
        """Work for this executor from now on."""
        self._executor = executor
        self.share.queue.is_valid = self._is_valid
        self.share.has_returning = lambda: bool(executor.scheduler.slots.returning)
        if self.fencing:
            executor.on_start = self._set_fence
        self._listen()
        stored, own = self.share.settings, self._made_with
        if stored != own and POOLS.listeners:
            about = {"pool_id": executor.id, "pool": executor.name}
            POOLS.emit(PoolSettingsDiffer(at=clock.wall(), **about, own=_described(own), shared=_described(stored)))

    def _listen(self) -> None:
        if self._stop_listening is not None:
            self._stop_listening()
        self._stop_listening = self._state.listen(self._key, _Ears(self))

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
        return not self.revoked and clock.now() < self._state.deadline

    # -- sending -------------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Send a message soon: in the next turns of the loop more may change."""
        loop = None if self._executor is None else self._executor.loop
        if loop is None or self._left:
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
            self._send()

    def _on_kept(self) -> None:
        """Give kept slots back when none was kept or used for a while; at once if a lender waits for one."""
        executor = self._executor
        loop = None if executor is None else executor.loop
        if executor is None or loop is None or loop.is_closed() or self._left or executor.scheduler.slots.returning:
            self._changed()
        else:
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

    def _message(self, *, leaves: bool = False) -> Message:
        executor = self._executor
        returning = () if executor is None else list(executor.scheduler.slots.returning)
        blocked = self._counts and executor is not None and bool(executor.submit_queue.line)
        origin = (self._host, self._pid)
        return self.share.message(clock.now(), origin, returning, counts=self._counts, blocked=blocked, leaves=leaves)

    def _send(self) -> None:
        self._scheduled = False
        if self._under_way or self._left:
            self._again = True
            return
        self._check_process()
        self._under_way, self._again = True, False
        waiting, self._waiting = self._waiting, []
        future = self._state.transact(self._key, partial(_step, self._message()))
        future.add_done_callback(partial(self._post, waiting, self._epoch))

    def _post(self, waiting: list[asyncio.Future[None]], epoch: int, future: Future[Reply]) -> None:
        """Pass a reply on to the loop of the pool. Runs in the thread of the store."""
        self.post(self._answered, waiting, epoch, future)

    def post(self, callback: Callable[..., None], *args: Any) -> bool:
        """Call this on the loop of the pool. May be called from any thread. Returns False if there is no loop."""
        loop = None if self._executor is None else self._executor.loop
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

        Called in any thread: nothing runs in the pool any more. A pool that was let go is another matter: a new one may
        have its name, and then its place among the members.
        """
        executor = self._executor
        if executor is not None and executor.state != "closed" and not self._left and self._pid == os.getpid():
            self.abandon()
            self._state.transact(self._key, partial(_step, self._message(leaves=True)))

    def _answered(self, waiting: list[asyncio.Future[None]], epoch: int, future: Future[Reply]) -> None:
        executor = self._executor
        assert executor is not None, "it sent a message"
        self._under_way = False
        try:
            if epoch == self._epoch:
                self._take(executor, future)
        finally:
            for one in waiting:
                if not one.done():
                    one.set_result(None)
        share = self.share
        if self._again or self._waiting or share.has_unused():
            self._changed()

    def _take(self, executor: Executor, future: Future[Reply]) -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or error is not None:
            self._failed(executor, error)
            return
        reply = future.result()
        self.reachable, self._told_trouble = True, False
        if reply.lost:
            self.lost()
            return
        self.share.replied(reply, clock.now())
        self.as_of = clock.wall()
        executor.pump()

    def _failed(self, executor: Executor, error: BaseException | None) -> None:
        """The store could not write, or was closed: nothing starts. It is tried again."""
        self.trouble(error or StoreUnreachable("the store was closed"))
        if executor.loop is not None and executor.state != "closed":
            executor.loop.call_later(_AGAIN, self._changed, context=Context())

    # -- what the store tells ------------------------------------------------------------------------------------------

    def woken(self) -> None:
        """Look again: somebody wants what this pool has, has granted it something, or is gone."""
        self.share.contended()
        if not self._scheduled and not self._left:
            self._send()  # now: a slot may wait for it, and who is woken has nothing else to say

    def lost(self) -> None:
        """Take part anew: the lease was lost, and what this pool held belongs to others."""
        executor = self._executor
        if executor is None or self._left or not (self.revoked or self.share.member):
            return  # or it has begun anew since, because a reply said so
        running = list(executor.scheduler.slots.holders())
        self._begin_anew()
        if POOLS.listeners:
            about = {"pool_id": executor.id, "pool": executor.name}
            POOLS.emit(PoolLeaseLost(at=clock.wall(), **about, running=len(running), action=self._on_lease_lost))
        if self._on_lease_lost == "cancel":
            for task in running:
                executor.cancel(task)
        self._changed()

    def _begin_anew(self) -> None:
        self.revoked = False
        self._epoch += 1
        self._under_way = False
        holders = [] if self._executor is None else list(self._executor.scheduler.slots.holders())
        self.share.lose(holders)

    def trouble(self, error: BaseException) -> None:
        """Note that the store does not answer, or cannot write. Reported once until it works again."""
        self.reachable = False
        self.share.end_blocks()
        for one in self._waiting:
            if not one.done():
                one.set_result(None)
        self._waiting.clear()
        executor = self._executor
        if executor is not None and not self._told_trouble and POOLS.listeners:
            self._told_trouble = True
            told = error.message if isinstance(error, HeadgateError) else type(error).__qualname__
            POOLS.emit(PoolStoreTrouble(at=clock.wall(), pool_id=executor.id, pool=executor.name, error=told))

    # -- what the pool asks --------------------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Return when an exchange is over that began after this call, or when the store does not answer."""
        if not self.reachable:
            self._changed()
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._changed()
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
            self._exchange_now()

    async def leave(self) -> None:
        """Take part no longer. Waits for the store, but not for ever: a process that ends is gone all the same."""
        if self._left or self._executor is None:
            return
        while self._under_way and self.reachable:
            await self.settled()
        future = self._state.transact(self._key, partial(_step, self._message(leaves=True)))
        self.abandon()
        await asyncio.wait([asyncio.wrap_future(future)], timeout=_LEAVING)
        if not future.done():
            future.cancel()

    def abandon(self) -> None:
        """Hear nothing more from the store."""
        self._left = True
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        if self._stop_listening is not None:
            self._stop_listening()

    def view(self) -> View:
        """What is known of all members: slots and queued tasks, together and of each."""
        share = self.share
        own = {"held": share.held, "queued": len(share.queue)}  # as it is now: not all is told at once
        members = [
            {**one._asdict(), **(own if one.id == share.member else {}), "is_this_pool": one.id == share.member}
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


class _Ears:
    """Listens for a budget, and does not keep it alive. Called in the thread of the store."""

    def __init__(self, budget: SharedBudget) -> None:
        self._budget = weakref.ref(budget)
        self._wakes = False  # was the loop told to look, and has not begun to?

    def woken(self) -> None:
        if not self._wakes:  # others may wake it several times while its loop is busy, and it has to look once
            self._wakes = True
            if not self._pass_on(self._wake):
                self._wakes = False

    def _wake(self, budget: SharedBudget) -> None:
        self._wakes = False
        budget.woken()

    def lost(self) -> None:
        budget = self._budget()
        if budget is not None:
            budget.revoked = (
                True  # now: the loop may be busy, and the lease that is made next must not seem to be this one
            )
        self._pass_on(SharedBudget.lost)

    def unreachable(self, error: Exception) -> None:
        self._pass_on(SharedBudget.trouble, error)

    def _pass_on(self, what: Callable[..., None], *args: object) -> bool:
        budget = self._budget()
        return budget is not None and budget.post(what, budget, *args)


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
    return Settings(limit, strategy.kind, weights, _caps_of(key_limits))


def _caps_of(limits: int | Mapping[Hashable, int] | None) -> int | dict[str, int] | None:
    return {token_of(key): cap for key, cap in limits.items()} if isinstance(limits, Mapping) else limits


def _step(message: Message, text: str | None, seen: Seen) -> Outcome:
    return exchange(text, message, seen)


def _described(settings: Settings) -> dict[str, Any]:
    return {
        "max_concurrent": settings.limit,
        "queue": settings.kind,
        "weights": settings.weights,
        "max_concurrent_per_key": settings.caps,
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
