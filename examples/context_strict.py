"""A value that cannot be read where it arrives: it is dropped with a warning, the result is not. Unless you say so."""

import asyncio
import os
import warnings

import headgate

trace = headgate.ContextVar("trace", default="no trace")


class Span:
    """Cannot be read in another process: as with a class that the other side does not have."""

    def __reduce__(self):
        return only_in, (os.getpid(),)


def only_in(pid):
    if os.getpid() != pid:
        raise LookupError("no such span here")
    return Span()


@headgate.routine
async def answer():
    trace.set(Span())  # goes back with the result, and cannot be read there
    return 42


async def main():
    async with headgate.WorkerPool(spawn=1):
        with warnings.catch_warnings():
            warnings.simplefilter("default", headgate.ContextDecodeWarning)  # it is shown on stderr
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
