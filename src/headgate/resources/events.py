"""The events of resource pools. Topics: "resources.health", "resources.usage", "resources.run", "resources.members",
"resources.tokens"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from headgate.core.events import Event
from headgate.core.topics import topic_named
from headgate.resources.model import ResourceStatus, Usage

HEALTH = topic_named("resources.health")
USAGE = topic_named("resources.usage")
RUN = topic_named("resources.run")
MEMBERS = topic_named("resources.members")
TOKENS = topic_named("resources.tokens")

UsageOutcome = Literal["ok", "error", "cooldown", "disable", "retry", "sibling_cancelled", "no_verdict"]
RunOutcome = Literal["ok", "exhausted", "error", "cancelled"]


FROM_ANOTHER = "reported by another process"
"""The reason of what another process found out that shares the health of the pool: its own is not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceEvent(Event):
    """Something that happened in a resource pool."""

    pool: str
    """The name of the pool in which it happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceCooled(ResourceEvent):
    """A cooldown of a resource began, or was extended."""

    name: ClassVar[str] = "resource_cooled"
    topic: ClassVar[str] = HEALTH.name

    resource_id: str
    old_status: ResourceStatus
    seconds: float
    """How long the cooldown lasts from now on."""
    consecutive: int
    """How many cooldowns in a row this is."""
    reason: str | None = None
    usage: Usage | None = None
    only_for: str | None = None
    """The affinity of the calls for which alone it cools down, as text; its status does not change then."""

    @property
    def request_id(self) -> str | None:
        """The request id of the call that caused this; None when a method of the pool did."""
        return None if self.usage is None else self.usage.request_id

    @property
    def from_another_process(self) -> bool:
        """True when another process that shares the health of the pool found it out."""
        return self.reason == FROM_ANOTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDisabled(ResourceEvent):
    """A resource was taken out of use until it is enabled. `usage` is None when `disable` was called."""

    name: ClassVar[str] = "resource_disabled"
    topic: ClassVar[str] = HEALTH.name

    resource_id: str
    old_status: ResourceStatus
    reason: str | None = None
    usage: Usage | None = None

    @property
    def request_id(self) -> str | None:
        """The request id of the call that caused this; None when a method of the pool did."""
        return None if self.usage is None else self.usage.request_id

    @property
    def from_another_process(self) -> bool:
        """True when another process that shares the health of the pool found it out."""
        return self.reason == FROM_ANOTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRecovered(ResourceEvent):
    """The cooldown of a resource is over. Noticed when a call asks for a resource, not before."""

    name: ClassVar[str] = "resource_recovered"
    topic: ClassVar[str] = HEALTH.name

    resource_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceEnabled(ResourceEvent):
    """A resource was declared usable by a call of `enable`."""

    name: ClassVar[str] = "resource_enabled"
    topic: ClassVar[str] = HEALTH.name

    resource_id: str
    old_status: ResourceStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimitChanged(ResourceEvent):
    """An adaptive `max_in_flight` was cut, because the provider refused a call, or has grown."""

    name: ClassVar[str] = "resource_limit_changed"
    topic: ClassVar[str] = HEALTH.name

    resource_id: str
    limit: int
    old_limit: int
    refused_at: int | None = None
    """How many calls were in flight when one was refused; None: the limit has grown."""
    reason: str | None = None
    """Of the refusal."""
    usage: Usage | None = None
    """The refused call; None: the limit has grown, or another process cut it."""

    @property
    def request_id(self) -> str | None:
        """The request id of the call that was refused; None if there was none here."""
        return None if self.usage is None else self.usage.request_id

    @property
    def from_another_process(self) -> bool:
        """True when another process that shares the limit of the pool found it out."""
        return self.reason == FROM_ANOTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcePaused(ResourceEvent):
    """A resource was paused by a call of `pause`: it gets no new calls. Its status does not change."""

    name: ClassVar[str] = "resource_paused"
    topic: ClassVar[str] = HEALTH.name

    resource_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceResumed(ResourceEvent):
    """A paused resource may be used again, because of a call of `resume`."""

    name: ClassVar[str] = "resource_resumed"
    topic: ClassVar[str] = HEALTH.name

    resource_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthUnshared(ResourceEvent):
    """The store by which processes share the health of resources cannot be reached. The pool goes on by itself."""

    name: ClassVar[str] = "health_unshared"
    topic: ClassVar[str] = HEALTH.name

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthShared(ResourceEvent):
    """The store answers again: what processes learned meanwhile is joined."""

    name: ClassVar[str] = "health_shared"
    topic: ClassVar[str] = HEALTH.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceAcquired(ResourceEvent):
    """A call was given a resource."""

    name: ClassVar[str] = "resource_acquired"
    topic: ClassVar[str] = USAGE.name

    usage: Usage

    @property
    def request_id(self) -> str:
        """The id that all events of one call, or of one task of a TaskPool, have in common."""
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
        """The id that all events of one call, or of one task of a TaskPool, have in common."""
        return self.usage.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingCancelled(ResourceEvent):
    """A use was asked to stop, because an older one found the resource overloaded or dead."""

    name: ClassVar[str] = "sibling_cancelled"
    topic: ClassVar[str] = USAGE.name

    usage: Usage

    @property
    def request_id(self) -> str:
        """The id that all events of one call, or of one task of a TaskPool, have in common."""
        return self.usage.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensUsed(ResourceEvent):
    """A call has reported how many tokens it used, or an answer that passed a transport has."""

    name: ClassVar[str] = "tokens_used"
    topic: ClassVar[str] = TOKENS.name

    resource_id: str
    tokens: float
    """In all."""
    input: float
    output: float
    """With `input` less than `tokens` if it is not known which of them were which."""
    tenant: str | None = None
    """Of the task that made the call."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Of that task, as `submit(labels=)` set them."""


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
    """A resource was added to the pool."""

    name: ClassVar[str] = "resource_added"
    topic: ClassVar[str] = MEMBERS.name

    resource_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRemoved(ResourceEvent):
    """A resource was removed from the pool."""

    name: ClassVar[str] = "resource_removed"
    topic: ClassVar[str] = MEMBERS.name

    resource_id: str
