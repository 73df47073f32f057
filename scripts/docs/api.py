"""Reference page of the public names, from their docstrings.

The sources are parsed instead of imported, because most of them import torch.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markup import text

import paceline

SOURCE = Path(__file__).resolve().parents[2] / "src"
GIVEN = {"Step": "paceline.train.run_step", "Losses": "paceline.exact.loss"}
"""Classes whose objects user code gets, but does not create."""
SETTINGS = "RunConfig"
FOR_THE_RUN = {"RunConfig", "Stream"}
"""Classes whose methods are called by the run, not by user code."""
ABOUT = """\
These are the public names of `import paceline`; `help(paceline.Run)` shows the same texts. `Step` and `Losses`, at the end, are
the classes of what `run.steps` and `run.update` return: scripts receive such objects, and do not import the classes. All examples are run by the tests,
on one rank and without the lines that report progress."""
_WIDE = 88

Function = ast.FunctionDef
Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Found:
    """A class or function, and the module that defines it."""

    node: Definition
    module: str


def api_page() -> str:
    """Return every public name with its members."""
    homes = {name: vars(paceline)["_HOMES"][name] for name in paceline.__all__}
    parts = [ABOUT]
    for name, module in (homes | GIVEN).items():
        parts += _sections(name, definition(module, name))
    return "\n\n".join(parts)


def definition(module: str, name: str) -> Found:
    """Return where a name is defined; imports are followed.

    >>> definition("paceline.config", "RunConfig").module
    'paceline.config.schema'
    """
    for node in _tree(module).body:
        if isinstance(node, Definition) and node.name == name:
            return Found(node, module)
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return definition(node.module or "", name)
    raise LookupError(f"{module} does not define {name}")


def _tree(module: str) -> ast.Module:
    path = SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _sections(name: str, found: Found) -> Iterator[str]:
    node = found.node
    yield f"## {name}"
    if isinstance(node, ast.FunctionDef):
        yield from _described(f"paceline.{name}", node)
        return
    begin = [one for one in _bodies(found) if isinstance(one, Function) and one.name == "__init__"]
    if begin and name not in GIVEN:
        yield _signature(f"paceline.{name}", begin[0], returns=False)
    yield markdown(ast.get_docstring(node) or "")
    if name == SETTINGS:
        yield "Its fields are the [settings](settings.md)."
    if name in FOR_THE_RUN:
        return
    listed = [f"- `{attribute}`: {text(says)}" for attribute, says in attributes(found)]
    if listed:
        yield "\n".join(["Attributes:", "", *listed])
    for method in _methods(found):
        yield f"### {name}.{method.name}"
        yield from _described(f"{name.lower()}.{method.name}", method)


def _described(call: str, node: Function) -> Iterator[str]:
    yield _signature(call, node)
    yield markdown(ast.get_docstring(node) or "")


def _bodies(found: Found) -> Iterator[ast.stmt]:
    """Yield what a class and its bases in this package contain; the class itself first."""
    assert isinstance(found.node, ast.ClassDef)
    yield from found.node.body
    for base in found.node.bases:
        try:
            above = definition(found.module, ast.unparse(base))
        except LookupError:
            continue  # a class of Python or torch
        yield from _bodies(above)


def _methods(found: Found) -> list[Function]:
    """Return the public methods; an overridden one once."""
    own: dict[str, Function] = {}
    for node in _bodies(found):
        if isinstance(node, Function) and not node.name.startswith("_") and _is_method(node):
            own.setdefault(node.name, node)
    return list(own.values())


def attributes(found: Found) -> Iterator[tuple[str, str]]:
    """Yield the public attributes with their texts: properties, and names with a string below them."""
    for node in _bodies(found):
        if isinstance(node, Function) and _has(node, "property") and not node.name.startswith("_"):
            yield node.name, ast.get_docstring(node) or ""
    for body in _assignments(found):
        for node, below in itertools.pairwise(body):
            says = below.value if isinstance(below, ast.Expr) else None
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(says, ast.Constant):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                name = ast.unparse(target).removeprefix("self.")
                if not name.startswith("_"):
                    yield name, str(says.value)


def _assignments(found: Found) -> Iterator[list[ast.stmt]]:
    everything = list(_bodies(found))
    yield everything
    for node in everything:
        if isinstance(node, Function) and node.name == "__init__":
            yield node.body


def _is_method(node: Function) -> bool:
    return not _has(node, "property") and not _has(node, "overload")


def _has(node: Function, decorator: str) -> bool:
    return any(ast.unparse(one) == decorator for one in node.decorator_list)


def _signature(call: str, node: Function, *, returns: bool = True) -> str:
    """Return a call as a block of code, one argument per line if it is long."""
    arguments = [each for each in _arguments(node.args) if each != "self"]
    end = f" -> {ast.unparse(node.returns)}" if returns and node.returns else ""
    line = f"{call}({', '.join(arguments)}){end}"
    if len(line) > _WIDE:
        line = "\n".join([f"{call}(", *(f"    {each}," for each in arguments), f"){end}"])
    return f"```text\n{line}\n```"


def _arguments(given: ast.arguments) -> Iterator[str]:
    """Yield the arguments as they are written.

    >>> [*_arguments(ast.parse("def f(a: int, *, b=1, **c): ...").body[0].args)]
    ['a: int', '*', 'b=1', '**c']
    """
    depth, begun = 0, ""
    for character in ast.unparse(given):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            yield _spaced(begun)
            begun = ""
        else:
            begun += character
    if begun:
        yield _spaced(begun)


def _spaced(argument: str) -> str:
    """Return an argument with spaces around the default of a type.

    >>> _spaced(" a: int=1"), _spaced("b=1")
    ('a: int = 1', 'b=1')
    """
    return re.sub(r"(: [^=]+)=", r"\1 = ", argument.strip())


def markdown(docstring: str) -> str:
    r"""Return a docstring as Markdown: paragraphs, lists, and examples as code.

    >>> print(markdown("One\nline.\n\n- `a`: first\n  part\n- `b`"))
    One line.
    <BLANKLINE>
    - `a`: first part
    - `b`
    """
    parts = []
    for block in re.split(r"\n\s*\n", docstring.strip()):
        if block.startswith(">>>"):
            parts.append(f"```python\n{block}\n```")
        elif block.startswith("- "):
            items = re.split(r"^- ", block, flags=re.MULTILINE)[1:]
            parts.append("\n".join(f"- {text(item)}" for item in items))
        else:
            parts.append(text(block))
    return "\n\n".join(parts)
