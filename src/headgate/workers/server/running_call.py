"""One call on a worker, and its state while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headgate.context.travel import Exchange
from headgate.core.imports import ImportNeeded, is_imported
from headgate.core.lessons import Lesson, joined
from headgate.workers.model import Task
from headgate.workers.protocol.messages import Begun
from headgate.workers.serialization.dynamic_classes import Scope
from headgate.workers.serialization.functions import Loaded
from headgate.workers.serialization.pickling import NOTHING_GIVEN, Given
from headgate.workers.server.generators import Orders
from headgate.workers.server.imports import FailedImport

if TYPE_CHECKING:
    from headgate.workers.server.client_stream import ClientStream
    from headgate.workers.server.nested_pool import NestedPool
    from headgate.workers.server.task_loop import TaskLoop


MOST_LESSONS = 64
"""Resources of which one answer tells: a call uses one, and those of the calls that it makes."""


class RunningCall:
    """A call on a worker, from when it was received until its outcome was sent."""

    # What most calls never change is kept by the class: thousands of them are made in a second.
    task: asyncio.Task[None] | None = None
    cancels: int = 0
    has_thread_place: bool = False
    """Does it hold one of the thread places?"""
    abandoned: bool = False
    """Does it hold a thread place although nobody waits for it any more?"""
    due: float | None = None
    """When its timeout is over; None: it has none, or has not begun, or is a generator between two steps."""
    admitted: bool = False
    """Has it passed the backpressure hook?"""
    stopped: bool = False
    """Was it cancelled because the worker stops?"""
    gone: bool = False
    """Has everybody stopped waiting for it?"""
    executes: bool = False
    """Does it count as executing?"""
    has_turn: bool = False
    """Does it count for the limits of `concurrency`?"""
    paused: float | None = None
    """Of a generator between two steps: since when."""
    waits: int = 0
    """Number of calls that it made and waits for."""
    orders: Orders | None = None
    """Of a generator: the steps that its consumer asked for."""
    loaded: Loaded | None = None
    """Its function, once that is loaded, with the copy of its group that the call uses."""
    given: Given = NOTHING_GIVEN
    """The classes that its caller has."""
    imports: Mapping[str, FailedImport | None] = {}
    """The modules whose import it waited for, and what that raised."""
    exchange: Exchange | None = None
    """Which values of its Context its caller knows; None: none were exchanged."""

    lessons: dict[str, Lesson] | None = None
    """What it has learned about resources that its client may hold, by id, since its last answer."""
    watchers: Sequence[Callable[[str, BaseException | None], object]] = ()
    """Who is told how it ended; see `headgate.workers.hooks`."""

    def __init__(self, tasks: TaskLoop, stream: ClientStream, client: str, begun: Begun) -> None:
        self.tasks: TaskLoop = tasks
        self.stream: ClientStream = stream
        self.client: str = client
        self.begun: Begun = begun
        self.scope: Scope = {}
        """Its own copies of the classes that were sent by value."""

    def load(self) -> Callable[..., Any]:
        """Return the function that it runs. ImportNeeded: not before a module is imported (see `core.imports`)."""
        if self.loaded is None:
            self.loaded = self.begun.function.open(self.scope, self.require)
            if self.loaded.copy.names:
                self.given = Given(self.loaded.copy.names)
        return self.loaded.fn

    def require(self, module: str) -> None:
        """Raise ImportNeeded if a module is not imported yet, or what its import raised."""
        if is_imported(module):
            return
        if module not in self.imports:
            raise ImportNeeded(module)
        failed = self.imports[module]
        if failed is not None:
            failed.throw()

    @property
    def id(self) -> str:
        """The id of the task, for people and events."""
        return f"{self.client}/{self.begun.task}"

    @property
    def caller(self) -> str:
        """The id of the task that called it."""
        return self.begun.caller

    @property
    def origin(self) -> str:
        """The id of the task of a TaskPool, or of the outermost call, for which it runs; "": it is the outermost."""
        return self.begun.origin or self.begun.caller

    @property
    def rests(self) -> bool:
        """Is the call a generator that is between two steps?"""
        return self.paused is not None

    @property
    def pool(self) -> NestedPool:
        """The pool that runs the routines which it calls itself."""
        return self.stream.nested

    def begins_to_wait(self) -> None:
        """Note that it waits for a routine it called: meanwhile it does not count as executing."""
        self.waits += 1
        self.tasks.count(self)

    def waits_no_more(self) -> None:
        """Note that a routine it called has ended."""
        self.waits -= 1
        self.tasks.count(self)

    def learned(self, lessons: Sequence[Lesson]) -> None:
        """Note what it has learned about resources, for its answer. From any thread."""
        known = {} if self.lessons is None else dict(self.lessons)
        for lesson in lessons:
            before = known.get(lesson.resource_id)
            if before is None and len(known) >= MOST_LESSONS:
                continue
            known[lesson.resource_id] = lesson if before is None else joined(before, lesson)
        self.lessons = known

    def take_lessons(self) -> Collection[Lesson]:
        """Return what it has learned since its last answer."""
        lessons, self.lessons = self.lessons, None
        return () if lessons is None else lessons.values()

    def tell_end(self, kind: str, error: BaseException | None = None) -> None:
        """Tell the watchers once how it ended."""
        watchers, self.watchers = self.watchers, ()
        for watcher in watchers:
            watcher(kind, error)

    def describe(self) -> Task:
        """Describe it for `current_task` and for hooks."""
        begun = self.begun
        tenant = begun.tenant or None
        return Task(self.id, begun.caller or None, begun.function.tag, begun.timeout or None, tenant)
