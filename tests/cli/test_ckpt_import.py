"""A run starts from the files of other programs; a pickle that needs code is refused, and its code never runs."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.checkpoint.local_storage import LocalStorage
from paceline.checkpoint.restore import read_tensors
from paceline.checkpoint.storage import verify
from paceline.cli.main import run_verb
from support.program import Done


class Net(nn.Module):
    """Two layers of equal shape, BatchNorm statistics, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs)).tanh()
        result: torch.Tensor = self.head(self.second(hidden).tanh())
        return result


def trained(
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, *, named: bool = False
) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    parameters: Any = model.named_parameters() if named else model.parameters()
    optimizer = kind(parameters, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture
def ckpt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run the verb in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Done:
        code = run_verb(["ckpt", *map(str, words)])
        return Done(code, *capsys.readouterr())

    return run


def contents(run: str = "runs/net") -> dict[str, torch.Tensor]:
    storage = LocalStorage(Path(run) / "checkpoints")
    (step,) = storage.steps()
    return dict(read_tensors(storage, verify(storage, step)))


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state as it is imported: that of an optimizer without names by the number of each parameter."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    if "param_names" not in optimizer.param_groups[0]:
        names = {parameter: f"#0.{number}" for number, parameter in enumerate(names)}
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        for kind, value in state.items():
            found[f"optimizer.{kind}.{names[parameter]}"] = value
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].dtype == value.dtype, name


def weights_of(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in found.items() if name.startswith("model.")}


KEYS = [
    ("model", "optimizer", "step"),
    ("model_state_dict", "optimizer_state_dict", "global_step"),
    ("state_dict", "optim", "iter_num"),
]


@pytest.mark.parametrize(("weights", "state", "step"), KEYS)
def test_a_file_of_a_plain_script_keeps_weights_optimizer_state_and_step(
    ckpt: Callable[..., Done], weights: str, state: str, step: str
) -> None:
    model, optimizer = trained()
    saved = {weights: model.state_dict(), state: optimizer.state_dict(), step: 3, "epoch": 1}
    torch.save(saved, "net.pt")
    done = ckpt("import", "net.pt", "runs/net")
    assert done.code == 0, done
    assert "optimizer state: exp_avg, exp_avg_sq, step\n" in done.out
    assert f"step: 3, from {step} in the file\n" in done.out
    assert "learning rate in the file: 0.01" in done.out
    assert done.out.endswith("paceline run SCRIPT name=net\n")
    assert_same(contents(), named_state(model, optimizer))
    listed = ckpt("list", "runs/net")
    assert "ok (newest, imported)" in listed.out
    assert ckpt("check", "runs/net").code == 0


def test_a_bare_state_dict_starts_at_step_0(ckpt: Callable[..., Done]) -> None:
    model, _ = trained()
    torch.save(model.state_dict(), "net.pt")
    told = json.loads(ckpt("import", "net.pt", "elsewhere/net", "--json").out)
    assert (told["layout"], told["step"], told["weights"]) == ("state dict", 0, 10)
    assert told["where"] == "elsewhere/net/checkpoints/step-000000000"
    assert (told["optimizer_state"], told["learning_rate"], told["epochs"]) == ([], None, 0)
    assert contents("elsewhere/net").keys() == {f"model.{name}" for name in model.state_dict()}


def test_a_lightning_checkpoint_loses_the_prefix_of_its_module(ckpt: Callable[..., Done]) -> None:
    model, optimizer = trained()
    weights = {f"model._orig_mod.{name}": value for name, value in model.state_dict().items()}
    saved = {"epoch": 0, "global_step": 3, "pytorch-lightning_version": "2.5.0", "loops": {}}
    saved |= {"state_dict": weights, "callbacks": {}, "lr_schedulers": []}
    saved["optimizer_states"] = [optimizer.state_dict()]
    torch.save(saved, "last.ckpt")
    done = ckpt("import", "last.ckpt", "runs/net")
    assert "last.ckpt (Lightning checkpoint)\n" in done.out
    assert "names: removed the prefix model._orig_mod.\n" in done.out
    assert_same(contents(), named_state(model, optimizer))


@pytest.mark.parametrize("named", [True, False])
def test_an_accelerate_folder_keeps_optimizer_state_scheduler_and_the_number_of_updates(
    ckpt: Callable[..., Done], tmp_path: Path, named: bool
) -> None:
    model, optimizer = trained(named=named)
    weights = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    folder = tmp_path / "state"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 8], last_epoch=-1)
    scheduler.last_epoch = 6  # two processes
    torch.save(scheduler.state_dict(), folder / "scheduler.bin")
    torch.save({"step": 3}, folder / "random_states_0.pkl")
    done = ckpt("import", "state", "runs/net")
    assert "state (Accelerate folder)" in done.out
    assert "stepped 6 times; run.track" in done.out
    assert "warning: the scheduler was stepped 2 times per step" in done.out
    assert "step: 3, from the number of updates in the optimizer state\n" in done.out
    assert "not imported: random_states_0.pkl\n" in done.out
    expected = named_state(model, optimizer)
    del expected["model.head.weight"]
    assert_same(contents(), expected)


def test_an_accelerate_folder_with_a_pickle_keeps_the_order(
    ckpt: Callable[..., Done], tmp_path: Path
) -> None:
    model, optimizer = trained(lambda parameters, lr: torch.optim.SGD(parameters, lr, 0.9))
    folder = tmp_path / "state"
    folder.mkdir()
    weights = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save(weights, folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    done = ckpt("import", "state", "runs/net", "--step", "7")
    assert "names: removed the prefix module.\n" in done.out
    assert "step: 7\n" in done.out
    assert_same(contents(), named_state(model, optimizer))


def test_weights_alone_start_a_new_training(ckpt: Callable[..., Done]) -> None:
    model, optimizer = trained()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(saved, "net.pt")
    done = ckpt("import", "net.pt", "runs/net", "--weights-only", "--strip-prefix", "first.")
    assert "schedulers: left out, as asked by --weights-only\nstep: 0\n" in done.out
    found = contents()
    assert {"model.weight", "model.bias", "model.second.weight"} <= found.keys()
    assert found == weights_of(found)


def test_the_snapshot_of_the_tutorial_counts_epochs(ckpt: Callable[..., Done]) -> None:
    model, _ = trained()
    torch.save({"MODEL_STATE": model.state_dict(), "EPOCHS_RUN": 10}, "snapshot.pt")
    assert "after 10 epochs" in ckpt("import", "snapshot.pt", "runs/net").out
    assert contents().keys() == {f"model.{name}" for name in model.state_dict()}


def test_other_weights_of_a_file_are_chosen_by_their_key(ckpt: Callable[..., Done]) -> None:
    model, optimizer = trained()
    average = torch.optim.swa_utils.AveragedModel(Net())
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ema": average.state_dict(), "best": 0.9}  # fmt: skip
    torch.save({"app": saved, "step": 3}, "net.pt")
    done = ckpt("import", "net.pt", "runs/net", "--weights", "ema")
    assert "optimizer state: left out, because it belongs to the weights of model\n" in done.out
    assert "not imported: model, best\n" in done.out
    assert_same(contents(), {f"model.{name}": value for name, value in average.module.state_dict().items()})  # fmt: skip
    done = ckpt("import", "net.pt", "runs/other", "--weights", "emma")
    assert (done.code, "--weights emma" in done.err) == (2, True)
    torch.save({"generator": model.state_dict()}, "gan.pt")
    done = ckpt("import", "gan.pt", "runs/gan")
    assert "name the key that holds them: --weights generator" in done.err


def sharded(folder: Path, model: nn.Module) -> dict[str, str]:
    """Write a Hugging Face folder of two shards."""
    folder.mkdir()
    files = {}
    for name in model.state_dict():
        kind = 1 if name.startswith("first") else 2
        files[name] = f"model-{kind:05d}-of-00002.safetensors"
    for file in set(files.values()):
        part = {name: value.clone() for name, value in model.state_dict().items() if files[name] == file}  # fmt: skip
        save_file(part, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


def test_a_sharded_hugging_face_folder_is_read_whole(
    ckpt: Callable[..., Done], tmp_path: Path
) -> None:
    model, _ = trained()
    sharded(tmp_path / "hf", model)
    done = ckpt("import", "hf", "memory://imported/net")
    assert "hf (Hugging Face folder)" in done.out
    assert done.out.endswith("paceline run SCRIPT checkpoint.to=memory://imported name=net\n")
    assert ckpt("check", "memory://imported/net").code == 0
    assert ckpt("export", "memory://imported/net", "out.safetensors").code == 0
    assert_same(load_file("out.safetensors"), dict(model.state_dict()))


class Hostile:
    """Creates a file where it is unpickled without restrictions."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_pickle_is_refused_and_never_executed(
    ckpt: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    saved = {"model": trained()[0].state_dict(), "extra": Hostile()}
    torch.save(saved, "net.pt", _use_new_zipfile_serialization=zipped)
    done = ckpt("import", "net.pt", "runs/net")
    assert done.code == 3
    assert "posix.mkdir" in done.err
    assert not Path("executed").exists()
    assert not Path("runs").exists()
    torch.load("net.pt", weights_only=False)
    assert Path("executed").exists()  # the file does what this test says


def test_copies_of_tensors_are_private_and_removed(
    ckpt: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look(source: Path, scratch: Path) -> Any:
        seen.append(stat.S_IMODE(scratch.stat().st_mode))
        raise KeyboardInterrupt

    torch.save({}, "net.pt")
    monkeypatch.setattr("paceline.checkpoint.importing.source.read_torch_file", look)
    assert ckpt("import", "net.pt", "runs/net").code == 130
    assert seen == [0o700]
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt"]


def make_truncated(folder: Path) -> None:
    torch.save({"model": {"a": torch.zeros(1000)}}, folder / "source")
    os.truncate(folder / "source", 2000)


def make_truncated_safetensors(folder: Path) -> None:
    save_file({"a": torch.zeros(1000)}, folder / "source.safetensors")
    os.truncate(folder / "source.safetensors", 2000)


def make_dcp(folder: Path) -> None:
    (folder / "source" / "model_0").mkdir(parents=True)
    (folder / "source" / "model_0" / ".metadata").write_bytes(b"\x80")


def make_missing_shard(folder: Path) -> None:
    sharded(folder / "source", Net())
    (folder / "source" / "model-00002-of-00002.safetensors").unlink()


def make_wrong_index(folder: Path) -> None:
    sharded(folder / "source", Net())
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (folder / "source" / "model.safetensors.index.json").write_text(json.dumps(index))


def make_incomplete_shard(folder: Path) -> None:
    sharded(folder / "source", Net())
    shard = folder / "source" / "model-00001-of-00002.safetensors"
    save_file({"first.bias": torch.zeros(4)}, shard)


def saved(value: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(value, folder / "source")


def empty_folder(folder: Path) -> None:
    (folder / "source").mkdir()


REFUSED: dict[str, tuple[Callable[[Path], None], str, list[str]]] = {
    "truncated": (make_truncated, "source", ["cannot read source", "copy the file again"]),
    "truncated safetensors": (make_truncated_safetensors, "source.safetensors", ["tensors end", "copy the file again"]),
    "a text": (lambda folder: (folder / "source").write_text("weights"), "source", ["cannot read source", "copy the file again"]),
    "an empty folder": (empty_folder, "source", ["source", "model.safetensors"]),
    "DCP": (make_dcp, "source", ["source/model_0", "format_utils dcp_to_torch source/model_0"]),
    "a missing shard": (make_missing_shard, "source", ["model-00002-of-00002.safetensors", "copy them"]),
    "a wrong index": (make_wrong_index, "source", ["'../secret.safetensors'", "save_pretrained"]),
    "an incomplete shard": (make_incomplete_shard, "source", ["model-00001-of-00002.safetensors", "first.weight"]),
    "a module": (saved(Net()), "source", [".Net, ", '{"model": model.state_dict()']),
    "no weights": (saved({"args": {"lr": 1}, "epoch": 3}), "source", ["args, epoch", '{"model": model.state_dict()']),
    "no tensor": (saved({"model": {"a": torch.zeros(1), "b": "text"}}), "source", ["b in the state dict", "str"]),
    "nothing": (empty_folder, "nowhere", ["nowhere", "check the path"]),
}  # fmt: skip


@pytest.mark.parametrize(("make", "source", "parts"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_imported_is_named(
    ckpt: Callable[..., Done],
    tmp_path: Path,
    make: Callable[[Path], None],
    source: str,
    parts: list[str],
) -> None:
    make(tmp_path)
    done = ckpt("import", source, "runs/net")
    assert done.code in {2, 3}
    assert [part for part in [*parts, "\n  fix: "] if part not in done.err] == [], done.err
    assert not (tmp_path / "runs").exists()


def test_a_run_with_checkpoints_is_never_changed(ckpt: Callable[..., Done]) -> None:
    save_file({"a": torch.zeros(2)}, "net.safetensors")
    assert ckpt("import", "net.safetensors", "runs/net").code == 0
    done = ckpt("import", "net.safetensors", "runs/net", "--step", "5")
    assert done.code == 2
    assert "runs/net" in done.err and "step 0" in done.err and "a new run" in done.err
    for words, problem in [
        (["runs/net/checkpoints"], "runs/net/checkpoints"),
        (["runs/new", "--step", "-1"], "got -1"),
        (["runs/new", "--strip-prefix", "b."], "prefix b.: a"),
    ]:
        done = ckpt("import", "net.safetensors", *words)
        assert (done.code, problem in done.err) == (2, True), done
