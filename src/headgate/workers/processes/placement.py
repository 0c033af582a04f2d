"""The port `Placement`: what starts the workers of a pool, replaces those that end, and ends all of them.

A WorkerPool says how many workers it wants and with which settings (`Launch`). The placement starts them, on this
machine (`LocalPlacement`) or elsewhere, and tells the pool through the callbacks of the launch how they are. A
placement is also a discovery: `subscribe` tells which workers take calls and where they listen. Calls do not go through
it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from headgate.core.kept_locks import KeptLocks
from headgate.workers.model import ENDLESS, Lifetime

if TYPE_CHECKING:
    from headgate.discovery.port import DiscoveryEvent, Filter
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.model import Limits, WorkerView
    from headgate.workers.processes.exit_status import Ending
    from headgate.workers.processes.restarts import Trouble
    from headgate.workers.setup import Setup

Retirement = Literal["finish", "end", "unreachable"]
"""How a worker is replaced: it finishes its calls first; it is ended at once; it is ended because nobody reaches it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a placement is to start, and what it calls when something happens.

    The callbacks are called on the event loop on which the placement was opened, and return at once.
    """

    workers: int | None
    """How many workers there are to be, until `scale` says otherwise; None: as many as the placement finds right."""
    tags: tuple[str, ...]
    """What each worker is marked with."""
    limits: Limits
    """For how long routines may keep a worker from its work."""
    stop_timeout: float | None
    """Seconds for the calls of a worker that leaves; None: as long as they take."""
    on_change: Callable[[int], None]
    """A worker came, became ready or went; so many are ready and not leaving."""
    on_ended: Callable[[str, Ending], None]
    """The process of the worker with this uid has ended in this way. Called before its "worker-dropped"."""
    on_trouble: Callable[[Trouble | None], None]
    """A worker could not be started; None: one became ready, starting works."""
    credentials: WorkerCredentials | None = None
    """What each worker shows to its clients and to other workers."""
    host: str | None = None
    """Where each worker listens for TCP connections; None: on a Unix socket, for clients of this machine only."""
    lifetime: Lifetime = ENDLESS
    """When a worker is replaced. It goes on until another is ready, and finishes its calls then."""
    setup: Setup | None = None
    """What each worker runs before its first call and at its end."""
    on_lost: Callable[[], None] = lambda: None
    """A worker that took calls has ended without being told to. Called once for each, after `on_ended`."""
    kept_locks: KeptLocks = field(default_factory=KeptLocks)
    """Locks that are to be held until the last worker has ended, also if this process is killed. A placement on this
    machine has its keeper hold them; one whose workers run elsewhere cannot."""


@runtime_checkable
class Placement(Protocol):
    """What starts and ends the workers of one pool. All methods are called on one event loop, except where it says.

    `headgate.testing.check_placement` tells whether a placement of yours keeps this contract.
    """

    @property
    def num_workers(self) -> int | None:
        """How many workers it was made for; None: it knows when it is open."""
        ...

    @property
    def credentials(self) -> WorkerCredentials | None:
        """What clients show to its workers, known when it is open: those of the launch, or its own; None: no TLS."""
        ...

    async def open(self, launch: Launch) -> None:
        """Begin to start the workers; return before they are ready. RuntimeError: it was opened before."""

    async def scale(self, workers: int) -> None:
        """Want so many workers from now on. Return when those too many have left; new ones need not be ready."""

    def retire(self, uid: str, reason: str, how: Retirement) -> None:
        """Put another worker in the place of this one. A uid that is not known, or not any more, is ignored."""

    def workers(self) -> list[WorkerView]:
        """Return the workers that there are to be, also those that start, without their load. From any thread."""
        ...

    def subscribe(self, filter: Filter | None = None) -> AsyncIterator[DiscoveryEvent]:
        """Yield a "worker-added" for each worker that takes calls, then what changes, until closed. On any loop."""
        ...

    async def close(self, drained: Awaitable[object]) -> None:
        """Replace no worker any more; when `drained` is done, end all of them. Return when none is left.

        If `drained` raises, end them at once, and raise that. If this is another event loop than that of `open`, end
        them without waiting for anything of that loop. A placement that was not opened, or not completely, can be
        closed too.
        """
