"""`headgate serve-keys` as a real command: its line, the SDK, tokens, signals, wrong calls, and no key anywhere."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest

from headgate.cli.client_tokens import read_tokens
from headgate.cli.output import WrongCall
from headgate.integrations.keys_proxy import Client
from tests.ports import number_of, reserved_port
from tests.sdks import openai
from tests.support.cli.support import PATIENCE, command, environment, run, run_here, started, until
from tests.support.integrations.upstream import Answer, Seen, Upstream, openai_events, refusal, serving, streamed, usual

pytestmark = pytest.mark.integration

KEY = "sk-live-a1b2c3d4e5f6g7h8"
ANN, BOB = "token-of-ann-0123456789", "token-of-bob-0123456789"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with serving() as server:
        yield server


def written(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text, "utf-8")
    path.chmod(mode)
    return str(path)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return written(tmp_path / "keys.toml", f'[keys]\nrevoked = "sk-revoked-0123456789"\ngood = "{KEY}"\n')


class Command(NamedTuple):
    """`headgate serve-keys`, which serves."""

    process: subprocess.Popen[str]
    line: str
    log: Path

    @property
    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.line)
        return told

    def ask(self, token: str | None = None, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token or self.told['token']}"}
        return httpx.post(f"{self.told['base_url']}/chat/completions", headers=headers, json=body, timeout=PATIENCE)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def until_logged(self, text: str) -> None:
        until(lambda: text in self.log.read_text("utf-8"), text)


@contextmanager
def serve_keys(
    folder: Path, upstream: Upstream, *arguments: str, env: Mapping[str, str] | None = None
) -> Iterator[Command]:
    """Start the command, wait for its line, and end it."""
    given = ["serve-keys", "--upstream", f"{upstream.url}/v1", *arguments]
    with started(folder, *given, cwd=folder, env=env) as made:
        yield Command(*made)


def test_c24_the_printed_line_is_all_that_an_unchanged_sdk_needs(keys: str, upstream: Upstream, tmp_path: Path) -> None:
    upstream.answers = {"sk-revoked-0123456789": [refusal(401, "authentication_error")]}
    with serve_keys(tmp_path, upstream, "--keys", keys) as served:
        told = dict(word.split("=", 1) for word in served.line.split())
        assert set(told) == {"base_url", "token"}
        program = (
            "import openai\n"
            "messages = [{'role': 'user', 'content': 'hi'}]\n"
            "answer = openai.OpenAI().chat.completions.create(model='m', messages=messages)\n"
            "print(answer.choices[0].message.content)\n"
        )
        env = environment({"OPENAI_BASE_URL": told["base_url"], "OPENAI_API_KEY": told["token"]})
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=PATIENCE, check=False
        )
        assert (ran.returncode, ran.stdout) == (0, "hello\n"), ran.stderr
        served.process.send_signal(signal.SIGINT)
        assert served.wait() == 0
        assert served.process.stdout is not None
        seen = served.line + served.process.stdout.read() + served.log.read_text("utf-8") + ran.stderr
    assert upstream.keys == ["sk-revoked-0123456789", KEY]
    assert "keys: revoked is disabled: HTTP 401" in seen, "the log names the key by its id"
    assert "sk-" not in seen
    assert told["token"] not in served.log.read_text("utf-8"), "the token stands on stdout, once"


def test_c24_with_tokens_no_token_is_printed_and_each_has_its_tenant(upstream: Upstream, tmp_path: Path) -> None:
    tokens = written(
        tmp_path / "tokens.toml", f'[tokens]\nann = "env:ANN"\nbob = {{ token = "{BOB}", tenant = "b" }}\n'
    )
    arguments = ["--keys", "env:THE_KEY", "--tokens", tokens, "--json", "--header", "x-api-key"]
    with serve_keys(tmp_path, upstream, *arguments, env={"ANN": ANN, "THE_KEY": KEY}) as served:
        assert set(served.told) == {"base_url", "pid"}
        assert served.told["pid"] == served.process.pid
        assert [served.ask(token).status_code for token in (ANN, BOB, "token-of-nobody-01234")] == [200, 200, 401]
        served.process.send_signal(signal.SIGTERM)
        assert served.wait() == 0
    assert [seen.headers["x-api-key"] for seen in upstream.seen] == [KEY, KEY]
    assert all("authorization" not in seen.headers for seen in upstream.seen)
    log = served.log.read_text("utf-8")
    assert not any(secret in log + served.line for secret in (KEY, ANN, BOB))


def waiting(upstream: Upstream, go: threading.Event) -> None:
    def answer(seen: Seen) -> Answer:
        go.wait(PATIENCE)
        return usual(seen)

    upstream.answers = {KEY: answer}


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_c24_c01_the_first_signal_lets_streams_finish_and_the_exit_code_is_0(
    number: signal.Signals, upstream: Upstream, tmp_path: Path
) -> None:
    go = threading.Event()
    waiting(upstream, go)
    with serve_keys(tmp_path, upstream, "--keys", "env:THE_KEY", "--json", env={"THE_KEY": KEY}) as served:
        with openai.OpenAI(base_url=served.told["base_url"], api_key=served.told["token"]) as client:
            parts: list[str] = []

            def read() -> None:
                for part in client.chat.completions.create(model="m", messages=MESSAGES, stream=True):
                    parts.append(part.choices[0].delta.content or "")

            thread = threading.Thread(target=read)
            thread.start()
            until(lambda: upstream.seen)
            served.process.send_signal(number)
            served.until_logged(f"got {number.name}: the proxy finishes 1 requests")
            assert served.process.poll() is None
            go.set()
            thread.join(PATIENCE)
        assert "".join(parts) == "hello"
        assert served.wait() == 0


@pytest.mark.parametrize(
    ("numbers", "arguments", "code"),
    [
        ([signal.SIGINT, signal.SIGINT], [], 130),
        pytest.param([signal.SIGTERM, signal.SIGINT], [], 143, marks=pytest.mark.soak),
        ([signal.SIGTERM], ["--grace", "0.1"], 143),
    ],
)
def test_c24_c01_a_second_signal_or_the_end_of_the_grace_ends_requests(
    numbers: list[signal.Signals], arguments: list[str], code: int, upstream: Upstream, tmp_path: Path
) -> None:
    upstream.answers = {KEY: [streamed(openai_events(), stall_at=1)]}
    with serve_keys(tmp_path, upstream, "--keys", "env:THE_KEY", "--json", *arguments, env={"THE_KEY": KEY}) as served:
        url, token = served.told["base_url"], served.told["token"]
        with (
            httpx.Client(timeout=PATIENCE, headers={"authorization": f"Bearer {token}"}) as client,
            client.stream("POST", f"{url}/chat/completions", json={}) as response,
        ):
            chunks = response.iter_raw()
            assert next(chunks) == openai_events()[0]
            for number in numbers:
                served.process.send_signal(number)
                served.until_logged(f"got {numbers[0].name}")
            with pytest.raises(httpx.HTTPError):
                list(chunks)
        assert served.wait() == code
    assert "Traceback" not in served.log.read_text("utf-8")


def test_c24_a_planted_key_is_in_nothing_that_anybody_got(upstream: Upstream, tmp_path: Path) -> None:
    told = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY[:8]}***{KEY[-4:]}. ({KEY})"}}).encode()
    answers = [
        Answer(400, {"x-debug": KEY}, told),
        Answer(cut_at=-1),
        Answer(200, {"transfer-encoding": KEY}, [b"x"]),
        Answer(401, {"www-authenticate": f"Bearer {KEY}"}, told),
    ]
    upstream.answers = {KEY: answers}
    got: list[str] = []
    keys = written(tmp_path / "keys.toml", f'max_attempts = 1\n[keys]\nonly = "{KEY}"\n')
    with serve_keys(tmp_path, upstream, "--keys", keys, "--json") as served:
        for _ in range(5):
            response = served.ask()
            got += [str(response.status_code), str(response.headers.raw), response.text]
        headers = {"authorization": f"Bearer {served.told['token']}"}
        base = served.told["base_url"].removesuffix("/v1")
        got.append(httpx.get(f"{base}/headgate/state", headers=headers).text)
        assert json.loads(got[-1])["keys"]["only"]["status"] == "disabled"
        served.process.send_signal(signal.SIGTERM)
        assert served.wait() == 0
        assert served.process.stdout is not None
        got += [served.line, served.process.stdout.read()]
    seen = "".join(got) + served.log.read_text("utf-8")
    for secret in (KEY, KEY[:8], KEY[-4:]):
        assert secret not in seen
    assert [one for one in got if one.isdigit()] == ["400", "502", "502", "401", "429"]


def test_c24_a_line_that_nobody_reads_does_not_stop_the_proxy(upstream: Upstream, tmp_path: Path) -> None:
    reserved = reserved_port()
    port = number_of(reserved)
    reader, writer = os.pipe()
    os.close(reader)
    arguments = ["serve-keys", "--upstream", upstream.url, "--keys", "env:THE_KEY", "--port", str(port)]
    with (
        reserved,
        subprocess.Popen(
            command(*arguments), stdout=writer, stderr=subprocess.PIPE, env=environment({"THE_KEY": KEY}), cwd=tmp_path
        ) as process,
    ):
        os.close(writer)
        try:
            until(lambda: healthy(port) or process.poll() is not None)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        assert b"the line for stdout could not be written" in process.stderr.read()


def test_c24_more_connections_than_there_are_files_are_refused_and_the_proxy_lives(
    upstream: Upstream, tmp_path: Path
) -> None:
    arguments = command("serve-keys", "--upstream", upstream.url, "--keys", "env:THE_KEY", "--json")
    few_files = ["sh", "-c", 'ulimit -n 128; exec "$@"', "sh", *arguments]
    with subprocess.Popen(
        few_files, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment({"THE_KEY": KEY}), cwd=tmp_path
    ) as process:
        try:
            assert process.stdout is not None
            port = urlsplit(json.loads(process.stdout.readline())["base_url"]).port
            assert port is not None
            with ExitStack() as many:
                idle = [many.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)]
                idle[-1].settimeout(PATIENCE)
                answer = idle[-1].recv(1000)
                assert answer.startswith(b"HTTP/1.1 503")
                assert b"too_many_connections" in answer
            until(lambda: healthy(port))
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        assert b"accept" not in process.stderr.read()


def healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz").text == '{"status": "ok"}'
    except httpx.HTTPError:
        return False


# -- wrong calls ------------------------------------------------------------------------------------------------------

HERE = ("--upstream", "http://127.0.0.1:1/v1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "required: --upstream, --keys"),
        (HERE, "required: --keys"),
        (("--upstream", "http://api.example.com", "--keys", "env:THE_KEY"), "without TLS"),
        (("--upstream", "nonsense", "--keys", "env:THE_KEY"), "must be a URL"),
        (("--upstream", f"https://u:{KEY}@api.example.com", "--keys", "env:THE_KEY"), "must be a URL"),
        ((*HERE, "--keys", "env:MISSING"), "MISSING"),
        ((*HERE, "--keys", "nowhere.toml"), "nowhere.toml cannot be read"),
        ((*HERE, "--keys", "env:MULTILINE"), "one line of ASCII text"),
        ((*HERE, "--keys", "env:THE_KEY", "--host", "0.0.0.0"), "--insecure-listen"),
        ((*HERE, "--keys", "env:THE_KEY", "--tokens", "nowhere.toml"), "nowhere.toml cannot be read"),
        ((*HERE, "--keys", "env:THE_KEY", "--allow-path", "chat"), "/chat/completions"),
        ((*HERE, "--keys", "env:THE_KEY", "--allow-method", "CONNECT"), "methods must be"),
        ((*HERE, "--keys", "env:THE_KEY", "--header", "a b"), "name of a header"),
        ((*HERE, "--keys", "env:THE_KEY", "--port", "70000"), "port from 0 to 65535"),
        ((*HERE, "--keys", "env:THE_KEY", "--port", "x"), "invalid"),
        ((*HERE, "--keys", "env:THE_KEY", "--max-body", "0"), "must be a size"),
        ((*HERE, "--keys", "env:THE_KEY", "--timeout", "0"), "above 0"),
        ((*HERE, "--keys", "env:THE_KEY", "--max-concurrent", "0"), "at least 1"),
        ((*HERE, "--keys", "env:THE_KEY", "--nonsense"), "unrecognized"),
    ],
)
def test_c24_a_wrong_call_is_exit_code_2_and_shows_no_key(
    arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    ran = run_here("serve-keys", *arguments, cwd=tmp_path, env={"THE_KEY": KEY, "MULTILINE": f"{KEY}\n{KEY}"})
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    assert words in ran.stderr
    assert KEY not in ran.stderr
    assert "Traceback" not in ran.stderr


def test_c24_c14_a_classifier_in_a_file_of_keys_is_for_batches(tmp_path: Path) -> None:
    path = written(tmp_path / "keys.toml", f'classify = "none"\n[keys]\nonly = "{KEY}"\n')
    ran = run_here("serve-keys", *HERE, "--keys", path)
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    assert "`classify` in a file of keys is for `headgate map`" in ran.stderr


def test_c24_a_port_in_use_is_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = run("serve-keys", *HERE, "--keys", "env:THE_KEY", "--port", port, env={"THE_KEY": KEY})
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"headgate serve-keys: cannot listen on 127.0.0.1:{port}" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("package", ["httpx", "uvicorn"])
def test_c24_a_missing_package_is_named_with_its_extra(package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('not installed')", "utf-8")
    ran = run("serve-keys", *HERE, "--keys", "env:THE_KEY", env={"PYTHONPATH": str(tmp_path), "THE_KEY": KEY})
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"needs the package {package}: pip install 'headgate[http]'" in ran.stderr
    assert "Traceback" not in ran.stderr


# -- files of tokens --------------------------------------------------------------------------------------------------


def test_c24_tokens_come_from_files_variables_and_commands(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    written(
        path,
        f"""
        [tokens]
        plain = "{ANN}"
        variable = {{ token = "env:TOKEN", tenant = "research" }}
        printed = {{ token = "command:pass show ci", names_tenant = true }}
        """,
    )
    found = read_tokens(path, {"TOKEN": BOB}, lambda words: f"{'-'.join(words)}-0123456789\n")
    assert found == {
        ANN: Client("plain"),
        BOB: Client("research"),
        "pass-show-ci-0123456789": Client("printed", names_tenant=True),
    }


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (f'[tokens]\nann = "{ANN}"', 0o644, "others can read the tokens"),
        ('[tokens]\nann = "env:ANN"', 0o666, "others can write"),
        ("[tokens]", 0o600, "no table [tokens]"),
        ("tokens = 3", 0o600, "no table [tokens]"),
        (f"[tokens]\nann = {ANN}", 0o600, "is not TOML"),
        (f'[tokens]\nann = "{ANN}"\nbob = "{ANN}"', 0o600, "the token bob"),
        ('[tokens]\nann = "short"', 0o600, "could be guessed"),
        ("[tokens]\nann = 7", 0o600, "the token ann"),
        ('[tokens]\nann = ""', 0o600, "the token ann"),
        (f'[tokens]\nann = {{ token = "{ANN}", tenants = "x" }}', 0o600, "Did you mean tenant?"),
        (f'[tokens]\nann = {{ token = "{ANN}", tenant = "" }}', 0o600, "tenant must be a name"),
        (f'[tokens]\nann = {{ token = "{ANN}", names_tenant = "yes" }}', 0o600, "names_tenant true or false"),
        (f'other = 1\n[tokens]\nann = "{ANN}"', 0o600, "'other' is no table"),
        ('[tokens]\nann = "env:NOWHERE"', 0o600, "NOWHERE"),
    ],
)
def test_c24_a_file_of_tokens_that_is_wrong_or_open_to_others_is_refused(
    text: str, mode: int, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.toml"
    written(path, text, mode)
    with pytest.raises(WrongCall) as caught:
        read_tokens(path, {})
    assert words in str(caught.value)
    assert ANN not in str(caught.value)
