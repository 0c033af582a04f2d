"""Answers whose payload is in memory that the worker lends: read it, and keep the answers of each call in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headgate.workers.protocol import shared_memory
from headgate.workers.protocol.bulk import Borrowed, BulkPayload, Unreadable
from headgate.workers.protocol.client_session import ClientSession
from headgate.workers.protocol.messages import Answer, Outgoing


class LentAnswers:
    """The answers of one session that are still being read. `rouse` is called when there is something to send."""

    __slots__ = ("_fetching", "_resent", "_rouse", "_session")

    def __init__(self, session: ClientSession, rouse: Callable[[], None]) -> None:
        self._session = session
        self._rouse = rouse
        self._fetching: dict[Outgoing, deque[Answer]] = {}  # what came after an answer that is still being read
        self._resent: dict[
            int, Callable[[BulkPayload | None, BaseException | None], None]
        ] = {}  # loans that are to come in chunks

    def __bool__(self) -> bool:
        """Is there an answer that is still being read?"""
        return bool(self._fetching)

    def __contains__(self, call: Outgoing) -> bool:
        """Is an answer of this call still being read?"""
        return call in self._fetching

    def arrived(self, answer: Answer) -> None:
        """Take an answer of a generator, or one that is still to be read. Each call gets its answers in order."""
        call = answer.call
        line = self._fetching.get(call)
        if line is not None:
            line.append(answer)
        elif isinstance(answer.payload, Borrowed):
            self._fetching[call] = deque()
            self._fetch(answer, answer.payload)
        else:
            hand_out(answer)

    def _fetch(self, answer: Answer, borrowed: Borrowed) -> None:
        probe = self._session.probe
        pid = probe.pid if probe is not None else 0

        def done(resent: BulkPayload | None, error: BaseException | None) -> None:
            if isinstance(error, shared_memory.Unopened) and not self._session.bulk.over:
                self._session.bulk.cannot_read(borrowed)
                self._resent[borrowed.number] = finish
                self._rouse()
                return
            self._session.bulk.has_read(borrowed)
            self._rouse()
            finish(resent, error)

        def finish(resent: BulkPayload | None, error: BaseException | None) -> None:
            if isinstance(error, (FileNotFoundError, ProcessLookupError)):
                hand_out(Answer(answer.call, "lost"))  # its process is gone
            else:
                payload = resent if resent is not None else Unreadable(f"it is in memory that cannot be read ({error})")
                hand_out(answer._replace(payload=payload))
            line = self._fetching.pop(answer.call)
            while line:
                self.arrived(line.popleft())
                if answer.call in self._fetching:
                    self._fetching[answer.call].extend(line)
                    return

        shared_memory.aside(
            sum(length for length, _ in borrowed.segments), lambda: shared_memory.read(pid, borrowed), done
        )

    def take_resent(self) -> None:
        """Finish answers whose payload could not be read, and has come in chunks."""
        for number, resent in self._session.bulk.take_resent():
            finish = self._resent.pop(number, None)
            if finish is not None:
                finish(resent, None if resent is not None else OSError("its worker cannot read it either"))

    def end(self) -> None:
        """Finish answers that were to come in chunks, because the session is over."""
        for finish in list(self._resent.values()):
            finish(None, ProcessLookupError())
        self._resent.clear()


def hand_out(answer: Answer) -> None:
    """Give an answer to whoever waits for it, or keep it until somebody asks."""
    call = answer.call
    if call.backlog is not None and call.waiter is None:
        call.backlog.append(answer)  # nobody has asked for it yet
    else:
        tell(call, answer)


def tell(call: Outgoing, answer: Answer) -> None:
    """Tell the waiter of a call its answer."""
    waiter, call.waiter, call.answer = call.waiter, None, answer
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
