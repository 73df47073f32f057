"""Does a profile say where the time goes, and do all ranks lie on one clock?"""

from __future__ import annotations

import functools
import gzip
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.main import run_verb
from paceline.config.values import with_settings
from paceline.errors import EnvironmentUnfit
from paceline.measure.profile import TRACE_FILE, write_verdict
from paceline.measure.profile_shares import shares_of
from paceline.measure.trace import RankTrace, clock_offset, read_traces
from paceline.report.page.studies import verdict_of
from paceline.rundir import VERDICT_FILE, RunDir, make_private
from support.documented import keys_of
from support.processes import run_on_processes
from support.program import paceline

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "trials"
SLOW = {"data": (1, 0.5), "compute": (-1, 0.1), "communication": (-1, 0.5)}
"""On which rank (-1: on all), and for how many seconds; of "compute", in every lane."""
CAUSE = {"data": "data_wait", "compute": "compute", "communication": "exposed_communication"}


def train_slowly(folder: str, phase: str) -> None:
    sys.path.insert(0, str(SCRIPTS))
    import slow_training

    rank, seconds = SLOW[phase]
    slow = {"slow.phase": phase, "slow.rank": rank, "slow.seconds": seconds}
    window = {"profile.to": f"{folder}/{phase}", "profile.skip": 2, "profile.steps": 3}
    words = {"steps": 6, "name": phase} | slow | window
    slow_training.main(with_settings(slow_training.TrainingConfig(), words))


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that trains with a delay in a phase, once, and returns the folder of its profile."""
    folder = tmp_path_factory.mktemp("profiles")

    @functools.cache
    def profile(phase: str) -> Path:
        for _ in range(1 + (phase == "communication")):  # one folder is filled twice
            run_on_processes(train_slowly, 2, folder, {}, {"folder": str(folder), "phase": phase})
        return folder / phase

    return profile


@pytest.fixture(scope="module")
def measured(measure: Callable[[str], Path]) -> Path:
    """The profile of two ranks, one of which waits for its data."""
    return measure("data")


@pytest.mark.parametrize(
    "phase", ["data", *(pytest.param(slow, marks=pytest.mark.heavy) for slow in list(SLOW)[1:])]
)
def test_what_is_made_slow_is_the_largest_cause(measure, phase: str) -> None:
    home = measure(phase)
    assert write_verdict("slow.py", read_traces(home), home).causes[0] == CAUSE[phase]
    found = json.loads((home / VERDICT_FILE).read_text())
    assert found["causes"][0]["cause"] == CAUSE[phase]
    assert found["causes"][0]["try"] in found["words"]
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    if phase == "data":
        slow = found["slow_rank"]
        assert (found["decisive_rank"], slow["rank"], slow["phase"]) == (1, 1, "data")
    assert verdict_of(home / VERDICT_FILE) == found  # what `paceline report` draws


def test_the_ranks_lie_side_by_side_on_one_clock(measured: Path) -> None:
    home, traces = measured, read_traces(measured)
    write_verdict("slow.py", traces, home)
    events = json.loads(gzip.decompress((home / TRACE_FILE).read_bytes()))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {name.partition(" on ")[0] for name in names if "phases" in name} == {"rank 0", "rank 1"}
    # Ranks leave a step together: nobody has the others' gradients before they are sent.
    waits = [[span for span in trace.phases if span[0] == "wait"] for trace in traces]
    ready = [max(spans[0][1] for spans in waits), min(spans[-1][2] for spans in waits)]
    assert ready[0] < ready[1]
    # What torch traced lies within the phases that we took by our own clock.
    for trace in traces:
        begun = [
            event["ts"]
            for event in trace.events
            if str(event.get("name")).startswith("Optimizer.step")
        ]
        spans = [span for span in trace.phases if span[0] == "optimizer"]
        assert sum(begin - 500 <= at <= end for at in begun for _, begin, end in spans) >= 3


@pytest.mark.heavy
def test_a_folder_that_ranks_have_filled_is_only_read(measure, capsys) -> None:
    assert run_verb(["profile", "--json", str(measure("communication"))]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["script"], found["ranks"]) == ("communication", 2)
    assert found["causes"][0]["cause"] == "exposed_communication"


def test_what_is_written_is_private(measured: Path) -> None:
    for path in [measured, *measured.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_clocks_of_two_nodes_are_aligned_within_a_round() -> None:
    true_offset, rounds = 7_000_000, [(1_000 * n, 1_000 * n + 300) for n in range(1, 9)]
    mine = [(spoke - true_offset + 20, heard - true_offset + 40) for spoke, heard in rounds]
    found = clock_offset({"boot": "a", "clocks": rounds}, {"boot": "b", "clocks": mine})
    assert abs(found - true_offset) <= 300


def kernel(name: str, begin: float, end: float, kind: str = "kernel") -> dict:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin}


ON_GPU = [
    kernel("gemm", 0, 40),
    kernel("ncclDevKernel_AllReduce", 30, 60),  # 20 of it alone
    kernel("adam", 60, 70),
    kernel("Optimizer.step#Adam.step", 60, 70, "gpu_user_annotation"),
]
ON_CPU = [
    kernel("aten::mm", 10, 40, "cpu_op"),
    kernel("gloo:all_gather", 35, 70, "user_annotation"),  # a slice of a model, within forward
]


@pytest.mark.parametrize(
    ("events", "phases", "expected"),
    [
        (ON_GPU, {"forward": 10, "other": 75, "data": 90, "other ": 100}, [40, 20, 10, 15, 15]),
        (ON_CPU, {"data": 5, "wait": 80, "optimizer": 100}, [30, 30, 20, 5, 15]),
    ],
)
def test_kernels_and_messages_tell_what_is_exposed(events, phases, expected) -> None:
    ends = [0.0, *map(float, phases.values())]
    spans = list(zip(map(str.strip, phases), ends[:-1], ends[1:], strict=True))
    found = shares_of(RankTrace(0, {"steps": 1}, events, spans, 0.0, 100.0))
    names = ("compute", "exposed_communication", "optimizer", "data_wait", "host_gaps")
    assert [round(getattr(found, name) * 1e6) for name in names] == expected


@pytest.mark.parametrize(
    "damage", ["no gzip", '{"ranks": 1, "trace": "x"}', '{"ranks": [], "trace": "x"}']
)
def test_a_damaged_profile_is_an_error_with_a_way_out(
    measured: Path, tmp_path: Path, damage: str
) -> None:
    home = shutil.copytree(measured, tmp_path / "copy")
    for file in home.glob("tensorboard/*" if damage == "no gzip" else "rank-*.json"):
        file.write_text(damage)
    with pytest.raises(EnvironmentUnfit, match="is damaged"):
        read_traces(home)


def test_a_run_that_was_too_short_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfit, match="rank 0"):
        read_traces(make_private(tmp_path / "empty"))


def test_the_verb_runs_a_recipe_and_leaves_its_run_alone(tmp_path: Path) -> None:
    words = ["--skip", "2", "--steps", "2", "--json", "toy", "name=mine", "log.to=csv"]
    done = paceline("profile", *words, f"checkpoint.to={tmp_path}/store", folder=tmp_path)
    assert done.code == 0, done
    found = json.loads(done.out)
    facts = [found[name] for name in ("script", "ranks", "steps", "device")]
    assert facts == ["toy", 1, 2, "cpu"]
    run = RunDir(tmp_path / "runs" / "mine")
    assert [path.name for path in run.root.iterdir()] == ["profile"]
    assert not (tmp_path / "store").exists()
    assert set(found) == keys_of("profile.md", "Keys of verdict.json")
    assert verdict_of(run.verdict) == found
