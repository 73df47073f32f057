"""`paceline scale` compares world sizes, says where the time went, and writes a report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.cli.scale import _write as write
from paceline.launch.spec import module
from paceline.measure import scaling
from paceline.measure.efficiency import Scaling, Trial, sizes_of
from paceline.measure.recorded_step_times import RankStep, RecordedRun, StepPace, pace_of
from paceline.measure.scaling_page import to_html
from paceline.measure.scaling_report import plot_of, print_study, to_markdown
from paceline.measure.scaling_store import read_studies
from paceline.report.page.studies import scaling_of
from paceline.rundir import RunDir
from support.documented import keys_of, words_of
from support.program import paceline

FACTS = {"nodes": 1, "sees_waits": True, "sees_ready": True}


def pace(seconds: float, samples: int = 64, **more) -> StepPace:
    return replace(StepPace(seconds, samples, 0.1, 0.2, 0.05, seconds / 2), **more)


def test_efficiency_is_p1_t1_over_pn_tn() -> None:
    trials = [
        Trial(1, 4, "", [pace(1.0), pace(1.2), pace(1.1)]),
        Trial(4, 4, "4 ranks share 2 cores", [pace(0.5), pace(0.4), pace(0.55)]),
    ]
    one, four = sizes_of(trials)
    assert (one.speedup, one.efficiency, one.efficiency_low, one.efficiency_high) == (1, 1, 1, 1)
    assert four.efficiency == pytest.approx(1 * 1.1 / (4 * 0.5))
    assert (four.efficiency_low, four.efficiency_high) == (pytest.approx(0.5), pytest.approx(0.75))
    assert (four.step_s, four.fastest_s, four.slowest_s) == (0.5, 0.4, 0.55)
    assert (four.exposed_share, four.exposed_how, four.uneven_share) == (0.2, "waits", 0.05)


def test_weak_scaling_compares_the_work_of_a_rank() -> None:
    trials = [Trial(1, 4, "", [pace(1.0)]), Trial(4, 16, "", [pace(1.25, samples=256)])]
    _one, four = sizes_of(trials)
    assert (four.speedup, four.efficiency) == (pytest.approx(3.2), pytest.approx(0.8))


def test_where_waits_are_hidden_the_end_of_a_step_is_compared_with_that_of_one_rank() -> None:
    hidden = {"waited_share": None, "uneven_share": None}
    alone = Trial(1, 4, "", [pace(1.0, tail_s=0.25)])
    two = Trial(2, 4, "", [pace(0.8, tail_s=0.45, **hidden)])
    assert sizes_of([alone, two])[1].exposed_share == pytest.approx(0.25)
    assert sizes_of([alone, two])[1].exposed_how == "estimate"
    four = Trial(4, 4, "", [pace(0.8, **hidden)])
    assert sizes_of([two, four])[1].exposed_how == "none"
    captured = [Trial(ranks, 4, "", [pace(0.8, tail_s=None, **hidden)]) for ranks in (1, 2)]
    assert sizes_of(captured)[1].exposed_how == "none"


def test_the_shares_of_a_step_are_those_of_its_ranks() -> None:
    def step(begin: float, samples: int = 8) -> tuple[RankStep, ...]:
        quick = RankStep(samples, begin, begin + 0.1, begin + 0.3, begin + 1.0, 0.5)
        slow = RankStep(samples, begin, begin + 0.3, begin + 0.7, begin + 1.0, 0.1)
        return quick, slow

    warm = (RankStep(8, 0, 5, 6, 9, 0), RankStep(8, 0, 5, 6, 9, 0))
    ran = RecordedRun(FACTS, ("cpu", "cpu"), [warm, step(10), step(20), step(30, samples=3)])
    found = pace_of(ran, warmup=1)
    assert (found.seconds, found.samples) == (pytest.approx(1.0), 8)
    assert (found.data_share, found.waited_share) == (pytest.approx(0.2), pytest.approx(0.3))
    assert found.uneven_share == pytest.approx(0.2)
    assert pace_of(replace(ran, facts=FACTS | {"sees_waits": False}), 1).waited_share is None
    assert pace_of(replace(ran, facts=FACTS | {"sees_ready": False}), 1).tail_s is None


SLOW_RANK = """
import time, torch, paceline
from torch.nn.functional import mse_loss

class Slow(torch.nn.Linear):
    def forward(self, values):
        time.sleep(0.05 * rank)
        return super().forward(values)

config = paceline.config_from_argv()
with paceline.Run(config) as run:
    rank = run.world.rank
    model = run.model(Slow(4, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    paceline.Trainer(run, model, optimizer, (torch.ones(64, 4), torch.ones(64, 1)), mse_loss).fit()
"""


def test_a_study_is_printed_and_written_with_its_report(tmp_path: Path) -> None:
    (tmp_path / "slow_rank.py").write_text(SLOW_RANK)
    home = tmp_path / "runs" / "study"
    home.mkdir(parents=True)
    (home / "scaling.json").write_text('{"studies": {"strong": []}}')
    short = ("--rounds", "1", "--steps", "4", "--warmup", "2", "--weak", "--json")
    settings = ("name=study", "batch.global_size=16", "device=cpu")
    words = ("--worlds", "2,1", *short, "slow_rank.py", *settings)
    done = paceline("scale", *words, folder=tmp_path)
    assert (done.code, done.err) == (0, ""), done
    found = json.loads(done.out)
    sizes = [(size["ranks"], size["global_batch"], size["lanes"]) for size in found["sizes"]]
    assert sizes == [(1, 16, 4), (2, 32, 8)]
    two = found["sizes"][1]
    assert two["uneven_share"] > 0.2  # rank 0 waits while rank 1 sleeps in every forward
    assert two["exposed_share"] >= two["uneven_share"]
    assert (found["kind"], found["good_efficiency"]) == ("weak", 0.75)
    written = json.loads((home / "scaling.json").read_text())
    assert written == {"format": 1, "studies": {"weak": found}}
    assert {*found, *found["sizes"][0]} == keys_of("scale.md", "JSON")
    assert set(found["facts"]) - words_of("scale.md", "JSON") == set()
    assert scaling_of(home / "scaling.json") == {"weak": found}  # what `paceline report` draws
    names = {"scaling-weak.svg", "scaling.html", "scaling.json", "scaling.md"}
    assert {path.name for path in home.iterdir()} == names
    assert {path.stat().st_mode & 0o077 for path in home.rglob("*")} == {0}


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("raise ValueError('no data')", 1, ["fails.py failed on 1 rank:", "ValueError: no data"]),
        ("print('no training')", 2, ["fails.py", "fix: train with `paceline.Run`"]),
    ],
)
def test_a_script_that_cannot_be_compared_is_an_error_with_a_fix(
    tmp_path: Path, script, code, said
) -> None:
    (tmp_path / "fails.py").write_text(script)
    done = paceline("scale", "--worlds", "1,2", "fails.py", folder=tmp_path)
    assert (done.code, done.out) == (code, "")
    assert [text for text in said if text not in done.err] == []
    assert not (tmp_path / "runs").exists()


PRETENDED = """
import json, os, pathlib
told = json.loads(os.environ["PACELINE_SET"])
times, run = pathlib.Path(told["record.times"]), pathlib.Path(told["runs"]) / "run"
times.mkdir(parents=True)
run.mkdir(parents=True)
(run / "config.toml").write_text("name = 'run'\\n[batch]\\nglobal_size = 32\\nlanes = 4\\n")
steps = [[SAMPLES, 0, 1, 2, 3, 0] for n in range(STEPS)]
(times / "0000.times").write_text(json.dumps({"device": "cpu", "nodes": 1, "sees_waits": True, "sees_ready": True, "steps": steps}))
"""


@pytest.mark.parametrize(
    ("samples", "steps", "worlds", "named"),
    [
        (32, 20, "1,8", ["8 ranks", "4 lanes", "add batch.lanes=8"]),
        pytest.param(31, 20, "1,2", ["batch.global_size is 32", "31 samples"], marks=pytest.mark.heavy),
        pytest.param(32, 10, "1,2", ["pretends.py", "10 steps", "`steps`"], marks=pytest.mark.heavy),
        pytest.param("64 - 32 * (n > 9)", 20, "1,2", ["64 samples", "give more --steps"], marks=pytest.mark.heavy),
    ],
)  # fmt: skip
def test_a_study_that_leads_nowhere_ends_after_its_first_run(
    tmp_path, samples, steps, worlds, named
) -> None:
    script = PRETENDED.replace("SAMPLES", str(samples)).replace("STEPS", str(steps))
    (tmp_path / "pretends.py").write_text(script)
    done = paceline("scale", "--worlds", worlds, "pretends.py", folder=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert [text for text in named if text not in done.err] == []


def test_a_folder_that_cannot_be_written_is_known_before_the_first_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = paceline("scale", "--to", "file/x", "toy", folder=tmp_path)
    assert (done.code, done.out) == (3, ""), done
    assert "give another folder with --to" in done.err
    assert "round 1" not in done.err


def test_secrets_among_the_words_do_not_reach_the_report(tmp_path: Path) -> None:
    words = ("hub_token=hf_1", "lr.base=1")
    runs = scaling._Runs(scaling.Study(module("x", "y"), words, (1,), False, 1, 0, 3), tmp_path)
    names = ("host", "cpu", "memory_bytes", "system", "python", "backend", "torch", "gpu")
    facts = FACTS | dict.fromkeys(names, "") | {"ranks": 1, "cores": 1}
    ran = RecordedRun(facts, ("cpu",), [(RankStep(8, 0, 1, 2, 3, 0),)] * 3)
    how = dict.fromkeys(("exact", "parallel", "precision", "compile", "capture"), "")
    runs._config = {"name": "x", "batch": {}, "threads": 1} | how
    runs._last, runs._batch, runs._paces = {1: ran}, scaling.Batch(8, 1), {1: [pace_of(ran, 0)]}
    assert runs.result().words == ["hub_token=[removed]", "lr.base=1"]


def study(name: str, kind: str, *ranks: int) -> Scaling:
    trials = [
        Trial(count, 4, "", [pace(1 / count**0.9), pace(1.1 / count**0.9)]) for count in ranks
    ]
    machine = ("host", "cpu", "system", "python", "paceline", "gpu", "backend", "torch")
    facts = dict.fromkeys((*machine, "exact", "parallel", "precision", "compile", "threads"), name)
    facts |= {"cores": 8, "nodes": 1, "memory_bytes": 1}
    date = "2026-01-01T00:00:00+00:00"
    return Scaling(name, name, [name], kind, 5, 20, 2, date, facts, sizes_of(trials))


def test_a_report_reads_what_the_verb_writes_whatever_else_is_there(tmp_path: Path) -> None:
    file = RunDir(tmp_path / "runs" / "x").scaling
    strong, weak = study("x", "strong", 1, 2, 4), study("x", "weak", 1, 2)
    write(strong, file)
    write(weak, file)
    wanted = {"strong": strong.as_dict(), "weak": weak.as_dict()}
    assert scaling_of(file) == json.loads(json.dumps(wanted))
    assert read_studies(file) == {"strong": strong, "weak": weak}
    content = json.loads(file.read_text())
    content["studies"]["strong"]["sizes"][0]["speedup"] = "fast"
    content["studies"]["strong"]["of a later version"] = 1
    del content["studies"]["weak"]["rounds"]
    file.write_text(json.dumps(content))
    [found] = read_studies(file).values()
    assert (found.kind, [size.ranks for size in found.sizes]) == ("strong", [2, 4])
    no_sizes = '{"studies": {"weak": {"sizes": [{}]}}}'
    for text in ("", "[]", "3", '{"studies": 3}', no_sizes, "[" * 100_000):
        file.write_text(text)
        assert scaling_of(file) is None


HOSTILE = "<script>alert(1)</script>|`*[x](javascript:y)"


def test_the_report_has_what_computing_centres_ask_for_and_runs_nothing(capsys) -> None:
    studies = [study(HOSTILE, "strong", 1, 2, 4, 32), study(HOSTILE, "weak", 1, 2)]
    page, text = to_html(studies), to_markdown(studies)
    for word in ("Code", "Machine", "Strong scaling", "Weak scaling", "efficiency", "75%"):
        assert word in page
        assert word in text
    assert "4 ranks (87%)" in page
    assert page.index("at least 3 sizes") < page.index("<h2>")  # a warning, before anything else
    for found in (page, plot_of(studies[0])):
        assert "<script>alert" not in found
        assert not re.search("http(?!-equiv|://www.w3.org/2000/svg)", found)
    ElementTree.fromstring(plot_of(studies[0]))
    assert "<script" not in text.replace(r"\<script", "")
    assert Scaling.from_dict(json.loads(json.dumps(studies[0].as_dict()))) == studies[0]
    print_study(studies[0])
    assert re.search(r"(?m)^   32  ", capsys.readouterr().out)
