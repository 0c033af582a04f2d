"""`DnsDiscovery`: the addresses of a host name are workers, as with a headless Service of Kubernetes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable

from headgate.core.checks import checked_flag, checked_names, checked_positive_seconds
from headgate.core.threads import Threads, call_in_thread
from headgate.discovery.dns_client import ask
from headgate.discovery.news import News
from headgate.discovery.port import DiscoveryEvent, Filter
from headgate.discovery.records import joined_address, split_address
from headgate.discovery.static import NoPublisher, listed_worker
from headgate.errors import InvalidArgument, InvalidType

PORT = 50051
"""The port of workers when none is given: the one that gRPC servers have by habit."""

Resolver = Callable[[str], Iterable[str]]
"""Returns the IP addresses of a host name, and raises OSError when it does not know. It is called in a thread."""


class DnsDiscovery:
    """Finds a worker at each address (A and AAAA) of a host name, which is looked up again every `interval` seconds.

    A lookup that fails changes nothing: the last answer stays, and the failure is logged once. All workers listen on
    the same port; `secure` and `tags` are theirs. `nameserver` ("host" or "host:port") is asked instead of the system's
    resolver, and `resolver`, a function from a host name to addresses, instead of both.
    """

    publishes: bool = False
    """Workers cannot be announced here."""

    def __init__(
        self,
        host: str,
        port: int = PORT,
        *,
        interval: float = 5.0,
        secure: bool = False,
        tags: Iterable[str] = (),
        nameserver: str | None = None,
        resolver: Resolver | None = None,
    ) -> None:
        if not isinstance(host, str):
            raise InvalidType(f"host must be a string, got {type(host).__name__}")
        if not isinstance(port, int) or isinstance(port, bool):
            raise InvalidType(f"port must be a whole number, got {type(port).__name__}")
        split_address(joined_address(host, port))  # raises for what is no host or no port
        if resolver is not None and not callable(resolver):
            raise InvalidType(f"resolver must be a function of a host name or None, got {type(resolver).__name__}")
        every = checked_positive_seconds("interval", interval)
        if every is None:
            raise InvalidArgument("interval must be a number of seconds, got None")
        self.host = host
        self.port = port
        self.interval: float = every
        self.secure: bool = checked_flag("secure", secure)
        self.tags: frozenset[str] = checked_names("tags", tags)
        self.nameserver: str | None = _checked_nameserver(nameserver)
        self._resolver = resolver

    def _identity(self) -> tuple[object, ...]:
        return self.host, self.port, self.secure, self.tags, self.nameserver, self._resolver

    def __eq__(self, other: object) -> bool:
        return self._identity() == other._identity() if isinstance(other, DnsDiscovery) else NotImplemented

    def __hash__(self) -> int:
        return hash((DnsDiscovery, self.host, self.port))

    def __repr__(self) -> str:
        return f"DnsDiscovery({self.host!r}, {self.port})"

    @property
    def publisher(self) -> NoPublisher:
        """A publisher that refuses to announce workers."""
        return NoPublisher(f"DnsDiscovery finds what a name server knows of {self.host}")

    def addresses(self) -> set[str]:
        """Look the host name up now, in this thread, and return the addresses of its workers, or raise OSError."""
        if self._resolver is not None:
            found = set(self._resolver(self.host))
        elif self.nameserver is not None:
            found = ask(self.nameserver, self.host)
        else:
            found = _system_addresses(self.host)
        return {joined_address(address, self.port) for address in found}

    async def subscribe(self, filter: Filter | None = None) -> AsyncIterator[DiscoveryEvent]:
        """Yield a "worker-added" for each address, then what the lookups to come change."""
        news = News(filter)
        known: set[str] = set()
        failing = False
        loop = asyncio.get_running_loop()
        threads = Threads("headgate-dns")  # not the loop's: a lookup may hang, and the end of a loop would wait for it
        try:
            while True:
                try:
                    found = await loop.run_in_executor(threads, call_in_thread, self.addresses, ())
                except Exception as error:  # of the resolver, whatever it raises
                    if not failing:
                        _warn(self.host, error, len(known))
                    failing = True
                else:
                    failing = False
                    for address in sorted(known - found):
                        for event in news.gone(listed_worker(address, self.secure, self.tags).uid):
                            yield event
                    for address in sorted(found - known):
                        for event in news.present(listed_worker(address, self.secure, self.tags)):
                            yield event
                    known = found
                await asyncio.sleep(self.interval)
        finally:
            threads.shutdown(wait=False)


def _system_addresses(host: str) -> set[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == getattr(socket, "EAI_NODATA", None):  # the name exists, and has no address now
            return set()
        raise
    return {str(address[0]) for *_, address in found}


def _checked_nameserver(nameserver: object) -> str | None:
    if nameserver is None:
        return None
    if not isinstance(nameserver, str):
        raise InvalidType(f"nameserver must be a string or None, got {type(nameserver).__name__}")
    if ":" not in nameserver or (nameserver.count(":") > 1 and not nameserver.startswith("[")):
        nameserver = joined_address(nameserver, 53)
    split_address(nameserver)
    return nameserver


def _warn(host: str, error: Exception, known: int) -> None:
    import logging

    logging.getLogger("headgate.discovery").warning(
        "the addresses of %s cannot be looked up (%s: %s); the %d workers of the last answer stay",
        host,
        type(error).__name__,
        error,
        known,
    )
