"""The shell of a task pool: it starts, interrupts and ends what the desk decides. Everything that awaits is here.

**No await between deciding and starting.** A submit decides, takes its slot and makes the asyncio Task in one go, and
so does the end of a task for the next one. So there is no moment in which two could take one slot, and no lock.

**A task is an asyncio Task of its own**, in a copy of its submitter's context. Reusing one for several would be
cheaper, and would let a forgotten ``call_later(..., task.cancel)`` of one task end another. `_drive` is stepped once
before the Task gets it: a Task that is cancelled before its first step throws into a coroutine that never entered its
``try``, and the slot would be lost.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable
from functools import partial
from inspect import CO_COROUTINE
from typing import Any

from headgate.core.cancellation import primed
from headgate.core.clock import clock
from headgate.core.threads import Interrupts, Threads, call_in_thread
from headgate.errors import StoreWriteFailed
from headgate.tasks.admission import Policy
from headgate.tasks.events import AUDIT
from headgate.tasks.model import PLAIN, Dropped, Mark, Moment, TaskRecord, TaskStatus, Told, failure
from headgate.tasks.runtime.durable import Records
from headgate.tasks.runtime.functions import is_async
from headgate.tasks.runtime.nested_waits import CURRENT, wake
from headgate.tasks.runtime.ports import Again, Supply, told
from headgate.tasks.runtime.reporting import Reporter
from headgate.tasks.scheduling.scheduler import Scheduler
from headgate.tasks.scheduling.slots import Waits, stuck, waiting_for
from headgate.tasks.scheduling.states import TaskStates
from headgate.tasks.scheduling.submit_queue import SubmitQueue
from headgate.tasks.scheduling.timers import Timers
from headgate.tasks.streams import has_opened

_AGES = 4096
_UNSEEN = 1000  # failures that nobody awaited are not all kept: there may be very many
_WAITS = "waits: "
_LONG = 400  # what is told of one thing
_MARKS = 200  # things that are remembered of one task
TICK = 1e-4  # tasks of the same tenth of a millisecond share one Moment


class Executor:
    """Runs tasks in the slots of a desk, on one event loop."""

    name: str

    def __init__(
        self, desk: Scheduler, ledger: TaskStates, reporter: Reporter, records: Records | None, supply: Supply | None
    ) -> None:
        self._desk = desk
        self._ledger = ledger
        self._report = reporter
        self._records = records
        self._supply = supply
        self._door = SubmitQueue()
        self._agenda = Timers()
        self._ages: deque[tuple[Hashable, float]] = deque(maxlen=_AGES)  # how long the last ones waited, by partition
        self._loop: asyncio.AbstractEventLoop | None = None
        self._make_task: Callable[..., Any] = asyncio.Task
        self._last = Moment(float("-inf"), 0.0)
        self._asked: dict[TaskRecord, str] = {}  # running tasks that were told to stop, and why
        self._overdue: dict[TaskRecord, asyncio.TimerHandle] = {}
        self._returns: dict[TaskRecord, list[asyncio.Future[None]]] = {}  # parts of tasks that wait for a slot
        self._unseen: OrderedDict[int, Told] = OrderedDict()  # who failed, and nobody knows yet
        self._forgotten = 0  # and more of them
        self._given_up = 0  # queued when the loop ended around the pool
        self._cut_off = 0  # running then
        self._interrupts: Interrupts | None = None  # of its loop
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._threads: Threads | None = None
        self._in_threads = 0
        self._pumping = False
        if supply is not None:
            supply.attach(self)

    @property
    def _policy(self) -> Policy:
        return self._desk.policy

    def _moment(self) -> Moment:
        now = clock.now()
        last = self._last
        if 0.0 <= now - last.now < TICK:
            return last
        self._last = last = Moment(now, clock.wall())
        return last

    # -- starting ------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Give every free slot to whoever is next."""
        if self._pumping:  # starting a task may call back, from a runner or a listener
            return
        desk = self._desk
        if not len(desk.queue) and not desk.slots.returning and not self._door.line:
            if not desk.slots.active:
                self._tell_idle()
            return
        self._pumping = True
        try:
            moment = None
            while (task := desk.next()) is not None:
                if task.status == "running":
                    self._resume(task)
                else:
                    if moment is None:
                        moment = self._moment()
                    self._launch(task, moment)
            self._after_pump()
        finally:
            self._pumping = False

    def _after_pump(self) -> None:
        """What else may have become possible."""

    def _tell_idle(self) -> None:
        """Nothing is active. Is nothing left?"""

    def _launch(self, task: TaskRecord, moment: Moment) -> None:
        """Start a task that was just given a slot, unless it is too late for it or the runner does not take it."""
        if task.slot is None or task.status != "queued":
            return  # somebody who heard of the end before it cancelled it
        if task.terms is not PLAIN and self._is_late(task, moment.now):
            self._discard(task, "expired")
            self._pump()
        elif self._supply is None or self._permitted(task, self._supply):
            self._start(task, moment)

    def _is_late(self, task: TaskRecord, now: float) -> bool:
        """Was it to start before now, or to end?"""
        terms = task.terms
        limit = terms.deadline if task.started is not None else terms.expires_at
        return limit is not None and limit <= now

    def _permitted(self, task: TaskRecord, supply: Supply) -> bool:
        """Does the runner take it? If not it keeps its turn, and all that need the same wait for the runner's call."""
        if task.permit is not None:
            if supply.confirmed(task):
                return True
            self._release_permit(task)
        try:
            permit = supply.reserve(task, stand=True)
        except Exception as error:  # nothing can ever serve it
            self._fail_queued(task, error)
            self._pump()
            return False
        if permit is not None:
            task.permit = permit
            return True
        self._desk.unseat(task)
        self._desk.shut.add(task.terms.need)
        if not self._refuse_stuck(task) and (why := supply.why_not(task)):
            self._mark(task, f"{_WAITS}{why}", self._moment().wall)
        self._pump()  # there may be others who need something else
        return False

    def _refuse_stuck(self, task: TaskRecord) -> bool:
        """If it waits for what those have who wait for it, nobody will ever go on: it fails. Has it?"""
        supply, waits = self._supply, task.waits
        if supply is None or waits is None or not waits.by:
            return False
        held = supply.held(task, waiting_for(task))
        if held:
            self._fail_queued(task, stuck(task, held))
        return bool(held)

    def _look_for_doomed(self) -> None:
        """The runner has less than it had: fail those whom nothing can serve any more, and those who would wait for
        ever because they are waited for by those who have what they need."""
        supply = self._supply
        assert supply is not None, "it tells us"
        hopeless: dict[Hashable, bool] = {}
        for task in list(self._desk.queued()):
            need = task.terms.need
            if need not in hopeless:
                hopeless[need] = supply.hopeless(task) is not None
            if hopeless[need] and (error := supply.hopeless(task)) is not None:
                self._fail_queued(task, error)
            elif task.waits is not None and task.status == "queued":
                self._refuse_stuck(task)
        self._pump()

    def _leave_lines(self) -> None:
        """There is no slot for those who wait for something else: they do not keep it from others."""
        supply, shut = self._supply, self._desk.shut
        if supply is not None:
            shut.difference_update([need for need in shut if supply.leave(need)])

    def _on_ready(self) -> None:
        """The runner might have something again, for whatever need. From any thread."""
        if self._loop is None or self._loop.is_closed():
            self._desk.shut.clear()
        else:
            self._loop.call_soon_threadsafe(self._reopen)

    def _serve(self, needs: Collection[Hashable]) -> None:
        """Something came free that any of these can use, once: it is for whoever is next of them."""
        shut = self._desk.shut
        others = shut.intersection(needs)
        shut -= others
        try:
            task = None if self._pumping else self._desk.next()
        finally:
            shut |= others
        if task is not None and task.status == "running":
            self._resume(task)
        elif task is not None:
            self._launch(task, self._moment())

    def _reopen(self, *needs: Hashable) -> None:
        """Something came free for these, or perhaps for all."""
        if needs:
            self._desk.shut.difference_update(needs)
        else:
            self._desk.shut.clear()
        self._pump()

    def _start(self, task: TaskRecord, moment: Moment) -> None:
        """It has its slot: run it."""
        if task.status == "queued":  # Ledger.move, without the call
            task.status = "running"
        else:
            self._ledger.move(task, "running")
        task.started = moment
        task.attempt += 1
        self._ages.append((task.partition, moment.now - task.since.now))
        if self._records is not None:
            self._records.started(task, moment.wall)
        if self._supply is not None and (begun := self._supply.begin(self, task)) is not None:
            task.task = begun
        else:
            self._make(task)
        terms = task.terms
        if terms is not PLAIN and (terms.timeout is not None or terms.deadline is not None):
            self._watch(task, moment.now)
        if AUDIT.listeners or self._report.audit:
            self._report.dequeued(task)
        if self._supply is not None:
            self._supply.started(task)

    def _make(self, task: TaskRecord) -> None:
        """The Task in which it runs."""
        code = getattr(task.fn, "__code__", None)  # is_async(), without the call for the usual function
        if self._supply is None and ((code is not None and code.co_flags & CO_COROUTINE) or is_async(task.fn)):
            body = self._drive(task)
        elif self._supply is not None:
            body = self._supply.drive(self, task)
        else:
            body = self._drive_otherwise(task)
        body.send(None)
        terms, context = task.terms, task.context
        if context is not None and (self._supply is not None or (terms is not PLAIN and terms.retries)):
            context = context.copy()  # each attempt begins as the first did
        task.task = self._make_task(body, loop=self._loop, name=self.name, context=context)

    def _watch(self, task: TaskRecord, now: float) -> None:
        """Stop it when its time is over."""
        terms, loop = task.terms, self._loop
        assert loop is not None, "something runs on it"
        ends = [end for end in (terms.deadline, terms.timeout and now + terms.timeout) if end is not None]
        self._overdue[task] = loop.call_later(max(0.0, min(ends) - now), self._interrupt, task, "timeout")

    # -- running -------------------------------------------------------------------------------------------------------

    async def _drive(self, task: TaskRecord) -> None:
        try:
            await primed()
            CURRENT.set(task)
            result = await task.fn(*task.args)  # type: ignore[misc]
        except BaseException as error:
            if not self._ended_badly(task, error):
                raise
        else:
            self._end(task, "completed", result)
        finally:
            del (
                task
            )  # the traceback holds this frame, and the task holds the traceback: only the collector would find it

    async def _drive_otherwise(self, task: TaskRecord) -> None:
        """The same for what is not simply an async function to be called here."""
        try:
            await primed()
            CURRENT.set(task)
            result = await self._call(task, task.args)
        except BaseException as error:
            if not self._ended_badly(task, error):
                raise
        else:
            self._end(task, "completed", result)
        finally:
            del (
                task
            )  # the traceback holds this frame, and the task holds the traceback: only the collector would find it

    async def _call(self, task: TaskRecord, args: tuple[Any, ...]) -> Any:
        """Call its function here, with these arguments."""
        fn = task.fn
        assert fn is not None, "it was submitted"
        called = fn(*args) if is_async(fn) else self._in_thread(task, args)
        del task  # see `_drive`
        result = await called
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, task: TaskRecord, args: tuple[Any, ...]) -> Any:
        """Call a plain function in a thread of ours. A thread cannot be interrupted, so neither can this wait."""
        loop = self._loop
        assert loop is not None and task.fn is not None, "it was submitted"  # noqa: PT018
        threads = self._threads = self._threads or Threads(f"headgate {self.name}")
        self._in_threads += 1
        # In a copy of the context: the Task's own is entered on the loop's thread meanwhile.
        context, fn = contextvars.copy_context(), task.fn
        future = loop.run_in_executor(threads, lambda: context.run(call_in_thread, fn, args))
        stopped: BaseException | None = None
        while not future.done():
            try:
                await asyncio.wait((future,))
            except asyncio.CancelledError as error:
                stopped = error
                if self._interrupts is not None and self._interrupts.count > 1:  # the program is to end at once
                    future.cancel()
                    raise
        self._in_threads -= 1
        asked = self._asked.get(task)
        if stopped is None and asked is None:
            try:
                return future.result()
            finally:
                del task, future, context  # see `_drive`; the thread's frames have this context too, and it the task
        result = future.exception() or future.result()
        if inspect.iscoroutine(result):
            result.close()  # dropped, like any other result
        raise stopped or asyncio.CancelledError(asked)

    def _ended_badly(self, task: TaskRecord, error: BaseException) -> bool:
        """The body raised. True: that is all. False: its Task must raise it too."""
        asked = self._asked.pop(task, None)
        if task.permit is not None and self._supply is not None:
            self._supply.release(task.permit)  # unless its runner has it: then it is released
        if asyncio._get_running_loop() is not self._loop:  # its loop was closed around it: nothing can be started
            self._desk.release(task)
            self._record_end(task, "cancelled", self._moment())
            self._cut_off += 1
            return False
        if isinstance(error, asyncio.CancelledError):
            if asked != "timeout":
                if asked is None and self._loop_is_ending():
                    self._cut_off += 1
                    self._give_up_queued()
                self._end(task, "cancelled", None)
                return False
            error = _overdue_error(task, error)
        if isinstance(error, Again):
            if asked is None or asked == "timeout":
                self._requeue(task, error.reason, spent=error.spent, resource_id=error.resource_id)
                return True
            self._end(task, "cancelled", None)
            return True
        if isinstance(error, Exception) and asked != "cancel" and self._retry(task, error):
            return True
        self._end(task, "failed", failure(error))
        return not isinstance(error, (KeyboardInterrupt, SystemExit))

    def _loop_is_ending(self) -> bool:
        """Is everything on this loop being cancelled, as asyncio.run does at its end? Then nothing new may begin."""
        return all(task.cancelling() for task in asyncio.all_tasks(self._loop))

    def _give_up_queued(self) -> None:
        """The loop ends around the pool: nobody will run what is queued."""
        for task in [*self._desk.queued(), *self._desk.coming]:
            self._discard(task, "cancelled")
            self._given_up += 1

    def _retry(self, task: TaskRecord, error: Exception) -> bool:
        """Queue it again, if it has attempts and time left."""
        terms, supply = task.terms, self._supply
        now = self._moment().now
        failures = task.attempt if supply is None else supply.failures(task)
        if failures > terms.retries or (terms.deadline is not None and terms.deadline <= now) or has_opened(task.fn):
            return False
        self._requeue(task, told(error), spent=True, resource_id=getattr(task.permit, "resource_id", None))
        return True

    def _requeue(self, task: TaskRecord, reason: str, *, spent: bool, resource_id: str | None = None) -> None:
        """An attempt is over and the task is not: it is first of its partition, and holds nothing meanwhile."""
        moment, terms = self._moment(), task.terms
        self._tell_attempt(task, f"{reason}; queued again", moment.wall)
        task.permit, task.since = None, moment
        self._stop_watching(task)
        self._desk.release(task)
        self._resume(task)
        task.task = None
        self._ledger.move(task, "queued")
        if self._records is not None:
            self._records.requeued(task, moment.wall)
        self._desk.requeue(task)
        if terms.deadline is not None:
            self._plan(terms.deadline, "expire", task)
        attempt = task.attempt
        if not spent:
            task.attempt -= 1
        if AUDIT.listeners or self._report.audit:
            self._report.requeued(task, reason, attempt, spent, resource_id)
        if task.status != "queued" or task.slot is not None:
            pass  # somebody who heard of it has ended it, or let it start
        elif self._supply is not None and (error := self._supply.hopeless(task)) is not None:
            self._fail_queued(task, error)
        else:
            self._refuse_stuck(task)
        self._pump()

    # -- what its story is made of -------------------------------------------------------------------------------------

    def _mark(self, task: TaskRecord, what: str, wall: float) -> None:
        """Something happened to it that is worth telling."""
        what = " ".join(what.split())[:_LONG]
        if task.trail is None:
            task.trail = []
        elif what.startswith(_WAITS) and task.trail and task.trail[-1].what.startswith(_WAITS):
            return  # it waits still
        if len(task.trail) < _MARKS:
            task.trail.append(Mark(wall, what))

    def _tell_attempt(self, task: TaskRecord, reason: str, wall: float) -> None:
        """An attempt has ended, and not as its task does."""
        started = task.started.wall if task.started is not None else wall
        where = self._supply.describe(task.permit) if self._supply is not None else ""
        self._mark(task, f"attempt {task.attempt} begins{where}", started)
        self._mark(task, f"attempt {task.attempt} ends: {reason}", wall)

    # -- ending --------------------------------------------------------------------------------------------------------

    def _end(self, task: TaskRecord, status: TaskStatus, outcome: Any) -> None:
        """The body is done: record that, and give its slot to the next."""
        task.outcome = outcome
        if self._asked:
            self._asked.pop(task, None)
        if self._overdue:
            self._stop_watching(task)
        now, moment = clock.now(), self._last
        if not 0.0 <= now - moment.now < TICK:
            moment = self._moment()
        if self._records is not None:
            self._desk.vacate(task)
            task.task = None
            self._end_durably(task, status, moment)
            return
        self._record_end(task, status, moment)
        heir = self._desk.succeed(task)
        if heir is None:
            self._pump()  # before anyone hears of it: who then submits must find all slots given away
            self._tell_end(task)
            return
        if task.waiters is not None or AUDIT.listeners or self._report.audit:
            try:
                self._tell_end(task)
            finally:
                self._launch(heir, moment)
        elif heir.terms is PLAIN and self._supply is None:
            self._start(heir, moment)
        else:
            self._launch(heir, moment)
        if self._door.line:
            self._after_pump()

    def _end_durably(self, task: TaskRecord, status: TaskStatus, moment: Moment) -> None:
        assert self._records is not None, "only durable pools write"
        done = partial(self._written, task, status, moment)
        try:
            self._records.ended(task, status, moment.wall, done)
        except Exception as broken:  # a store that breaks its promise never to raise: the work is done all the same
            error = StoreWriteFailed(f"the store of {self.name!r} raised in append(): {broken!r}")
            error.__cause__ = broken
            done(error)
        self._pump()

    def _written(self, task: TaskRecord, status: TaskStatus, moment: Moment, error: StoreWriteFailed | None) -> None:
        """The end of a task is on disk, or could not be put there. The work is done either way: say so."""
        if error is not None:
            self._report.unsaved(task, error)
        self._record_end(task, status, moment)
        self._desk.release(task)
        self._pump()
        self._tell_end(task)

    def _conclude(self, task: TaskRecord, status: TaskStatus, moment: Moment) -> None:
        self._record_end(task, status, moment)
        self._tell_end(task)

    def _record_end(self, task: TaskRecord, status: TaskStatus, moment: Moment) -> None:
        """Its terminal state: record it, and let go of what it held."""
        self._ledger.end(task, status, moment)
        task.task = task.context = None
        while task.parent is not None and task.parent.finished:
            task.parent = task.parent.parent  # its handle may live long, and need not hold the results of those before
        if self._supply is not None and status != "completed":
            self._supply.forget(task)
        if task.terms is PLAIN or task.terms.idempotency_key is None:
            task.fn = None
            task.args = ()
        if status == "failed":
            self._unseen[task.number] = task.outcome.told
            if len(self._unseen) > _UNSEEN:
                del self._unseen[next(iter(self._unseen))]
                self._forgotten += 1
        if task.waits is not None:
            self._resume(task)  # parts of it that its body left behind
            for waiter in self._desk.over(task):
                waiter.owner._reclaim(waiter)

    def _tell_end(self, task: TaskRecord) -> None:
        """Wake whoever waits, and report it."""
        if task.waiters is not None:
            wake(task)
        if AUDIT.listeners or self._report.audit:
            self._report.finished(task)

    def _stop_watching(self, task: TaskRecord) -> None:
        timer = self._overdue.pop(task, None)
        if timer is not None:
            timer.cancel()

    def _drop(self, task: TaskRecord, replacement: TaskRecord | None) -> None:
        """Reject a task that is not, or not any more, in the queue."""
        policy = self._policy
        task.outcome = Dropped(policy.reason, policy.name)
        moment = self._moment()
        self._record(task, "rejected", moment)
        self._conclude(task, "rejected", moment)
        if AUDIT.listeners or self._report.audit:
            self._report.dropped(task, replacement, self._desk.depth, policy)

    def _discard(self, task: TaskRecord, status: TaskStatus) -> None:
        """End a task that is queued."""
        if task.slot is None:
            self._desk.discard(task)
        else:  # it has its slot and has not started
            self._unseat(task)
        moment = self._moment()
        self._record(task, status, moment)
        self._conclude(task, status, moment)

    def _fail_queued(self, task: TaskRecord, error: Exception) -> None:
        """End a task that can never start."""
        if task.status != "queued":
            return
        if task.slot is None:
            self._desk.discard(task)
        else:
            self._unseat(task)
        task.outcome = failure(error)
        moment = self._moment()
        self._ledger.move(task, "running")  # for no time at all: only what runs can fail
        if self._records is not None:
            self._records.ended(task, "failed", moment.wall)
        self._conclude(task, "failed", moment)

    def _unseat(self, task: TaskRecord) -> None:
        """It gives back what it was given to start, and will not."""
        self._desk.release(task)
        self._release_permit(task)

    def _release_permit(self, task: TaskRecord) -> None:
        permit, task.permit = task.permit, None
        if permit is not None and self._supply is not None:
            self._supply.release(permit)

    def _record(self, task: TaskRecord, status: TaskStatus, moment: Moment) -> None:
        """Write down the end of a task that did not run, if this pool writes."""
        if self._records is not None:
            self._records.ended(task, status, moment.wall)

    def _cancel(self, task: TaskRecord) -> bool:
        if task.finished:
            return False
        self._require_loop("cancel()")
        if task.status == "queued":
            self._discard(task, "cancelled")
            self._pump()
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

    # -- waiting inside tasks ------------------------------------------------------------------------------------------

    def _begin_wait(self, waiter: TaskRecord, awaited: TaskRecord) -> None:
        supply = awaited.owner._supply
        if supply is not None and awaited.status == "queued":
            held = supply.held(awaited, {waiter, *waiting_for(waiter)})
            if held:
                raise stuck(awaited, held, waiter)
        self._desk.begin_wait(waiter, awaited)
        self._resume(waiter)  # if a part of it stood for a slot: it waits again, so it needs none

    def _lend_for_another(self, task: TaskRecord) -> Waits | None:
        """A descendant of it waits: it lends its slot, or its claim to one. None: it waits or stands for one itself."""
        returning = self._desk.slots.returning
        if task.slot is not None:
            self._desk.lend(task)
        elif task in returning and task not in self._returns:
            del returning[task]
        elif task.waits is None or not task.waits.roused:
            return None
        assert task.waits is not None, "who lends has waits"
        task.waits.roused += 1
        return task.waits

    def _reclaim(self, task: TaskRecord) -> bool:
        """It wants its slot back. Has it got one?"""
        if task in self._desk.slots.returning:
            return False
        if not self._desk.reclaim(task):
            self._pump()  # a slot may be free for whoever stood there before
        return task.slot is not None

    async def _returned(self, task: TaskRecord) -> None:
        """Return when it has its slot back. Cut short it goes on without, and keeps its place in the line."""
        if not self._desk.needs_slot(task):
            return
        assert self._loop is not None, "it runs on it"
        future = self._loop.create_future()
        standing = self._returns.setdefault(task, [])
        standing.append(future)
        try:
            await future
        finally:
            standing.remove(future)
            if not standing and self._returns.get(task) is standing:
                del self._returns[task]

    def _resume(self, task: TaskRecord) -> None:
        for future in self._returns.pop(task, ()):
            if not future.done():
                future.set_result(None)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _plan(self, at: float, errand: Any, task: TaskRecord) -> None:
        self._agenda.add(at, errand, task)
        self._set_timer()

    def _set_timer(self) -> None:
        at, loop = self._agenda.next_at(), self._loop
        if loop is None or (self._timer is not None and at is not None and self._timer_at <= at):
            return  # it rings early enough, and is set again then
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer_at = at
            self._timer = loop.call_later(max(0.0, at - clock.now()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = clock.now()
        for errand, task in self._agenda.due(now):
            if errand == "expire":
                self._expire(task, now)
            elif self._desk.is_aside(task):
                self._desk.enqueue(task)
        self._pump()
        self._set_timer()

    def _expire(self, task: TaskRecord, now: float) -> None:
        if self._is_late(task, now):
            if self._supply is not None and task.terms.need in self._desk.shut:
                task.outcome = why = self._supply.why_not(task)
                self._mark(task, f"{_WAITS}{why}", self._moment().wall)
            self._discard(task, "expired")

    # -- for those above -----------------------------------------------------------------------------------------------

    def _require_loop(self, what: str) -> None:
        raise NotImplementedError


def _overdue_error(task: TaskRecord, cause: BaseException) -> TimeoutError:
    limit = "its deadline" if task.terms.timeout is None else f"timeout={task.terms.timeout:g} s"
    error = TimeoutError(f"{task.label} was stopped at {limit}")
    error.__cause__ = cause
    return error
