"""What ranks tell each other. Every rank calls every one of these; in a world of one they return their input."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work

from paceline.world.world import World


def wire_device(world: World) -> torch.device:
    """Return the device whose memory the backend can send: gloo moves host memory only."""
    return wire_for(torch.device(world.device))


def wire_for(device: torch.device) -> torch.device:
    """Return the device whose memory the backend can send, for what lies on this one: NCCL moves that of GPUs only."""
    if dist.get_backend() == "gloo":
        return torch.device("cpu")
    return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def sum_across(world: World, values: Tensor) -> Tensor:
    """Return the sum over ranks, in the backend's own order; exact where ranks fill different places of zeros."""
    if world.size == 1:
        return values
    total = values.to(wire_device(world), copy=True)
    dist.all_reduce(total)
    return total.to(values.device)


def broadcast_from_main(tensors: Iterable[Tensor]) -> None:
    """Give all ranks the values that rank 0 has, in place."""
    for tensor in tensors:
        values = tensor.detach().contiguous().view(-1)
        sent = values.view(torch.uint8).to(wire_for(values.device))
        dist.broadcast(sent, 0)
        with torch.no_grad():
            tensor.copy_(sent.to(values.device).view(values.dtype).view(tensor.shape))


def all_gather_rows(world: World, row: Tensor) -> Tensor:
    """Return the row of every rank, stacked in rank order."""
    if world.size == 1:
        return row.unsqueeze(0)
    return all_gather_flat(row.contiguous().flatten()).view(world.size, *row.shape)


def all_gather_flat(mine: Tensor, among: ProcessGroup | None = None) -> Tensor:
    """Return the flat tensors of all ranks, or of all among some, which are of one length, one after the other."""
    sent = mine.to(wire_for(mine.device))
    gathered = torch.empty(
        dist.get_world_size(among) * sent.numel(), dtype=sent.dtype, device=sent.device
    )
    gather(gathered, sent, among).wait()
    return gathered.to(mine.device)


def all_gather_texts(world: World, text: str) -> list[str]:
    """Return the text of every rank, in rank order."""
    if world.size == 1:
        return [text]
    mine = text.encode()
    lengths = all_gather_rows(world, torch.tensor([len(mine)])).flatten().tolist()
    padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    if mine:
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    rows = all_gather_rows(world, padded)
    return [
        bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)
    ]


class WaitClock:
    """How long this process has waited for messages in `finish`."""

    seconds: float = 0.0


WAITED = WaitClock()


def finish(work: Work) -> None:
    """Wait for a message. With gloo the host waits, and the clock runs; with NCCL only the GPU's stream does."""
    begun = time.perf_counter()
    work.wait()
    WAITED.seconds += time.perf_counter() - begun


def gather(gathered: Tensor, mine: Tensor, among: ProcessGroup | None = None) -> Work:
    """Start to collect a flat tensor of every rank, side by side; `among` some of them, where it says which."""
    # The public name changed between torch 2.11 and 2.13; the group's own method did not.
    return (among or dist.group.WORLD)._allgather_base(gathered, mine)  # type: ignore[union-attr]  # noqa: SLF001


def exchange(
    received: Tensor,
    sent: Tensor,
    received_sizes: list[int],
    sent_sizes: list[int],
    among: ProcessGroup | None = None,
) -> Work:
    """Start to send each rank its piece of a flat tensor, and to collect the pieces meant for this one."""
    work: Work | None = dist.all_to_all_single(
        received, sent, received_sizes, sent_sizes, group=among, async_op=True
    )
    assert work is not None
    return work
