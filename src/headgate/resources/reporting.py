"""The reporter of a resource pool: its events, its `on_state_change` callback, its counts of calls and tokens."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from headgate.core.checks import Affinity
from headgate.core.clock import clock
from headgate.core.current_task import tenant_text
from headgate.core.events import maker
from headgate.core.labels import Labels
from headgate.core.redaction import log_exception, redact
from headgate.errors import PoolExhausted
from headgate.resources import events
from headgate.resources.attempts import Call
from headgate.resources.costs import Spent
from headgate.resources.effects import Cool, Disable, Enable, Limit, Pause, Recover
from headgate.resources.members import Use
from headgate.resources.model import ResourceStatus, Usage

_acquired, _released = maker(events.ResourceAcquired), maker(events.ResourceReleased)
_run_finished = maker(events.RunFinished)
StateChange = Callable[[str, ResourceStatus, ResourceStatus, int], object]
_WIDEST: Final = 200
"""Characters of a tenant's name by which its tokens are counted."""


class Tokens(NamedTuple):
    """Tokens that calls have reported."""

    input: float = 0.0
    output: float = 0.0
    unsplit: float = 0.0
    """Tokens that were reported as a total alone."""

    def plus(self, spent: Spent) -> Tokens:
        """Return the sum of both."""
        more = spent.parts()
        return Tokens(self.input + more[0], self.output + more[1], self.unsplit + more[2])


class TokenCounts:
    """How many tokens calls have reported, by resource and by tenant. Those without a label of their own are one."""

    __slots__ = ("_resources", "_tenants", "by_resource", "by_tenant")

    def __init__(self) -> None:
        self.by_resource: dict[str, Tokens] = {}
        self.by_tenant: dict[str, Tokens] = {}
        self._resources = Labels()
        self._tenants = Labels()

    def add(self, resource_id: str, tenant: str | None, spent: Spent) -> None:
        """Count one report."""
        resource, of = self._resources.of(resource_id), self._tenants.of(tenant and tenant[:_WIDEST])
        self.by_resource[resource] = self.by_resource.get(resource, Tokens()).plus(spent)
        self.by_tenant[of] = self.by_tenant.get(of, Tokens()).plus(spent)


class Reporter:
    """Tells listeners what happened in one pool, and counts its calls. It decides nothing."""

    def __init__(self, name: str, on_state_change: StateChange | None) -> None:
        self.name: str = name
        """The pool's name in events and logs."""
        self.runs_ok: int = 0
        self.runs_exhausted: int = 0
        self.runs_error: int = 0
        self.runs_cancelled: int = 0
        self.retries: int = 0
        self.tokens: TokenCounts = TokenCounts()
        self._on_state_change = on_state_change
        self._changes = itertools.count(1)
        self._counting = threading.RLock()  # the collector may run a destructor that reports tokens

    def counts(self) -> dict[str, int]:
        """The counters of calls, by their names in `PoolStats`."""
        names = ("retries", "runs_ok", "runs_exhausted", "runs_error", "runs_cancelled")
        return {name: getattr(self, name) for name in names}

    def _usage(self, use: Use) -> Usage:
        request_id = use.request_id
        if request_id is None:
            request_id = use.request_id = str(getattr(use.handle, "request_id", None) or clock.token())
        return use.usage(request_id)

    def acquired(self, use: Use) -> None:
        """Emit the beginning of a use. Call it only if USAGE has listeners."""
        events.USAGE.emit(_acquired(at=clock.wall(), pool=self.name, usage=self._usage(use)))

    def released(self, use: Use, outcome: events.UsageOutcome) -> None:
        """Emit the end of a use."""
        if use.status == "in_flight":
            use.status = "done"
        if events.USAGE.listeners:
            events.USAGE.emit(
                _released(
                    at=clock.wall(),
                    pool=self.name,
                    usage=self._usage(use),
                    outcome=outcome,
                    duration=clock.now() - use.acquired_at,
                )
            )

    def spent(self, resource_id: str, spent: Spent, task: Any) -> None:
        """Count tokens that a call for this task has used, or for none, and emit that. Call it without the lock."""
        tenant = None if task is None else tenant_text(task.partition) or None
        with self._counting:
            self.tokens.add(resource_id, tenant, spent)
        if events.TOKENS.listeners:
            labels: Mapping[str, Any] = {} if task is None else task.terms.labels or {}
            read, written, _ = spent.parts()
            events.TOKENS.emit(
                events.TokensUsed(
                    at=clock.wall(),
                    pool=self.name,
                    resource_id=resource_id,
                    tokens=spent.total,
                    input=read,
                    output=written,
                    tenant=None if tenant is None else redact(tenant),
                    labels=labels,
                )
            )

    def sibling_cancelled(self, use: Use) -> None:
        """Emit that a use was asked to stop because an older one failed."""
        if events.USAGE.listeners:
            events.USAGE.emit(events.SiblingCancelled(at=clock.wall(), pool=self.name, usage=self._usage(use)))

    def succeeded(self, call: Call) -> None:
        """Count a call that succeeded."""
        self.runs_ok += 1
        if events.RUN.listeners:
            self.run_finished(call.request_id, "ok", call.started)

    def run_finished(self, request_id: str | None, outcome: events.RunOutcome, attempts: int) -> None:
        """Emit the end of a call. Call it only if RUN has listeners."""
        request_id = request_id or clock.token()
        events.RUN.emit(
            _run_finished(at=clock.wall(), pool=self.name, request_id=request_id, outcome=outcome, attempts=attempts)
        )

    def failed(self, error: BaseException | None, request_id: str | None, attempts: int) -> None:
        """Count a call that raised `error`; None: it was cancelled."""
        outcome: events.RunOutcome = "error"
        if isinstance(error, PoolExhausted):
            outcome = "exhausted"
            self.runs_exhausted += 1
        elif error is None or isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            outcome = "cancelled"
            self.runs_cancelled += 1
        else:
            self.runs_error += 1
        if events.RUN.listeners:
            self.run_finished(request_id, outcome, attempts)

    def health_changed(self, effect: Cool | Disable | Recover | Enable, reason: str | None) -> None:
        """Tell listeners and the callback that a resource's health changed."""
        at, pool, resource_id = clock.wall(), self.name, effect.resource_id
        old: ResourceStatus = "cooling_down"
        new: ResourceStatus = "healthy"
        usage = None if isinstance(effect, (Recover, Enable)) or effect.use is None else self._usage(effect.use)
        event: events.ResourceEvent
        if isinstance(effect, Cool):
            old, new = effect.old, "cooling_down" if effect.affinity is None else effect.old
            event = events.ResourceCooled(
                at=at,
                pool=pool,
                resource_id=resource_id,
                old_status=old,
                seconds=effect.seconds,
                consecutive=effect.consecutive,
                reason=reason if effect.reason is None else redact(effect.reason),
                usage=usage,
                only_for=None if effect.affinity is None else redact(_text(effect.affinity)),
            )
        elif isinstance(effect, Disable):
            old, new = effect.old, "disabled"
            event = events.ResourceDisabled(
                at=at, pool=pool, resource_id=resource_id, old_status=old, reason=reason, usage=usage
            )
        elif isinstance(effect, Enable):
            old = effect.old
            event = events.ResourceEnabled(at=at, pool=pool, resource_id=resource_id, old_status=old)
        else:
            event = events.ResourceRecovered(at=at, pool=pool, resource_id=resource_id)
        events.HEALTH.emit(event)
        if not isinstance(effect, Cool) or effect.affinity is None:  # else its status is the same
            self._call_back(resource_id, old, new)

    def limit_changed(self, effect: Limit, reason: str | None) -> None:
        """Emit that an adaptive limit has changed."""
        events.HEALTH.emit(
            events.ResourceLimitChanged(
                at=clock.wall(),
                pool=self.name,
                resource_id=effect.resource_id,
                limit=effect.limit,
                old_limit=effect.old,
                refused_at=effect.refused_at,
                reason=reason if effect.refused_at is not None or reason == events.FROM_ANOTHER else None,
                usage=None if effect.use is None or effect.refused_at is None else self._usage(effect.use),
            )
        )

    def paused(self, effect: Pause) -> None:
        """Emit that a resource was paused or resumed."""
        kind = events.ResourcePaused if effect.paused else events.ResourceResumed
        if events.HEALTH.listeners:
            events.HEALTH.emit(kind(at=clock.wall(), pool=self.name, resource_id=effect.resource_id))

    def _call_back(self, resource_id: str, old: ResourceStatus, new: ResourceStatus) -> None:
        seq = next(self._changes)
        if self._on_state_change is None:
            return
        try:
            self._on_state_change(resource_id, old, new, seq)
        except (Exception, asyncio.CancelledError):
            log_exception("headgate.resources", "on_state_change callback failed in %s for %s", self.name, resource_id)

    def unshared(self, reason: str) -> None:
        """Emit that the store of shared health cannot be reached."""
        events.HEALTH.emit(events.HealthUnshared(at=clock.wall(), pool=self.name, reason=reason))

    def shared_again(self) -> None:
        """Emit that the store of shared health answers again."""
        events.HEALTH.emit(events.HealthShared(at=clock.wall(), pool=self.name))

    def membership(self, kind: type[events.ResourceAdded | events.ResourceRemoved], resource_id: str) -> None:
        """Emit that a resource was added or removed."""
        if events.MEMBERS.listeners:
            events.MEMBERS.emit(kind(at=clock.wall(), pool=self.name, resource_id=resource_id))


def _text(affinity: Affinity) -> str:
    return affinity if isinstance(affinity, str) else repr(affinity)
