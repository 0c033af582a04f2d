"""The pool that routines of a worker call into: what `await other_routine()` uses inside a routine.

A routine on the task loop uses a `Dispatcher` there directly. A routine in a thread has another event loop, so its
calls are run on the task loop and awaited from its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from headgate.context.travel import Elsewhere
from headgate.core.threads import on_loop
from headgate.workers.protocol.messages import Advance, Introduction
from headgate.workers.routines import CALLER
from headgate.workers.server.running_call import RunningCall

if TYPE_CHECKING:
    from headgate.workers.client.dispatcher import Dispatcher
    from headgate.workers.client.remote_stream import Stream
    from headgate.workers.routines import Routine
    from headgate.workers.server.service import Service


ALL_CONNECT = 2.0
"""Seconds that the first nested calls of a worker wait, at most, for all its peers to be connected. Mostly they are in
milliseconds; one that cannot be reached from here, though its client reaches it, costs this once."""


class NestedPool:
    """One pool of a client, for the routines that run here: a dispatcher on the task loop, made at the first call.

    There is one for each pool, whoever called. With one for each session, every level of nesting would double the
    streams.
    """

    def __init__(self, pool: str, service: Service) -> None:
        self.introduction: Introduction = Introduction(pool, [])
        """The workers of the pool, as its client last said."""
        self.max_payload: int = 0
        self._pool = pool
        self._service = service
        self._tasks = service.tasks
        self._server = asyncio.get_running_loop()
        self._made: Dispatcher | None = None
        self._introduced: Introduction | None = None  # what the dispatcher knows

    def introduce(self, introduction: Introduction) -> None:
        """Hear which workers the pool has now, from its client or from a worker that passes that on, and let calls that
        wait for a worker know them. A list that is older than the one that is known, or the same, changes nothing."""
        if 0 < introduction.number <= self.introduction.number:
            return
        self.introduction = introduction
        if self._made is not None:
            try:
                self._tasks.loop.call_soon_threadsafe(self._know_peers)
            except RuntimeError:  # the loop is closed
                pass

    def __dispatcher__(self) -> NestedPool | Dispatcher:
        """Return what runs calls for the current loop: the dispatcher or, in a routine in a thread, this object."""
        return self if asyncio.get_running_loop() is not self._tasks.loop else self._dispatcher()

    def _dispatcher(self) -> Dispatcher:
        if self._made is None:
            from headgate.workers.client.balancing import RoundRobinLoadBalancer
            from headgate.workers.client.dispatcher import Dispatcher

            self._made = Dispatcher(
                RoundRobinLoadBalancer(),  # most calls in flight here wait for the very calls that they make
                pool=self._pool,
                max_payload=self.max_payload,
                here=self._service.uid,
                limits=self._service.limits,
                on_retiring=self._retiring,
                credentials=self._service.credentials,
            )
        self._know_peers()
        return self._made

    def _know_peers(self) -> None:
        made, introduction = self._made, self.introduction
        if made is not None and self._introduced is not introduction:
            from headgate.workers.client.peers import usable_peers

            is_first, self._introduced = self._introduced is None, introduction
            usable = usable_peers(introduction.peers, secure=self._service.credentials is not None)
            made.connections.set_members(usable, introduction)
            if is_first:
                made.expect(len(usable), ALL_CONNECT)

    async def on_task_loop(self, running: RunningCall, use: Callable[[Dispatcher], Awaitable[Any]]) -> Any:
        """Await what `use` does with the dispatcher, from another loop than the dispatcher's."""
        elsewhere = Elsewhere()

        async def run() -> Any:
            self._tasks.free_thread_place(running)  # from the first wait on, other calls may have its thread place
            return await use(self._dispatcher())

        try:
            return await on_loop(self._tasks.loop, run, elsewhere.context)
        finally:
            elsewhere.bring_back()

    async def call(
        self, routine: Routine, args: tuple[Any, ...], kwargs: dict[str, Any], limit: float | None, caller: str
    ) -> Any:
        """Call a routine, as `Dispatcher.call` does, from another loop than the dispatcher's."""
        running = CALLER.get()
        return await self.on_task_loop(
            running, lambda dispatcher: dispatcher.call(routine, args, kwargs, limit, caller, running)
        )

    def stream(
        self, routine: Routine, args: tuple[Any, ...], kwargs: dict[str, Any], limit: float | None, caller: str
    ) -> StreamFromThread:
        """Call a generator, as `Dispatcher.stream` does, from another loop than the dispatcher's."""
        return StreamFromThread(self, CALLER.get(), (routine, args, kwargs, limit, caller))

    def _retiring(self, uid: str, reason: str, at_once: bool) -> None:
        """Report a worker that routines of this one called, and that must be replaced, unless it reports itself."""
        if at_once:
            try:
                self._server.call_soon_threadsafe(self._service.report_peer, self, uid, reason)
            except RuntimeError:  # the server is gone
                pass

    async def close(self) -> None:
        """End its sessions; to be called on the task loop."""
        made, self._made, self._introduced = self._made, None, None
        if made is not None:
            await made.close("the client left")


class StreamFromThread:
    """A stream whose consumer is on another loop than its dispatcher: a routine that runs in a thread."""

    def __init__(self, nested: NestedPool, running: RunningCall, called: tuple[Any, ...]) -> None:
        self._nested = nested
        self._running = running
        self._called = called
        self._stream: Stream | None = None

    async def advance(self, what: Advance, value: Any = None) -> Any:
        """Advance the stream, as `remote_stream.Stream.advance` does."""

        async def use(dispatcher: Dispatcher) -> Any:
            if self._stream is None:
                routine, args, kwargs, limit, caller = self._called
                self._stream = dispatcher.stream(routine, args, kwargs, limit, caller, self._running)
            return await self._stream.advance(what, value)

        return await self._nested.on_task_loop(self._running, use)
