"""Warns of results that a store cannot keep, once for each type."""

from __future__ import annotations

import logging

from headgate.stores.codec import REMEDY, Codec, name_of, why_opaque

_log = logging.getLogger("headgate.stores")


class Losses:
    """The types of results that one journal, or one pool, could not keep."""

    __slots__ = ("_place", "_types")

    def __init__(self, place: object) -> None:
        self._place = place
        self._types: set[type] = set()

    def tell(self, value: object, codec: Codec = "json") -> None:
        """Warn of this value, unless one of its type was warned of before."""
        kind = type(value)
        if kind not in self._types:
            self._types.add(kind)
            _log.warning(
                "%s: a result of type %s is not kept: %s. Awaited after a restart, or in another process, it raises "
                "TaskFailed; on_opaque= of the pool says what becomes of its idempotency key. %s",
                self._place,
                name_of(kind),
                why_opaque(value, codec=codec),
                REMEDY,
            )
