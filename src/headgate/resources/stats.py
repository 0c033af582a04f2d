"""The half of a rotation that only looks."""

from __future__ import annotations

from collections.abc import Iterator

from headgate.core.wait_queue import Line
from headgate.resources.members import Member, Requirement, Totals, Use, WaitTicket
from headgate.resources.model import RESOURCE_STATUSES, PoolStats, ResourceStats, ResourceStatus


class Looking:
    """How things stand. Nothing here changes anything."""

    seats: dict[str, Member]
    """By resource id, in pool order."""
    line: Line[WaitTicket]
    """Those who wait for a resource."""
    cooling: list[tuple[float, int, Member]]
    """A heap by expiry; entries may be outdated."""
    _draining: dict[str, dict[int, Use]]  # flights of removed seats, by resource id
    _totals: Totals
    _probe_on_recovery: bool

    def due(self, now: float) -> bool:
        """Has a cooldown ended that nobody has noticed?"""
        return bool(self.cooling) and self.cooling[0][0] <= now

    def look(self, now: float) -> Iterator[tuple[Member, ResourceStatus, float]]:
        """Each seat with its status and the seconds its cooldown has left; one that is over reads healthy."""
        for seat in self.seats.values():
            resource = seat.resource
            left = resource.cooldown_until - now
            if resource.status != "cooling_down":
                yield seat, resource.status, 0.0
            elif left <= 0:
                yield seat, "healthy", 0.0
            else:
                yield seat, "cooling_down", left

    def describe(self, want: Requirement, now: float) -> str:
        """In words, why nothing is eligible."""
        seen = [(seat, status) for seat, status, _ in self.look(now) if want.fits(seat.resource)]
        if not seen:
            return f"none of its {len(self.seats)} matches tags {sorted(want.tags)} and exclude {sorted(want.skip)}"
        statuses = [status for _, status in seen]
        cooling, disabled = statuses.count("cooling_down"), statuses.count("disabled")
        return f"{cooling} cooling down, {disabled} disabled, {len(seen) - cooling - disabled} in full use"

    def stats(self, now: float, **runs: int) -> PoolStats:
        """Gauges and counters; `runs` are the counters that the shell keeps."""
        resources: dict[str, ResourceStats] = {}
        by_status: dict[ResourceStatus, int] = dict.fromkeys(RESOURCE_STATUSES, 0)
        eligible = saturated = 0
        for seat, status, left in self.look(now):
            one = seat.stats(status, left)
            resources[one.resource_id] = one
            by_status[status] += 1
            eligible += one.eligible and not (seat.trial is not None and seat.trial.is_full)
            saturated += one.saturated
        totals, all_of = self._totals, resources.values()
        return PoolStats(
            resources=resources,
            in_flight=sum(one.in_flight for one in all_of),
            eligible=eligible,
            saturated=saturated,
            by_status=by_status,
            attempts=totals.acquires + sum(one.acquires for one in all_of),
            successes=totals.successes + sum(one.successes for one in all_of),
            cooldowns=totals.cooldowns + sum(one.cooldowns for one in all_of),
            disables=totals.disables + sum(one.disables for one in all_of),
            sibling_cancels=totals.sibling_cancels + sum(one.sibling_cancels for one in all_of),
            waiting=len(self.line),
            **runs,
        )

    def check(self, now: float) -> None:
        """What must always be true; for tests."""
        for resource_id, seat in self.seats.items():
            resource = seat.resource
            assert resource.resource_id == resource_id
            assert seat in resource._seats
            trial = seat.trial
            assert seat.shut == (resource.status != "healthy" or (trial is not None and trial.is_full))
            if seat.plain:
                assert len(resource._seats) == len(seat.pickers) == 1
                assert trial is None
                assert resource_id not in self._draining
            if trial is not None:
                assert self._probe_on_recovery
                assert resource.status == "healthy"
                assert trial.successes < trial.limit
                assert len(trial.aloft) <= trial.limit
                assert all(resource._flights[order].seat is seat for order in trial.aloft)
                assert all(order > resource._outage for order in trial.aloft)
            if resource.status == "cooling_down":
                assert any(until == resource.cooldown_until and s is seat for until, _, s in self.cooling)
            assert list(resource._flights) == sorted(resource._flights)
        open_seats = [seat for seat in self.seats.values() if seat.is_open]
        for ticket in self.line:
            assert ticket.grant is None
            assert not any(ticket.want.fits(seat.resource) for seat in open_seats if not self.due(now))
