"""The keeper: a small process between a client and its workers, whose one duty is that none of them is left behind.

    python -ISs -c "...; import keeper; keeper.main()" CONTROL,LOCK DIRECTORY

It is a program of its own, without site-packages, threads or user code, so that it starts in ten milliseconds, is
small, and cannot be taken down by what workers do. It must therefore import nothing of headgate, and of the standard
library only what is quick (`_signal` instead of `signal`, which would import `enum`).

CONTROL is a socket to the client: commands come in, reports go out, and when it closes (the client left, or was killed
in any way) the keeper ends every descendant and removes DIRECTORY. On Linux it is a *child subreaper*, and so is each
worker: whatever a worker started and left, daemons too, stays below the worker while it lives, and becomes the keeper's
when it is dead. Elsewhere the keeper ends the process groups of workers. LOCK is held for as long as it lives.

Each worker gets a pipe from the keeper that is never written to. The worker arms it (see `lifeline`), so that the
kernel kills the worker when the keeper dies. What a worker writes to stderr before it is ready is kept, and told if it
never becomes ready.

Messages both ways are marshalled dicts with their length before them: both ends are the same interpreter.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # pyright: ignore[reportMissingImports]
import marshal
import os
import select
import sys
import time

TYPE_CHECKING = False  # typing's own, without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable

GRACE = 1.0  # between SIGTERM and SIGKILL
TAIL = 4000  # bytes of stderr that are told of a worker that never became ready
MARK = "HEADGATE_WORKER"
_prctl: Callable[..., int] | None = None
if sys.platform == "linux":
    import ctypes

    _prctl = ctypes.CDLL(None).prctl
QUIET = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP)


class Child:
    """A worker process."""

    def __init__(self, uid: str, pid: int, lifeline: int, status: int, errors: int) -> None:
        self.uid: str = uid
        self.pid: int = pid
        self.lifeline: int = lifeline  # our end: the worker dies when it closes
        self.status: int | None = status  # what the worker tells
        self.errors: int = errors  # its stderr until it is ready
        self.said: bytes = b""


class Keeper:
    """What it keeps, and the loop it runs."""

    def __init__(self, control: int, directory: str) -> None:
        self.control: int = control
        self.directory: str = directory
        self.children: dict[int, Child] = {}  # by pid
        self.doomed: list[tuple[float, list[int], int | None]] = []  # (when, pids): SIGTERM was sent, SIGKILL follows
        self.heard: bytes = b""
        self.wake: int
        self.woken: int
        self.wake, self.woken = os.pipe()
        for fd in (self.wake, self.woken):
            os.set_blocking(fd, False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(self.woken, warn_on_full_buffer=False)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the client is gone."""
        while True:
            watched = [self.control, self.wake, *(c.status for c in self.children.values() if c.status is not None)]
            ready = readable(watched, None if not self.doomed else max(0.0, self.doomed[0][0] - time.monotonic()))
            if self.wake in ready:
                drain(self.wake)
            for child in [c for c in self.children.values() if c.status in ready]:
                self.hear(child)
            self.reap()
            self.finish_doomed()
            if self.control in ready and not self.obey():
                return

    def obey(self) -> bool:
        """Read commands. False: the client is gone."""
        try:
            data = os.read(self.control, 1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        self.heard += data
        while len(self.heard) >= 4:
            end = 4 + int.from_bytes(self.heard[:4], "big")
            if len(self.heard) < end:
                break
            command = marshal.loads(self.heard[4:end])
            self.heard = self.heard[end:]
            if command["do"] == "spawn":
                self.spawn(**command["worker"])
            elif command["do"] == "signal":
                for child in self.children.values():
                    if child.uid == command["uid"]:
                        kill(child.pid, command["signal"])
        return True

    def tell(self, **report: object) -> None:
        """Report to the client."""
        data = marshal.dumps(report)
        data = len(data).to_bytes(4, "big") + data
        while data:
            try:
                data = data[os.write(self.control, data) :]
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                return  # the client is gone, and `obey` will see it

    # -- workers -------------------------------------------------------------------------------------------------------

    def spawn(self, uid: str, argv: list[str], env: dict[str, str], cwd: str) -> None:
        """Start a worker."""
        lifeline, ours = os.pipe()
        status, said = os.pipe()
        errors = anonymous_file(self.directory)
        pid = os.fork()
        if pid == 0:
            try:
                become_worker(uid, argv, env, cwd, lifeline, said, errors)
            except BaseException as error:
                os.write(2, f"the worker could not be started: {error}\n".encode(errors="replace"))
            finally:
                os._exit(127)
        os.close(lifeline)
        os.close(said)
        os.set_blocking(status, False)
        self.children[pid] = Child(uid, pid, ours, status, errors)
        self.tell(event="started", uid=uid, pid=pid)

    def hear(self, child: Child) -> None:
        """Pass on what a worker tells: it is ready, or why it will never be."""
        if child.status is None:
            return
        try:
            data = os.read(child.status, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            child.said += data
            return
        os.close(child.status)  # it has said all it has to say
        child.status = None
        if child.said:
            self.tell(event="said", uid=child.uid, said=child.said)

    def reap(self) -> None:
        """Take note of every child that ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self.children.pop(pid, None)
            if child is not None:
                self.bury(child, os.waitstatus_to_exitcode(status))

    def bury(self, child: Child, code: int) -> None:
        """A worker ended: tell it, and end whatever it started."""
        if child.status is not None:
            self.hear(child)
            if child.status is not None:
                os.close(child.status)
                if child.said:
                    self.tell(event="said", uid=child.uid, said=child.said)
        os.close(child.lifeline)
        errors = read_tail(child.errors)
        os.close(child.errors)
        self.tell(event="exited", uid=child.uid, pid=child.pid, code=code, errors=errors)
        left = self.orphans()
        self.end([*left, *(further for pid in left for further in descendants(pid))], group=child.pid)

    # -- ending --------------------------------------------------------------------------------------------------------

    def orphans(self) -> list[int]:
        """Children of ours that are no workers: something that a dead worker started and left."""
        return [pid for pid in children(os.getpid()) if pid not in self.children]

    def end(self, pids: list[int], group: int | None = None) -> None:
        """Ask these to end, and see to it later."""
        if group is not None:
            try:
                os.killpg(group, _signal.SIGTERM)
            except OSError:
                group = None
        for pid in pids:
            kill(pid, _signal.SIGTERM)
        if pids or group is not None:
            self.doomed.append((time.monotonic() + GRACE, pids, group))

    def finish_doomed(self) -> None:
        """Kill those that were asked to end and have not."""
        now = time.monotonic()
        while self.doomed and self.doomed[0][0] <= now:
            _, pids, group = self.doomed.pop(0)
            living = set(descendants(os.getpid()))
            for pid in pids:
                if pid in living:
                    kill(pid, _signal.SIGKILL)
            if group is not None:
                try:
                    os.killpg(group, _signal.SIGKILL)
                except OSError:
                    pass

    def end_all(self) -> None:
        """The client is gone: end everything below us, the willing first."""
        for pid in self.everything():
            kill(pid, _signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and self.still_there():
            readable([self.wake], 0.01)
            drain(self.wake)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and self.still_there():
            for pid in self.everything():
                kill(pid, _signal.SIGKILL)
            time.sleep(0.002)

    def everything(self) -> list[int]:
        """All that lives below us; a negative number is a process group."""
        found = descendants(os.getpid())
        if not found and not os.path.isdir("/proc/self"):
            for pid in self.children:
                try:
                    os.killpg(pid, 0)
                except OSError:
                    continue
                found.append(-pid)
        return found

    def still_there(self) -> bool:
        """Reap, and tell whether anything is left."""
        try:
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                self.children.pop(pid, None)
        except ChildProcessError:
            return bool(self.everything())


def become_worker(
    uid: str, argv: list[str], env: dict[str, str], cwd: str, lifeline: int, said: int, errors: int
) -> None:
    """In the child: take its place."""
    os.setsid()
    adopts_orphans()
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
    _signal.set_wakeup_fd(-1)
    for number in (*QUIET, _signal.SIGCHLD, _signal.SIGPIPE):
        _signal.signal(number, _signal.SIG_DFL)
    stderr = os.dup(2)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(errors, 2)
    for fd in (lifeline, said, stderr):
        os.set_inheritable(fd, True)
    os.chdir(cwd)
    argv = [*argv, str(lifeline), str(said), str(stderr)]
    os.execve(argv[0], argv, {**env, MARK: uid})


def adopts_orphans() -> None:
    """What our descendants leave behind becomes ours (Linux). A worker does the same for its own while it lives: so
    what reaches the keeper was left by a worker that is dead."""
    if _prctl is not None:
        _prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER; stays across exec


def anonymous_file(directory: str) -> int:
    """A file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headgate-errors")
    path = os.path.join(directory, f"errors-{os.getpid()}-{time.monotonic_ns()}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return fd


def read_tail(fd: int) -> bytes:
    """The end of what was written there."""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, TAIL, max(0, size - TAIL))
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    """Its children, as /proc tells."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on."""
    found: list[int] = []
    todo = children(pid)
    while todo:
        child = todo.pop()
        found.append(child)
        todo += children(child)
    return found


def readable(fds: list[int], timeout: float | None) -> list[int]:
    """Which of them can be read. (Not select(), which cannot look at descriptors above 1023.)"""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN | select.POLLHUP)
    return [fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)]


def kill(pid: int, number: int) -> None:
    """Send a signal to a process, or to a group if the number is negative."""
    try:
        if pid < 0:
            os.killpg(-pid, number)
        else:
            os.kill(pid, number)
    except OSError:
        pass


def drain(fd: int) -> None:
    """Read all there is."""
    try:
        while os.read(fd, 4096):
            pass
    except OSError:
        pass


def remove(directory: str) -> None:
    """The directory and the sockets in it."""
    try:
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
    except OSError:
        pass


def main() -> None:
    """Keep."""
    for number in QUIET:
        _signal.signal(number, _signal.SIG_IGN)
    (control, lock), directory = map(int, sys.argv[1].split(",")), sys.argv[2]
    for fd in (control, lock):
        os.set_inheritable(fd, False)
    os.set_blocking(control, False)
    adopts_orphans()
    keeper = Keeper(control, directory)
    try:
        keeper.run()
    finally:
        keeper.end_all()
        remove(directory)
        os.close(lock)  # as long as we lived it said that the directory is in use
