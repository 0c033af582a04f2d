"""Every live pool of this process: its kind, its name, and its state.

Metrics, dashboards and commands read this list instead of asking users to hand over their pools. A pool enters itself:
a ResourcePool and a TaskPool when they are made, a WorkerPool when its block is entered. A pool leaves when it is
closed, because a closed pool is not live, or when nothing refers to it any more: the registry holds pools weakly. Names
need not be unique here. A forked child inherits the entries together with the pools.

A pool that nobody looks at pays for one entry in a dict. What there is to see is computed when somebody asks.

There is no lock. Each change is one operation on a dict, which is atomic, and a reader copies the dict first. So pools
may be made in any thread, the garbage collector may take one away in the middle of a call, and a fork leaves nothing
locked.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar

from headgate._version import __version__
from headgate.core.clock import clock
from headgate.core.redaction import log_exception
from headgate.core.views import Kind, PoolLook, Unread

if TYPE_CHECKING:
    import asyncio

SCHEMA: Final = 1
"""The version of what `snapshot` returns. It grows when a field gets another meaning or goes."""
STARTED_AT: Final = clock.wall()
"""When this process began to use pools, in Unix seconds."""
_ROWS: Final = 1000
_TRIES: Final = 5
_WIDEST: Final = 100

P = TypeVar("P")


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TypeError("a snapshot is frozen: it tells how things were")


class Frozen(dict[str, Any]):
    """A dict that cannot be changed. `json.dumps` takes it as it is; the sequences in it are tuples."""

    __slots__ = ()

    if not TYPE_CHECKING:  # a checker is told by `snapshot` that there is nothing to change
        __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return frozen, (dict(self),)


def frozen(value: Any) -> Any:
    """Return a copy of dicts and lists that cannot be changed."""
    if isinstance(value, Mapping):
        return Frozen({str(key): frozen(item) for key, item in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, slots=True)
class LivePool:
    """One pool that was live when the list was read. It does not keep the pool alive."""

    kind: Kind
    name: str
    _entry: _Registered = field(repr=False, hash=False)

    def snapshot(self) -> Any:
        """Return the state of the pool now, without values of resources, or None if the pool is gone.

        It is what `ResourcePool.snapshot()`, `TaskPool.snapshot()` or `WorkerPool.workers()` returns.
        """
        pool = self._entry.pool()
        return None if pool is None else self._entry.snapshot(pool)

    @property
    def pool(self) -> Any:
        """The pool itself, or None if it is gone."""
        return self._entry.pool()

    @property
    def number(self) -> int:
        """The number of the entry: unlike its name, no other pool of this process ever has it."""
        return self._entry.number

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that the pool belongs to; None: it has none, or it is gone, or any thread may use it."""
        pool = self._entry.pool()
        return None if pool is None or self._entry.home is None else self._entry.home(pool)

    def view(self, rows: int = _ROWS) -> PoolLook | None:
        """Return the state of the pool, with at most so many rows in each list, or None if it is gone.

        The lists of a TaskPool are exact only on its own event loop.
        """
        pool = self._entry.pool()
        if pool is None or self._entry.view is None:
            return None
        return PoolLook(self.kind, self.name, self.number, self._read(self._entry.view, pool, rows))

    def _read(self, view: Callable[[Any, int], Any], pool: Any, rows: int) -> Any:
        for _ in range(_TRIES):
            try:
                return view(pool, rows)
            except RuntimeError as error:  # perhaps it changed while another thread looked at it
                if "during iteration" not in str(error):
                    return Unread(broken=self._entry.broken(self.name, error))
            except Exception as error:  # a view runs code of others: engines, discoveries, names of tenants
                return Unread(broken=self._entry.broken(self.name, error))
        return Unread(changing=True)


class _Registered(NamedTuple):
    kind: Kind
    pool: weakref.ref[Any]
    snapshot: Callable[[Any], Any]
    spare_name: str  # for a pool that has no name of its own
    view: Callable[[Any, int], Any] | None
    home: Callable[[Any], asyncio.AbstractEventLoop | None] | None
    number: int
    logged: list[str]  # what kept the pool from being looked at, once it was logged

    def broken(self, name: str, error: Exception) -> str:
        """Return what is shown of an error of `view`, and log the first one of this pool."""
        if not self.logged:
            self.logged.append(type(error).__name__)
            log_exception("headgate.registry", "the pool %.100r of %s cannot be shown", name, self.kind)
        return type(error).__name__[:_WIDEST]


_live: dict[int, _Registered] = {}  # by the id of the pool, oldest first
_numbers = itertools.count(1)
_entries = itertools.count(1)
_first: list[Callable[[], object]] = []
_leaving: list[Callable[[LivePool], object]] = []


def register(
    pool: P,
    kind: Kind,
    snapshot: Callable[[P], Any],
    *,
    view: Callable[[P, int], Any] | None = None,
    home: Callable[[P], asyncio.AbstractEventLoop | None] | None = None,
) -> None:
    """Add a pool whose state ``snapshot(pool)`` returns, until `unregister` or until nothing else refers to it.

    ``view(pool, rows)`` tells the same as a frozen dataclass, of values that JSON knows and of rows; ``home(pool)`` is
    the event loop of the pool. A pool without a `name` is listed as "<kind>-<number>".
    """
    key, forget = id(pool), _live.pop
    weak = weakref.ref(pool, lambda _: forget(key, None))
    spare = "" if getattr(pool, "name", "") else f"{kind}-{next(_numbers)}"
    _live[key] = _Registered(kind, weak, snapshot, spare, view, home, next(_entries), [])
    while _first:
        try:
            callback = _first.pop()
        except IndexError:  # another thread has registered a pool, and taken it
            break
        callback()


def unregister(pool: object) -> None:
    """Remove a pool that is closed. One that is not registered is left alone."""
    known = _live.pop(id(pool), None)
    if known is not None:
        for callback in tuple(_leaving):
            callback(LivePool(known.kind, getattr(pool, "name", "") or known.spare_name, known))


def on_first(callback: Callable[[], object]) -> None:
    """Call this once, when the next pool is registered."""
    _first.append(callback)


def on_leave(callback: Callable[[LivePool], object]) -> Callable[[], None]:
    """Call this with each pool that is closed from now on, in the thread that closes it. Returns ``stop``."""
    _leaving.append(callback)
    return lambda: _leaving.remove(callback) if callback in _leaving else None


def pools(kind: Kind | None = None) -> list[LivePool]:
    """Return the live pools, or those of one kind, oldest first."""
    found = []
    for known in _live.copy().values():
        pool = known.pool()
        if pool is not None and kind in (None, known.kind):
            found.append(LivePool(known.kind, getattr(pool, "name", "") or known.spare_name, known))
    return found


def snapshot(rows: int = _ROWS) -> Frozen:
    """Return the state of every live pool: frozen, and values that JSON knows. No value of a resource is in it.

    `rows`: how many tenants, tasks, resources or workers are listed at most; the counts are always of all.
    """
    seen = [look.to_dict() for look in (one.view(rows) for one in pools()) if look is not None]
    about = {"schema": SCHEMA, "version": __version__, "pid": os.getpid(), "at": clock.wall()}
    whole: Frozen = frozen({**about, "pools": seen})
    return whole
