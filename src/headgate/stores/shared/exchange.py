"""Admission to a budget that several processes share: one pure function, the same for every store.

Each pool that shares a budget is a *member*. Its turn is an **exchange**: it says what it holds, what it wants and how
much is queued there, and is told what it was granted. `exchange` reads the state that all members share, does all of
that, and says whom to wake. One row of a store holds the state, so exchanges have one order, and in that order these
hold after each of them:

- What the members hold, together with what they were granted and do not know of yet, is at most the limit. (It is more
  only while a limit that was lowered is reached by ends.)
- Slots belong to (member, grant, tenant). A message names all slots that its sender holds; it does not add or subtract.
  So a message that is repeated, because its answer was lost, changes nothing: the same `seq` gives the same grants.
- What a member that is gone held is free, and its late messages are refused (`Reply.lost`).
- If the state was lost, nothing is granted until the members that live have said what they hold.
- A grant that its member has not been told of may be taken back. That is done when it lies there for a second and
  others want it: a stopped process keeps what it holds, and gets no more.

**Order.** A member announces only its first few tasks: one entry for each task with `fifo`, `lifo` and `priority`, one
for each tenant where tenants count. The entries of all members are merged by one key, so nobody gains by having many
tasks or many processes. The fair strategies go by start-time fair queueing: the tenant with the smallest tag is next,
and its tag grows by cost / weight. The tags of a hundred thousand tenants would not fit into a small state: each member
keeps those of the tenants it has queued, and the state lists only the newest changes (`recent`), which every reply
passes on. A member that is about to miss some is woken in time.

**Alone.** A member that is told that nobody else waits gives its slots to its next tasks without asking, until it is
woken.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from headgate.core.shared_state import Outcome, Seen
from headgate.errors import StoreFormatTooNew, StoreWriteFailed

FORMAT: Final = 1
RECENT: Final = 24
"""How many of the newest changes of tags the state lists."""
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

    def weight(self, tenant: str) -> float:
        """The weight of a tenant."""
        return 1.0 if self.weights is None else self.weights.get(tenant, 1.0)

    def cap(self, tenant: str) -> int | None:
        """How many slots this tenant may hold; None: as many as there are."""
        return self.caps.get(tenant) if isinstance(self.caps, Mapping) else self.caps

    @property
    def by_tenant(self) -> bool:
        """Do slots belong to tenants? Otherwise the tenant of a want is not looked at."""
        return self.kind in FAIR or self.caps is not None


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


class Message(NamedTuple):
    """What a member says. Its wants replace those of its message before."""

    member: str
    """The id of the sender; "" if it joins, and takes the id that it has now."""
    seq: int
    """Grows by one with each message of this member; a repeated one has the same."""
    settings: Settings
    """What this pool was made with, or what all members had when it last heard. It counts if it is the first."""
    held: Mapping[str, int] = {}
    """How many slots it uses, by tenant."""
    wants: Sequence[Want] = ()
    queued: int = 0
    """How many tasks are queued there, also those that are not announced."""
    blocked: bool = False
    """Does somebody there wait until fewer tasks are queued in all members together?"""
    refunds: Sequence[tuple[str, float]] = ()
    """Tenants and costs of grants that came to nothing: they are not charged."""
    seen: int = 0
    """The number of the newest change of a tag that it knows of."""
    host: str = ""
    pid: int = 0
    limit: int | None = None
    """Set this limit, for all members."""
    caps: int | Mapping[str, int] | None = None
    sets_caps: bool = False
    """Set these caps, for all members."""
    leaves: bool = False
    """It takes part no longer."""


class MemberView(NamedTuple):
    """What is known of one member, for snapshots."""

    id: str
    host: str
    pid: int
    held: int
    queued: int


class Reply(NamedTuple):
    """What a member is told."""

    lost: bool = False
    """The member is gone: what it held belongs to others. It takes part again under its new id."""
    member: str = ""
    """The id of the member that is answered."""
    now: float = 0.0
    ahead: float | None = None
    """See `Seen.ahead`."""
    settings: Settings | None = None
    grants: tuple[Grant, ...] = ()
    alone: bool = False
    """Nobody else waits: freed slots may be used again without asking."""
    recent: tuple[tuple[str, float], ...] = ()
    """Tags that have changed since `Message.seen`, oldest first."""
    seen: int = 0
    virtual: float = 0.0
    full: frozenset[str] = frozenset()
    """Tenants that are at their caps."""
    members: tuple[MemberView, ...] = ()


class _Member:
    """One member, as the state has it."""

    __slots__ = ("alone", "blocked", "held", "host", "last", "new", "pid", "queued", "seen", "seq", "wants")

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.seq = int(entry.get("s", 0))
        self.held = Counter({str(tenant): int(count) for tenant, count in entry.get("h", {}).items()})
        self.last = [_grant_of(one) for one in entry.get("l", ())]  # told by the newest reply
        self.new = [(_grant_of(one), float(at)) for *one, at in entry.get("n", ())]  # not told yet
        self.wants = [_want_of(one) for one in entry.get("w", ())]
        self.queued = int(entry.get("q", 0))
        self.seen = int(entry.get("k", 0))
        self.alone = bool(entry.get("a", 0))
        self.blocked = bool(entry.get("b", 0))
        self.host = str(entry.get("o", ""))
        self.pid = int(entry.get("p", 0))

    def entry(self) -> dict[str, Any]:
        """Describe the member in values that JSON knows, without what is empty."""
        full = {
            "s": self.seq,
            "h": {tenant: count for tenant, count in self.held.items() if count > 0},
            "l": [_short(grant) for grant in self.last],
            "n": [[*_short(grant), round(at, 3)] for grant, at in self.new],
            "w": [_entry_of(want) for want in self.wants if want.tasks > 0],
            "q": self.queued,
            "k": self.seen,
            "a": int(self.alone),
            "b": int(self.blocked),
            "o": self.host,
            "p": self.pid,
        }
        return {name: value for name, value in full.items() if value}

    def slots(self) -> Counter[str]:
        """The slots that it holds or may take, by tenant."""
        count = Counter(self.held)
        count.update(grant.tenant for grant in self.last)
        count.update(grant.tenant for grant, _ in self.new)
        return count

    def waits(self) -> bool:
        """Does it want more than it was granted, or wait until others have fewer tasks queued?"""
        return self.blocked or any(want.tasks > 0 for want in self.wants)


class _State:
    """The state of one budget, read from its text."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.number = 0  # of the newest grant or change of a tag
        self.virtual = 0.0
        self.recent: list[tuple[int, str, float]] = []
        self.members: dict[str, _Member] = {}

    @classmethod
    def read(cls, text: str | None, settings: Settings) -> _State:
        if text is None:
            return cls(settings)
        try:
            found = json.loads(text)
            version = found["f"]
            if isinstance(version, int) and version > FORMAT:
                raise StoreFormatTooNew(f"a shared budget has the format {version}, and this release knows {FORMAT}")
            caps = found.get("caps")
            weights = found.get("weights")
            state = cls(
                Settings(
                    max(1, int(found["limit"])),
                    str(found["kind"]),
                    None if weights is None else {str(name): float(weight) for name, weight in weights.items()},
                    caps and {str(name): int(cap) for name, cap in caps.items()} if isinstance(caps, dict) else caps,
                )
            )
            state.number, state.virtual = int(found["number"]), float(found["virtual"])
            state.recent = [(int(number), str(tenant), float(tag)) for number, tenant, tag in found["recent"]]
            state.members = {str(name): _Member(entry) for name, entry in found["members"].items()}
        except StoreFormatTooNew:
            raise
        except Exception:
            raise StoreWriteFailed(
                "the state of a shared budget cannot be read: it was not written by headgate, or it was damaged",
                remedy="Delete that row of the store (for SQLite: the files beside its path) while no pool uses it.",
            ) from None
        return state

    def text(self) -> str:
        settings = self.settings
        found: dict[str, Any] = {
            "f": FORMAT,
            "limit": settings.limit,
            "kind": settings.kind,
            "number": self.number,
            "virtual": _rounded(self.virtual),
            "recent": self.recent,
            "members": {name: member.entry() for name, member in self.members.items()},
        }
        if settings.weights is not None:
            found["weights"] = settings.weights
        if settings.caps is not None:
            found["caps"] = settings.caps
        return json.dumps(found, separators=(",", ":"))

    def note_tag(self, tenant: str, tag: float) -> None:
        """Remember a changed tag, here and in every announcement."""
        self.number += 1
        self.recent.append((self.number, tenant, _rounded(tag)))
        del self.recent[:-RECENT]
        for member in self.members.values():
            member.wants = [want._replace(tag=tag) if want.tenant == tenant else want for want in member.wants]

    def tag_of(self, tenant: str) -> float:
        """The newest tag of a tenant that the state knows; virtual time if it knows none."""
        for _, known, tag in reversed(self.recent):
            if known == tenant:
                return tag
        tags = [want.tag for one in self.members.values() for want in one.wants if want.tenant == tenant]
        return max(tags, default=self.virtual)


def exchange(text: str | None, message: Message, seen: Seen) -> Outcome:
    """Take in what one member says, grant what is free to whoever is next, and answer.

    Raises StoreFormatTooNew or StoreWriteFailed if the text is not one of ours.
    """
    joins = not message.member
    if joins:
        message = message._replace(member=seen.member)
    if message.member != seen.member or seen.is_gone(message.member):
        return Outcome(None, Reply(lost=True))
    state = _State.read(text, message.settings)
    if joins:
        state.members.pop(message.member, None)  # of a pool that was made before it, and never closed
    for name in [name for name in state.members if name != message.member and seen.is_gone(name)]:
        del state.members[name]
    member = state.members.get(message.member)
    if member is not None and message.seq <= member.seq:  # said again, because the answer was lost
        return Outcome(None, _reply(state, member, message, seen))
    if member is None:
        if not state.members:  # nobody is there whose settings could stand
            state.settings = message.settings
        member = state.members[message.member] = _Member({})
    queued = sum(one.queued for one in state.members.values())
    _apply(state, member, message)
    if message.leaves:
        del state.members[message.member]
    _take_back(state, message.member, seen.now)
    unheard = {name for name in seen.unheard if name not in state.members and not seen.is_gone(name)}
    woken = unheard or _grant(state, seen.now)
    if sum(one.queued for one in state.members.values()) < queued:
        woken |= {name for name, one in state.members.items() if one.blocked}
    if not message.leaves:
        member.last += [grant for grant, _ in member.new]
        member.new = []
        others = any(other.waits() for name, other in state.members.items() if name != message.member)
        member.alone = not others and not unheard
    woken |= _contended(state, message.member) | _behind(state)
    woken.discard(message.member)
    return Outcome(state.text(), _reply(state, member, message, seen), sorted(woken))


def _apply(state: _State, member: _Member, message: Message) -> None:
    """Take over what a member says of itself."""
    settings = state.settings
    if message.limit is not None:
        settings = settings._replace(limit=message.limit)
    if message.sets_caps:
        settings = settings._replace(caps=message.caps)
    state.settings = settings
    member.seq = message.seq
    member.held = Counter({tenant: count for tenant, count in message.held.items() if count > 0})
    member.last = []  # it knows of them: what it uses of them is in `held`
    member.queued, member.seen, member.blocked = message.queued, message.seen, message.blocked
    member.host, member.pid = message.host, message.pid
    changed = {tenant: tag for number, tenant, tag in state.recent if number > message.seen}
    granted = Counter((grant.tenant, grant.returning) for grant, _ in member.new)
    member.wants = []
    for want in message.wants[:MOST_WANTS]:
        # What was granted and not told of yet is among what it wants.
        already = min(want.tasks, granted[want.tenant, want.returning])
        granted[want.tenant, want.returning] -= already
        if want.tasks > already:
            tag = changed.get(want.tenant, want.tag)
            member.wants.append(want._replace(tag=tag, tasks=want.tasks - already))
    for tenant, cost in message.refunds:
        if settings.kind in FAIR:
            state.note_tag(tenant, state.tag_of(tenant) - cost / settings.weight(tenant))


def _take_back(state: _State, sender: str, now: float) -> None:
    """Take back grants that lay unread for too long while others want them.

    Their members want nothing until they speak again: they may be stopped.
    """
    for name, member in state.members.items():
        old = [grant for grant, at in member.new if now - at >= PATIENCE and name != sender]
        if old and any(other.waits() for another, other in state.members.items() if another != name):
            member.new = [(grant, at) for grant, at in member.new if now - at < PATIENCE]
            member.wants = []
            if state.settings.kind in FAIR:
                for grant in old:
                    cost = grant.cost / state.settings.weight(grant.tenant)
                    state.note_tag(grant.tenant, state.tag_of(grant.tenant) - cost)


class _Candidate(NamedTuple):
    """One announced entry, in the order in which entries are served."""

    rank: tuple[float, float, float]
    member: str
    place: int
    """Where it stands among the wants of its member."""


def _grant(state: _State, now: float) -> set[str]:
    """Grant what is free, the first of all first. Returns the members that were granted something."""
    used = Counter[str]()
    for member in state.members.values():
        used.update(member.slots())
    free = state.settings.limit - used.total()
    if free <= 0:
        return set()
    heap = [
        _Candidate(_rank(state, want), name, place)
        for name, member in state.members.items()
        for place, want in enumerate(member.wants)
    ]
    heapq.heapify(heap)
    woken: set[str] = set()
    while heap and free > 0:
        rank, name, place = heapq.heappop(heap)
        member = state.members[name]
        want = member.wants[place]
        current = _rank(state, want)
        if current != rank:  # its tenant was served meanwhile, through another entry
            heapq.heappush(heap, _Candidate(current, name, place))
            continue
        cap = state.settings.cap(want.tenant)
        if want.tasks <= 0 or (cap is not None and used[want.tenant] >= cap):
            continue
        _charge(state, member, place)
        grant = Grant(want.tenant, state.number, want.cost, want.returning)
        member.new.append((grant, now))
        used[want.tenant] += 1
        free -= 1
        woken.add(name)
        heapq.heappush(heap, _Candidate(_rank(state, member.wants[place]), name, place))
    return woken


def _charge(state: _State, member: _Member, place: int) -> None:
    """Count one grant of an entry: one task less, and its tenant pays."""
    want = member.wants[place]
    member.queued = max(0, member.queued - (not want.returning))
    # When the next one of the entry joined the queue is not known: it stands behind those who came when this one did.
    member.wants[place] = want._replace(tasks=want.tasks - 1, at=want.at + _LATER)
    if state.settings.kind in FAIR and not want.returning:
        start = max(state.virtual, want.tag)
        state.virtual = start
        state.note_tag(want.tenant, start + want.cost / state.settings.weight(want.tenant))
    else:
        state.number += 1


_LATER: Final = 1e-3


def _rank(state: _State, want: Want) -> tuple[float, float, float]:
    """By what entries are compared: the smallest is next."""
    kind = state.settings.kind
    if want.returning:
        return (-1.0, 0.0, want.at)
    if kind in FAIR:
        return (0.0, max(state.virtual, want.tag), want.at)
    if kind == "priority":
        return (0.0, -float(want.priority), want.at)
    return (0.0, 0.0, -want.at if kind == "lifo" else want.at)


def _contended(state: _State, sender: str) -> set[str]:
    """The members that were told that nobody else waits, where that is not true any more."""
    waiting = [name for name, member in state.members.items() if member.waits()]
    woken: set[str] = set()
    for name, member in state.members.items():
        if name != sender and member.alone and any(other != name for other in waiting):
            member.alone = False
            woken.add(name)
    return woken


def _behind(state: _State) -> set[str]:
    """The members that have tasks queued and would soon miss changes of tags."""
    if len(state.recent) < RECENT:
        return set()
    middle = state.recent[RECENT // 2][0]
    return {name for name, member in state.members.items() if member.queued and member.seen < middle}


def _reply(state: _State, member: _Member, message: Message, seen: Seen) -> Reply:
    settings = state.settings
    held = {name: one.slots() for name, one in state.members.items()}
    full: frozenset[str] = frozenset()
    if settings.caps is not None:
        used = sum(held.values(), Counter[str]())
        full = frozenset(tenant for tenant, count in used.items() if (cap := settings.cap(tenant)) and count >= cap)
    views = (MemberView(name, one.host, one.pid, held[name].total(), one.queued) for name, one in state.members.items())
    return Reply(
        member=message.member,
        now=seen.now,
        ahead=seen.ahead,
        settings=settings,
        grants=tuple(member.last),
        alone=member.alone,
        recent=tuple((tenant, tag) for number, tenant, tag in state.recent if number > message.seen),
        seen=state.number,
        virtual=state.virtual,
        full=full,
        members=tuple(views),
    )


# -- short forms ------------------------------------------------------------------------------------------------------


def _rounded(number: float) -> float:
    """Six digits after the point are enough to compare tags, and keep the state small."""
    return round(number, 6)


def _entry_of(want: Want) -> list[Any]:
    short = [want.tenant, want.tasks, round(want.at, 4), _rounded(want.tag)]
    if (want.priority, want.cost, want.returning) != (0, 1.0, False):
        short += [want.priority, want.cost, int(want.returning)]
    return short


def _want_of(entry: Sequence[Any]) -> Want:
    tenant, tasks, at, tag, *more = entry
    priority, cost, returning = more or (0, 1.0, False)
    return Want(str(tenant), int(tasks), float(at), float(tag), int(priority), float(cost), bool(returning))


def _short(grant: Grant) -> list[Any]:
    return [grant.tenant, grant.fence, grant.cost, int(grant.returning)]


def _grant_of(entry: Iterable[Any]) -> Grant:
    tenant, fence, cost, returning = entry
    return Grant(str(tenant), int(fence), float(cost), bool(returning))
