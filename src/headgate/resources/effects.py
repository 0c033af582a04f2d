"""The effects that a rotation returns, for the engine to carry out.

A rotation always names the `member`. It may be left out so that a test can write down the effects that it expects.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headgate.core.checks import Affinity
from headgate.resources.members import Member, Use, WaitTicket
from headgate.resources.model import ResourceStatus


@dataclass(frozen=True, slots=True)
class Cool:
    """A cooldown began, or was extended."""

    resource_id: str
    until: float
    seconds: float = field(default=0.0, compare=False)
    """From now on; exactly what was asked for, unless the cooldown was longer already."""
    consecutive: int = field(default=1, compare=False)
    """How many cooldowns in a row this is."""
    old: ResourceStatus = field(default="healthy", compare=False)
    member: Member | None = field(default=None, repr=False, compare=False)
    use: Use | None = field(default=None, repr=False, compare=False)
    reason: str | None = field(default=None, compare=False)
    """Why, where no signal says it."""
    affinity: Affinity | None = None
    """Of the calls for which alone it cools down; None: for all."""


@dataclass(frozen=True, slots=True)
class Disable:
    """A resource was taken out of use until it is enabled."""

    resource_id: str
    old: ResourceStatus = field(default="healthy", compare=False)
    member: Member | None = field(default=None, repr=False, compare=False)
    use: Use | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Recover:
    """The cooldown of a resource is over."""

    resource_id: str
    member: Member | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Enable:
    """A resource was declared usable by a call of `enable`."""

    resource_id: str
    old: ResourceStatus = field(default="healthy", compare=False)
    member: Member | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Limit:
    """An adaptive limit has changed."""

    resource_id: str
    limit: int
    old: int = field(default=0, compare=False)
    refused_at: int | None = field(default=None, compare=False)
    """How many calls were in flight when the provider refused one; None: it has grown."""
    member: Member | None = field(default=None, repr=False, compare=False)
    use: Use | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Pause:
    """A resource was paused or resumed by hand. Its status is as it was."""

    resource_id: str
    paused: bool = True
    member: Member | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Tell:
    """Something is to be told to other processes that users are not told of: a count was cleared, a permit is free."""

    member: Member


@dataclass(frozen=True, slots=True)
class Cancel:
    """A younger use of a failed resource is to be interrupted."""

    use: Use


@dataclass(frozen=True, slots=True)
class Serve:
    """A waiter was granted the use on its ticket: wake it."""

    ticket: WaitTicket


@dataclass(frozen=True, slots=True)
class Starve:
    """A waiter is to be told that nothing it could use will come free."""

    ticket: WaitTicket


@dataclass(frozen=True, slots=True)
class Watch:
    """The time has changed at which something opens that a waiter may wait for."""

    ticket: WaitTicket


Effect = Cool | Disable | Recover | Enable | Limit | Pause | Tell | Cancel | Serve | Starve | Watch
Effects = list[Effect]
