"""What a pool takes the outcome of a call for, where the call itself raised no signal.

A pool that was given `classify` asks it about everything; ``classify=None`` means that no outcome is a signal. A pool
that was not given one keeps two rules. For `run` and its relatives any exception means that the resource is fine, as
the seed has it; the first one that says otherwise (a 401, 403 or 429) logs a hint. For tasks of a TaskPool the errors
of HTTP clients and SDKs are signals: a task is queued again without harm, and a key that fails fast would otherwise
draw most of the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import EllipsisType
from typing import Any

from headgate.core.checks import checked_classifier
from headgate.core.redaction import log_exception
from headgate.resources.http_errors import task_errors
from headgate.resources.http_status import status_of
from headgate.resources.signals import SIGNALS, Signal

Classifier = Callable[[Any], Signal | type[Signal] | None]

_log = logging.getLogger("headgate.resources")
_TELLING = (401, 403, 429)


class Classification:
    """The classifiers of one pool, and whether it has given its hint."""

    __slots__ = ("_hints", "of_calls", "of_tasks")

    def __init__(self, classify: Classifier | EllipsisType | None) -> None:
        """`classify` is what the pool was given; ``...``: nothing. Raises InvalidType."""
        given = None if classify is ... else checked_classifier(classify)
        self.of_calls: Classifier | None = given
        """Asked about results and exceptions of `run` and its relatives, and about results of tasks."""
        self.of_tasks: Classifier | None = task_errors if classify is ... else given
        """Asked about exceptions of tasks."""
        self._hints = classify is ...

    def hint(self, error: Exception, pool: str) -> None:
        """Log, once, that an error said something about its resource, and that nobody was asked about it."""
        if not self._hints or (status := status_of(error)) not in _TELLING:
            return
        self._hints = False
        _log.warning(
            "%s: an operation raised %s with HTTP status %d, which says something about its resource; "
            "pass classify=headgate.http_errors to the pool to have such resources cooled or disabled",
            pool,
            type(error).__name__,
            status,
        )


def signal_of(classify: Classifier, outcome: object, pool: str) -> Signal | None:
    """The signal that a classifier sees in a result or an exception, if any. One that fails sees none."""
    try:
        signal = classify(outcome)
        if isinstance(signal, type) and issubclass(signal, SIGNALS):
            signal = signal()
    except (Exception, asyncio.CancelledError):
        kind = type(outcome).__name__
        log_exception("headgate.resources", "the classifier of %s failed on %s; taken as no signal", pool, kind)
        return None
    if signal is None or isinstance(signal, SIGNALS):
        return signal
    _log.error("the classifier of %s returned %s instead of a signal or None", pool, type(signal).__name__)
    return None
