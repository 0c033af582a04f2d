"""The main program of a worker process. The keeper starts it, or a template becomes it; it says when it is
ready, or why never.

Until it is ready its stderr is a file of the keeper's, so that whatever ends it too early can be told to the client.
"""

from __future__ import annotations

import atexit
import marshal
import os
import sys
import traceback
from typing import Any


def main(config: dict[str, Any], lifeline: int, status: int, stderr: int) -> None:
    """Serve until told to stop."""
    from headgate.workers import lifeline as line

    line.arm(lifeline)
    try:
        enter_folder(config["cwd"], os.path.dirname(config["address"].removeprefix("unix:")))
        prepare()
        from headgate.workers.loops import new_loop
        from headgate.workers.serving import serve
    except BaseException as error:
        tell(status, failed="".join(traceback.format_exception(error)), cause=_cause(error))
        raise
    os.set_inheritable(status, False)
    os.set_inheritable(stderr, False)

    def ready() -> None:
        restore_stderr(stderr)
        tell(status, ready=True, pid=os.getpid())

    def failed(error: BaseException) -> None:
        tell(status, failed="".join(traceback.format_exception(error)), cause=_cause(error))

    # Not asyncio.run, which would cancel what is left of gRPC's own tasks, and they would print that.
    new_loop(config.get("loop", "")).run_until_complete(serve(config, ready, failed))
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, or there is none
            pass
    os._exit(0)  # threads of routines that cannot be interrupted must not keep it


def enter_folder(folder: str, private: str) -> None:
    """Make it the current folder, as it is the client's. One that is gone keeps no worker from starting: most routines
    never use it. Such a worker is in a folder that is gone as well, as the client is: a relative path fails there, and
    does not silently mean a file elsewhere."""
    try:
        os.chdir(folder)
        return
    except OSError as error:
        reason = error
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
    """The settings of the interpreter."""
    sys.setswitchinterval(0.001)  # the server's thread gets its turn beside a computing routine
    sys.argv = [""]
    options = os.environ.get("HEADGATE_PYTHONWARNINGS", "")
    if options:
        filter_warnings(options)


def filter_warnings(options: str) -> None:
    """What PYTHONWARNINGS says of warnings of ours."""
    import warnings

    for option in options.split(","):
        try:
            warnings._setoption(option.strip())  # type: ignore[attr-defined] # as Python itself does
        except Exception as error:
            sys.stderr.write(f"Invalid -W option ignored: {error}\n")


def restore_stderr(real: int) -> None:
    """From now on it is the client's stderr; what was written so far is passed on."""
    if sys.stderr is not None:
        sys.stderr.flush()
    size = os.fstat(2).st_size
    early = os.pread(2, size, 0) if size else b""
    os.dup2(real, 2)
    os.close(real)
    while early:
        early = early[os.write(2, early) :]


def tell(status: int, **report: Any) -> None:
    """Say the one thing there is to say, to the keeper."""
    try:
        os.write(status, marshal.dumps(report))
        os.close(status)
    except OSError:
        pass


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
