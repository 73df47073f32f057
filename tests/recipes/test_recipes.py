"""The recipes: they learn, and they learn the same bits in every world, however they are started."""

import json
import os
from pathlib import Path

import pytest
import torch

from paceline import handover
from paceline.config import config_from_words
from paceline.recipes.digits import embedded_digits, mnist_digits
from paceline.recipes.mnist import GrayConv2d, MnistConfig, Net
from paceline.recipes.toy import ToyConfig
from paceline.recipes.toy import main as train_toy
from paceline.recipes.toy import samples as toy_samples
from support.processes import run_on_processes

SMALL = ["steps=3", "batch.global_size=22", "lr.schedule=constant"]


WAYS = {  # every two of these settings meet in one of them
    "one": ["norm=none", "optimizer=adamw", "batch.lanes=4"],
    "two": ["norm=none", "optimizer=sgd", "batch.lanes=8"],
    "three": ["norm=batch", "optimizer=adamw", "batch.lanes=8"],
    "four": ["norm=batch", "optimizer=sgd", "batch.lanes=4"],
}


def mnist_digests() -> dict[str, str]:
    """Train the recipe in this process in all ways; return the digests of weights and optimizer state."""
    import paceline.recipes.mnist as recipe

    train, test = embedded_digits()
    recipe.embedded_digits = lambda: (
        (train[0][:40], train[1][:40]),
        (test[0][:9], test[1][:9]),
    )  # two steps, the second short
    meeting = os.environ[handover.MEETING]
    for name, words in WAYS.items():
        os.environ[handover.MEETING] = (
            f"{meeting}-{name}"  # a process group meets in a file of its own
        )
        recipe.main(config_from_words(MnistConfig, [*SMALL, *words, f"name={name}"]))
    ends = {name: Path(f"runs/{name}/events.jsonl").read_text().splitlines()[-1] for name in WAYS}
    return (
        {name: json.loads(line)["digest"] for name, line in ends.items()}
        if os.environ["RANK"] == "0"
        else {}
    )


@pytest.mark.heavy  # the README's `paceline verify --worlds 1,2,3,4 mnist` compares one way of these
def test_mnist_has_the_same_bits_on_one_to_four_ranks(tmp_path):
    found = {size: run_on_processes(mnist_digests, size, tmp_path, {})[0] for size in (1, 2, 3, 4)}
    assert {
        name for name in WAYS if len({digests[name] for digests in found.values()}) > 1
    } == set(), found
    assert {len(digest) for digest in found[1].values()} == {64}
    assert len(set(found[1].values())) == len(WAYS), "and each way has bits of its own"


def test_toy_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_from_words(ToyConfig, ["5", "2"], positional=("epochs", "checkpoint.every"))
    train_toy(config)
    events = [json.loads(line) for line in Path("runs/toy/events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "EpochDone"]
    assert losses[-1] < losses[0] / 100
    assert [event["step"] for event in events if event["event"] == "CheckpointSaved"] == [
        128,
        256,
        320,
    ]


def test_toy_is_what_it_says():
    features, targets = toy_samples()
    assert (features.shape, targets.shape) == ((2048, 20), (2048, 1))
    assert ToyConfig().batch.global_size == 32


def test_the_network_has_the_layers_of_the_issue():
    shapes = {
        name: tuple(value.shape)
        for name, value in Net().named_parameters()
        if name.endswith("weight")
    }
    assert shapes == {
        "conv1.weight": (32, 1, 3, 3),
        "conv2.weight": (64, 32, 3, 3),
        "fc1.weight": (128, 9216),
        "fc2.weight": (10, 128),
    }
    assert [module.p for module in Net().modules() if isinstance(module, torch.nn.Dropout)] == [
        0.25,
        0.5,
    ]


def test_embedded_digits_are_complete_and_never_shared_by_training_and_test():
    (train, train_labels), (test, test_labels) = embedded_digits()
    assert (len(train), len(test)) == (1437, 360)
    assert train.shape[1:] == (1, 28, 28)
    assert set(train_labels.tolist()) == set(test_labels.tolist()) == set(range(10))


def test_real_mnist_is_read_from_its_files(mnist_folder):
    (train, labels), (test, _) = mnist_digits(str(mnist_folder))
    assert (train.shape, test.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert abs(float(train.mean())) < 0.01


class OnGpu(torch.Tensor):
    """A tensor that passes for one of a GPU."""

    is_cuda = True


def test_a_convolution_of_one_channel_as_a_product_is_that_of_torch() -> None:
    layer = GrayConv2d(6, 3).double()
    for count in (4, 0):
        images = torch.randn(count, 1, 9, 7).double()
        found, right = layer(images.as_subclass(OnGpu)), layer(images)
        assert found.shape == right.shape == (count, 6, 7, 5)
        assert found.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found.as_subclass(torch.Tensor), right)
