"""Does the report say what a script decides itself, instead of the settings that do not apply?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import paceline
from paceline.config.values import with_settings
from paceline.report.find_run import NamedRun
from paceline.report.page.document import render_page
from paceline.report.page.page_data import report_data
from paceline.rundir import RunDir

SETTINGS = {"batch.global_size": 8, "epochs": 1, "checkpoint.every": "end", "log.every_steps": 1}


def train(folder: Path, kind: str) -> dict[str, str]:
    """Train five steps in one of several styles; return what the report says of its settings."""
    config = with_settings(paceline.RunConfig(), SETTINGS | {"runs": str(folder)})
    with paceline.Run(config) as run:
        model = run.model(torch.nn.Linear(1, 1))
        rate = 1e-3 if kind == "settings" else 3e-4
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=rate))
        if kind in {"tracked", "untracked"}:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        if kind == "tracked":
            run.track(scheduler=scheduler)
        elif kind == "untracked":
            run.untracked(scheduler)
        for step in run.steps((torch.ones(40, 1),)):

            def loss(batch: tuple[torch.Tensor]) -> torch.Tensor:
                return model(batch[0]).square().mean()

            if kind == "backward":
                run.backward(optimizer, loss, step)
                optimizer.step()
            else:
                run.update(optimizer, loss, step, clip=1.5 if kind == "tracked" else None)
            if kind in {"tracked", "untracked"}:
                scheduler.step()
    data = report_data([NamedRun(RunDir(folder / "run"), ())])
    page = render_page(data).decode()
    found: dict[str, str] = data["runs"][0]["set_by_script"]
    assert page.count("(setting: ") == len(found)
    return found


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("settings", {}),
        ("untracked", {"lr.base": "0.0003 by the script's optimizer", "lr.schedule": "changed by the script"}),
        ("backward", {"lr.base": "0.0003 by the script's optimizer", "clip_norm": "chosen by the script, which calls run.backward"}),
        (
            "tracked",
            {
                "lr.base": "0.0003 by the script's optimizer",
                "lr.schedule": "set by the script's StepLR",
                "clip_norm": "1.5 by clip= of run.update",
            },
        ),
    ],
)  # fmt: skip
def test_the_report_shows_what_the_script_decides(
    tmp_path: Path, kind: str, expected: dict[str, str]
) -> None:
    assert train(tmp_path, kind) == expected
