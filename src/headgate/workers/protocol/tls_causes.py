"""Why a worker cannot be reached: the cause that gRPC does not tell, and what to do about it.

gRPC says "Socket closed" or "failed to connect", and a worker that refuses a certificate closes the connection without
a word. So the connection is tried once more with the ssl module, whose errors name the cause. A worker that dislikes
*our* certificate says so after the handshake, by closing; what is wrong with it is then found out here, by a handshake
with ourselves in memory.

All of it happens in a thread, and no key is written to a disk where memory will do (see `credentials.load_pair`).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from headgate.core.clock import clock
from headgate.workers.credentials import Material, WorkerCredentials, load_pair
from headgate.workers.protocol.addresses import TcpAddress, parse_address

Kind: TypeAlias = Literal[
    "no listener",
    "no certificate",
    "wrong CA",
    "expired",
    "not yet valid",
    "wrong name",
    "plaintext",
    "needs TLS",
    "old TLS",
    "no answer",
    "other",
]

PATIENCE = 3.0
"""Seconds for finding the cause."""
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # how a client of HTTP/2 begins: empty SETTINGS
_SETTINGS: Final = 4  # how a server answers: the type of its first frame, in byte 3
_FRAME_HEAD: Final = 9
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")
_OLD: Final = ("UNSUPPORTED_PROTOCOL", "PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE", "VERSION_TOO_LOW")
_EXPIRED, _NOT_YET, _HOST, _IP = 10, 9, 62, 64  # verify codes of OpenSSL
_ISSUER: Final = (2, 18, 19, 20, 21, 24, 30)  # no issuer, self-signed, not of that CA, an issuer that is no CA


@dataclass(frozen=True)
class Refusal:
    """Why a connection to a worker does not come about."""

    kind: Kind
    text: str
    """What is the matter, in one sentence without its full stop."""
    remedy: str
    """What to do about it, in sentences."""
    permanent: bool
    """Whether it stays so until somebody changes certificates or settings."""

    def __str__(self) -> str:
        return f"{self.text}. {self.remedy}"


async def why_refused(address: str, credentials: WorkerCredentials | None, timeout: float = PATIENCE) -> Refusal | None:
    """Find out why a worker cannot be reached, in `timeout` seconds. None: it can, as far as the connection goes."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Refusal | None] = loop.create_future()

    def tell(refusal: Refusal | None) -> None:
        if not found.done():
            found.set_result(refusal)

    def look() -> None:
        refusal = probe(address, credentials, timeout)
        try:
            loop.call_soon_threadsafe(tell, refusal)
        except RuntimeError:  # that loop is closed
            pass

    # Not the loop's own threads: a name that is looked up for minutes would keep the program from ending.
    threading.Thread(target=look, name="headgate-tls-causes", daemon=True).start()
    await asyncio.wait((found,), timeout=timeout + 0.5)
    return found.result() if found.done() else _silent(address)


def probe(address: str, credentials: WorkerCredentials | None, timeout: float = PATIENCE) -> Refusal | None:
    """Find out why a worker cannot be reached. Blocks."""
    where, until = parse_address(address), clock.now() + timeout
    try:
        if isinstance(where, str):
            return _probe_socket(where, timeout)
        if credentials is None:
            return _probe_plain(where, until)
        return _probe_tls(where, credentials, until)
    except ConnectionRefusedError:
        return _nobody(address)
    except TimeoutError:
        return _silent(address)
    except socket.gaierror as error:
        return Refusal(
            "no listener",
            f"the name of {address} is not known here: {error.strerror}",
            "Check the name, or have the worker advertise an address.",
            False,
        )
    except ssl.SSLError as error:
        return _other(f"the TLS handshake with {address} failed: {error.reason or error}")
    except OSError as error:
        return Refusal(
            "no answer", f"{address} cannot be reached: {error}", "Check the network between here and there.", False
        )


def _probe_socket(path: str, timeout: float) -> Refusal | None:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(timeout)
        try:
            plain.connect(path)
        except FileNotFoundError:
            return _nobody(f"unix:{path}")
    return None


# -- without credentials ----------------------------------------------------------------------------------------------


def _probe_plain(where: TcpAddress, until: float) -> Refusal | None:
    if _speaks_plainly(where, until):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _connect(where, until) as plain, context.wrap_socket(plain):
            pass
    except (ssl.SSLEOFError, ConnectionResetError):
        return _hangs_up(where)
    except ssl.SSLError as error:
        if _has(error, _NOT_TLS):
            return _no_worker(where)
    return Refusal(
        "needs TLS",
        f"the worker at {where} speaks TLS only, and the client has no credentials",
        "Pass credentials=WorkerCredentials.from_files(...) with a certificate of the worker's CA; on the command "
        "line --cert-dir DIR.",
        True,
    )


def _speaks_plainly(where: TcpAddress, until: float) -> bool:
    """Whether a server of HTTP/2 without TLS is there. TimeoutError: it takes the connection and says nothing."""
    with _connect(where, until) as plain:
        try:
            plain.sendall(_PREFACE)
            head = b""
            while len(head) < _FRAME_HEAD:
                if not (more := plain.recv(_FRAME_HEAD - len(head))):
                    return False
                head += more
        except (ConnectionResetError, BrokenPipeError):
            return False
    return head[3] == _SETTINGS


# -- with credentials -------------------------------------------------------------------------------------------------


def _probe_tls(where: TcpAddress, credentials: WorkerCredentials, until: float) -> Refusal | None:
    material, name = credentials.newest, credentials.identity or where.host
    context = _client_context(material, credentials.mutual)
    try:
        with _connect(where, until) as plain, context.wrap_socket(plain, server_hostname=name) as tls:
            tls.settimeout(_left(until))
            return None if _is_greeted(tls) else _about_ours(credentials)
    except ssl.SSLCertVerificationError as error:
        return _about_theirs(error, where, name, context, until)
    except (ssl.SSLEOFError, ConnectionResetError):  # during the handshake: a worker refuses nobody so early
        return _plaintext(where) if _speaks_plainly(where, until) else _hangs_up(where)
    except ssl.SSLError as error:
        if _has(error, _NOT_TLS):
            return _plaintext(where) if _speaks_plainly(where, until) else _no_worker(where)
        return _about_alert(error, where, credentials)


def _client_context(material: Material, shows_certificate: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does
    context.load_verify_locations(cadata=material.ca_cert.decode("ascii", "replace"))
    context.set_alpn_protocols(["h2"])
    if shows_certificate:
        load_pair(context, material)
    return context


def _is_greeted(tls: ssl.SSLSocket) -> bool:
    """Whether the worker begins to speak HTTP/2, and so has accepted what certificate it was shown."""
    try:
        return bool(tls.recv(1))
    except (ssl.SSLEOFError, ConnectionResetError):
        return False


def _about_theirs(
    error: ssl.SSLCertVerificationError, where: TcpAddress, name: str, context: ssl.SSLContext, until: float
) -> Refusal:
    """Say why we do not accept the worker's certificate."""
    code = error.verify_code
    if code == _EXPIRED:
        return Refusal(
            "expired",
            f"the certificate of the worker at {where}, or its CA, has expired",
            "Give the worker a new certificate: `headgate certs check DIR` shows until when certificates are valid.",
            True,
        )
    if code == _NOT_YET:
        return Refusal(
            "not yet valid",
            f"the certificate of the worker at {where} is not valid yet",
            "Compare the clocks of both machines, and from when the certificate is valid.",
            False,
        )
    if code in (_HOST, _IP):
        return _wrong_name(where, name, context, until)
    if code in _ISSUER:
        return Refusal(
            "wrong CA",
            f"the certificate of the worker at {where} is not of the CA that this client trusts",
            "Give both the same ca_cert, and the worker a certificate of that CA.",
            True,
        )
    return _other(f"the certificate of the worker at {where} is refused: {error.verify_message}")


def _wrong_name(where: TcpAddress, name: str, context: ssl.SSLContext, until: float) -> Refusal:
    context.check_hostname, names = False, ""
    try:
        with _connect(where, until) as plain, context.wrap_socket(plain) as tls:
            given: dict[str, Any] = dict(tls.getpeercert() or {})
            names = ", ".join(str(one[1]) for one in given.get("subjectAltName", ()))
    except OSError:
        pass
    return Refusal(
        "wrong name",
        f"the certificate of the worker at {where} is for {names or 'other names'}, not for {name}",
        "Connect to a name of the certificate, pass identity= with one of its names, or make a certificate with "
        f"`headgate certs DIR --name {name}`.",
        True,
    )


def _about_alert(error: ssl.SSLError, where: TcpAddress, credentials: WorkerCredentials) -> Refusal:
    """Say what an error of the handshake means that is not about the worker's certificate."""
    if _has(error, _OLD):
        return Refusal(
            "old TLS",
            f"what listens at {where} knows no TLS as new as 1.2",
            "Connect to the worker itself, or have what stands between it and here use TLS 1.2 or newer.",
            True,
        )
    if _has(error, ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "HANDSHAKE_FAILURE", "DECRYPT_ERROR")):
        return _about_ours(credentials)
    return _other(f"the TLS handshake with {where} failed: {error.reason or error}")


def _about_ours(credentials: WorkerCredentials) -> Refusal:
    """Say why the worker, which closed the connection, did not accept our certificate."""
    if not credentials.mutual:
        return Refusal(
            "no certificate",
            "the worker wants a certificate of its clients, and this client shows none",
            "Pass credentials with mutual=True and a certificate of the worker's CA, or start the worker with "
            "mutual=False.",
            True,
        )
    code, message = _own_fault(credentials.newest)
    if code == _EXPIRED:
        return Refusal(
            "expired",
            "the worker refused this client's certificate, which has expired",
            "Make a new certificate, and use reload=True to have new files read without a restart.",
            True,
        )
    if code == _NOT_YET:
        return Refusal(
            "not yet valid",
            "the worker refused this client's certificate, which is not valid yet",
            "Check the clock of this machine, and from when the certificate is valid.",
            False,
        )
    if code in (0, *_ISSUER):
        why = "it trusts another CA" if not code else "it is not of the CA that this client itself trusts"
        return Refusal(
            "wrong CA",
            f"the worker refused this client's certificate: {why}",
            "Give both the same ca_cert, and this client a certificate of that CA.",
            True,
        )
    return _other(f"the worker refused this client's certificate: {message}")


def _own_fault(material: Material) -> tuple[int, str]:
    """Show our certificate to ourselves, in memory; return OpenSSL's code and text of what is wrong, or 0."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does
    server.load_verify_locations(cadata=material.ca_cert.decode("ascii", "replace"))
    server.verify_mode = ssl.CERT_REQUIRED
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for context in (server, client):
        load_pair(context, material)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    for _ in range(4):  # as many flights as a handshake has
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                return error.verify_code, error.verify_message
            except ssl.SSLError as error:
                return -1, str(error.reason or error)
    return 0, ""


# -- both -------------------------------------------------------------------------------------------------------------


def _connect(where: TcpAddress, until: float) -> socket.socket:
    plain = socket.create_connection((where.host, where.port), timeout=_left(until))
    plain.settimeout(_left(until))
    return plain


def _left(until: float) -> float:
    return max(0.05, until - clock.now())


def _has(error: ssl.SSLError, reasons: tuple[str, ...]) -> bool:
    text = (error.reason or str(error)).upper().replace(" ", "_")
    return any(reason in text for reason in reasons)


def _nobody(address: str) -> Refusal:
    return Refusal(
        "no listener",
        f"nothing listens at {address}",
        "Start the worker, or check its address; a worker that was just started may need a moment.",
        False,
    )


def _silent(address: str) -> Refusal:
    return Refusal(
        "no answer",
        f"{address} does not answer",
        "Check that the machine is up, that no firewall is between, and that a worker listens there.",
        False,
    )


def _plaintext(where: TcpAddress) -> Refusal:
    return Refusal(
        "plaintext",
        f"the worker at {where} speaks no TLS, and the client has credentials",
        "Start the worker with credentials, or connect without if nobody else can reach this network.",
        True,
    )


def _no_worker(where: TcpAddress) -> Refusal:
    return _other(f"what listens at {where} speaks neither HTTP/2 nor TLS: it is no worker")


def _hangs_up(where: TcpAddress) -> Refusal:
    return _other(f"what listens at {where} closes the connection: it is no worker, or it has no room")


def _other(text: str) -> Refusal:
    return Refusal("other", text, "Check the address, and the certificates with `headgate certs check DIR`.", False)
