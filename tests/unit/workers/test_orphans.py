"""W33: which children of a worker are orphans that it may reap. Without processes."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from headgate.workers.server.orphans import Adopted


class Children:
    """Children by pid: "lives" or "ended"; what is not there is gone."""

    def __init__(self, **states: str) -> None:
        self.states = {int(pid[1:]): state for pid, state in states.items()}
        self.claimed: set[int] = set()
        self.asked = 0

    def state(self, pid: int) -> str:
        return self.states.get(pid, "gone")

    def claims(self) -> set[int]:
        self.asked += 1
        return self.claimed

    def look(self, adopted: Adopted, main: Iterable[int], others: Iterable[int] = ()) -> list[int]:
        found = adopted.due(main, others, self.state, self.claims)
        for pid in found:
            del self.states[pid]
        return found


def test_w33_an_orphan_is_reaped_when_it_was_a_zombie_at_two_looks() -> None:
    adopted, children = Adopted(), Children(p1="lives", p2="ended")
    assert [children.look(adopted, [1, 2]) for _ in range(3)] == [[], [2], []]
    children.states[1] = "ended"
    assert [children.look(adopted, [1]) for _ in range(2)] == [[], [1]]


def test_w33_a_child_of_another_thread_is_left_alone_also_when_that_thread_ends() -> None:
    adopted, children = Adopted(), Children(p1="lives")
    assert children.look(adopted, [], [1]) == []
    children.states[1] = "ended"
    assert [children.look(adopted, [1]) for _ in range(5)] == [[]] * 5
    del children.states[1]  # somebody waited for it, and its pid is given to another
    assert children.look(adopted, []) == []
    children.states[1] = "ended"
    assert [children.look(adopted, [1]) for _ in range(2)] == [[], [1]]


def test_w33_what_was_there_before_and_what_is_claimed_is_left_alone() -> None:
    adopted, children = Adopted([1]), Children(p1="ended", p2="ended", p3="ended")
    children.claimed = {2}
    assert [children.look(adopted, [1, 2, 3]) for _ in range(4)] == [[], [3], [], []]
    children.claimed = set()
    assert [children.look(adopted, [1, 2]) for _ in range(3)] == [[], [], []]


def test_w33_claims_are_asked_for_only_when_there_is_something_to_reap() -> None:
    adopted, children = Adopted(), Children(p1="lives", p2="ended")
    for _ in range(5):
        children.look(adopted, [1], [2])
    assert children.asked == 0


@given(
    st.lists(st.tuples(st.sampled_from(["fork", "thread ends", "dies", "orphan", "wait", "look"]), st.integers(0, 5)))
)
def test_w33_whatever_happens_only_orphans_are_reaped(steps: list[tuple[str, int]]) -> None:
    """A thread ends only after a look has seen its children, or somebody claims them."""
    adopted, children, own = Adopted(), Children(), set[int]()
    main, others, number = set[int](), set[int](), 0
    for step, which in steps:
        if step in ("fork", "orphan"):
            number += 1
            children.states[number] = "lives"
            (others if step == "fork" else main).add(number)
            own |= {number} if step == "fork" else set()
        elif step == "thread ends":
            if which % 2:
                children.look(adopted, main, others)
            else:
                children.claimed |= others
            main, others = main | others, set()
        elif step == "dies" and children.states:
            children.states[list(children.states)[which % len(children.states)]] = "ended"
        elif step == "wait":
            for pid in [pid for pid in own if children.states.get(pid) == "ended"][:which]:
                del children.states[pid]
                main.discard(pid)
                others.discard(pid)
        elif step == "look":
            reaped = children.look(adopted, main, others)
            assert not set(reaped) & own
            main -= set(reaped)
    for _ in range(2):
        main -= set(children.look(adopted, main, others))
    assert not [pid for pid in main - own if children.states.get(pid) == "ended"], "no zombie is left"
