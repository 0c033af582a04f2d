"""Progress on stderr: drawn again and again by rich on a terminal, else a line every 10 seconds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headgate.cli.batch.meter import Rate, Tally, duration
from headgate.cli.output import is_coloured, say
from headgate.core.clock import clock
from headgate.core.one_line import one_line

if TYPE_CHECKING:
    from headgate.cli.batch.output import Paths
    from headgate.resources.model import ResourceSnapshot

_LINE, _FRAME = 10.0, 0.25  # seconds between two lines, and between two frames
_MOST_KEYS = 12
_MOST_ROWS = 10  # of a summary


class Progress:
    """How far a run is, now and as text."""

    def __init__(
        self,
        counts: Callable[[], tuple[int, int, float | None]],
        keys: Callable[[], Mapping[str, ResourceSnapshot]] | None,
    ) -> None:
        self._counts = counts
        self._keys = keys
        self._rate = Rate()
        self.share: float | None = None

    def look(self) -> None:
        """Note how far the run is now."""
        done, failed, self.share = self._counts()
        self._rate.saw(clock.now(), done + failed, self.share or 0.0)

    def line(self) -> str:
        """Tell how far the run is: one line."""
        done, failed, share = self._counts()
        parts = [f"{done:,} done"]
        if failed:
            parts.append(f"{failed:,} failed")
        parts.append(f"{self._rate.per_second:,.0f}/s")
        left = self._rate.left
        if share is not None:
            parts.append(f"{share:.0%}" + (f", {duration(left)} left" if left is not None and share < 1 else ""))
        return ", ".join(parts)

    def key_states(self) -> list[str]:
        """Tell how each key is, with its countdown."""
        states = {} if self._keys is None else self._keys()
        told = [f"{one_line(name)} {_state(key)}" for name, key in list(states.items())[:_MOST_KEYS]]
        return told + ([f"{len(states) - _MOST_KEYS} more keys"] if len(states) > _MOST_KEYS else [])


def _state(key: ResourceSnapshot) -> str:
    if key["status"] == "cooling_down":
        return f"cools down {duration(key['cooldown_seconds_remaining'])}"
    return "disabled" if key["status"] == "disabled" else f"{key['in_flight']} in flight"


async def show(progress: Progress) -> None:
    """Show progress until it is cancelled."""
    progress.look()
    if is_coloured(sys.stderr) and (live := _live()) is not None:
        with live:
            while True:
                await asyncio.sleep(_FRAME)
                progress.look()
                live.update(_frame(progress), refresh=True)
    while True:
        for _ in range(int(_LINE)):  # a rate needs more than one look
            await asyncio.sleep(1)
            progress.look()
        say("; ".join([progress.line(), *progress.key_states()]), sys.stderr)


def _live() -> Any:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return None
    console = Console(stderr=True)
    return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=sys.stdout.isatty())


def _frame(progress: Progress) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    frame = Table.grid()
    if progress.share is not None:
        frame.add_row(ProgressBar(1.0, progress.share, width=60))
    frame.add_row(Text(progress.line()))
    for key in progress.key_states():
        frame.add_row(Text(f"  {key}", style="dim"))
    return frame


def summary(figures: Mapping[str, Any], tenants: Mapping[str, Tally], keys: Mapping[str, Any]) -> list[str]:
    """The lines that are printed at the end."""
    lines = [_total(figures)]
    for title, rows in (("tenant", {name: tally.to_dict() for name, tally in tenants.items()}), ("key", keys)):
        shown = sorted(rows.items(), key=lambda row: -row[1]["done"])[:_MOST_ROWS]
        lines += [f"  {title} {one_line(name)}: {_told(row)}" for name, row in shown]
        if len(rows) > len(shown):
            lines.append(f"  and {len(rows) - len(shown):,} more {title}s")
    return lines


def kept_line(figures: Mapping[str, Any], paths: Paths, *, has_room: bool) -> str:
    """Say which results are in the output, and which are kept in the journal only."""
    failures = figures["kept_failures"]
    more = [f"{figures['kept']:,} more"] if figures["kept"] or not failures else []
    more += [f"{failures:,} failure{'s' * (failures != 1)}"] if failures else []
    again = "run it again to write them" if has_room else "run it again with room to write them"
    return f"  {figures['written']:,} in {paths.out}, {' and '.join(more)} kept in {paths.journal}; {again}"


def _total(figures: Mapping[str, Any]) -> str:
    rate = figures["run"] / figures["seconds"] if figures["seconds"] else 0.0
    text = f"{figures['done']:,} done, {figures['failed']:,} failed; this run: {figures['run']:,} records"
    return f"{text} in {duration(figures['seconds'])} ({rate:,.0f}/s){_latency(figures)}{_cost(figures)}"


def _told(row: Mapping[str, Any]) -> str:
    text = f"{row['done']:,} done"
    for name in ("failed", "cooldowns"):
        if row.get(name):
            text += f", {row[name]:,} {name}"
    if row.get("status", "healthy") != "healthy":
        text += f", {row['status'].replace('_', ' ')}"
    return text + _latency(row) + _cost(row)


def _latency(row: Mapping[str, Any]) -> str:
    return f", p50 {duration(row['p50'])}, p99 {duration(row['p99'])}" if row.get("p50") is not None else ""


def _cost(row: Mapping[str, Any]) -> str:
    return f", cost {row['cost']:,.6g}" if row.get("cost") else ""
