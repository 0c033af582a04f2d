"""Reads, and alters, the messages between this process and its workers, below headgate and above gRPC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from grpc.aio import _call

from headgate.workers.protocol.wire.wire_pb2 import ToClient, ToWorker


class Tap:
    """The messages in their order. `alter_sent` and `alter_received` may change one before it goes on."""

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []
        self.received: list[ToClient] = []
        self.alter_sent: Callable[[ToWorker], None] | None = None
        self.alter_received: Callable[[ToClient], None] | None = None
        self._open = True

    def lay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kind: Any = _call.StreamStreamCall
        write, read = kind.write, kind._read  # which iterating over a stream calls, too

        async def tapped_write(stream: Any, data: bytes) -> None:
            await write(stream, self._outward(data) if self._open else data)

        async def tapped_read(stream: Any) -> Any:
            data = await read(stream)
            return self._homeward(data) if self._open and isinstance(data, bytes) else data

        monkeypatch.setattr(kind, "write", tapped_write)
        monkeypatch.setattr(kind, "_read", tapped_read)

    def close(self) -> None:
        self._open = False

    def forget(self) -> None:
        self.sent.clear()
        self.received.clear()

    def _outward(self, data: bytes) -> bytes:
        message = ToWorker.FromString(data)
        if self.alter_sent is not None:
            self.alter_sent(message)
            data = message.SerializeToString()
        self.sent.append(message)
        return data

    def _homeward(self, data: bytes) -> bytes:
        message = ToClient.FromString(data)
        if self.alter_received is not None:
            self.alter_received(message)
            data = message.SerializeToString()
        self.received.append(message)
        return data

    # -- contexts -----------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> list[Any]:
        return [call for message in self.sent for call in message.calls]

    @property
    def steps(self) -> list[Any]:
        return [step for message in self.sent for step in message.steps]

    @property
    def results(self) -> list[Any]:
        return [result for message in self.received for result in message.results]

    @property
    def yields(self) -> list[Any]:
        return [item for message in self.received for item in message.yields]

    @property
    def contexts(self) -> list[bytes]:
        """Of every call, step, item and result that went by."""
        return [frame.context for frame in (*self.calls, *self.steps, *self.yields, *self.results)]
