"""What may stand at the cursor of a command line, for the tab key of a shell. Imports fast: verbs are in a table."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.terminal import is_printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SAFE = re.compile(r"[\w./=:,@%+-]")
_OPEN = ("=", "/")
"""A word that ends so is not finished: no space follows."""
_NO_BREAKS = "\"' \t\n"
"""Characters that split words for a reason of their own: bash keeps them out of the word to complete."""


def print_candidates(words: Sequence[str]) -> int:
    """Print what may stand at the end of a command line, one word per line, as the shell wants it.

    bash gives the line and its word breaks; zsh and fish give the words after the program, the last one up to the
    cursor.
    """
    shell, *given = words or [""]
    if shell == "bash":
        line, breaks = (*given, "", "")[:2]
        typed, quote = split_line(line)
        found = [_for_bash(word, typed[-1], breaks, quote) for word, _ in candidates(typed[1:])]
    else:
        describes = shell == "fish"
        found = [
            f"{word}\t{text}" if describes and text else word for word, text in candidates(given)
        ]
    for word in filter(None, found):
        print(word)
    return 0


def split_line(line: str) -> tuple[list[str], str]:
    r"""Return the words of an unfinished line, the last one up to the cursor, and the quote that is still open.

    >>> split_line("paceline watch my\\ r"), split_line('paceline rm "a b')
    ((['paceline', 'watch', 'my r'], ''), (['paceline', 'rm', 'a b'], '"'))
    >>> split_line("paceline ")
    (['paceline', ''], '')
    """
    for end in ("", '"', "'", "\\"):
        try:
            words = shlex.split(f"{line}{end}")
            break
        except ValueError:
            continue
    is_new = not line or (line[-1].isspace() and not end and not line.endswith("\\ "))
    return ([*words, ""] if is_new else words), end if end != "\\" else ""


def _for_bash(word: str, typed: str, breaks: str, quote: str) -> str:
    r"""Return the part of a word after the last break in what was typed, quoted, with a space if it is finished.

    >>> _for_bash("parallel=ddp", "parallel=d", "=:", ""), _for_bash("a $(b)", "a", "=:", "")
    ('ddp ', 'a\\ \\$\\(b\\) ')
    """
    stops = [typed.rfind(letter) for letter in breaks if letter not in _NO_BREAKS]
    rest = word[max(stops, default=-1) + 1 :]
    if quote:  # within quotes, only what means nothing to the shell
        return rest if all(_SAFE.match(letter) or letter == " " for letter in rest) else ""
    home = "~" if rest.startswith("~/") else ""
    letters = rest.removeprefix(home)
    escaped = home + "".join(each if _SAFE.match(each) else f"\\{each}" for each in letters)
    return escaped if escaped.endswith(_OPEN) else f"{escaped} "


def candidates(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the words that may stand in place of the last one, each with a help text, or none."""
    table = json.loads(Path(__file__).with_name("completion.json").read_text(encoding="utf-8"))
    *before, current = words or [""]
    command: dict[str, Any] = {"actions": table["verbs"]}
    top = not before
    asks_help = bool(before) and before[0] == "help"
    before = before[1:] if asks_help else before
    while before and "actions" in command:
        command = command["actions"].get(before.pop(0), {})
    if "actions" in command:
        found = [(name, each["help"]) for name, each in command["actions"].items()]
        found += [("help", "show the help of a verb")] if top else []
        flags = ["--help", "--version"] if top else ["--help"]
        found += [(flag, "") for flag in flags if current.startswith("-")]
    elif asks_help or not command:
        found = []
    else:
        found = [(word, "") for word in _Arguments(command, table).after(before, current)]
    return [(word, text) for word, text in found if word.startswith(current) and _visible(word)]


def _visible(word: str) -> bool:
    """Return whether a name is what it looks like: one with control characters is never offered."""
    return all(map(is_printable, word))


class _Arguments:
    """The arguments of a verb, as far as they were typed."""

    def __init__(self, command: dict[str, Any], table: dict[str, Any]) -> None:
        self._options, self._positionals = command["options"], command["arguments"]
        self._repeats, self._rest = command["repeats"], command["rest"]
        self._table = table
        self._runs, self._taken = "runs", list[str]()

    def after(self, before: Sequence[str], current: str) -> list[str]:
        """Return what may follow the words before."""
        pending = self._read(before)
        if pending is not None:
            return list(self._values(pending, current))
        name, equals, value = current.partition("=")
        if self._is_script_argument():
            return self._script_argument(before, current)
        if equals and name in self._options:
            return [f"{name}={each}" for each in self._values(self._options[name] or [], value)]
        if current.startswith("-"):
            return list(self._options)
        place = len(self._taken)
        if place < len(self._positionals) or self._repeats:
            last = len(self._positionals) - 1
            found = self._values(self._positionals[min(place, last)], current)
            return [word for word in found if word not in self._taken]
        return self._settings(current) if self._rest else []

    def _read(self, before: Sequence[str]) -> list[str] | None:
        """Take the words that were typed; return what the value of the last option may be, if it waits for one."""
        words = iter(before)
        for word in words:
            name, equals, value = word.partition("=")
            if self._is_script_argument() or not word.startswith("-"):
                self._taken.append(word)
            elif (sources := self._options.get(name)) is not None:
                given = value if equals else next(words, None)
                if given is None:
                    return list(sources)
                if name == "--runs":
                    self._runs = given
        return None

    def _is_script_argument(self) -> bool:
        return self._rest == "verbatim" and len(self._taken) >= len(self._positionals)

    def _script_argument(self, before: Sequence[str], current: str) -> list[str]:
        """Return the settings of a script; for other words, files."""
        if before[-1] == "--config":
            return list(_paths(current))
        if current.startswith("-"):
            return ["--config", "--help"]
        found = [word for word in self._settings(current) if word.startswith(current)]
        return found or list(_paths(current))

    def _settings(self, current: str) -> list[str]:
        """Return `name=` of every setting, or `name=value` of one with few values."""
        settings = dict(self._table["settings"])
        for word in self._taken[:1]:
            settings |= self._table["recipes"].get(word, {})
        name, equals, value = current.partition("=")
        if not equals:
            return [f"{each}=" for each in settings]
        values = settings.get(name) or _paths(value)
        return [f"{name}={each}" for each in values] if name in settings else []

    def _values(self, sources: Sequence[str], current: str) -> Iterator[str]:
        for source in sources:
            if source == "<recipes>":
                yield from self._table["recipes"]
            elif source == "<runs>":
                yield from _paths(current) if "/" in current else _folders(self._runs)
            elif source == "<scripts>":
                yield from _paths(current, ".py")
            elif source == "<paths>":
                yield from _paths(current)
            else:
                yield source


def _folders(folder: str) -> list[str]:
    """Return the names of the folders in a folder, the one that changed last first."""
    try:
        with os.scandir(folder) as entries:
            folders = [entry for entry in entries if entry.is_dir()]
            found = sorted((-entry.stat().st_mtime, entry.name) for entry in folders)
    except OSError:
        return []
    return [name for _, name in found if not name.startswith(".")]


def _paths(current: str, suffix: str = "") -> Iterator[str]:
    """Yield the files with a suffix and the folders that a path may become."""
    folder, slash, base = current.rpartition("/")
    try:
        with os.scandir(Path(f"{folder}{slash}").expanduser()) as entries:
            found = sorted((entry.name, entry.is_dir()) for entry in entries)
    except (OSError, RuntimeError):  # the home of an unknown user
        return
    for name, is_folder in found:
        if name.startswith(".") and not base.startswith("."):
            continue
        if is_folder or name.endswith(suffix):
            yield f"{folder}{slash}{name}{'/' if is_folder else ''}"
