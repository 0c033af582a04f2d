"""The strategies by which a pool chooses among eligible resources: frozen values, each of which makes pickers.

How a picker keeps its order is in `pickers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headgate.core.checks import is_finite
from headgate.errors import InvalidArgument
from headgate.resources.pickers import (
    GuidedPicker,
    LeastLatency,
    Picker,
    PrimaryBackup,
    RoundRobin,
    Sticky,
    Weighted,
)


@runtime_checkable
class Strategy(Protocol):
    """A way to choose among resources: a value that makes pickers."""

    def picker(self) -> Picker | GuidedPicker:
        """Make a new picker without members."""
        ...


@dataclass(frozen=True, slots=True)
class round_robin:  # noqa: N801 - a value that reads like the verb it is
    """Fewest in flight, then longest unused, then first in the pool."""

    def picker(self) -> Picker:
        """Make a new picker without members."""
        return RoundRobin()


@dataclass(frozen=True, slots=True)
class primary_backup:  # noqa: N801
    """First in the pool; a later one only while all before it cool, are disabled or are at their limit."""

    def picker(self) -> Picker:
        """Make a new picker without members."""
        return PrimaryBackup()


@dataclass(frozen=True, slots=True)
class weighted:  # noqa: N801
    """In proportion to `Resource.weight`, evenly spread: weight 3 gets three calls for each one of weight 1."""

    def picker(self) -> Picker:
        """Make a new picker without members."""
        return Weighted()


@dataclass(frozen=True, slots=True)
class least_latency:  # noqa: N801
    """Of two drawn by chance the one that is likely to answer first: its latency times its uses in flight and this one.

    Its latency is a moving average over `decay` seconds that takes a rise at once. An idle one's fades, so that whoever
    was slow is tried again.
    """

    decay: float = 10.0

    def __post_init__(self) -> None:
        if not is_finite(self.decay) or self.decay <= 0:
            raise InvalidArgument(
                f"decay must be a finite number of seconds > 0, got {self.decay!r}",
                remedy="Pass about as long as a slow spell of a resource lasts, or leave it out.",
            )

    def picker(self) -> GuidedPicker:
        """Make a new picker without members."""
        return LeastLatency(self.decay)


@dataclass(frozen=True, slots=True)
class sticky:  # noqa: N801
    """Calls with the same `affinity=` go to the same resource; while it is not eligible, to the next by hash order.

    The order is the same in every process. Shares are in proportion to `Resource.weight`. Calls without an affinity go
    as in `round_robin`.
    """

    def picker(self) -> GuidedPicker:
        """Make a new picker without members."""
        return Sticky()


NAMED: dict[str, Strategy] = {
    "round_robin": round_robin(),
    "primary_backup": primary_backup(),
    "weighted": weighted(),
    "least_latency": least_latency(),
    "sticky": sticky(),
}


def strategy_of(choice: object) -> Strategy:
    """The strategy of this name, or the strategy itself; InvalidArgument for anything else."""
    if isinstance(choice, str) and choice in NAMED:
        return NAMED[choice]
    if isinstance(choice, Strategy) and not isinstance(choice, type):
        return choice
    called = " (call it: a strategy is a value)" if isinstance(choice, type) else ""
    raise InvalidArgument(
        f"strategy must be one of {', '.join(map(repr, NAMED))} or a Strategy object, got {choice!r}{called}",
        remedy="Pass one of these names, or an object with a picker() method.",
    )
