"""How a dataclass becomes a command line, for verbs and for settings alike.

Each field is an argument. The docstring line under a field is its help text (help.py).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import ConfigError

Role = Literal["positional", "option", "rest", "verbatim"]

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


def verbatim(metavar: str) -> Any:
    """Declare the field for all words after the positional argument, unchanged: they belong to a script."""
    return _declare("verbatim", (), (), metavar)


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
        spellings = spellings_of(argument)
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


def spellings_of(argument: Argument) -> dict[str, None]:
    """Return the flags of an option, also with underscores."""
    return dict.fromkeys([*argument.flags, *_with_underscores(argument.flags)])


def _with_underscores(flags: str | Sequence[str]) -> list[str]:
    names = [flags] if isinstance(flags, str) else flags
    return [f"--{flag[2:].replace('-', '_')}" for flag in names if flag.startswith("--")]


def usage_of(arguments: Sequence[Argument], program: str) -> str:
    """Return a command with its arguments, in brackets where they can be left out.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Show:
    ...     run: str = positional()
    ...     json: bool = False
    >>> usage_of(arguments_of(Show), "paceline show")
    'paceline show RUN [options]'
    """
    options = [argument for argument in arguments if argument.role == "option"]
    flags = [f"{each.shown} {each.metavar}" for each in options if each.required]
    if options:
        flags.append("[options]")
    positionals = [_placeholder(each) for each in arguments if each.role == "positional"]
    rest = [f"[{each.metavar} ...]" for each in arguments if each.role in {"rest", "verbatim"}]
    if any(argument.role == "verbatim" for argument in arguments):
        return " ".join([program, *flags, *positionals, *rest])
    return " ".join([program, *positionals, *flags, *rest])


def _placeholder(argument: Argument) -> str:
    name = f"{argument.metavar} ..." if argument.many else argument.metavar
    is_optional = not (argument.required or argument.needed)
    return f"[{name}]" if is_optional else name
