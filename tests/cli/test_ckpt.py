"""Checkpoints can be seen, checked to the last byte and exported; a damaged one is named and never exported."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from paceline.checkpoint.local_storage import LocalStorage
from paceline.checkpoint.manifest import _CHECKSUM, _end
from paceline.checkpoint.remote_storage import RemoteStorage
from paceline.cli.main import run_verb
from support.program import Done, paceline

NET = """
import torch
from safetensors.torch import save_file
from torch.nn.functional import mse_loss
import paceline

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("narrow", torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def forward(self, inputs):
        return self.linear(inputs)

def main(config):
    with paceline.Run(config) as run:
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(40, 4, generator=generator), torch.randn(40, 1, generator=generator)
        net = Net()
        run.model(net)
        optimizer = run.optimizer(torch.optim.AdamW(net.parameters(), lr=0.1))
        paceline.Trainer(run, net, optimizer, data, mse_loss, evaluation=data).fit()
        if run.is_main:
            save_file(net.state_dict(), f"trained.safetensors")

main(paceline.config_from_argv())
"""
SETTINGS = [
    "batch.global_size=16",
    "epochs=3",
    "checkpoint.every=1epoch",
    "checkpoint.best=max:eval_loss",
    "name=net",
]
PART = "part-00001-of-00002.safetensors"
OLD, NEW = "step-000000006", "step-000000009"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on two ranks, and with one that never began."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "net.py").write_text(NET)
    done = paceline("run", "-n", "2", "net.py", *SETTINGS, folder=folder)
    assert done.code == 0, done
    (folder / "runs" / "other").mkdir()
    shutil.copy(folder / "runs" / "net" / "config.toml", folder / "runs" / "other")
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it that may be damaged, as the current folder."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ckpt(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the verb in this process, which is fast."""

    def run(*words: object) -> Done:
        code = run_verb(["ckpt", *map(str, words)])
        return Done(code, *capsys.readouterr())

    return run


def rows(done: Done) -> list[list[str]]:
    return [line.split() for line in done.out.splitlines()]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def age(manifest: Path) -> None:
    """Make a manifest one of a later format."""
    body = manifest.read_bytes().rpartition(_CHECKSUM)[0].replace(b'"format": 1', b'"format": 7')
    manifest.write_bytes(body + _end(body))


def empty(path: Path) -> None:
    path.write_bytes(b"")


PARTS = f"damaged: {PART}"
MANIFEST = "damaged: its manifest"
DAMAGES = [
    # what is done, to which file, and what list and check say of it
    (flip, PART, "ok", PARTS),
    (truncate, PART, PARTS, PARTS),
    (Path.unlink, PART, PARTS, PARTS),
    (flip, "manifest.json", MANIFEST, MANIFEST),
    (empty, "manifest.json", MANIFEST, MANIFEST),
    (age, "manifest.json", "newer: checkpoint format 7", "newer: checkpoint format 7"),
]
NAMES = ["flipped bit", "truncated", "missing", "bit in the manifest", "empty manifest", "newer format"]  # fmt: skip


def test_list_shows_what_there_is(ckpt: Callable[..., Done]) -> None:
    done = ckpt("list", "runs/net")
    head, titles, *found = rows(done)
    assert (done.code, done.err, head) == (0, "", ["runs/net/checkpoints"])
    assert titles == ["step", "samples", "size", "ranks", "metrics", "verdict"]
    assert [(row[0], row[1], row[4], row[5]) for row in found] == [
        ("3", "40", "2", "eval_loss"), ("6", "80", "2", "eval_loss"), ("9", "120", "2", "eval_loss"),
    ]  # fmt: skip
    best = max(found, key=lambda row: float(row[6]))[0]
    for row in found:
        marks = ", ".join(["newest"] * (row[0] == "9") + ["best"] * (row[0] == best))
        assert " ".join(row[7:]) == (f"ok ({marks})" if marks else "ok")


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        ("runs/net/", [3, 6, 9]),
        ("runs/net/checkpoints", [3, 6, 9]),
        (f"runs/net/checkpoints/{OLD}", [6]),
        (f"file://{{folder}}/runs/net/checkpoints/{OLD}/", [6]),
    ],
)
def test_a_run_can_be_named_in_several_ways(
    ckpt: Callable[..., Done], folder: Path, run: str, steps: list[int]
) -> None:
    for action in ("list", "check"):
        done = ckpt(action, run.format(folder=folder), "--json")
        found = json.loads(done.out)["checkpoints"]
        verdicts = [(each["step"], each["verdict"]) for each in found]
        assert (done.code, verdicts) == (0, [(step, "ok") for step in steps])


def test_a_run_may_be_the_current_folder(
    ckpt: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    for at in (".", "checkpoints", f"checkpoints/{OLD}"):
        monkeypatch.chdir(folder / "runs" / "net" / at)
        found = json.loads(ckpt("list", ".", "--json").out)["checkpoints"]
        assert found[-1]["samples"] in {80, 120}


@pytest.mark.parametrize(
    ("to", "here"),
    [("store", "."), ("{folder}/store", "elsewhere"), ("file://{folder}/store", ".")],
)
def test_checkpoints_are_looked_for_where_the_settings_of_the_run_say(
    ckpt: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, folder: Path, to: str, here: str
) -> None:
    (folder / "store").mkdir()
    (folder / "elsewhere").mkdir()
    (folder / "runs/net/checkpoints").rename(folder / "store" / "net")
    config = folder / "runs/net/config.toml"
    place = f'to = "{to.format(folder=folder)}"'
    config.write_text(config.read_text().replace('to = ""', place, 1))
    monkeypatch.chdir(folder / here)
    done = ckpt("check", os.path.relpath(folder / "runs/net"))
    assert (done.code, done.out.count("  ok\n")) == (0, 3), done


def test_json_says_the_same(ckpt: Callable[..., Done]) -> None:
    found = json.loads(ckpt("list", "runs/net", "--json", "--step", 9).out)
    (entry,) = found["checkpoints"]
    size = sum(path.stat().st_size for path in Path(entry["where"]).glob("*.safetensors"))
    assert entry["metrics"].keys() == {"eval_loss"}
    assert entry | {"metrics": {}, "marks": entry["marks"][:1]} == {
        "step": 9, "where": f"runs/net/checkpoints/{NEW}", "verdict": "ok", "problems": [], "samples": 120,
        "size_bytes": size, "ranks": 2, "metrics": {}, "marks": ["newest"],
    }  # fmt: skip


@pytest.mark.parametrize(("damage", "name", "listed", "checked"), DAMAGES, ids=NAMES)
def test_what_is_damaged_is_named_and_never_exported(
    ckpt: Callable[..., Done],
    folder: Path,
    damage: Callable[[Path], None],
    name: str,
    listed: str,
    checked: str,
) -> None:
    damage(Path("runs/net/checkpoints") / NEW / name)
    shown, read = ckpt("list", "runs/net"), ckpt("check", "runs/net")
    assert (shown.code, read.code) == (0, 1)
    assert listed in shown.out.splitlines()[4]
    assert checked in read.out.splitlines()[2]
    assert read.out.count("  ok\n") == 2
    found = json.loads(ckpt("check", "runs/net", "--json").out)["checkpoints"]
    assert [one["verdict"] for one in found] == ["ok", "ok", checked.partition(":")[0]]
    assert ckpt("check", "runs/net", "--step", 6).code == 0
    for run in (["runs/net", "--step", 9], [f"runs/net/checkpoints/{NEW}"]):
        done = ckpt("export", *run, "net.safetensors")
        assert (done.code, done.out) == (3, "")
        assert f"runs/net/checkpoints/{OLD}" in done.err
        assert [path.name for path in folder.iterdir()] == ["runs"]


def test_a_checkpoint_under_the_name_of_another_is_damaged(ckpt: Callable[..., Done]) -> None:
    folder = Path("runs/net/checkpoints")
    (folder / OLD).rename(folder / "step-000000007")
    assert "damaged: its manifest belongs to step 6" in ckpt("check", "runs/net").out


def test_what_lies_beside_the_checkpoints_is_shown(ckpt: Callable[..., Done]) -> None:
    folder = Path("runs/net/checkpoints")
    (folder / "step-000000003").rename(folder / "aside-step-000000003")
    (folder / ".step-000000012.0a1b2c3d").mkdir()
    (folder / ".step-000000012.0a1b2c3d" / PART).write_bytes(bytes(2500))
    (folder / OLD / "manifest.json").unlink()
    done = ckpt("list", "runs/net")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[2].split()[0] == "6"
    assert lines[2].endswith("damaged: its manifest is missing")
    assert lines[3].split()[0] == "9"
    left = "left by an interrupted or running save or deletion"
    assert lines[4] == f"{left}: .step-000000012.0a1b2c3d (2.5 kB)"
    assert lines[5].startswith("set aside: aside-step-000000003 (")
    beside = json.loads(ckpt("list", "runs/net", "--json").out)["beside"]
    assert [item["kind"] for item in beside] == ["leftover", "aside"]


def test_the_same_is_seen_at_an_address(ckpt: Callable[..., Done]) -> None:
    store = fsspec.filesystem("memory")
    store.put("runs/net/checkpoints", "/bucket/net", recursive=True)
    store.rm_file(f"/bucket/net/{OLD}/manifest.json")
    RemoteStorage("memory://bucket/net").set_aside(3)
    done = ckpt("list", "memory://bucket/net")
    assert [line.partition(": ")[0] for line in done.out.splitlines()[3:]] == [
        "set aside", "left by an interrupted or running save or deletion",
    ]  # fmt: skip
    assert ckpt("export", "memory://bucket/net", "net.safetensors").code == 0
    assert ckpt("export", f"runs/net/checkpoints/{NEW}", "local.safetensors").code == 0
    assert Path("net.safetensors").read_bytes() == Path("local.safetensors").read_bytes()
    store.pipe_file(f"/bucket/net/{NEW}/{PART}", b"other")
    assert f"{PART} has 5 bytes instead of" in ckpt("check", "memory://bucket/net").out
    store.rm("/bucket", recursive=True)


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_called_damaged(
    ckpt: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = LocalStorage.chunks

    def chunks(
        storage: LocalStorage, step: int, name: str, **options: bool
    ) -> Iterator[memoryview]:
        if step == 3:
            shutil.rmtree(storage.where(3), ignore_errors=True)
        return read(storage, step, name, **options)

    monkeypatch.setattr(LocalStorage, "chunks", chunks)
    done = ckpt("check", "runs/net")
    assert (done.code, done.out.count("\n"), done.out.count("  ok\n")) == (0, 2, 2)


def test_what_may_not_be_read_or_written_is_said(
    ckpt: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(code: int) -> Callable[..., None]:
        def call(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse(errno.ENOSPC))
        full = ckpt("export", "runs/net", "net.safetensors")
    assert (full.code, os.listdir(".")) == (3, ["runs"])
    assert "net.safetensors: No space left on device" in full.err
    monkeypatch.setattr(LocalStorage, "steps", refuse(errno.EACCES))
    for action in ("list", "check"):
        done = ckpt(action, "runs/net")
        assert (done.code, done.out) == (3, "")
        assert "runs/net/checkpoints: Permission denied" in done.err


def test_no_checkpoints_at_all_is_said(ckpt: Callable[..., Done]) -> None:
    shutil.rmtree("runs/net/checkpoints")
    done = ckpt("list", "runs/net")
    assert (done.code, done.out.splitlines()[0], done.err) == (1, "runs/net/checkpoints", "")
    assert json.loads(ckpt("list", "runs/net", "--json").out)["checkpoints"] == []
    for words in (["check", "runs/net"], ["export", "runs/net", "net.safetensors"]):
        done = ckpt(*words)
        assert (done.code, done.out) == (1, "")
        assert "runs/net/checkpoints\n  fix: " in done.err
    assert not Path("net.safetensors").exists()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


@pytest.mark.parametrize(("words", "step"), [([], 9), (["--step", "6"], 6)])
def test_the_exported_weights_are_those_of_the_checkpoint(
    ckpt: Callable[..., Done], words: list[str], step: int
) -> None:
    done = ckpt("export", "runs/net", "net.safetensors", *words)
    parts = Path(f"runs/net/checkpoints/step-{step:09d}").glob("*.safetensors")
    saved = {name: value for part in parts for name, value in load_file(part).items()}
    wanted = {name[6:]: value for name, value in saved.items() if name.startswith("model.")}
    assert (done.code, done.err) == (0, "")
    assert same(load_file("net.safetensors"), wanted)
    assert (
        {"count", "narrow", "flags", "nothing", "linear.weight", "linear.bias"}
        == wanted.keys()
        != saved.keys()
    )
    with safe_open("net.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": str(step)}
    assert Path("net.safetensors").stat().st_mode & 0o777 == 0o600


def test_the_exported_weights_are_those_that_were_trained_and_load_as_it_says(
    ckpt: Callable[..., Done], trained: Path, folder: Path
) -> None:
    done = ckpt("export", "runs/net", "net.safetensors")
    said = done.out.splitlines()
    assert said[1].startswith("  -> net.safetensors: 6 tensors, ")
    scope: dict[str, object] = {}
    exec("\n".join(said[3:5]), scope)  # noqa: S102
    assert same(scope["weights"], load_file(trained / "trained.safetensors"))
    assert said[5] == "model.load_state_dict(weights)"


def test_the_exported_file_is_the_same_bytes_however_many_ranks_saved_it(
    ckpt: Callable[..., Done],
) -> None:
    two, one = LocalStorage(Path("runs/net/checkpoints")), LocalStorage(Path("one"))
    whole = {
        name: value
        for part in Path(two.where(9)).glob("*.safetensors")
        for name, value in load_file(part).items()
    }
    name, facts = one.write(9, "a1", "part-00001-of-00001.safetensors", memoryview(save(whole)))
    one.commit(9, "a1", replace(two.manifest(9), files={name: facts}))
    for run in ("runs/net", "one"):
        assert ckpt("export", run, f"{Path(run).name}.safetensors").code == 0
    assert Path("net.safetensors").read_bytes() == Path("one.safetensors").read_bytes()


def test_the_newest_good_checkpoint_is_exported(ckpt: Callable[..., Done]) -> None:
    flip(Path("runs/net/checkpoints") / NEW / PART)
    done = ckpt("export", "runs/net", "net.safetensors")
    assert done.code == 0
    assert done.err.startswith(f"skipped: runs/net/checkpoints/{NEW} is {PARTS}")
    assert done.out.startswith(f"runs/net/checkpoints/{OLD}\n")
    for step in ("step-000000003", OLD):
        (Path("runs/net/checkpoints") / step / PART).unlink()
    for words in ([], ["--step", 9]):
        assert ckpt("export", "runs/net", "none.safetensors", *words).code == 3
    assert not Path("none.safetensors").exists()


def test_a_file_is_written_over_only_by_force(ckpt: Callable[..., Done]) -> None:
    Path("net.safetensors").write_text("mine")
    done = ckpt("export", "runs/net", "net.safetensors")
    assert (done.code, Path("net.safetensors").read_text()) == (2, "mine")
    assert "net.safetensors exists" in done.err and "--force" in done.err
    forced = ckpt("export", "runs/net", "--force", "--json", "net.safetensors")
    assert json.loads(forced.out) == {
        "step": 9, "where": f"runs/net/checkpoints/{NEW}", "path": "net.safetensors", "tensors": 6,
        "size_bytes": Path("net.safetensors").stat().st_size, "passed_over": [],
    }  # fmt: skip


MISTAKES = {
    "list runs/nett": ["runs/nett", "did you mean runs/net?"],
    "list nett": ["nett", "did you mean net?"],
    "list runs": ["runs is not a run", "runs/net, runs/other"],
    "list runs/net/config.toml": ["is a file", "it is in: runs/net"],
    "list nowhere/at/all": ["nowhere/at/all", "runs/net, runs/other"],
    "list runs/net runs/other": ["'runs/other'", "paceline ckpt list [RUN] [options]"],
    "list runs/net --jsno": ["--jsno", "--json?"],
    "list file:///nowhere/net": ["file:///nowhere/net", "check the address"],
    "list nope://bucket/net": ["nope", "s3://bucket/folder"],
    "check runs/net --step 7": ["step 7", "3, 6, 9"],
    "check runs/net --step last": ["--step", "'last'", "--step 4"],
    "export runs/net": ["OUT", "paceline ckpt export [RUN] OUT [options]"],
    "export runs/net net.pt": ["net.pt", "net.safetensors"],
    "export runs/net runs": ["runs is a folder", "runs/model.safetensors"],
    "export runs/net no/net.safetensors": ["no folder no", "create it"],
    f"export runs/net runs/net/checkpoints/{NEW}/{PART} --force": ["inside a checkpoint"],
}


def test_bad_input_is_refused_with_its_fix(ckpt: Callable[..., Done]) -> None:
    for line, parts in MISTAKES.items():
        done = ckpt(*line.split())
        assert (done.code, done.out) == (2, ""), line
        assert [part for part in [*parts, "\n  fix: "] if part not in done.err] == [], done.err


def test_settings_that_cannot_be_read_or_are_old_are_refused(ckpt: Callable[..., Done]) -> None:
    config = Path("runs/net/config.toml")
    old = config.read_text().replace("hang_steps", "stuck")
    for text, parts in (
        ("name = = 3\n", ["config.toml is not TOML", "runs/net/checkpoints itself"]),
        (old, ["runs/net/config.toml", "timeout.stuck is now timeout.hang_steps"]),
    ):
        config.write_text(text)
        done = ckpt("list", "runs/net")
        assert (done.code, done.out) == (2, "")
        assert [part for part in parts if part not in done.err] == []


def test_none_of_it_needs_torch(folder: Path) -> None:
    words = [
        ["list", "runs/net"], ["check", "runs/net"], ["export", "runs/net", "net.safetensors"],
        ["list", f"file://{folder}/runs/net/checkpoints"],
    ]  # fmt: skip
    script = (
        "import json, sys\nfrom paceline.cli.main import run_verb\n"
        "assert [run_verb(['ckpt', *words]) for words in json.loads(sys.argv[1])] == [0] * 4\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(words)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
