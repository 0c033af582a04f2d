"""A batch of prompts against an HTTP upstream that limits and revokes keys: no code but the function."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.support import run_here

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
