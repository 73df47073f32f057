"""Collectives: every rank must call each of these; in a world of one they return their input."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work

from paceline.world.world import World


def wire_device(world: World) -> torch.device:
    """Return the device from which the backend can send: the CPU for gloo."""
    return wire_for(torch.device(world.device))


def wire_for(device: torch.device) -> torch.device:
    """Return the device to which a tensor must be moved before it is sent: gloo sends from the CPU, NCCL from a GPU."""
    if dist.get_backend() == "gloo":
        return torch.device("cpu")
    return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def sum_across(world: World, values: Tensor) -> Tensor:
    """Return the sum over ranks, in the backend's order; exact if each element is nonzero on one rank only."""
    if world.size == 1:
        return values
    total = values.to(wire_device(world), copy=True)
    dist.all_reduce(total)
    return total.to(values.device)


def broadcast_from_main(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors on all ranks with the values of rank 0."""
    for tensor in tensors:
        values = tensor.detach().contiguous().view(-1)
        sent = values.view(torch.uint8).to(wire_for(values.device))
        dist.broadcast(sent, 0)
        if sent.data_ptr() == tensor.data_ptr():
            continue  # received in place
        with torch.no_grad():
            tensor.copy_(sent.to(values.device).view(values.dtype).view(tensor.shape))


def all_gather_rows(world: World, row: Tensor) -> Tensor:
    """Return the rows of all ranks, stacked in rank order."""
    if world.size == 1:
        return row.unsqueeze(0)
    return all_gather_flat(row.contiguous().flatten()).view(world.size, *row.shape)


def all_gather_flat(flat: Tensor, among: ProcessGroup | None = None) -> Tensor:
    """Return the flat tensors of all ranks of a group, concatenated; all must have one length."""
    sent = flat.to(wire_for(flat.device))
    gathered = torch.empty(
        dist.get_world_size(among) * sent.numel(), dtype=sent.dtype, device=sent.device
    )
    gather(gathered, sent, among).wait()
    return gathered.to(flat.device)


def all_gather_texts(world: World, text: str) -> list[str]:
    """Return the texts of all ranks, in rank order."""
    if world.size == 1:
        return [text]
    encoded = text.encode()
    lengths = all_gather_rows(world, torch.tensor([len(encoded)])).flatten().tolist()
    padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    if encoded:
        padded[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    rows = all_gather_rows(world, padded)
    return [
        bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)
    ]


class WaitClock:
    """Time that this process has waited in `finish`."""

    seconds: float = 0.0


WAITED = WaitClock()


def finish(work: Work) -> None:
    """Wait for a collective. With gloo the host waits and the time counts; with NCCL only the CUDA stream waits."""
    begun = time.perf_counter()
    work.wait()
    WAITED.seconds += time.perf_counter() - begun


def gather(gathered: Tensor, flat: Tensor, among: ProcessGroup | None = None) -> Work:
    """Start an all-gather of flat tensors into one, in the world or in the group `among`."""
    # The public name changed between torch 2.11 and 2.13; the group's own method did not.
    return (among or dist.group.WORLD)._allgather_base(gathered, flat)  # type: ignore[union-attr]  # noqa: SLF001


def exchange(
    received: Tensor,
    sent: Tensor,
    received_sizes: list[int],
    sent_sizes: list[int],
    among: ProcessGroup | None = None,
) -> Work:
    """Start an all-to-all of the pieces of a flat tensor."""
    work: Work | None = dist.all_to_all_single(
        received, sent, received_sizes, sent_sizes, group=among, async_op=True
    )
    assert work is not None
    return work


def broadcast_bytes(world: World, content: bytes, source: int) -> bytes:
    """Return the bytes of one rank on all ranks."""
    if world.size == 1:
        return content
    wire = wire_device(world)
    length = torch.tensor([len(content)], device=wire)
    dist.broadcast(length, source)
    data = torch.empty(int(length), dtype=torch.uint8, device=wire)
    if world.rank == source:
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(data, source)
    return data.cpu().numpy().tobytes()
