"""The first difference of two records, the experiments that find its cause, and its text: tables, no processes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from paceline.cli.verify import worlds_from
from paceline.errors import ConfigError, PacelineError
from paceline.verify.causes import Cause
from paceline.verify.experiments import Experiments, arranged
from paceline.verify.records import (
    LOSS,
    RECORD_FILE,
    Record,
    RecordedStep,
    first_difference,
    read_record,
)
from paceline.verify.traces import Trace
from paceline.verify.verdict import Difference, VerifyResult, as_dict, describe


def after(step: int = 1, loss: float = 0.5, *, agree: bool = True, a: str = "2", b: str = "2", metric: str = "0x1p-1") -> RecordedStep:  # fmt: skip
    return RecordedStep(step, loss, {"accuracy": metric}, agree, {"a": a, "b": b})


START = after(0, math.nan)


def record(*steps: RecordedStep, world: int = 1) -> Record:
    return Record(world, exact=True, lanes=4, save_step=1, steps=[START, *steps])


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        (record(after()), record(after()), None),
        (record(after()), record(after(b="9")), (1, "b")),
        (record(after()), record(after(a="9", b="9")), (1, "a")),
        (record(after()), record(after(loss=0.5 + 2e-16, b="9")), (1, LOSS)),
        (record(after()), record(after(metric="0x1p-2")), (1, "accuracy")),
        (record(after(), after(2)), record(after(), after(2, a="9")), (2, "a")),
        (record(after()), record(after(agree=False)), (1, "the state of different ranks")),
        (record(after()), record(after(), after(2)), (1, "the number of steps")),
    ],
)
def test_records_part_here(one: Record, other: Record, where: tuple[int, str] | None) -> None:
    assert first_difference(one, other) == where


@pytest.mark.parametrize(
    ("restored", "where"),
    [([after(1), after(2)], None), ([after(1, a="9")], (1, "a")), ([after(1), after(2, 0.6)], (2, LOSS))],
)  # fmt: skip
def test_the_record_of_a_resumed_run_begins_in_the_middle(
    restored: list[RecordedStep], where: tuple[int, str] | None
) -> None:
    resumed = Record(2, exact=True, lanes=4, save_step=1, steps=restored)
    assert first_difference(record(after(), after(2)), resumed) == where


class Setting(NamedTuple):
    """Everything that a lane could depend on."""

    lane: int
    rank: int
    world: int
    before: list[int]
    beside: list[int]
    meanwhile: list[int]
    run: int


class Simulated:
    """A world whose lanes compute a given function."""

    def __init__(self, value: Callable[[Setting], float]) -> None:
        self._value, self._runs = value, 0

    def trace(self, world: int, step: int, arrangement: str) -> tuple[Record, Trace]:
        self._runs += 1
        ranks = [arranged(4, rank, world, arrangement) for rank in range(world)]
        lanes = {}
        for rank, mine in enumerate(ranks):
            for place, lane in enumerate(mine):
                meanwhile = [other[place] for other in ranks if place < len(other)]
                setting = Setting(
                    lane, rank, world, mine[:place], sorted(mine), meanwhile, self._runs
                )
                value = self._value(setting)
                lanes[f"lane {lane}"] = {"samples": "s 1.0", "loss": f"{value!r} {value!r}", "gradients": "g 1.0", "buffers": "b 1.0"}  # fmt: skip
        stages = {"start": {"model.a": "1"}, "end": {"model.a": "2"}, "evaluation": {}}
        own = [[f"lane {lane}" for lane in mine] for mine in ranks]
        total = sum(float(lane["loss"].split()[1]) for lane in lanes.values())
        return record(after(loss=total), world=world), Trace([stages] * world, lanes, own)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda lane: lane.lane + 0.1 * lane.rank, "rank"),
        (lambda lane: lane.lane / lane.world, "world"),
        (lambda lane: lane.lane + 0.1 * len(lane.before), "order"),
        (lambda lane: lane.lane + sum(lane.meanwhile), "others"),
        (lambda lane: lane.lane - sum(lane.beside), "local"),
        (lambda lane: lane.lane - sum(lane.beside) + 1e-9 * len(lane.before), "local"),
        (lambda lane: lane.lane + 0.1 * lane.run, "chance"),
    ],
)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_experiments_find_what_a_loss_depends_on(
    value: Callable[[Setting], float], why: str, world: int
) -> None:
    laboratory = Simulated(value)
    records = {size: laboratory.trace(size, 1, "usual")[0] for size in (1, world)}
    cause = Experiments(laboratory, records, world, 1).find(LOSS)
    assert (cause.where, cause.why) == ("loss", why), cause
    assert cause.shown_by


def test_with_one_lane_per_rank_the_cause_is_not_guessed() -> None:
    laboratory = Simulated(lambda lane: lane.lane + sum(lane.meanwhile))
    records = {size: laboratory.trace(size, 1, "usual")[0] for size in (2, 4)}
    cause = Experiments(laboratory, records, 4, 1).find(LOSS)
    assert not cause.is_known
    assert "not possible with these lanes" in " ".join(cause.shown_by)


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        (Cause("samples", "chance"), "with paceline.Run"),
        (Cause("samples", "rank"), "with paceline.Run"),
        (Cause("initial state", "chance"), "with paceline.Run"),
        (Cause("loss", "order", draws_in_body=True), "in loss(batch)"),
        (Cause("samples", "local", draws_in_body=True), "run.predict"),
        (Cause("loss", "order"), "from lane to lane"),
        (Cause("resume", "unsaved", ["the samples of lane 0"]), "set_epoch"),
        (Cause("resume", "unsaved", ["the loss of lane 0"]), "run.track"),
    ],
)
def test_the_advice_fits_the_place_where_numbers_are_drawn(cause: Cause, advice: str) -> None:
    assert advice in cause.fix
    is_drawn_at_once = cause.where == "initial state" or cause.draws_in_body
    assert not (is_drawn_at_once and "from the global generators" in cause.fix)


def result(difference: Difference | None = None, **more: float) -> VerifyResult:
    digests = {1: "ab" * 32, 2: "ab" * 32}
    counts = {"steps": 3, "tensors": 4, "metrics": 1, "resumed_after": 2}
    return VerifyResult(
        difference is None, "x.py", [1, 2], digests=digests, difference=difference, **counts | more
    )


def test_a_verdict_names_what_was_compared_and_how_sure_it_is() -> None:
    text = describe(result())
    for words in ("x.py: 3 steps, 4 tensors", "1 metric", "step 2", "2 ranks  abababababababab"):
        assert words in text
    assert text.endswith("the same bits")
    rounded = describe(result(tolerance=1e-3, largest_relative=2.5e-5))
    assert "2.5e-05 (allowed 1e-03)" in rounded
    assert "not compared with exact=false: metrics" in rounded
    for why, how in (("rank", "shown by: tried this"), ("", "cause: not known")):
        cause = Cause("loss", why, [], ["tried this"])
        text = describe(result(Difference(2, 2, "a", 0.25, 0.5, cause)))
        for words in ("world size 2", "step 2, a", "up to 0.25, relative 0.5", how, cause.fix):
            assert words in text


def test_a_verdict_is_plain_json() -> None:
    cause = Cause("buffers", "rank")
    found = json.loads(json.dumps(as_dict(result(Difference(2, 1, "a", 0.25, 0.5, cause)))))
    assert found["digests"].keys() == {"1", "2"}
    assert found["difference"]["cause"]["fix"] == cause.fix
    assert found["difference"]["cause"]["known"]


@pytest.mark.parametrize("text", ["", "1", "1,", "0,1", "1,-2", "1,two", "1.5,2", "1,1", "2,1,2"])
def test_what_is_no_list_of_worlds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        worlds_from(text)
    assert "--worlds 1,2,4" in refused.value.fix


HEAD = '{"world": 1, "exact": true, "lanes": 4, "save_step": 1}\n'
LINE = '{"step": 0, "loss": "nan", "metrics": {}, "ranks_agree": true, "tensors": {}}\n'


@pytest.mark.parametrize("content", [None, HEAD, HEAD + LINE])
def test_a_record_without_steps_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / RECORD_FILE).write_text(content)
    with pytest.raises(PacelineError) as refused:
        read_record(tmp_path, "x.py")
    assert "x.py" in refused.value.problem
    assert "run.steps(...)" in refused.value.fix
