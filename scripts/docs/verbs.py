"""Which verbs are there, and what does each take? Read from the very parsers that `--help` shows."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from markup import code, sentence, text

from paceline.cli.main import build_parser

# argparse has no public way to its arguments
_Verbs = argparse._SubParsersAction  # noqa: SLF001


def verbs_page() -> str:
    """Return every verb, with its arguments."""
    parser = build_parser()
    verbs = _inner(parser)
    entries = [f"- [`paceline {name}`](#paceline-{name}): {text(said)}" for name, said, _ in verbs]
    sections = [
        section for name, _, verb in verbs for section in _sections(verb, f"paceline {name}", "##")
    ]
    return "\n\n".join([sentence(text(parser.epilog or "")), "\n".join(entries), *sections])


def _inner(parser: argparse.ArgumentParser) -> list[tuple[str, str, argparse.ArgumentParser]]:
    """Return the verbs of the program, or the actions of a verb: name, help, parser."""
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, _Verbs):
            said = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
            return [(name, said[name], own) for name, own in action.choices.items()]
    return []


def _sections(parser: argparse.ArgumentParser, name: str, heading: str) -> Iterator[str]:
    """Yield a verb, then each of its actions."""
    if module := getattr(parser, "module", ""):
        importlib.import_module(module).add_arguments(
            parser
        )  # which the verb does once this action is called
    inner, arguments = _inner(parser), _arguments(parser)
    words = [_word(action) for action in arguments if not action.option_strings] + [
        "ACTION"
    ] * bool(inner)
    options = ["[options]"] * any(action.option_strings for action in arguments)
    usage = " ".join([name, *words, *options])
    yield (
        f"{heading} {name}\n\n{sentence(text(parser.description or ''))}\n\n```text\n{usage}\n```"
        + "".join(
            ["\n\n" * bool(arguments), "\n".join(_entry(parser, action) for action in arguments)]
        )
    )
    for action, said, own in inner:
        own.description = own.description or said
        yield from _sections(own, f"{name} {action}", f"#{heading}")


def _arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    found = parser._actions  # noqa: SLF001
    return [
        one for one in found if "--help" not in one.option_strings and not isinstance(one, _Verbs)
    ]


def _name(action: argparse.Action) -> str:
    return str(action.metavar or (action.dest.upper() if action.option_strings else action.dest))


def _word(action: argparse.Action) -> str:
    """Return a word of the command, in brackets if it may be left out."""
    name = _name(action)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(
        str(action.nargs), name
    )


def _entry(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return an argument as an entry of a list."""
    said = parser._get_formatter()._expand_help(action) if action.help else ""  # noqa: SLF001
    value = f" {_name(action)}" if action.nargs != 0 else ""
    names = [code(name + value) for name in action.option_strings] or [code(_name(action))]
    notes = (
        [f"one of {', '.join(code(str(one)) for one in action.choices)}"] if action.choices else []
    )
    if value and action.default and action.default != argparse.SUPPRESS and "default" not in said:
        notes.append(f"default: {code(str(action.default))}")
    return f"- {', '.join(names)}: {'; '.join([text(said), *notes])}"
