"""Which uses of resources an operation runs in, so that `resource.spent` and `resource.learn` know whose they are.

Only uses that take something of a quota are noted, and all others pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar, Token
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeVar

from headgate.core.current_task import CURRENT
from headgate.core.lessons import Lesson

if TYPE_CHECKING:
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


def learn_in_use(lessons: Iterable[Lesson]) -> None:
    """Tell resources what a call in another process has learned, made in a use of them here, or in a task with one."""
    for lesson in lessons:
        for use in reversed(_USES.get()):
            if use.member.resource.resource_id == lesson.resource_id and use.is_running:
                engine = use.member.rotation.owner
                if engine is not None:
                    engine.learned(use, lesson, CURRENT.get())
                break
        else:
            task = CURRENT.get()
            learned = None if task is None else getattr(task.permit, "learned", None)
            if learned is not None:
                learned((lesson,))


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
