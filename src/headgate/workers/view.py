"""The state of a worker pool as rows: what terminals, pages and metrics show."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from headgate.core.redaction import redact
from headgate.core.views import WorkerPoolView, WorkerRow
from headgate.workers.model import WorkerState, WorkerView

_UNUSUAL: tuple[WorkerState, ...] = ("lost", "blocked", "cooling", "starting", "stopping", "ready")


def pool_view(
    workers: Sequence[WorkerView], state: str, size: int, expected: int, losses: int, rows: int
) -> WorkerPoolView:
    """Return how many workers are in which state, and each of them; of more than `rows`, those that are not ready."""
    counts: Counter[str] = Counter(view.state for view in workers)
    memory = {view.uid: _memory(view) for view in workers}
    shown = list(workers)
    if len(shown) > rows:
        shown = sorted(shown, key=lambda view: _UNUSUAL.index(view.state))[:rows]
    return WorkerPoolView(
        state=state,
        size=size,
        expected=expected,
        worker_count=len(workers),
        in_flight=sum(view.in_flight for view in workers),
        memory=sum(used or 0 for used in memory.values()),
        losses=losses,
        **counts,
        workers=[_worker(view, memory.get(view.uid)) for view in shown],
    )


def _worker(view: WorkerView, memory: int | None) -> WorkerRow:
    options = view.metadata.options
    return WorkerRow(
        uid=view.uid,
        pid=view.pid,
        address=redact(view.address),
        host=redact(view.process.host),
        state=view.state,
        in_flight=view.in_flight,
        most=None if options is None else options.max_concurrent_streams,
        memory=memory,
        tags=sorted(view.tags),
        version=view.metadata.version,
        replaced_because=redact(view.replaced_because),
    )


def _memory(view: WorkerView) -> int | None:
    """Bytes of memory of a worker: as they are now, if it is on this machine, else as it told."""
    return memory_of(view.pid) if view.address.startswith("unix:") else view.process.memory


def memory_of(pid: int) -> int | None:
    """Return the bytes of resident memory of a process of this machine; None: it is gone, or there is no /proc."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None
