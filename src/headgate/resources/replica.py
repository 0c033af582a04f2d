"""What this process knows of the health that processes share, and what it has to tell. Pure; used with the pools' lock.

A replica stands between one rotation and the exchange. It compares each resource with how it was when it last looked,
so it finds what calls learned here, and it hands to the rotation what others learned. `message` gives what is to be
sent, `take` takes the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import NamedTuple, Protocol

from headgate.gate.adaptive import AdaptiveLevel
from headgate.resources.costs import AnyCost
from headgate.resources.effects import Effects
from headgate.resources.exchange import News, Told
from headgate.resources.health import UNKNOWN, Local, Record, is_forgotten, is_same, join, learned, local_of, mark_of
from headgate.resources.members import Adopted, Member, Requirement
from headgate.resources.model import update_limit
from headgate.resources.permits import Lease, Share, Wish
from headgate.resources.rotation import Rotation
from headgate.sharing.states import ClockOffset

PATIENCE = 0.5
"""Seconds for which a call without a wait mode waits for a permit of another process."""
LACK = 5.0
"""Seconds for which a permit is wanted after a call has lacked one."""
MOST_WAITING = 1024
"""More waiters than these are not counted: no process asks for more permits at once."""


class Asker(Protocol):
    """A call that needs a permit now, and does not stand in the wait queue."""

    @property
    def requirement(self) -> Requirement:
        """What it can use."""
        ...


class _Track:
    """One resource of the pool, and what of it was told and taken over."""

    __slots__ = ("before", "began", "mark", "member")

    def __init__(self, member: Member, mark: str) -> None:
        self.member = member
        self.mark = mark
        self.before: Local = local_of(member.resource)
        self.began = 0.0  # when its last outage began, by the store's clock


class _Held(NamedTuple):
    """One lease of a resource, and what is to be done about it."""

    mark: str
    lease: Lease
    limit: int  # of all processes together, as far as it is known here
    most: int  # the upper bound of an adaptive limit, else the same
    lacking: bool  # ask for one more
    keeps: bool  # do not give it back: a call here waits for something else


class Replica:
    """The part of one pool of this process in the shared state."""

    def __init__(self, rotation: Rotation, pool: str) -> None:
        self._rotation = rotation
        self._pool = pool
        self._offset = ClockOffset()
        self._known: dict[str, Record] = {}
        self._unsent: set[str] = set()  # marks whose records the store may not know
        self._tracks: dict[str, _Track] = {}  # by mark
        self._limited: list[_Track] = []  # those with permits or a right to probe
        self._returned: dict[str, Wish] = {}  # permits of resources that were removed
        self._alone = False
        self._levels: dict[str, AdaptiveLevel] = {}  # as the store knows them
        self._acquires = -1
        self._asked_at = -math.inf
        self.grants: int = 0
        """How often permits came."""
        rotation.is_shared = True
        self.refresh()

    # -- the resources of the pool ------------------------------------------------------------------------------------

    def refresh(self, now: float = 0.0) -> Effects:
        """Follow resources that were added, removed or given another limit."""
        effects: Effects = []
        left = dict(self._tracks)
        fresh: list[_Track] = []
        for member in self._rotation.members.values():  # all of them, before calls are served that wait
            mark = mark_of(self._pool, member.resource)
            track = left.pop(mark, None)
            if track is None or track.member is not member:
                track = self._tracks[mark] = _Track(member, mark)
                fresh.append(track)
            self._set_leases(track)
            self._rotation.leases_shrank(member)
        for track in fresh:
            known = self._known.get(track.mark, UNKNOWN)
            effects += self._apply(track, Record(known.generation), known, now) if known.is_trouble else ()
        for member in self._rotation.members.values():
            effects += self._rotation.leases_changed(member, now)
        for mark, track in left.items():
            self._drop(track)
            del self._tracks[mark]
        self._limited = [track for track in self._tracks.values() if any(self._leases(track))]
        return effects

    def _drop(self, track: _Track) -> None:
        for held in self._leases(track):
            if held.lease.told is not None or held.lease.granted:
                self._returned[held.mark] = Wish(held.lease.granted, held.lease.granted, 0, held.most)
        track.member.lease = track.member.probe = None

    def _set_leases(self, track: _Track) -> None:
        member = track.member
        if member.resource.max_in_flight is None:
            member.lease = None
        elif member.lease is None:
            member.lease = Lease()
        if self._rotation.probe_on_recovery and member.probe is None:
            member.probe = Lease()

    # -- telling ------------------------------------------------------------------------------------------------------

    def message(self, now: float, askers: Collection[Asker] = (), *, looks: bool = False) -> News | None:
        """What is to be told; None: nothing. `looks`: an answer is wanted in any case."""
        wishes, held = self._wishes(now, askers)
        levels = self._own_levels()
        is_told = all(self._levels.get(mark) == level for mark, level in levels.items())
        if not wishes and not self._unsent and not looks and is_told:
            return None
        records = {mark: self._known[mark] for mark in self._unsent}
        self._unsent = set()
        return News(records, wishes, held, levels)

    def _own_levels(self) -> dict[str, AdaptiveLevel]:
        adaptive = ((track.mark, track.member.sharing.adaptive) for track in self._limited)
        return {mark: limit.level for mark, limit in adaptive if limit is not None}

    def failed(self, news: News) -> None:
        """Note that a message did not arrive: it is to be told again."""
        self._unsent |= news.records.keys()
        for mark, wish in news.wishes.items():
            lease = self._lease(mark)
            if lease is not None:
                lease.told = None
            else:  # its resource was removed
                self._returned.setdefault(mark, wish._replace(returned=wish.granted, wanted=0))

    def learn(self, member: Member, now: float) -> None:
        """Look what calls of this process learned about a resource."""
        track = self._tracks.get(mark_of(self._pool, member.resource))
        if track is not None and track.member is member:
            self._learn(track, now)

    def _learn(self, track: _Track, now: float) -> None:
        after = local_of(track.member.resource)
        if after == track.before:
            return
        if after.outage != track.before.outage:
            track.began = max(track.began, self._offset.to_store(after.outage_at))
        known = self._known.get(track.mark, UNKNOWN)
        record = learned(known, track.before, after, track.began, now, self._offset)
        track.before = after
        if not is_same(record, known):
            self._known[track.mark] = record
            self._unsent.add(track.mark)

    # -- permits ------------------------------------------------------------------------------------------------------

    def lacks(self, requirement: Requirement, avoid: Collection[str], now: float, cost: AnyCost = 0.0) -> float | None:
        """Note that a call found nothing to use. Returns until when it may wait for a permit; None: none can help."""
        limit: float | None = None
        for track in self._limited:
            resource = track.member.resource
            if resource.resource_id in avoid or not requirement.fits(resource):
                continue
            account = track.member.sharing.account
            if account is not None and not account.admits(cost, now, None):
                continue
            for lease in (held.lease for held in self._leases(track) if held.lacking):
                lease.lacked_until = now + LACK
                lease.asked_since = now if lease.asked_since is None else lease.asked_since
                until = lease.asked_since + PATIENCE
                limit = until if limit is None else max(limit, until)
        return limit if limit is not None and limit > now else None

    def _wishes(self, now: float, askers: Collection[Asker]) -> tuple[dict[str, Wish], dict[str, Wish]]:
        """What is new about permits, and what this process holds of the others. See `News`."""
        wishes, self._returned = self._returned, {}
        held: dict[str, Wish] = {}
        reserved = [asker.requirement for asker in askers]
        waiting: dict[Requirement, int] | None = None
        for track in self._limited:
            for mark, lease, limit, most, lacking, keeps in self._leases(track):
                fits = track.member.resource
                fitting = wanted = 0
                if lacking or keeps:
                    waiting = self._waiting(reserved) if waiting is None else waiting
                    fitting = sum(number for one, number in waiting.items() if one.fits(fits))
                if lacking:
                    wanted = min(limit - lease.permits, max(fitting, int(lease.lacked_until > now)))
                else:
                    kept = sum(one.fits(fits) for one in reserved)
                    if keeps:
                        kept = max(kept, min(fitting, max(1, lease.share)))
                    lease.release(self._in_use(track, mark), kept)
                wish = Wish(lease.granted, lease.returned, wanted, most)
                if not lease.is_told(wish):
                    lease.told = wishes[mark] = wish
                    self._rotation.leases_shrank(track.member)
                elif lease.permits:
                    held[mark] = wish
        return wishes, held

    def _leases(self, track: _Track) -> Iterable[_Held]:
        """The leases of a resource.

        A call may lack several things: the right to try the resource, a permit to use it, some of its quota. They are
        asked for in this order, and what came is kept until the rest has come. Otherwise processes of which each has
        one of them would exchange these for ever.
        """
        member = track.member
        resource, trial, account = member.resource, member.trial, member.sharing.account
        healthy, lease = resource.status == "healthy", member.lease
        lacks_quota = account is not None and (account.is_closed or account.is_short)
        lacks_probe = member.probe is not None and trial is not None and trial.limit == 0
        lacks_permit = False
        if lease is not None and resource.max_in_flight is not None:
            number, policy = resource.max_in_flight, resource.adaptive
            lacks_permit = healthy and not lacks_probe and len(member.uses) >= lease.permits and lease.permits < number
            most = number if policy is None else policy.most
            yield _Held(track.mark, lease, number, most, lacks_permit, lacks_quota and not lacks_probe)
        if member.probe is not None:
            lacking = healthy and lacks_probe
            yield _Held(f"probe/{track.mark}", member.probe, 1, 1, lacking, lacks_permit or lacks_quota)

    def _in_use(self, track: _Track, mark: str) -> int:
        trial = track.member.trial
        if mark == track.mark:
            return len(track.member.uses)
        return 0 if trial is None or trial.limit > 1 else len(trial.running)

    def _waiting(self, askers: Iterable[Requirement]) -> dict[Requirement, int]:
        counts: dict[Requirement, int] = {}
        tickets = (ticket.requirement for ticket in islice(self._rotation.wait_queue, MOST_WAITING))
        for requirement in (*tickets, *askers):
            counts[requirement] = counts.get(requirement, 0) + 1
        return counts

    def _lease(self, mark: str) -> Lease | None:
        track = self._tracks.get(mark.removeprefix("probe/"))
        if track is None:
            return None
        return track.member.lease if mark == track.mark else track.member.probe

    def want_more(self, now: float) -> None:
        """Want what calls could use, if calls were made since this was last called.

        While a pool has other resources to use, no call lacks a permit, and nobody would ask for one.
        """
        if not self._limited:
            return
        acquires = sum(member.acquires for member in self._rotation.members.values())
        if acquires == self._acquires:
            return
        self._acquires = acquires
        asks = now >= self._asked_at + LACK  # not oftener: permits that nobody uses must not go round
        self._asked_at = now if asks else self._asked_at
        for track in self._limited:
            for held in self._leases(track):
                if held.lacking and (asks or held.lease is track.member.probe):
                    held.lease.lacked_until = now + LACK

    # -- being told ---------------------------------------------------------------------------------------------------

    def take(self, told: Told, offset: ClockOffset, now: float, *, is_current: bool) -> Effects:
        """Take an answer. Not `is_current`: this process has lost its lease since, so the permits are not its own."""
        self._offset = offset
        effects: Effects = []
        for mark, record in told.health.items():
            effects += self._merge(mark, record, now)
        self._levels = dict(told.levels)
        for track in self._limited:
            if track.mark in told.levels:
                effects += self._rotation.level_heard(track.member, told.levels[track.mark], now)
        for mark in [mark for mark in self._known if mark not in told.health]:
            if is_forgotten(self._known[mark], told.now):
                del self._known[mark]
                self._unsent.discard(mark)
            else:
                self._unsent.add(mark)  # the state was lost: tell it again
        if is_current:
            effects += self._take_shares(told, now)
        return effects

    def _merge(self, mark: str, record: Record, now: float) -> Effects:
        track = self._tracks.get(mark)
        if track is not None:
            self._learn(track, now)
        known = self._known.get(mark, UNKNOWN)
        joined = self._known[mark] = join(known, record)
        if is_same(joined, record):
            self._unsent.discard(mark)
        else:
            self._unsent.add(mark)
        return [] if track is None or is_same(joined, known) else self._apply(track, known, joined, now)

    def _apply(self, track: _Track, old: Record, new: Record, now: float) -> Effects:
        adopted = Adopted(
            until=self._offset.to_local(new.until),
            consecutive=new.consecutive,
            disabled=new.disabled,
            enabled=new.generation > old.generation,
            cleared=bool(old.outages) and not new.outages,
            is_new=new.began > old.began,
        )
        effects = self._rotation.adopt(track.member.resource.resource_id, adopted, now)
        track.before = local_of(track.member.resource)
        track.began = max(track.began, new.began)
        return effects

    def _take_shares(self, told: Told, now: float) -> Effects:
        effects: Effects = []
        for track in self._limited:
            changed = False
            for mark, lease, *_ in list(self._leases(track)):
                share: Share | None = told.shares.get(mark)
                before = lease.permits, lease.suspended
                self.grants += lease.take(share)
                lease.suspended = False
                if share is None:
                    lease.told = None
                changed = changed or before != (lease.permits, lease.suspended)
            if changed:
                effects += self._rotation.leases_changed(track.member, now)
        return effects

    def guard(self, lease_ends: Callable[[], float]) -> None:
        """Before each choice of a resource look whether the lease of this process still stands.

        The store says so too, from its thread. But after the whole process was stopped for a while, that thread may
        come too late. A pool without a store, or with one whose leases do not end, pays nothing for this.
        """

        def check(now: float) -> None:
            if now >= lease_ends():
                self._suspend()

        self._rotation.check_lease = check

    def _suspend(self) -> None:
        """Let no use begin that needs a permit, until the store answers."""
        for track in self._limited:
            lease = track.member.lease
            if lease is not None and not lease.suspended:
                lease.suspended = True
                update_limit(track.member.resource)

    def forget_permits(self) -> None:
        """Have no permits any more: this process takes part under a new id."""
        for track in self._limited:
            for held in list(self._leases(track)):
                held.lease.forget()
                self._rotation.leases_shrank(track.member)

    def set_alone(self, now: float, *, alone: bool) -> Effects:
        """Note that the store cannot be reached, or can. While it cannot, each process probes by itself."""
        effects: Effects = []
        if alone is not self._alone:
            self._alone = alone
            for track in self._limited:
                if track.member.probe is not None:
                    track.member.probe.unasked = int(alone)
                    effects += self._rotation.leases_changed(track.member, now)
        return effects
