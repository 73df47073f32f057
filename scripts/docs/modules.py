"""Which file of the package does what? One table per package, from the first sentence of each module's docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from markup import table, text

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "paceline"
INTRODUCTION = """Every package (a folder of `src/paceline`) answers one question, and every file one part of it. The sentences are the first ones of the modules'
docstrings. [ARCHITECTURE.md](../../ARCHITECTURE.md) says how the packages depend on each other."""


def files_page() -> str:
    """Return the page of all files: the top of the package first, then the packages below it by name."""
    sections = [_section("The top of the package", PACKAGE)]
    for package in sorted(_packages(PACKAGE)):
        name = package.relative_to(PACKAGE).as_posix()
        sections.append(_section(f"{name}/", package))
    return "\n\n".join([INTRODUCTION, *sections])


def _packages(folder: Path) -> Iterator[Path]:
    """Yield the packages below a folder, at any depth."""
    for entry in folder.iterdir():
        if (entry / "__init__.py").is_file():
            yield entry
            yield from _packages(entry)


def _section(heading: str, folder: Path) -> str:
    question = "" if folder == PACKAGE else _first_sentence(folder / "__init__.py")
    files = sorted(set(folder.glob("*.py")) - {folder / "__init__.py", folder / "__main__.py"})
    rows = [[f"`{file.name}`", text(_first_sentence(file))] for file in files]
    parts = [f"## {heading}", text(question), table(["file", "what it does"], rows) if rows else ""]
    return "\n\n".join(part for part in parts if part)


def _first_sentence(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    return first_sentence(docstring or "")


def first_sentence(docstring: str) -> str:
    r"""Return the text up to the first full stop or question mark that ends a sentence.

    >>> first_sentence("Read shards, e.g. from\nS3. Then more.")
    'Read shards, e.g. from S3.'
    >>> first_sentence("Who am I? See `detect.py`.\n\nMore.")
    'Who am I?'
    """
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    found = re.match(r".*?(?<!e\.g)(?<!i\.e)(?<!etc)[.?!](?=\s|$)", paragraph)
    return found[0] if found else paragraph
