"""Weighted rendezvous hashing: the order of resources for an affinity. Pure, and the same in every process.

Affinity and resource id are hashed together into a *distance*, and the nearest resource is the favourite. A distance
depends on these two alone, so whoever comes takes only the affinities it is nearest to, and whoever goes leaves only
its own to others. Distances are arrival times of a race (exponential, divided by the weight), so that shares are in
proportion to weights.

Measuring all distances costs as much as there are resources. It is done once for an affinity: the nearest few are
remembered, for the affinities used last. When members come and go, what is remembered is corrected by these members
alone, and when it is next asked for.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from headgate.core.checks import Affinity

FAVOURITES = 16
"""How many are remembered for an affinity, until it turns out to need more."""
REMEMBERED = 1 << 16
"""How many names are remembered for all affinities together: some 8 MB."""

Near = tuple[float, str]

_PRIME = (1 << 61) - 1


def stable_text(affinity: Affinity) -> bytes:
    """What is hashed: the same in every process and version, and different for 1, "1", b"1" and (1,)."""
    if isinstance(affinity, str):
        return b"s" + str.encode(affinity, "utf-8", "surrogatepass")
    if isinstance(affinity, bytes):
        return b"b" + affinity
    if isinstance(affinity, tuple):
        parts = [stable_text(part) for part in affinity]
        return b"t" + b"".join(b"%d:%b" % (len(part), part) for part in parts)
    return b"i%x" % affinity  # in decimal, Python refuses the longest


class Rendezvous:
    """Members of a pool by id and weight, and the nearest ones of each affinity."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[int, float]] = {}  # its hash and its weight, by id
        self._changes: list[str] = []  # ids that came or went since the oldest ranking was made
        self._rankings: OrderedDict[bytes, _Ranking] = OrderedDict()
        self._remembered = 0

    def admit(self, name: str, weight: float) -> None:
        """Add a member with this weight."""
        self._members[name] = _hashed(b"r" + name.encode("utf-8", "surrogatepass")) % _PRIME, weight
        self._changed(name)

    def dismiss(self, name: str) -> None:
        """Remove a member, if it is one."""
        if self._members.pop(name, None) is not None:
            self._changed(name)

    def favourites(self, text: bytes) -> tuple[list[Near], bool]:
        """The nearest members, each with its distance, and whether these are all there are."""
        ranking = self._rankings.get(text)
        if ranking is None:
            ranking = self._rankings[text] = _Ranking(text)
            self._survey(ranking, FAVOURITES)
        else:
            self._rankings.move_to_end(text)
            if ranking.seen != len(self._changes):
                self._correct(ranking)
        return ranking.nearest, ranking.is_whole

    def more_favourites(self, text: bytes) -> tuple[list[Near], bool]:
        """The same, and several times as many: those known were not enough."""
        ranking = self._rankings[text]
        self._survey(ranking, 4 * max(FAVOURITES, len(ranking.nearest)))
        return ranking.nearest, ranking.is_whole

    def nearest(self, text: bytes, names: Iterable[str]) -> str | None:
        """The nearest of these members to an affinity."""
        return min(self._measured(_Ranking(text), names), default=(0.0, None))[1]

    def _survey(self, ranking: _Ranking, depth: int) -> None:
        """Compute the distances of all members."""
        everyone = self._measured(ranking, self._members)
        ranking.seen = len(self._changes)
        ranking.is_whole = len(everyone) <= 2 * depth
        self._note(ranking, sorted(everyone) if ranking.is_whole else heapq.nsmallest(depth, everyone))
        if not ranking.is_whole:
            ranking.horizon = ranking.nearest[-1][0]

    def _correct(self, ranking: _Ranking) -> None:
        """Measure those that came or went since it was last asked for."""
        changed = set(self._changes[ranking.seen :])
        kept = [one for one in ranking.nearest if one[1] not in changed]
        came = self._measured(ranking, changed & self._members.keys())
        if not ranking.is_whole:
            came = [one for one in came if one[0] <= ranking.horizon]
        ranking.seen = len(self._changes)
        self._note(ranking, sorted(kept + came))
        size = len(ranking.nearest)
        if (size > 4 * FAVOURITES) if ranking.is_whole else (size < max(1, FAVOURITES // 2)):
            self._survey(ranking, FAVOURITES)

    def _measured(self, ranking: _Ranking, names: Iterable[str]) -> list[Near]:
        # A random line through the members' hashes, modulo a prime: as fair as hashing each pair, at a tenth of it.
        members, log, factor, shift = self._members, math.log, ranking.factor, ranking.shift
        found = []
        for name in names:
            place, weight = members[name]
            found.append((-log(((place * factor + shift) % _PRIME + 1) / _PRIME) / weight, name))
        return found

    def _note(self, ranking: _Ranking, nearest: list[Near]) -> None:
        self._remembered += len(nearest) - len(ranking.nearest)
        ranking.nearest = nearest
        while self._remembered > REMEMBERED and len(self._rankings) > 1:
            _, oldest = self._rankings.popitem(last=False)
            self._remembered -= len(oldest.nearest)

    def _changed(self, name: str) -> None:
        if not self._rankings:
            return
        self._changes.append(name)
        if len(self._changes) > len(self._members) + 64:
            self._changes.clear()  # to measure everybody again is no more work than to go through these
            self._rankings.clear()
            self._remembered = 0


class _Ranking:
    """The nearest members of one affinity: all of them, or all that are no further than `horizon`."""

    __slots__ = ("factor", "horizon", "is_whole", "nearest", "seen", "shift")

    def __init__(self, text: bytes) -> None:
        self.factor, self.shift = divmod(_hashed(text), 1 << 64)
        self.factor = self.factor % (_PRIME - 1) + 1
        self.is_whole = True
        self.horizon = 0.0
        self.nearest: list[Near] = []
        self.seen = 0  # the changes that are accounted for


def _hashed(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=16).digest(), "big")
