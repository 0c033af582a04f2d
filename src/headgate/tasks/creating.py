"""`pool_create`: a pool from a mapping of options, in the spelling of other languages too."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from headgate.core.checks import nearest, refuse_both, respell, seconds_of
from headgate.errors import InvalidArgument, InvalidType
from headgate.tasks.pool import TaskPool


def pool_create(options: Mapping[str, Any] | None = None, /, **keywords: Any) -> TaskPool:
    """Make a `TaskPool` from keywords, or from one mapping of them; what is None counts as not given.

    `stale_after_ms` is `stale_after` in milliseconds, `run_id` is `pipeline_id`, `strategy` is `queue`.
    """
    known = list(inspect.signature(TaskPool).parameters)
    if options is not None and not isinstance(options, Mapping):
        raise InvalidType(
            f"pool_create() takes one mapping of options, got {type(options).__name__}",
            remedy="Pass keywords: pool_create(name='review', max_concurrent=5).",
        )
    given = {**(options or {}), **keywords}
    for option in given:
        if option not in known and option not in _OTHER_NAMES:
            raise InvalidArgument(f"pool_create() has no option {option!r}", remedy=nearest(option, known))
    given = {name: value for name, value in given.items() if value is not None}
    if "stale_after_ms" in given:
        refuse_both("pool_create()", given, "stale_after", "stale_after_ms")
        given["stale_after"] = seconds_of(given.pop("stale_after_ms"))
    respell("pool_create()", given, "queue", "strategy")
    respell("pool_create()", given, "pipeline_id", "run_id")
    return TaskPool(**given)


_OTHER_NAMES = ("stale_after_ms", "strategy", "run_id")
