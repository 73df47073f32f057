"""A disk that cannot be written to ends a run with exit code 3, the problem and the fix, however it was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "trials" / "faulty_training.py"
SETTINGS = "batch.global_size=32 epochs=1 checkpoint.every=5steps runs=disk"
STARTS = {"python": sys.executable, "paceline": f"{sys.executable} -m paceline run -n 2"}
DISKS = {"full": "size=24k", "read-only": "ro"}


@pytest.mark.root
@pytest.mark.parametrize(
    ("disk", "start"), [("full", "python"), ("full", "paceline"), ("read-only", "python")]
)
def test_a_full_or_read_only_disk_gives_exit_code_3(tmp_path: Path, disk: str, start: str) -> None:
    (tmp_path / "disk").mkdir()
    mount = f"mount -t tmpfs -o {DISKS[disk]} none disk"
    command = f"{mount} && exec {STARTS[start]} {SCRIPT} {SETTINGS}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert (done.returncode, "Traceback" in said) == (3, False), said
    reason = {"full": "No space left on device", "read-only": "Read-only file system"}[disk]
    assert f": {reason}\n  fix: free disk space, allow writing there" in said
