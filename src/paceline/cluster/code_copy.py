"""The copy of the code that a job runs, made at submission: later edits do not change the job."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.launch.spec import Program
from paceline.rundir import make_private, writing_to
from paceline.safe_open import read_bytes

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "runs"}
_MAX_FILES = 2000
_MAX_BYTES = 50_000_000


@dataclass(frozen=True)
class CodeCopy:
    """The files that a job needs, and the folder for their copy."""

    files: dict[Path, Path]
    """From the path inside the copy to the original file."""
    folder: Path
    words: tuple[str, ...]
    """How to run the copy: path SCRIPT or module NAME, then the script's arguments."""

    def make(self) -> None:
        """Write the files that the folder does not have yet."""
        for name, source in self.files.items():
            copy = self.folder / name
            with writing_to(copy):
                make_private(copy.parent)
                if not copy.exists():
                    _copy(source, copy)


def plan_copy(target: Program, arguments: Sequence[str], below: Path) -> CodeCopy:
    """Return which files to copy: the script, the Python files next to and below it, its configs.

    The copy's folder is named by the digest of its contents. Recipes are part of the package and
    are not copied.
    """
    kind, script = target.argv
    files: dict[Path, Path] = {}
    if kind == "path":
        path = Path(script).resolve()
        for file in _python_files(path.parent, path):
            files[Path("code") / file.relative_to(path.parent)] = file
    config_names: dict[int, Path] = {}
    joined = join_config_files(arguments)
    for position, argument in enumerate(joined):
        option, equals, value = argument.partition("=")
        if option == "--config" and equals and Path(value).is_file():
            name = Path("settings") / f"{len(files)}-{Path(value).name}"
            files[name] = Path(value)
            config_names[position] = name
    folder = below / _digest(files)
    if kind == "path":
        script = str(folder / "code" / Path(script).resolve().name)
    for position, name in config_names.items():
        joined[position] = f"--config={folder / name}"
    return CodeCopy(files, folder, (kind, script, *joined))


def join_config_files(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--config FILE` as one.

    >>> join_config_files(["--config", "a.toml", "x=1", "--config"])
    ['--config=a.toml', 'x=1', '--config']
    """
    joined: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        value = next(rest, None) if argument == "--config" else None
        joined.append(argument if value is None else f"--config={value}")
    return joined


def _python_files(home: Path, script: Path) -> list[Path]:
    files, size = [script], script.stat().st_size
    for parent, folders, names in os.walk(home):
        folder = Path(parent)
        folders[:] = sorted(name for name in folders if not _is_skipped(folder / name))
        for name in sorted(names):
            file = folder / name
            if file.suffix == ".py" and file != script and file.is_file():
                files.append(file)
                size += file.stat().st_size
        if len(files) > _MAX_FILES or size > _MAX_BYTES:
            raise ConfigError(
                f"more than {len(files) - 1:,} Python files ({size / 1e6:.0f} MB) lie next to and "
                f"below {script}; at most {_MAX_FILES:,} ({_MAX_BYTES / 1e6:.0f} MB) are copied",
                fix="move the script to a folder of its own, with only the files it imports",
            )
    return files


def _is_skipped(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name in _SKIPPED
    return hidden or (folder / "pyvenv.cfg").exists()


def _digest(files: dict[Path, Path]) -> str:
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        content = read_bytes(file, _MAX_BYTES, links=True)
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def _copy(source: Path, copy: Path) -> None:
    """Copy one file; it appears under its name only when it is complete."""
    partial = copy.with_name(f".{copy.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(read_bytes(source, _MAX_BYTES, links=True))
    partial.replace(copy)
