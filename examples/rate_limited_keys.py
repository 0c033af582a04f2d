"""Keys that are rate-limited (429) and revoked (401). From rotapool's README; only the import line is different."""

import asyncio

import pretend_httpx as httpx  # in your code: import httpx

from headgate.resources import CooldownResource, DisableResource, Pool, Resource, parse_retry_after

# Define your resources (e.g. API keys)
pool = Pool(
    # A list or dict of Resource objects. Dict keys are used as resource IDs.
    resources=[
        Resource(
            resource_id="key-1",  # Unique identifier (used in logs, metrics, snapshot)
            value="sk-aaa",  # The actual resource value (generic type T)
            # max_in_flight=None, # Max concurrent usages per resource (None = unlimited)
        ),
        Resource(resource_id="key-2", value="sk-bbb"),
        Resource(resource_id="key-3", value="sk-ccc"),
    ],
    max_attempts=3,  # Total retry budget per run() call (capped at len(resources))
    cooldown_table=(30.0, 120.0, 300.0, 600.0),  # Escalation: 1st=30s, 2nd=120s, 3rd=300s, 4th+=600s
)


@pool.use(
    max_attempts=None,  # Override the pool's max_attempts for this decorated function
    deadline=None,  # Absolute time.monotonic() deadline; None = no deadline
    retry_delay=0.5,  # Seconds to pause between failed attempts
)
async def call_upstream(resource, url, payload):
    async with httpx.AsyncClient() as client:
        resp = await client.post(
            url,
            headers={"Authorization": f"Bearer {resource.value}"},
            json=payload,
        )
        if resp.status_code == 429:
            raise CooldownResource(
                cooldown_seconds=parse_retry_after(resp.headers.get("retry-after")),
                reason="rate limited",
            )
        if resp.status_code == 401:
            raise DisableResource(reason="invalid key")
        return resp.json()


async def main():
    httpx.will_answer("sk-aaa", 429)
    httpx.will_answer("sk-bbb", 401)
    result = await call_upstream("https://api.example.com/v1/chat", {"prompt": "hi"})
    print(result)
    for key, seen in pool.snapshot().items():
        print(f"{key}: {seen['status']}, {seen['cooldown_seconds_remaining']:.0f} s left")


asyncio.run(main())
