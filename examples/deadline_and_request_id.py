"""Options of one call are passed to run(). From rotapool's README; only the import line is different."""

import asyncio
import time

import pretend_httpx as httpx  # in your code: import httpx

import headgate
from headgate.resources import CooldownResource, DisableResource, Pool, Resource

pool = Pool(resources=[Resource(resource_id="key-1", value="sk-aaa"), Resource(resource_id="key-2", value="sk-bbb")])


async def call_upstream(resource, url, payload):
    async with httpx.AsyncClient() as client:
        resp = await client.post(
            url,
            headers={"Authorization": f"Bearer {resource.value}"},
            json=payload,
        )
        if resp.status_code == 429:
            raise CooldownResource(reason="rate limited")
        if resp.status_code == 401:
            raise DisableResource(reason="invalid key")
        return resp.json()


async def main():
    httpx.will_answer("sk-aaa", 429, 429)
    headgate.subscribe(lambda event: print(f"{event.request_id}: {event.outcome}"), "resources.run")

    # Operation receives the selected Resource as its first argument.
    result = await pool.run(
        lambda resource: call_upstream(resource, "https://api.example.com/v1/chat", {"prompt": "hi"}),
        max_attempts=None,  # Override the pool's max_attempts for this call only
        deadline=time.monotonic() + 30,  # Absolute time.monotonic() deadline bounding total retry time
        retry_delay=0.5,  # Seconds to pause between failed attempts
        request_id="req-abc",  # Opaque string attached to every Usage; auto-UUID when None
    )
    print(result["served_with"])

    httpx.will_answer("sk-bbb", 401)
    try:
        await pool.run(lambda resource: call_upstream(resource, "https://api.example.com", {}), request_id="req-def")
    except headgate.PoolExhausted as error:
        print(f"{error.reason}: {error}")


asyncio.run(main())
