"""What a resource pool reports. Topics: "resources.health", "resources.usage", "resources.run", "resources.members"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from headgate.core.events import Event
from headgate.core.topics import topic_named
from headgate.resources.model import ResourceStatus, Usage

HEALTH = topic_named("resources.health")
USAGE = topic_named("resources.usage")
RUN = topic_named("resources.run")
MEMBERS = topic_named("resources.members")

UsageOutcome = Literal["ok", "error", "cooldown", "disable", "retry", "sibling_cancelled", "no_verdict"]
RunOutcome = Literal["ok", "exhausted", "error", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceEvent(Event):
    """Something that happened in a resource pool."""

    pool: str
    """The pool's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceCooled(ResourceEvent):
    """A resource began to rest, or rests longer."""

    name: ClassVar[str] = "resource_cooled"
    topic: ClassVar[str] = HEALTH.name

    resource_id: str
    old_status: ResourceStatus
    seconds: float
    """From now on."""
    consecutive: int
    """How many times in a row."""
    reason: str | None = None
    usage: Usage | None = None

    @property
    def request_id(self) -> str | None:
        """By what all events of the call are known that taught this; None when a person did it."""
        return None if self.usage is None else self.usage.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDisabled(ResourceEvent):
    """A resource is out until it is enabled. `usage` is None when a person did it."""

    name: ClassVar[str] = "resource_disabled"
    topic: ClassVar[str] = HEALTH.name

    resource_id: str
    old_status: ResourceStatus
    reason: str | None = None
    usage: Usage | None = None

    @property
    def request_id(self) -> str | None:
        """By what all events of the call are known that taught this; None when a person did it."""
        return None if self.usage is None else self.usage.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRecovered(ResourceEvent):
    """A cooldown is over. Noticed when somebody asks for a resource, not before."""

    name: ClassVar[str] = "resource_recovered"
    topic: ClassVar[str] = HEALTH.name

    resource_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceEnabled(ResourceEvent):
    """Somebody declared a resource usable."""

    name: ClassVar[str] = "resource_enabled"
    topic: ClassVar[str] = HEALTH.name

    resource_id: str
    old_status: ResourceStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceAcquired(ResourceEvent):
    """A call was given a resource."""

    name: ClassVar[str] = "resource_acquired"
    topic: ClassVar[str] = USAGE.name

    usage: Usage

    @property
    def request_id(self) -> str:
        """By what all events of one call, or of one task of a TaskPool, are known."""
        return self.usage.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceReleased(ResourceEvent):
    """A use of a resource ended."""

    name: ClassVar[str] = "resource_released"
    topic: ClassVar[str] = USAGE.name

    usage: Usage
    outcome: UsageOutcome
    duration: float

    @property
    def request_id(self) -> str:
        """By what all events of one call, or of one task of a TaskPool, are known."""
        return self.usage.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingCancelled(ResourceEvent):
    """A use was asked to stop, because an older one found the resource overloaded or dead."""

    name: ClassVar[str] = "sibling_cancelled"
    topic: ClassVar[str] = USAGE.name

    usage: Usage

    @property
    def request_id(self) -> str:
        """By what all events of one call, or of one task of a TaskPool, are known."""
        return self.usage.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(ResourceEvent):
    """A call of `run`, `stream` or `run_sync` ended."""

    name: ClassVar[str] = "run_finished"
    topic: ClassVar[str] = RUN.name

    request_id: str
    outcome: RunOutcome
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceAdded(ResourceEvent):
    """A resource joined the pool."""

    name: ClassVar[str] = "resource_added"
    topic: ClassVar[str] = MEMBERS.name

    resource_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRemoved(ResourceEvent):
    """A resource left the pool."""

    name: ClassVar[str] = "resource_removed"
    topic: ClassVar[str] = MEMBERS.name

    resource_id: str
