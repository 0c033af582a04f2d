"""Idempotency keys of pools that share a budget: who runs a key, and how the others get its result.

`sharing/claims.py` decides; this asks the store, runs what is ours, and follows what is not. A task that follows
another process is a task of this pool like any other, except that it is set aside and never gets a slot: it can be
awaited, cancelled (which only stops following) and waited for by other tasks, which lend their slots meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import IdempotencyConflict, StoreWriteFailed, TaskFailed
from headgate.sharing import claims
from headgate.sharing.states import Outcome, SharedState
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
        self._serials = count(1)
        self._locks: dict[str, asyncio.Lock] = {}
        self._following: dict[TaskRecord, Callable[[], None]] = {}  # and how to stop listening
        self._looking: set[TaskRecord] = set()  # of which the store is being asked
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
        work = claims.Work(function, digest_of(function, given), task.terms.window)
        serial = next(self._serials)
        reruns = self._results.reruns
        answer = await self._ask(key, partial(claims.claim, serial, work, reruns=reruns))
        if answer.kind != "yours":
            self._refuse_other_work(key, work, given, answer)
            submitter.set_aside(task)
            self._listen(task, key, partial(claims.follow, answer.owner, serial, work, reruns=reruns))
            self._heard(task, key, answer)
            return task
        try:
            entered = submitter.enter(fn, args, options, wait=True)
            handle = await submitter.exchanged(entered, options.get("wait_timeout"), self._budget)
        except BaseException:
            self._post(key, partial(claims.release, answer.owner))
            raise
        handle.on_end(partial(self._settle, key, answer.owner))
        return handle

    def _refuse_other_work(self, key: str, work: claims.Work, given: tuple[Any, ...], answer: claims.Answer) -> None:
        known = answer.work
        if known is None or self._on_conflict == "trust_key":
            return
        if differs := digest_difference(known.function, known.digest, work.function, given):
            raise IdempotencyConflict(
                f"the idempotency_key {key!r} is held by a task of another process, which is other work: {differs}"
            )

    # -- following -----------------------------------------------------------------------------------------------------

    def _listen(self, task: TaskHandle[Any], key: str, step: Callable[..., Outcome]) -> None:
        ears = _Ears(lambda: self._budget.post(self._look, task, key, step))
        self._following[task] = self._state.listen(self._row(key), ears)
        task.on_end(self._stop_following)

    def _stop_following(self, task: TaskRecord) -> None:
        stop = self._following.pop(task, None)
        if stop is not None:
            stop()

    def _look(self, task: TaskHandle[Any], key: str, step: Callable[..., Outcome]) -> None:
        """Ask again: the task that is followed has ended, or its process is gone.

        Once at a time: the second answer would speak of a claim that the first has made.
        """
        if task in self._following and not task.finished and task not in self._looking:
            self._looking.add(task)
            future = self._state.transact(self._row(key), step, durable=True)
            future.add_done_callback(lambda done: self._budget.post(self._looked, task, key, done))

    def _looked(self, task: TaskHandle[Any], key: str, future: Future[claims.Answer]) -> None:
        self._looking.discard(task)
        if task in self._following and not task.finished and not future.cancelled() and future.exception() is None:
            self._heard(task, key, future.result())
        elif not future.cancelled() and future.exception() is None and future.result().kind == "yours":
            self._post(key, partial(claims.release, future.result().owner))  # nobody here wants it any more

    def _heard(self, task: TaskHandle[Any], key: str, answer: claims.Answer) -> None:
        if answer.kind == "ended" and answer.ended is not None:
            self._end(task, *_outcome(task, answer.ended, self._results.types))
        elif answer.kind == "yours":  # the process that ran it is gone: it is run here
            self._stop_following(task)
            task.on_end(partial(self._settle, key, answer.owner))
            self._executor.scheduler.enqueue(task)
            self._executor.pump()

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

    def _settle(self, key: str, owner: str, task: TaskRecord) -> None:
        if task.status == "cancelled" and task.outcome is not None:
            self._post(key, partial(claims.release, owner))  # with its parent: the first of those who follow it runs it
            return
        ended = _ended(task)
        if not ended.is_lost:
            self._post(key, partial(claims.settle, owner, ended))
            return
        self._losses.tell(task.outcome)
        # With "rerun" the key is free: those who follow it ask again, and the first of them runs it.
        reruns = self._results.reruns
        self._post(key, partial(claims.release, owner) if reruns else partial(claims.settle, owner, ended))

    def _post(self, key: str, step: Callable[..., Outcome]) -> None:
        future = self._state.transact(self._row(key), step, durable=True)
        self._settling.add(future)
        future.add_done_callback(lambda done: self._budget.post(self._posted, key, step, done))

    def _posted(self, key: str, step: Callable[..., Outcome], future: Future[Any]) -> None:
        """Try again what the store could not write: otherwise the key would be taken until this process ends."""
        self._settling.discard(future)
        loop = self._executor.loop
        if not future.cancelled() and isinstance(future.exception(), StoreWriteFailed) and loop is not None:
            loop.call_later(_AGAIN, self._post, key, step)

    async def _ask(self, key: str, step: Callable[..., Outcome]) -> claims.Answer:
        future: Future[claims.Answer] = self._state.transact(self._row(key), step, durable=True)
        return await asyncio.wrap_future(future)

    async def settled(self, timeout: float) -> None:
        """Return when the store knows of all ends, or after `timeout` seconds."""
        futures = [asyncio.wrap_future(future) for future in list(self._settling)]
        if futures:
            await asyncio.wait(futures, timeout=timeout)

    def _row(self, key: str) -> str:
        return f"key/{self._executor.id}/{key}"


class _Ears:
    """Listens to one key. Called in the thread of the store."""

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look

    def woken(self) -> None:
        self._look()

    def lost(self) -> None:
        self._look()

    def unreachable(self, error: Exception) -> None:
        """Do nothing: `woken` is called when the store answers again."""


def _ended(task: TaskRecord) -> claims.Ended:
    outcome = task.outcome
    if task.status == "completed":
        kept = encode(outcome)
        return claims.Ended("completed", kept, is_lost=is_opaque(kept))
    if task.status == "failed":
        kind = type(outcome.error)
        return claims.Ended("failed", None, (f"{kind.__module__}:{kind.__qualname__}", redact(outcome.told.text)))
    if task.status == "rejected":
        return claims.Ended("rejected", None, (outcome.reason, outcome.policy))
    return claims.Ended(task.status)


def _outcome(task: TaskRecord, ended: claims.Ended, types: ResultTypes) -> tuple[Any, Any]:
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
