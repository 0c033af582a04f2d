"""A context value that cannot be read on the other side is dropped with a warning; strict mode raises the warning."""

import asyncio
import os
import warnings

import headgate

trace = headgate.ContextVar("trace", default="no trace")


class Span:
    """An object that cannot be read in another process, like one whose class does not exist there."""

    def __reduce__(self):
        return only_in, (os.getpid(),)


def only_in(pid):
    if os.getpid() != pid:
        raise LookupError("no such span here")
    return Span()


@headgate.routine
async def answer():
    trace.set(Span())  # is sent back with the result, and cannot be read by the caller
    return 42


async def main():
    async with headgate.WorkerPool(spawn=1):
        with warnings.catch_warnings():
            warnings.simplefilter("default", headgate.ContextDecodeWarning)  # the warning is shown on stderr
            print("lenient:", await answer(), "and", trace.get())

        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", headgate.ContextDecodeWarning)
            print("recorded:", await answer(), "and", *[warning.message for warning in seen])

        with warnings.catch_warnings():
            warnings.simplefilter("error", headgate.ContextDecodeWarning)
            try:
                await answer()
            except headgate.ContextDecodeWarning as error:
                print("strict:", error)

    os.environ["PYTHONWARNINGS"] = "error::headgate.ContextDecodeWarning"  # for workers that are started from now on
    trace.set(Span())
    async with headgate.WorkerPool(spawn=1):
        try:
            await answer()
        except headgate.ContextDecodeWarning as error:
            print("strict on the worker:", error)


asyncio.run(main())
