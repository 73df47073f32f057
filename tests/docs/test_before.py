"""Do the scripts that the guides convert run, with the packages that they need?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.typed_pages import ROOT, page_of

PAGES = {
    path.stem: page_of(path)
    for path in sorted((ROOT / "docs" / "guides").glob("from-*.md"))
    if "before.py" in page_of(path).scripts
}
NEEDS = {"from-accelerate": "accelerate", "from-hf-trainer": "accelerate", "from-lightning": "lightning"}  # fmt: skip
STARTS_ITS_PROCESSES = {"from-lightning"}


def test_every_page_says_what_it_needs() -> None:
    assert set(PAGES) == set(NEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_script_runs_before_it_is_converted(name: str, tmp_path: Path) -> None:
    if not find_spec(NEEDS[name]):
        pytest.skip(f"{NEEDS[name]} is not installed; the page has its results")
    script = tmp_path / "before.py"
    script.write_text(PAGES[name].scripts["before.py"])
    command = [sys.executable, str(script)]
    if name not in STARTS_ITS_PROCESSES:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command[1:1] = torchrun
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\bacc\b|eval_acc", done.stdout + done.stderr)
