"""The values that users see: a resource, one use of it, snapshots and statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    NotRequired,
    SupportsIndex,
    TypedDict,
    TypeVar,
    cast,
    get_args,
)

from headgate.core.checks import (
    checked_id,
    checked_names,
    checked_number,
    checked_seconds,
    named_options,
)
from headgate.core.lessons import learned_elsewhere, rest_elsewhere, spent_elsewhere
from headgate.core.redaction import learn, meet, redact
from headgate.core.views import AdaptiveStats
from headgate.core.weakrefs import WeakList
from headgate.errors import InvalidArgument, InvalidType
from headgate.gate.adaptive import Adaptive, AdaptiveLimit, MaxInFlight, checked_max_in_flight
from headgate.resources.accounts import Account, account_of
from headgate.resources.costs import spent_of
from headgate.resources.http_status import headers_of, status_of
from headgate.resources.quota import AnyQuota, QuotaSetting, as_given, checked_group, checked_quota
from headgate.resources.rate_limits import rate_limit_headers
from headgate.resources.signals import Signal

if TYPE_CHECKING:
    from headgate.core.checks import Affinity
    from headgate.resources.affinity_cooldowns import AffinityCooldowns
    from headgate.resources.engine import Engine
    from headgate.resources.members import Member, Use

T = TypeVar("T")

ResourceStatus = Literal["healthy", "cooling_down", "disabled"]
UsageStatus = Literal["in_flight", "done", "cancelled"]

RESOURCE_STATUSES: Final[tuple[ResourceStatus, ...]] = get_args(ResourceStatus)


class Sharing:
    """What all pools that hold one resource keep about it together; only pools use it, with their lock held."""

    __slots__ = (
        "__weakref__",
        "account",
        "adaptive",
        "affinity_cooldowns",
        "enables",
        "is_brief",
        "members",
        "outage",
        "outage_at",
        "paused",
        "proofs",
        "proved_at",
        "rest",
        "uses",
    )

    def __init__(self) -> None:
        self.uses: dict[int, Use] = {}
        """Uses that have not ended, by acquisition order. The same dict as long as the resource lives."""
        self.outage: int = 0
        """The newest acquisition when the last cooldown began; uses up to this one belong to the same outage."""
        self.outage_at: float = 0.0
        """When the last cooldown began. Only other processes are told by it."""
        self.proofs: int = 0
        """How many successes cleared a cooldown or its counter."""
        self.proved_at: float = 0.0
        """When the use began that was the last of these."""
        self.enables: int = 0
        """How often it was enabled by hand."""
        self.is_brief: bool = False
        """Is its cooldown the brief rest of an adaptive limit, after which there is nothing to probe?"""
        self.paused: bool = False
        """Was it paused by hand? Its health goes on as if it were not."""
        self.rest: tuple[float, str | None] | None = None
        """Seconds and reason of the rest that begins when a use ends, if an operation asked for one."""
        self.account: Account | None = None
        """What may still be used of its quota; None: it has no quota."""
        self.adaptive: AdaptiveLimit | None = None
        """What calls have taught about its limit, if that is adaptive."""
        self.affinity_cooldowns: AffinityCooldowns | None = None
        """For which affinities it cools down, or did lately; None: for none."""
        self.members: WeakList[Member] = WeakList()
        """Its memberships of pools; a pool that is dropped takes its own along."""

    @property
    def adapts(self) -> AdaptiveLimit | None:
        """Its adaptive limit, if calls decide it now. Where a quota is known, the quota decides."""
        return None if self.account is not None and self.account.is_known else self.adaptive

    def ask_rest(self, seconds: float, reason: str | None) -> None:
        """Note a rest that begins when a use ends. The longest that was asked for counts."""
        if seconds > 0 and (self.rest is None or self.rest[0] <= seconds):
            self.rest = seconds, reason
            for member in self.members:
                member.plain = False


class Resource(Generic[T]):
    """Something scarce: an API key, a proxy, a GPU. Pools choose it, cool it down and disable it; its `value` is yours.

    Two pools may hold the same Resource: its health, what is in flight and its limit are shared between them.
    `status`, `cooldown_until`, `last_acquired_at` and `consecutive_cooldown` are kept by the pools; read them, do not
    set them. The times are monotonic readings that mean nothing outside this process. `value` appears in no repr, log
    or event: text that contains it shows the id instead.
    """

    __slots__ = (
        "__weakref__",
        "_max_in_flight",
        "_value",
        "consecutive_cooldown",
        "cooldown_until",
        "last_acquired_at",
        "limit",
        "resource_id",
        "sharing",
        "status",
        "tags",
        "weight",
    )

    @named_options
    def __init__(
        self,
        resource_id: str,
        value: T,
        max_in_flight: MaxInFlight | None = None,
        status: ResourceStatus = "healthy",
        cooldown_until: float = 0.0,
        last_acquired_at: float = 0.0,
        consecutive_cooldown: int = 0,
        *,
        tags: Iterable[str] = (),
        weight: float = 1.0,
        quota: AnyQuota | None = None,
        quota_group: str | None = None,
    ) -> None:
        """`max_in_flight` limits the uses at a time: a number, or "adaptive" or an `Adaptive` to find the number.

        `quota` limits how often it is used: a `Quota`, a list of quotas that hold at once, or "learn" to go by what
        the headers of answers say.

        `quota` limits how often it is used: a `Quota`, or "learn" to go by what the headers of answers say.
        Resources with the same `quota_group` share one quota, in all pools of this process.
        """
        self.resource_id: str = checked_id(resource_id)
        self._value = value
        self.limit: int | None
        """Internal: how many uses this process may have at a time: `max_in_flight`, less what other processes hold."""
        self.sharing: Sharing = Sharing()
        """Internal: what the pools that hold this resource keep about it together."""
        self.max_in_flight = max_in_flight
        if status not in RESOURCE_STATUSES:
            raise InvalidArgument(
                f"status must be one of {', '.join(RESOURCE_STATUSES)}, got {status!r}",
                remedy="Leave it out: pools keep it.",
            )
        self.status: ResourceStatus = status
        self.cooldown_until: float = checked_number("cooldown_until", cooldown_until)
        self.last_acquired_at: float = checked_number("last_acquired_at", last_acquired_at)
        if type(consecutive_cooldown) is not int or consecutive_cooldown < 0:
            raise InvalidArgument(f"consecutive_cooldown must be a whole number >= 0, got {consecutive_cooldown!r}")
        self.consecutive_cooldown: int = consecutive_cooldown
        self.tags: frozenset[str] = checked_names("tags", tags)
        self.weight: float = checked_number("weight", weight)
        if self.weight <= 0:
            raise InvalidArgument(f"weight must be > 0, got {weight!r}")
        set_account(self, account_of(checked_quota(quota), checked_group(quota_group)))

    @property
    def value(self) -> T:
        """The key, proxy or GPU itself. Pools pass it to operations and never show it."""
        return self._value

    @value.setter
    def value(self, value: T) -> None:
        self._value = value
        sharing = getattr(self, "sharing", None)  # not there yet while a copy is being made
        if sharing is not None and sharing.members:
            hide_value(self)

    @property
    def max_in_flight(self) -> int | None:
        """How many uses there may be at a time, also if the limit is adaptive; None: as many as there are calls."""
        return self._max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, limit: MaxInFlight | None) -> None:
        checked = checked_max_in_flight(limit)
        sharing: Sharing | None = getattr(self, "sharing", None)  # not there yet while a copy is being made
        self._max_in_flight: int | None = checked if not isinstance(checked, Adaptive) else checked.start
        if sharing is not None:
            _set_adaptive(sharing, checked)
            update_number(self)
        update_limit(self)

    @property
    def adaptive(self) -> Adaptive | None:
        """The rule by which `max_in_flight` follows what the provider takes; None: it is a number, or there is none."""
        limit = self.sharing.adaptive
        return None if limit is None else limit.policy

    @property
    def quota(self) -> AnyQuota | None:
        """How often it may be used: a `Quota` or several, "learn", or None."""
        account = self.sharing.account
        return None if account is None else as_given(account.quota)

    @property
    def quota_group(self) -> str | None:
        """The name that resources have in common which share one quota."""
        account = self.sharing.account
        return None if account is None else account.group

    def __repr__(self) -> str:
        limit = "" if self.max_in_flight is None else f", max_in_flight={self.max_in_flight}"
        tags = f", tags={sorted(self.tags)}" if self.tags else ""
        return f"<Resource {self.resource_id!r} {self.status}, {len(self.sharing.uses)} in flight{limit}{tags}>"

    def rest(self, seconds: float, reason: str | None = None) -> None:
        """Let the resource cool down for so many seconds after this call. The call goes on, and its result counts.

        For operations: an answer that says how much of a quota is left, or a site that wants pauses. Cancels nothing.
        If several calls use the resource, it rests from the end of the first of them on. On a worker it goes back with
        the answer.
        """
        seconds = checked_seconds("seconds of rest() must be finite and >= 0", seconds)
        owner = self._owner()
        if owner is not None:
            owner.ask_rest(self, seconds, reason)
        else:
            rest_elsewhere(self.resource_id, seconds, reason)

    def spent(self, tokens: float | None = None, *, input: float | None = None, output: float | None = None) -> None:
        """Report how many tokens this call has really used, in place of the `cost` that was reserved for it.

        Pass the total, or `input` and `output` if its quota counts them separately: a total alone counts in full as
        both. For operations. Called several times, the numbers add up. Without a quota only metrics show them. On a
        worker the numbers go back with the answer.
        """
        spent = spent_of(tokens, input, output)
        owner = self._owner()
        if owner is not None:
            owner.spent(self, spent)
        else:
            spent_elsewhere(self.resource_id, *spent)

    def learn(self, answer: object) -> None:
        """Read the rate-limit headers of an answer: a response of any HTTP library, an error, or the headers.

        For operations on a resource with ``quota="learn"`` that return something else than the response. What cannot
        be read is passed over. On a worker the headers go back with the answer.
        """
        owner = self._owner()
        if owner is not None:
            owner.heard(self, answer)
        elif headers := rate_limit_headers(answer if (found := headers_of(answer)) is None else found):
            learned_elsewhere(self.resource_id, status_of(answer), headers)

    def _owner(self) -> Engine[Any] | None:
        """The engine of a pool that has this resource; None for a copy, as a worker has it."""
        return next((one.rotation.owner for one in self.sharing.members if one.rotation.owner is not None), None)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        # One goes along with every task that runs on a worker: a few values in a row, not a mapping with their names.
        if type(self) is not Resource:
            return super().__reduce_ex__(protocol)
        fields = (self.resource_id, self._value, self._max_in_flight)
        if self.status != "healthy" or self.consecutive_cooldown or self.cooldown_until:
            health = (self.status, self.cooldown_until, self.consecutive_cooldown)
            return _arrived, (*fields, self.tags, self.weight, *health)
        return _arrived, fields if not self.tags and self.weight == 1.0 else (*fields, self.tags, self.weight)

    def __getstate__(self) -> dict[str, Any]:
        # What is in flight belongs to this process and stays here.
        names = ("value", *_KEPT)
        fields = {name: getattr(self, name) for name in names}
        return {**getattr(self, "__dict__", {}), **fields}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.sharing = Sharing()
        meet(self.resource_id, self._value)

    @classmethod
    def __agent_notes__(cls) -> str:
        """Notes for coding agents (`python -m agent_readable headgate.Resource`)."""
        return (
            "Make one per key, proxy or GPU and pass them to `headgate.ResourcePool`. Inside an operation read "
            "`value` and `resource_id`; treat every other field as read-only, pools keep them. `max_in_flight=1` makes "
            "it exclusive, None unlimited. Never log `value`."
        )


_KEPT = tuple(  # in the order of their names, as always: releases read each other's pickles
    sorted({*Resource.__slots__, "max_in_flight"} - {"__weakref__", "_max_in_flight", "_value", "limit", "sharing"})
)


def hide_value(resource: Resource[Any]) -> None:
    """Replace the resource's value by its id wherever text is redacted, because a pool holds the resource now."""
    learn(resource.resource_id, resource.value, resource)


def update_limit(resource: Resource[Any]) -> None:
    """Set `limit` from `max_in_flight` and from the permits that pools lease from a shared store."""
    limit = resource.max_in_flight
    sharing: Sharing | None = getattr(resource, "sharing", None)  # not there yet while it is being made
    if limit is not None and sharing is not None:
        leases = (member.lease for member in sharing.members)
        limit = min(limit, *(lease.usable for lease in leases if lease is not None), limit)
    resource.limit = limit


def update_number(resource: Resource[Any]) -> bool:
    """Set the current number of an adaptive limit. True: it has changed."""
    adaptive = resource.sharing.adaptive
    if adaptive is None:
        return False
    before = resource.max_in_flight
    resource._max_in_flight = adaptive.policy.most if resource.sharing.adapts is None else adaptive.number
    update_limit(resource)
    return resource.max_in_flight != before


def _set_adaptive(sharing: Sharing, setting: int | Adaptive | None) -> None:
    """Let a limit be adaptive or not. What is known is kept under other bounds."""
    if not isinstance(setting, Adaptive):
        sharing.adaptive = None
    elif sharing.adaptive is not None:
        sharing.adaptive.policy = setting
    else:
        sharing.adaptive = AdaptiveLimit(setting)
        for use in sharing.uses.values():
            use.level = min(use.level, -1) if use.level else 0  # it began under another limit
    for member in sharing.members:
        member.plain = False


def limit_of(resource: Resource[Any]) -> int | Adaptive | None:
    """Return `max_in_flight` as it was set."""
    return resource.adaptive or resource.max_in_flight


def fields_of(resource: Resource[Any]) -> tuple[object, ...]:
    """Return the fields that `reconcile` may change of a resource that stays."""
    return limit_of(resource), resource.tags, resource.weight, resource.quota, resource.quota_group


def set_account(resource: Resource[Any], account: Account | None) -> None:
    """Let a resource have this account, and no other."""
    sharing = resource.sharing
    if sharing.account is not None:
        sharing.account.sharings.remove(sharing)
    sharing.account = account
    if account is not None:
        account.sharings.append(sharing)
    update_number(resource)


_NO_TAGS: frozenset[str] = frozenset()


def _arrived(
    resource_id: str,
    value: T,
    max_in_flight: int | None = None,
    tags: frozenset[str] = _NO_TAGS,
    weight: float = 1.0,
    status: ResourceStatus = "healthy",
    cooldown_until: float = 0.0,
    consecutive_cooldown: int = 0,
) -> Resource[T]:
    """Make a copy of a resource, usually of another process, where its fields were checked."""
    resource: Resource[T] = object.__new__(Resource)
    resource.resource_id = resource_id
    resource.value = value
    resource._max_in_flight = resource.limit = max_in_flight
    resource.tags = tags
    resource.weight = weight
    resource.status = status
    resource.cooldown_until = cooldown_until
    resource.consecutive_cooldown = consecutive_cooldown
    resource.last_acquired_at = 0.0
    resource.sharing = Sharing()
    meet(resource_id, value)
    return resource


@dataclass(frozen=True, slots=True)
class Usage:
    """One use of a resource, as events show it."""

    id: int
    resource_id: str
    request_id: str
    status: UsageStatus
    acquired_at: float
    """When the use began, as a reading of the monotonic clock."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)


class WindowSnapshot(TypedDict):
    """How one window of a quota stands. With shared quotas, what this process may use of it."""

    left: float | None
    """How much is left; None if that is not known, or not limited."""
    limit: float | None
    """How much there is in all; None if that is not known, or not limited."""
    seconds_until_full: float | None
    """Seconds until all of it is there again if nothing else is used; None if that is not known."""


class QuotaSnapshot(TypedDict):
    """What is left of the quota of a resource."""

    left: dict[str, float | None]
    """How much is left of each window, by its name, such as "requests" or "requests/minute"; None as below."""
    windows: dict[str, WindowSnapshot]
    """Each window, by its name."""
    seconds_until_open: float
    """Seconds until there is enough for another call; 0.0 if there is enough, or that is not known."""


class ResourceSnapshot(TypedDict):
    """The state of one resource in `ResourcePool.snapshot`."""

    status: ResourceStatus
    in_flight: int
    max_in_flight: int | None
    consecutive_cooldown: int
    cooldown_seconds_remaining: float
    last_acquired_at: float
    """When the last use began, as a reading of the monotonic clock; 0.0 before the first."""
    quota: NotRequired[QuotaSnapshot]
    """What is left of its quota. Only for resources that have one."""


class Attempt(NamedTuple):
    """One attempt of a call that failed."""

    resource_id: str
    signal: Signal
    duration: float

    def __repr__(self) -> str:
        return redact(f"Attempt({self.resource_id!r}, {self.signal!r}, {self.duration!r})")


@dataclass(frozen=True, slots=True)
class ResourceStats:
    """Gauges and counters of one resource in one pool. The counters begin at 0 when it is added."""

    resource_id: str
    status: ResourceStatus
    in_flight: int
    max_in_flight: int | None
    consecutive_cooldown: int
    cooldown_seconds_remaining: float
    acquires: int
    successes: int
    cooldowns: int
    disables: int
    sibling_cancels: int
    refusals: int = 0
    """Uses that the upstream service refused. Cooldowns and disables can be policy too, or come from elsewhere."""
    adaptive: AdaptiveStats | None = None
    """Of an adaptive `max_in_flight`: its bounds, and its last cut."""
    affinity_cooldowns: Mapping[Affinity, float] = field(default_factory=dict)
    """Seconds left of cooldowns that hold for one affinity alone, by affinity; the longest 100 of them."""
    quota: QuotaSnapshot | None = None
    """What is left of its quota; None if it has none."""
    paused: bool = False
    """Whether `pause` keeps it from being used. Its status says nothing of that."""

    @property
    def max_in_flight_gauge(self) -> float:
        """`max_in_flight` as a number: infinity when unlimited."""
        return math.inf if self.max_in_flight is None else float(min(self.max_in_flight, 2**53))

    @property
    def saturated(self) -> bool:
        """Whether the resource is healthy and at its limit."""
        return self.status == "healthy" and self.in_flight >= self.max_in_flight_gauge

    @property
    def eligible(self) -> bool:
        """Whether the resource is healthy, not paused, and below its limit."""
        return self.status == "healthy" and not self.paused and self.in_flight < self.max_in_flight_gauge

    def status_one_hot(self) -> dict[ResourceStatus, int]:
        """Return 1 for the resource's status and 0 for the others, as metric systems expect an enumeration."""
        return {status: int(status == self.status) for status in RESOURCE_STATUSES}

    @classmethod
    def __agent_notes__(cls) -> str:
        """Notes for coding agents (`python -m agent_readable headgate.resources.ResourceStats`)."""
        return "Do not construct it: read `pool.stats().resources[resource_id]`."


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Gauges of a pool as it is now, and counters since it was made, which survive `remove`."""

    resources: Mapping[str, ResourceStats]
    in_flight: int
    eligible: int
    saturated: int
    by_status: Mapping[ResourceStatus, int]
    attempts: int
    successes: int
    cooldowns: int
    disables: int
    retries: int
    sibling_cancels: int
    waiting: int
    """Calls that wait for a resource, a TaskPool being one for each requirement; a gauge."""
    runs_ok: int
    runs_exhausted: int
    runs_error: int
    runs_cancelled: int
    paused: int = 0
    """How many resources are paused, whatever their status."""
    refusals: int = 0
    """Uses that the upstream service refused."""

    @classmethod
    def __agent_notes__(cls) -> str:
        """Notes for coding agents (`python -m agent_readable headgate.resources.PoolStats`)."""
        return (
            "Do not construct it: call `pool.stats()`. Take pool totals from it, never by summing `resources`: those "
            "counters go with their resource when it is removed."
        )


class Defaults(NamedTuple):
    """What a pool gives to resources that have none of their own."""

    max_in_flight: int | Adaptive | None = None
    quota: QuotaSetting | None = None

    def give(self, resources: Iterable[Resource[Any]]) -> None:
        """Give these resources what they lack."""
        for resource in resources:
            if self.max_in_flight is not None and resource.max_in_flight is None:
                resource.max_in_flight = self.max_in_flight
            if self.quota is not None and resource.sharing.account is None:
                set_account(resource, account_of(self.quota, None))


_NO_DEFAULTS = Defaults()


def resources_of(resources: object, defaults: Defaults = _NO_DEFAULTS) -> list[Resource[Any]]:
    """The resources given in any of the accepted forms. No message shows a value: it may be a secret."""
    if isinstance(resources, Mapping):
        members = [_keyed(key, item) for key, item in resources.items()]
    elif isinstance(resources, Iterable) and not isinstance(resources, (str, bytes, set, frozenset)):
        members = [
            item if isinstance(item, Resource) else Resource(f"resource-{index}", item)
            for index, item in enumerate(resources)
        ]
    else:
        raise InvalidType(
            f"resources must be a sequence or a mapping, got {type(resources).__name__}",
            remedy='Pass a list of Resource objects, or a dict such as {"key-1": "sk-..."}; the order matters.',
        )
    if not members:
        raise InvalidArgument("a ResourcePool requires at least one resource", remedy="Pass one or more.")
    seen: set[str] = set()
    for member in members:
        if member.resource_id in seen:
            raise InvalidArgument(
                f"Duplicate resource_id in pool: {member.resource_id!r}",
                remedy="Give each resource an id of its own.",
            )
        seen.add(member.resource_id)
    defaults.give(members)
    return members


def _keyed(key: object, item: object) -> Resource[Any]:
    if not isinstance(item, Resource):
        return Resource(cast(str, key), item)
    if key != item.resource_id:
        raise InvalidArgument(
            f"dict key {key!r} does not match resource_id {item.resource_id!r}",
            remedy="Use the resource's own id as its key, or pass a list.",
        )
    return item
