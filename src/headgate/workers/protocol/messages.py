"""What both ends of a session share: calls, answers, steps of generators, and limits. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from headgate.core.lessons import Lesson
from headgate.workers.model import FunctionForm
from headgate.workers.protocol.bulk import BulkPayload, Lending, Payload
from headgate.workers.protocol.wire.wire_pb2 import Step

if TYPE_CHECKING:
    from collections import deque

    from headgate.context.travel import Exchange
    from headgate.workers.serialization.functions import ReceivedFunction

OLDEST, NEWEST = 1, 1
"""The protocols that this release speaks."""

MESSAGE = 512 * 1024
"""Bytes of frames after which a message is long enough."""
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


class Introduction(NamedTuple):
    """What a worker is told of the workers that its routines may call."""

    pool: str
    peers: list[Peer]
    number: int = 0
    """Which list of the pool it is: the one with the highest number holds. 0: they are not numbered."""


class Peer(NamedTuple):
    """A worker that routines of another may call."""

    uid: str
    address: str
    secure: bool = False
    """Whether it is reached with TLS, unless its address is a Unix socket."""
    options: str = ""
    """The ChannelOptions that it advertises, as a JSON object; "": none."""


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

    def learned(self, lessons: Sequence[Lesson]) -> None:
        """Tell the resource of the task what the call has learned about it."""


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
        "origin",
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
        origin: str = "",
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
        self.origin: str = origin
        """The id of the task of a TaskPool, or of the outermost call, for which it runs, if `caller` is another."""
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
    lessons: Sequence[Lesson] = ()
    """What the call has learned about resources."""


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
    origin: str = ""


class Stepped(NamedTuple):
    """What a generator is to do now."""

    number: int
    advance: Advance
    times: int
    payload: Payload
    context: bytes = b""


class Received(NamedTuple):
    """The contents of a message to a worker."""

    begun: list[Begun]
    cancels: list[int]
    steps: list[Stepped]
