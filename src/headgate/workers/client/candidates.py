"""Workers that a dispatcher cannot use yet: they are being connected, or will be tried again after a pause.

Discovery is a hint: anybody can announce a worker that is not there. So a worker that is reached over a network gets
calls only when a session with it is open. One that cannot be reached, or is lost later, is tried again every
`PAUSES[-1]` seconds for as long as the discovery tells of it: it may be restarting, and a list of addresses does not
tell when it is back. While a call waits for a worker the pause is `URGENT`. A worker that refuses for good is tried
less often, because its log tells of each try. Why a worker cannot be used is kept for the error of a call that finds
none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from headgate.core.redaction import log_exception
from headgate.workers.model import WorkerMetadata

if TYPE_CHECKING:
    from headgate.workers.client.connection import Connection, Happening
    from headgate.workers.protocol.tls_causes import Refusal

PAUSES = (0.1, 0.3, 1.0)
"""Seconds before a worker is tried again, after its first failure in a row, its second, and so on."""
REFUSED = (0.1, 0.3, 1.0, 3.0, 10.0, 10.0, 10.0, 30.0)
"""The same for a worker that refuses for a reason that will not go away by itself."""
URGENT = 0.2
"""Seconds before a worker is tried again while a call waits for one."""
TRIES_A_SECOND = 50
"""How many tries begin each second, of all workers together: the more cannot be reached, the longer are the pauses. A
try costs about a millisecond, and anybody can announce workers."""
PATIENCE = (1.5, 5.0, 10.0)
"""Seconds that a worker has to answer the first time, and later. An address that never answers holds up others."""
SILENCE = 0.3
"""Seconds without an answer after which others may be tried beside a worker, if they wait for its place."""
AT_A_TIME = 64
"""How many workers are connected at the same time."""
_EXPLAINED_AT_A_TIME = 8  # each needs a thread
_OFTEN = 3  # so often in a row it is found out why one cannot be reached; later only now and then
_MAY_RESTART = ("no listener", "no answer", "other")  # kinds of refusals that a worker which restarts gives too
GRACE = 2.0
"""Seconds a call waits for another worker when each one that is known refuses for a reason that will not go away."""


class Places(Protocol):
    """The places that a pool has for discovered workers: what it is told of those that have one."""

    def silent(self, uid: str) -> None:
        """Hear that a worker has not answered for a while: others may be tried beside it."""
        ...

    def answers(self, uid: str) -> bool:
        """Hear that a session with a worker is open. False: others have all places, and it may not be used."""
        ...

    def out_of_reach(self, uid: str) -> None:
        """Hear that a worker cannot be reached: another one may have its place."""
        ...

    def lost(self, uid: str) -> None:
        """Hear that the session with a worker has broken: it did not say before that it would stop."""
        ...


class _Candidate:
    """A worker that is not used yet."""

    def __init__(self, metadata: WorkerMetadata) -> None:
        self.metadata = metadata
        self.failures = 0  # in a row
        self.reason = ""
        self.remedy = ""
        self.permanent = False  # the reason will not go away by itself, as far as was last found out
        self.said_why = False  # the worker itself, at the last try
        self.connection: Connection | None = None
        self.opened: asyncio.Future[str] | None = None  # "": the session is open; else why it is not
        self.task: asyncio.Task[None] | None = None


class Candidates:
    """The workers that one dispatcher does not use yet, each with a task that connects it."""

    def __init__(
        self,
        connect: Callable[[WorkerMetadata], Connection],
        on_open: Callable[[Connection], None],
        on_failure: Callable[[WorkerMetadata, bool], None],
        on_silence: Callable[[WorkerMetadata], None],
        explain: Callable[[WorkerMetadata], Awaitable[Refusal | None]],
        is_waited_for: Callable[[], bool],
    ) -> None:
        self._connect = connect
        self._on_open = on_open
        self._on_failure = on_failure
        self._on_silence = on_silence
        self._explain = explain
        self._is_waited_for = is_waited_for
        self._pausing: set[asyncio.Future[None]] = set()
        self._candidates: dict[str, _Candidate] = {}
        self._places = asyncio.Semaphore(AT_A_TIME)
        self._explaining = asyncio.Semaphore(_EXPLAINED_AT_A_TIME)
        self._tasks: set[asyncio.Task[None]] = set()  # also of those that were dropped, until they have ended

    def __contains__(self, uid: object) -> bool:
        return uid in self._candidates

    @property
    def reasons(self) -> dict[str, str]:
        """By uid, why workers cannot be used; "being connected" of those that were not tried yet."""
        return {uid: one.reason or "being connected" for uid, one in self._candidates.items()}

    @property
    def remedy(self) -> str | None:
        """What to do about those that refuse, each remedy once; None: none of them does."""
        return " ".join(dict.fromkeys(one.remedy for one in self._candidates.values() if one.remedy)) or None

    @property
    def out_of_reach(self) -> list[str]:
        """The uids of those that were tried and could not be connected."""
        return [uid for uid, one in list(self._candidates.items()) if one.reason]

    @property
    def hopeless(self) -> bool:
        """Whether there are some, and all of them refuse for a reason that will not go away by itself."""
        return bool(self._candidates) and all(one.permanent for one in self._candidates.values())

    def refuses(self, uid: str) -> bool:
        """Whether a worker is there and refuses, for a reason that will not go away by itself."""
        return uid in self._candidates and self._candidates[uid].permanent

    def add(self, metadata: WorkerMetadata, reason: str = "", *, permanent: bool = False) -> None:
        """Connect a worker. With a `reason` it was lost, or refused, and is tried after a pause."""
        self._leave(self._candidates.get(metadata.uid))
        one = self._candidates[metadata.uid] = _Candidate(metadata)
        one.reason, one.permanent, one.failures = reason, permanent, int(bool(reason))
        one.task = asyncio.get_running_loop().create_task(self._pursue(one))
        self._tasks.add(one.task)
        one.task.add_done_callback(self._tasks.discard)

    def drop(self, uid: str) -> None:
        """Forget a worker."""
        self._leave(self._candidates.pop(uid, None))

    def _leave(self, one: _Candidate | None) -> None:
        if one is not None and one.task is not None:
            one.task.cancel()

    def heard(self, connection: Connection, happening: Happening, reason: str) -> bool:
        """Take what a connection tells; False: it is none of a candidate."""
        one = self._candidates.get(connection.metadata.uid)
        if one is None or one.connection is not connection:
            return False
        if one.opened is not None and not one.opened.done():
            if happening == "open":
                one.connection = None
                del self._candidates[connection.metadata.uid]
                self._on_open(connection)
                one.opened.set_result("")
            elif happening in ("lost", "refused", "stopped", "closed"):
                one.said_why = happening == "refused"
                one.opened.set_result(reason or happening)
        return True

    async def _pursue(self, one: _Candidate) -> None:
        """Try to connect a worker until that succeeds."""
        try:
            while True:
                if one.failures:
                    await self._pause(one)
                async with self._places:
                    reason = await self._opens(one)
                if not reason:
                    return
                one.reason = one.reason or reason
                self._on_failure(one.metadata, False)  # another may have its place meanwhile
                one.reason = await self._explained(one, reason)
                one.failures += 1
                self._on_failure(one.metadata, True)
        finally:
            one.task = None
            connection, one.connection = one.connection, None
            if connection is not None:
                await connection.close("it is not used any more")

    def hurry(self) -> None:
        """Try workers again now, because a call has begun to wait for one."""
        pausing, self._pausing = self._pausing, set()
        for future in pausing:
            if not future.done():
                future.set_result(None)

    async def _pause(self, one: _Candidate) -> None:
        """Wait before a worker is tried again; less if a call waits for a worker, or begins to."""
        pauses, turn = REFUSED if one.permanent else PAUSES, len(self._candidates) / TRIES_A_SECOND
        usual = pauses[min(one.failures, len(pauses)) - 1]
        least = usual if one.permanent else min(usual, URGENT)
        least, usual = max(least, turn), max(usual, turn)
        await asyncio.sleep(least)
        if usual > least and not self._is_waited_for():
            hurried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._pausing.add(hurried)
            try:
                await asyncio.wait((hurried,), timeout=usual - least)
            finally:
                self._pausing.discard(hurried)

    async def _opens(self, one: _Candidate) -> str:
        """Try once to connect a worker; return why it cannot be, or "": it is connected."""
        opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        one.opened, one.said_why = opened, False
        one.connection = self._connect(one.metadata)
        one.connection.open()
        patience = PATIENCE[min(one.failures, len(PATIENCE) - 1)]
        await asyncio.wait((opened,), timeout=min(SILENCE, patience))
        if not opened.done():
            self._on_silence(one.metadata)
            await asyncio.wait((opened,), timeout=max(0.0, patience - SILENCE))
        if not opened.done():
            opened.set_result(f"it did not answer within {patience:g} s")
        failed, one.connection = one.connection, None
        if failed is not None:
            await failed.close("it is tried again later")
        return opened.result()

    async def _explained(self, one: _Candidate, reason: str) -> str:
        """Find out why a worker could not be connected, if `reason` does not say it and it was not done too often. (Of
        one that refuses for good it is asked each time, because calls do not wait for it.)"""
        if one.said_why:
            one.permanent, one.remedy = True, ""
            return reason
        if not one.permanent and one.failures >= _OFTEN and one.failures % 8:
            return one.reason or reason
        try:
            async with self._explaining:
                refusal = await self._explain(one.metadata)
        except Exception:  # it is tried again all the same
            log_exception("headgate.workers", "why %s cannot be reached was not found out", one.metadata.address)
            return reason
        if refusal is None:
            one.permanent, one.remedy = False, ""
            return reason
        one.permanent = refusal.kind not in _MAY_RESTART
        one.remedy = refusal.remedy if one.permanent else ""
        return refusal.text

    async def close(self) -> None:
        """Stop to connect workers."""
        self._candidates.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
