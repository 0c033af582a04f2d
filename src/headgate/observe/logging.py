"""Writes to the log what an operator must know: resources that cool down or are disabled, workers that are lost or
blocked, failures that nobody has seen.

Installed when headgate is imported. It costs nothing until such an event, and imports the stdlib's logging only then.
"""

from __future__ import annotations

from collections import OrderedDict

from headgate.core.one_line import one_line
from headgate.core.topics import subscribe

TYPE_CHECKING = False  # see core/topics.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TextIO


COOLDOWN_PAUSE = 60.0
"""Seconds between two warnings about cooldowns of the same resource."""


def install() -> Callable[[], None]:
    """Begin to log; returns a function that stops it."""
    stops = (
        subscribe(_HealthLog().write, "resources.health"),
        subscribe(_log_pool, "tasks.pools"),
        subscribe(_log_worker, "workers.lifecycle"),
    )

    def stop() -> None:
        for unsubscribe in stops:
            unsubscribe()

    return stop


def json(stream: TextIO | None = None, level: int | str = "INFO", logger: str | None = None) -> Callable[[], None]:
    """Write log records as one line of JSON each, with `task_id` and `tenant`; returns a function that stops it.

    To `stream` (stderr), of `level` and above, of `logger` and those below it; by default of all loggers. On workers
    too: ``WorkerPool(setup=headgate.observe.logging.json)``.
    """
    import logging

    from headgate.observe.json_logs import handler_for

    handler, target = handler_for(stream), logging.getLogger(logger)
    before = target.level
    handler.setLevel(level)
    if not target.isEnabledFor(handler.level):
        target.setLevel(handler.level)
    target.addHandler(handler)

    def stop() -> None:
        target.removeHandler(handler)
        target.setLevel(before)

    return stop


class _Log:
    """Writes to a logger. Names and reasons come from others: none of them makes a line of its own."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, level: str, message: str, *args: object, extra: dict[str, str] | None = None) -> None:
        import logging

        plain = [one if isinstance(one, (int, float)) else one_line(str(one)) for one in args]
        logging.getLogger(self._name).log(getattr(logging, level), message, *plain, extra=extra)

    def info(self, message: str, *args: object) -> None:
        self.write("INFO", message, *args)

    def warning(self, message: str, *args: object) -> None:
        self.write("WARNING", message, *args)

    def error(self, message: str, *args: object) -> None:
        self.write("ERROR", message, *args)


def _log_pool(event: Any) -> None:
    log = _Log("headgate.tasks")
    if event.name == "pool_unseen_failures":
        log.warning("%s: %d failed and nobody awaited them, the first: %s", event.pool, event.count, event.first)
    elif event.name == "pool_unsaved":
        log.error("%s: %s is not on disk: %s", event.pool, event.task_id, event.error)
    elif event.name == "pool_audit_failed":
        log.warning("%s: the audit file %s misses events from now on: %s", event.pool, event.path, event.error)
    elif event.name == "pool_audit_lost":
        log.warning("%s: %d events are not in the audit file %s", event.pool, event.count, event.path)
    elif event.name == "pool_settings_differ":
        log.warning(
            "%s: the processes that share this budget have %s, this pool was made with %s; theirs count. "
            "`pool.resize(n)` changes max_concurrent for all",
            event.pool,
            _differences(event.shared, event.own),
            _differences(event.own, event.shared),
        )
    elif event.name == "pool_lease_lost":
        what = "are cancelled" if event.action == "cancel" else "finish, and nobody counts them"
        log.warning("%s: the lease was lost; %d running tasks %s", event.pool, event.running, what)
    elif event.name == "pool_paused":
        log.info("%s: %s paused; what runs continues", event.pool, _paused(event))
    elif event.name == "pool_resumed" and event.before is None:
        log.info("%s: %s resumed", event.pool, _paused(event))
    elif event.name == "pool_resumed":
        log.warning("%s: %s resumed, because %s waits for what is queued", event.pool, _paused(event), event.before)
    elif event.name == "pool_store_trouble":
        log.warning("%s: no task starts, the shared store does not answer: %s", event.pool, event.error)


def _paused(event: Any) -> str:
    return "the pool is" if event.tenant is None else f"the tenant {event.tenant!r} is"


def _differences(one: Any, other: Any) -> str:
    """The entries of a mapping that another does not have, in words."""
    return ", ".join(f"{name}={value!r}" for name, value in one.items() if other.get(name) != value)


_LOGGED_OF_WORKERS = frozenset(
    {"worker_lost", "worker_blocked", "worker_unblocked", "worker_not_started", "worker_ready", "worker_replaced"}
)


def _log_worker(event: Any) -> None:
    if event.name not in _LOGGED_OF_WORKERS:
        return
    if event.name == "worker_ready" and not event.failed_tries:
        return
    _outside_of_tasks(_write_of_worker, event)  # connections are made in the code of the task that needs one first


def _write_of_worker(event: Any) -> None:
    log = _Log("headgate.workers")
    who = f"worker {event.uid} (pid {event.pid})" if event.pid else f"worker {event.uid}"  # peers know no pids
    if event.name == "worker_not_started":
        who = who if event.uid else "a worker"
        what_next = "no further try" if event.retry_in is None else f"the next try is in {event.retry_in:.2g} s"
        tries = f"try {event.failed_tries} in a row"
        log.warning("%s did not start (%s): %s; %s", who, tries, event.reason, what_next)
    elif event.name == "worker_ready":
        log.info("%s is ready: workers start again, after %d tries that failed", who, event.failed_tries)
    elif event.name == "worker_lost":
        log.warning("%s is lost: %s%s", who, event.reason, "; another takes its place" if event.restarted else "")
    elif event.name == "worker_replaced":
        level = "INFO" if event.planned else "WARNING"
        log.write(level, "%s is replaced: %s; it finishes its other calls", who, event.reason)
    elif event.name == "worker_blocked" and event.threads:
        why = "its thread places are held by calls that timed out or were cancelled and go on"
        log.warning("%s is blocked: %s; no new calls that need a thread go there until one ends", who, why)
    elif event.name == "worker_blocked":
        why = f"{event.tag} holds its loop" if event.tag else "its loop is held, or it gives no sign of life"
        log.warning("%s is blocked: %s; no new calls go there until it is free", who, why)
    else:
        log.info("%s takes calls again", who)


class _HealthLog:
    """Writes to the log how resources fare.

    A key that is refused ten times a second would fill the log. So there is at most one warning in `COOLDOWN_PAUSE`
    seconds about the cooldowns of a resource, the first at once; the next says how many there were in between. These,
    and what other processes found out and have logged themselves, are for debugging.

    Events come from any thread. There is no lock, because the price of a race is a line too many.
    """

    def __init__(self) -> None:
        self._cooldowns: OrderedDict[tuple[str, str], _Cooldowns] = OrderedDict()
        self._swaps = 0

    def write(self, event: Any) -> None:
        """Log an event of the topic `resources.health`."""
        text = _SENTENCES.get(event.name)
        if text is None:
            return
        level, sentence = text
        first, *args = sentence(event)
        message = str(first)
        if event.name == "resource_cooled":
            more = self._count(event)
            if more is None:
                level = "DEBUG"
            elif more:
                message, args = f"{message}; %d more since the last warning", [*args, more]
        elif event.name == "resource_recovered" and not self._was_logged(event):
            level = "DEBUG"
        elif event.name == "resource_disabled" and event.from_another_process:
            level = "INFO"
        log = _Log("headgate.resources")
        if event.name in _OF_NO_TASK:
            _outside_of_tasks(log.write, level, message, *args)
            return
        request_id = getattr(event, "request_id", None)  # of the task or call that found it out
        extra = {"task_id": request_id} if request_id else None
        log.write(level, message, *args, extra=extra)

    def _count(self, event: Any) -> int | None:
        """Count a cooldown. Returns how many were not logged before it, or None if it is not to be logged either."""
        from headgate.core.clock import clock

        now = clock.now()
        if self._swaps != clock.swaps:  # another clock, of a test. A number: the clock itself is part of an event loop
            self._swaps = clock.swaps
            self._cooldowns.clear()
        known = self._cooldowns.setdefault((event.pool, event.resource_id), _Cooldowns())
        if len(self._cooldowns) > _MANY:
            self._cooldowns.popitem(last=False)  # pools come and go
        if event.old_status != "cooling_down":  # else it is extended
            known.is_logged = False
        if event.from_another_process:
            return None
        if now - known.warned_at < COOLDOWN_PAUSE:
            known.unlogged += 1
            return None
        unlogged, known.unlogged = known.unlogged, 0
        known.warned_at, known.is_logged = now, True
        return unlogged

    def _was_logged(self, event: Any) -> bool:
        """Whether the cooldown that has ended was logged."""
        known = self._cooldowns.get((event.pool, event.resource_id))
        return known is not None and known.is_logged


class _Cooldowns:
    """What was logged of the cooldowns of one resource."""

    __slots__ = ("is_logged", "unlogged", "warned_at")

    def __init__(self) -> None:
        self.warned_at: float = float("-inf")
        self.unlogged: int = 0
        """Number of cooldowns since then that were not logged."""
        self.is_logged: bool = False
        """Whether the current cooldown was logged, when it began or when it was extended."""


_MANY = 1000  # resources whose cooldowns are remembered
_OF_NO_TASK = frozenset({"resource_recovered", "health_unshared", "health_shared"})
"""Events that are noticed in the code of whichever task is next, and have nothing to do with it."""


def _outside_of_tasks(write: Callable[..., None], *args: object) -> None:
    """Log in an empty context, so that the record has the id of no task."""
    from contextvars import Context

    Context().run(write, *args)


def _in_one_line(reason: str | None) -> str:
    """A reason without line breaks: the text of an HTTP client's exception often has some."""
    return "" if reason is None else " ".join(reason.split())


def _cooled(event: Any) -> tuple[object, ...]:
    return (
        "%s: %s cools down%s for %s s%s: %s",
        event.pool,
        event.resource_id,
        "" if event.only_for is None else f" for {_in_one_line(event.only_for)}",
        f"{event.seconds:.1f}" if event.seconds >= 0.1 or not event.seconds else f"{event.seconds:.3f}",
        f" ({event.consecutive} in a row)" if event.consecutive else "",  # the rest of an adaptive limit does not count
        _in_one_line(event.reason) or "no reason given",
    )


def _disabled(event: Any) -> tuple[object, ...]:
    reason = _in_one_line(event.reason) or ("by hand" if event.usage is None else "no reason given")
    return "%s: %s is disabled: %s", event.pool, event.resource_id, reason


def _recovered(event: Any) -> tuple[object, ...]:
    return "%s: %s is back after its cooldown", event.pool, event.resource_id


def _enabled(event: Any) -> tuple[object, ...]:
    return "%s: %s is enabled", event.pool, event.resource_id


def _limit_changed(event: Any) -> tuple[object, ...]:
    if event.refused_at is None:
        return (
            "%s: %s takes %d calls at a time, up from %d",
            event.pool,
            event.resource_id,
            event.limit,
            event.old_limit,
        )
    reason = _in_one_line(event.reason) or "no reason given"
    text = "%s: %s takes %d calls at a time: one was refused at %d: %s"
    return text, event.pool, event.resource_id, event.limit, event.refused_at, reason


def _resource_paused(event: Any) -> tuple[object, ...]:
    return "%s: %s is paused; what uses it continues", event.pool, event.resource_id


def _resource_resumed(event: Any) -> tuple[object, ...]:
    return "%s: %s is resumed", event.pool, event.resource_id


def _unshared(event: Any) -> tuple[object, ...]:
    return "%s: health is not shared with other processes for now: %s", event.pool, _in_one_line(event.reason)


def _shared(event: Any) -> tuple[object, ...]:
    return "%s: health is shared with other processes again", event.pool


_SENTENCES: dict[str, tuple[str, Callable[[Any], tuple[object, ...]]]] = {
    "resource_cooled": ("WARNING", _cooled),
    "resource_disabled": ("WARNING", _disabled),
    "resource_recovered": ("INFO", _recovered),
    "resource_enabled": ("INFO", _enabled),
    "resource_limit_changed": ("DEBUG", _limit_changed),
    "resource_paused": ("INFO", _resource_paused),
    "resource_resumed": ("INFO", _resource_resumed),
    "health_unshared": ("WARNING", _unshared),
    "health_shared": ("INFO", _shared),
}
