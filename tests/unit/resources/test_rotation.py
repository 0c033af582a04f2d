"""The rotation by examples: no loop, no clock, one line of the specification each."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headgate import InvalidArgument, Resource, UnknownResource
from headgate.resources import openings, pickers
from headgate.resources.effects import Cancel, Cool, Disable, Effects, Enable, Recover, Serve, Starve
from headgate.resources.members import ANY, Requirement, Use, WaitTicket
from headgate.resources.pickers import MAX_CLASSES
from headgate.resources.rotation import Rotation
from headgate.resources.stats import check, pool_stats
from headgate.resources.strategies import strategy_of
from tests.conftest import SCALE

TABLE = (30.0, 120.0, 300.0, 600.0)


def rotation_of(
    *members: str | Resource[None], strategy: str = "round_robin", table: Sequence[float] = TABLE, **options: Any
) -> Rotation:
    resources = [Resource(one, None) if isinstance(one, str) else one for one in members]
    return Rotation(resources, strategy=strategy_of(strategy), cooldown_table=table, **options)


def take(rotation: Rotation, want: Requirement = ANY, *, now: float = 0.0, avoid: Iterable[str] = ()) -> Use:
    """A use that may be cancelled, as an operation is that has suspended."""
    flight = rotation.acquire(now, want, frozenset(avoid))
    assert flight is not None, "nothing is eligible"
    flight.handle = object()
    return flight


def taken(rotation: Rotation, want: Requirement = ANY, *, now: float = 0.0, avoid: Iterable[str] = ()) -> str | None:
    """The id of what is taken; None when nothing is."""
    if rotation.due(now):
        rotation.advance(now)
    flight = rotation.acquire(now, want, frozenset(avoid))
    return flight and flight.member.resource.resource_id


def three_in_flight(on: str, **options: Any) -> tuple[Rotation, Use, Use, Use]:
    rotation = rotation_of(on, **options)
    return rotation, take(rotation, now=1.0), take(rotation, now=1.0), take(rotation, now=1.0)


def waits(rotation: Rotation, want: Requirement = ANY, *, deadline: float | None = None) -> WaitTicket:
    ticket = WaitTicket(want, rotation, deadline=deadline)
    rotation.wait_queue.join(ticket)
    return ticket


def tagged(*tags: str) -> Requirement:
    return Requirement(frozenset(tags))


def without(*ids: str) -> Requirement:
    return Requirement(skip=frozenset(ids))


def only(kind: type, effects: Effects | None) -> list[Any]:
    return [effect for effect in effects or () if isinstance(effect, kind)]


def served(effects: Effects | None) -> list[WaitTicket]:
    return [effect.ticket for effect in only(Serve, effects)]


def cool(rotation: Rotation, *, now: float, seconds: float | None = None) -> None:
    """One use that ends in a cooldown."""
    rotation.advance(now)
    rotation.cooled(take(rotation, now=now), seconds, now=now)


def health(resource: Resource[None]) -> tuple[str, int, float]:
    return resource.status, resource.consecutive_cooldown, resource.cooldown_until


# -- R06, R08: what a resource brings with it --------------------------------------------------------------------------


def test_r06_constructed_disabled_is_honoured() -> None:
    assert taken(rotation_of(Resource("a", None, status="disabled"), "b")) == "b"
    assert taken(rotation_of(Resource("a", None, status="disabled"))) is None


def test_r06_constructed_cooling_is_honoured_until_its_time() -> None:
    rotation = rotation_of(Resource("a", None, status="cooling_down", cooldown_until=40.0))
    assert taken(rotation, now=39.9) is None
    assert taken(rotation, now=40.0) == "a"


def test_r06_a_counter_that_is_given_is_counted_on() -> None:
    resource = Resource("a", None, consecutive_cooldown=1)
    cool(rotation_of(resource), now=0.0)
    assert health(resource) == ("cooling_down", 2, 120.0)


def test_r08_health_is_shared_and_each_pool_is_told() -> None:
    shared = Resource("k", None)
    here, there = rotation_of(shared, owner="here"), rotation_of(shared, "other", owner="there")
    effects = here.cooled(take(here), now=0.0)
    assert [(one.resource_id, one.until, one.member.rotation.owner) for one in only(Cool, effects)] == [
        ("k", 30.0, "here"),
        ("k", 30.0, "there"),
    ]
    assert taken(there) == "other"
    effects = there.advance(30.0)
    assert [one.member.rotation.owner for one in only(Recover, effects)] == ["here", "there"]
    assert taken(here, now=30.0) == "k"


def test_r08_each_signal_uses_its_own_pools_table() -> None:
    shared = Resource("k", None)
    here, there = rotation_of(shared, table=(1.0, 2.0, 3.0)), rotation_of(shared, table=(100.0, 200.0))
    cool(here, now=0.0)
    cool(there, now=1.0)
    assert health(shared) == ("cooling_down", 2, 201.0)
    cool(here, now=201.0)
    assert health(shared) == ("cooling_down", 3, 204.0)


def test_r08_the_limit_counts_the_uses_of_all_pools() -> None:
    shared = Resource("k", None, 2)
    here, there = rotation_of(shared), rotation_of(shared)
    flights = [take(here), take(there)]
    assert taken(here) is None
    assert taken(there) is None
    here.ok(flights[0])
    assert taken(there) == "k"


def test_r08_the_order_of_one_pool_sees_the_uses_of_the_other() -> None:
    shared = Resource("k", None)
    here, there = rotation_of(shared, "a"), rotation_of(shared)
    flight = take(there, now=5.0)
    assert taken(here, now=6.0) == "a", "fewer in flight"
    there.ok(flight)
    assert taken(here, now=7.0) == "k"


def test_r08_siblings_are_cancelled_across_pools() -> None:
    shared = Resource("k", None)
    here, there = rotation_of(shared), rotation_of(shared)
    old, mid, new = take(there), take(here), take(there)
    assert here.cooled(mid, now=0.0)[-1] == Cancel(new)
    assert there.in_flight("k") == [old, new]


def test_r08_a_waiter_of_the_other_pool_is_served() -> None:
    shared = Resource("k", None, 1)
    here, there = rotation_of(shared), rotation_of(shared)
    flight = take(here)
    ticket = waits(there)
    assert here.ok(flight, 1.0) == [Serve(ticket)]
    assert ticket.grant is not None
    assert ticket.grant.member.rotation is there


def test_r08_a_shared_successor_that_is_removed_gives_back_what_it_inherited() -> None:
    """R72: what drains in one pool counts there, and no longer when the successor has left that pool."""
    successor = Resource("k", None, 1)
    here, there = rotation_of("k"), rotation_of(successor)
    take(here)
    here.remove("k")
    here.add(successor)
    assert taken(there) is None, "the use of the predecessor counts"
    here.remove("k")
    assert there.in_flight("k") == []
    assert taken(there) == "k"


def test_r08_a_pool_that_is_dropped_takes_nothing_along() -> None:
    shared = Resource("k", None, 1)
    here, there = rotation_of(shared), rotation_of(shared)
    there.ok(take(there))
    del there
    gc.collect()
    check(here, 0.0)
    here.ok(take(here))
    check(here, 0.0)
    assert [taken(here), taken(here)] == ["k", None]


# -- R12, R25: what a call can mean ------------------------------------------------------------------------------------


def test_r12_the_budget_counts_what_matches() -> None:
    rotation = rotation_of(Resource("a", None, tags={"x"}), Resource("b", None, tags={"x", "y"}), "c")
    assert rotation.matching(ANY) == 3
    assert rotation.matching(tagged("x")) == 2
    assert rotation.matching(tagged("x", "y")) == 1
    assert rotation.matching(Requirement(frozenset({"x"}), frozenset({"b", "c", "unknown"}))) == 1
    rotation.remove("a")
    rotation.retag(rotation.members["c"].resource, Resource("c", None, tags={"x"}))
    assert (rotation.matching(ANY), rotation.matching(tagged("x"))) == (2, 2)


def test_r12_none_is_used_twice() -> None:
    rotation = rotation_of("a", "b", "c")
    assert [taken(rotation, avoid=tried) for tried in ("", "a", "ab", "abc")] == ["a", "b", "c", None]


def test_r25_tags_and_exclude_narrow_the_choice() -> None:
    rotation = rotation_of(Resource("a", None, tags={"eu"}), Resource("b", None, tags={"eu", "big"}), "c")
    assert [taken(rotation, tagged("eu")) for _ in range(4)] == ["a", "b", "a", "b"]
    assert taken(rotation, tagged("eu", "big")) == "b"
    assert taken(rotation, tagged("us")) is None
    assert taken(rotation, without("b", "c")) == "a"
    assert taken(rotation, Requirement(frozenset({"eu"}), frozenset({"a"})), avoid={"b"}) is None


def test_r25_what_was_set_aside_for_one_call_is_there_for_the_next() -> None:
    rotation = rotation_of(*"abcde")
    assert taken(rotation, without("a", "b", "c")) == "d"
    assert [taken(rotation) for _ in range(4)] == ["a", "b", "c", "e"]


# -- R20 - R23: selection ----------------------------------------------------------------------------------------------


def test_r20_eligible_is_not_disabled_not_cooling_and_below_the_limit() -> None:
    rotation = rotation_of("cooling", "disabled", Resource("full", None, 1), "free", strategy="primary_backup")
    rotation.cooled(take(rotation), now=0.0)
    rotation.disable("disabled")
    assert [taken(rotation) for _ in range(3)] == ["full", "free", "free"]


def test_r20_selecting_and_registering_are_one_step() -> None:
    rotation = rotation_of(Resource("a", None, 1))
    flight = take(rotation, now=7.0)
    assert rotation.in_flight("a") == [flight]
    assert flight.member.resource.last_acquired_at == 7.0
    assert taken(rotation) is None


def test_r21_six_concurrent_calls_on_three_resources_are_two_each() -> None:
    rotation = rotation_of("a", "b", "c")
    assert [taken(rotation, now=1.0) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_r21_fewest_in_flight_comes_before_longest_unused() -> None:
    rotation = rotation_of("a", "b")
    busy = take(rotation, now=1.0)
    rotation.ok(take(rotation, now=2.0))
    assert taken(rotation, now=3.0) == "b"
    rotation.ok(busy)
    assert taken(rotation, now=4.0) == "a"


def test_r21_longest_unused_comes_before_the_order_of_the_pool() -> None:
    rotation = rotation_of("a", "b", "c")
    for now in (1.0, 2.0, 3.0, 4.0):
        rotation.ok(take(rotation, now=now))
    assert taken(rotation, now=5.0) == "b"


def test_r21_a_last_use_that_is_given_counts() -> None:
    assert (
        taken(rotation_of(Resource("a", None, last_acquired_at=5.0), Resource("b", None, last_acquired_at=4.0))) == "b"
    )


def test_r22_a_backup_is_for_what_the_ones_before_cannot_take() -> None:
    regions = [Resource("us", None, 8), Resource("eu", None, 8), Resource("asia", None)]
    rotation = rotation_of(*regions, strategy="primary_backup")
    assert [taken(rotation) for _ in range(40)] == ["us"] * 8 + ["eu"] * 8 + ["asia"] * 24


def test_r22_the_second_is_never_touched_while_the_first_has_room() -> None:
    rotation = rotation_of(Resource("us", None, 2), "eu", strategy="primary_backup")
    for now in range(20):
        flights = [take(rotation, now=now), take(rotation, now=now)]
        assert {flight.member.resource.resource_id for flight in flights} == {"us"}
        for flight in flights:
            rotation.ok(flight, now)


def test_r22_a_freed_first_is_first_again() -> None:
    rotation = rotation_of(Resource("us", None, 1), "eu", strategy="primary_backup")
    flight = take(rotation)
    assert taken(rotation) == "eu"
    rotation.ok(flight)
    assert taken(rotation) == "us"


def test_r23_a_cooled_resource_returns_by_itself() -> None:
    rotation = rotation_of("a")
    rotation.cooled(take(rotation), now=0.0)
    assert not rotation.due(29.9)
    assert rotation.due(30.0)
    assert rotation.advance(30.0) == [Recover("a")]
    assert taken(rotation, now=30.0) == "a"


def test_r23_a_freed_slot_is_usable_at_once() -> None:
    rotation = rotation_of(Resource("a", None, 1))
    for end in (rotation.ok, rotation.ended):
        flight = take(rotation)
        assert taken(rotation) is None
        end(flight)
    assert taken(rotation) == "a"


# -- R30 - R33, R13, R35: verdicts -------------------------------------------------------------------------------------


def test_r30_a_success_clears_counter_and_cooldown() -> None:
    resource = Resource("a", None)
    rotation = rotation_of(resource)
    cool(rotation, now=0.0)
    cool(rotation, now=30.0)
    rotation.advance(150.0)
    assert health(resource) == ("healthy", 2, 150.0)
    rotation.ok(take(rotation, now=150.0))
    assert health(resource) == ("healthy", 0, 0.0)


def test_r30_no_verdict_changes_nothing() -> None:
    resource = Resource("a", None)
    rotation = rotation_of(resource)
    cool(rotation, now=0.0)
    rotation.advance(30.0)
    assert rotation.ended(take(rotation, now=30.0)) is None
    assert health(resource) == ("healthy", 1, 30.0)


def test_r13_r31_the_table_is_climbed_and_clamps_to_its_last_entry() -> None:
    resource = Resource("a", None)
    rotation = rotation_of(resource)
    rests = []
    now = 0.0
    for _ in range(6):
        cool(rotation, now=now)
        rests.append(resource.cooldown_until - now)
        now = resource.cooldown_until
    assert rests == [30.0, 120.0, 300.0, 600.0, 600.0, 600.0]
    assert resource.consecutive_cooldown == 6


def test_r31_explicit_seconds_override_the_table_for_that_event_and_still_count() -> None:
    resource = Resource("a", None)
    rotation = rotation_of(resource)
    cool(rotation, now=0.0, seconds=7.0)
    assert health(resource) == ("cooling_down", 1, 7.0)
    cool(rotation, now=7.0)
    assert health(resource) == ("cooling_down", 2, 127.0)


def test_r31_a_cooldown_is_never_shortened() -> None:
    rotation, old, mid, new = three_in_flight(on="a")
    rotation.cooled(old, 100.0, now=0.0)
    assert rotation.cooled(mid, 5.0, now=10.0) == [Cool("a", until=100.0)]
    assert rotation.cooled(new, 95.0, now=10.0) == [Cool("a", until=105.0)]
    assert rotation.advance(104.9) == []
    assert rotation.advance(105.0) == [Recover("a")]


def test_r31_zero_seconds_are_counted_and_eligible_at_once() -> None:
    resource = Resource("a", None)
    rotation = rotation_of(resource)
    cool(rotation, now=10.0, seconds=0.0)
    assert resource.consecutive_cooldown == 1
    assert taken(rotation, now=10.0) == "a"


def test_r31_zero_seconds_do_not_end_a_cooldown() -> None:
    rotation, old, mid, _ = three_in_flight(on="a")
    rotation.cooled(old, now=0.0)
    rotation.cooled(mid, 0.0, now=1.0)
    assert taken(rotation, now=1.0) is None
    assert taken(rotation, now=30.0) == "a"


def test_r32_disabled_is_permanent() -> None:
    rotation = rotation_of("a", "b")
    assert rotation.disabled(take(rotation), 0.0) == [Disable("a")]
    assert [taken(rotation, now=1e9) for _ in range(3)] == ["b", "b", "b"]


def test_r32_nothing_late_revives_a_disabled_resource() -> None:
    rotation, old, mid, new = three_in_flight(on="a", cancel_siblings=False)
    rotation.disabled(mid, 0.0)
    assert rotation.ok(new, 1.0) is None
    assert rotation.cooled(old, now=2.0) == []
    assert health(rotation.members["a"].resource) == ("disabled", 0, 0.0)
    assert taken(rotation, now=1e9) is None


def test_r32_disabled_while_cooling_does_not_return_when_the_cooldown_would_have_ended() -> None:
    rotation, old, mid, _ = three_in_flight(on="a")
    rotation.cooled(old, now=0.0)
    assert rotation.disabled(mid, 1.0)[0].old == "cooling_down"
    assert rotation.advance(1e9) == []
    assert taken(rotation, now=1e9) is None


def test_r33_a_late_ok_clears_no_cooldown_that_began_after_it_started() -> None:
    rotation, old, mid, new = three_in_flight(on="a", cancel_siblings=False)
    rotation.cooled(mid, now=0.0)
    for flight in (old, new):
        rotation.ok(flight, 1.0)
        assert health(rotation.members["a"].resource) == ("cooling_down", 1, 30.0)


def test_r33_a_late_ok_clears_no_counter_after_the_cooldown_has_ended() -> None:
    rotation, old, mid, _ = three_in_flight(on="a")
    rotation.cooled(mid, now=0.0)
    rotation.advance(30.0)
    rotation.ok(old, 31.0)
    assert health(rotation.members["a"].resource) == ("healthy", 1, 30.0)


def test_r35_a_burst_of_429s_escalates_once() -> None:
    rotation = rotation_of("a")
    flights = [take(rotation, now=0.0) for _ in range(20)]
    for now, flight in enumerate(flights):
        rotation.cooled(flight, now=float(now))
    assert health(rotation.members["a"].resource) == ("cooling_down", 1, 19.0 + 30.0)


def test_r35_a_late_429_extends_at_the_current_rung() -> None:
    resource = Resource("a", None)
    rotation = rotation_of(resource)
    late = take(rotation)
    cool(rotation, now=0.0)
    cool(rotation, now=30.0)
    rotation.cooled(late, now=100.0)
    assert health(resource) == ("cooling_down", 2, 220.0)


def test_r35_a_late_429_after_the_cooldown_has_ended_does_not_climb() -> None:
    resource = Resource("a", None)
    rotation = rotation_of(resource)
    late, later = take(rotation), take(rotation)
    cool(rotation, now=0.0)
    rotation.advance(30.0)
    current = take(rotation, now=31.0)
    rotation.cooled(late, now=40.0)
    assert health(resource) == ("cooling_down", 1, 70.0)
    rotation.cooled(later, now=41.0)
    rotation.cooled(current, now=42.0)
    assert health(resource) == ("cooling_down", 1, 72.0), "it began again at 40, and all of these are older"


def test_r35_a_new_429_after_the_cooldown_climbs() -> None:
    resource = Resource("a", None)
    rotation = rotation_of(resource)
    cool(rotation, now=0.0)
    cool(rotation, now=30.0)
    assert health(resource) == ("cooling_down", 2, 150.0)


def test_h02_a_cooldown_that_another_process_reports_lasts_from_now_to_its_end() -> None:
    rotation = rotation_of("a", "b")
    reported: Any = SimpleNamespace(
        until=40.0, consecutive=2, disabled=False, enabled=False, cleared=False, is_new=False
    )
    [cool] = [one for one in rotation.adopt("a", reported, 10.0) if isinstance(one, Cool)]
    assert (cool.resource_id, cool.until, cool.seconds) == ("a", 40.0, 30.0)
    reported.until = 39.0
    assert rotation.adopt("a", reported, 11.0) == []


def test_r35_a_late_429_after_a_success_is_the_first_of_a_new_outage() -> None:
    resource = Resource("a", None)
    rotation = rotation_of(resource)
    late, later = take(rotation), take(rotation)
    cool(rotation, now=0.0)
    rotation.advance(30.0)
    rotation.ok(take(rotation, now=31.0))
    rotation.cooled(late, now=40.0)
    assert health(resource) == ("cooling_down", 1, 70.0)
    rotation.cooled(later, now=41.0)
    assert health(resource) == ("cooling_down", 1, 71.0)


def test_r35_order_is_by_acquisition_and_not_by_clock() -> None:
    """All in the same instant: three that were acquired before, one after."""
    rotation, *before = three_in_flight(on="a", table=(0.0, 50.0))
    resource = rotation.members["a"].resource
    rotation.cooled(before[0], now=1.0)
    rotation.advance(1.0)
    after = take(rotation, now=1.0)
    rotation.ok(before[1], 1.0)
    assert resource.consecutive_cooldown == 1
    rotation.cooled(after, now=1.0)
    assert health(resource) == ("cooling_down", 2, 51.0)


# -- R37, R72: coming and going ----------------------------------------------------------------------------------------


def test_r37_a_late_401_of_a_removed_key_does_not_touch_its_successor() -> None:
    rotation = rotation_of("k")
    late = take(rotation)
    rotation.remove("k")
    rotation.add(Resource("k", None))
    assert rotation.disabled(late, 1.0) == []
    assert health(rotation.members["k"].resource) == ("healthy", 0, 0.0)
    assert taken(rotation) == "k"


def test_r37_a_late_429_of_a_removed_key_neither() -> None:
    rotation = rotation_of("k")
    late = take(rotation)
    rotation.remove("k")
    rotation.add(Resource("k", None))
    assert rotation.cooled(late, now=1.0) == []
    assert taken(rotation) == "k"


def test_r37_a_late_ok_of_a_removed_key_does_not_clear_its_successors_cooldown() -> None:
    rotation = rotation_of("k")
    late = take(rotation)
    rotation.remove("k")
    rotation.add(successor := Resource("k", None))
    cool(rotation, now=0.0)
    rotation.ok(late, 1.0)
    assert health(successor) == ("cooling_down", 1, 30.0)


def test_r37_siblings_of_a_removed_key_are_cancelled_and_its_successors_are_not() -> None:
    rotation, old, _, _ = three_in_flight(on="k")
    mid, new = rotation.in_flight("k")[1:]
    rotation.remove("k")
    rotation.add(Resource("k", None))
    take(rotation)
    assert rotation.disabled(old, 1.0) == [Cancel(new), Cancel(mid)]


def test_r37_a_shared_successor_does_not_cancel_what_it_inherited() -> None:
    """R60: younger uses *of that resource*; this one is younger and of another."""
    successor = Resource("k", None)
    here, there = rotation_of("k"), rotation_of(successor)
    signaller = take(there)
    take(here)
    here.remove("k")
    here.add(successor)
    assert there.cooled(signaller, now=0.0) == [Cool("k", 30.0), Cool("k", 30.0)]


def test_r72_removed_is_gone_at_once_and_drains() -> None:
    rotation = rotation_of("a", "b")
    flight = take(rotation)
    rotation.remove("a")
    assert list(rotation.members) == ["b"]
    assert [taken(rotation) for _ in range(3)] == ["b", "b", "b"]
    assert rotation.ok(flight) is None


def test_r72_what_drains_counts_against_the_limit_of_a_successor() -> None:
    rotation = rotation_of(Resource("k", None, 2))
    flights = [take(rotation), take(rotation)]
    rotation.remove("k")
    rotation.add(Resource("k", None, 2))
    assert rotation.in_flight("k") == flights
    assert taken(rotation) is None
    rotation.ok(flights[0])
    assert taken(rotation) == "k"
    assert taken(rotation) is None


def test_r72_what_drains_counts_against_the_successors_of_a_successor() -> None:
    rotation = rotation_of(Resource("k", None, 1))
    flight = take(rotation)
    for _ in range(3):
        rotation.remove("k")
        rotation.add(Resource("k", None, 1))
        assert taken(rotation) is None
    rotation.ok(flight)
    assert taken(rotation) == "k"


def test_r72_a_waiter_gets_the_successors_place_when_the_predecessors_use_ends() -> None:
    rotation = rotation_of(Resource("k", None, 1))
    flight = take(rotation)
    rotation.remove("k")
    rotation.add(successor := Resource("k", None, 1))
    ticket = waits(rotation)
    assert rotation.cooled(flight, now=1.0) == [Serve(ticket)]
    assert ticket.grant is not None
    assert ticket.grant.member.resource is successor


@pytest.mark.parametrize("verdict", ["ok", "ended", "cooled", "disabled"])
def test_r72_the_same_resource_may_go_and_come_back_while_in_use(verdict: str) -> None:
    resource = Resource("k", None, 2)
    rotation = rotation_of(resource)
    flight = take(rotation)
    for _ in range(3):
        rotation.remove("k")
        rotation.add(resource)
        assert rotation.in_flight("k") == [flight]
    rotation.remove("k")
    getattr(rotation, verdict)(flight, **({"now": 1.0} if verdict == "cooled" else {}))
    rotation.add(resource)
    assert rotation.in_flight("k") == []
    check(rotation, 1.0)


def test_r72_a_shared_resource_that_leaves_one_pool_twice_is_still_in_use_in_the_other() -> None:
    shared = Resource("k", None, 1)
    here, there = rotation_of(shared), rotation_of(shared)
    flight = take(here)
    here.remove("k")
    here.add(shared)
    here.remove("k")
    assert there.in_flight("k") == [flight]
    assert taken(there) is None
    here.ok(flight)
    assert taken(there) == "k"


def test_r72_what_cools_stays_cool_when_it_is_put_back() -> None:
    resource = Resource("k", None)
    rotation = rotation_of(resource, "other")
    cool(rotation, now=0.0)
    rotation.remove("k")
    rotation.add(resource)
    assert rotation.next_expiry() == 30.0
    assert [taken(rotation, now=1.0) for _ in range(2)] == ["other", "other"]
    assert taken(rotation, now=30.0) == "k"


def test_r72_enable_clears_cooldown_and_counter() -> None:
    rotation, old, mid, _ = three_in_flight(on="a")
    resource = rotation.members["a"].resource
    rotation.cooled(old, now=0.0)
    assert rotation.enable("a") == [Enable("a")]
    assert health(resource) == ("healthy", 0, 0.0)
    rotation.disabled(mid)
    assert rotation.enable("a") == [Enable("a")]
    assert rotation.enable("a") == []
    assert taken(rotation) == "a"
    assert rotation.next_expiry() is None


def test_r72_disable_cancels_nothing() -> None:
    rotation, *flights = three_in_flight(on="a")
    assert rotation.disable("a") == [Disable("a")]
    assert rotation.disable("a") == []
    assert rotation.in_flight("a") == flights
    assert {flight.status for flight in flights} == {"in_flight"}


def test_r72_an_unknown_id_is_named() -> None:
    rotation = rotation_of("a")
    for steer in (rotation.remove, rotation.enable, rotation.disable, rotation.in_flight):
        with pytest.raises(UnknownResource, match="unknown resource_id 'nobody'"):
            steer("nobody")


def test_r11_an_id_twice_is_refused_and_changes_nothing() -> None:
    rotation = rotation_of("a")
    with pytest.raises(InvalidArgument, match="Duplicate resource_id"):
        rotation.add(Resource("a", None))
    assert [taken(rotation), taken(rotation)] == ["a", "a"]
    check(rotation, 0.0)


def test_r72_reconcile_keeps_health_and_takes_over_limit_tags_and_order() -> None:
    rotation = rotation_of("a", "b", strategy="primary_backup")
    cool(rotation, now=0.0)
    resource = rotation.members["a"].resource
    rotation.retag(resource, Resource("a", None, 1, tags={"x"}))
    rotation.reorder(["b", "a"])
    assert rotation.settle(0.0) == []
    assert health(resource) == ("cooling_down", 1, 30.0)
    assert taken(rotation, now=30.0) == "b"
    assert taken(rotation, tagged("x"), now=30.0) == "a"
    assert taken(rotation, tagged("x"), now=30.0) is None


def test_r72_a_limit_may_be_lowered_below_what_is_in_flight() -> None:
    rotation, *flights = three_in_flight(on="a")
    rotation.retag(rotation.members["a"].resource, Resource("a", None, 2))
    check(rotation, 0.0)
    for free, flight in zip([False, True, True], flights, strict=True):
        rotation.ok(flight)
        assert rotation.members["a"].is_open is free
    assert [taken(rotation) for _ in range(3)] == ["a", "a", None]


def test_r72_a_raised_limit_serves_those_who_wait() -> None:
    rotation = rotation_of(Resource("a", None, 1))
    take(rotation)
    tickets = [waits(rotation) for _ in range(3)]
    rotation.retag(rotation.members["a"].resource, Resource("a", None, 3))
    assert rotation.settle(0.0) == [Serve(tickets[0]), Serve(tickets[1])]


def test_r72_reconciling_again_and_again_costs_no_memory() -> None:
    rotation = rotation_of("a", "b")
    cool(rotation, now=0.0, seconds=1e6)
    for _ in range(1000):
        rotation.reorder(["a", "b"])
        rotation.settle(0.0)
    assert len(rotation.cooling) < 100


# -- R43: those who wait -----------------------------------------------------------------------------------------------


def full(*members: Resource[None], **options: Any) -> tuple[Rotation, dict[str, Use]]:
    """A rotation in full use, and its uses by resource id."""
    rotation = rotation_of(*members, **options)
    flights = {}
    while (flight := rotation.acquire(0.0)) is not None:
        flights[flight.member.resource.resource_id] = flight
    return rotation, flights


def one(name: str, *tags: str) -> Resource[None]:
    return Resource(name, None, 1, tags=tags)


def test_r43_first_come_first_served() -> None:
    rotation, flights = full(one("a"), one("b"))
    tickets = [waits(rotation) for _ in range(3)]
    assert rotation.ok(flights["b"], 1.0) == [Serve(tickets[0])]
    assert rotation.ended(flights["a"], 2.0) == [Serve(tickets[1])]
    grants = [ticket.grant and ticket.grant.member.resource.resource_id for ticket in tickets]
    assert grants == ["b", "a", None]


def test_r43_a_release_goes_to_the_first_who_can_use_it() -> None:
    rotation, flights = full(one("a"), one("b", "x"))
    picky, easy = waits(rotation, tagged("x")), waits(rotation)
    assert rotation.ok(flights["a"], 1.0) == [Serve(easy)]
    assert rotation.ok(flights["b"], 2.0) == [Serve(picky)]


def test_r43_a_later_comer_never_takes_what_suits_an_earlier_one() -> None:
    rotation, flights = full(one("a"))
    early = waits(rotation)
    assert rotation.ok(flights["a"], 1.0) == [Serve(early)]
    assert taken(rotation, now=1.0) is None, "there is no moment in which it is free"


def test_r43_one_that_wakes_and_does_not_take_hands_on() -> None:
    rotation, flights = full(one("a"))
    first, second = waits(rotation), waits(rotation)
    rotation.ok(flights["a"], 1.0)
    assert rotation.leave(first, 2.0) == [Serve(second)]
    assert rotation.leave(first, 2.0) is None, "only once"


def test_r43_what_was_granted_and_not_begun_is_taken_back_when_it_rests() -> None:
    rotation = rotation_of(Resource("a", None, 2))
    older, newer = take(rotation), take(rotation)
    first, second = waits(rotation), waits(rotation)
    rotation.ok(newer, 1.0)
    assert first.grant is not None
    assert rotation.cooled(older, now=2.0) == [Cool("a", until=32.0)]
    assert (first.grant, list(rotation.wait_queue), rotation.in_flight("a")) == (None, [first, second], [])
    assert rotation.advance(32.0) == [Recover("a"), Serve(first), Serve(second)]


def test_r43_those_it_is_taken_back_from_stand_where_they_stood() -> None:
    rotation, flights = full(one("a"), one("b"), one("c"))
    first, second, third = waits(rotation), waits(rotation), waits(rotation)
    rotation.ok(flights["a"], 1.0)
    rotation.ok(flights["b"], 1.0)
    rotation.disable("a")
    rotation.disable("b")
    assert list(rotation.wait_queue) == [first, second, third]
    assert rotation.ok(flights["c"], 2.0) == [Serve(first)]


def test_r43_what_is_taken_back_by_a_disable_is_made_good_by_what_is_free() -> None:
    rotation, flights = full(one("a"), one("b"))
    ticket = waits(rotation)
    rotation.ok(flights["a"], 1.0)
    rotation.ok(flights["b"], 1.0)
    assert rotation.disable("a") == [Disable("a"), Serve(ticket)]


def test_r43_what_is_taken_back_no_longer_counts_against_a_successor() -> None:
    """R72: the grant drained for the successor as a use does."""
    rotation = rotation_of(Resource("k", None, 2))
    older, newer = take(rotation), take(rotation)
    ticket = waits(rotation)
    rotation.ok(newer, 1.0)
    rotation.remove("k")
    rotation.add(successor := Resource("k", None, 2))
    assert rotation.cooled(older, now=2.0) == [Serve(ticket)]
    assert ticket.grant is not None
    assert ticket.grant.member.resource is successor
    assert rotation.in_flight("k") == [ticket.grant]
    assert [taken(rotation, now=2.0), taken(rotation, now=2.0)] == ["k", None]


def test_r43_what_is_taken_back_in_another_pool_frees_the_successor_there() -> None:
    """Of the same id in that pool, and full so far: it must be offered again."""
    shared, successor = Resource("k", None, 2), one("k")
    here, there = rotation_of(shared), rotation_of(shared)
    signaller, other = take(here), take(there)
    ticket = waits(there)
    there.ok(other, 1.0)
    there.remove("k", 1.0)
    there.add(successor, 1.0)
    assert taken(there, now=1.0) is None
    assert served(here.cooled(signaller, now=2.0)) == [ticket]
    assert there.in_flight("k") == [ticket.grant]


def test_r43_who_it_is_taken_back_from_is_told_when_nothing_else_can_come() -> None:
    """Its pool does not hold the resource any more, and nothing else."""
    rotation = rotation_of(Resource("k", None, 2))
    older, newer = take(rotation), take(rotation)
    ticket = waits(rotation)
    rotation.ok(newer, 1.0)
    rotation.remove("k")
    assert rotation.cooled(older, now=2.0) == [Starve(ticket)]
    assert not rotation.wait_queue


def test_r43_leaving_the_line_takes_nothing_along() -> None:
    rotation, flights = full(one("a"))
    first, second = waits(rotation), waits(rotation)
    assert rotation.leave(first, 1.0) is None
    assert rotation.ok(flights["a"], 1.0) == [Serve(second)]


def test_r43_the_end_of_a_cooldown_serves() -> None:
    rotation = rotation_of(Resource("a", None, 2))
    rotation.cooled(take(rotation), now=0.0)
    tickets = [waits(rotation) for _ in range(3)]
    assert rotation.advance(30.0) == [Recover("a"), Serve(tickets[0]), Serve(tickets[1])]
    assert list(rotation.wait_queue) == [tickets[2]]


def test_r43_enable_and_add_serve() -> None:
    rotation, _ = full(one("a"))
    first, second = waits(rotation), waits(rotation)
    assert rotation.add(one("b"), 1.0) == [Serve(first)]
    rotation.add(Resource("c", None, status="disabled"), 1.0)
    assert rotation.enable("c", 1.0) == [Enable("c"), Serve(second)]


def test_r43_waiters_of_two_pools_are_served_in_the_order_in_which_they_came() -> None:
    """R08: a release of a shared resource goes to the first waiter that can use it, whichever pool it waits in."""
    shared = Resource("k", None, 2)
    here, there = rotation_of(shared), rotation_of(shared)
    here.cooled(take(here), now=0.0)
    first, second, third = waits(here), waits(there), waits(here)
    assert served(here.advance(30.0)) == [first, second]
    assert list(here.wait_queue) == [third]


def test_r43_one_who_cannot_use_it_does_not_open_the_door_for_those_behind() -> None:
    """The first of `here` is first of all and cannot use it; the next of `here` came after the one of `there`."""
    shared = one("k")
    here, there = rotation_of(shared, one("a", "x")), rotation_of(shared)
    flight, _ = take(here), take(here)
    waits(here, tagged("x"))
    second, third = waits(there), waits(here)
    assert served(here.ok(flight, 1.0)) == [second]
    assert third.grant is None


def test_r43_cooldowns_that_end_together_are_given_away_together() -> None:
    """The end of `a`, which only `here` holds, must not let `here` take `k` before the earlier waiter of `there`."""
    shared = one("k")
    here, there = rotation_of(one("a"), shared), rotation_of(shared)
    for flight in [take(here), take(here)]:
        here.cooled(flight, now=0.0)
    first, second, third = waits(there), waits(here), waits(here)
    assert served(here.advance(30.0)) == [first, second]
    assert third.grant is None


def test_r43_what_a_reconcile_frees_is_given_away_together() -> None:
    shared = one("k")
    here, there = rotation_of(one("a"), shared), rotation_of(shared)
    take(here), take(here)
    first, second, third = waits(there), waits(here), waits(here)
    for name in ("a", "k"):
        here.retag(here.members[name].resource, Resource(name, None, 2))
    assert served(here.settle(0.0)) == [first, second]
    assert third.grant is None


def test_r43_nothing_can_come_and_the_waiter_is_told() -> None:
    rotation, flights = full(one("a"), one("b", "x"))
    picky, easy = waits(rotation, tagged("x")), waits(rotation)
    assert rotation.disabled(flights["b"], 1.0) == [Disable("b"), Starve(picky)]
    assert rotation.disable("a") == [Disable("a"), Starve(easy)]
    assert not rotation.wait_queue


def test_r43_removing_the_last_hope_tells_the_waiter() -> None:
    rotation, _ = full(one("a"))
    ticket = waits(rotation)
    assert rotation.remove("a") == [Starve(ticket)]


def test_r43_a_waiter_of_the_other_pool_is_told_too() -> None:
    shared = one("k")
    here, there = rotation_of(shared), rotation_of(shared)
    flight = take(here)
    ticket = waits(there)
    assert Starve(ticket) in here.disabled(flight, 1.0)


def test_r43_a_waiter_of_the_other_pool_is_told_when_a_tag_is_taken_away() -> None:
    shared = one("k", "x")
    here, there = rotation_of(shared), rotation_of(shared)
    take(here)
    ticket = waits(there, tagged("x"))
    here.retag(shared, one("k"))
    assert here.settle(0.0) == [Starve(ticket)]


def test_r43_who_waits_for_a_cooldown_gives_up_when_it_is_extended_past_the_deadline() -> None:
    shared = Resource("k", None)
    here, there = rotation_of(shared), rotation_of(shared)
    first, late = take(here), take(here)
    here.cooled(first, now=0.0)
    patient, in_time, hurried = waits(there), waits(there, deadline=41.0), waits(there, deadline=40.0)
    assert only(Starve, here.cooled(late, now=10.0)) == [Starve(hurried)]
    assert list(there.wait_queue) == [patient, in_time]


def test_r43_next_expiry_is_the_earliest_of_those_that_match() -> None:
    rotation = rotation_of(one("a", "x"), one("b"), strategy="primary_backup")
    rotation.cooled(take(rotation), 50.0, now=0.0)
    rotation.cooled(take(rotation), 10.0, now=0.0)
    assert (rotation.next_expiry(), rotation.next_expiry(tagged("x")), rotation.next_expiry(without("a"))) == (
        10,
        50,
        10,
    )
    assert rotation.next_expiry(tagged("y")) is None
    rotation.enable("b")
    assert rotation.next_expiry() == 50


# -- R60: siblings -----------------------------------------------------------------------------------------------------


def test_r60_strictly_younger_uses_are_cancelled() -> None:
    rotation, old, mid, new = three_in_flight(on="key-1")
    assert rotation.cooled(mid, now=10.0) == [Cool("key-1", until=40.0), Cancel(new)]
    assert rotation.in_flight("key-1") == [old, new]  # the elder may already have had its effect upstream
    assert (old.status, new.status) == ("in_flight", "cancelled")


def test_r60_a_disable_cancels_too() -> None:
    rotation, old, mid, new = three_in_flight(on="key-1")
    assert rotation.disabled(old, 10.0) == [Disable("key-1"), Cancel(new), Cancel(mid)]


def test_r60_other_resources_are_left_alone() -> None:
    rotation = rotation_of("a", "b")
    flights = [take(rotation) for _ in range(4)]
    assert only(Cancel, rotation.cooled(flights[0], now=0.0)) == [Cancel(flights[2])]


def test_r60_nobody_is_cancelled_twice() -> None:
    rotation, old, mid, new = three_in_flight(on="key-1")
    rotation.cooled(mid, now=1.0)
    assert only(Cancel, rotation.cooled(old, now=2.0)) == []
    assert rotation.in_flight("key-1") == [new]


def test_r60_a_late_signal_cancels_those_younger_than_itself() -> None:
    rotation = rotation_of("a")
    old, mid = take(rotation), take(rotation)
    cool(rotation, now=0.0)
    rotation.advance(30.0)
    new = take(rotation, now=30.0)
    assert only(Cancel, rotation.cooled(old, now=31.0)) == [Cancel(new), Cancel(mid)]


def test_r63_both_pools_must_cancel_siblings() -> None:
    rotation, old, *_ = three_in_flight(on="a", cancel_siblings=False)
    assert rotation.cooled(old, now=0.0) == [Cool("a", until=30.0)]
    shared = Resource("k", None)
    here, there = rotation_of(shared), rotation_of(shared, cancel_siblings=False)
    first, second, _, fourth = take(here), take(there), take(there), take(here)
    assert only(Cancel, here.cooled(first, now=0.0)) == [Cancel(fourth)]
    assert only(Cancel, there.disabled(second)) == []


def test_r64_a_use_without_a_handle_is_never_cancelled() -> None:
    rotation, old, mid, new = three_in_flight(on="a")
    mid.handle = None
    assert only(Cancel, rotation.disabled(old)) == [Cancel(new)]


def test_r71_a_cancelled_sibling_is_counted_though_its_pool_has_let_the_resource_go() -> None:
    shared = Resource("k", None)
    here, there = rotation_of(shared), rotation_of(shared)
    old, new = take(here), take(there)
    there.remove("k")
    assert Cancel(new) in here.cooled(old, now=0.0)
    runs = dict.fromkeys(("retries", "runs_ok", "runs_exhausted", "runs_error", "runs_cancelled"), 0)
    assert pool_stats(there, 0.0, runs).sibling_cancels == 1


# -- R74: probes -------------------------------------------------------------------------------------------------------


def recovered(*before: str, **options: Any) -> tuple[Rotation, list[Use]]:
    """A rotation of one resource whose cooldown has just ended, at 30, and the uses from before that still run."""
    rotation = rotation_of("a", probe_on_recovery=True, **options)
    flights = [take(rotation) for _ in before]
    rotation.cooled(take(rotation), now=0.0)
    rotation.advance(30.0)
    return rotation, flights


def test_r74_one_probe_until_a_success() -> None:
    rotation, _ = recovered()
    probe = take(rotation, now=30.0)
    assert taken(rotation, now=31.0) is None
    rotation.ok(probe, 32.0)
    assert [taken(rotation, now=32.0) for _ in range(3)] == ["a", "a", None]


def test_r74_before_any_cooldown_there_is_nothing_to_prove() -> None:
    rotation = rotation_of("a", probe_on_recovery=True)
    assert [taken(rotation) for _ in range(3)] == ["a", "a", "a"]


def test_r74_uses_from_before_the_cooldown_do_not_block_the_probe() -> None:
    rotation, [old] = recovered("old")
    assert taken(rotation, now=30.0) == "a"
    assert taken(rotation, now=30.0) is None
    rotation.ended(old, 31.0)
    assert taken(rotation, now=31.0) is None, "and their end does not let a second one in"


def test_r74_a_success_from_before_the_cooldown_proves_nothing() -> None:
    rotation, [old] = recovered("old")
    take(rotation, now=30.0)
    rotation.ok(old, 31.0)
    assert taken(rotation, now=31.0) is None


def test_r74_a_probe_without_verdict_is_offered_again() -> None:
    rotation, _ = recovered()
    rotation.ended(take(rotation, now=30.0), 31.0)
    assert taken(rotation, now=31.0) == "a"
    assert taken(rotation, now=31.0) is None


def test_r74_a_probe_that_fails_climbs_and_the_next_is_a_probe_again() -> None:
    rotation, _ = recovered()
    assert rotation.cooled(take(rotation, now=30.0), now=31.0) == [Cool("a", until=151.0)]
    assert taken(rotation, now=151.0) == "a"
    assert taken(rotation, now=151.0) is None


def test_r74_a_probe_that_outlives_a_second_cooldown_does_not_block_the_next() -> None:
    rotation, [old] = recovered("old")
    outlived = take(rotation, now=30.0)
    rotation.cooled(old, now=31.0)
    assert taken(rotation, now=61.0) == "a"
    rotation.ended(outlived, 62.0)
    assert taken(rotation, now=62.0) is None
    assert rotation.members["a"].resource.consecutive_cooldown == 1


def test_r74_enable_asks_for_no_probe() -> None:
    rotation, _ = recovered()
    take(rotation, now=30.0)
    rotation.enable("a")
    assert [taken(rotation, now=30.0) for _ in range(3)] == ["a", "a", "a"]


def test_r74_waiters_are_served_the_probe_and_then_the_rest() -> None:
    rotation = rotation_of("a", probe_on_recovery=True)
    rotation.cooled(take(rotation), now=0.0)
    first, second, third = (waits(rotation) for _ in range(3))
    assert rotation.advance(30.0) == [Recover("a"), Serve(first)]
    assert first.grant is not None
    assert rotation.ok(first.grant, 31.0) == [Serve(second), Serve(third)]


def test_r74_a_success_in_a_pool_that_does_not_probe_proves_it_for_one_that_does() -> None:
    shared = Resource("k", None)
    careful, bold = rotation_of(shared, probe_on_recovery=True), rotation_of(shared)
    bold.cooled(take(bold), now=0.0)
    careful.advance(30.0)
    take(careful, now=30.0)
    ticket = waits(careful)
    flights = [take(bold, now=30.0), take(bold, now=30.0)]
    assert bold.ended(flights[0], 31.0) is None
    assert bold.ok(flights[1], 31.0) == [Serve(ticket)]


# -- R24: what it costs ------------------------------------------------------------------------------------------------


class CountingHeap(SimpleNamespace):
    """`heapq`, with the price of what is asked of it: n for making a heap, one for any other operation."""

    def __init__(self) -> None:
        import heapq

        self.price = 0
        for name in ("heappush", "heappop", "heapreplace", "heapify"):
            setattr(self, name, self._counted(getattr(heapq, name)))

    def _counted(self, operation: Any) -> Any:
        def counted(heap: list[Any], *args: Any) -> Any:
            self.price += len(heap) if operation.__name__ == "heapify" else 1
            return operation(heap, *args)

        return counted


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> CountingHeap:
    counting = CountingHeap()
    monkeypatch.setattr(pickers, "heapq", counting)
    monkeypatch.setattr(openings, "heapq", counting)
    return counting


LARGE = 10_000 if SCALE >= 1 else 2_000
SIZES = (100, LARGE)


def many(size: int, strategy: str, **options: Any) -> Rotation:
    return rotation_of(
        *(Resource(f"k{n}", None, 3, tags={f"t{n % 7}"}) for n in range(size)), strategy=strategy, **options
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", ["round_robin", "primary_backup", "weighted"])
def test_r24_a_quiet_call_is_a_few_heap_operations(strategy: str, size: int, heap: CountingHeap) -> None:
    rotation = many(size, strategy)
    heap.price = 0
    for now in range(1000):
        rotation.ok(take(rotation, now=now), now)
    assert heap.price <= 2 * 1000


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", ["round_robin", "primary_backup", "weighted"])
def test_r24_a_busy_call_is_a_few_heap_operations(strategy: str, size: int, heap: CountingHeap) -> None:
    """Ends in any order, with tags, cooldowns and disables."""
    chance = random.Random(1)
    rotation = many(size, strategy)
    rotation.acquire(0.0, tagged("t1"))
    flights = [take(rotation) for _ in range(size // 2)]
    heap.price = 0
    for step in range(4000):
        now = float(step)
        rotation.advance(now)
        flights.append(take(rotation, chance.choice([ANY, ANY, tagged("t1")]), now=now))
        flight = flights.pop(chance.randrange(len(flights)))
        if step % 10:
            rotation.ok(flight, now)
        elif step % 100:
            rotation.cooled(flight, now=now)
        else:
            rotation.disabled(flight, now)
            rotation.enable(flight.member.resource.resource_id, now)
    assert heap.price <= 10 * 4000


def test_r24_comparisons_grow_with_the_logarithm() -> None:
    class Reading(float):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Reading.compared += 1
            return float(self) == other

        def __lt__(self, other: float) -> bool:
            Reading.compared += 1
            return float(self) < float(other)

        __hash__ = float.__hash__

    prices = {}
    for size in SIZES:
        rotation = rotation_of(*(Resource(f"k{n}", None, last_acquired_at=Reading(n)) for n in range(size)))
        Reading.compared = 0
        for step in range(1000):
            rotation.ok(take(rotation, now=Reading(size + step)))
        prices[size] = Reading.compared / 1000
    assert prices[LARGE] < 3 * prices[100], prices
    assert prices[LARGE] < 100, prices


def entries(rotation: Rotation) -> int:
    picker: Any = rotation._main
    return len(picker._heap) + len(getattr(picker, "_idle", ()))


@pytest.mark.parametrize("strategy", ["round_robin", "primary_backup", "weighted"])
def test_r24_the_heap_is_compacted(strategy: str) -> None:
    chance = random.Random(2)
    rotation = rotation_of(*(Resource(f"k{n}", None, 3) for n in range(10)), strategy=strategy)
    flights: list[Use] = []
    for step in range(5000):
        if chance.random() < 0.5 and (flight := rotation.acquire(float(step))) is not None:
            flights.append(flight)
        elif flights:
            rotation.ok(flights.pop(chance.randrange(len(flights))))
        assert entries(rotation) <= 4 * 10 + 64 + 1


@pytest.mark.parametrize("strategy", ["round_robin", "primary_backup", "weighted"])
@pytest.mark.parametrize("busy", [0, pytest.param(3, marks=pytest.mark.soak), 13])
def test_r24_compacting_loses_nobody(strategy: str, busy: int) -> None:
    """Whenever it happens: after each number of changes that leave old entries behind."""
    for changes in range(1, 200, 3):
        rotation = rotation_of(*(Resource(f"k{n}", None, 2) for n in range(10)), strategy=strategy)
        for step in range(busy):
            take(rotation, now=step)
        for change in range(changes):
            resource = rotation.members[f"k{change % 7}"].resource
            rotation.retag(resource, Resource("like", None, 2, weight=resource.weight + 1))
            assert entries(rotation) <= 4 * 10 + 64 + 1
        found = Counter(taken(rotation, now=100.0) for _ in range(20 - busy))
        assert None not in found
        assert taken(rotation) is None


def test_r24_removed_resources_leave_the_heap() -> None:
    rotation = rotation_of("stays")
    for number in range(2000):
        rotation.add(Resource(f"k{number}", None))
        rotation.remove(f"k{number}")
        assert entries(rotation) <= 4 * 2 + 64 + 1


def test_r24_sets_of_tags_are_kept_for_the_latest_64_only() -> None:
    rotation = rotation_of(*(Resource(f"k{n}", None, tags={f"t{n}", "all"}) for n in range(200)))
    for turn in range(2):
        for number in range(200):
            assert taken(rotation, tagged(f"t{number}"), now=turn) == f"k{number}"
            assert len(rotation.pickers._pickers) <= MAX_CLASSES + 1 == 65
            assert rotation.matching(tagged(f"t{number}")) == 1
        check(rotation, turn)
    assert max(len(seat.pickers) for seat in rotation.members.values()) <= 3
    found = Counter(taken(rotation, tagged("all"), now=5.0) for _ in range(200))
    assert set(found.values()) == {1}


def test_r24_a_forgotten_set_of_tags_misses_nothing_while_it_is_away() -> None:
    rotation = rotation_of(Resource("a", None, 1, tags={"x"}), Resource("b", None, 1, tags={"x"}))
    flight = take(rotation, tagged("x"))
    for number in range(100):
        assert taken(rotation, tagged(f"t{number}")) is None
    rotation.ok(flight)
    rotation.remove("b")
    assert [taken(rotation, tagged("x")), taken(rotation, tagged("x"))] == ["a", None]


def test_r38_r74_a_use_that_is_taken_back_from_a_waiter_counts_no_longer_against_the_test_of_its_resource() -> None:
    rotation = rotation_of("a", probe_on_recovery=True)
    rotation.cooled(take(rotation), 10.0, now=0.0)
    rotation.advance(11.0)
    rotation.ok(take(rotation, now=11.0), 11.0)  # two at a time from now on
    refused, other = rotation.acquire(11.0, affinity="x"), take(rotation, now=11.0)
    assert refused is not None
    ticket = WaitTicket(ANY, rotation, affinity="x")
    rotation.join(ticket, 11.0)
    rotation.ended(other, 11.0)
    assert ticket.grant is not None
    rotation.cooled(refused, 5.0, now=11.0, affinity="x")
    assert ticket.grant is None
    assert [taken(rotation, now=11.0) for _ in range(3)] == ["a", "a", None]
