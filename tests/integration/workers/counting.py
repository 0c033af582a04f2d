"""Counts what the process of a script, or a worker, sends and loads: for the scripts of `test_scripts.py`.

Workers import it too, when they load the first function that refers to it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import cloudpickle

from headgate.workers.client import dispatcher
from headgate.workers.serialization import definitions, groups

counts: Counter[str] = Counter()
lengths: list[int] = []
"""Of the arguments of calls, in bytes."""


def _counted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[what] += 1
        return function(*args, **kwargs)

    return counting


def _install() -> None:
    number, dump_arguments = definitions.Definitions.number, dispatcher.dump_arguments

    def numbered(self: Any, message: Any, form: Any) -> tuple[int, int]:
        found, added = number(self, message, form)
        counts["definitions"] += len(message.definitions) and message.definitions[-1].function == found and added > 0
        return found, added

    def dumped(*args: Any, **kwargs: Any) -> Any:
        data = dump_arguments(*args, **kwargs)
        lengths.append(len(data))
        return data

    definitions.Definitions.number = numbered  # type: ignore[method-assign]
    dispatcher.dump_arguments = dumped
    groups.Group.load = _counted("loads", groups.Group.load)  # type: ignore[method-assign]
    cloudpickle.dumps = _counted("functions pickled", cloudpickle.dumps)


_install()


def here() -> dict[str, Any]:
    """What was counted in this process."""
    return {"pid": os.getpid(), **+counts}
