"""A proxy holds the keys, and programs in any language get a token: `headgate serve-keys`, with an API of our own."""

import asyncio
import json
import os
import signal
import sys

from small_upstream import Reply, Request, get, serve

KEYS = {"OLD_KEY": "sk-old-0123456789abcdef", "NEW_KEY": "sk-new-0123456789abcdef"}


async def api(request: Request) -> Reply:
    """An API that has revoked one of the keys."""
    key = request.headers["authorization"].removeprefix("Bearer ")
    if key == KEYS["OLD_KEY"]:
        return Reply(401, json.dumps({"error": {"message": f"Incorrect API key: {key}"}}))
    return Reply(200, json.dumps({"data": ["small-model", "large-model"]}))


async def main() -> None:
    async with serve(api) as upstream:  # in your code: --upstream https://api.example.com/v1
        command = [sys.executable, "-m", "headgate", "serve-keys", "--json", "--upstream", f"{upstream}/v1"]
        command += ["--keys", "env:OLD_KEY", "--keys", "env:NEW_KEY"]
        proxy = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **KEYS}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        assert proxy.stdout is not None
        told = json.loads(await proxy.stdout.readline())  # as OPENAI_BASE_URL and OPENAI_API_KEY for an SDK
        base, token = told["base_url"], {"authorization": f"Bearer {told['token']}"}

        print("with the token: ", (await get(f"{base}/models", token)).text)
        refused = await get(f"{base}/models", {"authorization": "Bearer something-else"})
        print("without it:     ", refused.status, json.loads(refused.text)["error"]["code"])
        refused = await get(f"{base}/organization/users", token)
        print("another path:   ", refused.status, json.loads(refused.text)["error"]["code"])
        state = json.loads((await get(f"{base.removesuffix('/v1')}/headgate/state", token)).text)
        print("state:          ", {key: one["status"] for key, one in state["keys"].items()})

        proxy.send_signal(signal.SIGTERM)
        print("exit code:      ", await proxy.wait())


asyncio.run(main())
