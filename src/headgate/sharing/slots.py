"""The slots of a budget that several processes share: a kind of shared state (see `protocol`). Pure.

Each pool that shares a budget is a *member*. Its turn is an **exchange**: it says what it holds, what it wants and how
much is queued there, and is told what it was granted. One row of a store holds the state, so exchanges have one order,
and in that order these hold after each of them:

- What the members hold, together with what they were granted and do not know of yet, is at most the limit. (It is more
  only while a limit that was lowered is reached by ends.)
- Slots belong to (member, grant, tenant). A message names all slots that its sender holds; it does not add or subtract.
  So a message that is repeated, because its answer was lost, changes nothing: the same `seq` gives the same grants.
- What a member that is gone held is free, and what its late messages say it holds means nothing.
- If the state was lost, nothing is granted until the members that live have said what they hold.
- A grant that its member has not been told of may be taken back. That is done when it lies there for a second and
  others want it: a stopped process keeps what it holds, and gets no more.

**Order.** A member announces only its first few tasks: one entry for each task with `fifo`, `lifo` and `priority`, one
for each tenant where tenants count. The entries of all members are merged by one key, so nobody gains by having many
tasks or many processes. The fair strategies go by start-time fair queueing: the tenant with the smallest tag is next,
and its tag grows by cost / weight. The tags of a hundred thousand tenants would not fit into a small state: each member
keeps those of the tenants it has queued, and the state lists only the newest changes (`recent`), which every reply
passes on. A member that is about to miss some is woken in time.

**Levels.** If the fair strategies have levels, a tenant has a turn at each of them, and each level has a virtual time
of its own. Then `<priority>|<tenant>` names a turn wherever a tenant is named otherwise. Caps count what a tenant holds
at all levels.

**Pauses.** While the budget is paused, or a tenant of it, slots are granted only to lenders that want theirs back.
Members give back what they were granted and have not used. The pauses are part of the settings: the first member of a
budget brings them, so they end with the last one.

**Alone.** A member that is told that nobody else waits gives its slots to its next tasks without asking, until it is
woken. If it is the only member it may also keep a slot for a moment when it has no task for it.

**Blocks.** Otherwise a member may give a slot to its next tasks for a few milliseconds after it was granted, and says
afterwards what that cost (`Said.charges`). Short tasks would be slower than their exchanges without that. Not with
fences, and not while somebody elsewhere outranks its next task (`Told.outranks`). So the order of all members holds up
to one block; the limit and the caps always hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from headgate.gate.capacity import Rank, allot
from headgate.sharing.protocol import Turn, mapping

RECENT: Final = 40
"""Of how many tenants the state lists the tags that changed last."""
_TO_SPARE: Final = 12
"""How many more tags may change before a member that is woken because of them misses one."""
PATIENCE: Final = 1.0
"""Seconds that a grant may lie unread before others may have it."""
FAIR: Final = ("fair_round_robin", "fair_share")
MOST_WANTS: Final = 32
"""How many entries a member may announce."""


class Settings(NamedTuple):
    """What all members of a budget have in common."""

    limit: int
    """How many slots there are."""
    kind: str
    """The name of the queue strategy."""
    weights: Mapping[str, float] | None = None
    """Weights of tenants, where they are not 1."""
    caps: int | Mapping[str, int] | None = None
    """How many slots a tenant may hold: one number for all, or some by name."""
    levels: bool = False
    """Does a higher priority go before every lower one, where tenants are served fairly?"""
    paused: bool = False
    """Does no queued task start?"""
    paused_tenants: frozenset[str] = frozenset()
    """The tenants of which no queued task starts."""

    def weight(self, turn: str) -> float:
        """The weight of the tenant that has this turn."""
        return 1.0 if self.weights is None else self.weights.get(tenant_of(turn) if self.levels else turn, 1.0)

    def cap(self, tenant: str) -> int | None:
        """How many slots this tenant may hold; None: as many as there are."""
        return self.caps.get(tenant) if isinstance(self.caps, Mapping) else self.caps

    @property
    def by_tenant(self) -> bool:
        """Do slots belong to tenants? Otherwise the tenant of a want is not looked at."""
        return self.kind in FAIR or self.caps is not None or bool(self.paused_tenants)

    def with_pauses(self, pauses: Mapping[str | None, bool]) -> Settings:
        """These settings, with tenants paused (True) or resumed (False); None stands for all of the budget."""
        if not pauses:
            return self
        tenants = {tenant for tenant in self.paused_tenants if pauses.get(tenant, True)}
        tenants |= {tenant for tenant, paused in pauses.items() if tenant is not None and paused}
        return self._replace(paused=pauses.get(None, self.paused), paused_tenants=frozenset(tenants))


def turn_of(tenant: str, priority: int) -> str:
    """The name of a tenant's turn at the level of this priority."""
    return f"{priority}|{tenant}"


def tenant_of(turn: str) -> str:
    """The tenant that has this turn at some level."""
    return turn.partition("|")[2]


def priority_of(turn: str) -> int:
    """The priority of the level of a turn."""
    return int(turn.partition("|")[0])


class Want(NamedTuple):
    """Tasks that one member would start: those of one tenant, or a single one."""

    tenant: str
    tasks: int
    """How many of them there are."""
    at: float
    """When the first of them joined the queue, by the clock of the store."""
    tag: float = 0.0
    """The tag of the tenant, as far as the member knows."""
    priority: int = 0
    cost: float = 1.0
    returning: bool = False
    """It runs already, lent its slot, and wants one back: it goes before all that only queue."""


class Grant(NamedTuple):
    """The right to start one task."""

    tenant: str
    fence: int
    """Grows with every grant of the budget."""
    cost: float = 1.0
    returning: bool = False
    block_ends: float = 0.0
    """Until when the slot may go to further tasks without asking, by the clock of its member. Not in the state."""


class Charge(NamedTuple):
    """What tasks of one tenant cost that were started within blocks."""

    tenant: str
    tag: float
    """Its tag before that, as the member knew it."""
    cost: float


class Said(NamedTuple):
    """What a member says. Its wants replace those of its message before."""

    seq: int
    """Grows by one with each message of this member; a repeated one has the same."""
    settings: Settings
    """What this pool was made with, or what all members had when it last heard. It counts if it is the first."""
    held: Mapping[str, int] = {}
    """How many slots it uses, by tenant."""
    wants: Sequence[Want] = ()
    queued: int = 0
    """How many tasks are queued there, also those that are not announced."""
    counts: bool = False
    """Must it know how many tasks are queued in all members together?"""
    blocked: bool = False
    """Does somebody there wait until these are fewer?"""
    refunds: Sequence[tuple[str, float]] = ()
    """Tenants and costs of grants that came to nothing: they are not charged."""
    charges: Sequence[Charge] = ()
    """What it started without asking, within blocks."""
    seen: int = 0
    """The number of the newest change of a tag that it knows of."""
    host: str = ""
    pid: int = 0
    limit: int | None = None
    """Set this limit, for all members."""
    caps: int | Mapping[str, int] | None = None
    sets_caps: bool = False
    """Set these caps, for all members."""
    pauses: Mapping[str | None, bool] = {}
    """Tenants to pause (True) or to resume (False), for all members; None stands for all of the budget."""


class MemberView(NamedTuple):
    """What is known of one member, for snapshots."""

    id: str
    host: str
    pid: int
    held: int
    queued: int


class Told(NamedTuple):
    """What a member is told."""

    me: str
    """The name of the member that is answered."""
    settings: Settings
    grants: tuple[Grant, ...] = ()
    alone: bool = False
    """Nobody else waits: freed slots may be used again without asking."""
    counts: bool = False
    """Some member must know how many tasks are queued here, also when that changes nothing else."""
    recent: tuple[tuple[str, float], ...] = ()
    """Tags that have changed since `Said.seen`, oldest first."""
    seen: int = 0
    virtual: Mapping[int, float] = {}
    """Virtual time at each level; without levels, at level 0."""
    full: frozenset[str] = frozenset()
    """Tenants that are at their caps."""
    outranks: float = -math.inf
    """The highest priority that waits elsewhere, if that is what decides; infinite if a lender wants its slot back."""
    members: tuple[MemberView, ...] = ()


# -- the state --------------------------------------------------------------------------------------------------------
#
# It is worked on as JSON gave it, because an exchange is a hot path (benchmarks/shared.py): making objects of all that
# it holds took three times as long as deciding. Its keys, and those of a member, left out where they are empty:
#
#     v format, limit, kind, weights, caps, levels, paused, tenants (paused ones),
#     number (of the newest grant or change of a tag),
#     virtual {level: virtual time},
#     base (a number that others are counted from, so that they are short),
#     recent {tenant: [number - base, tag], ...} in the order of the numbers, members {id: member}
#
#     s seq, h held {tenant: slots}, l grants told by the newest reply, n grants not told yet [..., at],
#     w wants, q queued, k seen - base, y was woken because of k, a alone, b blocked, c counts, o host, p pid
#
# A want is a list in the order of `Want`, of at least one task; a grant is one in the order of `Grant`.

_State: TypeAlias = dict[str, Any]
_Member: TypeAlias = dict[str, Any]
_TENANT, _TASKS, _AT, _TAG, _PRIORITY, _COST, _RETURNING = range(7)
_LATER: Final = 1e-3


class Slots:
    """The kind of the shared state of a budget. Implements `sharing.protocol.Kind`."""

    format: int = 3
    """Raised when an older release could misread a state."""
    is_replaceable: bool = False
    """Members would start too much until all have said what they hold."""
    is_plain: bool = True
    """Making objects of it would take three times as long as deciding."""

    def begin(self, said: Said | None) -> _State:
        """Nobody holds anything."""
        state: _State = {"number": 0, "base": 0, "virtual": {}, "recent": {}, "members": {}}
        _set(state, Settings(1, "fifo") if said is None else said.settings)
        return state

    def read(self, found: _State) -> _State:
        """Look whether this is a state of a budget. ValueError for anything else."""
        if found["limit"] < 1 or not isinstance(found["kind"], str):
            raise ValueError("no settings")
        mapping(found["members"])
        mapping(found["virtual"])
        return found

    def write(self, state: _State) -> _State:
        """It is what JSON can hold."""
        return state

    def participants(self, state: _State) -> Iterable[str]:
        """The members."""
        members: Mapping[str, _Member] = state["members"]
        return members

    def drop(self, state: _State, who: str, now: float) -> None:
        """What it held is free."""
        del state["members"][who]

    def step(self, state: _State, turn: Turn, said: Said | None) -> Told | None:
        """Take in what one member says, grant what is free to whoever is next, name whom to wake, and answer."""
        members: dict[str, _Member] = state["members"]
        own = turn.me
        if said is None:  # it has left
            turn.wakes |= _contended(members, own) | _blocked(members)
            if not turn.unheard:
                turn.wakes |= _grant(state, turn.now)
            return None
        member, joins = _member(state, turn, said)
        if turn.is_new and said.held:
            said = said._replace(held={}, wants=(), refunds=(), charges=())  # it was said under another name
        queued = _queued(members)
        if joins or said.seq > member["s"]:  # otherwise it is said again, because the answer was lost
            _apply(state, member, said)
        _take_back(state, own, turn.now)
        if turn.unheard:
            turn.wakes |= {f"{one}/" for one in turn.unheard}
        else:
            turn.wakes |= _grant(state, turn.now)
        if _queued(members) < queued:
            turn.wakes |= _blocked(members)
        if "n" in member:
            member["l"] = member.get("l", []) + [grant[:4] for grant in member.pop("n")]
        member.pop("a", None)
        if not turn.unheard and not any(name != own and _waits(one) for name, one in members.items()):
            member["a"] = 1
        turn.wakes |= _contended(members, own) | _behind(state)
        if said.limit is not None or said.sets_caps or said.pauses or (joins and (said.counts or len(members) == 2)):
            # One that is alone would not ask for long, and the only one may keep slots that it does not use.
            turn.wakes |= set(members)
        return _told(state, member, said, own)


SLOTS: Final = Slots()


def _member(state: _State, turn: Turn, said: Said) -> tuple[_Member, bool]:
    """The part of whoever speaks, and whether it is a new one."""
    members: dict[str, _Member] = state["members"]
    if turn.is_new:
        members.pop(turn.me, None)
        # Pools of this process that were let go are woken, so that they leave.
        turn.wakes |= {name for name in members if turn.is_alone((name,))}
    member = members.get(turn.me)
    if member is not None:
        return member, False
    if not members:  # nobody is there whose settings could stand
        _set(state, said.settings)
        # The state may be new, or that of a moment before a crash. The numbers of grants grow all the same, unless more
        # than a thousand a second were made until now.
        state["number"] = max(state["number"], int(turn.now * 1000))
        _count_from(state, state["number"])
    member = members[turn.me] = {}
    return member, True


def _count_from(state: _State, base: int) -> None:
    """Count changes of tags from this number on. Only while there is no member: `k` is counted from it too."""
    moved = base - state["base"]
    state["base"] = base
    state["recent"] = {tenant: [number - moved, tag] for tenant, (number, tag) in state["recent"].items()}


def _set(state: _State, settings: Settings) -> None:
    """Go by these settings."""
    state["limit"], state["kind"] = settings.limit, settings.kind
    for name, value in (
        ("weights", settings.weights),
        ("caps", settings.caps),
        ("levels", settings.levels or None),
        ("paused", settings.paused or None),
        ("tenants", sorted(settings.paused_tenants) or None),
    ):
        state.pop(name, None)
        if value is not None:
            state[name] = dict(value) if isinstance(value, Mapping) else value


def _settings(state: _State) -> Settings:
    return Settings(
        state["limit"],
        state["kind"],
        state.get("weights"),
        state.get("caps"),
        state.get("levels", False),
        state.get("paused", False),
        frozenset(state.get("tenants", ())),
    )


def _virtual(state: _State, turn: str) -> float:
    """Virtual time at the level of a turn."""
    return float(state["virtual"].get(_level(state, turn), 0.0))


def _level(state: _State, turn: str) -> str:
    return turn.partition("|")[0] if "levels" in state else "0"


def _tenant(state: _State, turn: str) -> str:
    return tenant_of(turn) if "levels" in state else turn


def _slots(member: _Member) -> int:
    """How many slots a member holds or may take."""
    slots = 0
    if "h" in member:
        slots += sum(member["h"].values())
    if "l" in member:
        slots += len(member["l"])
    if "n" in member:
        slots += len(member["n"])
    return slots


def _queued(members: Mapping[str, _Member]) -> int:
    queued: int = sum([one.get("q", 0) for one in members.values()])
    return queued


def _waits(member: _Member) -> bool:
    """Does it want more than it was granted, or wait until others have fewer tasks queued?"""
    return bool(member.get("w") or member.get("b"))


def _by_tenant(state: _State) -> Counter[str]:
    """How many slots each tenant holds or may take."""
    used = Counter[str]()
    for member in state["members"].values():
        for turn, count in member.get("h", {}).items():
            used[_tenant(state, turn)] += count
        for grant in (*member.get("l", ()), *member.get("n", ())):
            used[_tenant(state, grant[0])] += 1
    return used


# -- what a member says -----------------------------------------------------------------------------------------------


def _apply(state: _State, member: _Member, said: Said) -> None:
    """Take over what a member says of itself."""
    if said.limit is not None:
        state["limit"] = said.limit
    if said.sets_caps:
        _set(state, _settings(state)._replace(caps=said.caps))
    if said.pauses:
        _set(state, _settings(state).with_pauses(said.pauses))
    if state["kind"] in FAIR:
        for charge in said.charges:  # before its wants: these have the tags of before, or of only its own part
            _count_charge(state, charge)
    now: _Member = {"s": said.seq, "o": said.host, "p": said.pid}
    held = {tenant: count for tenant, count in said.held.items() if count > 0}
    unread = member.get("n", [])
    for name, value in (
        ("h", held),
        ("n", unread),  # "l" is not taken over: it knows of those, and what it uses of them is in `held`
        ("w", _wanted(state, said, unread)),
        ("q", said.queued),
        ("k", max(0, said.seen - state["base"])),
        ("b", int(said.blocked)),
        ("c", int(said.counts)),
    ):
        if value:
            now[name] = value
    member.clear()
    member.update(now)
    if state["kind"] in FAIR:
        for tenant, cost in said.refunds:
            _refund(state, tenant, cost)


def _wanted(state: _State, said: Said, unread: Sequence[list[Any]]) -> list[list[Any]]:
    """What a member wants besides what was granted to it already."""
    recent, seen = state["recent"], said.seen - state["base"]
    # What was granted and not told of yet is among what it wants.
    granted = Counter([(grant[0], bool(grant[3])) for grant in unread]) if unread else None
    wants = []
    for tenant, tasks, at, tag, priority, cost, returning in said.wants[:MOST_WANTS]:
        if granted:
            already = min(tasks, granted[tenant, returning])
            granted[tenant, returning] -= already
            tasks -= already
        if tasks > 0:
            change = recent.get(tenant)
            if change is not None and change[0] > seen:
                tag = change[1]
            wants.append([tenant, tasks, round(at, 4), _rounded(tag), priority, _short(cost), int(returning)])
    return wants


def _refund(state: _State, tenant: str, cost: float) -> None:
    _note_tag(state, tenant, _tag_of(state, tenant) - cost / _weight(state, tenant))


def _count_charge(state: _State, charge: Charge) -> None:
    """Let a tenant pay. Virtual time stays: others with smaller tags may wait, and would lose what they are ahead."""
    tenant, tag, cost = charge
    start = max(_virtual(state, tenant), tag, _tag_of(state, tenant))
    _note_tag(state, tenant, start + cost / _weight(state, tenant))


def _weight(state: _State, tenant: str) -> float:
    weights = state.get("weights")
    return 1.0 if weights is None else weights.get(_tenant(state, tenant), 1.0)


def _note_tag(state: _State, tenant: str, tag: float) -> None:
    """Remember a changed tag, here and in every announcement."""
    tag = _rounded(tag)
    state["number"] += 1
    recent = state["recent"]
    recent.pop(tenant, None)
    recent[tenant] = [state["number"] - state["base"], tag]
    if len(recent) > RECENT:
        del recent[next(iter(recent))]
    for member in state["members"].values():
        for want in member.get("w", ()):
            if want[_TENANT] == tenant:
                want[_TAG] = tag


def _tag_of(state: _State, tenant: str) -> float:
    """The newest tag of a tenant that the state knows; virtual time if it knows none."""
    change = state["recent"].get(tenant)
    if change is not None:
        return float(change[1])
    wants = [want for one in state["members"].values() for want in one.get("w", ()) if want[_TENANT] == tenant]
    return max((float(want[_TAG]) for want in wants), default=_virtual(state, tenant))


# -- granting ---------------------------------------------------------------------------------------------------------


def _take_back(state: _State, sender: str, now: float) -> None:
    """Take back grants that lay unread for too long while others want them.

    Their members want nothing until they speak again: they may be stopped.
    """
    members: dict[str, _Member] = state["members"]
    for name, member in members.items():
        unread = member.get("n")
        if not unread or name == sender or now - unread[0][4] < PATIENCE:
            continue
        if any(_waits(other) for another, other in members.items() if another != name):
            kept = [grant for grant in unread if now - grant[4] < PATIENCE]
            member["n"] = kept
            member["w"] = []
            if state["kind"] in FAIR:
                for tenant, _, cost, *_ in unread[: len(unread) - len(kept)]:
                    _refund(state, tenant, cost)


def _grant(state: _State, now: float) -> set[str]:
    """Grant what is free, the first of all first. Returns the members that were granted something."""
    members: dict[str, _Member] = state["members"]
    free: int = state["limit"] - sum(map(_slots, members.values()))
    wanting = [(name, want) for name, member in sorted(members.items()) for want in member.get("w", ())]
    if free <= 0 or not wanting:
        return set()
    order, caps = _RANKS.get(state["kind"], _by_time), state.get("caps")
    if "levels" in state:
        order = _by_level
    used = Counter[str]() if caps is None else _by_tenant(state)
    is_paused, paused = "paused" in state, frozenset(state.get("tenants", ()))
    woken: set[str] = set()

    def rank(entry: tuple[str, list[Any]]) -> Rank | None:
        _, want = entry
        if want[_TASKS] <= 0:
            return None
        if (is_paused or (paused and _tenant(state, want[_TENANT]) in paused)) and not want[_RETURNING]:
            return None
        if caps is not None:
            tenant = _tenant(state, want[_TENANT])
            cap = caps.get(tenant) if isinstance(caps, dict) else caps
            if cap is not None and used[tenant] >= cap:
                return None
        return order(state, want)

    def give(entry: tuple[str, list[Any]]) -> None:
        name, want = entry
        _charge(state, members[name], want)
        members[name].setdefault("n", []).append(
            [want[_TENANT], state["number"], want[_COST], want[_RETURNING], round(now, 3)]
        )
        used[_tenant(state, want[_TENANT])] += 1
        woken.add(name)

    allot(free, wanting, rank, give)
    for name in woken:
        members[name]["w"] = [want for want in members[name]["w"] if want[_TASKS] > 0]
    return woken


def _charge(state: _State, member: _Member, want: list[Any]) -> None:
    """Count one grant of an entry: one task less, and its tenant pays."""
    want[_TASKS] -= 1
    # When the next one of the entry joined the queue is not known: it stands behind those who came when this one did.
    want[_AT] = round(want[_AT] + _LATER, 4)
    if not want[_RETURNING]:
        member["q"] = max(0, member.get("q", 0) - 1)
        if state["kind"] in FAIR:
            turn = want[_TENANT]
            start = state["virtual"][_level(state, turn)] = max(_virtual(state, turn), want[_TAG])
            _note_tag(state, turn, start + want[_COST] / _weight(state, turn))
            return
    state["number"] += 1


def _by_tag(state: _State, want: list[Any]) -> Rank:
    if want[_RETURNING]:
        return (-1.0, 0.0, want[_AT])
    return (0.0, max(_virtual(state, want[_TENANT]), want[_TAG]), want[_AT])


def _by_level(state: _State, want: list[Any]) -> Rank:
    if want[_RETURNING]:
        return (-1.0, 0.0, want[_AT])
    return (0.0, -want[_PRIORITY], max(_virtual(state, want[_TENANT]), want[_TAG]), want[_AT])


def _by_priority(state: _State, want: list[Any]) -> Rank:
    return (-1.0, 0.0, want[_AT]) if want[_RETURNING] else (0.0, -want[_PRIORITY], want[_AT])


def _by_time(state: _State, want: list[Any]) -> Rank:
    return (-1.0 if want[_RETURNING] else 0.0, 0.0, want[_AT])


def _newest_first(state: _State, want: list[Any]) -> Rank:
    return (-1.0, 0.0, want[_AT]) if want[_RETURNING] else (0.0, 0.0, -want[_AT])


_RANKS: Final[dict[str, Callable[[_State, list[Any]], Rank]]] = {
    "fair_round_robin": _by_tag,
    "fair_share": _by_tag,
    "priority": _by_priority,
    "lifo": _newest_first,
}
"""By what entries are compared: the smallest is next."""


# -- whom to wake, and what to answer ---------------------------------------------------------------------------------


def _contended(members: dict[str, _Member], sender: str) -> set[str]:
    """The members that were told that nobody else waits, where that is not true any more."""
    waiting = {name for name, one in members.items() if _waits(one)}
    woken: set[str] = set()
    for name, member in members.items():
        if name != sender and member.get("a") and waiting - {name}:
            del member["a"]
            woken.add(name)
    return woken


def _blocked(members: dict[str, _Member]) -> set[str]:
    """The members in which somebody waits until fewer tasks are queued."""
    return {name for name, one in members.items() if "b" in one}


def _behind(state: _State) -> set[str]:
    """The members that have tasks queued and would soon miss changes of tags.

    One that was woken because of that is not woken again for each change that comes before it speaks, unless it has
    missed something by now: then what woke it may have been lost.
    """
    recent = state["recent"]
    if len(recent) < RECENT:
        return set()
    numbers = [number for number, _ in recent.values()]
    oldest, soon = numbers[0], numbers[_TO_SPARE]
    woken: set[str] = set()
    for name, member in state["members"].items():
        seen = member.get("k", 0)
        if seen < soon and member.get("q") and (seen < oldest or "y" not in member):
            member["y"] = 1
            woken.add(name)
    return woken


def _told(state: _State, member: _Member, said: Said, own: str) -> Told:
    members: dict[str, _Member] = state["members"]
    settings = _settings(state)
    known = said.seen - state["base"]
    full: frozenset[str] = frozenset()
    if settings.caps is not None:
        used = _by_tenant(state)
        full = frozenset(tenant for tenant, count in used.items() if (cap := settings.cap(tenant)) and count >= cap)
    return Told(
        me=own,
        settings=settings,
        grants=tuple([Grant(str(one), fence, cost, bool(back)) for one, fence, cost, back in member.get("l", ())]),
        alone=bool(member.get("a")),
        counts=any("c" in one for one in members.values()),
        recent=tuple([(tenant, tag) for tenant, (number, tag) in state["recent"].items() if number > known]),
        seen=state["number"],
        virtual={int(level): virtual for level, virtual in state["virtual"].items()},
        full=full,
        outranks=_outranks(state, own),
        members=tuple(
            [
                MemberView(name, one.get("o", ""), one.get("p", 0), _slots(one), one.get("q", 0))
                for name, one in members.items()
            ]
        ),
    )


def _outranks(state: _State, member: str) -> float:
    """See `Told.outranks`."""
    by_priority = state["kind"] == "priority" or "levels" in state
    ranks = [
        math.inf if want[_RETURNING] else want[_PRIORITY]
        for name, one in state["members"].items()
        if name != member
        for want in one.get("w", ())
        if by_priority or want[_RETURNING]
    ]
    return max(ranks, default=-math.inf)


def _rounded(number: float) -> float:
    """Six digits after the point are enough to compare tags, and keep the state small."""
    return _short(round(number, 6))


def _short(number: float) -> float:
    """The same number, without a point if it is whole: `1` is shorter than `1.0` in the state."""
    return int(number) if -1e15 < number < 1e15 and number % 1 == 0 else number
