"""Certificates for development: a CA, and certificates of workers, as files in one directory.

`make_certificates` makes them, `check_certificates` tells what is wrong with such a directory. Both need the package
`cryptography`, which ``pip install 'headgate[certs]'`` brings; TLS itself does not. What they make is good for
production too if you keep the CA's key where no worker is; most organisations have a CA of their own.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from headgate.core.clock import clock
from headgate.errors import InvalidArgument, InvalidType

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes, PrivateKeyTypes

T = TypeVar("T")

CA_CERT, CA_KEY = "ca-cert.pem", "ca-key.pem"
WORKER_CERT, WORKER_KEY = "worker-cert.pem", "worker-key.pem"
LOCAL = ("localhost", "127.0.0.1", "::1")
"""Names that every certificate has, besides the name of this machine."""
CA_DAYS, WORKER_DAYS = 3650, 365
SOON = timedelta(days=30)
"""A certificate that expires within so long is worth a warning."""
_SKEW = timedelta(minutes=5)  # clocks of other machines may be late
_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong in a directory of certificates, or soon will be."""

    level: Literal["error", "warning", "note"]
    file: str
    """The name of the file, or "" for the directory."""
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.level}: {self.file + ': ' if self.file else ''}{self.text}. {self.remedy}"


@dataclass(frozen=True)
class CertificateAuthority:
    """One CA in the file of the CA."""

    name: str
    """Its subject, such as CN=headgate development CA 1f3a."""
    expires: datetime
    signed_worker: bool
    """Whether the worker's certificate is of this CA."""


@dataclass(frozen=True)
class CertificateReport:
    """What is in a directory of certificates."""

    directory: str
    made: tuple[str, ...]
    """Paths of the files that were written, in order; none when a directory was only checked."""
    names: tuple[str, ...]
    """The names and addresses in the worker's certificate."""
    expires: datetime | None
    """Until when the worker's certificate is valid; None: it cannot be read."""
    ca_expires: datetime | None
    """Until when the CA's certificate is valid; of several, that of the CA which signed the worker's."""
    findings: tuple[Finding, ...] = ()
    cas: tuple[CertificateAuthority, ...] = ()
    """All CAs, in the order of their file."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; warnings and notes are no errors."""
        return not any(one.level == "error" for one in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON knows."""
        times = {name: None if at is None else at.isoformat() for name, at in self._times().items()}
        cas = [{**asdict(one), "expires": one.expires.isoformat()} for one in self.cas]
        return {**asdict(self), **times, "cas": cas, "ok": self.ok}

    def _times(self) -> dict[str, datetime | None]:
        return {"expires": self.expires, "ca_expires": self.ca_expires}


# -- making -----------------------------------------------------------------------------------------------------------


def make_certificates(
    directory: str | os.PathLike[str], names: Iterable[str] = (), *, days: int = WORKER_DAYS
) -> CertificateReport:
    """Make a CA and a worker's certificate in this directory, and the directory if there is none.

    The certificate is for localhost, for the name of this machine, and for `names`: host names and IP addresses. A CA
    that is there already signs it. FileExistsError: there is a worker's certificate already. Nothing is overwritten.
    """
    _need_cryptography()
    folder, names = os.path.abspath(os.fspath(directory)), _checked_names(names)
    if isinstance(days, bool) or not isinstance(days, int) or days < 1:
        raise InvalidArgument(f"days must be >= 1, got {days!r}")
    _make_directory(folder)
    for name in (WORKER_CERT, WORKER_KEY):
        if os.path.lexists(os.path.join(folder, name)):
            raise FileExistsError(
                f"{os.path.join(folder, name)} is there already, and nothing is overwritten: move it away to have a "
                "new certificate of the same CA, or use another directory"
            )
    found = [os.path.lexists(os.path.join(folder, name)) for name in (CA_CERT, CA_KEY)]
    if found == [True, False]:
        raise FileNotFoundError(
            f"{folder} has a {CA_CERT} and no {CA_KEY}, so nothing can be signed: bring the key, or use another "
            "directory for a CA of its own"
        )
    if found == [False, True]:
        raise FileExistsError(f"{folder} has a {CA_KEY} and no {CA_CERT}: bring the certificate, or move the key away")
    made: list[str] = []
    try:
        if not any(found):
            _make_ca(folder, made)
        _make_worker(folder, names, timedelta(days=days), made)
    except BaseException:
        for path in made:
            os.unlink(path)
        raise
    return replace(check_certificates(folder), made=tuple(made))


def pool_certificates(name: str) -> tuple[bytes, bytes, bytes]:
    """Make a CA for one pool and a certificate of it that has this name; return CA certificate, key and certificate.

    Nothing is written anywhere, and the key of the CA is forgotten: nobody can make another certificate of this pool.
    They are valid for as long as a CA of `make_certificates`, because nobody could renew them.
    """
    _need_cryptography()
    ca_key, ca = _new_ca(f"headgate pool {name}")
    key, cert = _new_worker(ca, ca_key, (name,), timedelta(days=CA_DAYS))
    return _cert_pem(ca), _key_pem(key), _cert_pem(cert)


def _make_ca(folder: str, made: list[str]) -> None:
    # Two CAs are told apart by their names, also in what other programs print.
    key, cert = _new_ca(f"headgate development CA {clock.token()[:8]}")
    _write(folder, CA_KEY, _key_pem(key), 0o600, made)
    _write(folder, CA_CERT, _cert_pem(cert), 0o644, made)


def _new_ca(subject: str) -> tuple[PrivateKeyTypes, x509.Certificate]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), _named(subject)
    signs = _usage(key_cert_sign=True, crl_sign=True)
    builder = _builder(name, key.public_key(), timedelta(days=CA_DAYS)).issuer_name(name)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return key, builder.add_extension(signs, critical=True).sign(key, hashes.SHA256())


def _make_worker(folder: str, names: tuple[str, ...], valid: timedelta, made: list[str]) -> None:
    from cryptography.hazmat.primitives import serialization

    cas = _load_certs(_read(folder, CA_CERT))
    ca_key = serialization.load_pem_private_key(_read(folder, CA_KEY), None)
    ca = next((one for one in cas if _belong_together(ca_key, one)), None)
    if ca is None:
        raise InvalidArgument(f"{CA_KEY} is not the key of {CA_CERT}", remedy="Use another directory.")
    key, cert = _new_worker(ca, ca_key, names, valid)
    _write(folder, WORKER_KEY, _key_pem(key), 0o600, made)
    _write(folder, WORKER_CERT, _cert_pem(cert), 0o644, made)


def _new_worker(
    ca: x509.Certificate, ca_key: PrivateKeyTypes, names: tuple[str, ...], valid: timedelta
) -> tuple[PrivateKeyTypes, x509.Certificate]:
    """Make a key and its certificate with these names, for both ends of a connection."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID as Purpose

    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_named("headgate worker"), key.public_key(), valid).issuer_name(ca.subject)
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(digital_signature=True), True),
        (x509.ExtendedKeyUsage([Purpose.SERVER_AUTH, Purpose.CLIENT_AUTH]), False),
        (x509.SubjectAlternativeName([_general(name) for name in names]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False),  # type: ignore[arg-type]
    ):
        builder = builder.add_extension(extension, critical)
    return key, builder.sign(ca_key, hashes.SHA256())  # type: ignore[arg-type]


def _builder(subject: x509.Name, key: CertificatePublicKeyTypes, valid: timedelta) -> x509.CertificateBuilder:
    from cryptography import x509

    now = _now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _named(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _checked_names(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise InvalidType("names must be a list of names, got one string", remedy=f"Pass [{names!r}].")
    given = list(names)
    for name in given:
        if not isinstance(name, str):
            raise InvalidType(f"a name must be a string, got {type(name).__name__}")
        if not (_is_address(name) or _NAME.fullmatch(name)):
            raise InvalidArgument(
                f"{name!r} is neither a host name nor an IP address",
                remedy="Pass names such as gpu-3.example.internal or 10.0.0.7, without a port.",
            )
    here = socket.gethostname()
    return tuple(dict.fromkeys([*LOCAL, *([here] if _NAME.fullmatch(here) else []), *given]))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _general(name: str) -> x509.GeneralName:
    from cryptography import x509

    return x509.IPAddress(ipaddress.ip_address(name)) if _is_address(name) else x509.DNSName(name)


def _make_directory(folder: str) -> None:
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        os.mkdir(folder, 0o700)
    except FileExistsError:
        found = os.stat(folder)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(f"{folder} is not a directory") from None
        if problem := _unsafe(found):
            raise PermissionError(f"keys are not safe in {folder}, {problem}") from None


def _unsafe(found: os.stat_result) -> str:
    if found.st_uid != os.geteuid():
        return f"which belongs to the user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"to which others can write (mode {stat.S_IMODE(found.st_mode):04o}): chmod 700 it"
    return ""


def _write(folder: str, name: str, data: bytes, mode: int, made: list[str]) -> None:
    path = os.path.join(folder, name)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # a link in its place is not followed
    made.append(path)
    with open(fd, "wb") as file:
        os.fchmod(fd, mode)  # whatever the umask is
        file.write(data)


def _key_pem(key: PrivateKeyTypes) -> bytes:
    from cryptography.hazmat.primitives import serialization as pem

    return key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())


def _cert_pem(cert: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return cert.public_bytes(Encoding.PEM)


def _public_pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as pem

    data: bytes = key.public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    return data


# -- checking ---------------------------------------------------------------------------------------------------------


def check_certificates(directory: str | os.PathLike[str]) -> CertificateReport:
    """Tell what is in a directory of certificates, and what is wrong with it. The CA's key may be elsewhere.

    The file of the CA may hold several, as while one takes the place of another.
    """
    _need_cryptography()
    folder = os.path.abspath(os.fspath(directory))
    if not os.path.isdir(folder):
        missing = Finding("error", "", f"there is no directory {folder}", f"Make it with `headgate certs {folder}`.")
        return CertificateReport(folder, (), (), None, None, (missing,))
    findings: list[Finding] = list(_about_directory(folder))
    cas = _load(folder, CA_CERT, _load_certs, findings) or []
    cert = _load(folder, WORKER_CERT, _load_cert, findings)
    keys = {name: _load(folder, name, _load_key, findings) for name in (WORKER_KEY, CA_KEY)}
    worker_key, ca_key = keys[WORKER_KEY], keys[CA_KEY]
    if worker_key is not None and cert is not None and not _belong_together(worker_key, cert):
        text = f"it is not the key of {WORKER_CERT}"
        findings.append(Finding("error", WORKER_KEY, text, "Put the key there that belongs to the certificate."))
    if ca_key is not None and cas and not any(_belong_together(ca_key, one) for one in cas):
        text = f"it is not the key of {CA_CERT}, as after a change of the CA"
        findings.append(Finding("note", CA_KEY, text, "Remove it; only making certificates needs a CA's key."))
    signer = next((one for one in cas if cert is not None and _signed(one, cert)), None)
    ca = signer or next(iter(cas), None)
    for name, one in ((CA_CERT, ca), (WORKER_CERT, cert)):
        if one is not None:
            findings.extend(_about_dates(name, one))
    findings.extend(_about_cas(cas, ca))
    if cas and cert is not None and signer is None:
        text = f"it is not signed by {'the' if len(cas) == 1 else 'a'} CA of {CA_CERT}"
        remedy = "Put a certificate of this CA there, or the CA that signed it."
        findings.append(Finding("error", WORKER_CERT, text, remedy))
    names = _names_of(cert)
    if cert is not None and not names:
        text = "it has no names (subjectAltName), so no client accepts it"
        findings.append(Finding("error", WORKER_CERT, text, "Make one with `headgate certs DIR --name HOST`."))
    expires, ca_expires = (None if one is None else one.not_valid_after_utc for one in (cert, ca))
    listed = tuple(
        CertificateAuthority(one.subject.rfc4514_string(), one.not_valid_after_utc, one is signer) for one in cas
    )
    return CertificateReport(folder, (), names, expires, ca_expires, tuple(findings), listed)


def _about_directory(folder: str) -> Iterator[Finding]:
    found = os.stat(folder)
    if problem := _unsafe(found):
        yield Finding("error", "", f"keys are not safe in this directory, {problem}", "Use a directory of your own.")


def _about_dates(name: str, cert: x509.Certificate) -> Iterator[Finding]:
    now, until = _now(), cert.not_valid_after_utc
    if now < cert.not_valid_before_utc:
        text = f"it is not valid before {cert.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        yield Finding("error", name, text, "Check the clock of this machine.")
    if now >= until:
        yield Finding("error", name, f"it expired at {until:%Y-%m-%d %H:%M} UTC", _renewal(name))
    elif until - now < SOON:
        text = f"it expires at {until:%Y-%m-%d %H:%M} UTC, in {_span(until - now)}"
        yield Finding("warning", name, text, _renewal(name))


def _span(left: timedelta) -> str:
    """A span of time in days; if it is shorter than two, in hours or minutes."""
    hours = int(left.total_seconds()) // 3600
    if hours >= 48:
        return f"{hours // 24} days"
    count, unit = (hours, "hour") if hours else (int(left.total_seconds()) // 60, "minute")
    return f"{count} {unit}{'s' * (count != 1)}"


def _renewal(name: str) -> str:
    if name == CA_CERT:
        return "Make a new CA in another directory, and give both CAs to all clients and workers for a while."
    return f"Move {WORKER_CERT} and {WORKER_KEY} away and call `headgate certs DIR` again."


def _about_cas(cas: list[x509.Certificate], signer: x509.Certificate | None) -> Iterator[Finding]:
    """Check that all are CAs. One that expired and did not sign the worker's certificate is merely not needed."""
    for number, ca in enumerate(cas, 1):
        which = "it" if len(cas) == 1 else f"certificate {number} of {len(cas)}"
        if not _is_ca(ca):
            yield Finding(
                "error", CA_CERT, f"{which} is not the certificate of a CA", "Put the CA's certificate there."
            )
        if ca is not signer and _now() >= ca.not_valid_after_utc:
            text = f"{which} expired at {ca.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
            yield Finding("warning", CA_CERT, text, "Remove it: nobody accepts what this CA signed.")


def _is_ca(cert: x509.Certificate) -> bool:
    from cryptography import x509

    try:
        return cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _signed(ca: x509.Certificate, cert: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        cert.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _belong_together(key: PrivateKeyTypes, cert: x509.Certificate) -> bool:
    return _public_pem(key.public_key()) == _public_pem(cert.public_key())


def _load(folder: str, name: str, load: Callable[[bytes], T], findings: list[Finding]) -> T | None:
    """Load a file; what is wrong with it is added to the findings."""
    path, is_key = os.path.join(folder, name), name in (WORKER_KEY, CA_KEY)
    try:
        data, mode = _read(folder, name), os.stat(path).st_mode
    except FileNotFoundError:
        if name != CA_KEY:  # which is better kept elsewhere
            findings.append(Finding("error", name, "it is missing", "Make it with `headgate certs DIR`, or bring it."))
        return None
    except OSError as error:
        findings.append(Finding("error", name, f"it cannot be read: {error.strerror}", "Let your user read it."))
        return None
    if is_key and mode & (stat.S_IRWXG | stat.S_IRWXO):
        text = f"others can read it or write to it (mode {stat.S_IMODE(mode):04o})"
        findings.append(Finding("error", name, text, f"chmod 600 {path}, and make a new one if others were here."))
    try:
        return load(data)
    except (ValueError, TypeError) as error:  # TypeError: it has a password
        text = f"it is not {'a private key' if is_key else 'a certificate'} as PEM without a password: {error}"
        findings.append(Finding("error", name, text, "Bring the right file."))
        return None


def _load_cert(data: bytes) -> x509.Certificate:
    from cryptography import x509

    return x509.load_pem_x509_certificate(data)


def _load_certs(data: bytes) -> list[x509.Certificate]:
    from cryptography import x509

    return x509.load_pem_x509_certificates(data)


def _load_key(data: bytes) -> PrivateKeyTypes:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return load_pem_private_key(data, None)


def _names_of(cert: x509.Certificate | None) -> tuple[str, ...]:
    from cryptography import x509

    if cert is None:
        return ()
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    return tuple(str(name.value) for name in names)


def _read(folder: str, name: str) -> bytes:
    with open(os.path.join(folder, name), "rb") as file:
        return file.read()


def _now() -> datetime:
    return datetime.fromtimestamp(clock.wall(), UTC)


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401 - whether it is there
    except ImportError as error:
        raise ImportError(
            "making and checking certificates needs the package cryptography: pip install 'headgate[certs]'"
        ) from error
