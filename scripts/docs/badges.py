"""The badges of the README, from pyproject.toml and the course. Widths are estimated: no font is measured."""

from __future__ import annotations

import re
import tomllib
from html import escape
from pathlib import Path

from paceline.course.catalog import all_lessons
from paceline.version import VERSION

_CHARACTER = 6.7
"""Pixels of an average character at 11 px."""


def facts(root: Path) -> dict[str, tuple[str, str]]:
    """Return label and value of each badge, by the name of its file."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = next(each for each in project["dependencies"] if each.startswith("torch>="))
    at_least = re.compile(r"^\D*>=")
    return {
        "version": ("version", VERSION),
        "python": ("Python", "≥ " + at_least.sub("", project["requires-python"])),
        "torch": ("PyTorch", "≥ " + at_least.sub("", torch)),
        "license": ("license", project["license"].partition(" ")[0]),
        "lessons": ("course", f"{len(all_lessons())} lessons"),
    }


def badge(label: str, value: str) -> str:
    """Return a badge as an SVG.

    >>> "<title>Python: ≥ 3.11</title>" in badge("Python", "≥ 3.11")
    True
    """
    left, right = (round(len(text) * _CHARACTER + 12) for text in (label, value))
    texts = [(label, left / 2), (value, left + right / 2)]
    drawn = "".join(f'<text x="{x:g}" y="14">{escape(text)}</text>' for text, x in texts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">'
        f"<title>{escape(label)}: {escape(value)}</title>"
        f'<clipPath id="c"><rect width="{left + right}" height="20" rx="4"/></clipPath><g clip-path="url(#c)">'
        f'<rect width="{left}" height="20" fill="#424a53"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="#00695c"/></g>'
        f'<g fill="#fff" text-anchor="middle" font-family="system-ui, sans-serif" font-size="11">{drawn}</g></svg>\n'
    )


def badge_files(root: Path) -> dict[Path, str]:
    """Return the badges by their files."""
    folder = root / "docs" / "images" / "badges"
    return {folder / f"{name}.svg": badge(*pair) for name, pair in facts(root).items()}
