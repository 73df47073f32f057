"""Does a loop written by hand stop, finish, resume and refuse misuse as a Trainer does?"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module

import paceline
from paceline.checkpoint.export import export_newest
from paceline.checkpoint.find import find_catalog
from paceline.config import config_from_words
from paceline.errors import ConfigError, Stopped, TrainingError
from paceline.train.run_step import with_length
from support.processes import run_on_processes
from support.program import paceline as run_paceline

DATA = (torch.arange(40.0).view(40, 1),)
SETTINGS = {"batch.global_size": 8, "batch.lanes": 4, "epochs": 2, "checkpoint.every": "end"}


def config_in(folder: Path, **settings: object) -> paceline.RunConfig:
    from paceline.config.values import with_settings

    return with_settings(paceline.RunConfig(), SETTINGS | {"runs": str(folder)} | settings)


def parts(run: paceline.Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = run.model(nn.Linear(1, 1))
    return model, run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-5))


def loss_of(model: nn.Module):
    return lambda batch: model(batch[0]).square().mean()


def events(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def train(config: paceline.RunConfig, *, finish_at: int = -1, leave_at: int = -1) -> int:
    """Return the number of steps that this start made."""
    count = 0
    with paceline.Run(config) as run:
        model, optimizer = parts(run)
        for step in run.steps(DATA):
            run.update(optimizer, loss_of(model), step)
            count += 1
            if step.index == finish_at:
                run.finish("it is good enough")
            if step.index == leave_at:
                break
    return count


def test_model_and_optimizer_stay_the_same_objects(tmp_path: Path) -> None:
    with paceline.Run(config_in(tmp_path)) as run:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert run.model(model) is model
        assert run.optimizer(optimizer) is optimizer


def test_a_finished_run_is_complete_and_a_rerun_makes_no_step(tmp_path: Path, capsys) -> None:
    assert train(config_in(tmp_path), finish_at=3) == 4
    assert train(config_in(tmp_path)) == 0
    assert "this run is complete" in capsys.readouterr().out
    assert [event["step"] for event in events(tmp_path, "RunEnded")] == [4, 4]


@pytest.mark.parametrize("every", ["end", "1steps"])
def test_break_completes_the_step_and_finishes_the_run(every: str, tmp_path: Path) -> None:
    config = config_in(tmp_path, **{"checkpoint.every": every})
    assert train(config, leave_at=2) == 3
    assert events(tmp_path, "CheckpointSaved")[-1]["step"] == 3
    assert train(config) == 0


def double(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


def rebuild(model: nn.Sequential) -> None:
    """What merging adapters does: other parameters under other names."""
    model[0] = nn.Sequential(nn.Linear(1, 1))


AFTER_LOOP = {"none": lambda model: None, "double": double, "rebuild": rebuild}
Weights = dict[str, list[Any]]


def change_after_loop(
    folder: Path,
    change: str,
    epochs: int = 2,
    ranks: tuple[int, ...] = (0, 1),
    leaves: bool = False,
) -> Weights:
    """Train, change the model after the loop on some ranks, and return the weights that this rank then has."""
    with paceline.Run(config_in(folder, epochs=epochs)) as run:
        model = run.model(nn.Sequential(nn.Linear(1, 1)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
        for step in run.steps(DATA):
            run.update(optimizer, loss_of(model), step)
            if leaves:
                break
        if run.world.rank in ranks:
            torch.manual_seed(0)
            AFTER_LOOP[change](model)
            run.save()
    return {name: value.tolist() for name, value in model.state_dict().items()}


def exported(folder: Path, step: int | None = None) -> Weights:
    catalog, out = find_catalog(str(folder / "run")), folder / "out.safetensors"
    export_newest(catalog if step is None else catalog.narrowed(step), out, force=True)
    return {name: value.tolist() for name, value in load_file(out).items()}


@pytest.mark.parametrize("change", ["double", "rebuild"])
def test_what_changes_the_model_after_the_loop_is_exported_and_never_resumed_from(
    change: str, tmp_path: Path
) -> None:
    def train_on(ranks: int, change: str, folder: Path = tmp_path, epochs: int = 2) -> Weights:
        given = {"folder": folder, "change": change, "epochs": epochs}
        return run_on_processes(change_after_loop, ranks, tmp_path, {}, given)[0]

    changed = train_on(2, change)
    assert exported(tmp_path) == changed
    assert exported(tmp_path, step=10) != changed, "a step that is named is that checkpoint"
    assert [event["step"] for event in events(tmp_path, "FinalStateSaved")] == [10]
    assert run_paceline("ckpt", "check", "run", "--runs", ".", folder=tmp_path).out.count("ok") == 2
    # The same command changes the same weights again, not those that were changed already.
    assert train_on(1, change) == exported(tmp_path) == changed
    # Without the change the export is the checkpoint, from which a training with more epochs resumes.
    train_on(1, "none")
    assert exported(tmp_path) == exported(tmp_path, step=10)
    train_on(1, change)
    assert train_on(1, "none", epochs=3) == train_on(1, "none", tmp_path / "whole", epochs=3)
    assert exported(tmp_path) == exported(tmp_path / "whole"), "the old final state is gone"


def change_on_rank_1(folder: Path) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        change_after_loop(folder, "double", ranks=(1,))
    return said.getvalue()


def test_a_change_after_the_loop_on_one_rank_only_is_said_and_not_saved(tmp_path: Path) -> None:
    said = run_on_processes(change_on_rank_1, 2, tmp_path, {}, {"folder": tmp_path})[0]
    assert not events(tmp_path, "FinalStateSaved")
    assert exported(tmp_path) == exported(tmp_path, step=10)
    assert "rank 1 changed the model after the loop (0.weight)" in said


def test_a_model_that_is_rebuilt_after_break_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.finish"):
        change_after_loop(tmp_path, "rebuild", leaves=True)


def test_a_stop_saves_between_two_steps_and_the_rest_of_the_script_does_not_run(
    tmp_path: Path,
) -> None:
    after = []

    def train_on() -> None:
        with paceline.Run(config_in(tmp_path, stop_after="1s")) as run:
            model, optimizer = parts(run)
            for step in run.steps(DATA, epochs=100000):
                run.update(optimizer, loss_of(model), step)
            after.append("the training is over")

    with pytest.raises(Stopped) as stopped:
        train_on()
    assert stopped.value.code == 75
    assert not after
    [saved] = events(tmp_path, "CheckpointSaved")
    assert saved["step"] == events(tmp_path, "RunStopped")[0]["step"] == stopped.value.step


def test_an_exception_saves_nothing_and_is_the_reason_of_the_failure(tmp_path: Path) -> None:
    def train_and_fail() -> None:
        with paceline.Run(config_in(tmp_path)) as run:
            model, optimizer = parts(run)
            for step in run.steps(DATA):
                run.update(optimizer, loss_of(model), step)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_and_fail()
    assert not events(tmp_path, "CheckpointSaved")
    assert "ZeroDivisionError" in events(tmp_path, "RunFailed")[0]["reason"]


def test_a_failed_update_lets_no_other_follow(tmp_path: Path) -> None:
    def broken(batch: tuple[Tensor]) -> Tensor:
        raise MemoryError("out of memory")

    def train_on() -> None:
        with paceline.Run(config_in(tmp_path)) as run:
            model, optimizer = parts(run)
            for step in run.steps(DATA):
                try:
                    run.update(optimizer, broken, step)
                except MemoryError:
                    run.update(optimizer, loss_of(model), step)

    with pytest.raises(TrainingError, match="MemoryError: out of memory"):
        train_on()


def misuse_late(run: paceline.Run, optimizer, loss) -> None:
    for _ in run.steps(DATA):
        run.track(late=nn.Linear(1, 1))


def misuse_twice(run: paceline.Run, optimizer, loss) -> None:
    for _ in run.steps(DATA):
        run.steps(DATA)


def misuse_old_step(run: paceline.Run, optimizer, loss) -> None:
    steps = run.steps(DATA)
    old = next(steps)
    next(steps)
    run.update(optimizer, loss, old)


def misuse_stranger(run: paceline.Run, optimizer, loss) -> None:
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    for step in run.steps(DATA):
        run.update(stranger, loss, step)


def misuse_vector(run: paceline.Run, optimizer, loss) -> None:
    for step in run.steps(DATA):
        run.update(optimizer, lambda batch: batch[0].requires_grad_(), step)


def misuse_detached(run: paceline.Run, optimizer, loss) -> None:
    for step in run.steps(DATA):
        run.update(optimizer, lambda batch: loss(batch).detach(), step)


def misuse_rate(run: paceline.Run, optimizer, loss) -> None:
    for step in run.steps(DATA):
        run.update(optimizer, loss, step)
        optimizer.param_groups[0]["lr"] = 1.0


def misuse_mean(run: paceline.Run, optimizer, loss) -> None:
    run.evaluate(DATA, lambda batch: {"error": batch[0].mean()})


def misuse_untrackable(run: paceline.Run, optimizer, loss) -> None:
    run.track(counter=7)


def misuse_unsavable(run: paceline.Run, optimizer, loss) -> None:
    class Odd(nn.Module):
        def state_dict(self):
            return {"now": object()}

    run.track(odd=Odd())
    list(run.steps(DATA))


class TwoHeads(nn.Module):
    """The second head is used from a step on, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)
        self.uses_second = False

    def forward(self, values: Tensor) -> Tensor:
        return self.first(values) + (self.second(values) if self.uses_second else 0.0)


@pytest.mark.parametrize("used_from", [2, None])
def test_parameters_that_are_never_used_are_named(
    used_from: int | None, tmp_path: Path, capsys
) -> None:
    with paceline.Run(config_in(tmp_path)) as run:
        model = run.model(TwoHeads())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
        for step in run.steps(DATA):
            model.uses_second = step.index == used_from
            run.update(optimizer, loss_of(model), step)
    said = "2 parameters got no gradient in the first 5 steps: second.weight; second.bias. If"
    assert (said in capsys.readouterr().out) == (used_from is None)


def misuse_by_hand(run: paceline.Run, optimizer, loss) -> None:
    for _ in run.steps(DATA):
        optimizer.zero_grad()
        loss(DATA).backward()
        optimizer.step()


def misuse_second_step(run: paceline.Run, optimizer, loss) -> None:
    for step in run.steps(DATA):
        run.update(optimizer, loss, step)
        optimizer.step()


def misuse_value(run: paceline.Run, optimizer, loss) -> None:
    for step in run.steps(DATA):
        run.update(optimizer, loss(DATA), step)


def misuse_swapped(run: paceline.Run, optimizer, loss) -> None:
    for step in run.steps(DATA):
        run.update(loss, optimizer, step)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (
            misuse_by_hand,
            r"called optimizer.step\(\) without run.update: each rank would train alone",
        ),
        (misuse_second_step, r"called optimizer.step\(\) after run.update"),
        (misuse_value, "the loss must be a function of a batch, got a Tensor"),
        (misuse_swapped, "the first argument of run.update must be an optimizer, got a function"),
        (misuse_late, "run.track was called after run.steps"),
        (misuse_twice, "run.steps was called twice"),
        (misuse_old_step, "step 0 is over"),
        (misuse_stranger, "this SGD is not part of the run"),
        (misuse_vector, r"a tensor of shape \[2, 1\], not one number"),
        (misuse_detached, "does not depend on any parameter"),
        (misuse_rate, "lr.schedule=cosine sets it, too"),
        (misuse_mean, r"'error' of run.evaluate is shape \[\] for 2 samples"),
        (misuse_untrackable, "int has no state_dict"),
        (misuse_unsavable, r"tracked.odd.now in the tracked state is a builtins.object"),
    ],
)
def test_misuse_is_refused(misuse, message: str, tmp_path: Path) -> None:
    config = config_in(tmp_path, **{"lr.schedule": "cosine"})

    def train_on() -> None:
        with paceline.Run(config) as run:
            model, optimizer = parts(run)
            misuse(run, optimizer, loss_of(model))

    with pytest.raises(ConfigError, match=message):
        train_on()


def test_optimizers_may_step_by_hand_where_the_run_does_not(tmp_path: Path) -> None:
    other = nn.Linear(1, 1)
    not_of_the_run = torch.optim.SGD(other.parameters(), lr=0.1)
    with paceline.Run(config_in(tmp_path)) as run:
        model, optimizer = parts(run)
        optimizer.step()  # before the loop
        for step in run.steps(DATA):
            if step.index % 2 == 0:
                run.backward(optimizer, loss_of(model), step)
            else:
                optimizer.step()  # with the gradients of the step before
            not_of_the_run.step()
    optimizer.step()  # after it
    assert not optimizer_module._global_optimizer_pre_hooks


@pytest.mark.parametrize(("steps", "warnings"), [(0, 1), (3, 0)])
def test_a_loop_that_trains_nothing_says_so_once(
    steps: int, warnings: int, tmp_path: Path, capsys
) -> None:
    with paceline.Run(config_in(tmp_path)) as run:
        model, optimizer = parts(run)
        for step in run.steps(DATA):
            if step.index < steps:
                run.update(optimizer, loss_of(model), step)
    said = capsys.readouterr().err
    assert said.count("no step until now has called run.update") == warnings


def test_a_measurement_of_nothing_is_refused(tmp_path: Path) -> None:
    def measure() -> None:
        config = config_in(tmp_path, **{"record.to": str(tmp_path / "to"), "record.steps": 2})
        with paceline.Run(config) as run:
            parts(run)
            list(run.steps(DATA))

    with pytest.raises(ConfigError, match="no step has called run.update"):
        measure()


@pytest.mark.parametrize(
    ("prepares", "evaluates", "warns"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_a_script_that_trains_outside_of_the_run_is_told(
    prepares: bool, evaluates: bool, warns: bool, tmp_path: Path, capsys
) -> None:
    with paceline.Run(config_in(tmp_path)) as run:
        if prepares:
            parts(run)
        if evaluates:
            run.evaluate(DATA, lambda batch: {"mean": batch[0][:, 0]})
    assert ("the script ended without run.steps" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "; lr 1e-05\n"),
        (["lr.base=0.1"], "; lr 1e-05 of the script's optimizer, instead of lr 0.1000; to use it: lr=paceline.scaled_lr(config)\n"),
        (["lr.base=1e-5"], "; lr 1e-05\n"),
        (["lr.rule=linear", "lr.reference_batch=2"], "instead of lr 0.0040 = 0.0010 x 4 (linear)"),
    ],
)  # fmt: skip
def test_a_rate_that_was_given_and_is_not_used_is_named(
    words: list[str], says: str, tmp_path: Path, capsys
) -> None:
    given = [f"runs={tmp_path}", "batch.global_size=8", "epochs=1", *words]
    with paceline.Run(config_from_words(paceline.RunConfig, given)) as run:
        model, optimizer = parts(run)
        for step in run.steps(DATA):
            run.update(optimizer, loss_of(model), step)
    assert says in capsys.readouterr().out


def change_weight(model: nn.Module, optimizer, patience) -> None:
    model.weight.data.add_(1.0)


def change_rate(model: nn.Module, optimizer, patience) -> None:
    optimizer.param_groups[0]["lr"] = 7.0


def change_tracked(model: nn.Module, optimizer, patience) -> None:
    patience.best = 3


class Patience:
    best = 0

    def state_dict(self) -> dict:
        return {"best": self.best}

    def load_state_dict(self, state: dict) -> None:
        self.best = state["best"]


CHANGES = {"weight": change_weight, "rate": change_rate, "tracked": change_tracked}


def one_rank_differs(config: paceline.RunConfig, change: str) -> None:
    with paceline.Run(config) as run:
        model, optimizer = parts(run)
        patience = Patience()
        run.track(patience=patience)
        for step in run.steps(DATA):
            run.update(optimizer, loss_of(model), step)
            if step.index == 2 and run.world.rank == 1:
                CHANGES[change](model, optimizer, patience)


@pytest.mark.parametrize(
    ("change", "name", "when"),
    [
        ("weight", "model.weight", {}),
        ("weight", "model.weight", {"checkpoint.every": "3steps", "compare_steps": "0"}),
        ("rate", "the options of optimizer.0", {"compare_steps": "3"}),
        ("tracked", "tracked.patience", {"compare_steps": "3"}),
    ],
)
def test_what_one_rank_alone_has_changed_is_found_at_the_next_save_or_comparison(
    change: str, name: str, when: dict[str, str], tmp_path: Path
) -> None:
    settings = SETTINGS | {"runs": str(tmp_path)} | when
    said = f"after step 3 rank 1 has other values than rank 0 in {name}"
    with pytest.raises(AssertionError, match=said):
        run_on_processes(one_rank_differs, 3, tmp_path, settings, {"change": change})


class Noisy(nn.Module):
    """Draws random numbers and changes a buffer also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        return self.norm(inputs) + torch.randn_like(inputs)


def evaluations(config: paceline.RunConfig) -> list:
    data = (torch.arange(21.0).view(21, 1),)
    with paceline.Run(config) as run:
        model = run.model(Noisy())
        model.frozen.eval()
        before, state = torch.get_rng_state(), model.seen.clone()
        found = run.evaluate(
            data, lambda batch: {"out": model(batch[0])[:, 0], "all": (len(batch[0]), 2)}
        )
        assert model.norm.training
        assert not model.frozen.training
        assert torch.equal(model.seen, state)
        assert torch.equal(before, torch.get_rng_state())
        rows = run.predict(data, lambda batch: torch.cat([batch[0], model(batch[0])], 1))
        return [found, rows.tolist()]


def test_evaluation_and_prediction_are_the_same_in_every_world_and_change_nothing(
    tmp_path: Path,
) -> None:
    answers = []
    for world in (1, 2, 3):
        settings = SETTINGS | {"runs": str(tmp_path / str(world))}
        answers += run_on_processes(evaluations, world, tmp_path, settings)
    assert all(answer == answers[0] for answer in answers)
    means, rows = answers[0]
    assert [row[0] for row in rows] == list(range(21))
    assert means["out"] != sum(row[1] for row in rows) / 21  # predictions draw other numbers
    assert means["all"] == 21 / 22


def free(config: paceline.RunConfig) -> list[float]:
    with paceline.Run(config) as run:
        model, optimizer = parts(run)
        for step in run.steps(DATA):
            run.update(optimizer, loss_of(model), step)
        return [float(value) for value in model.parameters()]


def test_without_exact_the_sum_is_the_same_up_to_rounding(tmp_path: Path) -> None:
    answers = []
    for world in (1, 2, 3):
        settings = SETTINGS | {"runs": str(tmp_path / str(world)), "exact": False}
        answers += run_on_processes(free, world, tmp_path, settings)
    assert all(answer == pytest.approx(answers[0], rel=1e-5) for answer in answers)


SCRIPT = """
import torch, paceline

def main(config):
    data = (torch.randn(40, 4, generator=torch.Generator().manual_seed(1)),)
    with paceline.Run(config) as run:
        model = run.model(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in run.steps(data):
            run.update(optimizer, lambda batch: model(batch[0]).square().mean(), step)

main(paceline.config_from_argv())
"""


def test_verify_profile_and_scale_drive_such_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    settings = ("batch.global_size=16", "batch.lanes=4")
    same = run_paceline("verify", "--worlds", "1,2", "train.py", *settings, folder=tmp_path)
    assert (same.code, "the same bits" in same.out) == (0, True), same
    profiled = run_paceline(
        "profile", "-n", "2", "train.py", *settings, "epochs=9", folder=tmp_path
    )
    assert profiled.code == 0, profiled
    scaled = run_paceline(
        "scale", "--worlds", "1,2", "train.py", *settings, "epochs=30", folder=tmp_path
    )
    assert scaled.code == 0, scaled


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], 3),  # 40 samples of the script's epoch, in its DataLoader's batches of 16
        (["epochs=10"], 30),  # which is also the default
        (["batch.global_size=256"], 1),  # likewise
        (["steps=2"], 2),
    ],
)
def test_settings_come_before_arguments_and_arguments_before_defaults(
    words: list[str], steps: int, tmp_path: Path, capsys
) -> None:
    config = config_from_words(paceline.RunConfig, [f"runs={tmp_path}", *words])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*DATA), batch_size=16)
    count = 0
    with paceline.Run(config) as run:
        model, optimizer = parts(run)
        for step in run.steps(loader, epochs=1):
            run.update(optimizer, loss_of(model), step)
            count += 1
    assert count == steps
    size = "batch.global_size=256 replaces batch_size=16"
    size = size if "batch.global_size=256" in words else "batch_size=16 is the global batch"
    assert f"DataLoader: {size}, " in capsys.readouterr().out


@dataclass(frozen=True)
class Longer(paceline.RunConfig):
    epochs: int = 12


@pytest.mark.parametrize(
    ("words", "given", "steps"),
    [
        (["epochs=2"], {"steps": 7}, 6),
        (["epochs=2"], {"steps": 7, "epochs": 4}, 6),
        (["steps=2"], {"steps": 7}, 2),
        ([], {"steps": 7}, 7),
        ([], {"epochs": 2}, 6),
        ([], {}, 36),
    ],
)
def test_epochs_of_the_command_line_replace_the_steps_of_a_script(
    words: list[str], given: dict[str, int], steps: int
) -> None:
    config = config_from_words(Longer, ["batch.global_size=16", *words])
    length = with_length(config, given.get("epochs", 0), given.get("steps", 0))
    assert (length.steps or 3 * length.epochs) == steps
    made_by_code = with_length(Longer(), given.get("epochs", 0), given.get("steps", 0))
    if not words:
        assert (made_by_code.steps or 3 * made_by_code.epochs) == steps


class Pages:
    """A stream that knows where it is, and counts what is read."""

    def __init__(self, shard: int) -> None:
        self.shard, self.at = shard, 0

    def __iter__(self):
        while True:
            self.at += 1
            with Path("reads").open("a") as reads:
                reads.write("x")
            yield torch.tensor([float(self.shard), float(self.at)])

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


def streamed(config: paceline.RunConfig) -> list[float]:
    with paceline.Run(config) as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.001))
        for step in run.steps(paceline.Stream(lambda shard, _: Pages(shard), use_state=True)):
            run.update(optimizer, lambda batch: model(batch).square().mean(), step)
        return model.weight.tolist()


def test_a_stream_that_knows_where_it_is_is_not_read_again(tmp_path: Path) -> None:
    given = {"batch.global_size": 8, "batch.lanes": 4, "lr.schedule": "constant"}
    whole = run_on_processes(streamed, 1, tmp_path, given | {"steps": 9})[0]
    broken = given | {"runs": str(tmp_path / "broken")}
    run_on_processes(streamed, 2, tmp_path, broken | {"steps": 5})
    before = set(tmp_path.glob("meeting-*/reads"))
    resumed = run_on_processes(streamed, 3, tmp_path, broken | {"steps": 9})
    assert resumed == [whole] * 3
    reads = [path for path in tmp_path.glob("meeting-*/reads") if path not in before]
    assert sum(path.stat().st_size for path in reads) == 8 * 4


def plateau(config: paceline.RunConfig) -> list[float]:
    """Epochs whose metric does not improve halve the learning rate."""
    rates = []
    with paceline.Run(config) as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        run.track(scheduler=scheduler)
        for step in run.steps(torch.zeros(8, 2)):
            run.update(optimizer, lambda batch: model(batch).square().mean(), step)
            if step.ends_epoch:
                found = run.evaluate(torch.ones(5, 2), lambda batch: {"same": batch[:, 0]})
                scheduler.step(found["same"])
                rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_a_scheduler_that_watches_a_metric_continues_where_it_was(tmp_path: Path) -> None:
    given = {"batch.global_size": 8, "batch.lanes": 4, "runs": str(tmp_path / "runs")}
    assert plateau_rates(tmp_path, given, epochs=7, ranks=1, name="whole") == [
        1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125,
    ]  # fmt: skip
    assert plateau_rates(tmp_path, given, epochs=4, ranks=2, name="part") == [1.0, 1.0, 0.5, 0.5]
    assert plateau_rates(tmp_path, given, epochs=7, ranks=3, name="part") == [0.25, 0.25, 0.125]


def plateau_rates(folder: Path, given: dict, *, epochs: int, ranks: int, name: str) -> list[float]:
    [rates] = {
        tuple(rates)
        for rates in run_on_processes(
            plateau, ranks, folder, given | {"epochs": epochs, "name": name}
        )
    }
    return list(rates)


def test_the_kernels_of_an_optimizer_are_those_of_the_script_not_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    """A run with fused=True on a GPU may be resumed where there is no such kernel."""
    found = []
    for epochs, options in ((1, {"fused": True, "momentum": 0.5}), (2, {"momentum": 0.5})):
        with paceline.Run(config_in(tmp_path, epochs=epochs)) as run:
            model = run.model(nn.Linear(1, 1))
            sgd = torch.optim.SGD(model.parameters(), lr=1e-5, **options)
            optimizer = run.optimizer(sgd)
            for step in run.steps(DATA):
                run.update(optimizer, loss_of(model), step)
                sgd.param_groups[0]["momentum"] = 0.25
        found.append([sgd.param_groups[0][key] for key in ("fused", "momentum")])
    assert found == [[True, 0.25], [None, 0.25]]


@pytest.mark.parametrize(("before", "after"), [(None, True), (True, None), (None, 0.5)])
def test_an_option_of_another_type_is_a_changed_setting_not_a_damaged_checkpoint(
    before: object, after: object, tmp_path: Path
) -> None:
    for epochs, option in ((1, before), (2, after)):
        with paceline.Run(config_in(tmp_path, epochs=epochs)) as run:
            model = run.model(nn.Linear(1, 1))
            group = {"params": list(model.parameters()), "margin": option}
            optimizer = run.optimizer(torch.optim.SGD([group], lr=1e-5))
            if epochs == 2:
                with pytest.raises(ConfigError, match=f"optimizer.margin {before} -> {after}"):
                    run.steps(DATA)
                break
            for step in run.steps(DATA):
                run.update(optimizer, loss_of(model), step)
    assert (tmp_path / "run" / "checkpoints" / "step-000000005").is_dir()
