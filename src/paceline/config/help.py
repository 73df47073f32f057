"""Help of verbs and settings, from their dataclasses: the docstring line under a field is its help."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.config.arguments import HELP_FLAGS, Argument, arguments_of, usage_of
from paceline.config.lanes import AutoLanes
from paceline.help_layout import section, sentence, wrapped

_METAVARS = {int: "N", float: "X", str: "TEXT"}


def verb_help(kind: type, program: str, summary: str) -> str:
    """Return the help of a verb: usage, summary, details, arguments and options."""
    arguments, helps = arguments_of(kind), field_helps(kind)
    parts = [f"usage: {usage_of(arguments, program)}", sentence(summary), _details(kind)]
    positionals = [argument for argument in arguments if argument.role != "option"]
    options = [argument for argument in arguments if argument.role == "option"]
    parts.append(section("arguments", [_row(each, helps) for each in positionals]))
    rows = [_row(argument, helps) for argument in options]
    if not any("--help" in argument.flags for argument in options):
        rows.append((", ".join(HELP_FLAGS), "Show this help."))
    parts.append(section("options", rows))
    return "\n\n".join(part for part in parts if part)


def settings_help(kind: type, program: str) -> str:
    """Return the help of all settings of a run, group by group."""
    helps = field_helps(kind)
    groups: dict[str, list[tuple[str, str]]] = {}
    for argument in arguments_of(kind):
        group = argument.name.rpartition(".")[0]
        groups.setdefault(group, []).append(_row(argument, helps))
    parts = [
        f"usage: {program} [SETTING=VALUE ...] [--SETTING VALUE ...]",
        _details(kind),
        wrapped(
            "Give a setting as SETTING=VALUE (batch.lanes=8), as a flag (--batch.lanes 8), "
            "or in a TOML file (--config FILE)."
        ),
    ]
    parts += [section(group or "settings", rows) for group, rows in groups.items()]
    parts.append(
        section(
            "options",
            [
                ("--config FILE", "Read settings from a TOML file."),
                ("-h, --help", "Show this help."),
            ],
        )
    )
    return "\n\n".join(part for part in parts if part)


def _details(kind: type) -> str:
    text = inspect.cleandoc(kind.__dict__.get("__doc__") or "")
    generated = text.startswith(f"{kind.__name__}(")  # dataclass writes one where there is none
    return "" if generated else wrapped(text)


def _row(argument: Argument, helps: Mapping[str, str]) -> tuple[str, str]:
    return spelled(argument), described(argument, helps.get(argument.name, ""))


def spelled(argument: Argument) -> str:
    """Return an argument as it is typed.

    >>> spelled(Argument("ranks", int, 1, flags=("-n", "--ranks")))
    '-n, --ranks N'
    """
    if argument.role in {"rest", "verbatim"}:
        return f"{argument.metavar} ..."
    if argument.role == "positional":
        return argument.metavar
    if argument.kind is bool:
        flags = argument.flags if not argument.default else (*argument.flags, argument.negation)
        return ", ".join(flags)
    return f"{', '.join(argument.flags)} {value_name(argument)}"


def value_name(argument: Argument) -> str:
    """Return the word that stands for the value of an option."""
    if argument.metavar:
        return argument.metavar
    if get_origin(argument.kind) is Literal:
        return "|".join(get_args(argument.kind))
    return _METAVARS.get(argument.kind, "PATH")


def described(argument: Argument, text: str) -> str:
    """Return the help of an argument, with its default unless the text names it."""
    text = " ".join(text.split())
    default = argument.default
    if argument.required or "default" in text or "must be given" in text:
        return text
    if default is False or default is None or default in ("", ()):
        return text
    return f"{text} (default: {written_default(default)})"


def written_default(value: Any) -> str:
    """Return a value as a person types it.

    >>> written_default(True), written_default(0.5)
    ('true', '0.5')
    """
    if isinstance(value, AutoLanes):
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)


def field_helps(kind: type, prefix: str = "") -> dict[str, str]:
    """Return the docstring line under each field of a dataclass, by its dotted name."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            for name, text in _written_helps(base).items():
                found[f"{prefix}{name}"] = text
    for name, hint in get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            found |= field_helps(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
    return found


def _written_helps(kind: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # a class without a file
        return {}
    definition: Any = ast.parse(source).body[0]
    found = {}
    for node, below in zip(definition.body, definition.body[1:], strict=False):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[node.target.id] = str(below.value.value)
    return found
