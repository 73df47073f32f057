"""Reference page of the settings, from the classes that `--help` reads.

The sources of recipes are parsed instead of imported, because recipes import torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from markup import code, table, text

from paceline.config import RunConfig
from paceline.config.help import field_helps, written_default
from paceline.config.values import flatten
from paceline.recipes import RECIPES

SOURCE = Path(__file__).resolve().parents[2] / "src" / "paceline" / "recipes"
HEAD = ("setting", "description", "values", "default")
KINDS = {"int": "whole number", "float": "number", "str": "text", "bool": "`true`, `false`"}
GIVEN = """\
Give a setting as `key=value`, as a flag (`--batch.lanes 8`), or in a TOML file (`--config run.toml`), where the part
before the dot is a table. `runs/NAME/config.toml` holds all settings of a run. The number of ranks is not a setting: it is `-n` of
[`paceline run`](verbs.md#paceline-run), or set by another launcher.

A flag comes before `key=value`, then a file, then a default. For the recipes `mnist`, `toy` and `gpt`, the first two words without a
name are `epochs` (gpt: `steps`) and `checkpoint.every`.

| environment variable | what it does |
|---|---|
| `PACELINE_CLUSTER=NAME` | the [cluster profile](../guides/slurm.md#cluster-profiles), instead of `--cluster` |
| `PACELINE_DATA=FOLDER` | the folder of MNIST's IDX files |
| `PACELINE_INTERFACE=NAME` | the network interface between nodes |
| `PACELINE_SECRET_FILE=FILE` | a secret that all nodes share, to [sign messages](../security.md) |"""


class Written(NamedTuple):
    """A field in the source of a class, with the help line below it."""

    name: str
    annotation: ast.expr
    default: ast.expr | None
    help: str


def settings_page() -> str:
    """Return every setting of a run and of the recipes."""
    return "\n\n".join([GIVEN, *_groups(RunConfig), *map(_recipe, RECIPES)])


def _groups(kind: type, prefix: str = "") -> Iterator[str]:
    """Yield a section with the settings of a class, then a section per group."""
    hints = get_type_hints(kind)
    helps = field_helps(kind)
    rows = []
    for item in fields(kind):
        if not is_dataclass(hints[item.name]):
            values = _values(hints[item.name])
            default = "NAME of NAME.py" if item.default is MISSING else item.default
            rows.append(_row(prefix + item.name, values, default, helps[item.name]))
    title = prefix.rstrip(".") or "The run"
    yield f"## {title}\n\n{text(kind.__doc__ or '')}\n\n{table(HEAD, rows)}"
    for item in fields(kind):
        if is_dataclass(hints[item.name]):
            yield from _groups(hints[item.name], f"{prefix}{item.name}.")


def _row(name: str, values: str, default: Any, help_text: str) -> list[str]:
    shown = code(written_default(default)) if default != "" else "empty"
    return [code(name), text(help_text), values, shown]


def _values(kind: Any) -> str:
    """Return the values that a setting accepts.

    >>> _values(Literal["none", "ddp"]), _values(int)
    ('`none`, `ddp`', 'whole number')
    """
    return (
        ", ".join(map(code, get_args(kind)))
        if get_origin(kind) is Literal
        else KINDS[kind.__name__]
    )


def _recipe(name: str) -> str:
    """Return the settings that a recipe adds, and the defaults that it changes."""
    found, about = _class_of(name)
    own = [_own_row(one) for one in recipe_fields(name)]
    usual = dict(flatten(RunConfig()))
    set_here = [pair for one in found if not one.help for pair in _defaults(one.name, one.default)]
    other = [
        code(f"{key}={written_default(value)}") for key, value in set_here if value != usual[key]
    ]
    section = f"## Recipe {name}\n\n{text(about)} Other defaults: {', '.join(other)}."
    return f"{section}\n\n{table(HEAD, own)}" if own else section


def recipe_fields(name: str) -> list[Written]:
    """Return the settings that a recipe adds."""
    return [one for one in _class_of(name)[0] if one.help]


def _own_row(one: Written) -> list[str]:
    assert one.default is not None, "a setting of a recipe has a default"
    return _row(one.name, _written_values(one.annotation), ast.literal_eval(one.default), one.help)


def _class_of(recipe: str) -> tuple[list[Written], str]:
    """Return the fields of a recipe's config and what it is; it stands in the recipe's file, or in one of its own."""
    name = f"{recipe.capitalize()}Config"
    files = [SOURCE / f"{recipe}_config.py", SOURCE / f"{recipe}.py"]
    source = next(file for file in files if file.exists()).read_text(encoding="utf-8")
    return _written(source, name), ast.get_docstring(_definition(source, name)) or ""


def _definition(source: str, name: str) -> ast.ClassDef:
    return next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == name
    )


def _written(source: str, name: str) -> list[Written]:
    """Return the fields of a class; one that only has another default says nothing of itself."""
    body = _definition(source, name).body
    found = []
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            says = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            found.append(
                Written(
                    node.target.id, node.annotation, node.value, below.value.value if says else ""
                )
            )  # type: ignore[union-attr]
    return found


def _written_values(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Subscript):  # a Literal
        return ", ".join(map(code, ast.literal_eval(annotation.slice)))
    return KINDS[ast.unparse(annotation)]


def _defaults(name: str, node: ast.expr | None) -> Iterator[tuple[str, Any]]:
    """Yield the defaults that a line of a recipe sets: that of a setting, or those of a group."""
    if isinstance(node, ast.Constant):
        yield name, node.value
    elif node is not None:
        calls = [
            call
            for call in ast.walk(node)
            if isinstance(call, ast.Call) and ast.unparse(call.func) != "field"
        ]
        yield from (
            (f"{name}.{word.arg}", ast.literal_eval(word.value))
            for call in calls
            for word in call.keywords
        )
