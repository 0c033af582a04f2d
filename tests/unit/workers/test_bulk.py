"""W05: payloads too long for a frame, alone: parcels, transfers with their windows, and loans."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import RpcError
from headgate.workers.protocol import bulk
from headgate.workers.protocol.bulk import (
    BulkPayload,
    Lending,
    Loans,
    ProtocolViolation,
    Transfers,
    segments_of,
)
from headgate.workers.protocol.wire.wire_pb2 import Chunk, Credit, Layout, ToWorker
from tests.conftest import SCALE
from tests.unit.workers.conversation import Shape, laid_out, limit, noise, packed, pieces, plain

INLINE, WINDOW, GRANT, LOANS = 10, 40, 20, 2
fuzz = settings(max_examples=int(530 * SCALE))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test can reach with a handful of bytes."""
    limit({"INLINE": INLINE, "WINDOW": WINDOW, "GRANT": GRANT, "LOANS": LOANS}, monkeypatch.setattr)


def parcel(shape: Shape, seed: object = 0) -> BulkPayload:
    made = packed(seed, shape)
    return made if isinstance(made, BulkPayload) else BulkPayload(made)


def carried(message: ToWorker) -> ToWorker:
    """As it arrives."""
    return ToWorker.FromString(message.SerializeToString())


def move(sender: Transfers[Any], receiver: Transfers[Any]) -> Any:
    """One chunk goes over, and what there is to be told comes back. The frame that may follow, if one may."""
    message = ToWorker()
    frame = sender.next(message)
    receiver.receive(carried(message))
    answer = ToWorker()
    receiver.grant(answer)
    sender.receive(carried(answer))
    return frame


# -- parcels ----------------------------------------------------------------------------------------------------------


def test_w05_a_parcel_is_a_pickle_and_its_buffers() -> None:
    one = BulkPayload(b"abc", [memoryview(b"de"), bytearray(b"f"), b"", memoryview(bytearray(b"gh"))], 2)
    assert (len(one), one.size, one.lifted) == (8, 8, 2)
    assert plain(one) == (2, ((b"abc", False), (b"de", False), (b"f", True), (b"", False), (b"gh", True)))
    layout = Layout()
    one.describe(layout)
    assert layout == laid_out(one)
    assert layout.lifted == 2
    assert segments_of(layout) == [(3, False), (2, False), (1, True), (0, False), (2, True)]


def test_w05_a_parcel_may_have_no_buffers() -> None:
    one = BulkPayload(b"abc")
    assert (len(one), one.lifted, plain(one)) == (3, 0, (0, ((b"abc", False),)))
    layout = Layout()
    one.describe(layout)
    assert segments_of(layout) == [(3, False)]
    assert segments_of(Layout()) == [(0, False)]


# -- transfers --------------------------------------------------------------------------------------------------------

SHAPES: list[Shape] = [
    *(1, INLINE - 1, INLINE, INLINE + 1, GRANT, GRANT + 1, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW + 3),
    (0, (1, False)),
    (1, (0, True)),
    (0, (0, False), (0, True), (3, False)),
    (INLINE + 1, (INLINE, True), (0, False), (INLINE + 1, False), (0, True), (0, True)),
    (2, (WINDOW, True), (WINDOW + 1, False)),
    (1, *((1, nth % 3 == 0) for nth in range(50))),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_w05_a_parcel_arrives_as_it_was(shape: Shape) -> None:
    sender, receiver = Transfers[str](), Transfers[str]()
    sent = parcel(shape)
    number = sender.begin(sent, "frame")
    assert len(sender) == 1
    while len(sender):
        assert sender, "it can go on"
        frame = move(sender, receiver)
    assert frame == "frame", "the last one"
    got = receiver.received(number)
    assert plain(got) == plain(sent)
    assert type(got.pickle) is bytes
    writable = [part.readonly for part in sent.segments()[1:]]
    assert [type(buffer) for buffer in got.buffers] == [bytes if readonly else bytearray for readonly in writable]
    assert len(got) == len(sent)
    assert not receiver.grants
    with pytest.raises(ProtocolViolation):
        receiver.received(number)  # once


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_w05_chunks_are_short_and_of_one_part_each(shape: Shape) -> None:
    sender, receiver = Transfers[str](), Transfers[str]()
    sent = parcel(shape)
    sender.begin(sent, "frame")
    chunks: list[Chunk] = []
    while len(sender):
        message = ToWorker()
        sender.next(message)
        chunks += message.chunks
        receiver.receive(message)
        answer = ToWorker()
        receiver.grant(answer)
        sender.receive(answer)
    assert [chunk.data for chunk in chunks] == pieces(sent)
    assert [chunk.HasField("layout") for chunk in chunks] == [nth == 0 for nth in range(len(chunks))]
    assert chunks[0].layout == laid_out(sent)


def test_w05_it_is_at_most_a_window_ahead() -> None:
    sender = Transfers[str]()
    sender.begin(parcel(3 * WINDOW), "frame")
    sent = ToWorker()
    while len(sender):
        assert sender.next(sent) is None
    assert sum(len(chunk.data) for chunk in sent.chunks) == WINDOW
    assert not sender, "it cannot go on"
    with pytest.raises(IndexError):
        sender.next(ToWorker())
    sender.receive(ToWorker(credits=[Credit(transfer=1, bytes=0), Credit(transfer=2, bytes=99)]))
    assert not sender, "nor by room of nobody"
    sender.receive(ToWorker(credits=[Credit(transfer=1, bytes=1)]))
    assert len(sender) == 1
    assert sender.next(sent) is None
    assert len(sent.chunks[-1].data) == INLINE, "a chunk is whole: so it is one chunk ahead at most"
    assert not sender
    sender.receive(ToWorker(credits=[Credit(transfer=1, bytes=INLINE - 1)]))
    assert not sender, "that is not more than was sent"
    sender.receive(ToWorker(credits=[Credit(transfer=1, bytes=1)]))
    assert sender


def test_w05_room_that_comes_before_it_is_needed_counts() -> None:
    sender = Transfers[str]()
    sender.begin(parcel(3 * WINDOW), "frame")
    sent = ToWorker()
    sender.next(sent)
    sender.receive(ToWorker(credits=[Credit(transfer=1, bytes=INLINE)]))
    while len(sender):
        sender.next(sent)
    assert sum(len(chunk.data) for chunk in sent.chunks) == WINDOW + INLINE


def test_w05_the_receiver_tells_of_room_now_and_then() -> None:
    receiver = Transfers[str]()
    layout: Layout | None = Layout(pickle=3 * GRANT)
    told = []
    for _ in range(3 * GRANT):
        receiver.receive(ToWorker(chunks=[Chunk(transfer=7, data=b"x", layout=layout)]))
        layout = None
        message = ToWorker()
        receiver.grant(message)
        told.append([(credit.transfer, credit.bytes) for credit in message.credits])
    assert [nth for nth, some in enumerate(told, 1) if some] == [GRANT, 2 * GRANT], "not after the last"
    assert told[GRANT - 1] == [(7, GRANT)]


def test_w05_room_that_was_not_told_adds_up() -> None:
    receiver = Transfers[str]()
    layout: Layout | None = Layout(pickle=3 * GRANT)
    for nth in range(5 * GRANT // 2):
        chunks = [Chunk(transfer=transfer, data=b"x", layout=layout) for transfer in (1, 2)[: 1 + (nth % 2 == 0)]]
        receiver.receive(ToWorker(chunks=chunks))
        layout = None
    assert receiver.grants == {1: 2 * GRANT, 2: GRANT}
    message = ToWorker()
    receiver.grant(message)
    assert [(credit.transfer, credit.bytes) for credit in message.credits] == [(1, 2 * GRANT), (2, GRANT)]
    assert receiver.grants == {}, "told once"


def test_w05_no_room_is_told_of_what_is_here_or_was_given_up() -> None:
    receiver = Transfers[str]()
    data, layout = b"x" * GRANT, Layout(pickle=GRANT + 1)
    receiver.receive(ToWorker(chunks=[Chunk(transfer=nth, data=data, layout=layout) for nth in (1, 2)]))
    assert receiver.grants == {1: GRANT, 2: GRANT}
    receiver.receive(ToWorker(chunks=[Chunk(transfer=1, abandoned=True), Chunk(transfer=2, data=b"y")]))
    assert receiver.grants == {2: GRANT}
    assert plain(receiver.received(2)) == (0, ((data + b"y", False),))
    assert receiver.grants == {}


def test_w05_transfers_take_turns() -> None:
    sender = Transfers[str]()
    sizes = {"a": 3, "b": 1, "c": 2}
    for name, count in sizes.items():
        sender.begin(parcel(count * INLINE), name)
    message = ToWorker()
    done = []
    while len(sender):
        if (frame := sender.next(message)) is not None:
            done.append(frame)
    assert [chunk.transfer for chunk in message.chunks] == [1, 2, 3, 1, 3, 1]
    assert done == ["b", "c", "a"]


@pytest.mark.parametrize("sent", range(7))
def test_w05_one_that_is_stopped_sends_no_more(sent: int) -> None:
    sender, receiver = Transfers[Any](), Transfers[Any]()
    frames = [[nth] for nth in range(3)]  # alike, and yet three
    frames[2] = [1]
    for frame in frames:
        sender.begin(parcel(3 * WINDOW), frame)
    message = ToWorker()
    for _ in range(2 * sent):
        if len(sender):
            sender.next(message)
    before = len(message.chunks)
    assert sender.stop(frames[1]) == 2
    assert sender.stop(frames[1]) is None, "once"
    assert sender.stop([1]) is None, "not one that is only equal"
    sender.receive(ToWorker(credits=[Credit(transfer=2, bytes=99)]))
    receiver.receive(message)
    finished: list[Any] = []
    while True:
        answer = ToWorker()
        receiver.grant(answer)
        sender.receive(answer)
        if not len(sender):
            break
        more = ToWorker()
        if (done := sender.next(more)) is not None:
            finished.append(done)
        assert [chunk.transfer for chunk in more.chunks] != [2]
        receiver.receive(more)
    assert before <= 3 * WINDOW // INLINE
    assert [done is frame for done, frame in zip(finished, (frames[0], frames[2]), strict=True)] == [True, True]


BEGUN = Chunk(transfer=1, data=b"abc", layout=Layout(pickle=5, buffers=[{"length": 2}]))  # type: ignore[list-item]


@pytest.mark.parametrize(
    "chunks",
    [
        [Chunk(transfer=2, data=b"x")],  # without a layout
        [Chunk(transfer=0, data=b"x")],
        [Chunk(transfer=1, data=b"def")],  # beyond its part, though not beyond the whole
        [Chunk(transfer=1, data=b"de"), Chunk(transfer=1, data=b"fgh")],
        [Chunk(transfer=1, data=b"de"), Chunk(transfer=1, data=b"fg"), Chunk(transfer=1, data=b"h")],
        [Chunk(transfer=1, data=b"de"), Chunk(transfer=1, data=b"fg"), Chunk(transfer=1)],
        [Chunk(transfer=1, abandoned=True), Chunk(transfer=1, data=b"de")],
        [Chunk(transfer=2, data=b"x", layout=Layout())],
        [Chunk(transfer=2, layout=Layout())],
        [Chunk(transfer=2, data=b"xy", layout=Layout(pickle=1))],
    ],
    ids=str,
)
def test_w40a_chunks_that_were_not_announced_break_the_conversation(chunks: list[Chunk]) -> None:
    receiver = Transfers[str]()
    receiver.receive(ToWorker(chunks=[BEGUN]))
    with pytest.raises(ProtocolViolation) as caught:
        receiver.receive(carried(ToWorker(chunks=chunks)))
    assert isinstance(caught.value, RpcError)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [Chunk(transfer=1, data=b"de")],  # one part of two
        [Chunk(transfer=1, data=b"de"), Chunk(transfer=1, data=b"f")],
        [Chunk(transfer=1, data=b"de"), Chunk(transfer=1, data=b"fg"), Chunk(transfer=1, abandoned=True)],
    ],
    ids=len,
)
def test_w40a_a_frame_that_names_what_has_not_come_breaks_the_conversation(chunks: list[Chunk]) -> None:
    receiver = Transfers[str]()
    receiver.receive(ToWorker(chunks=[BEGUN, *chunks]))
    for transfer in (1, 2, 0):
        with pytest.raises(ProtocolViolation, match=f"transfer {transfer}, of which not all has come"):
            receiver.received(transfer)


def test_w40a_empty_chunks_and_second_layouts_change_nothing() -> None:
    receiver = Transfers[str]()
    again = Chunk(transfer=1, data=b"de", layout=Layout(pickle=99))
    receiver.receive(ToWorker(chunks=[BEGUN, Chunk(transfer=1), again, Chunk(transfer=1, data=b"fg")]))
    receiver.receive(ToWorker(chunks=[Chunk(transfer=9, abandoned=True)]))
    assert plain(receiver.received(1)) == (0, ((b"abcde", False), (b"fg", False)))


def test_w05_the_limits_fit_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a grant above the window a transfer would wait for ever. The window is part of the protocol."""
    monkeypatch.undo()
    assert bulk.INLINE <= bulk.GRANT <= bulk.WINDOW == 4 << 20
    sender, receiver = Transfers[str](), Transfers[str]()
    sent = BulkPayload(noise(0, bulk.INLINE + 1), [memoryview(noise(1, 2 * bulk.WINDOW + 1))])
    sender.begin(sent, "frame")
    ahead = 0
    while len(sender):
        sender.next(message := ToWorker())
        ahead += len(message.chunks[0].data)
        assert ahead <= bulk.WINDOW + bulk.INLINE
        receiver.receive(message)
        answer = ToWorker()
        receiver.grant(answer)
        ahead -= sum(credit.bytes for credit in answer.credits)
        sender.receive(answer)
    assert plain(receiver.received(1)) == plain(sent)


sizes = st.integers(0, 3 * INLINE)
shapes = st.tuples(st.integers(1, 2 * INLINE), st.lists(st.tuples(sizes, st.booleans()), max_size=4)).map(
    lambda parts: (parts[0], *parts[1])
)
limits = st.sampled_from([(10, 40, 20), (10, 10, 10), (7, 20, 20), (3, 50, 1), (1, 5, 3)])


@fuzz
@given(st.lists(shapes, min_size=1, max_size=5), limits, st.integers(0, 2**32))
def test_w05_any_parcels_arrive_in_any_order_of_messages(
    shapes: Sequence[Shape], limits: tuple[int, int, int], seed: int
) -> None:
    """Both ways, with messages in transit, some of them given up on the way."""
    chance = random.Random(seed)
    limit(dict(zip(("INLINE", "WINDOW", "GRANT"), limits, strict=True)))  # the fixture puts them back
    sender, receiver = Transfers[int](), Transfers[int]()
    there: deque[bytes] = deque()
    back: deque[bytes] = deque()
    waiting = list(enumerate(shapes))
    numbers: dict[int, int] = {}
    sent = dict.fromkeys(range(len(shapes)), 0)
    taken = dict(sent)
    frames: list[int] = []
    gone: set[int] = set()
    while waiting or len(sender) or there or back or receiver.grants:
        what = chance.choice(["begin", "next", "next", "there", "there", "back", "grant", "stop"])
        if what == "begin" and waiting:
            nth, shape = waiting.pop()
            numbers[nth] = sender.begin(parcel(shape, nth), nth)
        elif what == "next" and len(sender):
            frame = sender.next(message := ToWorker())
            transfer = message.chunks[0].transfer
            nth = next(nth for nth, number in numbers.items() if number == transfer)
            sent[nth] += len(message.chunks[0].data)
            assert sent[nth] - taken[nth] < bulk.WINDOW + bulk.INLINE
            if frame is not None:
                assert frame == nth
                frames.append(nth)
            there.append(message.SerializeToString())
        elif what == "there" and there:
            receiver.receive(ToWorker.FromString(there.popleft()))
        elif what == "back" and back:
            sender.receive(message := ToWorker.FromString(back.popleft()))
            for credit in message.credits:
                nth = next(nth for nth, number in numbers.items() if number == credit.transfer)
                taken[nth] += credit.bytes
                assert taken[nth] <= sent[nth]
        elif what == "grant" and receiver.grants:
            receiver.grant(message := ToWorker())
            back.append(message.SerializeToString())
        elif what == "stop" and numbers and chance.random() < 0.05:
            nth = chance.choice(list(numbers))
            if sender.stop(nth) is not None:
                gone.add(nth)
                there.append(ToWorker(chunks=[Chunk(transfer=numbers[nth], abandoned=True)]).SerializeToString())
    assert sorted([*frames, *gone]) == sorted(numbers), "none is stuck, none ends twice"
    for nth in frames:
        assert plain(receiver.received(numbers[nth])) == plain(parcel(shapes[nth], nth))
    assert receiver._arriving == {}
    assert not sender._parked


# -- loans ------------------------------------------------------------------------------------------------------------


def asked(*names: str) -> Loans[str]:
    loans = Loans[str]()
    for name in names:
        loans.ask(BulkPayload(name.encode()), name)
    return loans


def begun(loans: Loans[str]) -> Lending[str]:
    lending = loans.begin()
    assert lending is not None
    return lending


def test_w05_what_is_to_be_lent_is_written_in_order_and_only_so_much() -> None:
    loans = asked("a", "b", "c")
    assert len(loans) == 3
    one, two = begun(loans), begun(loans)
    assert [lending.frame for lending in (one, two)] == ["a", "b"]
    assert (one.bulk.pickle, one.number, one.descriptor) == (b"a", 0, -1)
    assert loans.begin() is None, f"no more than {LOANS}"
    assert len(loans) == 3, "two are written, one waits"
    assert loans.written(two, 7) == "b", "the frame that may go now"
    assert (two.number, two.descriptor) == (1, 7), "numbers rise as they are lent"
    assert loans.begin() is None, "what is lent counts too"
    assert loans.written(one, 8) == "a"
    assert (one.number, len(loans), loans.released) == (2, 1, [])
    loans.returned([1])
    assert loans.released == [7]
    assert begun(loans).frame == "c", "there is room again"
    assert loans.begin() is None


def test_w05_what_cannot_be_lent_makes_room() -> None:
    loans = asked("a", "b", "c", "d")
    one, two = begun(loans), begun(loans)
    assert loans.failed(one) == "a", "the frame that has to travel otherwise"
    assert loans.failed(one) is None
    assert begun(loans).frame == "c"
    assert loans.begin() is None
    assert loans.failed(two) == "b"
    assert (begun(loans).frame, loans.released) == ("d", [])


def test_w05_what_comes_back_is_released_once() -> None:
    loans = asked("a", "b")
    for descriptor in (7, 8):
        loans.written(begun(loans), descriptor)
    loans.returned([2, 2, 99, 0])
    loans.returned([2])
    assert list(loans.take_released()) == [8]
    assert list(loans.take_released()) == []
    loans.end()
    loans.returned([1, 2])
    assert list(loans.take_released()) == [7]
    loans.end()
    assert list(loans.take_released()) == []


def test_w05_what_nobody_needs_is_not_lent() -> None:
    loans = asked("a", "b", "c")
    one = begun(loans)
    assert loans.stop("b"), "it waits"
    assert loans.stop("a"), "it is being written"
    assert not loans.stop("a"), "once"
    assert not loans.stop("b")
    assert not loans.stop("d")
    assert begun(loans).frame == "c"
    assert loans.begin() is None
    assert len(loans) == 2, "one is still being written"
    assert loans.written(one, 7) is None, "for nobody"
    assert (loans.released, one.number) == ([7], 0)
    assert len(loans) == 1
    other = asked("a")
    one = begun(other)
    assert other.stop("a")
    assert other.failed(one) is None
    assert (len(other), other.released) == (0, [])


def test_w05_a_frame_is_known_by_itself() -> None:
    """Two that are equal are two."""
    loans = Loans[list[int]]()
    frames: list[list[int]] = [[1], [1], [1]]
    for frame in frames:
        loans.ask(BulkPayload(b"x"), frame)
    one = loans.begin()
    assert one is not None
    assert not loans.stop([1])
    assert loans.stop(frames[1])
    two = loans.begin()
    assert two is not None
    assert two.frame is frames[2]
    assert loans.written(one, 7) is frames[0]


def test_w05_after_the_end_nothing_is_lent() -> None:
    loans = asked("a", "b", "c", "d")
    lent, writing = begun(loans), begun(loans)
    loans.written(lent, 7)
    loans.end()
    assert (len(loans), loans.begin(), loans.released) == (0, None, [7])
    assert loans.written(writing, 8) is None
    assert loans.failed(writing) is None
    assert list(loans.take_released()) == [7, 8]
    assert (loans._lent, list(loans.waiting), loans.writing) == ({}, [], [])


@pytest.mark.parametrize("seed", range(int(5 + 100 * SCALE)))
def test_w05_every_descriptor_is_released_once(seed: int) -> None:
    """A walk beside lists: each is lent or to be closed or closed, and never more than so many are open."""
    chance = random.Random(seed)
    bulk.LOANS = chance.choice([1, 2, 5])  # the fixture puts it back
    loans = Loans[int]()
    waiting: list[int] = []
    writing: list[tuple[Lending[int], int | None]] = []
    lent: dict[int, int] = {}
    opened: set[int] = set()
    over = False
    for nth in range(1, 400):
        what = chance.choice(["ask", "begin", "written", "written", "failed", "stop", "return", "close", "end"])
        if what == "ask" and not over:
            loans.ask(BulkPayload(b"x"), nth)
            waiting.append(nth)
        elif what == "begin":
            lending = loans.begin()
            may = bool(waiting) and len(lent) + len(writing) < bulk.LOANS
            assert (lending is not None) is may
            if lending is not None:
                writing.append((lending, waiting.pop(0)))
                assert lending.frame == writing[-1][1]
        elif what in ("written", "failed") and writing:
            lending, frame = writing.pop(chance.randrange(len(writing)))
            if what == "failed":
                assert loans.failed(lending) == frame
                continue
            opened.add(nth)
            assert loans.written(lending, nth) == frame
            if frame is not None:
                assert lending.number not in lent
                lent[lending.number] = nth
        elif what == "stop":
            frames = [*waiting, *(frame for _, frame in writing if frame is not None)]
            frame = chance.choice([*frames, 0])
            assert loans.stop(frame) is (frame in frames)
            waiting = [one for one in waiting if one != frame]
            writing = [(lending, None if one == frame else one) for lending, one in writing]
        elif what == "return":
            numbers = chance.choices([*lent, 0, 999], k=2)
            loans.returned(numbers)
            for number in numbers:
                lent.pop(number, None)
        elif what == "close":
            for descriptor in loans.take_released():
                opened.remove(descriptor)  # KeyError: it was closed before
        elif what == "end" and nth > 300:
            loans.end()
            waiting, lent, over = [], {}, True
            writing = [(lending, None) for lending, _ in writing]
        assert len(loans) == (0 if over else len(waiting) + len(writing))
        assert opened == {*lent.values(), *loans.released}
        assert len(loans.released) == len({*loans.released})
        assert over or len(lent) + len(writing) <= bulk.LOANS
    loans.end()
    for descriptor, (lending, _) in enumerate(writing, 1000):
        opened.add(descriptor)
        assert loans.written(lending, descriptor) is None
    assert sorted(loans.take_released()) == sorted(opened)


def test_w42_a_loan_that_cannot_be_read_is_recalled_and_released_once() -> None:
    loans = asked("a", "b")
    one, two = begun(loans), begun(loans)
    loans.written(one, 7)
    loans.written(two, 8)
    loans.recall([one.number, 99])
    loans.returned([one.number])
    assert list(loans.take_released()) == [], "who reads it again closes it"
    [lent] = loans.take_recalled()
    assert (lent.number, lent.descriptor, lent.segments) == (one.number, 7, [(1, False)])
    assert loans.take_recalled() == []
    loans.recall([two.number])
    loans.end()
    assert list(loans.take_released()) == [8]
    assert loans.take_recalled() == []
