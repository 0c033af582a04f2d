"""From a submit to a slot or a place in the queue.

In order: is it a function, what do its options ask, is it the same work as a task we have (idempotency), can it start,
can it queue, and if neither, what does the policy say? All of that happens in one go, without an await. What may follow
is waiting: for a place in the queue, or, in a durable pool, for the disk. Both are an `Arrival`.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import _get_running_loop
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Sequence
from contextlib import nullcontext
from contextvars import Context, copy_context
from functools import partial
from inspect import CO_COROUTINE
from types import FunctionType
from typing import Any, NamedTuple

from headgate.core.clock import clock
from headgate.errors import (
    IdempotencyConflict,
    InvalidArgument,
    InvalidType,
    PoolClosed,
    StoreWriteFailed,
    SubmitTimeout,
)
from headgate.tasks.batches import OneCall
from headgate.tasks.events import AUDIT
from headgate.tasks.handle import TaskHandle
from headgate.tasks.model import PLAIN, TaskRecord
from headgate.tasks.options import Asked, check_names, parse
from headgate.tasks.rates import TenantRates
from headgate.tasks.runtime.children import adopt, share, terms_below
from headgate.tasks.runtime.durable import Records, digest_of
from headgate.tasks.runtime.estimates import seconds_until_start
from headgate.tasks.runtime.executor import TICK, Executor
from headgate.tasks.runtime.failures import Kept
from headgate.tasks.runtime.functions import check_function
from headgate.tasks.runtime.nested_waits import CURRENT, enclosing, need_not_be_retrieved
from headgate.tasks.runtime.ports import Allocator
from headgate.tasks.runtime.reporting import Reporter
from headgate.tasks.runtime.results import ResultPolicy
from headgate.tasks.runtime.shared_budget import SharedBudget
from headgate.tasks.scheduling.idempotency import OnConflict, difference, equal, unequal, work_of
from headgate.tasks.scheduling.scheduler import Scheduler
from headgate.tasks.scheduling.shared_queue import token_of
from headgate.tasks.scheduling.states import TaskStates
from headgate.tasks.scheduling.submit_queue import Arrival, SubmitQueue
from headgate.tasks.strategies import KEY, Strategy
from headgate.tasks.tenants import TENANT


class Claim(NamedTuple):
    """One submitter that waits for a task to be accepted."""

    arrival: Arrival
    future: asyncio.Future[None]
    timer: asyncio.TimerHandle | None


_log = logging.getLogger("headgate.tasks")


class Submitter:
    """Takes tasks in for one executor."""

    def __init__(
        self,
        executor: Executor,
        strategy: Strategy,
        stale_after: float,
        results: ResultPolicy,
        on_conflict: OnConflict = "error",
        rates: TenantRates | None = None,
    ) -> None:
        self._executor = executor
        self._scheduler: Scheduler = executor.scheduler
        self._states: TaskStates = executor.states
        self._reporter: Reporter = executor.reporter
        self._records: Records | None = executor.records
        self._allocator: Allocator | None = executor.allocator
        self._queue: SubmitQueue = executor.submit_queue
        self._strategy = strategy
        self._plain = strategy.plain and rates is None
        self._rates = rates
        self._fair = strategy.key
        self._ignores_priority = strategy.order.by != "arrival" and not strategy.order.levels  # and has not said so yet
        self._stale_after = stale_after
        self._results = results
        self._on_conflict: OnConflict = on_conflict
        self._drops = executor.scheduler.policy.answer in ("drop_oldest", "drop_fair", "refuse_fair")
        # With fail_fast in a shared budget, whether there is a slot is known after an exchange: see `exchanged`.
        self._shared = executor.scheduler.is_shared
        self._asks_first = self._shared and executor.scheduler.policy.answer == "busy"
        self._queues_simply = self._records is None and executor.scheduler.policy.max_depth is None
        self._writing: dict[TaskRecord, Arrival] = {}
        self._waking: dict[TaskRecord, Arrival] = {}  # whose submitters wait, or have not woken yet
        self._idle: list[asyncio.Future[None]] = []
        self._beat: asyncio.TimerHandle | None = None
        executor.attach(self)

    def check_names(
        self, options: Iterable[str], what: str, others: tuple[str, ...], fn: Callable[..., Any] | None
    ) -> None:
        """Refuse keywords that are neither options of `submit`, nor of the allocator, nor among `others`."""
        own = () if self._allocator is None else self._allocator.options
        check_names(options, self._strategy, what, (*others, *own), fn)

    def enter(
        self, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], *, wait: bool
    ) -> TaskRecord | Arrival:
        """Check, decide, start or queue: all in one go. What can be inlined is, for benchmarks/tasks.py."""
        executor = self._executor
        if _get_running_loop() is not executor.accepts_on:
            self._check_open(fn)
        if fn.__class__ is not FunctionType or not fn.__code__.co_flags & CO_COROUTINE:
            check_function(fn)
        moment = executor.last
        if not 0.0 <= clock.now() - moment.now < TICK:
            moment = executor.moment()
        parent = CURRENT.get()
        if parent is not None:
            parent = enclosing()
            while parent is not None and parent.parent is not None and parent.parent.finished:
                parent.parent = parent.parent.parent  # else a task that submits its successor drags all before it along
        priority, terms = 0, PLAIN
        key: Hashable = None
        partition: Hashable = None
        simple = self._plain and len(options) == 1  # what most submits say, without the calls of `parse`
        if simple and type(value := options.get(self._fair)) is str and value.strip():
            partition = value
        else:
            if simple and type(value := options.get("priority")) is int:
                priority = value
            elif options or not self._plain:
                priority, key, partition, terms = self._parsed(options, args, moment.now, fn)
            if priority and self._ignores_priority:
                self._hint_at_levels()
            if partition is None:  # what `parse` does, where it was not called
                partition = TENANT.get()
        if self._shared:
            token_of(partition)  # refuses one that other processes could not compare
        number = next(self._states.numbers)
        task: TaskHandle[Any] = TaskHandle(
            executor, number, fn, args, copy_context(), moment, parent, priority, key, partition, terms
        )
        if parent is not None:
            return self._enter_made(task, wait)
        if terms is not PLAIN:
            if terms.idempotency_key is not None:
                known = self._known(task, terms.idempotency_key, wait)
                if known is not None:
                    return known
        elif self._queues_simply and not self._queue.line:
            scheduler, allocator = self._scheduler, self._allocator
            if scheduler.slots.exhausted and (allocator is None or allocator.impossible(task) is None):
                scheduler.enqueue_new(task)  # `_place`, where it is simple
                if AUDIT.listeners or self._reporter.audit:
                    self._reporter.submitted(task, scheduler.depth)
                return task
        return self._place(task, wait)

    def _check_open(self, fn: Callable[..., Any]) -> None:
        """Bind the pool to the loop of its first submit; refuse a submit on another loop, or to a pool that closes."""
        executor = self._executor
        loop = _get_running_loop()
        if loop is None or loop is not executor.loop:
            executor.bind()
        if executor.state != "open":
            check_function(fn)
            self.refuse(enclosing())

    def _hint_at_levels(self) -> None:
        self._ignores_priority = False
        kind = self._strategy.kind
        _log.info(
            "%s: priority= has no effect with %s(%r); %s(%r, levels=True) starts tasks of a higher priority first",
            *(self._executor.name, kind, self._fair, kind, self._fair),
        )

    def _parsed(self, options: dict[str, Any], args: tuple[Any, ...], now: float, fn: Callable[..., Any]) -> Asked:
        asked = parse(options, args, self._strategy, now, self._allocator, fn, TENANT.get())
        if self._rates is not None:
            self._rates.quota(asked[2])  # what is wrong with the rate of a tenant is raised here
        priority, key, partition, terms = asked
        if terms.need is not None:
            self._scheduler.check_need(terms.need)
        if terms.slots > 1:
            self._scheduler.check_slots(terms.slots, partition)
        return priority, None if self._fair == KEY else key, partition, terms

    def make(self, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> TaskHandle[Any]:
        """Make a task that is neither queued nor known yet. Refuses what `enter` refuses."""
        executor = self._executor
        if _get_running_loop() is not executor.loop or executor.loop is None:
            executor.bind()
        check_function(fn)
        moment, parent = executor.moment(), enclosing()
        if executor.state != "open":
            self.refuse(parent)
        priority, key, partition, terms = self._parsed(options, args, moment.now, fn)
        if priority and self._ignores_priority:
            self._hint_at_levels()
        if self._shared:
            token_of(partition)
        number = next(self._states.numbers)
        return TaskHandle(executor, number, fn, args, copy_context(), moment, parent, priority, key, partition, terms)

    def again(self, kept: Kept) -> TaskRecord | Arrival:
        """Take in a task once more, with the context that its submitter had."""
        executor = self._executor
        if executor.state != "open":
            self.refuse(None)
        context = copy_context() if kept.context is None else kept.context.copy()
        task: TaskHandle[Any] = TaskHandle(
            executor, next(self._states.numbers), kept.fn, kept.args, context, executor.moment(), None, *kept[3:]
        )
        return self._place(task, wait=False)

    def make_all(self, calls: Iterable[OneCall]) -> list[TaskHandle[Any]]:
        """Make the tasks of a batch, or raise what `enter` would raise for the first that is wrong."""
        tasks: list[TaskHandle[Any]] = []
        for call in calls:
            try:
                tasks.append(self.make(*call))
            except (InvalidArgument, InvalidType) as error:
                error.add_note(f"It is call {len(tasks) + 1} of the batch; none was submitted.")
                raise
        self._refuse_conflicts(tasks)
        return tasks

    def enter_all(self, tasks: Collection[TaskHandle[Any]]) -> list[TaskRecord | Arrival]:
        """Do what `enter` does with tasks that were made already; if one is refused, none is accepted.

        A durable pool writes them in one group.
        """
        entered: list[TaskRecord | Arrival] = []
        with nullcontext() if self._records is None else self._records.together():
            try:
                for task in tasks:
                    entered.append(self._enter_made(task, wait=True))
            except BaseException:
                self._take_back(entered, set(tasks))
                raise
        return entered

    def _take_back(self, entered: Iterable[TaskRecord | Arrival], new: Collection[TaskRecord]) -> None:
        """Cancel those of `new` that have entered, or wait for a place. The others have a key that was known before."""
        for one in entered:
            task = one.task if isinstance(one, Arrival) else one
            if task in new and self._queue.leave(task) is not None:
                self._states.withdraw(task)
            elif task in new:
                self._executor.cancel(task)

    def _enter_made(self, task: TaskHandle[Any], wait: bool) -> TaskRecord | Arrival:
        own = task.terms
        known = None if own.idempotency_key is None else self._known(task, own.idempotency_key, wait)
        if known is not None:
            return known
        task.terms = terms_below(task.parent, own)
        entered = self._place(task, wait)
        adopt(task, own)
        return entered

    def _refuse_conflicts(self, tasks: Iterable[TaskHandle[Any]]) -> None:
        """Raise IdempotencyConflict if one of these tasks has the key of other work, or of another one of them."""
        new: dict[str, TaskRecord] = {}
        for task in tasks:
            if (key := task.terms.idempotency_key) is not None:
                arrival = self._queue.with_key(key)
                holder = self._states.holder(key, task.moment.now)
                known = holder or (None if arrival is None else arrival.task) or new.setdefault(key, task)
                self._refuse_other_work(task, known, key)

    def set_aside(self, task: TaskRecord) -> None:
        """Take in a task that another process runs: it counts as queued, and gets no turn."""
        own, task.terms = task.terms, terms_below(task.parent, task.terms)
        self._states.claim(task)
        self._scheduler.set_aside(task)
        adopt(task, own)
        if task.terms.expires_at is not None:
            self._executor.plan(task.terms.expires_at, "expire", task)
        if AUDIT.listeners or self._reporter.audit:
            self._reporter.submitted(task, self._scheduler.depth)

    def _place(self, task: TaskRecord, wait: bool) -> TaskRecord | Arrival:
        scheduler, allocator = self._scheduler, self._allocator
        if allocator is not None and self._records is None and not self._queue.line and self._given_slot(task):
            if task.terms is not PLAIN:  # `_admit` and `_accept`, where it is simple: it starts
                self._states.claim(task)
            if AUDIT.listeners or self._reporter.audit:
                self._reporter.submitted(task, scheduler.depth)
            self._executor.launch_later(task, task.moment)
            return task
        if allocator is not None and allocator.impossible(task) is not None:
            return self._admit(Arrival(task), has_slot=False)  # to fail: see `_accept`
        if not self._queue.line or task.parent is not None:
            if self._given_slot(task):
                return self._admit(Arrival(task), has_slot=True)
            if not scheduler.full() or (task.parent is not None and self._scheduler.policy.answer == "block"):
                return self._admit(Arrival(task), has_slot=False)
        if self._asks_first and wait:
            return self._admit(Arrival(task), has_slot=False)
        refuses = scheduler.policy.answer in ("fail", "busy", "refuse_fair")
        answer = scheduler.answer(task, self._why_waiting(task), self._retry_after(task) if refuses else None)
        if answer == "block":
            return self._park(task, wait)
        if answer == "drop_newest":
            return self._turn_away(task)
        return self._admit(Arrival(task), has_slot=False)

    def _turn_away(self, task: TaskRecord) -> TaskRecord | Arrival:
        """Reject a new task: the policy drops the newest."""
        self._states.claim(task)
        entered: TaskRecord | Arrival = task
        if self._records is not None:
            entered = self._writing[task] = Arrival(task)
            self._records.submitted(task, has_slot=False, done=partial(self._on_written, entered, False))
        self._executor.drop(task, None)
        return entered

    def _admit(self, arrival: Arrival, *, has_slot: bool) -> TaskRecord | Arrival:
        """Take in a task that has a slot or a place in the queue. A durable pool writes it down first."""
        task = arrival.task
        self._states.claim(task)
        if self._records is None:
            self._accept(task, has_slot=has_slot)
            return task
        self._writing[task] = arrival
        if not has_slot:
            self._scheduler.set_aside(task, accepted=False)
        try:
            self._records.submitted(task, has_slot=has_slot, done=partial(self._on_written, arrival, has_slot))
        except BaseException:  # a store that breaks its promise: nothing was acknowledged
            self._on_written(
                arrival, has_slot, StoreWriteFailed(f"the store of {self._executor.name!r} raised in append()")
            )
            raise
        return arrival

    def _accept(self, task: TaskRecord, *, has_slot: bool) -> None:
        """Start or queue a task that is accepted."""
        if has_slot:
            if AUDIT.listeners or self._reporter.audit:
                self._reporter.submitted(task, self._scheduler.depth)
            self._executor.launch_later(task, task.moment if self._records is None else self._executor.moment())
            return
        terms = task.terms
        if terms is PLAIN:
            self._scheduler.enqueue(task)
        else:
            if terms.due is not None and terms.due > clock.now():
                self._scheduler.set_aside(task)
                self._executor.plan(terms.due, "due", task)
            else:
                self._scheduler.enqueue(task)
            if terms.expires_at is not None:
                self._executor.plan(terms.expires_at, "expire", task)
        if AUDIT.listeners or self._reporter.audit:
            self._reporter.submitted(task, self._scheduler.depth)
        if self._allocator is not None and (error := self._allocator.impossible(task)) is not None:
            self._executor.fail_queued(task, error)
            self._executor.tell_idle()
            return
        if self._drops:
            self._drop_victims(task)
        if not self._scheduler.slots.exhausted:
            self._executor.pump()

    def _drop_victims(self, newcomer: TaskRecord) -> None:
        """Drop whom the policy names, if the newcomer made the queue too long."""
        scheduler, bound = self._scheduler, self._scheduler.policy.max_depth
        assert bound is not None, "a policy that drops has one"
        while scheduler.depth > bound:
            victim = scheduler.victim(newcomer)
            scheduler.discard(victim)
            self._executor.drop(victim, newcomer)

    # -- the same work twice -------------------------------------------------------------------------------------------

    def _known(self, task: TaskRecord, key: str, wait: bool) -> TaskRecord | Arrival | None:
        """The task or the arrival that has this idempotency key already."""
        holder = self._states.holder(key, task.moment.now)
        if holder is not None and self._results.is_lost(holder):
            self._states.release(holder)
            holder = None
        arrival = self._queue.with_key(key) if holder is None else self._writing.get(holder)
        known = holder if arrival is None else arrival.task
        if known is None:
            return None
        self._refuse_other_work(task, known, key)
        share(known, task)
        if arrival is not None and task.parent is not None and self._queue.leave(arrival.task) is not None:
            entered = self._admit(arrival, has_slot=False)  # nested work waits for no place, nor for a task that does
            if self._records is None:
                self._welcome(arrival)
            return entered
        if arrival is not None and not wait:
            raise self._scheduler.queue_full(
                f"the task with the idempotency_key {key!r} waits for a place in the queue itself",
                self._retry_after(task),
            )
        if arrival is None and known in self._waking:
            self._waking[known].claimants.append(None)  # another holds its handle now, whatever its first one does
        return known if arrival is None else arrival

    def _refuse_other_work(self, task: TaskRecord, known: TaskRecord, key: str) -> None:
        if task is not known and (differs := self._difference(task, known, key)):
            raise IdempotencyConflict(
                f"the idempotency_key {key!r} is held by {known!r}, which is other work: {differs}"
            )

    def _difference(self, task: TaskRecord, known: TaskRecord, key: str) -> str:
        """What is not the same about the work of a newcomer and of the task that holds its key; "" when nothing is."""
        if self._on_conflict == "trust_key":
            return ""
        if self._records is not None and known.fn is None:
            return self._records.difference(key, task)
        old, held = work_of(known.fn, known.args, known.terms.payload_id)
        new, given = work_of(task.fn, task.args, task.terms.payload_id)
        same = equal(held, given)
        if not same and self._records is not None:  # arrays and the like, whose == is no yes or no
            digest = digest_of("", given)
            same = bool(digest) and digest == digest_of("", held)
        return difference(old, new, same_arguments=same, arguments_differ="" if same else unequal(held, given))

    # -- waiting for a place -------------------------------------------------------------------------------------------

    def _park(self, task: TaskRecord, wait: bool) -> Arrival:
        if not wait:
            depth, bound = self._scheduler.depth, self._scheduler.policy.max_depth
            raise self._scheduler.queue_full(
                f"{depth} tasks are queued, all that max_depth={bound} allows, and submit_nowait() never waits",
                self._retry_after(task),
            )
        arrival = Arrival(task)
        self._queue.join(arrival)
        self._scheduler.announce()
        if task.terms.expires_at is not None:
            self._executor.plan(task.terms.expires_at, "expire", task)
        return arrival

    async def accepted(self, arrival: Arrival, wait_timeout: float | None) -> TaskHandle[Any]:
        """Wait until the task is accepted: for a place, for the disk, or for both."""
        claim = self.claim(arrival, wait_timeout)
        try:
            await claim.future
        except BaseException:
            self._give_up(arrival, claim.future)
            raise
        finally:
            self.settle(claim)
        return arrival.task  # type: ignore[return-value]

    def claim(self, arrival: Arrival, wait_timeout: float | None) -> Claim:
        """Be told when the task is accepted, or why not, by the future of the claim."""
        loop = self._executor.loop
        assert loop is not None, "submit binds it"
        future: asyncio.Future[None] = loop.create_future()
        arrival.claimants.append(future)
        if arrival.settled:  # by a store that did not wait to say so
            self._welcome(arrival, arrival.error)
        self._waking[arrival.task] = arrival
        timer = None
        if wait_timeout is not None and not self.is_writing(arrival):
            timer = loop.call_later(wait_timeout, self._time_out, arrival, future, wait_timeout)
        return Claim(arrival, future, timer)

    def give_up(self, claim: Claim) -> None:
        """Want the task of a claim no more, whether it was accepted or not."""
        if claim.future.done() and not claim.future.cancelled():
            claim.future.exception()  # it is known now
        self._give_up(claim.arrival, claim.future)
        self.settle(claim)

    def settle(self, claim: Claim) -> None:
        """Forget a claim whose future is done."""
        self._waking.pop(claim.arrival.task, None)
        if claim.timer is not None:
            claim.timer.cancel()

    def is_writing(self, arrival: Arrival) -> bool:
        """Does the task have its place, and is it only being written?"""
        return arrival.task in self._writing

    async def accepted_all(self, entered: Sequence[TaskRecord | Arrival], new: Collection[TaskRecord]) -> None:
        """Wait until all of these are accepted. If one is not, or the caller gives up, those of `new` are cancelled."""
        claims = [self.claim(one, one.task.terms.wait_timeout) for one in entered if isinstance(one, Arrival)]
        try:
            for claim in claims:
                await claim.future
        except BaseException:
            for claim in claims:
                self.give_up(claim)
            self._take_back([one for one in entered if not isinstance(one, Arrival)], new)
            raise
        for claim in claims:
            self.settle(claim)

    async def informed(self, budget: SharedBudget) -> None:
        """Wait until it is known how many tasks the other processes have queued."""
        if self._executor.loop is None:
            self._executor.bind()
        await budget.settled()

    async def exchanged(
        self, entered: TaskRecord | Arrival, wait_timeout: float | None, budget: SharedBudget
    ) -> TaskHandle[Any]:
        """Wait until the others know of a task, if it may be next: then it runs already if a slot was free."""
        task: TaskRecord = entered.task if isinstance(entered, Arrival) else entered
        if isinstance(entered, Arrival):
            task = await self.accepted(entered, wait_timeout)
        fails = self._scheduler.policy.answer == "busy"
        if task.status == "queued" and (fails or len(self._scheduler.queue) == 1):
            try:
                await budget.settled()
            except BaseException:
                self._executor.cancel(task)  # nobody will ever hold its handle
                raise
        if fails and task.status == "queued":
            self._scheduler.discard(task)
            self._states.withdraw(task)
            where = "no slot of the shared budget is free" if budget.reachable else "the shared store does not answer"
            if self._scheduler.is_paused(task):
                where = "the pool or its tenant is paused"
            raise self._scheduler.busy(
                f"{where}, and the policy of {self._executor.name!r} is fail_fast", self._retry_after(task)
            )
        return task  # type: ignore[return-value]

    def _time_out(self, arrival: Arrival, future: asyncio.Future[None], seconds: float) -> None:
        if future.done() or arrival.task in self._writing:
            return
        future.set_exception(
            SubmitTimeout(
                f"no place in the queue of {self._executor.name!r} came free in {seconds:g} s",
                retry_after=self._retry_after(arrival.task),
                queued=self._scheduler.depth,
                active=self._scheduler.slots.active,
            )
        )
        self._give_up(arrival, future)  # now: what comes free in this very turn is not for it any more

    def _give_up(self, arrival: Arrival, future: asyncio.Future[None]) -> None:
        """A submitter goes away. When the last of an arrival has gone, the task goes too."""
        if future in arrival.claimants:
            arrival.claimants.remove(future)
        if arrival.claimants:
            return
        task = arrival.task
        if self._queue.leave(task) is not None:
            self._states.withdraw(task)
            self._executor.pump()  # whoever stood behind it may fit in where it did not
        elif not task.finished:
            self._executor.cancel(task)  # it was accepted in this very moment, and nobody will ever hold its handle
        self._executor.tell_idle()

    def settled(self) -> None:
        """Admit waiting submitters in order, as long as there are places."""
        while (arrival := self._queue.first()) is not None:
            has_slot = self._given_slot(arrival.task)
            if not has_slot and self._scheduler.full():
                break
            self._queue.leave(arrival.task)
            self._admit(arrival, has_slot=has_slot)
            if self._records is None:
                self._welcome(arrival)
        self._executor.tell_idle()

    def _welcome(self, arrival: Arrival, error: Exception | None = None) -> None:
        arrival.settled, arrival.error = True, error
        for future in arrival.claimants:
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def expired(self, task: TaskRecord) -> bool:
        """End a task that expired before there was a place for it. Returns False if it does not wait for one."""
        arrival = self._queue.leave(task)
        if arrival is None:
            return False
        self._states.claim(task)
        moment = self._executor.moment()
        if self._records is not None:
            self._writing[task] = arrival
            self._records.submitted(task, has_slot=False, done=partial(self._on_written, arrival, False))
            self._executor.record(task, "expired", moment)
        self._executor.conclude(task, "expired", moment)
        if self._records is None:
            self._welcome(arrival)
        return True

    def _why_waiting(self, task: TaskRecord) -> str:
        explainer = self._executor.explainer
        return "" if explainer is None else explainer.why_waiting(task)

    def _retry_after(self, task: TaskRecord) -> float | None:
        """The estimated seconds until a task like this would start."""
        return seconds_until_start(task, new=True)

    def _given_slot(self, task: TaskRecord) -> bool:
        """Give a newcomer a slot and what it needs, if it can start at once."""
        return task.terms.due is None and self._scheduler.enter(task)

    # -- durable submits -----------------------------------------------------------------------------------------------

    def _on_written(self, arrival: Arrival, has_slot: bool, error: StoreWriteFailed | None) -> None:
        """The submit is durable: start or queue it. Or it is not: as if it had never been."""
        task = arrival.task
        del self._writing[task]
        if error is None and task.status == "queued":
            if self._beat is None:
                self._start_beating()
            self._accept(task, has_slot=has_slot)
            self._welcome(arrival)
            return
        if task.status == "queued":
            if has_slot:
                self._executor.release_unused(task)
            else:
                self._scheduler.discard(task)
            self._states.withdraw(task)
        self._welcome(arrival, error)  # if it is cancelled, dropped or expired meanwhile, its journal says so too
        self._executor.pump()

    def _start_beating(self) -> None:
        """While there is something to do, say so in the journal, for those who read it and do not own it."""
        if self._beat is None and self._executor.loop is not None:
            self._beat = self._executor.loop.call_later(self._stale_after / 3, self._on_beat, context=Context())

    def _on_beat(self) -> None:
        self._beat = None
        if self._records is not None and self._scheduler.size:
            self._records.beat(clock.wall())
            self._start_beating()

    def stop_beating(self) -> None:
        """Write no more signs of life to the journal."""
        if self._beat is not None:
            self._beat.cancel()

    # -- the end -------------------------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Is nothing queued, running, waiting for a place, or being written?"""
        return not self._scheduler.size and not self._queue.line and not self._writing

    def idle(self) -> None:
        """Wake those who wait until everything is done, if it is."""
        if self._idle and self.is_idle():
            waiting, self._idle = self._idle, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def until_idle(self) -> None:
        """Return when the pool is idle, or was a moment ago."""
        future = asyncio.get_running_loop().create_future()
        self._idle.append(future)
        await future

    def begin_to_close(self) -> None:
        """Refuse new work, and those who wait for a place."""
        self._executor.begin_to_close()
        while (arrival := self._queue.first()) is not None:
            self._queue.leave(arrival.task)
            self._states.withdraw(arrival.task)
            name = self._executor.name
            self._welcome(arrival, PoolClosed(f"the pool {name!r} was closed before there was room for the task"))

    def refuse(self, parent: TaskRecord | None) -> None:
        """Raise PoolClosed, unless a task of ours that is being waited for needs this to come to its end."""
        while parent is not None and self._executor.state == "closing":
            if parent.owner is self._executor:
                return
            parent = parent.parent
        error = PoolClosed(f"the pool {self._executor.name!r} is {self._executor.state}")
        if self._executor.ending.exit_code is not None:
            need_not_be_retrieved(error)
        raise error


async def together(submits: Iterable[Coroutine[Any, Any, TaskHandle[Any]]]) -> list[TaskHandle[Any]]:
    """Wait until all of these submits have their handles. If one fails, or nobody waits any more, all are cancelled."""
    running = [asyncio.ensure_future(submit) for submit in submits]
    try:
        return list(await asyncio.gather(*running))
    except BaseException:
        for one in running:
            one.cancel()
        for handle in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(handle, TaskHandle):
                handle.cancel()
        raise
