"""What can be known of captured steps without a GPU; the rest is in test_gpu.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import paceline
from paceline.config import BatchConfig, RunConfig
from paceline.data.reading.batches import Lane
from paceline.errors import ConfigError, TrainingError
from paceline.train.cuda_graph import CudaGraphStep, step_class
from paceline.train.lane_sum import LocalTree, gradients_of
from paceline.train.note import Note
from paceline.train.reduce_after_backward import ReduceAfterBackward
from paceline.world.world import World
from support.processes import run_on_processes


def step_of(capture: str) -> paceline.OptimizerStep:
    model = nn.Linear(6, 1)
    config = RunConfig(batch=BatchConfig(4, lanes=2), capture=capture)
    optimizer = torch.optim.AdamW(model.parameters())
    kind = step_class(World(), optimizer, config)
    return kind(World(), model, optimizer, mse_loss, config)


def test_without_a_gpu_a_step_that_must_be_captured_is_refused():
    with pytest.raises(ConfigError, match="capture=auto"):
        step_of("true")
    assert not isinstance(step_of("auto"), CudaGraphStep)


class _Double(nn.Linear):
    """A head of other numbers than the rest: its gradients cross the ranks in a bucket of their own."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.double()).float()


def lanes_added(config, world) -> list[float]:
    """Take two steps of lanes without DDP, the second as if it had been replayed; return loss and a digest of the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), _Double(300))
    parameters = list(model.parameters())
    batch = paceline.Batches((torch.randn(50, 5), torch.randn(50, 1)), config, world)
    add = (
        ReduceAfterBackward(parameters, config.batch.lanes, world)
        if world.size > 1
        else LocalTree(parameters, config.batch.lanes)
    )
    found: list[float] = []
    for step in batch.steps():
        add.begin()
        notes = []
        for lane in step.lanes:
            value = mse_loss(model(lane.batch[0]), lane.batch[1])
            notes.append(Note(value.item() * lane.samples, float(lane.samples)))
            add.before_lane(notes[-1])
            value.backward()
            if lane is not step.lanes[-1]:
                add.after_lane()
        if world.size > 1:
            add.load_lanes(add.lane_gradients(), notes)
        total = add.finish()
        found += [
            total.loss,
            total.counted,
            *(float(value.double().sum()) for value in gradients_of(parameters)),
        ]
        found += gradients_of(parameters)[0].flatten().tolist()
    return found


def test_gradients_that_cross_the_ranks_at_once_have_the_bits_of_one_rank(tmp_path):
    given = {"batch.lanes": 5, "batch.global_size": 25, "epochs": 1}
    alone = run_on_processes(lanes_added, 1, tmp_path, given)[0]
    for size in (2, 3, 4):
        assert run_on_processes(lanes_added, size, tmp_path, given) == [alone] * size


def test_a_replayed_loss_that_is_not_finite_stops_before_the_update():
    step, plan = step_of("auto"), SimpleNamespace(index=7)
    with pytest.raises(TrainingError, match="nan at step 8, lane 3"):
        CudaGraphStep._note_of(step, SimpleNamespace(plan=plan), Lane(3, (), 2), float("nan"))
    assert CudaGraphStep._note_of(step, SimpleNamespace(plan=plan), Lane(3, (), 2), 0.5) == Note(
        1.0, 2.0
    )
