"""Packages that torch needs late are imported by a thread, without torch: two threads that import it could wait for each other."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from paceline.launch import preload, rank_local

SCRIPT = """
import json, sys, threading
from paceline.launch.preload import preload
preload()
[thread.join() for thread in threading.enumerate() if thread.name == "preload"]
print(json.dumps([name for name in ("sympy", "networkx", "torch") if name in sys.modules]))
"""


def test_the_packages_are_imported_and_import_nothing_of_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    assert json.loads(done.stdout) == list(preload.PACKAGES)


def test_a_package_that_is_missing_is_left_to_torch(monkeypatch, capfd) -> None:
    monkeypatch.setattr(preload, "PACKAGES", ("no_such_package",))
    preload.preload()
    for thread in threading.enumerate():
        if thread.name == "preload":
            thread.join()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("target", "begins"),
    [(["module", "paceline.recipes.mnist"], 1), (["module", "this"], 0), (["path", "x.py"], 0)],
)
def test_recipes_begin_with_it_and_scripts_do_not(target, begins, monkeypatch) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(rank_local, "preload", lambda: begun.append(True))
    monkeypatch.setattr(rank_local, "pause_gc", lambda: None)
    for name in ("run_module", "run_path"):
        monkeypatch.setattr(f"runpy.{name}", lambda *_, **__: {})
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    rank_local.run_target(target)
    assert len(begun) == begins
