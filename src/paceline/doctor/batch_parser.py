"""Parse a batch script without running it: its options, its variables and its commands.

The script is cut into words and operators by the rules of bash, and the words into simple commands. Of the
structure, only what the judgments need is kept: in which branches and functions a command stands.
Variables are replaced where their value is certain. What is not understood is left as it is.
"""

from __future__ import annotations

import bisect
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

_SHORT = {
    "-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task", "-t": "time", "-G": "gpus", "-K": "kill-on-bad-exit", "-J": "job-name",
    "-o": "output", "-e": "error", "-p": "partition", "-A": "account", "-q": "qos", "-C": "constraint", "-w": "nodelist",
    "-D": "chdir", "-m": "distribution", "-d": "dependency", "-W": "wait", "-a": "array",
}  # fmt: skip
_WITHOUT_VALUE = {
    "exclusive", "requeue", "no-requeue", "overlap", "label", "unbuffered", "exact", "hold", "overcommit", "oversubscribe", "wait-all-nodes",
    "kill-on-bad-exit", "no-kill", "contiguous", "verbose", "quiet", "standalone", "pty", "spread-job", "parsable", "no-python", "module",
    "multi-gpu", "use-deepspeed", "use-fsdp", "cpu", "debug", "same-network", "run-path", "no-container-entrypoint", "no-container-mount-home",
}  # fmt: skip
_OPENING = {"if", "while", "until", "elif", "then", "else", "do", "{", "!", "time"}
_PREFIXES = {"exec", "nohup", "eval", "command", "builtin"}
_EXPORTING = {"export", "declare", "typeset", "readonly", "local"}
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_ASSIGNING = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=$")
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?=(.*)\}", re.DOTALL)
_REFERENCE = re.compile(
    r"(?<!\x01)\$(?:(\w+)|\{(\w+)(\[[@*0]\])?(?::?-((?:[^{}]|\$\{[^{}]*\})*))?\})"
)
_MAX_DEPTH = 6  # of variables that refer to variables
_MAX_CHARS = 1 << 14  # of a word in which variables were replaced
_MAX_WORDS = 1 << 10  # of a command
_MAX_LOOKUPS = 10_000  # of variables, in one script
_PART = re.compile(r"(?:\$\(\(.*?\)\)|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\S)+")
MARKED = "\x01"
"""Precedes a $ that the batch shell does not expand, because of single quotes or a backslash."""


@dataclass(frozen=True)
class Word:
    """A word without its quotes; `quoted` if any part of it was quoted."""

    text: str
    line: int
    quoted: bool = False
    items: tuple[Word, ...] | None = None
    """The words of an array."""


@dataclass(frozen=True)
class Operator:
    """What separates commands: a newline, `;`, `&`, `&&`, `||`, `|`, `(` and so on."""

    text: str
    line: int


Branch = tuple[int, int]
"""A block of `if` or `case`, counted through the script, and the branch of it; 0: its condition."""


@dataclass(frozen=True)
class Command:
    """A simple command; `variables` are set for it alone."""

    line: int
    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    background: bool = False
    checked: bool = False
    """Whether its exit code is tested, as in `|| exit` or `if`."""
    piped: bool = False
    """Whether its output goes to another command, whose exit code counts."""
    branches: tuple[Branch, ...] = ()
    function: str = ""
    at: int = 0
    """Its position among commands and variables."""


@dataclass(frozen=True)
class Variable:
    """A variable that the batch shell sets; `value` is None if it is known only at run time."""

    line: int
    name: str
    value: str | None
    exported: bool = False
    items: tuple[Word, ...] | None = None
    branches: tuple[Branch, ...] = ()
    at: int = 0


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
    _by_name: dict[str, list[Variable]] = field(default_factory=dict)
    _lookups: int = 0

    def add(self, variable: Variable) -> None:
        """Add the next variable."""
        self.variables.append(variable)
        self._by_name.setdefault(variable.name, []).append(variable)

    @property
    def at(self) -> int:
        """The position of the next command or variable."""
        return len(self.variables) + len(self.commands)

    def value(self, name: str) -> str:
        """Return an option; empty if it is not set."""
        return self.options.get(name, ("", 0))[0]

    def last(self, name: str) -> Variable | None:
        """Return the last assignment of a variable, if its value is certain: not one of several branches."""
        return self.before(name, self.at, ())

    def before(self, name: str, at: int, branches: tuple[Branch, ...]) -> Variable | None:
        """Return the assignment that holds at a position, if it is certain."""
        self._lookups += 1
        if self._lookups > _MAX_LOOKUPS:
            return None
        known = self._by_name.get(name, [])
        index = bisect.bisect_left(known, at, key=lambda variable: variable.at) - 1
        if index < 0:
            return None
        found = known[index]
        is_certain = branches[: len(found.branches)] == found.branches
        return found if is_certain and found.value is not None else None

    def is_set(self, name: str) -> bool:
        """Return whether the script sets a variable anywhere, to whatever value."""
        return name in self._by_name

    def is_exported(self, name: str) -> bool:
        """Return whether the script exports a variable anywhere."""
        return any(variable.exported for variable in self._by_name.get(name, []))

    def expand(self, text: str) -> str:
        """Replace the variables whose values are certain at the end of the script."""
        return self.expand_at(text, self.at, ())

    def expand_at(
        self, text: str, at: int, branches: tuple[Branch, ...], depth: int = _MAX_DEPTH
    ) -> str:
        """Replace the variables in a text whose values are certain at a position."""

        def replaced(match: re.Match[str]) -> str:
            name, default = match[1] or match[2], match[4]
            variable = self.before(name, at, branches)
            if not depth:
                return match[0]
            if variable is not None and variable.value is not None:
                return self.expand_at(variable.value, variable.at, branches, depth - 1)
            earlier = self._by_name.get(name, [])[:1]
            if default is not None and not (earlier and earlier[0].at < at):
                return self.expand_at(default, at, branches, depth - 1)
            return match[0]

        expanded = _REFERENCE.sub(replaced, text)
        return expanded if len(expanded) <= _MAX_CHARS else text

    @property
    def body(self) -> str:
        """The script without its comments."""
        lines = self.text.splitlines()
        return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def read_script(text: str) -> Script:
    """Parse a script."""
    script = Script(text)
    _Parser(script).read()
    _read_options(script)
    return script


def _read_options(script: Script) -> None:
    """Read the #SBATCH lines as Slurm does: up to the first line that is not a comment."""
    lines = script.text.splitlines()
    code = (
        index for index, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#"
    )
    first = next(code, len(lines) + 1)
    script.late_options = [line for line in script.late_options if line > first]
    for number, line in enumerate(lines[: first - 1], 1):
        if line.startswith("#SBATCH"):
            try:
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:
                continue
            for name, value in options_of(words)[0].items():
                script.options[name] = (value, number)


def options_of(words: list[str] | tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Return the leading options by long name, and the rest from the first other word on.

    An option that stands in a variable is unknown: it is kept under the variable's own word.

    >>> options_of(["-N2", "--ntasks=4", "-c", "8", "--exclusive", "python", "-u"])
    ({'nodes': '2', 'ntasks': '4', 'cpus-per-task': '8', 'exclusive': ''}, ['python', '-u'])
    >>> options_of(["$MORE", "--label", "python"])
    ({'$MORE': '', 'label': ''}, ['python'])
    """
    options: dict[str, str] = {}
    rest = list(words)
    while rest and (rest[0].startswith("-") or is_unknown(rest[0])) and rest[0] not in {"-", "--"}:
        word = rest.pop(0)
        if is_unknown(word):
            options[word] = ""
            continue
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            name = name[2:].replace("_", "-")
        else:
            name, equals, value = _SHORT.get(word[:2], word[:2]), word[2:], word[2:].lstrip("=")
            if name in {"-l", "-u", "-v", "-k"}:
                continue
        if not equals and name not in _WITHOUT_VALUE and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        options[name] = value
    return options, rest


def is_unknown(word: str) -> bool:
    """Return whether a word is one variable, which may stand for any number of words.

    >>> is_unknown("$ARGS"), is_unknown("${ARGS[@]}"), is_unknown("$A:$B"), is_unknown("$(x)")
    (True, True, False, False)
    """
    return bool(re.fullmatch(r"\$(\w+|[@*]|\{\w+(\[[@*]\])?\})", word))


class _Lexer:
    """Cuts a script into words and operators."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._text = script.text.replace("\0", "")
        self._at = 0
        self._line = 1
        self._waiting: list[tuple[str, int]] = []  # here-documents that start at the next line
        self._ends: dict[str, list[int]] = {}  # where the lines end that may end them

    def tokens(self) -> Iterator[Word | Operator]:
        """Yield words and operators; redirections, comments and here-documents are left out."""
        while self._at < len(self._text):
            char = self._text[self._at]
            if self._text.startswith(("\\\n", "\\\r\n"), self._at):
                self._skip(self._text.index("\n", self._at) + 1)
            elif char in " \t\r":
                self._at += 1
            elif char == "#":
                if self._text.startswith("#SBATCH", self._at) and self._text[self._at - 1] == "\n":
                    self._script.late_options.append(self._line)
                self._at = self._find("\n")
            elif char == "\n":
                yield Operator("\n", self._line)
                self._skip(self._at + 1)
                self._skip_documents()
            elif self._text.startswith("((", self._at):
                self._skip(self._after_parenthesis(self._at + 1))
            elif match := re.compile(r"&&|\|\||;;&?|;&|\|&|[;|()]|&(?!>)").match(
                self._text, self._at
            ):
                self._at = match.end()
                yield Operator(match[0], self._line)
            elif match := re.compile(r"\d*(<<<|<<-?|>&|<&|>>|>\||<>|[<>](?!\()|&>>?)|&>>?").match(
                self._text, self._at
            ):
                self._redirect(match)
            else:
                yield self._word()

    def _skip(self, to: int) -> None:
        self._line += self._text.count("\n", self._at, to)
        self._at = to

    def _find(self, what: str) -> int:
        found = self._text.find(what, self._at)
        return len(self._text) if found < 0 else found

    def _redirect(self, match: re.Match[str]) -> None:
        """Leave out a redirection and its file, and remember a here-document."""
        self._at = match.end()
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1
        if self._at < len(self._text) and self._text[self._at] not in "\n;|&()":
            line, word = self._line, self._word()
            if match[1] in {"<<", "<<-"} and word.text:
                self._waiting.append((word.text, line))

    def _skip_documents(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting and not self._ends:
            end = 0
            for line in self._text.splitlines(keepends=True):
                end += len(line)
                self._ends.setdefault(line.strip(), []).append(end - line.endswith("\n"))
        for delimiter, line_number in waiting:
            ends = self._ends.get(delimiter.strip(), [])
            index = bisect.bisect_left(ends, self._at)
            if index < len(ends):
                self._skip(ends[index])
            else:  # continue: the following lines may be meant as commands
                self._script.open_texts.append((line_number, delimiter))

    def _word(self) -> Word:  # noqa: PLR0912, C901 - one case per kind of quote
        parts: list[str] = []
        line, quoted, start = self._line, False, self._at
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in " \t\r\n;|&":
                break
            if char in "<>":
                if not self._text.startswith("(", self._at + 1):
                    break
                self._raw(parts, self._after_parenthesis(self._at + 1))
            elif char == "(":
                if _ASSIGNING.fullmatch("".join(parts)) and not quoted:
                    return self._array("".join(parts), line)
                if start == self._at or not parts:
                    break
                if parts[-1] in {"@", "?", "*", "+", "!"}:  # a pattern such as *.@(a|b)
                    self._raw(parts, self._after_parenthesis(self._at))
                else:
                    break
            elif char == ")":
                break
            elif char == "'":
                end = self._text.find("'", self._at + 1)
                end = len(self._text) if end < 0 else end
                parts.append(self._text[self._at + 1 : end].replace("$", f"{MARKED}$"))
                self._skip(min(len(self._text), end + 1))
                quoted = True
            elif char == '"':
                self._double_quoted(parts)
                quoted = True
            elif char == "\\":
                escaped = self._text[self._at + 1 : self._at + 2]
                if escaped == "$":
                    parts.append(f"{MARKED}$")
                elif escaped not in {"\n", ""}:
                    parts.append(escaped)
                self._skip(self._at + 2)
            elif char in "$`":
                if self._text.startswith("$'", self._at):
                    self._at += 1
                    continue
                self._raw(parts, self._after_substitution())
            else:
                parts.append(char)
                self._at += 1
        if self._at == start:  # a lone ) or the like
            self._at += 1
        return Word("".join(parts), line, quoted)

    def _raw(self, parts: list[str], end: int) -> None:
        parts.append(self._text[self._at : end])
        self._skip(end)

    def _double_quoted(self, parts: list[str]) -> None:
        self._at += 1
        while self._at < len(self._text) and self._text[self._at] != '"':
            char = self._text[self._at]
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in {"$", "`", '"', "\\"}:
                escaped = self._text[self._at + 1]
                parts.append(f"{MARKED}$" if escaped == "$" else escaped)
                self._at += 2
            elif self._text.startswith("\\\n", self._at):
                self._skip(self._at + 2)
            elif char in "$`":
                self._raw(parts, self._after_substitution())
            else:
                parts.append(char)
                self._skip(self._at + 1)
        self._at += 1

    def _array(self, name: str, line: int) -> Word:
        """Read the words of NAME=( ... ); the position is at the parenthesis."""
        self._at += 1
        items: list[Word] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            char = self._text[self._at]
            if char == "#":
                self._at = self._find("\n")
            elif self._text.startswith("\\\n", self._at):
                self._skip(self._at + 2)
            elif char.isspace() or char in ";&|(<>":
                self._skip(self._at + 1)
            else:
                items.append(self._word())
        self._at += 1
        return Word(name, line, items=tuple(items))

    def _after_substitution(self) -> int:
        """Return the position after the $name, ${...}, $(...) or `...` that starts here."""
        text, at = self._text, self._at
        if text[at] == "`":
            end = text.find("`", at + 1)
            return len(text) if end < 0 else end + 1
        if text.startswith("$(", at):
            return self._after_parenthesis(at + 1)
        if text.startswith(("${", "$["), at):
            closing = "}" if text[at + 1] == "{" else "]"
            depth, opening = 0, text[at + 1]
            for index in range(at + 1, len(text)):
                depth += (text[index] == opening) - (text[index] == closing)
                if depth == 0:
                    return index + 1
            return len(text)
        match = re.compile(r"\$(\w+|[@*#?$!-])?").match(text, at)
        return match.end() if match else at + 1

    def _after_parenthesis(self, at: int) -> int:
        """Return the position after the parenthesis that closes the one at `at`; quotes are respected."""
        text, depth, index = self._text, 0, at
        while index < len(text):
            char = text[index]
            if char == "\\":
                index += 1
            elif char == "'":
                end = text.find("'", index + 1)
                index = end if end >= 0 else index
            elif char == '"':
                match = re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL).match(text, index)
                index = match.end() - 1 if match and "$(" not in match[0] else index
            elif char == "(":
                depth += 1
            elif char == ")":
                depth -= 1
                if depth == 0:
                    return index + 1
            index += 1
        return len(text)


@dataclass
class _Block:
    kind: str
    """if, case, loop, brace, subshell or function."""
    number: int = 0
    branch: int = 0
    in_condition: bool = False
    name: str = ""


class _Parser:
    """Groups the words into simple commands, and follows if, case, loops and functions."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._tokens = list(_Lexer(script).tokens())
        self._blocks: list[_Block] = []
        self._blocks_seen = 0
        self._function = ""  # whose body starts next
        self._words: list[tuple[Word, ...]] = []  # of each command, before variables are replaced

    def read(self) -> None:
        """Add all commands and variables to the script."""
        words: list[Word] = []
        index = 0
        while index < len(self._tokens):
            token = self._tokens[index]
            index += 1
            if isinstance(token, Word):
                words.append(token)
                if token.text == "[[":
                    index = self._after_test(index)
                continue
            if token.text == "(" and words and self._is(index, ")"):
                self._function, words = words[-1].text, []
                index += 1
                continue
            words = self._opened(words)
            if words and words[0].text == "case":
                index = self._read_case(index - 1)
                words = []
                continue
            self._add(words, token.text)
            words = []
            if token.text == "(":
                self._push("subshell")
            elif token.text == ")":
                self._pop("subshell")
            elif token.text in {";;", ";&", ";;&"}:
                index = self._next_case(index)
        self._add(self._opened(words), "\n")
        commands = zip(self._script.commands, self._words, strict=True)
        self._script.commands = [
            _expanded(self._script, command, words) for command, words in commands
        ]

    def _is(self, index: int, text: str) -> bool:
        token = self._tokens[index] if index < len(self._tokens) else None
        return isinstance(token, Operator) and token.text == text

    def _after_test(self, index: int) -> int:
        while index < len(self._tokens):
            token = self._tokens[index]
            index += 1
            if isinstance(token, Word) and token.text == "]]":
                break
        return index

    def _push(self, kind: str, *, in_condition: bool = False) -> None:
        self._blocks_seen += 1
        self._blocks.append(_Block(kind, self._blocks_seen, 0, in_condition, self._function))
        self._function = ""

    def _pop(self, *kinds: str) -> None:
        if self._blocks and self._blocks[-1].kind in kinds:
            self._blocks.pop()

    def _opened(self, words: list[Word]) -> list[Word]:  # noqa: PLR0912, C901 - one case per word
        """Enter and leave the blocks that the first words open or close; return the rest."""
        while words and not words[0].quoted:
            word = words[0].text
            top = self._blocks[-1] if self._blocks else None
            if word in {"if", "while", "until"}:
                self._push("if" if word == "if" else "loop", in_condition=True)
            elif word in {"then", "else", "elif"} and top and top.kind == "if":
                top.branch += word != "elif"
                top.in_condition = word == "elif"
            elif word == "do" and top and top.kind == "loop":
                top.in_condition = False
            elif word == "{":
                self._push("brace")
            elif word == "}":
                self._pop("brace")
            elif word == "fi":
                self._pop("if")
            elif word == "done":
                self._pop("loop")
            elif word == "esac":
                self._pop("case")
            elif word == "function" and len(words) > 1:
                self._function = words[1].text
                words = words[1:]
            elif word in {"for", "select"}:
                self._push("loop")
                for name in words[1:2]:
                    self._set(name.line, name.text, None, exported=False)
                return []
            elif word not in _OPENING:
                break
            words = words[1:]
        return words

    def _read_case(self, index: int) -> int:
        self._push("case")
        return self._next_case(index)

    def _next_case(self, index: int) -> int:
        """Enter the next branch of a case, after its pattern."""
        top = self._blocks[-1] if self._blocks else None
        if not top or top.kind != "case":
            return index
        top.branch += 1
        at = index
        while at < len(self._tokens):
            token = self._tokens[at]
            if isinstance(token, Word) and token.text == "esac":
                return at
            at += 1
            if isinstance(token, Operator) and token.text == ")":
                return at
        return index

    def _place(self) -> tuple[tuple[Branch, ...], str]:
        branches = tuple(
            (block.number, 0 if block.in_condition else block.branch)
            for block in self._blocks
            if block.kind in {"if", "case"} or block.name
        )
        names = [block.name for block in self._blocks if block.name]
        return branches, names[-1] if names else ""

    def _add(self, words: list[Word], after: str) -> None:  # noqa: C901, PLR0912 - one case per builtin
        """Add one simple command to the script: an assignment, an export, or a program."""
        while words and words[0].text in _PREFIXES and not words[0].quoted:
            words = words[1:]
        own: dict[str, str] = {}
        assignments: list[Word] = []
        while words and (words[0].items is not None or _ASSIGNED.fullmatch(words[0].text)):
            assignments.append(words[0])
            words = words[1:]
        if not words:
            for word in assignments:
                self._assign(word, exported=False)
            return
        for word in assignments:
            if match := _ASSIGNED.fullmatch(word.text):
                own[match[1]] = match[2]
        name = words[0].text
        if name in _EXPORTING:
            self._export(words)
        elif name == "unset" or name in {"read", "mapfile", "readarray"}:
            for word in words[1:]:
                self._set(word.line, word.text, None, exported=False)
        elif name == ":":
            for word in words[1:]:
                if match := _DEFAULT.fullmatch(word.text):
                    self._set(word.line, match[1], f"${{{match[1]}:-{match[2]}}}", exported=False)
        else:
            self._add_command(words, own, after)

    def _add_command(self, words: list[Word], own: dict[str, str], after: str) -> None:
        script = self._script
        branches, function = self._place()
        in_condition = any(block.in_condition for block in self._blocks)
        self._words.append(tuple(words[:_MAX_WORDS]))
        command = Command(
            words[0].line,
            (),
            own,
            background=after == "&",
            checked=after in {"||", "&&"} or in_condition,
            piped=after in {"|", "|&"},
            branches=branches,
            function=function,
            at=script.at,
        )
        script.commands.append(command)
        if command.background or command.checked:  # so is the whole pipeline
            for index in range(len(script.commands) - 2, -1, -1):
                before = script.commands[index]
                if not before.piped:
                    break
                script.commands[index] = replace(
                    before, background=command.background, checked=command.checked
                )

    def _assign(self, word: Word, *, exported: bool) -> None:
        if word.items is None:
            name, text = word.text.split("=", 1)
            if name.endswith("+"):
                name, text = name[:-1], f"${{{name[:-1]}}}{text}"
            self._set(word.line, name, text, exported=exported)
            return
        name = re.split(r"[\[+=]", word.text)[0]
        items: tuple[Word, ...] | None = word.items
        if word.text.endswith("+="):
            before = self._script.before(name, self._script.at, self._place()[0])
            items = (before.items or ()) + word.items if before else None
        value = " ".join(item.text for item in items) if items is not None else None
        self._set(word.line, name, value, exported=exported, items=items)

    def _export(self, words: list[Word]) -> None:
        flags = [word.text for word in words[1:] if word.text.startswith("-")]
        exported = words[0].text == "export" or any("x" in flag for flag in flags)
        for word in words[1:]:
            if word.items is not None or _ASSIGNED.fullmatch(word.text):
                self._assign(word, exported=exported)
            elif exported:
                known = [one for one in self._script.variables if one.name == word.text]
                if known:
                    self._script.add(replace(known[-1], exported=True))

    def _set(
        self,
        line: int,
        name: str,
        value: str | None,
        *,
        exported: bool,
        items: tuple[Word, ...] | None = None,
    ) -> None:
        branches, _ = self._place()
        exported = exported or self._script.is_exported(name)
        self._script.add(Variable(line, name, value, exported, items, branches, self._script.at))


def _expanded(script: Script, command: Command, words: tuple[Word, ...]) -> Command:
    """Replace the variables of a command that are certain; an unquoted one may become several words."""
    expanded: list[str] = []
    for word in words:
        for one in _words_of(script, word, command.at, command.branches):
            expanded.append(one)
            if len(expanded) > _MAX_WORDS:
                return replace(command, words=tuple(word.text for word in words))
    return replace(command, words=tuple(expanded) or ("",))


def _words_of(
    script: Script, word: Word, at: int, branches: tuple[Branch, ...], depth: int = _MAX_DEPTH
) -> Iterator[str]:
    match = re.fullmatch(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})", word.text)
    variable = match and script.before(match[1] or match[2], at, branches)
    if variable and variable.value is not None and depth:
        if variable.items is not None and "[" in word.text:
            for item in variable.items:
                yield from _words_of(script, item, variable.at, branches, depth - 1)
            return
        is_output = re.match(r"\$\((?!\()|`", variable.value)  # any number of words
        if not word.quoted and not is_output:
            for part in _PART.findall(variable.value):
                yield from _words_of(
                    script, Word(part, word.line), variable.at, branches, depth - 1
                )
            return
        if is_output:
            yield word.text
            return
    yield script.expand_at(word.text, at, branches)
