"""One call's progress through its attempts: what was tried, what may be tried next, when it is over. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.core.redaction import redact
from headgate.errors import CostTooLarge, PoolExhausted
from headgate.resources.costs import AnyCost, shown_cost
from headgate.resources.members import Use
from headgate.resources.model import Attempt
from headgate.resources.run_options import Plan
from headgate.resources.signals import CooldownResource, RetryOperation, Signal

if TYPE_CHECKING:
    from headgate.errors import ExhaustedReason


_AFTER_COOLDOWNS = "Look at what the resources were refused for; give each a max_in_flight that its provider allows."


class AttemptTimeout(RetryOperation, TimeoutError):
    """An attempt took longer than its `timeout`."""


COOLDOWNS_IN_A_ROW = 10
"""Cooldowns of one task after which it fails, if no other use of the pool succeeded between them."""
COOLDOWNS_IN_ALL = 50
"""Cooldowns of one task after which it fails in any case, if the first was long enough ago."""
COOLDOWNS_SECONDS = 60.0
"""How long ago that is. Where cooldowns are short, many tasks rush for each place, and a task meets 50 in seconds."""


class Cooldowns:
    """Counts the cooldowns that one queued task met.

    A cooldown says that a resource was busy, and a task that waits in a queue can afford to wait for it. So cooldowns
    do not count as attempts. But something must end a task that meets nothing else: ten of them while nobody had a
    success (then it is not the load), or fifty in all over at least a minute (then it may be the task).
    """

    __slots__ = ("_first_at", "_in_a_row", "_successes", "_total")

    def __init__(self) -> None:
        self._in_a_row = self._total = self._successes = 0
        self._first_at = 0.0

    def another(self, successes: int, now: float) -> bool:
        """Count a cooldown, given how many uses of the pool have succeeded so far; True when it was the last."""
        if not self._total:
            self._first_at = now
        self._in_a_row = 1 if successes != self._successes else self._in_a_row + 1
        self._successes = successes
        self._total += 1
        goes_on = self._total < COOLDOWNS_IN_ALL or now - self._first_at < COOLDOWNS_SECONDS
        return self._in_a_row >= COOLDOWNS_IN_A_ROW or not goes_on

    def __str__(self) -> str:
        if self._in_a_row >= COOLDOWNS_IN_A_ROW:
            return f"{self._in_a_row} cooldowns in a row, and no other call succeeded meanwhile"
        return f"{self._total} cooldowns"


class Call:
    """Counts attempts against the budget of one call.

    Without a wait mode no resource is used twice, so the budget is the smaller of `max_attempts` and the resources
    that matched at the start; an attempt that ended in RetryOperation said nothing against its resource, which may
    serve again when nothing else can. With a wait mode a rested resource may come again and only `max_attempts`
    counts. With `cooldowns`, as tasks have them, those are counted there, and `max_attempts` counts the others.
    """

    __slots__ = (
        "_cooldowns",
        "_counted",
        "_matching",
        "_retried",
        "_said",
        "_spent",
        "attempts",
        "deadline",
        "errors",
        "is_over",
        "own_failures",
        "plan",
        "request_id",
        "started",
    )

    def __init__(
        self, plan: Plan, matching: int, now: float, started: int = 0, cooldowns: Cooldowns | None = None
    ) -> None:
        self.plan: Plan = plan
        self.deadline: float | None = plan.deadline_at(now)
        self.request_id: str | None = plan.request_id
        self.started: int = started
        """Attempts that were given a resource."""
        self.attempts: list[Attempt] = []
        """The attempts that failed so far, oldest first."""
        self.own_failures: int = 0
        """Errors that were no verdicts and were tried again."""
        self.is_over: bool = False
        """Was the last attempt that failed the last that may be made?"""
        self._cooldowns = cooldowns
        self._counted = 0  # attempts that count to `max_attempts`
        self.errors: int = 0
        """Attempts that ended in RetryOperation."""
        self._matching = matching
        self._said = ""  # by the last that failed
        self._spent: frozenset[str] = frozenset()
        self._retried: frozenset[str] = frozenset()

    def choices(self) -> tuple[frozenset[str], ...]:
        """Sets of resource ids to avoid, the best set first: if nothing is eligible with one, the next is tried."""
        return (self._spent | self._retried, self._spent) if self._retried else (self._spent,)

    def failed(self, use: Use, signal: Signal, now: float, successes: int = 0) -> bool:
        """Note an attempt that ended in `signal`; True when it was the last.

        `successes` is how many uses of the pool have succeeded so far, for a call that counts cooldowns apart.
        """
        resource_id = use.member.resource.resource_id
        self._said = redact(repr(signal))
        self.attempts.append(Attempt(resource_id, signal, now - use.acquired_at))
        if isinstance(signal, RetryOperation):
            self._retried |= {resource_id}
        elif self.plan.waits == "no":
            self._spent |= {resource_id}
        if self._cooldowns is not None and isinstance(signal, CooldownResource):
            self.is_over = self._cooldowns.another(successes, now)
        else:
            self._counted += 1
            self.errors += isinstance(signal, RetryOperation)
            self.is_over = (
                self._counted >= self.plan.max_attempts
                or self.errors == self.plan.max_errors
                or 0 < self._matching <= len(self._spent)
            )
        if not self.is_over:
            signal.__traceback__ = None  # nobody sees it; one instance that is raised again and again would keep frames
        return self.is_over

    def pause(self, chance: float, now: float) -> float:
        """Seconds to rest before the next attempt; `chance` is drawn from 0.5 to 1.5."""
        seconds = self.plan.retry_delay * chance
        return seconds if self.deadline is None else max(0.0, min(seconds, self.deadline - now))

    def is_late(self, now: float) -> bool:
        """Whether the deadline has passed, so that no attempt may start."""
        return self.deadline is not None and now >= self.deadline

    # -- the three ways to end without a result -----------------------------------------------------------------------

    def out_of_attempts(self, retry_after: float | None) -> PoolExhausted:
        """The error of a call that has no attempts left."""
        if self._cooldowns is not None and self.attempts and isinstance(self.attempts[-1].signal, CooldownResource):
            message = f"gave up after {self._cooldowns}: {self._said}"
            return self._exhausted(message, "attempts", retry_after, _AFTER_COOLDOWNS)
        if self.errors == self.plan.max_errors:
            message = f"gave up after {self.errors} errors that say nothing against a resource: {self._said}"
            return self._exhausted(message, "attempts", retry_after, "Look at what the service answered.")
        tried = self._counted
        message = f"max_attempts={tried} exhausted: {self._said}"
        remedy = None
        if self._cooldowns is not None:
            remedy = "Raise max_attempts=, or add resources."
        elif self.plan.waits != "no":
            remedy = (
                "Raise max_attempts=, or give each resource a max_in_flight: waiting costs no attempt, refusals do."
            )
        elif tried < self.plan.max_attempts:
            message += f" ({self.plan.max_attempts} were allowed, but no resource is used twice and {tried} match)"
            remedy = "Add resources, or pass wait_for_capacity=True: then a rested resource may come again."
        return self._exhausted(message, "attempts", retry_after, remedy)

    def out_of_budget(self, why: str, retry_after: float | None) -> PoolExhausted:
        """The error of a call that may not be tried again because too many others were."""
        self.is_over = True
        remedy = "Look at what the service answered. Fewer retries keep an outage from growing."
        return self._exhausted(f"{why}: {self._said}", "attempts", retry_after, remedy)

    def out_of_time(self, retry_after: float | None, waited_for: str | None = None) -> PoolExhausted:
        """The error of a call whose deadline has passed."""
        message = f"deadline exceeded after {len(self.attempts)} attempt(s)"
        if waited_for is not None:
            message += f", waiting for a resource: {waited_for}"
        return self._exhausted(message, "deadline", retry_after, "Give it more time, or the pool more resources.")

    def out_of_resources(
        self, why: str, reason: ExhaustedReason, retry_after: float | None, remedy: str | None
    ) -> PoolExhausted:
        """The error of a call for which nothing is eligible and that does not or cannot wait."""
        return self._exhausted(f"no eligible resource in pool: {why}", reason, retry_after, remedy)

    def too_large(self, what: str, cost: AnyCost) -> CostTooLarge:
        """The error of a call or task that takes more of each quota than a whole window holds."""
        return CostTooLarge(
            f"no eligible resource in pool: the quota of none of them allows a {what} with {shown_cost(cost)}",
            attempts=self.attempts,
            remedy=f"Make the {what} smaller, or give the resources a larger Quota(tokens=...).",
        )

    def _exhausted(
        self, message: str, reason: ExhaustedReason, retry_after: float | None, remedy: str | None
    ) -> PoolExhausted:
        error = PoolExhausted(message, reason=reason, attempts=self.attempts, retry_after=retry_after, remedy=remedy)
        if self.attempts:
            error.__cause__ = self.attempts[-1].signal
        return error
