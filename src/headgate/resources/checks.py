"""Checks of what is passed to a pool: its resources, its hooks, what operations return."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, cast

from headgate.errors import InvalidArgument, InvalidType
from headgate.resources.fields import is_finite
from headgate.resources.model import Resource
from headgate.resources.reporting import StateChange


def members_of(resources: object) -> list[Resource[Any]]:
    """The resources given in any of the accepted forms. No message shows a value: it may be a secret."""
    if isinstance(resources, Mapping):
        members = [_keyed(key, item) for key, item in resources.items()]
    elif isinstance(resources, Iterable) and not isinstance(resources, (str, bytes, set, frozenset)):
        members = [
            item if isinstance(item, Resource) else Resource(f"resource-{index}", item)
            for index, item in enumerate(resources)
        ]
    else:
        raise InvalidType(
            f"resources must be a sequence or a mapping, got {type(resources).__name__}",
            remedy='Pass a list of Resource objects, or a dict such as {"key-1": "sk-..."}; the order matters.',
        )
    if not members:
        raise InvalidArgument("a ResourcePool requires at least one resource", remedy="Pass one or more.")
    seen: set[str] = set()
    for member in members:
        if member.resource_id in seen:
            raise InvalidArgument(
                f"Duplicate resource_id in pool: {member.resource_id!r}",
                remedy="Give each resource an id of its own.",
            )
        seen.add(member.resource_id)
    return members


def _keyed(key: object, item: object) -> Resource[Any]:
    if not isinstance(item, Resource):
        return Resource(cast(str, key), item)
    if key != item.resource_id:
        raise InvalidArgument(
            f"dict key {key!r} does not match resource_id {item.resource_id!r}",
            remedy="Use the resource's own id as its key, or pass a list.",
        )
    return item


def checked_table(cooldown_table: object) -> tuple[float, ...]:
    """Seconds of the first, second, ... cooldown in a row."""
    if isinstance(cooldown_table, (str, bytes)) or not isinstance(cooldown_table, Iterable):
        raise InvalidType(
            f"cooldown_table must be a sequence of seconds, got {type(cooldown_table).__name__}",
            remedy="Pass something like (30.0, 120.0, 300.0).",
        )
    table = tuple(cooldown_table)
    if not table:
        raise InvalidArgument("cooldown_table must contain at least one entry, got ()", remedy="Pass some seconds.")
    for entry in table:
        if not is_finite(entry) or entry < 0:
            raise InvalidArgument(f"cooldown_table entries must be finite and >= 0, got {entry!r} in {table!r}")
    return table


def checked_classifier(classify: Any) -> Any:
    """Something to call, or None."""
    if classify is not None:
        _require_callable("classify", classify)
    return classify


def _require_callable(parameter: str, given: object) -> None:
    if not callable(given):
        raise InvalidType(f"{parameter} must be callable or None, got {type(given).__name__}")


def checked_hook(hook: Any) -> StateChange | None:
    """The hook, called with as many arguments as it takes: older code has hooks without `seq`."""
    if hook is None:
        return None
    _require_callable("on_state_change", hook)
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return cast(StateChange, hook)
    for arguments in (("id", "old", "new", 1), ("id", "old", "new")):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return cast(StateChange, hook if len(arguments) == 4 else lambda *args: hook(*args[:3]))
    raise InvalidType(
        f"on_state_change must take (resource_id, old, new, seq), got a callable with {signature}",
        remedy="Give it these four parameters.",
    )


def refuse_on_loop() -> None:
    """Blocking is for threads without a loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise InvalidType(
        "run_sync() would block the event loop that runs on this thread",
        remedy="Use `await pool.run(...)` here, or `asyncio.to_thread(pool.run_sync, ...)`.",
    )


def refuse_awaitable(result: object) -> None:
    """A result nobody would await."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise InvalidType(
            "run_sync() calls a plain function, but this one returned an awaitable",
            remedy="Use `await pool.run(...)` for async functions.",
        )


def checked_stream(items: Any) -> Any:
    """An async iterator."""
    if hasattr(items, "__anext__"):
        return items
    if inspect.iscoroutine(items):
        items.close()
    raise InvalidType(
        f"operation must return an async iterator, got {type(items).__name__}",
        remedy="Pass an async generator function: an async def that yields.",
    )
