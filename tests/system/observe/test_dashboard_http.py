"""The server of the page: who may ask what, by every method, and what it answers."""

from __future__ import annotations

import asyncio
import gc
import http.client
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import InvalidArgument
from headgate.dashboard import Dashboard, app, serve, sources
from headgate.dashboard.security import HEADERS, OPEN, Guard
from headgate.dashboard.sources import PublishedPrograms
from headgate.observe import logging as observed
from headgate.observe import publish, sampler, sockets
from headgate.observe.lines import encoded
from tests.support.cli.support import command, environment
from tests.system.observe.conftest import Program, at_work
from tests.system.observe.support import PATIENCE, SECRET, eventually, published_program

pytestmark = pytest.mark.integration

PATHS = ["/", "/app.js", "/api/stream", "/api/rows", "/api/story", "/api/act", "/metrics", "/healthz", "/readyz", "/no"]
METHODS = ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"]


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with at_work("page") as program:
        yield program


@pytest.fixture(scope="module")
def page(program: Program) -> Iterator[Dashboard]:
    with serve() as page:
        yield page
    page.close()


def test_o25_the_server_of_the_page_writes_nothing_to_the_log_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("uvicorn", "uvicorn.error"):  # as they are before another server of this process changes them
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
        monkeypatch.setattr(logging.getLogger(name), "_cache", {})
    out = io.StringIO()
    stop = observed.json(out, level="DEBUG")
    try:
        with serve() as page:
            assert ask(page, "/healthz").status == 200
            logging.getLogger("uvicorn.error").info("of a server of the program itself")
    finally:
        stop()
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [one["message"] for one in told if "uvicorn" in one["logger"]] == ["of a server of the program itself"]
    assert logging.getLogger("uvicorn.error").filters == []


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    page: Dashboard, path: str, method: str = "GET", *, body: object = None, token: str | None = "", **more: str
) -> Answer:
    """Ask as the page does; `token` "" is the right one, None is none."""
    headers = {"Host": f"127.0.0.1:{page.port}", "Origin": f"http://127.0.0.1:{page.port}"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token or page.token}"
    for name, value in more.items():
        headers[name.replace("_", "-").title()] = value
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=PATIENCE)
    try:
        connection.putrequest(method, path, skip_host=True)
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        for name, value in headers.items():
            if value != "-":
                connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(data)))
        connection.endheaders(data)
        answer = connection.getresponse()
        whole = b"" if path.startswith("/api/stream") and answer.status == 200 else answer.read()
        return Answer(answer.status, dict(answer.getheaders()), whole)
    finally:
        connection.close()


def test_o22_every_answer_has_the_headers_and_the_page_has_no_inline_script(page: Dashboard) -> None:
    for path in PATHS:
        for answer in (ask(page, path), ask(page, path, token=None), ask(page, path, Host="evil.example")):
            assert {name: answer.headers.get(name.lower()) or answer.headers.get(name) for name in HEADERS} == HEADERS
    html = ask(page, "/").body.decode()
    assert "'unsafe" not in HEADERS["Content-Security-Policy"]
    assert html.count("<script") == html.count('<script type="module" src="/app.js">') == 1
    assert " style=" not in html
    assert " on" not in html.replace(" only", "")
    assert "http:" not in html
    assert "https:" not in html


@pytest.mark.parametrize("path", sorted({*PATHS} - OPEN))
def test_o22_without_the_token_nothing_is_answered(page: Dashboard, path: str) -> None:
    for token in (None, "wrong", page.token[:-1], page.token + "x", page.token.upper() + "é"):
        assert ask(page, path, token=token).status == 401
    assert ask(page, path, Authorization=f"Basic {page.token}").status == 401
    assert ask(page, f"{path}?token={page.token}", token=None).status == 401, "an address is logged; a header is not"
    assert ask(page, path, token=None, Cookie=f"token={page.token}").status == 401


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0", "-", "", "127.1",
     "[::2]", "127.0.0.1@evil.example", "xn--localhost-1", "2130706433", "localhost:80:80", "[::1]evil", "[::1",
     "[", ":", "localhost:port"],
)  # fmt: skip
def test_o22_a_name_that_was_made_to_point_here_is_refused(page: Dashboard, host: str) -> None:
    for path in PATHS:
        assert ask(page, path, Host=host, Origin=f"http://{host}").status in (400, 421), path


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1:1", "[::1]", "[::1]:8090"])
def test_o22_names_of_this_machine_are_known(page: Dashboard, host: str) -> None:
    assert ask(page, "/", Host=host).status == 200


@pytest.mark.parametrize("method", METHODS)
def test_o22_no_other_page_can_do_anything_by_any_method(page: Dashboard, program: Program, method: str) -> None:
    body = {"program": "here", "action": "disable", "target": "key-1", "pool": program.keys.name}
    origins = ["http://evil.example", "null", "-", "", f"http://127.0.0.1:{page.port + 1}", "http://localhost.evil.example",
               f"http://127.0.0.1:{page.port}.evil.example", "file://", "chrome-extension://abc"]  # fmt: skip
    for path in PATHS:
        for origin in origins:
            answer = ask(page, path, method, body=body, Origin=origin)
            assert answer.status == 403, (path, origin)
            assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    assert program.keys.snapshot()["key-1"]["status"] == "healthy"


@pytest.mark.parametrize("method", METHODS[1:])
def test_o22_the_page_itself_can_only_post_actions(page: Dashboard, method: str) -> None:
    for path in PATHS:
        assert ask(page, path, method, body={}).status in (404, 405)
    for path in set(PATHS) - {"/api/act", "/no"}:
        assert ask(page, path, "POST", body={}).status == 405


def test_o22_a_get_from_another_page_learns_nothing_and_acts_on_nothing(page: Dashboard) -> None:
    assert ask(page, "/api/act?action=disable&target=key-1").status == 405
    answer = ask(page, "/api/rows", Origin="http://evil.example", token=None)
    assert answer.status == 401


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"no json", 400), (b"[]", 400), (b'"x"', 400), (b"[" * 9000, 400), (b"x" * 20_000, 413),
        ({"action": "explode"}, 400), ({"action": "cancel", "target": 7}, 400),
        ({"program": "elsewhere", "action": "cancel", "target": "x/1"}, 409),
        ({"program": "here", "action": "cancel", "target": "x/1"}, 409),
        ({"program": "here", "action": "disable", "target": "<img src=x>"}, 409),
    ],
)  # fmt: skip
def test_o21_actions_that_make_no_sense_are_refused(page: Dashboard, body: Any, status: int) -> None:
    answer = ask(page, "/api/act", "POST", body=body)
    assert answer.status == status
    assert answer.json["error"]


def test_o21_actions_act_and_are_told(page: Dashboard, program: Program) -> None:
    told: list[Any] = []
    stop = headgate.subscribe(told.append, "observe.actions")
    body = {"program": "here", "action": "disable", "target": "key-1", "pool": program.keys.name}
    assert ask(page, "/api/act", "POST", body=body).json["done"].startswith("key-1 is disabled")
    assert program.keys.snapshot()["key-1"]["status"] == "disabled"
    stop()
    program.do(program.keys.enable("key-1"))
    assert [(one.action, one.target, one.origin, one.outcome) for one in told] == [("disable", "key-1", "page", "done")]


def test_o20_rows_are_paged_sorted_and_filtered(page: Dashboard, program: Program) -> None:
    number = next(one.number for one in headgate.registry.pools("tasks") if one.name == program.pool.name)
    asked = f"/api/rows?program=here&pool=%23{number}&list=tenants"
    answer = ask(page, f"{asked}&sort=tenant&limit=2").json
    assert answer["total"] == 3
    assert [row["tenant"] for row in answer["rows"]] == ["<b>eve</b>", "ann"]
    assert [row["tenant"] for row in ask(page, f"{asked}&sort=tenant&limit=2&offset=2").json["rows"]] == ["bob"]
    assert [row["tenant"] for row in ask(page, f"{asked}&filter=EV").json["rows"]] == ["<b>eve</b>"]
    for wrong in (
        f"pool=%23{number}&list=secrets",
        f"pool=%23{number}&list=tenants&limit=100000",
        f"pool=%23{number}",
        "pool=%23999999&list=tenants",
        "pool=%23x&list=tenants",
        "list=tenants",
    ):
        answer = ask(page, f"/api/rows?program=here&{wrong}")
        assert (answer.status, "rows" in answer.json) == (409, False), wrong


def test_o20_a_stream_ends_with_the_last_numbers_also_of_pools_that_were_closed() -> None:
    async def work() -> None:
        async with headgate.TaskPool("closed before the page") as pool:
            for _ in range(9):
                await (await pool.submit(asyncio.sleep, 0))
        page.close()  # on the loop of the program, as many do

    page = serve()
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=PATIENCE)
    connection.request("GET", "/api/stream", headers={"Authorization": f"Bearer {page.token}"})
    answer = connection.getresponse()
    asyncio.run(work())
    told = [json.loads(one.removeprefix("data: ")) for one in answer.read().decode().strip().split("\n\n")]
    connection.close()
    assert [(one["ended"], bool(one["alive"])) for one in told] == [(False, True)] * (len(told) - 1) + [(True, False)]
    last = [one["look"] for message in told for one in message["programs"]][-1]
    seen = {view["name"]: view for view in last["pools"]}["closed before the page"]
    assert (seen["state"], seen["completed"], seen["active"], seen["queued"]) == ("closed", 9, 0, 0)


def test_o22_no_value_of_a_resource_is_in_any_answer(page: Dashboard, program: Program) -> None:
    eventually(lambda: b"headgate_tasks_active" in ask(page, "/metrics").body)
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=PATIENCE)
    connection.request("GET", "/api/stream?tasks=1", headers={"Authorization": f"Bearer {page.token}"})
    answer = connection.getresponse()
    program.do(program.keys.cool("key-1", 1, f"because of {SECRET}"))
    seen = b""
    while b"resource_cooled" not in seen:
        seen += answer.read1(65536)
    connection.close()
    answer.close()
    seen += ask(page, f"/api/story?program=here&task={program.pool.id}/1").body + ask(page, "/metrics").body
    assert b"because of <key-1>" in seen
    assert b"refused by <key-" in seen
    for secret in (SECRET, SECRET[::-1]):
        assert secret.encode() not in seen


def test_o30_the_page_serves_metrics_and_health(page: Dashboard, program: Program) -> None:
    assert ask(page, "/healthz", token=None).status == 200
    eventually(lambda: ask(page, "/readyz", token=None).status == 200)
    assert f'headgate_tasks_active{{pool="{program.pool.name}"}} 2.0' in ask(page, "/metrics").body.decode()


@pytest.mark.parametrize("name", ["Host", "Origin", "Authorization"])
def test_o22_a_header_that_decides_and_comes_twice_decides_nothing(page: Dashboard, name: str) -> None:
    right = {"Host": "localhost", "Origin": "http://localhost", "Authorization": f"Bearer {page.token}"}
    for given in ([(name, "evil"), (name, right[name])], [(name, right[name]), (name, "evil")]):
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=PATIENCE)
        connection.putrequest("POST", "/api/act", skip_host=True)
        for one, value in [*given, *(item for item in right.items() if item[0] != name), ("Content-Length", "0")]:
            connection.putheader(one, value)
        connection.endheaders()
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status in {"Host": (400, 421), "Origin": (403,), "Authorization": (401,)}[name]


@pytest.mark.parametrize(
    ("host", "printed"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("localhost", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"),
     ("::1", "[::1]"), ("::", "[::1]")],
)  # fmt: skip
def test_o22_the_printed_address_is_answered(host: str, printed: str) -> None:
    with serve(host=host, insecure=True, token="Only.these_are~good-1") as page:
        assert page.url == f"http://{printed}:{page.port}/#token=Only.these_are~good-1"
        for name, status in ((printed, 200), ("0.0.0.0", 421), ("[::]", 421)):
            connection = http.client.HTTPConnection(printed.strip("[]"), page.port, timeout=PATIENCE)
            connection.request("GET", "/", headers={"Host": f"{name}:{page.port}"})
            assert connection.getresponse().status == status
            connection.close()


def test_o22_tokens_are_compared_whole_and_hosts_are_added_by_name() -> None:
    guard = Guard("t" * 32, ["Box.example"])
    good = {"host": "box.example:8090", "authorization": "bearer " + "t" * 32, "origin": "http://box.example:8090"}
    assert guard.refusal("GET", "/api/stream", good) is None
    assert guard.refusal("POST", "/api/act", good) is None
    assert guard.refusal("POST", "/api/act", {**good, "origin": "http://box.example"}) is not None
    assert guard.refusal("GET", "/api/stream", {**good, "authorization": "Bearer " + "t" * 31}) is not None
    assert guard.refusal("GET", "/", {}) is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0"}, "beyond this machine"),
        ({"host": "127.0.0.1x"}, r"'127\.0\.0\.1x' is not known"),
        ({"port": 99999}, "from 0 to 65535"),
        ({"port": "x"}, "from 0 to 65535"),
        ({"token": "short"}, "at least 16"),
        ({"token": "with a space in it and more"}, "only letters, digits and"),
        ({"token": "abcd&efgh-ijkl-mnop"}, "only letters, digits and"),
        ({"token": "100%zz-sixteen-chars"}, "only letters, digits and"),
        ({"token": "sixteen-letters-é"}, "only letters, digits and"),
    ],
)
def test_o22_what_is_not_safe_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        serve(**options)


def test_o20_a_port_that_is_taken_is_said(page: Dashboard) -> None:
    with pytest.raises(headgate.HeadgateError, match=r"cannot be served on 127\.0\.0\.1"):
        serve(page.port)
    assert page.token not in repr(page)
    assert page.url.endswith(f"/#token={page.token}")


def test_o20_without_the_extra_the_error_names_it() -> None:
    code = (
        "import sys; sys.modules['starlette'] = None\n"
        "import headgate\n"
        "try: headgate.dashboard.serve()\n"
        "except headgate.HeadgateError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'headgate[dashboard]'" in ran.stdout


@contextmanager
def stopped_program() -> Iterator[int]:
    """A published program that the test may stop. Gives its pid."""
    code = "import sys, headgate; pool = headgate.TaskPool('other'); print(flush=True); sys.stdin.read()"
    with published_program(code) as pid:
        yield pid


def test_o20_a_program_that_does_not_answer_keeps_no_other_out_of_a_scrape(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(app, "SCRAPED_WITHIN", 1.0)
    publish()
    with serve(source=PublishedPrograms()) as page, stopped_program() as pid:
        metrics = ""

        def label(of: int) -> str:
            nonlocal metrics
            metrics = ask(page, "/metrics").body.decode()
            found = re.search(rf'headgate_program_info{{pid="{of}",program="([^"]+)"}} 1.0', metrics)
            return found[1] if found else ""

        eventually(lambda: f'headgate_program_up{{program="{label(pid)}"}} 1.0' in metrics and label(os.getpid()))
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)  # it has stopped, and answers nothing more
        there, here = label(pid), label(os.getpid())
        assert there != here, "python and python-2, if pytest itself was started with -c"
        assert f'headgate_program_up{{program="{there}"}} 0.0' in metrics
        assert f"# no metrics of {there}: the program does not answer within 1 s" in metrics
        assert f'headgate_tasks_active{{pool="{program.pool.name}",program="{here}"}} 2.0' in metrics


def test_o20_a_program_that_talks_nonsense_or_dies_in_the_middle_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(sources, "RESCAN", 0.05)
    monkeypatch.setattr(sources, "AGAIN", 0.05)
    name, source = f"{os.getpid()}-{'0' * 12}.sock", PublishedPrograms()
    with socket.socket(socket.AF_UNIX) as listener, serve(source=source) as page, ThreadPoolExecutor(1) as pool:
        with sockets.ShortPath(f"{sockets.folder()}/{name}") as short:
            listener.bind(short)
        listener.settimeout(PATIENCE)
        listener.listen()
        for nonsense in (b"no json\n", encoded({"ok": [1]}), encoded({"ok": {}}) + encoded({"look": 7, "events": 7})):
            with listener.accept()[0] as watched:
                watched.sendall(nonsense)
                assert watched.recv(1000).startswith(b'{"v":1,"id":1,"ask":"watch"')
                assert watched.recv(1000) == b"", "it is left, and tried again"
        with listener.accept()[0] as watched:
            watched.sendall(encoded({"ok": {}}) + encoded({"look": {"pools": []}, "events": []}))
            eventually(lambda: name in source.programs)
            body = {"program": name, "action": "cancel", "target": "x/1"}
            asked = pool.submit(ask, page, "/api/act", "POST", body=body)
            with listener.accept()[0] as acted:
                acted.recv(1000)  # and then it dies, in the middle of the action
            assert asked.result(PATIENCE).json == {"error": "the program has ended before it answered"}
    gc.collect()
    assert [one.getMessage() for one in caplog.records] == [
        f"the program with pid {os.getpid()} is not shown: its answer cannot be read: a line is no JSON"
    ], "once"


def test_o20_a_program_whose_answer_is_too_long_is_told_of_once_and_asked_again_later(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(sources, "RESCAN", 0.01)
    monkeypatch.setattr(sources, "AGAIN", 1.0)
    tried: list[str] = []

    async def counted(name: str) -> Any:
        tried.append(name)
        return await connected(name)

    connected = sources._connected
    monkeypatch.setattr(sources, "_connected", counted)
    monkeypatch.setattr(sources, "LONGEST_ANSWER", 1000)
    source, published = PublishedPrograms(), publish()
    try:
        with serve(source=source):
            eventually(lambda: caplog.records)
            monkeypatch.setattr(sources, "LONGEST_ANSWER", 2**20)
            eventually(lambda: source.programs)
            assert len(tried) < 10, "not each time that programs are looked for"
    finally:
        published.close()
    [record] = caplog.records
    assert "is longer than 1000 bytes: the program has too many pools" in record.getMessage()


def test_o20_a_directory_that_is_open_to_others_for_a_while_blinds_the_page_only_so_long(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    looks: list[str] = []
    folder = sockets.folder()

    def noted() -> str:
        looks.append("")
        return folder_of()

    folder_of = sockets.folder
    monkeypatch.setattr(sources, "RESCAN", 0.05)
    monkeypatch.setattr(sockets, "folder", noted)
    with serve(source=PublishedPrograms()) as page:
        os.chmod(folder, 0o755)
        looks.clear()
        eventually(lambda: len(looks) > 2)
        os.chmod(folder, 0o700)
        publication = publish()
        eventually(lambda: ask(page, "/readyz").status == 200)
        publication.close()


def test_o20_the_command_serves_published_programs_and_their_metrics(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "token").write_text("a-token-of-my-own-1234\n")
    open_to_others = subprocess.run(
        command("dashboard", "--token-file", str(tmp_path / "token")), capture_output=True, text=True, check=False
    )
    assert (open_to_others.returncode, "chmod 600" in open_to_others.stderr) == (2, True)
    (tmp_path / "token").chmod(0o600)
    publication = publish()
    with subprocess.Popen(
        command("dashboard", "--json", "--token-file", str(tmp_path / "token")),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())

            class Page:
                port, token = told["port"], "a-token-of-my-own-1234"

            page: Any = Page
            assert told["url"].endswith("#token=a-token-of-my-own-1234")
            eventually(lambda: ask(page, "/readyz").status == 200)
            labels = f'pool="{program.pool.name}",program="{sampler.program_name()}"'
            assert f"headgate_tasks_active{{{labels}}} 2.0" in ask(page, "/metrics").body.decode()
            name = os.path.basename(publication.path)
            body = {"program": name, "action": "disable", "target": "key-1", "pool": program.keys.name}
            assert ask(page, "/api/act", "POST", body=body).status == 200
            assert program.keys.snapshot()["key-1"]["status"] == "disabled"
            assert "failed" in ask(page, f"/api/story?program={name}&task={program.pool.id}/1").json["story"]
            for odd in ("..", "../../etc/passwd", "1-000000000000.sock", ""):
                assert ask(page, f"/api/story?program={odd}&task=x/1").status == 409
            publication.close()
            eventually(lambda: ask(page, "/readyz").status == 503)
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
