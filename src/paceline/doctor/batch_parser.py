"""Parse a batch script without running it: its options, its variables and its commands."""

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
_HEREDOC = re.compile(  # quoted text, arithmetic and here-strings are skipped
    r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|\(\(.{0,300}?\)\)|<<<|<<-?[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([A-Za-z_][\w.-]*))",
    re.DOTALL,
)
_SUBSTITUTED = re.compile(
    r"\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"
)
_REDIRECTED = re.compile(r"\d*>&\d?-?|&>>?|[<>](?=\()")
_MAX_LINES = 200  # for which a quote may stay open
_MAX_CHARS = 1 << 14  # per command
MARKED = "\x01"
"""Precedes a $ in single quotes: the tasks expand it, not the batch shell."""


@dataclass(frozen=True)
class Command:
    """A simple command; `variables` are set for it alone."""

    line: int
    words: tuple[str, ...]
    variables: dict[str, str]
    background: bool = False
    checked: bool = False
    """Whether its exit code is tested, as in `|| exit`."""


@dataclass(frozen=True)
class Variable:
    """A variable that the batch shell sets."""

    line: int
    name: str
    value: str
    exported: bool


@dataclass
class Script:
    """The parsed parts of a batch script."""

    text: str
    options: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Options of the #SBATCH lines, by long name: value and line."""
    late_options: list[int] = field(default_factory=list)
    """Lines with #SBATCH after the first command, which Slurm ignores."""
    open_texts: list[tuple[int, str]] = field(default_factory=list)
    """Here-documents without an end: line and delimiter."""
    variables: list[Variable] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)

    def value(self, name: str) -> str:
        """Return an option; empty if it is not set."""
        return self.options.get(name, ("", 0))[0]

    def last(self, name: str) -> Variable | None:
        """Return the last assignment of a variable."""
        for variable in reversed(self.variables):
            if variable.name == name:
                return variable
        return None

    @property
    def body(self) -> str:
        """The script without its comments."""
        lines = self.text.splitlines()
        return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def read_script(text: str) -> Script:
    """Parse a script; lines that cannot be split into words are skipped."""
    script = Script(text)
    in_commands = False
    for number, piece in _logical_lines(script):
        stripped = piece.strip()
        if stripped.startswith("#SBATCH"):
            if in_commands:
                script.late_options.append(number)
            else:
                for name, value in _sbatch_options(stripped).items():
                    script.options[name] = (value, number)
        elif stripped and not stripped.startswith("#"):
            in_commands = True
            _read_piece(script, number, piece)
    return script


def _sbatch_options(line: str) -> dict[str, str]:
    try:
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
    except ValueError:
        return {}
    return options_of(words)[0]


def options_of(words: list[str] | tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Return the leading options by long name, and the rest from the first other word on.

    >>> options_of(["-N2", "--ntasks=4", "-c", "8", "--exclusive", "python", "-u"])
    ({'nodes': '2', 'ntasks': '4', 'cpus-per-task': '8', 'exclusive': ''}, ['python', '-u'])
    """
    options: dict[str, str] = {}
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
        options[name] = value
    return options, rest


def _logical_lines(script: Script) -> Iterator[tuple[int, str]]:
    """Yield each line joined with its continuations, and its number; here-documents are skipped."""
    lines = script.text.splitlines()
    indices: dict[str, list[int]] = {}
    for index, line in enumerate(lines):
        indices.setdefault(line.strip(), []).append(index)
    index = 0
    while index < len(lines):
        number = index + 1
        piece, index = _joined(lines, index)
        for delimiter in _delimiters(piece):
            ends = indices.get(delimiter, [])
            after = bisect.bisect_left(ends, index)
            if after < len(ends):
                index = ends[after] + 1
            else:  # continue: the following lines may be meant as commands
                script.open_texts.append((number, delimiter))
        yield number, piece[:_MAX_CHARS]


def _joined(lines: list[str], index: int) -> tuple[str, int]:
    """Return a line joined with its continuations, and the index after them."""
    piece, after = lines[index], index + 1
    if piece.lstrip().startswith("#"):
        return piece, after
    last = min(len(lines), after + _MAX_LINES)
    marked, quote = _scan(piece)
    while after < last and len(piece) <= _MAX_CHARS and (quote or _is_continued(piece, marked)):
        if piece.endswith("\\"):
            piece = f"{piece[:-1]} {lines[after]}"
        else:
            piece = f"{piece}\n{lines[after]}"
        more, quote = _scan(lines[after], quote)
        marked, after = f"{marked}\n{more}", after + 1
    return piece, after


def _delimiters(piece: str) -> list[str]:
    """Return the delimiters of the here-documents that a line starts.

    >>> _delimiters("cat <<-'A B' <<EOF; read x <<< $y; z=$((1<<z)) # <<C")
    ['A B', 'EOF']
    """
    if "<<" not in piece:
        return []
    delimiters = [match[1] or match[2] or match[3] for match in _HEREDOC.finditer(_scan(piece)[0])]
    return [delimiter for delimiter in delimiters if delimiter]


def _is_continued(piece: str, marked: str) -> bool:
    """Return whether a line ends with a backslash or inside an array."""
    in_array = bool(_ARRAY.match(piece)) and ")" not in _SUBSTITUTED.sub("", marked)
    return piece.endswith("\\") or in_array


def _read_piece(script: Script, number: int, piece: str) -> None:
    array = _ARRAY.match(piece)
    text = piece[array.end() :].rsplit(")", 1)[0].replace("\n", " ") if array else piece
    try:
        words = _words(text)
    except ValueError:
        return
    if array and words:  # a command in an array, run later
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
    """Split a line into words and separators; $( ) stays one word, $ in single quotes is marked."""
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
    r"""Remove comments, mark each $ in single quotes, and return the quote that stays open.

    `quote` is the quote that is open before the text.

    >>> _scan("a '$b' \"$c '$d'\" # it's")[0].replace(MARKED, "@")
    'a \'@$b\' "$c \'$d\'" '
    """
    kept, skipping, before = list[str](), False, " "
    for char in text:
        starts_comment = char == "#" and not quote and before.isspace()
        skipping = char != "\n" and (skipping or starts_comment)
        if not skipping:
            escaped = before == "\\" and quote != "'"
            if char in {"'", '"'} and quote in {"", char} and not escaped:
                quote = "" if quote else char
            kept.append(MARKED + char if char == "$" and quote == "'" else char)
        before = char
    return "".join(kept), quote


def _read_command(script: Script, number: int, words: list[str], after: str) -> None:
    """Add one simple command to the script: an assignment, an export, or a program."""
    while words and words[0] in _LEADING:
        words = words[1:]
    own: dict[str, str] = {}
    while words and (match := _ASSIGNED.fullmatch(words[0])):
        own[match[1]] = match[2]
        words = words[1:]
    if not words:
        for name, value in own.items():
            script.variables.append(Variable(number, name, value, exported=False))
    elif words[0] in {"export", "declare", "readonly", "local"}:
        _read_export(script, number, words)
    elif words[0] == "unset":
        kept = [variable for variable in script.variables if variable.name not in words]
        script.variables = kept
    else:
        checked = after in {"||", "&&"}
        script.commands.append(
            Command(number, tuple(words), own, background=after == "&", checked=checked)
        )


def _read_export(script: Script, number: int, words: list[str]) -> None:
    exported = words[0] == "export" or "-x" in words
    for word in words[1:]:
        if match := _ASSIGNED.fullmatch(word):
            script.variables.append(Variable(number, match[1], match[2], exported))
        elif exported and (known := script.last(word)):
            script.variables.append(Variable(known.line, known.name, known.value, exported=True))
