"""Lesson 16: Train in Slurm jobs.

Slurm starts one task per rank on all nodes and passes each its rank in variables. The program reads
them; the ranks meet on the first node, at a port derived from the job number. `salloc` alone opens a
shell for any number of `srun`. The batch shell runs on the first node only: it has no rank.

    salloc --nodes 2 --ntasks-per-node 2 srun python lessons/16_slurm.py 6 2
    sbatch --wait lessons/16_slurm.sh lessons/16_slurm.py 8 2

Expect: the first trains six epochs on four ranks; the second resumes there on two, into lesson-16.log.
All nodes must share this folder; with GPUs, request them per node (`--gpus-per-node`). `paceline
submit` writes such a script, and requeues a job that reached its time limit.
Time: about 50 s on 2 cores.
New since lesson 15: `read_slurm`, and `main` calls it.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

BATCH, RATE, FILE = 32, 0.05, Path("lesson-16.safetensors")


def make_samples() -> tuple[Tensor, Tensor]:
    """Return 2,048 samples: 20 features, and a target that is linear in them plus noise."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2048, 20, generator=generator)
    weights = torch.randn(20, 1, generator=generator)
    return features, features @ weights + 0.1 * torch.randn(2048, 1, generator=generator)


class Trainer:
    """Trains a model and saves it every few epochs."""

    def __init__(self, device: torch.device, save_every: int, rank: int, size: int) -> None:
        torch.manual_seed(0)
        self.device, self.save_every, self.rank, self.size = device, save_every, rank, size
        self.features, self.targets = (part.to(device) for part in make_samples())
        self.model = DistributedDataParallel(nn.Linear(20, 1).to(device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.begin_at = self.restore()

    def restore(self) -> int:
        """Resume from the checkpoint, if there is one; return how many epochs it has seen."""
        if not FILE.exists():
            return 0
        saved = load_file(FILE, device=str(self.device))  # loading a pickle could run code
        model = self.model.module
        model.load_state_dict({name: saved[name] for name in model.state_dict()})
        state = self.optimizer.state_dict()
        for name in [name for name in saved if name.startswith("optimizer.")]:
            _, number, key = name.split(".")
            state["state"].setdefault(int(number), {})[key] = saved[name]
        self.optimizer.load_state_dict(state)
        return int(saved["epochs"])

    def save(self, epochs: int) -> None:
        """Save what a resume needs; rename it last, so that no partial file is ever found."""
        tensors = self.model.module.state_dict() | {"epochs": torch.tensor(epochs)}
        for number, state in self.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if value is not None:
                    tensors[f"optimizer.{number}.{key}"] = value
        whole = FILE.with_suffix(".new")
        save_file(tensors, whole)
        whole.replace(FILE)

    def train(self, epochs: int) -> None:
        """Run all epochs."""
        print(f"--- rank {self.rank} begins with epoch {self.begin_at + 1} ---")
        for epoch in range(self.begin_at, epochs):
            loss = self.run_epoch(epoch)
            print(f"rank {self.rank}, epoch {epoch + 1}: loss {loss:.4f}")
            if self.rank == 0 and (epoch + 1) % self.save_every == 0:  # all weights are equal
                self.save(epoch + 1)
                print(f"epoch {epoch + 1}: saved {FILE}")
            is_last = self.rank == self.size - 1
            if "die" in sys.argv and is_last and epoch == 2 and self.begin_at == 0:
                print(f"--- rank {self.rank} is killed here ---", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)  # as if the machine had run out of memory

    def run_epoch(self, epoch: int) -> float:
        """See every sample of this rank once; return the mean loss."""
        total = 0.0
        order = torch.randperm(len(self.features), generator=torch.Generator().manual_seed(epoch))
        order = order[self.rank :: self.size]
        for batch in order.split(BATCH // self.size):
            loss = mse_loss(self.model(self.features[batch]), self.targets[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item() * len(batch)
        return total / len(order)


def read_slurm() -> None:
    """Translate srun's variables to torch's; in the batch shell every rank would be rank 0."""
    if "RANK" in os.environ or "SLURM_PROCID" not in os.environ:  # under torchrun, or alone
        return
    names = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}
    for name, slurm_name in names.items():
        os.environ[name] = os.environ[slurm_name]
    tasks = os.environ["SLURM_STEP_TASKS_PER_NODE"]
    os.environ["LOCAL_WORLD_SIZE"] = tasks.split("(")[0].split(",")[0]
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    hosts = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    os.environ["MASTER_ADDR"] = hosts[0]
    os.environ["MASTER_PORT"] = str(20000 + int(os.environ["SLURM_JOB_ID"]) % 10000)


def main() -> None:
    """Run as one task of srun, or one process of torchrun."""
    read_slurm()
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int, nargs="?", default=6)
    parser.add_argument("save_every", type=int, nargs="?", default=2)
    parser.add_argument("die", nargs="?", choices=["die"])
    arguments = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    Trainer(device, arguments.save_every, rank, size).train(arguments.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
