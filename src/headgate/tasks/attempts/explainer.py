"""`TaskExplainer`: says what tasks with resources wait for, and who holds it."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

from headgate.resources.members import Use
from headgate.tasks.attempts.attempt import Attempt
from headgate.tasks.attempts.supply import ResourceSupply, as_requirement, needed_by, requirement_of
from headgate.tasks.model import RanWith, TaskRecord


class TaskExplainer:
    """Explains why tasks wait for resources and workers."""

    def __init__(self, resources: ResourceSupply | None) -> None:
        self._resources = resources

    def why_waiting(self, task: TaskRecord) -> str:
        """The state of the resources that could serve the task."""
        if self._resources is None:
            return ""
        requirement = needed_by(task)
        opens = self._resources.back_in(requirement)
        soon = "" if opens is None else f", the first for {opens[0]:.1f} s more"
        return f"no resource of {self._resources.pool.name} is free: {self._resources.describe(requirement)}{soon}"

    def waiting_for(self, requirements: Collection[Hashable]) -> dict[str, Any]:
        """What tasks of these requirements wait for: workers, any resource, a cooldown, a quota, or a pause."""
        if self._resources is None:
            return {"cause": "workers", "seconds": None}
        if requirements and all(self._resources.is_paused(as_requirement(need)) for need in requirements):
            return {"cause": "paused", "seconds": None}
        times = [self._resources.back_in(as_requirement(need)) for need in requirements]
        if not times or None in times:
            return {"cause": "resources", "seconds": None}
        seconds, cause = min(time for time in times if time is not None)
        return {"cause": cause, "seconds": seconds}

    def describe(self, ran_with: Attempt | RanWith) -> str:
        """With which resource and on which worker an attempt ran, for its story."""
        with_what = "" if ran_with.resource_id is None else f" with {ran_with.resource_id}"
        return with_what + ("" if ran_with.worker is None else f" on worker {ran_with.worker}")

    def held(self, task: TaskRecord, waiting: Collection[TaskRecord]) -> list[str]:
        """All resources that could serve the task, if each is in full use by tasks that wait, and for nothing else.

        `waiting` wait for it. Others count too if all they wait for is held up in the same way.
        """
        if self._resources is None:
            return []
        users = {_waiting_user(use) for *_, uses in self._usable(task) for use in uses}
        others = {user for user in users if user is not None} - set(waiting)
        while True:
            stuck = {*waiting, *others}
            held = self.held_by(task, stuck)
            free = {
                one for one in others if one.waits is None or not all(_is_held_up(on, stuck) for on in one.waits.on)
            }
            if not held or not free:
                return held
            others -= free

    def held_by(self, task: TaskRecord, stuck: Collection[TaskRecord]) -> list[str]:
        """All resources that could serve the task, if each is in full use by these tasks alone; else nothing."""
        held_uses = {one.permit.use for one in stuck if isinstance(one.permit, Attempt)}
        full = []
        for resource_id, limit, unavailable, uses in self._usable(task):
            held = sum(use in held_uses for use in uses)
            if not (limit is not None and held >= limit) and not (unavailable and held == len(uses)):
                return []
            full.append(resource_id)
        return full

    def _usable(self, task: TaskRecord) -> list[tuple[str, int | None, bool, list[Use]]]:
        return [] if self._resources is None else self._resources.matching(requirement_of(task))


def _is_held_up(task: TaskRecord, stuck: Collection[TaskRecord]) -> bool:
    """Is the task one of these, or is it queued for resources that only these hold?"""
    explainer = task.owner.explainer
    if task in stuck or task.status != "queued" or not isinstance(explainer, TaskExplainer):
        return task in stuck
    return bool(explainer.held_by(task, stuck))


def _waiting_user(use: Use) -> TaskRecord | None:
    """The task that has this use, if it waits for other tasks and does nothing else."""
    task = use.handle.task if isinstance(use.handle, Attempt) else None
    return task if task is not None and task.slot is None and task.waits is not None and task.waits.on else None
