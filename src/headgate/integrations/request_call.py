"""One request of an HTTP client as a call of a ResourcePool: its attempts, their verdicts, and how it ends.

The transports of `integrations.httpx` send and receive; this decides, and tells the pool. A request is given to the
client as soon as it has an answer that is not a refusal, and from its first byte on nothing is tried again. Its use of
the resource ends with the stream.

A request that is made with a resource which its caller holds already, such as the key of a task, is a `HeldCall`: it is
sent once, and whoever holds the resource judges the error and tries again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headgate.core.current_task import CURRENT
from headgate.errors import PoolExhausted
from headgate.integrations.token_usage import UsageReader
from headgate.resources.engine import Engine, lock
from headgate.resources.further_requests import Taken, take_further, take_further_sync
from headgate.resources.http_errors import http_errors, is_connection_error
from headgate.resources.http_status import Answer, status_of
from headgate.resources.members import Use
from headgate.resources.model import Resource
from headgate.resources.rate_limits import may_be_spent
from headgate.resources.run_options import Plan
from headgate.resources.signals import CooldownResource, DisableResource, RetryOperation, Signal

Verdict = Callable[[object], Signal | None]


def proxy_errors(outcome: object) -> Signal | None:
    """What an exception or a response says about the proxy it came through."""
    status = status_of(outcome)
    if status == 407:
        return DisableResource("HTTP 407: the proxy refuses us")
    if status in (403, 429, 529):
        signal = http_errors(outcome)
        seconds = signal.cooldown_seconds if isinstance(signal, CooldownResource) else None
        # The site says so, and others do not know of it.
        return CooldownResource(seconds, f"HTTP {status} through this proxy", only_for="affinity")
    if status is None and is_connection_error(outcome):
        return CooldownResource(reason=type(outcome).__name__)
    return http_errors(outcome) if status is not None and status >= 500 else None


LONGEST_REST_FOR_STRANGERS = 60.0
"""Seconds for which a key rests at most because of a request that somebody else wrote."""


def errors_of_strangers(outcome: object) -> Signal | None:
    """What an answer says about its key, if the request was written by somebody who may want to harm others.

    A 403 may be due to the request (a model to which nobody has access), and says nothing. A limit may be that of one
    model, so the key rests for a minute at most.
    """
    if status_of(outcome) == 403:
        return None
    signal = http_errors(outcome)
    if isinstance(signal, CooldownResource) and (signal.cooldown_seconds or 0.0) > LONGEST_REST_FOR_STRANGERS:
        return CooldownResource(LONGEST_REST_FOR_STRANGERS, signal.reason)
    return signal


class RequestCall:
    """The attempts of one request."""

    is_heard = False
    """Whether the pool has learned from the answer, and must not do so again if it meets it elsewhere."""

    def __init__(
        self,
        engine: Engine[Any],
        plan: Plan,
        verdict: Verdict,
        *,
        may_repeat: bool,
        is_retry: Callable[[], bool],
        most_errors: int | None = None,
        most_disabled: int | None = None,
    ) -> None:
        """`may_repeat`: the body can be sent again. `is_retry` says whether an SDK sends this again after an error.

        `most_errors`: end after so many attempts that say nothing against their key (5xx, broken connections).
        `most_disabled`: so many keys may be disabled because of this request; what refuses more is the request's fault.
        """
        self._engine = engine
        self._plan = plan
        self._errors_left = most_errors
        self._disables_left = most_disabled
        self._verdict = verdict
        self._may_repeat = may_repeat
        self._is_retry = is_retry
        self._call = engine.enter(plan)
        self._use: Use | None = None
        self._usage: UsageReader | None = None
        self.exhausted: PoolExhausted | None = None
        """Why there is no further attempt; None: there may be one, or the body cannot be sent again."""

    async def take(self) -> Any:
        """Take a resource for the next attempt. Raises PoolExhausted.

        A further attempt is another request to whatever is used around this one, and takes one of its quota first:
        while it waits for that, it holds no resource that others may need.
        """
        try:
            if self._call.started:
                self._check(await take_further(self._engine.rotation, self._call.deadline))
            self._use = await self._engine.take(self._call)
        except BaseException as error:
            self._ended(error)
            raise
        self._engine.watch_lag(self._use)
        return self._use.member.resource

    def take_sync(self) -> Any:
        """`take` for a thread without a loop."""
        try:
            if self._call.started:
                self._check(take_further_sync(self._engine.rotation, self._call.deadline))
            self._use = self._engine.take_sync(self._call)
        except BaseException as error:
            self._ended(error)
            raise
        return self._use.member.resource

    def _check(self, taken: Taken) -> None:
        """Raise PoolExhausted if a quota around this request allows no further attempt."""
        if taken == "late":
            raise self._call.out_of_time(None, waited_for="another request of the quota around it")
        if taken == "gone":
            why = "the resource around this request was disabled or removed"
            raise self._call.out_of_resources(why, "no_eligible", None, None)

    def raised(self, error: BaseException) -> float | None:
        """End an attempt that raised this. Returns the seconds until the next one; None: there is none."""
        if self._use is not None and self._use.reservation is not None:
            self._use.reservation.has_failed = True
        signal = self._signal(error) if isinstance(error, Exception) else None
        if signal is None:
            self._broke(error, None)
            return None
        return self._failed(signal, error, final=self._is_retry())

    def refused(self, status: int, headers: Any, response: Callable[[], object]) -> Signal | None:
        """What an answer says against its resource; None if nothing.

        `response` makes what classifiers are given. It is not made of a success, about which only a pool's own
        classifier may have an opinion.
        """
        use = self._use
        if use is not None:
            self._learn(use, status, headers)
        if status < 400 and self._engine.classify is None:
            return None
        signal = self._signal(response())
        return signal if use is None else self._engine.eased(use, signal, headers)

    def _learn(self, use: Use, status: int, headers: Any) -> None:
        """Learn what the answer says about the quota, and look out for the tokens that it used.

        A key without a quota gets one that is learned once an answer says that nothing remains. Until then headers
        cost next to nothing.
        """
        self._usage = UsageReader()
        if use.level or may_be_spent(headers.raw):
            self._engine.hear(use, Answer(status, headers))

    def saw(self, chunk: bytes) -> None:
        """Look at a part of the answer that is given to the client: it may tell how many tokens it used."""
        if self._usage is not None:
            self._usage.feed(chunk)

    def failed(self, signal: Signal) -> float | None:
        """End an attempt that was refused. Returns the seconds until the next one; None: there is none."""
        return self._failed(signal, signal, final=False)

    def has_other_keys(self) -> bool:
        """Whether a key is left for this request that is not disabled, though it may be resting."""
        with lock:
            return self._engine.rotation.can_become_free(self._plan.requirement)

    def done(self) -> None:
        """End a call whose answer was given to the client, wholly or as far as the client wanted it.

        The tokens that the answer reports are counted, by its quota too if there is one.
        """
        use, self._use = self._use, None
        if use is not None:
            spent = None if self._usage is None else self._usage.spent()
            if spent is not None:
                self._engine.reporter.spent(use.member.resource.resource_id, spent, CURRENT.get())
                if use.reservation is not None:
                    use.reservation.spent = spent
            self._engine.done(self._call, use)

    def broke(self, error: Exception) -> None:
        """End a call whose answer broke off after the client was given a part of it."""
        self._broke(error, self._signal(error))

    def abandon(self) -> None:
        """End a call that nobody closed. Safe in a finaliser."""
        use, self._use = self._use, None
        if use is not None:
            self._engine.let_go(use)

    def _broke(self, error: BaseException, signal: Signal | None) -> None:
        use, self._use = self._use, None
        if use is None:
            return
        if signal is not None:
            self._engine.end(use, signal)
        elif isinstance(error, Exception):
            self._engine.succeed(use, "error")
        self._engine.failed(self._call, error, use)

    def _failed(self, signal: Signal, error: BaseException, *, final: bool) -> float | None:
        use, self._use = self._use, None
        assert use is not None
        self._engine.end(use, signal)
        try:
            pause = self._engine.note_failure(self._call, use, signal)
        except PoolExhausted as exhausted:
            self._ended(exhausted)
            return None
        if self._errors_left is not None and isinstance(signal, RetryOperation):
            self._errors_left -= 1
            final = final or self._errors_left <= 0
        if final or not self._may_repeat:
            self._ended(error)
            return None
        return pause

    def _ended(self, error: BaseException) -> None:
        self.exhausted = error if isinstance(error, PoolExhausted) else None
        self._engine.failed(self._call, error, None)

    def _signal(self, outcome: object) -> Signal | None:
        """The pool's own classifier goes first; what it has no opinion on is judged as HTTP."""
        signal = self._engine.classified(outcome) if self._engine.classify is not None else None
        signal = self._verdict(outcome) if signal is None else signal
        if self._disables_left is not None and isinstance(signal, DisableResource):
            self._disables_left -= 1
            return signal if self._disables_left >= 0 else None
        return signal


class HeldCall:
    """One request with a resource that its caller holds: a task, a call of `ResourcePool.run`, or a lease.

    What the answer says about the quota, and the tokens that it used, is told to the resource, for the use in which the
    request is made. A refusal is for the client: its error reaches the pool of the use, which judges it.
    """

    exhausted: PoolExhausted | None = None

    def __init__(self, resource: Resource[Any], verdict: Verdict) -> None:
        self._resource = resource
        self._verdict = verdict
        self._usage: UsageReader | None = None
        self.is_heard: bool = False

    async def take(self) -> Resource[Any]:
        """Return the resource that is held."""
        return self._resource

    def take_sync(self) -> Resource[Any]:
        """`take` for a thread without a loop."""
        return self._resource

    def raised(self, error: BaseException) -> float | None:
        """Return None: the error goes to the client, and nothing is tried again here."""
        return None

    def refused(self, status: int, headers: Any, response: Callable[[], object]) -> Signal | None:
        """Tell the resource what the answer says, and return what it says against the resource; None if nothing."""
        sharing = self._resource.sharing
        elsewhere = not sharing.members  # a worker's copy: the pool is in another process
        self._usage = UsageReader()
        if sharing.account is not None or elsewhere or may_be_spent(headers.raw):
            self._resource.learn(Answer(status, headers))
            self.is_heard = True
        return self._verdict(response()) if status >= 400 else None

    def saw(self, chunk: bytes) -> None:
        """Look at a part of the answer that is given to the client: it may tell how many tokens it used."""
        if self._usage is not None:
            self._usage.feed(chunk)

    def failed(self, signal: Signal) -> float | None:
        """Return None: the refusal goes to the client, and nothing is tried again here."""
        return None

    def has_other_keys(self) -> bool:
        """Return False: there is only the one that is held."""
        return False

    def done(self) -> None:
        """Tell the resource how many tokens the answer used."""
        usage, self._usage = self._usage, None
        spent = None if usage is None else usage.spent()
        if spent is not None:
            self._resource.spent(spent.total, input=spent.input, output=spent.output)

    def broke(self, error: Exception) -> None:
        """End a request whose answer broke off. What was read of the answer counts."""
        self.done()

    def abandon(self) -> None:
        """Do nothing: the resource belongs to somebody else. Safe in a finaliser."""
