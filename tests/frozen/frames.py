"""Scripted conversations between the two ends of a session: the bytes of each message, and what each end makes of them.

A script moves a `Conversation` by hand. It can be played with its own messages, or with the recorded ones in their
place: then each end hears exactly what the other end said when it was recorded.
"""

from __future__ import annotations

import base64
import contextvars
import hashlib
import pickle
import zlib
from collections.abc import Callable
from typing import Any

from google.protobuf.json_format import MessageToDict

from headgate.testing import run
from tests.frozen import jobs
from tests.frozen.inside import (
    RECORDED_NAMES,
    Borrowed,
    BulkPayload,
    ClientSession,
    Exchange,
    FunctionForm,
    Outgoing,
    Peer,
    Probe,
    ToClient,
    ToWorker,
    WorkerSession,
    dump_whole,
    loads,
    outgoing,
    refused,
)
from tests.frozen.support import plain

Script = Callable[["Conversation"], None]

SCRIPTS: dict[str, Script] = {}

BY_REFERENCE = FunctionForm("jobs.add:1", "tests.frozen.jobs", "add", b"digest", "cpython-311", file="jobs.py")
BY_VALUE = FunctionForm("main.f:2", value=b"a pickled function", fresh=True)
KEPT = FunctionForm("main.g:3", value=b"another one", thread=True)
GENERATOR = FunctionForm("jobs.echo:4", "tests.frozen.jobs", "echo", generator=True)


def script(function: Script) -> Script:
    """Record this one, under its name."""
    SCRIPTS[function.__name__] = function
    return function


def packed(*args: Any, **kwargs: Any) -> bytes:
    """Arguments as they travel."""
    return pickle.dumps((args, kwargs), 5)


def squeezed(data: bytes) -> str:
    """Bytes as text; long ones are compressed."""
    if len(data) <= 2000:
        return data.hex()
    return "zlib:" + base64.b64encode(zlib.compress(data, 9)).decode()


def released(text: str) -> bytes:
    """What `squeezed` was given."""
    return zlib.decompress(base64.b64decode(text[5:])) if text.startswith("zlib:") else bytes.fromhex(text)


class Conversation:
    """Both ends, and a record of what went between them."""

    def __init__(self, recording: list[Any] | None = None) -> None:
        self.client = ClientSession(3, "client-1", "frozen", 10_000_000)
        self.worker = WorkerSession("worker-1", "frozen", self._define)
        self.record: list[dict[str, Any]] = []
        self._recording = recording
        self._defined: list[Any] = []

    def _define(self, definition: Any) -> str:
        self._defined.append(told(definition))
        return f"function {definition.function}"

    def _sent(self, to: str, message: Any) -> Any:
        """What arrives of a message: the same, or the recorded one."""
        data = message.SerializeToString()
        self.record.append({"to": to, "bytes": squeezed(data), "fields": told(message)})
        if self._recording is not None:
            data = released(self._recording[len(self.record) - 1]["bytes"])
        return type(message).FromString(data)

    def _heard(self, value: Any) -> None:
        self.record[-1]["heard"] = meant(value)

    def open(self, **greeting: Any) -> None:
        """Hello and welcome."""
        hello = self._sent("worker", self.client.hello(greeting.pop("offer", None)))
        self._heard(self.worker.greet(hello, **greeting))
        welcome = self._sent("client", self.worker.take())
        self._heard([self.client.welcomed(welcome), self.client.state, self.client.uid, self.client.bulk.shares])

    def to_worker(self, message: Any = None) -> None:
        """Send one message, or all that the client has."""
        for one in [message] if message is not None else iter(self.client.take, None):
            arrived = self._sent("worker", one)
            self._defined = []
            try:
                heard = self.worker.receive(arrived)
            except Exception as error:
                self._heard(error)
                continue
            peers = self.worker.peers and (self.worker.peers[0], [peer[:2] for peer in self.worker.peers[1]])
            self._heard([*heard, self._defined, peers])

    def to_client(self, message: Any = None) -> None:
        """Send one message, or all that the worker has."""
        for one in [message] if message is not None else iter(self.worker.take, None):
            arrived = self._sent("client", one)
            try:
                answers = self.client.receive(arrived)
            except Exception as error:
                self._heard(error)
                continue
            told_answers = [[answer.call.task, *list(answer)[1:]] for answer in answers]
            room = self.client.reservations
            started = sorted(call.task for call in self.client.sent.values() if call.started)
            pulse = told(self.client.pulse)
            self._heard([told_answers, self.client.state, pulse, list(room.granted), room.closed, started])

    def call(self, task: int, form: FunctionForm = BY_REFERENCE, arguments: Any = None, **options: Any) -> Outgoing:
        """Put a call into the client's outbox."""
        limit, reservation = options.pop("limit", 0.0), options.pop("reservation", 0)
        call = Outgoing(task, form, packed(task) if arguments is None else arguments, **options)
        call.limit, call.reservation = limit, reservation
        self.client.submit(call)
        return call


def told(message: Any) -> Any:
    """The fields of a message; long bytes by their digest."""
    if message is None:
        return None
    return _shorter(MessageToDict(message, preserving_proto_field_name=True))


def _shorter(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shorter(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shorter(item) for item in value]
    if isinstance(value, str) and len(value) > 1000:
        return f"{len(value)} characters, {hashlib.blake2b(value.encode(), digest_size=8).hexdigest()}"
    return value


def meant(value: Any) -> Any:
    """What an end heard."""
    if isinstance(value, BulkPayload):
        parts = [
            [len(part), not part.readonly, hashlib.blake2b(part, digest_size=8).hexdigest()]
            for part in value.segments()
        ]
        return {"parcel": parts, "lifted": value.lifted}
    if isinstance(value, Exception):
        return {"raised": RECORDED_NAMES.get(type(value).__name__, type(value).__name__), "message": str(value.args[0])}
    if isinstance(value, Borrowed) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return {name: meant(getattr(value, name)) for name in value._fields}
    if isinstance(value, (list, tuple)):
        return [meant(item) for item in value]
    return plain(value)


# -- scripts ----------------------------------------------------------------------------------------------------------


@script
def handshake(talk: Conversation) -> None:
    talk.open(
        offer=Probe(pid=11, descriptor=4, token=b"try this"),
        probe=Probe(pid=12, descriptor=5, token=b"and this"),
        shares=True,
    )
    talk.client.can_read()
    talk.client.introduce("pool-1", [Peer("worker-1", "unix:one"), Peer("worker-2", "unix:two")])
    talk.to_worker()
    talk.worker.stopping()
    talk.to_client()


@script
def handshake_refused(talk: Conversation) -> None:
    for hello in (
        ToWorker(),
        ToWorker.FromString(b"\x0a\x04\x08\x63\x10\x64"),  # speaks 99 to 100
        ToWorker.FromString(b"\x0a\x02\x10\x00"),
    ):
        talk.worker = WorkerSession("worker-1", "frozen", talk._define)
        heard = talk._sent("worker", hello)
        talk._heard(talk.worker.greet(heard))
        reply = talk._sent("client", talk.worker.take())
        talk.client = ClientSession(1, "client-1", "frozen")
        talk._heard(talk.client.welcomed(reply))
    welcome = ToClient()
    for protocol in (0, 99):
        welcome.welcome.protocol = protocol
        talk.client = ClientSession(1, "client-1", "frozen")
        talk._heard(talk.client.welcomed(talk._sent("client", welcome)))


@script
def calls_and_answers(talk: Conversation) -> None:
    talk.open(stopping=False)
    talk.call(1)
    talk.call(2, BY_VALUE, packed(2, by="name"), timeout=2.5, caller="client-1/9", tell_start=True)
    talk.call(3, KEPT, context=b"\x01context", tenant="acme", limit=4.0)
    talk.call(4)
    talk.to_worker()
    for task in range(5, 13):
        talk.call(task, (BY_REFERENCE, BY_VALUE, KEPT)[task % 3])
    talk.to_worker()
    worker = talk.worker
    worker.started(2)
    worker.beat(0.25, 2, "main.f:2", [(2, 1.5), (3, -0.5)])
    talk.to_client()
    worker.answer(1, "returned", pickle.dumps("result", 5))
    worker.answer(2, "raised", pickle.dumps(LookupError("no"), 5), swallowed=True, context=b"\x02back")
    worker.answer(3, "cancelled")
    worker.answer(4, "stopped")
    talk.to_client()
    for number, kind in enumerate(("unavailable", "exhausted", "not_started", "no_thread", "reserved"), 5):
        worker.answer(number, kind, f"because {kind}".encode())
    worker.takes_threads(False)
    worker.retiring("too old", at_once=False)
    worker.retiring("unreachable", at_once=True, uid="worker-2")
    talk.to_client()
    worker.takes_threads(True)
    worker.answer(10, "returned")
    worker.stopping()
    talk.to_client()


@script
def streams(talk: Conversation) -> None:
    talk.open()
    first = talk.call(1, GENERATOR, packed("first"), prefetch=3, timeout=9.0)
    second = talk.call(2, GENERATOR)
    talk.to_worker()
    talk.worker.yielded(1, pickle.dumps("one", 5), context=b"\x01set")
    talk.worker.yielded(2, pickle.dumps("two", 5))
    talk.to_client()
    talk.client.step(first, "next", count=4)
    talk.client.step(second, "send", pickle.dumps("sent", 5), context=b"\x01step")
    talk.to_worker()
    talk.worker.yielded(2, pickle.dumps("answer", 5), steps=1)
    talk.to_client()
    talk.client.step(second, "throw", pickle.dumps(KeyError("thrown"), 5))
    talk.client.cancel(first)
    talk.to_worker()
    talk.worker.yielded(1, pickle.dumps("all the same", 5), swallowed=True)
    talk.worker.yielded(2, pickle.dumps("caught", 5), steps=2)
    talk.to_client()
    talk.client.step(first, "close")
    talk.client.step(second, "close")
    talk.to_worker()
    talk.worker.answer(1, "returned", steps=1)
    talk.worker.answer(2, "raised", pickle.dumps(ValueError("at the end"), 5), steps=3, context=b"\x01last")
    talk.to_client()


@script
def cancellation(talk: Conversation) -> None:
    talk.open()
    unsent = talk.call(1)
    sent = talk.call(2)
    left = talk.call(3)
    talk.record.append({"to": "nobody", "heard": talk.client.cancel(unsent), "bytes": "", "fields": {}})
    talk.to_worker()
    talk.client.cancel(sent)
    talk.client.cancel(sent)
    talk.client.cancel(left)
    talk.client.abandon(left)
    talk.to_worker()
    talk.worker.answer(1, "cancelled")
    talk.worker.answer(2, "returned", pickle.dumps("too late", 5), swallowed=True)
    talk.to_client()
    ended = [call.task for call in talk.client.take_ended()]
    broken = talk.call(4)
    talk.to_worker()
    talk.call(5)
    answers = [[answer.call.task, answer.kind] for answer in talk.client.broken()]
    talk.record.append({"to": "nobody", "heard": [ended, broken.number, answers], "bytes": "", "fields": {}})


@script
def transfers(talk: Conversation) -> None:
    talk.open()
    large = BulkPayload(b"a pickle", [bytes(600_000), bytearray(300_000)], lifted=1)
    talk.call(1, arguments=large)
    talk.call(2)
    given_up = talk.call(3, arguments=BulkPayload(bytes(700_000)))
    for _ in range(3):
        talk.to_worker(talk.client.take())
    talk.client.cancel(given_up)
    talk.to_worker()
    talk.worker.answer(2, "returned", BulkPayload(bytes(300_000), [b""]))
    talk.worker.answer(1, "returned", pickle.dumps("small", 5))
    talk.to_client()
    stream = talk.call(4, GENERATOR)
    talk.to_worker()
    talk.worker.yielded(3, BulkPayload(bytes(270_000)))
    talk.worker.yielded(3, pickle.dumps("behind it", 5))
    talk.to_client()
    talk.client.step(stream, "send", BulkPayload(bytes(270_000)))
    talk.client.cancel(stream)
    talk.to_worker()
    talk.call(5, arguments=BulkPayload(bytes(5_000_000)))  # more than the window
    talk.to_worker()
    talk.to_client()
    talk.to_worker()


@script
def loans(talk: Conversation) -> None:
    talk.open(probe=Probe(pid=12, descriptor=5, token=b"t"), shares=True)
    talk.client.can_read()
    talk.call(1, arguments=BulkPayload(b"a pickle", [bytes(300_000), bytearray(300_000)], lifted=1))
    talk.call(2, arguments=BulkPayload(bytes(300_000)))
    talk.call(3, arguments=BulkPayload(bytes(300_000)))
    for descriptor in (21, 22):
        lending = talk.client.bulk.loans.begin()
        assert lending is not None
        talk.client.bulk.lend(lending, descriptor)
    lending = talk.client.bulk.loans.begin()
    assert lending is not None
    talk.client.bulk.not_lent(lending)
    talk.to_worker()
    begun = [one.arguments for one in talk.worker.open.values()]
    talk.worker.bulk.has_read(begun[0])
    talk.worker.bulk.cannot_read(begun[1])
    talk.to_client()
    for lent in talk.client.bulk.loans.take_recalled():
        talk.client.bulk.resend(lent, BulkPayload(bytes(300_000)))
    talk.to_worker()
    talk.worker.answer(1, "returned", BulkPayload(bytes(400_000)))
    lending = talk.worker.bulk.loans.begin()
    assert lending is not None
    talk.worker.bulk.lend(lending, 31)
    talk.to_client()
    talk.client.bulk.has_read(Borrowed(1, 31, [(400_000, False)]))
    talk.client.bulk.cannot_read(Borrowed(7, 31, [(400_000, False)]))
    talk.to_worker()


@script
def room(talk: Conversation) -> None:
    talk.open()
    first = talk.client.reservations.ask(2, "client-1/7", False)
    second = talk.client.reservations.ask(1, "", True)
    talk.to_worker()
    talk.worker.grant(first)
    talk.worker.reserved(True)
    talk.to_client()
    talk.call(1, reservation=first)
    talk.client.reservations.release(second)
    talk.to_worker()
    talk.worker.answer(1, "returned")
    talk.worker.reserved(False)
    talk.to_client()


@script
def what_may_not_be_said(talk: Conversation) -> None:
    talk.open()
    talk.call(1, BY_VALUE)
    talk.to_worker()
    talk.to_worker(ToWorker(forgotten=[1]))
    again, unknown, chunk = ToWorker(), ToWorker(), ToWorker()
    again.calls.add(number=1, function=1)
    unknown.calls.add(number=2, function=1, arguments=b"x")
    chunk.chunks.add(transfer=9, data=b"no layout")
    for message in (again, unknown, chunk):
        talk.to_worker(message)
    late = ToClient()
    late.results.add(number=77, payload=b"nobody asked")
    late.results.add(number=1, kind=9)  # a kind of a later release
    talk.to_client(late)


def play(name: str, recording: list[Any] | None = None) -> list[Any]:
    """The record of a script, with its own messages or with those of a recording."""
    talk = Conversation(recording)
    SCRIPTS[name](talk)
    return talk.record


# -- contexts ---------------------------------------------------------------------------------------------------------


def contexts() -> dict[str, Any]:
    """Frames of context variables, as calls, steps and results carry them."""
    return {name: squeezed(data) for name, data in run(_contexts).items()}


async def _contexts() -> dict[str, bytes]:
    frames: dict[str, bytes] = {}

    def caller() -> None:
        frames["nothing"] = outgoing(dump_whole)
        jobs.TENANT.set("acme")
        jobs.LIMIT.set(3)
        frames["plain"] = outgoing(dump_whole)
        jobs.TENANT.set(["a", {"list": 1}])  # type: ignore[arg-type]
        frames["loose"] = outgoing(dump_whole)
        jobs.TENANT.set(jobs.Point(1, "by itself"))  # type: ignore[arg-type]
        frames["full"] = outgoing(dump_whole)

    def worker() -> None:
        exchange = Exchange("worker")
        exchange.receive(frames["plain"], loads)
        token = jobs.TENANT.set("changed")
        frames["changed"] = exchange.send(dump_whole, lenient=True)
        dump_whole(token)
        jobs.TENANT.reset(token)
        frames["with a chain"] = exchange.send(dump_whole, lenient=True)
        frames["nothing new"] = exchange.send(dump_whole, lenient=True)

    contextvars.Context().run(caller)
    contextvars.Context().run(worker)
    frames["refused"] = refused("it cannot be written down")
    return frames


def context_meaning(frames: dict[str, str]) -> dict[str, Any]:
    """What a worker that hears these has set."""

    def heard(data: bytes) -> Any:
        failures = Exchange("worker").receive(data, loads)
        return {"tenant": jobs.TENANT.get("unset"), "limit": jobs.LIMIT.get(), "failures": failures}

    return {name: plain(contextvars.Context().run(heard, released(text))) for name, text in frames.items()}
