"""`Quota`: how much of a resource may be used within some time. A value that users pass, alone or in a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final, Literal, TypeAlias, get_args

from headgate.core.checks import checked_seconds, is_finite
from headgate.errors import InvalidArgument, InvalidType
from headgate.gate.windows import Bucket, FixedWindow, SlidingWindow
from headgate.resources.costs import INPUT, OUTPUT, REQUESTS, TOKENS, name_of

LEARN: Final = "learn"

QuotaWindow: TypeAlias = Literal["sliding", "bucket", "fixed"]
"""How a provider counts."""

Window: TypeAlias = SlidingWindow | Bucket | FixedWindow

_KINDS: Final[Mapping[str, type[Window]]] = {"sliding": SlidingWindow, "bucket": Bucket, "fixed": FixedWindow}
_FORM: Final = "Pass what the provider allows: Quota(requests=60, per=60.0, tokens=90_000)."


@dataclass(frozen=True, slots=True)
class Quota:
    """At most `requests` calls and `tokens` tokens within `per` seconds, counted from the start of each call.

    tokens, input_tokens, output_tokens:
        Limits of all tokens of a call, of those it sends, and of those of its answer. Each is kept separately.
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
    input_tokens: int | None = None
    output_tokens: int | None = None
    window: QuotaWindow = "sliding"
    burst: float | None = None
    delay: float | None = None

    def __post_init__(self) -> None:
        for name in (REQUESTS, TOKENS, INPUT, OUTPUT):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 1):
                raise InvalidArgument(f"{name} of a Quota must be a whole number >= 1 or None, got {number!r}")
        if not self.limits:
            raise InvalidArgument("a Quota limits nothing without requests or tokens", remedy=_FORM)
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
        burst, most = self.burst, self._main
        if burst is None:
            return
        if type(burst) is bool or not is_finite(burst) or burst < 1:
            raise InvalidArgument(f"burst of a Quota must be a number >= 1 or None, got {burst!r}")
        if burst > most and self.window != "bucket":
            raise InvalidArgument(
                f"burst of a Quota must be at most its limit of {most}, got {burst!r}",
                remedy='Only a bucket can hold more than it refills in `per` seconds: window="bucket".',
            )
        object.__setattr__(self, "burst", float(burst))

    @property
    def limits(self) -> dict[str, int]:
        """What it limits, by dimension."""
        limits = {REQUESTS: self.requests, TOKENS: self.tokens, INPUT: self.input_tokens, OUTPUT: self.output_tokens}
        return {dimension: limit for dimension, limit in limits.items() if limit is not None}

    def window_of(self, dimension: str) -> Window:
        """Make the window limit of one dimension, with nothing used."""
        limit = self.limits[dimension]
        burst = None if self.burst is None else max(1.0, limit * self.burst / self._main)
        return _KINDS[self.window](limit, self.per, burst, self.delay or 0.0)

    @property
    def _main(self) -> int:
        """The limit that `burst` is a part of."""
        return next(iter(self.limits.values()))


Quotas: TypeAlias = tuple[Quota, ...]
"""Quotas that hold at once. Never empty."""
QuotaSetting: TypeAlias = Quotas | Literal["learn"]
"""The quota of a resource, once it is checked."""
AnyQuota: TypeAlias = Quota | Sequence[Quota] | Literal["learn"]
"""The quota of a resource, as users pass it."""


def windows_of(quotas: Quotas) -> dict[str, Window]:
    """Make the window limits that these quotas stand for, by name, with nothing used.

    A window is named after what it counts, "tokens". If several windows count the same, each has its time in its name.
    """
    return {name: quota.window_of(dimension) for name, quota, dimension in _named(quotas)}


def _named(quotas: Iterable[Quota]) -> list[tuple[str, Quota, str]]:
    counted = [(quota, dimension) for quota in quotas for dimension in quota.limits]
    windows = Counter(dimension for _, dimension in counted)
    return [
        (dimension if windows[dimension] == 1 else name_of(dimension, quota.per), quota, dimension)
        for quota, dimension in counted
    ]


def former_names(before: Quotas, after: Quotas) -> dict[str, str]:
    """The names that windows of `after` had in `before`: those that count the same thing in the same way.

    One quota may become several. Then its window is the one with the same length, under another name.
    """
    had = {name: quota.window for name, quota, _ in _named(before)}
    alike = {(dimension, quota.per, quota.window): name for name, quota, dimension in _named(before)}
    found = {
        name: (alike.get((dimension, quota.per, quota.window), name), quota.window)
        for name, quota, dimension in _named(after)
    }
    return {name: former for name, (former, kind) in found.items() if had.get(former) == kind}


def checked_quota(quota: object) -> QuotaSetting | None:
    """Return quotas as a tuple, "learn" or None. InvalidType or InvalidArgument for anything else."""
    if quota is None:
        return None
    if isinstance(quota, Quota):
        return (quota,)
    remedy = 'Pass Quota(requests=60, per=60.0, tokens=90_000), a list of them, or "learn".'
    if isinstance(quota, str):
        if quota == LEARN:
            return LEARN
        raise InvalidArgument(f'quota must be a Quota, a list of them, "learn" or None, got {quota!r}', remedy=remedy)
    if not isinstance(quota, Sequence):
        given = type(quota).__name__
        raise InvalidType(f'quota must be a Quota, a list of them, "learn" or None, got {given}', remedy=remedy)
    for one in quota:
        if not isinstance(one, Quota):
            shown = repr(one) if isinstance(one, str) and one == LEARN else type(one).__name__
            raise InvalidType(f"a list of quotas must hold Quota objects only, got {shown}", remedy=remedy)
    if not quota:
        raise InvalidArgument("a list of quotas must not be empty", remedy=remedy)
    _check_distinct(quota)
    return tuple(quota)


def _check_distinct(quotas: Sequence[Quota]) -> None:
    """Refuse two windows of the same length that count the same: they have one name, and only one could matter."""
    seen: dict[str, Quota] = {}
    for name, quota, dimension in _named(quotas):
        if name in seen:
            limits = f"{seen[name].limits[dimension]} and {quota.limits[dimension]}"
            raise InvalidArgument(
                f"two quotas limit {dimension} per {quota.per:g} s, to {limits}",
                remedy="Keep one of them, the one with the lower limit.",
            )
        seen[name] = quota


def as_given(quota: QuotaSetting) -> Quota | Quotas | Literal["learn"]:
    """A quota as users wrote it: one alone is not in a tuple."""
    return quota[0] if len(quota) == 1 and isinstance(quota, tuple) else quota


def checked_group(group: object) -> str | None:
    """Return the name of a group of resources, or None. InvalidArgument for anything else."""
    if group is None or (isinstance(group, str) and group):
        return group
    shown = "an empty string" if group == "" else type(group).__name__
    raise InvalidArgument(
        f"quota_group must be a non-empty string or None, got {shown}",
        remedy='Give the resources that share a quota the same name, for example "org-1".',
    )
