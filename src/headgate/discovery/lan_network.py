"""Multicast DNS for one event loop: what is announced from here, and what is heard of others.

The sockets, the cache and the queries are zeroconf's, and one instance of it serves all publishers and subscribers of a
loop. This module is imported when a `LanDiscovery` is used, and needs zeroconf (``pip install 'headgate[lan]'``).

Who announces a worker first owns it: owner means to answer for it, and to be the publisher whose end is the worker's.
Another process that announces the same worker sends its own record. The owner hears that, takes over what it says, and
sends it again under its own name; the newcomer hears that, and gives way. If no owner is there any more, nobody
objects, and the newcomer owns the worker.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import ifaddr
from zeroconf import (  # type: ignore[attr-defined] # the records are public, and not in its __all__
    DNSOutgoing,  # pyright: ignore[reportPrivateImportUsage]
    DNSPointer,  # pyright: ignore[reportPrivateImportUsage]
    DNSQuestion,  # pyright: ignore[reportPrivateImportUsage]
    DNSText,  # pyright: ignore[reportPrivateImportUsage]
    IPVersion,
    RecordUpdate,
    RecordUpdateListener,
    ServiceInfo,
    ServiceStateChange,
    Zeroconf,
)
from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

from headgate.core.clock import clock
from headgate.core.threads import outlast_cancellation
from headgate.discovery.lan_liveness import MAX_FOLLOWED, until_dead
from headgate.discovery.lan_records import (
    TYPE,
    Announcement,
    Known,
    Place,
    announcement_of,
    from_text,
    name_of,
    prefix_of,
)
from headgate.discovery.records import split_address
from headgate.errors import DiscoveryFailed, InvalidArgument
from headgate.workers.model import WorkerMetadata

_TXT: Final = 16
_PTR: Final = 12
_IN: Final = 1
_QUERY: Final = 0
_NEWCOMER: Final = 2.0
"""Seconds in which one who announces a worker gives way to an owner that objects."""
_REPEATS: Final = (0.0, 0.25, 0.75)
"""Seconds before each sending of an announcement: more than one, because packets are lost."""
_GOODBYES: Final = (0.0, 0.1, 0.1)
"""Seconds before each sending of a goodbye. A publisher that is left waits for them."""
_MOMENT: Final = 0.02
"""Seconds until a publisher of which one hears is followed."""
_AGAIN: Final = 15.0
"""Seconds after which everything is announced again, for those who were cut off meanwhile."""
_ANSWER: Final = 2.0
"""Seconds in which a publisher answers a question. It may wait a second, so as not to repeat itself too often."""
_MAX_MISSING: Final = 256
"""Workers whose TXT records are asked for, because only their names were heard."""


class Service:
    """A worker that is announced from here."""

    def __init__(self, announcement: Announcement, owner: object) -> None:
        self.announcement = announcement
        self.owner = owner
        self.since: float = clock.now()


class View:
    """What is known of the workers of one namespace, for the subscribers of one loop."""

    def __init__(self, network: Network, namespace: str) -> None:
        self.known: Known = Known(namespace)
        self.users = 0
        self.changed: set[asyncio.Event] = set()
        self._network = network
        self._following: dict[Place, asyncio.Task[None]] = {}
        self._is_due = False  # to look whom to follow

    def heard(self, name: str, text: bytes) -> None:
        """A worker was announced."""
        if self.known.announced(name, text, clock.now()):
            self._tell()

    def withdrawn(self, name: str, text: bytes, *, expired: bool = False) -> None:
        """A worker was taken back, or its record is so old that it is worth nothing."""
        news = self.known.workers.get(name)
        if expired and news is not None and self.known.has_answered(news.publisher):
            return
        if self.known.withdrawn(name, text, clock.now()):
            self._tell()

    def close(self) -> None:
        """End all connections to publishers."""
        for task in self._following.values():
            task.cancel()
        self._following.clear()
        self._is_due = True  # never again

    def _tell(self) -> None:
        for event in self.changed:
            event.set()
        if not self._is_due:  # once for all that comes within a moment: it looks at all workers
            self._is_due = True
            asyncio.get_running_loop().call_later(_MOMENT, self._follow)

    def _follow(self) -> None:
        """Follow the publishers of the workers that are known, and no others."""
        if not self.users:
            return
        self._is_due = False
        wanted = self.known.publishers()
        for place in [place for place in self._following if place not in wanted]:
            self._following.pop(place).cancel()
            self.known.ended(place, clock.now())
        for place, name in wanted.items():
            if place not in self._following and len(self._following) < MAX_FOLLOWED:
                self._following[place] = self._network.do(self._until_dead(place, name))

    async def _until_dead(self, place: Place, name: str) -> None:
        await until_dead(place, lambda: self.known.answered(place), lambda: self._network.asks(name))
        if self._following.pop(place, None) is not None:
            for dead in self.known.ended(place, clock.now()):
                self._network.forget(dead)
            self._tell()


class Network(RecordUpdateListener):
    """Multicast DNS on the interfaces of this machine, for one event loop."""

    def __init__(self) -> None:
        self.users = 0
        self.services: dict[str, Service] = {}
        self._zeroconf = _open()
        self._starting = asyncio.get_running_loop().create_task(self._start())
        self._browser: AsyncServiceBrowser | None = None
        self._views: dict[str, View] = {}  # by the prefix of names
        self._waiting: dict[str, set[asyncio.Future[bool]]] = {}
        self._missing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: dict[str, asyncio.Task[None]] = {}

    @property
    def _zc(self) -> Zeroconf:
        return self._zeroconf.zeroconf

    async def started(self) -> None:
        """Return when the network listens and asks."""
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        await self._zc.async_wait_for_start()
        self._zc.async_add_listener(self, None)
        self._browser = AsyncServiceBrowser(self._zc, TYPE, handlers=[_nothing])  # asks, and asks again
        _ = self.do(self._announce_again())

    async def close(self) -> None:
        """Close the sockets. Nothing is announced from here any more."""
        await asyncio.wait((self._starting,))  # zeroconf leaves sockets open when it is closed while it starts
        for view in self._views.values():
            view.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._browser is not None:
            await self._browser.async_cancel()
            self._zc.async_remove_listener(self)
        await self._zeroconf.async_close()

    @asynccontextmanager
    async def view(self, namespace: str) -> AsyncIterator[View]:
        """Give the view of a namespace, shared by all who are interested in it at the time."""
        prefix = prefix_of(namespace)
        view = self._views.get(prefix)
        if view is None:
            view = self._views[prefix] = View(self, namespace)
            self._fill(view, prefix)
        view.users += 1
        try:
            yield view
        finally:
            view.users -= 1
            if not view.users:
                view.close()
                self._views.pop(prefix, None)

    # -- announcing ---------------------------------------------------------------------------------------------------

    def announce(self, namespace: str, metadata: WorkerMetadata, session: str, port: int, owner: object) -> None:
        """Announce a worker, or, if it is announced from here already, what has changed."""
        name = name_of(namespace, metadata.uid)
        there = self.services.get(name)
        if there is not None:
            _, port, session = there.announcement.publisher
            there.announcement = announcement_of(metadata, session, port, self._revision(name))
        else:
            announcement = announcement_of(metadata, session, port, self._revision(name))
            there = self.services[name] = Service(announcement, owner)
        self._register(name, there.announcement)
        self._send(name, there.announcement)

    def drop(self, namespace: str, uid: str) -> None:
        """Take a worker back, whoever announced it."""
        name = name_of(namespace, uid)
        view = self._views.get(prefix_of(namespace))
        there = self.services.get(name)
        heard = view.known.workers.get(name) if view is not None else None
        announcement = there.announcement if there is not None else heard
        if announcement is not None:
            self._unregister(name)
            self._send(name, announcement, goodbye=True)
            if view is not None and heard is not None:
                view.withdrawn(name, heard.text)

    async def drop_all(self, owner: object) -> None:
        """Take back the workers that this owner announced, and return when that has been sent."""
        sent = []
        for name, service in list(self.services.items()):
            if service.owner is owner:
                self._unregister(name)
                self._send(name, service.announcement, goodbye=True)
                sent.append(self._sending[name])
                if (view := self._view_of(name)) is not None:
                    view.withdrawn(name, service.announcement.text)
        if sent:
            await asyncio.wait(sent)

    def _revision(self, name: str) -> int:
        """Return a number above all that this worker has had: by the clock, which other processes have too."""
        there, view = self.services.get(name), self._view_of(name)
        ours = -1 if there is None else there.announcement.revision
        heard = -1 if view is None else view.known.revision(name)
        return max(int(clock.wall() * 1000), ours + 1, heard + 1)

    def _register(self, name: str, announcement: Announcement) -> None:
        info = _info(name, announcement)
        if self._zc.registry.async_get_info_name(name) is None:
            self._zc.registry.async_add(info)
        else:
            self._zc.registry.async_update(info)

    def _unregister(self, name: str) -> None:
        self.services.pop(name, None)
        info = self._zc.registry.async_get_info_name(name)
        if info is not None:
            self._zc.registry.async_remove(info)

    def _send(self, name: str, announcement: Announcement, *, goodbye: bool = False) -> None:
        """Send it three times, unless something newer of this worker is sent meanwhile."""
        self._stop_sending(name)
        self._sending[name] = self.do(self._repeat(name, _info(name, announcement), 0 if goodbye else None))
        if not goodbye and (view := self._view_of(name)) is not None:
            view.heard(name, announcement.text)  # before the packet comes back

    def _stop_sending(self, name: str) -> None:
        before = self._sending.pop(name, None)
        if before is not None:
            before.cancel()

    async def _repeat(self, name: str, info: ServiceInfo, ttl: int | None) -> None:
        for pause in _REPEATS if ttl is None else _GOODBYES:
            await asyncio.sleep(pause)
            self._zc.async_send(self._zc.generate_service_broadcast(info, ttl, ttl is None))
        if self._sending.get(name) is asyncio.current_task():
            del self._sending[name]

    async def _announce_again(self) -> None:
        while True:
            await asyncio.sleep(_AGAIN)
            for name, service in list(self.services.items()):
                info = _info(name, service.announcement)
                self._zc.async_send(self._zc.generate_service_broadcast(info, None, True))
                await asyncio.sleep(0)

    # -- listening ----------------------------------------------------------------------------------------------------

    def async_update_records(self, zc: Zeroconf, now: float, records: list[RecordUpdate]) -> None:
        """Take note of what zeroconf received, or throws away because it is too old."""
        for update in records:
            record = update.new
            if isinstance(record, DNSText):
                name = record.name.lower()
                if not name.endswith(TYPE):
                    continue
                if not record.is_expired(now):
                    self._heard(name, record.text)
                elif (view := self._view_of(name)) is not None:
                    view.withdrawn(name, record.text, expired=record.ttl > 0)
                if record.ttl == 0:
                    self._taken_back(name, record.text)
            elif isinstance(record, DNSPointer) and record.name.lower() == TYPE and not record.is_expired(now):
                self._named(record.alias.lower())

    def async_update_records_complete(self) -> None:
        """Nothing: what zeroconf has in its cache now was noted before."""

    def _heard(self, name: str, text: bytes) -> None:
        self._missing.discard(name)
        for future in self._waiting.pop(name, ()):
            if not future.done():
                future.set_result(True)
        if name in self.services:
            self._overheard(name, text)
        elif (view := self._view_of(name)) is not None:
            view.heard(name, text)

    def _overheard(self, name: str, text: bytes) -> None:
        """Deal with somebody else's announcement of a worker that was announced here: see the top of this module."""
        service = self.services[name]
        try:
            theirs = from_text(text)
        except InvalidArgument:
            return
        ours = service.announcement
        _, port, session = ours.publisher
        if theirs.publisher.session == session or theirs.revision <= ours.revision:
            return
        if clock.now() - service.since < _NEWCOMER:
            self._unregister(name)
            self._stop_sending(name)
            if (view := self._view_of(name)) is not None:
                view.heard(name, text)
        else:
            service.announcement = announcement_of(theirs.metadata, session, port, theirs.revision + 1)
            self._register(name, service.announcement)
            self._send(name, service.announcement)

    def _taken_back(self, name: str, text: bytes) -> None:
        """Stop announcing a worker that another process has dropped."""
        if name in self.services and self.services[name].announcement.text == text:
            self._unregister(name)
            self._stop_sending(name)

    def _named(self, name: str) -> None:
        """Ask for the record of a worker of which only the name was heard, if it does not come by itself."""
        view = self._view_of(name)
        if view is None or name in view.known.workers or name in self._missing:
            return
        if len(self._missing) < _MAX_MISSING:
            self._missing.add(name)
            _ = self.do(self._fetch(name))

    async def _fetch(self, name: str) -> None:
        await asyncio.sleep(0.05)  # it mostly comes in the same packet
        if name in self._missing:
            await self.asks(name)
            self._missing.discard(name)

    async def asks(self, name: str) -> bool:
        """Ask for the record of a worker, and return whether there was an answer."""
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(name, set())
        waiting.add(answered)
        try:
            for _ in range(2):
                question = DNSOutgoing(_QUERY)
                question.add_question(DNSQuestion(name, _TXT, _IN))
                self._zc.async_send(question)
                await asyncio.wait((answered,), timeout=_ANSWER / 2)
                if answered.done():
                    return True
            return False
        finally:
            waiting.discard(answered)
            if not waiting and self._waiting.get(name) is waiting:
                del self._waiting[name]

    def forget(self, name: str) -> None:
        """Remove what zeroconf remembers of a worker that has died, so that nobody is told of it again."""
        cache = self._zc.cache
        records = cache.async_entries_with_name(name)
        pointer = cache.async_get_unique(DNSPointer(TYPE, _PTR, _IN, 0, name))
        with suppress(KeyError):
            cache.async_remove_records(records if pointer is None else [*records, pointer])

    def _fill(self, view: View, prefix: str) -> None:
        """Tell a new view what was heard before, and what is announced from here."""
        for record in self._zc.cache.async_all_by_details(TYPE, _PTR, _IN):
            if isinstance(record, DNSPointer) and record.alias.lower().startswith(prefix):
                name = record.alias.lower()
                for text in self._zc.cache.async_all_by_details(name, _TXT, _IN):
                    if isinstance(text, DNSText):
                        view.heard(name, text.text)
        for name, service in self.services.items():
            if name.startswith(prefix):
                view.heard(name, service.announcement.text)

    def _view_of(self, name: str) -> View | None:
        return self._views.get(name.partition("-")[0] + "-")

    def do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside; it ends with this network."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


_networks: dict[asyncio.AbstractEventLoop, Network] = {}


@asynccontextmanager
async def network() -> AsyncIterator[Network]:
    """Give the network of the running loop. Its sockets are closed when nobody uses it any more."""
    loop = asyncio.get_running_loop()
    found = _networks.get(loop)
    if found is None:
        found = _networks[loop] = Network()
    found.users += 1
    try:
        await found.started()
        yield found
    finally:
        found.users -= 1
        if not found.users:
            if _networks.get(loop) is found:
                del _networks[loop]
            closing = loop.create_task(found.close())
            cancelled = await outlast_cancellation(closing)
            closing.result()
            if cancelled is not None:
                raise cancelled


def _open() -> AsyncZeroconf:
    """Open the sockets: of IPv4 and IPv6, or of the one that there is."""
    failure: Exception | None = None
    by_address, by_index = _interfaces()
    for interfaces, version in (
        (by_address + by_index, IPVersion.All),
        (by_address, IPVersion.V4Only),
        (by_index, IPVersion.V6Only),
    ):
        try:
            if interfaces:
                return AsyncZeroconf(interfaces=interfaces, ip_version=version)
        except (OSError, RuntimeError) as error:
            failure = error
    raise DiscoveryFailed(
        f"multicast DNS is not possible on this machine: {failure}",
        remedy="Look whether there is a network interface, and whether UDP port 5353 can be shared.",
    ) from failure


def _interfaces() -> tuple[list[str | int | tuple[tuple[str, int, int], int]], list[Any]]:
    """Return the IPv4 addresses of this machine, and the indexes of interfaces with an IPv6 address.

    Not zeroconf's own choice of all: that has ::1, over which no multicast goes, and warns about it.
    """
    by_address: list[str | int | tuple[tuple[str, int, int], int]] = []
    by_index: list[Any] = []
    for adapter in ifaddr.get_adapters():
        by_address += [ip.ip for ip in adapter.ips if isinstance(ip.ip, str)]
        if adapter.index is not None and any(not isinstance(ip.ip, str) and ip.ip[0] != "::1" for ip in adapter.ips):
            by_index.append(adapter.index)
    return by_address, by_index


def _info(name: str, announcement: Announcement) -> ServiceInfo:
    """Return the service as zeroconf wants it: also for other programs that look into the network."""
    host, port = split_address(announcement.metadata.address)
    addresses = []
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            addresses.append(socket.inet_pton(family, host.partition("%")[0]))
    server = f"{announcement.publisher.session[:16]}-{name.partition('.')[0][-8:]}.local."
    return ServiceInfo(TYPE, name, port, properties=announcement.text, server=server, addresses=addresses)


def _nothing(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
    """What a browser calls: the network listens to the records themselves."""
