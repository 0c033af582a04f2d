"""`Verdicts`: tells a ResourcePool what the end of an attempt says about its resource; ends or requeues the task."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, NamedTuple

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import (
    DispatchTimeout,
    NoActivePool,
    NoWorkersAvailable,
    PoolClosed,
    RemoteError,
    RoutineTimeout,
    RpcError,
    WorkerLost,
)
from headgate.resources.http_errors import asked_pause
from headgate.resources.members import Use
from headgate.resources.signals import RetryOperation, Signal
from headgate.tasks.attempts.attempt import Attempt
from headgate.tasks.attempts.supply import ResourceSupply, requirement_of
from headgate.tasks.model import TaskRecord
from headgate.tasks.runtime.functions import explain
from headgate.tasks.runtime.ports import Completion
from headgate.tasks.streams import StreamBody, has_opened

if TYPE_CHECKING:
    from headgate.workers.client.any_function import Placing

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


class Interrupted(asyncio.CancelledError):
    """An attempt was told to stop before its function was called."""


class _Again(NamedTuple):
    """The attempt is over, the task is not: it is to be queued again."""

    reason: str
    spent: bool
    resource_id: str | None
    pause: float = 0.0


class Verdicts:
    """Decides what the end of an attempt means for its resource and for its task."""

    def __init__(self, resources: ResourceSupply | None, placing: Placing | None) -> None:
        self._resources = resources
        self._placing = placing

    def succeeded(self, task: TaskRecord, attempt: Attempt, result: object, completion: Completion) -> None:
        """End a task whose function returned this, or queue it again if the pool's classifier finds a signal in it."""
        try:
            again = self._learn_success(task, attempt, result, completion)
        except BaseException as error:
            if not self.failed(task, attempt, error, completion):
                raise
            return
        if again is None:
            completion.succeeded(task, result)
        else:
            self._end(task, again, completion)

    def failed(self, task: TaskRecord, attempt: Attempt, error: BaseException, completion: Completion) -> bool:
        """End a task whose function raised this, or queue it again. Returns as `Completion.failed` does."""
        return self._end(task, self._outcome(task, attempt, error, completion), completion)

    def started(self, task: TaskRecord) -> None:
        """Tell with what a task runs."""
        attempt: Attempt | None = task.permit
        if self._resources is not None and attempt is not None and attempt.use is not None:
            attempt.use.request_id = attempt.request_id
            self._resources.acquired(attempt.use)

    def forget(self, task: TaskRecord) -> None:
        """Drop what is known of a task that has ended without a result, and tell the ResourcePool."""
        attempt: Attempt | None = task.permit
        error = task.outcome.error if task.status == "failed" else None
        if attempt is not None:
            task.permit = attempt.remains()
            attempt.task = attempt.resource = None
        if self._resources is None:
            return
        if self._resources.calls:
            self._resources.calls.pop(task, None)
        if task.started is not None:
            self._resources.finished(f"{task.owner.id}/{task.number}", error, task.attempt)

    def _end(self, task: TaskRecord, outcome: BaseException | _Again, completion: Completion) -> bool:
        if isinstance(outcome, _Again):
            return completion.requeue(
                task, outcome.reason, spent=outcome.spent, resource_id=outcome.resource_id, pause=outcome.pause
            )
        return completion.failed(task, outcome, self._failures(task))

    def _failures(self, task: TaskRecord) -> int:
        """Attempts that were not verdicts; a task whose verdicts are spent has no other, whatever its `retries`."""
        calls = None if self._resources is None else self._resources.calls
        call = calls.get(task) if calls else None
        if call is None:
            return task.attempt
        return sys.maxsize if call.is_over else task.attempt - len(call.attempts)

    def _learn_success(
        self, task: TaskRecord, attempt: Attempt, result: object, completion: Completion
    ) -> BaseException | _Again | None:
        """The function returned: what the task is to end with instead, if the classifier finds a signal; else None."""
        resources, use = self._resources, attempt.use
        if resources is not None and use is not None:
            if use.level:
                resources.answered(use, result)
            if resources.engine.classify is not None and not isinstance(task.fn, StreamBody):
                signal = resources.judged(use, result)
                if signal is not None:
                    attempt.use = None
                    return self._after(resources, task, use, signal, signal, completion)
            attempt.use = None
            resources.succeeded(use, task, attempt)
            if resources.calls:
                resources.calls.pop(task, None)
        task.permit = attempt.remains()
        attempt.task = attempt.running = None  # the last answer of a worker is held until its next, and with it this
        return None

    def _outcome(
        self, task: TaskRecord, attempt: Attempt, error: BaseException, completion: Completion
    ) -> BaseException | _Again:
        """The function raised: what the task is to end with."""
        if isinstance(error, WorkerLost) and self._placing is not None and error.worker == attempt.worker:
            left = task.terms.retries + 1 - self._failures(task)
            self._placing.losses.note(attempt.request_id, left, error.neighbours)
        resources, use = self._resources, attempt.use
        if resources is None or use is None:
            attempt.running = None
            return error
        resources.ending = True
        try:
            return self._learn(resources, task, attempt, use, error, completion)
        except Exception as broken:  # a signal with a text for a number, or the like: the task ends all the same
            return broken
        finally:
            resources.ending = False
            attempt.running = None  # it holds the Task, which may hold the exception, whose traceback holds the attempt
            resources.dropped(use)  # if nothing else has ended it

    def _learn(
        self,
        resources: ResourceSupply,
        task: TaskRecord,
        attempt: Attempt,
        use: Use,
        error: BaseException,
        completion: Completion,
    ) -> BaseException | _Again:
        """Tell the ResourcePool of an attempt that raised, and return what the task is to end with."""
        use.request_id = attempt.request_id
        attempt.use = None
        if isinstance(error, asyncio.CancelledError):
            # Not by what it says: whatever it passed on its way may have raised another in its place.
            running = attempt.running
            ours = isinstance(error, Interrupted) or (running is not None and running.is_ours(error))
            stopping = completion.asked(task) is not None
            if not ours or not attempt.interrupted or stopping or has_opened(task.fn):
                resources.dropped(use)
                return error
            resources.stopped(use)
            reason = f"{attempt.resource_id}: cancelled by a sibling, an older use of it failed"
            return _Again(reason, False, attempt.resource_id)
        unplaced = self._placing is not None and attempt.worker is None and not attempt.here
        if isinstance(error, _SAYS_NOTHING) or unplaced:
            resources.dropped(use)
            return error
        signal = resources.failed(use, error)
        if isinstance(error, TypeError):
            explain(error, task.fn, (use.member.resource, *task.args))
        return error if signal is None else self._after(resources, task, use, signal, error, completion)

    def _after(
        self,
        resources: ResourceSupply,
        task: TaskRecord,
        use: Use,
        signal: Signal,
        error: BaseException,
        completion: Completion,
    ) -> BaseException | _Again:
        """What follows a verdict: another attempt, or the end if all are spent."""
        if has_opened(task.fn):
            return error
        call = resources.calls.get(task)
        if call is None:
            most = None if task.terms.wish is None else task.terms.wish[1]
            # An error that nobody asked us to judge must not cost the task the retries that it was submitted with.
            retries = task.terms.retries if signal is not error and not resources.classifies else 0
            call = resources.calls[task] = resources.call(requirement_of(task), most, retries)
        resource_id = use.member.resource.resource_id
        reason = f"{resource_id}: {redact(_text(signal))} ({type(signal).__name__})"
        now, budget = clock.now(), task.owner.retry_budget
        if call.failed(use, signal, now, resources.successes):
            completion.attempt_ended(task, reason)
            return resources.exhausted(call)
        pause = 0.0
        if isinstance(signal, RetryOperation):  # it says nothing against the resource: the service may be down
            if task.terms.backoff is not None:
                pause = task.terms.backoff.seconds(call.errors, clock.uniform(0.0, 1.0), asked_pause(error))
            if task.terms.deadline is not None and task.terms.deadline <= now + pause:
                completion.attempt_ended(task, reason)
                return call.out_of_time(None)
            if budget is not None and not budget.take(now):
                completion.attempt_ended(task, reason)
                return call.out_of_budget(budget.why_spent(), resources.engine.retry_after(call, now))
        return _Again(reason, True, resource_id, pause)


def _text(signal: Signal) -> str:
    """What a signal says; its class may be anybody's."""
    try:
        return str(signal.reason or signal)
    except Exception:
        return "it cannot be shown"
