"""A check that a strategy keeps its contract, for strategies of your own."""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from typing import cast

from headgate.resources.members import Member, Requirement, Use
from headgate.resources.model import Resource
from headgate.resources.pickers import GuidedPicker, Learner, Occasion, Picker
from headgate.resources.rotation import Rotation
from headgate.resources.strategies import Strategy, strategy_of


def check_strategy(strategy: Strategy | str, *, seed: int = 0, steps: int = 2000) -> None:
    """Drive a pool with it at random; AssertionError at the first pick that breaks the contract.

    A picker names an open member that is not skipped, names one whenever there is one, forgets what is withdrawn, and
    shares nothing with another picker of the same strategy. One with `pick_for` takes time and chance from what it is
    given: the same calls with the same numbers drawn lead to the same picks.
    """
    chosen = strategy_of(strategy)
    picks = _picks(chosen, seed, steps)
    if hasattr(chosen.picker(), "pick_for"):
        again = _picks(chosen, seed, steps)
        for step, (one, other) in enumerate(zip(picks, again, strict=True)):
            assert one == other, (
                f"pick_for() gave {one!r} and, after the same calls and draws, {other!r} at step {step}: "
                "draw from occasion.chance, take time from occasion.now, and share nothing between pickers"
            )


def _picks(strategy: Strategy, seed: int, steps: int) -> list[str | None]:
    drive = _Drive(_Watched(strategy), random.Random(seed))
    return [drive.step(step / 4) for step in range(steps)]


class _Drive:
    """Random traffic on a rotation with limits, tags, cooldowns and members that come and go."""

    def __init__(self, strategy: _Watched, chance: random.Random) -> None:
        self.chance = chance
        self.members = [self.resource(f"r{number}") for number in range(6)]
        draws = random.Random(chance.random())  # its own, so that a picker that draws more changes nothing else
        self.rotation = Rotation(self.members, strategy=strategy, cooldown_table=(1.0, 3.0), chance=draws.random)
        self.uses: list[Use] = []
        self.made = len(self.members)

    def resource(self, name: str) -> Resource[None]:
        limit = self.chance.choice([None, 1, 2, 3])
        tags = [tag for tag in ("x", "y") if self.chance.random() < 0.5]
        return Resource(name, None, limit, tags=tags, weight=self.chance.choice([0.5, 1.0, 4.0]))

    def step(self, now: float) -> str | None:
        """Do one random thing to the rotation; return the id of the resource that was picked, if any."""
        rotation, chance = self.rotation, self.chance
        if rotation.due(now):
            rotation.advance(now)
        deed = chance.random()
        if deed < 0.5 or not self.uses:
            tags = frozenset(tag for tag in ("x", "y") if chance.random() < 0.2)
            skip = frozenset(name for name in rotation.members if chance.random() < 0.15)
            affinity = chance.choice([None, "ann", 7, b"bob", ("acme", "ann")])
            if use := rotation.acquire(now, Requirement(tags, skip), (), affinity):
                self.uses.append(use)
                return use.member.resource.resource_id
        elif deed < 0.94:
            use = self.uses.pop(chance.randrange(len(self.uses)))
            if deed < 0.8:
                rotation.ok(use, now)
            elif deed < 0.85:
                rotation.ended(use, now)
            else:
                rotation.cooled(use, now=now)
        elif deed < 0.97 and len(rotation.members) > 2:
            rotation.remove(chance.choice(list(rotation.members)))
        else:
            self.made += 1
            rotation.add(self.resource(f"r{self.made}"), now)
        return None


class _Watched:
    """A strategy whose pickers are checked at every pick."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def picker(self) -> Picker | GuidedPicker:
        picker = self._strategy.picker()
        guided = hasattr(picker, "pick_for")
        for method in ("offer", "withdraw", "pick_for" if guided else "pick"):
            assert callable(getattr(picker, method, None)), f"a picker needs a method {method}(), {picker!r} has none"
        assert picker is not self._strategy.picker(), "picker() must make a new picker each time: pools would share it"
        watched = _WatchedGuidedPicker(picker) if guided else _WatchedPicker(picker)
        if isinstance(picker, Learner):
            watched.learn = picker.learn
        return watched


class _Watching:
    """The checks that both kinds of pickers have in common."""

    learn: Callable[[Member, float, float, bool], None]
    """Only of those that learn: a rotation looks whether it is there."""

    def __init__(self, picker: Picker | GuidedPicker) -> None:
        self._picker = picker
        self._members: dict[int, Member] = {}

    def offer(self, member: Member) -> None:
        self._members[id(member)] = member
        self._picker.offer(member)

    def withdraw(self, member: Member) -> None:
        self._members.pop(id(member), None)
        self._picker.withdraw(member)

    def checked(self, method: str, skip: Container[str], *occasion: Occasion) -> Member | None:
        """Return what the picker's method gives, after checking that it keeps the contract."""
        could = [s for s in self._members.values() if s.is_open and s.resource.resource_id not in skip]
        member = cast("Member | None", getattr(self._picker, method)(skip, *occasion))
        if member is None:
            assert not could, f"{method}() gave nothing, but {could[0].resource!r} is open"
            return None
        name = member.resource.resource_id
        assert id(member) in self._members, f"{method}() gave {name!r}, which was withdrawn or never offered"
        assert member.is_open, f"{method}() gave {name!r}, which is not open: {member.resource!r}"
        assert name not in skip, f"{method}() gave {name!r}, which was to be skipped"
        return member


class _WatchedPicker(_Watching):
    def pick(self, skip: Container[str]) -> Member | None:
        return self.checked("pick", skip)


class _WatchedGuidedPicker(_Watching):
    def pick_for(self, skip: Container[str], occasion: Occasion) -> Member | None:
        return self.checked("pick_for", skip, occasion)
