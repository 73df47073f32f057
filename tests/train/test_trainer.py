"""What a run leaves: lines for a person, events for a program, files only their owner can read."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.config import RunConfig, config_from_words
from paceline.errors import ConfigError, EnvironmentUnfit, TrainingError
from paceline.report.find_run import find_run
from paceline.report.state import RunWatcher
from paceline.world.world import World
from support.loops import events_in, run_trainer, sgd
from support.processes import run_on_processes


def train(config, loss=nn.functional.mse_loss, sinks=(), world=World()):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    data = torch.randn(40, 4), torch.randn(40, 1)
    rule = sgd(paceline.scaled_lr(config))
    given = {"loss": loss, "optimizer": rule, "evaluation": data, "sinks": sinks}
    run_trainer(world, config, model, data, **given)
    return model


def settings(tmp_path: Path, *words: str) -> RunConfig:
    base = ["batch.global_size=16", "epochs=3", "log.every_steps=2", "lr.base=0.1"]
    return config_from_words(RunConfig, [*base, f"runs={tmp_path}", *words])


def test_a_run_says_its_derived_numbers_once_and_a_line_per_epoch(tmp_path, capsys) -> None:
    words = "lr.rule=linear lr.reference_batch=4 lr.warmup_samples=2000 batch.global_size=256"
    train(settings(tmp_path, *words.split(), "log.progress=bar"))
    said = capsys.readouterr().out
    for text in (
        "batch 40 = 4 lanes x 10; 1 rank",
        "batch.global_size=256",
        "warm-up 2,000 samples",
    ):
        assert said.count(text) == 1, text  # the dataset is smaller than a batch
    lines = r"epoch (\d)/3  loss \d\.\d{4}  eval_loss \d\.\d{4}  [\d,]+ samples/s"
    assert re.findall(lines, said) == ["1", "2", "3"]
    assert " epoch 1/3  step 0/3  " in said, "the bar"
    assert events_in(tmp_path)[0]["global_batch"] == 40


def test_every_event_is_kept_in_order_in_private_files_and_the_config_starts_the_run_again(
    tmp_path,
) -> None:
    seen: list[str] = []
    config = settings(tmp_path, "seed=7")
    train(config, sinks=[lambda event: seen.append(type(event).__name__)])
    found = events_in(tmp_path)
    assert [event["event"] for event in found] == seen == [
        "RunStarted", "StepDone", "EpochDone", "StepDone", "StepDone", "EpochDone", "StepDone", "EpochDone", "CheckpointSaved", "RunEnded",
    ]  # fmt: skip
    assert [event["step"] for event in found if event["event"] == "EpochDone"] == [3, 6, 9]
    assert (found[-1]["step"], len(found[-1]["digest"])) == (9, 64)
    for path in (tmp_path / "run").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    saved = tmp_path / "run" / "config.toml"
    assert config_from_words(RunConfig, ["--config", str(saved)]) == config


def test_a_checkpoint_is_plain_safetensors_under_a_manifest(tmp_path) -> None:
    import xxhash
    from safetensors.torch import load_file

    model = train(settings(tmp_path, "checkpoint.every=2epochs"))
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step-000000006", "step-000000009"]
    file = folders[-1] / "part-00001-of-00001.safetensors"
    assert torch.equal(load_file(file)["model.weight"], model.weight)
    said = json.loads((folders[-1] / "manifest.json").read_text())["files"][file.name]
    assert said == {
        "size_bytes": file.stat().st_size,
        "xxh3": xxhash.xxh3_64_hexdigest(file.read_bytes()),
    }


def test_a_run_that_fails_says_why_and_a_complete_one_stays_as_it_was_if_fewer_epochs_are_asked_for(
    tmp_path, capsys
) -> None:
    with pytest.raises(TrainingError, match="nan at step 1"):
        train(settings(tmp_path), loss=lambda outputs, targets: outputs.mean() * float("nan"))
    [failed] = events_in(tmp_path, "RunFailed")
    assert "nan" in failed["reason"]
    page = tmp_path / "run" / "failure.md"
    page.write_text("# run failed\n")
    train(settings(tmp_path))
    assert not page.exists()
    config = (tmp_path / "run" / "config.toml").read_text()
    train(settings(tmp_path, "epochs=1"))
    assert "this run is complete" in capsys.readouterr().out
    assert (tmp_path / "run" / "config.toml").read_text() == config
    state = RunWatcher(find_run(str(tmp_path / "run"), tmp_path)).look()
    assert (state.phase, state.step, state.total_steps) == ("ended", 9, 9)


def test_a_folder_that_cannot_be_written_is_an_unfit_environment(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentUnfit, match="runs=FOLDER"):
        train(settings(tmp_path / "file"))


def loss_and_lines(config, world) -> tuple[list[float], str]:
    losses: list[float] = []
    with contextlib.redirect_stdout(io.StringIO()) as said:
        note = lambda event: losses.append(event.loss) if hasattr(event, "loss") else None  # noqa: E731
        train(config, sinks=[note], world=world)
    return losses, said.getvalue()


@pytest.mark.parametrize("exact", [True, False])
def test_the_loss_that_is_shown_is_the_mean_over_all_ranks(exact, tmp_path) -> None:
    given = {"batch.global_size": 16, "epochs": 2, "log.every_steps": 2, "exact": exact}
    given |= {"log.ranks": "all", "log.to": "csv"}
    alone = run_on_processes(loss_and_lines, 1, tmp_path, given)[0][0]
    (main, main_said), (_, other_said) = run_on_processes(loss_and_lines, 2, tmp_path, given)
    assert main == alone if exact else main == pytest.approx(alone, rel=1e-5)
    assert "rank 0  device cpu  epoch 2  micro-batch 2  steps 3" in main_said
    lines = [f"rank 1  device cpu  epoch {epoch}  micro-batch 2  steps 3" for epoch in (1, 2)]
    assert other_said.splitlines() == lines
    for table in tmp_path.rglob("csv/steps.csv"):  # rank 0 alone writes it
        column = [line.partition(",")[0] for line in table.read_text().splitlines()]
        assert column == ["step", "2", "4", "6"]


def test_it_is_evaluated_within_epochs_where_that_is_asked_for(tmp_path, capsys) -> None:
    train(settings(tmp_path, "evaluate_steps=2"))
    found = events_in(tmp_path, "Evaluated")
    assert [event["step"] for event in found if "eval_loss" in event["metrics"]] == [2, 4, 8]
    assert re.findall(r"step (\d)  eval_loss \d\.\d{4}", capsys.readouterr().out) == ["2", "4", "8"]


def test_evaluating_without_a_set_is_refused_in_the_first_step(tmp_path) -> None:
    data, model, calls = (torch.randn(40, 4), torch.randn(40, 1)), nn.Linear(4, 1), []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ConfigError, match=r"(?s)evaluate_steps=9.*evaluate_steps=0"):
        run_trainer(World(), settings(tmp_path, "evaluate_steps=9"), model, data)
    assert len(calls) == 4, "one step of four lanes"


@pytest.mark.parametrize(
    "metric", [lambda outputs, target: (1.0, 2.0, 3.0), lambda outputs, target: outputs.no]
)
def test_a_metric_that_fails_does_so_before_the_first_step(metric, tmp_path):
    """Otherwise it would fail after the first epoch, with all its steps lost."""
    seen = []
    data = torch.randn(40, 4), torch.randn(40, 1)
    given = {"evaluation": data, "metrics": {"m": metric}, "sinks": [seen.append]}
    with pytest.raises((TrainingError, ConfigError, AttributeError)):
        run_trainer(World(), settings(tmp_path), nn.Linear(4, 1), data, **given)
    assert seen == []
