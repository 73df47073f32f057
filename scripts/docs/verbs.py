"""Reference page of the verbs, from the dataclasses that `--help` reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_origin

from markup import code, sentence, text

from paceline.cli.commands import COMMANDS, GROUPS, Command, load
from paceline.cli.main import EXIT_CODES
from paceline.config.arguments import Argument, arguments_of, usage_of
from paceline.config.help import described, field_helps, value_name


def verbs_page() -> str:
    """Return every verb with its arguments."""
    entries = []
    for group, names in GROUPS.items():
        entries.append(f"- {group}:")
        entries += [
            f"    - [`paceline {name}`](#paceline-{name}): {text(COMMANDS[name].help)}"
            for name in names
        ]
    parts = [text(EXIT_CODES), "\n".join(entries)]
    for names in GROUPS.values():
        for name in names:
            parts += _sections(COMMANDS[name], f"paceline {name}", "##")
    return "\n\n".join(parts)


def _sections(command: Command, program: str, heading: str) -> Iterator[str]:
    """Yield a verb, then each of its actions."""
    summary = sentence(text(command.help))
    if command.actions:
        yield f"{heading} {program}\n\n{summary}\n\n```text\n{program} ACTION [options]\n```"
        for name, action in command.actions.items():
            yield from _sections(action, f"{program} {name}", f"#{heading}")
        return
    _, kind = load(command)
    arguments, helps = arguments_of(kind), field_helps(kind)
    parts = [f"{heading} {program}", summary, text(kind.__doc__ or "")]
    parts.append(f"```text\n{usage_of(arguments, program)}\n```")
    shown = [each for each in arguments if "--help" not in each.flags]
    shown.sort(key=lambda argument: argument.role == "option")
    parts.append("\n".join(_entry(each, helps.get(each.name, "")) for each in shown))
    yield "\n\n".join(part for part in parts if part)


def _entry(argument: Argument, help_text: str) -> str:
    """Return an argument as an entry of a list."""
    names = [code(argument.metavar)]
    if argument.role == "option":
        value = "" if argument.kind is bool else f" {value_name(argument)}"
        if get_origin(argument.kind) is Literal:
            value = f" {value_name(argument).replace('|', ', ')}"
        names = [code(f"{flag}{value}") for flag in argument.flags]
    return f"- {', '.join(names)}: {text(described(argument, help_text))}"
