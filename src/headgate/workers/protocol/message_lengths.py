"""How long the messages of a session may be, if `ChannelOptions` limits them. Pure.

A message has frames until it is long enough, and one chunk of a bulk payload. Without a limit it may become longer than
that by one frame, whatever that has: arguments up to `INLINE` bytes, and a Context and the definition of a function of
any length. With a limit all of it has to fit, so frames end earlier, and a call with a longer Context and function is
refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headgate.workers.options import LEAST_MESSAGE
from headgate.workers.protocol.bulk import INLINE
from headgate.workers.protocol.messages import MESSAGE

if TYPE_CHECKING:
    from headgate.workers.protocol.wire.wire_pb2 import ToClient, ToWorker

_SMALL = 64 * 1024  # for what a message has besides frames and chunks: numbers, and few texts


class Lengths(NamedTuple):
    """The limits of the messages of one session, in bytes."""

    longest: int = 0
    """Of a message; 0: no limit."""
    frames: int = 0
    """After which no frame is added; 0: as usual."""
    extra: int = 0
    """What the Context and the function of one frame may have together; 0: no limit."""

    def has_room_for_chunk(self, message: ToWorker | ToClient) -> bool:
        """Can a chunk be added to a message? If not, it goes with the next one."""
        return not self.longest or message.ByteSize() + INLINE + _SMALL <= self.longest

    def refusal(self, function: int, context: int) -> str:
        """Say why a call whose function and Context have so many bytes cannot be sent; "": it can."""
        if not self.extra or function + context <= self.extra:
            return ""
        return (
            f"its function ({function:,} bytes) and the context variables ({context:,} bytes) do not fit into a "
            f"message of at most {self.longest:,} bytes, of which they may have {self.extra:,}"
        )


def lengths_of(longest: int) -> Lengths:
    """Divide the longest allowed message; 0: no limit."""
    if not longest:
        return _UNLIMITED
    left = max(longest, LEAST_MESSAGE) - 2 * INLINE - _SMALL
    frames = min(MESSAGE, left // 2)
    return Lengths(longest, frames, left - frames)


_UNLIMITED = Lengths()
