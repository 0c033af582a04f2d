"""A batch of prompts against an HTTP upstream that limits and revokes keys: no code but the function."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.cli.support import run_here
from tests.support.integrations.upstream import Answer, Seen, refusal, serving, usual

pytestmark = pytest.mark.integration

FUNCTION = """
import http.client, json
from headgate import CooldownResource, DisableResource

def ask(key, record):
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
    try:
        connection.request("POST", "/", record["prompt"], {"Authorization": f"Bearer {key.value}"})
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    if answer.status == 429:
        raise CooldownResource(float(answer.headers["Retry-After"]), "429")
    if answer.status == 401:
        raise DisableResource("401")
    return {"prompt": record["prompt"], "answer": text}
"""


class Upstream(BaseHTTPRequestHandler):
    """Answers in capitals; limits each key now and then, and revokes one after a while."""

    asked: Counter[str]
    answered: Counter[str]

    def do_POST(self) -> None:
        name = self.headers["Authorization"].removeprefix("Bearer ")
        prompt = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.asked[name] += 1
        if name == "sk-revoked" and self.asked[name] > 20:
            self._reply(401, "")
        elif self.asked[name] % 25 == 0:
            self._reply(429, "")
        else:
            self.answered[prompt] += 1
            self._reply(200, prompt.upper())

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Retry-After", "0.01")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def upstream() -> Iterator[tuple[int, type[Upstream]]]:
    handler = type("Handler", (Upstream,), {"asked": Counter(), "answered": Counter()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1], handler
        finally:
            server.shutdown()
            thread.join()


def test_c10_c14_a_batch_of_prompts_needs_no_code_but_the_function(tmp_path: Path, scale: float) -> None:
    count = round(2000 * scale)
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(count)), "utf-8"
    )
    (tmp_path / "keys.toml").write_text(
        '[keys]\na = "sk-a"\nb = { value = "sk-b", max_in_flight = 3 }\nc = "sk-revoked"\n', "utf-8"
    )
    (tmp_path / "keys.toml").chmod(0o600)
    with upstream() as (port, seen):
        (tmp_path / "http_job.py").write_text(FUNCTION.replace("PORT", str(port)), "utf-8")
        ended = run_here(
            "map", "http_job.py:ask", "in.jsonl", "-o", "out.jsonl", "--keys", "keys.toml", "--json", cwd=tmp_path
        )
    assert ended.returncode == 0, ended.stderr
    answers = [json.loads(line)["answer"] for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert answers == [f"PROMPT {number}" for number in range(count)]
    assert set(seen.answered.values()) == {1}, "nothing was paid for twice"
    figures = json.loads(ended.stdout)
    assert figures["keys"]["c"]["status"] == "disabled"
    assert figures["keys"]["a"]["cooldowns"] > 0
    assert "sk-" not in ended.stderr


SDK_FUNCTION = """
from headgate.integrations import openai

async def ask(key, record):
    client = openai.client(key, base_url="URL")
    messages = [{"role": "user", "content": "hi"}]
    answer = await client.chat.completions.create(model="m", max_tokens=60, messages=messages)
    return {"id": record["id"], "answer": answer.choices[0].message.content}
"""


class Provider:
    """Allows each key a few requests in a window, and tells in headers what is left of it."""

    def __init__(self, requests: int, per: float) -> None:
        self._requests, self._per = requests, per
        self._lock = threading.Lock()
        self._ends: dict[str | None, float] = {}
        self._used: Counter[str | None] = Counter()
        self.refused = 0

    def __call__(self, seen: Seen) -> Answer:
        with self._lock:
            now = time.monotonic()
            if now >= self._ends.get(seen.key, 0.0):
                self._ends[seen.key], self._used[seen.key] = now + self._per, 0
            self._used[seen.key] += 1
            left, reset = self._requests - self._used[seen.key], self._ends[seen.key] - now
            self.refused += left < 0
        told = {
            "x-ratelimit-limit-requests": str(self._requests),
            "x-ratelimit-remaining-requests": str(max(0, left)),
            "x-ratelimit-reset-requests": f"{reset * 1000:.0f}ms",
        }
        if left < 0:
            return refusal(429, "rate_limit_error", retry_after_ms=f"{reset * 1000 + 1:.0f}", **told)
        answer = usual(seen)
        body = {**json.loads(answer.body), "usage": {"total_tokens": 5}}  # type: ignore[arg-type]
        return Answer(200, {**answer.headers, **told}, json.dumps(body).encode())


@pytest.mark.parametrize("where", [(), ("--workers", "1")], ids=["here", "on a worker"])
def test_c25_c10_c14_an_sdk_in_a_batch_keeps_to_limits_that_it_learns_and_loses_nothing(
    where: tuple[str, ...], tmp_path: Path
) -> None:
    count = 40
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"id": number, "tokens": 60}) + "\n" for number in range(count)), "utf-8"
    )
    (tmp_path / "keys.toml").write_text(
        'quota = "learn"\n[keys]\na = "sk-a"\nb = "sk-b"\nc = "sk-revoked"\n'
        'd = { value = "sk-d", quota = { tokens = 120, per = 600.0 } }\n',
        "utf-8",
    )
    (tmp_path / "keys.toml").chmod(0o600)
    with serving() as upstream:
        provider = Provider(8, per=0.7)
        upstream.answers = {"sk-a": provider, "sk-b": provider, "sk-revoked": [refusal(401, "invalid_api_key")]}
        upstream.answers["sk-d"] = Provider(1000, per=60.0)
        job = f"sdk_job_{len(where)}"  # a module is imported once
        (tmp_path / f"{job}.py").write_text(SDK_FUNCTION.replace("URL", f"{upstream.url}/v1"), "utf-8")
        options = ("--keys", "keys.toml", "--reserve", "tokens", "--max-concurrent", "20", "--json", *where)
        ended = run_here("map", f"{job}.py:ask", "in.jsonl", "-o", "out.jsonl", *options, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert written == [{"id": number, "answer": "hello"} for number in range(count)]
    keys = json.loads(ended.stdout)["keys"]
    assert (keys["c"]["status"], keys["c"]["done"]) == ("disabled", 0)
    assert provider.refused <= 8, "two keys and a few resets, instead of one for each record that is too much"
    assert 1 <= keys["d"]["done"] <= 120 / 5
