"""What a batch script would do, read and never run: its options, its variables, and the commands that start ranks."""

from __future__ import annotations

import bisect
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

_SHORT = {
    "-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task", "-t": "time", "-G": "gpus", "-K": "kill-on-bad-exit", "-J": "job-name",
    "-o": "output", "-e": "error", "-p": "partition", "-A": "account", "-q": "qos", "-C": "constraint", "-w": "nodelist",
    "-D": "chdir", "-m": "distribution", "-d": "dependency",
}  # fmt: skip
_WITHOUT_VALUE = {
    "exclusive", "requeue", "no-requeue", "overlap", "label", "unbuffered", "exact", "hold", "overcommit", "oversubscribe", "wait-all-nodes",
    "kill-on-bad-exit", "no-kill", "contiguous", "verbose", "quiet", "standalone", "pty", "spread-job", "parsable", "no-python", "module",
}  # fmt: skip
_SEPARATOR = re.compile(r"[;&|()\n]+")
_LEADING = {
    "if",
    "then",
    "else",
    "elif",
    "while",
    "until",
    "do",
    "{",
    "!",
    "exec",
    "time",
    "nohup",
    "eval",
    "command",
}
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_ARRAY = re.compile(r"^\s*[A-Za-z_]\w*=\((?!\()", re.MULTILINE)
_HEREDOC = re.compile(  # what is quoted, a sum, or a here-string is passed over
    r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|\(\(.{0,300}?\)\)|<<<|<<-?[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([A-Za-z_][\w.-]*))",
    re.DOTALL,
)
_SUBSTITUTED = re.compile(
    r"\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"
)
_REDIRECTED = re.compile(r"\d*>&\d?-?|&>>?|[<>](?=\()")
_MOST_LINES = 200  # that a quote may stay open
_MOST_LETTERS = 1 << 14  # of one command
MARKED = "\x01"
"""Stands before a $ that single quotes keep from the batch shell: the tasks themselves read it."""


@dataclass(frozen=True)
class Command:
    """One simple command; `variables` are those that are set for it alone."""

    line: int
    words: tuple[str, ...]
    variables: dict[str, str]
    background: bool = False
    checked: bool = False
    """Whether what comes after it, as in `|| exit`, asks how it ended."""


@dataclass(frozen=True)
class Variable:
    """A variable that the batch shell sets."""

    line: int
    name: str
    value: str
    exported: bool


@dataclass
class Script:
    """What was read of a batch script."""

    text: str
    options: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Of the #SBATCH lines, by their long names: value and line."""
    late_options: list[int] = field(default_factory=list)
    """Lines with #SBATCH after the first command, which Slurm does not read."""
    open_texts: list[tuple[int, str]] = field(default_factory=list)
    """Here-documents whose end word never comes: line and word."""
    variables: list[Variable] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)

    def value(self, name: str) -> str:
        """Return the value of an option; empty if it is not given."""
        return self.options.get(name, ("", 0))[0]

    def last(self, name: str) -> Variable | None:
        """Return the last setting of a variable."""
        return next((one for one in reversed(self.variables) if one.name == name), None)

    @property
    def body(self) -> str:
        """The script without its comments."""
        return "\n".join(
            line for line in self.text.splitlines() if not line.lstrip().startswith("#")
        )


def read_script(text: str) -> Script:
    """Return what a script says; what cannot be read as words is passed over."""
    script = Script(text)
    begun = False
    for number, piece in _pieces(script):
        stripped = piece.strip()
        if stripped.startswith("#SBATCH"):
            if begun:
                script.late_options.append(number)
            else:
                script.options |= {name: (value, number) for name, value in _sbatch(stripped)}
        elif stripped and not stripped.startswith("#"):
            begun = True
            _read_piece(script, number, piece)
    return script


def _sbatch(line: str) -> Iterator[tuple[str, str]]:
    try:
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
    except ValueError:
        return
    yield from options_of(words)[0].items()


def options_of(words: list[str] | tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Return the options that words begin with, by their long names, and the words from the first other one on.

    >>> options_of(["-N2", "--ntasks=4", "-c", "8", "--exclusive", "python", "-u", "x.py"])
    ({'nodes': '2', 'ntasks': '4', 'cpus-per-task': '8', 'exclusive': ''}, ['python', '-u', 'x.py'])
    """
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in {"-", "--"}:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            name = name[2:].replace("_", "-")
        else:
            name, equals, value = _SHORT.get(word[:2], word[:2]), word[2:], word[2:]
            if name in {"-l", "-u", "-v", "-k"}:
                continue
        if not equals and name not in _WITHOUT_VALUE and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        found[name] = value
    return found, rest


def _pieces(script: Script) -> Iterator[tuple[int, str]]:
    """Yield lines with those that continue them, each with the number of its first; texts for other programs are left out."""
    lines = script.text.splitlines()
    places: dict[str, list[int]] = {}
    for place, line in enumerate(lines):
        places.setdefault(line.strip(), []).append(place)
    place = 0
    while place < len(lines):
        number = place + 1
        piece, place = _joined(lines, place)
        for word in _end_words(piece):
            ends = places.get(word, [])
            after = bisect.bisect_left(ends, place)
            if after < len(ends):
                place = ends[after] + 1
            else:  # read on: what follows may have been meant to run
                script.open_texts.append((number, word))
        yield number, piece[:_MOST_LETTERS]


def _joined(lines: list[str], place: int) -> tuple[str, int]:
    """Return a line with those that continue it, and the place after them."""
    piece, after = lines[place], place + 1
    if piece.lstrip().startswith("#"):
        return piece, after
    last = min(len(lines), after + _MOST_LINES)
    marked, quote = _scan(piece)
    while after < last and len(piece) <= _MOST_LETTERS and (quote or _goes_on(piece, marked)):
        piece = (
            f"{piece[:-1]} {lines[after]}" if piece.endswith("\\") else f"{piece}\n{lines[after]}"
        )
        more, quote = _scan(lines[after], quote)
        marked, after = f"{marked}\n{more}", after + 1
    return piece, after


def _end_words(piece: str) -> list[str]:
    """Return the words that end the texts which follow a line.

    >>> _end_words("cat <<-'A B' <<EOF; read x <<< $y; z=$((1<<z)) # <<C")
    ['A B', 'EOF']
    """
    if "<<" not in piece:
        return []
    return [
        word
        for found in _HEREDOC.finditer(_scan(piece)[0])
        if (word := found[1] or found[2] or found[3])
    ]


def _goes_on(piece: str, marked: str) -> bool:
    """Return whether a line is not at its end: a backslash, an open array."""
    return piece.endswith("\\") or (
        bool(_ARRAY.match(piece)) and ")" not in _SUBSTITUTED.sub("", marked)
    )


def _read_piece(script: Script, number: int, piece: str) -> None:
    array = _ARRAY.match(piece)
    text = piece[array.end() :].rsplit(")", 1)[0].replace("\n", " ") if array else piece
    try:
        words = _words(text)
    except ValueError:
        return
    if array and words:  # a command that is kept, and run elsewhere
        script.commands.append(Command(number, tuple(words), {}, background=True, checked=True))
        return
    simple: list[str] = []
    for word in [*words, "\n"]:
        if not _SEPARATOR.fullmatch(word):
            simple.append(word)
            continue
        _read_command(script, number, simple, word)
        simple = []


def _words(text: str) -> list[str]:
    """Return the words and separators of a line; in single quotes every $ is marked, and $( ) stays one word."""
    kept: list[str] = []

    def hide(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\x02{len(kept) - 1}\x02"

    hidden = _SUBSTITUTED.sub(hide, _REDIRECTED.sub(" ", _scan(text)[0]))
    lexer = shlex.shlex(hidden, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    return [re.sub("\x02(\\d+)\x02", lambda match: kept[int(match[1])], word) for word in lexer]


def _scan(text: str, quote: str = "") -> tuple[str, str]:
    r"""Return a text without its comments, with a mark where the batch shell does not expand, and the quote that stays open.

    `quote` is the one that is open before it.

    >>> _scan("a '$b' \"$c '$d'\" # it's")[0].replace(MARKED, "@")
    'a \'@$b\' "$c \'$d\'" '
    """
    found, skipping, before = list[str](), False, " "
    for letter in text:
        skipping = letter != "\n" and (
            skipping or (letter == "#" and not quote and before.isspace())
        )
        if not skipping:
            if letter in {"'", '"'} and quote in {"", letter} and (before != "\\" or quote == "'"):
                quote = "" if quote else letter
            found.append(MARKED + letter if letter == "$" and quote == "'" else letter)
        before = letter
    return "".join(found), quote


def _read_command(script: Script, number: int, words: list[str], after: str) -> None:
    """Take up one simple command: an assignment, an export, or a program."""
    while words and words[0] in _LEADING:
        words = words[1:]
    own: dict[str, str] = {}
    while words and (found := _ASSIGNED.fullmatch(words[0])):
        own[found[1]] = found[2]
        words = words[1:]
    if not words:
        script.variables += [
            Variable(number, name, value, exported=False) for name, value in own.items()
        ]
    elif words[0] in {"export", "declare", "readonly", "local"}:
        _read_export(script, number, words)
    elif words[0] == "unset":
        script.variables = [one for one in script.variables if one.name not in words]
    else:
        checked = after in {"||", "&&"}
        script.commands.append(
            Command(number, tuple(words), own, background=after == "&", checked=checked)
        )


def _read_export(script: Script, number: int, words: list[str]) -> None:
    exported = words[0] == "export" or "-x" in words
    for word in words[1:]:
        if found := _ASSIGNED.fullmatch(word):
            script.variables.append(Variable(number, found[1], found[2], exported))
        elif exported and (known := script.last(word)):
            script.variables.append(Variable(known.line, known.name, known.value, exported=True))
