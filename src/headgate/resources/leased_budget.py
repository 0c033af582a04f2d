"""What this process holds of a quota that several processes share, and what it has to tell. Pure; used with the lock.

It takes the place of the `Ledger` in an account: calls take from what this process was granted. When little is left, or
a call lacks something, there is something to send: `message` gives it, `take` takes the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from headgate.resources.ledger import REQUESTS, TOKENS, Need, needed
from headgate.resources.quota import Quota, QuotaSetting
from headgate.resources.quota_exchange import Message, Reply, Told, Want
from headgate.resources.rate_limits import Limit

_LOW: Final = 0.25
"""More is asked for when less than this part is left of what was granted last."""
_ASKED_AGAIN: Final = 1.0
"""Seconds after which a process asks again that was not told when to."""
_OTHERS_USE_IT: Final = 5.0
"""Seconds after which it asks again for what others hold: they keep a part of it while they are busy."""
_BUSY: Final = 1.0
"""Seconds since its last call for which a process keeps half of what it does not use, when others want it."""
_MOST_TOLD: Final = 64


class LeasedBudget:
    """The part of this process in one shared quota. Implements `accounts.Budget`."""

    def __init__(
        self,
        quota: QuotaSetting,
        token: str,
        needed: Callable[[], None],
        lease_ends: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """`needed` is called, with the lock held, when there is something to send.

        `lease_ends` says until when this process has what it holds: if it was stopped for a while, others may have
        been given it before the store could tell.
        """
        self.quota: QuotaSetting = quota
        self._lease_ends = lease_ends
        self.is_alone: bool = False
        """Can the store not be reached?"""
        self._token = token
        self._needed = needed
        self._member: str | None = None
        self._offset = 0.0  # how far the store's clock is ahead of the monotonic one
        self._seq = 0
        self._unanswered: Message | None = None
        self._limits: dict[str, float | None] = {}
        self._granted: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._reserved: dict[str, float] = {}
        self._disowned: dict[str, float] = {}  # reserved under a former id: ends of these are not told
        self._chunk: dict[str, float] = {}  # what was granted last
        self._want: Want | None = None
        self._asks = False
        self._asks_at = -math.inf
        self._ahead_at = -math.inf
        self._used_at = -math.inf
        self._rows: dict[str, dict[float, float]] = {}
        self._untold: dict[str, float] = {}
        self._told: list[Told] = []
        self._is_wanted = False  # others wait for some of it
        self._may_probe = False  # the next call has to find out what there is
        self._probed: tuple[bool, bool] | None = None
        self._is_news = False
        self.wants_exchange: bool = False
        """Is there something to send that should not wait?"""

    # -- what an account asks -----------------------------------------------------------------------------------------

    def need(self, cost: float) -> dict[str, float]:
        """What a call takes that costs so many tokens."""
        is_told = isinstance(self.quota, Quota)
        need = {name: needed(name, cost, None if is_told else limit) for name, limit in self._limits.items()}
        if not isinstance(self.quota, Quota) or not need:
            need.setdefault(REQUESTS, 1.0)
        return need

    def can_ever_allow(self, cost: float) -> bool:
        """Whether a call that costs so many tokens fits into a whole window."""
        if not isinstance(self.quota, Quota):
            return True
        limit = self._limits.get(TOKENS, self.quota.tokens)  # other processes may have made it with another quota
        return limit is None or cost <= limit

    def allows(self, need: Need, now: float) -> bool:
        """Whether this process holds so much."""
        return now < self._lease_ends() and all(self.room(name, now) >= amount for name, amount in need.items())

    def room(self, name: str, now: float) -> float:
        """How much of one limit this process holds and does not use."""
        return self._held(name) - self._own(name)

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

    def reserve(self, need: Need, now: float) -> bool:
        """Take so much of what this process holds, and ask for more when little is left."""
        self._used_at = now
        for name, amount in need.items():
            self._reserved[name] = self._reserved.get(name, 0.0) + amount
        low = any(self.room(name, now) < _LOW * self._chunk.get(name, 0.0) for name in need)
        if low:
            self._ask_ahead(need, now)
        is_probe, self._may_probe = self._may_probe, False
        return is_probe

    def release(self, need: Need, *, used: bool = True) -> None:
        """Take back what a call was given. If it did not use it, another can."""
        for name, amount in need.items():
            self._reserved[name] = max(0.0, self._reserved.get(name, 0.0) - amount)
            disowned = min(amount, self._disowned.get(name, 0.0))
            if disowned:
                self._disowned[name] -= disowned
            if used and amount > disowned:
                self._ended[name] = self._ended.get(name, 0.0) + amount - disowned
                self._is_news = True
        if self._is_wanted and not any(self._reserved.values()):
            self._send()  # nobody here will ask soon, and tell it with that

    def count(self, name: str, amount: float, until: float) -> None:
        """Tell what was used of a limit that we were told, until it leaves the window."""
        if amount > 0:
            rows = self._rows.setdefault(name, {})
            grain = self.quota.per / 100 if isinstance(self.quota, Quota) else 1.0
            key = math.ceil((until + self._offset) / grain) * grain
            rows[key] = rows.get(key, 0.0) + amount
            self._is_news = True

    def count_untold(self, used: Need) -> None:
        """Tell what a call used whose answer told nothing."""
        for name, amount in used.items():
            self._untold[name] = self._untold.get(name, 0.0) + amount
        self._is_news = True

    def observe(self, limits: Iterable[Limit], now: float, began: float) -> None:
        """Tell what an answer said that arrived at `now`, to a call that began at `began`."""
        at = now + self._offset
        for told in limits:
            resets_at = None if told.reset_after is None else at + told.reset_after
            self._told.append(Told(told.name, told.limit, told.remaining, resets_at, at, began + self._offset))
        del self._told[:-_MOST_TOLD]
        self._is_news = True

    def probed(self, now: float, *, answered: bool, told: bool) -> None:
        """Tell at once that the call has ended that had to find out what there is: others wait for it."""
        self._probed = answered, told
        self._send()

    # -- exchanges ----------------------------------------------------------------------------------------------------

    def message(self, *, looks: bool = False) -> Message | None:
        """What is to be sent; None: nothing. `looks`: an answer is wanted in any case."""
        if self._unanswered is not None:
            return self._unanswered  # it did not arrive, or its answer did not
        if not looks and not self._is_news and self._want is None and self._probed is None:
            return None
        self._seq += 1
        rows = {name: tuple(rows.items()) for name, rows in self._rows.items()}
        message = self._unanswered = Message(
            token=self._token,
            seq=self._seq,
            member=self._member,
            quota=self.quota,
            ended=dict(self._ended),
            rows=rows,
            untold=dict(self._untold),
            told=tuple(self._told),
            probed=self._probed,
            want=self._want,
            asks=self._asks,
        )
        self._asks = False
        self._rows, self._untold, self._told, self._probed, self._is_news = {}, {}, [], None, False
        self.wants_exchange = False
        return message

    def take(self, message: Message, reply: Reply, offset: float, now: float) -> None:
        """Take the answer to a message."""
        self._unanswered = None
        self._offset = offset
        self._is_wanted = reply.is_wanted
        self.is_alone = False
        if reply.member != self._member:
            self.forget()
            self._member = reply.member
        before = dict(self._granted)
        self._granted, self._limits = dict(reply.granted), dict(reply.limits)
        gained = {name: amount - before.get(name, 0.0) for name, amount in self._granted.items()}
        if any(amount > 0 for amount in gained.values()):
            self._chunk, self._may_probe = gained, reply.is_probe
            self._want = None
        elif self._want is not None and not self._want.is_urgent:
            self._want, self._ahead_at = None, now + _ASKED_AGAIN
        elif self._want is not None:
            soon = now + _OTHERS_USE_IT if reply.opens_at is None else reply.opens_at - offset
            self._asks_at = min(max(soon, now + 0.001), now + 60.0)
            if message.want != self._want:
                self._send()

    def disown(self, need: Need) -> None:
        """Note a call that runs, and took nothing of what this process holds: its end is not told, but its use is."""
        for name, amount in need.items():
            self._reserved[name] = self._reserved.get(name, 0.0) + amount
            self._disowned[name] = self._disowned.get(name, 0.0) + amount

    def forget(self) -> None:
        """Hold nothing any more: this process takes part under a new id, and the former counts as having used it."""
        self._granted, self._ended, self._chunk = {}, {}, {}
        self._disowned = dict(self._reserved)
        self._member, self._asks_at, self._may_probe = None, -math.inf, False

    def give_back(self, now: float) -> None:
        """Return what is not used, as others want it; half of it while calls are being made here."""
        if self._want is None:
            self._return(now, 0.5 if now < self._used_at + _BUSY else 1.0)

    def _return(self, now: float, part: float) -> None:
        if self._may_probe:
            self._may_probe, self._probed = False, (False, False)
        for name in self._granted:
            returned = math.ceil(self.room(name, now) * part)
            if returned > 0:
                self._ended[name] = self._ended.get(name, 0.0) + returned
                self._send()

    def _send(self) -> None:
        self._is_news = self.wants_exchange = True
        self._needed()

    def _held(self, name: str) -> float:
        return self._granted.get(name, 0.0) - self._ended.get(name, 0.0)

    def _own(self, name: str) -> float:
        return self._reserved.get(name, 0.0) - self._disowned.get(name, 0.0)
