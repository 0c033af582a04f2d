"""What both ends of a session share: calls and answers, limits, and the handling of bulk payloads. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from headgate.workers.model import FunctionForm
from headgate.workers.protocol.bulk import Borrowed, BulkPayload, Lending, Lent, Loans, Payload, Transfers, segments_of
from headgate.workers.protocol.wire.wire_pb2 import Call, Resent, Result, Step, ToClient, ToWorker, Yield

if TYPE_CHECKING:
    from collections import deque

    from headgate.context.travel import Exchange
    from headgate.workers.serialization.functions import ReceivedFunction

OLDEST, NEWEST = 1, 1
"""The protocols that this release speaks."""

MESSAGE = 512 * 1024
OUTBOX = 8 * 1024 * 1024
"""With so many bytes waiting to be sent, a client should use another worker."""
KEPT = 64 * 1024 * 1024
CROWD = 256
"""With so many small calls a message is sent without waiting for more."""
CONFIRMATION = 5.0
"""Seconds a cancelled caller waits for the worker to confirm that the routine has ended."""
UNREAD = b"its arguments are in memory that cannot be read"
"""Reason of a refusal: the client must send the call again, with its arguments in chunks."""
PULSE = 0.5
"""Seconds between two reports of a worker that has calls."""
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
    """The task of a pool that a call belongs to."""

    max_calls: int
    """How many calls may run on its worker while it does, itself included; 0: any number. Set when it is run again
    after its worker was lost."""

    @property
    def request_id(self) -> str:
        """The id of the task, which all its events carry."""
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
        """Note which worker has the call."""


class Waiter(Protocol):
    """Who is told that a call was answered: a future that somebody awaits, or an object that acts on it at once."""

    def done(self) -> bool:
        """Whether it must not be told any more."""
        ...

    def set_result(self, result: None, /) -> None:
        """Hear that the answer is there."""


class Outgoing:
    """A call, as the client's end of a session keeps it."""

    __slots__ = (
        "answer",
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
        arguments: bytes | BulkPayload,
        timeout: float = 0.0,
        caller: str = "",
        tell_start: bool = False,
        waiter: Waiter | None = None,
        prefetch: int = 0,
        context: bytes = b"",
        tenant: str = "",
        request: Request | None = None,
    ) -> None:
        self.task: int = task
        """The number of the task in this process."""
        self.number: int = 0
        """Its number in the session; 0 while it is unsent."""
        self.form: FunctionForm = form
        self.arguments: bytes | BulkPayload = arguments
        self.transfer: int = 0
        """The transfer that sends the arguments, if they are bulk; 0: none."""
        self.lending: Lending[Any] | None = None
        """The memory in which the arguments are lent, if they are."""
        self.timeout: float = timeout
        self.caller: str = caller
        self.tell_start: bool = tell_start
        self.started: bool = False
        """Did the worker say so? Only calls with `tell_start` are told."""
        self.waiter: Waiter | None = waiter
        """Who is told of the next answer; None: nobody, or it has been. Not used in a session."""
        self.answer: Answer | None = None
        """The answer that `waiter` was told of, until it is taken: the two hold each other. Not used in a session."""
        self.prefetch: int = prefetch
        self.context: bytes = context
        """The caller's Context, encoded; not read in a session."""
        self.tenant: str = tenant
        self.request: Request | None = request
        """The task that it belongs to, if it was not called directly."""
        self.reservation: int = 0
        """The reservation that was granted for it; 0: it needs none."""
        self.exchange: Exchange | None = None
        """Of a generator: which values of the Context its worker knows; not used in a session."""
        self.backlog: deque[Answer] | None = None
        """Of a generator: answers that nobody has taken yet; not used in a session."""
        self.limit: float = 0.0
        """Seconds in which calls that it makes itself must have begun; 0: no limit."""
        self.handed: float | None = None
        """Of one with a timeout: when the worker was given it, or told to take the next step."""
        self.due: float | None = None
        """Of one with a timeout: when that is over, as the worker last said; None: it has not begun."""
        self.ended: Callable[[], None] | None = None
        """Called when the worker has ended this abandoned call; not used in a session."""

    def take_answer(self) -> Answer:
        """Return the answer that the waiter was told of, which is not kept."""
        answer, self.answer = self.answer, None
        assert answer is not None, "a waiter is told when the answer is there"
        return answer


class Answer(NamedTuple):
    """One answer to a call: its outcome, or an item of a generator."""

    call: Outgoing
    kind: Kind
    payload: Payload = b""
    """A pickle if it returned or raised; a reason, as text, if it was refused."""
    swallowed: bool = False
    """It was cancelled, and ended in another way."""
    steps: int = 0
    """Of a generator: how many steps other than "next" it had taken."""
    context: bytes = b""


class Begun(NamedTuple):
    """A call that a worker received and has to run."""

    number: int
    task: int
    function: ReceivedFunction
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
    """The contents of a message to a worker."""

    begun: list[Begun]
    cancels: list[int]
    steps: list[Stepped]


class Side:
    """The part of a session that both ends have: sending and receiving bulk payloads."""

    def __init__(self) -> None:
        self.shares: bool = False
        """Can the other side read memory that is lent to it?"""
        self.over: bool = False
        """Has the session ended?"""
        self.loans: Loans[Any] = Loans()
        self._transfers: Transfers[Any] = Transfers()
        self._returns: list[int] = []
        self._unread: list[int] = []  # loans of the other side that it is to send in chunks
        self._resending: list[Resent] = []  # what it could not read of ours, and has in chunks
        self.resent: list[tuple[int, BulkPayload | None]] = []
        """Loans of the other side that came in chunks, until `take_resent` takes them; None: they could not be sent."""

    def may_lend(self, may: bool) -> None:
        """Note whether the other side can read memory of this one."""
        self.shares = may

    def _depart(self, bulk: BulkPayload, frame: Any) -> None:
        """Send a bulk payload; `_landed(frame)` follows when the frame may be sent."""
        if self.shares:
            self.loans.ask(bulk, frame)
        else:
            frame.transfer = self._transfers.begin(bulk, frame)

    def _landed(self, frame: Any) -> None:
        raise NotImplementedError

    def lend(self, lending: Lending[Any], descriptor: int) -> None:
        """Lend a payload that was written into this memory."""
        frame = self.loans.written(lending, descriptor)
        if frame is not None:
            self._name(frame, lending)
            self._landed(frame)

    def _name(self, frame: Any, lending: Lending[Any]) -> None:
        name_loan(frame, lending)

    def not_lent(self, lending: Lending[Any]) -> None:
        """Send a payload in chunks, because there is no memory for it."""
        frame = self.loans.failed(lending)
        if frame is not None:
            frame.transfer = self._transfers.begin(lending.bulk, frame)

    def has_read(self, borrowed: Borrowed) -> None:
        """Return memory of the other side that was read."""
        if not self.over:
            self._returns.append(borrowed.number)

    def cannot_read(self, borrowed: Borrowed) -> None:
        """Ask the other side to send in chunks what it lent. It comes as one of `resent`."""
        if not self.over:
            self._unread.append(borrowed.number)

    def resend(self, lent: Lent, bulk: BulkPayload | None) -> None:
        """Send in chunks a loan that the other side could not read. None: it cannot be read here either."""
        if self.over:
            return
        frame = Resent(loan=lent.number)
        if bulk is None:
            self._resending.append(frame)
        else:
            frame.transfer = self._transfers.begin(bulk, frame)

    def take_resent(self) -> list[tuple[int, BulkPayload | None]]:
        """Return the loans that came in chunks, each once."""
        resent, self.resent = self.resent, []
        return resent

    def _follows(self, frame: Any) -> None:
        """Send the frame whose last chunk was taken."""
        if isinstance(frame, Resent):
            self._resending.append(frame)
        else:
            self._landed(frame)

    def _payload(self, frame: Any, inline: bytes) -> Payload:
        """Return the payload of a received frame, however it was sent."""
        if inline:
            return inline
        if frame.transfer:
            return self._transfers.received(frame.transfer)
        if frame.HasField("loan"):
            layout = frame.loan.layout
            return Borrowed(frame.loan.number, frame.loan.descriptor, segments_of(layout), layout.lifted)
        return inline

    def _drop(self, payload: Payload) -> None:
        """Return a payload that nobody needs."""
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
            bulk = self._transfers.received(resent.transfer) if resent.transfer else None
            self.resent.append((resent.loan, bulk))

    @property
    def stirs(self) -> bool:
        """Is there something to send, to write or to close after a message was read?"""
        transfers, loans = self._transfers, self.loans
        return bool(
            self.owes or transfers.leaving or loans.waiting or loans.writing or loans.released or loans.recalled
        )

    @property
    def owes(self) -> bool:
        """Is there something to tell the other side about the payloads that it sent?"""
        return bool(self._returns or self._transfers.grants or self._unread or self._resending)

    def _settle(self, message: ToWorker | ToClient) -> None:
        """Write into a message what was read, what could not be read, and new credit."""
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
    lending.bulk.describe(frame.loan.layout)
