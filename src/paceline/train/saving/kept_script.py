"""The script of a run: kept in the run folder; at a resume another script is refused, and another text is said."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.manifest import Manifest
from paceline.config import RunConfig
from paceline.main_script import Sources, main_script, may_be_same, means_the_same, read_sources
from paceline.redact import without_logins
from paceline.rundir import RunDir, make_private, write_whole, writing_to
from paceline.safe_open import SMALL_BYTES, read_text, refuse_outside
from paceline.terminal import plain
from paceline.verified import facts_of
from paceline.version import VERSION
from paceline.world.collectives import all_gather_texts
from paceline.world.world import World

_MOST_VERSIONS = 20
_MOST_LINES = 3  # that are shown of a change
_LONGEST, _BEFORE = 60, 20  # letters of a line, and those before the first that differs


class KeptScript:
    """The script of this process. Every rank has one, and makes the same calls; only rank 0 reads and writes files."""

    def __init__(self, world: World, config: RunConfig) -> None:
        self._world, self._config, self._folder = world, config, RunDir.of(config).script
        self.sources = read_sources() if world.is_main else Sources(main_script())
        self.change = ""
        """How the text differs from that of the checkpoint, in one line; empty: it does not."""

    def facts(self) -> dict[str, str]:
        """Return what a checkpoint says about the script that has trained it."""
        return {"place": self.sources.script.place, "version": self.sources.version}

    def identity(self) -> dict[str, Any]:
        """Return what identifies this training: texts, settings, versions and device."""
        versions = {"paceline": VERSION, "torch": torch.__version__}
        return facts_of(self.sources, self._config, versions, self._world.device)

    def compare(self, manifest: Manifest) -> str:
        """Compare with the script of a checkpoint; return both places if it is another one. Every rank must call this."""
        answer = self._compare(manifest) if self._world.is_main else ("", "")
        other, self.change = json.loads(all_gather_texts(self._world, json.dumps(answer))[0])
        return str(other)

    def _compare(self, manifest: Manifest) -> tuple[str, str]:
        before: Mapping[str, Any] = manifest.values.get("script") or {}
        place, version = before.get("place", ""), before.get("version", "")
        now, script = self.facts(), self.sources.script
        if not place or not now["place"]:  # a prompt, or an import from elsewhere
            return "", ""
        same_name = place.rpartition("/")[2] == script.file_name
        if not same_name or not (version == now["version"] or may_be_same(place, now["place"])):
            return f"script {place.lstrip('/')} -> {now['place'].lstrip('/')}", ""
        if not version or not now["version"] or version == now["version"]:
            return "", ""
        return "", self._describe_change(version, manifest.step)

    def _describe_change(self, version: str, step: int) -> str:
        texts = self._texts(version)
        if not texts:
            return (
                f"{self.sources.script.file_name} or a module beside it has another text than at step {step:,}, "
                f"which is not kept in {self._folder}"
            )
        lines = [
            line
            for name, text in self.sources.files.items()
            if name in texts and not means_the_same(texts[name], text)
            for line in changed_lines(name, texts[name], text)
        ]
        if not lines:
            return ""
        more = f"; and {len(lines) - _MOST_LINES} more lines" if len(lines) > _MOST_LINES else ""
        return f"changed since step {step:,}: {'; '.join(lines[:_MOST_LINES])}{more}"

    def _texts(self, version: str) -> dict[str, str]:
        """Return what is kept of the files that are read now, as they were in another version."""
        found: dict[str, str] = {}
        folder = self._folder / version
        if re.fullmatch(r"[0-9a-f]{12}", version):
            for name in self.sources.files:
                with contextlib.suppress(OSError, ValueError):
                    refuse_outside(folder / name, self._folder)
                    found[name] = read_text(folder / name, SMALL_BYTES)
        return found

    def keep(self) -> None:
        """Write the files of a start that is not refused, unless this version is there; delete the oldest of many."""
        version = self.sources.version
        if not version or (self._folder / version).is_dir():
            return
        partial = self._folder / f".{version}.{secrets.token_hex(4)}"
        with writing_to(self._folder):
            for name, text in self.sources.files.items():
                make_private((partial / name).parent)
                write_whole(partial / name, text.encode(), durable=False)
            partial.rename(self._folder / version)
        kept = [path for path in self._folder.iterdir() if not path.is_symlink()]
        for old in sorted(kept, key=_age)[:-_MOST_VERSIONS]:
            shutil.rmtree(old, ignore_errors=True)


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return 0.0


def changed_lines(name: str, before: str, now: str) -> list[str]:
    r"""Return a short text for every line that differs, without blank lines and comments.

    >>> changed_lines("train.py", "lr = 0.1\nx = 1\n", "lr = 0.01\nx = 1\n# two\ny = 2\n")
    ['train.py line 1: `lr = 0.1` -> `lr = 0.01`', 'train.py line 4: new `y = 2`']
    """
    old, new = ([line.strip() for line in text.splitlines()] for text in (before, now))
    found = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        for number, pair in enumerate(itertools.zip_longest(old[i:j], new[k:m], fillvalue="")):
            gone, came = ("" if line.startswith("#") else line for line in pair)
            where = f"{name} line {k + number + 1}"
            alike = itertools.takewhile(lambda two: two[0] == two[1], zip(gone, came, strict=False))
            same = sum(1 for _ in alike)
            if gone and came:
                found.append(f"{where}: {_shown(gone, same)} -> {_shown(came, same)}")
            elif gone or came:
                found.append(f"{where}: {'new' if came else 'removed'} {_shown(gone or came)}")
    return found


def _shown(line: str, same: int = 0) -> str:
    """Return a line in backticks, without secrets; a long one from shortly before the first letter that differs.

    >>> _shown("x" * 50 + " + y", 50), _shown("x", 1)
    ('`...xxxxxxxxxxxxxxxxxxxx + y`', '`x`')
    """
    text = plain(without_logins(line))
    if len(text) > _LONGEST or same > _LONGEST // 2:
        begin = max(0, same - _BEFORE) if same else 0
        head, tail = "..." if begin else "", text[begin:]
        text = head + (tail if len(tail) <= _LONGEST else f"{tail[:_LONGEST]}...")
    return f"`{text}`"
