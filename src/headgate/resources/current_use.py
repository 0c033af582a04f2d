"""Which uses of resources an operation runs in, so that `resource.spent` and `resource.learn` know whose they are.

Only uses that take something of a quota are noted, and all others pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from contextvars import ContextVar, Token
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeVar

from headgate.core.current_task import CURRENT
from headgate.core.lessons import Lesson

if TYPE_CHECKING:
    from headgate.resources.engine import Engine
    from headgate.resources.members import Use
    from headgate.resources.model import Resource

R = TypeVar("R")

_USES: ContextVar[tuple[Use, ...]] = ContextVar("headgate_uses", default=())


def begin_use(use: Use) -> Token[tuple[Use, ...]]:
    """Note that what runs in this context from now on belongs to this use, until `end_use`."""
    engine = use.member.rotation.owner
    if engine is not None:
        engine.watch_lag(use)
    return _USES.set((*_USES.get(), use))


def end_use(token: Token[tuple[Use, ...]]) -> None:
    """Note that what runs in this context from now on does not belong to the use any more."""
    try:
        _USES.reset(token)
    except ValueError:
        pass  # it ends in another context than the one in which it began: that one has gone


def use_of(resource: Resource[Any]) -> Use | None:
    """The use of this resource in which the code runs that asks."""
    return next((use for use in reversed(_USES.get()) if use.member.resource is resource and use.is_running), None)


def current_uses() -> tuple[Use, ...]:
    """The uses in which the code runs that asks, outermost first. Some may have ended."""
    return _USES.get()


def learn_in_use(lessons: Iterable[Lesson], given: Collection[Resource[Any]] = ()) -> list[Lesson]:
    """Tell resources what a call in another process has learned. Returns the lessons about none of this process.

    `given` are the resources that the call was made with: two pools may have resources of the same id. One that is not
    among them is looked for by its id, in the uses here and in the task in which the call was made.
    """
    left: list[Lesson] = []
    for lesson in lessons:
        resource = next((one for one in given if one.resource_id == lesson.resource_id), None)
        use = next((use for use in reversed(_USES.get()) if use.is_running and _is_about(use, resource, lesson)), None)
        task = CURRENT.get()
        permit = None if task is None else task.permit
        learned = getattr(permit, "learned", None)
        engine = None if use is None else use.member.rotation.owner
        if use is not None and engine is not None:
            engine.learned(use, lesson, task)
        elif permit is not None and learned is not None and (resource is None or permit.resource is resource):
            learned((lesson,))
        elif learned is None and getattr(permit, "resource_id", None) == lesson.resource_id:
            pass  # the task has ended
        elif resource is not None and (owner := _engine_with(resource)) is not None:
            owner.learned_about(resource, lesson)
        else:
            left.append(lesson)
    return left


def _is_about(use: Use, resource: Resource[Any] | None, lesson: Lesson) -> bool:
    used = use.member.resource
    return used.resource_id == lesson.resource_id if resource is None else used is resource


def _engine_with(resource: Resource[Any]) -> Engine[Any] | None:
    """The engine of a pool of this process that has a resource; None for a copy."""
    return next((one.rotation.owner for one in resource.sharing.members if one.rotation.owner is not None), None)


async def attributed(
    operation: Callable[[Resource[Any]], Awaitable[R]], use: Use, coroutine_of: Callable[[object], Awaitable[R]]
) -> R:
    """Await an operation, and let all that it does belong to a use."""
    token = begin_use(use)
    try:
        made = operation(use.member.resource)
        return await (made if type(made) is CoroutineType else coroutine_of(made))
    finally:
        end_use(token)
