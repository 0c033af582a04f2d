"""`Quota`: how much of a resource may be used within some time. A value that users pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from headgate.core.checks import checked_seconds
from headgate.errors import InvalidArgument, InvalidType

LEARN: Final = "learn"

_LEAST_DELAY: Final = 0.5
_DELAY_PART: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """At most `requests` calls and `tokens` tokens within any `per` seconds.

    A call counts from its start until `per` seconds after it has reached the service. When that was is not known, only
    that it was before the call ended, and not later than `delay` seconds after it began: by default 5 % of `per`, and
    at least half a second. Tokens count until `per` seconds after the end of their call.
    """

    requests: int | None = None
    per: float = 60.0
    tokens: int | None = None
    delay: float | None = None

    def __post_init__(self) -> None:
        for name, number in (("requests", self.requests), ("tokens", self.tokens)):
            if number is not None and (type(number) is not int or number < 1):
                raise InvalidArgument(f"{name} of a Quota must be a whole number >= 1 or None, got {number!r}")
        if self.requests is None and self.tokens is None:
            raise InvalidArgument(
                "a Quota limits nothing without requests or tokens",
                remedy="Pass what the provider allows: Quota(requests=60, per=60.0, tokens=90_000).",
            )
        object.__setattr__(self, "per", checked_seconds("per of a Quota must be a number of seconds > 0", self.per))
        if self.per <= 0:
            raise InvalidArgument(f"per of a Quota must be a number of seconds > 0, got {self.per!r}")
        if self.delay is not None:
            delay = checked_seconds("delay of a Quota must be a number of seconds >= 0", self.delay)
            object.__setattr__(self, "delay", delay)

    @property
    def arrives_within(self) -> float:
        """Seconds after its start within which a call reaches the service."""
        return max(_LEAST_DELAY, _DELAY_PART * self.per) if self.delay is None else self.delay


QuotaSetting: TypeAlias = Quota | Literal["learn"]


def checked_quota(quota: object) -> QuotaSetting | None:
    """Return a Quota, "learn" or None as it is. InvalidType or InvalidArgument for anything else."""
    if quota is None or isinstance(quota, Quota):
        return quota
    remedy = 'Pass Quota(requests=60, per=60.0, tokens=90_000), or "learn".'
    if not isinstance(quota, str):
        raise InvalidType(f'quota must be a Quota, "learn" or None, got {type(quota).__name__}', remedy=remedy)
    if quota != LEARN:
        raise InvalidArgument(f'quota must be a Quota, "learn" or None, got {quota!r}', remedy=remedy)
    return LEARN


def checked_group(group: object) -> str | None:
    """Return the name of a group of resources, or None. InvalidArgument for anything else."""
    if group is None or (isinstance(group, str) and group):
        return group
    shown = "an empty string" if group == "" else type(group).__name__
    raise InvalidArgument(
        f"quota_group must be a non-empty string or None, got {shown}",
        remedy='Give the resources that share a quota the same name, for example "org-1".',
    )
