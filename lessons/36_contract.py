"""Lesson 36: The promise in one file.

Paceline promises that a training has the same bits on any number of ranks. This file computes what
`paceline train mnist -n 2` computes, with PyTorch and the standard library only, so that nobody has to
believe it: it does not import Paceline, and prints the same digest. A floating-point result
depends on which numbers are added in which order, so all that depended on the number of ranks is
fixed here: the samples of a step (`sample_at`), the micro-batches (`lanes_of_step`), the random
numbers (`mix`) and the order of the sum (`tree_sum`). Change any of the four, and the digests part.

    python lessons/36_contract.py epochs=2
    python lessons/36_contract.py -n 3 epochs=2                          the same digest
    paceline train mnist -n 2 epochs=2 name=lesson-36 resume=never       the same digest, by Paceline

Expect: the same digest three times, on one process, on three, and by Paceline on two.
Time: about 30 s on 2 cores.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, max_pool2d

# The settings of the recipe. They are part of what is trained; the number of ranks is not.
LANES = 4  # micro-batches of a step: at most so many ranks
BATCH, EPOCHS, RATE = 64, 8, 5e-3
BITS = (1 << 64) - 1  # numbers of 64 bits: the rest of a product is cut off


# 1. What is trained: a model and its data, in plain PyTorch.


class DigitsNet(nn.Module):
    """The network of the recipe: two convolutions and two linear layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 5)
        self.dropout = nn.Dropout(0.25)
        self.fc1, self.fc2 = nn.Linear(512, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return ten logits per image."""
        hidden = max_pool2d(self.conv1(images).relu(), 2)
        hidden = max_pool2d(self.conv2(hidden).relu(), 2).flatten(1)
        return self.fc2(self.dropout(self.fc1(hidden).relu()))


def read_digits() -> tuple[Tensor, Tensor]:
    """Return the 1,437 digits to train on, of the 1,797 in the package: 28x28, normalized, and their labels.

    A .safetensors file is the length of its header in 8 bytes, the header in JSON, and the tensors' bytes.
    """
    package = Path(__file__).resolve().parents[1] / "src" / "paceline"
    if (
        not package.is_dir()
    ):  # an installed lesson; find_spec says where the package is, and does not import it
        package = Path(importlib.util.find_spec("paceline").origin).parent
    content = (package / "recipes" / "digits.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header, tensors = json.loads(content[8:begin]), {}
    for name in ("images", "labels"):
        entry = header[name]
        first, end = entry["data_offsets"]
        assert entry["dtype"] == "U8", "both tensors are bytes"
        values = torch.frombuffer(
            bytearray(content[begin + first : begin + end]), dtype=torch.uint8
        )
        tensors[name] = values.view(entry["shape"])
    images = interpolate(tensors["images"].float().unsqueeze(1) / 16, size=28, mode="bilinear")
    images, labels = (images - 0.1307) / 0.3081, tensors["labels"].long()
    trained = torch.arange(len(labels)) % 5 != 0  # every fifth digit is for the test
    return images[trained], labels[trained]


# 2. The order: which sample is the k-th of an epoch is a function of (seed, epoch, k).
#    No sampler has a state, and nothing is shuffled in memory, so ranks cannot disagree.


def hashed(word: int) -> int:
    """Return a hash of 64 bits (SplitMix64)."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & BITS
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & BITS
    return word ^ (word >> 31)


def sample_at(place: int, size: int, seed: int, epoch: int) -> int:
    """Return the sample at a place of the epoch's order: a keyed permutation of 0 .. size - 1.

    A Feistel network permutes the numbers below the next power of two: each round XORs one half of the bits with a
    hash of the other half, which can be undone, so no two places get the same number. A number that is not below
    `size` is permuted again until it is.
    """
    if size == 1:
        return 0
    stride = 0x9E3779B97F4A7C15
    state = hashed(hashed(seed + stride & BITS) + epoch * 0x94D049BB133111EB & BITS)
    bits = (size - 1).bit_length()
    widths = (
        bits // 2,
        bits - bits // 2,
    )  # of the low and of the high half; they swap after each round
    while True:
        high, low = place >> widths[0], place & ((1 << widths[0]) - 1)
        for number in range(8):
            key = hashed(state + (number + 1) * stride & BITS)
            mask = (1 << widths[1 - number % 2]) - 1
            high, low = low, high ^ (hashed(low ^ key) & mask)
        place = high << widths[0] | low
        if place < size:
            return place


# 3. The lanes: every step is cut into the same micro-batches, whoever computes them.


def lanes_of_step(within: int, size: int) -> list[range]:
    """Return the places of the epoch's order that each lane of a step reads: equal parts, larger ones first.

    The last step of an epoch is shorter, and so are its lanes.
    """
    place = within * BATCH
    least, rest = divmod(min(BATCH, size - place), LANES)
    lanes = []
    for lane in range(LANES):
        count = least + (lane < rest)
        lanes.append(range(place, place + count))
        place += count
    return lanes


def share(rank: int, ranks: int) -> range:
    """Return the lanes of a rank: contiguous, as even as possible. It decides who computes, not what is computed."""
    least, rest = divmod(LANES, ranks)
    begin = rank * least + min(rank, rest)
    return range(begin, begin + least + (rank < rest))


# 4. The random numbers: the generator is seeded before each lane, from (seed, step, lane).
#    So dropout of a lane is the same on any rank, after any other lane, and after a restart.


def mix(*numbers: int) -> int:
    """Return the seed that some numbers make."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ number) * 0xBF58476D1CE4E5B9 & BITS
        state = (state ^ (state >> 29)) * 0x94D049BB133111EB & BITS
        state ^= state >> 32
    return state


# 5. The sum: lanes are added along one fixed tree. (a + b) + (c + d) is not ((a + b) + c) + d in floating point.


def tree_sum(gradients: list[Tensor], lanes: range) -> Tensor:
    """Return the sum of the gradients of some lanes; the tree splits them at the largest power of two below their number.

    Paceline's ranks add the subtrees whose lanes are all theirs before they send anything, and each rank adds up
    a part of the parameters: fewer bytes, and the same additions of the same numbers. Here every rank adds all.
    """
    if len(lanes) == 1:
        return gradients[lanes.start]
    middle = lanes.start + half(len(lanes))
    left = tree_sum(gradients, range(lanes.start, middle))
    return left + tree_sum(gradients, range(middle, lanes.stop))


def half(count: int) -> int:
    """Return the largest power of two below a number."""
    return 1 << (count - 1).bit_length() - 1


# 6. The learning rate: a function of the samples seen so far, not of steps or ranks.


def learning_rate(seen: int, total: int) -> float:
    """Return the rate of the step that ends after `seen` samples: one cycle, up for 30 % of the run, then half a cosine."""
    rise = int(0.3 * total)
    if seen < rise:
        return RATE * (1 / 25 + (1 - 1 / 25) * seen / rise)
    return RATE * (1 + math.cos(math.pi * min(1.0, (seen - rise) / (total - rise)))) / 2


# 7. The training.


def train(rank: int, ranks: int, epochs: int, seed: int, folder: str) -> None:
    """Train as one of some ranks; rank 0 prints the digest."""
    torch.set_num_threads(1)  # the threads of a sum are part of its order
    if ranks > 1:  # they meet in a file of a private folder; gloo listens on loopback only
        loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
        os.environ["GLOO_SOCKET_IFNAME"] = loopback.pop()
        meet = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    images, labels = read_digits()
    size = len(images)
    steps_per_epoch = math.ceil(size / BATCH)

    torch.manual_seed(mix(seed))  # the same first weights on every rank
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, foreach=False)
    parameters = list(model.parameters())
    mine = share(rank, ranks)
    owners = [owner for owner in range(ranks) for _ in share(owner, ranks)]  # of each lane

    for step in range(epochs * steps_per_epoch):
        epoch, within = divmod(step, steps_per_epoch)
        lanes = lanes_of_step(within, size)
        samples = sum(map(len, lanes))

        # The gradient of each lane of this rank: the mean over its samples, times its weight in the mean of the step.
        gradients = [torch.zeros(sum(map(Tensor.numel, parameters))) for _ in range(LANES)]
        for lane in mine:
            places = [sample_at(place, size, seed, epoch) for place in lanes[lane]]
            torch.manual_seed(mix(seed, step, lane))
            loss = cross_entropy(model(images[places]), labels[places])
            weight = torch.full_like(loss, len(places) / samples)
            found = torch.autograd.grad(loss, parameters, weight)
            gradients[lane] = torch.cat([value.flatten() for value in found])

        # Every rank gets the gradients of all lanes, as they are: nothing is added on the way.
        if ranks > 1:
            for gradient, owner in zip(gradients, owners, strict=True):
                dist.broadcast(gradient, owner)
        total = tree_sum(gradients, range(LANES))

        # All ranks make the same update of the same weights by the same gradient.
        parts = total.split([value.numel() for value in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        seen = epoch * size + min((within + 1) * BATCH, size)
        optimizer.param_groups[0]["lr"] = learning_rate(seen, epochs * size)
        optimizer.step()

    if rank == 0:
        found = digest(model, optimizer)
        print(f"{ranks} rank{'s'[: ranks > 1]}: weights and optimizer state {found[:16]}")
        print(f"SHA-256 {found}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


# 8. The digest: one SHA-256 over the names, types, shapes and bytes of weights, buffers and optimizer state.


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 of all that a checkpoint would hold of model and optimizer."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state[parameter].items():  # step, exp_avg, exp_avg_sq
            tensors[f"optimizer.{kind}.{name}"] = value
    digests = []
    for name, value in sorted(tensors.items()):
        label = f"{name} {value.dtype} {tuple(value.shape)}\n".encode()
        content = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        digests.append(hashlib.sha256(label + content).hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def main() -> None:
    """Start the ranks: processes of this machine."""
    parser = argparse.ArgumentParser(
        description="Compute what `paceline train mnist -n 2` computes."
    )
    parser.add_argument("-n", dest="ranks", type=int, default=1, help=f"1 to {LANES} processes")
    parser.add_argument("settings", nargs="*", help="epochs=NUMBER, seed=NUMBER")
    given = parser.parse_args()
    settings = {"epochs": EPOCHS, "seed": 0}
    for word in given.settings:
        name, _, value = word.partition("=")
        if name not in settings or not value.isdecimal():
            parser.error(f"give epochs=NUMBER or seed=NUMBER, not {word}")
        settings[name] = int(value)
    if not 1 <= given.ranks <= LANES:
        parser.error(f"{LANES} lanes can be shared by 1 to {LANES} ranks, not {given.ranks}")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given.ranks, settings["epochs"], settings["seed"], folder)
        if given.ranks == 1:
            train(0, *arguments)
            return
        method = "fork" if sys.platform == "linux" else "spawn"  # forked ranks have torch already
        mp.start_processes(train, arguments, nprocs=given.ranks, start_method=method)


if __name__ == "__main__":
    main()
