"""What a rotation asks its shell to do. It returns these; it does nothing itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headgate.resources.members import Member, Use, WaitTicket
from headgate.resources.model import ResourceStatus

_NOBODY: Any = None  # a test that writes down what it expects need not name the member


@dataclass(frozen=True, slots=True)
class Cool:
    """A resource began to rest, or rests longer."""

    resource_id: str
    until: float
    seconds: float = field(default=0.0, compare=False)
    """From now on; exactly what was asked for, unless it rests longer already."""
    consecutive: int = field(default=1, compare=False)
    """How many times in a row."""
    old: ResourceStatus = field(default="healthy", compare=False)
    member: Member = field(default=_NOBODY, repr=False, compare=False)
    use: Use | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Disable:
    """A resource is out until it is enabled."""

    resource_id: str
    old: ResourceStatus = field(default="healthy", compare=False)
    member: Member = field(default=_NOBODY, repr=False, compare=False)
    use: Use | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Recover:
    """A cooldown is over."""

    resource_id: str
    member: Member = field(default=_NOBODY, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Enable:
    """Somebody declared it usable."""

    resource_id: str
    old: ResourceStatus = field(default="healthy", compare=False)
    member: Member = field(default=_NOBODY, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Cancel:
    """A younger sibling is doomed: interrupt it."""

    use: Use


@dataclass(frozen=True, slots=True)
class Serve:
    """A waiter was granted the use on its ticket: wake it."""

    ticket: WaitTicket


@dataclass(frozen=True, slots=True)
class Starve:
    """Nothing a waiter could use can come back by itself: tell it."""

    ticket: WaitTicket


Effect = Cool | Disable | Recover | Enable | Cancel | Serve | Starve
Effects = list[Effect]
