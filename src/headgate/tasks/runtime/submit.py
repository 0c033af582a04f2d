"""The way into a pool: from a submit to a slot or a place in the queue.

In order: is it a function, what do its options ask, is it the same work as a task we have (idempotency), can it start,
can it queue, and if neither, what does the policy say? All of that happens in one go, without an await. What may follow
is waiting: at the door for a place, or, in a durable pool, for the disk. Both are an `Arrival`.
"""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop
from collections.abc import Callable, Iterator
from contextvars import copy_context
from functools import partial
from inspect import CO_COROUTINE
from typing import Any

from headgate.core.clock import clock
from headgate.core.threads import Interrupts
from headgate.errors import IdempotencyConflict, InvalidArgument, PoolClosed, QueueFull, StoreWriteFailed, SubmitTimeout
from headgate.tasks.events import AUDIT
from headgate.tasks.handle import TaskHandle
from headgate.tasks.model import PLAIN, TaskRecord
from headgate.tasks.options import NOTHING, parse
from headgate.tasks.runtime.durable import Records, digest_of
from headgate.tasks.runtime.executor import TICK, Executor
from headgate.tasks.runtime.functions import check_function
from headgate.tasks.runtime.nested_waits import CURRENT, enclosing
from headgate.tasks.runtime.ports import Supply
from headgate.tasks.runtime.reporting import Reporter
from headgate.tasks.scheduling.idempotency import difference, equal, work_of
from headgate.tasks.scheduling.scheduler import Scheduler
from headgate.tasks.scheduling.states import TaskStates
from headgate.tasks.scheduling.submit_queue import Arrival
from headgate.tasks.strategies import KEY, Strategy


class Submitter(Executor):
    """A shell that takes tasks in."""

    def __init__(
        self,
        strategy: Strategy,
        desk: Scheduler,
        ledger: TaskStates,
        reporter: Reporter,
        records: Records | None,
        supply: Supply | None,
        stale_after: float,
    ) -> None:
        super().__init__(desk, ledger, reporter, records, supply)
        self._strategy = strategy
        self._plain = strategy.plain
        self._fair = strategy.key
        self._stale_after = stale_after
        self._state = "open"
        self._drops = desk.policy.answer in ("drop_oldest", "drop_fair")
        self._writing: dict[TaskRecord, Arrival] = {}
        self._waking: dict[TaskRecord, Arrival] = {}  # whose submitters wait, or have not woken yet
        self._idle: list[asyncio.Future[None]] = []
        self._beat: asyncio.TimerHandle | None = None

    def _enter(
        self, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], *, wait: bool
    ) -> TaskRecord | Arrival:
        """Check, decide, start or queue: all in one go."""
        loop = _get_running_loop()
        if loop is not self._loop or loop is None:
            self._bind()
        code = getattr(fn, "__code__", None)
        if code is None or not code.co_flags & CO_COROUTINE:
            check_function(fn)
        now, moment = clock.now(), self._last
        if not 0.0 <= now - moment.now < TICK:
            moment = self._moment()
        parent = CURRENT.get()
        if parent is not None:
            parent = enclosing()
            while parent is not None and parent.parent is not None and parent.parent.finished:
                parent.parent = parent.parent.parent  # else a task that submits its successor drags all before it along
        if self._state != "open":
            self._refuse(parent)
        priority, key, partition, terms = NOTHING
        simple = self._plain and len(options) == 1  # what most submits say, without the calls of `parse`
        if simple and (value := options.get(self._fair, "")).__class__ is str and value.strip():
            partition, key = value, value if self._fair == KEY else None
        elif simple and (value := options.get("priority", "")).__class__ is int:
            priority = value
        elif options or not self._plain:
            priority, key, partition, terms = parse(options, args, self._strategy, moment.now, self._supply, fn)
            if terms.need is not None:
                self._desk.check_need(terms.need)
        task: TaskHandle[Any] = TaskHandle(
            self, next(self._ledger.numbers), fn, args, copy_context(), moment, parent, priority, key, partition, terms
        )
        if terms is not PLAIN:
            if terms.idempotency_key is not None:
                known = self._known(task, terms.idempotency_key, wait)
                if known is not None:
                    return known
        elif self._records is None and not self._door.line and (self._supply is None or not self._supply.doubtful):
            desk = self._desk
            if desk.policy.max_depth is None and desk.slots.exhausted:  # _place, where it is simple: it queues
                desk.enqueue(task)
                if AUDIT.listeners or self._report.audit:
                    self._report.submitted(task, desk.depth)
                return task
        return self._place(task, wait)

    def _place(self, task: TaskRecord, wait: bool) -> TaskRecord | Arrival:
        desk, supply = self._desk, self._supply
        if supply is not None and self._records is None and not self._door.line and self._can_start(task):
            if task.terms is not PLAIN:
                self._ledger.claim(task)
            desk.seat(task)  # `_admit` and `_accept`, where it is simple: it starts
            if AUDIT.listeners or self._report.audit:
                self._report.submitted(task, desk.depth)
            self._launch(task, task.moment)
            return task
        if supply is not None and supply.hopeless(task) is not None:
            return self._admit(Arrival(task), seated=False)  # to fail: see `_accept`
        if not self._door.line or task.parent is not None:
            if self._can_start(task):
                return self._admit(Arrival(task), seated=True)
            if not desk.full() or (task.parent is not None and self._policy.answer == "block"):
                return self._admit(Arrival(task), seated=False)
        answer = desk.answer(task, "" if supply is None else supply.why_not(task))
        if answer == "block":
            return self._park(task, wait)
        if answer == "drop_newest":
            return self._turn_away(task)
        return self._admit(Arrival(task), seated=False)

    def _turn_away(self, task: TaskRecord) -> TaskRecord | Arrival:
        """The newcomer is the one to be dropped."""
        self._ledger.claim(task)
        entered: TaskRecord | Arrival = task
        if self._records is not None:
            entered = self._writing[task] = Arrival(task)
            self._records.submitted(task, seated=False, done=partial(self._on_written, entered, False))
        self._drop(task, None)
        return entered

    def _admit(self, arrival: Arrival, *, seated: bool) -> TaskRecord | Arrival:
        """It has a slot or a place. A durable pool writes it down first."""
        task = arrival.task
        self._ledger.claim(task)
        if seated:
            self._desk.seat(task)
        if self._records is None:
            self._accept(task, seated=seated)
            return task
        self._writing[task] = arrival
        if not seated:
            self._desk.set_aside(task, accepted=False)
        try:
            self._records.submitted(task, seated=seated, done=partial(self._on_written, arrival, seated))
        except BaseException:  # a store that breaks its promise: nothing was acknowledged
            self._on_written(arrival, seated, StoreWriteFailed(f"the store of {self.name!r} raised in append()"))
            raise
        return arrival

    def _accept(self, task: TaskRecord, *, seated: bool) -> None:
        """It is one of ours from now on."""
        if seated:
            if AUDIT.listeners or self._report.audit:
                self._report.submitted(task, self._desk.depth)
            self._launch(task, task.moment if self._records is None else self._moment())
            return
        terms = task.terms
        if terms is PLAIN:
            self._desk.enqueue(task)
        else:
            if terms.due is not None and terms.due > clock.now():
                self._desk.set_aside(task)
                self._plan(terms.due, "due", task)
            else:
                self._desk.enqueue(task)
            if terms.expires_at is not None:
                self._plan(terms.expires_at, "expire", task)
        if AUDIT.listeners or self._report.audit:
            self._report.submitted(task, self._desk.depth)
        if self._supply is not None and (error := self._supply.hopeless(task)) is not None:
            self._fail_queued(task, error)
            self._tell_idle()
            return
        if self._drops:
            self._make_room(task)
        if not self._desk.slots.exhausted:
            self._pump()

    def _make_room(self, newcomer: TaskRecord) -> None:
        """Drop whom the policy names, if the newcomer made the queue too long."""
        desk, bound = self._desk, self._policy.max_depth
        assert bound is not None, "a policy that drops has one"
        while desk.depth > bound:
            victim = desk.victim(newcomer)
            desk.discard(victim)
            self._drop(victim, newcomer)

    # -- the same work twice -------------------------------------------------------------------------------------------

    def _known(self, task: TaskRecord, key: str, wait: bool) -> TaskRecord | Arrival | None:
        """The task or the arrival that has this idempotency key already."""
        holder = self._ledger.holder(key, task.moment.now)
        arrival = self._door.with_key(key) if holder is None else self._writing.get(holder)
        known = holder if arrival is None else arrival.task
        if known is None:
            return None
        if differs := self._difference(task, known, key):
            raise IdempotencyConflict(
                f"the idempotency_key {key!r} is held by {known!r}, which is other work: {differs}"
            )
        if arrival is not None and task.parent is not None and self._door.leave(arrival.task) is not None:
            entered = self._admit(arrival, seated=False)  # nested work does not wait at the door, nor for who does
            if self._records is None:
                self._welcome(arrival)
            return entered
        if arrival is not None and not wait:
            raise QueueFull(f"the task with the idempotency_key {key!r} waits for a place in the queue itself")
        if arrival is None and known in self._waking:
            self._waking[known].claimants.append(None)  # another holds its handle now, whatever its first one does
        return known if arrival is None else arrival

    def _difference(self, task: TaskRecord, known: TaskRecord, key: str) -> str:
        """What is not the same about the work of a newcomer and of the task that holds its key; "" when nothing is."""
        if self._records is not None and known.fn is None:
            return self._records.difference(key, task)
        old, held = work_of(known.fn, known.args)
        new, given = work_of(task.fn, task.args)
        same = equal(held, given)
        if not same and self._records is not None:  # arrays and the like, whose == is no yes or no
            digest = digest_of("", given)
            same = bool(digest) and digest == digest_of("", held)
        return difference(old, new, same_arguments=same)

    # -- the door ------------------------------------------------------------------------------------------------------

    def _park(self, task: TaskRecord, wait: bool) -> Arrival:
        if not wait:
            raise QueueFull(
                f"{self._desk.depth} tasks are queued, all that max_depth={self._policy.max_depth} allows, and "
                "submit_nowait() never waits"
            )
        arrival = Arrival(task)
        self._door.join(arrival)
        if task.terms.expires_at is not None:
            self._plan(task.terms.expires_at, "expire", task)
        return arrival

    async def _accepted(self, arrival: Arrival, wait_timeout: float | None) -> TaskHandle[Any]:
        """Wait until the task is accepted: for a place, for the disk, or for both."""
        loop = self._loop
        assert loop is not None, "submit binds it"
        future: asyncio.Future[None] = loop.create_future()
        arrival.claimants.append(future)
        if arrival.settled:  # by a store that did not wait to say so
            self._welcome(arrival, arrival.error)
        self._waking[arrival.task] = arrival
        timer = None
        if wait_timeout is not None and arrival.task not in self._writing:
            timer = loop.call_later(wait_timeout, self._time_out, arrival, future, wait_timeout)
        try:
            await future
        except BaseException:
            self._give_up(arrival, future)
            raise
        finally:
            self._waking.pop(arrival.task, None)
            if timer is not None:
                timer.cancel()
        return arrival.task  # type: ignore[return-value]

    def _time_out(self, arrival: Arrival, future: asyncio.Future[None], seconds: float) -> None:
        if future.done() or arrival.task in self._writing:
            return
        future.set_exception(SubmitTimeout(f"no place in the queue of {self.name!r} came free in {seconds:g} s"))
        self._give_up(arrival, future)  # now: what comes free in this very turn is not for it any more

    def _give_up(self, arrival: Arrival, future: asyncio.Future[None]) -> None:
        """A submitter goes away. When the last of an arrival has gone, the task goes too."""
        if future in arrival.claimants:
            arrival.claimants.remove(future)
        if arrival.claimants:
            return
        task = arrival.task
        if self._door.leave(task) is not None:
            self._ledger.withdraw(task)
            self._pump()  # whoever stood behind it may fit in where it did not
        elif not task.finished:
            self._cancel(task)  # it was accepted in this very moment, and nobody will ever hold its handle
        self._tell_idle()

    def _after_pump(self) -> None:
        """Let in whom there is room for, in order."""
        while (arrival := self._door.first()) is not None:
            seated = self._can_start(arrival.task)
            if not seated and self._desk.full():
                break
            self._door.leave(arrival.task)
            self._admit(arrival, seated=seated)
            if self._records is None:
                self._welcome(arrival)
        self._tell_idle()

    def _welcome(self, arrival: Arrival, error: Exception | None = None) -> None:
        arrival.settled, arrival.error = True, error
        for future in arrival.claimants:
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _expire(self, task: TaskRecord, now: float) -> None:
        arrival = self._door.leave(task)
        if arrival is None:
            super()._expire(task, now)
            return
        self._ledger.claim(task)
        moment = self._moment()
        if self._records is not None:
            self._writing[task] = arrival
            self._records.submitted(task, seated=False, done=partial(self._on_written, arrival, False))
            self._record(task, "expired", moment)
        self._conclude(task, "expired", moment)
        if self._records is None:
            self._welcome(arrival)

    def _can_start(self, task: TaskRecord) -> bool:
        """Is there a slot for a newcomer, and does the runner take it? Its permit is kept for it then."""
        if task.terms.due is not None or not self._desk.startable(task):
            return False
        if self._supply is None:
            return True
        task.permit = self._supply.reserve(task, stand=False)
        return task.permit is not None

    # -- durable submits -----------------------------------------------------------------------------------------------

    def _on_written(self, arrival: Arrival, seated: bool, error: StoreWriteFailed | None) -> None:
        """The submit is durable: start or queue it. Or it is not: as if it had never been."""
        task = arrival.task
        del self._writing[task]
        if error is None and task.status == "queued":
            if self._beat is None:
                self._start_beating()
            self._accept(task, seated=seated)
            self._welcome(arrival)
            return
        if task.status == "queued":
            if seated:
                self._unseat(task)
            else:
                self._desk.discard(task)
            self._ledger.withdraw(task)
        self._welcome(arrival, error)  # if it is cancelled, dropped or expired meanwhile, its journal says so too
        self._pump()

    def _start_beating(self) -> None:
        """While there is something to do, say so in the journal, for those who read it and do not own it."""
        if self._beat is None and self._loop is not None:
            self._beat = self._loop.call_later(self._stale_after / 3, self._on_beat)

    def _on_beat(self) -> None:
        self._beat = None
        if self._records is not None and self.size():
            self._records.beat(clock.wall())
            self._start_beating()

    # -- idle ----------------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """How many tasks are unfinished: active, waiting and queued."""
        slots = self._desk.slots
        return slots.active + slots.waiting + self._desk.depth

    def _unfinished(self) -> Iterator[TaskRecord]:
        """Everyone who holds a slot, runs without one, or is queued."""
        slots = self._desk.slots
        yield from slots.holders()
        yield from slots.without
        yield from self._desk.queued()

    def _is_idle(self) -> bool:
        return not self.size() and not self._door.line and not self._writing

    def _tell_idle(self) -> None:
        """If nothing is queued or running any more, forget what is past, and wake who waits for that."""
        slots = self._desk.slots
        if slots.active or slots.without or self._desk.depth:
            return
        self._desk.queue.idle()
        self._agenda.clear()
        if self._desk.shut:
            self._leave_lines()
        if self._idle and self._is_idle():
            waiting, self._idle = self._idle, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        loop = _get_running_loop()
        if loop is None:
            raise InvalidArgument(
                f"the pool {self.name!r} was used without a running event loop in this thread",
                remedy="Submit from a coroutine, or with `asyncio.run_coroutine_threadsafe(pool.submit(...), loop)`.",
            )
        if self._loop is not None:
            raise self._elsewhere("submit()")
        self._loop = loop
        self._interrupts = Interrupts(loop)
        if self._supply is not None:
            self._supply.bound(loop)

    def _require_loop(self, what: str) -> None:
        if _get_running_loop() is not self._loop:
            raise self._elsewhere(what)

    def _elsewhere(self, what: str) -> InvalidArgument:
        return InvalidArgument(
            f"{what} was called on another event loop or thread than the one the pool {self.name!r} is bound to",
            remedy="Make a pool for each event loop (each asyncio.run has its own). From a thread: "
            "`asyncio.run_coroutine_threadsafe(pool.submit(...), loop)`, `loop.call_soon_threadsafe(handle.cancel)`.",
        )

    def _refuse(self, parent: TaskRecord | None) -> None:
        """PoolClosed, unless a task of ours that is being waited for needs this to come to its end."""
        while parent is not None and self._state == "closing":
            if parent.owner is self:
                return
            parent = parent.parent
        raise PoolClosed(f"the pool {self.name!r} is {self._state}")
