"""`TaskAllocator`: gives each task a resource of a ResourcePool at the moment in which it gets its slot."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from inspect import CO_COROUTINE
from types import FunctionType
from typing import TYPE_CHECKING, Any

from headgate.combined.permit import Permit
from headgate.core.checks import Affinity, checked_affinity, checked_attempts, checked_names
from headgate.resources.allocator import Allocator
from headgate.resources.attempts import Call
from headgate.resources.costs import AnyCost
from headgate.resources.members import ANY, CANCEL_REQUESTED, Requirement
from headgate.resources.model import Resource
from headgate.resources.pool import ResourcePool
from headgate.tasks.model import PLAIN, TaskRecord
from headgate.tasks.runtime.functions import is_async
from headgate.tasks.runtime.ports import Changes
from headgate.tasks.streams import StreamBody

if TYPE_CHECKING:
    import asyncio

    from headgate.workers.client.any_function import Placing


class TaskAllocator:
    """Reserves resources for tasks. Without a ResourcePool a task needs none, and its permit has none."""

    def __init__(self, resources: ResourcePool[Any] | None, placing: Placing | None) -> None:
        self.options: tuple[str, ...] = ()
        self.resources: Allocator | None = None
        self.calls: dict[TaskRecord, Call] = {}
        """The attempts so far of each task that has had a verdict and is to be tried again."""
        self._era = object()  # another one whenever the ResourcePool has a resource less
        self._hopeful_in: object = None  # the era in which a resource was found for tasks that ask for any
        self.ending: bool = False
        """Does a task give back its resource now? Its slot follows, so there will be a free one."""
        self._placing = placing
        self._changes: Changes | None = None
        self._others: Affinity = ("others", id(self))  # stands for the affinities that have no class of their own
        if resources is not None:
            self.options = ("tags", "exclude", "affinity", "max_attempts")
            self.resources = Allocator(
                resources, self._came_free, self._lost_one, self._is_full, self._asks_for_slots, self.loop
            )
            self.resources.engine.followers.append(self)

    def on_change(self, changes: Changes) -> None:
        """Tell this executor, from now on, when a resource comes free or is gone."""
        self._changes = changes

    def asks(self, options: Mapping[str, Any]) -> tuple[Hashable, Any]:
        """The requirement that these keywords name, None for any resource; and the affinity and number of attempts."""
        tags, exclude = options.get("tags") or (), options.get("exclude") or ()
        tags, exclude = checked_names("tags", tags), checked_names("exclude", exclude)
        attempts, affinity = options.get("max_attempts"), checked_affinity(options.get("affinity"))
        if attempts is not None:
            checked_attempts(attempts)
        wish = None if attempts is None and affinity is None else (affinity, attempts)
        return Requirement(tags, exclude) if tags or exclude else None, wish

    def impossible(self, task: TaskRecord) -> Exception | None:
        """Why there is no resource that the task could ever have; None if there is one."""
        resources, era = self.resources, self._era
        if resources is None or (task.terms is PLAIN and self._hopeful_in is era):
            return None
        call = self.calls.get(task) if self.calls else None
        error = resources.hopeless(requirement_of(task), call, task.terms.cost or 0.0)
        if error is None and task.terms is PLAIN:
            self._hopeful_in = era  # to look it up would cost more than all else here (benchmarks/combined.py)
        return error

    def changed(self) -> None:
        """Note that a resource was removed or disabled. From any thread."""
        self._era = object()

    def reserve(self, task: TaskRecord, *, wait: bool) -> Permit | None:
        """A permit with a resource that is free now."""
        resources = self.resources
        if resources is None:
            return Permit(task, None, None)
        terms, requirement, affinity = task.terms, ANY, None
        cost: AnyCost = 0.0
        if terms is not PLAIN:
            requirement, affinity = requirement_of(task), None if terms.wish is None else terms.wish[0]
            cost = terms.cost or 0.0
            if affinity is not None and resources.cools_for(affinity):
                requirement = self._set_apart(task, requirement, affinity)
        use = resources.take(requirement, self.calls.get(task) if self.calls else None, affinity, cost, wait=wait)
        if use is None:
            return None
        permit, fn = Permit(task, use, use.member.resource), task.fn
        if isinstance(fn, StreamBody):
            fn.when_open = permit.opened
        if (self._placing is None and fn.__class__ is FunctionType and fn.__code__.co_flags & CO_COROUTINE) or (
            self.can_stop(fn)
        ):
            if use.handle is CANCEL_REQUESTED:
                permit.interrupted = True
            use.handle = permit
        else:
            use.request_id = permit.request_id  # a thread cannot be interrupted: it has no handle
        return permit

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

    def is_in_order(self, permit: Permit) -> bool:
        """Whether its resource is still healthy, not paused, and not cooling down for its affinity."""
        use = permit.use
        if use is None or permit.interrupted:
            return not permit.interrupted
        member = use.member
        if member.resource.status != "healthy" or member.sharing.paused:
            return False
        return member.plain or member.cooling_until(use.affinity) is None

    def can_stop(self, fn: Callable[..., Any] | None) -> bool:
        """Can the function be interrupted, here or on a worker?"""
        if self._placing is not None and fn.__class__ is FunctionType:
            return self._placing.can_stop(fn)
        return is_async(fn) and (self._placing is None or self._placing.can_stop(fn))

    def release(self, permit: Permit) -> None:
        """Take back a resource that was not used."""
        use, permit.use, permit.task = permit.use, None, None
        if use is not None and self.resources is not None:
            self.resources.returned(use)

    def idle(self) -> None:
        """Give back resources that wait for a task with a slot: there is none."""
        if self.resources is not None:
            self.resources.give_back()

    def leave(self, requirement: Hashable) -> bool:
        """Stop waiting for resources of this requirement, so that others get them."""
        if self.resources is not None:
            self.resources.leave(as_requirement(requirement))
        return True

    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the TaskPool; None before its first submit."""
        return None if self._changes is None else self._changes.loop

    def _came_free(self, requirements: list[Requirement], resource: Resource[Any] | None) -> None:
        changes, resources = self._changes, self.resources
        assert changes is not None, "tasks wait for it"
        if resource is not None and resources is not None:
            # For the next of all tasks that can use it, not only of those that waited first.
            changes.offer([need for need in changes.unserved() if resources.can_use(resource, as_requirement(need))])
        changes.reopen(*[None if one == ANY else one for one in requirements])

    def _lost_one(self) -> None:
        if self._changes is not None:
            self._changes.fail_impossible()

    def _asks_for_slots(self) -> bool:
        return self._changes is not None and self._changes.is_shared

    def _is_full(self) -> bool:
        return not self.ending and self._changes is not None and not self._changes.has_free_slot()


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
