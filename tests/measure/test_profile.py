"""Does a profile say where the time goes, and do all ranks lie on one clock?"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
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

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "trials"
DELAYS = {"data": 1, "compute": -1, "communication": -1}  # on which rank; -1: on all
SECONDS = {
    "data": 0.5,
    "compute": 0.1,
    "communication": 0.5,
}  # the second is computed, in every lane
CAUSE = {"data": "data_wait", "compute": "compute", "communication": "exposed_communication"}


def train_slowly(folder: str, phase: str) -> None:
    sys.path.insert(0, str(SCRIPTS))
    import slow_training

    slow = {
        "slow.phase": phase,
        "slow.rank": DELAYS[phase],
        "slow.seconds": SECONDS[phase],
        "steps": 6,
        "name": phase,
    }
    window = {"profile.to": f"{folder}/{phase}", "profile.skip": 2, "profile.steps": 3}
    slow_training.main(with_settings(slow_training.TrainingConfig(), slow | window))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles")
    for phase in [*DELAYS, "communication"]:  # one folder is filled twice
        run_on_processes(train_slowly, 2, folder, {}, {"folder": str(folder), "phase": phase})
    return folder


@pytest.mark.parametrize("phase", DELAYS)
def test_what_is_made_slow_is_the_largest_cause(measured: Path, phase: str) -> None:
    home = measured / phase
    verdict = write_verdict("slow.py", read_traces(home), home)
    assert verdict.causes[0] == CAUSE[phase]
    found = json.loads((home / VERDICT_FILE).read_text())
    assert found["causes"][0]["cause"] == CAUSE[phase]
    assert found["causes"][0]["try"] in found["words"]
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    if phase == "data":
        assert (
            found["decisive_rank"],
            found["slow_rank"]["rank"],
            found["slow_rank"]["phase"],
        ) == (1, 1, "data")


def test_the_ranks_lie_side_by_side_on_one_clock(measured: Path) -> None:
    home = measured / "data"
    traces = read_traces(home)
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
        updates = [
            event
            for event in trace.events
            if str(event.get("name", "")).startswith("Optimizer.step")
        ]
        spans = [span for span in trace.phases if span[0] == "optimizer"]
        inside = [
            any(begin - 500 <= event["ts"] <= end for _, begin, end in spans) for event in updates
        ]
        assert sum(inside) >= 3


def test_a_folder_that_ranks_have_filled_is_only_read(measured: Path, capsys) -> None:
    assert run_verb(["profile", "--json", str(measured / "communication")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["script"], found["ranks"], found["causes"][0]["cause"]) == (
        "communication",
        2,
        "exposed_communication",
    )


def test_what_is_written_is_private(measured: Path) -> None:
    for path in [measured / "data", *(measured / "data").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_clocks_of_two_nodes_are_aligned_within_a_round() -> None:
    true_offset, rounds = 7_000_000, [(1_000 * n, 1_000 * n + 300) for n in range(1, 9)]
    mine = [(spoke - true_offset + 20, heard - true_offset + 40) for spoke, heard in rounds]
    found = clock_offset({"boot": "a", "clocks": rounds}, {"boot": "b", "clocks": mine})
    assert abs(found - true_offset) <= 300


def kernel(name: str, begin: float, end: float, kind: str = "kernel") -> dict:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin}


def test_on_a_gpu_kernels_tell_what_is_exposed() -> None:
    events = [
        kernel("gemm", 0, 40),
        kernel("ncclDevKernel_AllReduce", 30, 60),  # 20 of it alone
        kernel("adam", 60, 70),
        kernel("Optimizer.step#Adam.step", 60, 70, "gpu_user_annotation"),
    ]
    phases = [
        ("forward", 0.0, 10.0),
        ("other", 10.0, 75.0),
        ("data", 75.0, 90.0),
        ("other", 90.0, 100.0),
    ]
    found = shares_of(RankTrace(0, {"steps": 1}, events, phases, 0.0, 100.0))
    seconds = [
        found.compute,
        found.exposed_communication,
        found.optimizer,
        found.data_wait,
        found.host_gaps,
    ]
    assert [round(value * 1e6) for value in seconds] == [40, 20, 10, 15, 15]


def test_slices_of_a_model_that_are_sent_within_forward_are_told_from_it() -> None:
    events = [
        kernel("aten::mm", 10, 40, "cpu_op"),
        kernel("gloo:all_gather", 35, 70, "user_annotation"),
    ]
    phases = [("data", 0.0, 5.0), ("wait", 5.0, 80.0), ("optimizer", 80.0, 100.0)]
    found = shares_of(RankTrace(0, {"steps": 1}, events, phases, 0.0, 100.0))
    seconds = [
        found.compute,
        found.exposed_communication,
        found.optimizer,
        found.data_wait,
        found.host_gaps,
    ]
    assert [round(value * 1e6) for value in seconds] == [30, 30, 20, 5, 15]


@pytest.mark.parametrize(
    "damage", ["no gzip", '{"ranks": 1, "trace": "x"}', '{"ranks": [], "trace": "x"}']
)
def test_a_damaged_profile_is_an_error_with_a_way_out(
    measured: Path, tmp_path: Path, damage: str
) -> None:
    home = shutil.copytree(measured / "data", tmp_path / "copy")
    for file in home.glob("tensorboard/*" if damage == "no gzip" else "rank-*.json"):
        file.write_text(damage)
    with pytest.raises(EnvironmentUnfit, match="is damaged"):
        read_traces(home)


def test_a_run_that_was_too_short_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfit, match="rank 0 wrote no profile"):
        read_traces(make_private(tmp_path / "empty"))


def test_the_verb_runs_a_recipe_and_leaves_its_run_alone(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "paceline",
        "profile",
        "--skip",
        "2",
        "--steps",
        "2",
        "--json",
        "toy",
        "name=mine",
    ]
    words += [f"checkpoint.to={tmp_path}/store", "log.to=csv"]
    done = subprocess.run(words, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["script"], found["ranks"], found["steps"], found["device"]) == (
        "toy",
        1,
        2,
        "cpu",
    )
    assert sorted(path.name for path in (tmp_path / "runs" / "mine").iterdir()) == ["profile"]
    assert not (tmp_path / "store").exists()
    assert set(found) == keys_of("profile.md", "Keys of verdict.json")
    assert (
        verdict_of(RunDir(tmp_path / "runs" / "mine").verdict) == found
    )  # what `paceline report` draws


def test_a_report_reads_what_a_profile_of_several_ranks_wrote(measured: Path) -> None:
    home = measured / "data"
    write_verdict("slow.py", read_traces(home), home)
    assert verdict_of(home / VERDICT_FILE) == json.loads((home / VERDICT_FILE).read_text())
