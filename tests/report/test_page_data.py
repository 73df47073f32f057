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
    assert list(columns.steps["step"]) == list(range(10, 6001, 10))
    for name in ("step", "loss", "lr", "samples"):
        assert list(columns.steps[name]) == [event[name] for event in kept]
    run = facts(training)[0]
    names = ("from_step", "step", "lost_steps", "ending")
    assert [tuple(start[name] for name in names) for start in run["starts"]] == [
        (0, 2300, 300, "failed"), (2000, 4000, 0, "stopped"), (4000, 6000, 0, "ended"),
    ]  # fmt: skip
    whole = [run[name] for name in ("phase", "restarts", "lost_steps", "step")]
    assert whole == ["ended", 2, 300, 6000]
    assert run["slowest"]["beat"]["rank"] == 5
    assert [event["kind"] for event in run["slow_ranks"]] == ["chronic"]
    assert run["troubles"] == []
    # Within epochs and at their ends.
    assert run["metric_curves"]["acc"]["steps"] == list(range(250, 6001, 250))
    assert [point["step"] for point in run["checkpoints"]] == list(range(500, 6001, 500))
    assert run["metrics_step"] == 6000
    parts = run["breakdown"]
    whole_s = parts["data_s"] + parts["own_s"] + parts["rest_s"]
    assert parts["step_s"] == pytest.approx(whole_s, rel=1e-4)


def test_every_key_is_documented(training: RunDir) -> None:
    found = report_data([NamedRun(training, ())])
    run = found["runs"][0]
    inner = [run[name] for name in ("step_time", "breakdown", "slowest", "clock", "goodput", "rank_times")]  # fmt: skip
    inner += [run[name][0] for name in ("ranks", "starts", "restarts_because", "checkpoints", "slow_ranks")]  # fmt: skip
    inner.append(run["curves"]["loss"])
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
    variables = {"AWS_SECRET_ACCESS_KEY": "hush", "OMP_NUM_THREADS": "hushed-not"}
    folder.environment.write_text(json.dumps({"variables": variables}))
    found = report_data([NamedRun(folder, ())])
    assert not re.search(r"hush\b(?!ed)", json.dumps(found))
    assert not re.search(rb"hush\b(?!ed)", render_page(found))
    removed = dict.fromkeys(("api_key", "from", "hub.Token"), "[removed]")
    assert found["runs"][0]["config"] == {"name": "x"} | removed
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
    losses = enumerate([math.nan, math.inf, 1e308, -1e308, 0.0])
    steps = [StepDone(n, 1, 1, loss, 0.1, 0.0) for n, loss in losses]
    broken = runs.make_run(tmp_path / "broken", runs.started(), *steps)
    with broken.events.open("a") as file:
        file.write('{"event": "EpochDone", "step": "x", "metrics": 3}\n[1]\n"x"\n')
        file.write('{"event": "Odd", "step": 1e999}\n' + "[" * 100_000 + "\n")
        epoch = {"event": "EpochDone", "step": 4, "loss": 1, "samples_per_s": 1}
        file.write(json.dumps(epoch | {"metrics": {"acc": "high", "f1": 10**400}}) + "\n\xff\xfe\n")
    sizes = [3, {"ranks": "x"}, {"ranks": 2, "speedup": "fast"}]
    broken.scaling.write_text(json.dumps({"studies": {"strong": {"sizes": sizes}}}))
    broken.verdict.parent.mkdir()
    verdict = {"step_s": 1, "causes": [7, {}], "sentences": [3], "per_rank": [1, 2]}
    seconds = {"compute": math.nan, "host_gaps": 0.5}
    broken.verdict.write_text(json.dumps(verdict | {"seconds": seconds}))
    broken.environment.write_text("{")
    ranks = [{"forward": 3, "data": [[0, math.inf]]}, 4]
    broken.profile_step.write_text(json.dumps({"step_s": 1, "ranks": ranks}))
    broken.failure.write_bytes(b"\xff")
    (broken.root / "ranks").mkdir()
    broken.beat(0).write_text('{"rank": 0}')
    times = '[\n{"step": 3, "own_s": [1e999, 1]}\n{"step": 4, "own_s": [1, null]}\n{"step": "x"}\n'
    broken.rank_times.write_text(times)
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
    low = min((low for low in curve.low if low is not None), default=None)
    high = max((high for high in curve.high if high is not None), default=None)
    ends = pytest.approx([min(good), max(good)], rel=1e-5) if good else [None, None]
    assert [low, high] == ends


def test_a_long_history_of_several_runs_with_many_metrics_makes_a_small_page(
    tmp_path: Path,
) -> None:
    first = runs.make_run(tmp_path / "run", runs.started(ranks=1100))
    with first.events.open("a") as file:
        line = as_json(StepDone(123456789, 1, 1, 0.625, 0.1, 640.0)) + "\n"
        file.writelines(
            line.replace("123456789", str(step)).replace("0.625", f"{1 + step % 977 / 977}")
            for step in range(30_000)
        )
    for rank in range(1100):
        runs.put_beat(first, rank)
    metrics = tuple(f"metric {n}" for n in range(100))
    more = [trainings.make_training(tmp_path / f"more{n}", metrics=metrics) for n in range(2)]
    folders = [first, *more]
    found = report_data([NamedRun(folder, ()) for folder in folders])
    assert len(render_page(found)) < 2_000_000
    assert len(found["runs"][0]["curves"]["loss"]["steps"]) <= 400
    assert max(found["runs"][0]["curves"]["loss"]["high"]) > 1.998


def test_a_learning_rate_that_never_changes_is_a_number(tmp_path: Path) -> None:
    one = runs.make_run(tmp_path / "one", runs.started(), *runs.trained(1, 101))
    page = render_page(report_data([NamedRun(one, ())])).decode()
    assert "0.1 (constant)" in page
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
