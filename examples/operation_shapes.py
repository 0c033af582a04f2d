"""An operation is anything that returns an awaitable. From rotapool's README; only the import line is different."""

import asyncio

import pretend_httpx as httpx  # in your code: import httpx

from headgate.resources import Pool, Resource

pool = Pool(resources=[Resource(resource_id="key-1", value="sk-aaa")])
url = "https://api.example.com/v1/chat"


async def some_async_helper(key, payload):
    return f"helped {payload}"


def blocking_request(key, payload):
    return f"blocked on {payload}"


# 1. async def -- the typical case.
@pool.use()
async def call_async(resource, payload):
    async with httpx.AsyncClient() as client:
        return await client.post(url, json=payload, headers={"Authorization": f"Bearer {resource.value}"})


# 2. Sync function returning a coroutine.
@pool.use()
def call_returning_coro(resource, payload):
    return some_async_helper(resource.value, payload)  # returns a coroutine


# 3. Sync function returning an asyncio.Future -- accepted and cancellable via Future.cancel().
@pool.use()
def call_in_thread(resource, payload):
    loop = asyncio.get_running_loop()
    return loop.run_in_executor(None, blocking_request, resource.value, payload)


# 4. Anything returning a plain Awaitable (custom __await__). Nothing can cancel it: it runs to its natural completion.
class Later:
    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return "awaited"


async def main():
    print((await call_async("one")).status_code)
    print(await call_returning_coro("two"))
    print(await call_in_thread("three"))
    print(await pool.run(lambda resource: Later()))
    try:
        await pool.run(lambda resource: 5)
    except TypeError as error:
        print(error)


asyncio.run(main())
