"""The engine of a resource pool: runs operations on resources and carries out what the rotation decided.

It takes time and chance from the clock. Nothing is awaited while the lock is held.

**One lock for all pools.** Pools may share resources, so a transition of one may re-index another. A lock per pool
would need an order among them; one for all needs none, and costs nothing where it matters: a transition takes
microseconds and the interpreter runs one thread of Python at a time anyway. It is reentrant because the garbage
collector may run a caller's ``__del__`` in the middle of a transition, and that may use a pool.

**A call makes no Task.** The first step of an operation is taken at once; only one that suspends is put into a
`core.cancellation.Steered`, the handle by which a sibling or a timeout may stop it.

**Abandoned uses.** A coroutine thrown away half-way ends in GeneratorExit, possibly while this very thread holds the
lock. Its use is then left in `_abandoned`, and ended by the next call of any pool.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context, copy_context
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from headgate.calls.retry_budget import RetryBudget
from headgate.calls.retrying import add_note, is_retried
from headgate.core.cancellation import Steered
from headgate.core.checks import is_finite
from headgate.core.clock import clock
from headgate.core.current_task import CURRENT, current_retry_budget, current_standing
from headgate.core.lessons import Lesson
from headgate.core.redaction import redact
from headgate.core.weakrefs import WeakList
from headgate.errors import PoolExhausted
from headgate.resources import events
from headgate.resources.accounts import Account, Refusal, Reservation
from headgate.resources.attempts import AttemptTimeout, Call
from headgate.resources.classification import Classification, Classifier, signal_of
from headgate.resources.costs import Spent
from headgate.resources.current_use import attributed, use_of
from headgate.resources.effects import (
    Cancel,
    Cool,
    Disable,
    Effect,
    Effects,
    Enable,
    Limit,
    Pause,
    Recover,
    Serve,
    Starve,
    Tell,
    Watch,
)
from headgate.resources.http_errors import asked_pause
from headgate.resources.http_status import Answer, headers_of, status_of, was_heard
from headgate.resources.members import CANCEL_REQUESTED, Member, Use, WaitTicket
from headgate.resources.model import Resource
from headgate.resources.operations import coroutine_of, require_operation
from headgate.resources.quota import LEARN
from headgate.resources.rate_limits import RateLimits, read_rate_limits
from headgate.resources.reporting import Reporter
from headgate.resources.rotation import Rotation
from headgate.resources.run_options import Plan
from headgate.resources.signals import CooldownResource, DisableResource, RetryOperation, Signal, signal_in
from headgate.resources.stats import describe
from headgate.resources.wakeups import LoopWaiter, ThreadWaiter, Waiter
from headgate.sharing.link import send_due

if TYPE_CHECKING:
    from headgate.resources.shared_health import SharedHealth

Change = Cool | Disable | Recover | Enable | Limit | Pause
"""What users are told of a resource."""

T = TypeVar("T")
R = TypeVar("R")

lock: threading.RLock = threading.RLock()
"""The lock of all pools, held for each transition."""
_abandoned: deque[Use | WaitTicket] = deque()

_SIBLING, _TIMEOUT = "sibling", "timeout"
_TOO_MANY = 429
_REFUSED = frozenset({_TOO_MANY, 503, 529})
"""The statuses by which a provider says that it takes no more calls now."""
_LAG = 0.05  # seconds; a timer that is later than this means that the event loop stood still
_LATE = 0.01  # seconds from the reservation of a quota to the begin of its use; windows leave room for no more
MOST_ASKED = 4
"""How often a call without a wait mode asks other processes. Each time, somebody else may be quicker."""


class Follower(Protocol):
    """Is told when a pool has one resource less."""

    def changed(self) -> None:
        """A resource was removed or disabled. From any thread."""


class HasEngine(Protocol):
    """A pool that `engine_of` can be asked about."""

    def __engine__(self) -> Engine[Any]: ...


def engine_of(pool: HasEngine) -> Engine[Any]:
    """The engine of a ResourcePool, for other packages of headgate. Internal: users have no need of it."""
    return pool.__engine__()


class Engine(Generic[T]):
    """Runs the calls of one ResourcePool."""

    def __init__(self, rotation: Rotation, reporter: Reporter, plan: Plan, classification: Classification) -> None:
        """`plan` is the plan of calls without options."""
        self.rotation: Rotation = rotation
        self.reporter: Reporter = reporter
        self.plan: Plan = plan
        self.quick: Plan | None = plan
        """The plan of calls that are not counted before one of their attempts fails; None: all are counted."""
        self.retry_budget: RetryBudget | None = None
        """Bounds the retries of all calls; None: nothing does."""
        self.classification: Classification = classification
        self.classify: Classifier | None = classification.of_calls
        self.followers: WeakList[Follower] = WeakList()
        self.shared: SharedHealth | None = None
        """Shares health with other processes, if the pool has a store."""
        self.learns: bool = False
        """Has a resource got a quota because of what answers said, so that the cost of calls matters?"""
        self._alarm: tuple[object, float] | None = None  # the waiter that watches the next cooldown, and its end
        rotation.owner = self

    # -- a call -------------------------------------------------------------------------------------------------------

    async def run(self, operation: Callable[[Resource[T]], Awaitable[R]], plan: Plan) -> R:
        """Await ``operation(resource)`` on the best resource; on a signal try again elsewhere."""
        # The path of every call (benchmarks/resources.py): a Call, which counts attempts, is made only when one fails.
        rotation = self.rotation
        matching = len(rotation.members)
        call = None if plan is self.quick else self.enter(plan)
        use = None
        try:
            while True:
                use = None
                if call is None:
                    try:
                        lock.acquire()  # a `with` would cost twice as much; inside, lest an interrupt falls between
                        now = clock.now()
                        if not rotation.cooling or not rotation.due(now):
                            use = rotation.acquire(now)
                    finally:
                        lock.release()
                    if use is None:
                        call = Call(plan, matching, now)
                    elif events.USAGE.listeners:
                        self.reporter.acquired(use)
                if use is None:
                    use = await self.take(call or self.enter(plan))
                steered: Steered[R] | None = None
                try:
                    context = copy_context() if plan.isolate else None
                    resource = use.member.resource
                    if use.reservation is not None:
                        made: Any = attributed(operation, use, lambda made: coroutine_of(made)[0])
                    else:
                        made = operation(resource) if context is None else context.run(operation, resource)
                    coroutine, cancellable = (made, True) if type(made) is CoroutineType else coroutine_of(made)
                    try:
                        first = coroutine.send(None) if context is None else context.run(coroutine.send, None)
                    except StopIteration as done:
                        result: R = done.value
                    else:
                        steered = Steered(coroutine, first, context)
                        if cancellable:
                            set_handle(use, steered)
                        result = await (steered if plan.timeout is None else bounded(steered, plan.timeout))
                except BaseException as error:
                    call = call or Call(plan, matching, use.acquired_at, started=1)
                    pause = self.failed_attempt(call, use, error, steered)
                    if pause is None:
                        if isinstance(error, TypeError):
                            require_operation(operation)
                        raise
                else:
                    if use.level:
                        self.answered(use, result)
                    signal = None if self.classify is None else self.classified(result)
                    if signal is None:
                        try:
                            lock.acquire()
                            effects = rotation.ok(use, clock.now())
                        finally:
                            lock.release()
                        self.reporter.runs_ok += 1
                        if effects is not None or _abandoned or events.USAGE.listeners or events.RUN.listeners:
                            self.finish_plain(use, 1 if call is None else call.started, effects)
                        return result
                    self.end(use, signal)
                    call = call or Call(plan, matching, use.acquired_at, started=1)
                    pause = self.note_failure(call, use, signal)
                if pause:
                    await asyncio.sleep(pause)
        except BaseException as error:
            self.failed(call, error, use)
            raise

    def finish_plain(self, use: Use, attempts: int, effects: Effects | None) -> None:
        """Carry out and report the end of a call that succeeded."""
        self.carry_out(effects)
        self.reporter.released(use, "ok")
        if events.RUN.listeners:
            self.reporter.run_finished(use.request_id, "ok", attempts)

    def enter(self, plan: Plan) -> Call:
        """Begin a call that keeps count of its attempts."""
        now = clock.now()
        with lock:
            return Call(plan, self.rotation.matching(plan.requirement), now)

    def failed_attempt(
        self, call: Call, use: Use, error: BaseException, steered: Steered[Any] | None = None
    ) -> float | None:
        """End an attempt that raised `error`: what it says about its resource, and whether there is another attempt.

        Returns the seconds until that; None if there is none, and the caller is to get the error. Raises PoolExhausted
        when it was the last attempt that ends with a verdict.
        """
        signal = self.fail(use, error, steered, call.plan)
        return self._pause_after(call, error) if signal is None else self.note_failure(call, use, signal)

    def judged_result(self, call: Call, use: Use, result: object) -> float | None:
        """Learn from the result of an attempt, and let the pool's classifier judge it.

        Returns the seconds until another attempt if it finds a signal, and None if the call is done.
        """
        if use.level:
            self.answered(use, result)
        signal = None if self.classify is None else self.classified(result)
        if signal is None:
            return None
        self.end(use, signal)
        return self.note_failure(call, use, signal)

    def note_failure(self, call: Call, use: Use, signal: Signal) -> float:
        """Count a failed attempt and return the seconds to pause. Raises PoolExhausted when it was the last."""
        call.request_id = call.request_id or use.request_id
        now = clock.now()
        if call.failed(use, signal, now):
            raise call.out_of_attempts(self.retry_after(call, now))
        why = self._why_spent(now) if isinstance(signal, RetryOperation) else None
        if why is not None:
            raise call.out_of_budget(why, self.retry_after(call, now))
        return call.pause(clock.uniform(0.5, 1.5), now) if call.plan.retry_delay else 0.0

    def _pause_after(self, call: Call, error: BaseException) -> float | None:
        """The seconds until a call is tried again after an error that was no verdict; None if it is not."""
        plan = call.plan
        if not isinstance(error, Exception) or call.own_failures >= plan.retries or plan.retry_on is None:
            return None
        if not is_retried(plan.retry_on, error):
            return None
        pause, now = 0.0, clock.now()
        if plan.backoff is not None:
            pause = plan.backoff.seconds(call.own_failures + 1, clock.uniform(0.0, 1.0), asked_pause(error))
        if call.deadline is not None and now + pause >= call.deadline:
            return None
        why = self._why_spent(now)
        if why is not None:
            add_note(error, why)
            return None
        call.own_failures += 1
        return pause

    def _why_spent(self, now: float) -> str | None:
        """Count a retry, or say why none is allowed now."""
        budget = current_retry_budget() or self.retry_budget
        if budget is None:
            return None
        with lock:
            return None if budget.take(now) else budget.why_spent()

    # -- taking a resource --------------------------------------------------------------------------------------------

    async def take(self, call: Call) -> Use:
        """Begin the next use for `call`; waits for a resource if its plan says so, else raises PoolExhausted."""
        if call.plan.waits == "no" and self.shared is None:
            return self._started(call, self._try(call, None))
        taken, asked = None, 0
        while not isinstance(taken, Use):
            waiter = LoopWaiter()
            try:
                taken = self._stand(call, taken, waiter)
            except PoolExhausted:
                asked += 1
                if self.shared is None or asked > MOST_ASKED or not await self.shared.permit_came(call):
                    raise
                continue
            if isinstance(taken, WaitTicket):
                try:
                    await waiter.wait(call.deadline)
                except BaseException:
                    self.let_go(taken)
                    raise
                taken = self._collect(call, taken)
        return self._started(call, taken)

    def take_sync(self, call: Call) -> Use:
        """`take` for a thread without a loop."""
        if call.plan.waits == "no" and self.shared is None:
            return self._started(call, self._try(call, None))
        taken, asked = None, 0
        while not isinstance(taken, Use):
            waiter = ThreadWaiter()
            try:
                taken = self._stand(call, taken, waiter)
            except PoolExhausted:
                asked += 1
                if self.shared is None or asked > MOST_ASKED or not self.shared.permit_came_sync(call):
                    raise
                continue
            if isinstance(taken, WaitTicket):
                try:
                    waiter.wait(call.deadline)
                except BaseException:
                    self.let_go(taken)
                    raise
                taken = self._collect(call, taken)
        return self._started(call, taken)

    def _stand(self, call: Call, ticket: WaitTicket | None, waiter: Waiter) -> Use | WaitTicket:
        """Join the wait queue (or get a resource at once), or keep the old place with a new waiter."""
        if ticket is None:
            taken: Use | WaitTicket = self._try(call, waiter)
            return taken
        with lock:
            ticket.waiter = waiter
            if ticket.grant is not None or ticket not in self.rotation.wait_queue:
                waiter.wake()  # it was served or told meanwhile
        self.watch()
        return ticket

    def _try(self, call: Call, waiter: Waiter | None) -> Any:
        """Begin a use, or else join the wait queue: one step, so that no release falls between."""
        end_abandoned()
        rotation, requirement, affinity = self.rotation, call.plan.requirement, call.plan.affinity
        cost = call.plan.cost
        taken: Use | WaitTicket | PoolExhausted | None = None
        with lock:
            now = clock.now()
            if call.is_late(now):
                raise call.out_of_time(self.retry_after(call, now))
            effects = rotation.advance(now) if rotation.due(now) else None
            for avoid in call.choices():
                taken = taken or rotation.acquire(now, requirement, avoid, affinity, cost)
            if taken is None and call.plan.waits == "no":
                taken = rotation.acquire_unpaced(now, requirement, call.choices()[-1], affinity, cost)
            if taken is None:
                taken = self._why_not(call, now)
            if taken is None:
                limit = call.deadline if call.plan.waits == "for cooldown" else None
                taken = WaitTicket(requirement, rotation, waiter, limit, affinity, cost, current_standing())
                effects = [*(effects or ()), *(rotation.join(taken, now) or ())]
        self.carry_out(effects)
        if isinstance(taken, PoolExhausted):
            raise taken
        if isinstance(taken, WaitTicket):
            self.watch()
        return taken

    def _collect(self, call: Call, ticket: WaitTicket) -> Use | WaitTicket | None:
        """What a waiter got, now that it was woken.

        Its ticket again: what it had got was taken back before it woke, and it still waits. None: it was told that
        nothing can come, and should try again to find out why.
        """
        with lock:
            now = clock.now()
            use = ticket.grant
            waits = ticket in self.rotation.wait_queue
            late = (waits or use is not None) and call.is_late(now)
            why = describe(self.rotation, call.plan.need, now) if late else None
            effects = self.rotation.leave(ticket, now) if late else None
            if use is not None:
                use.ticket = None
        self.carry_out(effects)
        self.watch()
        if late:
            raise call.out_of_time(self.retry_after(call, now), waited_for=why)
        return ticket if waits else use

    def done(self, call: Call, use: Use) -> None:
        """End and report a call that succeeded with this use."""
        self.succeed(use)
        call.request_id = call.request_id or use.request_id
        self.reporter.succeeded(call)

    def failed(self, call: Call | None, error: BaseException, use: Use | None) -> None:
        """Count a call that raised; end its use if nothing else has."""
        if use is not None and use.is_running:
            self.let_go(use)
        self.reporter.failed(error, call.request_id if call else None, call.started if call else 1)

    def _started(self, call: Call, use: Use) -> Use:
        call.started += 1
        if call.started == 1 and self.retry_budget is not None:
            with lock:  # calls of `run_sync` are made in many threads
                self.retry_budget.began(clock.now())
        use.request_id = call.request_id
        if events.USAGE.listeners:
            try:
                self.reporter.acquired(use)
            except BaseException:
                self.let_go(use)
                raise
        return use

    def _why_not(self, call: Call, now: float) -> PoolExhausted | None:
        """Why `call` cannot be served now; None when it is worth waiting."""
        rotation, plan = self.rotation, call.plan
        hope = rotation.can_become_free(plan.requirement, plan.cost)
        if plan.waits == "for capacity" and hope:
            return None
        after = self.retry_after(call, now)
        if plan.waits == "for cooldown" and after is not None:
            late = 0.0 if call.deadline is None else now + after - call.deadline
            if call.deadline is None or late < 0:
                return None
            more_time = "Give it more time, or call again after `retry_after` seconds."
            return call.out_of_resources(f"cooldown ends {late:.3f} s after deadline", "deadline", after, more_time)
        why = describe(rotation, plan.need, now)
        remedy = None
        if not rotation.matching(plan.requirement):
            remedy = "Check tags= and exclude= against the resources of the pool."
        elif not hope and rotation.can_become_free(plan.requirement):
            return call.too_large("call", plan.cost)
        elif not hope:
            remedy = "All of them are disabled: enable() one, or add() another."
        elif plan.waits == "for cooldown":
            remedy = "Pass wait_for_capacity=True to wait for those in use too."
        return call.out_of_resources(why, "no_eligible", after, remedy)

    def retry_after(self, call: Call, now: float) -> float | None:
        """Seconds until the first resource opens that fits the call: a cooldown ends, or a quota; None: none does."""
        with lock:
            expiry = self.rotation.next_expiry(call.plan.need, call.plan.cost, now)
        return None if expiry is None else max(0.0, expiry - now)

    def let_go(self, thing: Use | WaitTicket) -> None:
        """End a use without a verdict, or leave the wait queue and pass on what was granted. Safe in a finaliser."""
        _abandoned.append(thing)
        end_abandoned()

    # -- a use ends ---------------------------------------------------------------------------------------------------

    def fail(
        self,
        use: Use,
        error: BaseException,
        steered: Steered[Any] | None,
        plan: Plan,
        classify: Classifier | None = None,
    ) -> Signal | None:
        """End a use by what `error` says. Returns the signal to try again on, or None: `error` is the caller's.

        `classify` is asked in place of the pool's own classifier.
        """
        if isinstance(error, asyncio.CancelledError) and steered is not None and steered.is_ours(error):
            return self._interrupted(use, steered, plan)
        if use.reservation is not None:
            use.reservation.has_failed = True
        if use.level:
            self.answered(use, error)
        signal, alone = signal_in(error)
        if isinstance(signal, CooldownResource) and use.reservation is not None:
            self._refused(use, use.reservation, signal)
        classify = classify or self.classify
        if signal is None and isinstance(error, Exception) and classify is not None:
            signal, alone = self._judged(use, error, classify), True
            if signal is not None and signal is not error and signal.__cause__ is None:
                signal.__cause__ = error
        if signal is not None:
            self.end(use, signal)
            return signal if alone else None
        if isinstance(error, Exception):
            if classify is None:
                self.classification.hint(error, self.reporter.name)
            self.succeed(use, "error")
        else:
            self.let_go(use)
            self.reporter.released(use, "no_verdict")
        return None

    def _refused(self, use: Use, reservation: Reservation, signal: CooldownResource) -> None:
        """Learn from a refusal that an operation told by raising a signal, as from one that a client raised."""
        account = reservation.account
        if account.quota != LEARN or signal.only_for is not None:
            return
        if signal.__cause__ is not None:
            self.hear(use, signal.__cause__)  # it may have headers
        with lock:
            now = clock.now()
            account.hear(reservation, (), now, Refusal(signal.cooldown_seconds))
            effects = self.rotation.quota_changed(account, now)
        self.carry_out(effects)

    def _judged(self, use: Use, error: Exception, classify: Classifier) -> Signal | None:
        """Ask a classifier about an error, and learn from a refusal what it says about the limits of the resource."""
        signal = signal_of(classify, error, self.reporter.name)
        if isinstance(signal, CooldownResource) and use.reservation is None:
            self.hear(use, error)
        return self.eased(use, signal, headers_of(error))

    def _interrupted(self, use: Use, steered: Steered[Any], plan: Plan) -> Signal:
        if steered.asked is _TIMEOUT:
            signal: Signal = AttemptTimeout(f"no result within {plan.timeout} s")
            self.end(use, signal)
            return signal
        with lock:
            disabled = use.member.resource.status == "disabled"
            effects = self.rotation.ended(use, clock.now())
        self.carry_out(effects)
        self.reporter.released(use, "sibling_cancelled")
        cause = "cancelled by a sibling: an older use of the resource failed"
        return DisableResource(cause) if disabled else CooldownResource(reason=cause)

    def end(self, use: Use, signal: Signal) -> None:
        """End a use with the verdict of a signal."""
        rotation = self.rotation
        with lock:
            now = clock.now()
            use.member.refusals += isinstance(signal, (CooldownResource, DisableResource))
            if isinstance(signal, CooldownResource):
                seconds = signal.cooldown_seconds  # a subclass may have put anything there
                seconds = seconds if is_finite(seconds) and seconds >= 0 else None
                affinity = use.affinity if signal.only_for == "affinity" else None
                effects: Effects | None = rotation.cooled(use, seconds, now=now, affinity=affinity)
            elif isinstance(signal, DisableResource):
                effects = rotation.disabled(use, now)
            else:
                effects = rotation.ended(use, now)
                self.reporter.retries += 1
        reason = signal.reason
        self.carry_out(effects, redact(reason) if isinstance(reason, str) else None)
        self.reporter.released(use, _outcome(signal))

    def succeed(self, use: Use, outcome: events.UsageOutcome = "ok") -> None:
        """End a use that found its resource fine."""
        if outcome != "ok" and not use.is_refused:
            use.level = 0  # an adaptive limit grows by what succeeded
        with lock:
            effects = self.rotation.ok(use, clock.now())
        self.carry_out(effects)
        self.reporter.released(use, outcome)

    # -- quotas -------------------------------------------------------------------------------------------------------

    def answered(self, use: Use, outcome: object) -> None:
        """Learn what the outcome of a use says about its quota and about its adaptive limit."""
        if use.reservation is not None:
            self.hear(use, outcome)
        elif use.member.sharing.adaptive is not None:
            use.is_refused = use.is_refused or status_of(outcome) in _REFUSED

    def hear(self, use: Use, answer: object) -> None:
        """Learn what the answer to a use says about its limits: a response, an error, or headers."""
        if use.level and use.member.sharing.adaptive is not None:
            use.is_refused = use.is_refused or status_of(answer) in _REFUSED
        self._hear(use.member.resource, use, answer)

    def heard(self, resource: Resource[Any], answer: object) -> None:
        """Learn what an answer says about the quota of a resource, told by an operation."""
        self._hear(resource, use_of(resource), answer)

    def learned(self, use: Use, lesson: Lesson, task: object) -> None:
        """Learn what a call in another process has learned about the resource of its use here, for a task or none."""
        if lesson.rest is not None:
            self.ask_rest(use.member.resource, lesson.rest, lesson.reason)
        if lesson.spent is not None:
            spent = Spent(*lesson.spent)
            if use.reservation is not None:
                use.reservation.spend(spent)
            self.reporter.spent(use.member.resource.resource_id, spent, task)
        if use.level and (lesson.headers or lesson.status is not None):
            self.hear(use, Answer(lesson.status, dict(lesson.headers)))

    def learned_about(self, resource: Resource[Any], lesson: Lesson) -> None:
        """Learn what a call in another process has learned about a resource whose use here is not known."""
        if lesson.rest is not None:
            self.ask_rest(resource, lesson.rest, lesson.reason)
        if lesson.spent is not None:
            self.spent(resource, Spent(*lesson.spent))
        if lesson.headers or lesson.status is not None:
            self.heard(resource, Answer(lesson.status, dict(lesson.headers)))

    def spent(self, resource: Resource[Any], spent: Spent) -> None:
        """Count tokens that an operation has used."""
        account, use = resource.sharing.account, use_of(resource)
        engine = self if use is None else _engine(use.member)
        engine.reporter.spent(resource.resource_id, spent, CURRENT.get())
        if use is not None and use.reservation is not None:
            use.reservation.spend(spent)
        elif account is not None:
            with lock:
                now = clock.now()
                account.spend(spent, now)
                effects = self.rotation.quota_changed(account, now)
            self.carry_out(effects)

    def _hear(self, resource: Resource[Any], use: Use | None, answer: object) -> None:
        account = resource.sharing.account
        if (account is not None and account.quota != LEARN) or was_heard(answer):
            return
        headers = headers_of(answer)
        limits = read_rate_limits(answer if headers is None else headers, clock.wall())
        status = status_of(answer)
        if account is None and limits is not None and any(one.is_spent for one in limits.limits):
            account = self._begin_learning(resource)
        if account is not None and (limits is not None or status is not None or isinstance(answer, Mapping)):
            self._learn(account, use, limits, status)

    def _begin_learning(self, resource: Resource[Any]) -> Account | None:
        """Give a resource a quota that is learned, because an answer has said that nothing remains of a limit."""
        with lock:
            if resource.sharing.account is None:
                self.learns = True
                self.rotation.set_quota(resource, Account(LEARN))
                self.follow_members()
        self.members_changed()
        return resource.sharing.account

    def _learn(self, account: Account, use: Use | None, limits: RateLimits | None, status: int | None) -> None:
        """Learn what the headers of an answer said about a quota, which may be nothing."""
        refusal = Refusal(None if limits is None else limits.retry_after) if status == _TOO_MANY else None
        with lock:
            now = clock.now()
            reservation = None if use is None else use.reservation
            if use is not None and not limits and use.member.sharing.adapts is not None:
                refusal = None  # the adaptive limit learns from it: one refusal must not be explained twice
            account.hear(reservation, () if limits is None else limits.limits, now, refusal)
            effects = self.rotation.quota_changed(account, now)
        self.carry_out(effects)
        send_due()

    def watch_lag(self, use: Use) -> None:
        """Notice it if the event loop stands still just before or right after a use begins, with nothing sent yet.

        Then its quota counts it from when the loop runs again. Otherwise calls would catch up, and the provider would
        see them all at once.
        """
        reservation = use.reservation
        if reservation is None or reservation.account.quota == LEARN:
            return
        now = clock.now()
        if now > reservation.made_at + _LATE:
            self._retime(reservation, now)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # a thread without a loop
        loop.call_later(_LAG, self._check_lag, reservation, now + _LAG, context=Context())

    def _check_lag(self, reservation: Reservation, due: float) -> None:
        now = clock.now()
        if now > due + _LAG:
            self._retime(reservation, now)

    def _retime(self, reservation: Reservation, now: float) -> None:
        with lock:
            reservation.account.retime(reservation.start, now)
            effects = self.rotation.quota_changed(reservation.account, now)
        self.carry_out(effects)

    def eased(self, use: Use, signal: Signal | None, headers: object) -> Signal | None:
        """Let a refused resource rest until its learned quota allows the next call, not until all of it is there.

        For refusals whose headers say when a limit is reset, and not when to try again. For a bucket, a reset is the
        time until it is full.
        """
        account = use.member.sharing.account
        if account is None or account.quota != LEARN or not isinstance(signal, CooldownResource):
            return signal
        told = read_rate_limits(headers, clock.wall())
        asked = None if told is None or told.retry_after is not None else told.spent_for
        if asked is None or signal.cooldown_seconds is None or abs(signal.cooldown_seconds - asked) > 1.0:
            return signal
        with lock:
            seconds = account.opens_in(clock.now())
        return signal if seconds is None else CooldownResource(min(seconds, asked), signal.reason)

    def ask_rest(self, resource: Resource[Any], seconds: float, reason: str | None) -> None:
        """Let a resource rest when a use of it ends; now if it is not in use."""
        effects: Effects = []
        with lock:
            if resource.sharing.uses:
                resource.sharing.ask_rest(seconds, reason)
            elif seconds > 0:
                effects = self.rotation.rest(resource.resource_id, seconds, reason, clock.now())
        self.carry_out(effects)

    def classified(self, outcome: object) -> Signal | None:
        """The signal that the pool's classifier sees in a result or an exception, if any."""
        return None if self.classify is None else signal_of(self.classify, outcome, self.reporter.name)

    # -- doing what was decided ---------------------------------------------------------------------------------------

    def carry_out(self, effects: Effects | None, reason: str | None = None) -> None:
        """Do what the rotation decided; `reason` is the signal's."""
        end_abandoned()
        if effects:
            _carry_out(effects, reason)

    def follow_members(self) -> None:
        """Let other processes limit what the pool has now, if it shares that. With the lock held, before it is used."""
        if self.shared is not None:
            self.shared.follow_members()

    def members_changed(self) -> None:
        """Tell the store which resources the pool has now, if it shares their health. After `follow_members`."""
        if self.shared is not None:
            self.shared.members_changed()

    def tell_followers(self) -> None:
        """Tell followers that there is one resource less."""
        for follower in self.followers:
            follower.changed()

    def watch(self) -> None:
        """Make the first waiter notice the end of the next cooldown, and ask other processes for what waiters need."""
        with lock:
            self._alarm = self._alarm_of_first()
        end_abandoned()
        if self.shared is not None:
            self.shared.waiters_changed()
        send_due()

    def _alarm_of_first(self) -> tuple[object, float] | None:
        rotation = self.rotation
        while first := rotation.wait_queue.first():
            expiry = rotation.openings.first()
            if expiry is None:
                break
            waiter = _waiter(first)
            alarm = (waiter, expiry)
            if alarm == self._alarm and not waiter.is_gone():
                return alarm
            if waiter.set_alarm(expiry - clock.now(), self._ring):
                return alarm
            rotation.wait_queue.leave(first)  # its loop is gone
            _abandoned.append(first)
        return None

    def _ring(self) -> None:
        with lock:
            self._alarm = None
            effects = self.rotation.advance(clock.now())
        self.carry_out(effects)
        self.watch()


def _carry_out(effects: Effects, reason: str | None) -> None:
    """Do what rotations decided: first what others wait for, then what they listen to."""
    report = begin(effects, reason)
    if report is not None:
        report()


def begin(effects: Effects, reason: str | None) -> Callable[[], None] | None:
    """Do what others wait for, and return what tells those who listen; None: there is nothing to tell."""
    touched: set[Engine[Any]] = set()
    changed: dict[Engine[Any], set[Member]] = {}
    todo: deque[Effect] = deque(effects)
    news: list[Change] = []
    while todo:
        effect = todo.popleft()
        if isinstance(effect, Cancel):
            use, handle = effect.use, effect.use.handle
            if handle is not None:  # it may have ended, or opened its stream, since then
                handle.interrupt(_SIBLING)
            _engine(use.member).reporter.sibling_cancelled(use)
        elif isinstance(effect, (Serve, Starve, Watch)):
            ticket = effect.ticket
            touched.add(_engine(ticket))
            if not isinstance(effect, Watch) and not _waiter(ticket).wake():
                with lock:
                    todo.extend(ticket.rotation.leave(ticket, clock.now()) or ())
        else:
            assert effect.member is not None
            engine = _engine(effect.member)
            if engine.shared is not None and not isinstance(effect, Pause):
                changed.setdefault(engine, set()).add(effect.member)
            if not isinstance(effect, Tell):
                news.append(effect)
                touched.add(engine)
    for engine, members in changed.items():
        if engine.shared is not None:
            engine.shared.learned(members)
    for engine in touched:
        engine.watch()
    send_due()
    return partial(_report, news, reason) if news else None


def _report(news: list[Change], reason: str | None) -> None:
    for effect in news:
        engine = _engine(effect.member)
        if isinstance(effect, Limit):
            engine.reporter.limit_changed(effect, reason)
        elif isinstance(effect, Pause):
            engine.reporter.paused(effect)
        else:
            engine.reporter.health_changed(effect, reason)
        if isinstance(effect, Disable):
            engine.tell_followers()


def end_abandoned() -> None:
    """End abandoned uses; not while this thread is in a transition: then the next call does it."""
    if not _abandoned or lock._is_owned():  # type: ignore[attr-defined]
        return
    effects: Effects = []
    left: set[Engine[Any]] = set()
    with lock:
        while _abandoned:
            thing = _abandoned.popleft()
            now = clock.now()
            if isinstance(thing, Use):
                if thing.is_running:
                    effects += thing.member.rotation.ended(thing, now) or ()
            else:
                effects += thing.rotation.leave(thing, now) or ()
                left.add(_engine(thing))
    if effects:
        _carry_out(effects, None)
    for engine in left:
        engine.watch()  # the waiter that left may have watched the next cooldown


def _engine(place: Member | WaitTicket | None) -> Engine[Any]:
    """The engine of the pool to which a member or a ticket belongs."""
    engine = None if place is None else place.rotation.owner
    assert engine is not None, "an engine carries out effects of rotations with engines"
    return engine


def _waiter(ticket: WaitTicket) -> Waiter:
    assert ticket.waiter is not None, "an engine's tickets have waiters"
    return ticket.waiter


def _outcome(signal: Signal) -> events.UsageOutcome:
    if isinstance(signal, RetryOperation):
        return "retry"
    return "disable" if isinstance(signal, DisableResource) else "cooldown"


def set_handle(use: Use, steered: Steered[Any]) -> None:
    """Let siblings cancel a use from here on; does it now if one asked for it before."""
    cancel_requested, use.handle = use.handle is CANCEL_REQUESTED, steered
    if cancel_requested:
        use.status = "cancelled"
        steered.interrupt(_SIBLING)


async def bounded(steered: Steered[R], seconds: float) -> R:
    """Await an operation, and interrupt it when it takes longer than `seconds`."""
    timer = asyncio.get_running_loop().call_later(seconds, steered.interrupt, _TIMEOUT, context=Context())
    try:
        return await steered
    finally:
        timer.cancel()


def _after_fork() -> None:
    # Another thread of the parent may have held the lock; here there is no such thread.
    lock._at_fork_reinit()  # type: ignore[attr-defined]
    _abandoned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
