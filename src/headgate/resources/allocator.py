"""A resource pool, as somebody sees it who hands out its resources to many tasks in an order of their own.

A call of `run` waits for a resource by itself. A pool of tasks must not: which of its tasks is next is not decided
before there is a resource for one. So it takes what it can get without waiting, and for everything else stands in the
line **once for all who want the same**, like one caller: what comes free goes to it in its turn, and for the next one
it stands at the end again. Callers from outside and the pool so take turns, however many tasks wait behind it.

It stands there on the event loop of its pool and takes what it was granted there; everything else is as for a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headgate.core.clock import clock
from headgate.errors import PoolExhausted
from headgate.resources import events
from headgate.resources.attempts import Call
from headgate.resources.engine import Engine, end_abandoned, engine_of, lock
from headgate.resources.members import ANY, Requirement, Use, WaitTicket
from headgate.resources.model import Resource
from headgate.resources.pool import ResourcePool
from headgate.resources.run_options import Plan
from headgate.resources.signals import Signal
from headgate.resources.stats import describe


class Allocator:
    """The resources of one pool, taken on behalf of many tasks."""

    def __init__(
        self,
        pool: ResourcePool[Any],
        ready: Callable[[list[Requirement], Resource[Any] | None], None],
        less: Callable[[], None],
        full: Callable[[], bool],
        loop: Callable[[], asyncio.AbstractEventLoop | None],
    ) -> None:
        """`ready` is called for wants for which it stands in line no more: with a resource that came free, which others
        may use as well, or because nothing can come, or there was no slot for it (`full`). `less` is called when there
        is one resource less."""
        self.pool: ResourcePool[Any] = pool
        self.engine: Engine[Any] = engine_of(pool)
        self._ready = ready
        self._less = less
        self.full: Callable[[], bool] = full
        self._loop_of_pool = loop
        self._hopeful: set[Requirement] = set()  # something can come for these: so it was, and nothing has gone since
        self.engine.followers.append(self)
        self._places: dict[Requirement, _Place] = {}
        self._granted: Use | None = None  # for whoever is first of those who can use it
        self._plan = Plan(self.engine.plan.max_attempts, waits="for capacity")

    # -- taking --------------------------------------------------------------------------------------------------------

    def take(self, want: Requirement, call: Call | None, affinity: Any, *, wait: bool) -> Use | None:
        """A use of a resource that `want` means, or None.

        With `wait`, if there is none, wait for one: `ready` is called on the loop of the pool. `call` knows what was
        tried before. Raises PoolExhausted when none can ever come.
        """
        granted = self._granted
        if granted is not None and want.fits(granted.member.resource):
            self._granted = None
            return granted
        engine, rotation = self.engine, self.engine.rotation
        if call is None and affinity is None:  # the way of most, as short as that of `run`
            try:
                lock.acquire()
                now = clock.now()
                if not rotation.cooling or not rotation.due(now):
                    flight = rotation.acquire(now, want)
                    if flight is not None:
                        return flight
            finally:
                lock.release()
        end_abandoned()
        effects = error = place = None
        loop = self._loop_of_pool()
        with lock:
            now = clock.now()
            if rotation.cooling and rotation.due(now):
                effects = rotation.advance(now)
            flight = None
            for avoid in call.choices() if call is not None else _NOBODY:
                flight = flight or rotation.acquire(now, want, avoid, affinity)
            if flight is None and wait and loop is not None and want not in self._places:
                if rotation.can_become_free(want):
                    place = self._places[want] = _Place(self, want, loop)
                    rotation.wait_queue.join(place.ticket)
                else:
                    error = self._hopeless(want, now, call)
        if effects and loop is not None:  # soon: who hears of it may call the pool, which is deciding right now
            loop.call_soon(engine.carry_out, effects)
        if place is not None:
            engine.watch()
        if error is not None:
            raise error
        return flight

    def leave(self, want: Requirement) -> None:
        """Do not stand in line for this any more."""
        place = self._places.pop(want, None)
        if place is not None:
            place.rest()
            with lock:
                effects = self.engine.rotation.leave(place.ticket, clock.now())
            self.engine.carry_out(effects)
            self.engine.watch()

    def _woken(self, place: _Place) -> None:
        """Something was granted, or it stands in line no more. On the pool's loop."""
        want, ticket = place.ticket.requirement, place.ticket
        if self._places.get(want) is not place:
            return
        with lock:
            line = self.engine.rotation.wait_queue
            flight, ticket.grant = ticket.grant, None
            if flight is not None:
                flight.ticket = None
                out = [place]
            else:  # all who were passed over, or can hope no more, are told at once: who is next is not for the line
                out = [one for one in self._places.values() if one.ticket.grant is None and one.ticket not in line]
        if not out:
            return  # what it had got was taken back before it woke
        for one in out:
            one.rest()
            del self._places[one.ticket.requirement]
        self.engine.watch()
        self._granted = flight
        try:
            self._ready([one.ticket.requirement for one in out], None if flight is None else flight.member.resource)
        finally:
            unused, self._granted = self._granted, None
            if unused is not None:
                self.engine.let_go(unused)

    def changed(self) -> None:
        """A resource is gone, or was disabled. From any thread."""
        self._hopeful = set()
        loop = self._loop_of_pool()
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._less)
            except RuntimeError:
                pass  # its loop is closed: nobody waits there

    # -- a use ends ----------------------------------------------------------------------------------------------------

    @property
    def classifies(self) -> bool:
        """Has the pool a classifier, which looks at results?"""
        return self.engine.classify is not None

    def acquired(self, flight: Use) -> None:
        """Report that a use has begun."""
        self.engine.reporter.acquired(flight)

    def succeeded(self, flight: Use, attempts: int) -> None:
        """It worked."""
        engine = self.engine
        try:
            lock.acquire()
            effects = engine.rotation.ok(flight, clock.now())
        finally:
            lock.release()
        engine.reporter.runs_ok += 1
        if effects is not None or events.USAGE.listeners or events.RUN.listeners:
            engine.finish_plain(flight, attempts, effects)

    def failed(self, flight: Use, error: BaseException) -> Signal | None:
        """It raised: what does that say? None: nothing that should be tried again."""
        return self.engine.fail(flight, error, None, self._plan)

    def judged(self, flight: Use, result: object) -> Signal | None:
        """It returned: does the pool's classifier find a signal in that? Then the use has ended so."""
        signal = self.engine.classified(result)
        if signal is not None:
            self.engine.end(flight, signal)
        return signal

    def stopped(self, flight: Use) -> None:
        """It was interrupted because an older use of the same resource failed."""
        with lock:
            effects = self.engine.rotation.ended(flight, clock.now())
        self.engine.carry_out(effects)
        self.engine.reporter.released(flight, "sibling_cancelled")

    def dropped(self, flight: Use) -> None:
        """It ended, and nobody knows what that says."""
        if flight.is_running:
            self.engine.let_go(flight)
            self.engine.reporter.released(flight, "no_verdict")

    def returned(self, flight: Use) -> None:
        """It was not used."""
        self.engine.let_go(flight)

    def finished(self, request_id: str, error: BaseException | None, attempts: int) -> None:
        """A task has ended that did not simply succeed."""
        self.engine.reporter.failed(error, request_id, attempts)

    # -- looking -------------------------------------------------------------------------------------------------------

    def matching(self, want: Requirement) -> list[tuple[str, int | None, bool, list[Use]]]:
        """Those that `want` means and that are not disabled: id, limit, is it healthy and takes no more, its uses."""
        with lock:
            return [
                (
                    member.resource.resource_id,
                    member.resource.max_in_flight,
                    member.resource.status == "healthy" and not member.is_open,
                    list(member.uses.values()),
                )
                for member in self.engine.rotation.matching_members(want)
                if member.resource.status != "disabled"
            ]

    @property
    def doubt(self) -> bool:
        """Might there be no resource that can come for anybody?"""
        return ANY not in self._hopeful

    def hopeless(self, want: Requirement, call: Call | None = None) -> PoolExhausted | None:
        """Why nothing can ever come for this; None: something can."""
        if want in self._hopeful:
            return None
        with lock:
            if not self.engine.rotation.can_become_free(want):
                return self._hopeless(want, clock.now(), call)
            if len(self._hopeful) >= _MOST_WANTS:
                self._hopeful.clear()
            self._hopeful.add(want)
            return None

    def _hopeless(self, want: Requirement, now: float, call: Call | None = None) -> PoolExhausted:
        rotation = self.engine.rotation
        if not rotation.matching(want):
            remedy = "Check tags= and exclude= against the resources of the pool, or add() one."
        else:
            remedy = "All of them are disabled: enable() one, or add() another."
        why = describe(rotation, want, now)
        if want != ANY and rotation.matching(want):
            why += f", of those with tags {sorted(want.tags)} and exclude {sorted(want.skip)}"
        return (call or Call(self._plan, 0, now)).out_of_resources(why, "no_eligible", None, remedy)

    def describe(self, want: Requirement) -> str:
        """Why nothing is there for this now."""
        with lock:
            return describe(self.engine.rotation, want, clock.now())

    def back_in(self, want: Requirement) -> float | None:
        """Seconds until the first of those that `want` means ends its cooldown; None: some are only in use."""
        with lock:
            now, rotation = clock.now(), self.engine.rotation
            matching = [s.resource for s in rotation.matching_members(want) if s.resource.status != "disabled"]
            if not matching or any(r.status != "cooling_down" for r in matching):
                return None
            return max(0.0, min(r.cooldown_until for r in matching) - now)

    def call(self, want: Requirement, max_attempts: int | None) -> Call:
        """What keeps the attempts of one task."""
        plan = self._plan
        if max_attempts is not None or want != plan.requirement:
            plan = replace(plan, max_attempts=max_attempts or plan.max_attempts, requirement=want)
        return Call(plan, 0, clock.now())

    def exhausted(self, call: Call) -> PoolExhausted:
        """A task has spent its attempts."""
        return call.out_of_attempts(self.engine.retry_after(call, clock.now()))


_MOST_WANTS = 1024
_NOBODY: tuple[frozenset[str], ...] = (frozenset(),)


class _Place:
    """A place in the line for all who want the same: what is granted is taken on the loop of their pool."""

    def __init__(self, leases: Allocator, want: Requirement, loop: asyncio.AbstractEventLoop) -> None:
        self.ticket = WaitTicket(want, leases.engine.rotation, self)
        self._leases = leases
        self._loop = loop
        self._alarm: asyncio.TimerHandle | None = None
        self._resting = False

    def passes(self) -> bool:
        return self._leases.full()

    def is_gone(self) -> bool:
        return self._loop.is_closed()

    def wake(self) -> bool:
        return self._post(self._leases._woken, self)

    def set_alarm(self, delay: float, ring: Callable[[], None]) -> bool:
        return self._post(self._set, delay, ring)

    def rest(self) -> None:
        """It stands there no more."""
        self._resting = True
        if self._alarm is not None:
            self._alarm.cancel()

    def _set(self, delay: float, ring: Callable[[], None]) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if not self._resting:
            self._alarm = self._loop.call_later(max(0.0, delay), ring)

    def _post(self, callback: Callable[..., None], *args: Any) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return False  # the loop is closed
        return True
