"""Takes keys out of what an upstream writes: providers repeat the key, or its beginning, when they refuse it.

An answer that is no error passes as it is, byte by byte. An error is read as a whole, searched, and passed on with
`[redacted]` in place of what looks like a key of the pool.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from html import unescape
from urllib.parse import unquote

from headgate.core.redaction import redact
from headgate.integrations.keys_proxy.headers import joined
from headgate.integrations.keys_proxy.refusals import Headers

LONGEST = 1 << 20
"""Bytes of an error that are searched; a longer one is not passed on."""

_BEGINNING = 6
"""Characters of a key that give it away. Words of prose that begin like a key are hidden too."""
_END = 4
"""Characters at the end of a key that providers show after dots or asterisks."""
_FOLLOWS = r"(?:[\w*.\x80-\xff/+=-]|\\/|\\u00[0-9a-fA-F]{2}|%[0-9a-fA-F]{2}|&#x?[0-9a-fA-F]{1,4};)*"
_HIDDEN = "[redacted]"


class ErrorTexts:
    """Redacts errors; `keys` are the values of the pool."""

    def __init__(self, keys: Iterable[object]) -> None:
        self._parts = _parts(frozenset(key for key in keys if isinstance(key, str)))

    def text(self, text: str) -> str:
        """Return a text without keys."""
        text = redact(text)
        return text if self._parts is None else self._parts.sub(_HIDDEN, text)

    def headers(self, headers: Headers) -> Headers:
        """Return the headers of an error without keys."""
        return _shown(headers, self.text)

    def body(self, body: bytes, headers: Headers) -> tuple[bytes, Headers] | None:
        """Return the body and the headers of an error without keys; None: it cannot be read, and must not pass."""
        plain = _decoded(body, joined(headers, b"content-encoding"))
        if plain is None:
            return None
        text = self.text(plain.decode("latin-1"))
        if any(self.text(reading) != reading for reading in _readings(text)):
            return None
        shown = text.encode("latin-1", "replace")
        if shown == plain:
            return body, headers
        kept = [pair for pair in headers if pair[0] not in _OF_THE_BODY]
        return shown, [*kept, (b"content-length", str(len(shown)).encode())]


def without_values(headers: Headers) -> Headers:
    """Return headers without whole keys: of an answer that is no error, in which words may begin as keys do."""
    return _shown(headers, redact)


def _shown(headers: Headers, hide: Callable[[str], str]) -> Headers:
    whole = b"\n".join([value for _, value in headers]).decode("latin-1")
    if hide(whole) == whole and all(hide(reading) == reading for reading in _readings(whole)):
        return headers
    return [(name, _shown_value(value.decode("latin-1"), hide).encode("latin-1", "replace")) for name, value in headers]


def _shown_value(value: str, hide: Callable[[str], str]) -> str:
    shown = hide(value)
    return shown if all(hide(reading) == reading for reading in _readings(shown)) else _HIDDEN


def _readings(text: str) -> Iterator[str]:
    """What a client may read in a text: UTF-16 and UTF-32 without their zeros, and each kind of escapes undone."""
    if "\0" in text:
        yield text.replace("\0", "")
    if "%" in text:
        yield unquote(text, "latin-1")
    if "&" in text:
        yield unescape(text)
    if "\\" in text:
        yield _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else found[2], text)


_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|([/\\\"]))")


_GZIP = b"\x1f\x8b"
_OF_THE_BODY = (b"content-encoding", b"content-length", b"content-md5", b"digest", b"content-digest", b"etag")


@lru_cache(8)
def _parts(keys: frozenset[str]) -> re.Pattern[str] | None:
    """What finds parts of keys: beginnings, with what follows (`sk-abcd****wxyz` is one word), and masked ends."""
    long = [key for key in keys if len(key) >= _BEGINNING]
    found = {re.escape(key[:_BEGINNING]) + _FOLLOWS for key in long}
    found |= {r"[*.\x80-\xff]{2,}" + re.escape(key[-_END:]) for key in long if len(key) >= 4 * _END}
    return re.compile("|".join(sorted(found))) if found else None


def _decoded(body: bytes, encoding: bytes) -> bytes | None:
    """The body as text; None if it is in an encoding that cannot be read here, or is too long."""
    name = encoding.strip().lower()
    if not body:
        return body
    if name in (b"", b"identity"):
        return None if body.startswith(_GZIP) else body
    if name not in (b"gzip", b"x-gzip", b"deflate"):
        return None
    for window in (47, -15):  # gzip or zlib by its header; deflate without one
        inflate = zlib.decompressobj(window)
        try:
            plain = inflate.decompress(body, LONGEST)
        except zlib.error:
            continue
        cut = inflate.unconsumed_tail or inflate.unused_data or not inflate.eof
        return None if cut or plain.startswith(_GZIP) else plain
    return None
