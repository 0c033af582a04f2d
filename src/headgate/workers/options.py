"""`ChannelOptions` and `WorkerOptions`: how the connections between clients and a worker behave. Pure.

A worker advertises its `ChannelOptions` in its `WorkerMetadata`, and every client connects with them, so both ends
agree. What else is in `WorkerOptions` concerns the worker's server alone, and is not advertised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from headgate.core.checks import checked_flag, checked_whole
from headgate.errors import InvalidArgument, InvalidType

if TYPE_CHECKING:
    from headgate.workers.credentials import WorkerCredentials

Compression = Literal["gzip", "deflate"]

KEEPALIVE_MS = 3000
"""Milliseconds between two pings, and milliseconds that the other side has to answer one, unless it is said."""
PING_INTERVAL_MS = 500
"""Milliseconds that a server expects between two pings of a client at least, unless it is said."""
LEAST_MESSAGE = 1024 * 1024
"""The smallest limit of a message: a frame of ours may be so long."""


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """Settings that both ends of a connection use. None: the default, which is gRPC's unless it is said otherwise."""

    max_receive_message_length: int | None = None
    """Bytes of the longest message that an end accepts; None: no limit. Payloads are not limited by it, because long
    ones travel in chunks: see ``WorkerPool(max_payload=)``."""
    max_send_message_length: int | None = None
    """Bytes of the longest message that an end sends; None: no limit."""
    keepalive_time_ms: int | None = None
    """Milliseconds without traffic after which a client pings the worker; None: 3000."""
    keepalive_timeout_ms: int | None = None
    """Milliseconds in which a ping must be answered, else the worker is lost; None: 3000."""
    keepalive_permit_without_calls: bool | None = None
    """Whether a client pings while no session is open; None: True."""
    max_pings_without_data: int | None = None
    """Pings in a row without data in between; 0 or None: any number."""
    max_concurrent_streams: int | None = None
    """Tasks of one client that the worker executes at the same time; more wait. None: any number."""
    compression: Compression | None = None
    """How messages are compressed."""

    def __post_init__(self) -> None:
        for name in ("max_receive_message_length", "max_send_message_length"):
            _check_count(name, getattr(self, name), LEAST_MESSAGE)
        for name in ("keepalive_time_ms", "keepalive_timeout_ms", "max_concurrent_streams"):
            _check_count(name, getattr(self, name), 1)
        _check_count("max_pings_without_data", self.max_pings_without_data, 0)
        if self.keepalive_permit_without_calls is not None:
            checked_flag("keepalive_permit_without_calls", self.keepalive_permit_without_calls)
        if self.compression not in (None, "gzip", "deflate"):
            raise InvalidArgument(f"compression must be 'gzip', 'deflate' or None, got {self.compression!r}")

    @property
    def max_message(self) -> int:
        """Bytes of the longest message that both ends send and accept; 0: no limit."""
        limits = (self.max_receive_message_length, self.max_send_message_length)
        return min((limit for limit in limits if limit is not None), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return what is set, as values that JSON knows."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ChannelOptions:
        """Make options of what `to_dict` gave. What a later release added is ignored."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in known})


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Settings of a worker: those of its connections, which its clients use too, and those of its server alone."""

    channel: ChannelOptions = field(default_factory=ChannelOptions)
    """What clients use too."""
    http2_min_recv_ping_interval_without_data_ms: int | None = None
    """Milliseconds between two pings of a client at least; None: `keepalive_time_ms` of the channel, if that is set."""
    max_ping_strikes: int | None = None
    """How many pings may come too early before the connection is closed; 0 or None: any number."""
    max_connection_idle_ms: int | None = None
    """Milliseconds after which a connection without a session is closed; None: never."""
    max_connection_age_ms: int | None = None
    """Milliseconds after which a connection is closed; clients open the next one before. None: never."""
    max_connection_age_grace_ms: int | None = None
    """Milliseconds that calls on a connection have to end when it has reached its age; None: as long as they take."""

    def __post_init__(self) -> None:
        if not isinstance(self.channel, ChannelOptions):
            raise InvalidType(f"channel must be ChannelOptions, got {type(self.channel).__name__}")
        _check_count("max_ping_strikes", self.max_ping_strikes, 0)
        for name in (
            "http2_min_recv_ping_interval_without_data_ms",
            "max_connection_idle_ms",
            "max_connection_age_ms",
            "max_connection_age_grace_ms",
        ):
            _check_count(name, getattr(self, name), 1)
        least, keepalive = self.http2_min_recv_ping_interval_without_data_ms, self.channel.keepalive_time_ms
        if least is not None and (KEEPALIVE_MS if keepalive is None else keepalive) < least:
            shown = f"{KEEPALIVE_MS} (the default)" if keepalive is None else keepalive
            raise InvalidArgument(
                f"keepalive_time_ms must be at least http2_min_recv_ping_interval_without_data_ms ({least}), "
                f"got {shown}",
                remedy="Clients would ping more often than the worker accepts. Raise the one or lower the other.",
            )

    @property
    def min_ping_interval_ms(self) -> int:
        """Milliseconds that the server expects between two pings of a client."""
        if self.http2_min_recv_ping_interval_without_data_ms is not None:
            return self.http2_min_recv_ping_interval_without_data_ms
        return PING_INTERVAL_MS if self.channel.keepalive_time_ms is None else self.channel.keepalive_time_ms


def _check_count(name: str, number: object, least: int) -> None:
    if number is not None:
        checked_whole(name, number, least)


def checked_options(options: object) -> WorkerOptions | None:
    """Return the options of a worker; ChannelOptions alone are taken as those of its connections."""
    if options is None or isinstance(options, WorkerOptions):
        return options
    if isinstance(options, ChannelOptions):
        return WorkerOptions(channel=options)
    raise InvalidType(
        f"options must be WorkerOptions, got {type(options).__name__}",
        remedy="Make them with headgate.WorkerOptions(channel=headgate.ChannelOptions(...), ...).",
    )


def checked_credentials(credentials: object) -> WorkerCredentials | None:
    """Return the credentials of a worker or a pool; None: there are none."""
    if credentials is None:
        return None
    from headgate.workers.credentials import WorkerCredentials

    if isinstance(credentials, WorkerCredentials):
        return credentials
    raise InvalidType(
        f"credentials must be WorkerCredentials, got {type(credentials).__name__}",
        remedy="Make them with headgate.WorkerCredentials.from_files(ca_path, key_path, cert_path).",
    )
