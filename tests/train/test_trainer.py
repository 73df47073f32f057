"""What a run leaves: lines for a person, events for a program, files only their owner can read."""

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
from support.loops import run_trainer, sgd
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
    base = [
        "batch.global_size=16",
        "epochs=3",
        f"runs={tmp_path}",
        "log.every_steps=2",
        "lr.base=0.1",
    ]
    return config_from_words(RunConfig, [*base, *words])


def events_of(tmp_path: Path) -> list[dict]:
    return [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]


def test_a_run_says_its_derived_numbers_once_and_a_line_per_epoch(tmp_path, capsys) -> None:
    train(settings(tmp_path, "lr.rule=linear", "lr.reference_batch=4", "lr.warmup_samples=2000"))
    said = capsys.readouterr().out
    assert (
        "global batch 16 = 4 lanes x 4; 1 rank; lr 0.4000 = 0.1000 x 4 (linear), warm-up 2,000 samples"
        in said
    )
    assert re.findall(
        r"epoch (\d)/3  loss \d\.\d{4}  eval_loss \d\.\d{4}  [\d,]+ samples/s", said
    ) == ["1", "2", "3"]
    assert said.count("global batch") == 1


def test_a_dataset_smaller_than_a_batch_is_said_with_its_own_size(tmp_path, capsys) -> None:
    train(settings(tmp_path, "batch.global_size=256", "epochs=1"))
    said = capsys.readouterr().out
    assert "global batch 40 = 4 lanes x 10; 1 rank; batch.global_size=256" in said
    assert events_of(tmp_path)[0]["global_batch"] == 40


def test_every_event_is_kept_in_order(tmp_path) -> None:
    train(settings(tmp_path))
    found = events_of(tmp_path)
    assert [event["event"] for event in found] == [
        "RunStarted", "StepDone", "EpochDone", "StepDone", "StepDone", "EpochDone", "StepDone", "EpochDone", "CheckpointSaved", "RunEnded",
    ]  # fmt: skip
    assert [event["step"] for event in found if event["event"] == "EpochDone"] == [3, 6, 9]
    assert found[-1]["step"] == 9
    assert len(found[-1]["digest"]) == 64


def test_files_and_folders_are_private_and_the_config_starts_the_run_again(tmp_path) -> None:
    config = settings(tmp_path, "seed=7")
    train(config)
    for path in (tmp_path / "run").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert (
        config_from_words(RunConfig, ["--config", str(tmp_path / "run" / "config.toml")]) == config
    )


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


def test_a_run_that_breaks_off_leaves_a_word(tmp_path) -> None:
    with pytest.raises(TrainingError, match="the loss is nan at step 1"):
        train(settings(tmp_path), loss=lambda outputs, targets: outputs.mean() * float("nan"))
    assert events_of(tmp_path)[-1]["event"] == "RunFailed"
    assert "the loss is nan" in events_of(tmp_path)[-1]["reason"]


def test_a_complete_run_stays_as_it_was_if_fewer_epochs_are_asked_for(tmp_path, capsys) -> None:
    with pytest.raises(TrainingError):
        train(settings(tmp_path), loss=lambda outputs, targets: outputs.mean() * float("nan"))
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


def test_sinks_get_the_events_too(tmp_path) -> None:
    seen: list[str] = []
    train(settings(tmp_path), sinks=[lambda event: seen.append(type(event).__name__)])
    assert seen[0] == "RunStarted"
    assert seen[-1] == "RunEnded"


def loss_and_lines(config, world) -> tuple[list[float], str]:
    import contextlib
    import io

    losses: list[float] = []
    said = io.StringIO()

    def note(event):
        if hasattr(event, "loss"):
            losses.append(event.loss)

    with contextlib.redirect_stdout(said):
        torch.manual_seed(0)
        data = torch.randn(40, 4), torch.randn(40, 1)
        run_trainer(world, config, nn.Linear(4, 1), data, sinks=[note])
    return losses, said.getvalue()


@pytest.mark.parametrize("exact", [True, False])
def test_the_loss_that_is_shown_is_the_mean_over_all_ranks(exact, tmp_path) -> None:
    given = {
        "batch.global_size": 16,
        "epochs": 2,
        "log.every_steps": 2,
        "exact": exact,
        "log.ranks": "all",
    }
    given |= {"log.to": "csv"}
    alone = run_on_processes(loss_and_lines, 1, tmp_path, given)[0][0]
    (main, main_said), (_, other_said) = run_on_processes(loss_and_lines, 2, tmp_path, given)
    assert main == alone if exact else main == pytest.approx(alone, rel=1e-5)
    assert "rank 0  device cpu  epoch 2  micro-batch 2  steps 3" in main_said
    assert other_said.splitlines() == [
        f"rank 1  device cpu  epoch {epoch}  micro-batch 2  steps 3" for epoch in (1, 2)
    ]
    for table in tmp_path.rglob("csv/steps.csv"):  # rank 0 alone writes it
        assert [line.partition(",")[0] for line in table.read_text().splitlines()] == [
            "step",
            "2",
            "4",
            "6",
        ]


def test_a_progress_bar_is_drawn_where_it_is_asked_for(tmp_path, capsys) -> None:
    train(settings(tmp_path, "log.progress=bar"))
    assert " epoch 1/3  step 0/9  " in capsys.readouterr().out


def test_it_is_evaluated_within_epochs_where_that_is_asked_for(tmp_path, capsys) -> None:
    train(settings(tmp_path, "evaluate_steps=2"))
    found = events_of(tmp_path)
    assert [event["step"] for event in found if event["event"] == "Evaluated"] == [2, 4, 8]
    assert all("eval_loss" in event["metrics"] for event in found if event["event"] == "Evaluated")
    assert re.findall(r"step (\d)  eval_loss \d\.\d{4}", capsys.readouterr().out) == ["2", "4", "8"]


def test_evaluating_without_a_set_is_refused_in_the_first_step(tmp_path) -> None:
    data, model, calls = (torch.randn(40, 4), torch.randn(40, 1)), nn.Linear(4, 1), []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(
        ConfigError, match=r"evaluate_steps=9, but .* no evaluation .*\n.*set evaluate_steps=0"
    ):
        run_trainer(World(), settings(tmp_path, "evaluate_steps=9"), model, data)
    assert len(calls) == 4, "one step of four lanes"


METRICS = {
    "three values": lambda outputs, target: (1.0, 2.0, 3.0),
    "raises": lambda outputs, target: outputs.no,
}


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_that_fails_does_so_before_the_first_step(metric, tmp_path):
    """Otherwise it would fail after the first epoch, with all its steps lost."""
    seen = []
    data = torch.randn(40, 4), torch.randn(40, 1)
    given = {"evaluation": data, "metrics": {"m": METRICS[metric]}, "sinks": [seen.append]}
    with pytest.raises((TrainingError, ConfigError, AttributeError)):
        run_trainer(World(), settings(tmp_path), nn.Linear(4, 1), data, **given)
    assert seen == []
