"""The recipes of docs/http.md for aiohttp and requests, as they stand there, against a real server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests

from headgate import PoolExhausted, ResourcePool
from tests.support.integrations.upstream import Answer, Upstream, refusal

pytestmark = pytest.mark.integration
PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text("utf-8")
MOST_LINES = 10

Ask = Callable[[Any], Any]


def recipe(title: str) -> str:
    """The first block of code below a heading."""
    found = re.search(rf"^## {title}\n.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def made(title: str, upstream: Upstream) -> tuple[ResourcePool[str], Any]:
    """The pool and the function `ask` of a recipe."""
    names: dict[str, Any] = {"URL": upstream.url}
    exec(recipe(title), names)
    return names["keys"], names["ask"]


def asked_by_aiohttp(upstream: Upstream) -> tuple[ResourcePool[str], Ask]:
    keys, ask = made("aiohttp", upstream)

    async def main(question: Any) -> tuple[int, Any]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            response = await ask(session, question)
            return response.status, await response.json()

    return keys, lambda question: asyncio.run(main(question))


def asked_by_requests(upstream: Upstream) -> tuple[ResourcePool[str], Ask]:
    keys, ask = made("requests", upstream)

    def main(question: Any) -> tuple[int, Any]:
        with requests.Session() as session:
            session.trust_env = False
            response = ask(session, question)
            return response.status_code, response.json()

    return keys, main


both = pytest.mark.parametrize("recipe_of", [asked_by_aiohttp, asked_by_requests], ids=["aiohttp", "requests"])
OK = Answer(200, {"content-type": "application/json"}, b'{"ok": true}')


@pytest.mark.parametrize("title", ["aiohttp", "requests"])
def test_c23_a_recipe_has_ten_lines(title: str) -> None:
    assert len(recipe(title).splitlines()) <= MOST_LINES


@both
def test_c23_a_recipe_moves_on_when_keys_are_refused(recipe_of: Any, upstream: Upstream) -> None:
    keys, ask = recipe_of(upstream)
    upstream.answers = {
        "sk-revoked": [refusal(429, "insufficient_quota")],  # only its body says that waiting would not help
        "sk-busy": [refusal(429, retry_after="60")],
        "sk-good": [OK],
    }
    assert [ask({"n": n}) for n in range(2)] == [(200, {"ok": True})] * 2
    assert upstream.keys == ["sk-revoked", "sk-busy", "sk-good", "sk-good"]
    assert [seen["status"] for seen in keys.snapshot().values()] == ["disabled", "cooling_down", "healthy"]
    assert 50 < keys.snapshot()["key-2"]["cooldown_seconds_remaining"] <= 60
    assert upstream.seen[-1].body.replace(b" ", b"") == b'{"n":1}'


@both
def test_c23_a_recipe_tries_again_after_errors_and_broken_connections(recipe_of: Any, upstream: Upstream) -> None:
    keys, ask = recipe_of(upstream)
    upstream.answers = {"sk-revoked": [refusal(503)], "sk-busy": [Answer(cut_at=-1)], "sk-good": [OK]}
    assert ask({}) == (200, {"ok": True})
    assert upstream.keys == ["sk-revoked", "sk-busy", "sk-good"]
    assert {seen["status"] for seen in keys.snapshot().values()} == {"healthy"}
    assert {seen["in_flight"] for seen in keys.snapshot().values()} == {0}


@both
def test_c23_a_recipe_gives_back_errors_of_the_request(recipe_of: Any, upstream: Upstream) -> None:
    keys, ask = recipe_of(upstream)
    upstream.answers = {"sk-revoked": [refusal(400, "invalid_request_error")]}
    status, body = ask({})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert upstream.keys == ["sk-revoked"]
    assert keys.snapshot()["key-1"]["status"] == "healthy"


@both
def test_c23_a_recipe_says_so_when_no_key_is_left(recipe_of: Any, upstream: Upstream) -> None:
    _, ask = recipe_of(upstream)
    upstream.answers = {key: [refusal(429, retry_after="30")] for key in ("sk-revoked", "sk-busy", "sk-good")}
    with pytest.raises(PoolExhausted) as caught:
        ask({})
    assert len(caught.value.attempts) == 3
    assert caught.value.retry_after is not None
    assert 20 < caught.value.retry_after <= 30
    assert "sk-" not in str(caught.value)
