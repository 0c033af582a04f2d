"""When members of a rotation open again: a cooldown ends, or there is some of a spent quota again. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sized

from headgate.core.checks import Affinity
from headgate.resources.costs import AnyCost
from headgate.resources.members import Member


class Openings:
    """A heap of times. Entries may be outdated: they are dropped when their turn comes, or when they are too many."""

    def __init__(self, members: Sized) -> None:
        """`members` are those of the rotation: they only say how many entries are too many."""
        self.heap: list[tuple[float, int, Member]] = []
        """The same list as long as the rotation lives."""
        self._members = members

    def note(self, member: Member, at: float) -> None:
        """Remember when a member opens."""
        heapq.heappush(self.heap, (at, member.index, member))
        if len(self.heap) > 4 * len(self._members) + 64:
            self.tidy()

    def note_closed(self, member: Member) -> None:
        """Remember when a member opens that is new, or has another quota than before, if its quota is spent."""
        account = member.sharing.account
        if account is not None and account.is_closed and account.opens_at < math.inf:
            self.note(member, account.opens_at)

    def pop(self, now: float) -> Member | None:
        """Take out a member that opens by now; None if there is none."""
        while self.heap and self.heap[0][0] <= now:
            at, _, member = heapq.heappop(self.heap)
            if _is_valid(member, at):
                return member
        return None

    def first(self) -> float | None:
        """The time at which the first member opens."""
        while self.heap and not _is_valid(self.heap[0][2], self.heap[0][0]):
            heapq.heappop(self.heap)
        return self.heap[0][0] if self.heap else None

    def tidy(self) -> None:
        """Remove outdated entries."""
        valid = {(entry[2], entry[0]): entry for entry in self.heap if _is_valid(entry[2], entry[0])}
        self.heap[:] = sorted(valid.values(), key=lambda entry: entry[:2])


def opens_at(member: Member, cost: AnyCost, now: float, affinity: Affinity | None = None) -> float | None:
    """When a call of this cost and affinity can use a member; None: now, never, or when others end or resume it."""
    resource, account = member.resource, member.sharing.account
    if not member.can_ever_serve(cost) or member.sharing.paused:
        return None
    times = [resource.cooldown_until] if resource.status == "cooling_down" else []
    until = member.cooling_until(affinity)
    if until is not None:
        times.append(until)
    if account is not None and (account.is_closed or not account.admits(cost, now, None)):
        times.append(account.would_open_at(cost, now))
    return max(times, default=None)


def _is_valid(member: Member, at: float) -> bool:
    if member.gone:
        return False
    resource, account = member.resource, member.sharing.account
    if resource.status == "cooling_down" and resource.cooldown_until == at:
        return True
    kept = member.sharing.affinity_cooldowns
    if kept is not None and kept.next_end == at:
        return True
    return account is not None and at == (account.opens_at if account.is_closed else account.enough_at)
