"""Triggers: from an event to a task in a named pool."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from typing import Any

from headgate.core.redaction import redact
from headgate.errors import InvalidArgument, InvalidType
from headgate.tasks.handle import TaskHandle
from headgate.tasks.names import pool_get

Factory = Callable[[Any], Callable[[], Any]]
_MISSING = object()


class SpawnToPool:
    """``await handler(event)`` submits what the factory makes of an event."""

    __slots__ = ("_factory", "_key_from", "_pool", "_priority_from")

    def __init__(self, pool: str, factory: Factory, priority_from: str | None, key_from: str | None) -> None:
        self._pool = pool
        self._factory = factory
        self._priority_from = priority_from
        self._key_from = key_from

    async def __call__(self, event: Any) -> TaskHandle[Any]:
        """The handle of the new task. Whatever the pool's policy raises is raised here."""
        pool = pool_get(self._pool)
        if pool is None:
            raise InvalidArgument(
                f"there is no live pool named {self._pool!r}",
                remedy="Make it before the first event, and keep it open.",
            )
        work = self._factory(event)
        if not callable(work):
            if hasattr(work, "close"):
                work.close()
            raise InvalidType(
                f"factory must return a function without arguments, got {type(work).__name__}",
                remedy="Return a lambda or a functools.partial that does the work when it is called.",
            )
        options: dict[str, Any] = {}
        if self._priority_from is not None:
            options["priority"] = _as_priority(pick(event, self._priority_from))
        if self._key_from is not None:
            key = pick(event, self._key_from)
            if key is not _MISSING and key is not None and str(key).strip():
                options["key"] = key if isinstance(key, (str, int)) else str(key)
        return await pool.submit(work, **options, detached=True)  # an event is nobody's subtask

    async def consume(self, events: AsyncIterable[Any], on_error: Callable[[Any, Exception], Any] | None = None) -> int:
        """Submit for every event. One that fails is told to ``on_error(event, error)``, or logged; the next follows.

        Returns how many tasks were submitted.
        """
        submitted = 0
        async for event in events:
            try:
                _ = await self(event)
            except Exception as error:
                if on_error is None:
                    _log(self._pool, error)
                elif hasattr(outcome := on_error(event, error), "__await__"):
                    await outcome
            else:
                submitted += 1
        return submitted

    def __repr__(self) -> str:
        return f"<SpawnToPool {self._pool!r}>"


def spawn_to_pool(
    pool_name: str, factory: Factory, priority_from: str | None = None, key_from: str | None = None
) -> SpawnToPool:
    """A handler that submits a task to the pool of this name for each event.

    ``factory(event)`` returns the function without arguments that does the work. `priority_from` and `key_from` are
    dotted paths into the event ("pull_request.labels.0.priority") that pick priority and key. Neither the strategy nor
    the backpressure of the pool is bypassed.
    """
    if not isinstance(pool_name, str) or not pool_name.strip():
        raise InvalidArgument(f"pool_name must be a non-blank string, got {pool_name!r}")
    if not callable(factory):
        raise InvalidType(
            f"factory must be callable, got {type(factory).__name__}", remedy="Pass a function of an event."
        )
    for name, path in (("priority_from", priority_from), ("key_from", key_from)):
        if path is not None and (not isinstance(path, str) or not all(path.split("."))):
            raise InvalidArgument(f"{name} must be a dotted path such as 'user.id', got {path!r}")
    return SpawnToPool(pool_name, factory, priority_from, key_from)


def pick(event: Any, path: str) -> Any:
    """What stands at this path: keys of mappings, indices of lists, attributes of the rest. Missing: a marker."""
    found = event
    for step in path.split("."):
        if isinstance(found, Mapping):
            found = found.get(step, _MISSING)
        elif isinstance(found, Sequence) and not isinstance(found, (str, bytes)):
            found = _at(found, step)
        else:
            found = getattr(found, step, _MISSING)
        if found is _MISSING:
            return _MISSING
    return found


def _at(found: Sequence[Any], step: str) -> Any:
    try:
        return found[int(step)]
    except (ValueError, IndexError):
        return _MISSING


def _as_priority(value: object) -> int:
    """Numbers, numeric strings and booleans; anything else is 0."""
    if not isinstance(value, (int, float, str)):
        return 0
    for read in (int, lambda text: int(float(text))):
        try:
            return read(value)
        except (ValueError, OverflowError):
            continue
    return 0


def _log(pool: str, error: Exception) -> None:
    import logging

    log = logging.getLogger("headgate.tasks")
    log.error("an event for the pool %r was not submitted: %s", pool, redact(str(error)))
