"""`Quota`: how much of a resource may be used within some time. A value that users pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Final, Literal, TypeAlias, get_args

from headgate.core.checks import checked_seconds, is_finite
from headgate.errors import InvalidArgument, InvalidType
from headgate.gate.windows import Bucket, FixedWindow, SlidingWindow

LEARN: Final = "learn"

QuotaWindow: TypeAlias = Literal["sliding", "bucket", "fixed"]
"""How a provider counts."""

_KINDS: Final[Mapping[str, type[SlidingWindow | Bucket | FixedWindow]]] = {
    "sliding": SlidingWindow,
    "bucket": Bucket,
    "fixed": FixedWindow,
}


@dataclass(frozen=True, slots=True)
class Quota:
    """At most `requests` calls and `tokens` tokens within `per` seconds, counted from the start of each call.

    window:
        "sliding": at most that much in any `per` seconds. Up to `burst` starts at once, the rest is spaced evenly.
        "bucket": `burst` at once, refilled at requests / per.
        "fixed": that much in each period of `per` seconds; what remains is spread over the rest of the period.
    burst:
        The part of the limits that may start at once: a number of requests; tokens in proportion. By default a tenth
        of a window (at least one request), and all of a bucket.
    delay:
        Seconds that are added to every count, for calls that may reach the provider that much later than they start.
        Safer and slower.
    """

    requests: int | None = None
    per: float = 60.0
    tokens: int | None = None
    _: KW_ONLY
    window: QuotaWindow = "sliding"
    burst: float | None = None
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
        if self.window not in get_args(QuotaWindow):
            raise InvalidArgument(
                f'window of a Quota must be "sliding", "bucket" or "fixed", got {self.window!r}',
                remedy='Leave it out if you do not know how the provider counts: "sliding" is right for all of them.',
            )
        self._check_burst()
        if self.delay is not None:
            delay = checked_seconds("delay of a Quota must be a number of seconds >= 0", self.delay)
            object.__setattr__(self, "delay", delay)

    def _check_burst(self) -> None:
        burst, most = self.burst, self.requests if self.requests is not None else self.tokens
        if burst is None or most is None:
            return
        if type(burst) is bool or not is_finite(burst) or burst < 1:
            raise InvalidArgument(f"burst of a Quota must be a number >= 1 or None, got {burst!r}")
        if burst > most and self.window != "bucket":
            raise InvalidArgument(
                f"burst of a Quota must be at most its limit of {most}, got {burst!r}",
                remedy='Only a bucket can hold more than it refills in `per` seconds: window="bucket".',
            )
        object.__setattr__(self, "burst", float(burst))

    def windows(self) -> dict[str, SlidingWindow | Bucket | FixedWindow]:
        """Make the window limits that this quota stands for, with nothing used."""
        limits = {"requests": self.requests, "tokens": self.tokens}
        made: dict[str, SlidingWindow | Bucket | FixedWindow] = {}
        for name, limit in limits.items():
            if limit is not None:
                main = self.requests if self.requests is not None else limit
                burst = None if self.burst is None else max(1.0, limit * self.burst / main)
                made[name] = _KINDS[self.window](limit, self.per, burst, self.delay or 0.0)
        return made


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
