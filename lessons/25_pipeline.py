"""Lesson 25: Pipeline parallelism by hand.

Each rank holds a few layers, a stage. A batch is cut into micro-batches: a stage computes one, sends
the result to the next stage, and takes the next one; in backward, gradients go the other way. A stage
waits until the first micro-batch arrives, and again after its last one has left. With p stages and m
micro-batches this bubble is (p - 1) / (m + p - 1) of the time: more micro-batches, less waiting. The
stages here sleep as long as a slow device would compute, so that four of them fit on two cores.

    torchrun --standalone --nproc-per-node 4 lessons/25_pipeline.py

Expect: for more micro-batches a shorter batch and a smaller bubble, near (p - 1) / (m + p - 1); a few
percent more where they are short, since sending takes time as well. The loss and the gradients are
those of one process that runs all stages, up to rounding. Any number of ranks from 2 on works.
Time: about 16 s on 2 cores.
New since lesson 4: `Stage` and `whole_gradients`, with `WIDTH`, `COUNTS` and the costs `FORWARD_S` and
`BACKWARD_S`, replace `make_model`, `accuracy`, `share_of` and `average_gradients`; `make_layers` gives
the layers of a stage; `main` measures one batch, where `EPOCHS` and `RATE` are not needed.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

BATCH, WIDTH, COUNTS = 64, 64, (1, 2, 4, 8)
FORWARD_S, BACKWARD_S = 0.002, 0.004  # per sample and stage, as on a slow device


def pick_device() -> torch.device:
    """Return the GPU of this local rank, or the CPU if there are not enough GPUs."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)  # "cuda" without a number would be GPU 0 everywhere
    return torch.device("cuda", local_rank)


def join(device: torch.device) -> tuple[int, int]:
    """Join the process group; return rank and world size, which torchrun passes as variables."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size()


def make_layers(rank: int, size: int) -> nn.Module:
    """Return the layers of a rank: the first stage reads pixels, the last one gives ten scores."""
    torch.manual_seed(rank)
    first = nn.Linear(28 * 28 if rank == 0 else WIDTH, WIDTH)
    if rank < size - 1:
        return nn.Sequential(nn.Flatten(), first, nn.ReLU())
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(WIDTH, 10))


class Stage:
    """The layers of a rank, and what it exchanges with the ranks before and after it."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.device, self.is_last = rank, device, rank == size - 1
        self.layers, self.waited_s = make_layers(rank, size).to(device), 0.0

    def receive(self, source: int, rows: int) -> Tensor:
        """Wait for the next tensor of another stage."""
        values, begun = torch.empty(rows, WIDTH, device=self.device), time.perf_counter()
        dist.recv(values, source)
        self.waited_s += time.perf_counter() - begun
        return values

    def run(self, images: Tensor, labels: Tensor, count: int) -> float:
        """Run all forwards, then all backwards; return the loss, which only the last stage knows."""
        kept, sent, total = [], [], 0.0
        for part, wanted in zip(images.chunk(count), labels.chunk(count), strict=True):
            inputs = part if self.rank == 0 else self.receive(self.rank - 1, len(part))
            outputs = self.layers(inputs.requires_grad_())
            time.sleep(FORWARD_S * len(part))
            if self.is_last:
                outputs = cross_entropy(outputs, wanted) / count  # gradients add up over the parts
                total += outputs.item()
            else:
                sent.append(dist.isend(outputs.detach(), self.rank + 1))
            kept.append((inputs, outputs))
        for inputs, outputs in kept:
            gradient = None if self.is_last else self.receive(self.rank + 1, len(outputs))
            outputs.backward(gradient)
            time.sleep(BACKWARD_S * len(inputs))
            if self.rank > 0:
                sent.append(dist.isend(inputs.grad, self.rank - 1))
        for message in sent:
            message.wait()
        return total


def whole_gradients(rank: int, size: int, images: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the gradients of this rank's layers, computed without a pipeline."""
    layers = [make_layers(one, size).to(images.device) for one in range(size)]
    cross_entropy(nn.Sequential(*layers)(images), labels).backward()
    return [parameter.grad for parameter in layers[rank].parameters()]


def main() -> None:
    """Run one batch in different numbers of micro-batches."""
    device = pick_device()
    rank, size = join(device)
    (images, labels), _ = embedded_digits()
    images, labels = images[:BATCH].to(device), labels[:BATCH].to(device)
    expected = whole_gradients(rank, size, images, labels)
    Stage(rank, size, device).run(images.clone(), labels, 2)  # warm-up is not counted
    for count in COUNTS:
        stage = Stage(rank, size, device)
        dist.barrier()
        begun = time.perf_counter()
        loss = stage.run(images.clone(), labels, count)
        done = time.perf_counter()
        dist.barrier()  # after its last micro-batch a stage waits for the others
        whole_s = time.perf_counter() - begun
        waited_s = stage.waited_s + time.perf_counter() - done
        pairs = zip(stage.layers.parameters(), expected, strict=True)
        error = max((one.grad - wanted).abs().max().item() for one, wanted in pairs)
        assert error < 1e-6, f"stage {rank}: the gradients differ by {error:.1e}"
        facts = torch.tensor([loss * size, waited_s / whole_s], device=device)
        dist.all_reduce(facts)
        loss, bubble = (facts / size).tolist()
        if rank == 0:
            formula = (size - 1) / (count + size - 1)
            print(
                f"micro-batches {count}: loss {loss:.4f}, {1000 * whole_s:.0f} ms, bubble {bubble:.0%}, formula {formula:.0%}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
