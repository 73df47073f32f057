"""Check the links of Markdown documents, without the network."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

CODE = re.compile(
    r"^( *)(```+|~~~+).*?^\1\2 *$|(`+)[^`\n](?:.*?[^`\n])?\3(?!`)", re.MULTILINE | re.DOTALL
)
LINKS = [
    re.compile(r"\]\(\s*<?([^)\s>]*)>?(?:\s+\"[^\"]*\")?\s*\)"),
    re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE),
    re.compile(r"<(https?:[^>\s]+)>"),
    re.compile(r"\b(?:href|src)=\"([^\"]*)\""),
]
HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)? *$", re.MULTILINE)
HOST = re.compile(r"([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}")


def documents(root: Path) -> list[Path]:
    """Return all Markdown files of a project that git does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(
        listed, cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [root / name for name in names if (root / name).exists()]


def problems(document: Path, root: Path) -> list[str]:
    """Return the problems of the links of a document."""
    found = [
        (link, problem(link, document, root))
        for link in links_of(document.read_text(encoding="utf-8"))
    ]
    return [f"{document.relative_to(root)}: {link}: {wrong}" for link, wrong in found if wrong]


def links_of(text: str) -> Iterator[str]:
    prose = CODE.sub(lambda code: "x" * (code[0].count("\n") == 0), text)
    for pattern in LINKS:
        yield from pattern.findall(prose)


def problem(link: str, document: Path, root: Path) -> str:
    """Return the problem of a link; empty: none."""
    address = urlsplit(link)
    if address.scheme or address.netloc:
        well = address.scheme == "https" and HOST.fullmatch(address.netloc)
        return "" if well else "not a plain https address"
    target = (document.parent / unquote(address.path)).resolve() if address.path else document
    if address.path.startswith("/") or root not in [target, *target.parents]:
        return "leads out of the project"
    if not target.exists():
        return "there is no such file"
    if address.fragment and unquote(address.fragment) not in anchors(target):
        return "there is no such heading"
    return "" if link else "leads nowhere"


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document, as Git hosts make them of headings."""
    if document.suffix != ".md":
        return set()
    text = document.read_text(encoding="utf-8")
    prose = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    for heading in HEADING.findall(prose):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found[name] = found.get(name, 0) + 1
    repeated = {f"{name}-{number}" for name, times in found.items() for number in range(1, times)}
    return {*found, *repeated, *re.findall(r"\bid=\"([^\"]+)\"", prose)}
