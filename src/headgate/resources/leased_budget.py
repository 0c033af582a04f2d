"""What this process holds of a quota that several processes share, and what it has to tell. Pure; used with the lock.

It takes the place of the `Ledger` in an account: calls take from what this process was granted. When little is left, or
a call lacks something, there is something to send: `message` gives it, `take` takes the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from headgate.resources.costs import REQUESTS, AnyCost, needed
from headgate.resources.ledger import Need, WindowView
from headgate.resources.quota import LEARN, QuotaSetting, Window, windows_of
from headgate.resources.quota_exchange import Granted, Refused, Report, Told, Want
from headgate.resources.rate_limits import Limit
from headgate.sharing.states import ClockOffset

_LOW: Final = 0.25
"""More is asked for when less than this part is left of what was granted last."""
_ASKED_AGAIN: Final = 1.0
"""Seconds after which a process asks again that was not told when to."""
_OTHERS_USE_IT: Final = 5.0
"""Seconds after which it asks again for what others hold: they keep a part of it while they are busy."""
_BUSY: Final = 1.0
"""Seconds since its last call for which a process keeps half of what it does not use, when others want it."""
_MOST_TOLD: Final = 64
_TOLD_AGAIN: Final = 0.05
"""Seconds between two reports of what answers said, while calls wait."""
_TICK: Final = 1e-6


class LeasedBudget:
    """The part of this process in one shared quota. Implements `accounts.Budget`."""

    def __init__(
        self,
        quota: QuotaSetting,
        needed: Callable[[], None],
        lease_ends: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """`needed` is called, with the lock held, when there is something to send.

        `lease_ends` says until when this process has what it holds: if it was stopped for a while, others may have
        been given it before the store could tell.
        """
        self.quota: QuotaSetting = quota
        self._counting = quota  # the quota that counts: other processes may have begun with another one
        self._windows = _windows(quota)
        self._limits: dict[str, float | None] = {name: window.limit for name, window in self._windows.items()}
        self._lease_ends = lease_ends
        self._needed = needed
        self._offset = ClockOffset()
        self._seq = 0
        self._unanswered: Report | None = None
        self._granted: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._chunk: dict[str, float] = {}  # what was granted last
        self._want: Want | None = None
        self._asks = False
        self._asks_at = -math.inf
        self._ahead_at = -math.inf
        self._used_at = -math.inf
        self._told_at = -math.inf
        self._started_at = -math.inf
        self._rows: dict[str, dict[float, float]] = {}  # what calls took, by their starts
        self._changes: dict[str, dict[float, float]] = {}  # what they used more or less than that
        self._told: list[Told] = []
        self._refused: list[Refused] = []
        self._is_wanted = False  # others wait for some of it
        self._may_ask = False  # the next call asks what there is
        self._probed: bool | None = None
        self._is_news = False
        self.wants_exchange: bool = False
        """Is there something to send that should not wait?"""

    # -- what an account asks -----------------------------------------------------------------------------------------

    def need(self, cost: AnyCost) -> dict[str, float]:
        """The amounts one call reserves: one request, and its tokens (at least 1)."""
        learns = self._counting == LEARN
        need = {name: needed(name, cost, limit if learns else None) for name, limit in self._limits.items()}
        if learns:
            need.setdefault(REQUESTS, 1.0)
        return need

    @property
    def is_known(self) -> bool:
        """Whether there is a limit that is configured, or that answers have told some process."""
        return self.quota != LEARN or any(limit is not None for limit in self._limits.values())

    def can_ever_allow(self, need: Need) -> bool:
        """Whether so much fits into every window when nothing of it is used."""
        windows = self._windows
        return all(amount <= windows[name].most for name, amount in need.items() if name in windows)

    def allows(self, need: Need, now: float, *, paced: bool = True) -> bool:
        """Whether this process holds so much."""
        return now < self._lease_ends() and all(self._left(name) >= amount for name, amount in need.items())

    def _left(self, name: str) -> float:
        """How much of one window this process holds."""
        return self._granted.get(name, 0.0) - self._ended.get(name, 0.0)

    def views(self, now: float) -> dict[str, WindowView]:
        """How much of each window this process holds. When there is more depends on others too."""
        return {name: WindowView(self._left(name), self._limits.get(name), math.inf) for name in self.need(0.0)}

    def lack(self, need: Need, now: float, *, waits: bool = True) -> None:
        """Ask for so much. Does a call wait for it?

        Then what this process holds is not enough, and goes back: it may be just what is lacking to give it all.
        """
        if not waits:
            self.want_no_more()
            self._ask_ahead(need, now)
            return
        want = Want(dict(need), is_urgent=True)
        if want != self._want or now >= self._asks_at:
            self._return(now, 1.0)
            self._want, self._asks, self._asks_at = want, True, now + _ASKED_AGAIN
            self._send()

    def want_no_more(self) -> None:
        """Note that no call waits any more for what was asked for: others may have it."""
        if self._want is not None and self._want.is_urgent:
            self._want = None
            self._send()

    def _ask_ahead(self, need: Need, now: float) -> None:
        """Ask for so much for the next call, unless it was refused a short time ago."""
        if self._want is None and now >= self._ahead_at:
            self._want = Want(dict(need), is_urgent=False)
            self._send()

    def opens_at(self, need: Need, now: float) -> float:
        """When to ask again; the store may have given it before."""
        if self.allows(need, now):
            return now
        return self._asks_at if self._asks_at > now else now + _ASKED_AGAIN

    def start(self, need: Need, now: float) -> tuple[float, bool]:
        """Take so much of what this process holds for a call that starts now, and ask for more when little is left.

        The start is a time of the store's clock, and no two are the same.
        """
        self._used_at = now
        start = self._started_at = max(self._offset.to_store(now), self._started_at + _TICK)
        for name, amount in need.items():
            self._ended[name] = self._ended.get(name, 0.0) + amount
            self._add(self._rows, name, start, amount)
        if any(self._left(name) < _LOW * self._chunk.get(name, 0.0) for name in need):
            self._ask_ahead(need, now)
        asks, self._may_ask = self._may_ask, False
        self._started()
        return start, asks

    def cancel(self, need: Need, start: float, now: float) -> None:
        """Take back what a call took that was never begun: other calls here can use it, unless it was reported."""
        for name, amount in need.items():
            if self._rows.get(name, {}).get(start, 0.0) >= amount:
                self._add(self._rows, name, start, -amount)
                self._ended[name] = self._ended.get(name, 0.0) - amount
            else:
                self._add(self._changes, name, start, -amount)
        self._is_news = True

    def amend(self, change: Need, start: float, now: float) -> None:
        """Report that a call used more or less than it had reserved."""
        start = start if start <= self._started_at else self._offset.to_store(now)
        for name, amount in change.items():
            if amount and name in self._limits:
                self._add(self._changes, name, start, amount)
                self._is_news = True

    def retime(self, since: float, now: float) -> None:
        """Count what started since then as started now. What was reported before stays as it is."""
        moved_to = self._started_at = max(self._offset.to_store(now), self._started_at + _TICK)
        for own in self._rows.values():
            late = [start for start in own if start >= since]
            if late:
                own[moved_to] = sum(own.pop(start) for start in late)

    def observe(self, limits: Iterable[Limit], start: float, now: float) -> None:
        """Report what an answer said that arrived at `now`, to a call that started at `start`."""
        at = max(self._offset.to_store(now), start)  # `start` may be of an earlier exchange, whose answer took longer
        for told in limits:
            resets_at = None if told.reset_after is None else at + told.reset_after
            self._told.append(Told(told.name, told.limit, told.remaining, resets_at, at, start, told.window))
        del self._told[:-_MOST_TOLD]
        self._is_news = True
        waits = self._is_wanted or (self._want is not None and self._want.is_urgent)
        if waits and now >= self._told_at + _TOLD_AGAIN:
            self._told_at = now
            self._send()  # it may be what allows the next call, here or elsewhere

    def refused(self, told: Mapping[str, float | None], after: float | None, start: float, now: float) -> None:
        """Report at once that a call was refused because of these limits: others would be refused too."""
        self._refused.append(Refused(told, after, start, max(self._offset.to_store(now), start)))
        del self._refused[:-_MOST_TOLD]
        self._send()

    def probed(self, *, answered: bool) -> None:
        """Report at once that a call has ended that asked what there is: others wait for it."""
        self._probed = answered
        self._send()

    def _started(self) -> None:
        self._is_news = True
        if self._is_wanted and not any(self._left(name) > 0 for name in self._granted):
            self._send()  # nobody here will ask soon, and tell it with that

    @staticmethod
    def _add(rows: dict[str, dict[float, float]], name: str, start: float, amount: float) -> None:
        own = rows.setdefault(name, {})
        own[start] = own.get(start, 0.0) + amount

    # -- exchanges ----------------------------------------------------------------------------------------------------

    def message(self, *, looks: bool = False) -> Report | None:
        """What is to be sent; None: nothing. `looks`: an answer is wanted in any case."""
        if self._unanswered is not None:
            return self._unanswered  # it did not arrive, or its answer did not
        if not looks and not self._is_news and self._want is None and self._probed is None:
            return None
        self._seq += 1
        report = self._unanswered = Report(
            seq=self._seq,
            quota=self.quota,
            ended=dict(self._ended),
            rows=_pairs(self._rows),
            changes=_pairs(self._changes),
            told=tuple(self._told),
            refused=tuple(self._refused),
            probed=self._probed,
            want=self._want,
            asks=self._asks,
        )
        self._asks = False
        self._rows, self._changes, self._told, self._refused = {}, {}, [], []
        self._probed, self._is_news = None, False
        self.wants_exchange = False
        return report

    def take(self, report: Report, told: Granted, offset: ClockOffset, now: float) -> None:
        """Take the answer to a message."""
        self._unanswered = None
        self._offset = offset
        self._is_wanted = told.is_wanted
        if told.quota != self._counting:
            self._counting, self._windows = told.quota, _windows(told.quota)
        before = dict(self._granted)
        self._granted, self._limits = dict(told.granted), dict(told.limits)
        gained = {name: amount - before.get(name, 0.0) for name, amount in self._granted.items()}
        if any(amount > 0 for amount in gained.values()):
            self._chunk, self._may_ask = gained, told.asks
            self._want = None
        elif self._want is not None and not self._want.is_urgent:
            self._want, self._ahead_at = None, now + _ASKED_AGAIN
        elif self._want is not None:
            soon = now + _OTHERS_USE_IT if told.opens_at is None else offset.to_local(told.opens_at)
            self._asks_at = min(max(soon, now + 0.001), now + 60.0)
            if report.want != self._want:
                self._send()

    def forget(self) -> None:
        """Hold nothing any more: this process takes part under a new id, and the former counts as having used it."""
        self._granted, self._ended, self._chunk = {}, {}, {}
        self._asks_at, self._may_ask = -math.inf, False

    def give_back(self, now: float) -> None:
        """Return what is not used, as others want it; half of it while calls are being made here."""
        if self._want is None:
            self._return(now, 0.5 if now < self._used_at + _BUSY else 1.0)

    def _return(self, now: float, part: float) -> None:
        if self._may_ask:
            self._may_ask, self._probed = False, False
        for name in self._granted:
            returned = math.ceil(self._left(name) * part)
            if returned > 0:
                self._ended[name] = self._ended.get(name, 0.0) + returned
                self._send()

    def _send(self) -> None:
        self._is_news = self.wants_exchange = True
        self._needed()


def _windows(quota: QuotaSetting) -> dict[str, Window]:
    """The windows of a quota with nothing used; none if it is learned."""
    return {} if quota == LEARN else windows_of(quota)


def _pairs(rows: dict[str, dict[float, float]]) -> dict[str, tuple[tuple[float, float], ...]]:
    return {name: tuple(own.items()) for name, own in rows.items()}
