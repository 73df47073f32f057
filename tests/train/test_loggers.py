"""Do figures also reach tables and TensorBoard, each step once, and does a logger that fails stop nothing?"""

from __future__ import annotations

import csv
import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.config import RunConfig, config_from_words
from paceline.errors import ConfigError
from paceline.events import EpochDone, RunStarted, StepDone
from paceline.rundir import RunDir
from paceline.train.observers import loggers
from paceline.train.observers.environment import environment_facts
from paceline.train.observers.sinks.bookmark import Bookmark
from paceline.train.observers.sinks.csvfile import CsvSink
from paceline.world.world import World
from support.loops import events_in, run_trainer, sgd


def train(folder: Path, *words: str, crash_at: int = 0) -> None:
    """Train to the end, or break off in the event of a step."""
    base = ["batch.global_size=8", "log.every_steps=2", "checkpoint.every=4steps", "lr.base=1e-3"]
    config = config_from_words(RunConfig, [*base, f"runs={folder}", *words])
    torch.manual_seed(0)
    data = torch.randn(40, 4), torch.randn(40, 1)

    def strike(event: object) -> None:
        if isinstance(event, StepDone) and event.step == crash_at:
            raise KeyboardInterrupt

    run_trainer(
        World(), config, nn.Linear(4, 1), data, optimizer=sgd(1e-3), sinks=[strike], evaluation=data
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def scalars_of(folder: Path) -> dict[str, list[int]]:
    """Return the steps of every scalar, as TensorBoard itself shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder))
    shown.Reload()
    return {name: [point.step for point in shown.Scalars(name)] for name in shown.Tags()["scalars"]}


def test_a_run_that_is_resumed_has_every_step_once_in_tables_and_tensorboard(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(loggers, "_CLOSE_TIMEOUT_S", 90)  # tensorboard imports much
    words = "log.to=csv,tensorboard", "epochs=2"
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, *words, crash_at=10)  # saved after 4 and 8
    with (tmp_path / "run" / "csv" / "steps.csv").open("a") as file:
        file.write("10,2,80,0.1")  # cut off within a row
    train(tmp_path, *words)
    tables = tmp_path / "run" / "csv"
    steps, epochs = (rows_of(tables / f"{name}.csv") for name in ("steps", "epochs"))
    assert [int(row["step"]) for row in steps] == [2, 4, 6, 8, 10]
    assert [int(row["step"]) for row in epochs if float(row["eval_loss"]) > 0] == [5, 10]
    losses = {event["step"]: event["loss"] for event in events_in(tmp_path, "StepDone")}
    assert {int(row["step"]): float(row["loss"]) for row in steps} == losses
    shown = scalars_of(tmp_path / "run" / "tensorboard")
    assert shown["train/loss"] == shown["train/lr"] == [2, 4, 6, 8, 10]
    assert shown["eval/loss"] == shown["epoch/loss"] == [5, 10]
    for path in (tmp_path / "run").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert "logger" not in capsys.readouterr().err

    train(tmp_path, *words, "resume=never")
    assert [int(row["step"]) for row in rows_of(tables / "steps.csv")] == [2, 4, 6, 8, 10]
    assert scalars_of(tmp_path / "run" / "tensorboard")["train/loss"] == [2, 4, 6, 8, 10]


def test_a_logger_that_fails_is_said_once_and_stops_nothing(tmp_path: Path, capsys) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "tensorboard").write_text("a file is in the way")
    train(tmp_path, "log.to=tensorboard,csv", "epochs=2")
    assert capsys.readouterr().err.count("the tensorboard logger failed") == 1
    assert len(rows_of(tmp_path / "run" / "csv" / "steps.csv")) == 5

    config = config_from_words(RunConfig, [f"runs={tmp_path}", "log.to=csv"])
    with loggers.Loggers(config, World(), RunDir(tmp_path / "run")) as told:
        for step in range(3):  # before any RunStarted: the table is not open
            told(StepDone(step, 1, 1, 0.1, 0.1, 1.0))
    assert capsys.readouterr().err.count("the csv logger failed") == 1


def test_a_logger_that_hangs_holds_nothing_up(tmp_path: Path, capsys, monkeypatch) -> None:
    let_go = threading.Event()

    class Hanging:
        def __call__(self, event: object) -> None:
            let_go.wait()

        def close(self, *, failed: bool) -> None: ...

    monkeypatch.setattr(loggers, "make_sink", lambda *_: Hanging())
    monkeypatch.setattr(loggers, "_CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(loggers, "_MAX_QUEUED", 2)
    config = config_from_words(RunConfig, [f"runs={tmp_path}", "log.to=csv"])
    with loggers.Loggers(config, World(), RunDir(tmp_path)) as hanging:
        for step in range(9):
            hanging(StepDone(step, 1, 1, 0.1, 0.1, 1.0))
    said = capsys.readouterr().err
    assert said.count("cannot keep up") == said.count("did not close within") == 1
    let_go.set()
    hanging._queue.put(None, timeout=90)
    hanging._thread.join(90)


def test_a_missing_package_or_an_unknown_logger_is_refused_with_its_fix(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="pip install wandb"):
        train(tmp_path, "log.to=csv,wandb")
    (tmp_path / "mlflow").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="pip install mlflow-skinny"):  # a folder is no package
        train(tmp_path, "log.to=mlflow")
    with pytest.raises(ConfigError, match="did you mean tensorboard"):
        train(tmp_path, "log.to=tensorbord")
    assert "mlflow" not in sys.modules
    assert not (tmp_path / "run").exists()


def test_a_metric_that_comes_later_gets_a_column(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "csv")
    sink(RunStarted(1, "cpu", "alone", 8, 8, 4, 0.1, 9, "", 0))
    sink(EpochDone(1, 2, 5, 0.5, 9.0, {"acc": 0.1}))
    sink(EpochDone(2, 2, 10, 0.5, 9.0, {"acc": 0.2, 'a,"b': 0.3}))
    sink.close(failed=False)
    rows = rows_of(tmp_path / "csv" / "epochs.csv")
    assert [(row["acc"], row['a,"b']) for row in rows] == [("0.1", ""), ("0.2", "0.3")]


def test_a_bookmark_remembers_what_was_told_and_survives_damage(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.json"
    first = Bookmark(path)
    assert first.begin(lambda: "a" * 32, is_new=False) == "a" * 32
    assert [first.passes("step", step) for step in (2, 4, 4, 3)] == [True, True, False, False]
    again = Bookmark(path)
    assert again.begin(lambda: "b", is_new=False) == "a" * 32
    passed = [again.passes(*what) for what in (("step", 4), ("epoch", 4), ("step", 6))]
    assert passed == [False, True, True]
    anew = Bookmark(path)
    assert anew.begin(lambda: "c", is_new=True) == "c"
    assert anew.passes("step", 1)
    path.write_text('{"name": "x", "st')
    damaged = Bookmark(path)
    assert damaged.begin(lambda: "d", is_new=False) == "d"
    for mark in (first, again, anew, damaged):
        mark.close()
    assert path.stat().st_mode & 0o077 == 0


def test_what_a_run_was_started_on_is_kept_without_secrets(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NCCL_TOKEN", "hush")
    monkeypatch.setenv("TORCH_HUB", "https://me:hush@host/x")
    monkeypatch.setenv("OMP_SHOWN", "yes")
    text = environment_facts("cpu")
    assert "hush" not in text
    found = json.loads(text)
    assert found["versions"]["torch"] == torch.__version__
    assert found["variables"]["OMP_SHOWN"] == "yes"
    assert found["variables"]["NCCL_TOKEN"] == found["variables"]["TORCH_HUB"] == "[removed]"
