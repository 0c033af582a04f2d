"""Decides how a run goes on after an earlier one: what has changed, and whether that matters."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from headgate.cli.batch.functions import Function
from headgate.cli.batch.journal import About, Early, Journal, Span
from headgate.cli.batch.sources import checksum
from headgate.cli.output import WrongCall

ANEW = "--restart begins anew"


@dataclass(slots=True)
class Resumed:
    """With what a run begins."""

    journal: Journal
    notes: list[str] = field(default_factory=list)
    """What the user is to be told."""


def about_of(function: Function, path: str, formats: tuple[str, str], id_field: str | None) -> About:
    """Describe a run that is about to begin."""
    if path == "-":
        return About(function.name, function.digest, path, None, None, formats, id_field)
    try:
        found = os.stat(path)
    except OSError as error:
        raise WrongCall(f"{path} cannot be read: {error.strerror}") from None
    return About(function.name, function.digest, path, found.st_size, found.st_mtime_ns, formats, id_field)


def compare_shape(before: About, about: About) -> None:
    """WrongCall: the files of the earlier run have another shape."""
    for what, old, new in (
        ("input", before.formats[0], about.formats[0]),
        ("output", before.formats[1], about.formats[1]),
    ):
        if old != new:
            raise WrongCall(f"the run was begun with {old} as format of the {what}, and not with {new}: {ANEW}")
    if before.id != about.id:
        told = "without --id" if before.id is None else f"with --id {before.id}"
        raise WrongCall(f"the run was begun {told}: {ANEW}")


def resumed(found: Journal, about: About, *, anyway: bool, retry: bool) -> Resumed:
    """Compare a run with the one that it goes on with; WrongCall: it should not.

    `anyway`: go on although the function or the input has changed. `retry`: failures are run again, for which
    functions are changed.
    """
    before = found.about
    notes = []
    if changed := _function_changed(before, about):
        if not anyway and not retry:
            raise WrongCall(
                f"{changed} since the run began: --continue goes on with it and keeps what is written, {ANEW}"
            )
        notes.append(f"{changed} since the run began")
    begun = Resumed(replace_about(found, about), notes)
    _compare_input(begun, before, about, anyway=anyway)
    return begun


def replace_about(journal: Journal, about: About) -> Journal:
    """Return the journal of the same state with another description."""
    return Journal(about, journal.state, journal.early)


def _function_changed(before: About, about: About) -> str | None:
    if before.function != about.function:
        return f"the function was {before.function} and is {about.function}: it has changed"
    return f"the source of {about.function} has changed" if before.digest != about.digest else None


def _compare_input(begun: Resumed, before: About, about: About, *, anyway: bool) -> None:
    """See whether the records that are done still stand where they stood."""
    state = begun.journal.state
    seen = state.main.seen
    same_file = (before.input, before.size, before.mtime) == (about.input, about.size, about.mtime)
    if not seen[0] or about.size is None or (same_file and before.size is not None):
        return  # nothing is done, or nothing has changed; stdin is compared when it is read
    if about.formats[0] != "parquet" and checksum(about.input, seen[2]) == seen[3]:
        if before.size is not None and about.size > before.size:
            begun.notes.append(f"{about.input} has grown since the run began: what is new is done too")
        return
    changed = f"the input {about.input} has changed since the run began, in the part that is done already"
    if about.id is not None:
        begun.notes.append(f"{changed}; records whose {about.id} is done are passed over")
        begun.journal.state = replace(state, main=Span(), former=state.ids)
        begun.journal.early = _of_retries(begun.journal.early)
    elif anyway:
        begun.notes.append(f"{changed}; the first {state.main.low[0]:,} records count as done all the same")
    else:
        raise WrongCall(f"{changed}: {ANEW}, --continue takes its first {state.main.low[0]:,} records for done")


def _of_retries(early: dict[tuple[bool, int], Early]) -> dict[tuple[bool, int], Early]:
    return {key: one for key, one in early.items() if one.retry}
