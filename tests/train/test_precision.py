"""Numbers of other widths: the same bits on any number of ranks, and with fp16 no gradient lost and none infinite."""

import math

import pytest
import torch
from processes import run_on_processes
from torch import nn
from torch.nn.functional import mse_loss

import paceline
from paceline.config import BatchConfig, RunConfig, config_from_words
from paceline.train.precision import Precision
from paceline.train.state import state_digest
from paceline.world.facts import World


def trained(config, world) -> str:
    torch.manual_seed(1)
    model = paceline.parallelize(nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 1)), world, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(2)
    data = torch.randn(40, 6, generator=generator), torch.randn(40, 1, generator=generator)
    batches = paceline.Batches(data, config, world)
    step = paceline.OptimizerStep(world, model, optimizer, mse_loss, config, batches.total_samples)
    for batch in batches.steps():
        step(batch)
    return state_digest(model, optimizer)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_any_number_of_ranks_trains_the_same_bits(precision, tmp_path):
    given = {"precision": precision, "batch.lanes": 4, "batch.global_size": 16, "epochs": 2, "clip_norm": 0.5}
    found = {digest for size in (1, 2, 3) for digest in run_on_processes(trained, size, tmp_path, given)}
    assert len(found) == 1
    assert found != set(run_on_processes(trained, 1, tmp_path, given | {"precision": "fp32"}))


def test_forward_runs_in_the_numbers_that_were_asked_for():
    seen = []

    class Model(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            seen.append(outputs.dtype)
            return outputs

    config = RunConfig(batch=BatchConfig(4, lanes=1), epochs=1, precision="bf16")
    model = Model(6, 1)
    step = paceline.OptimizerStep(World(), model, torch.optim.SGD(model.parameters(), lr=0.1), mse_loss, config)
    step(next(paceline.Batches((torch.ones(4, 6), torch.ones(4, 1)), config, World()).steps()))
    assert seen == [torch.bfloat16]
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32


def test_gradients_come_back_to_their_size_and_the_scale_grows_in_time():
    precision = Precision(RunConfig(precision="fp16"), "cpu")
    scale = precision.scale
    gradient = torch.tensor([3.0]) * scale
    assert precision.unscale([gradient])
    assert gradient.item() == 3.0
    for _ in range(1999):
        precision.unscale([torch.zeros(1)])
    assert precision.scale == 2 * scale


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_overflows_does_not_count_and_halves_the_scale(bad):
    precision = Precision(RunConfig(precision="fp16"), "cpu")
    scale = precision.scale
    assert not precision.unscale([torch.zeros(2), torch.tensor([1.0, bad])])
    assert precision.scale == scale / 2
    other = Precision(RunConfig(precision="fp16"), "cpu")
    other.restore(precision.state())
    assert other.state() == precision.state()


def test_weights_stay_as_they_are_where_a_step_does_not_count():
    config = RunConfig(batch=BatchConfig(4, lanes=2), epochs=1, precision="fp16")
    model = nn.Linear(6, 1)
    before = model.weight.clone()
    step = paceline.OptimizerStep(World(), model, torch.optim.SGD(model.parameters(), lr=0.1), mse_loss, config)
    step.precision.scale = 2.0**100  # more than fp16 holds
    batches = paceline.Batches((torch.full((8, 6), 3.0), torch.ones(8, 1)), config, World())
    first, second = batches.steps()
    step(first)
    assert torch.equal(model.weight, before)
    step.precision.scale = 1024.0
    step(second)
    assert not torch.equal(model.weight, before)


def test_a_true_setting_may_be_written_as_toml_writes_it():
    assert RunConfig(capture="true") == config_from_words(RunConfig, ["capture=true"])
