"""Asks one name server for the addresses of a host: as much of DNS as that takes (RFC 1035, EDNS0 for long answers).

`query` and `answers` are pure. `ask` sends over UDP, and over TCP when the answer does not fit into a datagram.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

from headgate.core.clock import clock
from headgate.discovery.records import split_address

A: Final = 1
AAAA: Final = 28
_LONGEST: Final = 4096  # bytes of an answer over UDP that we take
_TIMEOUT: Final = 2.0
_TRIES: Final = 2
_HEADER: Final = struct.Struct(">6H")
_RCODES: Final = {1: "format error", 2: "server failure", 3: "no such name", 4: "not implemented", 5: "refused"}


class NoAnswer(OSError):
    """The name server does not know, or what it sent cannot be read."""


def query(number: int, host: str, kind: int) -> bytes:
    """Return the question for the addresses of a host, of the kind A or AAAA."""
    header = _HEADER.pack(number, 0x0100, 1, 0, 0, 1)  # recursion desired; one question, one additional record
    options = b"\0" + struct.pack(">HHIH", 41, _LONGEST, 0, 0)  # EDNS0: how long a datagram may be
    return header + _question(host, kind) + options


def answers(data: bytes, number: int, host: str, kind: int) -> tuple[set[str], bool]:
    """Return the addresses in an answer, and whether it was cut; `NoAnswer`: it is none, or not to our question."""
    try:
        return _answers(data, number, _question(host, kind), kind)
    except (struct.error, IndexError) as error:
        raise NoAnswer("the answer of the name server cannot be read") from error


def ask(nameserver: str, host: str) -> set[str]:
    """Return all addresses of a host, or raise OSError. Blocks for some seconds at most."""
    return _ask(nameserver, host, A) | _ask(nameserver, host, AAAA)


def _ask(nameserver: str, host: str, kind: int) -> set[str]:
    where = split_address(nameserver)
    for last in range(_TRIES):
        number = int(clock.token()[:4], 16)
        try:
            found, cut = _by_udp(where, number, host, kind)
            return _by_tcp(where, number, host, kind) if cut else found
        except TimeoutError:
            if last == _TRIES - 1:
                raise
    raise AssertionError("the last try returns or raises")


def _by_udp(where: tuple[str, int], number: int, host: str, kind: int) -> tuple[set[str], bool]:
    family, _, _, _, address = socket.getaddrinfo(*where, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect(address)
        asking.send(query(number, host, kind))
        deadline = clock.now() + _TIMEOUT
        while (left := deadline - clock.now()) > 0:
            asking.settimeout(left)
            data = asking.recv(65536)
            if data[:2] == number.to_bytes(2, "big"):  # else a late answer to another question, or a forged one
                return answers(data, number, host, kind)
    raise TimeoutError(f"no answer from the name server {where[0]}:{where[1]} within {_TIMEOUT:g} s")


def _by_tcp(where: tuple[str, int], number: int, host: str, kind: int) -> set[str]:
    question = query(number, host, kind)
    with socket.create_connection(where, timeout=_TIMEOUT) as asking, asking.makefile("rb") as reader:
        asking.sendall(len(question).to_bytes(2, "big") + question)
        length = int.from_bytes(reader.read(2), "big")
        return answers(reader.read(length), number, host, kind)[0]


def _question(host: str, kind: int) -> bytes:
    labels = host.rstrip(".").split(".")
    try:
        encoded = [label.encode("ascii") if label.isascii() else label.encode("idna") for label in labels]
    except UnicodeError as error:
        raise NoAnswer(f"{host!r} is no host name") from error
    if any(not 0 < len(label) < 64 for label in encoded):
        raise NoAnswer(f"{host!r} is no host name")
    return b"".join(bytes([len(label)]) + label for label in encoded) + b"\0" + struct.pack(">HH", kind, 1)


def _answers(data: bytes, number: int, question: bytes, kind: int) -> tuple[set[str], bool]:
    got, flags, questions, count, _, _ = _HEADER.unpack_from(data)
    code = flags & 0xF
    if got != number or not flags & 0x8000 or questions != 1:
        raise NoAnswer("the name server sent something that is no answer to our question")
    at = _HEADER.size
    if data[at : at + len(question)].lower() != question.lower():
        raise NoAnswer("the name server answered another question")
    if code:
        raise NoAnswer(f"the name server says: {_RCODES.get(code, f'error {code}')}")
    at += len(question)
    found = set()
    for _ in range(count):
        at = _after_name(data, at)
        its_kind, _, _, length = struct.unpack_from(">HHIH", data, at)
        at += 10
        value = data[at : at + length]
        at += length
        if its_kind == kind and length == (4 if kind == A else 16) and len(value) == length:  # CNAMEs are passed over
            found.add(socket.inet_ntop(socket.AF_INET if kind == A else socket.AF_INET6, value))
    return found, bool(flags & 0x0200)


def _after_name(data: bytes, at: int) -> int:
    while length := data[at]:
        if length >= 0xC0:  # the rest of the name stands elsewhere
            return at + 2
        at += 1 + length
    return at + 1
