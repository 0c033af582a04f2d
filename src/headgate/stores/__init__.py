"""Stores keep what happened to the tasks of a pool: the port, and the stores that come with headgate.

`MemoryStore` keeps it in memory, `JsonLinesStore` in files; `read_journal` reads a journal that another process writes.
Imports `errors`, `core` and the values of `tasks`. Begin with `port.Store`, the contract that every store keeps.
"""

from headgate.stores.codec import Codec, Opaque, canonical, decode, encode
from headgate.stores.jsonl.reader import read_journal
from headgate.stores.jsonl.store import JsonLinesStore
from headgate.stores.memory import MemoryStore
from headgate.stores.port import Done, Entry, ErrorText, Journal, Store, StoredTask
from headgate.stores.shared.postgres import PostgresStore

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
    "Store",
    "StoredTask",
    "canonical",
    "decode",
    "encode",
    "read_journal",
]
