"""The sizes at which the parts of a GPT step are compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """A batch of a GPT, and where it is."""

    batch: int
    length: int
    heads: int
    head_dim: int
    vocab_size: int
    device: str

    @property
    def rows(self) -> int:
        """The number of tokens."""
        return self.batch * self.length

    @property
    def width(self) -> int:
        """The embedding dimension."""
        return self.heads * self.head_dim

    def random(self, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return normal values, the same for the same shape."""
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        values = torch.randn(shape, generator=generator, device=self.device, dtype=dtype)
        return values.mul_(std)

    def targets(self) -> Tensor:
        """Return a random token for every row."""
        generator = torch.Generator(self.device).manual_seed(1)
        return torch.randint(self.vocab_size, (self.rows,), generator=generator, device=self.device)


def gpt2_124m(device: str) -> Sizes:
    """Return the batch of `benchmarks/gpu/gpt.py`."""
    return Sizes(64, 1024, 12, 64, 50_304, device)
