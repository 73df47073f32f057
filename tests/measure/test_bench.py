"""`paceline bench` starts ranks or joins those that are there, and says what it found to people and to programs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.cli.main import run_verb
from paceline.measure.bench_plan import OPERATIONS
from paceline.measure.bench_results import Measurement, Mistake, Timing, as_dict, results_of
from paceline.measure.bench_table import print_results
from support.documented import keys_of, words_of
from support.program import paceline, started, wait_until

SHORT = ("--sizes", "1KiB,64KiB", "--seconds", "0", "--device", "cpu")


def test_ranks_are_started_and_the_figures_come_as_json_and_as_a_plot(tmp_path: Path) -> None:
    done = paceline("bench", "-n", "2", *SHORT, "--json", "--to", "out", folder=tmp_path)
    assert (done.code, done.err) == (0, ""), done
    found = json.loads(done.out)
    facts = [found[name] for name in ("right", "ranks", "nodes", "backend")]
    assert facts == [True, 2, 1, "gloo"]
    assert [each["operation"] for each in found["operations"]] == list(OPERATIONS)
    for each in found["operations"]:
        assert [row["size_bytes"] for row in each["sizes"]] == [1024, 65536]
        for row in each["sizes"]:
            assert row["fastest_s"] <= row["seconds"] <= row["slowest_s"]
            busbw = each["bus_factor"] * row["algbw_gb_per_s"]
            assert row["busbw_gb_per_s"] == pytest.approx(busbw)
        assert each["fit"]["latency_s"] >= 0
    assert {*found, "sizes", "fit"} == keys_of("bench.md", "JSON")
    first = found["operations"][0]
    assert {*first, *first["fit"]} <= words_of("bench.md", "JSON")
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == found
    assert (tmp_path / "out" / "bench.svg").read_text() == found["svg"]
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "out").rglob("*")} == {0}
    ElementTree.fromstring(found["svg"])
    assert "results were correct" in (tmp_path / "out" / "bench.html").read_text()


@pytest.mark.heavy
def test_under_torchrun_it_measures_the_ranks_that_are_there(tmp_path: Path) -> None:
    bench = ["-m", "paceline", "bench", "--ops", "pair,tree", *SHORT]
    torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, *bench], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks on 1 node, cpu, gloo") == 1
    assert done.stdout.count("results were correct") == 1


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGHUP, marks=pytest.mark.heavy), signal.SIGTERM]
)
def test_a_bench_that_is_told_to_go_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    words = ("bench", "-n", "2", "--seconds", "1000", "--sizes", "1KiB:64MiB")
    with started(*words, folder=tmp_path) as running:
        wait_until(lambda: any(running.temporary.glob(".paceline-bench-*")))
        time.sleep(0.5)
        running.process.send_signal(number)
        assert running.wait().code != 0
        assert running.left_over() == []
        assert list(running.temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--sizes", "4000GiB", ["--sizes", "4000GiB", "64GiB"]),
        ("--sizes", "1", ["4 bytes", "got 1"]),
        ("--sizes", "2MB:1MB", ["the first size"]),
        ("--ops", "all-reduced", ["'all-reduced'", "fix: did you mean all-reduce?"]),
    ],
)
def test_what_cannot_be_measured_is_refused(
    option: str, value: str, named: list[str], capsys
) -> None:
    assert run_verb(["bench", option, value]) == 2
    error = capsys.readouterr().err
    assert [word for word in named if word not in error] == []


def test_ranks_that_are_there_start_no_others(tmp_path: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    done = paceline("bench", "-n", "2", folder=tmp_path, env=env | {"MASTER_PORT": "1"})
    assert done.code == 2
    assert "-n 2 would start more ranks on each of 2" in done.err


def found_by(ranks: int, *, wrong: int = 0) -> Measurement:
    measured = [
        Timing(name, size, 4, [2e-3, 1e-3, 9.0])
        for name in OPERATIONS
        for size in (1_000_000, 4_000_000)
    ]
    mistakes = [Mistake("all-reduce", 1_000_000, 1, 17, 5.0, float("nan"))] if wrong else []
    return Measurement(ranks, 2, "cpu", "", "gloo", "2", measured, 100, wrong, mistakes)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    factors = {each.operation: each.bus_factor for each in results_of(found_by(4))}
    assert factors == {
        "all-reduce": 1.5, "tree": 1.5, "all-gather": 0.75, "reduce-scatter": 0.75, "all-to-all": 0.75, "pair": 1.0,
    }  # fmt: skip
    row = results_of(found_by(4))[0].rows[1]
    assert (row.seconds, row.algbw_gb_per_s, row.busbw_gb_per_s) == (2e-3, 2.0, 3.0)


def test_a_wrong_result_is_said_with_its_rank_and_number(capsys) -> None:
    found = found_by(4, wrong=3)
    results = results_of(found)
    print_results(found, results)
    out = capsys.readouterr().out
    assert "WRONG: 3 of 100 results" in out
    assert "rank 1: all-reduce of 1.0 MB, element 17: got nothing, expected 5" in out
    assert re.search(r"(?m)^4.0 MB +2,000 us +1,000 us +9,000 ms +2 +3  █{24}$", out)
    told = json.loads(json.dumps(as_dict(found, results, ""), allow_nan=False))
    assert (told["right"], told["mistakes"][0]["found"]) == (False, None)
    assert Measurement.from_json(found.as_json()).mistakes[0].rank == 1
