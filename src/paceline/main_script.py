"""Which script runs in this process: its name, its place in its project, and the text of its files."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline import handover
from paceline.safe_open import SMALL_BYTES, read_bytes

NAMELESS = "run"
"""The name of what is not in a file: `python -c`, standard input, a prompt, a kernel."""

_MOST_FILES = 500
_MOST_BYTES = 10_000_000  # of all files of a script
_NOT_BESIDE = {"site-packages", "dist-packages", "__pycache__", "node_modules"}
_RECIPES = "paceline.recipes."


@dataclass(frozen=True)
class MainScript:
    """The file that was started, as far as it is known."""

    name: str
    """How its runs are called unless they are given a name=."""
    place: str = ""
    """Its file name, below the folders that lead to it from its project: `/experiments/train.py`. Without the first slash it
    is not known where the project begins. Empty: there is no file."""
    project: str = ""
    """The folder in which its place begins."""
    file: Path | None = None
    is_recipe: bool = False

    @property
    def file_name(self) -> str:
        """The last part of its place."""
        return self.place.rpartition("/")[2]

    @property
    def typed(self) -> str:
        """The file as a person would type it here."""
        if self.is_recipe or self.file is None:
            return self.name
        origin = Path(self.project, self.place.lstrip("/"))  # what is run may be a copy
        file = origin if origin.is_file() else self.file
        here = os.path.relpath(file)
        return str(file) if here.startswith("..") else here

    def told_of(self, copy: str) -> str:
        """Return the value of `handover.SCRIPT`, by which ranks know that a copy, or the file of a cell, is this script."""
        facts = {"copy": copy, "place": self.place, "project": self.project}
        return json.dumps(facts, ensure_ascii=False)


def name_of(file: Path) -> str:
    """Return the name of the runs of a script.

    >>> name_of(Path("a/train.py")), name_of(Path("digits/__main__.py")), name_of(Path(".py"))
    ('train', 'digits', 'py')
    """
    name = file.absolute().parent.name if file.stem == "__main__" else file.stem
    return name.strip(".") or NAMELESS


def main_script() -> MainScript:
    """Return the script of this process."""
    main = sys.modules.get("__main__")
    given = getattr(main, "__file__", None)
    if not isinstance(given, str):
        return MainScript(NAMELESS)
    file = Path(given)
    if not file.is_file():  # a relative path, and the script has changed the working directory
        file = Path(sys.path[0]) / file.name
    module = getattr(getattr(main, "__spec__", None), "name", "")
    if module.startswith(_RECIPES):
        name = module.removeprefix(_RECIPES)
        return MainScript(name, f"/{module.replace('.', '/')}.py", "", file, is_recipe=True)
    if told := _told(file):
        return MainScript(name_of(Path(told["place"])), told["place"], told["project"], file)
    return script_at(file)


def script_at(file: Path) -> MainScript:
    """Return the script in a file: its project is the Git repository that it is in."""
    home = file.absolute().parent.resolve()
    if file.suffix != ".py":  # a command that pip has installed: its folder says nothing
        return MainScript(name_of(file), file.name, str(home), file)
    for project in (home, *home.parents):
        if (project / ".git").exists():
            place = (home / file.name).relative_to(project)
            return MainScript(name_of(file), f"/{place}", str(project), file)
    return MainScript(name_of(file), file.name, str(home), file)


def _told(file: Path) -> dict[str, str]:
    """Return what the launcher says about this file; nothing if it is another one, which a rank has started itself."""
    with contextlib.suppress(ValueError, TypeError, KeyError, OSError):
        told = json.loads(os.environ[handover.SCRIPT])
        if Path(told["copy"]).resolve() == file.resolve():
            return {name: str(told[name]) for name in ("place", "project")}
    return {}


def may_be_same(place: str, other: str) -> bool:
    """Return whether two places may be those of one script: a container may have mounted a part of the project.

    >>> may_be_same("/a/train.py", "train.py"), may_be_same("/a/train.py", "/b/train.py"), may_be_same("a.py", "b.py")
    (True, False, False)
    """
    if place.startswith("/") and other.startswith("/"):
        return place == other
    short, long = sorted((place.strip("/").split("/"), other.strip("/").split("/")), key=len)
    return long[-len(short) :] == short


@dataclass(frozen=True)
class Sources:
    """The text of a script and of the modules beside it that it has imported, by file name."""

    script: MainScript
    files: Mapping[str, str] = field(default_factory=dict)
    """The script itself has the file name of its place; modules have their path from its folder, or from the working directory."""

    @property
    def version(self) -> str:
        """A digest of all names and texts; empty: no text is known."""
        if not self.files:
            return ""
        texts = json.dumps(sorted(self.files.items()))
        return hashlib.sha256(texts.encode()).hexdigest()[:12]


def read_sources() -> Sources:
    """Read the script of this process and the modules beside it that it has imported until now; those of recipes are Paceline's.

    Files that are too large, and those beyond the limits of number and size, are left out.
    """
    script = main_script()
    if script.file is None or script.is_recipe:
        return Sources(script)
    files: dict[str, str] = {}
    size = 0
    main = script.file.resolve()
    for name, path in [(script.file_name, script.file), *sorted(_modules_beside(script.file))]:
        with contextlib.suppress(OSError, ValueError):
            if name in files or (files and path.resolve() == main):
                continue
            text = read_bytes(path, SMALL_BYTES, links=True).decode()
            size += len(text)
            if size > _MOST_BYTES or len(files) == _MOST_FILES:
                break
            files[name] = text
    return Sources(script, files)


def _modules_beside(file: Path) -> Iterator[tuple[str, Path]]:
    """Yield the imported modules in and below the folder of the script or the working directory, without installed ones."""
    module = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", None) or ""
    home = file.absolute().parent
    # `python -m package.train` imports its neighbours from the folder above the package.
    home = [home, *home.parents][min(module.count("."), len(home.parents))]
    roots = [
        f"{root}{os.sep}"
        for root in (home, home.resolve(), Path.cwd())
        if not _NOT_BESIDE.intersection(root.parts)
    ]
    standard = sysconfig.get_path("stdlib") + os.sep
    for name, imported in list(sys.modules.items()):
        if name.partition(".")[0] in {"paceline", "__main__"}:
            continue
        try:  # not by getattr, for which a lazy module would be imported
            path = object.__getattribute__(imported, "__dict__").get("__file__")
        except AttributeError:
            continue
        if not isinstance(path, str) or not path.endswith(".py") or path.startswith(standard):
            continue
        root = next((root for root in roots if path.startswith(root)), "")
        inside = Path(path.removeprefix(root))
        if root and not any(part in _NOT_BESIDE or part[0] == "." for part in inside.parts):
            yield str(inside), Path(path)


def means_the_same(before: str, now: str) -> bool:
    r"""Return whether two texts of a module are the same but for comments, blank lines and the form of expressions.

    >>> means_the_same("x = 1  # one\n", "x = (1)\n"), means_the_same("x = 1", "x = 2")
    (True, False)
    """
    if before == now:
        return True
    try:
        return ast.dump(ast.parse(before)) == ast.dump(ast.parse(now))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
