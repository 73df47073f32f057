"""Which code a job runs: a copy made when it was submitted, so that a later edit does not change a queued job."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.launch.spec import Program
from paceline.rundir import make_private, writing_to

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "runs"}
_MOST_FILES = 2000
_MOST_BYTES = 50_000_000


@dataclass(frozen=True)
class CodeCopy:
    """The files that a job needs, where they lie now and where they will lie."""

    files: dict[Path, Path]
    """From the path below the copy to the file."""
    folder: Path
    words: tuple[str, ...]
    """How Python is told to run the copy, with the script's own words."""

    def make(self) -> None:
        """Write the copy, unless the very same is there."""
        for name, source in self.files.items():
            place = self.folder / name
            with writing_to(place):
                make_private(place.parent)
                if not place.exists():
                    _copy(source, place)


def plan_copy(target: Program, arguments: Sequence[str], below: Path) -> CodeCopy:
    """Return what to copy: the script, the Python files beside and below it, and the settings files it is given.

    The name of the copy's folder is a digest of its contents. A recipe is part of the package, and is not copied.
    """
    kind, what = target.words
    files: dict[Path, Path] = {}
    if kind == "path":
        home = Path(what).resolve().parent
        files = {
            Path("code") / file.relative_to(home): file
            for file in _python_files(home, Path(what).resolve())
        }
    words: list[tuple[str, Path | None]] = []
    for word in with_joined_values(arguments):
        option, equals, value = word.partition("=")
        if option == "--config" and equals and Path(value).is_file():
            name = Path("settings") / f"{len(files)}-{Path(value).name}"
            files[name] = Path(value)
            words.append(("--config=", name))
        else:
            words.append((word, None))
    folder = below / _digest(files)
    script = str(folder / "code" / Path(what).resolve().name) if kind == "path" else what
    own = (word if name is None else f"{word}{folder / name}" for word, name in words)
    return CodeCopy(files, folder, (kind, script, *own))


def with_joined_values(arguments: Sequence[str]) -> list[str]:
    """Return the words with `--config FILE` as one.

    >>> with_joined_values(["--config", "a.toml", "x=1", "--config"])
    ['--config=a.toml', 'x=1', '--config']
    """
    found: list[str] = []
    rest = iter(arguments)
    for word in rest:
        value = next(rest, None) if word == "--config" else None
        found.append(word if value is None else f"--config={value}")
    return found


def _python_files(home: Path, script: Path) -> list[Path]:
    found, size = [script], script.stat().st_size
    for folder, below, names in os.walk(home):
        here = Path(folder)
        below[:] = sorted(
            name
            for name in below
            if name[0] != "." and name not in _SKIPPED and not (here / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            file = here / name
            if file.suffix == ".py" and file != script and file.is_file():
                found.append(file)
                size += file.stat().st_size
        if len(found) > _MOST_FILES or size > _MOST_BYTES:
            raise ConfigError(
                f"there are more than {len(found) - 1:,} Python files ({size / 1e6:.0f} MB) beside and below {script}",
                fix="put the script into a folder of its own, with only what it imports",
            )
    return found


def _digest(files: dict[Path, Path]) -> str:
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        content = file.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def _copy(source: Path, place: Path) -> None:
    """Copy one file; it exists only when it is whole."""
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(source.read_bytes())
    partial.replace(place)
