"""Streamed answers of the Anthropic SDK: until its first byte a stream moves to another key, and after it never."""

import asyncio
import json

from small_upstream import Reply, serve

from headgate import ResourcePool
from headgate.integrations import anthropic

keys = ResourcePool({"key-1": "sk-aaa", "key-2": "sk-bbb", "key-3": "sk-ccc"}, cancel_siblings=False)
asked = []


async def main():
    async with serve(provider) as url, anthropic.client(keys, base_url=url) as sdk:  # an AsyncAnthropic
        question = {"model": "claude", "max_tokens": 100, "messages": [{"role": "user", "content": "What is scarce?"}]}
        for _ in range(2):
            async with sdk.messages.stream(**question) as stream:
                print("|".join([text async for text in stream.text_stream]))
    print("asked with", *asked)
    print({key: seen["status"] for key, seen in keys.snapshot().items()})


async def provider(request):
    """Answer as the API of Anthropic does: one key is overloaded, another breaks off before the first byte."""
    key = request.headers["x-api-key"]
    asked.append({"sk-aaa": "key-1", "sk-bbb": "key-2", "sk-ccc": "key-3"}[key])
    if key == "sk-aaa":
        return Reply(529, '{"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}')
    if key == "sk-bbb":
        raise ConnectionError
    text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events())
    return Reply(200, text, {"content-type": "text/event-stream"})


def events():
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "claude", "content": [], "usage": usage}
    yield {"type": "message_start", "message": message}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    for word in ("keys", "slots", "workers"):
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
    yield {"type": "content_block_stop", "index": 0}
    yield {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}
    yield {"type": "message_stop"}


asyncio.run(main())
