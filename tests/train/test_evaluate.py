"""Every held-out sample counts once, whatever the number of ranks."""

import torch
from torch import nn

import paceline
from paceline.train.evaluate import Evaluation
from support.processes import on_processes, run_on_processes


class Always(nn.Module):
    """Predicts class 1, and nothing else."""

    def forward(self, inputs):
        return torch.tensor([[0.0, 1.0]]).expand(len(inputs), 2)


@on_processes(2)
def test_five_samples_on_two_ranks_with_one_right_give_a_fifth(world, config) -> None:
    data = torch.zeros(5, 1), torch.tensor([0, 0, 1, 0, 0])
    found = Evaluation(
        data, nn.functional.cross_entropy, {"acc": paceline.accuracy}, config, world
    ).run(Always())
    assert found["acc"] == 0.2


def evaluated(config, world) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    data = torch.randn(53, 3), torch.arange(53) % 2
    found = Evaluation(
        data, nn.functional.cross_entropy, {"acc": paceline.accuracy}, config, world
    ).run(model)
    assert model.training
    return str(found)


def test_the_figures_have_the_same_bits_in_every_world(tmp_path) -> None:
    settings = {"batch.global_size": 24, "batch.lanes": 4}
    found = {
        answer
        for size in (1, 2, 3, 4)
        for answer in run_on_processes(evaluated, size, tmp_path, settings)
    }
    assert len(found) == 1
