"""Train a convolutional network on handwritten digits: the built-in UCI digits, MNIST from IDX files, or shards."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import paceline
from paceline import handover
from paceline.config import BatchConfig, LrConfig, RunConfig
from paceline.config.given import is_given, with_values
from paceline.recipes.digits import embedded_digits, mnist_digits, packed_digits
from paceline.train.gpu_settings import with_gpu_settings


@dataclass(frozen=True)
class MnistConfig(RunConfig):
    """A convolutional network on handwritten digits."""

    name: str = "mnist"
    epochs: int = 8
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(global_size=64))
    lr: LrConfig = field(
        default_factory=lambda: LrConfig(base=5e-3, reference_batch=64, schedule="one-cycle")
    )
    optimizer: Literal["adamw", "adadelta", "sgd"] = "adamw"
    """AdamW, Adadelta (with lr.base=1), or SGD with momentum."""
    norm: Literal["none", "batch"] = "none"
    """BatchNorm after each convolution, or none."""
    data: Literal["digits", "mnist", "shards"] = "digits"
    """The 1,797 built-in digits, MNIST from data_folder, or shards that are streamed from there. The last two train a network of 1.2 million weights, with lr.base=0.001 unless it is given."""
    data_folder: str = ""
    """Folder of the IDX files, or folder or address of the datasets `train` and `test`; empty: PACELINE_DATA."""


_MULTIPLE = 8  # a product is fast if the length of its sums is a multiple of this


class GrayConv2d(nn.Conv2d):
    """A convolution of one channel: on a GPU a batch of products of patches and filters, which cuDNN takes longer for."""

    def __init__(self, outputs: int, size: int) -> None:
        super().__init__(1, outputs, size)

    def forward(self, images: Tensor) -> Tensor:
        """Convolve without padding."""
        if not images.is_cuda:
            return super().forward(images)
        side = self.kernel_size[0]
        patches = images.unfold(2, side, 1).unfold(3, side, 1)
        count, _, height, width = patches.shape[:4]
        unused = -side * side % _MULTIPLE
        rows = pad(patches.reshape(count, height * width, side * side), (0, unused))
        filters = pad(self.weight.flatten(1), (0, unused)).t().expand(count, -1, -1)
        result = torch.baddbmm(self.bias, rows, filters)  # type: ignore[arg-type]
        return result.view(count, height, width, self.out_channels).permute(0, 3, 1, 2)


_RATE_OF_NET = 1e-3


class Net(nn.Module):
    """The network for MNIST, from PyTorch's examples: two convolutions, max pooling and two linear layers, with dropout."""

    def __init__(self, norm: str = "none") -> None:
        super().__init__()
        self.conv1, self.conv2 = GrayConv2d(32, 3), nn.Conv2d(32, 64, 3)
        self.norm1: nn.Module = nn.BatchNorm2d(32) if norm == "batch" else nn.Identity()
        self.norm2: nn.Module = nn.BatchNorm2d(64) if norm == "batch" else nn.Identity()
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return ten logits per 28x28 image."""
        hidden = self.norm1(self.conv1(images)).relu()
        hidden = self.norm2(self.conv2(hidden)).relu()
        hidden = self.dropout1(nn.functional.max_pool2d(hidden, 2)).flatten(1)
        logits: Tensor = self.fc2(self.dropout2(self.fc1(hidden).relu()))
        return logits


class DigitsNet(nn.Module):
    """Two convolutions, max pooling and two linear layers: 80,202 weights, enough for the 1,437 digits in the package."""

    def __init__(self, norm: str = "none") -> None:
        super().__init__()
        self.conv1, self.conv2 = GrayConv2d(16, 5), nn.Conv2d(16, 32, 5)
        self.norm1: nn.Module = nn.BatchNorm2d(16) if norm == "batch" else nn.Identity()
        self.norm2: nn.Module = nn.BatchNorm2d(32) if norm == "batch" else nn.Identity()
        self.dropout = nn.Dropout(0.25)
        self.fc1, self.fc2 = nn.Linear(512, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return ten logits per 28x28 image."""
        hidden = nn.functional.max_pool2d(self.norm1(self.conv1(images)).relu(), 2)
        hidden = nn.functional.max_pool2d(self.norm2(self.conv2(hidden)).relu(), 2).flatten(1)
        logits: Tensor = self.fc2(self.dropout(self.fc1(hidden).relu()))
        return logits


def build_optimizer(model: nn.Module, config: MnistConfig) -> torch.optim.Optimizer:
    """Return the optimizer that the config names."""
    rate = paceline.scaled_lr(config)
    if config.optimizer == "adadelta":
        return torch.optim.Adadelta(model.parameters(), lr=rate)
    fused = next(model.parameters()).is_cuda
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=fused)
    compiled = fused and config.compile  # to two kernels for all parameters, which is faster
    return torch.optim.AdamW(
        model.parameters(), lr=rate, fused=fused and not compiled, foreach=compiled
    )


def read_digits(config: MnistConfig) -> tuple[Any, Any]:
    """Return the training and held-out digits that the settings name."""
    folder = config.data_folder or os.environ.get(handover.DATA, "")
    if config.data == "shards":
        return packed_digits(folder, config)
    return mnist_digits(folder) if config.data == "mnist" else embedded_digits()


def main(config: MnistConfig) -> None:
    """Train, and report the accuracy on held-out digits."""
    if config.data != "digits" and not is_given(config, "lr.base"):
        config = with_values(config, lr=replace(config.lr, base=_RATE_OF_NET))
    train, test = read_digits(config)
    with paceline.Run(config) as run:
        net = DigitsNet(config.norm) if config.data == "digits" else Net(config.norm)
        if run.device != "cpu" and config.parallel != "fsdp":  # FSDP needs contiguous weights
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model = run.model(net)
        optimizer = run.optimizer(build_optimizer(model, config))
        metrics = {"acc": paceline.accuracy}
        paceline.Trainer(
            run, model, optimizer, train, cross_entropy, evaluation=test, metrics=metrics
        ).fit()


if __name__ == "__main__":
    given = paceline.config_from_argv(MnistConfig, positional=("epochs", "checkpoint.every"))
    main(with_gpu_settings(given, compiles=False))  # it is trained before its compilation would end
