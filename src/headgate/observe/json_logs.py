"""Log records as one line of JSON each, with the task and the tenant in whose code they were written."""

from __future__ import annotations

import json
import logging
import math
import sys
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from headgate.core.redaction import redact
from headgate.tasks.names import pool_get
from headgate.tasks.runtime.nested_waits import CURRENT
from headgate.tasks.runtime.view import shown
from headgate.tasks.scopes import POOL_ID

RESOURCES: Final = "headgate.resources"
_USUAL: Final = frozenset(
    {*logging.LogRecord("", 0, "", 0, "", (), None).__dict__, "message", "asctime", "taskName"}
    | {"task_id", "call_id", "tenant"}
)


class TaskFilter(logging.Filter):
    """Gives each record `task_id` and `tenant`: of the task of a TaskPool in which it was written, here or on a worker.

    Both are None outside of tasks. On a worker there is also `call_id`, the id of the call; in a routine that no task
    called, `task_id` is the id of the outermost call. For a handler of yours: ``handler.addFilter(TaskFilter())``. Not
    for one that formats in another thread: attach it to the QueueHandler instead.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the two attributes, unless the record has them already."""
        task_id, tenant = current()
        given = getattr(record, "task_id", None)
        if given is None or (task_id is not None and _is_call(record, given)):
            record.task_id = given = task_id  # a call made in the code of a task is logged as the task
        if getattr(record, "tenant", None) is None:
            text = shown(given)
            record.tenant = tenant if given is None or text == task_id else tenant_of(text)
        if (running := _call()) is not None and getattr(record, "call_id", None) is None:
            record.call_id = None if running.id == task_id else running.id
        return True


def _is_call(record: logging.LogRecord, given: object) -> bool:
    """Is this the id of a call of a ResourcePool?"""
    return record.name == RESOURCES and not shown(given).startswith(POOL_ID)


def current() -> tuple[str | None, str | None]:
    """Return the id and the tenant of the task in which this code runs."""
    task = CURRENT.get()
    if task is not None:
        return f"{task.owner.id}/{task.number}", None if task.partition is None else shown(task.partition)
    running = _call()
    if running is None:
        return None, None
    tenant = running.begun.tenant
    return running.origin or running.id, shown(tenant) if tenant else None


def _call() -> Any:
    """The call of a routine in which this code runs, if this process is a worker."""
    routines = sys.modules.get("headgate.workers.routines")  # not there in a program without workers
    return None if routines is None else routines.CALLER.get()


def tenant_of(task_id: str) -> str | None:
    """Return for whom a running task of this process runs; None: that is not known."""
    pool_id, _, number = task_id.rpartition("/")
    pool = pool_get(pool_id) if number.isdecimal() and pool_id else None
    if pool is None:
        return None
    for task in list(pool.__executor__().scheduler.slots.holders()):
        if task.number == int(number):
            return None if task.partition is None else shown(task.partition)
    return None


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON: time, level, logger, message, the ids, exception, and extras."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. Values of resources are replaced by their ids."""
        try:
            message = record.getMessage()
        except Exception:  # arguments that do not fit: the line says what can be said
            message = f"{record.msg!r} (its arguments do not fit)"
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": redact(message),
            "task_id": _plain(getattr(record, "task_id", None)),
            "tenant": _plain(getattr(record, "tenant", None)),
            "call_id": _plain(getattr(record, "call_id", None)),
        }
        if record.exc_info:
            told["exception"] = redact(self.formatException(record.exc_info))
        if record.stack_info:
            told["stack"] = redact(record.stack_info)
        for name, value in record.__dict__.items():
            if name not in _USUAL:
                told.setdefault(name, _plain(value))
        return json.dumps({name: value for name, value in told.items() if value is not None})


def _plain(value: object) -> object:
    """Return a value that JSON knows. It has no NaN, and its readers have no whole numbers of more than 64 bits."""
    if isinstance(value, float):
        return value if math.isfinite(value) else shown(value)
    if value is None or (isinstance(value, int) and value.bit_length() <= 64):
        return value
    return shown(value)


def handler_for(stream: TextIO | None) -> logging.Handler:
    """Return a handler that writes such lines to a stream, by default to stderr."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(TaskFilter())
    return handler
