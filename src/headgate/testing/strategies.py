"""Does a strategy keep its contract? For strategies of your own."""

from __future__ import annotations

import random
from collections.abc import Container

from headgate.resources.model import Resource
from headgate.resources.rotation import Rotation
from headgate.resources.seats import Flight, Seat, Want
from headgate.resources.strategies import Picker, Strategy, strategy_of


def check_strategy(strategy: Strategy | str, *, seed: int = 0, steps: int = 2000) -> None:
    """Drive a pool with it at random; AssertionError at the first pick that breaks the contract.

    A picker names an open seat that is not skipped, names one whenever there is one, forgets what is withdrawn, and
    shares nothing with another picker of the same strategy.
    """
    drive = _Drive(_Watched(strategy_of(strategy)), random.Random(seed))
    for step in range(steps):
        drive.step(float(step))


class _Drive:
    """Random traffic on a rotation with limits, tags, cooldowns and members that come and go."""

    def __init__(self, strategy: _Watched, chance: random.Random) -> None:
        self.chance = chance
        self.members = [self.resource(f"r{number}") for number in range(6)]
        self.rotation = Rotation(self.members, strategy=strategy, cooldown_table=(3.0, 9.0))
        self.flights: list[Flight] = []
        self.made = len(self.members)

    def resource(self, name: str) -> Resource[None]:
        limit = self.chance.choice([None, 1, 2, 3])
        tags = [tag for tag in ("x", "y") if self.chance.random() < 0.5]
        return Resource(name, None, limit, tags=tags, weight=self.chance.choice([0.5, 1.0, 4.0]))

    def step(self, now: float) -> None:
        """One thing that happens to a pool."""
        rotation, chance = self.rotation, self.chance
        if rotation.due(now):
            rotation.advance(now)
        deed = chance.random()
        if deed < 0.5 or not self.flights:
            tags = frozenset(tag for tag in ("x", "y") if chance.random() < 0.2)
            skip = frozenset(name for name in rotation.seats if chance.random() < 0.15)
            if flight := rotation.acquire(now, Want(tags, skip)):
                self.flights.append(flight)
        elif deed < 0.94:
            flight = self.flights.pop(chance.randrange(len(self.flights)))
            if deed < 0.85:
                rotation.ok(flight, now)
            else:
                rotation.cooled(flight, now=now)
        elif deed < 0.97 and len(rotation.seats) > 2:
            rotation.remove(chance.choice(list(rotation.seats)))
        else:
            self.made += 1
            rotation.add(self.resource(f"r{self.made}"), now)


class _Watched:
    """A strategy whose pickers are checked at every pick."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def picker(self) -> Picker:
        picker = self._strategy.picker()
        for method in ("offer", "withdraw", "pick"):
            assert callable(getattr(picker, method, None)), f"a picker needs a method {method}(), {picker!r} has none"
        assert picker is not self._strategy.picker(), "picker() must make a new picker each time: pools would share it"
        return _WatchedPicker(picker)


class _WatchedPicker:
    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._seats: dict[int, Seat] = {}

    def offer(self, seat: Seat) -> None:
        self._seats[id(seat)] = seat
        self._picker.offer(seat)

    def withdraw(self, seat: Seat) -> None:
        self._seats.pop(id(seat), None)
        self._picker.withdraw(seat)

    def pick(self, skip: Container[str]) -> Seat | None:
        could = [s for s in self._seats.values() if s.is_open and s.resource.resource_id not in skip]
        seat = self._picker.pick(skip)
        if seat is None:
            assert not could, f"pick() gave nothing, but {could[0].resource!r} is open"
            return None
        name = seat.resource.resource_id
        assert id(seat) in self._seats, f"pick() gave {name!r}, which was withdrawn or never offered"
        assert seat.is_open, f"pick() gave {name!r}, which is not open: {seat.resource!r}"
        assert name not in skip, f"pick() gave {name!r}, which was to be skipped"
        return seat
