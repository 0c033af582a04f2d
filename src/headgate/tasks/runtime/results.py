"""What a pool does with results that its store cannot keep, and with stored ones whose type is not known here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from headgate.errors import InvalidArgument, TaskFailed
from headgate.stores.codec import REMEDY, Opaque, name_of
from headgate.stores.result_types import ResultTypes, checked_types
from headgate.tasks.model import Scope, TaskRecord, TaskStatus, failure

OnOpaque: TypeAlias = Literal["hold", "rerun", "fail"]
"""What becomes of a task whose result cannot be kept: it holds its idempotency key, it does not, or it fails."""

_log = logging.getLogger("headgate.tasks")


class ResultPolicy:
    """The options `result_types` and `on_opaque` of one pool."""

    __slots__ = ("_keeps_all", "_missed", "_pool", "_why_lost", "on_opaque", "types")

    def __init__(self, pool: str, scope: Scope, result_types: object, on_opaque: object) -> None:
        if on_opaque not in ("hold", "rerun", "fail"):
            raise InvalidArgument(
                f"on_opaque must be 'hold', 'rerun' or 'fail', got {on_opaque!r}",
                remedy="Leave it out for 'hold': a completed task holds its key though its result could not be kept.",
            )
        if scope == "session" and (on_opaque != "hold" or result_types is not None):
            raise InvalidArgument(
                "result_types= and on_opaque= are for results that are stored, and the scope is 'session'",
                remedy='Pass scope="pipeline", "tenant" or "org" too, or leave them out.',
            )
        self.on_opaque: OnOpaque = on_opaque
        self.types: ResultTypes = ResultTypes(checked_types(result_types), self._tell_missed)
        self._pool = pool
        self._keeps_all = scope == "pipeline"  # others store only the results of idempotency keys
        self._missed: set[str] = set()
        self._why_lost: Callable[[object], str] | None = None

    @property
    def reruns(self) -> bool:
        """Does a task whose result could not be kept leave its key to the next?"""
        return self.on_opaque == "rerun"

    def ask(self, why_lost: Callable[[object], str] | None) -> ResultPolicy | None:
        """Ask this why a value cannot be kept ("": it can). None if this pool need not know when a task ends."""
        self._why_lost = why_lost
        return None if self.on_opaque == "hold" or why_lost is None else self

    def ending(self, task: TaskRecord, result: Any) -> tuple[TaskStatus, Any]:
        """The status and the outcome of a task whose function returned this."""
        is_stored = self._keeps_all or task.terms.idempotency_key is not None
        why = self._why_lost(result) if is_stored and self._why_lost is not None else ""
        if not why:
            return "completed", result
        if self.on_opaque == "fail":
            error = TaskFailed(
                f"{task.label} returned a {name_of(type(result))}, which cannot be kept: {why}", remedy=REMEDY
            )
            return "failed", failure(error)
        if task.terms.idempotency_key is not None:
            task.terms = replace(task.terms, window="while_active")
        return "completed", result

    def is_lost(self, task: TaskRecord) -> bool:
        """Must a task of a former run be run again, because its result was not kept?"""
        return self.on_opaque == "rerun" and task.status == "completed" and task.outcome.__class__ is Opaque

    def _tell_missed(self, name: str, why: str) -> None:
        if name not in self._missed:
            self._missed.add(name)
            _log.warning(
                "%s: stored results of the type %s come back as mappings: %s. Import its module before they are asked "
                "for, or pass result_types=[...] to the pool",
                self._pool,
                name,
                why,
            )
