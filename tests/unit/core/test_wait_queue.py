"""The line: first come, first served, among those who can use what there is (R43)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headgate.core.wait_queue import Ticket, WaitQueue

Place = Ticket[str, str]


def line_of(*wants: str) -> tuple[WaitQueue[Place], list[Place]]:
    line: WaitQueue[Place] = WaitQueue()
    tickets = [Place(want) for want in wants]
    for ticket in tickets:
        line.join(ticket)
    return line, tickets


def stock(things: str) -> Callable[[str], str | None]:
    """Take a thing off this stock: a want is a set of letters, and any of them will do."""
    left = Counter(things)

    def take(want: str) -> str | None:
        thing = next((letter for letter in want if left[letter]), None)
        if thing is not None:
            left[thing] -= 1
        return thing

    return take


def test_r43_who_came_first_is_served_first() -> None:
    line, [first, second, third] = line_of("a", "a", "a")
    assert line.serve(stock("aa")) == [first, second]
    assert (first.grant, second.grant, third.grant) == ("a", "a", None)
    assert list(line) == [third]


def test_r43_what_comes_free_goes_to_the_first_who_can_use_it() -> None:
    line, [picky, easy, also_picky] = line_of("a", "ab", "a")
    assert line.serve(stock("b")) == [easy]
    assert easy.grant == "b"
    assert line.serve(stock("a")) == [picky]
    assert list(line) == [also_picky]


def test_r43_a_later_comer_never_takes_what_suits_an_earlier_one() -> None:
    line, [early, late] = line_of("a", "ab")
    assert line.serve(stock("a")) == [early]
    assert late.grant is None


def test_r43_those_who_want_different_things_are_served_by_age_not_by_want() -> None:
    line, tickets = line_of("a", "b", "a", "b", "ab")
    assert line.serve(stock("aabbb")) == tickets


def test_r43_no_herd_each_is_asked_at_most_once_for_each_thing() -> None:
    line, _ = line_of(*["a"] * 100, *["b"] * 100)
    asked: list[str] = []

    def take(want: str) -> str | None:
        asked.append(want)
        return "a" if want == "a" and len(asked) == 1 else None

    assert len(line.serve(take)) == 1
    assert asked == ["a", "a", "b"]  # one was served, and then the first of each want was told no


def test_nobody_in_line() -> None:
    line, _ = line_of()
    assert line.serve(stock("abc")) == []
    assert (bool(line), len(line), line.first(), list(line)) == (False, 0, None, [])


def test_leaving_gives_the_turn_to_the_next() -> None:
    line, [first, second] = line_of("a", "a")
    assert line.leave(first) is True
    assert line.first() is second
    assert line.serve(stock("a")) == [second]


def test_leaving_twice_or_after_being_served_says_so() -> None:
    line, [first, second] = line_of("a", "a")
    assert line.leave(first) is True
    assert line.leave(first) is False
    line.serve(stock("a"))
    assert line.leave(second) is False
    assert second.grant == "a"


def test_leaving_a_line_one_never_stood_in_says_so() -> None:
    line, _ = line_of("a")
    assert line.leave(Place("a")) is False
    assert line.leave(Place("b")) is False
    assert len(line) == 1


def test_r43_those_whose_grant_is_taken_back_stand_where_they_stood() -> None:
    line, [first, second, third, other] = line_of("a", "a", "a", "b")
    line.serve(stock("aa"))
    for ticket in (first, second):
        line.rejoin(ticket)
    assert first.grant is None
    assert list(line) == [first, second, third, other]
    assert line.serve(stock("aa")) == [first, second]
    for ticket in (second, first):
        line.rejoin(ticket)
    assert line.serve(stock("a")) == [first]
    assert (first in line, second in line) == (False, True)


def test_wants_that_nobody_has_any_more_are_forgotten() -> None:
    line, tickets = line_of(*(f"want-{number}" for number in range(100)))
    for ticket in tickets:
        line.leave(ticket)
    assert not line
    assert not line._lines


def test_lines_that_share_something_can_be_compared() -> None:
    (here, _), (there, _) = line_of("a"), line_of("a")
    first, second = here.first(), there.first()
    assert first is not None
    assert second is not None
    assert first.number < second.number


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("join"), st.sampled_from(["a", "b", "ab", "bc", "abc"])),
            st.tuples(st.just("leave"), st.integers(0, 30)),
            st.tuples(st.just("serve"), st.text("abc", max_size=4)),
        ),
        max_size=40,
    )
)
def test_r43_a_line_is_a_list_that_is_walked_from_the_front(steps: list[tuple[str, str | int]]) -> None:
    line, everybody = line_of()
    naive: list[Place] = []
    for step, what in steps:
        if step == "join":
            ticket = Place(str(what))
            everybody.append(ticket)
            naive.append(ticket)
            line.join(ticket)
        elif step == "leave" and everybody:
            ticket = everybody[int(what) % len(everybody)]
            assert line.leave(ticket) is (ticket in naive)
            naive = [one for one in naive if one is not ticket]
        elif step == "serve":
            take = stock(str(what))
            expected = [(one, thing) for one in naive if (thing := take(one.requirement))]
            assert [(one, one.grant) for one in line.serve(stock(str(what)))] == expected
            naive = [one for one in naive if one.grant is None]
        assert list(line) == naive
        assert (bool(line), len(line)) == (bool(naive), len(naive))
        assert line.first() is (naive[0] if naive else None)


# -- priorities and tenants --------------------------------------------------------------------------------------------


def names_served(line: WaitQueue[Place], names: dict[Place, str], things: int) -> list[str]:
    return [names[ticket] for ticket in line.serve(stock("a" * things))]


def test_l09_a_higher_priority_is_served_first() -> None:
    line: WaitQueue[Place] = WaitQueue()
    tickets = [Place("a", priority) for priority in (0, 5, 0, 10, 5)]
    for ticket in tickets:
        line.join(ticket)
    assert [ticket.priority for ticket in line.serve(stock("aaaaa"))] == [10, 5, 5, 0, 0]


def test_l09_tenants_take_turns() -> None:
    line: WaitQueue[Place] = WaitQueue()
    names: dict[Place, str] = {}

    def join(tenant: str, number: int) -> None:
        for _ in range(number):
            ticket = Place("a", 0, tenant)
            names[ticket] = tenant
            line.join(ticket)

    join("big", 6)
    assert names_served(line, names, 2) == ["big", "big"]
    join("small", 2)
    join("big", 1)
    assert names_served(line, names, 5) == ["big", "small", "big", "small", "big"]
    assert names_served(line, names, 9) == ["big", "big"]


class Rings:
    """The naive model: the highest priority, of that the tenant whose turn it is, of that the oldest waiter."""

    def __init__(self) -> None:
        self.rings: dict[float, list[tuple[Any, list[Place]]]] = {}

    def join(self, ticket: Place) -> None:
        ring = self.rings.setdefault(ticket.priority, [])
        own = next((own for tenant, own in ring if tenant == ticket.tenant), None)
        if own is None:
            ring.append((ticket.tenant, [ticket]))
        else:
            own.append(ticket)

    def leave(self, ticket: Place) -> None:
        for _, own in self.rings[ticket.priority]:
            if ticket in own:
                own.remove(ticket)
        self.tidy()

    def serve(self, things: int) -> list[Place]:
        served = []
        while self.rings and things:
            ring = self.rings[max(self.rings)]
            served.append(ring[0][1].pop(0))
            ring.append(ring.pop(0))
            things -= 1
            self.tidy()
        return served

    def tidy(self) -> None:
        for priority, ring in list(self.rings.items()):
            ring[:] = [(tenant, own) for tenant, own in ring if own]
            if not ring:
                del self.rings[priority]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("join"), st.tuples(st.integers(0, 2), st.sampled_from(["x", "y", "z", None]))),
            st.tuples(st.just("serve"), st.integers(1, 4)),
            st.tuples(st.just("leave"), st.integers(0, 30)),
        ),
        max_size=80,
    )
)
def test_l09_priorities_and_turns_as_in_the_naive_model(steps: list[tuple[str, Any]]) -> None:
    line, naive = WaitQueue[Place](), Rings()
    waiting: list[Place] = []
    for step, what in steps:
        if step == "join":
            ticket = Place("a", *what)
            waiting.append(ticket)
            line.join(ticket)
            naive.join(ticket)
        elif step == "leave" and waiting:
            ticket = waiting.pop(what % len(waiting))
            assert line.leave(ticket)
            naive.leave(ticket)
        elif step == "serve":
            served = line.serve(stock("a" * what))
            assert served == naive.serve(what)
            waiting = [ticket for ticket in waiting if ticket.grant is None]
        assert len(line) == len(waiting)
        assert all(ticket in line for ticket in waiting)
