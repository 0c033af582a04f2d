"""Checks of arguments, each with an error that names the parameter, shows what was given and says what to pass.

What may be a secret put in the wrong place is shown by its type only.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeGuard, TypeVar, cast

from headgate.errors import InvalidArgument, InvalidType

F = TypeVar("F", bound=Callable[..., None])
T = TypeVar("T")
StateChange = Callable[[str, str, str, int], object]
"""Called with the id of a resource, its old and its new status, and the number of the change."""

Affinity = str | int | bytes | tuple[str | int | bytes, ...]
"""What calls may be kept together by: values that read the same in every process."""


def is_finite(number: object) -> TypeGuard[float]:
    """A number that arithmetic can bear: not a bool, not infinite, not an integer beyond all floats."""
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return False
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def checked_id(resource_id: object) -> str:
    """Return a resource id, or raise InvalidArgument."""
    if not isinstance(resource_id, str) or not resource_id:
        # The thing passed may well be the secret, put in the wrong place: show its type, never itself.
        shown = "an empty string" if resource_id == "" else type(resource_id).__name__
        raise InvalidArgument(
            f"resource_id must be a non-empty string, got {shown}",
            remedy="Name each resource, for example 'key-1'; the secret itself goes into value.",
        )
    return resource_id


def checked_shared_name(name: object) -> str:
    """The name under which pools of several processes find each other in a store; InvalidArgument if there is none."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument(
            f"store= needs a name= by which processes share the pool, got {name!r}",
            remedy='Give every process the same: ResourcePool(..., name="openai-keys", store=store).',
        )
    return name


def checked_names(parameter: str, names: object) -> frozenset[str]:
    """A set of names (tags or ids), or InvalidType."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        shown = repr(names) if isinstance(names, str) else type(names).__name__
        raise InvalidType(
            f"{parameter} must be a collection of strings, got {shown}",
            remedy=f"Write {parameter}=({shown},)" if isinstance(names, str) else "Pass a list or a set of strings.",
        )
    found = list(names)
    for name in found:
        if not isinstance(name, str):
            raise InvalidType(f"{parameter} must hold strings only, got {type(name).__name__}")
    return frozenset(found)


def checked_affinity(affinity: object) -> Affinity | None:
    """None, or a value that reads the same in every process; else InvalidType."""
    if affinity is None or _is_affinity(affinity):
        return affinity
    shown = type(affinity).__name__
    if isinstance(affinity, tuple):
        shown += f" with {', '.join(sorted({type(part).__name__ for part in affinity if not _is_atom(part)}))} in it"
    raise InvalidType(
        f"affinity must be a str, an int, bytes or a tuple of these, got {shown}",
        remedy="Pass what names the user, session or document, such as affinity=user_id or affinity=(tenant, user_id).",
    )


def _is_affinity(affinity: object) -> TypeGuard[Affinity]:
    return _is_atom(affinity) or (isinstance(affinity, tuple) and all(map(_is_atom, affinity)))


def _is_atom(part: object) -> bool:
    # A bool is an int to Python, and a mistake here: all calls would be kept together, or in two heaps.
    return isinstance(part, (str, int, bytes)) and not isinstance(part, bool)


def checked_number(parameter: str, number: object) -> float:
    """Return a finite number, or raise InvalidArgument."""
    if not is_finite(number):
        raise InvalidArgument(f"{parameter} must be a finite number, got {number!r}")
    return number


def checked_attempts(max_attempts: object) -> int:
    """A usable number of attempts, or InvalidArgument."""
    if not isinstance(max_attempts, int) or isinstance(max_attempts, bool) or max_attempts < 1:
        raise InvalidArgument(
            f"max_attempts must be >= 1, got {max_attempts!r}", remedy="Pass a whole number of at least 1."
        )
    return max_attempts


def checked_flag(parameter: str, flag: object) -> bool:
    """Return a bool, or raise InvalidType."""
    if not isinstance(flag, bool):
        raise InvalidType(f"{parameter} must be bool, got {type(flag).__name__}", remedy="Pass True or False.")
    return flag


def checked_seconds(rule: str, seconds: object, least: float = 0.0) -> float:
    """A finite number of at least `least`, or InvalidArgument with the `rule`."""
    if not is_finite(seconds) or seconds < least:
        raise InvalidArgument(f"{rule}, got {seconds!r}")
    return seconds


# -- options that nobody knows -----------------------------------------------------------------------------------------


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint for who wrote `name`: the known option that is most like it, or all of them."""
    import difflib  # not above: it is needed only when somebody misspelt something

    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]}?" if near else f"It takes {', '.join(known)}."


def named_options(init: F) -> F:
    """A decorator for a constructor: keywords that it does not have are refused with the nearest that it has.

    Its signature stays as it is, for people, `inspect` and type checkers.
    """
    known = [
        parameter.name
        for parameter in inspect.signature(init).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ][1:]  # without self

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise InvalidType(f"{type(self).__name__}() has no option {name!r}", remedy=nearest(name, known))
        init(self, *args, **options)

    return wrapper  # type: ignore[return-value] # it is what it wraps, to whoever calls it


# -- arguments of resource pools ---------------------------------------------------------------------------------------


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


def checked_classifier(classify: T) -> T:
    """Return a classifier or None, or raise InvalidType."""
    if classify is not None:
        _require_callable("classify", classify)
        if inspect.iscoroutinefunction(classify):
            raise InvalidType(
                "classify must be a plain function, got an async one",
                remedy="Write it with `def`: it is asked between two steps of a call and cannot await.",
            )
    return classify


def _require_callable(parameter: str, given: object) -> None:
    if not callable(given):
        raise InvalidType(f"{parameter} must be callable or None, got {type(given).__name__}")


def checked_hook(hook: Callable[..., object] | None) -> StateChange | None:
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
    import asyncio  # not above: checks are read by programs that need no loop

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise InvalidType(
        "run_sync() would block the event loop that runs on this thread",
        remedy="Use `await pool.run(...)` here, or `await asyncio.to_thread(pool.run_sync, ...)`.",
    )


def refuse_awaitable(result: object) -> None:
    """Raise InvalidType for a result that nobody would await."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise InvalidType(
            "run_sync() calls a plain function, but this one returned an awaitable",
            remedy="Use `await pool.run(...)` for async functions.",
        )


def checked_stream(items: T) -> T:
    """Return an async iterator, or raise InvalidType."""
    if hasattr(items, "__anext__"):
        return items
    if inspect.iscoroutine(items):
        items.close()
    raise InvalidType(
        f"operation must return an async iterator, got {type(items).__name__}",
        remedy="Pass an async generator function: an async def that yields.",
    )


# -- arguments of task pools -------------------------------------------------------------------------------------------


def checked_name(name: object, pipeline_id: str | None) -> str:
    """A name. When there is none: "", and the registry draws one; for what is remembered the same each time."""
    if name is not None and not isinstance(name, str):
        raise InvalidType(f"name must be a string or None, got {type(name).__name__}")
    if name and name.strip():
        return name
    return "" if pipeline_id is None else f"pipeline {pipeline_id}"


def checked_whole(what: str, number: object, least: int) -> int:
    """A whole number of at least `least`."""
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise InvalidArgument(
            f"{what} must be >= {least}, got {number!r}", remedy=f"Pass a whole number of at least {least}."
        )
    return number


def checked_stale_after(stale_after: object) -> float:
    """Return `stale_after` in seconds, or raise an error."""
    seconds = stale_after.total_seconds() if isinstance(stale_after, timedelta) else stale_after
    if not is_finite(seconds) or seconds <= 0:
        raise InvalidArgument(f"stale_after must be > 0 seconds or a timedelta, got {stale_after!r}")
    return float(seconds)


def seconds_of(milliseconds: object) -> float | timedelta:
    """Convert a `timedelta` or a number of milliseconds to seconds."""
    if isinstance(milliseconds, timedelta):
        return milliseconds
    if not is_finite(milliseconds) or milliseconds <= 0:
        raise InvalidArgument(f"stale_after_ms must be > 0 milliseconds, got {milliseconds!r}")
    return milliseconds / 1000


def respell(what: str, options: dict[str, Any], name: str, *others: str) -> None:
    """Put an option that was given under one of its other names under its own."""
    refuse_both(what, options, name, *others)
    for other in others:
        if other in options:
            options[name] = options.pop(other)


def refuse_both(what: str, options: Mapping[str, Any], *names: str) -> None:
    """InvalidArgument: an option was given under two of its names."""
    given = [name for name in names if name in options]
    if len(given) > 1:
        raise InvalidArgument(
            f"{what} was given {' and '.join(given)}, which are names of one option", remedy=f"Pass {names[0]} alone."
        )


def check_store(store: object, *, shares: bool = False) -> None:
    """Raise InvalidType for an object that is no store. One that only shares a state needs no journals."""
    if store is not None and not shares and not (hasattr(store, "open") and hasattr(store, "shared")):
        raise InvalidType(
            f"store must be a Store, got {type(store).__name__}",
            remedy="Pass headgate.stores.JsonLinesStore(path), or something with the same methods.",
        )


# -- arguments of worker pools -----------------------------------------------------------------------------------------


def usable_as_balancer(value: object) -> bool:
    """Whether this is a balancer, a factory of one, or a context manager that gives one."""
    return callable(value) or any(hasattr(value, name) for name in ("order", "__aenter__", "__enter__"))


def usable_as_discovery(value: object) -> bool:
    """Whether this has `publisher` and `subscribe`, or can be called or entered to give something that has."""
    return (
        (hasattr(value, "publisher") and hasattr(value, "subscribe"))
        or callable(value)
        or hasattr(type(value), "__aenter__")
        or hasattr(type(value), "__enter__")
    )


def checked_optional_count(name: str, value: object, least: int) -> None:
    """A whole number of at least `least`, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"{name} must be a whole number, got {type(value).__name__}")
    if value < least:
        raise InvalidArgument(f"{name} must be >= {least}, got {value}")


def checked_optional_seconds(name: str, value: object) -> float | None:
    """A number of seconds, or None for no limit."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidType(f"{name} must be a number of seconds or None, got {type(value).__name__}")
    if not is_finite(value) or value < 0:
        raise InvalidArgument(f"{name} must be >= 0, got {value!r}")
    return float(value)


def checked_positive_seconds(name: str, value: object) -> float | None:
    """A number of seconds above 0, or None for no limit."""
    seconds = checked_optional_seconds(name, value)
    if seconds == 0:
        raise InvalidArgument(f"{name} must be above 0, got {value!r}", remedy="None means that there is no limit.")
    return seconds


_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def memory_size(text: str) -> int | None:
    """Return the bytes that ``2G``, ``512MB``, ``1.5 GiB`` or ``1000000`` mean; None: it is no size of memory.

    M, MB and MiB are the same: 2**20 bytes.
    """
    upper = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = upper[-1:] if upper[-1:] in _SIZES else ""
    try:
        size = float(upper.removesuffix(unit)) * _SIZES[unit]
    except ValueError:
        return None
    return int(size) if 1 <= size < 2**63 else None


def checked_memory(name: str, value: object) -> int | None:
    """A size of memory in bytes, from a number or from a text such as "500MB"; None: no limit."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InvalidType(f'{name} must be a number of bytes or a text such as "500MB", got {type(value).__name__}')
    size = memory_size(value if isinstance(value, str) else f"{value:.0f}" if is_finite(value) else "")
    if size is None:
        raise InvalidArgument(f'{name} must be a number of bytes above 0 or a text such as "500MB", got {value!r}')
    return size
