"""The numbers by which the wire names how a call ended."""

from __future__ import annotations

from headgate.workers.protocol.messages import Kind
from headgate.workers.protocol.wire.wire_pb2 import Refusal, Result

KIND_OF_RESULT: dict[Result.Kind, Kind] = {
    Result.RETURNED: "returned",
    Result.RAISED: "raised",
    Result.CANCELLED: "cancelled",
    Result.STOPPED: "stopped",
}
KIND_OF_REFUSAL: dict[Refusal.Why, Kind] = {
    Refusal.UNAVAILABLE: "unavailable",
    Refusal.RESOURCE_EXHAUSTED: "exhausted",
    Refusal.NOT_STARTED: "not_started",
    Refusal.NO_THREAD: "no_thread",
    Refusal.RESERVED: "reserved",
}
REFUSAL_OF_KIND: dict[Kind, Refusal.Why] = {kind: why for why, kind in KIND_OF_REFUSAL.items()}
RESULT_OF_KIND: dict[Kind, Result.Kind] = {kind: number for number, kind in KIND_OF_RESULT.items()}
