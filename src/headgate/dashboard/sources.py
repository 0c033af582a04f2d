"""The programs that a page shows: this one, or all that this user has published."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from headgate import registry
from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.core.views import TaskPoolView
from headgate.errors import HeadgateError, InvalidArgument
from headgate.observe import sampler as sampling
from headgate.observe import sockets
from headgate.observe.actions import act, story
from headgate.observe.feed import KEPT
from headgate.observe.history import POINTS
from headgate.observe.lines import LONGEST_ANSWER, decoded, encoded, said
from headgate.observe.rows import rows
from headgate.registry import LivePool
from headgate.tasks.runtime.view import shown

RESCAN: Final = 1.0
PATIENCE: Final = 15.0
_WIDEST: Final = 300
AGAIN: Final = 30.0
"""Seconds after which a program whose answers cannot be read is asked again."""
_CLOSED: Final = 8
"""Task pools that were closed and are shown again when the page ends: the last of them."""


class Seen:
    """What is known of one program."""

    def __init__(self, program_id: str) -> None:
        self.id: str = program_id
        self.look: dict[str, Any] = {}
        self.history: dict[str, deque[dict[str, Any]]] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.number: int = 0
        """Grows with each look."""
        self.heard: float = 0.0
        """When the last look came, monotonic."""

    def add(self, look: dict[str, Any], events: list[dict[str, Any]]) -> None:
        """Take in a look, and the events since the last one."""
        self.look, self.number, self.heard = look, self.number + 1, clock.now()
        self.events.extend(events)
        alive = set()
        for view in look["pools"]:
            key = str(view["number"])
            alive.add(key)
            if "point" in view:
                self.history.setdefault(key, deque(maxlen=POINTS)).append(view["point"])
        for gone in self.history.keys() - alive:
            del self.history[gone]


class Source(Protocol):
    """Knows programs, and asks them."""

    programs: dict[str, Seen]

    @property
    def looking(self) -> int:
        """Number of programs that were found and have told nothing yet."""
        ...

    async def open(self, changed: Callable[[], None]) -> None:
        """Begin to look; `changed` is called on the loop when something is new."""

    async def close(self) -> None:
        """Stop looking."""

    def finish(self) -> None:
        """Take a last look, because the page ends. From any thread but that of the page; it may block for a moment."""

    def want_tasks(self, wanted: bool) -> None:
        """Hear of single tasks too, or not any more."""

    async def ask(self, program: str, request: dict[str, Any]) -> Any:
        """Have a program answer: rows, story, act or metrics."""


class ThisProgram:
    """The process in which the page is served."""

    ID: Final = "here"

    def __init__(self) -> None:
        self.programs: dict[str, Seen] = {self.ID: Seen(self.ID)}
        self._stops: list[Callable[[], None]] = []
        self._heard = 0
        self._closed: deque[dict[str, Any]] = deque(maxlen=_CLOSED)

    @property
    def looking(self) -> int:
        """1 until the first look."""
        return int(not self.programs[self.ID].look)

    async def open(self, changed: Callable[[], None]) -> None:
        """Look at the pools of this process."""
        self._sampler, loop = sampling.acquire(), asyncio.get_running_loop()
        self._is_last = False
        seen = self.programs[self.ID]
        seen.history = {str(one): deque(past.points, POINTS) for one, past in list(self._sampler.history.items())}

        def take(look: dict[str, Any]) -> None:
            self._heard, events = self._sampler.feed.since(self._heard)
            if self._is_last:  # a program closes its pools before it ends, and what they did is what one wants to see
                look = {**look, "pools": [*look["pools"], *self._closed]}
            seen.add(look, events)
            changed()

        def tell(look: dict[str, Any]) -> None:
            try:
                loop.call_soon_threadsafe(take, look)
            except RuntimeError:  # the loop is closed: the page is gone
                pass

        self._stops = [self._sampler.listen(tell), registry.on_leave(self._keep)]
        try:
            await asyncio.to_thread(self._sampler.look)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop looking."""
        if self._stops:
            for stop in self._stops:
                stop()
            self._stops = []
            await asyncio.to_thread(sampling.release, self._sampler)

    def finish(self) -> None:
        """Take a last look, which has the pools that were closed too."""
        self._is_last = True
        self._sampler.look()

    def _keep(self, entry: LivePool) -> None:
        """Keep how a task pool was when it was closed; in the thread of its loop."""
        if entry.kind == "tasks":
            look = entry.view(sampling.ROWS)
            if look is not None and isinstance(look.state, TaskPoolView):
                self._closed.append({**look.to_dict(), "name": shown(look.name), "state": "closed", "held": None})

    def want_tasks(self, wanted: bool) -> None:
        """Hear of single tasks too, or not any more."""
        self._sampler.feed.want_tasks(wanted)

    async def ask(self, program: str, request: dict[str, Any]) -> Any:
        """Answer from this process."""
        if program != self.ID:
            raise InvalidArgument("there is no such program here")
        if request["ask"] == "rows":
            return await rows(request)
        if request["ask"] == "story":
            return await story(request["task"], request.get("pool", ""))
        if request["ask"] == "metrics":
            from headgate.observe.prometheus import PoolCollector, exposition

            return (await asyncio.to_thread(exposition, PoolCollector(self._sampler))).decode()
        return await act(request["action"], request["target"], request.get("pool", ""), "page")


class PublishedPrograms:
    """All programs of this user that can be seen, as they come and go."""

    def __init__(self) -> None:
        self.programs: dict[str, Seen] = {}
        self._watched: dict[str, asyncio.Task[None]] = {}
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._unreadable: dict[str, float] = {}  # when programs whose answers cannot be read are asked again
        self._tasks = 0
        self._scan: asyncio.Task[None] | None = None

    @property
    def looking(self) -> int:
        """Number of programs that are connected, and have told nothing yet."""
        return len(self._watched.keys() - self.programs.keys())

    async def open(self, changed: Callable[[], None]) -> None:
        """Watch the programs that there are, and look for new ones."""
        self._changed = changed
        self._look_for_new()
        self._scan = asyncio.ensure_future(self._keep_scanning())

    async def close(self) -> None:
        """Let go of all programs."""
        tasks = [*self._watched.values(), *([] if self._scan is None else [self._scan])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def finish(self) -> None:
        """Do nothing: the programs go on."""

    def want_tasks(self, wanted: bool) -> None:
        """Hear of single tasks too, or not any more."""
        self._tasks = max(0, self._tasks + (1 if wanted else -1))
        for writer in self._writers.values():
            writer.write(encoded({"tasks": bool(self._tasks)}))

    async def ask(self, program: str, request: dict[str, Any]) -> Any:
        """Ask a program over a connection of its own."""
        if program not in self.programs:
            raise InvalidArgument("this program has ended, or was never there")
        try:
            async with asyncio.timeout(PATIENCE):
                reader, writer = await _connected(program)
                try:
                    writer.write(encoded({"id": 1, "origin": "page", "until": clock.wall() + PATIENCE, **request}))
                    message = decoded(await reader.readuntil())
                finally:
                    writer.close()
        except asyncio.IncompleteReadError as error:
            raise InvalidArgument("the program has ended before it answered") from error
        except asyncio.LimitOverrunError as error:
            raise InvalidArgument("the answer of the program is too long") from error
        except TimeoutError as error:
            raise InvalidArgument(
                f"the program does not answer within {PATIENCE:g} s. It will not do it later"
            ) from error
        except OSError as error:
            raise InvalidArgument(f"the program does not answer: {error}") from error
        if "error" in message:
            raise InvalidArgument(str(message["error"]))
        return message.get("ok")

    async def _keep_scanning(self) -> None:
        # It looks again and again: a directory tells of new sockets on Linux only, and a second is soon enough here.
        while True:
            await asyncio.sleep(RESCAN)
            try:
                self._look_for_new()
            except HeadgateError:  # the directory is gone, or open to others, for now
                pass

    def _look_for_new(self) -> None:
        names = [path.rpartition("/")[2] for path in sockets.paths()]
        self._unreadable = {name: again for name, again in self._unreadable.items() if name in names}
        for name in names:
            if name not in self._watched and self._unreadable.get(name, 0.0) <= clock.now():
                self._watched[name] = asyncio.ensure_future(self._watch(name))

    async def _watch(self, name: str) -> None:
        """Follow a program until it ends."""
        try:
            await self._follow(name)
        finally:
            self._watched.pop(name, None)
            self.programs.pop(name, None)
            self._changed()

    async def _follow(self, name: str) -> None:
        """Take in what a program sends until it ends."""
        try:
            reader, writer = await _connected(name)
        except OSError as error:
            if isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
                sockets.remove(f"{sockets.folder()}/{name}")
            return
        seen, known = Seen(name), self._unreadable.get(name)
        try:
            writer.write(encoded({"id": 1, "ask": "watch", "tasks": bool(self._tasks)}))
            first = decoded(await reader.readuntil())
            history = first.get("ok", {}).get("history", {})
            seen.history = {key: deque(points[:-1], POINTS) for key, points in history.items()}
            self._writers[name] = writer
            while True:
                message = decoded(await reader.readuntil())
                seen.add(message["look"], message["events"])
                self.programs[name] = seen
                self._changed()
        except (OSError, EOFError):
            pass  # it has ended
        except (asyncio.LimitOverrunError, InvalidArgument, LookupError, TypeError, AttributeError) as error:
            self._unreadable[name] = clock.now() + AGAIN  # it has too much to say, or speaks another version
            if known is None:
                _say_unreadable(name, error)
        finally:
            writer.close()
            self._writers.pop(name, None)


def _say_unreadable(name: str, error: Exception) -> None:
    why = said(error) if isinstance(error, HeadgateError) else f"{type(error).__name__}: {error}"
    if isinstance(error, asyncio.LimitOverrunError):
        why = f"it is longer than {LONGEST_ANSWER} bytes: the program has too many pools"
    pid = name.partition("-")[0]
    logging.getLogger("headgate.dashboard").warning(
        "the program with pid %s is not shown: its answer cannot be read: %s", pid, redact(why)[:_WIDEST]
    )


async def _connected(name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if not sockets.NAME.fullmatch(name):
        raise FileNotFoundError(name)
    with sockets.ShortPath(f"{sockets.folder()}/{name}") as short:
        return await asyncio.open_unix_connection(short, limit=LONGEST_ANSWER)
