"""Does a loop written by hand stop, finish, resume and refuse misuse as a Trainer does?"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
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
from support.loops import SHORT, Patience, config_in, line, squares, updated
from support.loops import events_in as events
from support.processes import in_worlds, run_on_processes
from support.program import paceline as run_paceline

DATA = (torch.arange(40.0).view(40, 1),)


def train(config: paceline.RunConfig, *, finish_at: int = -1, leave_at: int = -1) -> int:
    """Return the number of steps that this start made."""
    count = 0
    with paceline.Run(config) as run:
        for _, _, step in updated(run, DATA):
            count += 1
            if step.index == finish_at:
                run.finish("it is good enough")
            if step.index == leave_at:
                break
    return count


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


def rebuild(model: nn.Sequential) -> None:
    """What merging adapters does: other parameters under other names."""
    model[0] = nn.Sequential(nn.Linear(1, 1))


AFTER_LOOP: dict[str, Callable[[nn.Sequential], Any]] = {
    "none": lambda model: None,
    "double": lambda model: model[0].weight.data.mul_(2),
    "rebuild": rebuild,
}
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
            run.update(optimizer, squares(model), step)
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


@pytest.mark.parametrize("change", ["rebuild", pytest.param("double", marks=pytest.mark.heavy)])
def test_what_changes_the_model_after_the_loop_is_exported_and_never_resumed_from(change, tmp_path):
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


def test_a_stop_saves_between_two_steps_and_the_rest_of_the_script_does_not_run(tmp_path):
    after = []

    def train_on() -> None:
        with paceline.Run(config_in(tmp_path, stop_after="1s")) as run:
            assert list(updated(run, DATA, epochs=100000))
            after.append("the training is over")

    with pytest.raises(Stopped) as stopped:
        train_on()
    assert stopped.value.code == 75
    assert not after
    [saved] = events(tmp_path, "CheckpointSaved")
    assert saved["step"] == events(tmp_path, "RunStopped")[0]["step"] == stopped.value.step


@pytest.mark.parametrize("broken", [ZeroDivisionError, MemoryError])
def test_an_exception_saves_nothing_is_the_reason_of_the_failure_and_lets_no_update_follow(
    broken: type[Exception], tmp_path: Path
) -> None:
    def fail(batch: tuple[Tensor]) -> Tensor:
        raise broken

    def train_on() -> None:
        with paceline.Run(config_in(tmp_path)) as run:
            model, optimizer = line(run)
            for step in run.steps(DATA):
                try:
                    run.update(optimizer, fail, step)
                except MemoryError:
                    run.update(optimizer, squares(model), step)

    with pytest.raises((ZeroDivisionError, TrainingError)):
        train_on()
    assert not events(tmp_path, "CheckpointSaved")
    assert broken.__name__ in events(tmp_path, "RunFailed")[0]["reason"]


def old_step(run: paceline.Run, optimizer, loss, step) -> None:
    if step.index == 1:
        run.update(optimizer, loss, OLD[-1])
    OLD.append(step)


OLD: list[paceline.Step] = []


class Odd(nn.Module):
    def state_dict(self):
        return {"now": object()}


class TwoHeads(nn.Module):
    """The second head is used from a step on, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)
        self.uses_second = False

    def forward(self, values: Tensor) -> Tensor:
        return self.first(values) + (self.second(values) if self.uses_second else 0.0)


@pytest.mark.parametrize("used_from", [2, None])
def test_parameters_that_are_never_used_are_named(used_from, tmp_path, capsys):
    with paceline.Run(config_in(tmp_path)) as run:
        model = run.model(TwoHeads())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
        for step in run.steps(DATA):
            model.uses_second = step.index == used_from
            run.update(optimizer, squares(model), step)
    said = capsys.readouterr().out
    assert ("second.weight; second.bias" in said) == (used_from is None)


STRANGER = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
IN_STEP = {  # what is done in a step, and what is said about it
    "optimizer.step() without run.update": lambda run, opt, loss, step: (loss(DATA).backward(), opt.step()),
    "optimizer.step() after run.update": lambda run, opt, loss, step: (run.update(opt, loss, step), opt.step()),
    "a Tensor": lambda run, opt, loss, step: run.update(opt, loss(DATA), step),
    "a function": lambda run, opt, loss, step: run.update(loss, opt, step),
    "run.track": lambda run, opt, loss, step: run.track(late=nn.Linear(1, 1)),
    "run.steps": lambda run, opt, loss, step: run.steps(DATA),
    "step 0": old_step,
    "SGD": lambda run, opt, loss, step: run.update(STRANGER, loss, step),
    "[2, 1]": lambda run, opt, loss, step: run.update(opt, lambda batch: batch[0].requires_grad_(), step),
    "any parameter": lambda run, opt, loss, step: run.update(opt, lambda batch: loss(batch).detach(), step),
    "lr.schedule=cosine": lambda run, opt, loss, step: (run.update(opt, loss, step), opt.param_groups[0].update(lr=1.0)),
}  # fmt: skip
BEFORE_LOOP = {
    "'error' of run.evaluate": lambda run: run.evaluate(DATA, lambda batch: {"error": batch[0].mean()}),
    "int has no state_dict": lambda run: run.track(counter=7),
    "tracked.odd.now": lambda run: run.track(odd=Odd()),
}  # fmt: skip


@pytest.mark.parametrize("named", [*IN_STEP, *BEFORE_LOOP])
def test_misuse_is_refused(named: str, tmp_path: Path) -> None:
    def train_on() -> None:
        with paceline.Run(config_in(tmp_path, **{"lr.schedule": "cosine"})) as run:
            model, optimizer = line(run)
            BEFORE_LOOP.get(named, lambda run: None)(run)
            for step in run.steps(DATA):
                IN_STEP[named](run, optimizer, squares(model), step)

    with pytest.raises(ConfigError, match=re.escape(named)):
        train_on()


def test_optimizers_may_step_by_hand_where_the_run_does_not(tmp_path: Path) -> None:
    other = nn.Linear(1, 1)
    not_of_the_run = torch.optim.SGD(other.parameters(), lr=0.1)
    with paceline.Run(config_in(tmp_path)) as run:
        model, optimizer = line(run)
        optimizer.step()  # before the loop
        for step in run.steps(DATA):
            if step.index % 2 == 0:
                run.backward(optimizer, squares(model), step)
            else:
                optimizer.step()  # with the gradients of the step before
            not_of_the_run.step()
    optimizer.step()  # after it
    assert not optimizer_module._global_optimizer_pre_hooks


@pytest.mark.parametrize(("steps", "warnings"), [(0, 1), (3, 0)])
def test_a_loop_that_trains_nothing_says_so_once_and_is_not_measured(
    steps: int, warnings: int, tmp_path: Path, capsys
) -> None:
    def train_on(folder: Path, **settings: object) -> None:
        with paceline.Run(config_in(folder, **settings)) as run:
            model, optimizer = line(run)
            for step in run.steps(DATA):
                if step.index < steps:
                    run.update(optimizer, squares(model), step)

    train_on(tmp_path / "plain")
    assert capsys.readouterr().err.count("no step until now") == warnings
    if not steps:
        with pytest.raises(ConfigError, match=r"run\.update"):
            train_on(tmp_path, **{"record.to": str(tmp_path / "to"), "record.steps": 2})


@pytest.mark.parametrize(
    ("prepares", "evaluates", "warns"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_a_script_that_trains_outside_of_the_run_is_told(
    prepares: bool, evaluates: bool, warns: bool, tmp_path: Path, capsys
) -> None:
    with paceline.Run(config_in(tmp_path)) as run:
        if prepares:
            line(run)
        if evaluates:
            run.evaluate(DATA, lambda batch: {"mean": batch[0][:, 0]})
    assert ("the script ended without run.steps" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "; lr 1e-05\n"),
        (["lr.base=0.1"], "instead of lr 0.1000"),
        (["lr.base=1e-5"], "; lr 1e-05\n"),
        (["lr.rule=linear", "lr.reference_batch=2"], "instead of lr 0.0040 = 0.0010 x 4 (linear)"),
    ],
)
def test_a_rate_that_was_given_and_is_not_used_is_named(words, says, tmp_path, capsys):
    given = [f"runs={tmp_path}", "batch.global_size=8", "epochs=1", *words]
    with paceline.Run(config_from_words(paceline.RunConfig, given)) as run:
        assert list(updated(run, DATA))
    assert says in capsys.readouterr().out


CHANGES = {
    "weight": lambda model, optimizer, patience: model.weight.data.add_(1.0),
    "rate": lambda model, optimizer, patience: optimizer.param_groups[0].update(lr=7.0),
    "tracked": lambda model, optimizer, patience: vars(patience).update(best=3),
}


def one_rank_differs(config: paceline.RunConfig, change: str) -> None:
    with paceline.Run(config) as run:
        run.track(patience=(patience := Patience()))
        for model, optimizer, step in updated(run, DATA):
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
    settings = SHORT | {"runs": str(tmp_path)} | when
    with pytest.raises(AssertionError, match=f"step 3 rank 1 .* rank 0 in {name}"):
        run_on_processes(one_rank_differs, 2, tmp_path, settings, {"change": change})


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


def test_evaluation_and_prediction_are_the_same_in_every_world_and_change_nothing(tmp_path):
    means, rows = in_worlds(evaluations, tmp_path, SHORT)
    assert [row[0] for row in rows] == list(range(21))
    assert means["out"] != sum(row[1] for row in rows) / 21  # predictions draw other numbers
    assert means["all"] == 21 / 22


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
    with paceline.Run(config) as run:
        assert len(list(updated(run, loader, epochs=1))) == steps
    said = capsys.readouterr().out
    assert "batch_size=16" in said
    assert ("batch.global_size=256" in said) == ("batch.global_size=256" in words)


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
def test_epochs_of_the_command_line_replace_the_steps_of_a_script(words, given, steps):
    config = config_from_words(Longer, ["batch.global_size=16", *words])
    length = with_length(config, given.get("epochs", 0), given.get("steps", 0))
    assert (length.steps or 3 * length.epochs) == steps
    made_by_code = with_length(Longer(), given.get("epochs", 0), given.get("steps", 0))
    if not words:
        assert (made_by_code.steps or 3 * made_by_code.epochs) == steps


class Pages:
    """A stream that knows where it is, and counts what is read."""

    def __init__(self, shard: int) -> None:
        self.shard, self.at = float(shard), 0

    def __iter__(self):
        while True:
            self.at += 1
            with Path("reads").open("a") as reads:
                reads.write("x")
            yield torch.tensor([self.shard, float(self.at)])

    state_dict, load_state_dict = Patience.state_dict, Patience.load_state_dict


def streamed(config: paceline.RunConfig) -> list[float]:
    with paceline.Run(config) as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.001))
        for step in run.steps(paceline.Stream(lambda shard, _: Pages(shard), use_state=True)):
            run.update(optimizer, lambda batch: model(batch).square().mean(), step)
        return model.weight.tolist()


def test_a_stream_that_knows_where_it_is_is_not_read_again(tmp_path: Path) -> None:
    given = SHORT | {"lr.schedule": "constant"}
    whole = run_on_processes(streamed, 1, tmp_path, given | {"steps": 9})[0]
    broken = given | {"runs": str(tmp_path / "broken")}
    run_on_processes(streamed, 2, tmp_path, broken | {"steps": 5})
    before = set(tmp_path.glob("meeting-*/reads"))
    resumed = run_on_processes(streamed, 3, tmp_path, broken | {"steps": 9})
    assert resumed == [whole] * 3
    reads = [path for path in tmp_path.glob("meeting-*/reads") if path not in before]
    assert sum(path.stat().st_size for path in reads) == 8 * 4


def test_the_kernels_of_an_optimizer_are_those_of_the_script_not_of_the_checkpoint(tmp_path):
    """A run with fused=True on a GPU may be resumed where there is no such kernel."""
    found = []
    for epochs, options in ((1, {"fused": True}), (2, {})):
        with paceline.Run(config_in(tmp_path, epochs=epochs)) as run:
            model, optimizer = line(run, momentum=0.5, **options)
            for step in run.steps(DATA):
                run.update(optimizer, squares(model), step)
                optimizer.param_groups[0]["momentum"] = 0.25
        found.append([optimizer.param_groups[0][key] for key in ("fused", "momentum")])
    assert found == [[True, 0.25], [None, 0.25]]


@pytest.mark.parametrize(("before", "after"), [(None, True), (True, None), (None, 0.5)])
def test_an_option_of_another_type_is_a_changed_setting_not_a_damaged_checkpoint(
    before: object, after: object, tmp_path: Path
) -> None:
    def train_with(option: object, epochs: int) -> None:
        with paceline.Run(config_in(tmp_path, epochs=epochs)) as run:
            model = run.model(nn.Linear(1, 1))
            group = {"params": list(model.parameters()), "margin": option}
            optimizer = run.optimizer(torch.optim.SGD([group], lr=1e-5))
            for step in run.steps(DATA):
                run.update(optimizer, squares(model), step)

    train_with(before, 1)
    with pytest.raises(ConfigError, match=f"optimizer.margin {before} -> {after}"):
        train_with(after, 2)
    assert (tmp_path / "run" / "checkpoints" / "step-000000005").is_dir()
