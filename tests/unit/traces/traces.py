"""Scenarios on the virtual loop, and what is recorded of them: events, states and texts.

A scenario is an async function that is given a `Trace`. Time, chance and ids come from `headgate.testing.run`, so two
runs of one scenario give the same recording to the last digit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import headgate
from headgate import ResourcePool, TaskHandle
from headgate.testing import run, settle
from tests.unit.traces.support import plain, steady

Scenario = Callable[["Trace"], Coroutine[Any, Any, None]]

SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Record this one, under its name."""
    assert function.__name__ not in SCENARIOS, f"two scenarios are called {function.__name__}"
    SCENARIOS[function.__name__] = function
    return function


class Trace:
    """What a scenario has shown so far."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.states: list[Any] = []
        self.texts: list[Any] = []
        self._usages: dict[int, int] = {}
        self.handles: list[Any] = []
        self._held: dict[str, Any] = {}  # a task forgets its result when nobody holds its handle

    def listen(self, event: Any) -> None:
        """Record an event. Worker pools that other tests share may report at any time, and are left out."""
        if event.topic.startswith("workers"):
            return
        told = event.to_dict()
        if told.get("usage"):  # their numbers are counted over all pools of the process
            told["usage"]["id"] = self._usages.setdefault(told["usage"]["id"], len(self._usages) + 1)
        self.events.append(told)

    def note(self, what: str, value: Any = None) -> None:
        """Record a value, with the time."""
        self.states.append({"at": asyncio.get_running_loop().time(), "what": what, "value": plain(value)})

    async def outcome(self, what: str, awaitable: Awaitable[Any]) -> Any:
        """Await this, and record what it returns or raises; an error's message is among the texts."""
        if isinstance(awaitable, TaskHandle):
            self._held[awaitable.id] = awaitable
        try:
            result = await awaitable
        except Exception as error:
            told = plain(error)
            self.note(what, {"raised": type(error).__name__, **_codes(error)})
            self.texts.append({what: told})
            return None
        self.note(what, {"handle": result.status} if isinstance(result, TaskHandle) else {"returned": result})
        if isinstance(result, TaskHandle):
            self.handles.append(result)
            self._held[result.id] = result
        return result

    def look(self, what: str, pool: Any) -> None:
        """Record snapshot, stats and repr of a pool.

        Results and errors only of tasks whose handles are held: when others are gone is up to Python.
        """
        snapshot = plain(pool.snapshot())
        if not isinstance(pool, ResourcePool):
            for task in snapshot["tasks"]:
                if task["id"] not in self._held:
                    task["result"] = task["error"] = None
                error = task["error"]
                task["error"] = error and error["error"]
                if error:
                    self.texts.append({f"{what}: error of {task['id']}": error})
            tasks = snapshot["tasks"]
            snapshot["fields of tasks"] = list(tasks[0]) if tasks else []
            snapshot["tasks"] = [list(task.values()) for task in tasks]
        self.states.append(
            {
                "at": asyncio.get_running_loop().time(),
                "what": what,
                "snapshot": snapshot,
                "stats": plain(pool.stats()),
            }
        )
        self.texts.append({f"{what}: repr": repr(pool)})

    def tell(self, *handles: TaskHandle[Any]) -> None:
        """Record status, repr and story of tasks."""
        for handle in handles:
            self._held[handle.id] = handle
            self.note(f"task {handle.id}", {"status": handle.status, "attempt": handle.attempt})
            self.texts.append({repr(handle): handle.story().splitlines()})


class _Log(logging.Handler):
    """Records what is logged, but for worker pools that other tests share."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("headgate.workers"):
            self._trace.texts.append({f"{record.levelname} {record.name}": record.getMessage()})


def _codes(error: BaseException) -> dict[str, Any]:
    """Of an error of headgate, what programs decide by."""
    names = ("code", "reason", "retry_after")
    return {name: plain(getattr(error, name)) for name in names if getattr(error, name, None) is not None}


def play(name: str) -> dict[str, Any]:
    """What a scenario records now."""
    trace = Trace()

    async def main() -> None:
        unsubscribe = headgate.subscribe(trace.listen)
        try:
            await SCENARIOS[name](trace)
            await settle()
        finally:
            unsubscribe()

    logger, handler = logging.getLogger("headgate"), _Log(trace)
    level, spreads = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        run(main)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = spreads
    return steady({"events": trace.events, "states": trace.states, "texts": trace.texts})
