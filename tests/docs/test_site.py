"""Every link has a target, the site builds without a warning, and no page loads anything from another host."""

from __future__ import annotations

import base64
import functools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.browser import Browser, browsing
from support.links import documents, problems
from support.page_checks import LOOKS, faults

ROOT = Path(__file__).resolve().parents[2]
LOADS = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "srcset",
    "video": "src",
    "use": "href",
}


@pytest.mark.skipif(
    not (ROOT / ".git").exists(),
    reason="needs a git checkout, which lists the documents",
)
def test_every_link_of_every_document_leads_somewhere() -> None:
    found = documents(ROOT)
    assert {"README.md", "ARCHITECTURE.md", "docs/index.md"} <= {
        str(one.relative_to(ROOT)) for one in found
    }
    assert [problem for one in found for problem in problems(one, ROOT)] == []


WRONG_LINKS = {
    "[a](no.md)": "no.md: there is no such file",
    "![a](no.svg)": "no.svg: there is no such file",
    '<a href="no.md">a</a>': "no.md: there is no such file",
    "[a]: no.md": "no.md: there is no such file",
    "[a](b.md#no)": "b.md#no: there is no such heading",
    "[a](b.md#in-a-block)": "b.md#in-a-block: there is no such heading",
    "[a](#no)": "#no: there is no such heading",
    "[a]()": ": leads nowhere",
    "[a](../../x.md)": "../../x.md: leads out of the project",
    "[a](/b.md)": "/b.md: leads out of the project",
    "[a](http://example.org)": "http://example.org: not a plain https address",
    "[a](https://u:w@example.org)": "https://u:w@example.org: not a plain https address",
    "[a](javascript:x)": "javascript:x: not a plain https address",
}
RIGHT_LINKS = """[a](b.md), [a](./b.md#one--two), [a](#here), [a](folder), [a](b.md#with-code), [a](b.md#again-1)
![a](b.md "title"), <img src="b.md">, [a](https://example.org/x?y=1#z), <https://example.org>, `[a](no.md)`
```
[a](no.md)
```
"""


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    headings = "# One & two\n## With `code`\n## Again\n## Again\n```\n# In a block\n```\n"
    (tmp_path / "b.md").write_text(headings)
    for text, wrong in {RIGHT_LINKS: "", **WRONG_LINKS}.items():
        (tmp_path / "a.md").write_text(f"# Here\n\n{text}\n")
        found = problems(tmp_path / "a.md", tmp_path)
        assert found == ([f"a.md: {wrong}"] if wrong else []), text


class Page(HTMLParser):
    """The files that a page loads, and its links."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.text = file.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.loads += [known[LOADS[tag]]] if LOADS.get(tag) in known else []
        self.links += [known["href"]] if tag == "a" and "href" in known else []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not find_spec("mkdocs") or not find_spec("material"):
        pytest.skip("needs mkdocs-material")
    place = tmp_path_factory.mktemp("site")
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {str(file.relative_to(site)): Page(file) for file in sorted(site.rglob("*.html"))}


def test_no_page_loads_anything_from_another_host(site: Path, pages: dict[str, Page]) -> None:
    foreign = r"url\(\s*[\"']?(https?:)?//|@import"
    for name, page in pages.items():
        loads = [one for one in page.loads if re.match(r"[a-z]+:|//", one)]
        assert [one for one in loads if not one.startswith("data:")] == [], name
        assert not re.search(rf'{foreign}|class="mermaid', page.text), name
    for sheet in site.rglob("*.css"):
        assert not re.search(foreign, sheet.read_text(encoding="utf-8")), sheet


def test_the_site_has_every_page_and_leads_to_it(pages: dict[str, Page]) -> None:
    home = {os.path.normpath(link.partition("#")[0]) for link in pages["index.html"].links}
    for source in (ROOT / "docs").rglob("*.md"):
        assert str(source.relative_to(ROOT / "docs").with_suffix(".html")) in home, source
    for lesson in (ROOT / "lessons").glob("*.py"):
        assert f"project/lessons/{lesson.name}.html" in pages


def test_what_pages_load_and_link_to_is_in_the_site(site: Path, pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        if name == "404.html":
            continue  # served at any address, so its links begin at the root
        for link in {*page.loads, *page.links}:
            path = link.partition("#")[0].partition("?")[0]
            if path and not re.match(r"[a-z]+:", path):
                assert ((site / name).parent / path).exists(), f"{name}: {link}"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium")) as found:
        yield found


FIRST_FOUND = "document.querySelector('.md-search-result__link')?.getAttribute('href')"
KINDS = {"index", "reference/settings", "project/lessons/30_context_parallel.py"}
"""A page of every kind, for a closer look: whole, with its script, in all looks, and at its screenshots."""


def sheets(site: Path, names: Sequence[str], folder: Path) -> Iterator[Path]:
    """Yield documents with the articles and footers of many pages: their header and navigation are the same."""
    shell = (site / "index.html").read_text(encoding="utf-8")
    shell = shell.replace("<head>", f'<head><base href="{site.as_uri()}/">', 1)
    before, after = shell.partition("<article")[0], shell.rpartition("</article>")[2]
    for first in range(0, len(names), 20):
        sheet = folder / f"{first}.html"
        parts = [_article(site, name) for name in names[first : first + 20]]
        sheet.write_text("".join([before, *parts, after]), encoding="utf-8")
        yield sheet


def _article(site: Path, name: str) -> str:
    page = (site / f"{name}.html").read_text(encoding="utf-8")
    parts = re.findall(
        r'<article.*</article>|<footer class="md-footer">.*</footer>', page, re.DOTALL
    )
    assert len(parts) == 2, name
    return re.sub(r'(<img[^>]* src=")', rf"\g<1>{Path(name).parent}/", "".join(parts))


@pytest.mark.heavy
@pytest.mark.browser
def test_every_page_can_be_read_at_a_desk_and_on_a_phone_in_light_and_dark(
    browser: Browser, site: Path, tmp_path: Path
) -> None:
    found = {str(file.relative_to(site).with_suffix("")) for file in site.rglob("*.html")}
    names = {name for name in found if re.match(r"project/lessons/\d|(?!project/|404)", name)}
    wrong = []
    for sheet in sheets(site, sorted(names - KINDS), tmp_path):
        wrong += faults(browser, sheet, LOOKS[::2], script=False)
    for name in sorted(KINDS):
        wrong += faults(browser, site / f"{name}.html", pictures=True)
    assert wrong == []
    assert len(names) > 80
    assert names > KINDS
    assert browser.complaints == []
    assert [url for url in browser.asked_for if not url.startswith(("file:", "data:"))] == []


@pytest.mark.heavy
@pytest.mark.browser
def test_every_drawing_can_be_read_in_light_and_dark(browser: Browser, site: Path) -> None:
    drawings = sorted((site / "images").rglob("*.svg"))
    assert len(drawings) > 25
    assert [one for drawing in drawings for one in faults(browser, drawing, LOOKS[:2])] == []


@pytest.mark.heavy
@pytest.mark.browser
def test_the_cheat_sheet_fits_a_page_of_a4(browser: Browser, site: Path) -> None:
    counts = []
    for name in ("cheat-sheet", "course"):
        browser.show(site / f"{name}.html")
        pdf = browser.tell("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"]
        counts.append(len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(pdf))))
    sheet, course = counts
    assert sheet == 1 < course


@pytest.mark.browser
@pytest.mark.parametrize(
    "served",
    [pytest.param(True, marks=pytest.mark.heavy), False],
    ids=["by a server", "from a folder"],
)
def test_a_setting_is_found_by_searching(
    browser: Browser, address: str, site: Path, served: bool
) -> None:
    start = address if served else f"{site.as_uri()}/"
    browser.show(f"{start}index.html?q=shard_over")
    patience = time.monotonic() + 90
    while not (found := browser.value(FIRST_FOUND)) and time.monotonic() < patience:
        time.sleep(0.2)
    assert found is not None
    assert browser.complaints == []
