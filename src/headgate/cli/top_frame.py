"""What `headgate top` shows: lines of text for a terminal of a size, from what programs say. Pure.

Each line is a list of pieces, each a text and a colour; the text of one line is never wider than the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from headgate.cli.workers import shown_age
from headgate.core.one_line import one_line
from headgate.core.views import PoolLook, ResourcePoolView, ResourceRow, TaskPoolView, Unread, WorkerPoolView, look_of
from headgate.observe.budgets import shared_budgets

SORTS = ("age", "name", "load")


class Piece(NamedTuple):
    """A text and its colour."""

    text: str
    colour: str = ""


Line = list[Piece]


@dataclass(frozen=True)
class Settings:
    """What the person at the terminal has chosen."""

    sort: str = "age"
    filter: str = ""
    typing: bool = False
    """Is the filter being typed?"""
    paused: bool = False

    def pressed(self, key: str) -> Settings | None:
        """Return the settings after a key was pressed; None: the end."""
        if self.typing:
            return self._typed(key)
        if key in ("q", "\x03", "\x04"):
            return None
        if key == "s":
            return replace(self, sort=SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)])
        if key in ("p", " "):
            return replace(self, paused=not self.paused)
        if key in ("/", "f"):
            return replace(self, typing=True, filter="")
        if key == "\x1b":
            return replace(self, filter="")
        return self

    def _typed(self, key: str) -> Settings | None:
        if key in ("\x03", "\x04"):
            return None
        if key in ("\r", "\n"):
            return replace(self, typing=False)
        if key == "\x1b":
            return replace(self, typing=False, filter="")
        if key in ("\x7f", "\b"):
            return replace(self, filter=self.filter[:-1])
        return replace(self, filter=self.filter + key) if key.isprintable() else self


class Table(NamedTuple):
    """Rows under titles, with a heading. `widths`: of all columns but one that is None and takes what is left."""

    heading: str
    titles: Sequence[str]
    widths: Sequence[int | None]
    rows: list[list[Piece]]


def frame(
    seen: Sequence[dict[str, Any]],
    settings: Settings,
    width: int,
    height: int,
    since: float = 0.0,
    *,
    keys: bool = True,
) -> list[Line]:
    """Return the lines. `since`: seconds that have passed since the programs were asked; countdowns go on.

    `keys`: say which keys can be pressed.
    """
    lines: list[Line] = [_title(seen, settings, width), *([_bar(settings, width)] if keys else [])]
    if not seen:
        return [*lines, [], [Piece("No program can be seen. Start one with HEADGATE_OBSERVE=1.", "yellow")]][:height]
    tables = [table for table in _tables(seen, settings, since) if table.rows]
    if not tables and settings.filter:
        lines.append([Piece(_cut(f"Nothing here has {settings.filter!r} in its name.", width), "yellow")])
    room = height - len(lines) - 2 * len(tables)
    for number, table in enumerate(tables):
        share = max(1, room // (len(tables) - number))
        shown = table.rows[: min(len(table.rows), share)]
        room -= len(shown)
        more = len(table.rows) - len(shown)
        lines.append([Piece(_cut(f"{table.heading}{f' (and {more} more)' if more else ''}", width), "bold")])
        columns = _columns(table, shown, width)
        lines.append(_row(columns, [Piece(title, "dim") for title in table.titles]))
        lines += [_row(columns, row) for row in shown]
    return lines[:height]


def _title(seen: Sequence[dict[str, Any]], settings: Settings, width: int) -> Line:
    answering = _answering(seen)
    pools = [view for one in answering for view in one["pools"] if view["kind"] == "tasks" and "active" in view]
    rate = sum(view.get("point", {}).get("done", 0.0) for view in pools)
    active, queued = sum(view["active"] for view in pools), sum(view["queued"] for view in pools)
    state = "PAUSED, " if settings.paused else ""
    programs = "1 program" if len(answering) == 1 else f"{len(answering)} programs"
    text = f"headgate top: {state}{programs}, {rate:.0f} tasks/s, {active} running, {queued} queued"
    return [Piece(_cut(text, width), "bold")]


def _answering(seen: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in seen if "silent" not in one]


def _bar(settings: Settings, width: int) -> Line:
    if settings.typing:
        return [Piece(_cut(f"filter: {settings.filter}_  (Enter keeps it, Esc clears it)", width), "yellow")]
    chosen = f", only {settings.filter!r}" if settings.filter else ""
    keys = f"q quit   p pause   s sort   / filter   sorted by {settings.sort}{chosen}"
    return [Piece(_cut(keys, width), "dim")]


def _tables(seen: Sequence[dict[str, Any]], settings: Settings, since: float) -> Iterable[Table]:
    yield _silent(seen, settings, since)
    views = _named(_answering(seen))
    yield _budgets(seen, settings)
    yield _pools(views, settings)
    yield _broken(views, settings)
    yield _tenants(views, settings, since)
    yield _resources(views, settings, since)
    yield _workers(views, settings)
    yield _slowest(views, settings, since)
    yield _failed(views, settings, since)


class View(NamedTuple):
    """A pool and its program."""

    program: dict[str, Any]
    look: PoolLook
    done: float
    """How many of its tasks end well in a second, if it is a task pool."""
    name: str
    """The name of the pool, with the pid of its program where several programs have pools of this name."""


Views = list[View]


def _named(seen: Sequence[dict[str, Any]]) -> Views:
    pids: dict[str, set[int]] = {}
    for one in seen:
        for view in one["pools"]:
            pids.setdefault(view["name"], set()).add(one["pid"])
    return [
        View(
            one,
            look_of(view),
            view.get("point", {}).get("done", 0.0),
            name if len(pids[view["name"]]) < 2 else f"{_cut(name, 9)} {one['pid']}",
        )
        for one in seen
        for view in one["pools"]
        for name in (view["name"],)
    ]


def _silent(seen: Sequence[dict[str, Any]], settings: Settings, since: float) -> Table:
    """The programs that give no answer. What they said last is old, and is shown nowhere else."""
    rows = [
        [
            Piece(one["program"] or "(never answered)", "bold"),
            Piece(str(one["pid"])),
            Piece(f"{one['silent'] + since:.0f} s", "red"),
            Piece(one.get("why", "it is stopped, or too busy")),
        ]
        for one in seen
        if "silent" in one and _fits(settings, one["program"], str(one["pid"]))
    ]
    return Table("Programs that give no answer", ("program", "pid", "for", "why"), (None, 8, 8, 40), rows)


def _budgets(seen: Sequence[dict[str, Any]], settings: Settings) -> Table:
    """The budgets that processes share, each with the sum of all of them. The processes stand in the next table."""
    rows = []
    for one in shared_budgets((str(look["pid"]), look) for look in _answering(seen)):
        if _fits(settings, one["name"]):
            cells = [
                Piece(one["name"], "bold"),
                Piece(str(one["member_count"])),
                Piece(f"{one['active']}/{one['limit']}"),
                Piece(str(one["queued"])),
            ]
            rows.append((cells, float(one["queued"]), one["name"], one["active"]))
    titles = ("budget", "processes", "running", "queued")
    return Table("Shared budgets", titles, (None, 18, 9, 7), _sorted(rows, settings))


def _pools(views: Views, settings: Settings) -> Table:
    rows = []
    several = _several(views)
    for one, look, done, _ in views:
        view = look.state
        if not isinstance(view, TaskPoolView) or not _fits(settings, look.name, one["program"]):
            continue
        cells = [
            Piece(look.name, "bold"),
            _state(view, look.held),
            Piece(f"{view.active}/{view.max_concurrent}"),
            Piece(str(view.queued)),
            Piece(f"{done:.1f}"),
            Piece(str(view.failed or ""), "red"),
            Piece(str(view.dropped or ""), "yellow"),
            Piece(str(one["pid"]) if several else ""),
            Piece(str(view.completed)),
            Piece(f"{view.jain:.2f}"),
            Piece(one["program"]),
        ]
        rows.append((cells, view.lag, look.name, view.active))
    titles = ("pool", "state", "running", "queued", "done/s", "failed", "dropped", "pid", "done", "fair", "program")
    return Table("Task pools", titles, (None, 18, 9, 7, 7, 6, 7, 8, 9, 4, 30), _sorted(rows, settings))


def _several(views: Views) -> bool:
    """Are they pools of several programs? Then each row names its program."""
    return len({view.program["pid"] for view in views}) > 1


def _state(view: TaskPoolView, held: float | None) -> Piece:
    if held:
        return Piece(f"loop held {held:.0f} s", "red")
    if view.paused:
        return Piece("paused", "yellow")
    if view.waiting_for:
        return Piece(f"waits: {view.waiting_for['cause']}", "yellow")
    return Piece(view.state)


def _broken(views: Views, settings: Settings) -> Table:
    """The pools of any kind whose state cannot be read, and the error."""
    rows = [
        [
            Piece(look.name, "bold"),
            Piece(look.kind),
            Piece(look.state.broken, "red"),
            Piece(str(one["pid"])),
        ]
        for one, look, _, _ in views
        if isinstance(look.state, Unread) and look.state.broken and _fits(settings, look.name, one["program"])
    ]
    return Table("State cannot be read", ("pool", "kind", "error", "pid"), (None, 10, 30, 8), rows)


def _tenants(views: Views, settings: Settings, since: float) -> Table:
    rows = []
    for _, look, _, its_name in views:
        for row in look.state.tenants if isinstance(look.state, TaskPoolView) else ():
            name = "(none)" if row.tenant is None else row.tenant
            if _fits(settings, name, look.name):
                lag = row.lag + since if row.queued else 0.0
                cells = [
                    Piece(name, "bold"),
                    Piece(its_name),
                    Piece(str(row.active)),
                    Piece(str(row.queued)),
                    Piece(f"{lag:.1f} s" if lag else "", "yellow" if lag > 10 else ""),
                    Piece(f"{row.p50:.2f} s"),
                    Piece(f"{row.p99:.2f} s"),
                ]
                rows.append((cells, lag, name, row.active + row.queued))
    titles = ("tenant", "pool", "running", "queued", "oldest", "wait p50", "p99")
    return Table("Tenants", titles, (None, 16, 8, 8, 10, 10, 10), _sorted(rows, settings))


_COLOURS = {"healthy": "green", "cooling_down": "yellow", "disabled": "red", "no_quota": "yellow", "paused": "yellow"}


def _resources(views: Views, settings: Settings, since: float) -> Table:
    """The resources of pools at work, then those of idle ones: a forgotten pool pushes nothing off the screen."""
    at_work: list[Ranked] = []
    idle: list[Ranked] = []
    for _, look, _, its_name in views:
        if not isinstance(look.state, ResourcePoolView):
            continue
        rows = at_work if _is_at_work(look.state, since) else idle
        for row in look.state.resources:
            if _fits(settings, row.id, look.name):
                left = max(0.0, row.cooldown - since)
                status: str = row.status if row.status != "cooling_down" or left else "healthy"
                spent = max(0.0, _opens_in(row) - since)
                if status == "healthy" and spent:
                    status, left = "no_quota", spent
                if row.paused and status != "disabled":
                    status = "paused"
                most = "" if row.max_in_flight is None else f"/{row.max_in_flight}"
                refused = row.refusals
                cells = [
                    Piece(row.id, "bold"),
                    Piece(its_name),
                    Piece(status.removesuffix("_down").replace("_", " "), _COLOURS[status]),
                    Piece(f"{left:.1f} s" if left else ""),
                    Piece(f"{row.in_flight}{most}"),
                    Piece(str(row.successes)),
                    Piece(str(refused or ""), "yellow"),
                ]
                rows.append((cells, left + 1e9 * (status == "disabled"), row.id, row.in_flight))
    titles = ("resource", "pool", "status", "back in", "in use", "ok", "refused")
    ordered = [*_sorted(at_work, settings), *_sorted(idle, settings)]
    return Table("Resources", titles, (None, 16, 9, 9, 8, 9, 8), ordered)


def _is_at_work(view: ResourcePoolView, since: float) -> bool:
    """Is a resource of the pool in use, awaited, or on its way back from a cooldown or to its next quota?"""
    if view.in_flight or view.waiting:
        return True
    return any(max(row.cooldown, _opens_in(row)) > since for row in view.resources if row.status != "disabled")


def _opens_in(row: ResourceRow) -> float:
    """Seconds until the quota of a resource allows a call."""
    return 0.0 if row.quota is None else float(row.quota["seconds_until_open"])


def _workers(views: Views, settings: Settings) -> Table:
    rows = []
    pools = [one.look.state for one in views if isinstance(one.look.state, WorkerPoolView)]
    for _, look, _, its_name in views:
        for row in look.state.workers if isinstance(look.state, WorkerPoolView) else ():
            if _fits(settings, row.uid, look.name, str(row.pid), row.host, row.address):
                far = not row.address.startswith("unix:")
                bad = row.state in ("lost", "blocked")
                cells = [
                    Piece(row.uid, "bold"),
                    Piece(its_name),
                    Piece(str(row.pid or "")),
                    Piece(row.state, "red" if bad else "green" if row.state == "ready" else "yellow"),
                    Piece(str(row.in_flight)),
                    Piece("" if row.memory is None else f"{row.memory / 1e6:.0f} MB"),
                    Piece(row.host if far else ""),
                    Piece(row.address if far else ""),
                ]
                rows.append((cells, float(bad), row.uid, row.in_flight))
    titles = ("worker", "pool", "pid", "state", "calls", "memory", "host", "address")
    ready, expected = sum(view.ready for view in pools), sum(view.expected for view in pools)
    title, widths = f"Workers, {ready} of {expected} ready", (None, 16, 9, 10, 7, 10, 16, 24)
    return Table(title, titles, widths, _sorted(rows, settings))


def _slowest(views: Views, settings: Settings, since: float) -> Table:
    rows = []
    several = _several(views)
    for one, look, _, _ in views:
        for row in look.state.running if isinstance(look.state, TaskPoolView) else ():
            tenant = "" if row.tenant is None else row.tenant
            name = f"{look.name}/{row.number}"
            if _fits(settings, name, tenant, row.what):
                cells = [
                    Piece(f"{_cut(look.name, 20)}/{row.number}", "bold"),
                    Piece(str(one["pid"]) if several else ""),
                    Piece(f"{row.seconds + since:.1f} s"),
                    Piece(tenant),
                    Piece(row.what.rpartition(".")[2]),
                    Piece(str(row.attempt)),
                    Piece(row.resource or ""),
                    Piece(row.worker or ""),
                ]
                rows.append((cells, row.seconds, name, row.attempt))
    titles = ("task", "pid", "running for", "tenant", "function", "try", "resource", "worker")
    return Table("Slowest tasks", titles, (None, 8, 11, 14, 16, 4, 12, 13), _sorted(rows, settings))


def _failed(views: Views, settings: Settings, since: float) -> Table:
    """The last tasks that ended badly, the newest first, whatever the other tables are sorted by."""
    rows = []
    several = _several(views)
    for one, look, _, _ in views:
        for row in look.state.failures if isinstance(look.state, TaskPoolView) else ():
            tenant = "" if row.tenant is None else row.tenant
            name = f"{look.name}/{row.number}"
            if _fits(settings, name, tenant, row.why):
                cells = [
                    Piece(f"{_cut(look.name, 20)}/{row.number}", "bold"),
                    Piece(str(one["pid"]) if several else ""),
                    Piece(row.status, "red"),
                    Piece(shown_age(max(0.0, one["at"] - ended_at + since)) if (ended_at := row.ended_at) else ""),
                    Piece("yes" if row.can_retry else ""),
                    Piece(tenant),
                    Piece(row.why),
                ]
                rows.append((ended_at or 0.0, cells))
    rows.sort(key=lambda row: -row[0])
    titles = ("task", "pid", "ended", "ago", "retry?", "tenant", "why")
    return Table("Ended badly", titles, (None, 8, 9, 8, 6, 14, 40), [cells for _, cells in rows])


Ranked = tuple[list[Piece], float, str, float]


def _sorted(rows: Sequence[Ranked], settings: Settings) -> list[list[Piece]]:
    keys: dict[str, Callable[[Ranked], Any]] = {
        "age": lambda row: (-row[1], row[2]),
        "name": lambda row: row[2],
        "load": lambda row: (-row[3], row[2]),
    }
    return [row[0] for row in sorted(rows, key=keys[settings.sort])]


def _fits(settings: Settings, *names: str) -> bool:
    wanted = settings.filter.lower()
    return not wanted or any(wanted in name.lower() for name in names)


_LEAST = 16  # what the first column has at least
_OPTIONAL = ("pid", "resource", "worker", "retry?", "dropped", "host", "address")


def _columns(table: Table, rows: Sequence[Sequence[Piece]], width: int) -> dict[int, int]:
    """Return the columns to show, each with its width.

    Of those that not every program fills, the empty ones are left out. So are those that the terminal has no room for,
    from the right.
    """
    spare, shown = width - _LEAST, {0: 0}
    for column, wide in enumerate(table.widths):
        needed = table.titles[column] not in _OPTIONAL or any(row[column].text for row in rows)
        if wide is not None and wide + 2 <= spare and needed:
            spare -= wide + 2
            shown[column] = wide
    return {**shown, 0: min(_LEAST + spare, 40)}


def _row(columns: dict[int, int], cells: Sequence[Piece]) -> Line:
    """Put cells into their columns."""
    line: Line = []
    last = max(columns)
    for column, room in columns.items():
        text = _cut(cells[column].text, room)
        line.append(Piece(text if column == last else text.ljust(room), cells[column].colour))
        if column != last:
            line.append(Piece("  "))
    return line


def _cut(text: str, width: int) -> str:
    """Return a text that has this width at most: whatever others have put into it, it moves no cursor."""
    text = one_line(text)
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
