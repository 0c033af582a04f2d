"""Look at a worker from outside, without a session: whether a pool would use it, whether it answers, and its load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headgate._version import __version__
from headgate.core.clock import clock
from headgate.errors import HeadgateError
from headgate.workers.membership import Membership
from headgate.workers.model import WorkerMetadata
from headgate.workers.protocol.messages import NEWEST, OLDEST

if TYPE_CHECKING:
    from headgate.workers.credentials import WorkerCredentials


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker says of itself."""

    uid: str
    version: str
    oldest: int
    """The oldest protocol that it speaks."""
    newest: int
    """The newest one."""
    pid: int
    age: float
    """Seconds since it started."""
    clients: int
    running: int
    finished: int
    stopping: bool
    tags: frozenset[str]
    metrics_port: int | None
    """The port on its host where it has metrics; None: it has none."""
    clock_offset: float
    """Seconds that the clock of its machine is ahead of ours, as far as one request can tell."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found out about one worker."""

    metadata: WorkerMetadata
    admitted: bool
    """Would a pool with the same credentials use it?"""
    reason: str = ""
    """Why not, or what is odd about it."""
    remedy: str = ""
    load: Load | None = None
    """None: it was not asked, did not answer, or is of a release that cannot tell."""


def why_not_admitted(metadata: WorkerMetadata, *, secure: bool) -> tuple[str, str] | None:
    """Return why a pool does not use a worker with this metadata, and what to do; None: it does.

    `secure`: has the pool credentials?
    """
    reason = Membership(secure=secure, version=__version__).reason_against(metadata)
    if not reason:
        return None
    if metadata.secure == secure:
        return reason, "Use releases of headgate with the same first number on both sides."
    if secure:
        return reason, "Start it with certificates, or look without yours."
    return reason, "Give certificates of its CA (credentials=, or --cert-dir)."


async def inspect(
    metadata: WorkerMetadata, credentials: WorkerCredentials | None, *, timeout: float = 3.0
) -> Inspection:
    """Find out whether a pool with these credentials would use a worker, and ask the worker for its load."""
    refused = why_not_admitted(metadata, secure=credentials is not None)
    if refused is not None:
        return Inspection(metadata, False, *refused)
    try:
        load = await ask_load(metadata, credentials, timeout)
    except LookupError as error:
        return Inspection(metadata, True, str(error))
    except (OSError, HeadgateError) as error:
        reason, remedy, kind = await _cause(metadata.address, credentials, error, timeout)
        if kind in ("needs TLS", "plaintext"):  # a listed address is only assumed to be like the client
            metadata = replace(metadata, secure=kind == "needs TLS")
        return Inspection(metadata, False, reason, remedy)
    if load.newest < OLDEST or load.oldest > NEWEST:
        reason = f"it speaks protocols {load.oldest} to {load.newest}, we speak {OLDEST} to {NEWEST}"
        return Inspection(metadata, False, reason, "Use releases of headgate that are closer to each other.", load)
    if load.stopping:
        return Inspection(metadata, False, "it is stopping: it finishes what runs", "", load)
    return Inspection(metadata, True, load=load)


async def ask_load(metadata: WorkerMetadata, credentials: WorkerCredentials | None, timeout: float) -> Load:
    """Ask a worker for its load. LookupError: it is of a release that cannot tell. OSError: it did not answer."""
    from headgate.workers.protocol.transport import dial, grpc
    from headgate.workers.protocol.wire import STATUS
    from headgate.workers.protocol.wire.wire_pb2 import StatusReply

    if credentials is not None:
        credentials = await credentials.refreshed()
    async with dial(metadata.address, session=False, credentials=credentials, options=metadata.options) as channel:
        before = clock.wall()
        try:
            reply = StatusReply.FromString(await channel.unary_unary(STATUS)(b"", timeout=timeout))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise LookupError("it answers, and is of a release that cannot tell its load") from None
            raise OSError(f"{error.code().name}: {error.details()}") from None
        except Exception as error:  # what answered is no worker
            raise OSError(f"what answers there is no worker: {error}") from None
        now = (before + clock.wall()) / 2
    return Load(
        reply.uid,
        reply.version,
        reply.oldest,
        reply.newest,
        reply.pid,
        max(0.0, reply.now - reply.started_at),
        reply.clients,
        reply.running,
        reply.finished,
        reply.stopping,
        frozenset(reply.tags),
        reply.metrics_port or None,
        reply.now - now,
    )


async def _cause(
    address: str, credentials: WorkerCredentials | None, error: Exception, timeout: float
) -> tuple[str, str, str]:
    """Name the cause of a failed connection as exactly as can be found out, the remedy, and the kind if it is known."""
    from headgate.workers.protocol.tls_causes import why_refused

    if isinstance(error, (PermissionError, HeadgateError)):
        return (error.message, error.remedy, "") if isinstance(error, HeadgateError) else (str(error), "", "")
    try:
        found = await why_refused(address, credentials, timeout)
    except (OSError, HeadgateError, TimeoutError) as other:
        return str(other), "", ""
    if found is None:
        return f"it cannot be reached: {error}", "Look at the log of the worker.", ""
    return found.text, found.remedy, found.kind
