"""The pool sees only what happens inside the operation. From rotapool's README; only the import line is different."""

import asyncio

from headgate.resources import CooldownResource, Pool, Resource

pool = Pool(resources=[Resource(resource_id="key-1", value="sk-aaa"), Resource(resource_id="key-2", value="sk-bbb")])


class RateLimited(Exception):
    retry_after = 30.0


class Client:
    def __init__(self, key):
        self.key = key

    def __await__(self):
        yield from asyncio.sleep(0).__await__()  # connects
        return self

    async def get(self, path):
        if self.key == "sk-aaa":
            raise RateLimited
        return f"{path} with the second key"


build_client = Client


async def fetch(resource):
    client = build_client(resource.value)
    try:
        return await client.get("/things")
    except RateLimited as e:
        raise CooldownResource(cooldown_seconds=e.retry_after)  # noqa: B904 (as the README has it)


async def main():
    try:
        # WRONG — the actual API call is outside the pool's view.
        client = await pool.run(lambda r: build_client(r.value))
        response = await client.get("/things")  # invisible to pool
    except RateLimited:
        print("wrong: the caller got the 429, and key-1 is", pool.snapshot()["key-1"]["status"])

    await pool.run(lambda r: build_client(r.value))  # key-2 has its turn, key-1 is next

    # RIGHT — the call lives inside the operation, so 429s reach the pool.
    response = await pool.run(fetch)
    print("right:", response, "and key-1 is", pool.snapshot()["key-1"]["status"])


asyncio.run(main())
