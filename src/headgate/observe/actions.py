"""What can be done to a running program from outside: cancel, retry, enable, disable, pause, resume, resize, drain.

Each action runs on the event loop of its pool, and is told as an `ActionTaken` event, whether it worked or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from headgate import registry
from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import HeadgateError, InvalidArgument
from headgate.observe.events import ACTIONS, ActionTaken
from headgate.observe.lines import said
from headgate.registry import LivePool
from headgate.tasks.model import Remains, TaskRecord
from headgate.tasks.runtime.story import story_of, story_of_past
from headgate.tasks.runtime.view import find_task, shown, tenant_named

T = TypeVar("T")
Act = Callable[[Any, str], Coroutine[Any, Any, str]]
PATIENCE: Final = 10.0
"""Seconds that a loop has to carry out an action."""
_MOST: Final = 100_000


async def act(action: str, target: str, pool: str = "", origin: str = "program") -> str:
    """Carry out an action, on the loop of its pool; return what was done, or raise InvalidArgument.

    `target` is a task ("pool/17", "pool#17" or its id), a resource, or a number. `pool` is a name, or "#" and the
    number of the pool in a snapshot; it may be left out where the target says which pool is meant. What is paused and
    resumed is the task pool that is the target, or the tenant or resource of this name in `pool`.
    """
    try:
        kinds, work, choose = _known(action)
        entry, subject = choose(kinds, target, pool)
        done = await on_home(entry, lambda live: work(live, subject), changes=True)
    except HeadgateError as error:
        _tell(action, pool, target, origin, redact(said(error)))
        raise
    except Exception as error:
        why = redact(f"{type(error).__name__}: {error}")
        _tell(action, pool, target, origin, why)
        raise InvalidArgument(f"{action} {shown(target)} failed: {why}") from error
    _tell(action, entry.name, target, origin, "done")
    return redact(done)


async def find(action: str, target: str, pool: str = "") -> str:
    """Return the name of the pool that an action would be about, or raise InvalidArgument. Nothing is done."""
    kinds, _, choose = _known(action)
    if choose is _task:
        await story(target, pool)  # or there is no such task
    return choose(kinds, target, pool)[0].name


def _known(action: str) -> tuple[tuple[str, ...], Act, _Choice]:
    known = _ACTIONS.get(action)
    if known is None:
        raise InvalidArgument(f"{shown(action)!r} is no action", remedy=f"One of {', '.join(_ACTIONS)}.")
    return known


async def story(target: str, pool: str = "") -> str:
    """Return the story of a task."""
    entry, number = _task(("tasks",), target, pool)
    return await on_home(entry, lambda live: _story(live, number))


async def _story(pool: Any, number: str) -> str:
    executor = pool.__executor__()
    found = _found(executor, number)
    if isinstance(found, Remains):
        return str(story_of_past(found, executor))
    return str(story_of(found, clock.wall()))


async def on_home(entry: LivePool, work: Callable[[Any], Coroutine[Any, Any, T]], *, changes: bool = False) -> T:
    """Await this on the event loop of a pool; here if it has none, or is at home here.

    What only looks is done here too if that loop is not running. What `changes` the pool is refused then.
    """
    pool, loop = entry.pool, entry.loop
    if pool is None:
        raise InvalidArgument(f"the pool {shown(entry.name)!r} is gone")
    if loop is None or loop is asyncio.get_running_loop():
        return await work(pool)
    if not loop.is_running():
        if changes:
            raise InvalidArgument(
                f"the event loop of {shown(entry.name)!r} is not running",
                remedy="Nothing was done. Try again when the program runs it.",
            )
        return await work(pool)
    return await _on_loop(loop, lambda: work(pool), entry.name)


async def _on_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]], name: str) -> T:
    turns = [work]  # whoever takes it decides: the loop, to do it, or the one who waits, to give up

    async def take() -> T:
        if not turns:
            raise asyncio.CancelledError
        return await turns.pop()()

    future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(take(), loop))
    try:
        await asyncio.wait({future}, timeout=PATIENCE)
        if future.done():  # a TimeoutError of its own is the answer of the work
            return future.result()
    finally:
        future.cancel()
    try:
        turns.pop()  # which is one step, in whatever thread
        remedy = "Nothing was done. Something holds it: look at the running tasks."
    except IndexError:
        remedy = "It has begun, and may still be done."
    raise InvalidArgument(f"the event loop of {shown(name)!r} did not answer within {PATIENCE:g} s", remedy=remedy)


def _tell(action: str, pool: str, target: str, origin: str, outcome: str) -> None:
    if ACTIONS.listeners:
        names = {"action": shown(action), "pool": shown(pool), "target": shown(target), "origin": origin}
        ACTIONS.emit(ActionTaken(at=clock.wall(), **names, outcome=outcome))


# -- which pool is meant -----------------------------------------------------------------------------------------------


def _pools(kinds: tuple[str, ...], pool: str) -> list[LivePool]:
    found = [one for one in registry.pools() if one.kind in kinds]
    if pool.startswith("#") and pool[1:].isdecimal():
        found = [one for one in found if one.number == int(pool[1:])]
    elif pool:
        found = [one for one in found if pool in (one.name, getattr(one.pool, "id", None))]
    if not found:
        raise InvalidArgument(_no_such_pool(kinds, pool))
    return found


def _no_such_pool(kinds: tuple[str, ...], pool: str) -> str:
    if not pool:
        return f"there is no pool of {' or '.join(kinds)} here"
    others = [one.kind for one in registry.pools() if pool == one.name]
    if others:
        return f"{shown(pool)!r} is a pool of {others[0]}, and this is done to pools of {' or '.join(kinds)}"
    return f"there is no such pool here: {shown(pool)!r}"


def _only(found: list[LivePool], what: str) -> LivePool:
    if len(found) > 1:
        names = ", ".join(f"{shown(one.name)} (#{one.number})" for one in found)
        raise InvalidArgument(
            f"{what} could be of several pools: {names}", remedy="Name the pool, or give its number: #2."
        )
    return found[0]


def _task(kinds: tuple[str, ...], target: str, pool: str) -> tuple[LivePool, str]:
    """The pool of a task, and its number."""
    end = max(target.rfind("/"), target.rfind("#"))
    head, number = target[: max(end, 0)], target[end + 1 :]
    if not number.isdecimal():
        raise InvalidArgument(
            f"{shown(target)!r} names no task", remedy="Write pool/17 or pool#17, as `headgate top` shows it."
        )
    found = _pools(kinds, head or pool)
    if head and pool:
        numbers = {one.number for one in _pools(kinds, pool)}
        found = [one for one in found if one.number in numbers]
        if not found:
            raise InvalidArgument(f"{shown(target)!r} is no task of the pool {shown(pool)!r}")
    return _only(found, f"task {number}"), number


def _resource(kinds: tuple[str, ...], target: str, pool: str) -> tuple[LivePool, str]:
    having = [one for one in _pools(kinds, pool) if target in (one.snapshot() or {})]
    if not having:
        raise InvalidArgument(f"no pool here has the resource {shown(target)!r}")
    return _only(having, f"the resource {shown(target)!r}"), target


def _number(kinds: tuple[str, ...], target: str, pool: str) -> tuple[LivePool, str]:
    if not target.isdecimal() or not 1 <= int(target) <= _MOST:
        raise InvalidArgument(f"the new size must be a whole number from 1 to {_MOST}, got {shown(target)!r}")
    return _only(_pools(kinds, pool), "resize"), target


def _whole(kinds: tuple[str, ...], target: str, pool: str) -> tuple[LivePool, str]:
    return _only(_pools(kinds, target or pool), "drain"), ""


def _part(kinds: tuple[str, ...], target: str, pool: str) -> tuple[LivePool, str]:
    """A task pool and "", or a pool and the name of a tenant or resource of it."""
    if not pool:
        return _only(_pools(("tasks",), target), "pause or resume"), ""
    found = _pools(kinds, pool)
    having = [one for one in found if one.kind == "tasks" or target in (one.snapshot() or {})]
    if not having:
        raise InvalidArgument(f"the pool {shown(pool)!r} has no resource {shown(target)!r}")
    return _only(having, shown(target)), target


def _found(executor: Any, number: str) -> TaskRecord | Remains:
    found = find_task(executor, int(number))
    if found is None:
        raise InvalidArgument(
            f"{shown(executor.name)}#{number} is not known: there was none, or it is not among the last that ended"
        )
    return found


# -- the actions, on the loop of their pool ----------------------------------------------------------------------------


async def _cancel(pool: Any, number: str) -> str:
    executor = pool.__executor__()
    found = _found(executor, number)
    if isinstance(found, Remains) or not executor.cancel(found):
        raise InvalidArgument(f"{shown(executor.name)}#{number} has ended already: {found.status}")
    return f"{executor.name}#{number} is cancelled"


async def _retry(pool: Any, number: str) -> str:
    again = await pool.retry(f"{pool.id}/{number}")
    return f"{pool.name}#{number} runs again as {pool.name}#{again.number}"


async def _enable(pool: Any, resource_id: str) -> str:
    await pool.enable(resource_id)
    return f"{resource_id} is enabled"


async def _disable(pool: Any, resource_id: str) -> str:
    await pool.disable(resource_id)
    return f"{resource_id} is disabled; what uses it goes on"


async def _pause(pool: Any, part: str) -> str:
    return _set_paused(pool, part, paused=True)


async def _resume(pool: Any, part: str) -> str:
    return _set_paused(pool, part, paused=False)


def _set_paused(pool: Any, part: str, *, paused: bool) -> str:
    is_now = "is paused; what runs continues" if paused else "is resumed"
    if not hasattr(pool, "__executor__"):
        (pool.pause if paused else pool.resume)(part)
        return f"{part} {is_now}"
    if not part:
        (pool.pause if paused else pool.resume)()
        return f"{pool.name} {is_now}"
    tenant = tenant_named(pool.__executor__(), part)
    (pool.pause_tenant if paused else pool.resume_tenant)(tenant)
    return f"the tenant {shown(tenant)} of {pool.name} {is_now}"


_busy: set[asyncio.Task[None]] = set()  # asyncio holds its tasks weakly


async def _resize(pool: Any, size: str) -> str:
    if hasattr(pool, "__executor__"):
        pool.resize(int(size))
        return f"{pool.name} runs at most {size} tasks at a time"
    await _begin(pool.resize(int(size)), "resize", pool, size)
    return f"the pool gets {size} workers"


async def _drain(pool: Any, _: str) -> str:
    await _begin(pool.close(), "drain", pool, "")
    return f"{pool.name} takes no more tasks, and is closed when those that it has have ended"


async def _begin(work: Coroutine[Any, Any, None], action: str, pool: object, target: str) -> None:
    """Begin what takes long, on the loop of the pool. If it fails at once, that is raised, and else in the events."""
    name = next((one.name for one in registry.pools() if one.pool is pool), "")
    task = asyncio.get_running_loop().create_task(work)
    await asyncio.sleep(0)
    if task.done():
        task.result()
        return

    def ended(task: asyncio.Task[None]) -> None:
        _busy.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _tell(action, name, target, "program", redact(f"{type(error).__name__}: {error}"))

    _busy.add(task)
    task.add_done_callback(ended)


_Choice = Callable[[tuple[str, ...], str, str], tuple[LivePool, str]]
_ACTIONS: Final[dict[str, tuple[tuple[str, ...], Act, _Choice]]] = {
    "cancel": (("tasks",), _cancel, _task),
    "retry": (("tasks",), _retry, _task),
    "enable": (("resources",), _enable, _resource),
    "disable": (("resources",), _disable, _resource),
    "pause": (("tasks", "resources"), _pause, _part),
    "resume": (("tasks", "resources"), _resume, _part),
    "resize": (("tasks", "workers"), _resize, _number),
    "drain": (("tasks",), _drain, _whole),
}
ACTIONS_KNOWN: Final = tuple(_ACTIONS)
"""The names of all actions."""
