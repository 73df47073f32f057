"""Where compiled code is kept between starts: in a private folder of the user, since it is executed.

torch keeps generated code, machine code and pickles of graphs, and runs what it finds. So a run folder, which may come
from somebody else, is never a source of it; neither is torch's default, a folder of a known name in TMPDIR.
"""

from __future__ import annotations

import atexit
import contextlib
import getpass
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from paceline.errors import EnvironmentUnfit
from paceline.rundir import make_private

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
"""The variables that tell torch and Triton where compiled code is."""
FIX = "remove the compiled code there and run `chmod go-w` on that folder, or set XDG_CACHE_HOME to a folder of yours"
_DIGEST_CHARACTERS = 12
_TEMPORARY = "paceline-compiled-"
_READ_FROM_DEFAULT = ("cache", "precompiled_headers")


class CacheUse(NamedTuple):
    """What a cache holds."""

    folders: int
    """One for each torch, card and setting that changes compiled code."""
    size_bytes: int


def user_cache(env: Mapping[str, str]) -> Path:
    """Return the folder in which Paceline keeps things for a user.

    >>> str(user_cache({"XDG_CACHE_HOME": "/scratch/me/cache"}))
    '/scratch/me/cache/paceline'
    """
    home = Path(env.get("XDG_CACHE_HOME", ""))
    base = home if home.is_absolute() else Path("~/.cache").expanduser()
    return base / "paceline"


def cache_root(env: Mapping[str, str]) -> Path:
    """Return the folder of all compiled code of this user."""
    return user_cache(env) / "compiled"


def folder_name(facts: Mapping[str, object]) -> str:
    """Return the name of the folder for code that was compiled with these facts; "torch" and "card" can be read in it.

    >>> folder_name({"torch": "2.13.0+cpu", "card": "cpu", "threads": 1})
    'torch-2.13.0-cpu-cpu-2f4f1a4115a5'
    """
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()
    shown = re.sub(r"[^A-Za-z0-9.]+", "-", f"torch {facts['torch']} {facts['card']}")
    return f"{shown}-{digest[:_DIGEST_CHARACTERS]}"


def keep_compiled_code(env: MutableMapping[str, str], facts: Mapping[str, object]) -> str:
    """Tell torch and Triton where compiled code is; return why it is not kept, empty if it is.

    A folder that the user names in TORCHINDUCTOR_CACHE_DIR or TRITON_CACHE_DIR stays. Raise if other users can write to one.
    """
    _secure_default()
    given, problem = _chosen(env, INDUCTOR), ""
    folder = Path(given) if given else cache_root(env) / folder_name(facts)
    try:
        for part in (folder,) if given else (folder.parent, folder):
            refuse_writable(part)
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        problem = getattr(error, "strerror", None) or str(error)
    if problem:
        unfit, folder = folder, Path(tempfile.mkdtemp(prefix=_TEMPORARY))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        problem = f"compiled code is not kept: cannot write to {unfit}: {problem}; set XDG_CACHE_HOME to a folder of yours"
    env[INDUCTOR] = str(folder)
    # By default every GPU of a node has a folder of its own, though the kernels are the same.
    env[TRITON] = _chosen(env, TRITON) or str(folder / "triton")
    try:
        refuse_writable(Path(env[TRITON]))
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot keep compiled kernels in {env[TRITON]}: {error.strerror}",
            fix=f"set {TRITON} to a folder of yours",
        ) from error
    return problem


def refuse_writable(folder: Path) -> None:
    """Raise if other users can write to a folder, or replace it; one that does not exist is made for the owner alone."""
    if problem := why_untrusted(make_private(folder)):
        raise EnvironmentUnfit(problem, fix=FIX)


def why_untrusted(folder: Path) -> str:
    """Return who else could write code into an existing folder; empty if nobody can."""
    real = folder.resolve()
    facts = real.stat()
    if not facts.st_mode & 0o022 and facts.st_uid == os.getuid():
        if (parent := _replaceable(real)) is None:
            return ""
        real, facts = parent, parent.stat()
    return (
        f"other users can write to {real} (mode {facts.st_mode & 0o7777:o}, owner {facts.st_uid}), "
        f"so compiled code in {folder} cannot be trusted: it would be executed"
    )


def _replaceable(folder: Path) -> Path | None:
    """Return the first parent folder that lets any user replace this one; None if all are safe."""
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return parent
    return None


def cache_use(root: Path) -> CacheUse:
    """Return how many folders a cache has, and the size of all their files."""
    size = 0
    for where, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                size += Path(where, name).lstat().st_size
    try:
        folders = sum(entry.is_dir(follow_symlinks=False) for entry in os.scandir(root))
    except OSError:
        folders = 0
    return CacheUse(folders, size)


def _chosen(env: Mapping[str, str], name: str) -> str:
    """Return the folder that the user has chosen; empty if it is ours, or the default, which torch itself writes there."""
    value = env.get(name, "")
    ours = Path(value).is_relative_to(cache_root(env)) or _TEMPORARY in value
    return "" if ours or Path(value).is_relative_to(_default()) else value


def _default() -> Path:
    """Return the folder that torch would take."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    cleaned = re.sub(r'[\\/:*?"<>|]', "_", user)
    return Path(tempfile.gettempdir()) / f"torchinductor_{cleaned}"


def _secure_default() -> None:
    """Take write access to torch's default folder from others: precompiled headers are read from there in any case.

    torch makes it with the user's umask. What others could have written before is removed.
    """
    folder = _default()
    with contextlib.suppress(OSError):  # something else is there, or no place for it
        make_private(folder)
    try:
        facts = folder.lstat()
    except OSError:  # torch cannot read from there either
        return
    if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode):
        raise EnvironmentUnfit(
            f"{folder}, where torch reads compiled code, is not a folder of this user (owner {facts.st_uid})",
            fix="set TMPDIR to a folder of yours, such as TMPDIR=$HOME/tmp",
        )
    if facts.st_mode & 0o022:
        folder.chmod(0o700)
        for name in _READ_FROM_DEFAULT:
            shutil.rmtree(folder / name, ignore_errors=True)
