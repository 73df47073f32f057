"""The recipes: they learn, and they learn the same bits in every world, however they are started."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from paceline.config import config_from_words
from paceline.config.lanes import choose_lanes
from paceline.course.catalog import find_lesson
from paceline.recipes.digits import embedded_digits, mnist_digits
from paceline.recipes.mnist import DigitsNet, GrayConv2d, MnistConfig, Net
from paceline.recipes.mnist import main as train_mnist
from paceline.recipes.toy import ToyConfig
from paceline.recipes.toy import main as train_toy


@pytest.fixture(scope="module")
def digest_of_the_recipe(tmp_path_factory):
    """The SHA-256 of the recipe after an epoch; it prints the first 16 digits."""
    folder = tmp_path_factory.mktemp("recipe")
    train_mnist(config_from_words(MnistConfig, ["epochs=1", "seed=3", f"runs={folder}"]))
    events = (folder / "mnist" / "events.jsonl").read_text().splitlines()
    return json.loads(events[-1])["digest"]


@pytest.mark.parametrize(
    "ranks", [1, 3, *(pytest.param(number, marks=pytest.mark.heavy) for number in (2, 4))]
)
def test_the_promise_in_one_file_computes_the_same_digest(ranks, digest_of_the_recipe, tmp_path):
    lesson = find_lesson("36")
    assert "import paceline" not in lesson.source
    assert "from paceline" not in lesson.source
    assert len(lesson.source.splitlines()) <= 300
    batch = MnistConfig().batch  # what `paceline train mnist -n 2` takes on a CPU
    lanes = choose_lanes(batch.lanes, ranks=2, global_size=batch.global_size)
    assert f"\nLANES = {lanes} " in lesson.source
    words = [sys.executable, str(lesson.path), "-n", str(ranks), "epochs=1", "seed=3"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    assert re.findall(r"SHA-256 (\w+)", done.stdout) == [digest_of_the_recipe]


def test_toy_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_from_words(ToyConfig, ["5", "2"], positional=("epochs", "checkpoint.every"))
    train_toy(config)
    events = [json.loads(line) for line in Path("runs/toy/events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "EpochDone"]
    assert losses[-1] < losses[0] / 100
    saved = [event["step"] for event in events if event["event"] == "CheckpointSaved"]
    assert saved == [128, 256, 320]


def test_the_network_is_that_of_the_torch_examples():
    weights = {
        name: list(value.shape) for name, value in Net().state_dict().items() if value.ndim > 1
    }
    assert weights == {
        "conv1.weight": [32, 1, 3, 3],
        "conv2.weight": [64, 32, 3, 3],
        "fc1.weight": [128, 9216],
        "fc2.weight": [10, 128],
    }
    rates = [module.p for module in Net().modules() if isinstance(module, torch.nn.Dropout)]
    assert rates == [0.25, 0.5]


def test_the_network_of_the_embedded_digits_is_small():
    assert sum(value.numel() for value in DigitsNet().parameters()) == 80_202
    for norm in ("none", "batch"):
        assert DigitsNet(norm)(embedded_digits()[1][0][:3]).shape == (3, 10)


def test_files_of_mnist_train_the_larger_network_at_its_own_rate(tmp_path, monkeypatch):
    (images, labels), _ = embedded_digits()
    few = images[:9], labels[:9]
    monkeypatch.setattr("paceline.recipes.mnist.read_digits", lambda _: (few, few))
    fixed = ["data=mnist", "steps=1", f"runs={tmp_path}"]
    for name, given, rate in (("own", [], 0.001), ("given", ["lr.base=0.005"], 0.005)):
        train_mnist(config_from_words(MnistConfig, [*fixed, f"name={name}", *given]))
        saved = tomllib.loads((tmp_path / name / "config.toml").read_text())
        assert saved["lr"]["base"] == rate
    [manifest] = tmp_path.glob("own/checkpoints/*/manifest.json")
    assert "dropout2.training" in manifest.read_text(), "the network of the tutorial"


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
