"""Draw the README's picture of a terminal: a run on four ranks loses one, restarts, and ends with the bits of one process.

`python scripts/docs/terminal.py` runs the commands, kills rank 2, and writes docs/images/terminal.json; `make reference`
draws that file. Nothing in it is written by hand.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

RECORD = Path(__file__).resolve().parents[2] / "docs" / "images" / "terminal.json"
WORDS = "epochs=2 checkpoint.every=10steps"
ALONE = f"paceline train mnist -n 1 {WORDS} name=one"
FOUR = f"paceline train mnist -n 4 {WORDS} name=four"
KILL_AFTER = "step-000000030"
VICTIM = "2"
SHOWN = re.compile(r"epoch|done:|error:|fix:|restarting")
COLUMNS, LINE, LEFT, TOP = 98, 20, 22, 62
STYLE = """
.card { fill: #11151c; stroke: #3d444d }
.bar { fill: #ff5f57 } .bar + .bar { fill: #febc2e } .bar + .bar + .bar { fill: #28c840 }
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #c9d1d9; white-space: pre }
.command { fill: #ffffff; font-weight: 600 } .kill { fill: #ff8a80 } .restart { fill: #ffd54f }
.digest { fill: #4dd0a5; font-weight: 600 } .soft { fill: #8b949e }
"""


def record() -> list[str]:
    """Run both trainings; return the lines of the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        alone = _start(ALONE, folder)
        lines = [f"$ {ALONE}", *_shown(alone.communicate()[0])]
        four = _start(FOUR, folder)
        saved = Path(folder, "runs", "four", "checkpoints", KILL_AFTER)
        while not saved.exists():
            time.sleep(0.02)
        victim = _rank(four.pid)
        os.kill(victim, signal.SIGKILL)
        output = _shown(four.communicate()[0])
    killed = f"$ kill -9 {victim}    # rank {VICTIM}, from another terminal"
    at = next(index for index, line in enumerate(output) if "SIGKILL" in line)
    return [*lines, "", f"$ {FOUR}", *output[:at], killed, *output[at:]]


def _start(command: str, folder: str) -> subprocess.Popen[str]:
    pipe, joined = subprocess.PIPE, subprocess.STDOUT
    words = [sys.executable, "-m", *command.split()]
    return subprocess.Popen(words, cwd=folder, stdout=pipe, stderr=joined, text=True)


def _rank(launcher: int) -> int:
    """Return the process of the rank that is to die."""
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for child in (task / "children").read_text().split():
            if f"\0RANK={VICTIM}\0" in Path(f"/proc/{child}/environ").read_text():
                return int(child)
    raise LookupError(f"rank {VICTIM} has no process")


def _shown(output: str) -> list[str]:
    """Return the lines that a reader looks at; the start, the saves and the fix are left out."""
    return [line[:COLUMNS] for line in output.splitlines() if SHOWN.search(line)]


def picture() -> str:
    """Return the SVG."""
    lines = json.loads(RECORD.read_text(encoding="utf-8"))
    width, height = 2 * LEFT + round(COLUMNS * 7.82), TOP + LINE * len(lines) + 6
    alt = "A terminal: a training on four ranks loses a rank, restarts, and ends with the digest of one process."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{alt}">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="12"/>',
        *(f'<circle class="bar" cx="{24 + 20 * dot}" cy="24" r="6"/>' for dot in range(3)),
        *(part for number, line in enumerate(lines) for part in _row(TOP + LINE * number, line)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _row(y: int, line: str) -> Iterator[str]:
    kinds = {"$ kill": "kill", "$ ": "command", "restarting": "restart", "error:": "kill"}
    kind = next((kind for start, kind in kinds.items() if line.startswith(start)), "")
    text = escape(line)
    if line.startswith("done:"):
        text = re.sub(r"(\w{16})$", r'<tspan class="digest">\1</tspan>', text)
    if text:
        yield f'<text class="{kind}" x="{LEFT}" y="{y}">{text}</text>'


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
