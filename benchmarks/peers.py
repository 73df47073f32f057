"""Where do the peers live? In a virtual environment of their own, so that the project's own stays small."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
FOLDER = HOME / ".venv-peers"
REQUIREMENTS = HOME / "benchmarks" / "requirements.txt"
ALONE = HOME / "benchmarks" / "requirements-alone.txt"
_STAMP = FOLDER / "requirements.txt"


def peers_python() -> Path:
    """Return the interpreter of the peers' environment; build it first if it is missing or out of date."""
    python = FOLDER / "bin" / "python"
    wanted = "".join(path.read_text(encoding="utf-8") for path in (REQUIREMENTS, ALONE))
    if not _STAMP.is_file() or _STAMP.read_text(encoding="utf-8") != wanted:
        _say(
            f"making {FOLDER.name} (once): the packages of {REQUIREMENTS.relative_to(HOME)}, and this checkout"
        )
        venv.create(FOLDER, with_pip=True, clear=True)
        _install_all(python)
        _install(python, "--no-deps", "-e", str(HOME))
        _STAMP.write_text(wanted, encoding="utf-8")
    return python


def _install_all(python: Path) -> None:
    """Install all packages; where they cannot be had together, each by itself, so that one that cannot be had is left out."""
    for path, *how in ((REQUIREMENTS,), (ALONE, "--no-deps")):
        try:
            _install(python, *how, "-r", str(path))
        except subprocess.CalledProcessError:
            for line in path.read_text(encoding="utf-8").splitlines():
                _install_if_possible(python, *how, "-c", str(REQUIREMENTS), line)


def _install_if_possible(python: Path, *words: str) -> None:
    if not words[-1] or words[-1].startswith("#"):
        return
    try:
        _install(python, *words)
    except subprocess.CalledProcessError:
        _say(f"{words[-1]} cannot be installed here")


def _install(python: Path, *words: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *words], check=True)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    _say(str(peers_python().relative_to(HOME)))
