"""The cost of starting a program, by package: import time, opened files, file system calls."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.doctor.disk import filesystem_of
from paceline.doctor.finding import Finding, passed, problem

_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
_CALL = re.compile(
    r"^\d+\s+(\w+)\((?:AT_FDCWD, |\d+(?:<[^>]*>)?, )?\"([^\"]*)\".*?=\s+(-?\d+)(?: (E\w+))?"
)
_NETWORKED = re.compile(r"nfs|lustre|gpfs|beegfs|ceph|cifs|smb|afs|panfs|fuse|9p|glusterfs")
_SLOW_S = 20.0
_LARGE_SHARE = 0.25  # of the time of all imports
_MAX_UNCOMPILED = 50
OWN, PYTHON, SYSTEM, METADATA = (
    "(your own files)",
    "(Python itself)",
    "(system)",
    "(metadata of packages)",
)
_EXPECTED = {"torch", "paceline", PYTHON}


@dataclass(frozen=True)
class Package:
    """The share of one package in a start."""

    name: str
    import_s: float = 0.0
    opened: int = 0
    calls: int = -1
    """File system calls; -1: not counted."""


@dataclass(frozen=True)
class Startup:
    """The measurements of a start. A JSON key per field."""

    what: str
    whole_s: float
    stepped: bool
    """Whether it reached its first optimizer step, at which it is stopped."""
    packages: list[Package]
    opened: int
    calls: int = -1
    not_found: int = -1
    """Calls for files that do not exist: the cost of a long search path."""
    kind: str = ""
    """File system type of the packages' folder."""
    uncompiled: int = 0
    """Modules without cached bytecode."""


def summarize(
    what: str,
    facts: Mapping[str, Any],
    errors: str,
    calls: str | None,
    roots: Mapping[str, str] | None = None,
) -> Startup:
    """Return the cost per package; `errors` has Python's import times, `calls` strace's output."""
    roots = roots or _roots()
    times = import_times(errors)
    opened, uncompiled = Counter[str](), 0
    for path, count in facts["opened"].items():
        package = owner(path, roots)
        opened[package] += count
        uncompiled += path.endswith(".py") and package not in {OWN, SYSTEM}
    traced, not_found = read_calls(calls, roots) if calls is not None else (Counter[str](), -1)
    packages = []
    for name in {*times, *opened, *traced}:
        count = traced[name] if calls is not None else -1
        packages.append(Package(name, times.get(name, 0.0), opened[name], count))
    return Startup(
        what=what,
        whole_s=float(facts["whole_s"]),
        stepped=bool(facts["stepped"]),
        packages=_most_expensive_first(packages),
        opened=opened.total(),
        calls=traced.total() if calls is not None else -1,
        not_found=not_found,
        kind=filesystem_of(Path(roots["packages"])),
        uncompiled=uncompiled,
    )


def _most_expensive_first(packages: Sequence[Package]) -> list[Package]:
    """Sort by the sum of a package's shares of the time, the files and the calls."""
    import_s = max(sum(package.import_s for package in packages), 1e-9)
    opened = max(1, sum(package.opened for package in packages))
    calls = max(1, sum(package.calls for package in packages))

    def share(package: Package) -> float:
        return package.import_s / import_s + package.opened / opened + package.calls / calls

    return sorted(packages, key=share, reverse=True)


def import_times(errors: str) -> dict[str, float]:
    r"""Return the import seconds per top-level package, from `python -X importtime`.

    The standard library counts as one package.

    >>> import_times("import time: 1500000 | 3000000 | torch.nn\nimport time: 9 | 9 | json.decoder")
    {'torch': 1.5, '(Python itself)': 9e-06}
    """
    times: dict[str, float] = {}
    for match in _IMPORT.finditer(errors):
        top = match[2].partition(".")[0]
        name = PYTHON if top in sys.stdlib_module_names or top.startswith("_") else top
        times[name] = times.get(name, 0.0) + int(match[1]) / 1e6
    return times


def _roots() -> dict[str, str]:
    paths = sysconfig.get_paths()
    return {"packages": paths["platlib"], "python": paths["platstdlib"], "base": paths["stdlib"]}


def owner(path: str, roots: Mapping[str, str]) -> str:
    """Return the package to which a file belongs.

    >>> roots = {"packages": "/v/site-packages", "python": "/v/lib", "base": "/usr/lib/python3.11"}
    >>> owner("/v/site-packages/torch/nn/x.py", roots), owner("/usr/lib/python3.11/json.py", roots)
    ('torch', '(Python itself)')
    >>> owner("/proc/stat", roots), owner("/me/x.py", roots)
    ('(system)', '(your own files)')
    """
    packages = roots["packages"] + "/"
    if path.startswith(packages):
        first = path.removeprefix(packages).partition("/")[0]
        if first.endswith((".dist-info", ".egg-info")):
            return METADATA
        return re.split(r"[.-]", first)[0] or first
    if path.startswith((roots["python"], roots["base"])):
        return PYTHON
    if any(root.startswith(path) for root in roots.values()):
        return PYTHON  # folders above it, which Python looks up repeatedly
    return SYSTEM if path.startswith(("/proc", "/sys", "/dev", "/etc", "/usr", "/lib")) else OWN


def read_calls(trace: str, roots: Mapping[str, str]) -> tuple[Counter[str], int]:
    """Return strace's calls per package, and how many of all did not find their file."""
    calls, not_found = Counter[str](), 0
    for line in trace.splitlines():
        match = _CALL.match(line)
        # A call without a file name is about an open file.
        if match and match[2] and match[1] != "getcwd":
            calls[owner(match[2], roots)] += 1
            not_found += match[4] == "ENOENT"
    return calls, not_found


def judge_startup(start: Startup) -> list[Finding]:
    """Judge file access, import time and missing bytecode."""
    findings = [_judge_files(start), _judge_time(start)]
    if start.uncompiled > _MAX_UNCOMPILED:
        findings.append(
            problem(
                "compiled",
                f"{start.uncompiled} modules of packages are compiled again at every start",
                f"{sys.executable} -m compileall -q {sysconfig.get_paths()['platlib']}",
            )
        )
    return findings


def _judge_files(start: Startup) -> Finding:
    text = f"{start.opened:,} files opened"
    if start.calls >= 0:
        text += (
            f", {start.calls:,} file system calls, {start.not_found:,} of them for missing files"
        )
    text += f"; packages are on {start.kind or 'an unknown file system'}"
    if _NETWORKED.search(start.kind):
        return problem(
            "files",
            f"{text}, a network file system that every rank reads",
            "unpack the environment on the local disk of every node: `paceline doctor --pack DIR`",
        )
    return passed("files", text)


def _judge_time(start: Startup) -> Finding:
    import_s = sum(package.import_s for package in start.packages)
    until = "to the first step" if start.stepped else "to its end"
    text = f"{start.whole_s:.1f} s {until}, {import_s:.1f} s of it imports"
    if import_s > _SLOW_S:
        return problem(
            "time",
            f"{text}, most by {start.packages[0].name}",
            "import rarely used packages inside the functions that need them; "
            "keep the environment on a local disk: --pack",
        )
    others = [package for package in start.packages if package.name not in _EXPECTED]
    large = [package for package in others if package.import_s > _LARGE_SHARE * import_s]
    if large and import_s > 1:
        names = ", ".join(f"{package.name} ({package.import_s:.1f} s)" for package in large)
        return problem(
            "time",
            f"{text}; besides torch: {names}",
            "import it inside the function that needs it, if not every start does",
        )
    return passed("time", text)
