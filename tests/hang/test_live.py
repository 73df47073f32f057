"""Does a real run say by itself that it is stuck, does the verb find the same, and does the page tell how it ended?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.cli import hang
from paceline.events import surviving
from paceline.hang.rank_report import RankException, RankReport, write_report
from paceline.report.find_run import find_run
from paceline.report.state import RunWatcher
from paceline.rundir import RunDir, make_private
from paceline.runlock import claimed
from support.program import Done, around, paceline, started, wait_for

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "trials" / "faulty_training.py"
SETTINGS = ("batch.global_size=32", "epochs=1", "checkpoint.every=5steps", "timeout.step_s=60")
ONCE = ("--max-restarts", "0", *SETTINGS)
FAULT = {"FAULT_RANK": "1", "FAULT_STEP": "12"}
SAVED = FAULT | {"FAULT_AFTER": "runs/faulty_training/checkpoints/step-000000010"}


def ask(folder: Path, *words: str) -> Done:
    elsewhere = folder / "reader"
    elsewhere.mkdir(exist_ok=True)
    return paceline("hang", str(folder / "runs" / "faulty_training"), *words, folder=elsewhere)


def test_a_stuck_rank_is_named_while_the_run_goes_on_and_afterwards(tmp_path: Path):
    words = ("run", "-n", "2", *around(str(SCRIPT), ONCE))
    with started(*words, folder=tmp_path, env=FAULT | {"FAULT": "loop"}) as running:
        wait_for(tmp_path / "runs" / "faulty_training" / "hang" / "verdict.json")
        live = ask(tmp_path, "--json")
        found = json.loads(live.out)
        assert (live.code, found["alive"]) == (1, True)
        assert (found["cause"], found["ranks"], found["waiting"]) == ("own code", [1], [0])
        assert "rank 1 (node " in found["sentence"]
        assert "it is in spin at faulty_training.py:" in found["sentence"]
        assert {record["state"] for record in found["records"]} == {"stuck"}
        # The first interrupt asks to save, which rank 1 does not hear.
        while running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert found["sentence"].partition(";")[0] in running.wait().out
        assert running.left_over() == []
    later = json.loads(ask(tmp_path, "--json").out)
    assert (later["alive"], later["cause"], later["ranks"]) == (False, "own code", [1])


def test_a_start_that_has_reported_nothing_yet_does_not_show_the_failure_of_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "_ANSWER_S", 0.1)
    folder = RunDir(tmp_path / "runs" / "run")
    make_private(folder.root)
    folder.config.write_text('name = "run"\n')
    wrong = RankException("ValueError", "ValueError: a bad sample", lost_peer=False)
    write_report(folder, RankReport(0, 1, "n1", "failed", time.time(), 3, "step", wrong=wrong))
    arguments = hang.HangArguments(run=str(folder.root))
    assert hang.main(arguments) == 1
    assert "ValueError" in capsys.readouterr().out
    with claimed(folder.lock):
        assert hang.main(arguments) == 0
    assert "is starting" in capsys.readouterr().out


@pytest.mark.heavy
def test_a_failure_leaves_a_page_with_the_way_on(tmp_path: Path):
    env = SAVED | {"FAULT": "raise"}
    done = paceline("run", "-n", "2", *around(str(SCRIPT), ONCE), folder=tmp_path, env=env)
    folder = tmp_path / "runs" / "faulty_training"
    page = json.loads((folder / "failure.json").read_text())
    text = (folder / "failure.md").read_text()
    assert (page["rank"], page["step"], page["checkpoint_step"]) == (1, 12, 10)
    assert page["how"] == "failed with ValueError: a bad sample"
    assert "ValueError: a bad sample" in page["words"]
    assert page["resume"].startswith("paceline run ")
    assert page["resume"] in done.err
    assert page["resume"] in text
    shown = ask(tmp_path)
    assert shown.code == 1
    assert "From step 10: " in shown.out
    verdict = shown.out.partition("\n")[0]  # rank 0 only knows that it lost a connection
    assert verdict.startswith("rank 1 (node ")
    assert verdict.endswith(" failed with ValueError: a bad sample, in step 13")
    state = RunWatcher(find_run(str(folder), tmp_path)).look()
    assert (state.phase, state.reason) == ("failed", verdict)
    assert surviving(folder / "events.jsonl")[-1]["reason"] == verdict
    assert f"{verdict}." in text


@pytest.mark.heavy
def test_under_torchrun_the_page_about_a_killed_rank_is_left_afterwards(tmp_path: Path):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    env = os.environ | SAVED | {"FAULT": "kill"}
    env["TMPDIR"] = str(tmp_path)  # torchrun leaves a folder for logs behind
    words = [sys.executable, *torchrun, str(SCRIPT), *SETTINGS]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, timeout=120)
    assert done.returncode == 1
    folder = tmp_path / "runs" / "faulty_training"
    assert not (folder / "failure.json").exists()
    assert "rank 1 (node " in ask(tmp_path).out
    page = json.loads((folder / "failure.json").read_text())
    assert (page["rank"], page["how"], page["step"]) == (1, "vanished without a report", 12)
    assert page["checkpoint_step"] == 10
