"""A process that shares an adaptive limit, and what must be true of it: a `Part` of the machine in `world`."""

from __future__ import annotations

from typing import ClassVar, cast

from headgate.gate.adaptive import Adaptive
from tests.support.sharing.health_part import NAMES, HealthGame, HealthPart
from tests.support.sharing.world import Part, Process, World

POLICY = Adaptive(start=2, least=1, most=6, pause=0.5)


class AdaptiveGame(HealthGame):
    """Compares what the processes know of the limit, and counts permits."""

    def part(self, process: Process) -> Part:
        return AdaptivePart(self, process)

    def check(self, world: World) -> None:
        held = sum(part.permits for part in _parts(world))
        assert held <= POLICY.most, f"{held} permits, of at most {POLICY.most}: {world.text}"
        for part in _parts(world):
            assert POLICY.least <= part.number <= POLICY.most

    def check_at_rest(self, world: World) -> None:
        parts = _parts(world)
        levels = {part.level for part in parts}
        assert len(levels) <= 1, f"processes have learned {levels}: {world.text}"
        if parts:
            held, used = sum(part.permits for part in parts), sum(part.used for part in parts)
            most = max(parts[0].number, used)
            assert held <= most, (
                f"{held} permits are held, of which {used} are used, of {parts[0].number}: {world.text}"
            )


class AdaptivePart(HealthPart):
    """One process that uses a resource whose limit is found."""

    actions = ("call", "call", "call", "wait", "wait", "wait", "ok", "ok", "ok", "ok", "ended", "cooled")
    limit: ClassVar[int | Adaptive] = POLICY

    @property
    def permits(self) -> int:
        lease = self.rotation.members[NAMES[0]].lease
        return 0 if lease is None else lease.permits

    @property
    def used(self) -> int:
        return len(self.rotation.members[NAMES[0]].uses)

    @property
    def number(self) -> int:
        return self.rotation.members[NAMES[0]].resource.max_in_flight or 0

    @property
    def level(self) -> object:
        adaptive = self.rotation.members[NAMES[0]].sharing.adaptive
        return None if adaptive is None else adaptive.level

    def want_all(self) -> None:
        for _ in range(self.number):
            self.act("wait", 1)


def _parts(world: World) -> list[AdaptivePart]:
    return [cast(AdaptivePart, one.part) for one in world.living()]
