"""A platform that docs/platforms.md calls refused is refused, with the way out."""

from __future__ import annotations

import subprocess
import sys


def test_windows_is_refused_at_the_first_import() -> None:
    script = "import difflib, sys; sys.platform = 'win32'; import paceline"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "EnvironmentUnfit: Paceline does not run on Windows" in done.stderr
    assert "\n  fix: run it under WSL 2" in done.stderr
