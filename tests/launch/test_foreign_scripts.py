"""Scripts that do not know Paceline run under `paceline run` as they do under torchrun."""

from __future__ import annotations

import json
import socket
import venv
from pathlib import Path

import pytest

from paceline.launch.environment import free_port, master_of, torchrun_variables
from paceline.launch.script_folder import script_folder
from paceline.launch.spec import LaunchSpec, module, script
from support.program import Done, paceline

VARIABLES = """
import json, os
from pathlib import Path
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"]
Path(f"{os.environ['RANK']}.json").write_text(json.dumps({name: os.environ[name] for name in names}))
"""

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item(), dist.is_torchelastic_launched())
dist.destroy_process_group()
"""

OURS = """
import os, socket, paceline, torch
from paceline.world.process_group import join
import torch.distributed as dist
with join(paceline.RunConfig()) as world:
    total = torch.ones(1)
    dist.all_reduce(total)
    with socket.socket() as probe:
        answer = probe.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    print(world.launcher, total.item(), "open" if answer == 0 else "closed")
"""


def test_each_rank_gets_the_variables_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "any.py").write_text(VARIABLES)
    done = paceline("run", "-n", "2", "any.py", folder=tmp_path, cold=True)
    assert (done.code, done.err) == (0, "")
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert 1024 < int(first["MASTER_PORT"]) < 65536
    assert first.pop("TORCHELASTIC_RUN_ID").startswith("paceline-")
    same = {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "0", "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    assert first == same | {"MASTER_PORT": first["MASTER_PORT"]}
    assert (second["RANK"], second["LOCAL_RANK"], second["ROLE_RANK"]) == ("1", "1", "1")
    assert second["MASTER_PORT"] == first["MASTER_PORT"]


def test_several_hosts_use_the_port_of_their_rendezvous() -> None:
    spec = LaunchSpec(module("x", "x"), 2, node=1, nodes=2, address="host0:29400", attempt=1)
    found = torchrun_variables(spec, 3, master_of(spec))
    wanted = {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    wanted |= {"MASTER_ADDR": "host0", "MASTER_PORT": "29400", "TORCHELASTIC_RESTART_COUNT": "1"}
    wanted |= {"TORCHELASTIC_RUN_ID": "paceline-host0_29400"}
    assert found | wanted == found


def test_a_script_with_init_process_group_alone_joins(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
    (tmp_path / "any.py").write_text(ALL_REDUCE)
    done = paceline("run", "-n", "2", "any.py", folder=tmp_path)
    said = ["[0] sum 3.0 True", "[1] sum 3.0 True"]
    assert (done.code, sorted(done.out.splitlines()), done.err) == (0, said, "")


def test_a_script_that_joins_through_paceline_opens_no_port(tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text(OURS)
    done = paceline("run", "-n", "2", "ours.py", folder=tmp_path)
    lines = [f"[{rank}] paceline 2.0 closed" for rank in range(2)]
    assert (done.code, sorted(done.out.splitlines())) == (0, lines)


PLAIN = "import random\nprint('trained')\n"


def test_ranks_that_each_do_the_whole_work_are_told_so(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    done = paceline("run", "-n", "2", "plain.py", folder=tmp_path, cold=True)
    assert (done.code, sorted(done.out.splitlines())) == (0, ["[0] trained", "[1] trained"])
    assert "warning: 2 ranks ran plain.py, but it never joined" in done.err
    assert paceline("run", "plain.py", folder=tmp_path, cold=True).err == ""
    (tmp_path / "plain.py").write_text(f"{PLAIN}raise SystemExit(4)\n")
    failed = paceline("run", "-n", "2", "plain.py", folder=tmp_path, cold=True)
    assert (failed.code, "never joined" in failed.err) == (4, False)
    page = tmp_path / "runs" / "plain" / "failure.md"
    assert page.exists()
    early = "import sys\nprint('needs two GPUs')\nsys.exit()\ninit_process_group('nccl')\n"
    (tmp_path / "plain.py").write_text(early)
    done = paceline("run", "-n", "2", "plain.py", folder=tmp_path, cold=True)
    assert (done.code, "2 ranks ran plain.py, and ended before" in done.err) == (0, True)
    assert not page.exists()


@pytest.mark.parametrize(
    "text",
    [
        "import os\nprint(os.environ.get('RANK'))",
        "import os\nprint(os.getenv('WORLD_SIZE'))",
        "import share\nprint(share.of_this_process([1, 2, 3]))",
        "import subprocess\nsubprocess.run(['sh', '-c', 'echo $RANK'], check=True)",
        "import multiprocessing as mp\nif __name__ == '__main__':\n    w = mp.Process(target=print)\n    w.start()\n    w.join()",
    ],
)
def test_a_script_that_could_know_its_rank_is_told_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "aware.py").write_text(text)
    share = "import os\ndef of_this_process(files):\n    return files[int(os.environ['RANK'])::2]\n"
    (tmp_path / "share.py").write_text(share)
    done = paceline("run", "-n", "2", "aware.py", folder=tmp_path, cold=True)
    assert (done.code, done.err) == (0, "")


def test_importing_torch_is_not_joining(tmp_path: Path) -> None:
    text = "import torch\nnet = torch.nn.Linear(2, 1)\nnet(torch.ones(3, 2)).sum().backward()\n"
    (tmp_path / "plain.py").write_text(text + "torch.optim.AdamW(net.parameters()).step()\n")
    done = paceline("run", "-n", "2", "plain.py", folder=tmp_path, cold=True)
    assert "never joined" in done.err


FOREIGN = """
import os, sys
assert "paceline" not in sys.modules
print(sys.executable, os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:])
if "fail" in sys.argv and os.environ["RANK"] == "1":
    raise KeyError("no such column")
if "wait" in sys.argv:
    import time
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an interpreter without packages: a venv of its own."""
    folder = tmp_path_factory.mktemp("other") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    return str(folder / "bin" / "python")


def run_foreign(folder: Path, python: str, *words: str) -> Done:
    (folder / "any.py").write_text(FOREIGN)
    command = ("run", "-n", "2", "--python", python, "any.py", *words)
    return paceline(*command, folder=folder, cold=True)


def test_another_interpreter_runs_the_script(tmp_path: Path, other_python: str) -> None:
    done = run_foreign(tmp_path, other_python, "-n", "x")
    said = [f"[{rank}] {other_python} {rank} of 2 -n x" for rank in range(2)]
    assert (done.code, sorted(done.out.splitlines())) == (0, said)
    done = run_foreign(tmp_path, other_python, "fail", "wait")
    assert (done.code, "rank 1 crashed with KeyError" in done.err) == (1, True)
    assert "KeyError: 'no such column'" in done.err
    done = run_foreign(tmp_path, "/nowhere/python")
    assert (done.code, done.out) == (2, "")
    assert "/nowhere/python" in done.err


FAILS_ONCE = """
import os, sys
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("bad sample 17")
"""


def test_a_foreign_run_keeps_logs_exit_codes_and_a_failure_page(tmp_path: Path) -> None:
    (tmp_path / "any.py").write_text(FAILS_ONCE)
    done = paceline("run", "-n", "2", "--max-restarts", "1", "any.py", folder=tmp_path, cold=True)
    folder = tmp_path / "runs" / "any"
    assert done.code == 0
    assert "restarting on 2 ranks (restart 1 of 1)" in done.err
    events = [json.loads(line) for line in (folder / "launches.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["launched", "ended"] * 2
    assert (events[1]["codes"][1], events[3]["codes"]) == (1, [0, 0])
    assert (folder / "ranks" / "0001.log").read_text() == "attempt 0\nattempt 1\n"
    page = (folder / "failure.md").read_text()
    assert "rank 1 failed with ValueError: bad sample 17.\n" in page
    assert "ValueError: bad sample 17" in page
    assert "in step" not in page
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_second_run_of_a_script_at_the_same_time_has_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "any.py").write_text("x = 1\n")
    program = script(str(tmp_path / "any.py"))
    runs = tmp_path / "runs"
    with script_folder(program, runs) as first, script_folder(program, runs) as second:
        assert [Path(first).name, Path(second).name] == ["any", "any-2"]
    with script_folder(program, runs) as again:
        assert Path(again).name == "any"
    (tmp_path / "a file").touch()
    with script_folder(program, tmp_path / "a file") as folder:
        assert folder == ""  # it cannot be written, which does not stop a script
    (tmp_path / "ours.py").write_text("import paceline\n")
    with script_folder(script(str(tmp_path / "ours.py")), tmp_path / "other") as folder:
        assert (folder, (tmp_path / "other").exists()) == ("", False)


LEAVES_ALL_OPEN = """
import sys, weakref
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model, notes = DistributedDataParallel(torch.nn.Linear(2, 1)), open("notes.txt", "w")
weakref.finalize(model.reducer, print, "the reducer was freed").atexit = False
notes.write("all of it")
model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
"""
ENDS = {
    "end": "",
    "exit": "sys.exit()",
    "a function": "def uses_the_variables(): pass",
    "garbage collection": "def uses_the_variables(): pass\nimport atexit, gc; atexit.register(gc.collect)",
    "frozen objects": "def uses_the_variables(): pass\nimport gc; gc.freeze()",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_script_need_not_close_its_files_nor_free_its_model(tmp_path: Path, end: str) -> None:
    """DistributedDataParallel is freed under the GIL, for which gloo's threads may wait: a deadlock at exit."""
    (tmp_path / "any.py").write_text(LEAVES_ALL_OPEN + ENDS[end])
    done = paceline("run", "-n", "1", "any.py", folder=tmp_path)
    assert (done.code, done.out) == (0, "")
    assert (tmp_path / "notes.txt").read_text() == "all of it"
