from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import Any as _Any, ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToWorker(_message.Message):
    __slots__ = ("hello", "definitions", "chunks", "calls", "cancels", "forgotten", "peers", "steps", "credits", "returned", "shares", "unread", "resent", "reserves", "released", "leaves")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DEFINITIONS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    RESENT_FIELD_NUMBER: _ClassVar[int]
    RESERVES_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    definitions: _containers.RepeatedCompositeFieldContainer[Definition]
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    calls: _containers.RepeatedCompositeFieldContainer[Call]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    forgotten: _containers.RepeatedScalarFieldContainer[int]
    peers: Peers
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    credits: _containers.RepeatedCompositeFieldContainer[Credit]
    returned: _containers.RepeatedScalarFieldContainer[int]
    shares: bool
    unread: _containers.RepeatedScalarFieldContainer[int]
    resent: _containers.RepeatedCompositeFieldContainer[Resent]
    reserves: _containers.RepeatedCompositeFieldContainer[Reserve]
    released: _containers.RepeatedScalarFieldContainer[int]
    leaves: bool
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping[str, _Any]]] = ..., definitions: _Optional[_Iterable[_Union[Definition, _Mapping[str, _Any]]]] = ..., chunks: _Optional[_Iterable[_Union[Chunk, _Mapping[str, _Any]]]] = ..., calls: _Optional[_Iterable[_Union[Call, _Mapping[str, _Any]]]] = ..., cancels: _Optional[_Iterable[int]] = ..., forgotten: _Optional[_Iterable[int]] = ..., peers: _Optional[_Union[Peers, _Mapping[str, _Any]]] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping[str, _Any]]]] = ..., credits: _Optional[_Iterable[_Union[Credit, _Mapping[str, _Any]]]] = ..., returned: _Optional[_Iterable[int]] = ..., shares: bool = ..., unread: _Optional[_Iterable[int]] = ..., resent: _Optional[_Iterable[_Union[Resent, _Mapping[str, _Any]]]] = ..., reserves: _Optional[_Iterable[_Union[Reserve, _Mapping[str, _Any]]]] = ..., released: _Optional[_Iterable[int]] = ..., leaves: bool = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("number", "max_calls", "caller", "overdue")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MAX_CALLS_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_FIELD_NUMBER: _ClassVar[int]
    number: int
    max_calls: int
    caller: str
    overdue: bool
    def __init__(self, number: _Optional[int] = ..., max_calls: _Optional[int] = ..., caller: _Optional[str] = ..., overdue: bool = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("oldest", "newest", "epoch", "client", "version", "max_payload", "probe", "tells_leaving")
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    TELLS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    oldest: int
    newest: int
    epoch: int
    client: str
    version: str
    max_payload: int
    probe: Probe
    tells_leaving: bool
    def __init__(self, oldest: _Optional[int] = ..., newest: _Optional[int] = ..., epoch: _Optional[int] = ..., client: _Optional[str] = ..., version: _Optional[str] = ..., max_payload: _Optional[int] = ..., probe: _Optional[_Union[Probe, _Mapping[str, _Any]]] = ..., tells_leaving: bool = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("pid", "descriptor", "token")
    PID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    pid: int
    descriptor: int
    token: bytes
    def __init__(self, pid: _Optional[int] = ..., descriptor: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class Definition(_message.Message):
    __slots__ = ("function", "tag", "module", "qualname", "digest", "python", "value", "fresh", "thread", "file", "generator", "member", "reusable")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    QUALNAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    THREAD_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    GENERATOR_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    REUSABLE_FIELD_NUMBER: _ClassVar[int]
    function: int
    tag: str
    module: str
    qualname: str
    digest: bytes
    python: str
    value: bytes
    fresh: bool
    thread: bool
    file: str
    generator: bool
    member: int
    reusable: bool
    def __init__(self, function: _Optional[int] = ..., tag: _Optional[str] = ..., module: _Optional[str] = ..., qualname: _Optional[str] = ..., digest: _Optional[bytes] = ..., python: _Optional[str] = ..., value: _Optional[bytes] = ..., fresh: bool = ..., thread: bool = ..., file: _Optional[str] = ..., generator: bool = ..., member: _Optional[int] = ..., reusable: bool = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("number", "function", "arguments", "transfer", "timeout", "caller", "tell_start", "task", "context", "loan", "prefetch", "tenant", "dispatch_timeout", "reservation", "origin")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    TELL_START_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LOAN_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    number: int
    function: int
    arguments: bytes
    transfer: int
    timeout: float
    caller: str
    tell_start: bool
    task: int
    context: bytes
    loan: Loan
    prefetch: int
    tenant: str
    dispatch_timeout: float
    reservation: int
    origin: str
    def __init__(self, number: _Optional[int] = ..., function: _Optional[int] = ..., arguments: _Optional[bytes] = ..., transfer: _Optional[int] = ..., timeout: _Optional[float] = ..., caller: _Optional[str] = ..., tell_start: bool = ..., task: _Optional[int] = ..., context: _Optional[bytes] = ..., loan: _Optional[_Union[Loan, _Mapping[str, _Any]]] = ..., prefetch: _Optional[int] = ..., tenant: _Optional[str] = ..., dispatch_timeout: _Optional[float] = ..., reservation: _Optional[int] = ..., origin: _Optional[str] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("number", "kind", "count", "payload", "transfer", "loan", "context")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NEXT: _ClassVar[Step.Kind]
        SEND: _ClassVar[Step.Kind]
        THROW: _ClassVar[Step.Kind]
        CLOSE: _ClassVar[Step.Kind]
    NEXT: Step.Kind
    SEND: Step.Kind
    THROW: Step.Kind
    CLOSE: Step.Kind
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    LOAN_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: Step.Kind
    count: int
    payload: bytes
    transfer: int
    loan: Loan
    context: bytes
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[_Union[Step.Kind, str]] = ..., count: _Optional[int] = ..., payload: _Optional[bytes] = ..., transfer: _Optional[int] = ..., loan: _Optional[_Union[Loan, _Mapping[str, _Any]]] = ..., context: _Optional[bytes] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("workers", "pool", "number")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Peer]
    pool: str
    number: int
    def __init__(self, workers: _Optional[_Iterable[_Union[Peer, _Mapping[str, _Any]]]] = ..., pool: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("uid", "address", "secure", "options")
    UID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    uid: str
    address: str
    secure: bool
    options: str
    def __init__(self, uid: _Optional[str] = ..., address: _Optional[str] = ..., secure: bool = ..., options: _Optional[str] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("pickle", "buffers", "lifted")
    PICKLE_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    LIFTED_FIELD_NUMBER: _ClassVar[int]
    pickle: int
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    lifted: int
    def __init__(self, pickle: _Optional[int] = ..., buffers: _Optional[_Iterable[_Union[Buffer, _Mapping[str, _Any]]]] = ..., lifted: _Optional[int] = ...) -> None: ...

class Buffer(_message.Message):
    __slots__ = ("length", "writable")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    WRITABLE_FIELD_NUMBER: _ClassVar[int]
    length: int
    writable: bool
    def __init__(self, length: _Optional[int] = ..., writable: bool = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("transfer", "data", "abandoned", "layout")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    data: bytes
    abandoned: bool
    layout: Layout
    def __init__(self, transfer: _Optional[int] = ..., data: _Optional[bytes] = ..., abandoned: bool = ..., layout: _Optional[_Union[Layout, _Mapping[str, _Any]]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("transfer", "bytes")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    bytes: int
    def __init__(self, transfer: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Loan(_message.Message):
    __slots__ = ("number", "descriptor", "layout")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    number: int
    descriptor: int
    layout: Layout
    def __init__(self, number: _Optional[int] = ..., descriptor: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping[str, _Any]]] = ...) -> None: ...

class Resent(_message.Message):
    __slots__ = ("loan", "transfer")
    LOAN_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    loan: int
    transfer: int
    def __init__(self, loan: _Optional[int] = ..., transfer: _Optional[int] = ...) -> None: ...

class ToClient(_message.Message):
    __slots__ = ("welcome", "refused", "started", "chunks", "results", "refusals", "pulse", "stopping", "yields", "credits", "returned", "unread", "resent", "takes_threads", "retiring", "granted", "reserved")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    YIELDS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    RESENT_FIELD_NUMBER: _ClassVar[int]
    TAKES_THREADS_FIELD_NUMBER: _ClassVar[int]
    RETIRING_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    started: _containers.RepeatedScalarFieldContainer[int]
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    results: _containers.RepeatedCompositeFieldContainer[Result]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    pulse: Pulse
    stopping: bool
    yields: _containers.RepeatedCompositeFieldContainer[Yield]
    credits: _containers.RepeatedCompositeFieldContainer[Credit]
    returned: _containers.RepeatedScalarFieldContainer[int]
    unread: _containers.RepeatedScalarFieldContainer[int]
    resent: _containers.RepeatedCompositeFieldContainer[Resent]
    takes_threads: bool
    retiring: _containers.RepeatedCompositeFieldContainer[Retiring]
    granted: _containers.RepeatedScalarFieldContainer[int]
    reserved: bool
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping[str, _Any]]] = ..., refused: _Optional[_Union[Refused, _Mapping[str, _Any]]] = ..., started: _Optional[_Iterable[int]] = ..., chunks: _Optional[_Iterable[_Union[Chunk, _Mapping[str, _Any]]]] = ..., results: _Optional[_Iterable[_Union[Result, _Mapping[str, _Any]]]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping[str, _Any]]]] = ..., pulse: _Optional[_Union[Pulse, _Mapping[str, _Any]]] = ..., stopping: bool = ..., yields: _Optional[_Iterable[_Union[Yield, _Mapping[str, _Any]]]] = ..., credits: _Optional[_Iterable[_Union[Credit, _Mapping[str, _Any]]]] = ..., returned: _Optional[_Iterable[int]] = ..., unread: _Optional[_Iterable[int]] = ..., resent: _Optional[_Iterable[_Union[Resent, _Mapping[str, _Any]]]] = ..., takes_threads: bool = ..., retiring: _Optional[_Iterable[_Union[Retiring, _Mapping[str, _Any]]]] = ..., granted: _Optional[_Iterable[int]] = ..., reserved: bool = ...) -> None: ...

class Retiring(_message.Message):
    __slots__ = ("uid", "reason", "at_once")
    UID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    uid: str
    reason: str
    at_once: bool
    def __init__(self, uid: _Optional[str] = ..., reason: _Optional[str] = ..., at_once: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "uid", "version", "probe", "shares", "max_age_ms", "max_message", "host", "pid", "memory")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    uid: str
    version: str
    probe: Probe
    shares: bool
    max_age_ms: int
    max_message: int
    host: str
    pid: int
    memory: int
    def __init__(self, protocol: _Optional[int] = ..., uid: _Optional[str] = ..., version: _Optional[str] = ..., probe: _Optional[_Union[Probe, _Mapping[str, _Any]]] = ..., shares: bool = ..., max_age_ms: _Optional[int] = ..., max_message: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., memory: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("number", "kind", "payload", "transfer", "swallowed", "context", "loan", "steps", "lessons")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RETURNED: _ClassVar[Result.Kind]
        RAISED: _ClassVar[Result.Kind]
        CANCELLED: _ClassVar[Result.Kind]
        STOPPED: _ClassVar[Result.Kind]
    RETURNED: Result.Kind
    RAISED: Result.Kind
    CANCELLED: Result.Kind
    STOPPED: Result.Kind
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    SWALLOWED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LOAN_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LESSONS_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: Result.Kind
    payload: bytes
    transfer: int
    swallowed: bool
    context: bytes
    loan: Loan
    steps: int
    lessons: _containers.RepeatedCompositeFieldContainer[Lesson]
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[_Union[Result.Kind, str]] = ..., payload: _Optional[bytes] = ..., transfer: _Optional[int] = ..., swallowed: bool = ..., context: _Optional[bytes] = ..., loan: _Optional[_Union[Loan, _Mapping[str, _Any]]] = ..., steps: _Optional[int] = ..., lessons: _Optional[_Iterable[_Union[Lesson, _Mapping[str, _Any]]]] = ...) -> None: ...

class Lesson(_message.Message):
    __slots__ = ("resource", "rest", "reason", "spent", "input", "output", "status", "headers")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    resource: str
    rest: float
    reason: str
    spent: float
    input: float
    output: float
    status: int
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    def __init__(self, resource: _Optional[str] = ..., rest: _Optional[float] = ..., reason: _Optional[str] = ..., spent: _Optional[float] = ..., input: _Optional[float] = ..., output: _Optional[float] = ..., status: _Optional[int] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping[str, _Any]]]] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Yield(_message.Message):
    __slots__ = ("number", "payload", "transfer", "loan", "swallowed", "context", "steps", "lessons")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    LOAN_FIELD_NUMBER: _ClassVar[int]
    SWALLOWED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LESSONS_FIELD_NUMBER: _ClassVar[int]
    number: int
    payload: bytes
    transfer: int
    loan: Loan
    swallowed: bool
    context: bytes
    steps: int
    lessons: _containers.RepeatedCompositeFieldContainer[Lesson]
    def __init__(self, number: _Optional[int] = ..., payload: _Optional[bytes] = ..., transfer: _Optional[int] = ..., loan: _Optional[_Union[Loan, _Mapping[str, _Any]]] = ..., swallowed: bool = ..., context: _Optional[bytes] = ..., steps: _Optional[int] = ..., lessons: _Optional[_Iterable[_Union[Lesson, _Mapping[str, _Any]]]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("number", "why", "reason")
    class Why(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNAVAILABLE: _ClassVar[Refusal.Why]
        RESOURCE_EXHAUSTED: _ClassVar[Refusal.Why]
        NOT_STARTED: _ClassVar[Refusal.Why]
        NO_THREAD: _ClassVar[Refusal.Why]
        RESERVED: _ClassVar[Refusal.Why]
    UNAVAILABLE: Refusal.Why
    RESOURCE_EXHAUSTED: Refusal.Why
    NOT_STARTED: Refusal.Why
    NO_THREAD: Refusal.Why
    RESERVED: Refusal.Why
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    why: Refusal.Why
    reason: str
    def __init__(self, number: _Optional[int] = ..., why: _Optional[_Union[Refusal.Why, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class Pulse(_message.Message):
    __slots__ = ("tick_age", "number", "tag", "timed", "memory")
    TICK_AGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    TIMED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    tick_age: int
    number: int
    tag: str
    timed: _containers.RepeatedCompositeFieldContainer[Timed]
    memory: int
    def __init__(self, tick_age: _Optional[int] = ..., number: _Optional[int] = ..., tag: _Optional[str] = ..., timed: _Optional[_Iterable[_Union[Timed, _Mapping[str, _Any]]]] = ..., memory: _Optional[int] = ...) -> None: ...

class Timed(_message.Message):
    __slots__ = ("number", "left")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    number: int
    left: int
    def __init__(self, number: _Optional[int] = ..., left: _Optional[int] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: float
    def __init__(self, timeout: _Optional[float] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("uid", "version", "oldest", "newest", "pid", "started_at", "now", "clients", "running", "finished", "stopping", "tags", "metrics_port")
    UID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    uid: str
    version: str
    oldest: int
    newest: int
    pid: int
    started_at: float
    now: float
    clients: int
    running: int
    finished: int
    stopping: bool
    tags: _containers.RepeatedScalarFieldContainer[str]
    metrics_port: int
    def __init__(self, uid: _Optional[str] = ..., version: _Optional[str] = ..., oldest: _Optional[int] = ..., newest: _Optional[int] = ..., pid: _Optional[int] = ..., started_at: _Optional[float] = ..., now: _Optional[float] = ..., clients: _Optional[int] = ..., running: _Optional[int] = ..., finished: _Optional[int] = ..., stopping: bool = ..., tags: _Optional[_Iterable[str]] = ..., metrics_port: _Optional[int] = ...) -> None: ...
