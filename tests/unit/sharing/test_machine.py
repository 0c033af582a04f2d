"""All kinds of shared state in one machine: processes crash, and lose leases, answers, wake-ups and texts.

Each kind has a part (`tests/support/sharing/*_part.py`) that drives what really runs in a process, and a game that
counts naively what the parts do. After each step no limit is exceeded. At the end of a run everything is delivered and
ended: nothing waits that could run, nothing is held by nobody, and no change has cost more than a few messages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

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

from tests.support.sharing.adaptive_part import AdaptiveGame, AdaptivePart
from tests.support.sharing.health_part import HealthGame, HealthPart
from tests.support.sharing.quotas_part import QuotasGame, QuotasPart
from tests.support.sharing.slots_part import SlotsGame, SlotsPart
from tests.support.sharing.spending_part import SpendingGame, SpendingPart
from tests.support.sharing.world import Game, Part, Process, World

STEPS = 100
"""In one run of the machine."""
RUNS = 220
"""At full length: more than 20,000 steps for each kind."""
ORDERS = ("fifo", "lifo", "priority", "fair_round_robin", "fair_share", "fair_share/levels")
USUAL = {("fifo", None), ("priority", 1), ("fair_round_robin", 1), ("fair_share", None), ("fair_share/levels", 1)}
"""Orders and caps of tenants that are tried each time; the others in `make soak`."""

AHEAD = st.sampled_from([0.0, 5000.0, -80.0])
PAUSE = st.sampled_from([0.0, 0.0, 0.0, 0.3, 4.0])
NTH = st.integers(0, 3)


class Machine(RuleBasedStateMachine):
    """Anything that can happen to processes that share a state, in any order."""

    part: type[Part]
    game: Callable[[int], Game]

    @initialize(ahead=st.lists(AHEAD, min_size=1, max_size=3), variant=st.integers(0, 15))
    def begin(self, ahead: list[float], variant: int) -> None:
        self.world = World(type(self).game(variant))
        for one in ahead:
            self.world.join(one)

    def nth(self, nth: int) -> Process:
        return self.world.processes[nth % len(self.world.processes)]

    # -- processes -----------------------------------------------------------------------------------------------------

    def act(self, nth: int, what: str, which: int) -> None:
        """A rule of each kind, like the next one: see `machine_of`."""
        self.world.act(self.nth(nth), what, which)

    def act_often(self, what: str, which: list[int]) -> None:
        """All processes are busy."""
        for nth, one in enumerate(which):
            self.world.act(self.nth(nth), what, one)

    @rule(nth=NTH)
    def turn(self, nth: int) -> None:
        self.world.turn(self.nth(nth))

    @precondition(lambda self: len(self.world.processes) < 4)
    @rule(ahead=AHEAD)
    def join(self, ahead: float) -> None:
        self.world.join(ahead)

    @precondition(lambda self: len(self.world.processes) > 1)
    @rule(nth=NTH)
    def crash(self, nth: int) -> None:
        self.world.crash(self.nth(nth))

    @precondition(lambda self: len(self.world.processes) > 1)
    @rule(nth=NTH)
    def leave(self, nth: int) -> None:
        self.world.leave(self.nth(nth))

    @rule(nth=NTH, knows=st.booleans())
    def lose_lease(self, nth: int, knows: bool) -> None:
        self.world.expire(self.nth(nth))
        if knows:
            self.world.notice(self.nth(nth))

    # -- the store -----------------------------------------------------------------------------------------------------

    @rule(nth=NTH, before=PAUSE, after=PAUSE, how=st.sampled_from(["once", "once", "twice", "conflict"]))
    def run(self, nth: int, before: float, after: float, how: str) -> None:
        self.world.run(self.nth(nth), before=before, after=after, how=how)

    @rule(nth=NTH)
    def answer(self, nth: int) -> None:
        self.world.answer(self.nth(nth))

    @rule(nth=NTH)
    def run_and_answer(self, nth: int) -> None:
        self.world.run(self.nth(nth))
        self.world.answer(self.nth(nth))

    @rule(nth=NTH)
    def cannot_write(self, nth: int) -> None:
        self.world.fail(self.nth(nth))

    @rule(nth=NTH, again=st.booleans())
    def wake(self, nth: int, again: bool) -> None:
        for _ in range(1 + again):
            self.world.changes += 1
            self.world.wake(self.nth(nth))

    @rule(nth=NTH)
    def lose_wake(self, nth: int) -> None:
        self.world.lose_wake(self.nth(nth))

    @rule(nth=NTH)
    def cut_off_or_reconnect(self, nth: int) -> None:
        one = self.nth(nth)
        (self.world.reconnect if one.is_cut_off else self.world.cut_off)(one)

    @precondition(lambda self: self.part.survives_loss)
    @rule()
    def lose_text(self) -> None:
        self.world.lose_text()

    @rule(seconds=st.sampled_from([0.002, 0.01, 0.5, 2.0, 31.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    # -- what holds ----------------------------------------------------------------------------------------------------

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @invariant()
    def no_limit_is_exceeded(self) -> None:
        self.world.game.check(self.world)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.drain()
                self.world.give_all_to_a_newcomer()
            finally:
                self.world.close()


class Kind(NamedTuple):
    """What the machine is run with."""

    part: type[Part]
    game: Callable[[int], Game]


def machine_of(kind: Kind) -> type[Machine]:
    """The machine for one kind."""
    what, which = st.sampled_from(kind.part.actions), st.integers(0, 19)
    rules = {  # several of the same, else most of what happens were accidents
        "act": rule(nth=NTH, what=what, which=which)(Machine.act),
        "act_again": rule(nth=NTH, what=what, which=which)(Machine.act),
        "act_often": rule(what=what, which=st.lists(which, min_size=3, max_size=8))(Machine.act_often),
        "begin_often": rule(what=st.just(kind.part.actions[0]), which=st.lists(which, min_size=3, max_size=8))(
            Machine.act_often
        ),
    }
    name = kind.part.__name__.replace("Part", "Machine")
    return type(name, (Machine,), {"part": kind.part, "game": staticmethod(kind.game), **rules})


KINDS = [
    pytest.param(Kind(SpendingPart, SpendingGame), id="trial"),
    pytest.param(Kind(HealthPart, HealthGame), id="health"),
    pytest.param(Kind(AdaptivePart, AdaptiveGame), id="adaptive"),
    pytest.param(Kind(QuotasPart, partial(QuotasGame, "sliding")), id="quotas-sliding"),
    pytest.param(Kind(QuotasPart, partial(QuotasGame, "bucket")), id="quotas-bucket"),
    *(
        pytest.param(
            Kind(SlotsPart, partial(SlotsGame, order, caps)),
            id=f"slots-{order}".replace("/", "-") + ("-caps" if caps else ""),
            marks=() if (order, caps) in USUAL else pytest.mark.soak,
        )
        for order in ORDERS
        for caps in (None, 1)
    ),
]


@pytest.mark.parametrize("kind", KINDS)
def test_g10_g14_g20_g21_g22_g25_h02_h03_h05_h10_l04_no_order_of_events_breaks_a_shared_state(
    kind: Kind, scale: float
) -> None:
    run_state_machine_as_test(
        machine_of(kind),
        settings=settings(
            max_examples=max(10, int(RUNS * scale**1.2)),
            stateful_step_count=STEPS,
            report_multiple_bugs=False,
        ),
    )
