"""Pages of a list of a pool that is too long to be shown whole: tenants, resources, workers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from headgate import registry
from headgate.core.views import PoolLook, plain
from headgate.errors import InvalidArgument
from headgate.observe.actions import on_home
from headgate.observe.lines import text_of

_NAMED: Final = {"tenants": "tenant", "resources": "id", "workers": "uid"}
_WHOLE: Final = 100_000
_MOST: Final = 200


async def rows(request: dict[str, Any]) -> dict[str, Any]:
    """Return a page: `rows`, and how many there are in `total`. Sorted by a field, largest first if it is a number."""
    listed, wanted, by = text_of(request, "list"), text_of(request, "filter").lower(), text_of(request, "sort")
    named = _NAMED.get(listed)
    if named is None:
        raise InvalidArgument(f"list must be one of {', '.join(_NAMED)}")
    offset, limit = _number(request, "offset", 0, _WHOLE), _number(request, "limit", 50, _MOST)
    pool = text_of(request, "pool").removeprefix("#")
    entry = next((one for one in registry.pools() if str(one.number) == pool), None)
    if entry is None:
        raise InvalidArgument("there is no such pool here any more")

    async def look(_: Any) -> PoolLook | None:
        return entry.view(_WHOLE)

    seen = await on_home(entry, look)
    rows = () if seen is None else getattr(seen.state, listed, ())
    found = [row for row in rows if wanted in (getattr(row, named) or "(none)").lower()]
    if found and by in {field.name for field in fields(found[0])}:
        found.sort(key=lambda row: _rank(getattr(row, by)))
    return {"rows": plain(found[offset : offset + limit]), "total": len(found)}


def _rank(value: object) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return 0, -float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, str(value).lower())


def _number(request: dict[str, Any], name: str, default: int, most: int) -> int:
    value = request.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise InvalidArgument(f"{name} must be a whole number from 0 to {most}")
    return value
