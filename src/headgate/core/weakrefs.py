"""An ordered list that does not keep its members alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class WeakList(Generic[T]):
    """Members in the order they came; those that nobody else holds any more are gone."""

    __slots__ = ("_references",)

    def __init__(self) -> None:
        self._references: tuple[weakref.ref[T], ...] = ()  # replaced, never changed: it may be walked meanwhile

    def append(self, member: T) -> None:
        """Add a member at the end."""
        self._references = (*self._references, weakref.ref(member))

    def remove(self, member: T) -> None:
        """Remove a member, if it is there."""
        self._references = tuple(reference for reference in self._references if reference() is not member)

    def prune(self) -> bool:
        """Forget members that are gone; True when there were any."""
        living = tuple(reference for reference in self._references if reference() is not None)
        lost = len(living) < len(self._references)
        self._references = living
        return lost

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            member = reference()
            if member is not None:
                yield member

    def __len__(self) -> int:
        return sum(reference() is not None for reference in self._references)
