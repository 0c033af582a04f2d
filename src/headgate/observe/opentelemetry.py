"""Traces for OpenTelemetry: submit, queue, lease, dispatch, run, across processes. Needs the extra `otel`.

    from headgate.observe import opentelemetry
    stop = opentelemetry.install()                                   # in the program
    WorkerPool(setup=opentelemetry.install, ...)                     # and on its workers

The span that is current where a task is submitted is the parent of its spans, and the span of the attempt is current
inside the task. Calls on workers carry the `traceparent` of W3C in their Context, so the spans of another process join
the trace. `sample=` decides cheaply which tasks are traced; a task that never starts has no span. Spans
carry ids of resources and names of tenants and pools, never values.

Spans are made of records that pools keep anyway: when a task starts, its submit and its wait are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar as Variable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headgate.context.variables import ContextVar
from headgate.core.checks import checked_number
from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.core.topics import subscribe
from headgate.errors import HeadgateError, InvalidArgument
from headgate.tasks.model import TaskRecord, Told, told_of
from headgate.tasks.names import pool_get
from headgate.tasks.runtime.executor import START_HOOKS
from headgate.tasks.runtime.view import shown
from headgate.tasks.scopes import POOL_ID
from headgate.workers import hooks

if TYPE_CHECKING:
    from contextvars import Context

    from opentelemetry.trace import Span, TracerProvider

    from headgate.workers.client.routine_call import RoutineCall
    from headgate.workers.server.running_call import RunningCall

TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="", namespace="headgate")
"""The span in which a call was made, as W3C writes it. Travels with calls of routines."""
T = TypeVar("T")
_BILLION: Final = 1_000_000_000
_installed: list[Tracing] = []
_MADE: Variable[tuple[str, Span] | None] = Variable("headgate_call_span", default=None)
"""The number of the call that was made last and its span, until a worker is given the call."""


def install(tracer_provider: TracerProvider | None = None, *, sample: float = 1.0) -> Callable[[], None]:
    """Make spans from now on, with this provider or the global one. Returns a function that stops it.

    `sample` is the share of tasks without a parent span that are traced, drawn before the SDK is asked: its own sampler
    costs ten times as much for each task that it drops. A second call replaces the first.
    """
    share = checked_number("sample", sample)
    if not 0.0 <= share <= 1.0:
        raise InvalidArgument(f"sample must be from 0 to 1, got {sample!r}", remedy="0.01 is one of a hundred.")
    try:
        import opentelemetry.trace  # noqa: F401 - the only question is whether it is there
    except ImportError as error:
        raise HeadgateError(
            "traces need opentelemetry-api, which is not installed", remedy="pip install 'headgate[otel]'"
        ) from error
    while _installed:
        _installed.pop().stop()
    tracing = Tracing(tracer_provider, share)
    _installed.append(tracing)
    tracing.start()

    def uninstall() -> None:
        if tracing in _installed:
            _installed.remove(tracing)
            tracing.stop()

    return uninstall


class _OpenAttempt:
    """The spans of one attempt that have not ended."""

    __slots__ = ("attempt", "context", "lease", "permit")

    def __init__(self, context: Any, attempt: Span, lease: Span | None, permit: Any) -> None:
        self.context = context  # of the submit: parent of all
        self.attempt = attempt
        self.lease = lease
        self.permit = permit  # the task has another one, or none, when it starts again


class Tracing:
    """Makes the spans of this process."""

    def __init__(self, provider: TracerProvider | None, sample: float = 1.0) -> None:
        from opentelemetry import context, propagate, trace

        self._trace = trace
        self._variable, self._nothing = _variable_of(context), context.Context()
        self._set = self._variable.set
        self._inject, self._extract = propagate.inject, propagate.extract
        self._tracer = trace.get_tracer("headgate", tracer_provider=provider)
        self._sample = sample
        self._skips = self._drawn()
        unsampled = trace.SpanContext(1, 1, is_remote=False)  # never exported: that it is valid and not sampled counts
        self._dropped = trace.set_span_in_context(trace.NonRecordingSpan(unsampled), context.Context())
        self._open: dict[TaskRecord, _OpenAttempt] = {}
        self._uses: dict[tuple[str, int], Span] = {}  # of calls that are no task's, by pool and use
        self._calls: dict[str, Span] = {}  # the same, by the id of the call
        self._stops: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin to make spans."""
        START_HOOKS.append(self._starts)
        hooks.CALLING.append(self._calling)
        hooks.RUNNING.append(self._running)
        self._stops = [subscribe(self._on_use, "resources.usage"), subscribe(self._on_call, "workers.tasks")]

    def stop(self) -> None:
        """End the spans that are open, and make no more."""
        _take_out(START_HOOKS, self._starts)
        _take_out(hooks.CALLING, self._calling)
        _take_out(hooks.RUNNING, self._running)
        for stop in self._stops:
            stop()
        for span in (*self._uses.values(), *self._calls.values()):
            span.end()
        for task in list(self._open):
            self._ended(task)

    # -- tasks of a TaskPool -------------------------------------------------------------------------------------------

    def _starts(self, task: TaskRecord) -> None:
        """Make the spans of an attempt that begins, and let the last one be current inside the task.

        Most tasks are not sampled, so what is done for these has to be cheap: see benchmarks/observe.py.
        """
        inner = task.context
        if self._open and (known := self._open.pop(task, None)) is not None:
            self._close(known, task, task.since.wall, "requeued")  # the attempt before this one
            self._begin(task, known.context, self._about(task))
        elif inner is not None:
            parent = inner.get(self._variable, self._nothing)
            if not parent and self._skips > 0:
                self._skips -= 1
                inner.run(self._set, self._dropped)
                return
            if not parent:
                self._skips = self._drawn()
            about = self._about(task)
            if (context := self._submitted(task, inner, parent, about)) is not None:
                self._begin(task, context, about)
                task.on_end(self._ended)  # type: ignore[attr-defined] # every record of a pool is a handle

    def _drawn(self) -> float:
        """How many tasks without a parent are not traced before the next one that is."""
        if self._sample >= 1.0:
            return 0
        if self._sample <= 0.0:
            return math.inf
        return math.floor(math.log(1.0 - clock.uniform(0.0, 1.0)) / math.log(1.0 - self._sample))

    def _submitted(self, task: TaskRecord, inner: Context, parent: Any, about: dict[str, Any]) -> Any:
        """Make the span of the submit, which says whether the task is sampled. None: it is not."""
        trace = self._trace
        if parent:
            above = trace.get_current_span(parent).get_span_context()
            if above.is_valid and not above.trace_flags.sampled and not above.is_remote:
                return None  # nor is what the task traces itself
        at = int(task.moment.wall * _BILLION)
        sent = {**about, "messaging.operation.name": "submit", "messaging.operation.type": "send"}
        span = self._tracer.start_span(
            f"submit {task.owner.name}", parent, kind=trace.SpanKind.PRODUCER, attributes=sent, start_time=at
        )
        inside = trace.set_span_in_context(span, parent)
        if not span.is_recording():
            inner.run(self._set, inside)
            return None
        span.end(at)
        return inside

    def _begin(self, task: TaskRecord, context: Any, about: dict[str, Any]) -> None:
        trace, tracer, started, name = self._trace, self._tracer, task.started, task.owner.name
        assert started is not None, "it starts"
        now = int(started.wall * _BILLION)
        tracer.start_span(f"queue {name}", context, start_time=int(task.since.wall * _BILLION)).end(now)
        lease, inside = None, context
        resource = getattr(task.permit, "resource_id", None)
        if resource is not None:
            held = {"headgate.resource.id": resource}
            lease = tracer.start_span(f"lease {resource}", context, start_time=now, attributes=held)
            inside = trace.set_span_in_context(lease, context)
        if getattr(task.owner.launcher, "is_remote", False):
            operation, kind = "dispatch", trace.SpanKind.CLIENT
        else:
            operation, kind = "run", trace.SpanKind.CONSUMER
        ran = {**about, "messaging.operation.name": operation, "messaging.operation.type": "process"}
        ran["headgate.attempt"] = task.attempt
        attempt = tracer.start_span(f"{operation} {name}", inside, kind=kind, attributes=ran, start_time=now)
        self._open[task] = _OpenAttempt(context, attempt, lease, task.permit)
        assert task.context is not None, "it has not ended"
        task.context.run(self._set, trace.set_span_in_context(attempt, inside))

    def _ended(self, task: TaskRecord) -> None:
        known = self._open.pop(task, None)
        if known is not None:
            self._close(known, task, None if task.ended is None else task.ended.wall, task.status)

    def _close(self, known: _OpenAttempt, task: TaskRecord, wall: float | None, status: str) -> None:
        span, at = known.attempt, None if wall is None else int(wall * _BILLION)
        span.set_attribute("headgate.task.status", status)
        worker = getattr(known.permit, "worker", None)
        if worker is not None:
            span.set_attribute("headgate.worker.id", worker)
        if status == "failed":
            self._fail(span, task.outcome.told)
        elif status == "requeued" and (reason := _why_again(task)) is not None:
            span.set_attribute("headgate.reason", reason)
        span.end(at)
        if known.lease is not None:
            known.lease.end(at)

    def _fail(self, span: Span, told: Told) -> None:
        span.set_attribute("error.type", told.kind)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, redact(told.line)))

    def _about(self, task: TaskRecord) -> dict[str, Any]:
        about: dict[str, Any] = {
            "messaging.system": "headgate",
            "messaging.destination.name": task.owner.name,
            "messaging.message.id": f"{task.owner.id}/{task.number}",
        }
        if task.partition is not None:
            about["headgate.tenant"] = shown(task.partition)
        for name, value in (task.terms.labels or {}).items():
            if str(name).startswith("gen_ai.") and isinstance(value, (str, int, float, bool)):
                about[str(name)] = redact(value) if isinstance(value, str) else value
        return about

    # -- calls that are no task's --------------------------------------------------------------------------------------

    def _on_use(self, event: Any) -> None:
        """Make the span of a use of a resource by `ResourcePool.run` and the like."""
        if event.name == "resource_acquired" and not self._is_of_task(event.request_id):
            span = self._tracer.start_span(f"lease {event.usage.resource_id}", start_time=int(event.at * _BILLION))
            if span.is_recording():
                span.set_attributes({"headgate.resource.id": event.usage.resource_id, "headgate.pool": event.pool})
                self._uses[event.pool, event.usage.id] = span
        elif event.name == "resource_released":
            ended = self._uses.pop((event.pool, event.usage.id), None)
            if ended is not None:
                ended.set_attribute("headgate.outcome", event.outcome)
                ended.end(int(event.at * _BILLION))

    def _on_call(self, event: Any) -> None:
        """Keep the span of a call of a routine, which `_calling` made, until the call ends."""
        if event.name == "task_dispatched" and event.request_id is None:
            span, made = self._calls.get(event.task), _MADE.get()  # known: it is given to another worker
            if made is not None and event.task.endswith(made[0]):
                span = self._calls[event.task] = made[1]
                _MADE.set(None)
            if span is not None:
                span.set_attribute("headgate.worker.id", event.uid)
        elif event.name == "task_finished":
            ended = self._calls.pop(event.task, None)
            if ended is not None:
                if event.exception is not None:
                    ended.set_attribute("error.type", event.exception.type)
                    ended.set_status(self._trace.Status(self._trace.StatusCode.ERROR))
                ended.end(int(event.at * _BILLION))

    def _is_of_task(self, request_id: str) -> bool:
        pool_id, _, number = request_id.rpartition("/")
        return number.isdecimal() and pool_get(pool_id) is not None

    # -- across processes ----------------------------------------------------------------------------------------------

    def _calling(self, call: RoutineCall) -> None:
        """Put the span of a call, or of the attempt that it is, into the Context that is sent along with it."""
        carrier: dict[str, str] = {}
        self._inject(carrier, self._made_for(call) if call.request is None else None)
        found = carrier.get("traceparent", "")
        if found != TRACEPARENT.get():
            TRACEPARENT.set(found)

    def _made_for(self, call: RoutineCall) -> Any:
        """Make the span of a call that is not the attempt of a task. Returns the context of OpenTelemetry in which it
        is current; None: what is current is not sampled, and so neither is the call."""
        trace = self._trace
        above = trace.get_current_span().get_span_context()
        if above.is_valid and not above.trace_flags.sampled and not above.is_remote:
            return None
        tag = call.routine.tag
        span = self._tracer.start_span(f"dispatch {tag}", kind=trace.SpanKind.CLIENT)
        if span.is_recording():
            span.set_attributes(_about_call("dispatch", tag, call.origin or call.caller, call.tenant))
            _MADE.set((f"/{call.task}", span))
        return trace.set_span_in_context(span)

    def _running(self, running: RunningCall) -> Callable[[str, BaseException | None], object] | None:
        """Make the span of a call that runs in this process, as a child of the span in which it was made."""
        came = TRACEPARENT.get()
        if not came:
            return None
        trace = self._trace
        parent = self._extract({"traceparent": came})
        begun = running.begun
        span = self._tracer.start_span(f"run {begun.function.tag}", parent, kind=trace.SpanKind.CONSUMER)
        self._set(trace.set_span_in_context(span, parent))
        if not span.is_recording():
            return None
        about = _about_call("run", begun.function.tag, running.origin, begun.tenant)
        span.set_attributes({"messaging.message.id": running.id, **about})

        def ended(kind: str, error: BaseException | None) -> None:
            span.set_attribute("headgate.outcome", kind)
            if error is not None:
                self._fail(span, told_of(error, None, 0))
            span.end()

        return ended


def _why_again(task: TaskRecord) -> str | None:
    """Why the last attempt of a task that starts again was not its last. None: it has had too many to know."""
    for mark in reversed(task.trail or ()):
        if mark.kind == "ended":
            return redact(mark.text) if mark.wall == task.since.wall else None
    return None


def _about_call(operation: str, tag: str, origin: str, tenant: str) -> dict[str, str]:
    """The attributes of a call: its function, and the task of a TaskPool for which it runs."""
    about = {"messaging.system": "headgate", "messaging.operation.name": operation, "code.function.name": tag}
    if origin.startswith(POOL_ID):
        about["messaging.message.id"] = origin
    if tenant:
        about["headgate.tenant"] = shown(tenant)
    return about


def _variable_of(context: Any) -> Variable[Any]:
    """The variable in which OpenTelemetry keeps its current context: to read it in another context is much quicker."""
    mark, inner = context.Context(), copy_context()
    inner.run(context.attach, mark)
    for variable, value in inner.items():
        if value is mark:
            return variable
    raise HeadgateError(
        "OpenTelemetry keeps its current span elsewhere than in a context variable",
        remedy="Leave OTEL_PYTHON_CONTEXT as it is by default.",
    )


def _take_out(known: list[T], hook: T) -> None:
    if hook in known:
        known.remove(hook)
