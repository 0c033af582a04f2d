"""What both ends of a conversation share: its nouns, its limits, and payloads that travel apart. Pure."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

from headgate.workers.model import FunctionForm
from headgate.workers.protocol.bulk import Borrowed, Lending, Lent, Loans, Parcel, Payload, Transfers, segments_of
from headgate.workers.protocol.wire.wire_pb2 import Call, Resent, Result, Step, ToClient, ToWorker, Yield

OLDEST, NEWEST = 1, 1
"""The protocols this release speaks."""

MESSAGE = 512 * 1024
OUTBOX = 8 * 1024 * 1024
"""With so much waiting to be sent, a client should ask another worker."""
KEPT = 64 * 1024 * 1024
CROWD = 256
"""So many small calls fill a message well enough."""
CONFIRMATION = 5.0
"""Seconds a cancelled caller waits for the worker to confirm that the routine has ended."""
UNREAD = b"its arguments are in memory that cannot be read"
"""Why a call was refused that is to be sent again, in chunks."""
PULSE = 0.5
"""Seconds between two signs of life of a worker that has calls."""
HELD = 1.0
"""Seconds without a turn after which a task loop counts as held."""

Kind = Literal[
    "yielded",
    "returned",
    "raised",
    "cancelled",
    "stopped",
    "unavailable",
    "exhausted",
    "not_started",
    "no_thread",
    "reserved",
    "lost",
    "overdue",
    "unsent",
]
"""How a call ended, but for "yielded": a generator goes on. The next four ran; of "lost" nobody knows; "overdue" may be
running still, and its caller waits no longer; the others never began."""
Advance = Literal["next", "send", "throw", "close"]
"""What a generator is to do."""
ADVANCE_TO_STEP: dict[Advance, Step.Kind] = {
    "next": Step.NEXT,
    "send": Step.SEND,
    "throw": Step.THROW,
    "close": Step.CLOSE,
}
STEP_TO_ADVANCE: dict[int, Advance] = {number: advance for advance, number in ADVANCE_TO_STEP.items()}
FRAME = 24
"""About how many bytes a small frame takes besides its payload."""


class Request(Protocol):
    """What a call is a part of: a task of a pool, which wants to be told, and knows what must not be."""

    max_calls: int
    """How many calls may run on its worker while it does, itself included; 0: any number. Set when it is run again
    after its worker was lost."""

    @property
    def request_id(self) -> str:
        """Its id, on every event."""
        ...

    @property
    def tenant(self) -> str:
        """For whom it runs; "": for nobody in particular."""
        ...

    @property
    def holds(self) -> bool:
        """Does it hold something that is in use until the call has ended, however long that takes?"""
        ...

    def placed(self, uid: str) -> None:
        """A worker was given the call."""


class Outgoing:
    """A call, as the client's end of a session keeps it."""

    __slots__ = (
        "arguments",
        "backlog",
        "caller",
        "context",
        "due",
        "ended",
        "exchange",
        "form",
        "handed",
        "lending",
        "limit",
        "number",
        "prefetch",
        "request",
        "reservation",
        "started",
        "task",
        "tell_start",
        "tenant",
        "timeout",
        "transfer",
        "waiter",
    )

    def __init__(
        self,
        task: int,
        form: FunctionForm,
        arguments: bytes | Parcel,
        timeout: float = 0.0,
        caller: str = "",
        tell_start: bool = False,
        waiter: Any = None,
        prefetch: int = 0,
        context: bytes = b"",
        tenant: str = "",
        request: Any = None,
    ) -> None:
        self.task: int = task
        """The number of the task in this process."""
        self.number: int = 0
        """Its number in the session; 0 while it is unsent."""
        self.form: FunctionForm = form
        self.arguments: bytes | Parcel = arguments
        self.transfer: int = 0
        """The transfer by which they travel, if they travel apart;"""
        self.lending: Lending[Any] | None = None
        """or the memory in which they are lent."""
        self.timeout: float = timeout
        self.caller: str = caller
        self.tell_start: bool = tell_start
        self.started: bool = False
        """Did the worker say so? Only calls with `tell_start` are told."""
        self.waiter: Any = waiter
        """Whom the shell has to tell; opaque here."""
        self.prefetch: int = prefetch
        self.context: bytes = context
        """What is set in the caller's Context; opaque here, as in all that follows."""
        self.tenant: str = tenant
        self.request: Any = request
        """What it is a part of, if it was not called by itself (see `Request`)."""
        self.reservation: int = 0
        """The room that was granted for it; 0: it needs none."""
        self.exchange: Any = None
        """Of a generator: what its worker knows of that; the shell's."""
        self.backlog: Any = None
        """Of a generator: answers that nobody has taken yet; the shell's, opaque here."""
        self.limit: float = 0.0
        """Seconds in which calls that it makes itself must have begun; 0: no limit."""
        self.handed: float | None = None
        """Of one with a timeout: when the worker was given it, or told to take the next step; the shell's."""
        self.due: float | None = None
        """Of one with a timeout: when that is over, as the worker last said; None: it has not begun. The shell's."""
        self.ended: Any = None
        """Whom to tell, when it was abandoned, that the worker has ended it; the shell's."""


class Answer(NamedTuple):
    """The one outcome of a call in a session."""

    call: Outgoing
    kind: Kind
    payload: Payload = b""
    """A pickle if it returned or raised; a reason, as text, if it was refused."""
    swallowed: bool = False
    """It was cancelled and ended otherwise all the same."""
    steps: int = 0
    """Of a generator: how many steps other than "next" it had taken."""
    context: bytes = b""


class Begun(NamedTuple):
    """A call for the worker to run."""

    number: int
    task: int
    function: Any
    arguments: Payload
    timeout: float
    caller: str
    tell_start: bool
    prefetch: int = 0
    context: bytes = b""
    tenant: str = ""
    reservation: int = 0
    dispatch_timeout: float = 0.0


class Stepped(NamedTuple):
    """What a generator is to do now."""

    number: int
    advance: Advance
    times: int
    payload: Payload
    context: bytes = b""


class Heard(NamedTuple):
    """What came to a worker."""

    begun: list[Begun]
    cancels: list[int]
    steps: list[Stepped]


class Side:
    """What both ends have: payloads that travel apart."""

    def __init__(self) -> None:
        self.shares: bool = False
        """May it lend memory to the other side?"""
        self.over: bool = False
        """Is there nobody any more to tell anything?"""
        self.loans: Loans[Any] = Loans()
        self._transfers: Transfers[Any] = Transfers()
        self._returns: list[int] = []
        self._unread: list[int] = []  # loans of the other side that it is to send in chunks
        self._resending: list[Resent] = []  # what it could not read of ours, and has in chunks
        self.resent: list[tuple[int, Parcel | None]] = []
        """Loans of the other side that came in chunks, until the shell has taken them; None: they could not be sent."""

    def may_lend(self, may: bool) -> None:
        """The other side can, or cannot, read memory of this one."""
        self.shares = may

    def _depart(self, parcel: Parcel, frame: Any) -> None:
        """Send it apart; `_landed(frame)` follows."""
        if self.shares:
            self.loans.ask(parcel, frame)
        else:
            frame.transfer = self._transfers.begin(parcel, frame)

    def _landed(self, frame: Any) -> None:
        raise NotImplementedError

    def lend(self, lending: Lending[Any], descriptor: int) -> None:
        """It was written into this memory."""
        frame = self.loans.written(lending, descriptor)
        if frame is not None:
            self._name(frame, lending)
            self._landed(frame)

    def _name(self, frame: Any, lending: Lending[Any]) -> None:
        name_loan(frame, lending)

    def not_lent(self, lending: Lending[Any]) -> None:
        """There is no memory for it: it goes in chunks."""
        frame = self.loans.failed(lending)
        if frame is not None:
            frame.transfer = self._transfers.begin(lending.parcel, frame)

    def has_read(self, borrowed: Borrowed) -> None:
        """What the other side lent was read."""
        if not self.over:
            self._returns.append(borrowed.number)

    def cannot_read(self, borrowed: Borrowed) -> None:
        """What the other side lent cannot be read: it is to send it. It comes as one of `resent`."""
        if not self.over:
            self._unread.append(borrowed.number)

    def resend(self, lent: Lent, parcel: Parcel | None) -> None:
        """The other side could not read this. None: neither can we."""
        if self.over:
            return
        frame = Resent(loan=lent.number)
        if parcel is None:
            self._resending.append(frame)
        else:
            frame.transfer = self._transfers.begin(parcel, frame)

    def take_resent(self) -> list[tuple[int, Parcel | None]]:
        """Loans that came in chunks, each once."""
        resent, self.resent = self.resent, []
        return resent

    def _follows(self, frame: Any) -> None:
        """The last chunk was taken of what this frame needs."""
        if isinstance(frame, Resent):
            self._resending.append(frame)
        else:
            self._landed(frame)

    def _payload(self, frame: Any, inline: bytes) -> Payload:
        """What a frame that came speaks of."""
        if inline:
            return inline
        if frame.transfer:
            return self._transfers.parcel(frame.transfer)
        if frame.HasField("loan"):
            layout = frame.loan.layout
            return Borrowed(frame.loan.number, frame.loan.descriptor, segments_of(layout), layout.lifted)
        return inline

    def _drop(self, payload: Payload) -> None:
        """Nobody needs it."""
        if isinstance(payload, Borrowed):
            self.has_read(payload)

    def _hear(self, message: ToWorker | ToClient) -> None:
        if message.chunks or message.credits:
            self._transfers.receive(message)
        if message.returned:
            self.loans.returned(message.returned)
        if message.unread:
            self.loans.recall(message.unread)
        for resent in message.resent:
            parcel = self._transfers.parcel(resent.transfer) if resent.transfer else None
            self.resent.append((resent.loan, parcel))

    @property
    def stirs(self) -> bool:
        """Did what came set something going, or free something?"""
        transfers, loans = self._transfers, self.loans
        return bool(
            self.owes or transfers.leaving or loans.waiting or loans.writing or loans.released or loans.recalled
        )

    @property
    def owes(self) -> bool:
        """Is there something to tell the other side about what it sent?"""
        return bool(self._returns or self._transfers.grants or self._unread or self._resending)

    def _settle(self, message: ToWorker | ToClient) -> None:
        """Tell what was read and what could not be, and that there is room."""
        if self._unread:
            message.unread.extend(self._unread)
            self._unread.clear()
        if self._resending:
            message.resent.extend(self._resending)
            self._resending.clear()
        if self._returns:
            message.returned.extend(self._returns)
            self._returns.clear()
        if self._transfers.grants:
            self._transfers.grant(message)

    def _end(self) -> None:
        self.over = True
        self.loans.end()
        self._transfers = Transfers()
        self._returns.clear()
        self._unread.clear()
        self._resending.clear()
        self.resent.clear()


def name_loan(frame: Call | Step | Result | Yield, lending: Lending[Any]) -> None:
    """Write into a frame in which memory its payload is."""
    frame.loan.number, frame.loan.descriptor = lending.number, lending.descriptor
    lending.parcel.describe(frame.loan.layout)
