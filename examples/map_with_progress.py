"""One function over many items through a pool: in order or as they are completed, in constant memory, with progress."""

import asyncio

from headgate import TaskPool


async def pages():
    """A source of items. Any iterable works, also an endless one."""
    for number in range(1, 9):
        yield number


async def fetch(page):
    await asyncio.sleep(0.02 * (9 - page))
    if page == 5:
        raise LookupError(f"page {page} is gone")
    return f"p{page}"


async def main():
    async with TaskPool("fetch", max_concurrent=4) as pool:
        # Progress goes to stderr: a bar on a terminal if rich is installed, else lines.
        found = [page async for page in pool.map(fetch, pages(), return_exceptions=True, progress="pages")]
        print("in order:", *found)

        found = [page async for page in pool.map(fetch, [1, 2, 3, 4], ordered=False)]
        print("as they are done:", *found)

        try:
            async for page in pool.map(fetch, pages()):
                print("got", page)
        except LookupError as error:
            print("stopped:", error)  # and the outstanding tasks are cancelled


asyncio.run(main())
