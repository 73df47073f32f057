"""Lesson 30: Context parallelism by hand.

Activations grow with the length of a text. Context parallelism cuts the text: each rank has all weights
and some positions. Only attention looks at others: in a ring, queries stay, and keys and values go
around. The online softmax adds up block after block, and scales the sums down when a higher score
comes. Backward computes these weights again instead of keeping them. Later blocks are masked.

    torchrun --standalone --nproc-per-node 4 lessons/30_context_parallel.py

Expect: a quarter of the bytes of one process on each of four ranks, and its scores and gradients, up to
rounding. Rank 3 computes four blocks and rank 0 one, then it waits: in practice each rank has an early
and a late part of the text. Any number of ranks from 2 on that divides 512 works.
Time: about 12 s on 2 cores.
New since lesson 0: `Ring`, with `rotate` and `block_scores`; `Model` with `LENGTH`, `WIDTH` and `HEADS`; `run`,
which counts bytes; `main` compares the ring with one process.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

LENGTH, WIDTH, HEADS = 512, 64, 4


def join() -> tuple[int, int]:
    """Join the process group; return rank and world size, which torchrun passes as variables."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def rotate(values: Tensor, rank: int, size: int) -> Tensor:
    """Send a tensor to the next rank; return that of the rank before."""
    received, after, before = torch.empty_like(values), (rank + 1) % size, (rank - 1) % size
    both = dist.P2POp(dist.isend, values, after), dist.P2POp(dist.irecv, received, before)
    for message in dist.batch_isend_irecv(list(both)):
        message.wait()
    return received


def block_scores(queries: Tensor, keys: Tensor, *, is_own: bool) -> Tensor:
    """Return the scores of a block of keys; in the rank's own block later positions are masked."""
    scores = queries @ keys.mT * keys.shape[-1] ** -0.5
    return scores.tril() + torch.full_like(scores, -torch.inf).triu(1) if is_own else scores


class Ring(torch.autograd.Function):
    """Causal attention of this rank's queries to the keys and values of all ranks."""

    blocks = 0  # that this rank has computed in forward

    @staticmethod
    def forward(ctx: FunctionCtx, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        ctx.world = rank, size = dist.get_rank(), dist.get_world_size()
        top = torch.full_like(queries[..., :1], -torch.inf)  # the highest score so far
        total, sums, moving = torch.zeros_like(top), 0, torch.stack([keys, values])
        for turn in range(size):
            if turn <= rank:  # the block of rank - turn: the own one, then earlier ones
                scores = block_scores(queries, moving[0], is_own=turn == 0)
                highest = top.maximum(scores.amax(-1, keepdim=True))
                weights, shrink = (scores - highest).exp(), (top - highest).exp()
                total = total * shrink + weights.sum(-1, keepdim=True)
                sums = sums * shrink + weights @ moving[1]
                top, Ring.blocks = highest, Ring.blocks + 1
            moving = rotate(moving, rank, size)
        ctx.save_for_backward(queries, keys, values, outputs := sums / total, top + total.log())
        return outputs

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, ...]:
        queries, keys, values, outputs, log_total = ctx.saved_tensors
        mean, of_queries = (gradient * outputs).sum(-1, keepdim=True), torch.zeros_like(queries)
        moving = torch.stack([keys, values, 0 * keys, 0 * values])  # and the gradients of both
        for turn in range(ctx.world[1]):
            if turn <= ctx.world[0]:
                scores = block_scores(queries, moving[0], is_own=turn == 0)
                weights = (scores - log_total).exp()
                of_scores = weights * (gradient @ moving[1].mT - mean) * keys.shape[-1] ** -0.5
                of_queries += of_scores @ moving[0]
                moving[2] += of_scores.mT @ queries
                moving[3] += weights.mT @ gradient
            moving = rotate(moving, *ctx.world)  # in the end, each is back where it came from
        return of_queries, *moving[2:]


class Model(nn.Module):
    """Bytes in, scores of the next byte out; a position looks at itself and those before it."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank
        self.attention, self.token = attention, nn.Embedding(256, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        values = self.token(text)
        heads = self.qkv(values).view(1, len(text), 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.head(values + self.attention(*heads)[0].transpose(0, 1).flatten(1))


def run(model: nn.Module, text: Tensor) -> tuple[Tensor, int]:
    """Run forward and backward; return the scores, and the bytes that forward kept besides weights."""
    kept = []
    with saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        scores = model(text[:-1])
    cross_entropy(scores, text[1:]).backward()
    sizes = {one.data_ptr(): one.nbytes() for one in map(Tensor.untyped_storage, kept)}
    weights = {one.data_ptr() for one in model.parameters()}
    return scores, sum(sizes[place] for place in sizes.keys() - weights)


def main() -> None:
    """Compare the ring with one process."""
    rank, size = join()
    text = torch.randint(256, (LENGTH + 1,), generator=torch.Generator().manual_seed(0))
    begin, end = rank * LENGTH // size, (rank + 1) * LENGTH // size
    whole = Model(lambda *heads: scaled_dot_product_attention(*heads, is_causal=True))
    expected, whole_bytes = run(whole, text)
    scores, own_bytes = run(model := Model(Ring.apply), text[begin : end + 1])
    errors = [(scores - expected[begin:end]).abs().max().item()]
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(parameter.grad)  # each rank has the gradient of its own positions
        errors.append((parameter.grad / size - other.grad).abs().max().item())
    print(
        f"rank {rank} of {size}: {end - begin} positions, {Ring.blocks} blocks, kept {own_bytes:,} of {whole_bytes:,} bytes, scores differ by {errors[0]:.1e}, gradients by {max(errors[1:]):.1e}"
    )
    assert max(errors) < 1e-5, "the ring does not compute what one process does"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
