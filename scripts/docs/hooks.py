"""Turn pages that are written for a Git host into a site. MkDocs calls these functions while it builds.

Pages may link to any file of the project. A linked file outside docs/ becomes a page below `project/`: Markdown
as it is, other text as a listing, a folder as the list of its files.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))  # MkDocs loads this file by its path
from lesson_pages import lesson_page

from paceline.course.catalog import Lesson, all_lessons
from paceline.course.tracks import tracks

ROOT = Path(__file__).resolve().parents[2]
PLACE = "project/"
LINK = re.compile(r"""(\]\(|\b(?:href|src|srcset)=")(?![a-z]+:|//|\#|/)([^)\s"#]+)""")
CODE = re.compile(
    r"^( *)(```+|~~~+).*?^\1\2 *$|(`+)[^`\n](?:.*?[^`\n])?\3(?!`)", re.MULTILINE | re.DOTALL
)
PICTURES = (".svg", ".png", ".gif", ".webp")
BLOCK = re.compile(r"^(?![-*] |\d+\. |\|)(\S.*)\n(?=[-*] |\d+\. |\|.*\|\n\|-)", re.MULTILINE)
INNER_LIST = re.compile(r"^ {2,3}(?=[-*] )", re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".def": "singularity"}


def on_config(config: Any) -> Any:
    """Fill the empty entries of the navigation with the guides and lessons."""
    lists = {
        "Guides": _guides(Path(config.docs_dir) / "guides"),
        "Course": ["course.md", "teaching.md", "cheat-sheet.md", *_tracks()],
    }
    for item in config.nav:
        for name, pages in lists.items():
            if item.get(name) == []:
                item[name] = pages
    config.nav = [item for item in config.nav if [] not in item.values()]
    return config


def _guides(folder: Path) -> list[str]:
    """Return the guides in the order of the home page; the others come last."""
    home = folder.with_name("index.md").read_text(encoding="utf-8")
    found = [f"guides/{file.name}" for file in sorted(folder.glob("*.md"))]
    return sorted(found, key=lambda page: home.find(f"]({page})") % (len(home) + 1))


def _tracks() -> list[dict[str, list[dict[str, str]]]]:
    return [{track.name: list(map(_entry, track.lessons))} for track in tracks()]


def _entry(lesson: Lesson) -> dict[str, str]:
    return {f"{lesson.number}. {lesson.title}": page_of(f"lessons/{lesson.path.name}")}


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    waiting = [f"lessons/{one.path.name}" for one in all_lessons()]
    for file in files.documentation_pages():
        waiting += _outside(file.content_string, f"docs/{file.src_uri}")
    done: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in done or not (ROOT / path).exists():  # MkDocs reports missing files itself
            continue
        done.add(path)
        if path.endswith(PICTURES):
            files.append(File.generated(config, page_of(path), abs_src_path=str(ROOT / path)))
            continue
        text = _listing(path)
        files.append(File.generated(config, page_of(path), content=text))
        waiting += _outside(text, path) if path.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links to files of the project, and separate lists as a Git host does."""
    uri: str = page.file.src_uri
    if uri.startswith(PLACE):
        page.meta["search"] = {"boost": 0.5}  # guides rank above changelogs
    path = uri.removeprefix(PLACE) if uri.startswith(PLACE) else f"docs/{uri}"
    if uri.startswith(PLACE) and not (ROOT / path).exists():
        return markdown  # a listing
    return with_blocks(with_links(markdown, path))


def with_blocks(text: str) -> str:
    r"""Return Markdown with an empty line before lists and tables, and inner lists indented by four spaces.

    >>> with_blocks("Two:\n- a\n  - b\n")
    'Two:\n\n- a\n    - b\n'
    """
    return _outside_code(text, lambda part: INNER_LIST.sub("    ", BLOCK.sub(r"\1\n\n", part)))


def with_links(text: str, path: str) -> str:
    """Return a document with its links rewritten for the site; code stays unchanged.

    >>> with_links("[a](../../README.md#b), `[a](../../README.md)`, [c](c.md)", "docs/guides/x.md")
    '[a](../project/README.md#b), `[a](../../README.md)`, [c](c.md)'
    """
    return _outside_code(
        text, lambda part: LINK.sub(lambda link: link[1] + _target(link[2], path), part)
    )


def _target(link: str, path: str) -> str:
    return posixpath.relpath(
        page_of(_resolved(link, path)), posixpath.dirname(page_of(path)) or "."
    )


def _resolved(link: str, path: str) -> str:
    """Return the file that a link leads to; for a folder its README.md, if it has one."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return f"{found}/README.md" if (ROOT / found / "README.md").is_file() else found


def page_of(path: str) -> str:
    """Return the path of a project file on the site.

    >>> page_of("docs/hang.md"), page_of("README.md"), page_of("lessons/04_ddp_by_hand.py")
    ('hang.md', 'project/README.md', 'project/lessons/04_ddp_by_hand.py.md')
    """
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PLACE + (path if path.endswith((".md", *PICTURES)) else f"{path}.md")


def _outside(text: str, path: str) -> list[str]:
    """Return the files outside docs/ that a document links to."""
    found = [_resolved(link[2], path) for link in LINK.finditer(CODE.sub("", text))]
    return [one for one in found if not one.startswith(("docs/", ".."))]


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Apply a change to everything but code."""
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def _listing(path: str) -> str:
    """Return a file as a page."""
    place = ROOT / path
    if path.endswith(".md"):
        return place.read_text(encoding="utf-8")
    if place.is_dir():
        names = sorted(one.name for one in place.iterdir() if not one.name.startswith((".", "_")))
        return "\n".join([f"# {path}", "", *(f"- `{path}/{name}`" for name in names)])
    for lesson in all_lessons():
        if lesson.path.name == place.name:
            return lesson_page(lesson)
    return f"# {path}\n\n`{path}`\n\n````{LANGUAGES.get(place.suffix, 'text')}\n{place.read_text(encoding='utf-8')}````\n"
