"""The trial kind in the machine: what is spent together is never more than there is."""

from __future__ import annotations

from headgate.sharing.states import ClockOffset
from tests.support.sharing.spending import SHARED_BUDGET, Allowed, Spending
from tests.support.sharing.world import Game, Part, Process, World

TOTAL = 20.0


class SpendingGame(Game):
    """Counts what was really spent."""

    def __init__(self, variant: int) -> None:
        self.spent = 0.0

    def part(self, process: Process) -> Part:
        return SpendingPart(self, process)

    def check(self, world: World) -> None:
        held = sum(one.part.granted - one.part.spent for one in world.living())
        assert self.spent + held <= TOTAL, f"{self.spent:g} spent and {held:g} held of {TOTAL:g}"

    def check_at_rest(self, world: World) -> None:
        parts = [one.part for one in world.processes]
        assert all(not part.wants or part.left == 0.0 for part in parts), "it waits for what is there"


class SpendingPart(Part):
    """One process that spends."""

    actions = ("want", "want", "spend", "spend")
    survives_loss = False  # nobody says again what those that are gone have spent

    def __init__(self, game: SpendingGame, process: Process) -> None:
        self.game, self.process = game, process
        self.granted = self.spent = self.wants = self.left = 0.0
        self.link = process.link(SHARED_BUDGET, self)

    def act(self, what: str, which: int) -> None:
        if what == "want":
            self.wants = float(which)
            self.link.send()
        elif self.granted - self.spent >= 1.0 and not self.process.is_gone:
            self.spent += 1.0
            self.game.spent += 1.0

    @property
    def waits(self) -> bool:
        return self.wants > 0.0 and self.left > 0.0

    def want_all(self) -> None:
        self.wants = TOTAL
        self.link.send()

    def has_all(self) -> bool:
        return self.left == 0.0

    def message(self, now: float, *, looks: bool) -> Spending | None:
        return Spending(TOTAL, self.spent, self.wants) if looks or self.wants else None

    def take(self, said: Spending, told: Allowed, offset: ClockOffset, now: float, *, is_current: bool) -> bool:
        if is_current:
            self.granted, self.left = told.granted, told.left
            if said.wants == self.wants and told.granted >= said.spent + said.wants:
                self.wants = 0.0
        return False

    def forget(self, now: float, *, forked: bool = False) -> None:
        self.granted = self.spent = 0.0
