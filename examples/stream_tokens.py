"""Tokens of a pretend language model, streamed from workers: two answers at once, one of which is stopped early."""

import asyncio
import os
from contextlib import aclosing

import headgate

ANSWERS = {
    "headgate": "A gate at the head of a canal that lets in as much water as the fields below can take .",
    "canal": "A river that was told where to go , and went there , and is asked ever since why it does not hurry .",
}


@headgate.routine
async def tokens(prompt):
    """Runs on a worker and produces one token for each that is read. However it ends, the model is free again."""
    said = 0
    try:
        for token in ANSWERS[prompt].split():
            await asyncio.sleep(0.01)  # the model thinks
            said += 1
            yield token, os.getpid()
    except GeneratorExit:
        print(f"model: stopped after {said} tokens on the {prompt}", flush=True)
        raise


async def answer(prompt, enough=None):
    """Read a stream; return the text and the process that produced it."""
    read, pids = [], set()
    async with aclosing(tokens(prompt)) as stream:  # closes the stream at once when we leave it early
        async for token, pid in stream:
            read.append(token)
            pids.add(pid)
            if len(read) == enough:
                break
    return " ".join(read), pids


async def main():
    async with headgate.WorkerPool(spawn=2):
        async with asyncio.TaskGroup() as group:
            whole = group.create_task(answer("headgate"))
            part = group.create_task(answer("canal", enough=8))
    (text, pids), (beginning, other_pids) = whole.result(), part.result()
    print("whole:", text)
    print("part:", beginning)
    print("said by two workers, and this process is neither:", len(pids | other_pids | {os.getpid()}) == 3)


asyncio.run(main())
