"""What a shell can complete: verbs, options, settings and what each argument may be, from the dataclasses that `--help` reads.

The table is kept with the package, because importing the verbs takes longer than a person waits for the tab key.
"""

from __future__ import annotations

import ast
import json
from typing import Any, Literal, get_args, get_origin

from settings import recipe_fields

from paceline.cli.commands import COMMANDS, Command, load
from paceline.cli.init_origins import ORIGINS
from paceline.cluster.profile import READY
from paceline.config import RunConfig
from paceline.config.arguments import Argument, arguments_of
from paceline.config.help import field_helps, value_name
from paceline.config.values import field_types
from paceline.data.download import PUBLIC_DATASETS
from paceline.recipes import RECIPES

PATHS = ["<paths>"]
SOURCES = {
    "RECIPE": ["<recipes>"],
    "RUN": ["<runs>"],
    "RUN|JOBID": ["<runs>"],
    "SCRIPT": ["<scripts>"],
    "LIBRARY": sorted(ORIGINS),
} | dict.fromkeys(
    (
        "DATASET",
        "FILE",
        "FILE|FOLDER",
        "FOLDER",
        "INPUT",
        "JOB.sh",
        "OUT",
        "PATH",
        "SOURCE",
        "VENV",
    ),
    PATHS,
)
"""What a value may be, by its name in the help: words, or <what> is looked up when the key is pressed."""
NAMES = {
    "paceline data get": sorted(PUBLIC_DATASETS),
    "paceline cluster show": sorted(file.stem for file in READY.glob("*.toml")),
}


def completion_table() -> str:
    """Return the table as JSON."""
    verbs = {name: _entry(verb, f"paceline {name}") for name, verb in COMMANDS.items()}
    settings = {name: _values(kind) for name, kind in field_types(RunConfig).items()}
    recipes = {name: _recipe(name) for name in RECIPES}
    table = {"verbs": verbs, "settings": settings, "recipes": recipes}
    return json.dumps(table, indent=1) + "\n"


def _entry(command: Command, program: str) -> dict[str, Any]:
    if command.actions:
        actions = {
            name: _entry(action, f"{program} {name}") for name, action in command.actions.items()
        }
        return {"help": command.help, "actions": actions}
    _, kind = load(command)
    arguments, helps = arguments_of(kind), field_helps(kind)
    positionals = [each for each in arguments if each.role == "positional"]
    others = [each.role for each in arguments if each.role in {"rest", "verbatim"}]
    return {
        "help": command.help,
        "options": _options(arguments),
        "arguments": [_sources(each, program, helps) for each in positionals],
        "repeats": any(each.many for each in positionals),
        "rest": others[0] if others else "",
    }


def _options(arguments: list[Argument]) -> dict[str, list[str] | None]:
    """Return the flags, and what the value of each may be; None: it takes no value."""
    found: dict[str, list[str] | None] = {}
    for each in arguments:
        if each.role == "option":
            values = None if each.kind is bool else _sources(each, "", {})
            found |= dict.fromkeys(each.flags, values)
    return found | {"--help": None}


def _sources(argument: Argument, program: str, helps: dict[str, str]) -> list[str]:
    if get_origin(argument.kind) is Literal:
        return list(get_args(argument.kind))
    name = argument.metavar or value_name(argument)
    found = SOURCES.get(name, NAMES.get(program, []))
    if name == "SCRIPT" and "name of a recipe" in helps[argument.name]:
        return [*found, "<recipes>"]
    return found


def _values(kind: Any) -> list[str]:
    """Return the values that a setting can have, if they are few."""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return ["true", "false"] if kind is bool else []


def _recipe(name: str) -> dict[str, list[str]]:
    """Return the settings that a recipe adds, from its source: to import it would import torch."""
    found = {}
    for field in recipe_fields(name):
        if isinstance(field.annotation, ast.Subscript):  # a Literal
            found[field.name] = [str(value) for value in ast.literal_eval(field.annotation.slice)]
        else:
            found[field.name] = _values(bool if ast.unparse(field.annotation) == "bool" else str)
    return found
