"""The keywords of a submit, checked once and turned into what the pool works with. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, TypeAlias

from headgate.calls.retrying import checked_backoff, checked_retry_on
from headgate.core.checks import checked_flag, is_finite
from headgate.core.key_windows import checked_window
from headgate.errors import InvalidArgument, InvalidType
from headgate.resources.costs import AnyCost, Cost
from headgate.tasks.model import PLAIN, Terms
from headgate.tasks.runtime.functions import name_of, takes
from headgate.tasks.runtime.ports import Allocator
from headgate.tasks.strategies import KEY, OPTIONS, Strategy

Asked: TypeAlias = tuple[int, Hashable, Hashable, Terms]
"""What a submit asks for: priority, key, partition, terms. A plain tuple, because one is made for every submit."""


def parse(
    options: dict[str, Any],
    args: tuple[Any, ...],
    strategy: Strategy,
    now: float,
    allocator: Allocator | None = None,
    fn: Callable[..., Any] | None = None,
    tenant: str | None = None,
) -> Asked:
    """What these keywords ask for, at the time `now`; InvalidArgument names the first that cannot be.

    `tenant` counts where they name none.
    """
    fair = strategy.key
    own = allocator.options if allocator is not None else ()
    check_names(options, strategy, own=own, fn=fn)
    refuse_callables(options)
    checked: dict[str, Any] = {name: _CHECKS[name](name, value) for name, value in options.items() if name in _CHECKS}
    key = checked.get(KEY)
    labels = checked.get("labels") or {}
    partition = key if fair == KEY else _key(fair, options.get(fair, labels.get(fair)))
    partition = key if partition is None else partition
    if partition is None and tenant is not None:
        partition, key = tenant, tenant if fair == KEY else None
    strategy.check_partition(partition)
    terms = _terms(checked, now)
    if terms.cost is None and (cost := strategy.cost_of(args)) is not None and cost != 1.0:
        terms = replace(terms, cost=cost)
    if allocator is not None and own and not options.keys().isdisjoint(own):
        need, wish = allocator.asks({name: options[name] for name in own if name in options})
        if terms is PLAIN and wish is None and need is not None:
            terms = _terms_of(need)
        elif need is not None or wish is not None:
            terms = replace(terms, need=need, wish=wish)
    return checked.get("priority") or 0, key, partition, terms


@lru_cache(1024)
def _terms_of(need: Hashable) -> Terms:
    """The terms of tasks that ask for nothing but this: they share one object, as those do that ask for nothing."""
    return Terms(need=need)


def _terms(checked: dict[str, Any], now: float) -> Terms:
    given = {name: value for name, value in checked.items() if value is not None}
    if not given.keys() - {"priority", KEY}:
        return PLAIN
    if "window" in given and "idempotency_key" not in given:
        raise InvalidArgument("window says how long an idempotency_key is held, and none is given")
    if "payload_id" in given and "idempotency_key" not in given:
        raise InvalidArgument("payload_id names the work behind an idempotency_key, and none is given")
    deadline, ttl = given.get("deadline"), given.get("ttl")
    ends = [end for end in (deadline, None if ttl is None else now + ttl) if end is not None]
    return Terms(
        idempotency_key=given.get("idempotency_key"),
        window=given.get("window", "until_success"),
        timeout=given.get("timeout"),
        expires_at=min(ends, default=None),
        deadline=deadline,
        retries=_retries(given),
        backoff=given.get("backoff"),
        retry_on=given.get("retry_on"),
        due=now + given["delay"] if given.get("delay") else None,
        wait_timeout=given.get("wait_timeout"),
        cost=given.get("cost"),
        slots=given.get("slots", 1),
        labels=given.get("labels"),
        payload_id=given.get("payload_id"),
        detached=given.get("detached", False),
    )


def _retries(given: Mapping[str, Any]) -> int:
    retries: int = given.get("retries", 0)
    if not retries and ("backoff" in given or "retry_on" in given):
        raise InvalidArgument(
            "backoff and retry_on need retries, which says how often", remedy="Pass retries=3, or leave them out."
        )
    return retries


def check_names(
    options: Iterable[str],
    strategy: Strategy,
    what: str = "submit()",
    own: tuple[str, ...] = (),
    fn: Callable[..., Any] | None = None,
) -> None:
    """Refuse keywords that nobody knows: with the nearest that is known, or as a parameter of `fn`, if it has one."""
    known = dict.fromkeys([*own, *OPTIONS, strategy.key])
    for name in options:
        if name not in known:
            if takes(fn, name):
                raise InvalidArgument(
                    f"{what} has no option {name!r}: it is a parameter of {name_of(fn)}",
                    remedy=f"Keyword arguments of the function go in with functools.partial: "
                    f"{what[:-2]}(functools.partial({name_of(fn)}, {name}=...), ...).",
                )
            near = [_USUAL[name]] if name in _USUAL else difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"Did you mean {near[0]}?" if near else f"It takes {', '.join(known)}."
            if name in ("tags", "exclude", "affinity", "max_attempts"):
                hint = "It is for a headgate.TaskPool with resources=."
            elif name.endswith(("_id", "_key", "tenant")) and not near:
                hint += f' To share by {name}, make the pool with queue=fair_round_robin("{name}").'
            raise InvalidArgument(
                f"{what} has no option {name!r}",
                remedy=f"{hint} Keyword arguments of the function itself go in with functools.partial, labels of yours "
                "in labels={...}.",
            )


def refuse_callables(options: Mapping[str, Any]) -> None:
    """InvalidType: a function, where a plain value is expected."""
    for name, value in options.items():
        if callable(value) and name != "retry_on":
            raise InvalidType(
                f"{name} must be a plain value, got {name_of(value)}, which is to be called",
                remedy=f"Call it, and pass what it returns: {name}={name_of(value)}(...).",
            )


def _key(name: str, value: object) -> Hashable:
    if value is None:
        return None
    refuse_callables({name: value})  # it may stand in labels
    if isinstance(value, str):
        if not value.strip():
            raise InvalidArgument(f"{name} must not be blank, got {value!r}", remedy="Leave it out, or name something.")
        return value
    try:
        hash(value)
    except TypeError:
        raise InvalidType(
            f"{name} must be hashable, got {type(value).__name__}", remedy="Pass a string, a number or a tuple."
        ) from None
    return value


def checked_tenant(value: object) -> Hashable:
    """Return a tenant that tasks can have; None is none."""
    return _key("tenant", value)


def _idempotency_key(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise InvalidArgument(
            f"{name} must be a non-blank string, got {value!r}", remedy="Leave it out, or name the work."
        )
    return value


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"{name} must be a whole number, got {value!r}", remedy="Pass an int, such as 3.")
    return value


def _count(name: str, value: object) -> int:
    count = _whole(name, value)
    if count < 0:
        raise InvalidArgument(f"{name} must be >= 0, got {value!r}", remedy="Pass 0 or more.")
    return count


def _slots(name: str, value: object) -> int:
    slots = _whole(name, value)
    if slots < 1:
        raise InvalidArgument(f"{name} must be >= 1, got {value!r}", remedy="Pass how many slots the task takes.")
    return slots


def _moment(name: str, value: object) -> float | None:
    if value is None:
        return None
    if not is_finite(value):
        kind = "number" if name == "cost" else "number of seconds"
        remedy = "Pass time.monotonic() + seconds." if name == "deadline" else f"Pass a {kind}, such as 2.5."
        raise InvalidArgument(f"{name} must be a finite {kind}, got {value!r}", remedy=remedy)
    return float(value)


def _seconds(name: str, value: object) -> float | None:
    seconds = _moment(name, value)
    if seconds is not None and seconds < 0:
        raise InvalidArgument(f"{name} must be >= 0 seconds, got {value!r}", remedy="Pass 0 or more, such as 2.5.")
    return seconds


def _some(name: str, value: object) -> float | None:
    seconds = _moment(name, value)
    if seconds is not None and seconds <= 0:
        raise InvalidArgument(f"{name} must be > 0, got {value!r}", remedy="Pass more than 0, such as 2.5.")
    return seconds


def _cost(name: str, value: object) -> AnyCost | None:
    if not isinstance(value, Cost):
        return _some(name, value)
    if not value:
        raise InvalidArgument(f"{name} must be > 0, got {value!r}", remedy="Leave it out if it is not known.")
    return value


def _flag(name: str, value: object) -> bool | None:
    return None if value is None else checked_flag(name, value)


def _labels(name: str, value: object) -> Mapping[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(label, str) for label in value):
        raise InvalidType(f"{name} must be a mapping from strings, got {type(value).__name__}")
    return dict(value)


_USUAL: Final = {"retry": "retries", "max_retries": "retries"}
"""What others call an option, where the nearest name is another one."""
_CHECKS: Final = {
    "priority": _whole,
    KEY: _key,
    "idempotency_key": _idempotency_key,
    "window": lambda name, value: None if value is None else checked_window(value),
    "timeout": _some,
    "ttl": _some,
    "deadline": _moment,
    "retries": _count,
    "backoff": lambda name, value: checked_backoff(value),
    "retry_on": lambda name, value: checked_retry_on(value),
    "delay": _seconds,
    "wait_timeout": _seconds,
    "cost": _cost,
    "slots": _slots,
    "labels": _labels,
    "payload_id": _idempotency_key,
    "detached": _flag,
}
