"""The metrics of all programs of a page in one: each series has a label that says of which program it is.

The label is the name of the script, which a restart does not change. Of several programs of one name that run at the
same time the later ones have `name-2`, `name-3` and so on: always the first that no living program has. So a program
that is started again has the series of the one before it, and there are never more labels than programs that ran at a
time. The process id, which is new each time, stands in `headgate_program_info` alone.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import HeadgateError
from headgate.observe import sockets
from headgate.observe.lines import said

if TYPE_CHECKING:
    from headgate.dashboard.sources import Seen

KEPT: Final = 300.0
"""Seconds that a program which was killed is shown as down."""
MOST_KEPT: Final = 100
"""Such programs, the latest of them."""
_LONGEST: Final = 100


class Labelled:
    """A program that is there, or was there until it was killed."""

    __slots__ = ("gone", "id", "label", "name", "pid", "started")

    def __init__(self, program_id: str, look: Mapping[str, Any]) -> None:
        started = look.get("started_at")
        self.id: str = program_id
        self.name: str = _utf8(str(look.get("program") or "python"))[:_LONGEST]
        self.pid: str = _utf8(str(look.get("pid", "")))[:_LONGEST]
        self.started: float = started if isinstance(started, (int, float)) else 0.0
        self.label: str = ""
        """Empty until somebody scrapes."""
        self.gone: float | None = None
        """When it was missed."""


class ProgramLabels:
    """Gives each program its label, and remembers for a while those that were killed."""

    def __init__(self, is_left_behind: Callable[[str], bool]) -> None:
        """`is_left_behind`: has the program with this id, which is gone, left its socket behind?"""
        self._is_left_behind = is_left_behind
        self._known: dict[str, Labelled] = {}

    def note(self, programs: Mapping[str, Seen]) -> None:
        """Take in which programs there are."""
        now = clock.now()
        for program_id, seen in programs.items():
            known = self._known.get(program_id)
            if known is None:
                self._known[program_id] = Labelled(program_id, seen.look)
            else:
                known.gone = None
        for known in list(self._known.values()):
            if known.gone is None and known.id not in programs:
                known.gone = now if self._is_left_behind(known.id) else now - 2 * KEPT
        gone = sorted((one.gone, one.id) for one in self._known.values() if one.gone is not None)
        for number, (since, program_id) in enumerate(reversed(gone)):
            if now - since > KEPT or number >= MOST_KEPT:
                del self._known[program_id]

    def given(self) -> list[Labelled]:
        """Return all programs with their labels; those that come at the same time in the order of their start."""
        new = sorted((one for one in self._known.values() if not one.label), key=lambda one: (one.started, one.id))
        holders = {one.label: one for one in self._known.values() if one.label}
        for one in new:
            one.label = next(label for label in _numbered(one.name) if _is_free(holders.get(label)))
            if (before := holders.get(one.label)) is not None:
                del self._known[before.id]  # it was killed, and this is its successor
            holders[one.label] = one
        return list(self._known.values())


def _is_free(holder: Labelled | None) -> bool:
    return holder is None or holder.gone is not None


def _numbered(name: str) -> Iterator[str]:
    return itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))


def _utf8(text: str) -> str:
    """Return a text as UTF-8 can have it: names of files may have halves of characters."""
    return text.encode("utf-8", "backslashreplace").decode()


def has_socket(program_id: str) -> bool:
    """Is the socket of a program still there? One that ends by itself removes it first; one that is killed cannot."""
    try:
        return os.path.lexists(os.path.join(sockets.folder(), program_id))
    except HeadgateError:  # the directory is not to be trusted, for now
        return False


def joined(told: Iterable[tuple[Labelled, str | BaseException | None]]) -> bytes:
    """Return one exposition of what programs have told: their metrics, or why there are none. None: it is gone."""
    from headgate.observe.prometheus import exposition, prometheus_client

    family = prometheus_client().Metric
    families: dict[str, Any] = {}
    up = family("headgate_program_up", "1: the program has given its metrics in time.", "gauge")
    info = family("headgate_program_info", "The process id of a program.", "gauge")
    remarks = []
    for one, text in told:
        why = _added(families, one.label, text) if isinstance(text, str) else _reason(text)
        up.add_sample(up.name, {"program": one.label}, float(not why))
        info.add_sample(info.name, {"program": one.label, "pid": one.pid}, 1.0)
        if why:
            remarks.append(f"# no metrics of {one.label}: {why}")
    lines = "".join(f"{' '.join(remark.split())}\n" for remark in remarks)
    return exposition(_Families([up, info, *families.values()])) + redact(lines).encode()


def _reason(why: BaseException | None) -> str:
    if why is None:
        return "it was killed"
    return _utf8(said(why)) if isinstance(why, HeadgateError) else type(why).__name__


def _added(families: dict[str, Any], label: str, text: str) -> str:
    """Add the metrics of a program, or return why that cannot be done."""
    from prometheus_client.core import Metric
    from prometheus_client.parser import text_string_to_metric_families

    try:
        parsed = list(text_string_to_metric_families(text))
    except ValueError:  # another version, or nonsense
        return "they are not in the format of Prometheus"
    for family in parsed:
        into = families.get(family.name)
        if into is None:
            into = families[family.name] = Metric(family.name, family.documentation, family.type)
        for sample in family.samples:
            into.add_sample(sample.name, {**sample.labels, "program": label}, sample.value)
    return ""


class _Families:
    """A collector of what was made already."""

    def __init__(self, made: Iterable[Any]) -> None:
        self._made = made

    def describe(self) -> tuple[()]:
        return ()

    def collect(self) -> Iterator[Any]:
        yield from self._made
