"""Certificates of all kinds, good and bad, for the tests of TLS."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HERE = ("localhost", "127.0.0.1", "::1")
DAY = timedelta(days=1)


class Pair(NamedTuple):
    """A private key and its certificate, both PEM."""

    key: bytes
    cert: bytes

    def write(self, folder: Path, ca: bytes) -> tuple[Path, Path, Path]:
        """Write the paths of the CA, the key and the certificate, each in one step, as those who rotate them do."""
        paths = folder / "ca.pem", folder / "key.pem", folder / "cert.pem"
        for path, data in zip(paths, (ca, self.key, self.cert), strict=True):
            new = path.with_suffix(".new")
            new.write_bytes(data)
            new.chmod(0o600)
            new.rename(path)
        return paths


class Authority:
    """A CA that signs whatever a test needs."""

    def __init__(self, name: str = "headgate test CA", *, start: timedelta = -DAY, end: timedelta = DAY) -> None:
        self.name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(self._subject, self._key, start, end).issuer_name(self._subject)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.cert = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        *names: str,
        start: timedelta = -DAY,
        end: timedelta = DAY,
        subject: str = "worker",
        extension: x509.ExtensionType | None = None,
    ) -> Pair:
        """Sign a certificate for these names, valid from `start` to `end`, both counted from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
        builder = _builder(named, key, start, end).issuer_name(self._subject)
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names or HERE]), False)
        if extension is not None:
            builder = builder.add_extension(extension, critical=False)
        cert = builder.sign(self._key, hashes.SHA256())
        return Pair(_pem(key), cert.public_bytes(serialization.Encoding.PEM))

    @cached_property
    def good(self) -> Pair:
        """A certificate for this machine that is valid now."""
        return self.issue()


def serial(cert: bytes) -> int:
    """The number of a certificate."""
    return x509.load_pem_x509_certificate(cert).serial_number


def encrypted(key: bytes) -> bytes:
    """The same key, with a password."""
    loaded = serialization.load_pem_private_key(key, None)
    return loaded.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, start: timedelta, end: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + start)
        .not_valid_after(now + end)
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
