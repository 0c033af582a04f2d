"""How many calls of one client, and of all, execute on a worker at the same time. Pure.

What exceeds a limit waits. The calls of one client begin in the order in which they came. Clients take turns, so one
that sends many calls delays only its own.

A call that waits for calls that it made itself does not count, because those may wait for the very place that it holds.
It continues without asking, so there may be more than the limit for a while, and nothing begins then. A generator
between two steps does not count either: nobody knows when its consumer asks for the next item, and the consumer may be
waiting for a call that waits here. Its next step asks for a place again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Concurrency(Generic[Item]):
    """The limits of a worker, and what waits for them. An item is a call, or a step of a generator."""

    __slots__ = ("_executing", "_per_client", "_queues", "_total", "_turns", "executing", "waiting")

    def __init__(self, per_client: int | None = None, total: int | None = None) -> None:
        self.executing: int = 0
        """Number of calls that count, of all clients."""
        self.waiting: int = 0
        """Number of items that wait."""
        self._per_client = per_client
        self._total = total
        self._executing: dict[str, int] = {}
        self._queues: dict[str, OrderedDict[Hashable, Item]] = {}
        self._turns: OrderedDict[str, None] = OrderedDict()  # clients with a queue, but for some at their limit

    @property
    def ready(self) -> bool:
        """Can `next` return something, as far as that is known without looking?"""
        return bool(self._turns) and (self._total is None or self.executing < self._total)

    def add(self, client: str, key: Hashable, item: Item) -> None:
        """Put an item of a client at the end of its queue; `key` names it."""
        self._queues.setdefault(client, OrderedDict())[key] = item
        self.waiting += 1
        self._give_turn(client)

    def enter(self, client: str) -> bool:
        """Count a call of a client at once, if there is room and nothing waits for it."""
        free = self._total is None or self.executing < self._total
        if free and not self._turns and client not in self._queues and self._has_room(client):
            self.begins(client)
            return True
        return False

    def next(self) -> Item | None:
        """Return the next item that may begin, which counts from now on. None: there is none."""
        while self.ready:
            client, _ = self._turns.popitem(last=False)
            if not self._has_room(client):
                continue  # until one of its calls has ended
            _, item = self._queues[client].popitem(last=False)
            self.waiting -= 1
            self.begins(client)
            self._tidy(client)
            self._give_turn(client)
            return item
        return None

    def begins(self, client: str) -> None:
        """Count one more call of a client, whether or not there is room."""
        self.executing += 1
        self._executing[client] = self._executing.get(client, 0) + 1

    def ends(self, client: str) -> None:
        """Count one call of a client less."""
        self.executing -= 1
        left = self._executing[client] - 1
        if left:
            self._executing[client] = left
        else:
            del self._executing[client]
        self._give_turn(client)

    def withdraw(self, client: str, key: Hashable) -> Item | None:
        """Take out an item that waits. None: it does not."""
        queue = self._queues.get(client)
        item = None if queue is None else queue.pop(key, None)
        if item is not None:
            self.waiting -= 1
            self._tidy(client)
        return item

    def items(self) -> list[tuple[str, Hashable, Item]]:
        """Return everything that waits, with the client and the key of each."""
        return [(client, key, item) for client, queue in self._queues.items() for key, item in queue.items()]

    def _has_room(self, client: str) -> bool:
        return self._per_client is None or self._executing.get(client, 0) < self._per_client

    def _give_turn(self, client: str) -> None:
        if client in self._queues and self._has_room(client):
            self._turns.setdefault(client, None)

    def _tidy(self, client: str) -> None:
        if not self._queues[client]:
            del self._queues[client]
            self._turns.pop(client, None)
