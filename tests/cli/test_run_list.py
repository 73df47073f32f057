"""Are the runs of a folder listed, newest first, deleted only after a yes, and taken by default by the verbs that need one?"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path

import pytest

from paceline.cli.main import run_verb
from paceline.cluster.registry import register
from paceline.events import RunEnded, RunFailed, as_json
from paceline.rundir import RunDir
from support import report_trainings as trainings
from support import run_folders as runs
from support.documented import keys_of, words_of
from support.program import Done, paceline
from support.terminal import in_terminal

BEGUN_S = 1_790_000_000


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def verb(capsys):
    """Run a verb in this process."""

    def call(*words: str) -> Done:
        code = run_verb(words)
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return call


def begin(folder: RunDir, second: int) -> RunDir:
    """Give a run the time of its start."""
    os.utime(folder.config, (BEGUN_S + second, BEGUN_S + second))
    return folder


def three_runs() -> list[RunDir]:
    """Make an old run that ended, a run that failed, and a new one that was killed."""
    root = Path("runs")
    old = runs.make_run(
        root / "old", runs.started(), *runs.trained(1, 1000), RunEnded(1000, 5, "d")
    )
    bad = runs.make_run(root / "bad", runs.started(), RunFailed(3, 0, "Boom: \x1b[2Jtwo\nlines"))
    new = runs.make_run(root / "new", runs.started(time_s=BEGUN_S), *runs.trained(1, 51))
    return [begin(folder, second) for second, folder in enumerate((old, bad, new))]


def test_runs_are_listed_newest_first_and_a_report_makes_none_newer(verb) -> None:
    old, *_ = three_runs()
    old.report.write_text("x" * 2000)
    Path("runs/latest").symlink_to("new")
    Path("runs/notes").mkdir()
    done = verb("runs")
    head, *rows, reason, _ = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    titles = ["run", "state", "step", "loss", "time", "size", "checkpoints", "started"]
    assert head.split() == titles
    assert [row.split()[:4] for row in rows] == [
        ["new", "lost", "51/1,000", "1.9608"],
        ["bad", "failed", "0/1,000", "-"],
        ["old", "finished", "991/1,000", "0.1009"],
    ]
    assert "2.4 kB" not in rows[0]
    assert reason == "new: it was killed, or its node went down"
    assert done.out.splitlines()[-1] == "bad: Boom: two lines"


def test_a_damaged_run_is_listed_with_what_is_wrong(verb) -> None:
    events = runs.make_run(Path("runs/events"))
    events.events.write_text("garbage\n")
    config = runs.make_run(Path("runs/config"), runs.started(), RunEnded(9, 5, "d"))
    config.config.write_text("= =\n")
    pipe = runs.make_run(Path("runs/pipe"))
    pipe.events.unlink()
    os.mkfifo(pipe.events)
    for second, folder in enumerate((pipe, config, events)):
        begin(folder, second)
    lines = verb("runs").out.splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["damaged"] * 3
    assert lines[4] == "events: events.jsonl has no start of a run"
    assert lines[5].startswith("config: config.toml is not TOML: ")
    assert lines[6] == "pipe: cannot read events.jsonl: it is a FIFO, not a plain file"


def test_a_run_that_failed_before_its_first_step_is_not_damaged(verb) -> None:
    begun = Path("runs/early")
    begun.mkdir(parents=True)
    failed = as_json(RunFailed(0, 0, "ValueError: no data"))
    (begun / "events.jsonl").write_text(f"{failed}\n")
    said = verb("runs").out
    assert "failed" in said
    assert "damaged" not in said
    assert "early: ValueError: no data" in said


def test_where_there_are_no_runs_it_says_how_to_start_one(verb, tmp_path: Path) -> None:
    said = verb("runs").out
    assert f"{tmp_path}/runs" in said and "paceline train mnist" in said and "--runs" in said
    assert json.loads(verb("runs", "--json").out)["runs"] == []
    Path("file").touch()
    assert verb("runs", "--runs", "file").code == 2


def test_json_has_the_keys_of_the_documents(verb) -> None:
    three_runs()
    found = json.loads(verb("runs", "--json").out)["runs"]
    assert [run["name"] for run in found] == ["new", "bad", "old"]
    assert set(found[0]) <= words_of("json.md", "runs")
    assert keys_of("json.md", "runs") <= set(found[0])


def test_the_newest_run_is_taken_where_none_is_named_and_said(verb) -> None:
    three_runs()
    for words in (["watch", "--json"], ["hang", "--json"], ["ckpt", "list", "--json"]):
        done = verb(*words)
        assert done.err == "the newest run: runs/new\n"
        assert "new" in str(json.loads(done.out))
    done = verb("ckpt", "export", "x.safetensors")
    assert "the newest run: runs/new\n" in done.err
    assert "runs/new/checkpoints" in done.err
    assert "OUT is missing" in verb("ckpt", "export", "old").err


def test_cancel_never_guesses(verb) -> None:
    three_runs()
    assert "which run? newest: new, bad, old" in verb("cancel").err


def test_the_index_page_compares_all_runs_and_links_their_reports(verb) -> None:
    three_runs()
    trainings.make_training(Path("runs/a <b>&'"), "name=x")
    assert verb("report", "runs/a <b>&'").code == 0
    done = verb("report")
    assert done.out.startswith("runs/index.html (")
    assert Path("runs/index.html").stat().st_mode & 0o077 == 0
    page = Path("runs/index.html").read_text()
    assert page.count("<tr>") == 5
    assert "a &lt;b&gt;&amp;&#x27;</a>" in page
    assert 'href="./a%20%3Cb%3E%26%27/report.html"' in page
    assert page.count("<a ") == 1
    assert page.count('class="line ') == 2 * 3  # three runs have losses; linear and logarithmic
    assert "Boom: two lines" in page
    Path("elsewhere").mkdir()
    verb("report", "--to", "elsewhere/all.html")
    assert 'href="./../runs/a%20' in Path("elsewhere/all.html").read_text()


def test_the_index_as_json_has_the_loss_curves(verb) -> None:
    three_runs()
    curve = json.loads(verb("report", "--json").out)["runs"][0]["loss_curve"]
    assert (curve["steps"], curve["loss"][0]) == ([1, 11, 21, 31, 41, 51], 100)
    assert not Path("runs/index.html").exists()


def test_the_time_of_a_run_is_that_of_its_report(verb) -> None:
    trainings.make_training(Path("runs/three-starts"), "name=three-starts")
    [listed] = json.loads(verb("runs", "--json").out)["runs"]
    [reported] = json.loads(verb("report", "three-starts", "--json").out)["runs"]
    assert listed["trained_s"] == pytest.approx(reported["trained_s"])


def test_a_page_is_opened_in_the_browser_and_its_path_said_without_one(tmp_path: Path) -> None:
    three_runs()
    browser = tmp_path / "browser"
    browser.write_text(f"#!{sys.executable}\nimport sys\nopen('opened', 'w').write(sys.argv[1])\n")
    browser.chmod(0o700)
    some = {"BROWSER": f"{browser} %s"}
    done = paceline("report", "old", "--open", folder=tmp_path, env=some, cold=True)
    assert (done.code, done.err) == (0, "")
    assert Path("opened").read_text() == f"file://{tmp_path}/runs/old/report.html"
    none = {"PATH": "/nowhere", "BROWSER": "", "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    done = paceline("report", "--open", folder=tmp_path, env=none, cold=True)
    assert done.code == 0
    assert done.err == f"no browser was found here; open {tmp_path}/runs/index.html\n"


def test_rm_asks_and_deletes_only_after_a_yes(tmp_path: Path) -> None:
    three_runs()
    for answer, left in (("n", True), ("y", False)):
        with in_terminal("rm", "old", "runs/new/", folder=tmp_path) as terminal:
            terminal.wait_for(lambda: "delete these 2 runs" in terminal.written)
            terminal.type_line(answer)
            assert terminal.wait() == int(left)
        assert Path("runs/old").exists() == left
    assert "finished" in terminal.written
    assert os.listdir("runs") == ["bad"]


def test_rm_without_a_terminal_wants_yes_and_says_the_line_to_type(verb) -> None:
    three_runs()
    done = verb("rm", "old", "bad")
    assert done.code == 2
    assert "fix: type `paceline rm old bad --yes`" in done.err
    assert len(os.listdir("runs")) == 3
    done = verb("rm", "old", "--yes")
    assert done.out.startswith("deleted runs/old (finished, ")
    assert sorted(os.listdir("runs")) == ["bad", "new"]


def test_rm_follows_no_link(verb, tmp_path: Path) -> None:
    old, bad, _ = three_runs()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    (old.root / "link").symlink_to(outside)
    (old.root / "lock").symlink_to(outside / "precious")
    Path("runs/latest").symlink_to("old")
    Path("runs/away").symlink_to(bad.root.absolute())
    for name in ("latest", "away"):
        assert "is a symbolic link to" in verb("rm", name, "--yes").err
    assert verb("rm", "old", "--yes").code == 0
    assert (outside / "precious").read_text() == "mine"
    assert not old.root.exists()
    assert bad.events.exists()


NOT_RUNS = ["..", ".", "", "runs/..", "old/..", "../outside", "/etc", "odl", "notes", "file", "project"]  # fmt: skip


def test_rm_refuses_what_is_not_a_run_and_deletes_nothing_else_then(verb) -> None:
    three_runs()
    Path("runs/notes").mkdir()
    Path("runs/file").touch()
    Path("runs/project").mkdir()
    Path("runs/project/config.toml").write_text('name = "project"\n')
    Path("runs/project/events.jsonl").write_text('{"event": "started", "level": "info"}\n')
    for name in NOT_RUNS:
        done = verb("rm", "old", name, "--yes")
        assert (done.code, name in done.err) == (2, True), done
        assert len(os.listdir("runs")) == 6
    assert "did you mean old?" in verb("rm", "odl", "--yes").err


def test_rm_refuses_a_run_that_is_written_or_has_a_job(verb) -> None:
    _, bad, new = three_runs()
    script = RunDir(Path("runs/script"))
    script.root.mkdir()
    script.launches.write_text('{"time_s": 1, "event": "launched"}\n')
    with runs.holding(new.lock), runs.holding(script.launch_lock):
        assert "new is still running (training)" in verb("rm", "old", "new", "--yes").err
        assert "script is still running (training)" in verb("rm", "script", "--yes").err
    runs.put_beat(new, 0)  # by another host, whose locks are not seen here
    assert "new is still running (training)" in verb("rm", "new", "--yes").err
    register(runs.submission("17", bad.root.absolute()))
    assert "bad has jobs (17), and Slurm does not say" in verb("rm", "bad", "--yes").err
    assert len(os.listdir("runs")) == 4
    assert verb("rm", "script", "--yes").out.startswith("deleted runs/script (lost, ")


def test_a_run_that_starts_while_it_is_deleted_stays(verb, monkeypatch) -> None:
    old, *_ = three_runs()
    with runs.holding(old.lock):
        monkeypatch.setattr(fcntl, "flock", _blind_to_readers(fcntl.flock))
        done = verb("rm", "old", "--yes")
    assert done.code == 3
    assert "runs/old is being written by process 4711 on n1" in done.err
    assert old.events.exists()


def _blind_to_readers(flock):
    """Return a flock that sees no holder when a reader asks, as if the run began just afterwards."""

    def call(file: int, operation: int) -> None:
        if not operation & fcntl.LOCK_SH:
            flock(file, operation)

    return call
