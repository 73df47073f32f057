"""`%%paceline` in a real Jupyter kernel: live output, curves, failures, interrupts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.cli.init import script_text
from support.kernel import Kernel, Shown, started_kernel
from support.program import processes_with, wait_until

pytestmark = pytest.mark.skipif(
    not find_spec("ipykernel"), reason="needs ipykernel (pip install ipykernel)"
)
TRAINING = script_text("cell")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with started_kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        yield kernel


@pytest.fixture
def kernel(running: Kernel, tmp_path: Path) -> Kernel:
    """The kernel, in the folder of the test."""
    assert not running.run(f"import os; os.chdir({str(tmp_path)!r})").error
    return running


def scripts_in(folder: Path) -> list[Path]:
    return sorted((folder / "runs" / "cells").iterdir())


def ranks_of(kernel: Kernel) -> list[str]:
    """Return the processes that the kernel has started and that still run."""
    return [words for words in processes_with(kernel.mark).values() if "rank_local" in words]


def test_a_cell_trains_on_two_ranks_with_the_bits_of_one_and_curves_below_it(
    kernel: Kernel, tmp_path: Path
) -> None:
    words = "-n 2 name=two epochs=3 log.every_steps=1"
    shown = kernel.run(f"%%paceline {words}\n{TRAINING}")
    alone = kernel.run(f"%%paceline name=one epochs=3\n{TRAINING}")
    bits = [re.findall(r"optimizer state ([0-9a-f]{16})", one.stdout) for one in (shown, alone)]
    assert bits[0] == bits[1] and len(bits[0]) == 1
    assert (shown.error, shown.stderr) == ({}, "")
    assert "; 2 ranks, 2 lanes each" in shown.stdout
    assert re.search(r"^done: 18 steps .* state [0-9a-f]{16}\n", shown.stdout, re.MULTILINE)
    loss, metrics = shown.drawings
    assert "loss of two, step 18 of 18" in loss
    assert "metrics of two, step 18 of 18" in metrics
    assert ">acc<" in metrics
    text = shown.displays[-2]["text/plain"]
    assert re.fullmatch(r"loss of two, step 18 of 18\ntraining  \S+  2\.\d+ to 0\.\d+", text)
    [file] = [one for one in scripts_in(tmp_path) if words in one.read_text()]
    assert file.read_text() == f"# cell {words}\n{TRAINING}"
    assert re.fullmatch(rf"runs/cells/{file.name} finished after [\d.]+ s", shown.updates[-1])


def test_lines_and_progress_come_while_the_ranks_run(kernel: Kernel, tmp_path: Path) -> None:
    waits = (
        "import time\nfrom pathlib import Path\n"
        "print('first line')\nprint('half of it', end='\\r')\n"
        "while not Path('go').exists():\n    time.sleep(0.05)\nprint('last line')\n"
    )

    def let_go(shown: Shown) -> None:
        if shown.stdout == "first line\n" and "half of it" in shown.updates:
            (tmp_path / "go").touch()

    shown = kernel.run(f"%%paceline name=waits-v1.5\n{waits}", let_go)
    assert (shown.error, shown.stdout) == ({}, "first line\nlast line\n")
    assert (tmp_path / "runs" / "waits-v1.5" / "ranks" / "0000.log").is_file()
    assert shown.drawings == []


def test_a_cell_imports_modules_beside_the_notebook_and_sees_no_variable_of_it(
    kernel: Kernel, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("value = 7\n")
    kernel.run("secret = 1; word = 'a=1'")
    shown = kernel.run(
        "%%paceline --max-restarts 0 {word} -n 4\n"
        "import sys\nimport beside\nprint(beside.value, 'secret' in globals(), sys.argv[1:])\n"
    )
    assert shown.error == {}
    assert shown.stdout == "7 False ['a=1', '-n', '4']\n"


def test_a_failing_cell_shows_the_verdict_of_the_run_and_no_traceback_of_ours(
    kernel: Kernel, tmp_path: Path
) -> None:
    cell = TRAINING.replace("    images, labels = batch\n", "    images, labels = batch[:0]\n", 1)
    shown = kernel.run(f"%%paceline -n 2 name=bad\n{cell}")
    assert "CellFailed: exit code 1" in shown.problem
    said = re.sub(r"\x1b\[[\d;]*m", "", shown.stderr)
    assert "crashed with ValueError" in said  # one rank, or all if none was stopped in time
    (file,) = scripts_in(tmp_path)
    line = 2 + cell[: cell.index("batch[:0]")].count(
        "\n"
    )  # the magic is the first line of the cell
    assert f'File "runs/cells/{file.name}", line {line}, in loss_of' in said
    assert "\n  run the cell again: %%paceline -n 2 name=bad\n" in said
    page = (tmp_path / "runs" / "bad" / "failure.md").read_text()
    assert "    run the cell again: %%paceline -n 2 name=bad\n" in page
    assert "kernel" not in page


def test_a_mistake_on_the_line_is_refused_with_its_fix(kernel: Kernel) -> None:
    for line, problem, fix in (
        ("--rank 2", "--rank", "--ranks?"),
        ("name='x", "name='x", "close the quotation mark"),
        ("seeed=3", "'seeed'", "seed?"),
    ):
        shown = kernel.run(f"%%paceline {line}\n{TRAINING}")
        said = re.sub(r"\x1b\[[\d;]*m", "", shown.stderr)
        assert problem in said and fix in said.partition("  fix: ")[2]
        assert shown.error["ename"] == "CellFailed" and "exit code 2" in shown.error["evalue"]
    shown = kernel.run("%%paceline --help\npass\n")
    assert shown.error == {}
    assert shown.stdout.startswith("usage: %%paceline [options] [SETTING=VALUE ...]\n")


def test_an_interrupt_saves_and_the_cell_resumes(kernel: Kernel, tmp_path: Path) -> None:
    asked = []

    def interrupt(shown: Shown) -> None:
        if "epoch 2/" in shown.stdout and not asked:
            asked.append(True)
            kernel.interrupt()

    cell = f"%%paceline -n 2 name=long epochs=100000\n{TRAINING}"
    shown = kernel.run(cell, interrupt)
    assert shown.problem.startswith("CellFailed: stopped after saving a checkpoint (exit code 75)")
    said = re.findall(
        r"Stopped by Ctrl-C at step ([\d,]+), checkpoint saved", shown.stdout + shown.stderr
    )
    assert len(said) == 1, "the ranks and the launcher do not both say it"
    assert ranks_of(kernel) == []
    assert "loss of long, step " in shown.drawings[0]
    steps = int(said[0].replace(",", "")) + 2
    again = kernel.run(f"%%paceline name=long steps={steps} resume=changed\n{TRAINING}")
    assert again.error == {}
    assert f"resumed after step {said[0]}\n" in again.stdout


def test_an_interrupted_script_that_saves_nothing_just_ends(kernel: Kernel) -> None:
    asked = []

    def interrupt(shown: Shown) -> None:
        if "here" in shown.stdout and not asked:
            asked.append(True)
            kernel.interrupt()

    shown = kernel.run("%%paceline\nimport time\nprint('here')\ntime.sleep(300)\n", interrupt)
    assert shown.problem == "CellFailed: interrupted; all ranks were stopped"
    assert ranks_of(kernel) == []
    assert kernel.run("print('still here')").stdout == "still here\n"


def test_the_ranks_end_with_the_kernel(tmp_path: Path) -> None:
    def kill(shown: Shown) -> None:
        if "here" in shown.stdout:
            raise KeyboardInterrupt  # the test leaves the cell, and the kernel is killed

    with contextlib.suppress(KeyboardInterrupt), started_kernel(tmp_path) as kernel:
        kernel.run("%%paceline -n 2\nimport time\nprint('here')\ntime.sleep(300)\n", kill)
    wait_until(lambda: not processes_with(kernel.mark), "all processes are gone")


def test_in_a_cell_of_the_notebook_itself_the_settings_are_the_defaults(
    kernel: Kernel, tmp_path: Path
) -> None:
    shown = kernel.run(
        "import sys, paceline\n"
        "assert len(sys.argv) > 1, sys.argv\n"
        "print(paceline.config_from_argv() == paceline.RunConfig())\n"
    )
    assert (shown.error, shown.stdout) == ({}, "True\n")
    (tmp_path / "own.py").write_text("import paceline\nprint(paceline.config_from_argv().seed)\n")
    assert kernel.run("%run own.py seed=3").stdout == "3\n"


def test_loading_the_extension_imports_no_torch(kernel: Kernel) -> None:
    assert kernel.run("import sys; print('torch' in sys.modules)").stdout == "False\n"
