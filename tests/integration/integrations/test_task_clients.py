"""C25: the released SDKs inside tasks that were given a key, against a real server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import httpx2
import pytest

import headgate
from headgate import InvalidType, Quota, Resource, ResourcePool, TaskPool
from headgate.integrations import openai as our_openai
from headgate.integrations.httpx import RotatingSyncTransport, RotatingTransport
from tests.integration.integrations.test_sdks import ANTHROPIC, MESSAGES, OPENAI, Sdk, every_sdk, pool_of, statuses
from tests.support.integrations.upstream import Answer, Seen, Upstream, refusal, streamed, usual

pytestmark = pytest.mark.integration

TOLD = {
    "openai": {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "41",
        "x-ratelimit-reset-requests": "60s",
        "x-ratelimit-limit-tokens": "9000",
        "x-ratelimit-remaining-tokens": "5000",
        "x-ratelimit-reset-tokens": "60s",
    },
    "anthropic": {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "41",
        "anthropic-ratelimit-requests-reset": "2100-01-01T00:00:00Z",
        "anthropic-ratelimit-tokens-limit": "9000",
        "anthropic-ratelimit-tokens-remaining": "5000",
        "anthropic-ratelimit-tokens-reset": "2100-01-01T00:00:00Z",
    },
}
USED = {"openai": {"prompt_tokens": 30, "completion_tokens": 7, "total_tokens": 37}}
USED["anthropic"] = {"input_tokens": 30, "output_tokens": 7}
every_form = pytest.mark.parametrize("of", ["the key", "the pool"])


def telling(sdk: Sdk) -> Callable[[Seen], Answer]:
    """Answers as usual, with limits in the headers and tokens in the body."""
    name = sdk.module.__name__

    def answer(seen: Seen) -> Answer:
        given = usual(seen)
        assert isinstance(given.body, bytes)
        body = {**json.loads(given.body), "usage": USED[name]}
        return Answer(200, {**given.headers, **TOLD[name]}, json.dumps(body).encode())

    return answer


def in_tasks(
    sdk: Sdk, upstream: Upstream, keys: ResourcePool[str], of: str = "the key", count: int = 6, **options: Any
) -> list[Any]:
    """Ask in tasks that are given keys, with the client of one of the documented forms."""

    async def main() -> list[Any]:
        base_url = sdk.base_url(upstream)
        async with (
            sdk.ours.client(keys, base_url=base_url) as client,
            TaskPool(max_concurrent=3, resources=keys) as pool,
        ):

            async def ask(key: Resource[str], number: int) -> dict[str, Any]:
                chosen = sdk.ours.client(key, base_url=base_url) if of == "the key" else client
                return {"number": number, "answer": await sdk.ask(chosen)}

            return [one async for one in pool.map(ask, range(count), **options)]

    return asyncio.run(asyncio.wait_for(main(), 30))


def answers(count: int) -> list[dict[str, Any]]:
    return [{"number": number, "answer": "hello"} for number in range(count)]


# -- errors ------------------------------------------------------------------------------------------------------------


@every_sdk
def test_c25_r80_a_task_that_simply_raises_the_errors_of_an_sdk_loses_nothing(sdk: Sdk, upstream: Upstream) -> None:
    """As everybody writes it first: the SDK's own client, and nothing that translates its errors."""
    keys = ResourcePool({key: key for key in ("revoked", "limited", "good")}, cancel_siblings=False)
    upstream.answers = {
        "revoked": [refusal(401, "authentication_error")],
        "limited": [refusal(429, "rate_limit_error", retry_after="40")],
    }

    async def ask(key: Resource[str], number: int) -> str:
        async with sdk.usual(api_key=key.value, base_url=sdk.base_url(upstream), max_retries=0) as client:
            return await sdk.ask(client)

    async def main() -> list[str]:
        async with TaskPool(max_concurrent=2, resources=keys) as pool:
            return [one async for one in pool.map(ask, range(6))]

    assert asyncio.run(main()) == ["hello"] * 6
    assert statuses(keys) == {"revoked": "disabled", "limited": "cooling_down", "good": "healthy"}
    assert upstream.keys.count("revoked") <= 2
    assert 35 < keys.snapshot()["limited"]["cooldown_seconds_remaining"] <= 40


@every_sdk
@every_form
def test_c25_a_client_inside_a_task_rotates_with_the_tasks(sdk: Sdk, of: str, upstream: Upstream) -> None:
    keys = pool_of("revoked", "limited", "broken", "good")
    upstream.answers = {
        "revoked": [refusal(401, "authentication_error")],
        "limited": [refusal(429, "rate_limit_error", retry_after="40")],
        "broken": [Answer(cut_at=-1), *[refusal(503)] * 2, usual(Seen(None, sdk.path + "/messages", {}, b""))]
        if sdk is ANTHROPIC
        else [Answer(cut_at=-1), *[refusal(503)] * 2, usual(Seen(None, "/v1/chat/completions", {}, b""))],
    }
    assert in_tasks(sdk, upstream, keys, of, max_attempts=10) == answers(6)
    assert statuses(keys) == {"revoked": "disabled", "limited": "cooling_down", "broken": "healthy", "good": "healthy"}
    assert all(one["in_flight"] == 0 for one in keys.snapshot().values())


@every_sdk
def test_c25_the_sdks_own_retries_do_not_hold_a_key_that_was_refused(sdk: Sdk, upstream: Upstream) -> None:
    keys = pool_of("bad", "good")
    upstream.answers = {"bad": [refusal(429, "rate_limit_error", retry_after="40")]}

    async def ask(key: Resource[str]) -> str:
        http_client = httpx2.AsyncClient(transport=RotatingTransport(key))
        async with sdk.usual(api_key="-", base_url=sdk.base_url(upstream), http_client=http_client) as client:
            assert client.max_retries == 2
            return await sdk.ask(client)

    async def main() -> str:
        async with TaskPool(resources=keys) as pool:
            return await pool.run(ask)

    assert asyncio.run(main()) == "hello"
    assert upstream.keys == ["bad", "good"]


# -- limits and tokens ------------------------------------------------------------------------------------------------


@every_sdk
@every_form
def test_c25_h10_limits_are_learned_from_the_answers_of_an_sdk(sdk: Sdk, of: str, upstream: Upstream) -> None:
    keys = ResourcePool({"a": "a"}, quota="learn")
    upstream.answers = {"a": telling(sdk)}
    assert in_tasks(sdk, upstream, keys, of, count=1) == answers(1)
    assert keys.snapshot()["a"]["quota"]["left"] == {"requests": 41.0, "tokens": 5000.0}


@every_sdk
@every_form
def test_c25_h10_and_from_its_errors(sdk: Sdk, of: str, upstream: Upstream) -> None:
    keys = ResourcePool({"a": "a", "b": "b"}, quota="learn", strategy="primary_backup")
    upstream.answers = {"a": [refusal(503, **TOLD[sdk.module.__name__])], "b": telling(sdk)}
    assert in_tasks(sdk, upstream, keys, of, count=1) == answers(1)
    assert upstream.keys == ["a", "b"]
    assert keys.snapshot()["a"]["quota"]["left"] == {"requests": 41.0, "tokens": 5000.0}


@every_sdk
@every_form
def test_c25_h10_tokens_that_were_reserved_are_settled(sdk: Sdk, of: str, upstream: Upstream) -> None:
    keys = ResourcePool({"a": "a"}, quota=Quota(tokens=1000, per=600.0, burst=1000))
    upstream.answers = {"a": telling(sdk)}
    assert in_tasks(sdk, upstream, keys, of, count=5, cost=400) == answers(5), "2,000 in all, if they were not settled"
    assert keys.snapshot()["a"]["quota"]["left"] == {"tokens": 1000.0 - 5 * 37}


def test_c25_h10_a_stream_settles_its_tokens_at_its_end(upstream: Upstream) -> None:
    keys = ResourcePool({"a": "a"}, quota=Quota(tokens=1000, per=600.0))
    last = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": []}
    usage = f"data: {json.dumps({**last, 'usage': USED['openai']})}\n\n".encode()
    events = [*OPENAI.events[:-1], usage, OPENAI.events[-1]]
    upstream.answers = {"a": [streamed(events)]}

    async def ask(key: Resource[str]) -> str:
        client = our_openai.client(key, base_url=f"{upstream.url}/v1")
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        return "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])

    async def main() -> str:
        async with TaskPool(resources=keys) as pool:
            return await pool.run(ask, cost=500)

    assert asyncio.run(main()) == "hello"
    assert keys.snapshot()["a"]["quota"]["left"] == {"tokens": 963.0}


@every_form
def test_c25_a_key_whose_answer_says_that_nothing_remains_gets_a_learned_quota(of: str, upstream: Upstream) -> None:
    keys = pool_of("a", "b")
    limits = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "40s"}
    given = usual(Seen(None, "/v1/chat/completions", {}, b""))
    upstream.answers = {"a": [Answer(200, {**given.headers, **limits}, given.body)]}
    assert in_tasks(OPENAI, upstream, keys, of) == answers(6)
    assert upstream.keys.count("a") <= 2
    assert statuses(keys) == {"a": "healthy", "b": "healthy"}
    assert keys.snapshot()["a"]["quota"]["seconds_until_open"] > 30


def test_h10_a_response_that_passed_a_transport_is_not_learned_from_twice() -> None:
    keys = ResourcePool({"a": "a"}, quota="learn")

    def send(request: Any) -> httpx.Response:
        return httpx.Response(200, headers=TOLD["openai"])

    async def ask(key: Resource[str]) -> httpx.Response:
        transport = RotatingTransport(key, transport=httpx.MockTransport(send))
        async with httpx.AsyncClient(transport=transport) as client:
            response = await client.get("https://api.example.org/")
        response.headers["x-ratelimit-remaining-requests"] = "7"
        return response  # the pool looks at what an operation returns

    asyncio.run(keys.run(ask))  # type: ignore[arg-type]
    assert keys.snapshot()["a"]["quota"]["left"] == {"requests": 41.0, "tokens": 5000.0}


# -- which key ---------------------------------------------------------------------------------------------------------


def test_c25_a_client_of_the_pool_uses_the_tasks_key_and_takes_no_second_one(upstream: Upstream) -> None:
    keys = ResourcePool({key: key for key in "abc"}, max_in_flight=1)
    seen: list[tuple[str, str]] = []

    async def main() -> None:
        async with (
            our_openai.client(keys, base_url=f"{upstream.url}/v1") as client,
            TaskPool(max_concurrent=3, resources=keys) as pool,
        ):

            async def ask(key: Resource[str], number: int) -> None:
                await client.chat.completions.create(model="m", messages=MESSAGES, user=f"{key.value}{number}")

            async for _ in pool.map(ask, range(9)):
                pass

    asyncio.run(asyncio.wait_for(main(), 30))
    seen = [(str(one.key), json.loads(one.body)["user"][0]) for one in upstream.seen]
    assert len(seen) == 9
    assert all(key == given for key, given in seen)


@pytest.mark.parametrize("options", [{"tags": ["large"]}, {"exclude": ["a"]}], ids=str)
def test_c25_unless_the_client_asks_for_another(options: Any, upstream: Upstream) -> None:
    keys = ResourcePool([Resource("a", "a"), Resource("b", "b", tags=["large"])], strategy="primary_backup")

    async def main() -> None:
        async with (
            our_openai.client(keys, base_url=f"{upstream.url}/v1", **options) as client,
            TaskPool(resources=keys) as pool,
        ):

            async def ask(key: Resource[str]) -> str:
                assert key.value == "a"
                return await OPENAI.ask(client)

            assert await pool.run(ask) == "hello"

    asyncio.run(main())
    assert upstream.keys == ["b"]


def test_c25_tasks_of_another_pool_and_subtasks_take_keys_of_their_own(upstream: Upstream) -> None:
    keys, others = pool_of("a", "b"), pool_of("x")

    async def main() -> None:
        async with (
            our_openai.client(keys, base_url=f"{upstream.url}/v1") as client,
            TaskPool(resources=others) as elsewhere,
            TaskPool(max_concurrent=3, resources=keys) as pool,
            TaskPool(max_concurrent=3) as plain,
        ):

            async def ask(*given: Any) -> str:
                return await OPENAI.ask(client)

            async def spreads(key: Resource[str]) -> list[str]:
                return await asyncio.gather(*(plain.run(ask) for _ in range(4)))

            assert await elsewhere.run(ask) == "hello"
            assert await pool.run(spreads) == ["hello"] * 4

    asyncio.run(main())
    assert set(upstream.keys) == {"a", "b"}
    assert upstream.keys.count("a") < 5, "not all with the key of the task that waits for them"


def test_c25_a_task_waits_for_its_key_by_priority(upstream: Upstream) -> None:
    keys = ResourcePool({"a": "a"}, max_in_flight=1)

    async def ask(key: Resource[str], name: str) -> None:
        client = our_openai.client(key, base_url=f"{upstream.url}/v1")
        await client.chat.completions.create(model="m", messages=MESSAGES, user=name)

    async def main() -> None:
        async with TaskPool(max_concurrent=10, queue="priority", resources=keys) as pool:
            batch = [pool.submit_nowait(ask, f"batch {number}") for number in range(4)]
            urgent = pool.submit_nowait(ask, "urgent", priority=10)
            await asyncio.gather(*batch, urgent)

    asyncio.run(main())
    assert [json.loads(one.body)["user"] for one in upstream.seen].index("urgent") <= 1


# -- every way to be given a key ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
def test_c25_c20_a_transport_over_one_key(library: Any, upstream: Upstream) -> None:
    keys = ResourcePool({"revoked": "revoked", "good": "good"}, classify=headgate.http_errors, quota="learn")
    upstream.answers = {"revoked": [refusal(401)], "good": [Answer(200, TOLD["openai"])]}

    async def ask(key: Resource[str]) -> int:
        async with library.AsyncClient(transport=RotatingTransport(key)) as client:
            response = await client.post(upstream.url, content=b"{}")
        response.raise_for_status()
        assert key.value not in str(response.request.headers)
        return int(response.status_code)

    async def main() -> int:
        return await keys.run(ask, retry_delay=0)

    assert asyncio.run(main()) == 200
    assert upstream.keys == ["revoked", "good"]
    assert statuses(keys) == {"revoked": "disabled", "good": "healthy"}
    assert keys.snapshot()["good"]["quota"]["left"] == {"requests": 41.0, "tokens": 5000.0}


@every_sdk
def test_c25_plain_functions_that_run_in_threads(sdk: Sdk, upstream: Upstream) -> None:
    keys = ResourcePool({"revoked": "revoked", "good": "good"}, quota=Quota(tokens=1000, per=600.0, window="bucket"))
    upstream.answers = {"revoked": [refusal(401, "authentication_error")], "good": telling(sdk)}

    def ask(key: Resource[str], number: int) -> str:
        with sdk.ours.sync_client(key, base_url=sdk.base_url(upstream)) as client:
            if sdk is OPENAI:
                return str(client.chat.completions.create(model="m", messages=MESSAGES).choices[0].message.content)
            return str(client.messages.create(model="m", max_tokens=5, messages=MESSAGES).content[0].text)

    async def main() -> list[str]:
        async with TaskPool(max_concurrent=3, resources=keys) as pool:
            return [one async for one in pool.map(ask, range(6), cost=100)]

    assert asyncio.run(main()) == ["hello"] * 6
    assert statuses(keys) == {"revoked": "disabled", "good": "healthy"}
    left = keys.snapshot()["good"]["quota"]["left"]["tokens"]
    assert left == pytest.approx(1000 - 6 * 37, abs=30)  # it refills by 2 a second


# -- connections -------------------------------------------------------------------------------------------------------


class KeepsAlive(BaseHTTPRequestHandler):
    """Keeps connections open, and counts them."""

    protocol_version = "HTTP/1.1"
    timeout = 10.0  # of a connection that nobody closes
    opened: list[int]
    closed: list[int]
    asked: list[str]
    forgotten: list[int]

    def setup(self) -> None:
        self.opened.append(1)
        super().setup()

    def finish(self) -> None:
        super().finish()
        self.closed.append(1)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        key = self.headers["authorization"].removeprefix("Bearer ")
        self.asked.append(key)
        answer = usual(Seen(key, self.path, {}, body))
        assert isinstance(answer.body, bytes)
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_error(self, format: str, *args: object) -> None:
        self.forgotten.append(1)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def kept_alive() -> Iterator[tuple[str, type[KeepsAlive]]]:
    handler = type("Handler", (KeepsAlive,), {"opened": [], "closed": [], "asked": [], "forgotten": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = False  # closing the server waits until all connections are closed
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1", handler
        finally:
            server.shutdown()
            thread.join()


def test_c25_clients_of_all_keys_share_their_connections_which_end_with_the_loop() -> None:
    keys = pool_of("a", "b", "c")
    with kept_alive() as (base_url, server):

        async def ask(key: Resource[str], number: int) -> str:
            if number % 2:
                return await OPENAI.ask(our_openai.client(key, base_url=base_url))
            async with our_openai.client(key, base_url=base_url) as client:  # closing it closes nobody else's
                return await OPENAI.ask(client)

        async def main() -> list[str]:
            async with TaskPool(max_concurrent=1, resources=keys) as pool:
                return [one async for one in pool.map(ask, range(9))]

        assert asyncio.run(main()) == ["hello"] * 9
        assert asyncio.run(main()) == ["hello"] * 9, "on another loop, with connections of its own"
        assert set(server.asked) == {"a", "b", "c"}
        assert len(server.opened) == 2
    assert len(server.closed) == 2
    assert not server.forgotten


@pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
def test_c25_transports_of_single_keys_share_their_connections_too(library: Any) -> None:
    """One is made for each task, and must cost neither a connection nor a TLS context."""
    keys = pool_of("a", "b", "c")
    with kept_alive() as (base_url, server):

        async def ask(key: Resource[str], number: int) -> int:
            async with library.AsyncClient(transport=RotatingTransport(key)) as client:
                response = await client.post(f"{base_url}/chat/completions", json={"number": number})
                return int(response.status_code)

        async def main() -> list[int]:
            async with TaskPool(max_concurrent=1, resources=keys) as pool:
                return [one async for one in pool.map(ask, range(9))]

        assert asyncio.run(main()) == [200] * 9
        assert set(server.asked) == {"a", "b", "c"}
        assert len(server.opened) == 1
    assert not server.forgotten


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["within", "max_attempts", "wait_for_capacity", "tags"])
def test_c25_options_of_calls_are_refused_with_a_single_key(option: str) -> None:
    key = Resource("a", "sk-a")
    value: Any = {"tags": ["x"], "wait_for_capacity": True}.get(option, 3)
    for make in (our_openai.client, our_openai.sync_client):
        with pytest.raises(InvalidType, match=f"takes no option '{option}' with a single key") as caught:
            make(key, **{option: value})
        assert "sk-a" not in str(caught.value)
    for transport in (RotatingTransport, RotatingSyncTransport):
        with pytest.raises(InvalidType, match=f"takes no option '{option}' with a single key"):
            transport(key, **{option: value})
    with pytest.raises(InvalidType, match="takes no option 'cost' with a single key"):
        RotatingTransport(key, cost=3)


def test_c25_the_value_of_a_key_is_refused_and_not_shown() -> None:
    for make in (our_openai.client, RotatingTransport):
        with pytest.raises(InvalidType, match="the Resource that a task was given") as caught:
            make("sk-secret")  # type: ignore[arg-type, operator]
        assert "sk-secret" not in str(caught.value)


def test_c25_c20_one_key_goes_nowhere_else_either() -> None:
    with pytest.raises(headgate.InvalidArgument, match="without TLS everybody on the way can read them"):
        our_openai.client(Resource("a", "sk-a"), base_url="http://api.example.org/v1")
