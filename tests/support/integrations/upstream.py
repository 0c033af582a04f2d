"""A real HTTP server of the tests: answers as OpenAI and Anthropic do, and misbehaves for the keys it is told to."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One answer. A body in a list is streamed, one chunk for each item."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | list[bytes] = b"{}"
    stall_at: int | None = None
    """Send nothing more from this chunk on, until the server closes; -1: not even the status."""
    cut_at: int | None = None
    """Break the connection before this chunk; -1: before the status."""


@dataclass(frozen=True)
class Seen:
    """One request that arrived."""

    key: str | None
    path: str
    headers: dict[str, str]
    body: bytes


class Upstream:
    """The server: `answers[key]` is what requests with this key get, one after the other, the last one for ever."""

    def __init__(self) -> None:
        self.answers: dict[str | None, list[Answer] | Callable[[Seen], Answer]] = {}
        self.seen: list[Seen] = []
        self.port = 0
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def keys(self) -> list[str | None]:
        """The keys of all requests, in order."""
        return [one.key for one in self.seen]

    def answer(self, seen: Seen) -> Answer:
        self.seen.append(seen)
        told = self.answers.get(seen.key)
        if callable(told):
            return told(seen)
        if told:
            return told.pop(0) if len(told) > 1 else told[0]
        return usual(seen)


def refusal(status: int, kind: str = "error", **headers: str) -> Answer:
    """An error as providers write it."""
    body = {"type": "error", "error": {"type": kind, "code": kind, "message": "no"}}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, {"content-type": "application/json", **named}, json.dumps(body).encode())


def usual(seen: Seen) -> Answer:
    """An answer of OpenAI or Anthropic, streamed if the request asks for it."""
    asked = json.loads(seen.body) if seen.body[:1] == b"{" else {}
    if seen.path == "/redirect":
        return Answer(307, {"location": asked["to"]})
    stream = asked.get("stream", False)
    if seen.path.endswith("/messages"):
        return Answer(200, *(_sse(anthropic_events()) if stream else _json(anthropic_message())))
    return Answer(200, *(_sse(openai_events()) if stream else _json(openai_completion())))


def streamed(events: list[bytes], **how: Any) -> Answer:
    return Answer(200, {"content-type": "text/event-stream"}, events, **how)


def _json(value: object) -> tuple[dict[str, str], bytes]:
    return {"content-type": "application/json"}, json.dumps(value).encode()


def _sse(events: list[bytes]) -> tuple[dict[str, str], list[bytes]]:
    return {"content-type": "text/event-stream"}, events


def openai_completion() -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


def openai_events() -> list[bytes]:
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    texts = [{**chunk, "choices": [{"index": 0, "delta": {"content": text}}]} for text in ("hel", "lo")]
    return [f"data: {json.dumps(one)}\n\n".encode() for one in texts] + [b"data: [DONE]\n\n"]


def anthropic_message(text: str = "hello") -> dict[str, Any]:
    content = [{"type": "text", "text": text}] if text else []
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": content}
    return {**message, "stop_reason": "end_turn", "stop_sequence": None, "usage": usage}


def anthropic_events() -> list[bytes]:
    def delta(text: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}

    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": anthropic_message("")},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        delta("hel"),
        delta("lo"),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ]
    return [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in events]


class _Cut(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: Upstream

    def do_POST(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = Seen(_key(headers), self.path, headers, self._body(headers))
        self.close_connection = True
        try:
            self._send(self.upstream.answer(seen))
        except (_Cut, OSError):
            pass

    def do_GET(self) -> None:
        self.do_POST()

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(headers.get("content-length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, answer: Answer) -> None:
        self._misbehave(answer, -1)
        self.send_response(answer.status)
        self.send_header("connection", "close")
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if isinstance(answer.body, bytes):
            self.send_header("content-length", str(len(answer.body)))
            self.end_headers()
            self._misbehave(answer, 0)
            self.wfile.write(answer.body)
            return
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number, chunk in enumerate(answer.body):
            self._misbehave(answer, number)
            self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _misbehave(self, answer: Answer, at: int) -> None:
        if answer.stall_at == at:
            self.upstream.closing.wait(10)
            raise _Cut
        if answer.cut_at == at:
            raise _Cut

    def log_message(self, format: str, *args: object) -> None:
        pass


def _key(headers: dict[str, str]) -> str | None:
    if "x-api-key" in headers:
        return headers["x-api-key"]
    return headers.get("authorization", "").removeprefix("Bearer ") or None


class _Server(ThreadingHTTPServer):
    request_queue_size = 200  # of more connections at a time some would be made a second later


@contextmanager
def serving() -> Iterator[Upstream]:
    """Serve on a port of the loopback, in threads that end with the block."""
    upstream = Upstream()
    handler = type("Handler", (_Handler,), {"upstream": upstream})
    with _Server(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = False
        upstream.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield upstream
        finally:
            upstream.closing.set()
            server.shutdown()
            thread.join()


@contextmanager
def answering(answer: Callable[[bytes, socket.socket], object]) -> Iterator[str]:
    """Serve bytes that need not be HTTP: `answer` writes them for the head of each request. Yields the URL."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            try:
                while head := self._head():
                    answer(head, self.connection)
            except OSError:
                pass

        def _head(self) -> bytes:
            lines = []
            while (line := self.rfile.readline()) not in (b"", b"\r\n"):
                lines.append(line)
            return b"".join(lines)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
