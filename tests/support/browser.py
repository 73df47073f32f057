"""A real Chromium without a window, told what to do through a pair of pipes: no port, no driver, no package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PATIENCE_S = 90
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--remote-debugging-pipe", "--force-color-profile=srgb",
)  # fmt: skip


class Browser:
    """The other end of Chromium's debugging pipe, attached to one page."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._read, self._count, self._session = to, back, b"", 0, ""
        self.complaints: list[str] = []
        self.asked_for: list[str] = []
        page = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.tell(f"{domain}.enable")

    def tell(self, method: str, **params: Any) -> Any:
        """Send a command, and return its answer; what happens meanwhile is kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message | session).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._count:
                assert "error" not in said, said["error"]
                return said["result"]

    def _next(self) -> dict[str, Any]:
        limit = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._read:
            assert time.monotonic() < limit, "Chromium says nothing"
            if select.select([self._back], [], [], 1.0)[0]:
                got = os.read(self._back, 1 << 20)
                assert got, "Chromium has gone"
                self._read += got
        line, _, self._read = self._read.partition(b"\0")
        said = json.loads(line)
        self._note(said.get("method", ""), said.get("params", {}))
        return said

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method in {"Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening"}:
            self.complaints.append(json.dumps(params))
        bad = {"error", "warning", "assert"}
        if method == "Runtime.consoleAPICalled" and params["type"] in bad:
            self.complaints.append(json.dumps(params["args"]))
        if method == "Network.requestWillBeSent":
            self.asked_for.append(params["request"]["url"])
        self._last = method

    def show(
        self, place: Path | str, *, width: int = 1200, dark: bool = False, script: bool = True
    ) -> None:
        """Open a file, or an address, at a width, in a colour scheme, with or without its script, and wait until it is there."""
        self.look(width=width, dark=dark)
        self.tell("Emulation.setScriptExecutionDisabled", value=not script)
        url = place if isinstance(place, str) else place.absolute().as_uri()
        self.tell("Page.navigate", url=url)
        while self._last != "Page.loadEventFired":
            self._next()

    def look(self, *, width: int, dark: bool) -> None:
        """Change the width of the screen and the colour scheme."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.tell("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """Return what an expression is, in the page."""
        how = {"returnByValue": True, "awaitPromise": True}
        found = self.tell("Runtime.evaluate", expression=expression, **how)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move_to(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.tell("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self) -> bytes:
        """Return what the screen shows, as PNG."""
        return base64.b64decode(self.tell("Page.captureScreenshot")["data"])


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Start Chromium with a folder of its own for everything it keeps."""
    to_read, to = os.pipe()
    back, back_write = os.pipe()
    folder.mkdir(parents=True, exist_ok=True)

    def take_pipes() -> None:
        # Chromium reads from 3 and writes to 4; moved out of the way first, as our own ends may have these numbers.
        ends = os.dup2(to_read, 100), os.dup2(back_write, 101)
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    process = subprocess.Popen(
        ["chromium", *_OPTIONS, f"--user-data-dir={folder}"], env=os.environ | {"HOME": str(folder), "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=take_pipes, close_fds=False,  # noqa: PLW1509
    )  # fmt: skip
    os.close(to_read)
    os.close(back_write)
    with process:
        try:
            yield Browser(to, back)
        finally:
            process.kill()
            process.wait()
            os.close(to)
            os.close(back)
