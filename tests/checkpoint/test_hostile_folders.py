"""A short run of the trials of `scripts/hostile_folders.py`: no wrong load, no wait, no traceback, nothing written through links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "hostile_folders.py"


@pytest.mark.slow
def test_damaged_and_forged_run_folders_are_refused_or_skipped(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--count", "34", "--seed", "7", "--json"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stderr
    found = json.loads(done.stdout)
    assert len(found) >= 17
    assert [one["examples"] for one in found.values() if one["examples"]] == []
    assert done.returncode == 0
    assert list(tmp_path.glob("hostile-*")) == []  # torch may leave its own cache
