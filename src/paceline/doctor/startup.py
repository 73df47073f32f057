"""What a start costs, by package: the time of imports, the files that are opened, all calls to the file system."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import handover
from paceline.doctor.disk import filesystem_of
from paceline.doctor.finding import Finding, passed, problem
from paceline.errors import EnvironmentUnfit, TrainingError
from paceline.launch.signals import StopSignals

_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
_CALL = re.compile(
    r"^\d+\s+(\w+)\((?:AT_FDCWD, |\d+(?:<[^>]*>)?, )?\"([^\"]*)\".*?=\s+(-?\d+)(?: (E\w+))?"
)
_NETWORKED = re.compile(r"nfs|lustre|gpfs|beegfs|ceph|cifs|smb|afs|panfs|fuse|9p|glusterfs")
_SLOW_S = 20.0
_HEAVY = 0.25  # of the time of all imports
_UNCOMPILED = 50
_LOOK_S, _GRACE_S = 0.2, 10.0
OWN, PYTHON, SYSTEM, METADATA = (
    "(your own files)",
    "(Python itself)",
    "(system)",
    "(metadata of packages)",
)


@dataclass(frozen=True)
class Package:
    """One package's part of a start."""

    name: str
    import_s: float = 0.0
    opened: int = 0
    calls: int = -1
    """To the file system; -1: nobody counted."""


@dataclass(frozen=True)
class Startup:
    """A start, measured."""

    what: str
    whole_s: float
    stepped: bool
    """Whether it came to its first optimizer step, where it was ended."""
    packages: list[Package]
    opened: int
    calls: int = -1
    not_found: int = -1
    """Calls for files that are not there: the price of a long search path."""
    kind: str = ""
    """The file system on which the packages lie."""
    uncompiled: int = 0
    """Modules that were compiled again."""


def measure_startup(target: Sequence[str], timeout_s: float, *, trace: bool = True) -> Startup:
    """Start a program twice: once to take its time and its imports, once under strace, if there is one, to count its calls."""
    with StopSignals() as signals, tempfile.TemporaryDirectory(prefix="paceline-start-") as folder:
        place = Path(folder)

        def run(options: Sequence[str], around: Sequence[str]) -> tuple[dict[str, Any], str]:
            return _start(
                target, place, options, around, lambda process: _wait(process, timeout_s, signals)
            )

        seen, said = run(["-X", "importtime"], [])
        calls = _trace(place, run) if trace and shutil.which("strace") else None
    return summarize(" ".join(target), seen, said, calls)


Run = Callable[[Sequence[str], Sequence[str]], tuple[dict[str, Any], str]]
"""Starts the program, with options for Python and words before it."""


def _start(
    target: Sequence[str],
    place: Path,
    options: Sequence[str],
    around: Sequence[str],
    wait: Callable[[subprocess.Popen[bytes]], None],
) -> tuple[dict[str, Any], str]:
    """Run the program under watch; return what was seen, and what it wrote to standard error."""
    out = place / "seen.json"
    out.unlink(missing_ok=True)
    settings = json.loads(os.environ.get(handover.SETTINGS) or "{}") | {
        "runs": str(place / "runs"),
        "name": "startup",
    }
    env = os.environ | {handover.SETTINGS: json.dumps(settings)}
    words = [
        *around,
        sys.executable,
        *options,
        "-m",
        "paceline.doctor.startup_probe",
        str(out),
        str(time.monotonic()),
    ]
    with (place / "said").open("wb") as said:
        none = subprocess.DEVNULL
        wait(
            subprocess.Popen(
                [*words, *target],
                env=env,
                stdin=none,
                stdout=none,
                stderr=said,
                start_new_session=True,
            )
        )
    text = (place / "said").read_text(encoding="utf-8", errors="replace")
    if not out.exists():
        raise EnvironmentUnfit(
            f"{' '.join(target)} ended before anything was seen: {_own_words(text)}",
            fix="see whether it starts without the doctor",
        )
    seen: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if seen["failure"]:
        raise TrainingError(
            f"it fails before its first step: {seen['failure']}",
            fix="start it without the doctor, and mend it",
        )
    return seen, text


def _wait(process: subprocess.Popen[bytes], timeout_s: float, signals: StopSignals) -> None:
    """Wait for a program's end, its time, or a signal to stop; nothing of it is left, and such a signal is heeded."""
    limit = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < limit and not signals.first:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)
    for number in (
        signal.SIGTERM,
        signal.SIGKILL,
    ):  # at the first it writes down what it has seen; strace hears only the second
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    if signals.first == signal.SIGINT:
        raise KeyboardInterrupt
    if signals.first:
        raise SystemExit(128 + signals.first)


def _own_words(said: str) -> str:
    own = [
        line.strip()
        for line in said.splitlines()
        if line.strip() and not line.startswith("import time:")
    ]
    return own[-1][:300] if own else "without a word"


def _trace(place: Path, run: Run) -> str | None:
    """Return strace's list of calls to the file system; None where it is not permitted."""
    record = place / "calls"
    try:
        run([], ["strace", "-f", "-qq", "-s", "300", "-e", "trace=%file", "-o", str(record)])
    except (EnvironmentUnfit, TrainingError):
        return None
    return record.read_text(encoding="utf-8", errors="replace")


def summarize(
    what: str,
    seen: Mapping[str, Any],
    said: str,
    calls: str | None,
    roots: Mapping[str, str] | None = None,
) -> Startup:
    """Put together what was seen, by package."""
    roots = roots or _roots()
    times = import_times(said)
    opened = Counter[str]()
    for path, count in seen["opened"].items():
        opened[owner(path, roots)] += count
    traced, not_found = read_calls(calls, roots) if calls is not None else (Counter[str](), -1)
    names = {*times, *opened, *traced}
    packages = [
        Package(name, times.get(name, 0.0), opened[name], traced[name] if calls is not None else -1)
        for name in names
    ]
    packages.sort(key=_dear(packages), reverse=True)
    return Startup(
        what=what,
        whole_s=float(seen["whole_s"]),
        stepped=bool(seen["stepped"]),
        packages=packages,
        opened=opened.total(),
        calls=traced.total() if calls is not None else -1,
        not_found=not_found,
        kind=filesystem_of(Path(roots["packages"])),
        uncompiled=sum(
            path.endswith(".py") and owner(path, roots) not in {OWN, SYSTEM}
            for path in seen["opened"]
        ),
    )


def _dear(packages: Sequence[Package]) -> Callable[[Package], float]:
    """Return how dear a package is: its share of the time, of the files, and of the calls."""
    whole = [
        sum(one.import_s for one in packages),
        sum(one.opened for one in packages),
        sum(one.calls for one in packages),
    ]
    return lambda one: (
        one.import_s / max(whole[0], 1e-9)
        + one.opened / max(1, whole[1])
        + one.calls / max(1, whole[2])
    )


def import_times(said: str) -> dict[str, float]:
    r"""Return the seconds of imports by top-level package, from what `python -X importtime` says; Python's own modules are one.

    >>> import_times("import time:  1500000 |    3000000 |   torch.nn\nimport time:  500000 | 5 | torch\nimport time: 9 | 9 | json.decoder")
    {'torch': 2.0, '(Python itself)': 9e-06}
    """
    found: dict[str, float] = {}
    for match in _IMPORT.finditer(said):
        top = match[2].partition(".")[0]
        name = PYTHON if top in sys.stdlib_module_names or top.startswith("_") else top
        found[name] = found.get(name, 0.0) + int(match[1]) / 1e6
    return found


def _roots() -> dict[str, str]:
    paths = sysconfig.get_paths()
    return {"packages": paths["platlib"], "python": paths["platstdlib"], "base": paths["stdlib"]}


def owner(path: str, roots: Mapping[str, str]) -> str:
    """Return the package to which a file belongs.

    >>> roots = {"packages": "/v/lib/site-packages", "python": "/v/lib", "base": "/usr/lib/python3.11"}
    >>> [owner(path, roots) for path in ("/v/lib/site-packages/torch/nn/x.py", "/usr/lib/python3.11/json.py", "/proc/stat", "/me/x.py")]
    ['torch', '(Python itself)', '(system)', '(your own files)']
    """
    if path.startswith(roots["packages"] + "/"):
        first = path[len(roots["packages"]) + 1 :].partition("/")[0]
        return (
            METADATA
            if first.endswith((".dist-info", ".egg-info"))
            else re.split(r"[.-]", first)[0] or first
        )
    if path.startswith((roots["python"], roots["base"])) or any(
        root.startswith(path) for root in roots.values()
    ):
        return PYTHON  # and the folders above it, which it looks up again and again
    return SYSTEM if path.startswith(("/proc", "/sys", "/dev", "/etc", "/usr", "/lib")) else OWN


def read_calls(said: str, roots: Mapping[str, str]) -> tuple[Counter[str], int]:
    """Return how many calls strace saw for each package, and how many of all found nothing."""
    found, missing = Counter[str](), 0
    for line in said.splitlines():
        match = _CALL.match(line)
        if (
            match and match[2] and match[1] != "getcwd"
        ):  # without a name it is about a file that is open
            found[owner(match[2], roots)] += 1
            missing += match[4] == "ENOENT"
    return found, missing


def judge_startup(start: Startup) -> list[Finding]:
    """Judge what a start costs, and name what helps."""
    found = [_judge_disk(start), _judge_time(start)]
    if start.uncompiled > _UNCOMPILED:
        found.append(
            problem(
                "compiled",
                f"{start.uncompiled} modules of packages are compiled again at every start",
                f"{sys.executable} -m compileall -q {sysconfig.get_paths()['platlib']}",
            )
        )
    return found


def _judge_disk(start: Startup) -> Finding:
    calls = (
        f", {start.calls:,} calls to the file system, {start.not_found:,} of them for what is not there"
        if start.calls >= 0
        else ""
    )
    said = f"{start.opened:,} files opened{calls}; packages lie on {start.kind or 'a file system that is not known'}"
    if _NETWORKED.search(start.kind):
        return problem(
            "files",
            f"{said}, which every rank asks for all of them",
            "unpack the environment on every node's own disk: `paceline doctor --pack DIR`",
        )
    return passed("files", said)


def _judge_time(start: Startup) -> Finding:
    whole = sum(one.import_s for one in start.packages)
    heavy = [
        one
        for one in start.packages
        if one.import_s > _HEAVY * whole and one.name not in {"torch", "paceline", PYTHON}
    ]
    where = "to the first step" if start.stepped else "to its end"
    said = f"{start.whole_s:.1f} s {where}, {whole:.1f} s of it imports"
    if whole > _SLOW_S:
        worst = start.packages[0].name
        return problem(
            "time",
            f"{said}, most by {worst}",
            "import what is seldom needed where it is needed; keep the environment on a local disk: --pack",
        )
    if heavy and whole > 1:
        names = ", ".join(f"{one.name} ({one.import_s:.1f} s)" for one in heavy)
        return problem(
            "time",
            f"{said}; beside torch: {names}",
            "import it where it is needed, if not every start needs it",
        )
    return passed("time", said)
