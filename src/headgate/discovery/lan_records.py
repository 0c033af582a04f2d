"""What `LanDiscovery` puts into DNS-SD, and how it is read. Pure.

A worker is an instance of the service ``_headgate._tcp.local.``. Its name is made of digests of the namespace and of
the worker's uid, so that namespaces never mix, and others' instances are passed over without being looked at. Its TXT
record carries the record of the worker as JSON, cut into entries of at most 255 bytes, because that is what DNS-SD
allows:  txtvers=1  h0={"worker":{"uid":...  h1=...
"""

from __future__ import annotations

from typing import Final, NamedTuple

from headgate.discovery.namespaces import digest
from headgate.discovery.records import decoded, encoded, from_record, split_address, to_record
from headgate.errors import InvalidArgument
from headgate.workers.model import WorkerMetadata

TYPE: Final = "_headgate._tcp.local."
MAX_BYTES: Final = 6 * 1024
"""Bytes of the longest record in a LAN: with the other records it must fit into one packet of multicast DNS."""
MAX_WORKERS: Final = 1000
"""Workers of one namespace that are kept. Anybody in the network can announce more."""
_CHUNK: Final = 240
_REMEMBERED: Final = 10.0
"""Seconds for which it is known that a worker is gone: packets that were sent before may come after."""
_MOST: Final = MAX_BYTES + 1024


class Place(NamedTuple):
    """A publisher: where it can be asked whether it lives, and by which session it is known there."""

    host: str
    port: int
    """0: nowhere."""
    session: str


class Announcement(NamedTuple):
    """One announcement of a worker."""

    metadata: WorkerMetadata
    publisher: Place
    """The publisher that announced the worker first, and whose end is the worker's. It is on the worker's host."""
    revision: int
    """Grows with each announcement of the worker."""
    text: bytes
    """The TXT record."""


def prefix_of(namespace: str) -> str:
    """Return how the names of all instances of a namespace begin."""
    return digest(namespace, length=16) + "-"


def name_of(namespace: str, uid: str) -> str:
    """Return the name of a worker's instance."""
    return f"{prefix_of(namespace)}{digest(uid, length=24)}.{TYPE}"


def announcement_of(metadata: WorkerMetadata, session: str, port: int, revision: int) -> Announcement:
    """Return an announcement with its TXT record, or raise `InvalidArgument` if that is too long."""
    record = to_record(metadata)
    encoded(record, MAX_BYTES)  # raises with the worker's uid
    data = encoded({"worker": record, "session": session, "port": port, "revision": revision}, _MOST)
    entries = [b"txtvers=1"]
    for number, at in enumerate(range(0, len(data), _CHUNK)):
        entries.append(b"h%d=%s" % (number, data[at : at + _CHUNK]))
    text = b"".join(bytes([len(entry)]) + entry for entry in entries)
    return Announcement(metadata, Place(split_address(metadata.address)[0], port, session), revision, text)


def from_text(text: bytes) -> Announcement:
    """Return what a TXT record announces, or raise `InvalidArgument`."""
    if len(text) > 2 * _MOST:
        raise InvalidArgument("a TXT record is too long")
    parts: dict[int, bytes] = {}
    at = 0
    while at < len(text):
        entry = text[at + 1 : at + 1 + text[at]]
        at += 1 + text[at]
        key, _, value = entry.partition(b"=")
        if key[:1] == b"h" and key[1:].isdigit() and len(key) <= 4:
            parts[int(key[1:])] = value
    if sorted(parts) != list(range(len(parts))):
        raise InvalidArgument("a TXT record has gaps")
    record = decoded(b"".join(parts[number] for number in range(len(parts))), _MOST)
    session, port, revision = record.get("session"), record.get("port"), record.get("revision")
    if not isinstance(session, str) or not 0 < len(session) <= 64 or not session.isascii():
        raise InvalidArgument("session of a TXT record must be a short string")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 65536:
        raise InvalidArgument("port of a TXT record must be a port or 0")
    if not isinstance(revision, int) or isinstance(revision, bool) or not 0 <= revision < 2**53:
        raise InvalidArgument("revision of a TXT record must be a whole number")
    metadata = from_record(record.get("worker"))
    if metadata.address.startswith("unix:"):
        raise InvalidArgument("a worker of a LAN has no Unix socket")
    return Announcement(metadata, Place(split_address(metadata.address)[0], port, session), revision, text)


class Known:
    """The workers of one namespace, at most `most` of them.

    Where there is no room, the oldest whose publisher has not answered makes place; where all have, news are ignored.
    So a flood of records that were made up costs bounded memory, and pushes out no worker that is known to live.
    """

    def __init__(self, namespace: str, most: int = MAX_WORKERS) -> None:
        self.workers: dict[str, Announcement] = {}
        self._namespace = namespace
        self._most = most
        self._by_publisher: dict[Place, set[str]] = {}
        self._answered: set[Place] = set()
        self._gone: dict[str, tuple[int, float]] = {}  # the last revision, and when it ended; the oldest first

    def announced(self, name: str, text: bytes, now: float) -> bool:
        """Read a TXT record. Return whether that changed anything."""
        try:
            news = from_text(text)
        except InvalidArgument:
            return False
        if name.lower() != name_of(self._namespace, news.metadata.uid):
            return False
        self._forget(now)
        if self.revision(name) >= news.revision:
            return False
        if name in self.workers:
            self._take(name)
        elif len(self.workers) >= self._most and not self._make_room():
            return False
        self.workers[name] = news
        self._by_publisher.setdefault(news.publisher, set()).add(name)
        return True

    def revision(self, name: str) -> int:
        """Return the last revision of a worker that is there, or went a moment ago; -1: nothing is known."""
        if name in self.workers:
            return self.workers[name].revision
        return self._gone[name][0] if name in self._gone else -1

    def withdrawn(self, name: str, text: bytes, now: float) -> bool:
        """Forget a worker if this is its newest TXT record. Return whether it was."""
        if name not in self.workers or self.workers[name].text != text:
            return False  # an older one, that was replaced
        self._remove(name, now)
        return True

    def answered(self, publisher: Place) -> None:
        """Note that a publisher lives."""
        self._answered.add(publisher)

    def has_answered(self, publisher: Place) -> bool:
        """Whether a publisher is known to live."""
        return publisher in self._answered

    def ended(self, publisher: Place, now: float) -> list[str]:
        """Forget all workers of a publisher, and return their names."""
        self._answered.discard(publisher)
        names = self.of(publisher)
        for name in names:
            self._remove(name, now)
        return names

    def of(self, publisher: Place) -> list[str]:
        """Return the names of all workers of a publisher."""
        return sorted(self._by_publisher.get(publisher, ()))

    def publishers(self) -> dict[Place, str]:
        """Return all publishers, each with the name of one of its workers."""
        return {publisher: next(iter(names)) for publisher, names in self._by_publisher.items()}

    def _take(self, name: str) -> Announcement:
        news = self.workers.pop(name)
        names = self._by_publisher[news.publisher]
        names.discard(name)
        if not names:
            del self._by_publisher[news.publisher]
        return news

    def _remove(self, name: str, now: float) -> None:
        self._gone.pop(name, None)
        self._gone[name] = self._take(name).revision, now

    def _forget(self, now: float) -> None:
        for name, (_, since) in list(self._gone.items()):
            if now - since < _REMEMBERED and len(self._gone) <= self._most:
                break
            del self._gone[name]

    def _make_room(self) -> bool:
        for name, news in self.workers.items():  # in the order in which they came
            if news.publisher not in self._answered:
                self._take(name)
                return True
        return False
