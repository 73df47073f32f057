"""Generate what comes from the code: in docs/ verbs, settings, API, events, files, lessons, guides, drawings; the table of the shells' completion; the help texts that tests compare (`make reference`).

`--check` writes nothing and exits with 1 if a page is stale. Works without torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from api import api_page
from badges import badge_files
from completion import completion_table
from drawing import draw
from events import events_table
from figures import figure_files
from help_texts import help_texts
from lists import lessons_tables, situations_table
from modules import files_page
from picture import picture
from settings import settings_page
from terminal import picture as terminal_picture
from verbs import verbs_page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
END = "<!-- end -->"


def pages() -> dict[Path, str]:
    """Return the text of every generated file."""
    made = "<!-- made from the code by `make reference` -->"
    return {
        DOCS / "reference" / "verbs.md": f"# Verbs\n\n{made}\n\n{verbs_page()}\n",
        DOCS / "reference" / "settings.md": f"# Settings\n\n{made}\n\n{settings_page()}\n",
        DOCS / "reference" / "api.md": f"# Python API\n\n{made}\n\n{api_page()}\n",
        DOCS / "internals" / "files.md": f"# Files\n\n{made}\n\n{files_page()}\n",
        DOCS / "course.md": with_part(DOCS / "course.md", lessons_tables()),
        DOCS / "json.md": with_part(DOCS / "json.md", events_table()),
        DOCS / "index.md": with_part(DOCS / "index.md", situations_table()),
        ROOT / "src" / "paceline" / "cli" / "completion.json": completion_table(),
        ROOT / "tests" / "cli" / "help.txt": help_texts(),
        **badge_files(ROOT),
        **figure_files(DOCS / "images" / "course"),
        DOCS / "images" / "contract.svg": draw(),
        DOCS / "images" / "same-training.svg": picture(),
        DOCS / "images" / "terminal.svg": terminal_picture(),
    }


def with_part(page: Path, part: str) -> str:
    """Return a page with its generated part, between two comments, replaced."""
    before, begin, rest = page.read_text(encoding="utf-8").partition("by `make reference` -->\n")
    return f"{before}{begin}\n{part}\n\n{END}{rest.partition(END)[2]}"


def is_stale(page: Path, text: str) -> bool:
    """Return whether a file is missing or has another text."""
    return not page.exists() or page.read_text(encoding="utf-8") != text


def main() -> int:
    """Write the stale pages, or list them with --check."""
    stale = {page: text for page, text in pages().items() if is_stale(page, text)}
    if "--check" in sys.argv[1:]:
        for page in stale:
            print(
                f"{page.relative_to(ROOT)} is not what the code says\n  fix: make reference",
                file=sys.stderr,
            )
        return 1 if stale else 0
    for page, text in stale.items():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
