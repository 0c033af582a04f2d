"""The keeper: a small process between a client and its workers that makes sure that none of them is left behind.

    python -ISs -c "...; import keeper; keeper.main()" CONTROL,LOCK DIRECTORY

It is a program of its own, without site-packages, threads or user code, so that it starts in ten milliseconds, is
small, and cannot be taken down by what workers do. It must therefore import nothing of headgate, and of the standard
library only what is quick (`_signal` instead of `signal`, which would import `enum`).

CONTROL is a socket to the client: commands come in, reports go out, and when it closes (the client left, or was killed
in any way) the keeper ends every descendant and removes DIRECTORY. On Linux it is a *child subreaper*, and so is each
worker: whatever a worker started and left, daemons too, stays below the worker while it lives, and becomes the keeper's
when it is dead. Elsewhere the keeper ends the process groups of workers. LOCK is held for as long as it lives.

On Linux the workers of a pool are made by a *fork server* (see `fork_server`), a child of the keeper. If it does not
come up, nothing is lost: the workers are then started as programs, each by itself. If it made workers and ended,
another is started for the next worker. The first fork server is there before the keeper: an interpreter starts, forks
the fork server, and becomes the keeper (`begin_with_fork_server`).

A worker that cannot be made (no processes, no memory, no descriptors) is reported as ended before it began, with the
reason. It ends neither the keeper nor the fork server, because the other workers would end with them. The client
decides when to try again.

Each worker gets a pipe from the keeper that is never written to. The worker arms it (see `lifeline`), so that the
kernel kills the worker when the keeper dies. What a worker writes to stderr before it is ready is kept, and told if it
never becomes ready.

The client may pass it the files by which other processes see that the client is alive: locks of flock, which belong to
the open file, and so are free when its last copy is closed. The keeper keeps its copies until everything below it has
ended. So nobody takes a client that was killed for gone while its workers still run. If the keeper is killed too, the
kernel kills the workers in the moment in which it closes the files of the keeper.

Messages both ways are marshalled dicts with their length before them: both ends are the same interpreter.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # pyright: ignore[reportMissingImports]
import _socket
import marshal
import os
import select
import sys
import time

TYPE_CHECKING = False  # typing's own, without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

GRACE = 1.0  # between SIGTERM and SIGKILL
PATIENCE = 5.0  # for a fork server to make a worker; then the worker is started by itself
MESSAGE = 1 << 17  # bytes of a request to a fork server
TAIL = 4000  # bytes of stderr that are told of a worker that never became ready
MARK = "HEADGATE_WORKER"
SHORTAGES = (OSError, MemoryError)  # what opening and forking raise when the system has no more to give
QUIET = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP)


class Child:
    """One worker process, or one that is being made, with the descriptors that connect the keeper to it."""

    def __init__(self, uid: str, directory: str) -> None:
        self.uid: str = uid
        self.pid: int = 0  # none yet
        lifeline, ours, status, said, errors = open_all(os.pipe, os.pipe, lambda: (anonymous_file(directory),))
        self.lifeline: int = ours  # the worker dies when it closes
        self.status: int | None = status  # what the worker tells
        self.errors: int = errors  # its stderr until it is ready
        self.said: bytes = b""  # the beginning of a message
        self.theirs: tuple[int, int] = (lifeline, said)
        self.asked: float = 0.0  # when a fork server was asked for it
        self.config: dict[str, Any] = {}
        self.program: dict[str, Any] = {}
        os.set_blocking(status, False)

    def handed_over(self) -> None:
        """Close the descriptors that are for the worker: it has its own copies, or never will."""
        for fd in self.theirs:
            os.close(fd)


class ForkServer:
    """The fork server of one program, as the keeper knows it."""

    def __init__(self, program: dict[str, Any] | None, pid: int, requests: int, lifeline: int, errors: int) -> None:
        self.program: dict[str, Any] | None = program  # None: that of the first worker, whatever it is
        self.pid: int = pid
        self.socket: _socket.socket = _socket.socket(fileno=requests)
        self.socket.setblocking(False)
        self.fds: tuple[int, int] = (lifeline, errors)
        self.waiting: dict[str, Child] = {}  # asked for, and not yet heard of
        self.made: int = 0  # workers

    def ask(self, child: Child) -> bool:
        """Ask the fork server for a worker. False: it cannot be asked."""
        fds = (*child.theirs, child.errors)
        packed = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
        request = marshal.dumps(child.config)
        if len(request) > MESSAGE:
            return False
        try:
            self.socket.sendmsg([request], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)])
        except OSError:
            return False
        child.asked = time.monotonic()
        self.waiting[child.uid] = child
        return True

    def retire(self) -> None:
        """Ask the fork server for nothing more: it ends when it has made what it was asked for."""
        try:
            self.socket.shutdown(_socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        """End the fork server, and close what connects the keeper to it."""
        kill(-self.pid, _signal.SIGKILL)  # its group: it may be about to fork
        self.socket.close()
        for fd in self.fds:
            os.close(fd)


class Keeper:
    """The state of the keeper, and the loop that it runs."""

    def __init__(self, control: int, directory: str) -> None:
        self.control: int = control
        self.commands: _socket.socket = _socket.socket(fileno=control)
        self.commands.setblocking(False)
        self.passed: list[int] = []  # files that came, in the order of the commands that they came with
        self.held: dict[int, int] = {}  # by the numbers that they have in the client
        self.directory: str = directory
        self.children: dict[int, Child] = {}  # by pid
        self.fork_server: ForkServer | None = None
        self.retired: list[ForkServer] = []  # they still make what they were asked for
        self.unforked: dict[str, Any] | None = None  # the program whose fork server does not come up
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
        """Handle commands, reports and deaths until the client is gone."""
        while True:
            watched = [self.control, self.wake, *(c.status for c in self.children.values() if c.status is not None)]
            watched += [server.socket.fileno() for server in self.fork_servers()]
            ready = readable(watched, self.patience())
            if self.wake in ready:
                drain(self.wake)
            for child in [c for c in self.children.values() if c.status in ready]:
                self.hear(child)
            self.hear_fork_servers()
            self.reap()
            self.finish_doomed()
            if self.control in ready and not self.obey():
                return

    def patience(self) -> float | None:
        """Return the seconds until there is something to do even if nothing is heard; None: there is nothing."""
        moments = [self.doomed[0][0]] if self.doomed else []
        moments += [child.asked + PATIENCE for server in self.fork_servers() for child in server.waiting.values()]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def obey(self) -> bool:
        """Read commands of the client and carry them out. False: the client is gone."""
        try:
            data, passed, flags, _ = self.commands.recvmsg(1 << 20, _socket.CMSG_SPACE(4))
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        self.take(passed, flags)
        messages, self.heard = split_messages(self.heard + data)
        for message in messages:
            command = marshal.loads(message)
            if command["do"] == "spawn":
                self.spawn(**command["worker"])
            elif command["do"] == "signal":
                self.signal(command["uid"], command["signal"])
            elif command["do"] == "hold":
                self.held[command["file"]] = self.passed.pop(0)
            elif command["do"] == "drop":
                close(self.held.pop(command["file"], -1))
        return True

    def take(self, passed: list[tuple[int, int, bytes]], flags: int) -> None:
        """Note a file that came with a command. A read ends with the first command that has one."""
        for _, _, packed in passed:
            fd = int.from_bytes(packed, sys.byteorder)
            os.set_inheritable(fd, False)
            self.passed.append(fd)
        if flags & _socket.MSG_CTRUNC:
            self.passed.append(-1)  # there was no descriptor for it: then others see the end of the client at once

    def signal(self, uid: str, number: int) -> None:
        """Send a signal to a worker. One that is not made yet will not be made."""
        for child in self.children.values():
            if child.uid == uid:
                kill(child.pid, number)
        for server in self.fork_servers():
            unmade = server.waiting.get(uid)
            if unmade is not None and unmade.program:
                unmade.program = {}  # it ends as soon as we hear of it
                self.tell(event="exited", uid=uid, pid=0, code=-number, errors=b"")

    def tell(self, **report: object) -> None:
        """Send a report to the client, as a whole."""
        data = marshal.dumps(report)
        data = len(data).to_bytes(4, "big") + data
        while data:
            try:
                data = data[os.write(self.control, data) :]
            except BlockingIOError:
                until_writable(self.control)
            except OSError:
                return  # the client is gone, and `obey` will see it

    # -- workers -------------------------------------------------------------------------------------------------------

    def spawn(self, config: dict[str, Any], program: dict[str, Any], forks: bool, first: bool) -> None:
        """Start a worker through the fork server, or as a program. `first`: its fork server was there before us."""
        try:
            child = Child(config["uid"], self.directory)
        except SHORTAGES as error:
            self.tell_unmade(config["uid"], error)
            return
        child.config, child.program = config, program
        if first and self.fork_server is not None:
            self.fork_server.program = program
        if not (forks and sys.platform == "linux" and program != self.unforked and self.ask_fork_server(child)):
            self.exec(child)

    def exec(self, child: Child) -> None:
        """Start a worker as a program, or tell the client why that is not possible."""
        try:
            pid = fork_program("worker_main", child.program, child.config, *child.theirs, child.errors)
        except SHORTAGES as error:
            discard(child)
            self.tell_unmade(child.uid, error)
        else:
            self.born(child, pid)

    def tell_unmade(self, uid: str, error: BaseException) -> None:
        """Report a worker for which there is no process."""
        reason = f"{type(error).__name__}: {error}"
        self.tell(event="exited", uid=uid, pid=0, code=1, errors=reason.encode(errors="replace"), unmade=reason)

    def born(self, child: Child, pid: int) -> None:
        """Note the process that a worker has now, and tell the client."""
        child.pid = pid
        child.handed_over()
        self.children[pid] = child
        self.tell(event="started", uid=child.uid, pid=pid)

    # -- the fork server -----------------------------------------------------------------------------------------------

    def fork_servers(self) -> list[ForkServer]:
        """Return the fork servers that may still make workers."""
        return [*self.retired, *([self.fork_server] if self.fork_server is not None else [])]

    def ask_fork_server(self, child: Child) -> bool:
        """Have the fork server of its program make a worker. False: there is none that can."""
        if self.fork_server is not None and self.fork_server.program != child.program:
            self.fork_server.retire()
            self.retired.append(self.fork_server)
            self.fork_server = None
        if self.fork_server is None:
            try:
                self.fork_server = start_fork_server(child.program, child.config, self.directory)
            except SHORTAGES:
                return False
        return self.fork_server.ask(child)

    def hear_fork_servers(self) -> None:
        """Note which workers the fork servers made, and drop those that are gone or hang."""
        for server in self.fork_servers():
            if not self.hear_fork_server(server) or self.is_late(server):
                self.drop_fork_server(server)

    def is_late(self, server: ForkServer) -> bool:
        """Tell whether a worker waits for too long to be made: the fork server was stopped, or hangs."""
        now = time.monotonic()
        return any(now - child.asked > PATIENCE for child in server.waiting.values())

    def hear_fork_server(self, server: ForkServer) -> bool:
        """Read which workers a fork server made. False: it is gone."""
        while True:
            try:
                data = server.socket.recv(4096)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            made = marshal.loads(data)
            child = server.waiting.pop(made["uid"], None)
            if child is None:
                continue
            server.made += bool(made["pid"])
            if child.program and made["pid"]:
                self.born(child, made["pid"])
            elif child.program:  # it could not be made: by itself, then
                self.exec(child)
            else:  # nobody wants it any more
                discard(child)
                if made["pid"]:
                    kill(made["pid"], _signal.SIGKILL)

    def drop_fork_server(self, server: ForkServer) -> None:
        """Give up a fork server, and start as programs the workers that it was to make."""
        if server is self.fork_server:
            if not server.made:
                self.unforked = server.program
            self.fork_server = None
        else:
            self.retired.remove(server)
        server.close()
        for child in server.waiting.values():
            if child.program:
                self.exec(child)
            else:
                discard(child)

    def hear(self, child: Child) -> None:
        """Pass on what a worker tells: it is ready, or why it will never be; and later, that it is to be replaced."""
        if child.status is None:
            return
        try:
            data = os.read(child.status, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        messages, child.said = split_messages(child.said + data)
        for message in messages:
            self.tell(event="said", uid=child.uid, said=message)
        if not data:
            os.close(child.status)  # it has said all it has to say
            child.status = None

    def reap(self) -> None:
        """Take note of every child that ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self.children:
                self.hear_fork_servers()  # one told of it before it became ours
            child = self.children.pop(pid, None)
            if child is not None:
                self.bury(child, os.waitstatus_to_exitcode(status))

    def bury(self, child: Child, code: int) -> None:
        """Tell the client how a worker ended, and end whatever it started."""
        if child.status is not None:
            self.hear(child)
            if child.status is not None:
                os.close(child.status)
        os.close(child.lifeline)
        errors = read_tail(child.errors)
        os.close(child.errors)
        self.tell(event="exited", uid=child.uid, pid=child.pid, code=code, errors=errors)
        left = self.orphans()
        self.end([*left, *(further for pid in left for further in descendants(pid))], group=child.pid)

    # -- ending --------------------------------------------------------------------------------------------------------

    def orphans(self) -> list[int]:
        """Return the children of the keeper that dead workers started and left."""
        found = children(os.getpid())
        self.hear_fork_servers()  # after we looked: they tell of a worker before that becomes our child
        servers = {server.pid for server in self.fork_servers()}
        return [pid for pid in found if pid not in self.children and pid not in servers]

    def end(self, pids: list[int], group: int | None = None) -> None:
        """Ask processes to end; `finish_doomed` kills them later if they have not."""
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
        """End everything below us, because the client is gone: the willing first.

        It looks again and again: a process that is no child of ours ends without a signal to us, and one that dies may
        have forked another that has to be found first.
        """
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
        """Return everything that lives below the keeper; a negative number is a process group."""
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


def fork_program(
    name: str, program: dict[str, Any], config: dict[str, Any], lifeline: int, said: int, errors: int
) -> int:
    """Start a program of this package (a worker, a fork server) in a process of its own; return its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            become(name, program, config, lifeline, said, errors)
        except BaseException as error:
            os.write(2, f"the worker could not be started: {error}\n".encode(errors="replace"))
        finally:
            os._exit(127)
    return pid


def start_fork_server(program: dict[str, Any], config: dict[str, Any], directory: str) -> ForkServer:
    """Start a fork server as a program."""
    ours, theirs, line, lifeline, errors = open_all(socket_pair, os.pipe, lambda: (anonymous_file(directory),))
    try:
        pid = fork_program("fork_server", program, config, line, theirs, errors)
    except SHORTAGES:
        for fd in (ours, lifeline, errors):
            os.close(fd)
        raise
    finally:
        os.close(line)
        os.close(theirs)
    return ForkServer(program, pid, ours, lifeline, errors)


def begin_with_fork_server() -> tuple[Any, ...]:
    """Become the keeper, and in a child the fork server, in an interpreter like that of the workers.

    The keeper is a program of its own, but its interpreter's start is not waited for that way: it starts when the
    first command has come, and the fork server is half loaded by then. Returns in the child.
    """
    fds, directory, here, code, config, guard = sys.argv[1:]
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    line, lifeline = os.pipe()
    errors = anonymous_file(directory)
    kept = [*map(int, fds.split(",")), ours.fileno(), lifeline, errors]
    try:
        pid = os.fork()
    except OSError:  # the keeper alone, then: it starts what it can when it is asked for workers
        pid, kept = -1, kept[:2]
    if pid:
        theirs.close()
        os.close(line)
        for fd in kept:
            os.set_inheritable(fd, True)
        os.close(int(guard))  # from now on we see by ourselves whether the client is there
        readable(kept[:1], None)
        arguments = [",".join(map(str, kept)), directory, here, str(pid)]
        os.execv(sys.executable, [sys.executable, "-ISs", "-c", code, *arguments])
    os.setsid()
    reset_signals()
    stderr = os.dup(2)
    os.dup2(errors, 2)
    ours.detach()
    for fd in (*kept, int(guard)):
        os.close(fd)
    return marshal.loads(bytes.fromhex(config)), line, theirs.detach(), stderr


def become(name: str, program: dict[str, Any], config: dict[str, Any], lifeline: int, said: int, errors: int) -> None:
    """Replace this forked child by a program of this package."""
    os.setsid()
    if name == "worker_main":
        adopts_orphans()
    _signal.set_wakeup_fd(-1)
    reset_signals()
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
    stderr = os.dup(2)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(errors, 2)
    for fd in (lifeline, said, stderr):
        os.set_inheritable(fd, True)
    leave_gone_folder()
    argv = [*program["argv"], name, marshal.dumps(config).hex(), str(lifeline), str(said), str(stderr)]
    env = program["env"] if name == "fork_server" else {**program["env"], MARK: config["uid"]}
    os.execve(argv[0], argv, env)


def leave_gone_folder() -> None:
    """Go elsewhere if the current folder was removed. A worker enters its own folder, or none, when it has started.

    There Python 3.13.0 to 3.13.2 raises SystemError for every attribute that a module does not have, and so cannot even
    import asyncio (CPython's gh-130932). No Python starts there with a relative path in PYTHONPATH.
    """
    try:
        os.getcwd()
    except OSError:
        os.chdir("/")


def reset_signals() -> None:
    """Block and ignore no signal, whatever the client has done: so workers begin."""
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
    for number in (*QUIET, _signal.SIGCHLD):
        _signal.signal(number, _signal.SIG_DFL)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def adopts_orphans() -> None:
    """Become the parent of whatever our descendants leave behind (Linux).

    A worker does the same while it lives: so what reaches the keeper was left by a worker that is dead.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER; stays across exec


def discard(child: Child) -> None:
    """Close what was opened for a worker that will not be made."""
    child.handed_over()
    os.close(child.lifeline)
    os.close(child.errors)
    if child.status is not None:
        os.close(child.status)


def split_messages(data: bytes) -> tuple[list[bytes], bytes]:
    """Cut data into messages, each with its length before it; return them, and the beginning of the next one."""
    messages = []
    while len(data) >= 4 and len(data) >= (end := 4 + int.from_bytes(data[:4], "big")):
        messages.append(data[4:end])
        data = data[end:]
    return messages, data


def open_all(*openers: Callable[[], tuple[int, ...]]) -> list[int]:
    """Return the descriptors that these functions open. If one fails, those of the others are closed."""
    opened: list[int] = []
    try:
        for opener in openers:
            opened += opener()
    except SHORTAGES:
        for fd in opened:
            os.close(fd)
        raise
    return opened


def socket_pair() -> tuple[int, int]:
    """Make two connected sockets that keep the borders of messages."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    return ours.detach(), theirs.detach()


def anonymous_file(directory: str) -> int:
    """Open a new file that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headgate-errors")
    path = os.path.join(directory, f"errors-{os.getpid()}-{time.monotonic_ns()}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return fd


def read_tail(fd: int) -> bytes:
    """Return the end of what was written to a file."""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, TAIL, max(0, size - TAIL))
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    """Return the children of a process, as /proc tells them."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    found: list[int] = []
    todo = children(pid)
    while todo:
        child = todo.pop()
        found.append(child)
        todo += children(child)
    return found


def readable(fds: list[int], timeout: float | None) -> list[int]:
    """Wait, and return which descriptors can be read. (Not by select(), which takes none above 1023.)"""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN | select.POLLHUP)
    try:
        return [fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)]
    except OSError:  # somebody has lowered our limit of descriptors below what we have; select() does not mind
        return select.select([fd for fd in fds if fd < 1024], [], [], timeout)[0]


def until_writable(fd: int) -> None:
    """Wait until there is room for more, or until nobody reads it any more."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()


def kill(pid: int, number: int) -> None:
    """Send a signal to a process, or to a group if the number is negative."""
    try:
        if pid < 0:
            os.killpg(-pid, number)
        else:
            os.kill(pid, number)
    except OSError:
        pass


def close(fd: int) -> None:
    """Close a descriptor, if there is one."""
    if fd >= 0:
        os.close(fd)


def drain(fd: int) -> None:
    """Read from a descriptor until nothing is left there."""
    try:
        while os.read(fd, 4096):
            pass
    except OSError:
        pass


def remove(directory: str) -> None:
    """Remove the directory and the sockets in it."""
    try:
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
    except OSError:
        pass


def main() -> None:
    """Run the keeper as a program, with descriptors and directory from the command line."""
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
    for number in QUIET:
        _signal.signal(number, _signal.SIG_IGN)
    (control, lock, *of_fork_server), directory = map(int, sys.argv[1].split(",")), sys.argv[2]
    for fd in (control, lock, *of_fork_server):
        os.set_inheritable(fd, False)
    os.set_blocking(control, False)
    keeper = Keeper(control, directory)
    if of_fork_server:
        keeper.fork_server = ForkServer(None, int(sys.argv[4]), *of_fork_server)
    adopts_orphans()
    try:
        keeper.run()
    finally:
        keeper.end_all()
        remove(directory)
        os.close(lock)  # as long as we lived it said that the directory is in use
