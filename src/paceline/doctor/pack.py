"""Pack an environment of thousands of small files into one archive, for the local disk of nodes."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import ConfigError
from paceline.rundir import make_private, write_whole, writing_to

ROOT = "/tmp/paceline-UID"  # noqa: S108 - made private before use; UID is the user ID
_UNPACK = Path(__file__).with_name("unpack.py")


@dataclass(frozen=True)
class Packed:
    """An environment in one archive, with the program that unpacks it."""

    archive: Path
    unpacker: Path
    name: str
    files: int
    size_bytes: int
    python: str
    """The base interpreter of the environment, which is not packed."""
    outside: tuple[str, ...]
    """Folders outside the environment that it refers to; they are not packed."""

    @property
    def place(self) -> str:
        """The folder of the environment on a node."""
        return f"{ROOT.replace('UID', str(os.getuid()))}/{self.name}"


class _HashingFile:
    """Writes a file and computes its SHA-256."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self.size += len(data)
        return self._file.write(data)


def pack(environment: Path, to: Path) -> Packed:
    """Write an archive of a virtual environment, its plan, and the program that unpacks it."""
    settings = _settings(environment)
    with writing_to(to, "use another folder: --pack DIR"):
        make_private(to)
        partial = to / f".{secrets.token_hex(4)}.tar"
        try:
            files, digest, size = _write(environment, partial)
            name = f"{environment.resolve().name.strip('.') or 'env'}-{digest[:12]}"
            archive = to / f"{name}.tar"
            plan = {
                "name": name,
                "sha256": digest,
                "from": str(environment.resolve()),
                "root": ROOT,
            }
            write_whole(archive.with_suffix(".json"), json.dumps(plan, indent=2).encode())
            write_whole(archive.with_suffix(".py"), _UNPACK.read_bytes())
            partial.replace(archive)
        finally:
            partial.unlink(missing_ok=True)
    python = str(Path(settings.get("home", "/usr/bin")) / "python3")
    return Packed(
        archive, archive.with_suffix(".py"), name, files, size, python, tuple(_outside(environment))
    )


def _settings(environment: Path) -> dict[str, str]:
    """Return the settings in pyvenv.cfg."""
    try:
        lines = (environment / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{environment} is not a virtual environment: it has no pyvenv.cfg",
            fix="name one with --env (`python -m venv` creates one); for conda use conda-pack",
        ) from error
    settings = {}
    for line in lines:
        name, _, value = line.partition("=")
        settings[name.strip()] = value.strip()
    return settings


def _write(environment: Path, path: Path) -> tuple[int, str, int]:
    """Write the archive durably; return its number of files, SHA-256 and size."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    count = 0
    with os.fdopen(descriptor, "wb") as file:
        hashing = _HashingFile(file)
        with tarfile.open(fileobj=hashing, mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
            for member in _members(environment):
                archive.add(member, member.relative_to(environment), recursive=False, filter=_plain)
                count += 1
        file.flush()
        os.fsync(file.fileno())
    return count, hashing.sha256.hexdigest(), hashing.size


def _members(environment: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(environment):
        below.sort()
        path = Path(folder)
        links = [name for name in below if (path / name).is_symlink()]
        yield from (path / name for name in sorted([*names, *links]))
        if not names and not below and path != environment:
            yield path


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Drop owners and special files; round times to seconds, which Python compares."""
    if not (member.isreg() or member.issym() or member.islnk() or member.isdir()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = int(member.mtime)
    return member


def _outside(environment: Path) -> Iterator[str]:
    """Yield the folders that the environment's .pth files add."""
    home = str(environment.resolve())
    for file in sorted(environment.glob("lib/python*/site-packages/*.pth")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("/") and not line.startswith(home):
                yield line.strip()
            elif line.startswith("import __editable__"):
                yield f"{file.stem} (editable)"


def snippet(packed: Packed) -> str:
    """Return the lines for a batch script; no path in a comment, where it could not be quoted."""
    return (
        "# once per node, before the ranks start:\n"
        'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 '
        f"{shlex.quote(packed.python)} {shlex.quote(str(packed.unpacker))}\n"
        "# then start the ranks from it, for example: srun python SCRIPT\n"
        f"source {shlex.quote(f'{packed.place}/bin/activate')}\n"
    )
