"""The programs of this user that can be seen, as a command line asks them."""

from __future__ import annotations

import socket
from typing import Any, Final, Self

from headgate.core.clock import clock
from headgate.errors import InvalidArgument
from headgate.observe import sockets
from headgate.observe.lines import LONGEST_ANSWER, decoded, encoded, said

PATIENCE: Final = 15.0


class Refused(Exception):
    """A program does not do what it was asked to do."""


class Program:
    """A connection to a program."""

    def __init__(self, path: str, connection: socket.socket) -> None:
        self.path: str = path
        self.pid: int = int(path.rpartition("/")[2].partition("-")[0])
        self._connection = connection
        self._rest = b""
        self._number = 0

    def ask(self, ask: str, *, patience: float | None = None, **more: Any) -> Any:
        """Ask something and return the answer. `Refused`: the program says no. OSError: it is gone.

        TimeoutError: it does not answer within `patience` seconds, or those that it was connected with. It may be asked
        again; what it answers to the earlier request is passed over.
        """
        self._number += 1
        if patience is not None:
            self._connection.settimeout(patience)
        try:
            until = clock.wall() + (self._connection.gettimeout() or PATIENCE)
            self._send(encoded({"id": self._number, "ask": ask, "until": until, **more}))
            message = self._answer()
        except (OSError, EOFError, InvalidArgument) as error:
            why = said(error) if isinstance(error, InvalidArgument) else str(error) or "it has ended"
            kind = TimeoutError if isinstance(error, TimeoutError) else OSError
            raise kind(f"the program with pid {self.pid} does not answer: {why}") from error
        if "error" in message:
            raise Refused(str(message["error"]))
        return message.get("ok")

    def _answer(self) -> dict[str, Any]:
        while True:
            message = decoded(self._line())
            if message.get("id") in (self._number, None):
                return message

    def _send(self, line: bytes) -> None:
        try:
            self._connection.sendall(line)
        except ConnectionError:
            pass  # it has closed the connection: what it said before, or that it has ended, is read now

    def _line(self) -> bytes:
        while b"\n" not in self._rest:
            got = self._connection.recv(1 << 16)
            if not got:
                raise EOFError("it has ended")
            self._rest += got
            if len(self._rest) > LONGEST_ANSWER:
                raise EOFError("its answer is too long")
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def programs(pid: int | None = None, patience: float | None = None) -> list[Program]:
    """Connect to all programs of this user that can be seen, or to those of one process.

    `patience`: seconds that they have for each answer.
    """
    found = []
    for path in sockets.paths():
        if pid is None or path.rpartition("/")[2].startswith(f"{pid}-"):
            connection = sockets.connected(path, PATIENCE if patience is None else patience)
            if connection is not None:
                found.append(Program(path, connection))
    return found
