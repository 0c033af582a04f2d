"""The ports of an executor: what a task needs besides a slot, where it runs, and why it waits.

An `Allocator` reserves what a task needs (a resource); a `Launcher` starts the task with that; whoever ran it reports
the end to a `Completion`, which is the executor; an `Explainer` says in words what tasks wait for. A pool without
ports needs nothing but slots and runs its tasks right here (`local_launcher`). The public `Runner` is an allocator and
a launcher in one, for a way of running tasks that somebody writes; `runner` adapts it. The ports of resources and
workers are in `headgate.tasks.attempts`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headgate.tasks.model import Cancellable, TaskRecord
from headgate.tasks.scheduling.budget import SlotBudget

if TYPE_CHECKING:
    import asyncio

    from headgate.sharing.states import SharedState


class Runner(Protocol):
    """Runs tasks somewhere, with something."""

    def reserve(self, task: TaskRecord) -> object | None:
        """A permit to run this task now, or None. Never waits."""

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Call this back whenever a task that was refused a permit might get one."""

    def release(self, permit: Any) -> None:
        """The task of this permit will not be run."""

    async def run(self, task: TaskRecord, permit: Any) -> Any:
        """Run it to its result, and give the permit back."""


class Completion(Protocol):
    """Is told by a launcher how an attempt of a task ended. The executor is one."""

    loop: asyncio.AbstractEventLoop | None
    """The event loop of the pool."""

    def succeeded(self, task: TaskRecord, result: Any) -> None:
        """End the task: its function returned this."""

    def failed(self, task: TaskRecord, error: BaseException, failures: int | None = None) -> bool:
        """End the task or try it again: its function raised this.

        `failures` says how many of its attempts were failures of its own, if not all were. Returns False when the
        asyncio Task that ran it must raise the exception as well.
        """
        ...

    def requeue(
        self, task: TaskRecord, reason: str, *, spent: bool, resource_id: str | None, pause: float = 0.0
    ) -> bool:
        """Queue the task again: the attempt is over, and it was no failure of the task. Returns as `failed` does.

        `spent` says whether it counts as one of the task's attempts. It begins again after `pause` seconds at the
        earliest.
        """
        ...

    def attempt_ended(self, task: TaskRecord, reason: str) -> None:
        """Note in the story of the task why its last attempt ended."""

    def asked(self, task: TaskRecord) -> str | None:
        """Why the running task was told to stop, "cancel" or "timeout"; None if it was not."""
        ...

    def interrupts(self) -> int:
        """How often Ctrl-C was pressed."""
        ...


class Changes(Protocol):
    """Is told by an allocator that what it has to give has changed. The executor is one."""

    loop: asyncio.AbstractEventLoop | None
    """The event loop of the pool; None before its first submit."""

    def unserved(self) -> Collection[Hashable]:
        """The requirements that were refused and of which tasks wait."""
        ...

    def has_free_slot(self) -> bool:
        """Could a task start if it got what it needs?"""
        ...

    @property
    def is_shared(self) -> bool:
        """Are other processes asked before a task gets a slot?"""
        ...

    def keeps_apart(self, requirement: Hashable) -> bool:
        """Whether tasks may be given this requirement that had another: not many are kept apart."""
        ...

    def set_need(self, task: TaskRecord, requirement: Hashable) -> None:
        """Give a task that asks for a permit another requirement."""

    def offer(self, requirements: Collection[Hashable]) -> None:
        """Start one task, the next of all that have one of these requirements."""

    def reopen(self, *requirements: Hashable) -> None:
        """Start tasks that have one of these requirements, or any requirement if none is given."""

    def reopen_soon(self) -> None:
        """Do `reopen` for all requirements, on the loop of the pool. May be called from any thread."""

    def fail_impossible(self) -> None:
        """Fail the queued tasks that nothing can serve any more."""


class Allocator(Protocol):
    """Gives each task what it needs besides a slot."""

    options: tuple[str, ...]
    """Keywords of `submit` that say what a task needs."""

    def asks(self, options: Mapping[str, Any]) -> tuple[Hashable, Any]:
        """The requirement that these keywords name, and what else they ask for. None is any and nothing."""
        ...

    def on_change(self, changes: Changes) -> None:
        """Tell this object, from now on, what changes."""

    def impossible(self, task: TaskRecord) -> Exception | None:
        """Why nothing can ever serve this task; None if something can."""
        ...

    def reserve(self, task: TaskRecord, *, wait: bool) -> Any:
        """A permit to run this task now, or None.

        With `wait` the allocator tells the pool when the task's requirement might be served.
        """

    def is_in_order(self, permit: Any) -> bool:
        """Whether a permit that was reserved a moment ago may still be used."""
        ...

    def rests(self, task: TaskRecord) -> bool:
        """Whether all that could serve this task is cooling down or paused."""
        ...

    def release(self, permit: Any) -> None:
        """Take back a permit with which nothing was run."""

    def idle(self) -> None:
        """Nothing is queued and nothing runs: give back what no task has."""

    def leave(self, requirement: Hashable) -> bool:
        """Nothing of this requirement is needed any more. Returns True if nobody waits for it from now on."""
        ...


class Launcher(Protocol):
    """Starts tasks that have their slot and their permit."""

    def in_threads(self, tasks: Iterable[TaskRecord]) -> int:
        """How many of the pool's unfinished tasks, which are given, run in threads that must be waited for."""
        ...

    def start(self, task: TaskRecord, permit: Any, completion: Completion) -> Cancellable:
        """Run the task; `completion` is told how it ended."""
        ...

    def announce(self, task: TaskRecord) -> None:
        """Emit what is to be told of a start, after the pool's own event. Listeners may do anything to the task."""

    def forget(self, task: TaskRecord) -> None:
        """Drop what is known of a task that has ended without a result."""

    def close(self) -> None:
        """Let go of threads and the like."""


class Explainer(Protocol):
    """Says in words what tasks wait for and what they ran with."""

    def why_waiting(self, task: TaskRecord) -> str:
        """Why nothing serves this task now; "" if that is not known."""
        ...

    def waiting_for(self, requirements: Collection[Hashable]) -> dict[str, Any]:
        """What tasks of these requirements wait for, and for how many seconds."""
        ...

    def describe(self, ran_with: Any) -> str:
        """With which resource and on which worker an attempt ran, for its story: of a permit, or what remains of it."""
        ...

    def held(self, task: TaskRecord, waiting: Collection[TaskRecord]) -> list[str]:
        """The names of all that could serve a queued task, if none of it can come free before one of `waiting` ends."""
        ...


class Listener(Protocol):
    """Is told by an executor what matters to those who wait for a place in the queue."""

    def settled(self) -> None:
        """Every free slot was given to a task: admit submitters for whom there is a place now."""

    def idle(self) -> None:
        """Nothing is queued or running."""

    def expired(self, task: TaskRecord) -> bool:
        """The time of a task is over. Returns False if its submitter does not wait for a place any more."""
        ...


class Ports(NamedTuple):
    """What a pool works with besides its own queue: where tasks run, and what they need for that."""

    launcher: Launcher
    allocator: Allocator | None = None
    """None: a task needs nothing but a slot."""
    explainer: Explainer | None = None
    budget: SlotBudget | None = None
    """None: the pool has its slots for itself, as many as `max_concurrent` says."""
    on_shared: Callable[[SharedState], None] | None = None
    """Called with the store of a pool that shares its budget, before the pool takes part."""
