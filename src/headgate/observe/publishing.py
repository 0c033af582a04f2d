"""`publish()`: lets this program be seen and acted on by its user, through a Unix socket of mode 0600.

A thread with an event loop of its own serves the socket. It looks at the pools only while somebody is connected, and
for a while after. Everything is bounded: connections, the length of a request, what is kept for a slow reader.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import threading
from typing import Any, Final, NoReturn

from headgate.core.clock import clock
from headgate.core.redaction import log_exception, redact
from headgate.errors import HeadgateError, InvalidArgument
from headgate.observe import sampler as sampling
from headgate.observe import sockets
from headgate.observe.actions import act, find, story
from headgate.observe.history import recent_points
from headgate.observe.lines import LONGEST_REQUEST, decoded, encoded, said, text_of
from headgate.observe.rows import rows
from headgate.observe.sampler import Sampler

MOST_CLIENTS: Final = 32
LINGER: Final = 10.0
"""Seconds that the sampler looks on after the last has gone: who comes again finds what was."""
SLOWEST: Final = 10.0
"""Seconds that a reader has to take what is written to it."""
FIRST_WITHIN: Final = 60.0
"""Seconds that a client has to ask something: a command connects to all programs, and then asks one after the other."""
NEXT_WITHIN: Final = 300.0
"""Seconds that a client has to ask again, unless it watches: `headgate top` asks nothing while it is paused."""


class Publication:
    """This program, as others see it, until `close`."""

    def __init__(self) -> None:
        self.path: str
        self._socket, self.path = sockets.listening()
        self._loop = asyncio.SelectorEventLoop()  # see Listener
        self._clients: set[asyncio.Task[Any]] = set()
        self._sampler: Sampler | None = None
        self._release_timer: asyncio.TimerHandle | None = None
        self._end = asyncio.Event()
        self._started = threading.Event()
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="headgate publish", daemon=True)
        self._thread.start()
        self._started.wait()

    def close(self) -> None:
        """Stop being seen. Twice is fine. In a forked child it does nothing: the socket is the parent's."""
        if self._abandoned:
            return
        sockets.remove(self.path)
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()
        global _published
        if _published is self:
            _published = None

    def abandon(self) -> None:
        """In a forked child: close what would make the child look like the program."""
        self._abandoned = True
        self._socket.abandon()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            log_exception("headgate.observe", "this program cannot be observed any more")
        finally:
            self._started.set()
            self._loop.close()
            self._socket.close()

    async def _serve(self) -> None:
        # Not start_unix_server, which looks for the path by which the socket was bound: it has another by now.
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=LONGEST_REQUEST)
        self._started.set()
        await self._end.wait()
        server.close()
        for client in list(self._clients):
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        self._release_sampler()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "it runs"
        peer: socket.socket = writer.get_extra_info("socket")
        try:
            if not sockets.is_ours(peer):
                return
            if len(self._clients) >= MOST_CLIENTS:
                writer.write(encoded({"error": f"the program has {MOST_CLIENTS} clients, and takes no more"}))
                return
            self._clients.add(task)
            self._hold_sampler()
            await _Client(self, reader, writer).serve()
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        except Exception:
            log_exception("headgate.observe", "answering somebody who looks on failed")
        finally:
            self._clients.discard(task)
            if not self._clients and self._sampler is not None and not self._end.is_set():
                self._release_timer = self._loop.call_later(LINGER, self._release_sampler)
            self._close_soon(writer)

    def _close_soon(self, writer: asyncio.StreamWriter) -> None:
        """Close a connection when what was written has been read, and at the latest after some seconds."""
        writer.close()
        if self._end.is_set():
            writer.transport.abort()
        else:
            self._loop.call_later(SLOWEST, writer.transport.abort)

    def _hold_sampler(self) -> Sampler:
        """Return the sampler, which looks from now on."""
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None
        if self._sampler is None:
            self._sampler = sampling.acquire()
        return self._sampler

    def _release_sampler(self) -> None:
        if self._sampler is not None:
            sampler, self._sampler = self._sampler, None
            sampling.release(sampler)

    @property
    def sampler(self) -> Sampler:
        """The sampler, while somebody is connected."""
        return self._hold_sampler()


class _Client:
    """Answers one connection."""

    def __init__(self, publication: Publication, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._publication = publication
        self._reader, self._writer = reader, writer

    async def serve(self) -> None:
        """Answer until the other side goes, asks nothing for long, or says what makes no sense."""
        limit = FIRST_WITHIN
        try:
            while (line := await self._request(limit)) is not None:
                limit = NEXT_WITHIN
                request = decoded(line)
                number = request.get("id")
                number = number if isinstance(number, int) else None
                if request.get("ask") == "watch":
                    await self._send_looks(number, bool(request.get("tasks")))
                await self._send({"id": number, **await self._told(request)})
        except asyncio.LimitOverrunError:
            await self._send({"error": f"a request may have {LONGEST_REQUEST} bytes"})
        except InvalidArgument as error:
            await self._send({"error": said(error)})

    async def _request(self, limit: float) -> bytes | None:
        """Return the next line; None: it did not come in time."""
        try:
            async with asyncio.timeout(limit):
                return await self._reader.readuntil()
        except TimeoutError:
            await self._send({"error": f"nothing was asked for {limit:g} s, so the program has closed the connection"})
            return None

    async def _told(self, request: dict[str, Any]) -> dict[str, Any]:
        until = request.get("until")
        if isinstance(until, (int, float)) and clock.wall() > until:  # this program was stopped, or the machine slept
            return {"error": "the program was asked too long ago, so nothing was done"}
        try:
            return {"ok": await self._answer(request)}
        except HeadgateError as error:
            return {"error": redact(said(error))}
        except Exception:
            log_exception("headgate.observe", "answering somebody who looks on failed")
            return {"error": "something went wrong in the program; its log says what"}

    async def _answer(self, request: dict[str, Any]) -> Any:
        ask = request.get("ask")
        if ask in ("hello", "snapshot"):
            sampler = self._publication.sampler
            seen = await asyncio.to_thread(sampler.look)
            return seen if ask == "snapshot" else {**seen, "pools": [_brief(one) for one in seen["pools"]]}
        if ask == "rows":
            return await rows(request)
        if ask == "metrics":
            return await asyncio.to_thread(_metrics, self._publication.sampler)
        if ask == "story":
            return await story(text_of(request, "task"), text_of(request, "pool"))
        if ask in ("act", "find"):
            about = text_of(request, "action"), text_of(request, "target"), text_of(request, "pool")
            if ask == "find":
                return await find(*about)
            return await act(*about, "page" if request.get("origin") == "page" else "terminal")
        raise InvalidArgument("ask must be hello, snapshot, rows, story, find, act, metrics or watch")

    async def _send_looks(self, number: int | None, tasks: bool) -> NoReturn:
        """Send what is seen, until the other side goes. A slow reader gets the newest and misses what was between."""
        sampler, loop = self._publication.sampler, asyncio.get_running_loop()
        newest: asyncio.Queue[dict[str, Any]] = asyncio.Queue(1)

        def offer(seen: dict[str, Any]) -> None:
            if newest.full():
                newest.get_nowait()
            newest.put_nowait(seen)

        def tell(seen: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(offer, seen)

        await asyncio.to_thread(sampler.look)
        stop, wants = sampler.listen(tell), _TasksWanted(sampler, tasks)
        line = self._next_line()
        offered = asyncio.ensure_future(newest.get())
        try:
            await self._send({"id": number, "ok": {"history": recent_points(sampler.history)}})
            last = 0
            offer(sampler.latest)
            while True:
                await asyncio.wait({line, offered}, return_when=asyncio.FIRST_COMPLETED)
                if line.done():
                    wants.set(bool(decoded(line.result()).get("tasks")))
                    line = self._next_line()
                if offered.done():
                    last, events = sampler.feed.since(last)
                    await self._send({"id": number, "look": offered.result(), "events": events})
                    offered = asyncio.ensure_future(newest.get())
        finally:
            line.cancel()
            offered.cancel()
            stop()
            wants.set(False)

    def _next_line(self) -> asyncio.Task[bytes]:
        """The next line. asyncio would complain of one that failed and that nobody has asked for."""
        line = asyncio.ensure_future(self._reader.readuntil())
        line.add_done_callback(lambda done: done.cancelled() or done.exception())
        return line

    async def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(encoded(message))
        async with asyncio.timeout(SLOWEST):
            await self._writer.drain()


class _TasksWanted:
    """Whether one who watches wants to hear of tasks."""

    def __init__(self, sampler: Sampler, tasks: bool) -> None:
        self._sampler = sampler
        self._tasks = False
        self.set(tasks)

    def set(self, tasks: bool) -> None:
        if tasks != self._tasks:
            self._tasks = tasks
            self._sampler.feed.want_tasks(tasks)


def _metrics(sampler: Sampler) -> str:
    from headgate.observe.prometheus import PoolCollector, exposition

    return exposition(PoolCollector(sampler)).decode()


def _brief(view: dict[str, Any]) -> dict[str, Any]:
    """Return the counters of a pool, without its lists."""
    return {name: value for name, value in view.items() if not isinstance(value, list)}


_published: Publication | None = None
_lock = threading.Lock()


def publish() -> Publication:
    """Let this program be seen by `headgate ps`, `top` and `dashboard`, until it ends; a second call changes nothing.

    The same as HEADGATE_OBSERVE=1 in its environment. Only processes of this user, and of root, can connect.
    """
    global _published
    with _lock:
        if _published is None:
            _published = Publication()
            atexit.register(_published.close)
        return _published


def _forked() -> None:
    global _published, _lock
    published, _published, _lock = _published, None, threading.Lock()
    if published is not None:
        atexit.unregister(published.close)
        published.abandon()


os.register_at_fork(after_in_child=_forked)
