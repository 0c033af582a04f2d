"""Permits: how many uses of a resource each process may have at a time, so that all together keep its limit. Pure.

Every process has a `Claim` in the shared state for each resource with a limit: how many permits it was granted and how
many it returned, both counted since it takes part, and how many it asked for. Counted in this way a message may arrive
twice without harm. What it holds is the difference of the first two.

Permits that nobody else asks for stay where they are, so a process that is alone has all of them and needs the store no
more. When others ask, each process returns what it does not use, and, as its uses end, what it has above its share.

The right to probe a resource after a cooldown is a permit too, of which there is one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from headgate.gate.capacity import Rank, allot
from headgate.resources.effects import Effects, Tell
from headgate.resources.model import update_limit

if TYPE_CHECKING:
    from headgate.resources.members import Member


class Claim(NamedTuple):
    """What one process has and wants of the permits of one resource."""

    granted: int
    returned: int
    asked: int
    """How many it wants to have been granted; fewer than `granted` counts as none."""
    since: float
    """Since when it wants more, by the store's clock."""
    limit: int
    """How many there are for all processes, as this one was told. The lowest number counts. Of an adaptive limit it is
    the upper bound."""

    @property
    def held(self) -> int:
        """How many permits it has."""
        return max(0, self.granted - self.returned)

    @property
    def wanted(self) -> int:
        """How many more it wants."""
        return max(0, self.asked - self.granted)

    @property
    def is_empty(self) -> bool:
        """Whether it has nothing and wants nothing."""
        return not self.held and not self.wanted


class Wish(NamedTuple):
    """What a process says about the permits of one resource."""

    granted: int
    """As it was last told."""
    returned: int
    wanted: int
    limit: int


def claim_of(old: Claim | None, wish: Wish, now: float, *, is_new: bool) -> Claim:
    """Return the claim after a message. `is_new`: the process has a new id since, so what it counted means nothing."""
    since = old.since if old is not None and old.wanted else now
    if old is None and is_new:
        return Claim(0, 0, wish.wanted, since, wish.limit)
    if old is None:  # the state was lost, or it had nothing: what it says it holds, it holds
        return Claim(wish.granted, wish.returned, wish.granted + wish.wanted, since, wish.limit)
    if is_new:
        return old._replace(asked=max(old.asked, wish.wanted), since=since, limit=wish.limit)
    returned = min(max(old.returned, wish.returned), old.granted)
    return Claim(old.granted, returned, wish.granted + wish.wanted, since, wish.limit)


def limit_of(claims: Mapping[str, Claim], level: float = math.inf) -> int:
    """How many permits there are: the lowest number that a process was told, and no more than an adaptive level."""
    return int(min(level, min((one.limit for one in claims.values()), default=0)))


def grant(claims: Mapping[str, Claim], level: float = math.inf) -> dict[str, Claim]:
    """Give free permits to those who want some: to whoever has fewest, then to whoever has waited longest.

    Returns the claims that changed. When everybody has what they want, those who asked get more, up to their share:
    this saves them from asking again soon.
    """
    limit = limit_of(claims, level)
    given: Counter[str] = Counter()

    def rank(who: str) -> Rank | None:
        one = claims[who]
        return (one.held + given[who], one.since, who) if one.wanted > given[who] else None

    def give(who: str) -> None:
        given[who] += 1

    free = allot(limit - sum(one.held for one in claims.values()), claims, rank, give)
    if free > 0 and given:
        share = -(-limit // sum(not one.is_empty for one in claims.values()))
        for who in given:
            more = max(0, min(free, share - claims[who].held - given[who]))
            given[who] += more
            free -= more
    return {who: claims[who]._replace(granted=claims[who].granted + number) for who, number in given.items()}


class Share(NamedTuple):
    """What a process is told about the permits of one resource."""

    granted: int
    returned: int
    share: int
    """To how many it comes down while others want some."""
    wanted: int
    """How many others want, or are to be given back."""


def share_of(claims: Mapping[str, Claim], who: str, level: float = math.inf) -> Share:
    """Return what to tell the process `who`. After the limit has fallen, what is held above it is wanted back."""
    claimants = sum(not one.is_empty for one in claims.values())
    limit = limit_of(claims, level)
    wanted = sum(one.wanted for other, one in claims.items() if other != who)
    wanted = max(wanted, sum(one.held for one in claims.values()) - limit)
    mine = claims[who]
    return Share(mine.granted, mine.returned, limit // max(1, claimants), wanted)


class Lease:
    """The permits of this process for one resource."""

    __slots__ = ("asked_since", "granted", "lacked_until", "permits", "share", "suspended", "told", "unasked", "wanted")

    def __init__(self) -> None:
        self.permits: int = 0
        """How many uses it may have at a time."""
        self.share: int = 0
        self.wanted: int = 0
        """How many permits other processes wait for."""
        self.granted: int = 0
        self.suspended: bool = False
        """The lease of this process on the store may be over: nothing may begin until the store says that it stands."""
        self.unasked: int = 0
        """How many uses may begin without a permit, because the store cannot be asked."""
        self.told: Wish | None = None
        """What the store was last told."""
        self.lacked_until: float = -math.inf
        """A call needed a permit not long ago: one is wanted until then."""
        self.asked_since: float | None = None
        """Since when a call has lacked a permit and none was granted."""

    @property
    def usable(self) -> int:
        """How many uses may begin on the strength of this lease."""
        return self.unasked if self.suspended else max(self.permits, self.unasked)

    @property
    def lacks(self) -> bool:
        """Whether it has asked for more than it was granted."""
        return self.told is not None and self.told.granted + self.told.wanted > self.granted

    @property
    def returned(self) -> int:
        """How many permits were given back since this process takes part."""
        return self.granted - self.permits

    def is_told(self, wish: Wish) -> bool:
        """Whether the store would learn nothing from this wish."""
        told = self.told
        if told is None:
            return not wish.wanted and not wish.granted
        wanted = max(0, told.granted + told.wanted - wish.granted)  # what was granted since is not wanted any more
        return (told.returned, wanted, told.limit) == (wish.returned, wish.wanted, wish.limit)

    def take(self, share: Share | None) -> bool:
        """Note what the store told; None: it has nothing for this process. True: there are more permits than before."""
        if share is None and self.permits:
            self.told = None  # the state was lost: what this process holds is said again, and stays
            return False
        if share is None:
            self.granted = self.share = self.wanted = 0
            return False
        if share.granted < self.granted or (self.told is not None and share.returned < self.told.returned):
            self.granted = self.permits = 0  # the state was lost, and counts begin anew
        returned = max(self.returned, share.returned)
        before, self.permits = self.permits, max(0, share.granted - returned)
        self.granted = self.permits + returned
        self.share, self.wanted = share.share, share.wanted
        more = self.permits > before
        if more:
            self.asked_since, self.lacked_until = None, -math.inf
        return more

    def release(self, in_use: int, reserved: int = 0) -> None:
        """Give back what is not used, as far as others want it or this process has more than its share."""
        idle = self.permits - in_use - reserved
        if self.wanted and idle > 0:
            given = min(idle, max(self.permits - self.share, self.wanted))
            self.permits -= given
            self.wanted = max(0, self.wanted - given)

    def release_one(self) -> None:
        """Give back one permit, which another process wants."""
        self.permits -= 1
        self.wanted -= 1

    def forget(self) -> None:
        """Have nothing any more: this process takes part under a new id."""
        self.granted = self.permits = self.share = self.wanted = 0
        self.told = None
        self.suspended = False


def return_permits(member: Member) -> Effects:
    """Give back the permit of a use that ended, if other processes want it and this one has more than its share."""
    told: Effects = []
    for one in member.sharing.members:
        if one.lease is not None and one.lease.wanted:
            if one.lease.permits > max(one.lease.share, len(one.uses)):
                one.lease.release_one()
                update_limit(one.resource)
            told.append(Tell(one))
        elif one.probe is not None and one.probe.wanted:
            told.append(Tell(one))
    return told
