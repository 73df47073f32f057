"""Words and variables reach every rank as they were meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.program import Done, paceline

RECORD_ARGUMENTS = """
import json, os, sys
from pathlib import Path
Path(f"words-{os.environ['RANK']}.json").write_text(json.dumps(sys.argv[1:]))
"""
UGLY = ["two words", "it's", 'a "quote"', "$(touch hacked)", "`touch hacked`", "a;b && c | d > e", "line\nbreak", "gr\u00fc\u00dfe \u2603", "*", "~", "", "-1", "\\n", "%s{}"]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "arrive"),
    [
        (["-n", "2"], UGLY),
        (["-n2"], UGLY),
        (["--ranks=2", "--"], ["--", *UGLY, "-n", "5"]),
        (["--max-restarts", "0"], ["seed=3", "--lr.base", "0.1", "name=x", "--help"]),
        (["--"], ["a", "--", "b", "--ranks", "7"]),
        ([], []),
    ],
)
def test_words_after_the_script_arrive_exactly(
    tmp_path: Path, options: list[str], arrive: list[str]
) -> None:
    (tmp_path / "words.py").write_text(RECORD_ARGUMENTS)
    done = paceline("run", *options, "words.py", *arrive, folder=tmp_path, cold=True)
    found = {file.name: json.loads(file.read_text()) for file in tmp_path.glob("words-*.json")}
    assert (done.code, done.err) == (0, "")
    assert found == {
        f"words-{rank}.json": arrive for rank in range(2 if "2" in "".join(options) else 1)
    }
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["-n", "4", "a"], "-n 4"),
        (["a", "--ranks=3"], "--ranks=3"),
        (["--stop_after", "1h"], "--stop_after 1h"),
    ],
)
def test_an_option_after_the_script_goes_to_the_script_with_a_hint(
    tmp_path: Path, words: list[str], typed: str
) -> None:
    (tmp_path / "words.py").write_text(RECORD_ARGUMENTS)
    done = paceline("run", "words.py", *words, folder=tmp_path, cold=True)
    assert json.loads((tmp_path / "words-0.json").read_text()) == words
    assert (done.code, f"paceline run {typed} words.py" in done.err) == (0, True)


THREADS = """
import os, torch, paceline
from paceline.world.process_group import join
asked = int(os.environ["OMP_NUM_THREADS"])
before = torch.get_num_threads() in {asked, min(asked, os.cpu_count())}  # some builds cap it at the cores
with join(paceline.config_from_argv()) as world:
    print(world.rank, world.size, world.launcher, os.environ["OMP_NUM_THREADS"], before, torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (["-n", "2", "threads.py"], {}, ["[0] 0 2 paceline 1 True 1", "[1] 1 2 paceline 1 True 1"]),
        (["threads.py", "threads=2"], {"OMP_NUM_THREADS": "3"}, ["0 1 paceline 3 True 2"]),
    ],
)
def test_a_rank_takes_one_thread_unless_told_otherwise(
    tmp_path: Path, words: list[str], env: dict[str, str], said: list[str]
) -> None:
    (tmp_path / "threads.py").write_text(THREADS)
    done = paceline("run", *words, folder=tmp_path, env=env, cold=True)
    assert (done.code, sorted(done.out.splitlines()), done.err) == (0, said, "")


def test_a_script_finds_the_modules_beside_it_and_runs_as_main(tmp_path: Path) -> None:
    home = tmp_path / "a folder"
    home.mkdir()
    (home / "beside.py").write_text("WORD = 'found'\n")
    (home / "main.py").write_text(
        "import beside\nif __name__ == '__main__':\n    print(beside.WORD)\n"
    )
    assert paceline("run", "a folder/main.py", folder=tmp_path, cold=True) == Done(0, "found\n", "")
