"""Where do the peers live? In a virtual environment of their own, so that the project's own stays small."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
FOLDER = HOME / ".venv-peers"
REQUIREMENTS = HOME / "benchmarks" / "requirements.txt"
_STAMP = FOLDER / "requirements.txt"


def peers_python() -> Path:
    """Return the interpreter of the peers' environment; build it first if it is missing or out of date."""
    python = FOLDER / "bin" / "python"
    wanted = REQUIREMENTS.read_text(encoding="utf-8")
    if not _STAMP.is_file() or _STAMP.read_text(encoding="utf-8") != wanted:
        _say(f"making {FOLDER.name} (once): the packages of {REQUIREMENTS.relative_to(HOME)}, and this checkout")
        venv.create(FOLDER, with_pip=True, clear=True)
        _install(python, "-r", str(REQUIREMENTS))
        _install(python, "--no-deps", "-e", str(HOME))
        _STAMP.write_text(wanted, encoding="utf-8")
    return python


def _install(python: Path, *words: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *words], check=True)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    _say(str(peers_python().relative_to(HOME)))
