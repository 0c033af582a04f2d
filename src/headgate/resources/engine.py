"""The shell around the rotation: it takes time and chance from the clock, awaits operations, and does what was decided.

Nothing is awaited while the lock is held.

**One lock for all pools.** Pools may share resources, so a transition of one may re-index another. A lock per pool
would need an order among them; one for all needs none, and costs nothing where it matters: a transition takes
microseconds and the interpreter runs one thread of Python at a time anyway. It is reentrant because the garbage
collector may run a caller's ``__del__`` in the middle of a transition, and that may look at a pool.

**A call makes no Task.** The first step of an operation is taken in line; only one that suspends is put into a
`core.cancellation.Steered`, the handle by which a sibling or a timeout may stop it.

**What the collector abandons.** A coroutine thrown away half-way ends in GeneratorExit, possibly while this very thread
holds the lock. Its flight is then left in `_orphans`, and ended by whoever uses a pool next.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from types import CoroutineType
from typing import Any, Generic, Protocol, TypeVar

from headgate.core.cancellation import Steered, adopt
from headgate.core.checks import is_finite
from headgate.core.clock import clock
from headgate.core.redaction import log_exception, redact
from headgate.core.weakrefs import WeakList
from headgate.errors import InvalidType, PoolExhausted
from headgate.resources import events
from headgate.resources.attempts import AttemptTimeout, Call
from headgate.resources.effects import Cancel, Cool, Disable, Effect, Effects, Enable, Recover, Serve, Starve
from headgate.resources.members import DOOMED, Member, Use, WaitTicket
from headgate.resources.model import Resource
from headgate.resources.reporting import Reporting
from headgate.resources.rotation import Rotation
from headgate.resources.run_options import Plan
from headgate.resources.signals import SIGNALS, CooldownResource, DisableResource, RetryOperation, Signal, signal_in
from headgate.resources.wakeups import LoopWaiter, ThreadWaiter, Waiter

T = TypeVar("T")
R = TypeVar("R")

Classifier = Callable[[Any], Signal | type[Signal] | None]

_log = logging.getLogger("headgate.resources")
turn: Any = threading.RLock()
"""Held for each transition of any pool."""
_orphans: deque[Use | WaitTicket] = deque()

_SIBLING, _TIMEOUT = "sibling", "timeout"


class Follower(Protocol):
    """Somebody who counts on the resources of a pool, and may not stand in its line."""

    def changed(self) -> None:
        """There is one less. From any thread."""


class Engine(Reporting, Generic[T]):
    """What `ResourcePool` is made of."""

    _rotation: Rotation
    _plan: Plan
    _classify: Classifier | None

    def __init__(self) -> None:
        super().__init__()
        self._followers: WeakList[Follower] = WeakList()
        self._alarm: tuple[object, float] | None = None  # whom we asked to watch the next cooldown, and until when

    # -- a call -------------------------------------------------------------------------------------------------------

    async def _run(self, operation: Callable[[Resource[T]], Awaitable[R]], plan: Plan) -> R:
        # The path of every call. A plain one that succeeds needs no Call to keep its progress: made when it does not.
        rotation = self._rotation
        matching = len(rotation.seats)
        call = None if plan is self._plan else self._enter(plan)
        flight = None
        try:
            while True:
                flight = None
                if call is None:
                    try:
                        turn.acquire()  # a `with` would cost twice as much; inside, lest an interrupt falls between
                        now = clock.now()
                        if not rotation.cooling or not rotation.due(now):
                            flight = rotation.acquire(now)
                    finally:
                        turn.release()
                    if flight is None:
                        call = Call(plan, matching, now)
                    elif events.USAGE.listeners:
                        self._report_acquired(flight)
                if flight is None:
                    flight = await self._take(call or self._enter(plan))
                steered: Steered[R] | None = None
                try:
                    context = copy_context() if plan.isolate else None
                    resource = flight.seat.resource
                    made = operation(resource) if context is None else context.run(operation, resource)
                    coroutine, cancellable = (made, True) if type(made) is CoroutineType else _coroutine_of(made)
                    try:
                        first = coroutine.send(None) if context is None else context.run(coroutine.send, None)
                    except StopIteration as done:
                        result: R = done.value
                    else:
                        steered = Steered(coroutine, first, context)
                        if cancellable:
                            set_handle(flight, steered)
                        result = await (steered if plan.timeout is None else bounded(steered, plan.timeout))
                except BaseException as error:
                    signal = self._fail(flight, error, steered, plan)
                    if signal is None:
                        if isinstance(error, TypeError):
                            require_operation(operation)
                        raise
                else:
                    signal = None if self._classify is None else self._classified(result)
                    if signal is None:
                        try:
                            turn.acquire()
                            effects = rotation.ok(flight, clock.now())
                        finally:
                            turn.release()
                        self._runs_ok += 1
                        if effects is not None or _orphans or events.USAGE.listeners or events.RUN.listeners:
                            self._finish_plain(flight, 1 if call is None else call.started, effects)
                        return result
                    self._end(flight, signal)
                call = call or Call(plan, matching, flight.acquired_at, started=1)
                if pause := self._note_failure(call, flight, signal):
                    await asyncio.sleep(pause)
        except BaseException as error:
            self._finish_badly(call, error, flight)
            raise

    def _finish_plain(self, flight: Use, attempts: int, effects: Effects | None) -> None:
        self._carry_out(effects)
        self._report_released(flight, "ok")
        if events.RUN.listeners:
            self._report_run(flight.request_id, "ok", attempts)

    def _enter(self, plan: Plan) -> Call:
        with turn:
            return Call(plan, self._rotation.matching(plan.want), clock.now())

    def _note_failure(self, call: Call, flight: Use, signal: Signal) -> float:
        """Count the attempt; how long to rest before the next. Raises PoolExhausted when it was the last."""
        call.request_id = call.request_id or flight.request_id
        now = clock.now()
        if call.failed(flight, signal, now):
            raise call.out_of_attempts(self._retry_after(call, now))
        return call.pause(clock.uniform(0.5, 1.5), now) if call.plan.retry_delay else 0.0

    # -- taking a resource --------------------------------------------------------------------------------------------

    async def _take(self, call: Call) -> Use:
        """The next resource for `call`; waits for one if its plan says so, else raises PoolExhausted."""
        if call.plan.waits == "no":
            return self._started(call, self._try(call, None))
        taken = None
        while not isinstance(taken, Use):
            waiter = LoopWaiter()
            taken = self._stand(call, taken, waiter)
            if isinstance(taken, WaitTicket):
                try:
                    await waiter.wait(call.deadline)
                except BaseException:
                    self._let_go(taken)
                    raise
                taken = self._collect(call, taken)
        return self._started(call, taken)

    def _take_sync(self, call: Call) -> Use:
        """`_take` for a thread without a loop."""
        if call.plan.waits == "no":
            return self._started(call, self._try(call, None))
        taken = None
        while not isinstance(taken, Use):
            waiter = ThreadWaiter()
            taken = self._stand(call, taken, waiter)
            if isinstance(taken, WaitTicket):
                try:
                    waiter.wait(call.deadline)
                except BaseException:
                    self._let_go(taken)
                    raise
                taken = self._collect(call, taken)
        return self._started(call, taken)

    def _stand(self, call: Call, ticket: WaitTicket | None, waiter: Waiter) -> Use | WaitTicket:
        """A new place in the line (or a resource at once), or the old place with a new alarm clock."""
        if ticket is None:
            taken: Use | WaitTicket = self._try(call, waiter)
            return taken
        with turn:
            ticket.waiter = waiter
            if ticket.grant is not None or ticket not in self._rotation.line:
                waiter.wake()  # it was served or told meanwhile
        self._watch()
        return ticket

    def _try(self, call: Call, waiter: Waiter | None) -> Any:
        """A Flight, or else a place in the line for `waiter`: one step, so that no release falls between."""
        bury()
        rotation, want, affinity = self._rotation, call.plan.want, call.plan.affinity
        taken: Use | WaitTicket | PoolExhausted | None = None
        with turn:
            now = clock.now()
            if call.is_late(now):
                raise call.out_of_time(self._retry_after(call, now))
            effects = rotation.advance(now) if rotation.due(now) else None
            for avoid in call.choices():
                taken = taken or rotation.acquire(now, want, avoid, affinity)
            if taken is None:
                taken = self._why_not(call, now)
            if taken is None:
                limit = call.deadline if call.plan.waits == "for cooldown" else None
                taken = WaitTicket(want, rotation, waiter, limit, affinity)
                rotation.line.join(taken)
        self._carry_out(effects)
        if isinstance(taken, PoolExhausted):
            raise taken
        if isinstance(taken, WaitTicket):
            self._watch()
        return taken

    def _collect(self, call: Call, ticket: WaitTicket) -> Use | WaitTicket | None:
        """What a waiter got, now that it was woken.

        Its ticket again: what it had got was taken back before it woke, and it still stands in line. None: it was told
        that nothing can come, and should see for itself.
        """
        with turn:
            now = clock.now()
            flight = ticket.grant
            waits = ticket in self._rotation.line
            late = (waits or flight is not None) and call.is_late(now)
            why = self._rotation.describe(call.plan.want, now) if late else None
            effects = self._rotation.leave(ticket, now) if late else None
            if flight is not None:
                flight.ticket = None
        self._carry_out(effects)
        self._watch()
        if late:
            raise call.out_of_time(self._retry_after(call, now), waited_for=why)
        return ticket if waits else flight

    def _done(self, call: Call, flight: Use) -> None:
        """A call that keeps a Call succeeded with this flight."""
        self._succeed(flight)
        call.request_id = call.request_id or flight.request_id
        self._finish_well(call)

    def _started(self, call: Call, flight: Use) -> Use:
        call.started += 1
        flight.request_id = call.request_id
        if events.USAGE.listeners:
            try:
                self._report_acquired(flight)
            except BaseException:
                self._let_go(flight)
                raise
        return flight

    def _why_not(self, call: Call, now: float) -> PoolExhausted | None:
        """Why `call` cannot be served now; None when it is worth waiting."""
        rotation, plan = self._rotation, call.plan
        hope = rotation.can_hope(plan.want)
        if plan.waits == "for capacity" and hope:
            return None
        after = self._retry_after(call, now)
        if plan.waits == "for cooldown" and after is not None:
            late = 0.0 if call.deadline is None else now + after - call.deadline
            if call.deadline is None or late < 0:
                return None
            more_time = "Give it more time, or call again after `retry_after` seconds."
            return call.out_of_resources(f"cooldown ends {late:.3f} s after deadline", "deadline", after, more_time)
        why = rotation.describe(plan.want, now)
        remedy = None
        if not rotation.matching(plan.want):
            remedy = "Check tags= and exclude= against the resources of the pool."
        elif not hope:
            remedy = "All of them are disabled: enable() one, or add() another."
        elif plan.waits == "for cooldown":
            remedy = "Pass wait_for_capacity=True to wait for those in use too."
        return call.out_of_resources(why, "no_eligible", after, remedy)

    def _retry_after(self, call: Call, now: float) -> float | None:
        with turn:
            expiry = self._rotation.next_expiry(call.plan.want)
        return None if expiry is None else max(0.0, expiry - now)

    def _let_go(self, thing: Use | WaitTicket) -> None:
        """End a flight without a verdict, or leave the line, handing on what was granted. Safe in a finaliser."""
        _orphans.append(thing)
        bury()

    # -- a use ends ---------------------------------------------------------------------------------------------------

    def _fail(self, flight: Use, error: BaseException, steered: Steered[Any] | None, plan: Plan) -> Signal | None:
        """End a flight by what `error` says. The signal to try again on, or None: `error` is the caller's."""
        if isinstance(error, asyncio.CancelledError) and steered is not None and steered.is_ours(error):
            return self._interrupted(flight, steered, plan)
        signal, alone = signal_in(error)
        if signal is None and isinstance(error, Exception) and self._classify is not None:
            signal, alone = self._classified(error), True
            if signal is not None and signal is not error and signal.__cause__ is None:
                signal.__cause__ = error
        if signal is not None:
            self._end(flight, signal)
            return signal if alone else None
        if isinstance(error, Exception):
            self._succeed(flight, "error")
        else:
            self._let_go(flight)
            self._report_released(flight, "no_verdict")
        return None

    def _interrupted(self, flight: Use, steered: Steered[Any], plan: Plan) -> Signal:
        if steered.asked is _TIMEOUT:
            signal: Signal = AttemptTimeout(f"no result within {plan.timeout} s")
            self._end(flight, signal)
            return signal
        with turn:
            disabled = flight.seat.resource.status == "disabled"
            effects = self._rotation.ended(flight, clock.now())
        self._carry_out(effects)
        self._report_released(flight, "sibling_cancelled")
        cause = "cancelled by a sibling: an older use of the resource failed"
        return DisableResource(cause) if disabled else CooldownResource(reason=cause)

    def _end(self, flight: Use, signal: Signal) -> None:
        """End a flight by a signal."""
        rotation = self._rotation
        with turn:
            now = clock.now()
            if isinstance(signal, CooldownResource):
                seconds = signal.cooldown_seconds  # a subclass may have put anything there
                seconds = seconds if is_finite(seconds) and seconds >= 0 else None
                effects: Effects | None = rotation.cooled(flight, seconds, now=now)
            elif isinstance(signal, DisableResource):
                effects = rotation.disabled(flight, now)
            else:
                effects = rotation.ended(flight, now)
                self._retries += 1
        reason = signal.reason
        self._carry_out(effects, redact(reason) if isinstance(reason, str) else None)
        self._report_released(flight, _outcome(signal))

    def _succeed(self, flight: Use, outcome: events.UsageOutcome = "ok") -> None:
        """End a flight that found its resource in order."""
        with turn:
            effects = self._rotation.ok(flight, clock.now())
        self._carry_out(effects)
        self._report_released(flight, outcome)

    def _classified(self, outcome: object) -> Signal | None:
        """What the pool's classifier makes of a result or an exception."""
        assert self._classify is not None
        try:
            signal = self._classify(outcome)
            if isinstance(signal, type) and issubclass(signal, SIGNALS):
                signal = signal()
        except (Exception, asyncio.CancelledError):
            name, kind = self.name, type(outcome).__name__
            log_exception("headgate.resources", "the classifier of %s failed on %s; taken as no signal", name, kind)
            return None
        if signal is None or isinstance(signal, SIGNALS):
            return signal
        _log.error("the classifier of %s returned %s instead of a signal or None", self.name, type(signal).__name__)
        return None

    # -- doing what was decided ---------------------------------------------------------------------------------------

    def _carry_out(self, effects: Effects | None, reason: str | None = None) -> None:
        bury()
        if effects:
            _carry_out(effects, reason)

    def _tell_followers(self) -> None:
        """There is one resource less."""
        for follower in self._followers:
            follower.changed()

    def _watch(self) -> None:
        """See to it that the first in line notices the end of the next cooldown."""
        rotation = self._rotation
        with turn:
            while first := rotation.line.first():
                expiry = rotation.next_expiry()
                if expiry is None:
                    break
                alarm = (first.waiter, expiry)
                known = alarm == self._alarm and not first.waiter.is_gone()
                if known or first.waiter.set_alarm(expiry - clock.now(), self._ring):
                    self._alarm = alarm
                    return
                rotation.line.leave(first)  # its loop is gone
            self._alarm = None

    def _ring(self) -> None:
        with turn:
            self._alarm = None
            effects = self._rotation.advance(clock.now())
        self._carry_out(effects)
        self._watch()


def _carry_out(effects: Effects, reason: str | None) -> None:
    """Do what rotations decided: first what others wait for, then what they listen to."""
    touched: set[Engine[Any]] = set()
    todo: deque[Effect] = deque(effects)
    news: list[Cool | Disable | Recover | Enable] = []
    while todo:
        effect = todo.popleft()
        if isinstance(effect, Cancel):
            flight, handle = effect.flight, effect.flight.handle
            if handle is not None and handle is not DOOMED:  # it may have ended, or opened its stream, since then
                handle.interrupt(_SIBLING)
            owner = _owner(flight.seat)
            if events.USAGE.listeners:
                usage = owner._usage(flight)
                events.USAGE.emit(events.SiblingCancelled(at=clock.wall(), pool=owner.name, usage=usage))
        elif isinstance(effect, (Serve, Starve)):
            ticket = effect.ticket
            touched.add(ticket.rotation.owner)
            if not ticket.waiter.wake():
                with turn:
                    todo.extend(ticket.rotation.leave(ticket, clock.now()) or ())
        else:
            news.append(effect)
            touched.add(_owner(effect.seat))
    for shell in touched:
        shell._watch()
    for effect in news:
        shell = _owner(effect.seat)
        shell._announce(effect, reason)
        if isinstance(effect, Disable):
            shell._tell_followers()


def bury() -> None:
    """End what the collector abandoned; not while this thread is in a transition: then whoever comes next."""
    if not _orphans or turn._is_owned():
        return
    effects: Effects = []
    left: set[Engine[Any]] = set()
    with turn:
        while _orphans:
            thing = _orphans.popleft()
            now = clock.now()
            if isinstance(thing, Use):
                if thing.order in thing.seat.resource._flights:
                    effects += thing.seat.rotation.ended(thing, now) or ()
            else:
                effects += thing.rotation.leave(thing, now) or ()
                left.add(thing.rotation.owner)
    if effects:
        _carry_out(effects, None)
    for shell in left:
        shell._watch()  # whoever left may have kept the alarm


def _owner(seat: Member) -> Engine[Any]:
    owner: Engine[Any] = seat.rotation.owner
    return owner


def _outcome(signal: Signal) -> events.UsageOutcome:
    if isinstance(signal, RetryOperation):
        return "retry"
    return "disable" if isinstance(signal, DisableResource) else "cooldown"


def _coroutine_of(made: Any) -> tuple[Coroutine[Any, Any, Any], bool]:
    """A coroutine for what an operation returned, and whether siblings may cancel it."""
    if isinstance(made, Coroutine):
        return made, True
    if isinstance(made, Awaitable):
        return adopt(made), asyncio.isfuture(made)
    if inspect.isawaitable(made):
        return adopt(made), False
    streams = hasattr(made, "__anext__")
    raise InvalidType(
        f"operation must return an Awaitable, got {type(made).__name__}",
        remedy="Use stream() for an async generator." if streams else "Pass an async function, or use run_sync().",
    )


def require_operation(operation: object) -> None:
    """Say it clearly when what was passed cannot be called at all."""
    if callable(operation):
        return
    if inspect.iscoroutine(operation):
        operation.close()
    raise InvalidType(
        f"operation must be a function that takes the resource, got {type(operation).__name__}",
        remedy="Pass the function itself, or a lambda: pool.run(lambda resource: fetch(resource, url)).",
    ) from None


def set_handle(flight: Use, steered: Steered[Any]) -> None:
    """From here on siblings may cancel it; one may have wanted to before."""
    doomed, flight.handle = flight.handle is DOOMED, steered
    if doomed:
        flight.status = "cancelled"
        steered.interrupt(_SIBLING)


async def bounded(steered: Steered[R], seconds: float) -> R:
    """Interrupt it when it takes longer."""
    timer = asyncio.get_running_loop().call_later(seconds, steered.interrupt, _TIMEOUT)
    try:
        return await steered
    finally:
        timer.cancel()


def _after_fork() -> None:
    # Another thread of the parent may have held the lock; here there is no such thread.
    turn._at_fork_reinit()
    _orphans.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
