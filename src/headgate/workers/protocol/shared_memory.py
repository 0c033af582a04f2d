"""Memory that one process lends to another on the same machine: files without a name, read through ``/proc`` (Linux).

Nothing is left behind when a process is killed, because such a file is deleted with the last descriptor of it. Long
payloads are written and read in threads, so that no event loop waits for the copy.
"""

from __future__ import annotations

import asyncio
import io
import mmap
import os
import stat
import threading
from collections.abc import Callable
from typing import Any

from headgate.workers.protocol.bulk import Borrowed, BulkPayload, Lending, Lent
from headgate.workers.protocol.bulk_channel import BulkChannel, FrameT
from headgate.workers.protocol.wire.wire_pb2 import Probe

AT_ONCE = 1024 * 1024
"""Bytes that are copied without a thread: that takes less time than to start one."""
SWITCH = "HEADGATE_SHARED_MEMORY"
"""Environment variable that switches shared memory off with the value 0."""
PIECEWISE = 8 * 1024 * 1024
"""Payloads of this length or more are freed piece by piece while they are read: else they would be in memory three
times."""
_IOV = 1 << 30  # what one system call is asked to move
_PIECE = 1 << 20


def available() -> bool:
    """Tell whether this process can lend memory."""
    return hasattr(os, "memfd_create") and os.environ.get(SWITCH, "") != "0"


class Offer:
    """Memory with a token, by which another process finds out whether it can read memory of this one."""

    def __init__(self) -> None:
        self.probe: Probe | None = None
        self._descriptor = -1
        if available():
            token = os.urandom(16)
            try:
                self._descriptor = os.memfd_create("headgate-probe")
                os.write(self._descriptor, token)
            except OSError:
                self.close()
            else:
                self.probe = Probe(pid=os.getpid(), descriptor=self._descriptor, token=token)

    def close(self) -> None:
        """Close the memory: the other process has tried it, or will not."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def can_read(probe: Probe | None) -> bool:
    """Tell whether memory of the process that made this probe can be read here."""
    if probe is None or not probe.token or not available():
        return False
    try:
        descriptor = _open(probe.pid, probe.descriptor, len(probe.token))
    except OSError:
        return False
    try:
        return os.read(descriptor, len(probe.token)) == probe.token
    finally:
        os.close(descriptor)


def _open(pid: int, number: int, length: int, how: int = os.O_RDONLY) -> int:
    """Open a descriptor of another process, if it is a file of this length: reading anything else could block."""
    descriptor = os.open(f"/proc/{pid}/fd/{number}", how | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_size != length:
        os.close(descriptor)
        raise OSError(f"descriptor {number} of process {pid} does not hold what it should")
    return descriptor


def write(bulk: BulkPayload) -> int:
    """Write a payload into new memory and return the descriptor. OSError: there is no memory."""
    descriptor = os.memfd_create("headgate-loan")
    try:
        for segment in bulk.segments():
            while len(segment):
                segment = segment[os.write(descriptor, segment[:_IOV]) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Unopened(OSError):
    """Memory of another process cannot be read from here now, and nothing of it was."""


def read(pid: int, borrowed: Borrowed) -> BulkPayload:
    """Move a payload out of another process's memory. `Unopened`: have it sent; other OSErrors: the process is gone."""
    size = sum(length for length, _ in borrowed.segments)
    try:
        descriptor = _open(pid, borrowed.descriptor, size, os.O_RDWR)
    except (FileNotFoundError, ProcessLookupError):
        raise
    except OSError as error:
        raise Unopened(str(error)) from error
    try:
        try:
            removal = _Removal(descriptor, size) if size >= PIECEWISE else None
        except OSError as error:
            raise Unopened(str(error)) from error
        pickle, *buffers = [_read(descriptor, length, writable, removal) for length, writable in borrowed.segments]
        if removal is not None:
            removal.close()
    finally:
        os.close(descriptor)
    return BulkPayload(bytes(pickle), buffers, borrowed.lifted)


def read_back(lent: Lent) -> BulkPayload:
    """Read what this process has lent, to send it in chunks."""
    os.lseek(lent.descriptor, 0, os.SEEK_SET)
    pickle, *buffers = [_read(lent.descriptor, length, writable, None) for length, writable in lent.segments]
    return BulkPayload(bytes(pickle), buffers, lent.lifted)


def _read(descriptor: int, length: int, writable: bool, removal: _Removal | None) -> bytes | bytearray:
    sink = bytearray() if writable else io.BytesIO()  # which gives away what it holds without a copy
    left = length
    while left:
        data = os.read(descriptor, min(left, _IOV if removal is None else _PIECE))
        if not data:
            raise OSError("memory of another process ended too early")
        if len(data) == length and not writable:
            return data
        if isinstance(sink, bytearray):
            sink += data
        else:
            sink.write(data)
        left -= len(data)
        if removal is not None:
            removal.read(len(data))
    return sink if isinstance(sink, bytearray) else sink.getvalue()


class _Removal:
    """Frees the pages that were read, while the rest is read: so little memory is held twice."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._pages = mmap.mmap(descriptor, size)
        self._read = 0
        self._removed = 0

    def read(self, length: int) -> None:
        self._read += length
        done = self._read - self._read % mmap.PAGESIZE - self._removed
        if done > 0:
            self._pages.madvise(mmap.MADV_REMOVE, self._removed, done)
            self._removed += done

    def close(self) -> None:
        self._pages.close()


def aside(size: int, fn: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
    """Call `fn`, in a thread if there is much to copy, and then `done` with what it returned or raised, here."""
    if size <= AT_ONCE:
        _call(fn, done)
        return
    loop = asyncio.get_running_loop()

    def run() -> None:
        _call(fn, lambda *outcome: _on(loop, done, *outcome))

    try:
        threading.Thread(target=run, name="headgate copy", daemon=True).start()
    except (RuntimeError, MemoryError):  # no thread can be started
        _call(fn, done)


def _call(fn: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
    try:
        result = fn()
    except Exception as error:
        done(None, error)
    else:
        done(result, None)


def _on(loop: asyncio.AbstractEventLoop, done: Callable[[Any, BaseException | None], None], *outcome: Any) -> None:
    try:
        loop.call_soon_threadsafe(done, *outcome)
    except RuntimeError:  # it is closed: nobody waits any more, and the process may go on
        if isinstance(outcome[0], int):
            os.close(outcome[0])


def lend(channel: BulkChannel[FrameT], flush: Callable[[], None]) -> None:
    """Write the payloads that a session wants to lend, and close what was returned or cannot be read there."""
    for descriptor in channel.loans.take_released():
        os.close(descriptor)
    for lent in channel.loans.take_recalled():
        _send_instead(channel, lent, flush)
    while (lending := channel.loans.begin()) is not None:
        _lend(channel, lending, flush)


def _send_instead(channel: BulkChannel[FrameT], lent: Lent, flush: Callable[[], None]) -> None:
    def done(bulk: BulkPayload | None, error: BaseException | None) -> None:
        channel.resend(lent, bulk)
        flush()

    def read() -> BulkPayload:
        try:
            return read_back(lent)
        finally:
            os.close(lent.descriptor)

    aside(sum(length for length, _ in lent.segments), read, done)


def _lend(channel: BulkChannel[FrameT], lending: Lending[FrameT], flush: Callable[[], None]) -> None:
    def done(descriptor: int | None, error: BaseException | None) -> None:
        if descriptor is None:
            channel.not_lent(lending)
        else:
            channel.lend(lending, descriptor)
        for released in channel.loans.take_released():
            os.close(released)
        flush()

    aside(len(lending.bulk), lambda: write(lending.bulk), done)
