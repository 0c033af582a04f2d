"""`WorkerCredentials`: the certificates with which clients and workers know each other, and their rotation.

A value: it can be compared, pickled and kept. gRPC's own objects are made of it when they are asked for. Material that
is read again (`reload=True`, or a provider) is read in a thread of its own, never on an event loop, and nobody waits
long for it: whoever needs certificates while a provider is slow, or fails, gets those that were there before.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from headgate.core.checks import checked_flag
from headgate.core.clock import clock
from headgate.errors import InvalidArgument, InvalidType

if TYPE_CHECKING:
    import ssl

    from headgate.workers.protocol.transport import grpc

StrPath: TypeAlias = "str | os.PathLike[str]"

PATIENCE = 2.0
"""Seconds that a client waits for new material before it connects with what there is."""
HANDSHAKE_PATIENCE = 0.5
"""Seconds that a worker waits for new material when somebody connects: other handshakes wait meanwhile."""
SETTLING = (0.05, 0.1, 0.2, 0.4)
"""Seconds between readings of files that do not fit together: somebody may be replacing them one after the other."""

_log = logging.getLogger("headgate.workers")


class Material(NamedTuple):
    """What certificates are made of: PEM."""

    ca_cert: bytes
    worker_key: bytes
    worker_cert: bytes

    def __repr__(self) -> str:
        return "Material(...)"  # never the key


class Source(Protocol):
    """Where newer material comes from."""

    @property
    def pause(self) -> float:
        """Seconds for which an answer counts as new."""
        ...

    def read(self) -> Material:
        """Return the newest material. Blocks."""
        ...


@dataclass(frozen=True)
class WorkerCredentials:
    """A CA, and a key with its certificate signed by that CA, all PEM. Clients and workers use the same kind.

    With `mutual` both sides show a certificate and check the other's. Without, only the worker shows one, and everybody
    who can connect may call it; a client then needs no key and no certificate of its own and may pass ``b""`` for both.

    The name in a worker's certificate must be the host of its address or, with `identity`, that name, whatever the
    address is.
    """

    ca_cert: bytes
    """Certificates of the CAs that are trusted. Everybody with a certificate of one of them may run code here."""
    worker_key: bytes = field(repr=False)
    """The private key, without a password."""
    worker_cert: bytes
    """The certificate of the key, followed by those between it and the CA, if there are any."""
    mutual: bool = True
    """Whether clients show a certificate too."""
    identity: str | None = None
    """The name that a worker's certificate must have, in place of the host of its address."""
    source: Source | None = field(default=None, kw_only=True)
    """Where newer material comes from; see `from_files` and `from_provider`."""
    _newest: _Newest | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checked_flag("mutual", self.mutual)
        if self.identity is not None:
            _check_identity(self.identity)
        check_material(self.material, self.mutual)
        self._watch()

    def _watch(self) -> None:
        if self.source is not None:
            object.__setattr__(self, "_newest", _Newest(self.source, self.material, self.mutual))

    @classmethod
    def from_files(
        cls,
        ca_path: StrPath,
        key_path: StrPath | None,
        cert_path: StrPath | None,
        mutual: bool = True,
        *,
        identity: str | None = None,
        reload: bool = False,
    ) -> WorkerCredentials:
        """Read credentials from PEM files. FileNotFoundError or PermissionError: one of them cannot be read.

        With `reload`, files that were replaced are read again for each new connection. Pickled credentials then take
        the paths along, and are read again wherever they arrive.
        """
        checked_flag("reload", reload)
        paths = (_checked_path("ca_path", ca_path), *(_checked_optional(key_path, cert_path)))
        files = Files(*paths)
        return cls(*files.read(), mutual, identity, source=files if reload else None)

    @classmethod
    def from_provider(
        cls,
        provider: Callable[[], Material | tuple[bytes, bytes, bytes]],
        mutual: bool = True,
        *,
        identity: str | None = None,
    ) -> WorkerCredentials:
        """Take credentials from a function that returns (ca_cert, worker_key, worker_cert).

        It is called here once, and later in a thread, once a second at most, when somebody connects. To be pickled
        with the credentials it must be a function of a module.
        """
        if not callable(provider):
            raise InvalidType(f"provider must be callable, got {type(provider).__name__}")
        given = Provided(provider)
        return cls(*given.read(), mutual, identity, source=given)

    @property
    def material(self) -> Material:
        """The certificates of this value."""
        return Material(self.ca_cert, self.worker_key, self.worker_cert)

    @property
    def newest(self) -> Material:
        """The newest certificates that are known. Await `refreshed` first for newer."""
        return self.material if self._newest is None else self._newest.material

    @property
    def server_credentials(self) -> grpc.ServerCredentials:
        """What a gRPC server listens with. If there is a source, each new connection gets the newest material."""
        from headgate.workers.protocol.transport import grpc

        if not self.worker_key:
            raise InvalidArgument(
                "a worker needs a key and a certificate, and these credentials have none",
                remedy="Pass worker_key and worker_cert: `headgate certs DIR` makes both for development.",
            )
        if self._newest is None:
            pairs = [(self.worker_key, self.worker_cert)]
            return grpc.ssl_server_credentials(pairs, self._client_ca(self.material), self.mutual)
        newest, served = self._newest, self._newest.material

        def fetch() -> Any:  # by a thread of gRPC, at each handshake, one after the other
            nonlocal served
            found = newest.wait(HANDSHAKE_PATIENCE)
            if found == served:
                return None
            served = found
            return self._configuration(found)

        return grpc.dynamic_ssl_server_credentials(self._configuration(served), fetch, self.mutual)

    def _configuration(self, material: Material) -> Any:
        from headgate.workers.protocol.transport import grpc

        pairs = [(material.worker_key, material.worker_cert)]
        return grpc.ssl_server_certificate_configuration(pairs, self._client_ca(material))

    def _client_ca(self, material: Material) -> bytes | None:
        return material.ca_cert if self.mutual else None

    @property
    def client_credentials(self) -> grpc.ChannelCredentials:
        """What a gRPC channel connects with: the newest material that is known. Await `refreshed` first for newer."""
        from headgate.workers.protocol.transport import grpc

        material = self.newest
        return grpc.ssl_channel_credentials(*(material if self.mutual else material[:1]))

    def expires_at(self) -> float | None:
        """Return when the newest certificate expires, in Unix seconds, or None if there is no certificate.

        Reads it again if it has a source, and may block for half a second.
        """
        material = self.material if self._newest is None else self._newest.wait(HANDSHAKE_PATIENCE)
        return certificate_expiry(material.worker_cert) if material.worker_cert else None

    async def refreshed(self) -> WorkerCredentials:
        """Return these credentials with the newest material, or with the old if no newer can be had in time."""
        if self._newest is None:
            return self
        return self.renewed(await self._newest.wait_async(PATIENCE))

    def renewed(self, material: Material) -> WorkerCredentials:
        """Return these credentials with other material from the same source."""
        if material == self.material:
            return self
        new = replace(self, ca_cert=material[0], worker_key=material[1], worker_cert=material[2])
        object.__setattr__(new, "_newest", self._newest)
        return new

    def __repr__(self) -> str:
        parts = [f"mutual={self.mutual}", *([f"identity={self.identity!r}"] if self.identity else [])]
        return f"<WorkerCredentials {', '.join(parts)}{f', from {self.source}' if self.source else ''}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (*self.material, self.mutual, self.identity, self.source)


def _arrive(*given: Any) -> WorkerCredentials:
    *fields, source = given
    return WorkerCredentials(*fields, source=source)


# -- where material comes from ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Files:
    """Three PEM files."""

    ca_path: str
    key_path: str | None
    cert_path: str | None
    pause: float = 0.1

    def read(self) -> Material:
        """Read the files."""
        return Material(
            *(b"" if path is None else _read(path) for path in (self.ca_path, self.key_path, self.cert_path))
        )

    def __str__(self) -> str:
        return ", ".join(path for path in (self.ca_path, self.key_path, self.cert_path) if path is not None)


@dataclass(frozen=True)
class Provided:
    """A function of the user's."""

    provider: Callable[[], Material | tuple[bytes, bytes, bytes]]
    pause: float = 1.0

    def read(self) -> Material:
        """Call the function."""
        given = self.provider()
        if asyncio.iscoroutine(given):
            given.close()
        if not isinstance(given, tuple) or len(given) != 3:
            raise InvalidType(
                f"a provider must return (ca_cert, worker_key, worker_cert), it returned {type(given).__name__}",
                remedy="Return a tuple of three bytes from a plain function.",
            )
        return Material(*given)

    def __str__(self) -> str:
        return str(getattr(self.provider, "__qualname__", type(self.provider).__name__))


class _Newest:
    """The newest material of a source, and the thread that asks the source for it. Usable from any thread."""

    def __init__(self, source: Source, first: Material, mutual: bool) -> None:
        self.material: Material = first
        self._source = source
        self._mutual = mutual
        self._lock = threading.Lock()
        self._reading: threading.Event | None = None  # set when the reading is over
        self._listeners: list[Callable[[], None]] = []
        self._begun = 0.0
        self._read_at: float | None = None  # when a reading last ended
        self._warned: set[str] = set()

    def wait(self, patience: float) -> Material:
        """Return the newest material, or what there is after so many seconds. Blocks for so long at most."""
        reading = self._begin(None)
        if reading is not None:
            left = self._begun + patience - clock.now()  # nobody waits again for what is late already
            if left > 0 and not reading.wait(left):
                self._is_late(patience)
        return self.material

    async def wait_async(self, patience: float) -> Material:
        """Return the newest material, or what there is after so many seconds, without blocking the loop."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            try:
                loop.call_soon_threadsafe(_end, over)
            except RuntimeError:  # that loop is closed
                pass

        if self._begin(tell) is not None:
            left = self._begun + patience - clock.now()
            if left > 0 and not (await asyncio.wait((over,), timeout=left))[0]:
                self._is_late(patience)
        return self.material

    def _begin(self, tell: Callable[[], None] | None) -> threading.Event | None:
        """Begin to read, unless that was done just now: None. Else `tell` is called at the end."""
        with self._lock:
            now = clock.now()
            reading = self._reading
            if reading is None:
                if self._read_at is not None and now - self._read_at < self._source.pause:
                    return None
                reading, self._begun = threading.Event(), now
                thread = threading.Thread(target=self._read, args=(reading,), name="headgate-credentials", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads
                    self._warn(f"no thread could be started: {error}")
                    return None
                self._reading = reading
            if tell is not None:
                self._listeners.append(tell)
            return reading

    def _read(self, reading: threading.Event) -> None:
        problem, found = "", None
        for pause in (*SETTLING, None):
            try:
                found = self._source.read()
                if found != self.material:
                    check_material(found, self._mutual)
            except InvalidArgument as error:  # perhaps half of them is replaced by now
                problem, found = error.message, None
                if pause is not None and isinstance(self._source, Files):
                    threading.Event().wait(pause)
                    continue
            except Exception as error:
                problem, found = f"{type(error).__name__}: {error}", None
            break
        with self._lock:
            if found is not None:
                self.material = found
            self._reading, self._read_at = None, clock.now()
            listeners, self._listeners = self._listeners, []
        if found is None:
            self._warn(problem)
        else:
            self._warned.clear()
        reading.set()
        for tell in listeners:
            tell()

    def _is_late(self, patience: float) -> None:
        self._warn(f"nothing came within {patience:g} s")

    def _warn(self, problem: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            _log.warning("Certificates could not be renewed from %s, the old ones are used: %s", self._source, problem)


def _end(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)


# -- checks -----------------------------------------------------------------------------------------------------------


def check_material(material: Material, mutual: bool) -> None:
    """Raise InvalidArgument unless these are PEM and the key belongs to the certificate."""
    import ssl

    for name, data in zip(Material._fields, material, strict=True):
        if not isinstance(data, bytes):
            raise InvalidType(
                f"{name} must be bytes (PEM), got {type(data).__name__}",
                remedy="Pass the contents of the file, or use WorkerCredentials.from_files(...).",
            )
    if not mutual and not material.worker_key and not material.worker_cert:
        _check_ca(material.ca_cert)
        return
    for name, data in zip(Material._fields, material, strict=True):
        if b"-----BEGIN " not in data:
            raise InvalidArgument(
                f"{name} is {'not PEM' if data else 'empty'}",
                remedy="PEM begins with -----BEGIN. `openssl x509 -inform DER` and `openssl pkey -inform DER` convert.",
            )
    _check_ca(material.ca_cert)
    load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), material)


def certificate_expiry(pem: bytes) -> float:
    """Return when the first certificate of a PEM expires, in Unix seconds.

    The ssl module tells that of a peer's certificate only, and `cryptography` is an extra that no worker needs. The
    certificate was checked before, so that it is read here without further checks (RFC 5280, 4.1).
    """
    import ssl
    from datetime import UTC, datetime

    first = pem[pem.index(_BEGIN) : pem.index(_END) + len(_END)].decode("ascii")
    _, certificate, _ = _der_element(ssl.PEM_cert_to_DER_cert(first))
    _, rest, _ = _der_element(certificate)
    parts = []
    while rest:
        tag, content, rest = _der_element(rest)
        if tag == _SEQUENCE:
            parts.append(content)
    _, _, last = _der_element(parts[2])  # after the signature's algorithm and the issuer come the two dates
    tag, when, _ = _der_element(last)
    text = when.decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: 1950 to 2049
        text = ("20" if text < "50" else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
_SEQUENCE, _UTC_TIME = 0x30, 0x17


def _der_element(data: bytes) -> tuple[int, bytes, bytes]:
    """Return the tag and the content of the first element of DER, and what follows it."""
    length, begin = data[1], 2
    if length & 0x80:  # then it says how many bytes the length has
        begin += length & 0x7F
        length = int.from_bytes(data[2:begin], "big")
    return data[0], data[begin : begin + length], data[begin + length :]


def _check_ca(ca_cert: bytes) -> None:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=ca_cert.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(
            f"ca_cert has no certificate that can be read: {_reason(error)}",
            remedy="Pass the CA's certificate as PEM: -----BEGIN CERTIFICATE-----.",
        ) from None


def load_pair(context: ssl.SSLContext, material: Material) -> None:
    """Give a context the key and the certificate. InvalidArgument: they cannot be read, or are no pair."""
    import ssl

    asked: list[bool] = []

    def password() -> bytes:
        asked.append(True)
        return b""

    try:
        with _as_file(material.worker_cert) as cert, _as_file(material.worker_key) as key:
            context.load_cert_chain(cert, key, password)
    except (ssl.SSLError, OSError, ValueError) as error:
        if asked:
            raise InvalidArgument(
                "worker_key has a password",
                remedy="Remove it: openssl pkey -in key.pem -out plain.pem. Let only your user read the new file.",
            ) from None
        if isinstance(error, ssl.SSLError) and "MISMATCH" in (error.reason or ""):
            raise InvalidArgument(
                "worker_key is not the key of worker_cert",
                remedy="Pass the key that the certificate was made for. Were the arguments given in another order?",
            ) from None
        raise InvalidArgument(
            f"worker_key or worker_cert cannot be read: {_reason(error)}",
            remedy="Pass a private key and its certificate, both PEM. `headgate certs DIR` makes them for development.",
        ) from None


class _as_file:  # noqa: N801 - used as `with _as_file(...):`
    """A path under which the ssl module reads these bytes: it takes keys from files only.

    On Linux the file is in memory. Elsewhere it is a temporary file of this user, removed at the end of the block.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fd = -1
        self._path = ""

    def __enter__(self) -> str:
        import tempfile

        try:
            self._fd = os.memfd_create("headgate", os.MFD_CLOEXEC)
            path = f"/proc/self/fd/{self._fd}"
            if not os.path.exists(path):
                os.close(self._fd)
                self._fd = -1
        except (AttributeError, OSError):  # no Linux, or a sandbox
            path = ""
        if self._fd < 0:
            self._fd, path = tempfile.mkstemp(prefix="headgate-")  # 0600
            self._path = path
        try:
            with open(self._fd, "wb", closefd=False) as file:
                file.write(self._data)
        except BaseException:
            self.__exit__()
            raise
        return path

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        if self._path:
            os.unlink(self._path)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)


def _check_identity(identity: object) -> None:
    if not isinstance(identity, str):
        raise InvalidType(f"identity must be a string or None, got {type(identity).__name__}")
    if not identity.strip() or not identity.isascii() or any(one.isspace() or one in "/:@" for one in identity):
        raise InvalidArgument(
            f"identity must be a name as in a certificate, got {identity!r}",
            remedy="Pass one of the DNS names of the worker's certificate, such as 'workers.example.internal'.",
        )


def _checked_path(name: str, path: object) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidType(f"{name} must be a path, got {type(path).__name__}")
    if not (text := os.fspath(path)) or not isinstance(text, str):
        raise InvalidArgument(f"{name} must be a path, got {path!r}")
    return os.path.abspath(text)


def _checked_optional(key_path: object, cert_path: object) -> tuple[str | None, str | None]:
    if key_path is None and cert_path is None:
        return None, None
    return _checked_path("key_path", key_path), _checked_path("cert_path", cert_path)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
