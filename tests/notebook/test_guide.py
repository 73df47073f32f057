"""The guide about notebooks is a notebook: its cells run, and show what the page says."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.kernel import kernel_environment
from support.typed_pages import ROOT, page_of, pattern_of

pytestmark = pytest.mark.skipif(
    not find_spec("nbclient") or not find_spec("ipykernel"),
    reason="needs nbclient and ipykernel (pip install nbclient ipykernel)",
)
PAGE = page_of(ROOT / "docs" / "guides" / "notebooks.md")


def test_the_cells_of_the_guide_run_in_order(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(cell) for cell in PAGE.scripts.values()]
    assert len(cells) == 2
    book = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=kernel_environment(tmp_path))
    outputs = book.cells[-1]["outputs"]
    said = "".join(one["text"] for one in outputs if one["output_type"] == "stream")
    (shown,) = re.findall(r"^```text\n(.*?)^```$", PAGE.text, re.DOTALL | re.MULTILINE)
    for line in shown.splitlines():
        assert re.search(pattern_of(line), said), line
    kinds = [
        kind for one in outputs if one["output_type"] == "display_data" for kind in one["data"]
    ]
    assert "image/svg+xml" in kinds
