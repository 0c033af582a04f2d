"""Idempotency keys of pools that share a budget: who runs a key, and how the others get its result.

`sharing/claims.py` decides; this asks the store, runs what is ours, and follows what is not. A task that follows
another process is a task of this pool like any other, except that it is set aside and never gets a slot: it can be
awaited, cancelled (which only stops following) and waited for by other tasks, which lend their slots meanwhile.

Messages go straight to the store. A `sharing.link.Link` for each key would cost a task 13 % more CPU, and most keys
have no use for one: they need two messages and no listener, and a claim is not renewed after a lost lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import IdempotencyConflict, StoreWriteFailed, TaskFailed
from headgate.sharing.claims import Answer, Ask, Ended, Work, exchange_key
from headgate.sharing.protocol import Message, Reply
from headgate.sharing.states import SharedState
from headgate.stores.codec import decode, encode, is_opaque
from headgate.stores.losses import Losses
from headgate.stores.result_types import ResultTypes
from headgate.tasks.model import Dropped, Failure, TaskRecord, TaskStatus, Told
from headgate.tasks.runtime.durable import digest_difference, digest_of
from headgate.tasks.runtime.results import ResultPolicy
from headgate.tasks.scheduling.idempotency import OnConflict, work_of

if TYPE_CHECKING:
    from headgate.tasks.handle import TaskHandle
    from headgate.tasks.runtime.executor import Executor
    from headgate.tasks.runtime.shared_budget import SharedBudget
    from headgate.tasks.runtime.submit import Submitter


_AGAIN: Final = 1.0
"""Seconds until something is written again that the store could not write."""


class SharedKeys:
    """The idempotency keys of one pool, shared with other processes."""

    def __init__(
        self,
        state: SharedState,
        executor: Executor,
        submitter: Submitter,
        budget: SharedBudget,
        results: ResultPolicy,
        on_conflict: OnConflict = "error",
    ) -> None:
        self._state = state
        self._results = results
        self._on_conflict: OnConflict = on_conflict
        self._losses = Losses(f"the pool {executor.name!r}")
        self._executor = executor
        self._submitter = submitter
        self._budget = budget
        self._token = clock.token()[:12]
        self._serials = count(1)
        self._locks: dict[str, asyncio.Lock] = {}
        self._settling: set[Future[Any]] = set()

    async def submit(self, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> TaskHandle[Any]:
        """Run the work of a key, or follow the process that does. The options have a valid `idempotency_key`."""
        key: str = options["idempotency_key"]
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                return await self._submit(key, fn, args, options)
        finally:
            if not lock.locked() and self._locks.get(key) is lock:
                del self._locks[key]

    async def _submit(
        self, key: str, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> TaskHandle[Any]:
        executor, submitter = self._executor, self._submitter
        if executor.states.holder(key, clock.now()) is not None:
            entered = submitter.enter(fn, args, options, wait=True)  # the same handle again, or a conflict
            return await submitter.exchanged(entered, options.get("wait_timeout"), self._budget)
        task = submitter.make(fn, args, options)
        function, given = work_of(fn, args, task.terms.payload_id)
        ask = Ask(Work(function, digest_of(function, given), task.terms.window), self._results.reruns)
        part = _Part(f"key/{executor.id}/{key}", f"{self._token}.{next(self._serials)}")
        try:
            answer: Answer = (await asyncio.wrap_future(self._say(part, ask))).body
        except asyncio.CancelledError:
            self._leave(part)  # the key may be ours already
            raise
        try:
            if answer.kind != "yours":
                self._refuse_other_work(key, ask.work, given, answer.work)
                return self._follow(_Follower(task, part, ask, partial(self._budget.post, self._look)), answer)
            entered = submitter.enter(fn, args, options, wait=True)
            handle = await submitter.exchanged(entered, options.get("wait_timeout"), self._budget)
        except BaseException:
            self._leave(part)
            raise
        handle.on_end(partial(self._settle, part))
        return handle

    def _refuse_other_work(self, key: str, work: Work, given: tuple[Any, ...], known: Work) -> None:
        if self._on_conflict == "trust_key":
            return
        if differs := digest_difference(known.function, known.digest, work.function, given):
            raise IdempotencyConflict(
                f"the idempotency_key {key!r} is held by a task of another process, which is other work: {differs}"
            )

    # -- following -----------------------------------------------------------------------------------------------------

    def _follow(self, follower: _Follower, answer: Answer) -> TaskHandle[Any]:
        task = follower.task
        self._submitter.set_aside(task)
        stop = self._state.listen(follower.part.row, follower)
        task.on_end(lambda _: stop())
        task.on_end(partial(self._followed, follower))
        self._take(follower, answer)
        return task

    def _look(self, follower: _Follower) -> None:
        """Ask again: the task that is followed has ended, or its process is gone.

        Also while an answer is on its way, which may be older than the wake-up. Asking twice changes nothing, and only
        the first answer that ends the wait counts.
        """
        if follower.is_waiting:
            asked = self._say(follower.part, follower.ask)
            asked.add_done_callback(partial(self._budget.post, self._looked, follower))

    def _looked(self, follower: _Follower, future: Future[Reply]) -> None:
        if follower.is_waiting and future.exception() is None:
            self._take(follower, future.result().body)

    def _take(self, follower: _Follower, answer: Answer) -> None:
        task, follower.told = follower.task, answer.kind
        follower.ask = follower.ask._replace(followed=answer.owner)
        if answer.ended is not None:
            self._end(task, *_outcome(task, answer.ended, self._results.types))
        elif answer.kind == "yours":  # the process that ran it is gone: it is run here
            self._executor.scheduler.enqueue(task)
            self._executor.pump()

    def _followed(self, follower: _Follower, task: TaskRecord) -> None:
        if follower.told == "yours":
            self._settle(follower.part, task)
        elif follower.told == "follow":
            self._leave(follower.part)

    def _end(self, task: TaskRecord, status: TaskStatus, outcome: Any) -> None:
        """End a task that another process ran."""
        executor = self._executor
        executor.scheduler.discard(task)
        if status == "completed":
            executor.states.move(task, "running")
        task.outcome = outcome
        executor.conclude(task, status, executor.moment())
        executor.tell_idle()

    # -- the end of what is ours ---------------------------------------------------------------------------------------

    def _settle(self, part: _Part, task: TaskRecord) -> None:
        if task.status == "cancelled" and task.outcome is not None:
            self._leave(part)  # with its parent: the first of those who follow it runs it
            return
        ended = _ended(task)
        if ended.is_lost:
            self._losses.tell(task.outcome)
        # With "rerun" the key is free: those who follow it ask again, and the first of them runs it.
        self._leave(part, None if ended.is_lost and self._results.reruns else ended)

    def _leave(self, part: _Part, ended: Ended | None = None) -> None:
        """Say how the task ended; without that, give the key back or follow it no longer."""
        future = self._say(part, ended)
        self._settling.add(future)
        future.add_done_callback(partial(self._budget.post, self._left, part, ended))

    def _left(self, part: _Part, ended: Ended | None, future: Future[Reply]) -> None:
        """Try again what the store could not write: otherwise the key would be taken until this process ends."""
        self._settling.discard(future)
        loop = self._executor.loop
        if isinstance(future.exception(), StoreWriteFailed) and loop is not None:
            loop.call_later(_AGAIN, self._leave, part, ended)

    def _say(self, part: _Part, body: Ask | Ended | None) -> Future[Reply]:
        message = Message(part.token, None, body, leaves=body is None)
        return self._state.transact(part.row, partial(exchange_key, message), durable=True)

    async def settled(self, timeout: float) -> None:
        """Return when the store knows of all ends, or after `timeout` seconds."""
        futures = [asyncio.wrap_future(future) for future in list(self._settling)]
        if futures:
            await asyncio.wait(futures, timeout=timeout)


class _Part(NamedTuple):
    """The part of one submit in the state of its key."""

    row: str
    token: str


class _Follower:
    """A task that another process runs. Listens to its key, in the thread of the store."""

    def __init__(self, task: TaskHandle[Any], part: _Part, ask: Ask, look: Callable[[_Follower], object]) -> None:
        self.task = task
        self.part = part
        self.ask = ask
        self.told = ""
        self._look = look

    @property
    def is_waiting(self) -> bool:
        return self.told == "follow" and not self.task.finished

    def woken(self) -> None:
        self._look(self)

    def lost(self) -> None:
        self._look(self)

    def unreachable(self, error: Exception) -> None:
        """Do nothing: `woken` is called when the store answers again."""


def _ended(task: TaskRecord) -> Ended:
    outcome = task.outcome
    if task.status == "completed":
        kept = encode(outcome)
        return Ended("completed", kept, is_lost=is_opaque(kept))
    if task.status == "failed":
        kind = type(outcome.error)
        return Ended("failed", None, (f"{kind.__module__}:{kind.__qualname__}", redact(outcome.told.text)))
    if task.status == "rejected":
        return Ended("rejected", None, (outcome.reason, outcome.policy))
    return Ended(task.status)


def _outcome(task: TaskRecord, ended: Ended, types: ResultTypes) -> tuple[Any, Any]:
    """The status and the outcome of a task that another process ran."""
    if ended.status == "completed":
        return "completed", decode(ended.result, types=types)
    if ended.status == "rejected":
        return "rejected", Dropped(*ended.error)
    if ended.status in ("cancelled", "expired"):
        return ended.status, None
    kind, text = ended.error
    error = TaskFailed(f"{task.label} failed in another process with {kind or 'an unknown error'}: {text}")
    return "failed", Failure(error, None, Told(kind, text))
