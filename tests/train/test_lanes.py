"""The number of lanes that a run takes if nobody gives one, and keeps when it is continued."""

import shutil
import tomllib

import pytest
import torch

import paceline
from paceline.config import BatchConfig, RunConfig, config_from_words
from paceline.config.lanes import AUTO_LANES, AutoLanes, choose_lanes
from paceline.errors import ConfigError
from support.processes import run_on_processes


@pytest.mark.parametrize(
    ("facts", "lanes"),
    [
        ({}, 4),
        ({"on_cpu": False}, 1),
        ({"ranks": 3}, 4),
        ({"ranks": 3, "on_cpu": False}, 3),
        ({"ranks": 8}, 8),
        ({"ranks": 8, "saved": 4}, 4),
        ({"ranks": 2, "saved": 8, "on_cpu": False}, 8),
        ({"given": 2, "ranks": 8}, 2),
        ({"given": 2, "saved": 4}, 2),
        ({"global_size": 3}, 3),
        ({"ranks": 8, "global_size": 6}, 6),
        ({"on_cpu": False, "replicas": 4}, 4),
        ({"ranks": 6, "replicas": 4}, 8),
        ({"ranks": 6, "replicas": 4, "global_size": 7}, 4),
        ({"replicas": 3}, 6),
    ],
    ids=str,
)
def test_a_new_run_has_as_many_lanes_as_ranks_and_a_continued_one_keeps_its_number(facts, lanes):
    assert choose_lanes(**{"given": AUTO_LANES, "global_size": 64, **facts}) == lanes


def test_the_settings_tell_a_number_that_was_given_from_auto():
    for batch in (BatchConfig(3), BatchConfig(64, lanes="auto"), _read("batch.lanes=auto").batch):
        assert isinstance(batch.lanes, AutoLanes)
    for batch in (BatchConfig(64, lanes=4), _read("batch.lanes=4").batch):
        assert not isinstance(batch.lanes, AutoLanes)


def _read(*words: str) -> RunConfig:
    return config_from_words(RunConfig, words)


def train(config: RunConfig) -> tuple[int, str]:
    """Return the lanes of a run and its last line, or the error."""
    last = []
    try:
        with paceline.Run(config, sinks=[last.append]) as run:
            lanes = run.config.batch.lanes
            assert config.batch.lanes == lanes  # the script's own settings say the same
            model = run.model(torch.nn.Linear(4, 1))
            optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for step in run.steps((torch.arange(96.0).view(24, 4),)):
                run.update(optimizer, lambda batch: model(batch[0]).sin().mean(), step)
    except ConfigError as error:
        return 0, f"{error}"
    return lanes, getattr(last[-1], "digest", "") if last else ""


def test_a_run_that_began_on_six_ranks_continues_on_two_with_its_six_lanes(tmp_path):
    def lanes(ranks: int, steps: int, **settings: object) -> set[int]:
        own = {"runs": str(tmp_path), "name": "six", "batch.global_size": 12, "steps": steps}
        answers = run_on_processes(train, ranks, tmp_path, own | settings)
        texts.append(answers[0][1])
        return {answer[0] for answer in answers}

    texts: list[str] = []
    folder = tmp_path / "six"
    assert lanes(6, 2) == {6}
    assert tomllib.loads((folder / "config.toml").read_text())["batch"]["lanes"] == 6
    assert lanes(2, 3) == {6}
    (folder / "config.toml").unlink()  # the checkpoint says it, too
    assert lanes(1, 4) == {6}
    assert lanes(7, 5) == {0}
    assert "6 lanes" in texts[-1]
    assert "batch.lanes=7" in texts[-1]
    continued = folder.rename(tmp_path / "continued")
    assert lanes(6, 4) == {6}
    assert texts[-1] == texts[2]
    shutil.rmtree(folder)
    continued.rename(folder)
    assert lanes(2, 2, resume="never") == {4}


@pytest.mark.parametrize(("most", "lanes"), [("6", 6), ("2", 4), ("", 4)])
def test_a_start_that_may_grow_has_lanes_for_its_most_ranks(most, lanes, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_MOST_RANKS", most or "0")
    config = RunConfig(runs=str(tmp_path), name="most", batch=BatchConfig(12), steps=1)
    assert train(config)[0] == lanes
