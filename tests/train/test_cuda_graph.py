"""What can be known of captured steps without a GPU; the rest is in test_gpu.py."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from paceline.config import RunConfig
from paceline.config.diloco import LocalSgdConfig
from paceline.errors import ConfigError
from paceline.telemetry.phases import PhaseClock
from paceline.train.gradients.gradient_sum import BucketedSum
from paceline.train.gradients.note import Note
from paceline.train.step.cuda_graph import may_capture
from paceline.train.strategy import Strategy
from paceline.world.world import World
from support.loops import lanes_of
from support.processes import run_on_processes


def _may_capture(world, optimizers, config):
    return may_capture(world, config, Strategy.of(world, config), optimizers)


def test_without_a_gpu_a_step_that_must_be_captured_is_refused():
    optimizers = [torch.optim.AdamW(nn.Linear(6, 1).parameters())]
    with pytest.raises(ConfigError, match="capture=auto"):
        _may_capture(World(), optimizers, RunConfig(capture="true"))
    assert not _may_capture(World(), optimizers, RunConfig(capture="auto"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"parallel": "fsdp"}, "gathers weights"),
        ({"local_sgd": LocalSgdConfig(steps=2, replicas=2)}, "swaps the weights"),
        ({}, "SGD with fused=True"),
    ],
)
def test_what_cannot_be_captured_is_said(settings, reason, capsys):
    optimizers = [torch.optim.SGD(nn.Linear(6, 1).parameters())]
    config = RunConfig(capture="auto", **settings)
    assert not _may_capture(World(device="cuda"), optimizers, config)
    assert reason in capsys.readouterr().err


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
    data = torch.randn(50, 5), torch.randn(50, 1)
    add = BucketedSum(parameters, config.batch.lanes, world, PhaseClock(), exact=True)
    found: list[float] = []
    for step in lanes_of(world, config, data):
        add.begin()
        notes = []
        for lane in step.lanes:
            value = mse_loss(model(lane.batch[0]), lane.batch[1])
            notes.append(Note(value.item() * lane.samples, float(lane.samples)))
            add.before_lane(notes[-1], last=False)
            value.backward()
            if lane is not step.lanes[-1]:
                add.after_lane()
        alone = world.size == 1
        total = add.finish() if alone else add.send_results(add.lane_results(), notes)
        found += [
            total.loss,
            total.counted,
            *(float(value.grad.double().sum()) for value in parameters),
        ]
        found += parameters[0].grad.flatten().tolist()
    return found


def test_gradients_that_cross_the_ranks_at_once_have_the_bits_of_one_rank(tmp_path):
    given = {"batch.lanes": 5, "batch.global_size": 25, "epochs": 1}
    alone = run_on_processes(lanes_added, 1, tmp_path, given)[0]
    for size in (2, 3, 4):
        assert run_on_processes(lanes_added, size, tmp_path, given) == [alone] * size
