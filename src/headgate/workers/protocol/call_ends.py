"""How the end of a call is written on the wire."""

from __future__ import annotations

from typing import Any

from headgate.workers.protocol.messages import Kind
from headgate.workers.protocol.wire.wire_pb2 import Refusal, Result

KIND_OF_RESULT: dict[int, Kind] = {
    Result.RETURNED: "returned",
    Result.RAISED: "raised",
    Result.CANCELLED: "cancelled",
    Result.STOPPED: "stopped",
}
KIND_OF_REFUSAL: dict[int, Kind] = {
    Refusal.UNAVAILABLE: "unavailable",
    Refusal.RESOURCE_EXHAUSTED: "exhausted",
    Refusal.NOT_STARTED: "not_started",
    Refusal.NO_THREAD: "no_thread",
    Refusal.RESERVED: "reserved",
}
REFUSAL_OF_KIND: dict[Kind, Any] = {kind: why for why, kind in KIND_OF_REFUSAL.items()}
RESULT_OF_KIND: dict[Kind, Any] = {kind: number for number, kind in KIND_OF_RESULT.items()}
