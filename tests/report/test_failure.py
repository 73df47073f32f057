"""Does every screen, page and file give the same verdict on a failed run: what the launcher or srun knows?"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from paceline.events import RunFailed, surviving
from paceline.hang.rank_report import RankReport, write_report
from paceline.hang.verdict import HangVerdict, write_verdict
from paceline.launch.failure import Failure, RankEnd, find_culprit, out_of_memory
from paceline.launch.traceback_text import traceback_text
from paceline.report.failure import page_from_launch, write_failure_page
from paceline.rundir import RunDir
from paceline.world.address import free_port
from support.program import paceline, started
from support.run_folders import make_run, trained
from support.run_folders import started as run_started

SCRIPT = str(Path(__file__).resolve().parents[2] / "scripts" / "trials" / "faulty_training.py")
SETTINGS = ("batch.global_size=32", "epochs=1", "checkpoint.every=5steps")
SYMPTOM = RunFailed(12, -1, "a rank ended, and the others lost the connection to it")
SRUN = "srun: error: n1: task 0: Exited with exit code 76\nsrun: error: n2: task 1: Killed"


FAULT = {"FAULT": "kill", "FAULT_RANK": "1", "FAULT_STEP": "12"}


def test_a_killed_rank_is_the_verdict_on_every_screen(tmp_path: Path) -> None:
    words = ["run", "-n", "2", "--max-restarts", "0", SCRIPT, *SETTINGS]
    done = paceline(*words, folder=tmp_path, env=FAULT)
    run = tmp_path / "runs" / "faulty_training"
    verdict = surviving(run / "events.jsonl")[-1]["reason"]
    assert done.code == 137
    assert "error: rank 1 was killed (SIGKILL)" in done.err
    assert verdict.startswith("rank 1 (node ")
    assert verdict.endswith(") was killed (SIGKILL), in step 13")
    watched = json.loads(paceline("watch", "faulty_training", "--json", folder=tmp_path).out)
    hang = json.loads(paceline("hang", "faulty_training", "--json", folder=tmp_path).out)
    assert (watched["phase"], watched["reason"]) == ("failed", verdict)
    assert (hang["sentence"], hang["ranks"]) == (verdict, [1])
    page = (run / "failure.md").read_text()
    assert f"\n{verdict}.\n" in page
    assert "\nFix: " in page
    paceline("report", "faulty_training", folder=tmp_path)
    report = (run / "report.html").read_text()
    assert verdict in report
    for text in (done.out, done.err, json.dumps(watched), page, report):
        assert "peer" not in text


@pytest.mark.heavy
def test_the_launchers_of_two_hosts_give_one_verdict(tmp_path: Path) -> None:
    shared = ["-n", "1", "--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port('127.0.0.1')}"]
    with contextlib.ExitStack() as stack:
        words = [("run", *shared, "--node", node, SCRIPT, *SETTINGS) for node in "01"]
        both = [started(*each, folder=tmp_path, env=FAULT) for each in words]
        first, second = [running.wait() for running in map(stack.enter_context, both)]
    verdict = surviving(tmp_path / "runs" / "faulty_training" / "events.jsonl")[-1]["reason"]
    assert ") was killed (SIGKILL), in step 13" in verdict
    assert (first.code, second.code) == (1, 137)
    assert "rank 0 lost the connection to a rank of another host" in first.err
    assert verdict in first.err
    assert "Traceback" not in first.err + second.err


def failed_on_nodes(folder: Path) -> RunDir:
    run = make_run(folder / "run", run_started(), *trained(1, 12), SYMPTOM)
    (run.root / "hang").mkdir()
    for rank in range(2):
        write_report(run, RankReport(rank, 2, f"n{rank + 1}", "failed", 0.0, 12, "step"))
    return run


def test_what_srun_says_is_the_verdict_of_a_launch_on_several_nodes(tmp_path: Path) -> None:
    run = failed_on_nodes(tmp_path)
    failure = Failure(-1, 137, "the ranks failed", details=SRUN, run=str(run.root))
    write_failure_page(page_from_launch(failure, "paceline run t.py"))
    last = surviving(run.events)[-1]
    assert (last["rank"], last["reason"]) == (1, "rank 1 (node n2) was killed (SIGKILL), in step 13")  # fmt: skip
    assert "    paceline run t.py\n" in run.failure.read_text()


def test_a_cut_link_is_no_fault_of_a_rank(tmp_path: Path) -> None:
    folder = failed_on_nodes(tmp_path)
    cut = "network partition between n2 and n1: n2 gets no answer from n1"
    write_verdict(folder, HangVerdict("link", (0, 1), (), cut))
    page = page_from_launch(Failure(-1, 1, "lost", run=str(folder.root)), "again")
    assert page.verdict.startswith("rank 0 (node n1) lost the network to another node")
    assert f"before that: {cut}" in page.last_lines()


def test_a_rank_that_the_kernel_killed_for_its_memory_ran_out_of_memory(tmp_path: Path) -> None:
    run = failed_on_nodes(tmp_path)
    killed = find_culprit([RankEnd(0, 1, 2.0, "lost", lost_peer=True), RankEnd(1, -9, 1.0)])
    page = page_from_launch(out_of_memory(Failure(**{**vars(killed), "run": str(run.root)})), "x")
    assert "was killed (SIGKILL): the machine, or its memory limit, ran out" in page.verdict


def test_no_page_is_named_that_could_not_be_written(tmp_path: Path) -> None:
    run = failed_on_nodes(tmp_path)
    failure = Failure(1, 1, "", how="failed", run=str(run.root))
    page = page_from_launch(failure, "x")
    assert not any(line.startswith("page: ") for line in page.last_lines())
    write_failure_page(page)
    assert page.last_lines()[-1] == f"page: {run.failure}"


def test_a_traceback_shows_the_frames_of_the_script_and_the_innermost_one() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        RunDir(Path("/nowhere")).config.read_text()
    frames = [line for line in traceback_text(caught.value).splitlines() if "File" in line]
    assert "test_failure.py" in frames[0]
    assert not any("paceline/rundir.py" in frame for frame in frames)
