"""Functions that read a rotation: the status of each member, statistics, and why nothing is eligible. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from headgate.core.events import maker
from headgate.core.labels import MOST
from headgate.core.redaction import redact
from headgate.core.views import ResourcePoolView, ResourceRow, TokenRow
from headgate.resources.members import Member, Requirement, WaitTicket
from headgate.resources.model import (
    RESOURCE_STATUSES,
    PoolStats,
    QuotaSnapshot,
    ResourceSnapshot,
    ResourceStats,
    ResourceStatus,
)

if TYPE_CHECKING:
    from headgate.resources.reporting import TokenCounts
    from headgate.resources.rotation import Rotation


def statuses(rotation: Rotation, now: float) -> Iterator[tuple[Member, ResourceStatus, float]]:
    """Each member with its status and the seconds its cooldown has left; one whose cooldown is over reads healthy."""
    for member in rotation.members.values():
        resource = member.resource
        left = resource.cooldown_until - now
        if resource.status != "cooling_down":
            yield member, resource.status, 0.0
        elif left <= 0:
            yield member, "healthy", 0.0
        else:
            yield member, "cooling_down", left


def describe(rotation: Rotation, requirement: Requirement, now: float) -> str:
    """Say in words why nothing is eligible for `requirement`."""
    seen = [status for member, status, _ in statuses(rotation, now) if requirement.fits(member.resource)]
    if not seen:
        tags, skip = sorted(requirement.tags), sorted(requirement.skip)
        return f"none of its {len(rotation.members)} matches tags {tags} and exclude {skip}"
    cooling, disabled = seen.count("cooling_down"), seen.count("disabled")
    healthy = [
        member
        for member, status, _ in statuses(rotation, now)
        if status == "healthy" and requirement.fits(member.resource)
    ]
    paused = sum(member.sharing.paused for member in healthy)
    healthy = [member for member in healthy if not member.sharing.paused]
    apart = [member for member in healthy if (member.cooling_until(requirement.affinity) or 0.0) > now]
    spent = sum(has_spent_quota(member) for member in healthy if member not in apart)
    for_affinity = f"{len(apart)} cooling down for this affinity, " if apart else ""
    no_quota = f"{spent} with a spent quota, " if spent else ""
    in_use = len(healthy) - len(apart) - spent
    limits = _adaptive_limits(rotation, requirement, now)
    out = f"{cooling} cooling down, {for_affinity}{disabled} disabled, {f'{paused} paused, ' if paused else ''}"
    return f"{out}{no_quota}{in_use} in full use{limits}"


def _adaptive_limits(rotation: Rotation, requirement: Requirement, now: float) -> str:
    """Say in words what the adaptive limits of the resources are that fit `requirement`."""
    found = [
        f"{member.resource.resource_id} takes {member.resource.max_in_flight} at a time ({stats})"
        for member in rotation.matching_members(requirement)
        if (stats := member.adaptive_stats(now)) is not None and member.resource.status != "disabled"
    ]
    more = f" and {len(found) - _MOST_DESCRIBED} more" if len(found) > _MOST_DESCRIBED else ""
    return f"; adaptive: {', '.join(found[:_MOST_DESCRIBED])}{more}" if found else ""


_MOST_DESCRIBED = 3  # adaptive limits in one sentence


def has_spent_quota(member: Member) -> bool:
    """Whether too little is left of its quota for another call."""
    account = member.sharing.account
    return account is not None and account.is_closed


def _quota(member: Member, now: float) -> dict[str, QuotaSnapshot]:
    account = member.sharing.account
    return {} if account is None else {"quota": account.snapshot(now)}


def pool_snapshot(rotation: Rotation, now: float) -> dict[str, ResourceSnapshot]:
    """The state of each resource, by id."""
    return {
        member.resource.resource_id: {
            "status": status,
            "in_flight": member.in_flight,
            "max_in_flight": member.resource.max_in_flight,
            "consecutive_cooldown": member.resource.consecutive_cooldown,
            "cooldown_seconds_remaining": left,
            "last_acquired_at": member.resource.last_acquired_at,
            **_quota(member, now),  # type: ignore[typeddict-item]  # only resources with a quota have it
        }
        for member, status, left in statuses(rotation, now)
    }


def pool_stats(rotation: Rotation, now: float, runs: Mapping[str, int]) -> PoolStats:
    """Gauges and counters; `runs` are the counters of calls, which the reporter keeps."""
    resources: dict[str, ResourceStats] = {}
    by_status: dict[ResourceStatus, int] = dict.fromkeys(RESOURCE_STATUSES, 0)
    eligible = saturated = 0
    for member, status, left in statuses(rotation, now):
        one = member.stats(status, left, now)
        resources[one.resource_id] = one
        by_status[status] += 1
        on_trial = member.trial is not None and member.trial.is_full
        eligible += one.eligible and not on_trial and not has_spent_quota(member)
        saturated += one.saturated
    totals, all_of = rotation.totals, resources.values()
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
        refusals=totals.refusals + sum(one.refusals for one in all_of),
        waiting=len(rotation.wait_queue),
        paused=len(rotation.paused),
        **runs,
    )


_WORST_FIRST: dict[ResourceStatus, int] = {"disabled": 0, "cooling_down": 1, "healthy": 2}


_COUNTS = tuple({field.name for field in fields(PoolStats)} & {field.name for field in fields(ResourcePoolView)})
_row = maker(ResourceRow)


def pool_view(stats: PoolStats, tokens: TokenCounts, rows: int) -> ResourcePoolView:
    """The state of a pool as rows.

    Of more resources than `rows` the first in the pool are listed, whose counters metrics follow, and those that are
    out of order, which come first.
    """
    shown = list(enumerate(stats.resources.values()))
    if len(shown) > rows:

        def rank(one: tuple[int, ResourceStats]) -> tuple[int, int]:
            return _WORST_FIRST[one[1].status], -one[1].in_flight

        first = min(MOST, rows // 2)
        shown = sorted([*shown[:first], *sorted(shown[first:], key=rank)[: rows - first]], key=rank)
    counts = {name: getattr(stats, name) for name in _COUNTS if name != "resources"}
    return ResourcePoolView(
        **counts,
        **{str(status): number for status, number in stats.by_status.items()},
        resource_count=len(stats.resources),
        resources=[
            _row(
                id=one.resource_id,
                position=position,
                status=one.status,
                in_flight=one.in_flight,
                max_in_flight=one.max_in_flight,
                cooldown=round(one.cooldown_seconds_remaining, 3),
                consecutive_cooldown=one.consecutive_cooldown,
                acquires=one.acquires,
                successes=one.successes,
                cooldowns=one.cooldowns,
                disables=one.disables,
                refusals=one.refusals,
                sibling_cancels=one.sibling_cancels,
                paused=one.paused,
                adaptive=one.adaptive,
                quota=one.quota,
            )
            for position, one in shown
        ],
        tokens=[TokenRow(name, *count) for name, count in tokens.by_resource.copy().items()],
        tenant_tokens=[TokenRow(redact(name), *count) for name, count in tokens.by_tenant.copy().items()],
    )


def check(rotation: Rotation, now: float) -> None:
    """Assert what must always be true of a rotation; for tests."""
    for resource_id, member in rotation.members.items():
        resource, uses, trial = member.resource, member.uses, member.trial
        assert resource.resource_id == resource_id
        assert member in resource.sharing.members
        assert uses is resource.sharing.uses
        no_quota = has_spent_quota(member)
        on_trial = trial is not None and trial.is_full
        is_paused = resource.sharing.paused
        assert (resource_id in rotation.paused) is is_paused
        assert member.unavailable == (resource.status != "healthy" or is_paused or on_trial or no_quota)
        if member.plain:
            assert len(resource.sharing.members) == len(member.pickers) == 1
            assert rotation.is_plain(member)
        if trial is not None:
            assert rotation.probe_on_recovery
            assert resource.status == "healthy"
            assert trial.successes < max(1, trial.limit)
            assert len(trial.running) <= trial.limit
            assert all(uses[order].member is member and not uses[order].is_late for order in trial.running)
        if resource.status == "cooling_down":
            assert any(until == resource.cooldown_until and one is member for until, _, one in rotation.cooling)
        kept = resource.sharing.affinity_cooldowns
        running = {} if kept is None else kept.active()
        assert kept is None or not member.plain
        assert {one for one, ids in rotation.cooling_for.items() if resource_id in ids} == set(running)
        if running:
            assert any(at == min(running.values()) and one is member for at, _, one in rotation.cooling)
        assert list(uses) == sorted(uses)
    open_members = [member for member in rotation.members.values() if member.is_open]
    assert all(ids <= rotation.members.keys() and ids for ids in rotation.cooling_for.values())
    for ticket in rotation.wait_queue:
        assert ticket.grant is None
        assert ticket.requirement.affinity is not None or ticket.affinity not in rotation.cooling_for
        fitting = [one for one in open_members if ticket.requirement.fits(one.resource) and not rotation.due(now)]
        assert not any(_affords(one, ticket, now) for one in fitting)


def _affords(member: Member, ticket: WaitTicket, now: float) -> bool:
    account = member.sharing.account
    if member.cooling_until(ticket.affinity) is not None:
        return False
    return account is None or account.admits(ticket.cost, now, ticket)
