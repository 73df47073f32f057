"""Lesson 16: Slurm: interactive, and as a batch job.

Slurm starts one task for each rank on all nodes, and tells each who it is in variables of its own. All
that is needed is to hear them, and an address where the ranks meet: the first node, and a port that
follows from the number of the job. `salloc` without more gives a shell, in which to type `srun` again and
again. The batch shell runs once, on the first node: what differs from rank to rank must not come from it.

    salloc --nodes 2 --ntasks-per-node 2 srun python lessons/16_slurm.py 6 2
    sbatch --wait lessons/16_slurm.sh lessons/16_slurm.py 8 2

Expect: the first trains six epochs on four ranks; the second goes on from there, and its words are in
lesson-16.log. All nodes must see this folder; with GPUs, ask for those of a node (`--gpus-per-node`). Typed
again there is nothing left to do: remove lesson-16.safetensors. `paceline submit` writes such a script, and puts a job
that reached its time limit back into the queue.
Time: about 50 s on 2 cores.
New since lesson 15: `hear_slurm`, and `main` calls it.
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
    """Return 2,048 samples whose target is a linear function of their 20 features, plus a little noise."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2048, 20, generator=generator)
    weights = torch.randn(20, 1, generator=generator)
    return features, features @ weights + 0.1 * torch.randn(2048, 1, generator=generator)


class Trainer:
    """Trains a model, and saves it every so many epochs."""

    def __init__(self, device: torch.device, save_every: int, rank: int, size: int) -> None:
        torch.manual_seed(0)
        self.device, self.save_every, self.rank, self.size = device, save_every, rank, size
        self.features, self.targets = (part.to(device) for part in make_samples())
        self.model = DistributedDataParallel(nn.Linear(20, 1).to(device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.begin_at = self.restore()

    def restore(self) -> int:
        """Go on from the checkpoint, if there is one; return how many epochs it has seen."""
        if not FILE.exists():
            return 0
        saved = load_file(
            FILE, device=str(self.device)
        )  # numbers alone: a pickle may run code when it is loaded
        self.model.module.load_state_dict(
            {name: saved[name] for name in self.model.module.state_dict()}
        )
        state = self.optimizer.state_dict()
        for name in [name for name in saved if name.startswith("optimizer.")]:
            _, number, key = name.split(".")
            state["state"].setdefault(int(number), {})[key] = saved[name]
        self.optimizer.load_state_dict(state)
        return int(saved["epochs"])

    def save(self, epochs: int) -> None:
        """Write all that a later start needs, under another name first: a half-written file must never be found."""
        tensors = self.model.module.state_dict() | {"epochs": torch.tensor(epochs)}
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors |= {
                f"optimizer.{number}.{key}": value
                for key, value in state.items()
                if value is not None
            }
        whole = FILE.with_suffix(".new")
        save_file(tensors, whole)
        whole.replace(FILE)

    def train(self, epochs: int) -> None:
        """Run all epochs."""
        for epoch in range(self.begin_at, epochs):
            loss = self.run_epoch(epoch)
            print(f"rank {self.rank}, epoch {epoch + 1}: loss {loss:.4f}")
            if (
                self.rank == 0 and (epoch + 1) % self.save_every == 0
            ):  # all have the same weights: one writes them
                self.save(epoch + 1)
                print(f"epoch {epoch + 1}: saved {FILE}")
            if (
                "die" in sys.argv
                and epoch == 2
                and self.begin_at == 0
                and self.rank == self.size - 1
            ):
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


def hear_slurm() -> None:
    """Say in torch's words what srun says in its own. A batch shell must not do this: there all ranks would be rank 0."""
    if (
        "RANK" in os.environ or "SLURM_PROCID" not in os.environ
    ):  # torchrun has said it already, or nobody is there
        return
    names = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}
    told = {name: os.environ[theirs] for name, theirs in names.items()}
    told["LOCAL_WORLD_SIZE"] = os.environ["SLURM_STEP_TASKS_PER_NODE"].split("(")[0].split(",")[0]
    ask = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    first = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.split()[0]
    told |= {
        "MASTER_ADDR": first,
        "MASTER_PORT": str(20000 + int(os.environ["SLURM_JOB_ID"]) % 10000),
    }
    os.environ.update(told)


def main() -> None:
    """Be one of the tasks that srun starts, or of torchrun's processes: each is told who it is."""
    hear_slurm()
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int, nargs="?", default=6)
    parser.add_argument("save_every", type=int, nargs="?", default=2)
    parser.add_argument("die", nargs="?", choices=["die"])
    words = parser.parse_args()
    rank, size, local_rank = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    device = (
        torch.device("cuda", local_rank)
        if torch.cuda.device_count() >= here
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    Trainer(device, words.save_every, rank, size).train(words.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
