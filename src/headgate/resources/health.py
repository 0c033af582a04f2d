"""The health of a resource as several processes know it together: records, and how they are joined. Pure.

Every process keeps a `Record` of each resource that had trouble, and the store keeps one too. Whatever order news
arrive in, and however often, the processes come to the same record, because records are only ever *joined*: the join is
commutative, associative and idempotent.

- A *generation* begins with each call of `enable`. A record of a later generation replaces one of an earlier, so what
  was said before `enable` and arrives after it changes nothing.
- Disabled counts more than cooling, and cooling more than healthy.
- An `Outage` is a cooldown: when it began, how many in a row it was, until when it lasts. Several processes that meet
  the same rate limit report outages of the same count, and the largest counts: one outage, one escalation.
- A success tells when its call began. It clears the outages that began before that, and nothing else.

Outages are not merged into one, because a success may clear one of them and not the other. An outage that another one
exceeds in every respect says nothing more and is left out, so there is nearly always one.

All times are those of the store's clock. Those that this process writes are not earlier than they were, with one
exception: a success, which would otherwise clear what began after its call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, NamedTuple, cast

from headgate.core.checks import Affinity
from headgate.resources.affinity import stable_text
from headgate.resources.cooldowns import SAME_UNTIL
from headgate.resources.model import Resource, ResourceStatus
from headgate.sharing.states import ClockOffset

REMEMBERED_HEALTHY = 3600.0
"""Seconds for which the record of a resource that was never enabled by hand is kept when it is healthy, so that older
news that come late change nothing."""
REMEMBERED_COUNTER = 86400.0
"""Seconds after the end of a cooldown for which its count in a row is kept."""


class Outage(NamedTuple):
    """One cooldown."""

    began: float
    consecutive: int
    """How many cooldowns in a row it was."""
    until: float


class Record(NamedTuple):
    """What is known of one resource."""

    generation: int = 0
    """How often it was enabled by hand."""
    disabled: bool = False
    cleared: float = 0.0
    """When the newest call began that found the resource fine after trouble."""
    outages: tuple[Outage, ...] = ()
    """Cooldowns that no success has cleared, the oldest first. Those that are over still count in a row."""
    at: float = 0.0
    """When this was last changed. It only decides how long the record is kept."""

    @property
    def began(self) -> float:
        """When the newest outage began; 0.0 if there is none."""
        return self.outages[-1].began if self.outages else 0.0

    @property
    def consecutive(self) -> int:
        """How many cooldowns in a row there were."""
        return max((one.consecutive for one in self.outages), default=0)

    @property
    def until(self) -> float:
        """When the last cooldown ends; 0.0 if there is none."""
        return max((one.until for one in self.outages), default=0.0)

    @property
    def is_trouble(self) -> bool:
        """Whether the resource is disabled, cools down or has a count."""
        return self.disabled or bool(self.outages)


UNKNOWN = Record()


def join(one: Record, other: Record) -> Record:
    """Join what two processes know."""
    at = max(one.at, other.at)
    if one.generation != other.generation:
        return max(one, other, key=lambda record: record.generation)._replace(at=at)
    cleared = max(one.cleared, other.cleared)
    return Record(
        one.generation,
        one.disabled or other.disabled,
        cleared,
        _remaining((*one.outages, *other.outages), cleared),
        at,
    )


def is_same(one: Record, other: Record) -> bool:
    """Whether two records say the same."""
    return one[:-1] == other[:-1]


def _remaining(outages: Iterable[Outage], cleared: float) -> tuple[Outage, ...]:
    """The outages that are not cleared and not exceeded by another, oldest first."""
    left = sorted({one for one in outages if one.began >= cleared})
    return tuple(
        one
        for at, one in enumerate(left)
        if not any(one.consecutive <= later.consecutive and one.until <= later.until for later in left[at + 1 :])
    )


def is_forgotten(record: Record, now: float) -> bool:
    """Whether a record need not be kept any longer.

    A generation is never forgotten. Processes do not forget at the same moment, and one that was cut off may do so much
    later: its old generation would count more than what the others have said since in a new first one.
    """
    ends = record.at + REMEMBERED_HEALTHY
    if record.outages:
        ends = max(ends, record.until + REMEMBERED_COUNTER)
    return not record.disabled and not record.generation and ends < now


class Local(NamedTuple):
    """The health of a resource in this process, on its monotonic clock."""

    status: ResourceStatus
    until: float
    consecutive: int
    outage: int
    outage_at: float
    proofs: int
    proved_at: float
    enables: int


def local_of(resource: Resource[Any]) -> Local:
    """Read the health of a resource in this process."""
    shared = resource.sharing
    return Local(
        resource.status,
        resource.cooldown_until,
        resource.consecutive_cooldown,
        shared.outage,
        shared.outage_at,
        shared.proofs,
        shared.proved_at,
        shared.enables,
    )


def learned(known: Record, before: Local, after: Local, began: float, now: float, offset: ClockOffset) -> Record:
    """Return the record with what this process learned between two looks at its own resource.

    `known` is what it had taken over until then, `began` when the current outage began.
    """
    record, enabled = known, after.enables != before.enables
    if enabled:
        record = Record(known.generation + 1)
    if after.proofs != before.proofs and record.outages:
        # This process decides by acquisition order that the success is newer than every outage it had heard of. Two
        # clocks must not decide otherwise.
        cleared = max(after.proved_at + offset.least, math.nextafter(record.began, math.inf))
        record = record._replace(cleared=max(record.cleared, cleared))
    if after.consecutive and (enabled or _is_new(before, after)):
        outage = Outage(max(began, record.cleared), after.consecutive, offset.to_store(after.until))
        record = record._replace(outages=(*record.outages, outage))
    if after.status == "disabled" and (enabled or before.status != "disabled"):
        record = record._replace(disabled=True)
    if record is known:
        return known
    return record._replace(outages=_remaining(record.outages, record.cleared), at=max(known.at, offset.to_store(now)))


def _is_new(before: Local, after: Local) -> bool:
    changed = (before.consecutive, before.outage) != (after.consecutive, after.outage)
    return changed or after.until > before.until + SAME_UNTIL


def mark_of(pool: str, resource: Resource[Any]) -> str:
    """The name of a resource in the shared state: its id, and a digest of its value of 12 bits.

    The digest tells apart two values under one id, such as a key and the one that replaces it: what is learned of the
    old key must not touch the new one. It is too short to find a value by. Values that are not text, bytes, numbers or
    tuples of these have no digest.
    """
    try:
        text = stable_text(_plain(resource.value))
    except (TypeError, ValueError):
        return f":{resource.resource_id}"
    digest = blake2b(text, digest_size=2, key=blake2b(pool.encode("utf-8", "surrogatepass"), digest_size=16).digest())
    return f"{digest.hexdigest()[:3]}:{resource.resource_id}"


def _plain(value: object) -> Affinity:
    parts = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(part, (str, bytes, int)) for part in parts):
        raise TypeError
    return cast(Affinity, value)
