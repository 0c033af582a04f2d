"""What a pool tells: events, the hook, the counters of its calls."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from headgate.core.clock import clock
from headgate.core.redaction import log_exception
from headgate.errors import PoolExhausted
from headgate.resources import events
from headgate.resources.attempts import Call
from headgate.resources.effects import Cool, Disable, Enable, Recover
from headgate.resources.members import Use
from headgate.resources.model import ResourceStatus, Usage

StateChange = Callable[[str, ResourceStatus, ResourceStatus, int], object]


class Reporting:
    """The part of a pool that speaks. Nothing here decides anything."""

    name: str
    """How events and logs call the pool."""
    _on_state_change: StateChange | None

    def _let_go(self, thing: Use) -> None:
        raise NotImplementedError

    def __init__(self) -> None:
        self._runs_ok = self._runs_exhausted = self._runs_error = self._runs_cancelled = self._retries = 0
        self._changes = itertools.count(1)

    def _usage(self, flight: Use) -> Usage:
        request_id = flight.request_id
        if request_id is None:
            request_id = flight.request_id = str(getattr(flight.handle, "request_id", None) or clock.token())
        return flight.usage(request_id)

    def _report_acquired(self, flight: Use) -> None:
        events.USAGE.emit(events.ResourceAcquired(at=clock.wall(), pool=self.name, usage=self._usage(flight)))

    def _report_released(self, flight: Use, outcome: events.UsageOutcome) -> None:
        if flight.status == "in_flight":
            flight.status = "done"
        if events.USAGE.listeners:
            events.USAGE.emit(
                events.ResourceReleased(
                    at=clock.wall(),
                    pool=self.name,
                    usage=self._usage(flight),
                    outcome=outcome,
                    duration=clock.now() - flight.acquired_at,
                )
            )

    def _finish_well(self, call: Call) -> None:
        """Count a call that succeeded."""
        self._runs_ok += 1
        if events.RUN.listeners:
            self._report_run(call.request_id, "ok", call.started)

    def _report_run(self, request_id: str | None, outcome: events.RunOutcome, attempts: int) -> None:
        request_id = request_id or clock.token()
        events.RUN.emit(
            events.RunFinished(
                at=clock.wall(), pool=self.name, request_id=request_id, outcome=outcome, attempts=attempts
            )
        )

    def _finish_badly(self, call: Call | None, error: BaseException, flight: Use | None) -> None:
        """Count a call that raised; end its flight if nothing else has."""
        if flight is not None and flight.order in flight.seat.resource._flights:
            self._let_go(flight)
        self._count(error, call.request_id if call else None, call.started if call else 1)

    def _count(self, error: BaseException | None, request_id: str | None, attempts: int) -> None:
        """Count a call that raised this; None: it was cancelled."""
        outcome: events.RunOutcome = "error"
        if isinstance(error, PoolExhausted):
            outcome = "exhausted"
            self._runs_exhausted += 1
        elif error is None or isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            outcome = "cancelled"
            self._runs_cancelled += 1
        else:
            self._runs_error += 1
        if events.RUN.listeners:
            self._report_run(request_id, outcome, attempts)

    def _announce(self, effect: Cool | Disable | Recover | Enable, reason: str | None) -> None:
        """Tell listeners and the hook that a resource's health changed."""
        at, pool, resource_id = clock.wall(), self.name, effect.resource_id
        old: ResourceStatus = "cooling_down"
        new: ResourceStatus = "healthy"
        usage = None if isinstance(effect, (Recover, Enable)) or effect.flight is None else self._usage(effect.flight)
        event: events.ResourceEvent
        if isinstance(effect, Cool):
            old, new = effect.old, "cooling_down"
            event = events.ResourceCooled(
                at=at,
                pool=pool,
                resource_id=resource_id,
                old_status=old,
                seconds=effect.seconds,
                consecutive=effect.rung,
                reason=reason,
                usage=usage,
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
        self._call_hook(resource_id, old, new)

    def _call_hook(self, resource_id: str, old: ResourceStatus, new: ResourceStatus) -> None:
        seq = next(self._changes)
        if self._on_state_change is None:
            return
        try:
            self._on_state_change(resource_id, old, new, seq)
        except (Exception, asyncio.CancelledError):
            log_exception("headgate.resources", "on_state_change callback failed in %s for %s", self.name, resource_id)

    def _report_member(self, kind: type[events.ResourceAdded | events.ResourceRemoved], resource_id: str) -> None:
        if events.MEMBERS.listeners:
            events.MEMBERS.emit(kind(at=clock.wall(), pool=self.name, resource_id=resource_id))
