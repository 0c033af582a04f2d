"""Hold a resource for several steps. A lease retries nothing, but the pool learns from a signal raised in it."""

import asyncio

from headgate import CooldownResource, DisableResource, Resource, ResourcePool


class Browser:
    """In place of a webdriver session; one of them has crashed."""

    def __init__(self, crashed=False):
        self.crashed = crashed

    async def open(self, path):
        await asyncio.sleep(0.01)
        if self.crashed:
            raise ConnectionError("session is gone")
        return f"page {path}"


pool = ResourcePool(
    [
        Resource("browser-1", Browser(crashed=True), max_in_flight=1),
        Resource("browser-2", Browser(), max_in_flight=1),
    ]
)


async def visit():
    async with pool.lease(wait_for_capacity=True) as browser:
        try:
            pages = [await browser.value.open(path) for path in ("/login", "/cart")]
        except ConnectionError as error:
            raise DisableResource(reason=str(error)) from error
        return browser.resource_id, pages


async def main():
    for _ in range(3):
        try:
            print(await visit())
        except (CooldownResource, DisableResource) as signal:
            print(f"not this time: {signal}")
    print(pool)


asyncio.run(main())
