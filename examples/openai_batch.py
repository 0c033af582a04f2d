"""A batch with the OpenAI SDK: keys that are limited rest, a revoked one is dropped, and tenants take turns.

The function only asks. The client reports to its key what answers say about limits and tokens, and the pool judges the
errors that the SDK raises.
"""

import asyncio
import json
import os
from collections import Counter

from small_upstream import Reply, serve

from headgate import ResourcePool, TaskPool, fair_round_robin
from headgate.integrations import openai

keys = ResourcePool({"key-1": "sk-aaa", "key-2": "sk-bbb", "key-3": "sk-ccc"}, quota="learn", cancel_siblings=False)
prompts = [{"tenant": "acme", "text": f"Question {number}", "tokens": 20} for number in range(90)]
prompts += [{"tenant": "bolt", "text": text, "tokens": 20} for text in ("An urgent question", "Another one")]
finished = []


async def ask(key, prompt):
    client = openai.client(key)  # an AsyncOpenAI that uses this key
    messages = [{"role": "user", "content": prompt["text"]}]
    answer = await client.chat.completions.create(model="gpt", messages=messages)
    finished.append(prompt["tenant"])
    return answer.choices[0].message.content


async def main():
    async with serve(provider) as url:
        os.environ["OPENAI_BASE_URL"] = f"{url}/v1"  # in place of api.openai.com
        async with TaskPool("batch", max_concurrent=8, resources=keys, queue=fair_round_robin("tenant")) as pool:
            answers = [one async for one in pool.map(ask, prompts, tenant="tenant", cost="tokens", window=100)]
    print(len(answers), "answers, the last one:", answers[-1])
    print("bolt did not wait for acme:", finished.index("bolt") < 30)
    print("key-2:", keys.snapshot()["key-2"]["status"])
    print("refused by the provider, with:", *sorted(refused))


asked, refused = Counter(), Counter()


async def provider(request):
    """Answer as the API of OpenAI does."""
    key = request.headers["authorization"].removeprefix("Bearer ")
    asked[key] += 1
    status = 401 if key == "sk-bbb" else 429 if asked[key] % 16 == 0 else 200
    if status != 200:
        refused[status] += 1
        return Reply(status, '{"error": {"message": "no"}}', {"retry-after": "0.1"})
    message = {"role": "assistant", "content": "Answer to " + json.loads(request.text)["messages"][0]["content"]}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "gpt", "choices": [choice]}
    return Reply(200, json.dumps(body), {"content-type": "application/json"})


asyncio.run(main())
