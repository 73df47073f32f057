"""The drawings below a cell: which curves a run has, and where their points are."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.events import EpochDone, Evaluated, EventLog, RunEnded, RunStarted, StepDone
from paceline.notebook.curves import curves_of
from paceline.plot.line import Curve, Line
from paceline.plot.svg_file import Plot, to_svg


def write_run(folder: Path, losses: list[float]) -> Path:
    folder.mkdir()
    with EventLog(folder / "events.jsonl") as log:
        log(RunStarted(2, "cpu", "paceline", 9, 4, 2, 0.1, len(losses), "summary"))
        for step, loss in enumerate(losses, start=1):
            log(StepDone(step, 1, 4 * step, loss, 0.1, 9.0))
        log(Evaluated(2, {"eval_loss": 0.5, "acc": 0.25}))
        log(EpochDone(1, 1, len(losses), 1.0, 9.0, {"eval_loss": 0.25, "acc": 0.75}))
        log(RunEnded(len(losses), 1.0, "0" * 64))
    return folder


def heights(svg: str) -> list[float]:
    (points,) = re.findall(r'<polyline points="([^"]+)"', svg)
    return [float(point.partition(",")[2]) for point in points.split()]


def test_a_run_has_its_loss_and_its_metrics(tmp_path: Path) -> None:
    loss, metrics = curves_of(write_run(tmp_path / "x", [3.0, 2.0, 1.0]))
    assert re.findall(r">([^<]*loss[^<]*)<", loss["image/svg+xml"]) == ["loss of x, step 3 of 3"]
    assert loss["image/svg+xml"].count("<polyline") == 2
    assert loss["text/plain"].splitlines()[1:] == [
        "training  █▅▁  3 to 1",
        "evaluation  █▁  0.5 to 0.25",
    ]
    assert metrics["text/plain"].splitlines()[1:] == ["acc  ▁█  0.25 to 0.75"]


def test_without_events_there_is_nothing_to_draw(tmp_path: Path) -> None:
    assert list(curves_of(tmp_path)) == []
    (tmp_path / "events.jsonl").touch()
    assert list(curves_of(tmp_path)) == []


def test_values_that_are_not_finite_leave_a_gap(tmp_path: Path) -> None:
    loss, _ = curves_of(write_run(tmp_path / "x", [3.0, float("nan"), 1.0]))
    assert "3 to 1" in loss["text/plain"]
    assert "nan" not in loss["image/svg+xml"]


def test_negative_values_are_within_the_picture() -> None:
    line = Line("reward", 0, Curve.of([1, 2, 3], [-30.0, -2.0, 5.0]))
    svg = to_svg(Plot("t", "step", "", [line], log_x=False))
    found = heights(svg)
    assert found == sorted(found, reverse=True)
    assert all(34 <= height <= 314 for height in found)


def test_a_long_curve_has_no_dots() -> None:
    for count, has_dots in ((60, True), (61, False)):
        line = Line("loss", 0, Curve.of(range(1, count + 1), [1.0] * count))
        assert ("<circle" in to_svg(Plot("t", "step", "", [line], log_x=False))) == has_dots
