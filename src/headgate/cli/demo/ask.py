"""The function of the demo that runs on workers. It is apart from the rest, so that a worker imports little."""

from __future__ import annotations

from headgate.cli.demo.upstream import request
from headgate.resources import CooldownResource, DisableResource, Resource, RetryOperation, parse_retry_after


async def ask(key: Resource[str], api: str, question: str) -> str:
    """Runs on a worker: send one request, and raise a signal if the answer says something about the key."""
    answer = await request(api, key.value, question)
    if answer.status == 429:
        raise CooldownResource(parse_retry_after(answer.headers.get("retry-after")), "rate limited")
    if answer.status == 401:
        raise DisableResource("key revoked")
    if answer.status == 502:
        raise RetryOperation("bad gateway")
    return answer.body
