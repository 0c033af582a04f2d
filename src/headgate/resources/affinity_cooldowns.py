"""Cooldowns that hold for one affinity alone: a site has banned a proxy that serves all other sites. Pure.

They stand beside the health of the resource, which does not change: calls with another affinity, or with none, use it
as before. A call with the affinity passes over the resource, in the same way as over one that it excludes.

Each rotation keeps an index of the affinities for which a member of it cools down (`Rotation.cooling_for`). Calls that
wait and have such an affinity are a class of their own in the wait queue: what one of them cannot use may still serve
whoever is behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from headgate.core.checks import Affinity
from headgate.resources.cooldowns import Cooldown, cooldown_after
from headgate.resources.members import Use, WaitTicket, refresh
from headgate.resources.model import Resource

if TYPE_CHECKING:
    from headgate.resources.rotation import Rotation

MOST_KEPT: Final = 1_000
"""How many affinities are remembered for one resource. Beyond that, the one whose cooldown ends first is forgotten."""
REMEMBERED: Final = 3_600.0
"""Seconds for which the count of cooldowns in a row is remembered after a cooldown has ended."""


class AffinityCooldown:
    """The cooldown of a resource for one affinity, and after its end the count of those in a row."""

    __slots__ = ("consecutive_cooldown", "cooldown_until", "is_over", "outage")

    def __init__(self) -> None:
        self.consecutive_cooldown: int = 0
        self.cooldown_until: float = -math.inf
        self.is_over: bool = True
        self.outage: int = 0
        """The newest acquisition when it began; uses up to this one belong to the same outage."""


class AffinityCooldowns:
    """The cooldowns of one resource, by affinity."""

    __slots__ = ("_known", "next_end")

    def __init__(self) -> None:
        self._known: dict[Affinity, AffinityCooldown] = {}
        self.next_end: float = math.inf
        """When the first of them ends; infinite if none is running."""

    def __len__(self) -> int:
        return len(self._known)

    def until(self, affinity: Affinity | None) -> float | None:
        """When the cooldown for this affinity ends; None if there is none."""
        one = None if affinity is None else self._known.get(affinity)
        return None if one is None or one.is_over else one.cooldown_until

    def active(self) -> dict[Affinity, float]:
        """The ends of all that are running, by affinity."""
        return {affinity: one.cooldown_until for affinity, one in self._known.items() if not one.is_over}

    def begin(
        self, affinity: Affinity, table: Sequence[float], asked: float | None, *, order: int, newest: int, now: float
    ) -> tuple[Cooldown, list[Affinity]]:
        """Begin or extend the cooldown for one affinity, by the rules of `cooldown_after`.

        `order` is the acquisition that asks for it, `newest` the last of all. Returns the cooldown, and the affinities
        whose running cooldowns were forgotten for it.
        """
        one = self._known.pop(affinity, None) or AffinityCooldown()
        cooldown = cooldown_after(one, table, asked, is_late=order <= one.outage, now=now)
        if one.is_over:
            one.outage = newest
        one.consecutive_cooldown, one.cooldown_until, one.is_over = cooldown.consecutive, cooldown.until, False
        forgotten = self._make_room(now)
        self._known[affinity] = one
        self._look_ahead()
        return cooldown, forgotten

    def end_due(self, now: float) -> list[Affinity]:
        """End the cooldowns whose time is over. Returns their affinities."""
        over = [affinity for affinity, until in self.active().items() if until <= now]
        for affinity in over:
            self._known[affinity].is_over = True
        self._forget_old(now)
        self._look_ahead()
        return over

    def proved(self, affinity: Affinity, order: int) -> bool:
        """Forget the cooldown for an affinity after a success. False: there is none, or it began after this use."""
        one = self._known.get(affinity)
        if one is None or order <= one.outage:
            return False
        del self._known[affinity]
        self._look_ahead()
        return True

    def _make_room(self, now: float) -> list[Affinity]:
        self._forget_old(now)
        if len(self._known) < MOST_KEPT:
            return []
        first = min(self._known, key=lambda affinity: self._known[affinity].cooldown_until)
        return [] if self._known.pop(first).is_over else [first]

    def _forget_old(self, now: float) -> None:
        for affinity, one in list(self._known.items()):
            if one.is_over and one.cooldown_until + REMEMBERED <= now:
                del self._known[affinity]

    def _look_ahead(self) -> None:
        self.next_end = min(self.active().values(), default=math.inf)


# -- in the rotations that hold the resource --------------------------------------------------------------------------


def cool_for(
    use: Use, affinity: Affinity, table: Sequence[float], asked: float | None, *, newest: int, now: float
) -> Cooldown:
    """Let the resource of a use that has ended cool down for calls with this affinity."""
    resource = use.member.resource
    kept = resource.sharing.affinity_cooldowns
    if kept is None:
        kept = resource.sharing.affinity_cooldowns = AffinityCooldowns()
    before = kept.next_end
    cooldown, forgotten = kept.begin(affinity, table, asked, order=use.order, newest=newest, now=now)
    for other in forgotten:
        _open(resource, other)
    for member in resource.sharing.members:
        rotation = member.rotation
        if affinity not in rotation.cooling_for:
            rotation.cooling_for[affinity] = set()
            _set_waiters_apart(rotation, affinity)
        rotation.cooling_for[affinity].add(resource.resource_id)
        if kept.next_end != before:
            rotation.openings.note(member, kept.next_end)
    refresh(resource)
    return cooldown


def end_due(resource: Resource[Any], now: float) -> bool:
    """End what is over of the cooldowns of a resource for single affinities. True: waiters may use it now."""
    kept = resource.sharing.affinity_cooldowns
    if kept is None or kept.next_end > now:
        return False
    for affinity in kept.end_due(now):
        _open(resource, affinity)
    _tidy(resource, kept)
    return True


def proved_for(use: Use) -> None:
    """Note that a use succeeded: if it has an affinity, its resource is fine for that again."""
    resource, affinity = use.member.resource, use.affinity
    kept = resource.sharing.affinity_cooldowns
    if kept is not None and affinity is not None and kept.proved(affinity, use.order):
        _open(resource, affinity)
        _tidy(resource, kept)


def clear(resource: Resource[Any]) -> None:
    """Forget all cooldowns of a resource for single affinities."""
    kept, resource.sharing.affinity_cooldowns = resource.sharing.affinity_cooldowns, None
    for affinity in () if kept is None else kept.active():
        _open(resource, affinity)


def admitted(rotation: Rotation, resource: Resource[Any]) -> None:
    """Take over the running cooldowns of a resource that a rotation has now."""
    kept = resource.sharing.affinity_cooldowns
    for affinity in () if kept is None else kept.active():
        if affinity not in rotation.cooling_for:
            rotation.cooling_for[affinity] = set()
            _set_waiters_apart(rotation, affinity)
        rotation.cooling_for[affinity].add(resource.resource_id)
    if kept is not None and kept.next_end < math.inf:
        rotation.openings.note(rotation.members[resource.resource_id], kept.next_end)


def dropped(rotation: Rotation, resource: Resource[Any]) -> None:
    """Forget the running cooldowns of a resource that a rotation does not have any more."""
    kept = resource.sharing.affinity_cooldowns
    for affinity in () if kept is None else kept.active():
        _discard(rotation, affinity, resource.resource_id)


def set_apart(ticket: WaitTicket) -> None:
    """Let a call that is about to wait be of the class of its affinity, if a resource cools down for that."""
    affinity = ticket.affinity
    if affinity is not None and ticket.requirement.affinity is None and affinity in ticket.rotation.cooling_for:
        ticket.requirement = ticket.requirement._replace(affinity=affinity)


def _set_waiters_apart(rotation: Rotation, affinity: Affinity) -> None:
    for ticket in [one for one in rotation.wait_queue if one.affinity == affinity]:
        rotation.wait_queue.leave(ticket)
        set_apart(ticket)
        rotation.wait_queue.rejoin(ticket)


def _open(resource: Resource[Any], affinity: Affinity) -> None:
    for member in resource.sharing.members:
        _discard(member.rotation, affinity, resource.resource_id)


def _discard(rotation: Rotation, affinity: Affinity, resource_id: str) -> None:
    ids = rotation.cooling_for.get(affinity)
    if ids is not None:
        ids.discard(resource_id)
        if not ids:
            del rotation.cooling_for[affinity]


def _tidy(resource: Resource[Any], kept: AffinityCooldowns) -> None:
    """Note when the next one ends; forget the collection if nothing is left in it."""
    if kept.next_end < math.inf:
        for member in resource.sharing.members:
            member.rotation.openings.note(member, kept.next_end)
    elif not len(kept):
        resource.sharing.affinity_cooldowns = None
    refresh(resource)
