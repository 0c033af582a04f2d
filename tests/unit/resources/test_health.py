"""The pure parts of shared health: records, permits, the exchange, and all of it together with random delays."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headgate.resources import Resource
from headgate.resources.exchange import RESOURCE_HEALTH, News, State
from headgate.resources.health import UNKNOWN, Local, Outage, Record, is_forgotten, is_same, join, learned, mark_of
from headgate.resources.members import ANY, Use
from headgate.resources.permits import Claim, Lease, Share, Wish, claim_of, grant, share_of
from headgate.resources.replica import Replica
from headgate.resources.rotation import Rotation
from headgate.resources.stats import check
from headgate.resources.strategies import NAMED
from headgate.sharing.protocol import Message, Reply, exchange
from headgate.sharing.states import ClockOffset, Outcome, Seen

SCALE = float(os.environ.get("HEADGATE_SCALE", "0.1"))
FAST = settings(max_examples=max(50, int(1000 * SCALE**1.3)))

NOBODY_GONE = Seen(1000.0, "m1", lambda member: False)

times = st.sampled_from([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
outages = st.builds(Outage, times, st.integers(1, 4), times)
records = st.builds(
    lambda generation, disabled, cleared, some: join(
        Record(generation, disabled, cleared, (), 0.0), Record(generation, outages=tuple(sorted(some)))
    ),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([0.0, 2.5, 3.0, 4.5]),
    st.lists(outages, max_size=3),
)


# -- records -----------------------------------------------------------------------------------------------------------


@FAST
@given(records, records, records)
def test_h02_joining_is_commutative_associative_and_idempotent(a: Record, b: Record, c: Record) -> None:
    assert join(a, b) == join(b, a)
    assert join(join(a, b), c) == join(a, join(b, c))
    assert join(a, a) == a
    assert join(a, UNKNOWN if a.generation == 0 else a) == a


@FAST
@given(st.lists(records, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_h02_the_join_of_many_records_is_what_the_facts_say(some: list[Record], chance: Any) -> None:
    """The naive model: of the newest generation, everything said; outages older than a success do not count."""
    newest = max(one.generation for one in some)
    said = [one for one in some if one.generation == newest]
    cleared = max(one.cleared for one in said)
    left = [outage for one in said for outage in one.outages if outage.began >= cleared]
    chance.shuffle(some)
    joined = some[0]
    for one in some[1:]:
        joined = join(joined, one)
    assert joined.disabled is any(one.disabled for one in said)
    assert joined.until == max((one.until for one in left), default=0.0)
    assert joined.consecutive == max((one.consecutive for one in left), default=0)
    assert joined.began == max((one.began for one in left), default=0.0)


@FAST
@given(records, records)
def test_h02_disabled_counts_more_than_cooling_and_until_never_shrinks(a: Record, b: Record) -> None:
    b = b._replace(generation=a.generation, cleared=0.0)
    joined = join(a, b)
    assert joined.disabled is (a.disabled or b.disabled)
    assert joined.until >= a.until


def test_h02_an_older_verdict_that_arrives_after_enable_changes_nothing() -> None:
    disabled = Record(0, True, 0.0, (Outage(5.0, 3, 600.0),), 5.0)
    enabled = Record(1, at=6.0)
    assert join(enabled, disabled) == join(disabled, enabled) == enabled
    late = disabled._replace(at=7.0)
    assert is_same(join(enabled, late), enabled)


def local(**changes: Any) -> Local:
    return Local("healthy", 0.0, 0, 0, 0.0, 0, 0.0, 0)._replace(**changes)


def exactly(ahead: float) -> ClockOffset:
    return ClockOffset(ahead, ahead)


def test_h02_a_success_clears_what_is_older_than_its_call_and_nothing_else() -> None:
    old, new = Outage(10.0, 1, 40.0), Outage(30.0, 1, 60.0)
    after = local(proofs=1, proved_at=20.0)
    assert learned(Record(outages=(old,)), local(), after, 0.0, 25.0, exactly(0.0)).outages == ()
    known = learned(Record(outages=(old,)), local(), after, 0.0, 25.0, exactly(0.0))
    assert join(known, Record(outages=(old, new))).outages == (new,)


def test_h02_the_order_of_this_process_decides_even_if_clocks_say_otherwise() -> None:
    """The success is of a call that began after the cooldown here, although the store's clock has it the other way."""
    known = Record(outages=(Outage(10.0, 1, 40.0),))
    assert learned(known, local(), local(proofs=1, proved_at=9.9), 0.0, 11.0, exactly(0.0)).outages == ()


def test_h02_r35_two_processes_that_meet_one_outage_escalate_once() -> None:
    cooled = local(status="cooling_down", until=130.0, consecutive=2, outage=7)
    one = learned(Record(outages=(Outage(10.0, 1, 40.0),)), local(), cooled, 100.0, 100.0, exactly(0.0))
    other = learned(Record(outages=(Outage(10.0, 1, 40.0),)), local(), cooled, 100.3, 100.3, exactly(0.3))
    assert join(one, other).consecutive == 2
    assert join(one, other).until == 130.3


def test_h02_enable_begins_a_generation_and_what_follows_belongs_to_it() -> None:
    disabled = Record(3, True)
    enabled = learned(disabled, local(status="disabled"), local(enables=1), 0.0, 5.0, exactly(100.0))
    assert enabled == Record(4, at=105.0)
    again = learned(disabled, local(status="disabled"), local(status="disabled", enables=1), 0.0, 5.0, exactly(0.0))
    assert again == Record(4, True, at=5.0)


def test_h01_nothing_learned_is_nothing_to_tell() -> None:
    known = Record(outages=(Outage(10.0, 1, 40.0),))
    assert learned(known, local(), local(), 0.0, 50.0, exactly(0.0)) is known
    unshared = local(proofs=1, proved_at=49.0)
    assert learned(UNKNOWN, local(), unshared, 0.0, 50.0, exactly(0.0)) is UNKNOWN


def test_h01_records_of_healthy_resources_are_forgotten_in_time() -> None:
    assert not is_forgotten(Record(cleared=1.0), 3599.0)
    assert is_forgotten(Record(cleared=1.0), 3601.0)
    assert not is_forgotten(Record(1), 1e9), "an older generation would come back with whoever still knows this one"
    assert not is_forgotten(Record(outages=(Outage(0.0, 2, 100.0),)), 86_400.0)
    assert is_forgotten(Record(outages=(Outage(0.0, 2, 100.0),)), 86_501.0)
    assert not is_forgotten(Record(disabled=True), 1e9)


def test_r37_h02_two_values_under_one_id_are_two_resources() -> None:
    old, new = Resource("k", "sk-old"), Resource("k", "sk-new")
    assert mark_of("pool", old) == mark_of("pool", Resource("k", "sk-old"))
    assert mark_of("pool", old) != mark_of("pool", new)
    assert mark_of("pool", old) != mark_of("other", old)
    assert mark_of("pool", Resource("k", object())) == ":k"
    assert mark_of("pool", Resource("k", ("host", 8080))) != mark_of("pool", Resource("k", ("host", 8081)))
    assert len(mark_of("pool", old)) == len("fff:k"), "12 bits: too few to find a value by"


# -- permits -----------------------------------------------------------------------------------------------------------


def claim(held: int = 0, wanted: int = 0, since: float = 0.0, limit: int = 4) -> Claim:
    return Claim(held, 0, held + wanted, since, limit)


claims = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(claim, st.integers(0, 2), st.integers(0, 3), times, st.integers(1, 6)),
    min_size=1,
)


@FAST
@given(claims)
def test_h03_permits_never_exceed_the_lowest_limit_and_free_ones_are_granted(some: dict[str, Claim]) -> None:
    limit = min(one.limit for one in some.values())
    before = sum(one.held for one in some.values())
    after = {**some, **grant(some)}
    held = sum(one.held for one in after.values())
    assert held <= max(limit, before)
    wanted = sum(one.wanted for one in after.values())
    assert not wanted or held >= limit, "nobody waits while one is free"
    assert all(after[who].held >= one.held for who, one in some.items())


def test_h03_whoever_has_fewest_gets_the_next_and_then_whoever_waited_longest() -> None:
    some = {"rich": claim(2, 1, 1.0), "late": claim(0, 1, 5.0), "early": claim(0, 1, 4.0)}
    assert list(grant({**some, "busy": claim(1)})) == ["early"]
    assert set(grant(some)) == {"early", "late"}


def test_h03_who_asks_for_one_gets_its_share_if_nobody_wants_it() -> None:
    assert grant({"a": claim(0, 1, limit=10)})["a"].held == 10
    assert grant({"a": claim(5, limit=10), "b": claim(0, 1, limit=10)})["b"].held == 5


def test_h03_a_message_that_arrives_twice_counts_once() -> None:
    wish = Wish(granted=3, returned=2, wanted=1, limit=4)
    once = claim_of(Claim(3, 0, 3, 1.0, 4), wish, 9.0, is_new=False)
    assert once == Claim(3, 2, 4, 9.0, 4) == claim_of(once, wish, 9.0, is_new=False)
    first = claim_of(None, Wish(7, 5, 2, 4), 9.0, is_new=True)
    assert first == Claim(0, 0, 2, 9.0, 4), "what was counted under another id means nothing"
    granted = grant({"a": first})["a"]
    assert claim_of(granted, Wish(7, 5, 2, 4), 9.5, is_new=True).asked == granted.asked


def test_h03_a_lease_returns_what_is_idle_as_far_as_others_want_it() -> None:
    lease = Lease()
    assert lease.take(Share(10, 0, 5, 0))
    lease.release(in_use=2)
    assert lease.permits == 10, "nobody wants any"
    lease.take(Share(10, 0, 5, 1))
    lease.release(in_use=2)
    assert (lease.permits, lease.returned) == (5, 5), "down to its share"
    lease.take(Share(10, 5, 5, 1))
    lease.release(in_use=2)
    assert lease.permits == 4, "below its share, as many as are wanted"
    lease.take(Share(10, 6, 5, 9))
    lease.release(in_use=2, reserved=1)
    assert lease.permits == 3


def test_h03_counts_begin_anew_when_the_state_was_lost() -> None:
    lease = Lease()
    lease.take(Share(10, 0, 5, 1))
    lease.release(in_use=3)
    lease.told = Wish(10, 5, 0, 10)
    lease.take(Share(2, 0, 5, 0))
    assert (lease.permits, lease.granted, lease.returned) == (2, 2, 0)
    lease.told = Wish(2, 0, 0, 10)
    lease.take(None)
    assert (lease.permits, lease.granted) == (2, 2), "it holds what it holds, though the state was lost"
    assert not lease.is_told(Wish(2, 0, 0, 10)), "and says so again"
    lease.release(in_use=0)
    lease.forget()
    lease.take(None)
    assert (lease.permits, lease.granted) == (0, 0)


def test_h03_shares_are_told() -> None:
    some = {"a": claim(3), "b": claim(0, 2), "c": claim(1)}
    assert share_of(some, "a") == Share(3, 0, 1, 2)
    assert share_of(some, "b") == Share(0, 0, 1, 0)


def test_l04_what_is_held_above_a_level_that_has_fallen_is_wanted_back() -> None:
    some = {"a": claim(5, limit=200), "b": claim(5, limit=200)}
    assert share_of(some, "a") == Share(5, 0, 100, 0)
    assert share_of(some, "a", 8.9) == Share(5, 0, 4, 2)
    assert grant({**some, "c": claim(0, 3, limit=200)}, 8.9) == {}
    assert grant({**some, "c": claim(0, 3, limit=200)}, 11.5)["c"].held == 1


# -- the exchange ------------------------------------------------------------------------------------------------------


def say(text: str | None, message: Message, seen: Seen = NOBODY_GONE) -> tuple[str | None, Reply, set[str]]:
    outcome: Outcome = exchange(RESOURCE_HEALTH, text, seen, message)
    return (text if outcome.state is None else outcome.state), outcome.reply, set(outcome.wakes)


def news(token: str, member: str, records: dict[str, Record] | None = None, **wishes: Wish) -> Message:
    return Message(token, member, News(records or {}, wishes))


def read(text: str | None) -> State:
    return RESOURCE_HEALTH.read(json.loads(text))


def test_h03_after_the_state_was_lost_no_permit_is_granted_before_all_have_said_what_they_hold() -> None:
    def seen(member: str) -> Seen:
        return NOBODY_GONE._replace(member=member, unheard=("m1", "m2"))

    text, reply, wakes = say(None, news("t", "m1", k=Wish(2, 0, 2, 3)), seen("m1"))
    assert reply.body.shares["k"].granted == 2, "what it has, and no more"
    assert wakes == {"m2"}
    text, reply, _ = say(text, news("t", "m2", k=Wish(1, 0, 0, 3)), seen("m2"))
    assert reply.body.shares["k"].granted == 1
    _, reply, _ = say(text, news("t", "m1", k=Wish(2, 0, 2, 3)), seen("m1"))
    assert reply.body.shares["k"].granted == 2, "all three are taken"


def limited_replica() -> tuple[Rotation, Replica]:
    rotation = Rotation([Resource("k", "v", 2)], strategy=NAMED["round_robin"], cooldown_table=(30.0,))
    return rotation, Replica(rotation, "pool")


def shares_of(reply: Reply) -> list[int]:
    return [share.granted - share.returned for share in reply.body.shares.values()]


def test_h03_who_looks_after_the_state_was_lost_says_what_it_holds_also_if_there_is_nothing_new() -> None:
    rotation, replica = limited_replica()
    assert replica.lacks(ANY, (), 0.0) is not None
    _, reply, _ = say(None, Message("t", "m1", replica.message(0.0)))
    replica.take(reply.body, ClockOffset(), 0.0, is_current=True)
    assert rotation.acquire(0.0) is not None
    assert shares_of(reply) == [2]
    lost = NOBODY_GONE._replace(unheard=("m1", "m2"))
    text, _, _ = say(None, Message("t", "m1", replica.message(1.0, looks=True)), lost)
    other = news("t", "m2", **{mark: Wish(0, 0, 1, 2) for mark in reply.body.shares})
    _, reply, _ = say(text, other, lost._replace(member="m2"))
    assert shares_of(reply) == [0], "both are held by the first, which was heard"


def test_h03_permits_of_a_removed_resource_are_returned_again_if_the_message_failed() -> None:
    rotation, replica = limited_replica()
    replica.lacks(ANY, (), 0.0)
    text, reply, _ = say(None, Message("t", "m1", replica.message(0.0)))
    replica.take(reply.body, ClockOffset(), 0.0, is_current=True)
    rotation.remove("k")
    replica.refresh()
    lost = replica.message(0.0)
    assert lost is not None
    replica.failed(lost)
    text, _, _ = say(text, Message("t", "m1", replica.message(0.0, looks=True)))
    assert read(text).members == {"m1/t": {}}


COOLED = Record(outages=(Outage(990.0, 1, 1020.0),), at=990.0)


def test_h01_others_are_woken_when_health_changes_and_left_alone_when_it_does_not() -> None:
    text, _, wakes = say(None, news("t", "m1"))
    assert not wakes
    text, reply, wakes = say(text, news("t", "m2", {"k": COOLED}), NOBODY_GONE._replace(member="m2"))
    assert wakes == {"m1"}
    assert reply.body.health == {"k": COOLED._replace(at=1000.0)}
    again, _, wakes = say(text, news("t", "m2", {"k": COOLED}), NOBODY_GONE._replace(member="m2"))
    assert (again, wakes) == (text, set())
    looked, _, _ = say(text, news("t", "m1"))
    assert looked == text, "to look writes nothing"


def test_h03_members_that_are_gone_lose_their_permits() -> None:
    wish = {"k": Wish(0, 0, 1, 1)}
    text, reply, _ = say(None, news("t", "m1", **wish))
    assert reply.body.shares["k"].granted == 1
    second = NOBODY_GONE._replace(member="m2")
    text, reply, wakes = say(text, news("t", "m2", **wish), second)
    assert (reply.body.shares["k"].granted, wakes) == (0, {"m1"})
    text, reply, _ = say(text, news("t", "m2"), second._replace(is_gone=lambda member: member == "m1"))
    assert reply.body.shares["k"].granted == 1
    assert list(read(text).members) == ["m2/t"]


def test_h03_two_pools_of_one_process_are_told_apart() -> None:
    wish = {"k": Wish(0, 0, 1, 1)}
    text, _, _ = say(None, news("one", "m1", **wish))
    text, reply, wakes = say(text, news("two", "m1", **wish))
    assert (reply.body.shares["k"].granted, wakes) == (0, {"m1"})
    text, _, wakes = say(text, Message("one", leaves=True))
    assert list(read(text).members) == ["m1/two"]
    assert wakes == {"m1"}


GARBAGE = [
    "",
    "null",
    "[]",
    "{}",
    '{"v": true}',
    '{"v": 1}',
    '{"v": 1, "health": [], "members": {}}',
    '{"v": 1, "health": {"k": [0, 1, 0, [], 0]}, "members": {}}',
    '{"v": 1, "health": {"k": [0, false, 1e999, [], 0]}, "members": {}}',
    '{"v": 1, "health": {"k": [0, false, NaN, [], 0]}, "members": {}}',
    '{"v": 1, "health": {"k": [-1, false, 0, [], 0]}, "members": {}}',
    '{"v": 1, "health": {"k": [0, false, 0, [[1, 2]], 0]}, "members": {}}',
    '{"v": 1, "health": {"k": {"__reduce__": ["os:system", "true"]}}, "members": {}}',
    '{"v": 1, "health": {}, "members": {"m": {"k": [1, 2, 3]}}}',
    '{"v": 1, "health": {}, "members": {"m": 7}}',
    "[" * 100_000,
    "cos\nsystem\n(S'true'\ntR.",
]


@pytest.mark.parametrize("text", GARBAGE)
def test_g24_garbage_is_reported_and_the_state_begins_anew(text: str) -> None:
    after, reply, _ = say(text, news("t", "m1", {"k": COOLED}))
    assert reply.trouble
    assert reply.is_usable
    assert read(after).health == {"k": COOLED._replace(at=1000.0)}


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(["v", "health", "members"]), inner),
)


@FAST
@given(anything)
def test_g24_any_text_gives_an_answer(body: Any) -> None:
    for text in (json.dumps(body), json.dumps({"v": 1, "health": {"k": body}, "members": {"m/t": {"k": body}}})):
        after, reply, _ = say(text, news("t", "m1", {"k": COOLED}, k=Wish(0, 0, 1, 1)))
        assert isinstance(reply, Reply)
        if reply.is_usable:  # else it is of a newer release, and left alone
            read(after)


def test_g24_a_newer_format_is_left_alone() -> None:
    text = '{"v": 2, "what": "ever"}'
    outcome = exchange(RESOURCE_HEALTH, text, NOBODY_GONE, news("t", "m1", {"k": COOLED}))
    assert outcome.state is None
    assert not outcome.reply.is_usable
    assert "newer" in outcome.reply.trouble


# -- everything with random delays -------------------------------------------------------------------------------------


@dataclass
class Process:
    """One process: a rotation and its replica, a message under way, an answer under way."""

    member: str
    limit: int
    offset: float
    rotation: Rotation = field(init=False)
    replica: Replica = field(init=False)
    lease: int = 0
    uses: list[tuple[Use, int]] = field(default_factory=list)
    sent: tuple[Message, int] | None = None
    answer: tuple[Reply, ClockOffset, int] | None = None
    answered: str | None = None
    """The id under which it was last answered."""

    def __post_init__(self) -> None:
        resources = [Resource("k0", "v", self.limit), Resource("k1", "v")]
        self.rotation = Rotation(
            resources, strategy=NAMED["round_robin"], cooldown_table=(30.0, 60.0, 90.0), probe_on_recovery=True
        )
        self.replica = Replica(self.rotation, "pool")

    def status(self, name: str) -> str:
        return self.rotation.members[name].resource.status


class Delays(RuleBasedStateMachine):
    """Three processes whose messages and answers arrive late."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 10_000.0
        self.text: str | None = None
        self.gone: set[str] = set()
        self.made = 0
        self.processes: list[Process] = []
        for offset in (0.0, 5000.0, -80.0):
            self.begin(offset)

    def begin(self, offset: float, nth: int | None = None) -> None:
        """Start a process. Its first message is answered before the pool is used."""
        self.made += 1
        one = Process(f"m{self.made}", 2, offset)
        nth = len(self.processes) if nth is None else nth
        self.processes[nth : nth + 1] = [one]
        self.send(nth, True)
        self.deliver(nth, False)
        self.hear(nth)

    def local(self, one: Process) -> float:
        return self.now - one.offset

    # -- what a process does -------------------------------------------------------------------------------------------

    @rule(nth=st.integers(0, 2))
    def acquire(self, nth: int) -> None:
        one = self.processes[nth]
        now = self.local(one)
        if one.rotation.due(now):
            self.learn(one, one.rotation.advance(now))
        use = one.rotation.acquire(now)
        if use is not None:
            one.uses.append((use, one.lease))
        else:
            one.replica.lacks(ANY, (), now)

    @precondition(lambda self: any(one.uses for one in self.processes))
    @rule(nth=st.integers(0, 20), verdict=st.sampled_from(["ok", "ok", "ended", "cooled", "disabled"]))
    def finish(self, nth: int, verdict: str) -> None:
        busy = [one for one in self.processes if one.uses]
        one = busy[nth % len(busy)]
        use, _ = one.uses.pop(nth % len(one.uses))
        now = self.local(one)
        if verdict == "cooled":
            effects = one.rotation.cooled(use, now=now)
        elif verdict == "disabled":
            effects = one.rotation.disabled(use, now)
        else:
            effects = (one.rotation.ok if verdict == "ok" else one.rotation.ended)(use, now) or []
        self.learn(one, effects)

    @rule(nth=st.integers(0, 2), name=st.sampled_from(["k0", "k1"]))
    def enable(self, nth: int, name: str) -> None:
        one = self.processes[nth]
        self.learn(one, one.rotation.enable(name, self.local(one)))

    def learn(self, one: Process, effects: list[Any]) -> None:
        for effect in effects:
            member = getattr(effect, "member", None)
            if member is not None:
                one.replica.learn(member, self.local(one))

    @rule(seconds=st.sampled_from([0.01, 1.0, 31.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # -- what the store does -------------------------------------------------------------------------------------------

    @rule(nth=st.integers(0, 2), looks=st.booleans())
    def send(self, nth: int, looks: bool) -> None:
        one = self.processes[nth]
        if one.sent is None and one.answer is None:
            one.replica.want_more(self.local(one))
            body = one.replica.message(self.local(one), looks=looks)
            one.sent = None if body is None else (Message("t", one.answered, body), one.lease)

    @rule(nth=st.integers(0, 2), twice=st.booleans())
    def deliver(self, nth: int, twice: bool) -> None:
        one = self.processes[nth]
        if one.sent is None:
            return
        message, lease = one.sent
        for _ in range(1 + twice):  # the answer to a COMMIT was lost, and the step ran again
            seen = Seen(self.now, one.member, lambda member: member in self.gone)
            self.text, reply, _ = say(self.text, message, seen)
        one.sent, one.answer = None, (reply, exactly(one.offset), lease)

    @rule(nth=st.integers(0, 2))
    def hear(self, nth: int) -> None:
        one = self.processes[nth]
        if one.answer is not None:
            (reply, offset, lease), one.answer = one.answer, None
            is_current = lease == one.lease
            if is_current and one.answered != reply.member:
                one.replica.forget_permits()
                one.answered = reply.member
            self.learn(one, one.replica.take(reply.body, offset, self.local(one), is_current=is_current))

    @rule(nth=st.integers(0, 2))
    def lose(self, nth: int) -> None:
        """The lease of a process is lost."""
        one = self.processes[nth]
        self.gone.add(one.member)
        self.made += 1
        one.member = f"m{self.made}"
        one.lease += 1
        one.answered = None
        one.replica.forget_permits()

    @rule(nth=st.integers(0, 2))
    def die(self, nth: int) -> None:
        self.gone.add(self.processes[nth].member)
        self.begin(self.processes[nth].offset, nth)

    @rule()
    def forget_health(self) -> None:
        """Somebody spoils the records: what processes know is told again."""
        state = read(self.text)
        state.health.clear()
        self.text = json.dumps({"v": RESOURCE_HEALTH.format, **RESOURCE_HEALTH.write(state)})

    # -- what holds ----------------------------------------------------------------------------------------------------

    @invariant()
    def limits_are_kept(self) -> None:
        # Uses that go on after a lease was lost are outside the count.
        held = [
            use
            for one in self.processes
            for use, lease in one.uses
            if use.member.resource.resource_id == "k0" and lease == one.lease
        ]
        assert len(held) <= 2
        assert sum(one.rotation.members["k0"].lease.permits for one in self.processes) <= 2  # type: ignore[union-attr]

    @invariant()
    def one_process_probes(self) -> None:
        for name in ("k0", "k1"):
            rights = [one.rotation.members[name].probe for one in self.processes]
            assert sum(right.permits for right in rights if right is not None) <= 1

    @invariant()
    def rotations_are_sound(self) -> None:
        for one in self.processes:
            check(one.rotation, self.local(one))

    def settle(self) -> None:
        """Deliver everything, until nobody has anything new to say."""
        quiet = 0
        for _ in range(40):
            before = self.text
            for nth in range(3):
                self.deliver(nth, False)
                self.hear(nth)
                self.send(nth, True)
                self.deliver(nth, False)
                self.hear(nth)
            quiet = quiet + 1 if self.text == before else 0
            if quiet == 3:
                return
        raise AssertionError("they never stop talking")

    def teardown(self) -> None:
        self.settle()
        for name in ("k0", "k1"):
            for one in self.processes:  # notice cooldowns that are over
                self.learn(one, one.rotation.advance(self.local(one)))
            resources = [one.rotation.members[name].resource for one in self.processes]
            assert len({resource.status for resource in resources}) == 1, "all agree"
            counts = {resource.consecutive_cooldown for resource in resources}
            assert len(counts) == 1 or resources[0].status == "disabled", "which has no count that matters"
            record = read(self.text).health.get(mark_of("pool", resources[0]), UNKNOWN)
            assert (resources[0].status == "disabled") is record.disabled
            if record.until > self.now + 1 and not record.disabled:
                assert resources[0].status == "cooling_down"


TestDelays = Delays.TestCase
TestDelays.settings = settings(
    max_examples=max(20, int(400 * SCALE**1.4)),
    stateful_step_count=60,
    phases=(Phase.explicit, Phase.generate),
)
