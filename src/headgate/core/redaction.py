"""Taking the values of resources out of text before anybody sees it.

Events, log records, stories, journals and reprs of snapshots contain text that others wrote: messages of exceptions,
reasons of signals, tracebacks. Somebody may have put an API key there. Which key it was cannot be told from where the
text is made: a routine called inside `keys.run(...)` fails in another process, a snapshot is shown long after the call.
So the values of all resources of this process are known here, and whoever shows such text calls `redact`.

Calls with resources pay nothing for it: a value is learned when its resource joins a pool, or when it is assigned. Text
is searched only when it is shown, and when there are many values, by their first four characters.

A value is known as long as its resource lives. A long one is known longer, because text outlives resources: the last
10,000 of these are kept.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import fields, is_dataclass
from typing import Any, Final

__all__ = ["Redactor", "learn", "log_exception", "meet", "redact"]

_SHORTEST: Final = 4
"""What has fewer characters is no secret, and hiding it would make every text unreadable."""
_WORD: Final = 8
"""What has fewer is hidden only where it stands alone: "test" in "/test/", not in "latest"."""
_LONG: Final = 12
"""What has fewer is forgotten with its resource: it may be an ordinary word elsewhere."""
_LONGEST: Final = 20_000
_PARTS: Final = 200
_DEPTH: Final = 4
_PAST: Final = 10_000
_FEW: Final = 100
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]*")
_TELLING: Final = re.compile(
    r"key|token|secret|passw|pwd|auth|cred|cookie|signature|proxy|url|dsn|value", re.IGNORECASE
)


class Redactor:
    """Knows texts that must not be shown, and by what label each is replaced."""

    def __init__(self) -> None:
        self._lock: AbstractContextManager[bool] = (
            threading.RLock()
        )  # the collector may run a destructor, and that may make a pool
        self._labels: dict[str, str] = {}
        self._owners: dict[str, int] = {}  # how many living resources have it
        self._lengths: dict[str, tuple[int, ...]] = {}  # of the texts with these first four characters, longest first
        self._known: dict[int, _Owner] = {}  # by the id of the resource
        self._gone: deque[_Owner] = deque()  # resources that died, to be looked at when there is time
        self._past: OrderedDict[str, None] = OrderedDict()
        self._longest_first: tuple[str, ...] | None = ()

    def learn(self, label: str, value: object, owner: object) -> None:
        """Hide this value of `owner`, as long as that lives. What it had before is past."""
        texts: tuple[str, ...]
        if isinstance(value, str) and len(value) >= _SHORTEST and _PLAIN.fullmatch(value) and value not in label:
            texts = (value,)  # what most values are, without the steps of `_forms`
        else:
            texts = tuple(dict.fromkeys(text for text in _forms(value) if text not in label))
        with self._lock:
            self._settle()
            before = self._known.pop(id(owner), None)
            known = self._known[id(owner)] = _Owner(owner, self._gone.append)
            known.key, known.texts = id(owner), texts
            for text in texts:
                self._owners[text] = self._owners.get(text, 0) + 1
                self._add(text, label)
            if before is not None:
                self._retire(before.texts)

    def meet(self, label: str, value: object) -> None:
        """Hide this value, which came from another process with a copy of its resource."""
        if isinstance(value, str) and value in self._labels:
            return
        with self._lock:
            for text in _forms(value):
                if len(text) >= _LONG and text not in label:
                    self._add(text, label)
                    self._keep_past(text)

    def redact(self, text: str) -> str:
        """This text with ``<label>`` in place of every value."""
        if not self._labels or len(text) < _SHORTEST:
            return text
        return self._search(text) if len(self._labels) <= _FEW else self._scan(text)

    def _search(self, text: str) -> str:
        texts = self._longest_first
        if texts is None:
            with self._lock:
                texts = self._longest_first = tuple(sorted(self._labels, key=len, reverse=True))
        for secret in texts:
            if secret in text:
                label = self._labels.get(secret, "hidden")
                if len(secret) >= _WORD:
                    text = text.replace(secret, f"<{label}>")
                else:
                    alone = rf"(?<![^\W_]){re.escape(secret)}(?![^\W_])"
                    text = re.sub(alone, f"<{label}>".replace("\\", r"\\"), text)
        return text

    def _scan(self, text: str) -> str:
        lengths, labels = self._lengths, self._labels
        shown: list[str] = []
        at = done = 0
        while at <= len(text) - _SHORTEST:
            for length in lengths.get(text[at : at + _SHORTEST], ()):
                label = labels.get(text[at : at + length]) if at + length <= len(text) else None
                if label is not None and (length >= _WORD or _alone(text, at, at + length)):
                    shown += text[done:at], f"<{label}>"
                    done = at + length
                    at = done - 1
                    break
            at += 1
        shown.append(text[done:])
        return "".join(shown)

    # -- keeping book, with the lock held ------------------------------------------------------------------------------

    def _add(self, text: str, label: str) -> None:
        if text not in self._labels:
            self._index(text)
            self._longest_first = None
        self._labels[text] = label  # of two that have the same value, the newest

    def _index(self, text: str) -> None:
        start = text[:_SHORTEST]
        known = self._lengths.get(start, ())
        if len(text) not in known:
            self._lengths[start] = tuple(sorted((*known, len(text)), reverse=True))

    def _settle(self) -> None:
        """See which resources have died since the last time."""
        while self._gone:
            owner = self._gone.popleft()
            if self._known.get(owner.key) is owner:
                del self._known[owner.key]
                self._retire(owner.texts)

    def _retire(self, texts: Iterable[str]) -> None:
        """One living resource less has these."""
        for text in texts:
            left = self._owners[text] = self._owners[text] - 1
            if not left:
                del self._owners[text]
                if len(text) >= _LONG:
                    self._keep_past(text)
                else:
                    self._drop(text)

    def _keep_past(self, text: str) -> None:
        self._past[text] = None
        self._past.move_to_end(text)
        if len(self._past) > _PAST:
            oldest, _ = self._past.popitem(last=False)
            if oldest not in self._owners:
                self._drop(oldest)

    def _drop(self, text: str) -> None:
        del self._labels[text]
        self._longest_first = None
        if len(self._lengths) > 2 * len(self._labels) + 1000:  # what is dropped leaves its length behind
            self._lengths = {}
            for known in self._labels:
                self._index(known)

    def after_fork(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may have held it


class _Owner(weakref.ref[Any]):
    """A resource whose value is known. Does not keep it alive."""

    __slots__ = ("key", "texts")

    key: int
    texts: tuple[str, ...]


def _alone(text: str, start: int, end: int) -> bool:
    return not (start and text[start - 1].isalnum()) and not text[end : end + 1].isalnum()


# -- what must not be shown of a value ---------------------------------------------------------------------------------


def _forms(value: object) -> Iterator[str]:
    """The texts in a value, as they are and as reprs, JSON and URLs show them. Each may come several times."""
    for number, text in enumerate(_texts(value)):
        if number >= _PARTS:
            return
        if len(text) > _LONGEST:
            continue
        for form in (text,) if _PLAIN.fullmatch(text) else _written(text):
            if len(form) >= _SHORTEST:
                yield form


def _written(text: str) -> Iterator[str]:
    import json  # not above, nor urllib: most values are plain text, and need neither
    from urllib.parse import quote, quote_plus

    yield text
    once = repr(text)[1:-1]
    yield once
    yield repr(once)[1:-1]  # the repr of what shows a repr
    yield once.replace("'", "\\'")
    yield once.replace('"', '\\"')
    if len(bare := text.strip()) < len(text):  # a file that holds a key ends with a line break; shown text may not
        yield from (bare,) if _PLAIN.fullmatch(bare) else _written(bare)
    if not text.isascii():
        yield ascii(text)[1:-1]
        yield repr(text.encode(errors="replace"))[2:-1]
    yield json.dumps(text)[1:-1]
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    with suppress(ValueError):  # half a surrogate pair
        yield quote(text)
        yield quote(text, safe="")
        yield quote_plus(text)
    lines = [line.strip() for line in text.splitlines()]
    if len(lines) > 1:
        yield from (line for line in lines if len(line) >= _WORD)  # a group of exceptions indents each line
    if "://" in text:
        yield from _credentials(text)


def _credentials(url: str) -> Iterator[str]:
    """The password in a URL, such as that of a proxy."""
    from urllib.parse import unquote, urlsplit

    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.password:
            yield f"{parts.username or ''}:{parts.password}"
            yield parts.password
            yield unquote(parts.password)


def _texts(value: object, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield str(value)
    elif isinstance(value, (bytes, bytearray)):
        if len(value) <= _LONGEST:
            yield bytes(value).decode(errors="replace")
            yield repr(bytes(value))[2:-1]
    elif value is None or isinstance(value, (bool, int, float, complex, type)) or depth >= _DEPTH:
        return
    elif isinstance(value, Mapping):
        for part in _some(value.values):
            yield from _texts(part, depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in _some(value.__iter__):
            yield from _texts(part, depth + 1)
    else:
        yield from _shown(value)
        for part in _attributes(value):
            for text in _texts(part, depth + 1):
                if len(text) >= _WORD:
                    yield text


def _some(parts: Callable[[], Iterable[Any]]) -> list[Any]:
    """The first of many parts; none, if they cannot be had."""
    found: list[Any] = []
    with suppress(Exception):
        for part in parts():
            found.append(part)
            if len(found) >= _PARTS:
                break
    return found


def _shown(value: object) -> Iterator[str]:
    """How an object shows itself, if its class says how."""
    kind = type(value)
    with suppress(Exception):
        if kind.__str__ is not object.__str__ and len(shown := str(value)) >= _WORD:
            yield shown
    with suppress(Exception):
        if kind.__repr__ is not object.__repr__ and len(shown := repr(value)) >= _WORD:
            yield shown


def _attributes(value: object) -> Iterator[Any]:
    """All fields of a dataclass; of other objects those whose names speak of a secret. Calls no property."""
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
    else:
        slots = [name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
        names = [name for name in (*getattr(value, "__dict__", ()), *slots) if _TELLING.search(name)]
    for name in names[:_PARTS]:
        with suppress(Exception):
            yield object.__getattribute__(value, name)


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


_redactor = Redactor()
learn: Callable[[str, object, object], None] = _redactor.learn
meet: Callable[[str, object], None] = _redactor.meet
redact: Callable[[str], str] = _redactor.redact


def log_exception(logger: str, message: str, *args: object) -> None:
    """`exception(...)` of this logger, without the values of resources.

    The record carries the exception itself only if there is nothing to hide: handlers write it down as it is.
    """
    import logging
    import sys
    import traceback

    log = logging.getLogger(logger)
    error = sys.exc_info()[1]
    try:
        shown = "".join(traceback.format_exception(error)) if error is not None else ""
        said = f"{message % args}\n{shown}"
    except Exception:  # a repr of somebody's that raises
        said = f"{message} ({type(error).__qualname__})"
    if redact(said) == said:
        log.error(message, *args, exc_info=error, stacklevel=2)
    else:
        log.error("%s", redact(said).rstrip(), stacklevel=2)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_redactor.after_fork)
