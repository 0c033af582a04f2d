"""Everything that can be pickled and may reach another process, and the names that such pickles refer to.

Two kinds. *Public things* are pickled with the standard library, as a user would. *Payloads* are made by the codec of
the workers: arguments, results, exceptions, functions by value. An older worker must be able to load both, and so every
name of headgate in a pickle made now has to be one that was there when the recording was made.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import itertools
import pickle
import pickletools
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import headgate
from headgate import Resource, resources, stores, tasks, testing, workers
from tests.frozen import jobs
from tests.frozen.inside import (
    ActionTaken,
    BulkPayload,
    Event,
    PortableFunction,
    RoutineOptions,
    as_routine,
    clock,
    dump_arguments,
    dump_exception,
    dump_sent,
    dump_thrown,
    dump_whole,
    dumps,
    error_module,
    load_arguments,
    load_exception,
    loads,
    worker_events,
)
from tests.frozen.support import plain

PYTHON = sys.implementation.cache_tag
MODULES = {
    "headgate": headgate,
    "headgate.resources": resources,
    "headgate.stores": stores,
    "headgate.tasks": tasks,
    "headgate.testing": testing,
    "headgate.workers": workers,
}
"""Modules whose public names stay where they are."""


class Made(NamedTuple):
    """One pickle, and how it is read."""

    data: bytes
    load: Callable[[bytes], Any]
    portable: bool = True
    """Can another Python read it? One that holds compiled code cannot be read there."""
    fixed: bool = True
    """Is it the same each time? A class by value has an id that is drawn, and code names its file."""


# -- public things ----------------------------------------------------------------------------------------------------


def public_things() -> dict[str, Any]:
    """An example of each, with all its fields set."""
    metadata = workers.WorkerMetadata(
        "w-1", "unix:socket", 42, "0.1", frozenset({"gpu"}), True, {"option": 1}, {"extra": "x"}
    )
    task = workers.Task("client/1", "client/0", "jobs.add:1", 2.5, "acme")
    cooling = Resource("key-2", "sk-frozen-2", 3, "cooling_down", 12.5, 1.5, 2, tags=["fast"], weight=2.0)
    attempt = resources.Attempt("key-1", headgate.CooldownResource(3, "429"), 0.5)
    things: dict[str, Any] = {
        "CooldownResource": headgate.CooldownResource(12.5, "429"),
        "CooldownResource without": headgate.CooldownResource(),
        "DisableResource": headgate.DisableResource("revoked"),
        "RetryOperation": headgate.RetryOperation("odd"),
        "Resource": Resource("key-1", "sk-frozen-1"),
        "Resource with tags": Resource("key-1", ("sk-frozen-1", 1), 3, tags=["fast"], weight=2.0),
        "Resource that cools": cooling,
        "Resource of a subclass": jobs.Special("key-1", "sk-frozen-1", 1),
        "Attempt": attempt,
        "Usage": resources.Usage(3, "key-1", "request", "in_flight", 1.5),
        "WorkerMetadata": metadata,
        "WorkerView": workers.WorkerView(metadata, "ready", 2),
        "Task": task,
        "TaskException": workers.TaskException("LookupError", "Traceback ..."),
        "BackpressureContext": workers.BackpressureContext(2, task),
        "DiscoveryEvent": workers.DiscoveryEvent("worker-added", metadata),
        "Opaque": stores.Opaque("module.Class"),
        "KeyAge": tasks.KeyAge(*_filled(tasks.KeyAge).values()),
        "PoolStats of tasks": tasks.PoolStats(**_filled(tasks.PoolStats)),
        "ResourceStats": resources.ResourceStats(**_filled(resources.ResourceStats)),
        "PoolStats of resources": resources.PoolStats(**_filled(resources.PoolStats)),
        "TaskSnapshot": tasks.TaskSnapshot({"status": "completed", "result": [1], "error": LookupError("x")}),
        "PoolSnapshot": tasks.PoolSnapshot({"name": "p", "tasks": ()}),
        "Policy": tasks.backpressure_queue(3, "drop_fair"),
        "Hang": testing.Hang("who waits"),
        "Leak": testing.Leak("what is left"),
        "ContextDecodeWarning": headgate.ContextDecodeWarning("lost"),
        "ContextVarCollision": headgate.ContextVarCollision("twice"),
        "ContextVar": {"variables": [jobs.TENANT, jobs.LIMIT, jobs.TENANT]},
        "Token.MISSING": headgate.Token.MISSING,
        "routine": [jobs.add, jobs.count],
    }
    for name in ("fifo", "lifo", "priority", "fair_round_robin", "fair_share"):
        things[f"strategy {name}"] = getattr(tasks, name)()
    for name in ("round_robin", "weighted", "primary_backup", "sticky", "least_latency"):
        things[f"strategy {name} of resources"] = getattr(resources, name)()
    extra: dict[str, dict[str, Any]] = {
        "PoolExhausted": {"reason": "attempts", "attempts": [attempt], "retry_after": 1.5},
        "RoutineExited": {"exit_code": 3},
        "WorkerLost": {
            "task": "client/1",
            "worker": "w-1",
            "exit_code": 1,
            "signal": 9,
            "stderr": "last words",
            "neighbours": 4,
        },
    }
    for name, kind in vars(error_module).items():
        if isinstance(kind, type) and issubclass(kind, headgate.HeadgateError):
            error = kind(f"a {name}", remedy="Do something.", **extra.get(name, {}))
            error.add_note("a note")
            things[f"error {name}"] = error
            things[f"error {name} without"] = kind()
    for event in events():
        things[f"event {event.__name__}"] = event(**_filled(event))
    return things


def events() -> list[type[Event]]:
    """Every event of headgate, by name."""
    todo: list[type[Event]] = [Event, resources.ResourceEvent, tasks.PoolEvent, worker_events.WorkerEvent, ActionTaken]
    found: set[type[Event]] = set()  # naming these loads their modules, which are loaded when they are first used
    for kind in todo:
        todo += kind.__subclasses__()
        # A dataclass with slots is made twice, and the first one lives until it is collected.
        if kind.__module__.startswith("headgate.") and getattr(sys.modules[kind.__module__], kind.__name__) is kind:
            found.add(kind)
    return sorted(found, key=lambda kind: kind.__name__)


def _filled(kind: Any) -> dict[str, Any]:
    """A value for each field, by what its annotation says."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        said = str(field.type)
        if "Usage" in said and "Outcome" not in said:
            values[field.name] = resources.Usage(3, "key-1", "request", "done", 1.5)
        elif "TaskException" in said:
            values[field.name] = workers.TaskException("LookupError", "Traceback ...")
        elif said.startswith("float"):
            values[field.name] = 1.5
        elif said.startswith("int"):
            values[field.name] = 2
        elif said.startswith("bool"):
            values[field.name] = True
        elif said.startswith(("Mapping", "dict")):
            values[field.name] = {"name": 1}
        else:
            values[field.name] = field.name
    return values


def refusing() -> dict[str, Any]:
    """What belongs to its process and refuses to be pickled."""
    return {"ResourcePool": headgate.ResourcePool(["sk-frozen"]), "Context": headgate.copy_context()}


# -- payloads ---------------------------------------------------------------------------------------------------------

_MAIN = """
import headgate

LIMIT = headgate.ContextVar("main limit", namespace="frozen", default=4)

class Box:
    colour = "red"

class Machine:
    def __init__(self, value):
        self.value = value
    def double(self):
        return self.value * 2

class Trouble(Exception):
    pass

def plain(value, *, by=2):
    return value * by

def closure(amount):
    async def adds(value):
        return value + amount + LIMIT.get()
    return adds

@headgate.routine(timeout=5, retries=1)
async def called(value):
    return value + 1

@headgate.routine
async def counts(stop):
    for number in range(stop):
        yield number

async def calls(value):
    return called, counts, value
"""


@functools.cache
def main_program() -> dict[str, Any]:
    """Names of a main program: nobody can import it, so all that it defines travels by value."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(_MAIN, "main.py", "exec"), names)
    return names


def _chained() -> BaseException:
    """An exception with a cause, a context and notes."""
    error = jobs.Picky(5, detail="with a cause")
    error.__cause__ = KeyError("cause")
    error.__cause__.__context__ = OSError(2, "No such file", "name.txt")
    error.add_note("a note")
    return error


def _slotted() -> BaseException:
    error = jobs.Slotted("slots")
    error.place = "here"
    return error


def exceptions() -> dict[str, BaseException]:
    """Of each way in which exceptions are taken apart."""
    stateful = jobs.Stateful("state")
    stateful.seen = 3
    signal = headgate.DisableResource("revoked")
    signal.__cause__ = LookupError("why")
    return {
        "builtin": LookupError("no"),
        "own constructor, with a chain": _chained(),
        "slots": _slotted(),
        "own reduce": jobs.Reduced("itself"),
        "own state": stateful,
        "group": ExceptionGroup("two", [ValueError("one"), ExceptionGroup("inner", [jobs.Picky(1, detail="d")])]),
        "of headgate": headgate.WorkerLost("gone", task="client/1", signal=9, neighbours=2),
        "exhausted": headgate.PoolExhausted(
            reason="attempts", attempts=[resources.Attempt("a", headgate.RetryOperation("r"), 0.5)]
        ),
        "signal": signal,
        "cannot travel": jobs.Stuck("bad"),
        "chain that cannot travel": _with_cause(LookupError("fine"), jobs.Stuck("bad")),
        "signal that cannot travel": _holding(headgate.CooldownResource(7.5, "429")),
    }


def _with_cause(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def _holding(error: Any) -> BaseException:
    error.response = jobs.Stuck("a response")
    return error


def payloads() -> dict[str, Made]:
    """What the codec makes now."""
    main = main_program()
    box = main["Box"]()
    box.value = [1, 2]
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "atoms": ((1, "two", b"three", None, 4.5, True), {}),
        "containers": (([1, (2,)], {"a": {3}}), {"by": "name"}),
        "resource": ((Resource("key-1", "sk-frozen-1"), 5), {}),
        "cooling resource": ((Resource("key-1", "sk-frozen-1", 2, "cooling_down", 3.0, tags=["t"]),), {}),
        "objects": ((jobs.Point(1, jobs.Colour.RED), jobs.Pair(1, 2)), {}),
        "variables": ((jobs.TENANT, jobs.LIMIT), {}),
        "routine": ((jobs.add,), {"other": jobs.plain}),
        "object of the main program": ((box,), {}),
        "errors": ((headgate.QueueFull("full"), headgate.CooldownResource(3)), {}),
        "metadata": ((workers.WorkerMetadata("w", "a", 1, "v"), workers.Task("t", None, "tag")), {}),
    }
    made = {
        f"arguments: {name}": Made(
            _bytes(dump_arguments("tag", *given)), load_arguments, fixed="main program" not in name
        )
        for name, given in arguments.items()
    }
    made["arguments: code of the main program"] = Made(
        _bytes(dump_arguments("tag", (main["plain"], main["Machine"](4)), {})), _code_loaded, False, False
    )
    made["arguments: routines of the main program"] = Made(
        _bytes(dump_arguments("tag", (main["called"], main["counts"]), {})), _routines_loaded, False, False
    )
    for name, value in {
        "text": "result",
        "nested": {"a": [1, jobs.Point(1, 2)]},
        "missing": headgate.Token.MISSING,
    }.items():
        made[f"result: {name}"] = Made(_bytes(dumps(value)), loads)
        made[f"whole: {name}"] = Made(dump_whole(value), loads)
    made["sent: value"] = Made(_bytes(dump_sent("tag", jobs.Pair(1, [2]))), loads)
    made["whole: token"] = Made(contextvars.Context().run(_token), _token_loaded)
    made["thrown"] = Made(_bytes(dump_thrown(_chained())), loads)
    for name, error in exceptions().items():
        made[f"exception: {name}"] = Made(_bytes(dump_exception(error, "worker w-1")), load_exception)
    trouble = main["Trouble"]("of the main program")
    made["exception: of the main program"] = Made(
        _bytes(dump_exception(trouble, "worker w-1")), load_exception, fixed=False
    )
    for name, fn in {"plain": main["plain"], "closure": main["closure"](3), "calls": main["calls"]}.items():
        form = PortableFunction(fn, False).form(fn)
        made[f"function: {name}"] = Made(form.value, functools.partial(_called, name), False, False)
    for name, fn in {
        "object": jobs.Adder(3),
        "partial": functools.partial(jobs.undecorated, 3),
        "method": jobs.Adder(4).__call__,
        "partial generator": functools.partial(jobs.numbers, 3),
    }.items():
        routine = as_routine(fn, RoutineOptions())
        made[f"function: {name}"] = Made(
            routine.portable.form(routine.decorated).value, functools.partial(_called, name), False, False
        )
    return made


def large_payload() -> dict[str, Any]:
    """One whose long parts travel beside its pickle."""
    parcel = dumps(
        {"bytes": bytes(300_000), "array": bytearray(300_000), "buffer": pickle.PickleBuffer(bytes(300_000))}
    )
    assert isinstance(parcel, BulkPayload)
    parts = [[type(buffer).__name__, len(buffer)] for buffer in parcel.buffers]
    return {"pickle": parcel.pickle.hex(), "buffers": parts, "lifted": parcel.lifted}


def large_meaning(payload: dict[str, Any]) -> Any:
    """What such a payload means where it arrives."""
    buffers = [(bytes if kind == "bytes" else bytearray)(length) for kind, length in payload["buffers"]]
    return plain(loads(BulkPayload(bytes.fromhex(payload["pickle"]), buffers, payload["lifted"])))


def _bytes(payload: Any) -> bytes:
    assert isinstance(payload, bytes)
    return payload


def _token() -> bytes:
    names = itertools.count(1)
    with clock.replaced(token=lambda: f"frozen-{next(names)}"):
        token = jobs.TENANT.set("before")
        again = jobs.TENANT.set("now")
        return dump_whole([token, again])


def _token_loaded(data: bytes) -> Any:
    first, second = loads(data)
    return {"vars": [first.var, second.var], "old": [first.old_value is headgate.Token.MISSING, second.old_value]}


def _code_loaded(data: bytes) -> Any:
    (function, machine), _ = load_arguments(data)
    return [function(3, by=5), machine.double(), type(machine).__name__]


def _routines_loaded(data: bytes) -> Any:
    (called, counts), _ = load_arguments(data)
    return [_here(called, 4), _here(counts, 3)]


def _called(name: str, data: bytes) -> Any:
    function = loads(data)
    if isinstance(function, tuple):  # a group: it comes with the routines that it calls
        (function, *_), _ = function
    if name == "calls":
        called, counts, value = asyncio.run(function(5))
        return [_here(called, value), _here(counts, value)]
    return _here(function, *(() if name.startswith("partial") else (6,)))


def _here(function: Any, *args: Any) -> Any:
    """What it returns in this process."""

    async def run() -> Any:
        with headgate.do_dispatch(False):
            result = function(*args)
            if inspect.isasyncgen(result):
                return [item async for item in result]
            return await result if inspect.isawaitable(result) else result

    return asyncio.run(run())


def made_now() -> dict[str, Made]:
    """All pickles, by name."""
    public = {f"public: {name}": Made(_dumped(thing), pickle.loads) for name, thing in public_things().items()}
    return {**public, **payloads()}


def _dumped(thing: Any) -> bytes:
    return contextvars.Context().run(pickle.dumps, thing, 5)


def meaning(made: Made) -> Any:
    """What a pickle means where it is loaded."""
    return plain(contextvars.Context().run(made.load, made.data))


def group_of(name: str, made: Made) -> str:
    """Pickles of one kind are tested together."""
    kind, _, rest = name.partition(": ")
    if not made.portable:
        return "code"
    return f"{kind} {rest.split()[0]}s" if rest.startswith(("error ", "event ", "strategy ")) else kind


# -- what is in a pickle ----------------------------------------------------------------------------------------------


def names_in(data: bytes) -> set[str]:
    """Every global that a pickle refers to, as module:name, also in pickles that it holds as bytes."""
    found: set[str] = set()
    pushed: list[str] = []
    memo: dict[int, Any] = {}
    last: Any = None
    for code, arg, _ in pickletools.genops(data):
        if code.name == "GLOBAL":
            found.add(":".join(str(arg).split(" ", 1)))
        elif code.name == "STACK_GLOBAL":
            found.add(":".join(pushed[-2:]))
        if isinstance(arg, str) and "UNICODE" in code.name:
            pushed.append(arg)
            last = arg
        elif code.name == "MEMOIZE":
            memo[len(memo)] = last
        elif code.name in ("BINGET", "LONG_BINGET"):
            if isinstance(memo.get(int(str(arg))), str):
                pushed.append(memo[int(str(arg))])
        elif code.name != "FRAME":
            last = None
        if isinstance(arg, bytes):
            found |= _names_inside(arg)
    return found


def _names_inside(data: bytes) -> set[str]:
    if not data.startswith(b"\x80"):
        return set()
    try:
        return names_in(data)
    except Exception:  # it only looks like one
        return set()


def ours(names: set[str]) -> set[str]:
    """Those of headgate."""
    return {name for name in names if name.partition(":")[0].partition(".")[0] == "headgate"}


def operations(data: bytes) -> list[Any]:
    """What a pickle says, without the lengths of its frames: two that are equal load the same everywhere."""
    told: list[Any] = []
    for code, arg, _ in pickletools.genops(data):
        if code.name != "FRAME":
            inner = isinstance(arg, bytes) and arg.startswith(b"\x80")
            told.append([code.name, operations(arg) if inner else plain(arg)])
    return told


def importable_names() -> list[str]:
    """Public names, where a pickle may look for them: these stay."""
    return sorted(f"{module}:{name}" for module, found in MODULES.items() for name in found.__all__)
