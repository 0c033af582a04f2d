"""A real Chromium, driven by chromedriver over its HTTP protocol (W3C WebDriver)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

from tests.ports import number_of, reserved_port

T = TypeVar("T")
PATIENCE = 20.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def missing() -> str:
    """Why no browser can be started here; "" if one can."""
    return "" if CHROMIUM and DRIVER else "there is no Chromium here: apt-get install chromium chromium-driver"


class Browser:
    """One window of Chromium, with a profile of its own."""

    def __init__(self, *flags: str) -> None:
        assert DRIVER and CHROMIUM  # noqa: PT018
        self._profile = tempfile.TemporaryDirectory(prefix="headgate-chromium-")
        self._reserved = reserved_port()
        port = number_of(self._reserved)
        self._base = f"http://127.0.0.1:{port}"
        env = {**os.environ, "HOME": self._profile.name}
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={port}", "--log-level=OFF"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env
        )
        try:
            self._until_ready()
            options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={self._profile.name}/profile", *flags]}
            wanted = {
                "capabilities": {
                    "alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
                }
            }
            self._base += f"/session/{self._ask('POST', '/session', wanted)['sessionId']}"
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._end()

    def _end(self) -> None:
        self._driver.terminate()
        self._driver.wait(PATIENCE)
        self._reserved.close()
        for _ in range(50):
            try:
                self._profile.cleanup()
                return
            except OSError:  # Chromium still writes there
                time.sleep(0.05)

    def _until_ready(self) -> None:
        limit = time.monotonic() + PATIENCE
        while True:
            try:
                if self._ask("GET", "/status")["ready"]:
                    return
            except OSError:
                assert time.monotonic() < limit, "chromedriver does not answer"
            time.sleep(0.02)

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(json.load(error)["value"]["message"]) from None

    # -- what tests do -------------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *args: object) -> Any:
        """Run a script in the page: ``return ...``."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def run_async(self, script: str, *args: object) -> Any:
        """Run a script in the page that calls its last argument when it is done."""
        return self._ask("POST", "/execute/async", {"script": script, "args": list(args)})

    def until(self, script: str, *args: object) -> Any:
        """Run a script again and again until it returns something."""
        limit = time.monotonic() + PATIENCE
        while not (found := self.run(script, *args)):
            assert time.monotonic() < limit, f"{script} stays {found!r}; the page says:\n{self.text()}"
            time.sleep(0.05)
        return found

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def until_text(self, words: str) -> None:
        self.until("return document.body.innerText.includes(arguments[0])", words)

    def press(self, keys: str) -> None:
        """Press keys, one after the other, where the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def click(self, script: str, *args: object) -> None:
        """Click at an element that a script returns, in the same turn: rows come and go."""
        self.until(f"const one = ({script}); one?.click(); return Boolean(one)", *args)

    def size(self, width: int, height: int) -> None:
        """Have a page of this size, also one that is narrower than a window can be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def devtools(self, command: str, params: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of the page."""
        shot = self.devtools("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        return base64.b64decode(shot["data"])

    def complaints(self) -> list[str]:
        """What the browser has logged since the last time: errors of scripts, breaches of the policy."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]


def eventually(look: Callable[[], T]) -> T:
    limit = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.05)
    return found
