"""A trial kind: an amount that processes spend together and that never comes back. See `sharing.protocol.Kind`.

Each participant is granted parts of it and says how much of them it has spent. What a participant that is gone held
counts as spent. A kind that headgate may have one day needs no more than this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from headgate.sharing.protocol import Turn, mapping, number, row


class Spending(NamedTuple):
    """What a participant says: how much it has spent since it takes part, and how much more it wants to be granted."""

    total: float
    spent: float
    wants: float = 0.0


class Allowed(NamedTuple):
    """What it is told: how much it was granted since it takes part, and what is left for all."""

    granted: float
    left: float


class State:
    def __init__(self, total: float) -> None:
        self.total = total
        self.gone = 0.0
        """What was spent by those that are gone."""
        self.parts: dict[str, tuple[float, float]] = {}
        """Granted and spent, by participant."""

    @property
    def left(self) -> float:
        return self.total - self.gone - sum(granted for granted, _ in self.parts.values())


class SharedBudget:
    format: int = 1
    is_replaceable: bool = True
    is_plain: bool = False

    def begin(self, body: Spending | None) -> State:
        return State(0.0 if body is None else body.total)

    def read(self, found: dict[str, Any]) -> State:
        state = State(number(found.get("total"), 0.0))
        state.gone = number(found.get("gone"), 0.0)
        for who, part in mapping(found.get("parts")).items():
            granted, spent = row(part, 2)
            state.parts[who] = number(granted, 0.0), number(spent, 0.0)
        return state

    def write(self, state: State) -> dict[str, Any]:
        return {"total": state.total, "gone": state.gone, "parts": state.parts}

    def participants(self, state: State) -> Iterable[str]:
        return state.parts

    def drop(self, state: State, who: str, now: float) -> None:
        granted, _ = state.parts.pop(who)
        state.gone += granted

    def step(self, state: State, turn: Turn, body: Spending | None) -> Allowed | None:
        if body is None:
            return None
        before = state.parts.get(turn.me)
        granted, spent = before or (0.0, 0.0)
        if not turn.is_new:
            spent = max(spent, body.spent)
        lacks = max(0.0, (0.0 if turn.is_new else body.spent) + body.wants - granted)
        granted += min(lacks, max(0.0, state.left))
        state.parts[turn.me] = granted, spent
        if state.parts[turn.me] != before:  # else two that look would wake each other for ever
            turn.wakes.update(state.parts)
        return Allowed(granted, state.left)


SHARED_BUDGET: Final = SharedBudget()
