"""W40, W40c, W41: which worker is next, without workers: the roster of a pool and balancers, beside a naive model."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from headgate import LeastLoadedLoadBalancer, LoadBalancerLike, RoundRobinLoadBalancer, WorkerMetadata
from headgate.errors import UnknownResource
from headgate.workers import WorkerView
from headgate.workers.client.balancing import COOLDOWNS, Cycle, FewestInFlight, Roster
from headgate.workers.model import WorkerState
from tests.conftest import seeds


def roster(uids: str = "", strategy: Any = None) -> Roster:
    made = Roster(strategy or Cycle())
    for uid in uids:
        made.admit(uid, f"worker {uid}")
    return made


def uid_of(use: Any) -> str | None:
    return None if use is None else use.member.resource.resource_id


def goes_to(workers: Roster, now: float = 0.0, avoid: Any = ()) -> str | None:
    """Who is next? The call stays there."""
    return uid_of(workers.next(now, avoid))


def view(uid: str, in_flight: int = 0, state: WorkerState = "ready") -> WorkerView:
    return WorkerView(WorkerMetadata(uid, f"unix:{uid}", 1, "1.0"), state, in_flight)


def views(uids: str) -> list[WorkerView]:
    return [view(uid) for uid in uids]


def cool(workers: Roster, uid: str, now: float) -> None:
    use = workers.take(uid, now)
    assert use is not None
    workers.failed(use, now)


def fit_again(workers: Roster, uid: str, now: float) -> float:
    """How many seconds it rests from now on, to a hundredth."""
    return next(n for n in range(10_000) if not workers.cooling(uid, now + n / 100)) / 100


# -- round robin ------------------------------------------------------------------------------------------------------


def test_w40c_round_robin_goes_by_admission_whatever_the_load() -> None:
    workers = roster("bac")
    busy = [workers.take("a", 0.0) for _ in range(50)]
    assert [goes_to(workers) for _ in range(7)] == list("bacbacb"), "nothing of it has ended"
    for use in busy:
        assert use is not None
        workers.ended(use)
    assert [goes_to(workers) for _ in range(3)] == list("acb")


def test_w40c_whoever_comes_stands_last_and_whoever_goes_takes_no_turn_along() -> None:
    workers = roster("abc")
    assert [goes_to(workers) for _ in range(2)] == list("ab")
    workers.admit("d", "worker d")
    assert [goes_to(workers) for _ in range(3)] == list("cda")
    workers.drop("a")
    assert [goes_to(workers) for _ in range(2)] == list("bc"), "the turn was after a, and still is"
    workers.drop("d")
    assert goes_to(workers) == "b"
    workers.admit("a", "a, come back")
    assert [goes_to(workers) for _ in range(4)] == list("cabc"), "admitted again, it is last"
    assert workers.get("a") == "a, come back"


def test_w40c_the_next_one_is_asked_when_one_refuses() -> None:
    workers = roster("abc")
    assert goes_to(workers) == "a"
    assert goes_to(workers, avoid=("a",)) == "b"
    assert goes_to(workers, avoid={"a": "", "b": ""}) == "c", "also when whom to avoid is a dict"
    assert goes_to(workers, avoid=("a", "b", "c")) is None
    assert goes_to(workers) == "a", "a full cycle has come around"
    assert goes_to(workers, avoid=("b",)) == "c"
    assert goes_to(workers) == "a"


def test_w40c_nobody_is_next_in_an_empty_roster() -> None:
    workers = roster()
    assert goes_to(workers) is None
    assert workers.take("a", 0.0) is None
    assert not workers.cooling("a", 0.0)
    assert workers.get("a") is None
    assert (len(workers), "a" in workers, list(workers)) == (0, False, [])
    with pytest.raises(UnknownResource):
        workers.drop("a")


def test_w40c_calls_of_a_worker_that_left_may_end() -> None:
    workers = roster("ab")
    uses = [workers.next(0.0) for _ in range(6)]
    workers.drop("a")
    workers.admit("a", "another")
    ends: list[Any] = [workers.served, lambda use: workers.failed(use, 0.0), workers.ended]
    for end, use in zip([ends[0], ends[0], ends[1], ends[2], ends[2], ends[2]], uses, strict=True):
        end(use)
    assert not workers.cooling("a", 0.0), "the failure was its predecessor's"
    assert not workers.cooling("b", 0.0)


# -- the fewest calls in flight ---------------------------------------------------------------------------------------


def test_w40_the_worker_with_the_fewest_calls_is_next() -> None:
    workers = roster("abc", FewestInFlight())
    held = {uid: [workers.take(uid, 0.0) for _ in range(count)] for uid, count in {"a": 3, "b": 1, "c": 2}.items()}
    assert [goes_to(workers) for _ in range(4)] == list("bcba"), "b has two then, c three, b three, and a its turn"
    for use in held["c"]:
        assert use is not None
        workers.ended(use)
    assert [goes_to(workers) for _ in range(2)] == list("cc")


def test_w40_calls_made_one_at_a_time_cycle_in_the_order_of_admission() -> None:
    workers = roster("bac", FewestInFlight())

    def call() -> str | None:
        use = workers.next(0.0)  # no time passes: turns are told by their order, not by a clock
        assert use is not None
        workers.served(use)
        return uid_of(use)

    assert [call() for _ in range(7)] == list("bacbacb")
    workers.admit("d", "worker d")
    assert [call() for _ in range(5)] == list("dacbd"), "whoever was never picked is the one picked longest ago"
    workers.drop("a")
    assert [call() for _ in range(4)] == list("cbdc")


def test_w40_answered_calls_go_back_to_their_worker() -> None:
    """What one message answers is called again in one message, however many workers there are."""
    workers = roster("abcdefgh", FewestInFlight())
    flying: dict[str, list[Any]] = {uid: [] for uid in "abcdefgh"}
    for _ in range(96):
        use = workers.next(0.0)
        flying[str(uid_of(use))].append(use)
    assert {len(uses) for uses in flying.values()} == {12}
    chance = random.Random(1)
    for _ in range(200):
        uid = chance.choice("abcdefgh")
        for use in flying[uid]:
            workers.served(use)
        flying[uid] = [workers.next(0.0) for _ in range(12)]
        assert {uid_of(use) for use in flying[uid]} == {uid}


def test_w40_event_loops_of_a_pool_do_not_all_begin_with_the_same_worker() -> None:
    strategy = FewestInFlight()
    found = Counter()
    for _ in range(12):  # each has one call to make
        found[goes_to(roster("abcd", strategy))] += 1
    assert found == dict.fromkeys("abcd", 3)


def test_w40_few_workers_of_long_ago_are_remembered() -> None:
    strategy = FewestInFlight()
    lasting = roster("a", strategy)
    for number in range(5000):
        assert goes_to(roster("a", strategy)) == "a"
        strategy.last_pick(f"w{number}")
    assert len(strategy._last_picks) <= 4096
    assert goes_to(lasting) == "a"


# -- cooling ----------------------------------------------------------------------------------------------------------


def test_w41_a_cooling_worker_is_tried_last_and_never_skipped() -> None:
    workers = roster("abc")
    cool(workers, "b", 0.0)
    assert [goes_to(workers, 0.05) for _ in range(4)] == list("acac")
    assert goes_to(workers, 0.05, avoid="ac") == "b", "the others refused"
    assert goes_to(workers, 0.05, avoid="abc") is None
    assert [goes_to(workers, COOLDOWNS[0]) for _ in range(3)] == list("abc"), "it is over to the very moment"


def test_w41_of_those_that_cool_the_first_that_is_fit_again_goes_first() -> None:
    workers = roster("abc")
    for uid, at in (("b", 0.0), ("c", 0.01), ("a", 0.02)):
        cool(workers, uid, at)
    assert goes_to(workers, 0.03) == "b"
    assert goes_to(workers, 0.03, avoid="b") == "c"
    assert goes_to(workers, 0.03, avoid="bc") == "a"
    assert goes_to(workers, 0.105) == "b"
    assert not workers.cooling("b", 0.105)
    assert workers.cooling("c", 0.105)


def test_w41_a_single_worker_that_cools_is_used_all_the_same() -> None:
    workers = roster("a")
    cool(workers, "a", 0.0)
    assert goes_to(workers, 0.01) == "a"


def test_w41_cooldowns_escalate_while_failures_follow_each_other() -> None:
    workers = roster("ab")
    now = 0.0
    for seconds in (*COOLDOWNS, COOLDOWNS[-1]):
        cool(workers, "a", now)
        assert fit_again(workers, "a", now) == pytest.approx(seconds, abs=0.011)
        now += seconds + 1
        assert not workers.cooling("a", now)
    use = workers.take("a", now)
    assert use is not None
    workers.served(use)
    cool(workers, "a", now)
    assert fit_again(workers, "a", now) == pytest.approx(COOLDOWNS[0], abs=0.011), "a success begins anew"


def test_w41_one_outage_is_one_escalation() -> None:
    """Ten calls were under way when it failed: they fail for the same reason."""
    workers = roster("ab")
    uses = [workers.take("a", 0.0) for _ in range(10)]
    for use in uses:
        assert use is not None
        workers.failed(use, 1.0)
    assert fit_again(workers, "a", 1.0) == pytest.approx(COOLDOWNS[0], abs=0.011)


def test_w41_a_worker_that_serves_while_it_cools_is_fit_again() -> None:
    workers = roster("ab")
    cool(workers, "a", 0.0)
    use = workers.next(0.01, avoid="b")
    assert uid_of(use) == "a"
    assert use is not None
    workers.served(use)
    assert not workers.cooling("a", 0.02), "it took the call and answered: it is fine"
    assert Counter(goes_to(workers, 0.03) for _ in range(4)) == {"a": 2, "b": 2}


def test_w41_a_worker_that_served_while_it_cooled_does_not_cool_for_ever() -> None:
    workers = roster("a")
    cool(workers, "a", 0.0)
    use = workers.next(0.01)
    assert use is not None
    workers.served(use)
    for now in (0.05, 0.2, 5.0, 500.0):
        assert goes_to(workers, now) == "a", "the only worker there is"
    assert not workers.cooling("a", 500.0)


def test_w41_what_ends_without_a_verdict_changes_nothing() -> None:
    workers = roster("ab")
    cool(workers, "a", 0.0)
    use = workers.next(0.01, avoid="b")
    assert use is not None
    workers.ended(use)
    assert workers.cooling("a", 0.05)
    assert not workers.cooling("a", COOLDOWNS[0])
    assert {goes_to(workers, 0.2) for _ in range(2)} == {"a", "b"}


def test_w41_a_worker_that_comes_back_is_not_the_one_that_cooled() -> None:
    workers = roster("ab")
    cool(workers, "a", 0.0)
    workers.drop("a")
    workers.admit("a", "again")
    assert not workers.cooling("a", 0.0)
    assert {goes_to(workers) for _ in range(2)} == {"a", "b"}


# -- a naive model ----------------------------------------------------------------------------------------------------


class Member:
    def __init__(self, uid: str, place: int) -> None:
        self.uid = uid
        self.place = place  # in the order of admission
        self.rests = False
        self.until = 0.0
        self.failures = 0
        self.outage = 0  # uses up to this one belong to the failure that was noticed
        self.gone = False


class Naive:
    """A roster that looks at everybody each time."""

    def __init__(self, picks: list[str] | None) -> None:
        self.picks = picks  # by all rosters of one strategy; None: members take turns whatever their load
        self.members: list[Member] = []
        self.uses: list[tuple[int, Member]] = []
        self._last = -1
        self._places = self._orders = 0

    def admit(self, uid: str) -> None:
        self._places += 1
        self.members.append(Member(uid, self._places))

    def find(self, uid: str) -> Member | None:
        return next((member for member in self.members if member.uid == uid), None)

    def drop(self, uid: str) -> None:
        member = self.find(uid)
        assert member is not None
        member.gone = True
        self.members.remove(member)

    def advance(self, now: float) -> None:
        for member in self.members:
            if member.rests and member.until <= now:
                member.rests = False

    def load(self, member: Member) -> int:
        """Calls that it has, and those of a predecessor of its name that have not ended."""
        return sum(other.uid == member.uid for _, other in self.uses)

    def next(self, now: float, avoid: str) -> Member | None:
        self.advance(now)
        members = [member for member in self.members if member.uid not in avoid]
        fit = [member for member in members if not member.rests]
        if not fit:
            return self.take(min(members, key=lambda member: member.until, default=None), now)
        if self.picks is not None:
            last = {uid: turn for turn, uid in enumerate(self.picks)}
            member = min(fit, key=lambda member: (self.load(member), last.get(member.uid, -1), member.place))
            self.picks.append(member.uid)
            return self.take(member, now)
        member = next((member for member in fit if member.place > self._last), fit[0])
        self._last = member.place
        return self.take(member, now)

    def take(self, member: Member | None, now: float) -> Member | None:
        if member is not None:
            self._orders += 1
            self.uses.append((self._orders, member))
        return member

    def served(self, order: int, member: Member) -> None:
        if order > member.outage:
            member.rests, member.until, member.failures = False, 0.0, 0

    def failed(self, order: int, member: Member, now: float) -> None:
        if order > member.outage or not member.failures:
            member.failures += 1
        if not member.rests:
            self._orders += 1
            member.outage = self._orders
        member.until = max(member.until, now + COOLDOWNS[min(member.failures, len(COOLDOWNS)) - 1])
        member.rests = not member.gone


class Walk:
    """A roster and a naive one beside it, through the same random events."""

    def __init__(self, strategy: Any, picks: list[str] | None) -> None:
        self.real = Roster(strategy)
        self.naive = Naive(picks)
        self.uses: list[Any] = []

    def step(self, chance: random.Random, now: float) -> None:
        real, naive = self.real, self.naive
        uid, what = chance.choice("abcde"), chance.random()
        if what < 0.15:
            self.come_or_go(uid, chance)
        elif what < 0.55:
            avoid = "".join(chance.sample("abcde", chance.choice((0, 0, 0, 1, 2, 4, 5))))
            self.begun(real.next(now, avoid), naive.next(now, avoid))
        elif what < 0.6:
            self.begun(real.take(uid, now), naive.take(naive.find(uid), now))
        elif self.uses:
            self.end(chance.randrange(len(self.uses)), what, now)
        naive.advance(now)
        self.check(now)

    def come_or_go(self, uid: str, chance: random.Random) -> None:
        """A worker comes, or is lost or drained: its calls end later."""
        if self.naive.find(uid) is None:
            self.real.admit(uid, uid.upper())
            self.naive.admit(uid)
        elif chance.random() < 0.4:
            self.real.drop(uid)
            self.naive.drop(uid)

    def begun(self, use: Any, member: Member | None) -> None:
        assert uid_of(use) == (member and member.uid)
        self.uses += [use] if use is not None else []

    def end(self, nth: int, how: float, now: float) -> None:
        use, (order, member) = self.uses.pop(nth), self.naive.uses.pop(nth)
        if how < 0.75:
            self.real.served(use)
            self.naive.served(order, member)
        elif how < 0.9:
            self.real.failed(use, now)
            self.naive.failed(order, member, now)
        else:
            self.real.ended(use)

    def check(self, now: float) -> None:
        real, members = self.real, self.naive.members
        assert list(real) == [member.uid.upper() for member in members]
        assert [real.cooling(member.uid, now) for member in members] == [member.rests for member in members]
        assert len(real) == len(members)
        assert all(member.uid in real for member in members)


@pytest.mark.parametrize("least_loaded", [False, True])
@pytest.mark.parametrize("seed", seeds(8, 3))
def test_w40_a_roster_chooses_as_one_that_looks_at_everybody(seed: int, least_loaded: bool, scale: float) -> None:
    """Two rosters at a time, as two event loops of one pool have them: they share when workers were picked."""
    for walk in range(int(3 + 60 * scale)):
        chance, now = random.Random(f"{seed} {walk}"), 1.0
        strategy, picks = (FewestInFlight(), []) if least_loaded else (Cycle(), None)
        walks = [Walk(strategy, picks) for _ in range(2)]
        for _ in range(300):
            now += chance.choice((0.0, 0.0, 0.001, 0.05, 0.1, 0.7, 3.0))
            chance.choice(walks).step(chance, now)


@pytest.mark.parametrize("seed", seeds(4, 2))
def test_w40_what_was_counted_is_forgotten_when_all_calls_have_ended(seed: int, scale: float) -> None:
    """However calls ended and workers came and went: afterwards each gets its share, to the call."""
    for walk in range(int(3 + 60 * scale)):
        chance, now = random.Random(f"{seed} {walk} ended"), 1.0
        one = Walk(FewestInFlight(), [])
        for _ in range(300):
            now += chance.choice((0.0, 0.001, 0.1, 3.0))
            one.step(chance, now)
        while one.uses:
            one.end(chance.randrange(len(one.uses)), chance.random(), now)
        now += 100.0  # nobody cools
        workers = [member.uid for member in one.naive.members]
        found = Counter(goes_to(one.real, now) for _ in range(10 * len(workers)))
        assert found == dict.fromkeys(workers, 10)


# -- balancers --------------------------------------------------------------------------------------------------------


def ordered(balancer: Any, workers: list[WorkerView]) -> str:
    return "".join(worker.uid for worker in balancer.order(None, workers))


def first(balancer: Any, workers: list[WorkerView]) -> str:
    """Whom a pool asks that is not refused: it looks no further."""
    return next(iter(balancer.order(None, workers))).uid


@pytest.mark.parametrize("balancer", [RoundRobinLoadBalancer(), LeastLoadedLoadBalancer()])
def test_w40_shipped_balancers_are_what_a_pool_takes(balancer: Any) -> None:
    assert isinstance(balancer, LoadBalancerLike)
    assert repr(balancer) == f"{type(balancer).__name__}()"
    assert list(balancer.order(None, [])) == []
    assert sorted(ordered(balancer, views("abc"))) == list("abc"), "each worker once"
    for report in ("accepted", "transient", "evicted"):
        balancer.report(view("a"), report)
    assert balancer.strategy.picker() is not balancer.strategy.picker(), "each event loop has its own"


def test_w40c_the_order_begins_with_the_one_whose_turn_it_is() -> None:
    balancer, workers = RoundRobinLoadBalancer(), views("abc")
    assert [first(balancer, workers) for _ in range(5)] == list("abcab")
    assert ordered(balancer, workers) == "cab", "all of them, if all before refuse"
    assert first(balancer, workers) == "c", "who refused is asked again in its turn"


def test_w40c_the_order_does_not_look_at_the_load() -> None:
    balancer = RoundRobinLoadBalancer()
    assert [first(balancer, [view("a", 99), view("b", 0)]) for _ in range(4)] == list("abab")


def test_w40c_one_balancer_serves_several_pools() -> None:
    balancer, one, other = RoundRobinLoadBalancer(), views("abc"), views("xy")
    turns = [(first(balancer, one), first(balancer, other)) for _ in range(6)]
    assert [mine for mine, _ in turns] == list("abcabc")
    assert [theirs for _, theirs in turns] == list("xyxyxy")


def test_w40c_two_calls_at_once_ask_each_worker_once() -> None:
    balancer, workers = RoundRobinLoadBalancer(), views("abcd")
    orders = [iter(balancer.order(None, workers)) for _ in range(3)]
    asked: list[list[str]] = [[], [], []]
    chance = random.Random(1)
    while any(len(seen) < 4 for seen in asked):
        nth = chance.randrange(3)
        asked[nth] += [worker.uid for _, worker in zip(range(1), orders[nth], strict=False)]
    assert all(sorted(seen) == list("abcd") for seen in asked)
    assert all(next(order, None) is None for order in orders)


def test_w40c_the_views_of_this_very_call_are_given_back() -> None:
    balancer = RoundRobinLoadBalancer()
    for in_flight in range(3):
        workers = [view("a", in_flight), view("b", in_flight)]
        assert {id(worker) for worker in balancer.order(None, workers)} == {id(worker) for worker in workers}


def test_w40c_the_order_is_that_of_admission_also_when_a_worker_came_back() -> None:
    """It left and was admitted again: now it is last."""
    balancer = RoundRobinLoadBalancer()
    assert ordered(balancer, views("abc")) == "abc"
    assert first(balancer, views("ac"))
    assert ordered(balancer, views("acb")) in ("acb", "cba", "bac")


def test_w40c_a_balancer_remembers_no_end_of_pools() -> None:
    balancer = RoundRobinLoadBalancer()
    for number in range(500):
        workers = [view(f"w{number}"), view(f"w{number + 1}")]
        assert first(balancer, workers) == f"w{number}"
        assert first(balancer, workers) == f"w{number + 1}"
    assert len(balancer._rosters) <= 64


def test_w41_least_loaded_asks_the_one_with_the_fewest_calls() -> None:
    balancer = LeastLoadedLoadBalancer()
    workers = [view("a", 3), view("b", 0), view("c", 7), view("d", 1)]
    for _ in range(3):
        assert ordered(balancer, workers) == "bdac"


def test_w41_least_loaded_asks_the_longest_unused_among_equals() -> None:
    balancer = LeastLoadedLoadBalancer()
    workers = [view("a", 1), view("b", 1), view("c", 1), view("busy", 2)]
    found = []
    for _ in range(6):
        found.append(first(balancer, workers))
        balancer.report(workers["abc".index(found[-1])], "accepted")
    assert set(Counter(found).values()) == {2}, "each in its turn"


@pytest.mark.parametrize("balancer", [RoundRobinLoadBalancer(), LeastLoadedLoadBalancer()])
def test_w41_cooling_workers_come_last_in_the_order(balancer: Any) -> None:
    workers = [view("a", 0, "cooling"), view("b", 1), view("c", 2)]
    for _ in range(4):
        order = ordered(balancer, workers)
        assert sorted(order) == list("abc"), "never skipped"
        assert order[-1] == "a"
