"""The main program of a worker process, started by the keeper or forked by the fork server.

It tells the keeper when it is ready, or why it never will be. If its life has limits, it also tells the keeper that one
of them is exceeded, and so that another worker should take its place.

Until it is ready its stderr is a file of the keeper's, so that whatever ends it too early can be told to the client.
From then on it is the client's, and the file gets a copy: its last lines are in WorkerLost.
"""

from __future__ import annotations

import atexit
import io
import marshal
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_KEPT, _MOST_KEPT = 4000, 65536  # bytes of stderr: as many as the keeper reads, and when the rest is dropped


def main(config: dict[str, Any], lifeline: int, status: int, stderr: int) -> None:
    """Run the server of a worker until it is told to stop, and end the process."""
    from headgate.workers.processes import lifeline as line

    line.arm(lifeline)
    try:
        reason = enter_folder(config["cwd"])
        prepare()
        from headgate.workers.server.event_loops import new_loop
        from headgate.workers.server.serve import serve

        if reason is not None:
            enter_no_folder(config["private"], reason)  # now: Python 3.13.0 to 3.13.2 can hardly import anything there
    except BaseException as error:
        tell(status, cause=_cause(error))
        raise
    os.set_inheritable(status, False)
    os.set_inheritable(stderr, False)

    told = _Status(status, stderr)
    code = 0
    # Not asyncio.run, which would cancel what is left of gRPC's own tasks, and they would print that.
    try:
        new_loop(config.get("loop", "")).run_until_complete(serve(config, told))
    except BaseException as error:
        code = 1
        traceback.print_exc()
        told.failed(error)
    else:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, or there is none
            pass
    os._exit(code)  # threads of the user's code that cannot be interrupted must not keep it


class _Status:
    """What a worker tells its keeper."""

    def __init__(self, status: int, stderr: int) -> None:
        self._status, self._stderr = status, stderr
        self._closed = False

    def ready(self, address: str, *, last: bool) -> None:
        """Tell that it takes calls. From now on its stderr is that of the client."""
        copy = os.dup(2)
        restore_stderr(self._stderr)
        keep_copy(copy)
        tell(self._status, ready=True, pid=os.getpid(), address=address)
        if last:
            self._closed = True
            os.close(self._status)

    def expired(self, reason: str) -> None:
        """Tell that another worker should take its place."""
        tell(self._status, expired=reason)

    def failed(self, error: BaseException) -> None:
        """Tell why it will never be ready, if it was not."""
        if not self._closed:
            tell(self._status, cause=_cause(error), error=_dumped_cause(error))


def enter_folder(folder: str) -> OSError | None:
    """Make the current folder of the client the current folder here. Return why that cannot be."""
    try:
        os.chdir(folder)
    except OSError as error:
        return error
    return None


def enter_no_folder(private: str, reason: OSError) -> None:
    """Run without a current folder, because that of the client cannot be entered.

    A folder that is gone keeps no worker from starting, because most routines never use it. The worker is then in a
    folder that is gone as well: a relative path fails there, and does not silently mean a file elsewhere.
    """
    try:
        gone = os.path.join(private, f"gone-{os.getpid()}")
        os.mkdir(gone, 0o700)
        os.chdir(gone)
        os.rmdir(gone)
    except OSError:
        os.chdir("/")
    sys.stderr.write(
        f"headgate: the folder of this worker (pid {os.getpid()}) cannot be entered: {reason}. It runs without one; "
        "relative paths will not work in it. Change to a folder that exists (os.chdir) in your program.\n"
    )


def prepare() -> None:
    """Set what a worker needs of the interpreter: thread switches, arguments, warnings."""
    sys.setswitchinterval(0.001)  # the server's thread gets its turn beside a computing routine
    sys.argv = [""]
    options = os.environ.get("HEADGATE_PYTHONWARNINGS", "")
    if options:
        filter_warnings(options)


def filter_warnings(options: str) -> None:
    """Apply what PYTHONWARNINGS says of warnings of headgate."""
    import warnings

    for option in options.split(","):
        try:
            warnings._setoption(option.strip())  # type: ignore[attr-defined] # as Python itself does
        except Exception as error:
            sys.stderr.write(f"Invalid -W option ignored: {error}\n")


def restore_stderr(real: int) -> None:
    """Make descriptor 2 the stderr of the client again, and pass on to it what was written so far."""
    if sys.stderr is not None:
        sys.stderr.flush()
    size = os.fstat(2).st_size
    early = os.pread(2, size, 0) if size else b""
    os.dup2(real, 2)
    os.close(real)
    while early:
        early = early[os.write(2, early) :]


class _Copied(io.FileIO):
    """The stderr of a worker, of which at least the last `_KEPT` bytes are also kept in a file of the keeper.

    Only what is written through `sys.stderr`. Descriptor 2 stays the client's own: a pipe in its place would be no
    terminal, would fill up when its reader is slow, and would be held open by whatever the worker starts.
    """

    copy: int = -1
    _size: int = 0

    def write(self, data: ReadableBuffer, /) -> int:
        written = super().write(data)
        try:
            self._keep(bytes(memoryview(data)[: written or 0]))
        except OSError:  # no room for it: it was written where it belongs
            pass
        return written

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > _MOST_KEPT:
            size = os.fstat(self.copy).st_size
            data = (os.pread(self.copy, _KEPT, max(0, size - _KEPT)) + data)[-_KEPT:]
            os.ftruncate(self.copy, 0)
            os.lseek(self.copy, 0, os.SEEK_SET)
            self._size = len(data)
        os.write(self.copy, data)  # at the place where faulthandler would go on


def keep_copy(fd: int) -> None:
    """Copy to this file what is written to stderr from now on.

    What Python writes about a fatal signal goes only there. The client is told it when this process has died.
    """
    import faulthandler

    if not faulthandler.is_enabled():
        faulthandler.enable(fd, all_threads=False)
    old = sys.stderr
    if not isinstance(old, io.TextIOWrapper):
        return  # there is none, or somebody has put something else there
    raw = _Copied(2, "wb", closefd=False)
    raw.copy, raw.name = fd, "<stderr>"
    sys.stderr = io.TextIOWrapper(
        raw if old.write_through else io.BufferedWriter(raw),
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=True,
        write_through=old.write_through,
    )
    sys.__stderr__ = sys.stderr  # type: ignore[misc] # Python's own is the one that stays when others are put there


def tell(status: int, **report: object) -> None:
    """Tell the keeper something: that this worker is ready, why it failed, or that another should take its place."""
    data = marshal.dumps(report)
    try:
        os.write(status, len(data).to_bytes(4, "big") + data)
    except OSError:
        pass


def _cause(error: BaseException) -> str:
    from headgate.errors import WorkerStartFailed

    return error.message if isinstance(error, WorkerStartFailed) else f"{type(error).__name__}: {error}"


def _dumped_cause(error: BaseException) -> bytes:
    """Pickle what made the start fail, for the client; empty if there is nothing, or too much of it."""
    from headgate.workers.serialization.pickling import dump_exception

    if error.__cause__ is None:
        return b""
    data = dump_exception(error.__cause__, f"start of a worker, pid {os.getpid()}")
    return data if isinstance(data, bytes) and len(data) <= _MOST_KEPT // 2 else b""
