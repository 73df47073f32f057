"""How a dataclass becomes a command line, for verbs and for settings alike.

Each field is an argument. The docstring line under a field is its help text (help.py).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.config.values import typed
from paceline.errors import ConfigError, did_you_mean

A = TypeVar("A")
Role = Literal["positional", "option", "rest"]

_METADATA = "argument"
HELP_FLAGS = ("-h", "--help")
REQUIRED = dataclasses.MISSING
"""The default of an option that must be given."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a command line."""

    name: str
    """The field, with a dot between a group and its member."""
    kind: Any
    """The type, without None."""
    default: Any
    """The value without it; MISSING where it must be given."""
    role: Role = "option"
    flags: tuple[str, ...] = ()
    metavar: str = ""
    needed: bool = False
    """Whether the verb itself asks for it, with a better message than "is missing"."""

    @property
    def required(self) -> bool:
        """Whether the command cannot run without it."""
        return self.default is dataclasses.MISSING

    @property
    def many(self) -> bool:
        """Whether it takes several words."""
        return get_origin(self.kind) is tuple

    @property
    def shown(self) -> str:
        """The name that errors and help use."""
        return self.metavar if self.role == "positional" else self.flags[-1]

    @property
    def negation(self) -> str:
        """The flag that sets a boolean to false.

        >>> Argument("batch.drop_last", bool, True, flags=("--batch.drop-last",)).negation
        '--batch.no-drop-last'
        """
        group, dot, leaf = self.flags[-1].removeprefix("--").rpartition(".")
        return f"--{group}{dot}no-{leaf}"


def option(default: Any, *flags: str, metavar: str = "") -> Any:
    """Declare an option with a short flag, another long flag or another name for its value."""
    return _declare("option", default, flags, metavar)


def flag(*flags: str) -> Any:
    """Declare a boolean option, false by default, with other flags than its name."""
    return _declare("option", False, flags, "")  # noqa: FBT003


def positional(default: Any = REQUIRED, *, metavar: str = "", needed: bool = False) -> Any:
    """Declare an argument without a flag; a field of type tuple[str, ...] takes several.

    `needed`: there is a default only so that the verb can ask for it, with the choices at hand.
    """
    return _declare("positional", default, (), metavar, needed=needed)


def rest(metavar: str) -> Any:
    """Declare the field for all other words, and for everything after `--`."""
    return _declare("rest", (), (), metavar)


def _declare(
    role: Role, default: Any, flags: tuple[str, ...], metavar: str, *, needed: bool = False
) -> Any:
    metadata = {_METADATA: (role, flags, metavar, needed)}
    return dataclasses.field(default=default, metadata=metadata)


def arguments_of(kind: type, prefix: str = "", given: Any = None) -> list[Argument]:
    """Return the arguments that a dataclass declares; groups are flattened to dotted names."""
    found: list[Argument] = []
    hints = get_type_hints(kind)
    for item in dataclasses.fields(kind):
        default = _default(item) if given is None else getattr(given, item.name)
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            found += arguments_of(hint, f"{prefix}{item.name}.", default)  # type: ignore[arg-type]
        else:
            found.append(_argument(item, f"{prefix}{item.name}", hint, default))
    return found


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _argument(item: dataclasses.Field[Any], name: str, hint: Any, default: Any) -> Argument:
    declared = item.metadata.get(_METADATA, ("option", (), "", False))
    role, flags, metavar, needed = declared
    long = [flag for flag in flags if flag.startswith("--")]
    if role == "option" and not long:
        flags = (*flags, f"--{name.replace('_', '-')}")
    if role == "positional" and not metavar:
        metavar = name.upper()
    return Argument(name, _without_none(hint), default, role, flags, metavar, needed)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in {Union, UnionType}:
        return hint
    (kind,) = [kind for kind in get_args(hint) if kind is not NoneType]
    return kind


def read_arguments(kind: type[A], words: Sequence[str], program: str) -> A:
    """Return the arguments of a verb, read from the words after it."""
    arguments = arguments_of(kind)
    before, after = split_words(words)
    texts, bare = read_options(arguments, before, program)
    by_name = {argument.name: argument for argument in arguments}
    values = {name: _typed(by_name[name], text) for name, text in texts.items()}
    remainder = [argument for argument in arguments if argument.role == "rest"]
    left = _take_positionals(arguments, bare, [] if remainder else after, values)
    for argument in arguments:
        if argument.required and argument.name not in values:
            raise ConfigError(f"{argument.shown} is missing", fix=usage_of(arguments, program))
    if remainder:
        values[remainder[0].name] = (*left, *after)
    elif left:
        _refuse(left[0], arguments, program)
    return kind(**values)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words up to the first `--`, and the words after it, which belong to the script.

    >>> split_words(["run", "x.py", "--", "-n", "--", "3"])
    (['run', 'x.py'], ['-n', '--', '3'])
    """
    split = list(words).index("--") if "--" in words else len(words)
    return list(words[:split]), list(words[split + 1 :])


def read_options(
    arguments: Sequence[Argument], words: Sequence[str], program: str, *, negations: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Return the text of every option that was given, and all other words in their order."""
    parser = _Parser(program)
    for argument in arguments:
        if argument.role == "option":
            parser.declare(argument, negations=negations)
    try:
        found, left = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        flag = (error.argument_name or "").partition("/")[0]
        problem = f"{flag} {error.message}".replace("expected one argument", "needs a value")
        raise ConfigError(problem, fix=f"see `{program} --help`") from None
    return vars(found), left


class _Parser(argparse.ArgumentParser):
    """A parser that only finds options."""

    def __init__(self, program: str) -> None:
        super().__init__(prog=program, add_help=False, allow_abbrev=False, exit_on_error=False)

    def declare(self, argument: Argument, *, negations: bool) -> None:
        """Find an option; a boolean takes no value."""
        spellings = dict.fromkeys([*argument.flags, *_with_underscores(argument.flags)])
        if argument.kind is bool:
            self._declare_constant(spellings, argument.name, "true")
            if negations:
                negated = dict.fromkeys([argument.negation, *_with_underscores(argument.negation)])
                self._declare_constant(negated, argument.name, "false")
        else:
            self.add_argument(*spellings, dest=argument.name, default=argparse.SUPPRESS)

    def _declare_constant(self, spellings: Mapping[str, None], name: str, value: str) -> None:
        self.add_argument(
            *spellings, dest=name, action="store_const", const=value, default=argparse.SUPPRESS
        )


def _with_underscores(flags: str | Sequence[str]) -> list[str]:
    names = [flags] if isinstance(flags, str) else flags
    return [f"--{flag[2:].replace('-', '_')}" for flag in names if flag.startswith("--")]


def _typed(argument: Argument, text: str) -> Any:
    return typed(argument.shown, text, argument.kind)


def _take_positionals(
    arguments: Sequence[Argument],
    bare: Sequence[str],
    after: Sequence[str],
    values: dict[str, Any],
) -> list[str]:
    """Fill the positional arguments in their order; return the words that are left."""
    wanted = [argument for argument in arguments if argument.role == "positional"]
    left: list[str] = []
    queue = [(word, _is_flag(word)) for word in bare] + [(word, False) for word in after]
    for word, is_flag in queue:
        if is_flag or not wanted:
            left.append(word)
        elif wanted[0].many:
            values[wanted[0].name] = (*values.get(wanted[0].name, ()), word)
        else:
            argument = wanted.pop(0)
            values[argument.name] = _typed(argument, word)
    return left


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-"


def _refuse(word: str, arguments: Sequence[Argument], program: str) -> NoReturn:
    if not _is_flag(word):
        raise ConfigError(f"unexpected argument {word!r}", fix=usage_of(arguments, program))
    flags = [flag for argument in arguments for flag in argument.flags]
    name = word.partition("=")[0]
    raise ConfigError(f"there is no option {name}", fix=did_you_mean(name, [*flags, "--help"]))


def usage_of(arguments: Sequence[Argument], program: str) -> str:
    """Return a command with its arguments, in brackets where they can be left out.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Show:
    ...     run: str = positional()
    ...     json: bool = False
    >>> usage_of(arguments_of(Show), "paceline show")
    'paceline show RUN [options]'
    """
    words = [program]
    for argument in arguments:
        if argument.role == "positional":
            name = f"{argument.metavar} ..." if argument.many else argument.metavar
            optional = not (argument.required or argument.needed)
            words.append(f"[{name}]" if optional else name)
    options = [argument for argument in arguments if argument.role == "option"]
    words += [f"{each.shown} {each.metavar}" for each in options if each.required]
    if options:
        words.append("[options]")
    words += [f"[{argument.metavar} ...]" for argument in arguments if argument.role == "rest"]
    return " ".join(words)
