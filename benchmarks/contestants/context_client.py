"""The process of `context.py`: opens our pool, and measures what it is asked, with variables set and without.

python context_client.py serve     a line of JSON asks, a line of JSON answers, until the end of input
python context_client.py frames    the bytes of single calls and of their answers, once
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from client import how_many_each, measure_calls, measure_latency

SETS = 10_000


async def answered(asked: dict[str, Any]) -> Any:
    """In a task of its own: what is set here is gone after it."""
    from ours_context import VARIABLES, set_and_add, set_here, set_objects
    from ours_context import add as plain_add

    add = plain_add
    match asked["values"]:
        case "none":
            pass
        case "texts":
            set_here(len(VARIABLES), times=1)
        case "new":
            set_here(len(VARIABLES), times=1)
            add = set_and_add
        case "objects":
            set_objects()
        case unknown:
            raise ValueError(f"asked for {unknown}")
    match asked:
        case {"measure": "calls", "callers": callers, "each": each}:
            return callers * each / await measure_calls(add, callers, each)
        case {"measure": "each", "callers": callers, "seconds": seconds}:
            return await how_many_each(add, callers, seconds)
        case {"measure": "latency", "calls": many}:
            return await measure_latency(add, many)
        case unknown:
            raise ValueError(f"asked for {unknown}")


async def serve() -> None:
    import headgate

    answer = _answering()
    async with headgate.WorkerPool(spawn=2):
        while line := await asyncio.to_thread(sys.stdin.readline):
            answer(await asyncio.create_task(answered(json.loads(line))))


# -- frames -----------------------------------------------------------------------------------------------------------


class Watched:
    """What goes over the stream, as the client's sessions write and read it."""

    def __init__(self) -> None:
        from headgate.workers.protocol.client_session import ClientSession

        self.calls: list[Any] = []
        self.results: list[Any] = []
        take, receive = ClientSession.take, ClientSession.receive

        def watched_take(session: ClientSession) -> Any:
            message = take(session)
            self.calls += message.calls if message is not None else ()
            return message

        def watched_receive(session: ClientSession, message: Any) -> Any:
            self.results += message.results
            return receive(session, message)

        ClientSession.take = watched_take  # type: ignore[method-assign]
        ClientSession.receive = watched_receive  # type: ignore[method-assign]

    def last(self) -> dict[str, int]:
        """Bytes of the last call and of its answer, and those that are context."""
        call, result = self.calls[-1], self.results[-1]
        return {
            "call": call.ByteSize(),
            "call_context": len(call.context),
            "result": result.ByteSize(),
            "result_context": len(result.context),
        }


async def frames() -> None:
    """Few calls, so that their numbers take a byte: what differs is the context."""
    from ours_context import add, set_here, set_there

    import headgate

    watched = Watched()

    async def sent(variables: int, times: int, *, keep: bool = False) -> dict[str, int]:
        tokens = set_here(variables, times)
        if not keep:
            tokens.clear()
        await add(1, 2)
        return watched.last()

    async def answered_with(times: int) -> dict[str, int]:
        await set_there(f"{times:05}")
        return watched.last()

    cases = {
        "nothing": lambda: sent(0, 0),
        "1 variable, once": lambda: sent(1, 1),
        f"1 variable, {SETS:,} times": lambda: sent(1, SETS),
        f"1 variable, {SETS:,} times, tokens kept": lambda: sent(1, SETS, keep=True),
        "10 variables, once": lambda: sent(10, 1),
        "by the routine, once": lambda: answered_with(1),
        f"by the routine, {SETS:,} times": lambda: answered_with(SETS),
    }
    answer = _answering()
    async with headgate.WorkerPool(spawn=2):
        for _ in range(4):  # both workers know both functions
            await asyncio.create_task(sent(0, 0))
            await asyncio.create_task(answered_with(1))
        answer({what: await asyncio.create_task(case()) for what, case in cases.items()})


def _answering() -> Any:
    # What a library or a worker prints goes where errors go: standard output is for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    return lambda value: print(json.dumps(value), file=answers, flush=True)


if __name__ == "__main__":
    asyncio.run({"serve": serve, "frames": frames}[sys.argv[1]]())
