"""Unpack an environment once per node, even if several processes ask at once; print its folder.

A copy of this file is next to every packed environment, with a .json of the same name. It needs only Python:
    python3 NAME.py [FOLDER]
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import tarfile
from pathlib import Path
from typing import IO, Any

_COMPLETE = ".whole"
_SMALL = 1 << 20


class HashingFile:
    """Reads a file and computes its SHA-256."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        data = self._file.read(size)
        self.sha256.update(data)
        return data


def main() -> None:
    """Unpack the environment if it is not there yet, and print its folder."""
    plan: dict[str, str] = json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    )
    user = os.getuid()
    root = Path(sys.argv[1] if len(sys.argv) > 1 else plan["root"].replace("UID", str(user)))
    try:
        print(unpack(plan, Path(__file__).with_suffix(".tar"), root))
    except (OSError, tarfile.TarError, ValueError) as error:
        sys.exit(
            f"error: cannot unpack the environment to {root}: {error}\n"
            "  fix: use another folder, or pack it again"
        )


def unpack(plan: dict[str, str], archive: Path, root: Path) -> Path:
    """Return the folder of the environment; it gets its name only when it is complete and verified."""
    _claim(root)
    place = root / plan["name"]
    with (root / f"{plan['name']}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when its holder dies
        if _is_complete(place, plan):
            return place
        for left in [*root.glob(f".{plan['name']}.*"), place]:
            shutil.rmtree(left, ignore_errors=True)
        partial = root / f".{plan['name']}.{os.getpid()}"
        try:
            _extract(archive, partial, plan["sha256"])
            _relocate(partial, plan["from"], str(place))
            (partial / _COMPLETE).write_text(plan["sha256"], encoding="utf-8")
            partial.rename(place)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return place


def _claim(root: Path) -> None:
    """Make a folder that only this user can write: a name in /tmp may be an attacker's."""
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700, parents=True)
    facts = root.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise ValueError(f"{root} is not a folder that only this user can write")


def _is_complete(place: Path, plan: dict[str, str]) -> bool:
    with contextlib.suppress(OSError):
        return (place / _COMPLETE).read_text(encoding="utf-8") == plan["sha256"]
    return False


def _extract(archive: Path, to: Path, expected: str) -> None:
    """Unpack the archive in one pass; raise an error if its SHA-256 is not the expected one."""
    to.mkdir(mode=0o700)
    with archive.open("rb") as file:
        hashing = HashingFile(file)
        with tarfile.open(fileobj=hashing, mode="r|") as packed:  # type: ignore[call-overload]
            for member in packed:
                if member.name.startswith("/") or ".." in Path(member.name).parts:
                    raise ValueError(
                        f"the archive contains {member.name!r}, a path outside the folder"
                    )
                packed.extract(member, to, set_attrs=True, **_FILTER)
        while hashing.read(_SMALL):
            pass
    if hashing.sha256.hexdigest() != expected:
        raise ValueError(f"{archive} is damaged: its SHA-256 differs from the one at packing")


_FILTER: dict[str, Any] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}


def _relocate(folder: Path, old: str, new: str) -> None:
    """Replace the old path in the environment's scripts; Python finds its own location itself."""
    for file in (folder / "bin").iterdir():
        if file.is_symlink() or not file.is_file() or file.stat().st_size > _SMALL:
            continue
        content = file.read_bytes()
        if old.encode() in content and b"\0" not in content[:1024]:
            file.write_bytes(content.replace(old.encode(), new.encode()))


if __name__ == "__main__":
    main()
