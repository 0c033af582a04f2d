"""The options of `run`, `use`, `lease`, `stream` and `run_sync`, checked once and frozen into a `Plan`.

The options are typed dictionaries, so that five methods share one list of keywords instead of spelling it five times,
and type checkers still see each of them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from headgate.calls.retrying import Backoff, RetryOn, checked_backoff, checked_retry_on
from headgate.core.checks import (
    Affinity,
    checked_affinity,
    checked_attempts,
    checked_flag,
    checked_names,
    checked_seconds,
    checked_whole,
)
from headgate.errors import InvalidArgument, InvalidType
from headgate.resources.costs import AnyCost, checked_cost
from headgate.resources.members import ANY, Requirement

RETRY_DELAY = 0.5


class LeaseOptions(TypedDict, total=False):
    """Options of `ResourcePool.lease`, understood by all the others too."""

    deadline: float | None
    """Do not start, and do not wait, at or after this monotonic time. It never interrupts what has started."""
    within: float | None
    """The same, in seconds from the call."""
    wait_for_cooldown: bool
    """Nothing eligible: wait for the earliest cooldown to end, instead of raising PoolExhausted."""
    wait_for_capacity: bool
    """Nothing eligible: wait for whatever comes first (a slot, a cooldown, a probe), first come first served."""
    tags: Iterable[str]
    """Only resources that carry all of these."""
    exclude: Iterable[str]
    """None of these resource ids."""
    affinity: Affinity | None
    """What the call belongs to, such as a user or a site. A resource may cool down for one affinity alone. With the
    strategy `sticky`, calls with the same affinity are given the same resource where possible."""
    request_id: str | None
    """Attached to every event of the call; made when first needed."""
    cost: AnyCost
    """Tokens that each attempt takes of the quota of its resource, until `resource.spent` tells how many it was: a
    number, or a `Cost` if the quota counts input and output separately."""


class SyncOptions(LeaseOptions, total=False):
    """Options of `ResourcePool.run_sync`: those of `lease`, and how often to try."""

    max_attempts: int | None
    """At most this many attempts; None: the pool's own number."""
    retry_delay: float
    """Mean seconds between two attempts; 0: none."""
    isolate: bool
    """Run each attempt in a copy of the context, so that variables it sets do not stay set."""
    retries: int
    """How many times an error that `retry_on` names is tried again. Verdicts are counted by `max_attempts` alone."""
    retry_on: RetryOn | None
    """Exception classes, or a function of the error, that say which errors are tried again; None: none are."""
    backoff: Backoff | float | None
    """The pauses before those; None: they are tried again at once."""


class StreamOptions(LeaseOptions, total=False):
    """Options of `ResourcePool.stream`: those of `lease`, and how to try before the first item."""

    max_attempts: int | None
    """At most this many attempts; None: the pool's own number."""
    retry_delay: float
    """Mean seconds between two attempts; 0: none."""
    timeout: float | None
    """Interrupt an attempt that has not given its first item after so many seconds, and try again."""
    retries: int
    """How many times an error that `retry_on` names is tried again, before the first item."""
    retry_on: RetryOn | None
    """Exception classes, or a function of the error, that say which errors are tried again; None: none are."""
    backoff: Backoff | float | None
    """The pauses before those; None: they are tried again at once."""


class UseOptions(TypedDict, total=False):
    """Options of `ResourcePool.use`: all of `run` but `request_id`, which is different for each call."""

    max_attempts: int | None
    deadline: float | None
    within: float | None
    timeout: float | None
    retry_delay: float
    wait_for_cooldown: bool
    wait_for_capacity: bool
    tags: Iterable[str]
    exclude: Iterable[str]
    affinity: Affinity | None
    isolate: bool
    cost: AnyCost
    retries: int
    retry_on: RetryOn | None
    backoff: Backoff | float | None


class RunOptions(SyncOptions, total=False):
    """Options of `ResourcePool.run`: those of `run_sync`, and a limit for each attempt."""

    timeout: float | None
    """Interrupt an attempt after so many seconds, and try again."""


Waits = Literal["no", "for cooldown", "for capacity"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Checked options. `deadline` is relative when `within` is given: see `deadline_at`."""

    max_attempts: int
    deadline: float | None = None
    within: float | None = None
    timeout: float | None = None
    retry_delay: float = RETRY_DELAY
    request_id: str | None = None
    waits: Waits = "no"
    requirement: Requirement = ANY
    affinity: Affinity | None = None
    isolate: bool = False
    cost: AnyCost = 0.0
    retries: int = 0
    retry_on: RetryOn | None = None
    backoff: Backoff | None = None
    max_errors: int | None = None
    """Attempts that may end in RetryOperation, which says nothing against a resource; None: `max_attempts` counts."""

    @property
    def need(self) -> Requirement:
        """The requirement of a call that has this affinity."""
        return self.requirement if self.affinity is None else self.requirement._replace(affinity=self.affinity)

    def deadline_at(self, now: float) -> float | None:
        """The deadline of a call that starts now."""
        return self.deadline if self.within is None else now + self.within


def plan_of(options: Mapping[str, Any], *, method: str, allowed: frozenset[str], max_attempts: int) -> Plan:
    """Check options and make their plan; the error names the first option that is wrong."""
    for name in options:
        if name not in allowed:
            raise _unexpected(method, name, allowed)
    given = options.get
    attempts = given("max_attempts")
    deadline, within, timeout = given("deadline"), given("within"), given("timeout")
    if deadline is not None:
        checked_seconds("deadline must be a finite time.monotonic() value", deadline, least=-math.inf)
    if within is not None:
        checked_seconds("within must be a finite number of seconds >= 0", within)
    if timeout is not None and checked_seconds("timeout must be a finite number of seconds > 0", timeout) == 0:
        raise InvalidArgument("timeout must be a finite number of seconds > 0, got 0", remedy="Leave it out for none.")
    if deadline is not None and within is not None:
        raise InvalidArgument(
            f"deadline and within are the same bound, got both ({deadline!r} and {within!r})",
            remedy="Pass the absolute deadline= or the relative within=.",
        )
    delay = given("retry_delay", RETRY_DELAY)
    request_id = given("request_id")
    if request_id is not None and not isinstance(request_id, str):
        raise InvalidType(f"request_id must be a string or None, got {type(request_id).__name__}")
    tags, exclude = checked_names("tags", given("tags", ())), checked_names("exclude", given("exclude", ()))
    return Plan(
        max_attempts=max_attempts if attempts is None else checked_attempts(attempts),
        deadline=deadline,
        within=within,
        timeout=timeout,
        retry_delay=checked_seconds("retry_delay must be >= 0 and finite", delay),
        request_id=request_id,
        waits=_waits(options),
        requirement=Requirement(tags, exclude) if tags or exclude else ANY,
        affinity=checked_affinity(given("affinity")),
        isolate=checked_flag("isolate", given("isolate", False)),
        cost=checked_cost("cost", given("cost", 0.0)),
        retries=_retries(options),
        retry_on=checked_retry_on(given("retry_on")),
        backoff=checked_backoff(given("backoff")),
    )


def _retries(options: Mapping[str, Any]) -> int:
    retries = checked_whole("retries", options.get("retries", 0), 0)
    if retries and options.get("retry_on") is None:
        raise InvalidArgument(
            "retries needs retry_on, which says which errors are tried again",
            remedy="Pass retry_on=(ConnectionError, TimeoutError), or whatever your operation raises.",
        )
    if not retries and (options.get("retry_on") is not None or options.get("backoff") is not None):
        raise InvalidArgument(
            "retry_on and backoff need retries, which says how often", remedy="Pass retries=3, or leave them out."
        )
    return retries


def _waits(options: Mapping[str, Any]) -> Waits:
    cooldown = checked_flag("wait_for_cooldown", options.get("wait_for_cooldown", False))
    if checked_flag("wait_for_capacity", options.get("wait_for_capacity", False)):
        return "for capacity"
    return "for cooldown" if cooldown else "no"


def _unexpected(method: str, name: str, allowed: frozenset[str]) -> InvalidType:
    if name == "request_id":
        remedy = "It is different for each call: pass it to run()."
    elif name == "timeout":
        remedy = "A thread cannot be interrupted: give the function a timeout of its own."
    else:
        near = difflib.get_close_matches(name, allowed, 1)
        remedy = f"Did you mean {near[0]}?" if near else f"Options are {', '.join(sorted(allowed))}."
    return InvalidType(f"{method}() takes no option {name!r}", remedy=remedy)
