"""Telling what happened: typed events to whoever subscribed, and to the pool's own audit file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from headgate.core.clock import clock
from headgate.core.events import maker
from headgate.core.redaction import redact
from headgate.tasks.admission import Policy
from headgate.tasks.events import (
    AUDIT,
    POOLS,
    PoolAuditFailed,
    PoolAuditLost,
    PoolDequeue,
    PoolDrop,
    PoolEvent,
    PoolFinish,
    PoolRequeue,
    PoolSubmit,
    PoolUnsaved,
    PoolUnseen,
)
from headgate.tasks.model import TaskRecord, Told
from headgate.tasks.runtime.audit import AuditFile

_submit, _dequeue, _finish = maker(PoolSubmit), maker(PoolDequeue), maker(PoolFinish)


class Reporter:
    """Emits the events of one pool, and writes its audit file."""

    __slots__ = ("_about", "_pool", "_pool_id", "audit")

    def __init__(self, pool_id: str, pool: str, audit: str | os.PathLike[str] | None) -> None:
        self._pool_id = pool_id
        self._pool = pool
        self._about = {"pool_id": pool_id, "pool": pool}
        self.audit: AuditFile | None = None if audit is None else AuditFile(audit)
        """The pool's own file. Ask ``if AUDIT.listeners or reporter.audit``: an event nobody hears is never made."""

    def submitted(self, task: TaskRecord, depth: int) -> None:
        """Report that the pool has accepted a task."""
        key, partition = task.key, task.partition
        self._tell(
            _submit(
                at=clock.wall(),
                pool_id=self._pool_id,
                pool=self._pool,
                task_id=f"{self._pool_id}/{task.number}",
                key=redact(key) if isinstance(key, str) else key,
                partition=redact(partition) if isinstance(partition, str) else partition,
                priority=task.priority,
                idempotency_key=None if task.terms.idempotency_key is None else redact(task.terms.idempotency_key),
                submitted_by=None if task.parent is None else _id(task.parent),
                queue_depth=depth,
            )
        )

    def dequeued(self, task: TaskRecord) -> None:
        """Report that an attempt of a task begins."""
        assert task.started is not None, "it starts"
        waited = task.started.now - task.since.now
        slot = task.slot.number if task.slot is not None else 0
        self._tell(
            _dequeue(
                at=clock.wall(),
                pool_id=self._pool_id,
                pool=self._pool,
                task_id=f"{self._pool_id}/{task.number}",
                queued_for=waited,
                slot=slot,
                attempt=task.attempt,
            )
        )

    def requeued(
        self, task: TaskRecord, reason: str, attempt: int, spent: bool, resource_id: str | None, pause: float
    ) -> None:
        """Report that an attempt has ended, and another will follow after a pause."""
        of = self._of(task)
        self._tell(PoolRequeue(**of, reason=reason, attempt=attempt, spent=spent, resource_id=resource_id, pause=pause))

    def dropped(self, task: TaskRecord, replacement: TaskRecord | None, depth: int, policy: Policy) -> None:
        """Report that the policy has rejected a task."""
        self._tell(
            PoolDrop(
                **self._of(task),
                replacement_id=_id(replacement) if replacement is not None else None,
                reason=policy.reason,
                policy=policy.name,
                queue_depth=depth,
                max_depth=policy.max_depth,
            )
        )

    def finished(self, task: TaskRecord) -> None:
        """Report that a task has ended."""
        ran = task.ended.now - task.started.now if task.started is not None and task.ended is not None else None
        error = type(task.outcome.error).__qualname__ if task.status == "failed" else None
        self._tell(
            _finish(
                at=clock.wall(),
                pool_id=self._pool_id,
                pool=self._pool,
                task_id=f"{self._pool_id}/{task.number}",
                status=task.status,
                attempt=task.attempt,
                ran_for=ran,
                error=error,
            )
        )

    def unseen(self, failed: Mapping[int, Told], more: int) -> None:
        """Report at the end of the pool that these tasks failed and nobody saw it, and how many more."""
        if failed and POOLS.listeners:
            number, told = next(iter(failed.items()))
            first = f"{self._about['pool_id']}/{number}: {told.line}"
            POOLS.emit(PoolUnseen(at=clock.wall(), **self._about, count=len(failed) + more, first=first))

    def unsaved(self, task: TaskRecord, error: Exception) -> None:
        """Report that the end of a task could not be written."""
        if POOLS.listeners:
            POOLS.emit(PoolUnsaved(at=clock.wall(), **self._about, task_id=_id(task), error=redact(str(error))))

    def close(self) -> None:
        """Close the audit file, and say how many events are not in it."""
        audit, self.audit = self.audit, None
        if audit is None:
            return
        if audit.close():
            self._tell_audit_failed(audit)
        if audit.lost and POOLS.listeners:
            POOLS.emit(PoolAuditLost(at=clock.wall(), **self._about, path=str(audit.path), count=audit.lost))

    def _of(self, task: TaskRecord) -> dict[str, Any]:
        return {"at": clock.wall(), **self._about, "task_id": _id(task)}

    def _tell(self, event: PoolEvent) -> None:
        audit = self.audit
        if audit is not None and audit.append(json.dumps(event.to_dict())):
            self._tell_audit_failed(audit)
        AUDIT.emit(event)

    def _tell_audit_failed(self, audit: AuditFile) -> None:
        if POOLS.listeners:
            told = PoolAuditFailed(at=clock.wall(), **self._about, path=str(audit.path), error=str(audit.error))
            POOLS.emit(told)


def _id(task: TaskRecord) -> str:
    return f"{task.owner.id}/{task.number}"
