"""How long until a network has 99 % of MNIST's test digits right, on one GPU?

`python benchmarks/gpu/accuracy.py --seeds 20 data_folder=FOLDER` trains once per seed, each in a fresh process. FOLDER
holds MNIST's IDX files; gzipped ones are decompressed once beforehand, which is not timed. There are three clocks, and all
end when the accuracy is known: the first begins with the first step (a warm-up on zeros, which loads cuDNN and the kernels
of a step, comes before), the second when Python's imports are done, the third with the process. Recording the CUDA graph
is part of all. A thread starts CUDA while Python imports, so that is part of the third only.

Without `--seeds` the script trains once, on any number of ranks:
`paceline verify --worlds 1,2 --steps 5 benchmarks/gpu/accuracy.py batch.lanes=2` (without a folder: built-in digits).
"""

# ruff: noqa: E402 - CUDA starts before the slow imports

from __future__ import annotations

import contextlib
import copy
import ctypes
import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev


def start_cuda() -> None:
    """Start the driver and make the context of the first GPU, which torch then finds."""
    with contextlib.suppress(OSError):  # there is no driver
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


IS_ALONE = "RANK" not in os.environ and sys.argv[1:2] != ["--seeds"]
if IS_ALONE:  # a rank may have another GPU, or none
    threading.Thread(target=start_cuda, daemon=True).start()

import torch
import torch._dynamo  # torch imports it with the first optimizer
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy, gelu, max_pool2d, pad, unfold
from torch.optim.lr_scheduler import LambdaLR

import paceline
from paceline import Run  # imports what a run needs, before the clock starts
from paceline.config import BatchConfig, CheckpointConfig, LrConfig
from paceline.data.mnist_idx import read_idx
from paceline.recipes.digits import embedded_digits
from paceline.recipes.muon import Muon
from paceline.train.gpu_settings import with_gpu_settings

IMPORTED = time.perf_counter()
WANTED = 0.99
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
Digits = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    """A small convolutional network on MNIST."""

    name: str = "mnist-99"
    steps: int = 125
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(global_size=240, lanes=1))
    lr: LrConfig = field(default_factory=lambda: LrConfig(base=0.02, reference_batch=240))
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every="end"))
    data_folder: str = ""
    """Folder of MNIST's IDX files; empty: the built-in digits."""
    muon_factor: float = 6.0
    """Learning rate of the filters, as a multiple of lr.base."""
    shift: int = 1
    """Shift training digits by up to this many pixels."""
    smoothing: float = 0.2
    """Label smoothing."""


class Conv(nn.Module):
    """A 3x3 convolution whose filters are the rows of a matrix, for Muon."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        linear = nn.Linear(9 * inputs, outputs, bias=False)
        self.weight = linear.weight

    def forward(self, images: Tensor) -> Tensor:
        """Convolve without padding."""
        rows = self.weight.view(len(self.weight), 3, 3, -1)
        return conv2d(images, rows.permute(0, 3, 1, 2))  # channels last


class Net(nn.Module):
    """A fixed whitening convolution and two trained ones."""

    def __init__(self, widths: tuple[int, int] = (32, 64)) -> None:
        super().__init__()
        self.whitening: Tensor
        self.register_buffer("whitening", torch.zeros(18, 1, 3, 3))
        self.convs = nn.ModuleList([Conv(18, widths[0]), Conv(*widths)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width, momentum=0.4) for width in widths])
        self.head = nn.Linear(9 * widths[1], 10, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return ten logits per digit, from bytes [samples, 28, 28]."""
        hidden = conv2d(images.unsqueeze(1).float(), self.whitening)  # bf16 holds bytes exactly
        hidden = gelu(max_pool2d(hidden, 2), approximate="tanh")
        hidden = hidden.contiguous(memory_format=torch.channels_last)
        hidden = max_pool2d(self.convs[0](hidden), 2)
        hidden = gelu(self.norms[0](hidden), approximate="tanh")
        hidden = gelu(self.norms[1](self.convs[1](hidden)), approximate="tanh")
        logits: Tensor = self.head(hidden.flatten(1))
        return logits


def whitening_filters(images: Tensor) -> Tensor:
    """Return 18 filters, 3x3: the whitened principal components of patches, and their negatives.

    Sums of bytes and their products are exact in fp64, in any order, and the largest entry of each component is positive.
    """
    patches = unfold(images.unsqueeze(1).double(), 3).transpose(0, 1).reshape(9, -1)
    mean = patches.mean(1, keepdim=True).cpu()
    covariance = (patches @ patches.T).cpu() / patches.shape[1] - mean @ mean.T
    variances, components = torch.linalg.eigh(covariance)
    filters = (components / (variances + 5e-4 * variances.max()).sqrt()).T.flip(0)
    filters *= filters.gather(1, filters.abs().argmax(1, keepdim=True)).sign()
    return torch.cat([filters, -filters]).float().view(-1, 1, 3, 3)


def shifted(images: Tensor, most: int) -> Tensor:
    """Return every digit moved by up to `most` pixels each way. The numbers are drawn per (seed, step, lane)."""
    if most == 0:
        return images
    count, device = len(images), images.device
    down, right = torch.randint(2 * most + 1, (2, count, 1), device=device)
    pixels, sample = torch.arange(28, device=device), torch.arange(count, device=device)
    rows, columns = (down + pixels)[:, :, None], (right + pixels)[:, None, :]
    return pad(images, (most,) * 4)[sample[:, None, None], rows, columns]


def read_digits(folder: str) -> tuple[Digits, Digits]:
    """Return training and test digits, as bytes."""
    if folder:
        parts = [torch.from_numpy(read_idx(Path(folder), name)) for name in FILES]
        return (parts[0], parts[1].long()), (parts[2], parts[3].long())
    train, test = embedded_digits()
    return (_as_bytes(train[0]), train[1]), (_as_bytes(test[0]), test[1])


def _as_bytes(images: Tensor) -> Tensor:
    low, high = images.min(), images.max()
    return ((images - low) * (255 / (high - low))).round().byte().squeeze(1)


def build_optimizer(net: Net, config: Config) -> Muon:
    """Return Muon for the filters, and its AdamW for all other parameters."""
    filters = [conv.weight for conv in net.convs]
    others = [*net.norms.parameters(), net.head.weight]
    rate = paceline.scaled_lr(config)
    muon = {"params": filters, "rule": "muon", "momentum": 0.6, "lr": rate * config.muon_factor}
    return Muon([{"params": others}, muon], rate)


def linear_decay(optimizer: Muon, config: Config, samples: int) -> LambdaLR:
    """Return a schedule from the peak to 0."""
    steps = config.steps or config.epochs * math.ceil(samples / config.batch.global_size)
    return LambdaLR(optimizer, lambda done: max(0.0, 1 - done / steps))


def loss_of(net: Net, batch: Digits, config: Config) -> Tensor:
    """Return the mean loss of a batch."""
    images = shifted(batch[0], config.shift)
    return cross_entropy(net(images), batch[1], label_smoothing=config.smoothing)


def warm_up(net: Net, config: Config, device: str) -> None:
    """Load cuDNN and the kernels of a forward and backward pass, by a copy of the network on zeros."""
    if device == "cpu":
        return
    trial, size = copy.deepcopy(net).to(device), config.batch.global_size
    digits = torch.zeros(size, 28, 28, dtype=torch.uint8, device=device)
    labels = torch.zeros(size, dtype=torch.long, device=device)
    with torch.autocast("cuda", torch.bfloat16, enabled=config.precision == "bf16"):
        loss_of(trial, (digits, labels), config).backward()
    torch.cuda.synchronize(device)


def warm_up_optimizer(net: Net, config: Config, device: str) -> None:
    """Load the kernels of an update, by a copy of the network without gradients."""
    if device == "cpu":
        return
    trial = copy.deepcopy(net).to(device)
    for value in trial.parameters():
        value.grad = torch.zeros_like(value)
    build_optimizer(trial, config).step()


def read_and_whiten(config: Config, device: str) -> tuple[Digits, Digits, Tensor]:
    """Return training and test digits, and the filters for them."""
    train, test = read_digits(config.data_folder)
    return train, test, whitening_filters(train[0][:5_000].to(device))


def main(config: Config) -> None:
    """Train, and print how long it took and how good the network became."""
    with Run(config) as run, ThreadPoolExecutor(2) as pool:
        net = Net()
        reading = pool.submit(read_and_whiten, config, run.device)
        updating = pool.submit(warm_up_optimizer, net, config, run.device)
        warm_up(net, config, run.device)
        updating.result()
        train, test, filters = reading.result()
        net.whitening.copy_(filters)
        run.model(net)
        optimizer = run.optimizer(build_optimizer(net, config))
        scheduler = linear_decay(optimizer, config, len(train[0]))
        run.track(scheduler=scheduler)

        def loss(batch: Digits) -> Tensor:
            return loss_of(net, batch, config)

        def score(batch: Digits) -> dict[str, Tensor]:
            return {"acc": paceline.accuracy(net(batch[0]), batch[1])}

        steps = run.steps(train)
        begun = time.perf_counter()
        for step in steps:
            run.update(optimizer, loss, step)
            scheduler.step()
            if step.evaluates:
                accuracy, ended = run.evaluate(test, score)["acc"], time.perf_counter()
                times = {"from_first_step_s": ended - begun, "after_imports_s": ended - IMPORTED}
                run.print(json.dumps({"accuracy": accuracy, **times, "ended_s": ended}))


def measure(seeds: int, words: list[str]) -> None:
    """Train once per seed, each in a fresh process; print the times and accuracies."""
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-99-") as scratch:
        words = [decompressed(word, Path(scratch)) for word in words]
        for seed in range(seeds):
            given = [f"seed={seed}", f"name=seed-{seed}", f"runs={scratch}/runs", *words]
            found.append(train_once(given))
            print(f"seed {seed}: {json.dumps(found[-1])}", file=sys.stderr, flush=True)
    good = [run for run in found if run["accuracy"] >= WANTED]
    print(f"{len(good)} of {len(found)} seeds reached {WANTED:.0%}")
    for name in found[0]:
        values = [run[name] for run in found]
        spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
        print(f"{name}: {mean(values):.4f}{spread} ({min(values):.4f}-{max(values):.4f})")


def train_once(words: list[str]) -> dict[str, float]:
    """Run this script in a fresh process; return the last result that it printed."""
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    started = time.perf_counter()  # the same clock in all processes
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    results = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, float] = json.loads(results[-1])
    return found | {"from_start_s": found.pop("ended_s") - started}


def decompressed(word: str, scratch: Path) -> str:
    """Return the setting of a folder with IDX files that are not gzipped; other settings as they are."""
    name, _, folder = word.partition("=")
    if name != "data_folder" or all((Path(folder) / file).is_file() for file in FILES):
        return word
    for file in FILES:
        content = gzip.decompress((Path(folder) / f"{file}.gz").read_bytes())
        (scratch / file).write_bytes(content)
    return f"data_folder={scratch}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--seeds"]:
        measure(int(sys.argv[2]), sys.argv[3:])
    else:
        main(with_gpu_settings(paceline.config_from_argv(Config), compiles=False))
