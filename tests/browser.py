"""Headless Chromium for tests of pages: the fixture `tab`, over Chromium's DevTools protocol.

    def test_a_page(tab: Tab) -> None:
        tab.look(width=400, height=800, dark=True)
        tab.open((folder / "index.html").as_uri())
        assert tab.evaluate("document.title") == "..." and tab.complaints == []

A tab collects what the page complains of: warnings and errors of the console, uncaught exceptions, files that do not
load. Tests are skipped where there is no Chromium, and fail instead where REPRO_NEEDS_CHROMIUM is set.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # Chromium refuses to run as root with one; only this project's own pages are opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-port=0",
)


class Tab:
    """One tab. `complaints` are what the page has complained of since it was opened."""

    def __init__(self, socket: str) -> None:
        import websocket

        self._socket = websocket.create_connection(socket, suppress_origin=True, timeout=60)
        self._number = 0
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol; returns its result. AssertionError where Chromium refuses it."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, event: str | None, what: dict[str, Any]) -> None:
        if event == "Runtime.consoleAPICalled" and what["type"] in ("warning", "error", "assert"):
            said = " ".join(str(part.get("value", part.get("description"))) for part in what["args"])
            self.complaints.append(f"console {what['type']}: {said}")
        elif event == "Runtime.exceptionThrown":
            details = what["exceptionDetails"]
            self.complaints.append(f"exception: {details.get('exception', {}).get('description', details['text'])}")
        elif event == "Log.entryAdded" and what["entry"]["level"] in ("warning", "error"):
            entry = what["entry"]
            self.complaints.append(f"{entry['source']} {entry['level']}: {entry['text']} {entry.get('url', '')}")

    def look(self, width: int = 1400, height: int = 1000, dark: bool = False, media: str = "screen") -> None:
        """How the page is looked at from now on: the window in CSS pixels, the colour scheme, "screen" or "print"."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def open(self, url: str, seconds: float = 60) -> None:
        """Go to an address and wait until it is loaded, images too."""
        self.complaints.clear()
        failed = self.send("Page.navigate", url=url).get("errorText")
        assert not failed, (url, failed)
        self.wait_for("document.readyState === 'complete'", seconds)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise. AssertionError where it throws."""
        done = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        """Wait until a JavaScript expression is true; AssertionError, with the page's text, if it stays false."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                text = self.evaluate("document.body.innerText.slice(-2000)")
                raise AssertionError(f"not within {seconds:.0f} s: {condition}\n{self.complaints[-5:]}\n{text}")
            time.sleep(0.25)

    def click(self, selector: str) -> None:
        """Click in the middle of the first element that a CSS selector finds, after scrolling there."""
        x, y = self.evaluate(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)}); found.scrollIntoView({{block: "
            "'center'}); const box = found.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height "
            "/ 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type text where the cursor is."""
        self.send("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """Save what is seen as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self.send("Page.close")
        self._socket.close()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running headless Chromium: the address of its DevTools protocol."""
    if next(filter(None, map(shutil.which, PROGRAMS)), None) is None:
        if os.environ.get("REPRO_NEEDS_CHROMIUM"):
            pytest.fail("no Chromium, and REPRO_NEEDS_CHROMIUM is set")
        pytest.skip("no Chromium is installed (Debian: apt install chromium); pages are not opened")
    with running(tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture
def tab(chromium: str) -> Iterator[Tab]:
    """A new tab of 1,400 by 1,000 pixels, light."""
    with new_tab(chromium) as one:
        yield one


@contextmanager
def running(profile: Path) -> Iterator[str]:
    """A headless Chromium with a profile in this folder: the address of its DevTools protocol."""
    program = next(filter(None, map(shutil.which, PROGRAMS)))
    command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with open(profile / "log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        port, deadline = profile / "DevToolsActivePort", time.monotonic() + 60
        while not (port.exists() and port.read_text().count("\n")):
            assert process.poll() is None and time.monotonic() < deadline, (profile / "log").read_text()[-2000:]
            time.sleep(0.05)
        yield f"127.0.0.1:{port.read_text().split()[0]}"
        process.terminate()


@contextmanager
def new_tab(chromium: str) -> Iterator[Tab]:
    import urllib.request

    request = urllib.request.Request(f"http://{chromium}/json/new", method="PUT")
    with urllib.request.urlopen(request, timeout=60) as answer:
        one = Tab(json.load(answer)["webSocketDebuggerUrl"])
    one.look()
    yield one
    one.close()
