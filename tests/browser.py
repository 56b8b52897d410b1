"""A headless Chromium for the tests of web pages: open one, ask it things, read its console's errors, take a picture.

    with Browser() as browser:
        browser.open(Path("report.html"), width=480)
        assert browser.errors == []
        assert browser.evaluate("document.title") == "Report"
        browser.screenshot(Path("report.png"))

Tests take the fixture `browser` (`tests/conftest.py`), which skips them where there is no Chromium.
"""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
MISSING = f"no Chromium is on the path ({', '.join(NAMES)}); Debian: apt-get install chromium"


def find() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab of a headless Chromium, which is told what to do in its own DevTools protocol, through a pipe.

    `errors` are those of the page that is open: exceptions, `console.error`, and files that it did not find.
    """

    def __init__(self, patience_s: float = 120.0) -> None:
        path = find()
        if path is None:
            raise FileNotFoundError(MISSING)
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # Chromium reads file descriptor 3 and writes 4.
        shell = ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >&2', "sh"]
        self.process = subprocess.Popen(
            [*shell, path, *FLAGS, f"--user-data-dir={self.profile.name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.patience_s, self.ids, self.session, self.target = patience_s, itertools.count(1), "", ""
        self.loaded, self.errors = False, list[str]()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        self.profile.cleanup()

    def open(self, page: Path | str, width: int = 1280, height: int = 900) -> None:
        """Open a file or an address in a window of this size, in pixels, and wait until it is loaded."""
        if self.target:
            self.call("Target.closeTarget", targetId=self.target)
        self.session, self.loaded, self.errors = "", False, []
        self.target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not self.loaded:
            self.listen()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; of a promise, the promised one."""
        outcome = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in outcome:
            raise ValueError(f"{expression}: {outcome['exceptionDetails']['exception']['description']}")
        return outcome["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write a picture of the window as a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol; its result."""
        message: dict[str, Any] = {"id": next(self.ids), "method": method, "params": params}
        if self.session and not method.startswith("Target."):
            message["sessionId"] = self.session
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        while (answer := self.listen()).get("id") != message["id"]:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def listen(self) -> dict[str, Any]:
        """The next message of the browser; it is ended if none comes."""
        assert self.process.stdout is not None
        timer = threading.Timer(self.patience_s, self.process.kill)
        timer.start()
        text = bytearray()
        while (byte := self.process.stdout.read(1)) not in (b"\0", b""):
            text += byte
        timer.cancel()
        if not byte:
            raise TimeoutError(f"the browser has ended, or said nothing for {self.patience_s:g} s")
        message = json.loads(text)
        if message.get("sessionId", "") == self.session:
            self.note(message.get("method"), message.get("params", {}))
        return message

    def note(self, event: str | None, params: dict[str, Any]) -> None:
        """Keep what an event of the open page says."""
        if event == "Page.loadEventFired":
            self.loaded = True
        elif event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(x.get("value", x.get("description"))) for x in params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".rstrip())
