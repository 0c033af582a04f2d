"""A FastAPI service whose tenants share two slots; one that asks too much gets 503 with Retry-After, others answers."""

import asyncio
import socket
from collections import Counter

try:
    import httpx
    import uvicorn
    from fastapi import FastAPI
except ImportError:
    raise SystemExit("This example needs: pip install fastapi httpx uvicorn") from None

from headgate import TaskPool, backpressure_queue, fair_round_robin
from headgate.integrations import asgi

fair = fair_round_robin("tenant_id")
full = backpressure_queue(6, "refuse_fair")  # no room: the tenant with the most queued tasks is refused
pool = TaskPool("answers", max_concurrent=2, queue=fair, backpressure=full)
app = FastAPI(lifespan=asgi.lifespan(pool, drain_timeout=20))
app.add_middleware(asgi.PoolErrors)
app.add_middleware(asgi.CancelOnDisconnect)
app.add_middleware(asgi.TenantHeader)  # x-tenant-id, which a gateway sets


@app.get("/ask")
async def ask(question: str) -> str:
    return await pool.run(answer, question)


async def answer(question):
    """Wait a little, in place of a model."""
    await asyncio.sleep(0.2)
    return f"{question} 42."


async def main():
    listening = socket.create_server(("127.0.0.1", 0))  # in your shell: uvicorn fastapi_service:app
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    url = "http://{}:{}/ask?question=6x7?".format(*listening.getsockname())
    async with httpx.AsyncClient() as client:
        senders = ["greedy"] * 20 + ["ann", "bob"]
        *greedy, ann, bob = await asyncio.gather(*(client.get(url, headers={"x-tenant-id": who}) for who in senders))
        print("greedy:", dict(sorted(Counter(reply.status_code for reply in greedy).items())))
        print("ann and bob:", ann.json(), bob.json())
        refused = next(reply for reply in greedy if reply.status_code == 503)
        print(refused.json(), "Retry-After:", refused.headers["retry-after"])
        print("without a tenant:", (await client.get(url)).status_code)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())
