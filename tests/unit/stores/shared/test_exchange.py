"""The exchange: one pure function that admits tasks of many processes to one budget."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headgate.errors import StoreFormatTooNew, StoreWriteFailed
from headgate.sharing.protocol import Message, exchange, member_of
from headgate.sharing.slots import RECENT, SLOTS, Said, Settings, Want
from headgate.sharing.states import Outcome, Seen
from headgate.tasks.scheduling.share import BLOCK
from tests.unit.stores.shared.budget_world import Pool, World

KINDS = ("fifo", "lifo", "priority", "fair_round_robin", "fair_share")
USUAL = {("fifo", None), ("priority", 1), ("fair_round_robin", 1), ("fair_share", None)}
"""Orders and caps of tenants that the random events are tried with each time; with the others in `make soak`."""
NOBODY_GONE = lambda _: False  # noqa: E731


def world(limit: int = 2, kind: str = "fifo", pools: int = 2, **more: object) -> tuple[World, list[Pool]]:
    place = World(Settings(limit, kind, **more))  # type: ignore[arg-type]
    return place, [place.join() for _ in range(pools)]


def talk(*pools: Pool) -> None:
    """Everybody who has something to say says it, until nobody has."""
    while busy := [pool for pool in pools if pool.woken or pool.changed]:
        busy[0].speak()


def started(place: World) -> list[int]:
    return [task.number for task in place.started]


def finish_one_by_one(place: World) -> None:
    """End what runs, the oldest first, until all is done."""
    while True:
        talk(*place.pools)
        running = [(task.number, pool, task) for pool in place.pools for task in pool.running]
        if not running:
            return
        _, pool, task = min(running, key=lambda one: place.started.index(one[2]))
        pool.end(task)


# -- the budget -------------------------------------------------------------------------------------------------------


def test_g10_two_members_never_hold_more_than_the_limit() -> None:
    place, (one, two) = world(3)
    for pool in (one, two):
        for _ in range(5):
            pool.submit()
    talk(one, two)
    assert len(one.running) + len(two.running) == 3
    finish_one_by_one(place)
    assert len(place.started) == 10


def test_g10_g25_a_member_that_leaves_frees_nothing_before_all_have_said_what_they_hold() -> None:
    """After the state was lost, m1 runs a task and has not spoken yet, m2 wants a slot, and m3 leaves."""

    def say(member: str, said: Said, *, leaves: bool = False) -> Outcome:
        seen = Seen(1.0, member, NOBODY_GONE, unheard=("m1", "m2", "m3"))
        return exchange(SLOTS, text, seen, Message("t", member, said, leaves=leaves))

    text: str | None = None
    shared = Settings(1, "fifo")
    text = say("m2", Said(1, shared, wants=[Want("", 1, 1.0)])).state
    text = say("m3", Said(1, shared)).state
    text = say("m3", Said(2, shared), leaves=True).state
    told = say("m2", Said(2, shared, wants=[Want("", 1, 1.0)])).reply.body
    assert not told.grants, "m1 may hold the only slot"


def test_g10_a_lowered_limit_drains_and_interrupts_nothing() -> None:
    place, (one, two) = world(4)
    for pool in (one, two):
        for _ in range(6):
            pool.submit()
    talk(one, two)
    one.share.resize(2)
    talk(one, two)
    assert len(one.running) + len(two.running) == 4
    one.end(one.running[0])
    one.end(one.running[0])
    talk(one, two)
    assert len(one.running) + len(two.running) == 2
    two.speak()
    assert two.share.settings.limit == 2
    finish_one_by_one(place)
    assert len(place.started) == 12


def test_g10_a_message_that_is_repeated_changes_nothing() -> None:
    place, (one, _) = world(3)
    one.submit()
    one.speak(lose_answer=True)
    before = place.text
    one.speak()
    assert place.text == before
    assert len(one.running) == 1


def test_g20_what_a_dead_member_held_is_free_and_its_late_messages_are_refused() -> None:
    place, (one, two) = one_running_in_each()
    late = one.message()
    assert late.body.held
    one.die()
    talk(two)
    assert len(two.running) == 2
    reply = place.transact(place.new_id(), late)  # its process has another id by now
    assert reply.body.grants == ()
    held = {view.id: view.held for view in reply.body.members}
    assert held == {"m2/t": 2, "m3/t": 0}


def test_g20_a_stopped_member_keeps_what_it_holds_and_gets_no_more() -> None:
    place, (one, two) = one_running_in_each()
    stopped = one  # it says nothing from here on
    for _ in range(3):
        two.end(two.running[0])
        two.speak()
        place.now += 2.0  # longer than a grant may lie unread
        two.speak()
        assert len(two.running) == 1
    assert len(stopped.running) == 1
    stopped.speak()
    finish_one_by_one(place)
    assert len(place.started) == 8


def one_running_in_each() -> tuple[World, list[Pool]]:
    """Two members with one slot each, and three more tasks each."""
    place, pools = world(2)
    for pool in pools:
        pool.submit()
        talk(pool)
    for _ in range(3):
        for pool in pools:
            pool.submit()
    talk(*pools)
    assert [len(pool.running) for pool in pools] == [1, 1]
    return place, pools


def test_g21_the_answer_to_a_grant_is_lost_and_the_grant_is_not() -> None:
    place, (one, two) = world(1)
    one.submit()
    two.submit()
    one.speak(lose_answer=True)  # it was granted a slot and does not know
    two.speak()
    assert not two.running
    one.speak()
    assert len(one.running) == 1
    finish_one_by_one(place)
    assert len(place.started) == 2


def test_g22_lost_wakes_change_nothing_but_latency() -> None:
    place, (one, two) = world(1)
    for _ in range(3):
        one.submit()
        two.submit()
    one.speak(lose_wakes=True)
    two.speak(lose_wakes=True)
    one.speak()  # at its heartbeat it hears that it is not alone
    one.end(one.running[0])
    one.speak(lose_wakes=True)  # the slot goes to `two`, which came before the rest of `one`
    assert not one.running
    assert not two.running
    two.speak()  # at its heartbeat, too
    assert len(two.running) == 1
    place.drain(heartbeat=True)
    assert len(place.started) == 6


def test_g10_a_grant_that_comes_to_nothing_goes_back_and_is_not_charged() -> None:
    _, (one, two) = world(1, "fair_round_robin")
    one.submit("acme")
    two.submit("bolt")
    one.speak(unserved=True)
    assert not one.running
    talk(one, two)
    assert [task.partition for task in two.running] == ["bolt"]
    one.serve_again()
    two.end(two.running[0])
    two.submit("bolt")
    one.changed = True
    one.speak()
    talk(one, two)
    assert [task.partition for task in one.running] == ["acme"]


def test_g14_a_lender_that_resumes_stands_before_all_that_only_queue() -> None:
    place, (one, two) = world(1)
    first = one.submit()
    talk(one, two)
    for _ in range(3):
        two.submit()
    talk(two)
    one.lend(first)
    one.speak()
    assert one.running == [first]
    place.drain(heartbeat=False)


def test_g05_one_that_is_alone_uses_its_slots_again_without_asking() -> None:
    place, (one, two) = world(1)
    for _ in range(5):
        one.submit()
    talk(one)
    before = place.text
    for _ in range(3):
        one.end(one.running[0])
        assert not one.changed
    assert place.text == before
    two.submit()
    two.speak()
    assert one.woken
    one.speak()
    one.end(one.running[0])
    assert one.changed, "somebody else waits: it asks"
    place.drain(heartbeat=False)
    assert len(place.started) == 6


def test_g05_the_only_member_keeps_a_free_slot_for_tasks_that_come_soon() -> None:
    place = World(Settings(2, "fifo"))
    one = place.join()
    one.submit()
    talk(one)
    before = place.text
    for _ in range(3):
        one.end(one.running[0])
        assert (one.share.kept, one.keeps, one.changed) == (1, True, False)
        one.submit()
        assert (len(one.running), one.share.kept, one.changed) == (1, 0, False)
    assert place.text == before, "nothing was said, and nobody else could have missed it"
    one.submit()
    assert one.changed, "a second slot needs an exchange"
    talk(one)
    for task in list(one.running):
        one.end(task)
    assert one.share.kept == 2
    two = place.join()
    assert one.woken, "now somebody is there who might want them"
    one.speak()
    assert one.share.kept == 0
    two.submit()
    two.speak()
    assert len(two.running) == 1, "after one exchange: nobody keeps anything"
    one.submit()
    one.speak()
    one.end(one.running[0])
    assert (one.share.kept, one.changed) == (0, True), "it is not the only member any more"


def test_g05_a_kept_slot_is_not_used_beyond_a_lower_limit_nor_after_the_lease() -> None:
    place = World(Settings(2, "fifo"))
    one = place.join()
    for _ in range(2):
        one.submit()
    talk(one)
    one.end(one.running[0])
    one.share.resize(1)
    talk(one)
    assert one.share.kept == 0
    one.submit()
    assert len(one.running) == 1
    talk(one)
    assert len(one.running) == 1
    one.end(one.running[0])
    talk(one)
    one.end(one.running[0])
    assert one.share.kept == 1
    one.lose_lease()
    assert one.share.kept == 0


@pytest.mark.parametrize("with_kept", [Settings(1, "fair_round_robin", None, 1), Settings(1, "fifo", None, {"a": 1})])
def test_g05_with_caps_no_slot_is_kept(with_kept: Settings) -> None:
    place = World(with_kept)
    one = place.join()
    one.submit("a")
    talk(one)
    one.end(one.running[0])
    assert (one.share.kept, one.changed) == (0, True)


def test_g16_with_fencing_every_start_is_an_exchange() -> None:
    place = World(Settings(1, "fifo"))
    pool = place.join()
    pool.share, pool.answered = type(pool.share)(place.settings, pool._changed, fencing=True), None
    for _ in range(4):
        pool.submit()
    fences = []
    for _ in range(4):
        talk(pool)
        (task,) = pool.running
        fences.append(pool.share.fences[task])
        pool.end(task)
        assert pool.changed
    assert fences == sorted(set(fences))


# -- blocks -----------------------------------------------------------------------------------------------------------


def contended(kind: str, caps: int | None = None, *, pools: int = 2) -> tuple[World, list[Pool]]:
    """Members with blocks, of which the first holds the only slot, and all have tasks queued."""
    place = World(Settings(1, kind, None, caps), blocks=True)
    members = [place.join() for _ in range(pools)]
    members[0].submit("a", 1)
    talk(*members)
    for _ in range(3):
        for member in members:
            member.submit("a", 1)
    talk(*members)
    return place, members


@pytest.mark.parametrize("kind", KINDS)
def test_g11_a_granted_slot_goes_from_task_to_task_without_asking_for_one_block(kind: str) -> None:
    place, (one, two) = contended(kind)
    first, *_ = one.running
    place.now = 2000.0  # long after its slot was granted
    one.end(first)
    assert not one.running, "its block is over"
    assert one.changed
    talk(one, two)
    (holder,) = [pool for pool in (one, two) if pool.running]
    for _ in range(2):
        holder.end(holder.running[0])
        assert holder.running, "it was granted a moment ago"
        assert not holder.changed
    place.now += 2 * BLOCK
    holder.end(holder.running[0])
    assert holder.changed
    assert not holder.running


def test_g16_there_are_no_blocks_with_fences() -> None:
    place = World(Settings(1, "fifo"))
    pool, other = place.join(), place.join()
    pool.share = type(pool.share)(place.settings, pool._changed, fencing=True, clock=lambda: place.now)
    pool.answered = None
    for _ in range(3):
        pool.submit()
        other.submit()
    talk(pool, other)
    pool.end(pool.running[0])
    assert not pool.running
    assert pool.changed


def test_g11_a_higher_priority_elsewhere_ends_a_block() -> None:
    place, (one, two) = contended("priority")
    two.submit(priority=2)
    talk(one, two)
    place.now += 2 * BLOCK
    one.end(one.running[0])
    talk(one, two)
    assert [task.priority for task in two.running] == [2]
    one.submit(priority=2)
    talk(one, two)
    two.speak()
    two.end(two.running[0])
    assert not two.running, "its next task has the priority 1, and one of 2 waits elsewhere"
    talk(one, two)
    assert [task.priority for task in one.running] == [2]


def test_g14_a_lender_elsewhere_that_wants_its_slot_back_ends_a_block() -> None:
    _, (one, two) = contended("lifo")
    lender = one.running[0]
    one.lend(lender)
    waiting, one.lenders = one.lenders, []  # it does not want its slot back yet
    talk(one, two)
    assert two.running
    one.lenders = waiting
    one.speak()
    two.speak()
    two.end(two.running[0])
    assert not two.running
    talk(one, two)
    assert lender in one.running


def test_g04_caps_hold_within_blocks() -> None:
    place = World(Settings(2, "fair_round_robin", None, 1), blocks=True)
    one, two = place.join(), place.join()
    for pool in (one, two):
        for tenant in "aabb":
            pool.submit(tenant)
    for _ in range(30):
        talk(one, two)
        for pool in (one, two):
            for task in list(pool.running):
                pool.end(task)
        place.now += 0.001
        place.check()
    assert len(place.started) == 8


def test_g04_a_lower_limit_ends_blocks() -> None:
    place = World(Settings(2, "fifo"), blocks=True)
    one, two = place.join(), place.join()
    for _ in range(4):
        one.submit()
        two.submit()
    talk(one, two)
    two.share.resize(1)
    talk(one, two)
    held = [(pool, task) for pool in (one, two) for task in pool.running]
    assert len(held) == 2
    for pool, task in held:
        pool.end(task)
    assert not one.running
    assert not two.running
    talk(one, two)
    assert len(one.running) + len(two.running) == 1


def test_g11_what_was_started_within_blocks_is_charged_for_all_processes() -> None:
    place = World(Settings(4, "fair_round_robin"), blocks=True)
    pools = [place.join() for _ in range(4)]
    for pool in pools:
        for _ in range(400):
            pool.submit("flood")
    for number in range(10):
        for _ in range(100):
            pools[number % 4].submit(f"small-{number}")
    place.now += 1.0
    while len(place.started) < 1000:
        talk(*pools)
        for pool in pools:
            for task in list(pool.running):
                pool.end(task)
        place.now += 0.002
    counts = Counter(task.partition for task in place.started[4:])
    assert jain([counts[f"small-{number}"] for number in range(10)] + [counts["flood"]]) >= 0.99, counts


# -- order ------------------------------------------------------------------------------------------------------------


def queue_in_turns(pools: list[Pool], count: int) -> None:
    for number in range(count):
        pools[number % len(pools)].submit(priority=number % 3)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("fifo", list(range(2, 14))),
        ("lifo", list(range(13, 1, -1))),
        ("priority", [4, 7, 10, 13, 3, 6, 9, 12, 2, 5, 8, 11]),
    ],
)
def test_g11_the_order_is_that_of_all_processes_together(kind: str, expected: list[int]) -> None:
    place, pools = world(1, kind, pools=4)
    blocker = pools[0].submit()
    talk(*pools)
    queue_in_turns(pools, 12)
    talk(*pools)
    pools[0].end(blocker)
    finish_one_by_one(place)
    assert started(place)[1:] == expected


def test_g11_tenants_take_turns_across_processes_and_many_tasks_gain_nothing() -> None:
    place, pools = world(4, "fair_round_robin", pools=4)
    for pool in pools:  # one tenant floods from all processes, ten have a little in one process each
        for _ in range(100):
            pool.submit("flood")
    for number in range(10):
        for _ in range(20):
            pools[number % 4].submit(f"small-{number}")
    finish_one_by_one(place)
    first = Counter(task.partition for task in place.started[4:224])  # what had started before the others came
    counts = [first[f"small-{number}"] for number in range(10)] + [first["flood"]]
    assert jain(counts) >= 0.99, first


@pytest.mark.parametrize("kind", ["fair_round_robin", "fair_share"])
@pytest.mark.parametrize("caps", [None, 1])
def test_l01_g11_levels_and_turns_are_those_of_all_processes_together(kind: str, caps: int | None) -> None:
    place, (one, two) = world(1, kind, levels=True, caps=caps)
    one.submit("busy", 9)
    talk(one, two)
    for number in range(24):
        (one, two)[number % 2].submit("ab"[number // 2 % 2], number // 4 % 3)
    finish_one_by_one(place)
    tasks = place.started[1:]
    assert [task.priority for task in tasks] == [2] * 8 + [1] * 8 + [0] * 8
    for level in (0, 8, 16):
        turns = [task.partition for task in tasks[level : level + 8]]
        assert all(set(turns[at : at + 2]) == {"a", "b"} for at in range(0, 8, 2)), "tenants take turns at each level"


def test_l01_what_a_tenant_had_at_one_level_costs_it_nothing_at_another() -> None:
    place, (one, two) = world(1, "fair_share", levels=True)
    one.submit("busy", 9)
    talk(one, two)
    for _ in range(10):
        one.submit("rich", 5, cost=100.0)
    for _ in range(5):
        one.submit("rich", 1)
        two.submit("poor", 1)
    finish_one_by_one(place)
    turns = [task.partition for task in place.started[11:]]
    assert all(set(turns[at : at + 2]) == {"rich", "poor"} for at in range(0, 10, 2))


def test_l01_g04_the_cap_of_a_tenant_counts_all_its_levels() -> None:
    place, (one, two) = world(4, "fair_round_robin", levels=True, caps=2)
    busy = [one.submit(f"busy-{number}") for number in range(4)]
    talk(one, two)
    for level in (2, 1, 0):
        one.submit("a", level)
        two.submit("a", level)
    one.submit("b", 0)
    talk(one, two)
    for task in busy:
        one.end(task)
        talk(one, two)
    assert Counter(task.partition for task in place.started[4:]) == {"a": 2, "b": 1}
    assert [task.priority for task in place.started if task.partition == "a"] == [2, 2]
    one.end(next(task for task in one.running if task.partition == "a"))
    talk(one, two)
    assert [task.priority for task in place.started if task.partition == "a"] == [2, 2, 1]


def test_g11_a_newcomer_waits_at_most_one_round() -> None:
    place, pools = world(1, "fair_round_robin", pools=3)
    for number in range(12):
        for _ in range(5):
            pools[number % 3].submit(f"tenant-{number}")
    for _ in range(30):
        talk(*pools)
        pool = next(pool for pool in pools if pool.running)
        pool.end(pool.running[0])
    pools[1].submit("newcomer")
    before = len(place.started)
    finish_one_by_one(place)
    behind = next(n for n, task in enumerate(place.started[before:]) if task.partition == "newcomer")
    assert behind <= 13


def test_g11_shares_go_by_weight_across_processes() -> None:
    place, pools = world(2, "fair_share", pools=2, weights={"big": 3.0})
    for pool in pools:
        for _ in range(100):
            pool.submit("big")
            pool.submit("small")
    finish_one_by_one(place)
    first = Counter(task.partition for task in place.started[:120])
    assert 2.5 <= first["big"] / first["small"] <= 3.5


def test_g11_thousands_of_tenants_in_several_processes_get_one_turn_each(scale: float) -> None:
    """The tags of so many do not fit into the state: members keep them, and pass on what changes."""
    place, pools = world(4, "fair_round_robin", pools=4)
    many = 300 if scale >= 1 else 120
    for tenant in range(many):  # each tenant has work in two processes, some in four
        for pool in range(4 if tenant % 5 == 0 else 2):
            pools[(tenant + pool) % 4].submit(f"tenant-{tenant}")
            pools[(tenant + pool) % 4].submit(f"tenant-{tenant}")
    finish_one_by_one(place)
    rounds = Counter(task.partition for task in place.started[: 2 * many])
    assert jain([rounds[f"tenant-{tenant}"] for tenant in range(many)]) >= 0.99


def test_g04_caps_of_tenants_hold_over_all_processes() -> None:
    place, pools = world(4, "fair_round_robin", pools=3, caps=1)
    for pool in pools:
        for _ in range(6):
            pool.submit("acme")
            pool.submit("bolt")
    talk(*pools)
    assert Counter(task.partition for pool in pools for task in pool.running) == {"acme": 1, "bolt": 1}
    finish_one_by_one(place)
    assert len(place.started) == 36


def test_g04_caps_with_an_order_that_knows_no_tenants() -> None:
    place, pools = world(4, "priority", pools=2, caps={"acme": 1})
    for pool in pools:
        for _ in range(6):
            pool.submit("acme", priority=5)
            pool.submit("bolt")
    talk(*pools)
    assert Counter(task.partition for pool in pools for task in pool.running) == {"acme": 1, "bolt": 3}
    finish_one_by_one(place)
    assert len(place.started) == 24


# -- settings and size ------------------------------------------------------------------------------------------------


def test_g04_the_settings_of_the_members_stand_and_an_empty_budget_takes_new_ones() -> None:
    place = World(Settings(2, "fifo"))
    one = place.join()
    place.settings = Settings(5, "lifo")
    two = place.join()
    assert two.share.settings == Settings(2, "fifo")
    one.die()
    two.die()
    three = place.join()
    assert three.share.settings == Settings(5, "lifo")


def test_g04_limits_that_one_member_changes_are_known_to_all() -> None:
    _, (one, two) = world(2, "fifo")
    one.share.limit_tenants({"acme": 1})
    one.speak()
    two.speak()
    assert two.share.settings == Settings(2, "fifo", None, {"acme": 1})


def said(text: str | None, member: str, answered: str | None, body: Said) -> Outcome:
    return exchange(SLOTS, text, Seen(1.0, member, NOBODY_GONE), Message("t", answered, body))


def jain(counts: list[int]) -> float:
    return sum(counts) ** 2 / (len(counts) * sum(count * count for count in counts))


def test_g11_the_state_stays_small_with_many_tenants(scale: float) -> None:
    place, pools = world(4, "fair_round_robin", pools=8)
    for number in range(20_000 if scale >= 1 else 4_000):
        pools[number % 8].submit(f"tenant-{number:06}")
    for _ in range(200 if scale >= 1 else 100):
        talk(*pools)
        pool = next(pool for pool in pools if pool.running)
        pool.end(pool.running[0])
    assert place.largest < 4096


@pytest.mark.parametrize("cost", [0.001, 1.5, 3.0, 1e16])
def test_g11_the_cost_of_a_task_counts_however_short_it_is_written(cost: float) -> None:
    place, (one, two) = world(1, "fair_share")
    for _ in range(4):
        one.submit("a", cost=cost)
        two.submit("b", cost=cost)
    finish_one_by_one(place)
    turns = [task.partition for task in place.started]
    assert turns in (["a", "b"] * 4, ["b", "a"] * 4)


def test_g24_a_text_that_is_not_ours_is_a_clear_error() -> None:
    message = Message("t", None, Said(1, Settings(1, "fifo")))
    for text in (
        "",
        "garbage",
        "[]",
        "{}",
        '{"v":2}',
        '{"v":"os:system"}',
        '{"v":2,"limit":1,"kind":"fifo","number":0}',
        '{"v":2,"limit":1,"kind":"fifo","number":0,"members":{"m2/t":7}}',
    ):
        with pytest.raises(StoreWriteFailed, match="cannot be read"):
            exchange(SLOTS, text, Seen(1.0, "m1", NOBODY_GONE), message)
    with pytest.raises(StoreFormatTooNew, match="99"):
        exchange(SLOTS, '{"v":99}', Seen(1.0, "m1", NOBODY_GONE), message)


def test_g24_nothing_but_counts_ids_and_tenants_is_in_the_state() -> None:
    place, (one, _) = world(1, "fair_round_robin")
    one.submit("acme")
    one.speak()
    known = {"v", "limit", "kind", "number", "base", "virtual", "recent", "members"}
    assert set(json.loads(place.text or "")) == known


def test_g11_a_member_that_would_miss_changes_of_tags_is_woken() -> None:
    place, (one, two) = world(1, "fair_round_robin")
    two.submit("waits")
    two.speak()
    two.speak()
    for number in range(RECENT * 3):
        one.submit(f"tenant-{number}")
    woken = 0
    for _ in range(RECENT * 2):
        talk(one)
        if one.running:
            one.end(one.running[0])
        woken += two.woken
        if two.woken:
            two.speak()
            if two.running:
                two.end(two.running[0])
                two.submit("waits")
    assert woken
    reply = place.transact(two.id, two.message())
    assert len(reply.body.recent) < RECENT


def test_g11_a_member_behind_is_woken_once_and_again_only_when_it_has_missed_something() -> None:
    settings = Settings(1, "fair_round_robin")
    quiet = Said(1, settings, queued=1)  # it has a task that nothing can serve now
    text = said(None, "quiet", None, quiet).state
    woken, busy = [], None
    for number in range(1, 2 * RECENT):
        wants = Said(number, settings, wants=[Want(f"tenant-{number}", 1, 1.0)], queued=1)
        outcome = said(text, "busy", busy, wants)
        text, busy = outcome.state, "busy"
        woken += [number] if number > 1 and outcome.wakes else []  # the first wakes it because it joins
    first, *again = woken
    assert first <= RECENT, "it had missed something by then"
    assert all(number > RECENT for number in again), "it was woken again before it had missed anything"
    assert again, "it was not woken again, although it had missed something"


def test_g11_a_member_without_tasks_is_not_woken_for_changes_of_tags() -> None:
    settings = Settings(1, "fair_round_robin")
    text, busy = said(None, "idle", None, Said(1, settings)).state, None
    for number in range(1, 2 * RECENT):
        wants = Said(number, settings, wants=[Want(f"tenant-{number}", 1, 1.0)], queued=1)
        outcome = said(text, "busy", busy, wants)
        text, busy = outcome.state, "busy"
        assert number == 1 or not outcome.wakes  # the first wakes it because it joins


def test_g11_a_tenant_that_is_served_again_and_again_takes_one_place_in_the_state() -> None:
    place, (one, _) = world(1, "fair_round_robin")
    for number in range(10):
        one.submit(f"tenant-{number % 2}")
        talk(one)
        one.end(one.running[0])
    assert set(place.state()["recent"]) == {"tenant-0", "tenant-1"}


def test_g10_more_wants_than_are_allowed_are_cut_off() -> None:
    wants = [Want(f"t{number}", 1, 1.0) for number in range(1000)]
    outcome = said(None, "m1", None, Said(1, Settings(1, "fair_round_robin"), wants=wants))
    assert len(json.loads(outcome.state or "")["members"]["m1/t"]["w"]) <= 32


# -- everything in any order ------------------------------------------------------------------------------------------


class Budgets(RuleBasedStateMachine):
    """Members that submit, end, lend, cancel, die, lose leases, answers and wakes, in any order."""

    kind = "fifo"
    caps: int | None = None
    blocks = True

    def __init__(self) -> None:
        super().__init__()
        self.world = World(Settings(3, self.kind, None, self.caps), blocks=self.blocks)
        self.submitted = 0
        self.lost_wakes = False

    @initialize(members=st.integers(1, 2))
    def begin(self, members: int) -> None:
        for _ in range(members):
            self.world.join()

    def pool(self, number: int) -> Pool:
        return self.world.pools[number % len(self.world.pools)]

    @rule(number=st.integers(0, 7), tenant=st.sampled_from("abcde"), priority=st.integers(0, 2))
    def submit(self, number: int, tenant: str, priority: int) -> None:
        self.pool(number).submit(tenant, priority)

    @rule(number=st.integers(0, 7), lose_answer=st.booleans(), lose_wakes=st.sampled_from([False, False, False, True]))
    def speak(self, number: int, lose_answer: bool, lose_wakes: bool) -> None:
        self.lost_wakes |= lose_wakes
        self.pool(number).speak(lose_answer=lose_answer, lose_wakes=lose_wakes)

    @rule(number=st.integers(0, 7))
    def speak_plainly(self, number: int) -> None:
        self.pool(number).speak()

    @rule(number=st.integers(0, 7))
    def run_out(self, number: int) -> None:
        self.pool(number).speak(unserved=True)

    @rule(number=st.integers(0, 7))
    def serve_again(self, number: int) -> None:
        self.pool(number).serve_again()

    @rule(number=st.integers(0, 7), which=st.integers(0, 5))
    def end(self, number: int, which: int) -> None:
        pool = self.pool(number)
        if pool.running:
            pool.end(pool.running[which % len(pool.running)])

    @rule(number=st.integers(0, 7), which=st.integers(0, 5))
    def lend(self, number: int, which: int) -> None:
        pool = self.pool(number)
        if pool.running:
            pool.lend(pool.running[which % len(pool.running)])

    @rule(number=st.integers(0, 7))
    def cancel(self, number: int) -> None:
        pool = self.pool(number)
        queued = list(pool.share.queue)
        if queued:
            pool.cancel(queued[len(queued) // 2])

    @rule(seconds=st.sampled_from([0.002, 0.01, 0.5, 2.0, 20.0]))
    def advance(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(number=st.integers(0, 7), limit=st.integers(1, 5))
    def resize(self, number: int, limit: int) -> None:
        self.pool(number).share.resize(limit)

    @precondition(lambda self: len(self.world.pools) < 5)
    @rule()
    def join(self) -> None:
        self.world.join()

    @precondition(lambda self: len(self.world.pools) > 1)
    @rule(number=st.integers(0, 7))
    def die(self, number: int) -> None:
        self.pool(number).die()

    @rule(number=st.integers(0, 7))
    def lose_lease(self, number: int) -> None:
        self.pool(number).lose_lease()

    @invariant()
    def counts_hold(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        for pool in self.world.pools:
            pool.serve_again()
            for task in list(pool.running):
                if task in pool.outside:
                    pool.end(task)
        self.world.drain(heartbeat=self.lost_wakes)
        for pool in list(self.world.pools):
            pool.speak()
        self.world.drain(heartbeat=self.lost_wakes)  # the answer to one that was lost may have granted a slot too many
        state = self.world.state()
        held = sum(
            sum(entry.get("h", {}).values()) + len(entry.get("l", ())) + len(entry.get("n", ()))
            for name, entry in state["members"].items()
            if member_of(name) in self.world.alive
        )
        assert held == 0, f"slots leaked: {self.world.text}"


@pytest.mark.parametrize(
    ("kind", "caps"),
    [
        pytest.param(kind, caps, marks=() if (kind, caps) in USUAL else pytest.mark.soak)
        for kind in KINDS
        for caps in (None, 1)
    ],
)
def test_g10_g14_g20_g21_g22_no_order_of_events_breaks_the_budget(kind: str, caps: int | None, scale: float) -> None:
    machine = type("Budgets", (Budgets,), {"kind": kind, "caps": caps})
    steps = settings(
        max_examples=max(6, int(300 * scale**1.7)),
        stateful_step_count=100,
    )
    run_state_machine_as_test(machine, settings=steps)
