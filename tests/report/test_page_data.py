"""Are the facts of a report those of the run: what survived, thinned, without secrets, whatever the files hold?"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.events import CheckpointFailed, EventLog, RunFailed, StepDone, as_json, surviving
from paceline.plot.downsample import downsample
from paceline.report.find_run import NamedRun
from paceline.report.page.document import render_page
from paceline.report.page.event_columns import read_event_columns
from paceline.report.page.page_data import report_data
from paceline.rundir import RunDir
from support import report_trainings as trainings
from support import run_folders as runs

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
WORDS = ("name=x", "checkpoint.keep=7", "log.every_steps=10")


def facts(*folders: RunDir) -> list[dict]:
    return report_data([NamedRun(folder, ()) for folder in folders])["runs"]


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> RunDir:
    folder = trainings.make_training(tmp_path_factory.mktemp("facts") / "runs" / "one", *WORDS)
    trainings.measure(folder)
    trainings.note_rank_times(folder, 8, slow=5)
    return folder


def test_steps_that_were_lost_and_done_again_count_once(training: RunDir) -> None:
    columns = read_event_columns(training.events)
    kept = [event for event in surviving(training.events) if event["event"] == "StepDone"]
    assert (
        list(columns.steps["step"])
        == [event["step"] for event in kept]
        == list(range(10, 6001, 10))
    )
    assert list(columns.steps["loss"]) == [event["loss"] for event in kept]
    run = facts(training)[0]
    starts = [
        (start["from_step"], start["step"], start["lost_steps"], start["ending"])
        for start in run["starts"]
    ]
    assert starts == [
        (0, 2300, 300, "failed"),
        (2000, 4000, 0, "stopped"),
        (4000, 6000, 0, "ended"),
    ]
    assert (run["phase"], run["restarts"], run["lost_steps"], run["step"]) == (
        "ended",
        2,
        300,
        6000,
    )
    assert run["slowest"]["beat"]["rank"] == 5
    assert [event["kind"] for event in run["slow_ranks"]] == ["chronic"]
    assert run["troubles"] == []
    assert run["metric_curves"]["acc"]["steps"] == list(
        range(250, 6001, 250)
    )  # within epochs and at their ends
    assert run["metrics_step"] == 6000
    parts = run["breakdown"]
    assert parts["step_s"] == pytest.approx(
        parts["data_s"] + parts["own_s"] + parts["rest_s"], rel=1e-4
    )


def test_every_key_is_documented(training: RunDir) -> None:
    found = report_data([NamedRun(training, ())])
    run = found["runs"][0]
    inner = [
        run["curves"]["loss"],
        run["step_time"],
        run["breakdown"],
        run["ranks"][0],
        run["slowest"],
        run["starts"][0],
        run["clock"],
        run["goodput"],
        run["restarts_because"][0],
    ]
    inner += [
        run["checkpoints"][0],
        run["rank_times"],
        run["slow_ranks"][0],
    ]
    keys = {*found, *run, *run["curves"], *(key for part in inner for key in part)}
    assert {key for key in keys if f"`{key}`" not in DOCUMENT} == set()
    json.dumps(found, allow_nan=False)


def test_secrets_are_removed(tmp_path: Path) -> None:
    folder = runs.make_run(
        tmp_path / "runs" / "run", runs.started(), CheckpointFailed(3, "cannot write s3://me:hush@bucket/x, token=hush"),
        RunFailed(3, 0, "OSError: https://user:hush@host/path"),
    )  # fmt: skip
    folder.config.write_text(
        'name = "x"\napi_key = "hush"\nfrom = "sftp://me:hush@host/x"\n[hub]\nToken = "hush"\n'
    )
    folder.environment.write_text(
        json.dumps(
            {"variables": {"AWS_SECRET_ACCESS_KEY": "hush", "OMP_NUM_THREADS": "hushed-not"}}
        )
    )
    found = report_data([NamedRun(folder, ())])
    assert not re.search(r"hush\b(?!ed)", json.dumps(found))
    assert not re.search(rb"hush\b(?!ed)", render_page(found))
    assert found["runs"][0]["config"] == {
        "name": "x",
        "api_key": "[removed]",
        "from": "[removed]",
        "hub.Token": "[removed]",
    }
    assert found["runs"][0]["environment"]["OMP_NUM_THREADS"] == "hushed-not"


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_half_written_last_line_is_survived(tmp_path: Path, cut: int) -> None:
    folder = runs.make_run(tmp_path / "runs" / "run", runs.started(), *runs.trained(1, 101))
    with folder.events.open("a") as file:
        file.write(as_json(StepDone(111, 1, 1, 0.5, 0.1, 1.0))[:-cut])
    assert facts(folder)[0]["curves"]["loss"]["steps"][-1] == 101


def test_whatever_the_files_hold_there_is_a_page(tmp_path: Path) -> None:
    empty = RunDir(tmp_path / "empty")
    empty.jobs.mkdir(parents=True)
    broken = runs.make_run(tmp_path / "broken", runs.started(), *(StepDone(n, 1, 1, loss, 0.1, 0.0) for n, loss in enumerate([math.nan, math.inf, 1e308, -1e308, 0.0])))  # fmt: skip
    with broken.events.open("a") as file:
        file.write(
            '{"event": "EpochDone", "step": "x", "metrics": 3}\n[1]\n"x"\n{"event": "Odd", "step": 1e999}\n'
            + "[" * 100_000
            + "\n"
        )
        file.write(
            '{"event": "EpochDone", "step": 4, "loss": 1, "samples_per_s": 1, "metrics": {"acc": "high", "f1": %s}}\n'
            % ("9" * 400)
        )
        file.write("\xff\xfe\n")
    broken.scaling.write_text(
        '{"studies": {"strong": {"sizes": [3, {"ranks": "x"}, {"ranks": 2, "speedup": "fast"}]}}}'
    )
    broken.verdict.parent.mkdir()
    broken.verdict.write_text(
        '{"step_s": 1, "seconds": {"compute": NaN, "host_gaps": 0.5}, "causes": [7, {}], "sentences": [3], "per_rank": [1, 2]}'
    )
    broken.environment.write_text("{")
    broken.profile_step.write_text(
        '{"step_s": 1, "ranks": [{"forward": 3, "data": [[0, 1e999]]}, 4]}'
    )
    broken.failure.write_bytes(b"\xff")
    (broken.root / "ranks").mkdir()
    broken.beat(0).write_text('{"rank": 0}')
    broken.rank_times.write_text(
        '[\n{"step": 3, "own_s": [1e999, 1]}\n{"step": 4, "own_s": [1, null]}\n{"step": "x"}\n'
    )
    for folder in (empty, broken):
        assert render_page(report_data([NamedRun(folder, ())])).startswith(b"<!doctype html>")
    found = facts(broken)[0]
    assert found["curves"]["loss"]["not_finite"] == 4
    assert (found["scaling"], found["profile"]["seconds"]) == (None, {"host_gaps": 0.5})
    assert found["rank_times"] == {"steps": [4], "ranks": [0, 1], "own_s": [[1.0], [None]]}


@settings(max_examples=50)
@given(
    st.lists(st.integers(-9, 9) | st.just(math.nan), min_size=1, max_size=90), st.integers(1, 20)
)
def test_thinning_keeps_the_extremes_and_the_width(values: list[float], columns: int) -> None:
    curve = downsample(range(len(values)), values, columns)
    good = [value for value in values if math.isfinite(value)]
    assert len(curve.steps) <= columns
    assert curve.steps == sorted(set(curve.steps))
    assert curve.not_finite == len(values) - len(good)
    assert min((low for low in curve.low if low is not None), default=None) == (
        pytest.approx(min(good), rel=1e-5) if good else None
    )
    assert max((high for high in curve.high if high is not None), default=None) == (
        pytest.approx(max(good), rel=1e-5) if good else None
    )


def test_a_long_history_of_several_runs_with_many_metrics_makes_a_small_page(
    tmp_path: Path,
) -> None:
    folders = [
        runs.make_run(tmp_path / f"run{number}", runs.started(ranks=1100)) for number in range(3)
    ]
    with folders[0].events.open("a") as file:
        line = as_json(StepDone(123456789, 1, 1, 0.625, 0.1, 640.0)) + "\n"
        file.writelines(
            line.replace("123456789", str(step)).replace("0.625", f"{1 + step % 977 / 977}")
            for step in range(30_000)
        )
    for number, folder in enumerate(folders):
        more = trainings.make_training(
            tmp_path / f"more{number}", metrics=tuple(f"metric {n}" for n in range(100))
        )
        folders[number] = folder if number == 0 else more
    for rank in range(1100):
        runs.put_beat(folders[0], rank)
    found = report_data([NamedRun(folder, ()) for folder in folders])
    assert len(render_page(found)) < 2_000_000
    assert len(found["runs"][0]["curves"]["loss"]["steps"]) <= 400
    assert max(found["runs"][0]["curves"]["loss"]["high"]) > 1.998


def test_a_learning_rate_that_never_changes_is_a_number(tmp_path: Path) -> None:
    one = runs.make_run(tmp_path / "one", runs.started(), *runs.trained(1, 101))
    page = render_page(report_data([NamedRun(one, ())])).decode()
    assert "<dd>0.1 (constant)</dd>" in page
    assert "<h3>Learning rate</h3>" not in page
    other = trainings.make_training(tmp_path / "other")
    both = render_page(report_data([NamedRun(one, ()), NamedRun(other, ())])).decode()
    assert "<h3>Learning rate</h3>" in both


def test_a_run_that_says_nothing_new_is_not_changed_by_reading(training: RunDir) -> None:
    before = {path: path.stat().st_mtime_ns for path in training.root.rglob("*")}
    render_page(report_data([NamedRun(training, ())]))
    with EventLog(training.events):
        pass
    assert {path: path.stat().st_mtime_ns for path in training.root.rglob("*")} == before
