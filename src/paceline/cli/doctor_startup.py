"""The parts of `paceline doctor` that are about starting: what it costs, and how to make it cheap."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from paceline.doctor.finding import all_ok, as_dict, format_findings
from paceline.doctor.pack import pack as pack_environment
from paceline.doctor.pack import snippet
from paceline.doctor.startup import Startup, judge_startup
from paceline.doctor.startup_run import measure_startup
from paceline.launch.spec import script
from paceline.units import human_size

_TOP = 10


def startup(known: argparse.Namespace) -> int:
    """Measure a start, show its ten dearest packages, and judge it."""
    target = (
        [*script(known.script).argv, *known.arguments]
        if known.script
        else ["import", "torch", "paceline"]
    )
    start = measure_startup(target, known.wait)
    found = judge_startup(start)
    if known.json:
        said = asdict(start) | {"ok": all_ok(found), "findings": [as_dict(one) for one in found]}
        print(json.dumps(said, indent=2))
    else:
        print("\n".join([*_table(start), "", *format_findings(found)]))
    return 0 if all_ok(found) else 1


def _table(start: Startup) -> list[str]:
    """Return the dearest packages, and the rest in one line."""
    rows = [("package", "import", "opened", "calls")]
    counted = start.calls >= 0
    rows += [
        (one.name, f"{one.import_s:.2f} s", f"{one.opened:,}", f"{one.calls:,}" if counted else "?")
        for one in start.packages[:_TOP]
    ]
    rest = start.packages[_TOP:]
    if rest:
        calls = f"{sum(one.calls for one in rest):,}" if counted else "?"
        rows.append(
            (
                f"{len(rest)} more",
                f"{sum(one.import_s for one in rest):.2f} s",
                f"{sum(one.opened for one in rest):,}",
                calls,
            )
        )
    width = max(len(row[0]) for row in rows)
    return [
        f"{name:<{width}}  {took:>8}  {opened:>7}  {calls:>7}" for name, took, opened, calls in rows
    ]


def pack(known: argparse.Namespace) -> int:
    """Pack the environment, and say how a batch script uses it."""
    packed = pack_environment((known.env or Path(sys.prefix)).absolute(), known.pack.absolute())
    if known.json:
        kept = {
            "archive": str(packed.archive),
            "unpacker": str(packed.unpacker),
            "place": packed.place,
            "files": packed.files,
        }
        kept |= {
            "size_bytes": packed.size_bytes,
            "python": packed.python,
            "outside": list(packed.outside),
            "snippet": snippet(packed),
        }
        print(json.dumps(kept, indent=2))
        return 0
    print(
        f"{packed.archive}: {packed.files:,} files, {human_size(packed.size_bytes)}, in one\n\n{snippet(packed)}"
    )
    for path in packed.outside:
        print(f"note: {path} is only pointed to, and stays where it is")
    print(f"note: Python itself stays where it is: {packed.python}")
    return 0
