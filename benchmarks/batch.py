"""A batch of prompts over five keys that are limited and revoked: headgate, asyncio with tenacity, LiteLLM's Router.

    make bench          about two minutes
    make bench-quick    about 20 seconds

All three have the same upstream (contestants/upstream.py, a process of its own, made anew for each turn) and the same
number of calls at a time. They take turns in one process. Counted by the upstream: refused requests, prompts that were
answered twice, and so paid twice, prompts that were never answered. The ratios are against the quicker of the two
others in the same round. The program prints MISSED for a figure that does not reach its minimum ("must"), and exits
with 0 all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import table
from table import Bar, median, times

import headgate
from headgate.resources import parse_retry_after

HERE = Path(__file__).parent
KEYS = {f"key-{number}": f"sk-{number}" for number in range(1, 6)}
AT_A_TIME = 40
TIME, REFUSED, NONE = Bar(0.95, at_most=True), Bar(0.6, at_most=True), Bar(0, at_most=True)


@dataclass(frozen=True, slots=True)
class Batch:
    """How many prompts there are, what the upstream allows, and how often each contestant runs."""

    prompts: int
    limit: int
    window: float
    revoke_after: int
    rounds: int


FULL = Batch(prompts=2000, limit=40, window=1.0, revoke_after=100, rounds=3)
QUICK = Batch(prompts=300, limit=20, window=0.5, revoke_after=20, rounds=1)

Contestant = Callable[[str, Sequence[str]], Awaitable[list[Any]]]
"""Gets the address of the upstream and the prompts; returns the answers."""


def payload(prompt: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}]}


async def ours(url: str, prompts: Sequence[str]) -> list[Any]:
    """A TaskPool with resources: a key that is limited rests for all tasks, a prompt waits for another key."""
    keys = headgate.ResourcePool(KEYS, max_in_flight=4, cancel_siblings=False)
    async with httpx.AsyncClient(timeout=30) as client:

        async def ask(key: headgate.Resource, prompt: str) -> str:
            headers = {"Authorization": f"Bearer {key.value}"}
            reply = await client.post(f"{url}/v1/chat/completions", json=payload(prompt), headers=headers)
            if reply.status_code == 429:
                raise headgate.CooldownResource(parse_retry_after(reply.headers.get("retry-after")), "429")
            if reply.status_code == 401:
                raise headgate.DisableResource("401")
            reply.raise_for_status()
            return str(reply.json()["choices"][0]["message"]["content"])

        async with headgate.TaskPool(max_concurrent=AT_A_TIME, resources=keys) as pool:
            return [answer async for answer in pool.map(ask, prompts)]


async def with_tenacity(url: str, prompts: Sequence[str]) -> list[Any]:
    """A semaphore, keys in turn, and tenacity, which waits for as long as Retry-After says and drops revoked keys."""
    import tenacity

    keys, semaphore = list(KEYS.values()), asyncio.Semaphore(AT_A_TIME)

    class Limited(Exception):
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return (error.seconds if isinstance(error, Limited) else 0.0) + random.uniform(0, 0.1)

    async with httpx.AsyncClient(timeout=30) as client:

        @tenacity.retry(
            retry=tenacity.retry_if_exception_type(Limited),
            wait=wait,
            stop=tenacity.stop_after_attempt(50),
            reraise=True,
        )
        async def ask(prompt: str) -> str:
            key = random.choice(keys)
            headers = {"Authorization": f"Bearer {key}"}
            reply = await client.post(f"{url}/v1/chat/completions", json=payload(prompt), headers=headers)
            if reply.status_code == 429:
                raise Limited(float(reply.headers["retry-after"]))
            if reply.status_code == 401:
                with contextlib.suppress(ValueError):
                    keys.remove(key)
                raise Limited(0.0)
            reply.raise_for_status()
            return str(reply.json()["choices"][0]["message"]["content"])

        async def one(prompt: str) -> str:
            async with semaphore:
                return await ask(prompt)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts), return_exceptions=True))


async def with_litellm(url: str, prompts: Sequence[str]) -> list[Any]:
    """LiteLLM's Router with a deployment for each key, its cooldowns and its retries."""
    import litellm

    litellm.suppress_debug_info = True
    deployments = [
        {"model_name": "m", "litellm_params": {"model": "openai/m", "api_key": key, "api_base": f"{url}/v1"}}
        for key in KEYS.values()
    ]
    router = litellm.Router(model_list=deployments, num_retries=50, cooldown_time=1, allowed_fails=1)
    semaphore = asyncio.Semaphore(AT_A_TIME)

    async def one(prompt: str) -> str:
        async with semaphore:
            reply = await router.acompletion(model="m", messages=payload(prompt)["messages"])
            return str(reply.choices[0].message.content)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts), return_exceptions=True))


CONTESTANTS: dict[str, Contestant] = {
    "headgate": ours,
    "asyncio + tenacity": with_tenacity,
    "LiteLLM Router": with_litellm,
}


@contextlib.contextmanager
def upstream(batch: Batch) -> Iterator[str]:
    """A process that plays the provider; gives its address."""
    arguments = [str(batch.limit), str(batch.window), str(batch.revoke_after)]
    program = [sys.executable, str(HERE / "contestants" / "upstream.py"), *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


async def measured(contestant: Contestant, batch: Batch) -> dict[str, float]:
    """Run one contestant against an upstream of its own; returns what was counted."""
    prompts = [f"prompt {number}" for number in range(batch.prompts)]
    with upstream(batch) as url:
        began = time.perf_counter()
        answers = await contestant(url, prompts)
        seconds = time.perf_counter() - began
        async with httpx.AsyncClient() as client:
            counts = (await client.get(f"{url}/counts")).json()
    right = sum(answer == f"answer to {prompt}" for prompt, answer in zip(prompts, answers, strict=True))
    return {"seconds": seconds, "lost": batch.prompts - right, **counts}


async def run(batch: Batch) -> dict[str, list[dict[str, float]]]:
    """Let the contestants take turns."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for turn in range(batch.rounds):
        for name, contestant in CONTESTANTS.items():
            seen[name].append(await measured(contestant, batch))
            table.say(f"  round {turn + 1}: {name}: {seen[name][-1]}")
    return seen


def ratios(seen: dict[str, list[dict[str, float]]], field: str) -> list[float]:
    """Ours against the quicker of the others, round by round."""
    others = [rounds for name, rounds in seen.items() if name != "headgate"]
    quicker = [min(beside, key=lambda turn: turn["seconds"]) for beside in zip(*others, strict=True)]
    return [own[field] / max(1e-9, other[field]) for own, other in zip(seen["headgate"], quicker, strict=True)]


def report(batch: Batch, seen: dict[str, list[dict[str, float]]]) -> None:
    """Print what was counted, and the ratios."""
    fields = ("seconds", "refused", "paid_twice", "lost")
    rows = [
        [name, *(f"{median([turn[field] for turn in rounds]):,.6g}" for field in fields)]
        for name, rounds in seen.items()
    ]
    title = f"{batch.prompts} prompts, 5 keys of {batch.limit} requests in {batch.window:g} s, one of them revoked"
    table.print_table(title, ["", "seconds", "refused", "paid twice", "lost"], rows)
    judged = []
    for what, bar in (("seconds", TIME), ("refused", REFUSED)):
        ratio = median(ratios(seen, what))
        judged.append([what, times(ratio), times(bar.must), bar.verdict(ratio)])
    for what in ("paid_twice", "lost"):
        most = max(turn[what] for turn in seen["headgate"])
        judged.append([what, f"{most:g}", "0", NONE.verdict(most)])
    table.print_table("headgate against the quicker of the others", ["", "ratio", "must (at most)", ""], judged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts, one round")
    batch = QUICK if parser.parse_args().quick else FULL
    logging.disable(logging.ERROR)  # each contestant reports limited keys in its own way
    warnings.simplefilter("ignore")
    table.warn_if_busy()
    seen = asyncio.run(run(batch))
    report(batch, seen)
    table.keep("batch", {"prompts": batch.prompts, "rounds": seen})


if __name__ == "__main__":
    main()
