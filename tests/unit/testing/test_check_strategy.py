"""`check_strategy` passes what is right and names what is wrong."""

from __future__ import annotations

import random
from collections.abc import Container

import pytest

from headgate.resources import GuidedPicker, Member, Occasion, Picker, least_latency
from headgate.testing import check_strategy


class Honest:
    """The newest first, by a plain list."""

    def __init__(self) -> None:
        self.seats: list[Member] = []

    def offer(self, seat: Member) -> None:
        if seat not in self.seats:
            self.seats.append(seat)

    def withdraw(self, seat: Member) -> None:
        if seat in self.seats:
            self.seats.remove(seat)

    def pick(self, skip: Container[str]) -> Member | None:
        fit = [seat for seat in self.seats if seat.is_open and seat.resource.resource_id not in skip]
        return fit[-1] if fit else None


class Greedy(Honest):
    def pick(self, skip: Container[str]) -> Member | None:
        return next((seat for seat in self.seats if seat.resource.resource_id not in skip), None)


class Lazy(Honest):
    def pick(self, skip: Container[str]) -> Member | None:
        return None


class Deaf(Honest):
    def pick(self, skip: Container[str]) -> Member | None:
        return super().pick(())


class Hoarder(Honest):
    def withdraw(self, seat: Member) -> None:
        pass


class Guided:
    """Anybody who is open, by chance; those that took long are not asked twice."""

    def __init__(self) -> None:
        self.seats: list[Member] = []
        self.learned: list[tuple[float, bool]] = []

    def offer(self, seat: Member) -> None:
        if seat not in self.seats:
            self.seats.append(seat)

    def withdraw(self, seat: Member) -> None:
        self.seats.remove(seat)

    def fit(self, skip: Container[str]) -> list[Member]:
        return [seat for seat in self.seats if seat.is_open and seat.resource.resource_id not in skip]

    def pick_for(self, skip: Container[str], occasion: Occasion) -> Member | None:
        fit = self.fit(skip)
        return fit[int(occasion.chance() * len(fit))] if fit else None

    def learn(self, seat: Member, seconds: float, now: float, well: bool) -> None:
        assert seat in self.seats
        assert 0 <= seconds <= now
        self.learned.append((seconds, well))


class Dicing(Guided):
    def pick_for(self, skip: Container[str], occasion: Occasion) -> Member | None:
        fit = self.fit(skip)
        return random.choice(fit) if fit else None


class Reckless(Guided):
    def pick_for(self, skip: Container[str], occasion: Occasion) -> Member | None:
        return self.seats[int(occasion.chance() * len(self.seats))] if self.seats else None


class Halfway(Guided):
    offer = None  # type: ignore[assignment]


class OfGuided:
    def __init__(self, kind: type[Guided]) -> None:
        self.kind = kind
        self.made: list[Guided] = []

    def picker(self) -> GuidedPicker:
        self.made.append(self.kind())
        return self.made[-1]


class Of:
    def __init__(self, kind: type[Honest]) -> None:
        self.kind = kind

    def picker(self) -> Picker:
        return self.kind()


class Shared(Of):
    def __init__(self) -> None:
        self.one = Honest()

    def picker(self) -> Picker:
        return self.one


@pytest.mark.parametrize(
    "strategy",
    [
        "round_robin",
        "primary_backup",
        "weighted",
        "least_latency",
        "sticky",
        least_latency(0.5),
        Of(Honest),
        OfGuided(Guided),
    ],
)
def test_good_strategies_pass(strategy: Of | OfGuided | least_latency | str, scale: float) -> None:
    for seed in range(max(2, int(20 * scale))):
        check_strategy(strategy, seed=seed)


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        (Of(Greedy), "not open"),
        (Of(Lazy), "gave nothing"),
        (Of(Deaf), "to be skipped"),
        (Of(Hoarder), "withdrawn"),
        (Shared(), "a new picker each time"),
        (OfGuided(Dicing), "draw from occasion.chance"),
        (OfGuided(Reckless), "pick_for.. gave .*, which (is not open|was to be skipped)"),
        (OfGuided(Halfway), "needs a method offer"),
    ],
)
def test_bad_ones_are_told_why(strategy: Of | OfGuided, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_strategy(strategy)


def test_one_that_learns_is_told_of_every_end() -> None:
    strategy = OfGuided(Guided)
    check_strategy(strategy)
    learned = [one for picker in strategy.made for one in picker.learned]
    assert {well for _, well in learned} == {True, False}
    assert any(seconds > 0 for seconds, _ in learned)
