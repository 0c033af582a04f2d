"""`check_strategy` passes what is right and names what is wrong."""

from __future__ import annotations

from collections.abc import Container

import pytest

from headgate.resources import Picker, Seat
from headgate.testing import check_strategy


class Honest:
    """The newest first, by a plain list."""

    def __init__(self) -> None:
        self.seats: list[Seat] = []

    def offer(self, seat: Seat) -> None:
        if seat not in self.seats:
            self.seats.append(seat)

    def withdraw(self, seat: Seat) -> None:
        if seat in self.seats:
            self.seats.remove(seat)

    def pick(self, skip: Container[str]) -> Seat | None:
        fit = [seat for seat in self.seats if seat.is_open and seat.resource.resource_id not in skip]
        return fit[-1] if fit else None


class Greedy(Honest):
    def pick(self, skip: Container[str]) -> Seat | None:
        return next((seat for seat in self.seats if seat.resource.resource_id not in skip), None)


class Lazy(Honest):
    def pick(self, skip: Container[str]) -> Seat | None:
        return None


class Deaf(Honest):
    def pick(self, skip: Container[str]) -> Seat | None:
        return super().pick(())


class Hoarder(Honest):
    def withdraw(self, seat: Seat) -> None:
        pass


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


@pytest.mark.parametrize("strategy", ["round_robin", "primary_backup", "weighted", Of(Honest)])
def test_good_strategies_pass(strategy: Of | str, scale: float) -> None:
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
    ],
)
def test_bad_ones_are_told_why(strategy: Of, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_strategy(strategy)
