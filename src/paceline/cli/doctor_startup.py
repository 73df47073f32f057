"""`paceline doctor --startup` and `--pack`: what starting costs, and how to make it cheap."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.doctor.finding import all_ok, as_dict, format_findings
from paceline.doctor.pack import pack as pack_environment
from paceline.doctor.pack import snippet
from paceline.doctor.startup import Startup, judge_startup
from paceline.doctor.startup_run import measure_startup
from paceline.units import human_size

_TOP = 10


def startup(words: Sequence[str], wait_s: float, *, as_json: bool) -> int:
    """Measure the startup of a script (without words: of torch), and show the slowest imports."""
    start = measure_startup(list(words) or ["import", "torch", "paceline"], wait_s)
    findings = judge_startup(start)
    ok = all_ok(findings)
    if as_json:
        facts = asdict(start) | {"ok": ok, "findings": [as_dict(each) for each in findings]}
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join([*_table(start), "", *format_findings(findings)]))
    return 0 if ok else 1


def _table(start: Startup) -> list[str]:
    """Return the slowest packages, and the sum of all others."""
    counted = start.calls >= 0
    rows = [("package", "import", "opened", "calls")]
    for package in start.packages[:_TOP]:
        calls = f"{package.calls:,}" if counted else "?"
        rows.append((package.name, f"{package.import_s:.2f} s", f"{package.opened:,}", calls))
    others = start.packages[_TOP:]
    if others:
        import_s = sum(package.import_s for package in others)
        opened = sum(package.opened for package in others)
        calls = f"{sum(package.calls for package in others):,}" if counted else "?"
        rows.append((f"{len(others)} more", f"{import_s:.2f} s", f"{opened:,}", calls))
    width = max(len(row[0]) for row in rows)
    return [
        f"{name:<{width}}  {took:>8}  {opened:>7}  {calls:>7}" for name, took, opened, calls in rows
    ]


def pack(folder: Path, environment: Path | None, *, as_json: bool) -> int:
    """Pack the environment, and print how a batch script uses it."""
    packed = pack_environment((environment or Path(sys.prefix)).absolute(), folder.absolute())
    if as_json:
        facts = {
            "archive": str(packed.archive),
            "unpacker": str(packed.unpacker),
            "place": packed.place,
            "files": packed.files,
            "size_bytes": packed.size_bytes,
            "python": packed.python,
            "outside": list(packed.outside),
            "snippet": snippet(packed),
        }
        print(json.dumps(facts, indent=2))
        return 0
    size = human_size(packed.size_bytes)
    print(f"{packed.archive}: {packed.files:,} files, {size}\n\n{snippet(packed)}")
    for path in packed.outside:
        print(f"note: {path} is only linked, not packed")
    print(f"note: Python itself is not packed: {packed.python}")
    return 0
