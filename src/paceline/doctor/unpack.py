"""Unpack an environment once on this node, however many ask at the same time, and print where it is.

A copy of this file lies beside every packed environment, with a .json of the same name. It needs nothing but Python:
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

_MARK = ".whole"
_SMALL = 1 << 20


class Summed:
    """Reads a file, and sums what is read on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sum = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        data = self._file.read(size)
        self.sum.update(data)
        return data


def main() -> None:
    """Unpack beside others, if need be, and print the folder."""
    plan: dict[str, str] = json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    )
    user = os.getuid()
    root = Path(sys.argv[1] if len(sys.argv) > 1 else plan["root"].replace("UID", str(user)))
    try:
        print(unpack(plan, Path(__file__).with_suffix(".tar"), root))
    except (OSError, tarfile.TarError, ValueError) as error:
        sys.exit(
            f"error: the environment cannot be unpacked to {root}: {error}\n  fix: name another folder, or pack it again"
        )


def unpack(plan: dict[str, str], archive: Path, root: Path) -> Path:
    """Return the folder of the environment; it has its name only when it is whole and its bytes were right."""
    _claim(root)
    place = root / plan["name"]
    with (root / f"{plan['name']}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when its holder dies
        if _is_whole(place, plan):
            return place
        for left in [*root.glob(f".{plan['name']}.*"), place]:
            shutil.rmtree(left, ignore_errors=True)
        partial = root / f".{plan['name']}.{os.getpid()}"
        try:
            _extract(archive, partial, plan["sha256"])
            _relocate(partial, plan["from"], str(place))
            (partial / _MARK).write_text(plan["sha256"], encoding="utf-8")
            partial.rename(place)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return place


def _claim(root: Path) -> None:
    """Make a folder that nobody else can enter: a name in /tmp may be somebody else's trap."""
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700, parents=True)
    facts = root.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise ValueError(f"{root} is not a folder that only this user can write")


def _is_whole(place: Path, plan: dict[str, str]) -> bool:
    with contextlib.suppress(OSError):
        return (place / _MARK).read_text(encoding="utf-8") == plan["sha256"]
    return False


def _extract(archive: Path, to: Path, expected: str) -> None:
    """Unpack one file, in one go; bytes that are not those that were packed are refused."""
    to.mkdir(mode=0o700)
    with archive.open("rb") as file:
        summed = Summed(file)
        with tarfile.open(fileobj=summed, mode="r|") as packed:  # type: ignore[call-overload]
            for member in packed:
                if member.name.startswith("/") or ".." in Path(member.name).parts:
                    raise ValueError(f"the archive holds {member.name!r}")
                packed.extract(member, to, set_attrs=True, **_FILTER)
        while summed.read(_SMALL):
            pass
    if summed.sum.hexdigest() != expected:
        raise ValueError(f"{archive} is damaged: its sum is not the one that was packed")


_FILTER: dict[str, Any] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}


def _relocate(folder: Path, old: str, new: str) -> None:
    """Let the programs of the environment find it at its new place; Python itself finds it by where it lies."""
    for file in (folder / "bin").iterdir():
        if file.is_symlink() or not file.is_file() or file.stat().st_size > _SMALL:
            continue
        content = file.read_bytes()
        if old.encode() in content and b"\0" not in content[:1024]:
            file.write_bytes(content.replace(old.encode(), new.encode()))


if __name__ == "__main__":
    main()
