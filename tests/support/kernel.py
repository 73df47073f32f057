"""A real Jupyter kernel: cells go in, and what a notebook would show comes out."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

from support.program import MARK

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 120


@dataclass
class Shown:
    """What a cell shows."""

    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, str]] = field(default_factory=list)
    """By MIME type; each as it was shown at first."""
    updates: list[str] = field(default_factory=list)
    """The texts that replaced a display."""
    error: dict[str, Any] = field(default_factory=dict)

    @property
    def drawings(self) -> list[str]:
        """The SVG files."""
        return [each["image/svg+xml"] for each in self.displays if "image/svg+xml" in each]

    @property
    def problem(self) -> str:
        """The error as the notebook shows it."""
        return "\n".join(self.error.get("traceback", []))

    def add(self, kind: str, content: dict[str, Any]) -> None:
        """Add a message of the kernel."""
        if kind == "stream":
            setattr(self, content["name"], getattr(self, content["name"]) + content["text"])
        elif kind == "display_data":
            self.displays.append(content["data"])
        elif kind == "update_display_data":
            self.updates.append(content["data"]["text/plain"])
        elif kind == "error":
            self.error = content


class Kernel:
    """One kernel, in which cells run one after the other."""

    def __init__(self, manager: Any, client: Any, mark: str) -> None:
        self._manager, self._client = manager, client
        self.mark = mark
        """The mark of all processes that it starts."""

    def run(self, code: str, each_message: Callable[[Shown], None] | None = None) -> Shown:
        """Run a cell to its end; `each_message` is called while it runs."""
        request = self._client.execute(code)
        shown, limit = Shown(), time.monotonic() + _PATIENCE_S
        while time.monotonic() < limit:
            with contextlib.suppress(Empty):
                message = self._client.get_iopub_msg(timeout=0.5)
                if message["parent_header"].get("msg_id") != request:
                    continue
                content = message["content"]
                if content.get("execution_state") == "idle":
                    return shown
                shown.add(message["msg_type"], content)
                if each_message is not None:
                    each_message(shown)
        raise AssertionError(f"the cell did not end within {_PATIENCE_S} s: {shown}")

    def interrupt(self) -> None:
        """Interrupt the kernel, as the button of a notebook does."""
        self._manager.interrupt_kernel()


def kernel_environment(folder: Path) -> dict[str, str]:
    """Return the variables of a kernel that imports this source tree and keeps its files in a folder."""
    places = {name: str(folder / name) for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    source = {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    env = os.environ | places | source
    env.pop("PYTEST_CURRENT_TEST", None)  # it changes what a kernel does
    env["TMPDIR"] = tempfile.mkdtemp(dir=folder, prefix="t")  # a killed kernel removes nothing
    return env


@contextlib.contextmanager
def started_kernel(folder: Path) -> Iterator[Kernel]:
    """Start a kernel that imports this source tree, with `%load_ext paceline` done."""
    from jupyter_client.manager import KernelManager

    mark = uuid.uuid4().hex
    env = kernel_environment(folder) | {MARK: mark}
    manager = KernelManager(transport="ipc", connection_file=str(folder / "kernel.json"))
    manager.start_kernel(cwd=str(folder), env=env)
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=_PATIENCE_S)
        kernel = Kernel(manager, client, mark)
        assert not kernel.run("%load_ext paceline").error
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
