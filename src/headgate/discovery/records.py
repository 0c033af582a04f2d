"""The record of a worker: its `WorkerMetadata` as JSON, for files, DNS-SD and command lines. Pure.

A record may come from anybody, so all of it is checked when it is read: size, types, numbers and lengths. A record that
fails is refused as a whole with `InvalidArgument`. Fields that a later release added are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from headgate.errors import HeadgateError, InvalidArgument
from headgate.workers.model import WorkerMetadata
from headgate.workers.options import ChannelOptions

MAX_BYTES: Final = 16 * 1024
"""Bytes of the longest record."""
MAX_TAGS: Final = 64
"""Tags of one worker."""
_LONGEST: Final = {"uid": 256, "address": 512, "version": 64, "tag": 256}
_MAX_PID: Final = 2**31 - 1


def to_record(metadata: WorkerMetadata) -> dict[str, Any]:
    """Return the metadata as values that JSON knows, or raise `InvalidArgument` if a reader would refuse them."""
    record = {
        "uid": metadata.uid,
        "address": metadata.address,
        "pid": metadata.pid,
        "version": metadata.version,
        "tags": sorted(metadata.tags),
        "secure": metadata.secure,
        "options": None if metadata.options is None else metadata.options.to_dict(),
        "extra": dict(metadata.extra),
    }
    if _read(encoded(record)) != metadata:
        raise InvalidArgument(
            f"extra of worker {metadata.uid} holds something that JSON does not know, and would arrive changed",
            remedy="Use strings as keys, and strings, numbers, booleans, None, lists and dicts as values.",
        )
    return record


def from_record(record: object) -> WorkerMetadata:
    """Return the metadata that a record describes, or raise `InvalidArgument` that says what is wrong with it."""
    if not isinstance(record, dict):
        raise InvalidArgument(f"a record must be an object, got {type(record).__name__}")
    tags = record.get("tags", [])
    if not isinstance(tags, list) or len(tags) > MAX_TAGS:
        raise InvalidArgument(f"tags of a record must be a list of at most {MAX_TAGS} strings")
    pid = record.get("pid", 0)
    if not isinstance(pid, int) or isinstance(pid, bool) or not 0 <= pid <= _MAX_PID:
        raise InvalidArgument("pid of a record must be a whole number from 0")
    secure = record.get("secure", False)
    if not isinstance(secure, bool):
        raise InvalidArgument("secure of a record must be true or false")
    extra = record.get("extra", {})
    if not isinstance(extra, dict):
        raise InvalidArgument("extra of a record must be an object")
    return WorkerMetadata(
        uid=_text("uid", record.get("uid")),
        address=checked_address(_text("address", record.get("address"))),
        pid=pid,
        version=_text("version", record.get("version")),
        tags=frozenset(_text("tag", tag) for tag in tags),
        secure=secure,
        options=_options(record.get("options")),
        extra=extra,
    )


def encoded(record: Mapping[str, Any], most: int = MAX_BYTES) -> bytes:
    """Return a record as bytes, or raise `InvalidArgument` if it is no JSON or longer than `most` bytes."""
    try:
        text = json.dumps(record, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
        data = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"the record of worker {record.get('uid')} cannot be written as JSON: {error}",
            remedy="Use strings as keys of extra, and strings, numbers, booleans, None, lists and dicts as values.",
        ) from error
    if len(data) > most:
        raise InvalidArgument(
            f"the record of worker {record.get('uid')} has {len(data)} bytes, and at most {most} are announced",
            remedy="Put less into extra and tags.",
        )
    return data


def decoded(data: bytes, most: int = MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object in these bytes, or raise `InvalidArgument`."""
    if len(data) > most:
        raise InvalidArgument(f"a record has more than {most} bytes")
    try:
        record = json.loads(data.decode(), parse_constant=_no_constant)
        json.dumps(record, ensure_ascii=False).encode()  # half a surrogate pair reads as text, and can go nowhere
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"a record is no JSON: {type(error).__name__}") from error
    if not isinstance(record, dict):
        raise InvalidArgument(f"a record must be an object, got {type(record).__name__}")
    return record


def checked_address(address: str) -> str:
    """Return an address of the form "unix:/path", "host:port" or "[v6]:port", or raise `InvalidArgument`."""
    if address.startswith("unix:"):
        if address.removeprefix("unix:").startswith("/"):
            return address
    else:
        split_address(address)
        return address
    raise InvalidArgument(f"address must be unix:/path, host:port or [ipv6]:port, got {address!r}")


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port", the host without brackets."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # IPv6 without brackets: where the port begins is a guess
    if not colon or not host or not _is_port(port):
        raise InvalidArgument(f"address must be unix:/path, host:port or [ipv6]:port, got {address!r}")
    return host, int(port)


def joined_address(host: str, port: int) -> str:
    """Return the address of a host, with brackets if it is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536


def _read(data: bytes) -> WorkerMetadata:
    return from_record(decoded(data))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or len(value) > _LONGEST[name] or not value.isprintable():
        raise InvalidArgument(f"{name} of a record must be a printable string of 1 to {_LONGEST[name]} characters")
    return value


def _options(given: object) -> ChannelOptions | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidArgument("options of a record must be an object")
    try:
        return ChannelOptions.from_dict(given)
    except HeadgateError as error:
        raise InvalidArgument(f"options of a record cannot be used: {error.message}") from error


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
