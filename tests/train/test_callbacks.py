"""Are callbacks called at the same moments on every rank, and may they save, finish, stop and fail?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import paceline
from paceline.errors import ConfigError, Stopped, TrainingError
from paceline.exact.state import state_digest
from paceline.train.callbacks import MOMENTS, Callback
from support.loops import SHORT, config_in, line, updated
from support.loops import events_in as events
from support.processes import in_worlds, run_on_processes
from support.program import paceline as run_paceline

DATA = (torch.arange(20.0).view(20, 1),)


class Diary(paceline.Callback):
    """Writes down every call, and keeps it over a restart."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def state_dict(self) -> dict:
        return {"lines": self.lines}

    def load_state_dict(self, state: dict) -> None:
        self.lines = state["lines"]

    def run_start(self, run: paceline.Run) -> None:
        self.lines.append(f"run starts with {len(self.lines)} lines")

    def run_end(self, run: paceline.Run) -> None:
        self.lines.append("run ends")

    def epoch_start(self, run: paceline.Run, step: paceline.Step) -> None:
        self.lines.append(f"epoch {step.epoch} starts")

    def epoch_end(self, run: paceline.Run, step: paceline.Step) -> None:
        self.lines.append(f"epoch {step.epoch} ends")
        run.evaluate(DATA, lambda batch: {"mean": batch[0]})

    def step_start(self, run: paceline.Run, step: paceline.Step) -> None:
        self.lines.append(f"step {step.index} starts")

    def step_end(self, run: paceline.Run, step: paceline.Step) -> None:
        self.lines.append(f"step {step.index} ends")

    def evaluation_end(self, run: paceline.Run, metrics: Mapping[str, float]) -> None:
        self.lines.append(f"mean is {metrics['mean']}")

    def save(self, run: paceline.Run, steps: int) -> None:
        self.lines.append(f"saves {steps}")

    def stop(self, run: paceline.Run, reason: str) -> None:
        self.lines.append(f"stops: {reason}")


class Acting(paceline.Callback):
    """Does something after one step, on some ranks only."""

    def __init__(self, action: str, at: int, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
        self._action, self._at, self._ranks = action, at, ranks

    def step_end(self, run: paceline.Run, step: paceline.Step) -> None:
        if step.index != self._at or run.world.rank not in self._ranks:
            return
        if self._action == "save":
            run.save()
        elif self._action == "stop":
            run.stop("it is late")
        elif self._action == "finish":
            run.finish("it is good enough")


def train(
    config: paceline.RunConfig, action: str = "", at: int = -1, ranks: tuple = (0, 1, 2)
) -> list:
    diary = Diary()
    try:
        with paceline.Run(config, callbacks=[diary, Acting(action, at, tuple(ranks))]) as run:
            [*_, (model, optimizer, _)] = updated(run, DATA)
    except Stopped as stopped:
        return [stopped.step, stopped.code, *diary.lines]
    return [state_digest(model, optimizer), *diary.lines]


STEPS = [f"step {step} {what}" for step in range(6) for what in ("starts", "ends")]


def test_every_rank_calls_all_of_them_in_one_order(tmp_path: Path) -> None:
    assert in_worlds(train, tmp_path, SHORT)[1:] == [
        "run starts with 0 lines",
        "epoch 0 starts", *STEPS[:6], "epoch 0 ends", "mean is 9.5",
        "epoch 1 starts", *STEPS[6:], "epoch 1 ends", "mean is 9.5",
        "saves 6", "run ends",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("action", "saves"), [("save", ["saves 3", "saves 6"]), ("finish", ["saves 2"])]
)
def test_a_save_or_the_end_that_a_callback_requests_is_that_of_all_ranks(action, saves, tmp_path):
    """A save on request of one rank comes after the next step; the end, on request of all, after this one."""
    given = {"action": action, "at": 1, "ranks": (1,) if action == "save" else (0, 1)}
    found = in_worlds(train, tmp_path, SHORT, given, worlds=[2])
    assert [line for line in found[1:] if "saves" in line] == saves
    assert found[-1] == "run ends"


def test_a_stop_that_one_rank_requests_is_saved_and_resumed_with_its_state(tmp_path: Path) -> None:
    [whole] = run_on_processes(train, 1, tmp_path, SHORT | {"runs": str(tmp_path / "whole")})
    settings = SHORT | {"runs": str(tmp_path / "stopped")}
    given = {"action": "stop", "at": 2, "ranks": (1,)}
    answers = run_on_processes(train, 2, tmp_path, settings, given)
    reasons = ["another rank was asked to stop", "it is late"]
    for answer, reason in zip(answers, reasons, strict=True):
        assert answer[:2] == [4, 75]
        assert answer[-2:] == ["saves 4", f"stops: {reason}"]
    assert events(tmp_path / "stopped", "RunStopped")[0]["step"] == 4
    [resumed] = run_on_processes(train, 1, tmp_path, settings)
    assert resumed[0] == whole[0]
    before, after = answers[0][2:-1], ["run starts with 14 lines", *STEPS[8:]]
    assert resumed[1:] == [*before, *after, "epoch 1 ends", "mean is 9.5", "saves 6", "run ends"]


class FailingAfterEvaluation(paceline.Callback):
    def evaluation_end(self, run: paceline.Run, metrics: Mapping[str, float]) -> None:
        raise ValueError("no such metric")


def test_no_update_follows_an_exception_that_the_loop_has_caught(tmp_path: Path) -> None:
    def train_on() -> None:
        with paceline.Run(config_in(tmp_path), callbacks=[FailingAfterEvaluation()]) as run:
            model, optimizer = line(run)
            for step in run.steps(DATA):
                with pytest.raises(ValueError, match="no such metric"):
                    run.evaluate(DATA, lambda batch: {"mean": batch[0]})
                run.update(optimizer, lambda batch: model(batch[0]).mean(), step)

    with pytest.raises(TrainingError, match="ValueError: no such metric"):
        train_on()


SCRIPT = """
import torch, paceline

class Failing(paceline.Callback):
    def step_end(self, run, step):
        if step.index == 2 and run.world.rank == 1:
            raise ZeroDivisionError("in a callback")

def main(config):
    with paceline.Run(config, callbacks=[Failing()]) as run:
        model = run.model(torch.nn.Linear(1, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
        for step in run.steps((torch.ones(40, 1),)):
            run.update(optimizer, lambda batch: model(batch[0]).square().mean(), step)

main(paceline.config_from_argv())
"""


def test_an_exception_in_a_callback_is_the_failure_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("train.py", "batch.global_size=8", "batch.lanes=4", "name=train")
    done = run_paceline("run", "-n", "2", "--max-restarts", "0", *words, folder=tmp_path)
    assert done.code == 1, done
    assert not events(tmp_path / "runs", "CheckpointSaved", "train")
    page = (tmp_path / "runs" / "train" / "failure.md").read_text()
    assert "ZeroDivisionError" in page
    assert "rank 1" in page


class FromLightning(paceline.Callback):
    def on_epoch_end(self, trainer: object, module: object) -> None:
        """Nothing would call this."""


def test_misuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)FromLightning.on_epoch_end.* epoch_end"):
        paceline.Run(config_in(tmp_path), callbacks=[FromLightning()])
    with pytest.raises(ConfigError, match="class Diary"):
        paceline.Run(config_in(tmp_path), callbacks=[Diary])  # type: ignore[list-item]
    with paceline.Run(config_in(tmp_path)) as run, pytest.raises(ConfigError, match="loop"):
        run.stop("too early")


def test_the_moments_are_the_methods_of_the_base_class() -> None:
    assert set(MOMENTS) == {name for name in vars(Callback) if not name.startswith("_")}
