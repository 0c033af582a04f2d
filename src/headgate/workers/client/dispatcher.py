"""Dispatch from one event loop: choose a worker, send the call, report its one outcome.

A dispatcher has connections to the workers that it knows (`connections`). It is made at the first dispatch on its loop
(`lazy`), in the client as in workers, whose routines call others through one of their own.

At most once: a call goes to another worker only if a worker refused it, or if it was never handed to a transport. What
was sent and not answered is lost when its worker is, and runs again only if its routine allows `retries`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import Context
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

from headgate.calls.retrying import add_note, is_retried
from headgate.core.clock import clock
from headgate.core.current_task import CURRENT, current_retry_budget, tenant_text
from headgate.core.lessons import Lesson
from headgate.core.redaction import log_exception
from headgate.errors import DispatchTimeout, HeadgateError, NoWorkersAvailable, PoolClosed, RoutineTimeout, WorkerLost
from headgate.resources.members import Use
from headgate.resources.model import Resource
from headgate.workers.client.availability import Openings
from headgate.workers.client.balancing import Cycle, LoadBalancerLike, Roster, checked_order, strategy_of
from headgate.workers.client.candidates import GRACE, Places
from headgate.workers.client.connection import Connection
from headgate.workers.client.connections import Connections
from headgate.workers.client.failures import (
    INSIDE,
    client_id,
    described,
    fresh,
    listed,
    not_begun,
    raise_answer,
    raise_lost,
    refuse_long,
    tell_dispatched,
    tell_ended,
    too_late,
    unreadable,
)
from headgate.workers.client.isolation import after_loss
from headgate.workers.client.peers import Introductions
from headgate.workers.client.remote_stream import Stream
from headgate.workers.client.routine_call import GONE, ArgumentNames, Attempts, RoutineCall
from headgate.workers.events import TASKS
from headgate.workers.hooks import CALLING
from headgate.workers.model import UNLIMITED, Limits, Report, RoutineOptions, Task, WorkerMetadata
from headgate.workers.protocol.bulk import BulkPayload
from headgate.workers.protocol.messages import CONFIRMATION, UNREAD, Answer, Request, Waiter
from headgate.workers.routines import CALLER
from headgate.workers.serialization import context_frames
from headgate.workers.serialization.dynamic_classes import loads
from headgate.workers.serialization.pickling import dump_arguments

if TYPE_CHECKING:
    from headgate.context.travel import Exchange
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.routines import Routine
    from headgate.workers.server.running_call import RunningCall

_RAN = frozenset({"returned", "raised", "cancelled", "yielded"})
_task_numbers = count(1)
_NOBODY: Mapping[str, str] = {}


class Dispatcher:
    """What calls routines on the workers of a pool, from one event loop."""

    def __init__(
        self,
        balancer: LoadBalancerLike,
        *,
        quorum: int = 1,
        quorum_timeout: float | None = 60.0,
        on_lost: Callable[[WorkerMetadata, str], None] | None = None,
        pool: str = "",
        introductions: Introductions | None = None,
        max_payload: int = 0,
        awaits_endings: bool = False,
        here: str = "",
        limits: Limits = UNLIMITED,
        on_retiring: Callable[[str, str, bool], None] | None = None,
        credentials: WorkerCredentials | None = None,
        places: Places | None = None,
    ) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        strategy = strategy_of(balancer)
        self.custom: LoadBalancerLike | None = None if strategy is not None else balancer
        self.roster: Roster[Connection] = Roster(strategy if strategy is not None else Cycle())
        self._quorum = quorum
        self._quorum_timeout = quorum_timeout
        self.why_none: Callable[[], str] = str  # tells why there may be no worker
        self.max_payload: int = max_payload
        self.here: str = here
        """The uid of the worker in whose process this dispatcher is; "": in none."""
        self.openings: Openings = Openings()
        self.connections: Connections = Connections(
            self.roster,
            self.openings,
            introductions=introductions or Introductions(pool),
            here=here,
            max_payload=max_payload,
            limits=limits,
            credentials=credentials,
            awaits_endings=awaits_endings,
            on_lost=on_lost,
            on_retiring=on_retiring,
            places=places,
            on_evicted=lambda connection: self._report(connection, "evicted"),
        )
        self._calls: dict[RoutineCall, None] = {}
        self._reached_quorum = False
        self._closed = ""
        self._failure: BaseException | None = None

    # -- calls --------------------------------------------------------------------------------------------------------

    async def call(
        self,
        routine: Routine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        limit: float | None,
        caller: str,
        running: RunningCall | None = None,
        to: str = "",
        request: Request | None = None,
    ) -> Any:
        """Run a routine on a worker, or on the one whose uid is `to`; returns or raises what it does there. On a worker
        `running` is the call that makes it."""
        running = running or CALLER.get()
        call = self.prepare(routine, args, kwargs, limit, caller, running, request)
        options = routine.options
        if options.retry_on is not None or options.backoff is not None:
            return await self._repeated(call, running, to)
        call, answer = await self.place(call, running, to)
        return self.finished(call, answer, running)

    async def _repeated(self, call: RoutineCall, running: RunningCall | None, to: str) -> Any:
        """Run a call again after the errors that its routine names, with a pause before each."""
        options, arguments, attempts, failures = call.routine.options, call.arguments, Attempts(), 0
        while True:
            isolation = attempts.isolation
            attempts = Attempts()
            attempts.limit(call, to)
            attempts.left, attempts.isolation = 0, isolation or attempts.isolation
            try:
                call, answer = await self.place(call, running, to, attempts)
                return self.finished(call, answer, running)
            except Exception as error:
                failures += 1
                pause = _pause_after(error, options, failures)
                if pause is None:
                    raise
                if isinstance(error, WorkerLost):
                    attempts.isolation = after_loss(attempts.isolation, options.retries - failures, error.neighbours)
            await asyncio.sleep(pause)
            call = call.again(arguments)
            call.task = next(_task_numbers)

    def stream(
        self,
        routine: Routine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        limit: float | None,
        caller: str,
        running: RunningCall | None = None,
        request: Request | None = None,
    ) -> Stream:
        """Make a generator, which will run on a worker from its first step on."""
        return Stream(self, routine, args, kwargs, limit, caller, running or CALLER.get(), request)

    def prepare(
        self,
        routine: Routine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        limit: float | None,
        caller: str,
        running: RunningCall | None = None,
        request: Request | None = None,
        exchange: Exchange | None = None,
    ) -> RoutineCall:
        """Make a call with its arguments and the Context pickled, to be given to a worker. InvalidArgument: they are
        too long. `exchange`: of a generator."""
        most = self.max_payload
        naming = ArgumentNames(routine)
        arguments = dump_arguments(routine.tag, args, kwargs, routine.fn, naming)
        if 0 < most < len(arguments):
            refuse_long(routine, arguments, most)
        form = naming.form()
        tenant, origin = "", ""
        if request is not None:
            tenant = request.tenant
        elif (task := CURRENT.get()) is not None:
            tenant, origin = tenant_text(task.partition), f"{task.owner.id}/{task.number}"
            if not caller:
                caller, origin = origin, ""
        elif running is not None:
            origin = running.origin
        if running is not None:
            tenant = tenant or running.begun.tenant
        options = routine.options
        call = RoutineCall(
            next(_task_numbers),
            form,
            arguments,
            options.timeout or 0.0,
            caller,
            limit is not None,
            None,
            options.prefetch,
            b"",
            tenant,
            request,
            origin,
        )
        call.routine, call.limit, call.exchange = routine, limit or 0.0, exchange
        call.seen = routine.portable.seen
        call.given = () if request is not None else _resources_in(args, kwargs)
        for hook in CALLING:
            hook(call)
        if exchange is not None or not context_frames.nothing():  # after all else is pickled: see `sent`
            call.context = context_frames.sent(routine.tag, most, exchange)
        return call

    def assign(self, call: RoutineCall, use: Use, waiter: Waiter) -> None:
        """Note which worker a call is given to, and who is told of its answer."""
        call.use, call.connection, call.waiter = use, self.roster.worker_of(use), waiter
        if call.request is not None:
            call.request.placed(call.connection.metadata.uid)
        self._calls[call] = None

    async def place(
        self, call: RoutineCall, running: RunningCall | None = None, to: str = "", attempts: Attempts | None = None
    ) -> tuple[RoutineCall, Answer]:
        """Have a worker take a call, and wait for its first answer: it returned, raised, was cancelled, or yielded.
        Returns the attempt that was answered with its answer. `attempts`: of a call that was placed before."""
        arguments = call.arguments
        if attempts is None:
            attempts = Attempts()
            if to or call.limit or call.request is not None or call.routine.options.retries:
                attempts.limit(call, to)
        if running is not None:
            running.begins_to_wait()
        try:
            while True:
                use = self._choice(call, attempts) or await self._until_chosen(call, attempts)
                waiter = self.loop.create_future()
                self.assign(call, use, waiter)
                connection, isolation = call.connection, attempts.isolation
                if isolation is not None:
                    call.reservation = isolation.reservation
                try:
                    try:
                        if TASKS.listeners:
                            tell_dispatched(call)
                        connection.submit(call)
                        if self.openings.waiters:
                            self.openings.wake(1)  # there may be room for another
                        if attempts.until is not None and not await connection.begins(call, waiter, attempts.until):
                            raise not_begun(call)
                        await waiter
                        answer = call.take_answer()
                        if call.timeout:
                            self.check_time(call, answer)
                    except asyncio.CancelledError as error:
                        answer = await self.cancelled(call, error)
                except BaseException as error:
                    self.give_up(call)
                    self.ended(call, error)
                    raise
                finally:
                    self._calls.pop(call, None)
                    if isolation is not None:
                        connection.release(isolation.reservation)
                if answer.kind in _RAN:
                    return call, answer
                self.unanswered(call, answer, attempts)
                attempts.after_answer(call, answer, self.here)
                call = call.again(arguments)
        finally:
            if running is not None:
                running.waits_no_more()

    def finished(self, call: RoutineCall, answer: Answer, running: RunningCall | None) -> Any:
        """Return or raise what the routine of a call did."""
        scope = None if running is None else running.scope
        self.roster.served(call.use)
        failures = context_frames.came_back(call, answer, running) if answer.context else ()
        if answer.lessons:
            self.learned(call, answer.lessons, running)
        if self.custom is not None:
            self._report(call.connection, "accepted")
        if answer.kind != "returned":
            raise_answer(call, answer, scope, failures)
        if TASKS.listeners:
            tell_ended(call, "returned")
        try:
            result = loads(answer.payload, scope)
        except BaseException as error:
            raise unreadable(call.routine, error) from error
        if failures:
            context_frames.tell(call.routine.tag, failures)
        return result

    def learned(self, call: RoutineCall, lessons: Sequence[Lesson], running: RunningCall | None) -> None:
        """Pass on what a call has learned about resources: to its task, to the resources of this process, or to the
        call that made it."""
        if not lessons:
            return
        if call.request is not None:
            call.request.learned(lessons)
            return
        from headgate.resources.current_use import learn_in_use  # not above: few calls learn something

        left = learn_in_use(lessons, call.given)
        if left and running is not None:
            running.learned(left)

    def unanswered(self, call: RoutineCall, answer: Answer, attempts: Attempts) -> None:
        """Note that a call did not run, or that nobody knows whether it did. Raises if it cannot be placed again."""
        self._refused(call, answer, attempts)
        if self._closed or (answer.kind in GONE and attempts.left <= 0):
            raise_lost(call, answer, self._closed)
        budget = current_retry_budget() if answer.kind in GONE else None
        if budget is not None and not budget.take(clock.now()):
            try:
                raise_lost(call, answer, self._closed)
            except WorkerLost as error:
                add_note(error, budget.why_spent())
                raise

    def waits_for(self, call: RoutineCall) -> None:
        """Count a step of a generator as a call while it is under way."""
        self._calls[call] = None

    def waits_no_more_for(self, call: RoutineCall) -> None:
        """Stop counting a call, which has its answer."""
        self._calls.pop(call, None)

    def served(self, call: RoutineCall, answer: Answer) -> None:
        """Note that a generator has ended on its worker."""
        self.roster.served(call.use)
        self._report(call.connection, "accepted")
        if answer.kind == "returned":
            tell_ended(call, "returned")

    def raise_gone(self, call: RoutineCall, answer: Answer) -> NoReturn:
        """Raise that the worker of a generator is gone, or the pool is."""
        self.roster.ended(call.use)
        self.check_time(call, answer)
        raise_lost(call, answer, self._closed)

    def ended(self, call: RoutineCall, error: BaseException) -> None:
        """Note that a call was given up here, whatever becomes of it on its worker. Until that has ended it, it counts
        as load."""
        outcome = "cancelled" if isinstance(error, asyncio.CancelledError) else "raised"
        outcome = "timeout" if isinstance(error, TimeoutError) else outcome
        use, left = call.use, call.connection.has_left(call)
        if not left:
            self.roster.ended(use)
        tell_ended(call, outcome, described(error))
        if left:
            call.request, call.ended = None, lambda: self.roster.ended(use)

    # -- the choice of a worker ---------------------------------------------------------------------------------------

    def is_usable(self, routine: Routine) -> bool:
        """Whether as many workers have come as the pool waits for. Raises if it is closed."""
        if self._closed:
            raise PoolClosed(f"{routine.tag} cannot be called: its pool is closed ({self._closed})", remedy=INSIDE)
        self._reached_quorum = self._reached_quorum or len(self.roster) >= self._quorum
        return self._reached_quorum

    def expect(self, workers: int, seconds: float) -> None:
        """Let the first calls wait until so many workers are connected, for so long at most. They are spread over all
        then, and do not go to the one that was connected first."""
        if not self._reached_quorum and workers > max(self._quorum, len(self.roster)):
            self.loop.call_later(seconds, self._expect_no_more, self._quorum, context=Context())
            self._quorum = workers

    def _expect_no_more(self, quorum: int) -> None:
        self._quorum = quorum
        self.openings.wake()

    def choose(self, call: RoutineCall, attempts: Attempts) -> Use | None:
        """Take the next worker that takes calls and has not refused this one."""
        if (self._closed or not self._reached_quorum) and not self.is_usable(call.routine):
            return None
        avoid: Collection[str] = attempts.tried
        if self.openings.limited:
            here = self.here if attempts.may_stay else ""
            avoid = self.openings.avoided(self.roster, attempts.tried, call.routine.portable.thread, here)
        if self.custom is not None:
            return self.custom_choice(self.custom, call, avoid)
        bulky = isinstance(call.arguments, BulkPayload)
        use = self.roster.next(clock.now(), avoid)
        while use is not None and not self.roster.worker_of(use).can_take(bulky):
            self.roster.ended(use)
            avoid = {*avoid, use.member.resource.resource_id}
            use = self.roster.next(clock.now(), avoid)
        return use

    def custom_choice(self, balancer: LoadBalancerLike, call: RoutineCall, avoid: Collection[str]) -> Use | None:
        """Take the first worker that a user's balancer names, that takes calls and that is not in `avoid`."""
        task = Task(f"{client_id()}/{call.task}", None, call.routine.tag, call.routine.options.timeout)
        for view in checked_order(balancer, task, self.connections.views()):
            connection = self.roster.get(view.uid)
            if view.uid not in avoid and connection is not None and connection.can_take(call.is_bulky):
                return self.roster.take(view.uid, clock.now())
        return None

    def _choice(self, call: RoutineCall, attempts: Attempts) -> Use | None:
        """Take a worker for the next attempt, if one can be had without waiting."""
        if attempts.isolation is not None:
            return None
        if attempts.to:
            return self._only(attempts.to, call.routine, attempts.tried)
        return self.choose(call, attempts)

    async def _until_chosen(self, call: RoutineCall, attempts: Attempts) -> Use:
        """Wait for a worker for the next attempt."""
        if attempts.isolation is not None:
            return await attempts.isolation.place(self, call, attempts)
        use, since = None, clock.now()
        while use is None:
            waits_for_thread = self.openings.crowded and call.routine.portable.thread
            if call.timeout and waits_for_thread and attempts.patience is None:
                attempts.patience = clock.now() + call.timeout + CONFIRMATION
            await self.until_there_is_one(call, attempts, attempts.patience, since)
            use = self._choice(call, attempts)
        return use

    def _only(self, uid: str, routine: Routine, tried: Mapping[str, str]) -> Use | None:
        """Take this worker and no other, if it takes calls now."""
        self.is_usable(routine)
        connection = self.roster.get(uid)
        if connection is None or uid in tried or connection.session.state in ("stopping", "over"):
            why = tried.get(uid) or self.connections.reasons.get(uid) or "it is gone"
            raise NoWorkersAvailable(f"worker {uid} did not take {routine.tag}: {why}")
        refuses = connection.reserved or (connection.crowded and routine.portable.thread)
        return None if refuses else self.roster.take(uid, clock.now())

    def _report(self, connection: Connection, report: Report) -> None:
        if self.custom is None:
            return
        try:
            self.custom.report(self.connections.view(connection), report)
        except Exception:  # the call has its outcome, and must not lose it
            log_exception("headgate.workers", "report() of the balancer %r failed", self.custom)

    async def until_there_is_one(
        self, call: RoutineCall, attempts: Attempts, patience: float | None = None, since: float | None = None
    ) -> None:
        """Wait until a worker may take a call that none can take now, or give up; at `patience`, because the call's
        timeout is over. `since`: when it began to wait, if that was before."""
        if self._failure is not None:
            raise fresh(self._failure)
        tried = attempts.tried
        admitted = [one for one in self.roster if one.session.state not in ("stopping", "over")]
        if tried and admitted and all(connection.metadata.uid in tried for connection in admitted):
            raise NoWorkersAvailable(f"no worker took {call.routine.tag}: {listed(tried)}")
        waiter = self.loop.create_future()
        self.openings.waiters.append(waiter)
        self.connections.hurry()
        # By the limit that is over, not by the clock: the timer of a loop may be a little early.
        until, kind, what = min(self._limits_of(call, attempts, patience, since), key=lambda limit: limit[0])
        scope = asyncio.timeout(None)
        try:
            async with scope:
                if until != math.inf:
                    self._limit(scope, until)
                await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.openings.wake(1)  # it was its turn, and it goes away: the next one
            raise
        except TimeoutError:
            if not scope.expired():
                raise
            remedy = None if kind is not NoWorkersAvailable else self.connections.remedy
            raise kind(f"{what}: {self.standing(tried)}", remedy=remedy) from None
        if self._failure is not None:
            raise fresh(self._failure)

    def _limits_of(
        self, call: RoutineCall, attempts: Attempts, patience: float | None, since: float | None
    ) -> Iterator[tuple[float, type[HeadgateError], str]]:
        """Yield until when a call may wait for a worker, and for each limit the error and what it says."""
        tag, begun = call.routine.tag, clock.now() if since is None else since
        yield math.inf, NoWorkersAvailable, ""
        if attempts.until is not None:
            what = f"{tag} did not reach a worker within dispatch_timeout={call.limit:g} s"
            yield attempts.until, DispatchTimeout, what
        if patience is not None:
            limit = f"its timeout of {call.timeout:g} s and {CONFIRMATION:g} s more"
            yield patience, RoutineTimeout, f"no worker could begin {tag} within {limit}"
        if self.connections.hopeless:
            yield begun + GRACE, NoWorkersAvailable, f"no worker for {tag}: all that are known refuse"
        if self._quorum_timeout is not None and not self.openings.reserved:  # a call that runs alone will end
            within = f"for {tag} within quorum_timeout={self._quorum_timeout:g} s"
            short = len(self.roster) > 0 and not self._reached_quorum
            what = f"fewer than quorum={self._quorum} workers {within}" if short else f"no worker {within}"
            yield begun + self._quorum_timeout, NoWorkersAvailable, what

    def standing(self, tried: Mapping[str, str] = _NOBODY) -> str:
        """Say of each worker that is known why it takes no call; `tried`: what some of them said to one call."""
        reasons = self.connections.reasons
        for connection in self.roster:
            uid = connection.metadata.uid
            reasons[uid] = tried.get(uid, connection.obstacle or self.connections.view(connection).state)
        return (listed(reasons) or "none is there") + ("" if len(self.roster) else self.why_none())

    def check_time(self, call: RoutineCall, answer: Answer) -> None:
        """Raise RoutineTimeout if a call's timeout is over, and its worker has not said how it ended."""
        late = answer.kind in GONE and not self._closed and call.connection.is_late(call)
        if late or answer.kind == "overdue":
            raise too_late(call, gone=late)

    def give_up(self, call: RoutineCall) -> None:
        """Have a call cancelled that nobody waits for any more."""
        connection = call.connection
        if connection.session.state != "over":
            connection.cancel(call)
            connection.give_up(call)

    async def cancelled(self, call: RoutineCall, error: asyncio.CancelledError) -> Answer:
        """Tell the worker that the caller was cancelled, and wait for the routine to end. Returns what it ended with,
        if it swallowed the cancellation."""
        connection = call.connection
        patient = call.request is not None and call.request.holds
        deadline = clock.now() + CONFIRMATION
        told = False
        before: list[Answer] = []  # items that were on their way
        try:
            while True:
                answer, call.answer = call.answer, None
                if answer is not None:
                    if answer.swallowed and answer.kind in ("returned", "raised", "yielded"):
                        first, *rest = *before, answer
                        if rest and call.backlog is not None:
                            call.backlog.extendleft(reversed(rest))
                        return first
                    if answer.kind != "yielded":
                        context_frames.came_back_late(call, [*before, answer], CALLER.get())
                        for one in (*before, answer):
                            self.learned(call, one.lessons, CALLER.get())
                        answer = None  # it may be long, and an exception keeps its frames for a while
                        before.clear()
                        raise error
                    before.append(answer)
                if connection.session.state == "over" or (not told and connection.cancel(call)):
                    raise error
                told = True
                if call.backlog:
                    call.waiter, call.answer = None, call.backlog.popleft()
                    continue
                waiter = call.waiter = self.loop.create_future()
                scope = asyncio.timeout(None)
                try:
                    async with scope:
                        if not patient:
                            self._limit(scope, deadline)
                        await waiter
                except TimeoutError:
                    if scope.expired():
                        connection.give_up(call)
                        raise error from None
                    raise
                except asyncio.CancelledError as again:
                    error, told = again, False
        finally:
            del error  # else it and this frame hold each other, and those of all callers, until a collection

    def _limit(self, scope: asyncio.Timeout, until: float) -> None:
        """Let a scope end then. asyncio keeps a timer that was cancelled, and its context, as long as another is due
        before it: so an empty one, because that of a task holds its handle, and so its result and its pool."""
        Context().run(scope.reschedule, self.loop.time() + max(0.0, until - clock.now()))

    # -- outcomes -----------------------------------------------------------------------------------------------------

    def _refused(self, call: RoutineCall, answer: Answer, attempts: Attempts) -> None:
        """Note what an attempt that did not run, or was lost, says of its worker."""
        use, connection = call.use, call.connection
        uid = connection.metadata.uid
        assert isinstance(answer.payload, bytes), "a reason is text"
        reason = answer.payload.decode(errors="replace") or connection.reason
        if answer.kind == "unavailable":
            self.roster.failed(use, clock.now())
        else:
            self.roster.ended(use)
        if answer.kind in ("unavailable", "exhausted"):
            status = "UNAVAILABLE" if answer.kind == "unavailable" else "RESOURCE_EXHAUSTED"
            attempts.after_refusal(uid, f"{status}: {reason}")
        elif answer.payload == UNREAD:
            connection.session.bulk.shares = False
        elif answer.kind == "not_started":
            connection.block()  # until it says that its loop is free
        if answer.kind not in ("lost", "unsent", "stopped"):
            self._report(connection, "transient")

    # -- ending -------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException | None) -> None:
        """Raise this in every call that waits for a worker, because none can be started. None: they can be again."""
        self._failure = error
        self.openings.wake()
        self.connections.changed()

    async def connect(self, workers: int) -> None:
        """Connect to this number of workers now, not at the first call."""
        await self.connections.connect(workers, lambda: self._failure is not None)

    @property
    def calls(self) -> int:
        """Number of calls that were placed and not answered."""
        return len(self._calls)

    def refuse(self, why: str) -> None:
        """Refuse new calls from now on."""
        self._closed = why
        self.connections.is_closed = True
        for connection in self.roster:
            connection.give_no_room()
        self.openings.wake()

    def abandon(self, why: str = "its event loop is closed") -> None:
        """Break every session without awaiting anything, because the loop is closed or does not turn."""
        self._closed = self._closed or why
        self.connections.abandon()

    async def close(self, why: str) -> None:
        """End every session. Calls that are left raise PoolClosed."""
        self._closed = self._closed or why
        await self.connections.close(list(self._calls))
        self.openings.wake()


def _resources_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Resource[Any], ...]:
    """The resources among the arguments of a call."""
    return tuple([one for one in (*args, *kwargs.values()) if issubclass(type(one), Resource)])


def _pause_after(error: Exception, options: RoutineOptions, failures: int) -> float | None:
    """The seconds until a call is run again that has failed this many times; None if it is not."""
    if failures > options.retries or not is_retried(options.retry_on or WorkerLost, error):
        return None
    budget, pause = current_retry_budget(), 0.0
    if options.backoff is not None:
        from headgate.resources.http_errors import asked_pause  # not above: few calls pause

        pause = options.backoff.seconds(failures, clock.uniform(0.0, 1.0), asked_pause(error))
    if budget is not None and not budget.take(clock.now()):
        add_note(error, budget.why_spent())
        return None
    return pause
