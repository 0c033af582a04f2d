"""`headgate ps`: the running programs of this user that can be seen, and their pools."""

from __future__ import annotations

import argparse
from collections import Counter

from headgate.cli.observing import HOW, add_program, nothing_seen
from headgate.cli.output import complain, print_json, print_table
from headgate.cli.workers import shown_age

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from typing import Any

_DESCRIPTION = f"""\
List the programs of this user that can be seen, with their pools. {HOW}"""
_EXAMPLE = """\
example:
  headgate ps
  headgate ps --json
"""
PATIENCE = 5.0
"""Seconds that a program has to answer. One that is stopped must not keep the others from being listed for long."""
TITLES = ("pid", "program", "pool", "kind", "state", "running", "queued", "done", "failed", "dropped", "age")


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    add_program(parser)


def run(options: argparse.Namespace) -> int:
    """List the programs."""
    from headgate.observe.programs import Refused, programs

    seen: list[dict[str, Any]] = []
    silent = False
    for program in programs(options.pid, patience=PATIENCE):
        with program:
            try:
                seen.append(program.ask("hello"))
            except (Refused, OSError) as error:
                silent = True
                complain("headgate ps", str(error))
    if options.json:
        print_json(seen)
    elif seen:
        print_table(TITLES, [row for one in seen for row in rows_of(one)], fold=("program", "state"))
    if silent:
        return 1
    if seen:
        return 0
    complain("headgate ps", nothing_seen(options.pid))
    return 0 if options.pid is None else 2


def rows_of(seen: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each pool of a program; one that has none has a row too."""
    age = shown_age(max(0.0, seen["at"] - seen["started_at"]))
    about = (str(seen["pid"]), seen["program"])
    names = Counter(view["name"] for view in seen["pools"])
    pools = []
    for view in seen["pools"]:
        number = f" (#{view['number']})" if names[view["name"]] > 1 else ""
        pools.append((*about, view["name"] + number, view["kind"], *_figures(view), age))
    return pools or [(*about, "-", "", "", "", "", "", "", "", age)]


def _figures(told: dict[str, Any]) -> tuple[str, ...]:
    """Return the state of a pool, and what is running, queued, done, failed and dropped."""
    from headgate.core.views import ResourcePoolView, TaskPoolView, Unread, WorkerPoolView, look_of

    look = look_of(told)
    view = look.state
    if look.held:
        return f"its loop is held for {look.held:.0f} s", "", "", "", "", ""
    if isinstance(view, Unread):
        state = "changes too fast to be read" if view.changing else view.state or ""
        return f"cannot be read: {view.broken}" if view.broken else state, "", "", "", "", ""
    if isinstance(view, TaskPoolView):
        running = f"{view.active}/{view.max_concurrent}"
        ended = str(view.queued), str(view.completed), str(view.failed)
        state = "paused" if view.paused and view.state == "open" else view.state
        return state, running, *ended, str(view.dropped or "")
    if isinstance(view, ResourcePoolView):
        state = f"{view.healthy} healthy, {view.cooling_down} cooling, {view.disabled} disabled"
        state += f", {view.paused} paused" if view.paused else ""
        return state, str(view.in_flight), str(view.waiting), str(view.successes), "", ""
    assert isinstance(view, WorkerPoolView), "there is no other kind"
    state = f"{view.ready} of {view.expected} ready"
    return state, str(view.in_flight), "", "", str(view.losses or ""), ""
