"""Local SGD replicas learn the same bits on any number of ranks, send few bytes, and survive a stop anywhere."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.config import RunConfig, config_from_words
from paceline.errors import ConfigError, Stopped
from paceline.events import RunEnded, surviving
from paceline.exact import exchange
from paceline.verify.records import first_difference, read_record
from paceline.world.process_group import join
from paceline.world.world import World
from support.loops import RunIn, fit, lanes_of, run_trainer
from support.processes import run_on_processes

SAMPLES = 37  # with a global batch of 16 the last step of an epoch has 5 samples, and leaves replicas without any
FIXED = {
    "batch.global_size": 16,
    "batch.lanes": 8,
    "local_sgd.steps": 4,
    "local_sgd.replicas": 4,
    "epochs": 3,
    "clip_norm": 0.5,
}
CASES = {
    "plain": {},
    "bf16 on the wire": {"compression": "bf16"},
    "six lanes, three replicas": {
        "batch.lanes": 6,
        "local_sgd.replicas": 3,
        "local_sgd.outer_momentum": 0.0,
    },
}


class Small(nn.Module):
    """Dropout, a tied weight, a frozen one, a buffer that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 9), nn.Linear(9, 1)
        self.frozen = nn.Linear(9, 9).requires_grad_(requires_grad=False)
        self.again = self.first
        self.register_buffer("shift", torch.ones(9))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.again(inputs).tanh() + self.shift, 0.2, self.training)
        found: Tensor = self.last(self.frozen(hidden))
        return found


def data_of(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(samples, 5, generator=generator), torch.randn(
        samples, 1, generator=generator
    )


def train(world: World, config: RunConfig, stop_at: int = -1) -> dict[str, object]:
    """A run of the Trainer, told to stop after a step that was reported; what it says of itself."""
    seen: list[object] = []

    def told(event: object) -> None:
        seen.append(event)
        if getattr(event, "step", 0) == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    torch.manual_seed(0)
    with contextlib.suppress(Stopped):
        run_trainer(
            world, config, Small(), data_of(), optimizer=adamw, evaluation=data_of(11), sinks=[told]
        )
    if not world.is_main:
        return {}
    events = surviving(Path(config.runs) / config.name / "events.jsonl")
    return {
        "digest": next((event.digest for event in seen if isinstance(event, RunEnded)), ""),
        "losses": [(event["step"], event["loss"]) for event in events if "loss" in event],
        "metrics": [event["metrics"] for event in events if "metrics" in event],
    }


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def config_of(folder: str, **more: object) -> RunConfig:
    words = FIXED | {"runs": folder, "log.every_steps": 2, "checkpoint.every": "end"} | more
    return config_from_words(RunConfig, [f"{name}={value}" for name, value in words.items()])


def every_case(world: World, folder: str, record: bool = False) -> dict[str, dict[str, object]]:
    """Train all cases on this rank, one after the other, as far as there is a replica for every rank."""
    found = {}
    for name, more in CASES.items():
        to = f"{folder}/record-{name}" if record else ""
        config = config_of(f"{folder}/{name}", **more | {"record.to": to})
        if world.size <= config.local_sgd.replicas:
            found[name] = train(world, config)
    return found


def test_replicas_learn_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    found = {}
    for size in (1, 3, 4):
        given = {"folder": str(tmp_path / f"world-{size}"), "record": size < 4}
        found[size] = run_on_processes(every_case, size, tmp_path, {}, given)[0]
    assert found[3] == found[1]
    assert found[4] == {name: found[1][name] for name in found[4]}
    assert len({result["digest"] for result in found[1].values()}) == len(CASES)
    for name in CASES:
        one, three = (
            read_record(tmp_path / f"world-{size}" / f"record-{name}", name) for size in (1, 3)
        )
        assert first_difference(one, three) is None
        assert any("replica.0002.model.last.weight" in step.tensors for step in one.steps)


def interrupted(world: World, folder: str, stop_at: int, record_steps: int) -> dict[str, object]:
    more: dict[str, object] = {"epochs": 4, "local_sgd.steps": 2}
    if record_steps:
        more |= {"record.to": f"{folder}/record", "record.steps": record_steps}
        more["record.save_step"] = record_steps
    return train(world, config_of(folder, **CASES["bf16 on the wire"] | more), stop_at)


def test_a_run_stopped_between_two_meetings_goes_on_with_the_same_bits_in_another_world(tmp_path):
    def run(place: str, size: int, stop_at: int = -1, record_steps: int = 0) -> dict[str, object]:
        given = {"folder": str(tmp_path / place), "stop_at": stop_at, "record_steps": record_steps}
        return run_on_processes(interrupted, size, tmp_path, {}, given)[0]

    straight = run("straight", 1)
    part = run("broken", 3, record_steps=4)
    assert part["losses"] == straight["losses"][: len(part["losses"])]
    names = names_saved(tmp_path / "broken", 4)
    mine = {"replica.0003.model.last.bias", "replica.0003.optimizer.exp_avg.last.bias"}
    assert {*mine, "optimizer.momentum_buffer.last.bias"} <= names, "one step after a meeting"
    assert run("broken", 2, stop_at=6)["digest"] == ""
    assert not mine <= names_saved(tmp_path / "broken", 8), "it was saved at a meeting"
    assert run("broken", 4) == straight


def names_saved(folder: Path, step: int) -> set[str]:
    from safetensors import safe_open

    found: set[str] = set()
    for path in (folder / f"run/checkpoints/step-{step:09d}").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found


def count_bytes(world: World, folder: str) -> dict[str, list[int]]:
    """Return the bytes of every message that a rank hands to the exchange, by compression."""
    found: dict[str, list[int]] = {"none": [], "bf16": []}
    send = exchange.gather
    for name, sent in found.items():

        def counted(gathered: Tensor, mine: Tensor, among: object = None, sent=sent) -> object:
            sent.append(mine.nbytes)
            return send(gathered, mine, among)

        exchange.gather = counted
        config = config_of(folder, name=name, compression=name, **{"local_sgd.replicas": 2})
        train(world, config)
    return found


def test_only_differences_cross_the_ranks_and_only_when_replicas_meet(tmp_path: Path) -> None:
    weights = sum(value.numel() for value in Small().parameters() if value.requires_grad)
    found = run_on_processes(count_bytes, 2, tmp_path, {}, {"folder": str(tmp_path)})
    # 3 epochs of 3 steps, and H is 4
    assert found == [{"none": [4 * weights] * 3, "bf16": [2 * weights] * 3}] * 2


def by_hand(config: RunConfig, world: World) -> nn.Module:
    """DiLoCo as its paper has it, with torch's own optimizers."""
    torch.manual_seed(0)
    common = Small().eval()
    copies = [copy.deepcopy(common) for _ in range(config.local_sgd.replicas)]
    walked = [[v for v in one.parameters() if v.requires_grad] for one in copies]
    inner = [torch.optim.AdamW(mine, lr=0.02) for mine in walked]
    shared = [value for value in common.parameters() if value.requires_grad]
    rate, momentum = config.local_sgd.outer_lr, config.local_sgd.outer_momentum
    outer = torch.optim.SGD(shared, rate, momentum, nesterov=True)
    each = config.batch.lanes // config.local_sgd.replicas
    for step in lanes_of(world, config, data_of()):
        for number, (one, optimizer) in enumerate(zip(copies, inner, strict=True)):
            mine = step.lanes[number * each : (number + 1) * each]
            batches = [lane.batch for lane in mine if lane.samples]
            if batches:
                inputs, targets = (torch.cat(column) for column in zip(*batches, strict=True))
                optimizer.zero_grad()
                nn.functional.mse_loss(one(inputs), targets).backward()
                optimizer.step()
        if step.plan.index % 3 != 2:  # epochs of three steps, and H = 4
            continue
        for value, *theirs in zip(shared, *walked, strict=True):
            value.grad = value.detach() - torch.stack([other.detach() for other in theirs]).mean(0)
        outer.step()
        for mine in walked:
            torch._foreach_copy_([value.data for value in mine], [value.data for value in shared])
    return common


def check_against_hand_written(folder: str) -> None:
    config = config_of(folder, clip_norm=0.0)
    with join(config) as world:
        torch.manual_seed(0)
        model = fit(world, config, Small().eval(), data_of(), optimizer=adamw).model
        expected = by_hand(config, world)
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


def test_it_is_the_algorithm_of_its_paper(tmp_path: Path) -> None:
    run_on_processes(check_against_hand_written, 1, tmp_path, {}, {"folder": str(tmp_path)})


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("local_sgd.replicas=3", "1, 2, 4, 8, or batch.lanes to a multiple of 3"),
        ("parallel=fsdp", "parallel=ddp"),
        ("capture=true", "capture=false"),
        ("compression=powersgd exact=false", "compression=bf16"),
        ("precision=fp16", "precision=bf16"),
        ("local_sgd.steps=-1", "local_sgd.steps=0"),
        ("local_sgd.steps=0 local_sgd.replicas=2", "local_sgd.steps=32"),
        ("local_sgd.outer_lr=0", "local_sgd.outer_lr=0.7"),
        ("local_sgd.outer_momentum=1", "local_sgd.outer_momentum=0.9"),
    ],
)
def test_settings_that_contradict_local_sgd_are_refused(words: str, fix: str) -> None:
    given = [f"{name}={value}" for name, value in FIXED.items()]
    with pytest.raises(ConfigError) as caught:
        config_from_words(RunConfig, [*given, *words.split()])
    assert fix in caught.value.fix


def test_more_ranks_than_replicas_are_refused(monkeypatch, tmp_path):
    meeting = str(tmp_path / "meeting")
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "PACELINE_MEETING": meeting}.items():
        monkeypatch.setenv(name, value)
    config = config_of(str(tmp_path), **{"local_sgd.replicas": 2})
    with pytest.raises(ConfigError, match="3 ranks .* 2 replicas"), join(config):
        pass


def test_models_whose_buffers_move_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 1), nn.BatchNorm1d(1))
    with pytest.raises(ConfigError, match="LayerNorm"):
        fit(World(), config_of(str(tmp_path)), model, data_of())


@pytest.mark.parametrize("call", ["backward", "losses", "over_batch"])
def test_what_replicas_cannot_do_is_refused(tmp_path: Path, call: str) -> None:
    with pytest.raises(ConfigError, match=r"set local_sgd\.steps=0"):
        impossible(config_of(str(tmp_path)), call)


def impossible(config: RunConfig, call: str) -> None:
    model = nn.Linear(5, 1)
    with RunIn(World(), config) as run:
        run.model(model)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(data_of()):
            if call == "backward":
                run.backward(optimizer, lambda batch: model(batch[0]).mean(), step)
            elif call == "losses":
                float(run.update(optimizer, lambda batch: model(batch[0]).mean(), step))
            else:
                run.update(optimizer, lambda batch: model(batch[0]), step, over_batch=torch.mean)


def test_a_checkpoint_of_other_replicas_is_refused(tmp_path: Path) -> None:
    for more, problem in [
        ({}, ""),
        ({"local_sgd.replicas": 2}, " 4 .* 2"),
        ({"local_sgd.steps": 0}, " 4 .* 0"),
    ]:
        config = config_of(str(tmp_path), resume="changed", epochs=2, **more)
        refused = pytest.raises(ConfigError, match=problem) if problem else contextlib.nullcontext()
        with refused, join(config) as world:
            train(world, config)
