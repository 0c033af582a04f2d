"""Places that remember pools: the port, and the stores that come with headgate.

`MemoryStore` remembers as long as it lives, `JsonLinesStore` on the disk. `read_journal` looks into a journal that
somebody else writes.
"""

from headgate.stores.codec import Codec, Opaque, canonical, decode, encode
from headgate.stores.jsonl.reader import read_journal
from headgate.stores.jsonl.store import JsonLinesStore
from headgate.stores.memory import MemoryStore
from headgate.stores.port import Done, Entry, ErrorText, Journal, Store, StoredTask

__all__ = [
    "Codec",
    "Done",
    "Entry",
    "ErrorText",
    "Journal",
    "JsonLinesStore",
    "MemoryStore",
    "Opaque",
    "Store",
    "StoredTask",
    "canonical",
    "decode",
    "encode",
    "read_journal",
]
