"""Examples in docstrings: those of user code run in an empty folder, and without the lines that report progress."""

from __future__ import annotations

from typing import Any

import pytest

_USER_CODE = {"pack", "reading", "train"}
"""The folders of names that scripts use."""


@pytest.fixture(autouse=True)
def _example(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    doctest_namespace: dict[str, Any],
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    if request.node.path.parent.name not in _USER_CODE:
        return
    import torch

    import paceline
    from paceline.train.observers.console import Console

    monkeypatch.chdir(request.getfixturevalue("tmp_path"))
    monkeypatch.setattr(Console, "__call__", lambda *_: None)
    config = paceline.RunConfig(name="example")
    doctest_namespace.update(torch=torch, paceline=paceline, config=config)
