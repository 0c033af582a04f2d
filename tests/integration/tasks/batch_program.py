"""A batch as a user would write it: prompts over keys, against an HTTP upstream, resumable. Run by tests."""

import asyncio
import json
import sys
import urllib.error
import urllib.request

import headgate

folder, url = sys.argv[1:]
keys = headgate.ResourcePool(
    [headgate.Resource(f"key-{n}", f"sk-{n}", max_in_flight=4) for n in range(5)], cancel_siblings=False
)


def post(key, prompt):
    request = urllib.request.Request(url, json.dumps(prompt).encode(), {"Authorization": f"Bearer {key.value}"})
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 429:
            raise headgate.CooldownResource(float(error.headers["Retry-After"]), "429") from None
        raise headgate.DisableResource("revoked") from None


async def ask(key, prompt):
    return await asyncio.to_thread(post, key, prompt)


with open(f"{folder}/prompts.jsonl") as file:
    prompts = [json.loads(line) for line in file]


async def main():
    async with headgate.TaskPool(
        "answers", max_concurrent=12, resources=keys, scope="pipeline", pipeline_id="prompts", on_signal="drain"
    ) as pool:
        print("ready", flush=True)  # noqa: T201 - for the test
        with open(f"{folder}/answers.jsonl", "w") as out:  # noqa: ASYNC230 - short
            async for answer in pool.map(ask, prompts, idempotency_key="id"):
                print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
