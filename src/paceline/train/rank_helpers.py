"""What user code asks of the ranks: who am I, print once, gather, broadcast, wait."""

from __future__ import annotations

from torch import Tensor

from paceline.train.evaluation.inference import gather_in_order
from paceline.train.observers.console import say
from paceline.world.collectives import broadcast_from_main
from paceline.world.process_group import wait_for_all
from paceline.world.world import World


class RankHelpers:
    """Helpers for code that runs on every rank."""

    world: World
    """This rank among all ranks."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_main

    @property
    def device(self) -> str:
        """The device of this rank."""
        return self.world.device

    def print(self, *values: object) -> None:
        """Print a line, on rank 0 only.

        - `values`: what to print, separated by spaces.

        >>> with paceline.Run(config) as run:
        ...     run.print("the device is", run.device)
        the device is cpu
        """
        if self.world.is_main:
            say(" ".join(map(str, values)))

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks on the CPU, those of rank 0 first. Every rank must call this.

        - `rows`: a tensor; the number of rows may differ between ranks, their shape may not.

        >>> with paceline.Run(config) as run:
        ...     run.gather(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
        """
        return gather_in_order(self.world, rows)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor on all ranks with the values of rank 0, and return it. Every rank must call this.

        - `tensor`: a tensor of the same shape and type on every rank.

        >>> with paceline.Run(config) as run:
        ...     run.broadcast(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
        """
        if self.world.size > 1:
            broadcast_from_main([tensor])
        return tensor

    def barrier(self) -> None:
        """Wait until every rank has called this.

        >>> with paceline.Run(config) as run:
        ...     run.barrier()
        """
        wait_for_all(self.world)
