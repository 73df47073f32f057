"""Start a program under measurement: its imports and opened files, then its file system calls."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import handover
from paceline.doctor.startup import Startup, summarize
from paceline.errors import EnvironmentUnfit, TrainingError
from paceline.launch.signals import StopSignals

_POLL_S, _GRACE_S = 0.2, 10.0


def measure_startup(target: Sequence[str], timeout_s: float, *, trace: bool = True) -> Startup:
    """Start a program twice: to time its imports, and under strace, if present, to count calls."""
    with StopSignals() as signals, tempfile.TemporaryDirectory(prefix="paceline-start-") as folder:
        run = _MeasuredRun(target, Path(folder), timeout_s, signals)
        facts, errors = run.start(["-X", "importtime"])
        calls = run.trace() if trace and shutil.which("strace") else None
    return summarize(" ".join(target), facts, errors, calls)


@dataclass(frozen=True)
class _MeasuredRun:
    target: Sequence[str]
    folder: Path
    timeout_s: float
    signals: StopSignals

    def start(
        self, options: Sequence[str], prefix: Sequence[str] = ()
    ) -> tuple[dict[str, Any], str]:
        """Run the program under `startup_probe`; return its facts and its standard error."""
        facts_file, errors_file = self.folder / "seen.json", self.folder / "said"
        facts_file.unlink(missing_ok=True)
        probe = ["-m", "paceline.doctor.startup_probe", str(facts_file), str(time.monotonic())]
        with errors_file.open("wb") as errors:
            process = subprocess.Popen(
                [*prefix, sys.executable, *options, *probe, *self.target],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            self._wait(process)
        text = errors_file.read_text(encoding="utf-8", errors="replace")
        return self._facts(facts_file, text), text

    def _environment(self) -> dict[str, str]:
        settings = json.loads(os.environ.get(handover.SETTINGS) or "{}")
        settings |= {"runs": str(self.folder / "runs"), "name": "startup"}
        return os.environ | {handover.SETTINGS: json.dumps(settings)}

    def _facts(self, file: Path, errors: str) -> dict[str, Any]:
        if not file.exists():
            raise EnvironmentUnfit(
                f"{' '.join(self.target)} ended before its first measurement: {_last_line(errors)}",
                fix="check that it starts without the doctor",
            )
        facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if facts["failure"]:
            raise TrainingError(
                f"it fails before its first step: {facts['failure']}",
                fix="start it without the doctor, and fix the error",
            )
        return facts

    def trace(self) -> str | None:
        """Return strace's list of file system calls; None where tracing is not permitted."""
        calls = self.folder / "calls"
        strace = ["strace", "-f", "-qq", "-s", "300", "-e", "trace=%file", "-o", str(calls)]
        try:
            self.start([], strace)
        except (EnvironmentUnfit, TrainingError):
            return None
        return calls.read_text(encoding="utf-8", errors="replace")

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the program's exit, the timeout or a stop signal; then kill what is left."""
        limit = time.monotonic() + self.timeout_s
        stop = self.signals
        while process.poll() is None and time.monotonic() < limit and not stop.first:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
        # At SIGTERM the probe writes its facts; strace ends only by SIGKILL.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        if stop.first == signal.SIGINT:
            raise KeyboardInterrupt
        if stop.first:
            raise SystemExit(128 + stop.first)


def _last_line(errors: str) -> str:
    for line in reversed(errors.splitlines()):
        if line.strip() and not line.startswith("import time:"):
            return line.strip()[:300]
    return "no output"
