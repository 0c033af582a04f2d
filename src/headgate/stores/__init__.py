"""Stores keep what happened to the tasks of a pool: the port, and the stores that come with headgate.

`MemoryStore` keeps it in memory, `JsonLinesStore` in files; `read_journal` reads a journal that another process writes.
`SqliteStore` and `PostgresStore` also share budgets and health among processes, of one machine and of several
(`headgate.sharing`). Imports `errors`, `core` and `sharing`. Begin with `port.Store`, the contract of every store.
"""

from headgate.core.lazy import lazy
from headgate.stores.codec import Codec, Opaque, canonical, decode, encode
from headgate.stores.jsonl.reader import read_journal
from headgate.stores.jsonl.store import JsonLinesStore
from headgate.stores.memory import MemoryStore
from headgate.stores.port import Done, Entry, ErrorText, Journal, Store, StoredTask

TYPE_CHECKING = False  # typing's own, without importing typing
if TYPE_CHECKING:
    from headgate.stores.postgres import PostgresStore
    from headgate.stores.sqlite import SqliteStore

__all__ = [
    "Codec",
    "Done",
    "Entry",
    "ErrorText",
    "Journal",
    "JsonLinesStore",
    "MemoryStore",
    "Opaque",
    "PostgresStore",
    "SqliteStore",
    "Store",
    "StoredTask",
    "canonical",
    "decode",
    "encode",
    "read_journal",
]

_SHARED = {
    "headgate.stores.postgres": ("PostgresStore",),
    "headgate.stores.sqlite": ("SqliteStore",),
}
_named = lazy(globals(), _SHARED)  # when they are used: every TaskPool imports this package

if not TYPE_CHECKING:  # a checker that sees this believes in every name

    def __getattr__(name):
        return _named(name)
