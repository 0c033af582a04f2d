"""Starts, interrupts and ends the tasks that the scheduler of a pool chooses.

**No await between deciding and starting.** A submit decides, takes its slot and starts the task in one go, and so does
the end of a task for the next one. So there is no moment in which two could take one slot, and no lock.

What a task needs besides a slot, and where it runs, is known to the ports (`ports`). Who waits for a place in the queue
is known to the submitter, which the executor calls through `Listener`.
"""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from headgate.calls.retry_budget import RetryBudget
from headgate.calls.retrying import add_note, is_retried
from headgate.core.clock import clock
from headgate.errors import StoreWriteFailed
from headgate.gate.tenants import Window
from headgate.resources.http_errors import asked_pause
from headgate.tasks.events import AUDIT
from headgate.tasks.handle import TaskHandle
from headgate.tasks.model import (
    PLAIN,
    Cancelled,
    Dropped,
    Expired,
    Moment,
    TaskRecord,
    TaskStatus,
    Terms,
    Told,
    failure,
    leave_parent,
    told_of,
)
from headgate.tasks.runtime.children import cancel_children, requeue_after, stopped_with_parent
from headgate.tasks.runtime.durable import Records
from headgate.tasks.runtime.ending import Ending, is_ending
from headgate.tasks.runtime.estimates import seconds_until_start
from headgate.tasks.runtime.failures import Failures
from headgate.tasks.runtime.lending import Lending
from headgate.tasks.runtime.marks import mark_attempt, mark_waiting
from headgate.tasks.runtime.messages import on_another_loop, overdue_error, without_loop
from headgate.tasks.runtime.nested_waits import wake
from headgate.tasks.runtime.pausing import Pauses
from headgate.tasks.runtime.ports import Allocator, Explainer, Launcher, Listener, Ports
from headgate.tasks.runtime.reporting import Reporter
from headgate.tasks.runtime.results import ResultPolicy
from headgate.tasks.runtime.shortages import Shortages
from headgate.tasks.scheduling.load import Pace
from headgate.tasks.scheduling.scheduler import Scheduler
from headgate.tasks.scheduling.slots import stuck, waiting_for
from headgate.tasks.scheduling.states import TaskStates
from headgate.tasks.scheduling.submit_queue import SubmitQueue
from headgate.tasks.scheduling.timers import Errand, Timers
from headgate.tasks.strategies import KEY
from headgate.tasks.streams import has_opened

_AGES = 4096
START_HOOKS: list[Callable[[TaskRecord], object]] = []  # called before each attempt of any pool; see observe
TICK = 1e-4  # tasks of the same tenth of a millisecond share one Moment


NOWHERE: Final = object()
"""No event loop."""


class Executor:
    """Runs the tasks of one pool, on one event loop."""

    def __init__(
        self,
        name: str,
        pool_id: str,
        scheduler: Scheduler,
        reporter: Reporter,
        ports: Ports,
        keep: int = 0,
        records: Records | None = None,
        failures: Failures | None = None,
        retry_budget: RetryBudget | None = None,
    ) -> None:
        self.name: str = name
        self.id: str = pool_id
        self.scheduler: Scheduler = scheduler
        self.keyed: bool = scheduler.strategy.key == KEY
        """Whether tenants are known by the `key` of their tasks, and by no other name."""
        self.states: TaskStates = TaskStates(keep, self.revive, keyed=self.keyed)
        self.reporter: Reporter = reporter
        self.records: Records | None = records
        self.launcher: Launcher = ports.launcher
        self.allocator: Allocator | None = ports.allocator
        self.explainer: Explainer | None = ports.explainer
        self.submit_queue: SubmitQueue = SubmitQueue()
        self.timers: Timers = Timers()
        self.ages: deque[tuple[Hashable, float]] = deque(maxlen=_AGES)
        """How long the last tasks waited, by partition."""
        self.pace: Pace = Pace()
        self.shortages: Shortages = Shortages()
        self.pauses: Pauses = Pauses(self)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.last: Moment = Moment(float("-inf"), 0.0)
        """The newest Moment that was made."""
        self.failures: Failures = failures or Failures(0)
        self.unseen: OrderedDict[int, Told] = self.failures.unseen
        self.state: Literal["open", "closing", "closed"] = "open"
        self.accepts_on: object = NOWHERE
        """The event loop of the pool while it is open, so that a submit asks one question (benchmarks/tasks.py)."""
        self.ending: Ending = Ending(name, scheduler, ports.launcher)
        self.lending: Lending = Lending(self)
        self.on_bind: Callable[[], None] | None = None  # called when the pool has its event loop
        self._on_start: Callable[[TaskRecord], None] | None = None
        self.retry_budget: RetryBudget | None = retry_budget
        if retry_budget is not None:
            self.before_each(self._count_first)
        self._is_plain = self._starts_plainly()
        self._listener: Listener | None = None
        self._asked: dict[TaskRecord, str] = {}  # running tasks that were told to stop, and why
        self._overdue: dict[TaskRecord, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at, self._pumping, self._pump_again = 0.0, False, False
        self.results: ResultPolicy | None = None  # asked about results, if what is not kept matters
        if self.allocator is not None:
            self.allocator.on_change(self)
            scheduler.supply = self

    def attach(self, listener: Listener) -> None:
        """Tell this listener what matters to submitters."""
        self._listener = listener

    @property
    def on_start(self) -> Callable[[TaskRecord], None] | None:
        """Called before each attempt."""
        return self._on_start

    @on_start.setter
    def on_start(self, on_start: Callable[[TaskRecord], None] | None) -> None:
        self._on_start = on_start
        self._is_plain = self._starts_plainly()

    def _starts_plainly(self) -> bool:
        """Is nobody of this pool told of starts, and needs a task nothing else to start?"""
        return self.allocator is None and self.records is None and self._on_start is None and not self.reporter.audit

    def moment(self) -> Moment:
        """The time now, on both clocks."""
        now, last = clock.now(), self.last
        if 0.0 <= now - last.now < TICK:
            return last
        self.last = last = Moment(now, clock.wall())
        if now >= self.pace.until:
            self.pace.sample(now)
        return last

    # -- starting ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Give every free slot to whoever is next."""
        if self._pumping:  # starting a task may call back, from a runner or a listener
            self._pump_again = True
            return
        scheduler = self.scheduler
        if not len(scheduler.queue) and not scheduler.slots.returning and not self.submit_queue.line:
            if not scheduler.slots.active:
                self.tell_idle()
            return
        self._pumping = self._pump_again = True
        try:
            while self._pump_again:  # a submitter that has waited may have queued a task
                self._pump_again = False
                moment = None
                while (task := scheduler.next()) is not None:
                    if task.status == "running":
                        self.lending.resume(task)
                    else:
                        if moment is None:
                            moment = self.moment()
                        self.launch(task, moment)
                if self._listener is not None:
                    self._listener.settled()
        finally:
            self._pumping = False

    def tell_idle(self) -> None:
        """If nothing is queued or running, forget what is past and tell the listener."""
        scheduler = self.scheduler
        slots = scheduler.slots
        if slots.active or slots.without or scheduler.depth:
            return
        scheduler.idle()
        self.timers.clear()
        if self.allocator is not None:
            self.allocator.idle()
            if scheduler.unserved:
                left = [requirement for requirement in scheduler.unserved if self.allocator.leave(requirement)]
                self.shortages.end(scheduler.unserved, left, clock.wall())
        if self._listener is not None:
            self._listener.idle()

    def launch(self, task: TaskRecord, moment: Moment) -> None:
        """Start a task that was just given its slot and what it needs, unless it is too late for it."""
        if task.slot is None or task.status != "queued":
            return  # somebody who heard of the end before it cancelled it
        if task.terms is not PLAIN and self._is_late(task, moment.now):
            self._discard(task, "expired")
            self.pump()
        else:
            self.start(task, moment)

    def launch_later(self, task: TaskRecord, moment: Moment) -> None:
        """Start a task that was given its slot before something else happened. What it got may be gone since."""
        allocator = self.allocator
        if allocator is None or task.permit is None or allocator.is_in_order(task.permit):
            self.launch(task, moment)
            return
        self.release_unused(task)
        self.scheduler.requeue(task)
        if task.terms.expires_at is not None:
            self.plan(task.terms.expires_at, "expire", task)
        self.pump()

    def _is_late(self, task: TaskRecord, now: float) -> bool:
        """Is the time over by which a task was to start, or to end?"""
        terms = task.terms
        limit = terms.deadline if task.started is not None else terms.expires_at
        return limit is not None and limit <= now

    def take(self, task: TaskRecord, *, wait: bool) -> bool:
        """Take what a task needs besides slots, for the scheduler that decides about it (see `Supply`)."""
        assert self.allocator is not None, "it is asked"
        if not wait:
            task.permit = self.allocator.reserve(task, wait=False)
            return task.permit is not None
        try:
            task.permit = self.allocator.reserve(task, wait=True)
        except Exception as error:  # nothing can ever serve it
            self.fail_queued(task, error)
            return False
        if task.permit is not None:
            return True
        if not self._refuse_stuck(task):
            mark_waiting(task, self.moment().wall)
        return False

    def give_back(self, task: TaskRecord) -> None:
        """Take back the permit of a task that does not start with it."""
        permit, task.permit = task.permit, None
        if permit is not None and self.allocator is not None:
            self.allocator.release(permit)

    def rests(self, task: TaskRecord) -> bool:
        """Is all that could serve a task cooling down or paused?"""
        return self.allocator is not None and self.allocator.rests(task)

    def _refuse_stuck(self, task: TaskRecord) -> bool:
        """Fail a queued task that waits for what only those have who wait for it. Returns whether it was failed."""
        explainer, waits = self.explainer, task.waits
        if explainer is None or waits is None or not waits.by:
            return False
        held = explainer.held(task, waiting_for(task))
        if held:
            self.fail_queued(task, stuck(task, held))
        return bool(held)

    # -- what an allocator tells ---------------------------------------------------------------------------------------

    def unserved(self) -> Collection[Hashable]:
        """The requirements that were refused and of which tasks wait."""
        return self.scheduler.unserved

    def has_free_slot(self) -> bool:
        """Could a task start if it got what it needs?"""
        return not self.scheduler.slots.exhausted and not self.scheduler.paused

    @property
    def is_shared(self) -> bool:
        """Are other processes asked before a task gets a slot?"""
        return self.scheduler.is_shared

    def keeps_apart(self, requirement: Hashable) -> bool:
        """Whether tasks may be given this requirement that had another: not many are kept apart."""
        return self.scheduler.keeps_apart(requirement)

    def set_need(self, task: TaskRecord, requirement: Hashable) -> None:
        """Give a task that asks for a permit another requirement."""
        self.scheduler.set_need(task, requirement)

    def fail_impossible(self) -> None:
        """Fail the queued tasks that nothing can serve any more, and those that would wait for ever because they are
        waited for by those who have what they need."""
        allocator = self.allocator
        assert allocator is not None, "it tells us"
        impossible: dict[Hashable, bool] = {}
        for task in list(self.scheduler.queued()):
            need = task.terms.need
            if need not in impossible:
                impossible[need] = allocator.impossible(task) is not None
            if impossible[need] and (error := allocator.impossible(task)) is not None:
                self.fail_queued(task, error)
            elif task.waits is not None and task.status == "queued":
                self._refuse_stuck(task)
        self.pump()

    def reopen_soon(self) -> None:
        """Start tasks of any requirement, soon, on the loop of the pool. May be called from any thread."""
        if self.loop is None or self.loop.is_closed():
            self.scheduler.unserved.clear()
        else:
            self.loop.call_soon_threadsafe(self.reopen)

    def offer(self, requirements: Collection[Hashable]) -> None:
        """Start one task, the next of all that have one of these requirements."""
        if self.scheduler.is_shared:  # whether there is a slot is known after an exchange
            self.reopen(*requirements)
            return
        unserved = self.scheduler.unserved
        others = unserved.intersection(requirements)
        unserved -= others
        try:
            task = None if self._pumping else self.scheduler.next()
        finally:
            unserved |= others
            self.scheduler.open_kept()  # else others would overtake a task that only lacks slots
        if task is not None and task.status == "running":
            self.lending.resume(task)
        elif task is not None:
            self.launch(task, self.moment())

    def reopen(self, *requirements: Hashable) -> None:
        """Start tasks that have one of these requirements, or any requirement if none is given."""
        self.shortages.end(self.scheduler.unserved, requirements or list(self.scheduler.unserved), clock.wall())
        self.scheduler.announce()
        self.pump()

    # -- an attempt ----------------------------------------------------------------------------------------------------

    def start(self, task: TaskRecord, moment: Moment) -> None:
        """Run a task that has its slot and its permit."""
        if task.status != "queued":
            self.states.move(task, "running")
        task.status = "running"  # TaskStates.move, inlined for benchmarks/tasks.py
        if task.started is None:  # its first attempt
            task.started = moment
            waited = moment.now - task.moment.now
        else:
            attempt, task.started = task.attempt, moment
            task.attempt = attempt + 1
            waited = moment.now - task.since.now
        self.ages.append((task.partition, waited))
        pace = self.pace  # see `Pace`
        if waited:
            pace.count += 1
        else:
            pace.free += moment.now - pace.last
        pace.last = moment.now
        if self._is_plain and task.terms is PLAIN and not START_HOOKS and not AUDIT.listeners:
            task.stage = self.launcher.start(task, None, self)
        else:
            self._start_observed(task, moment)

    def _start_observed(self, task: TaskRecord, moment: Moment) -> None:
        """Start a task that has a permit or time limits, or of whose start somebody hears."""
        if self.records is not None:
            self.records.started(task, moment.wall)
        if self._on_start is not None:
            self._on_start(task)
        for hook in START_HOOKS:
            hook(task)
        running = self.launcher.start(task, task.permit, self)
        if task.status == "running":  # else its end was told before this returned
            task.stage = running
        terms = task.terms
        if terms is not PLAIN and (terms.timeout is not None or terms.deadline is not None):
            self._watch(task, moment.now)
        if AUDIT.listeners or self.reporter.audit:
            self.reporter.dequeued(task)
        if self.allocator is not None:
            self.launcher.announce(task)

    def _watch(self, task: TaskRecord, now: float) -> None:
        """Stop it when its time is over."""
        terms, loop = task.terms, self.loop
        assert loop is not None, "something runs on it"
        assert task.started is not None, "it runs"
        began = task.started.now
        ends = [end for end in (terms.deadline, terms.timeout and began + terms.timeout) if end is not None]
        seconds = max(0.0, min(ends) - now)
        self._overdue[task] = loop.call_later(seconds, self._interrupt, task, "timeout", context=Context())

    def change_terms(self, task: TaskRecord, terms: Terms) -> None:
        """Give an unfinished task another deadline."""
        if terms.need != task.terms.need:  # its requirement was set apart since, and it is queued by that
            terms = replace(terms, need=task.terms.need)
        task.terms = terms
        if task.status == "queued":
            if terms.expires_at is not None:
                self.plan(terms.expires_at, "expire", task)
        elif task.task is not None and task not in self._asked:
            if (timer := self._overdue.pop(task, None)) is not None:
                timer.cancel()
            if terms.timeout is not None or terms.deadline is not None:
                self._watch(task, clock.now())

    def succeeded(self, task: TaskRecord, result: Any) -> None:
        """End a task whose function returned this."""
        if self.results is not None:
            self.end(task, *self.results.ending(task, result))
        elif task.terms is not PLAIN or self.records is not None or (task.rare is not None and task.rare.has_ties):
            self.end(task, "completed", result)
        else:  # `end`, without what such a task cannot have (benchmarks/tasks.py)
            task.outcome = result
            if self._asked:
                self._asked.pop(task, None)
            moment = self.last
            if not 0.0 <= clock.now() - moment.now < TICK:
                moment = self.moment()
            self.states.completed(task, moment)
            task.context = task.fn = None
            task.args = ()
            if not (task.waiters or AUDIT.listeners or self.reporter.audit or self.submit_queue.line):
                heir = self.scheduler.succeed(task)
                if heir is None:
                    self.pump()
                elif heir.terms is PLAIN:
                    self.start(heir, moment)
                else:
                    self.launch(heir, moment)
            else:
                self._pass_on_slot(task, moment)

    def failed(self, task: TaskRecord, error: BaseException, failures: int | None = None) -> bool:
        """End a task whose function raised this, or try it again (see `Completion.failed`)."""
        asked = self._stopped(task)
        if self._outlived(task):
            return False
        if isinstance(error, asyncio.CancelledError):
            if asked != "timeout":
                if asked is None and is_ending(self.loop):
                    self.ending.cut_off += 1
                    task.dependents = None  # they are being cancelled too, or given up
                    self._give_up_queued()
                self.end(task, "cancelled", task.outcome)
                return False
            error = overdue_error(task, error)
        own = task.attempt if failures is None else failures
        if isinstance(error, Exception) and asked != "cancel":
            try:
                if self._retry(task, error, own):
                    return True
            except BaseException:  # Ctrl-C in a `retry_on`, or the like: nothing else would end the task
                self.end(task, "failed", failure(error))
                raise
        known = asked == "timeout" and stopped_with_parent(task)
        self.end(task, "failed", failure(error))
        if known:
            self.unseen.pop(task.number, None)
        return not isinstance(error, (KeyboardInterrupt, SystemExit))

    def requeue(
        self, task: TaskRecord, reason: str, *, spent: bool, resource_id: str | None, pause: float = 0.0
    ) -> bool:
        """Queue a task again whose attempt was no failure of its own (see `Completion.requeue`)."""
        asked = self._stopped(task)
        if self._outlived(task):
            return False
        if asked is None or asked == "timeout":
            self._requeue(task, reason, spent=spent, resource_id=resource_id, pause=pause)
        else:
            self.end(task, "cancelled", task.outcome)
        return True

    def asked(self, task: TaskRecord) -> str | None:
        """Why a running task was told to stop; None if it was not."""
        return self._asked.get(task)

    def _stopped(self, task: TaskRecord) -> str | None:
        """Take back what the attempt still holds. Returns why it was told to stop, if it was."""
        if task.permit is not None and self.allocator is not None:
            self.allocator.release(task.permit)  # unless its launcher has given it back
        return self._asked.pop(task, None)

    def _outlived(self, task: TaskRecord) -> bool:
        """Record the end of a task whose loop was closed around it: nothing can be started any more."""
        if _get_running_loop() is self.loop:
            return False
        self.scheduler.release(task)
        task.dependents = None  # their loop is closed too
        self._record_end(task, "cancelled", self.moment())
        self.ending.cut_off += 1
        return True

    def _give_up_queued(self) -> None:
        """The loop ends around the pool: nobody will run what is queued."""
        for task in [*self.scheduler.queued(), *self.scheduler.coming]:
            task.dependents = None
            self._discard(task, "cancelled")
            self.ending.given_up += 1

    def _retry(self, task: TaskRecord, error: Exception, failures: int) -> bool:
        """Queue a failed task again, if it has attempts and time left."""
        terms = task.terms
        if failures > terms.retries or has_opened(task.fn):
            return False
        if terms.retry_on is not None and not is_retried(terms.retry_on, error):
            return False
        now, pause = self.moment().now, 0.0
        if terms.backoff is not None:
            pause = terms.backoff.seconds(failures, clock.uniform(0.0, 1.0), asked_pause(error))
        if terms.deadline is not None and terms.deadline <= now + pause:
            return False
        reason = told_of(error, None, 0).line
        if task in self._asked:  # one of these, which are code of users, has cancelled it
            return False
        if self.retry_budget is not None and not self.retry_budget.take(now):
            add_note(error, self.retry_budget.why_spent())
            return False
        self._requeue(task, reason, spent=True, resource_id=getattr(task.permit, "resource_id", None), pause=pause)
        return True

    def _requeue(
        self, task: TaskRecord, reason: str, *, spent: bool, resource_id: str | None = None, pause: float = 0.0
    ) -> None:
        """An attempt is over and the task is not: it is first of its partition, and holds nothing meanwhile.

        With a `pause` it is set aside for so many seconds first.
        """
        moment, terms = self.moment(), task.terms
        ending = cancel_children(task, "queued") if task.dependents else []
        mark_attempt(task, reason, moment.wall, again=True, pause=pause)
        task.permit, task.since = None, moment
        if (timer := self._overdue.pop(task, None)) is not None:
            timer.cancel()
        self.scheduler.release(task)
        self.lending.resume(task)
        task.stage = None
        self.states.move(task, "queued")
        if self.records is not None:
            self.records.requeued(task, moment.wall)
        keyed = [child for child in ending if child.terms.idempotency_key is not None]
        if keyed:  # the next attempt may submit them again, and must not be given those that are about to end
            self.scheduler.set_aside(task)
            requeue_after(keyed, task, moment.now + pause)
        elif pause:
            self.scheduler.set_aside(task)
            self.plan(moment.now + pause, "due", task)
        else:
            self.scheduler.requeue(task)
        if terms.deadline is not None:
            self.plan(terms.deadline, "expire", task)
        attempt = task.attempt
        if not spent:
            task.attempt -= 1
            if self.retry_budget is not None and task.started is not None and not task.attempt:
                self.retry_budget.take_back(task.started.now, moment.now)
        if AUDIT.listeners or self.reporter.audit:
            self.reporter.requeued(task, reason, attempt, spent, resource_id, pause)
        if task.status != "queued" or task.slot is not None:
            pass  # somebody who heard of it has ended it, or let it start
        elif self.allocator is not None and (error := self.allocator.impossible(task)) is not None:
            self.fail_queued(task, error)
        elif self.ending.is_dropped(task):
            self._discard(task, "cancelled")
        else:
            self._refuse_stuck(task)
        self.pump()

    def resume_at(self, task: TaskRecord, at: float) -> None:
        """Queue a task that was set aside, at this time or at once: it is first of its partition."""
        now = clock.now()
        if at > now:
            self.plan(at, "due", task)
            return
        task.since = self.moment()
        self.scheduler.requeue(task)
        self.pump()

    def attempt_ended(self, task: TaskRecord, reason: str) -> None:
        """Note why the last attempt of a task ended."""
        mark_attempt(task, reason, clock.wall(), again=False)

    # -- ending --------------------------------------------------------------------------------------------------------

    def end(self, task: TaskRecord, status: TaskStatus, outcome: Any) -> None:
        """Record the outcome of a task whose function is done, and give its slot to the next."""
        task.outcome = outcome
        self._unwatch(task)
        moment = self.moment()
        if self.records is not None:
            if task.dependents and status != "completed":
                cancel_children(task, status)  # before its slot is given to one of them
            self.scheduler.vacate(task)
            task.stage = None
            self._end_durably(task, status, moment)
            return
        self._record_end(task, status, moment)
        self._pass_on_slot(task, moment)

    def _unwatch(self, task: TaskRecord) -> None:
        """Forget what a task was told and when its time is over: it has ended."""
        self._asked.pop(task, None)
        if (timer := self._overdue.pop(task, None)) is not None:
            timer.cancel()

    def _pass_on_slot(self, task: TaskRecord, moment: Moment) -> None:
        """Give the slot of a task that has ended to the next, and tell whoever waits for the end."""
        heir = self.scheduler.succeed(task)
        if heir is None:
            self.pump()  # before anyone hears of it: who then submits must find all slots given away
            self._tell_end(task)
            return
        if task.waiters is not None or AUDIT.listeners or self.reporter.audit:
            try:
                self._tell_end(task)
            finally:
                self.launch_later(heir, moment)
        else:
            self.launch(heir, moment)
        if self.submit_queue.line and self._listener is not None:
            self._listener.settled()

    def _end_durably(self, task: TaskRecord, status: TaskStatus, moment: Moment) -> None:
        assert self.records is not None, "only durable pools write"
        done = partial(self._written, task, status, moment)
        try:
            self.records.ended(task, status, moment.wall, done, may_release=self.results is not None)
        except Exception as broken:  # a store that breaks its promise never to raise: the work is done all the same
            error = StoreWriteFailed(f"the store of {self.name!r} raised in append(): {broken!r}")
            error.__cause__ = broken
            done(error)
        self.pump()

    def _written(self, task: TaskRecord, status: TaskStatus, moment: Moment, error: StoreWriteFailed | None) -> None:
        """End a task whose end is on disk, or could not be put there: the work is done either way."""
        if error is not None:
            self.reporter.unsaved(task, error)
        self._record_end(task, status, moment)
        self.scheduler.release(task)
        self.pump()
        self._tell_end(task)

    def conclude(self, task: TaskRecord, status: TaskStatus, moment: Moment) -> None:
        self._record_end(task, status, moment)
        self._tell_end(task)

    def _record_end(self, task: TaskRecord, status: TaskStatus, moment: Moment) -> None:
        """Record the terminal state of a task, and let go of what it held."""
        self.states.end(task, status, moment)
        if status == "failed":
            self.failures.note(task)
        task.context = None
        if task.rare is not None:
            if status != "completed" and task.dependents is not None:
                cancel_children(task, status)
            task.dependents = None
            leave_parent(task)
        if self.allocator is not None and status != "completed":
            self.launcher.forget(task)
        if task.terms is PLAIN or task.terms.idempotency_key is None:
            task.fn, task.args = None, ()
        if task.waits is not None:
            self.lending.resume(task)  # parts of it that its body left behind
            for waiter in self.scheduler.over(task):
                waiter.owner.lending.reclaim(waiter)

    def _tell_end(self, task: TaskRecord) -> None:
        """Wake whoever waits, and report it."""
        if task.waiters is not None:
            wake(task)
        if AUDIT.listeners or self.reporter.audit:
            self.reporter.finished(task)

    def drop(self, task: TaskRecord, replacement: TaskRecord | None) -> None:
        """Reject a task that is not, or not any more, in the queue."""
        policy = self.scheduler.policy
        task.outcome = Dropped(policy.reason, policy.name, seconds_until_start(task, new=True))
        moment = self.moment()
        self.record(task, "rejected", moment)
        self.conclude(task, "rejected", moment)
        if AUDIT.listeners or self.reporter.audit:
            self.reporter.dropped(task, replacement, self.scheduler.depth, policy)

    def _discard(self, task: TaskRecord, status: TaskStatus) -> None:
        """End a task that is queued."""
        if task.slot is None:
            self.scheduler.discard(task)
        else:  # it has its slot and has not started
            self.release_unused(task)
        moment = self.moment()
        self.record(task, status, moment)
        self.conclude(task, status, moment)

    def fail_queued(self, task: TaskRecord, error: Exception) -> None:
        """End a task that can never start."""
        if task.status == "queued":
            task.outcome = failure(error)
            self._discard(task, "failed")

    def release_unused(self, task: TaskRecord) -> None:
        """Take back the slot and the permit of a task that will not start."""
        self.scheduler.release(task)
        self.give_back(task)

    def record(self, task: TaskRecord, status: TaskStatus, moment: Moment) -> None:
        """Write down the end of a task that did not run, if this pool writes."""
        if self.records is not None:
            self.records.ended(task, status, moment.wall)

    def cancel(self, task: TaskRecord, reason: str | None = None) -> bool:
        """Cancel a task; for a `reason` that is not its own, only once: what it does at its end is not disturbed."""
        if task.finished:
            return False
        self.require_loop("cancel()")
        if reason is not None and (task.status == "queued" or task.task is not None):
            task.outcome = Cancelled(reason)
            if task in self._asked:
                self._asked[task] = "cancel"
                return True
        if task.status == "queued":
            self._discard(task, "cancelled")
            self.pump()
            return True
        return self._interrupt(task, "cancel")

    def _interrupt(self, task: TaskRecord, why: str) -> bool:
        """Tell a running task to stop. What was said first stands, except that a cancel outweighs a timeout."""
        if task.status != "running" or task.task is None:  # or its body is done, and its end is being written
            return False
        if why == "cancel" or task not in self._asked:
            self._asked[task] = why
        task.task.cancel(f"headgate: {why}")
        return True

    # -- time ----------------------------------------------------------------------------------------------------------

    def limit_rates(self, window_of: Callable[[Hashable], Window | None]) -> None:
        """Limit how many tasks of each tenant start within some time; `window_of` makes the window of a tenant."""
        self.scheduler.limit_rates(window_of, lambda _: self._set_timer(), lambda: clock.now())
        self.before_each(self.scheduler.began)

    def before_each(self, hook: Callable[[TaskRecord], None]) -> None:
        """Call this too before each attempt."""
        first = self.on_start

        def both(task: TaskRecord) -> None:
            assert first is not None, "there are two"
            first(task)
            hook(task)

        self.on_start = hook if first is None else both

    def _count_first(self, task: TaskRecord) -> None:
        if task.attempt == 1 and task.started is not None and self.retry_budget is not None:
            self.retry_budget.began(task.started.now)

    def plan(self, at: float, errand: Errand, task: TaskRecord) -> None:
        self.timers.add(at, errand, task)
        self._set_timer()

    def _set_timer(self) -> None:
        at, loop = self.timers.next_at(), self.loop
        rates_at = self.scheduler.next_at()
        if rates_at is not None and (at is None or rates_at < at):
            at = rates_at
        if loop is None or (self._timer is not None and at is not None and self._timer_at <= at):
            return  # it rings early enough, and is set again then
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer_at = at
            self._timer = loop.call_later(max(0.0, at - clock.now()), self._on_timer, context=Context())  # no task's

    def _on_timer(self) -> None:
        self._timer, now = None, clock.now()
        for errand, task in self.timers.due(now):
            if errand == "expire":
                self._expire(task, now)
            elif not self.scheduler.is_aside(task):
                continue
            elif task.started is None:
                self.scheduler.enqueue(task)  # its delay is over
            else:
                task.since = self.moment()
                self.scheduler.requeue(task)
        self.scheduler.due(now)
        self.pump()
        self._set_timer()

    def _expire(self, task: TaskRecord, now: float) -> None:
        if self._listener is not None and self._listener.expired(task):
            return
        if self._is_late(task, now):
            if self.explainer is not None and task.terms.need in self.scheduler.unserved:
                task.outcome = Expired(mark_waiting(task, self.moment().wall))
            self._discard(task, "expired")

    # -- the loop ------------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Belong to the event loop that runs, from the first submit on."""
        loop = _get_running_loop()
        if loop is None:
            raise without_loop(self.name)
        if self.loop is not None:
            raise on_another_loop(self.name, "submit()")
        self.loop = loop
        self.accepts_on = loop if self.state == "open" else NOWHERE
        self.ending.bind(loop)
        self.pace.begin(clock.now())
        try:
            if self.on_bind is not None:
                self.on_bind()
        except BaseException:
            self.loop, self.accepts_on = None, NOWHERE
            raise

    def require_loop(self, what: str) -> None:
        """Raise InvalidArgument if `what` is called on another loop than the pool's."""
        if _get_running_loop() is not self.loop:
            raise on_another_loop(self.name, what)

    def is_abandoned(self) -> bool:
        """Was the loop of the pool closed around it?"""
        return self.loop is not None and self.loop.is_closed()

    # -- the end of the pool -------------------------------------------------------------------------------------------

    def interrupts(self) -> int:
        """How often the program was interrupted."""
        return self.ending.interrupts()

    def begin_to_close(self) -> None:
        """Accept nothing from now on."""
        self.state, self.accepts_on = "closing", NOWHERE

    def cancel_all(self) -> None:
        """Cancel everything that is queued or runs, because the pool closes."""
        self.ending.cancels_all = True
        for task in [*self.scheduler.unfinished(), *self.scheduler.coming]:
            self.cancel(task)

    def drop_queue(self) -> None:
        """Cancel what is queued, now and when it comes back to the queue, unless what runs needs it to finish."""
        self.ending.drops_queue = True
        for task in [*self.scheduler.queued(), *self.scheduler.coming]:
            if task.status == "queued" and self.ending.is_dropped(task):
                self._discard(task, "cancelled")
        self.pump()

    async def finish(self) -> None:
        """Tell of failures that nobody has seen, and wait until everything is written."""
        if self._timer is not None:
            self._timer.cancel()
        self.reporter.unseen(self.unseen, self.failures.forgotten)
        self.unseen.clear()
        if self.records is not None:
            await self.records.close()

    def let_go(self) -> None:
        """Close files and end threads."""
        self.state, self.accepts_on = "closed", NOWHERE
        self.reporter.close()
        if self.records is not None:
            self.records.abandon()
        self.launcher.close()

    def revive(self, place: int) -> TaskHandle[Any]:
        """Make the record of a task of a former run."""
        assert self.records is not None, "they are the only ones who know of it"
        return self.records.revived(place, self)
