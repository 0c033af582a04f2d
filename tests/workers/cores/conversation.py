"""Conversations with workers, moved by hand, beside a naive model of them.

A `Pair` is one stream: both ends of a session, and what is in transit between them, as bytes. A `Work` is one call of a
routine, whatever becomes of it: it may be placed on several pairs, one after the other. `World` does what a shell does,
one step at a time, and compares each answer with what lists and plain counting say. Constants are read from the session
module at each use, so that a test may make them small.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from headgate.workers import session
from headgate.workers.model import FunctionForm
from headgate.workers.session import Answer, ClientSession, Outgoing, WorkerSession
from headgate.workers.wire.wire_pb2 import Definition, ToClient, ToWorker

Manner = Literal["fine", "stopping", "refusing"]
Peers = tuple[str, list[tuple[str, str]]]

REFUSALS = ("unavailable", "exhausted", "not_started")
ENDS = ("returned", "raised", "cancelled", "stopped")
NOTHING: Mapping[Any, int] = {}


def form_of(definition: Definition) -> FunctionForm:
    """What a worker makes of a definition here: the form that it came from."""
    return FunctionForm(*(getattr(definition, name) for name in FunctionForm._fields))


def peers_of(message: ToWorker) -> Peers:
    return message.peers.pool, [(peer.uid, peer.address) for peer in message.peers.workers]


def noise(seed: object, size: int) -> bytes:
    """Bytes in which no part is like another."""
    return random.Random(repr(seed)).randbytes(size)


class Work:
    """A call of a routine, from its first attempt to its one outcome."""

    def __init__(self, task: int, form: FunctionForm, arguments: bytes, retries: int, moves: int) -> None:
        self.task = task
        self.form = form
        self.arguments = arguments
        self.retries = retries  # how often it may run again after it was lost
        self.moves = moves  # how often it tries another worker after a refusal
        self.pair: Pair | None = None  # who has it now
        self.call: Outgoing | None = None
        self.outcomes: list[tuple[str, bytes, bool]] = []
        self.received = 0
        self.refused = 0
        self.may_arrive = 1
        self.may_run = 1

    def attempt(self) -> Outgoing:
        terms = random.Random(self.task)
        timeout, caller = terms.choice((0.0, 2.5)), terms.choice(("", "client/7"))
        return Outgoing(self.task, self.form, self.arguments, timeout, caller, terms.random() < 0.5)

    def __repr__(self) -> str:
        return f"<work {self.task}, {len(self.arguments)} bytes>"


class Long:
    """A payload on its way in chunks."""

    def __init__(self, key: Any, payload: bytes) -> None:
        self.key = key
        self.payload = payload
        self.done = 0
        self.transfer: int | None = None  # known from its first chunk


class Lanes:
    """What one end has to send: small frames, first come first served, and long payloads that take turns."""

    def __init__(self) -> None:
        self.queue: list[tuple[Any, int]] = []
        self.bulk: list[Long] = []
        self.transfers: dict[Any, int] = {}  # of those that are in the queue now, or were
        self._highest = 0

    def add(self, key: Any, payload: bytes) -> None:
        if len(payload) > session.INLINE:
            self.bulk.append(Long(key, payload))
        else:
            self.queue.append((key, len(payload) + session._FRAME))

    def remove(self, key: Any) -> list[int | None] | None:
        """Forget it. None: it is not here. Else the transfers that the other end has to forget."""
        for long in self.bulk:
            if long.key is key:
                self.bulk.remove(long)
                return [long.transfer]
        for entry in self.queue:
            if entry[0] is key:
                self.queue.remove(entry)
                return [self.transfers[key]] if key in self.transfers else []
        return None

    def keys(self) -> list[Any]:
        return [key for key, _ in self.queue] + [long.key for long in self.bulk]

    def leave(self, keys: Sequence[Any], chunks: Iterable[Any], defined: Mapping[Any, int] = NOTHING) -> None:
        """These frames and chunks left in one message: the ones that should have? Some brought a definition along."""
        size = 0
        for key in keys:
            assert size < session.MESSAGE, "a message ends when it is long enough"
            (first, cost), self.queue = self.queue[0], self.queue[1:]
            assert first is key or first == key, "first come, first served"
            size += cost + defined.get(key, 0)
        assert not self.queue or size >= session.MESSAGE, "small frames never wait for a transfer"
        data = [chunk for chunk in chunks if not chunk.abandoned]
        if not self.bulk:
            assert not data
            return
        (chunk,) = data  # one chunk a message: what comes next waits for no more than that
        long = self.bulk.pop(0)
        if long.transfer is None:
            assert chunk.transfer > self._highest, "numbers of transfers rise"
            long.transfer = self._highest = chunk.transfer
        assert chunk.transfer == long.transfer, "transfers take turns"
        assert chunk.data == long.payload[long.done : long.done + session.INLINE]
        long.done += len(chunk.data)
        if long.done < len(long.payload):
            self.bulk.append(long)
        else:
            self.transfers[long.key] = long.transfer
            self.queue.append((long.key, session._FRAME))


class Pair:
    """One stream, both ends of it, and what both should know."""

    def __init__(self, epoch: int, manner: Manner) -> None:
        self.manner = manner
        self.client = ClientSession(epoch, "client", "1.0")
        self.worker = WorkerSession(f"w{epoch}", "1.0", form_of)
        hello = self.client.hello()
        if manner == "refusing":
            hello.hello.oldest = hello.hello.newest = 99
        self.to_worker = deque([hello.SerializeToString()])
        self.to_client: deque[bytes] = deque()
        # the client's end
        self.client_over = False
        self.welcomed = False
        self.client_stopping = False
        self.out = Lanes()
        self.sent: dict[int, Work] = {}
        self.numbered: dict[int, Work] = {}  # all that were ever sent here
        self.cancels: list[int] = []
        self.notices: list[int | None] = []  # transfers that were given up, and the worker has not been told
        self.peers: Peers | None = None
        self.known: dict[int, FunctionForm] = {}  # the longest unused first
        self.defined: set[int] = set()
        # the worker's end
        self.worker_over = False
        self.greeted = False
        self.reply_due = False
        self.stopping = False
        self.open: dict[int, Work] = {}
        self.back = Lanes()
        self.answers: dict[int, tuple[str, bytes, bool]] = {}
        self.refusals: list[int] = []
        self.started: list[int] = []
        self.told_start: set[int] = set()
        self.pulse: tuple[int, int, str] | None = None
        self.last_peers: Peers | None = None

    @property
    def takes_calls(self) -> bool:
        return not self.client_over and not self.client_stopping

    @property
    def quiet(self) -> bool:
        """Is it over on both sides, with nothing in transit?"""
        return self.client_over and self.worker_over and not self.to_worker and not self.to_client

    @property
    def unsent(self) -> list[Work]:
        return self.out.keys()


class World:
    """All streams there are, and all calls there ever were."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.works: list[Work] = []
        self.homeless: list[Work] = []  # on no stream: unsent when theirs broke, or to be tried again
        self._epoch = 0

    # -- the client ---------------------------------------------------------------------------------------------------

    def connect(self, manner: Manner = "fine") -> Pair:
        self._epoch += 1
        pair = Pair(self._epoch, manner)
        self.pairs.append(pair)
        return pair

    def make(self, form: FunctionForm, size: int, retries: int = 0, moves: int = 0) -> Work:
        work = Work(len(self.works) + 1, form, noise(len(self.works), size), retries, moves)
        self.works.append(work)
        self.homeless.append(work)
        return work

    def place(self, work: Work, pair: Pair) -> None:
        self.homeless.remove(work)
        work.pair, work.call = pair, work.attempt()
        pair.client.submit(work.call)
        pair.out.add(work, work.arguments)

    def cancel(self, work: Work) -> None:
        if work.pair is None:
            self.homeless.remove(work)
            work.outcomes.append(("gone", b"", False))
            return
        pair, call = work.pair, work.call
        assert call is not None
        notices = pair.out.remove(work)
        assert pair.client.cancel(call) is (notices is not None)
        if notices is None:
            pair.cancels.append(call.number)
        else:
            pair.notices += notices
            self._end(work, "gone")

    def abandon(self, work: Work) -> None:
        """As a shell gives up: cancel it, and wait no more."""
        pair, call = work.pair, work.call
        self.cancel(work)
        if pair is not None and call is not None:
            pair.client.abandon(call)
            if pair.sent.pop(call.number, None) is not None:
                self._end(work, "abandoned")

    def introduce(self, pair: Pair, peers: Peers) -> None:
        pair.client.introduce(*peers)
        pair.peers = peers

    def client_takes(self, pair: Pair) -> bool:
        """Hand the client's next message to the transport. Was there one?"""
        message = pair.client.take()
        may_speak = pair.welcomed and not pair.client_over
        if message is None:
            assert not may_speak or not self._has_news(pair)
            return False
        assert may_speak, "nothing is sent before the welcome, nor after the end"
        assert self._has_news(pair)
        pair.to_worker.append(message.SerializeToString())
        assert pair.to_worker[-1], "an empty message says nothing"
        peers, pair.peers = pair.peers, None
        assert message.HasField("peers") is (peers is not None)
        assert peers_of(message) == (peers or ("", []))
        assert list(message.cancels) == pair.cancels
        pair.cancels = []
        abandoned = {chunk.transfer for chunk in message.chunks if chunk.abandoned}
        assert abandoned >= {transfer for transfer in pair.notices if transfer is not None}
        assert not abandoned & {*pair.out.transfers.values(), *(long.transfer for long in pair.out.bulk)} - {
            *pair.notices
        }
        pair.notices = []
        self._calls_leave(pair, message)
        return True

    def _calls_leave(self, pair: Pair, message: ToWorker) -> None:
        for definition in message.definitions:
            form, number = form_of(definition), definition.function
            assert number not in pair.defined, "no number means two functions"
            assert form not in pair.known.values(), "it travels once"
            pair.known[number] = form
            pair.defined.add(number)
        fresh = {definition.function for definition in message.definitions}
        assert fresh <= {frame.function for frame in message.calls}, "defined when it is needed"
        works: list[Work] = []
        defined: dict[Work, int] = {}
        for frame in message.calls:
            work = next(work for work in pair.unsent if work.task == frame.task)
            assert work.call is not None
            assert frame.number > max(pair.numbered, default=0), "numbers rise"
            assert frame.number == work.call.number
            assert pair.known[frame.function] == work.form
            if work.form.value:
                pair.known[frame.function] = pair.known.pop(frame.function)  # used last
            assert frame.transfer == pair.out.transfers.get(work, 0)
            assert frame.arguments == (b"" if frame.transfer else work.arguments)
            pair.sent[frame.number] = pair.numbered[frame.number] = work
            works.append(work)
            if frame.function in fresh:
                fresh.remove(frame.function)
                defined[work] = len(work.form.value)
        pair.out.leave(works, message.chunks, defined)
        by_value = [number for number, form in pair.known.items() if form.value]
        forgotten = []
        while len(by_value) > 1 and sum(len(pair.known[number].value) for number in by_value) > session.KEPT:
            forgotten.append(by_value.pop(0))
        assert list(message.forgotten) == forgotten
        for number in forgotten:
            del pair.known[number]

    def _has_news(self, pair: Pair) -> bool:
        return bool(pair.unsent or pair.cancels or pair.notices or pair.peers is not None)

    def client_hears(self, pair: Pair) -> None:
        """The next message from the worker arrives."""
        message = ToClient.FromString(pair.to_client.popleft())
        client = pair.client
        if pair.client_over:
            assert client.receive(message) == [], "an answer after the break finds nobody"
            return
        if not pair.welcomed:
            pair.welcomed = True
            reason = client.welcomed(message)
            if pair.manner == "refusing":
                assert reason
                assert client.state == "over"
                self.client_breaks(pair)
                return
            assert reason is None
            assert client.uid == message.welcome.uid
            pair.client_stopping = message.stopping
            return
        expected = []
        for frame in (*message.results, *message.refusals):
            if frame.number in pair.sent:
                expected.append((pair.sent.pop(frame.number), *pair.answers[frame.number]))
        answers = client.receive(message)
        assert [(answer.call, *answer[1:]) for answer in answers] == [(work.call, *rest) for work, *rest in expected]
        pair.client_stopping |= message.stopping
        for number in message.started:
            if number in pair.sent:
                pair.told_start.add(number)
        if message.HasField("pulse"):
            assert client.pulse == message.pulse
        for answer, (work, *_) in zip(answers, expected, strict=True):
            self._settle(work, answer)

    def client_breaks(self, pair: Pair) -> None:
        """The client notices that the stream is gone."""
        unsent = [(work.call, "unsent") for work in pair.unsent]
        lost = [(work.call, "lost") for work in pair.sent.values()]
        work_of = {work.call: work for work in [*pair.unsent, *pair.sent.values()]}
        pair.client_over, pair.out, pair.sent = True, Lanes(), {}
        pair.cancels, pair.notices, pair.peers = [], [], None
        answers = pair.client.broken()
        assert sorted((id(answer.call), answer.kind) for answer in answers) == sorted(
            (id(call), kind) for call, kind in [*unsent, *lost]
        )
        for answer in answers:
            if answer.kind == "unsent":
                assert answer.call.number == 0
                assert answer.call.arguments == work_of[answer.call].arguments, "it can be sent elsewhere as it is"
            self._settle(work_of[answer.call], answer)
        assert pair.client.broken() == [], "nothing ends twice"

    def _settle(self, work: Work, answer: Answer) -> None:
        """One attempt has ended so."""
        assert work.call is answer.call, "the answer belongs to this very attempt"
        if answer.kind == "unsent":
            self._again(work)
        elif answer.kind in REFUSALS and work.moves:
            work.moves -= 1
            work.may_arrive += 1
            self._again(work)
        elif answer.kind == "lost" and work.retries:
            work.retries -= 1
            work.may_arrive += 1
            work.may_run += 1
            self._again(work)
        else:
            self._end(work, answer.kind, answer.payload, answer.swallowed)

    def _again(self, work: Work) -> None:
        work.pair = work.call = None
        self.homeless.append(work)

    def _end(self, work: Work, kind: str, payload: bytes = b"", swallowed: bool = False) -> None:
        work.pair = work.call = None
        work.outcomes.append((kind, payload, swallowed))

    # -- the worker ---------------------------------------------------------------------------------------------------

    def worker_hears(self, pair: Pair) -> None:
        """The next message from the client arrives."""
        message = ToWorker.FromString(pair.to_worker.popleft())
        worker = pair.worker
        if pair.worker_over:
            assert worker.receive(message) == ([], [])
            return
        if not pair.greeted:
            pair.greeted = pair.reply_due = True
            assert worker.greet(message, stopping=pair.manner == "stopping") is (pair.manner != "refusing")
            pair.stopping = pair.manner == "stopping"
            pair.worker_over = pair.manner == "refusing"
            return
        begun, cancels = worker.receive(message)
        assert [call.number for call in begun] == [frame.number for frame in message.calls]
        for call, frame in zip(begun, message.calls, strict=True):
            work = pair.numbered[frame.number]
            assert call.task == work.task
            assert call.function == work.form, "the worker knows the function it is to call"
            assert call.arguments == work.arguments, "byte for byte"
            like = work.attempt()
            assert call[-3:] == (like.timeout, like.caller, like.tell_start)
            pair.open[frame.number] = work
            work.received += 1
        assert cancels == [number for number in message.cancels if number in pair.open]
        if message.HasField("peers"):
            pair.last_peers = peers_of(message)

    def worker_answers(self, pair: Pair, number: int, kind: str, size: int, swallowed: bool) -> None:
        """A call ended, or is said to have ended once more."""
        payload = noise((number, kind), size)
        if kind in REFUSALS:
            payload, swallowed = payload.hex()[:size].encode(), False
        work = pair.open.pop(number, None)
        said = pair.worker.answer(number, kind, payload, swallowed=swallowed)  # type: ignore[arg-type]
        assert said is (work is not None)
        if work is None:
            return
        pair.answers[number] = (kind, payload, swallowed)
        if kind in REFUSALS:
            work.refused += 1
            pair.refusals.append(number)
        else:
            pair.back.add(number, payload)

    def worker_starts(self, pair: Pair, number: int) -> None:
        pair.worker.started(number)
        if number in pair.open:
            pair.started.append(number)

    def worker_beats(self, pair: Pair, age: float, number: int) -> None:
        pair.worker.beat(age, number, "tag")
        if pair.greeted and not pair.worker_over:
            pair.pulse = (int(age * 1000), number, "tag")

    def worker_stops(self, pair: Pair) -> None:
        pair.worker.stopping()
        if pair.greeted and not pair.worker_over:
            pair.stopping = True

    def worker_takes(self, pair: Pair) -> bool:
        """Hand the worker's next message to the transport. Was there one?"""
        back = pair.back
        small = pair.reply_due or pair.started or pair.refusals or pair.pulse or pair.stopping
        has_news = bool(small or back.keys())
        assert pair.worker.has_more is has_news
        message = pair.worker.take()
        assert (message is not None) is has_news
        if message is None:
            return False
        pair.to_client.append(message.SerializeToString())
        assert message.HasField("welcome") is (pair.reply_due and pair.manner != "refusing")
        assert message.HasField("refused") is (pair.reply_due and pair.manner == "refusing")
        assert list(message.started) == pair.started
        assert [frame.number for frame in message.refusals] == pair.refusals
        assert message.HasField("pulse") is (pair.pulse is not None)
        if pair.pulse is not None:
            assert (message.pulse.tick_age, message.pulse.number, message.pulse.tag) == pair.pulse
        assert message.stopping is pair.stopping
        pair.started, pair.refusals, pair.pulse, pair.reply_due, pair.stopping = [], [], None, False, False
        for frame in message.results:
            assert frame.transfer == back.transfers.get(frame.number, 0)
            assert frame.payload == (b"" if frame.transfer else pair.answers[frame.number][1])
        assert not any(chunk.abandoned for chunk in message.chunks)
        back.leave([frame.number for frame in message.results], message.chunks)
        return True

    def worker_breaks(self, pair: Pair) -> None:
        """The worker notices that the stream is gone."""
        assert pair.worker.broken() == list(pair.open), "what it has runs for nobody"
        assert pair.worker.broken() == []
        pair.worker_over, pair.open, pair.back = True, {}, Lanes()
        pair.started, pair.refusals, pair.pulse, pair.reply_due, pair.stopping = [], [], None, False, False

    # -- everything ---------------------------------------------------------------------------------------------------

    def lose(self, pair: Pair, to_worker: int, to_client: int) -> None:
        """Of what is in transit on a broken stream only the first so many arrive, late."""
        for transit, kept in ((pair.to_worker, to_worker), (pair.to_client, to_client)):
            while len(transit) > kept:
                transit.pop()

    def tidy(self) -> None:
        self.pairs = [pair for pair in self.pairs if not pair.quiet]

    def check(self) -> None:
        for pair in self.pairs:
            self._check_client(pair)
            self._check_worker(pair)
        placed = {work for pair in self.pairs for work in [*pair.unsent, *pair.sent.values()]}
        assert len(placed) == sum(len(pair.unsent) + len(pair.sent) for pair in self.pairs), "one stream at a time"
        for work in self.works:
            where = [work in placed, work in self.homeless, bool(work.outcomes)]
            assert where.count(True) == 1, f"{work} is in exactly one place"
            assert len(work.outcomes) <= 1
            assert work.received <= work.may_arrive, f"{work} was sent twice"
            assert work.received - work.refused <= work.may_run, f"{work} may have run twice"
            if work.outcomes and work.outcomes[0][0] in ENDS:
                assert work.received - work.refused > 0, "nobody answers for a worker"
            if work.outcomes and work.outcomes[0][0] == "gone":
                assert work.received < work.may_arrive, "this attempt never left"

    def _check_client(self, pair: Pair) -> None:
        client = pair.client
        waiting = sum(len(work.arguments) + session._FRAME for work in pair.unsent)
        assert client.outbox == waiting
        assert client.full is (waiting >= session.OUTBOX)
        assert client.waiting == len(pair.unsent) + len(pair.sent)
        assert client.sent == {number: work.call for number, work in pair.sent.items()}
        urgent = pair.out.bulk or pair.cancels or pair.notices or pair.peers is not None
        crowded = len(pair.out.queue) >= session.CROWD or waiting >= session.INLINE
        if not pair.client_over:
            assert client.can_wait is not bool(urgent or crowded)
        for work in pair.unsent:
            assert work.call is not None
            assert work.call.number == 0
            assert work.call.arguments == work.arguments
        for number, work in pair.sent.items():
            assert work.call is not None
            assert work.call.started is (number in pair.told_start)
        by_value = [len(form.value) for form in pair.known.values() if form.value]
        assert sum(by_value) <= session.KEPT or len(by_value) == 1
        if pair.client_over:
            assert client.state == "over"
        elif pair.client_stopping:
            assert client.state == "stopping"
        else:
            assert client.state == ("open" if pair.welcomed else "opening")

    def _check_worker(self, pair: Pair) -> None:
        worker = pair.worker
        assert list(worker.open) == list(pair.open)
        assert worker.peers == pair.last_peers
        assert worker.state == ("over" if pair.worker_over else "open" if pair.greeted else "opening")
        held = [len(form.value) for form in worker._functions.values() if form.value]
        assert sum(held) <= session.KEPT or len(held) == 1, "it keeps no more than was agreed"

    def finish(self, choose: Callable[[], str]) -> None:
        """Let everything end by itself. What is left then was stuck."""
        for pair in list(self.pairs):
            if pair.client_over is not pair.worker_over and pair.manner != "refusing":
                (self.worker_breaks if pair.client_over else self.client_breaks)(pair)
            elif pair.worker_over and not (pair.client_over or pair.reply_due or pair.to_client):
                self.client_breaks(pair)  # the refusal was lost on the way
        longest = sum(len(work.arguments) for work in self.works) + 200 * len(self.works)
        for _ in range(200 + 10 * longest):
            while self.homeless:
                pair = next((pair for pair in self.pairs if pair.takes_calls), None) or self.connect()
                self.place(self.homeless[0], pair)
            moved = False
            for pair in list(self.pairs):
                moved |= self.client_takes(pair)
                while pair.to_worker:
                    self.worker_hears(pair)
                    moved = True
                for number in list(pair.open):
                    self.worker_answers(pair, number, choose(), 3 * session.INLINE, False)
                moved |= self.worker_takes(pair)
                while pair.to_client:
                    self.client_hears(pair)
                    moved = True
            if not moved and not self.homeless:
                break
        self.check()
        for work in self.works:
            assert len(work.outcomes) == 1, f"{work} never ended"
        for pair in self.pairs:
            assert not pair.client.waiting
            assert not pair.client._transfers._arriving, "nothing is kept of what was given up"
            assert not pair.worker._transfers._arriving, "nothing is kept of what was given up"
