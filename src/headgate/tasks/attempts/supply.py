"""Gives each task of a TaskPool a resource, in the moment in which it gets its slot.

A call of `ResourcePool.run` waits for a resource by itself. A TaskPool must not: which of its tasks is next is not
decided before there is a resource for one of them. So it takes what it can get without waiting. For everything else it
has **one place in the wait queue for each requirement**, like a single caller: a resource that comes free goes to that
place in its turn, and for the next resource the place is at the end of the queue again. So calls of `run` and the
TaskPool take turns, however many tasks are queued.

The places wait on the event loop of the TaskPool, and what they are granted is taken there. Everything else is as for a
call of `run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from contextvars import Context
from dataclasses import replace
from inspect import CO_COROUTINE
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, TypeVarTuple

from headgate.core.checks import Affinity, checked_affinity, checked_attempts, checked_names
from headgate.core.clock import clock
from headgate.errors import PoolExhausted
from headgate.resources import events
from headgate.resources.attempts import Call, Cooldowns
from headgate.resources.costs import AnyCost
from headgate.resources.effects import Effects
from headgate.resources.engine import Engine, end_abandoned, engine_of, lock
from headgate.resources.holding import reprice, unspent
from headgate.resources.members import ANY, CANCEL_REQUESTED, Member, Requirement, Use, WaitTicket
from headgate.resources.model import Resource
from headgate.resources.openings import opens_at
from headgate.resources.pool import ResourcePool
from headgate.resources.signals import Signal
from headgate.resources.stats import describe
from headgate.tasks.attempts.attempt import Attempt
from headgate.tasks.model import PLAIN, TaskRecord
from headgate.tasks.runtime.functions import is_async
from headgate.tasks.runtime.ports import Changes
from headgate.tasks.streams import StreamBody

if TYPE_CHECKING:
    from headgate.workers.client.any_function import Placing

Ts = TypeVarTuple("Ts")


class OnlySlots:
    """The allocator of a pool with workers and without resources: its tasks need nothing but a slot."""

    options: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._changes: Changes | None = None

    def on_change(self, changes: Changes) -> None:
        """Note the executor, whose loop is asked for."""
        self._changes = changes

    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the TaskPool; None before its first submit."""
        return None if self._changes is None else self._changes.loop

    def asks(self, options: Mapping[str, Any]) -> tuple[Hashable, Any]:
        """Nothing: there are no keywords for it."""
        return None, None

    def impossible(self, task: TaskRecord) -> None:
        """None: a worker may always come."""

    def reserve(self, task: TaskRecord, *, wait: bool) -> Attempt:
        """An attempt without a resource."""
        return Attempt(task, None, None)

    def is_in_order(self, permit: Attempt) -> bool:
        """There is nothing that could have changed."""
        return True

    def rests(self, task: TaskRecord) -> bool:
        """There is nothing that could."""
        return False

    def release(self, permit: Attempt) -> None:
        """Let go of the task."""
        permit.task = None

    def idle(self) -> None:
        """Nothing is held."""

    def leave(self, requirement: Hashable) -> bool:
        """Nobody waits for anything."""
        return True


class ResourceSupply:
    """The allocator of a pool with resources: takes those of one ResourcePool on behalf of many tasks."""

    options: tuple[str, ...] = ("tags", "exclude", "affinity", "max_attempts")

    def __init__(self, pool: ResourcePool[Any], placing: Placing | None) -> None:
        """`placing` calls functions on workers; None if tasks run in this process."""
        self.pool: ResourcePool[Any] = pool
        self.engine: Engine[Any] = engine_of(pool)
        self.calls: dict[TaskRecord, Call] = {}
        """The attempts so far of each task that has had a verdict and is to be tried again."""
        self.ending: bool = False
        """Does a task give back its resource now? Its slot follows, so there will be a free one."""
        self._placing = placing
        self._changes: Changes | None = None
        self._others: Affinity = ("others", id(self))  # stands for the affinities that have no class of their own
        # What can be served some day: found so, and no resource has gone since.
        self._hopeful: set[tuple[Requirement, AnyCost]] = set()
        self._era = object()  # another one whenever a resource has gone
        self._any_in: object = None  # the era in which a resource was found for tasks that ask for any
        self._places: dict[Requirement, _Place] = {}
        self._granted: dict[Use, None] = {}  # each for the first task that can use it
        self._offered: Use | None = None  # the one of these that is being offered to all tasks
        self._plan = replace(self.engine.plan, waits="for capacity")

    def on_change(self, changes: Changes) -> None:
        """Tell this executor, from now on, when a resource comes free or is gone."""
        self._changes = changes
        self.engine.followers.append(self)

    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the TaskPool; None before its first submit."""
        return None if self._changes is None else self._changes.loop

    def asks(self, options: Mapping[str, Any]) -> tuple[Hashable, Any]:
        """The requirement that these keywords name, None for any resource; and the affinity and number of attempts."""
        tags, exclude = options.get("tags") or (), options.get("exclude") or ()
        tags, exclude = checked_names("tags", tags), checked_names("exclude", exclude)
        attempts, affinity = options.get("max_attempts"), checked_affinity(options.get("affinity"))
        if attempts is not None:
            checked_attempts(attempts)
        wish = None if attempts is None and affinity is None else (affinity, attempts)
        return Requirement(tags, exclude) if tags or exclude else None, wish

    # -- taking --------------------------------------------------------------------------------------------------------

    def impossible(self, task: TaskRecord) -> Exception | None:
        """Why there is no resource that the task could ever have; None if there is one."""
        era = self._era
        if task.terms is PLAIN and self._any_in is era:
            return None  # a look-up would cost more than all else here (benchmarks/combined.py)
        requirement, cost = requirement_of(task), task.terms.cost or 0.0
        if (requirement, cost) in self._hopeful:
            return None
        with lock:
            if not self.engine.rotation.can_become_free(requirement, cost):
                call = self.calls.get(task) if self.calls else None
                return self._hopeless(requirement, clock.now(), call, cost)
            if len(self._hopeful) >= _MOST_HOPEFUL:
                self._hopeful.clear()
            self._hopeful.add((requirement, cost))
            if task.terms is PLAIN:
                self._any_in = era
            return None

    def reserve(self, task: TaskRecord, *, wait: bool) -> Attempt | None:
        """An attempt with a resource that is free now, or None."""
        terms, requirement, affinity = task.terms, ANY, None
        cost: AnyCost = 0.0
        if terms is not PLAIN:
            requirement, affinity = requirement_of(task), None if terms.wish is None else terms.wish[0]
            cost = terms.cost or 0.0
            if affinity is not None and affinity in self.engine.rotation.cooling_for:
                requirement = self._set_apart(task, requirement, affinity)
        call, use, rotation = self.calls.get(task) if self.calls else None, None, self.engine.rotation
        if call is None and affinity is None and not self._granted:  # most tasks: as short as in `ResourcePool.run`
            try:  # (benchmarks/combined.py)
                lock.acquire()
                now = clock.now()
                if not rotation.cooling or not rotation.due(now):
                    use = rotation.acquire(now, requirement, (), None, cost)
            finally:
                lock.release()
        if use is None:
            use = self._take(requirement, call, affinity, cost, wait=wait)
        if use is None:
            return None
        attempt, fn = Attempt(task, use, use.member.resource), task.fn
        if self._placing is not None or type(fn) is not FunctionType or not fn.__code__.co_flags & CO_COROUTINE:
            if isinstance(fn, StreamBody):
                fn.when_open = attempt.opened
            if not self.can_stop(fn):  # a thread cannot be interrupted: it has no handle
                use.request_id = attempt.request_id
                return attempt
        if use.handle is CANCEL_REQUESTED:
            attempt.interrupted = True
        use.handle = attempt
        return attempt

    def can_stop(self, fn: Callable[..., Any] | None) -> bool:
        """Can the function be interrupted, here or on a worker?"""
        if self._placing is not None and fn.__class__ is FunctionType:
            return self._placing.can_stop(fn)
        return is_async(fn) and (self._placing is None or self._placing.can_stop(fn))

    def _set_apart(self, task: TaskRecord, requirement: Requirement, affinity: Affinity) -> Requirement:
        """Let a task need something else than the others, because a resource cools down for its affinity.

        It would hold up those behind it otherwise, which can use that resource. If there are many such affinities, the
        tasks of several wait together.
        """
        if requirement.affinity is not None or self._changes is None:
            return requirement
        apart = requirement._replace(affinity=affinity)
        if not self._changes.keeps_apart(apart):
            apart = requirement._replace(affinity=self._others)
        self._changes.set_need(task, apart)
        return apart

    def is_in_order(self, permit: Attempt) -> bool:
        """Whether its resource is still healthy, not paused, and not cooling down for its affinity."""
        use = permit.use
        if use is None or permit.interrupted:
            return not permit.interrupted
        member = use.member
        if member.resource.status != "healthy" or member.sharing.paused:
            return False
        return member.plain or member.cooling_until(use.affinity) is None

    def rests(self, task: TaskRecord) -> bool:
        """Whether all resources that could serve this task are cooling down or paused."""
        requirement = requirement_of(task)
        opens = self.back_in(requirement)
        return (opens is not None and opens[1] == "cooldown") or self.is_paused(requirement)

    def release(self, permit: Attempt) -> None:
        """Take back a resource that was not used."""
        use, permit.use, permit.task = permit.use, None, None
        if use is not None:
            self._returned(use)

    def idle(self) -> None:
        """Give back resources that wait for a task with a slot: there is none."""
        for use in list(self._granted):
            self._not_taken(use)

    def leave(self, requirement: Hashable) -> bool:
        """Stop waiting for resources of this requirement, so that others get them."""
        place = self._places.pop(as_requirement(requirement), None)
        if place is not None:
            place.rest()
            with lock:
                effects = self.engine.rotation.leave(place.ticket, clock.now())
            self.engine.carry_out(effects)
            self.engine.watch()
        return True

    def _take(
        self,
        requirement: Requirement,
        call: Call | None,
        affinity: Affinity | None,
        cost: AnyCost = 0.0,
        *,
        wait: bool,
    ) -> Use | None:
        """Begin a use of a resource that fits `requirement`; None if none is free.

        With `wait`, the executor is told when one comes free. `call` knows what was tried before. `cost` is what the
        task takes of a quota. Raises PoolExhausted when none can ever come.
        """
        for granted in self._granted:
            if self._suits(granted.member, requirement, affinity) and self._reprice(granted, cost):
                del self._granted[granted]
                granted.affinity = affinity
                return granted
        engine, rotation = self.engine, self.engine.rotation
        end_abandoned()
        effects = error = place = None
        loop = self.loop()
        with lock:
            now = clock.now()
            if rotation.cooling and rotation.due(now):
                effects = rotation.advance(now)
            use = None
            for avoid in call.choices() if call is not None else _NOBODY:
                use = use or rotation.acquire(now, requirement, avoid, affinity, cost)
            if use is None and wait and loop is not None and requirement not in self._places:
                if rotation.can_become_free(requirement, cost):
                    alone = None if requirement.affinity is None else affinity  # else others of it can use more
                    place = self._places[requirement] = _Place(self, requirement, alone, cost, loop)
                    rotation.join(place.ticket, now)
                else:
                    error = self._hopeless(requirement, now, call, cost)
        self._carry_out_soon(effects)
        if place is not None:
            engine.watch()
        if error is not None:
            raise error
        return use

    def _suits(self, member: Member, requirement: Requirement, affinity: Affinity | None) -> bool:
        is_usable = not member.sharing.paused and member.cooling_until(affinity) is None
        return is_usable and requirement.fits(member.resource)

    def _reprice(self, use: Use, cost: AnyCost) -> bool:
        if use.reservation is None:
            return True
        with lock:
            now = clock.now()
            fits = reprice(use, cost, now)
            effects = self.engine.rotation.quota_changed(use.reservation.account, now)
        self._carry_out_soon(effects)
        return fits

    def _carry_out_soon(self, effects: Effects | None) -> None:
        """Do what was decided, but not now: listeners may call the TaskPool, which is deciding right now."""
        loop = self.loop()
        if effects and loop is not None:
            loop.call_soon(self.engine.carry_out, effects, context=Context())

    def _woken(self, place: _Place) -> None:
        """Pass on what this place was granted, or that it left the wait queue. Runs on the loop of the TaskPool."""
        ticket = place.ticket
        if self._places.get(ticket.requirement) is not place:
            return
        with lock:
            queue = self.engine.rotation.wait_queue
            use, ticket.grant = ticket.grant, None
            if use is not None:
                use.ticket = None
                out = [place]
            else:  # all places that were passed over or cannot be served: which task is next is not decided here
                out = [one for one in self._places.values() if one.ticket.grant is None and one.ticket not in queue]
        if not out:
            return  # what it was granted was taken back before this ran
        for one in out:
            one.rest()
            del self._places[one.ticket.requirement]
        self.engine.watch()
        if use is not None:
            self._granted[use] = None
        self._offered = use
        try:
            self._came_free([one.ticket.requirement for one in out], None if use is None else use.member.resource)
        finally:
            self._offered = None
            loop = self.loop()
            if use in self._granted and loop is not None and self._asks_for_slots():
                # Given back at once, it would go to another process that has to ask for a slot too, and so on.
                loop.call_later(_ASKING, self._not_taken, use, context=Context())
            elif use is not None:
                self._not_taken(use)

    def _not_taken(self, use: Use) -> None:
        """Give back what no task has taken."""
        if use in self._granted:
            del self._granted[use]
            self._returned(use)

    def _came_free(self, requirements: list[Requirement], resource: Resource[Any] | None) -> None:
        """Start tasks of requirements that have no place in the wait queue any more.

        `resource` came free for them. It is None when nothing can come, or when there was no free slot to use it.
        """
        changes = self._changes
        assert changes is not None, "tasks wait for it"
        if resource is not None:
            # For the next of all tasks that can use it, not only of those that waited first.
            changes.offer([need for need in changes.unserved() if self._can_use(resource, as_requirement(need))])
        changes.reopen(*[None if one == ANY else one for one in requirements])

    def _can_use(self, resource: Resource[Any], requirement: Requirement) -> bool:
        """Whether tasks of this requirement can use a resource that came free."""
        with lock:
            member = self.engine.rotation.members.get(resource.resource_id)
            return member is not None and self._suits(member, requirement, requirement.affinity)

    def _asks_for_slots(self) -> bool:
        return self._changes is not None and self._changes.is_shared

    def is_full(self) -> bool:
        """Is there no free slot, so that a resource that comes free should go to somebody else?"""
        return not self.ending and self._changes is not None and not self._changes.has_free_slot()

    def changed(self) -> None:
        """Note that a resource was removed or disabled. From any thread."""
        self._hopeful, self._era = set(), object()
        loop = self.loop()
        if loop is not None and self._changes is not None:
            try:
                loop.call_soon_threadsafe(self._changes.fail_impossible)
            except RuntimeError:
                pass  # its loop is closed: no task waits there

    # -- a use ends ----------------------------------------------------------------------------------------------------

    @property
    def classifies(self) -> bool:
        """Whether the pool was given a classifier, which looks at results."""
        return self.engine.classify is not None

    def acquired(self, use: Use) -> None:
        """Report that a use has begun."""
        self.engine.reporter.acquired(use)

    def succeeded(self, use: Use, task: TaskRecord, attempt: Attempt) -> None:
        """End a use whose task succeeded with this attempt."""
        engine = self.engine
        self.ending = True
        try:
            try:
                lock.acquire()
                effects = engine.rotation.ok(use, clock.now())
            finally:
                lock.release()
            engine.reporter.runs_ok += 1
            if effects is not None or events.USAGE.listeners or events.RUN.listeners:
                use.request_id = attempt.request_id
                engine.finish_plain(use, task.attempt, effects)
        finally:
            self.ending = False

    def answered(self, use: Use, result: object) -> None:
        """Learn what the result of a task says about the limits of its resource."""
        self.engine.answered(use, result)

    def failed(self, use: Use, error: BaseException) -> Signal | None:
        """End a use whose function raised `error`. Returns the signal to try again on, or None if there is none."""
        return self.engine.fail(use, error, None, self._plan, self.engine.classification.of_tasks)

    def judged(self, use: Use, result: object) -> Signal | None:
        """Ask the pool's classifier about a result; if it finds a signal, end the use with that and return it."""
        signal = self.engine.classified(result)
        if signal is not None:
            self.engine.end(use, signal)
        return signal

    def stopped(self, use: Use) -> None:
        """End a use that was interrupted because an older use of the same resource failed."""
        with lock:
            effects = self.engine.rotation.ended(use, clock.now())
        self.engine.carry_out(effects)
        self.engine.reporter.released(use, "sibling_cancelled")

    def dropped(self, use: Use) -> None:
        """End a use without a verdict, if nothing else has ended it."""
        if use.is_running:
            self.engine.let_go(use)
            self.engine.reporter.released(use, "no_verdict")

    def _returned(self, use: Use) -> None:
        """Take back a use that was never begun.

        While it is offered, another task may still take it. Given back at once, it would go to the next place that this
        pool has in the wait queue, be offered again, and so on without end.
        """
        if use is self._offered and use.is_running and use.member.resource.status == "healthy":
            use.handle = None
            self._granted[use] = None
            return
        if use.reservation is not None:
            with lock:
                unspent(use, clock.now())
        self.engine.let_go(use)

    def finished(self, request_id: str, error: BaseException | None, attempts: int) -> None:
        """Count and report a task that was given a resource and did not succeed."""
        self.engine.reporter.failed(error, request_id, attempts)

    # -- explaining ---------------------------------------------------------------------------------------------------

    def matching(self, requirement: Requirement) -> list[tuple[str, int | None, bool, list[Use]]]:
        """Describe the resources that fit and are not disabled: id, limit, whether uses of it must end first, and uses.

        A resource that only lacks quota or is paused is not such a one: time or somebody brings it back.
        """
        with lock:
            return [
                (
                    member.resource.resource_id,
                    member.resource.max_in_flight,
                    member.resource.status == "healthy" and not member.sharing.paused and not member.lacks_only_quota,
                    list(member.uses.values()),
                )
                for member in self.engine.rotation.matching_members(requirement)
                if member.resource.status != "disabled"
            ]

    def _hopeless(
        self, requirement: Requirement, now: float, call: Call | None = None, cost: AnyCost = 0.0
    ) -> PoolExhausted:
        rotation = self.engine.rotation
        if cost and rotation.can_become_free(requirement):
            return (call or Call(self._plan, 0, now)).too_large("task", cost)
        if not rotation.matching(requirement):
            remedy = "Check tags= and exclude= against the resources of the pool, or add() one."
        else:
            remedy = "All of them are disabled: enable() one, or add() another."
        why = describe(rotation, requirement, now)
        if requirement != ANY and rotation.matching(requirement):
            why += f", of those with tags {sorted(requirement.tags)} and exclude {sorted(requirement.skip)}"
        return (call or Call(self._plan, 0, now)).out_of_resources(why, "no_eligible", None, remedy)

    def describe(self, requirement: Requirement) -> str:
        """Why no resource is free for this requirement now."""
        with lock:
            return describe(self.engine.rotation, requirement, clock.now())

    def back_in(self, requirement: Requirement) -> tuple[float, Literal["cooldown", "quota"]] | None:
        """Seconds until the first resource that fits opens, and what ends then; None if some are not closed."""
        with lock:
            now = clock.now()
            matching = self._usable(requirement)
            times = [(opens_at(member, 0.0, now, requirement.affinity), member) for member in matching]
            closed = [(time, member) for time, member in times if time is not None]
            if not closed or len(closed) < len(times):
                return None
            first, member = min(closed, key=lambda one: one[0])
            cools = member.resource.status == "cooling_down" or member.cooling_until(requirement.affinity) is not None
            return max(0.0, first - now), "cooldown" if cools else "quota"

    def is_paused(self, requirement: Requirement) -> bool:
        """Whether all that could serve this requirement is paused."""
        with lock:
            members = self.engine.rotation.matching_members(requirement)
            return not self._usable(requirement) and any(member.sharing.paused for member in members)

    def _usable(self, requirement: Requirement) -> list[Member]:
        """The resources that fit and are neither disabled nor paused."""
        members = self.engine.rotation.matching_members(requirement)
        return [one for one in members if one.resource.status != "disabled" and not one.sharing.paused]

    def call(self, requirement: Requirement, max_attempts: int | None, retries: int = 0) -> Call:
        """Make the `Call` that counts the attempts of one task: `max_attempts`, or else at least `retries` more."""
        plan = self._plan
        if max_attempts is not None:
            plan = replace(plan, max_attempts=max_attempts, max_errors=None)
        elif retries >= plan.max_attempts:
            plan = replace(plan, max_attempts=retries + 1)
        if requirement != plan.requirement:
            plan = replace(plan, requirement=requirement)
        return Call(plan, 0, clock.now(), cooldowns=Cooldowns())

    @property
    def successes(self) -> int:
        """How many calls and tasks have succeeded with resources of the pool."""
        return self.engine.reporter.runs_ok

    def exhausted(self, call: Call) -> PoolExhausted:
        """The error of a task that has spent its attempts."""
        return call.out_of_attempts(self.engine.retry_after(call, clock.now()))


_MOST_HOPEFUL = 1024
_ASKING = 0.1
"""Seconds for which a resource that was granted waits for the slot of a task, if other processes have to be asked."""
_NOBODY: tuple[frozenset[str], ...] = (frozenset(),)


class _Place:
    """A place in the wait queue for all tasks with the same requirement; a `Waiter` on the loop of their pool."""

    def __init__(
        self,
        supply: ResourceSupply,
        requirement: Requirement,
        affinity: Affinity | None,
        cost: AnyCost,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.ticket = WaitTicket(requirement, supply.engine.rotation, self, affinity=affinity, cost=cost)
        self._supply = supply
        self._loop = loop
        self._alarm: asyncio.TimerHandle | None = None
        self._resting = False

    def passes(self) -> bool:
        return self._supply.is_full()

    def is_gone(self) -> bool:
        return self._loop.is_closed()

    def wake(self) -> bool:
        return self._post(self._supply._woken, self)

    def set_alarm(self, delay: float, ring: Callable[[], None]) -> bool:
        return self._post(self._set, delay, ring)

    def rest(self) -> None:
        """Stop the alarm: the place has left the wait queue."""
        self._resting = True
        if self._alarm is not None:
            self._alarm.cancel()

    def _set(self, delay: float, ring: Callable[[], None]) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if not self._resting:
            # Not in the context of the task that happened to be first: it may have ended long before.
            self._alarm = self._loop.call_later(max(0.0, delay), ring, context=Context())

    def _post(self, callback: Callable[[*Ts], None], *args: *Ts) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return False  # the loop is closed
        return True


def requirement_of(task: TaskRecord) -> Requirement:
    """Which resources a task can use."""
    return as_requirement(task.terms.need)


def needed_by(task: TaskRecord) -> Requirement:
    """Which resources a task can use, with its own affinity if one cools down for that."""
    requirement, wish = requirement_of(task), task.terms.wish
    return requirement if requirement.affinity is None else requirement._replace(affinity=wish[0])


def as_requirement(need: Hashable) -> Requirement:
    """Which resources are meant by the requirement of a task; None is any."""
    return need if isinstance(need, Requirement) else ANY
