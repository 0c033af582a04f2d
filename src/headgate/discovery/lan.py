"""`LanDiscovery`: workers and pools of one local network find each other by multicast DNS (DNS-SD).

Anybody in the network can announce workers. What is found is a hint, and trust comes from TLS alone.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from headgate.core.clock import clock
from headgate.discovery.lan_liveness import Beacon, is_loopback
from headgate.discovery.namespaces import checked_namespace
from headgate.discovery.news import News, checked_type
from headgate.discovery.port import DiscoveryEvent, DiscoveryEventType, Filter
from headgate.discovery.records import joined_address, split_address, to_record
from headgate.errors import DiscoveryFailed, InvalidArgument, InvalidType
from headgate.workers.model import WorkerMetadata

if TYPE_CHECKING:
    from headgate.discovery.lan_network import Network
    from headgate.discovery.lan_records import Announcement

_FAR: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation, which nobody has: the way to them is the default route."""


class LanDiscovery:
    """Finds the workers of the local network that are announced in the same namespace.

    Without a namespace each discovery has one of its own; it can be passed on by pickling. `advertise_host` is the host
    name or address under which workers that are announced here can be reached, or a function that returns it and is
    called once. Without it a worker is announced with the host that it listens on, or, if that is all addresses, with
    the address of this machine's default route.
    """

    bind_host: str = "0.0.0.0"
    """Where workers that a pool starts for this discovery listen."""

    def __init__(self, namespace: str | None = None, *, advertise_host: str | Callable[[], str] | None = None) -> None:
        self.namespace: str = checked_namespace(namespace)
        if not (advertise_host is None or isinstance(advertise_host, str) or callable(advertise_host)):
            raise InvalidType(
                f"advertise_host must be a string, a function that returns one, or None, "
                f"got {type(advertise_host).__name__}"
            )
        self._advertise_host = _checked_host(advertise_host) if isinstance(advertise_host, str) else advertise_host
        _require_zeroconf()

    def __eq__(self, other: object) -> bool:
        return self.namespace == other.namespace if isinstance(other, LanDiscovery) else NotImplemented

    def __hash__(self) -> int:
        return hash((LanDiscovery, self.namespace))

    def __repr__(self) -> str:
        return f"LanDiscovery({self.namespace!r})"

    @property
    def publisher(self) -> LanPublisher:
        """A new publisher, to be entered with ``async with``. What it has announced goes when it is left."""
        return LanPublisher(self)

    def advertised(self, address: str) -> str:
        """Return the address under which others reach a worker that listens on this one."""
        if address.startswith("unix:"):
            raise InvalidArgument(
                f"a worker that listens on {address} cannot be announced in a LAN",
                remedy="Let it listen on a TCP port, or use LocalDiscovery.",
            )
        host, port = split_address(address)
        if callable(self._advertise_host):
            self._advertise_host = _checked_host(self._advertise_host())
        if self._advertise_host is not None:
            return joined_address(self._advertise_host, port)
        if _is_wildcard(host):
            host = _routable_host()
        if is_loopback(host):
            warnings.warn(
                f"a worker is announced at {joined_address(host, port)}, which other machines cannot reach: let it "
                "listen on another address, or pass advertise_host",
                RuntimeWarning,
                stacklevel=3,
            )
        return joined_address(host, port)

    async def subscribe(self, filter: Filter | None = None) -> AsyncIterator[DiscoveryEvent]:
        """Yield a "worker-added" for each worker that is there, then every change."""
        news = News(filter)
        told: dict[str, Announcement] = {}
        changed = asyncio.Event()
        async with _network() as lan, lan.view(self.namespace) as view:
            view.changed.add(changed)
            try:
                while True:
                    changed.clear()
                    for name in [name for name in told if name not in view.known.workers]:
                        for event in news.gone(told.pop(name).metadata.uid):
                            yield event
                    for name, announcement in list(view.known.workers.items()):
                        if told.get(name) is not announcement:
                            told[name] = announcement
                            for event in news.present(announcement.metadata):
                                yield event
                    await changed.wait()
            finally:
                view.changed.discard(changed)


class LanPublisher:
    """Announces workers in one namespace of the local network, until it is left."""

    def __init__(self, discovery: LanDiscovery) -> None:
        self._discovery = discovery
        self._session = clock.token()
        self._beacons: dict[str, Beacon] = {}
        self._stack = AsyncExitStack()
        self._network: Network | None = None

    async def __aenter__(self) -> Self:
        try:
            self._network = await self._stack.enter_async_context(_network())
            await self._stack.enter_async_context(self._network.view(self._discovery.namespace))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        network, self._network = self._network, None
        beacons, self._beacons = self._beacons, {}
        try:
            for beacon in beacons.values():
                beacon.close()
            if network is not None:
                await network.drop_all(self)
        finally:
            await self._stack.aclose()

    async def publish(self, type: DiscoveryEventType, metadata: WorkerMetadata) -> None:
        """Announce that a worker came, changed or went. One that is not known and has changed is announced as new."""
        checked_type(type)
        to_record(metadata)
        network = self._network
        if network is None:
            raise DiscoveryFailed("the publisher of a LanDiscovery is not entered", remedy="Use it with `async with`.")
        namespace = self._discovery.namespace
        if type == "worker-dropped":
            network.drop(namespace, metadata.uid)
            return
        announced = replace(metadata, address=self._discovery.advertised(metadata.address))
        beacon = self._beacon(split_address(announced.address)[0])
        network.announce(namespace, announced, self._session, beacon.port, self)

    def _beacon(self, host: str) -> Beacon:
        """Return what shows that this publisher lives: on loopback for a worker there, else on all addresses."""
        where = host if is_loopback(host) else ""
        if where not in self._beacons:
            self._beacons[where] = Beacon(self._session, host)
        return self._beacons[where]


def _network() -> AbstractAsyncContextManager[Network]:
    """Return what gives the network of the running loop, or raise `DiscoveryFailed` if zeroconf is not installed."""
    _require_zeroconf()
    from headgate.discovery.lan_network import network  # not above: zeroconf takes a while to import

    return network()


def _require_zeroconf() -> None:
    if find_spec("zeroconf") is None:
        raise DiscoveryFailed(
            "LanDiscovery needs the package zeroconf, which is not installed",
            remedy="Run: pip install 'headgate[lan]'.",
        )


def _checked_host(host: object) -> str:
    if not isinstance(host, str):
        raise InvalidType(f"advertise_host must be a string, got {type(host).__name__}")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if _is_wildcard(host):
        raise InvalidArgument(
            f"advertise_host must be an address or a name that others can reach, got {host!r}",
            remedy="Pass the address of this machine in the network, or None to have it found.",
        )
    split_address(joined_address(host, 1))  # raises for what cannot be part of an address
    return host


def _is_wildcard(host: str) -> bool:
    if not host.strip() or host == "*":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return False


def _routable_host() -> str:
    """Return the address of the default route, else of any interface, else loopback."""
    for family, far in zip((socket.AF_INET, socket.AF_INET6), _FAR, strict=True):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as asking:
                asking.connect((far, 9))  # sends nothing
                host = str(asking.getsockname()[0])
        except OSError:
            continue
        if not _is_wildcard(host):
            return host
    import ifaddr  # which zeroconf needs too

    found = [ip.ip for adapter in ifaddr.get_adapters() for ip in adapter.ips]
    addresses = [ipaddress.ip_address(ip if isinstance(ip, str) else ip[0]) for ip in found]
    usable = [one for one in addresses if not one.is_loopback and not one.is_link_local]
    return str(min(usable, key=lambda one: one.version)) if usable else "127.0.0.1"
