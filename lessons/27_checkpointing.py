"""Lesson 27: Activation checkpointing.

Forward keeps what backward needs, and that grows with the number of layers. Activation checkpointing
keeps only the input of a segment of layers, and runs the segment again in backward: less memory, one
more forward. What is kept at most are the inputs of all segments and the inside of one: few segments
are long inside, many have many inputs. Dropout must draw the same numbers the second time, or
backward belongs to another network. `torch.utils.checkpoint.checkpoint` does all this.

    python lessons/27_checkpointing.py

Expect: the fewest bytes with 4 to 8 segments, about a third of those without; twice as many runs of
a layer; and the same gradients, bit for bit. A single segment saves nothing.
Time: about 5 s on 2 cores.
New since lesson 18: `Segment` and `in_segments`, with `LAYERS`, `WIDTH` and `COUNTS`; `Kept` lets
`Ledger` see what is freed, in backward as well; `make_model` has 16 times a `Layer`; `main` compares one
batch instead of training, so `EPOCHS`, `RATE`, `BUDGET_BYTES` and `accuracy` are gone.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import cross_entropy

from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

BATCH, LAYERS, WIDTH, COUNTS = 64, 16, 128, (0, 1, 2, 4, 8, 16)


class Layer(nn.Sequential):
    """A linear layer, relu and dropout; counts how often a layer runs."""

    runs = 0

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, values: Tensor) -> Tensor:
        Layer.runs += 1
        return super().forward(values)


def make_model() -> nn.Sequential:
    """Return a deep network: a layer that reads pixels, 16 equal ones, and one that gives ten scores."""
    first = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, WIDTH))
    return nn.Sequential(first, *(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, 10))


class Kept:
    """A tensor that is kept for backward, until nobody needs it."""

    def __init__(self, value: Tensor, ledger: "Ledger") -> None:
        self.value, self.ledger = value, ledger
        ledger.held += value.nbytes
        ledger.most = max(ledger.most, ledger.held)

    def __del__(self) -> None:
        self.ledger.held -= self.value.nbytes


class Ledger:
    """Counts what is kept for backward, except the weights, which are there anyway."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
        self.held, self.most = 0, 0

    def keep(self, value: Tensor) -> Tensor | Kept:
        """Count a tensor that is kept."""
        is_weight = value.untyped_storage().data_ptr() in self.weights
        return value if is_weight else Kept(value, self)

    def watch(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Start counting."""
        self.held, self.most = 0, 0
        return torch.autograd.graph.saved_tensors_hooks(
            self.keep, lambda kept: kept.value if isinstance(kept, Kept) else kept
        )


class Segment(torch.autograd.Function):
    """Runs layers and keeps only their input; runs them again in backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, layers: nn.Module, values: Tensor) -> Tensor:
        ctx.layers, ctx.random = layers, torch.get_rng_state()
        ctx.save_for_backward(values)
        return layers(values)  # a Function keeps nothing else

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, Tensor]:
        values = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.random)  # dropout draws the same numbers again
            outputs = ctx.layers(values)
        outputs.backward(gradient)
        return None, values.grad


def in_segments(model: nn.Sequential, images: Tensor, count: int) -> Tensor:
    """Return the scores; the layers run in segments, or without if the count is 0."""
    if count == 0:
        return model(images)
    values, length = model[0](images), LAYERS // count
    for begin in range(1, LAYERS + 1, length):
        values = Segment.apply(model[begin : begin + length], values)
    return model[-1](values)


def main() -> None:
    """Run forward and backward of one batch with different numbers of segments."""
    torch.manual_seed(0)
    (images, labels), _ = embedded_digits()
    model = make_model()
    ledger, expected = Ledger(model), []
    for count in COUNTS:
        torch.manual_seed(1)  # the same dropout for each count
        model.zero_grad()
        Layer.runs = 0
        with ledger.watch():
            loss = cross_entropy(in_segments(model, images[:BATCH], count), labels[:BATCH])
            loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        expected = expected or gradients
        pairs = zip(gradients, expected, strict=True)
        error = max((one - other).abs().max().item() for one, other in pairs)
        print(
            f"{count} segments: loss {loss.item():.4f}, kept at most {ledger.most:,} bytes, {Layer.runs} layers run"
        )
        assert error == 0, f"with {count} segments the gradients differ by {error:.1e}"


if __name__ == "__main__":
    main()
