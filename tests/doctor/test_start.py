"""The cost of a start is measured; a packed environment works, whatever happens during unpacking."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.doctor.pack import pack, snippet
from paceline.doctor.startup_run import measure_startup
from paceline.errors import ConfigError, EnvironmentUnfit, TrainingError
from support.program import paceline, started, wait_for

STEPS = """
import pathlib, torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(10**9):
    weight.sum().backward()
    optimizer.step()
    pathlib.Path("steps").write_text(str(step))
"""


def test_a_training_is_ended_at_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(STEPS)
    start = measure_startup(["path", "train.py"], 120, trace=False)
    assert start.stepped and not (tmp_path / "steps").exists()
    torch = next(one for one in start.packages if one.name == "torch")
    assert torch == max(start.packages, key=lambda one: one.opened)
    assert torch.import_s > 0 and torch.opened > 100
    assert start.whole_s > torch.import_s and start.calls == -1


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_a_program_without_steps_is_counted_to_its_end_with_all_its_calls(tmp_path: Path):
    (tmp_path / "tool.py").write_text(
        "import json, sys\nopen(__file__)\nassert sys.argv[1:] == ['-x']\nsys.exit(0)\n"
    )
    done = paceline("doctor", "--startup", "tool.py", "--json", "--", "-x", folder=tmp_path)
    said = json.loads(done.out)
    assert (done.code, said["ok"], said["stepped"]) == (0, True, False)
    keys = "what whole_s stepped packages opened calls not_found kind uncompiled findings ok"
    assert set(said) == {*keys.split()}
    assert said["calls"] > said["opened"] > 0
    own = next(one for one in said["packages"] if one["name"] == "(your own files)")
    assert own["opened"] > 0


def test_a_program_that_fails_or_hangs_is_told(tmp_path: Path):
    (tmp_path / "bad.py").write_text("raise ValueError('no data')")
    with pytest.raises(TrainingError, match="ValueError: no data"):
        measure_startup(["path", str(tmp_path / "bad.py")], 60)
    (tmp_path / "gone.py").write_text("import os; os._exit(3)")
    with pytest.raises(EnvironmentUnfit, match="before its first measurement"):
        measure_startup(["path", str(tmp_path / "gone.py")], 60)
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    assert not measure_startup(["path", str(tmp_path / "slow.py")], 15, trace=False).stepped


SLEEPS = "import pathlib, time; pathlib.Path('asleep').touch(); time.sleep(600)"


def test_a_program_that_sleeps_is_ended_with_all_that_watches_it(tmp_path: Path):
    """Once at its time, traced and not; once at a signal. `paceline` sees that nothing is left."""
    (tmp_path / "sleepy.py").write_text(SLEEPS)
    done = paceline("doctor", "--startup", "sleepy.py", "--wait", "15", folder=tmp_path)
    assert "s to its end" in done.out, done.err
    (tmp_path / "asleep").unlink()
    with started("doctor", "--startup", "sleepy.py", folder=tmp_path) as running:
        wait_for(tmp_path / "asleep")
        running.process.send_signal(signal.SIGTERM)
        assert running.wait().code == 128 + signal.SIGTERM
        assert running.left_over() == []
        assert list(running.temporary.glob("paceline-*")) == []


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small virtual environment with a package and a program."""
    home = tmp_path_factory.mktemp("shared") / "my env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    packages = next(home.glob("lib/python*/site-packages"))
    (packages / "tool.py").write_text("import sys\ndef main():\n    print(sys.prefix, __file__)\n")
    (packages / "own.pth").write_text("/home/me/code\n")
    (home / "bin" / "tool").write_text(
        f"#!/bin/sh\n'''exec' '{home}/bin/python' \"$0\" \"$@\"\n' '''\nimport tool\ntool.main()\n"
    )
    (home / "bin" / "tool").chmod(0o755)
    return home


def unpack(packed, root: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, str(packed.unpacker), str(root)]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def test_many_unpack_once_and_the_original_is_no_longer_needed(environment: Path, tmp_path: Path):
    packed = pack(environment, tmp_path / "packed")
    root = tmp_path / "node"
    unpacking = [unpack(packed, root) for _ in range(4)]
    ended = [process.communicate(timeout=90) for process in unpacking]
    assert ended == [(f"{root / packed.name}\n", "")] * 4
    place = root / packed.name
    names = {file.name for file in root.iterdir()}
    assert names == {packed.name, f"{packed.name}.lock"}
    assert root.stat().st_mode & 0o777 == 0o700
    hidden = environment.rename(environment.with_name("hidden"))
    try:
        python = [place / "bin" / "python", "-c", "import tool; tool.main()"]
        for words in (python, [place / "bin" / "tool"]):
            said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            assert said.startswith(f"{place} {place}/lib/")
        activate = ["bash", "-c", f"source '{place}/bin/activate' && command -v tool"]
        said = subprocess.run(activate, capture_output=True, text=True, check=True).stdout
        assert said == f"{place}/bin/tool\n"
    finally:
        hidden.rename(environment)
    begun = place.stat().st_mtime_ns
    unpack(packed, root).communicate(timeout=90)
    assert place.stat().st_mtime_ns == begun
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "packed").iterdir()} == {0o600}
    assert packed.outside == ("/home/me/code",)
    assert str(packed.unpacker) in snippet(packed) and packed.place in snippet(packed)


def test_what_a_batch_script_is_told_is_quoted(environment: Path, tmp_path: Path):
    whole = pack(environment, tmp_path / "pack me")
    packed = replace(whole, name="a\nb; touch PWNED", python="/opt/$(x)/python3")
    words = shlex.split(snippet(packed), comments=True)
    activate = f"{packed.place}/bin/activate"
    assert words[-4:] == [packed.python, str(packed.unpacker), "source", activate]
    assert words[:2] == ["srun", "--nodes=$SLURM_JOB_NUM_NODES"]
    assert pack(environment, tmp_path / "b").name == whole.name


def test_damaged_bytes_are_refused_and_nothing_is_left(environment: Path, tmp_path: Path):
    packed = pack(environment, tmp_path / "packed")
    content = bytearray(packed.archive.read_bytes())
    content[content.index(b"print(sys.prefix")] ^= 1
    packed.archive.write_bytes(content)
    process = unpack(packed, tmp_path / "node")
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (1, "")
    assert "is damaged" in err and "fix: " in err
    assert [file.name for file in (tmp_path / "node").iterdir()] == [f"{packed.name}.lock"]


def test_a_killed_one_leaves_no_half_environment(environment: Path, tmp_path: Path):
    packed = pack(environment, tmp_path / "packed")
    root = tmp_path / "node"
    half = root / f".{packed.name}.123"
    half.mkdir(parents=True)
    (root / packed.name).mkdir()  # of somebody who did not come to its end
    root.chmod(0o700)
    assert unpack(packed, root).communicate(timeout=90)[0] == f"{root / packed.name}\n"
    assert not half.exists() and (root / packed.name / "bin" / "python").exists()


def test_a_folder_that_others_can_write_is_no_place_for_programs(environment: Path, tmp_path: Path):
    packed = pack(environment, tmp_path / "packed")
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name in ("open", "link"):
        process = unpack(packed, tmp_path / name)
        assert "only this user can write" in process.communicate(timeout=90)[1]
        assert process.returncode == 1


def test_what_is_no_environment_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="pyvenv.cfg") as caught:
        pack(tmp_path, tmp_path / "packed")
    assert "conda-pack" in caught.value.fix
    assert not (tmp_path / "packed").exists()
