"""A real worker process: what a client sends it and hears, and what it answers to the bytes of an older client."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Coroutine
from typing import Any

import grpc.aio
import pytest

import headgate
from tests.context.wiretap import Tap
from tests.frozen import jobs
from tests.frozen.frames import Conversation, packed, released, told
from tests.frozen.inside import CONVERSE, BulkPayload, FunctionForm, ToClient, dump_arguments, load_exception, loads
from tests.frozen.support import plain
from tests.workers.support import until

VOLATILE = frozenset(
    {"number", "function", "task", "digest", "python", "file", "value", "loan", "transfer", "caller", "count"}
)
"""Numbers and paths that are others each time: that they are there is recorded, and not what they are."""


NEXT = {"step": {"number": "...", "count": "..."}}
"""How many items are asked for at once depends on how fast they come."""


async def talk_to_a_worker(messages: list[str]) -> dict[str, Any]:
    """What goes over the wire for one call of each kind; and what the worker says to these recorded messages."""
    tap, patch = Tap(), pytest.MonkeyPatch()
    async with headgate.WorkerPool(spawn=1) as pool:
        tap.lay(patch)  # the conversation may be open already: what it said before is in the scripts
        try:
            sent = {}
            for name, call in _CALLS.items():
                tap.forget()
                sent[name] = await _seen(tap, call(pool, tap))
        finally:
            patch.undo()
        (worker,) = pool.workers()
        answered = await _answers(worker.address, [released(text) for text in messages])
    return {"calls": sent, "answers": answered}


async def _add(_: headgate.WorkerPool, __: Tap) -> Any:
    return await jobs.add(1, right=2)


async def _by_value(_: headgate.WorkerPool, __: Tap) -> Any:
    amount = 5

    @headgate.routine
    async def local(value: int) -> int:
        return value + amount

    return await local(2)


async def _fails(_: headgate.WorkerPool, __: Tap) -> Any:
    return await jobs.fail("remotely")


async def _thread(_: headgate.WorkerPool, __: Tap) -> Any:
    return await jobs.plain({"key": (1, b"x")})


async def _bulk(_: headgate.WorkerPool, __: Tap) -> Any:
    return await jobs.length(bytes(1_000_000))


async def _counts(_: headgate.WorkerPool, __: Tap) -> Any:
    return [item async for item in jobs.count(3)]


async def _echoes(_: headgate.WorkerPool, __: Tap) -> Any:
    stream = jobs.echo("first")
    items = [await anext(stream), await stream.asend("second"), await stream.athrow(KeyError("third"))]
    await stream.aclose()
    return items


async def _cancelled(_: headgate.WorkerPool, tap: Tap) -> Any:
    call = asyncio.ensure_future(jobs.hang())
    await until(lambda: tap.calls)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    return call.cancelled()


async def _context(_: headgate.WorkerPool, __: Tap) -> Any:
    jobs.TENANT.set("acme")
    return await jobs.tenant(), jobs.TENANT.get()


async def _task(workers: headgate.WorkerPool, _: Tap) -> Any:
    resources = headgate.ResourcePool([headgate.Resource("a", 41)])
    async with headgate.TaskPool("frozen-live", resources=resources, workers=workers) as pool:
        return await (await pool.submit(jobs.value_of, key="tenant"))


_CALLS = {
    "by reference": _add,
    "by value": _by_value,
    "raises": _fails,
    "thread": _thread,
    "bulk": _bulk,
    "stream": _counts,
    "steps": _echoes,
    "cancelled": _cancelled,
    "context": _context,
    "task of a pool": _task,
}


async def _seen(tap: Tap, call: Coroutine[Any, Any, Any]) -> dict[str, Any]:
    """The frames of one call in each direction, in their order; messages may be cut anywhere."""
    try:
        outcome = plain(await asyncio.create_task(call))
    except LookupError as error:
        outcome = plain(error)
    there, back = [], []
    for message in tap.sent:
        there += [_frame("definition", one) for one in message.definitions]
        there += [_frame("call", one) for one in message.calls]
        steps = [_frame("step", one) for one in message.steps]
        there += [step for step in steps if step != NEXT or there[-1] != NEXT]
        there += ["cancel" for _ in message.cancels]
    for answer in tap.received:
        back += [_frame("yield", one) for one in answer.yields]
        back += [_frame("result", one) for one in answer.results]
        back += [_frame("refusal", one) for one in answer.refusals]
    return {"outcome": outcome, "sent": there, "received": back}


def _frame(kind: str, frame: Any) -> dict[str, Any]:
    fields = {}
    for field, value in frame.ListFields():
        if field.name in VOLATILE:
            fields[field.name] = "..."
        elif field.name == "tag":
            fields["tag"] = value.rpartition(":")[0]
        elif field.name in ("arguments", "payload"):
            raised = kind == "result" and frame.kind == frame.RAISED
            fields[field.name] = plain(load_exception(value) if raised else loads(value))
        elif field.name == "context":
            fields[field.name] = value.hex()
        else:
            fields[field.name] = value
    return {kind: fields}


# -- an older client --------------------------------------------------------------------------------------------------


def messages_of_a_client() -> list[str]:
    """What a client of this release sends to a worker: functions by reference, a stream, an exception, a transfer."""
    talk = Conversation()
    talk.open()
    names = ("add", "fail", "plain", "length", "echo", "undecorated")
    forms = {
        name: FunctionForm(
            f"tests.frozen.jobs.{name}:1",
            "tests.frozen.jobs",
            name,
            thread=name == "plain",
            generator=name == "echo",
        )
        for name in names
    }
    talk.call(1, forms["add"], packed(20, right=22))
    talk.call(2, forms["fail"], packed("as told"), timeout=30.0)
    talk.call(3, forms["plain"], packed([1, 2]), tell_start=True, tenant="acme")
    talk.call(4, forms["undecorated"], packed("plain function"), context=b"")
    stream = talk.call(5, forms["echo"], packed("first"))
    long = dump_arguments("length", (bytes(600_000),), {})
    assert isinstance(long, BulkPayload)
    talk.call(6, forms["length"], long)
    talk.to_worker()
    talk.client.step(stream, "send", _pickled("second"))
    talk.to_worker()
    talk.client.step(stream, "throw", _pickled(KeyError("third")))
    talk.to_worker()
    talk.client.step(stream, "close")
    talk.to_worker()
    return [one["bytes"] for one in talk.record if one["to"] == "worker"]


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, 5)


async def _answers(address: str, messages: list[bytes]) -> dict[str, Any]:
    """Say this to a worker and listen until each of the calls has ended."""
    welcome: Any = None
    started: list[int] = []
    ends: dict[str, Any] = {}
    items: list[Any] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stream = channel.stream_stream(CONVERSE)()
        for data in messages:
            await stream.write(data)
            if welcome is None:
                hello = ToClient.FromString(await stream.read())
                welcome = [hello.HasField("refused"), hello.welcome.protocol, bool(hello.welcome.uid)]
        async with asyncio.timeout(20):
            while len(ends) < 6:
                message = ToClient.FromString(await stream.read())
                started += message.started
                items += [loads(item.payload) for item in message.yields]
                for result in message.results:
                    end = load_exception(result.payload) if result.kind == result.RAISED else None
                    value = end if end is not None else loads(result.payload) if result.payload else None
                    ends[str(result.number)] = [result.kind, plain(value)]
                ends |= {str(refusal.number): told(refusal) for refusal in message.refusals}
        stream.cancel()
    return {"welcome": welcome, "started": started, "items": items, "ends": dict(sorted(ends.items()))}
