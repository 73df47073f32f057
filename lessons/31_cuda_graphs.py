"""Lesson 31: CUDA graphs and torch.compile.

A step of a small model is many small kernels; the host needs longer to launch them than a GPU to run
them. A CUDA graph captures the launches once, and replays all in one. `torch.compile` traces Python into
a graph of operators, to fuse them. Both need the same step each time: fixed shapes, for capture fixed
addresses as well, and no question for a value, such as `.item()` or an `if` on a tensor.

    python lessons/31_cuda_graphs.py

Expect: the same loss three times. `.item()` and `if` cannot be captured, and break the graph of compile;
`torch.where` does not. A new shape is compiled anew; a captured step does not see a new tensor. `CpuGraph`
has the rules of a CUDA graph, not its speed: it calls all operators again. With a GPU it is not used.
Time: about 12 s on 2 cores.
New since lesson 2: `CpuGraph`; `Step`, which stays at its addresses, with its `LOSSES`; `train`, which
counts with the profiler; `main` compares, with `STEPS` and without `EPOCHS` and `accuracy`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._dynamo import explain, utils
from torch.nn.functional import cross_entropy
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

STEPS, BATCH, RATE = 20, 64, 0.05
LOSSES = {
    "plain": lambda loss: loss,
    "torch.where": lambda loss: torch.where(loss > 1, loss / 2, loss),
    ".item()": lambda loss: loss / max(1.0, loss.item()),
    "if": lambda loss: loss / 2 if loss > 1 else loss,
}


def make_model() -> nn.Module:
    """Return a small network: two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip


class CpuGraph(TorchDispatchMode):
    """The rules of a CUDA graph, on a CPU: keeps operators with their addresses, and repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, _, args=(), kwargs=None):  # noqa: ANN001, ANN204
        if operator.name() == "aten::_local_scalar_dense":
            raise RuntimeError("the host asks for a value, but nothing is computed during capture")
        result = operator(*args, **(kwargs or {}))
        fixed = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}, result))
        self.calls.append((operator, *fixed))
        return result

    def replay(self) -> None:
        for operator, args, kwargs, result in self.calls:
            again = operator(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)  # the next operator reads the old address


class Step:
    """A training step whose batch, weights and loss stay at their addresses."""

    def __init__(self, kind: str = "plain") -> None:
        torch.manual_seed(0)
        self.model, self.change, self.loss = make_model(), LOSSES[kind], torch.zeros(())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.images, self.labels = torch.zeros(BATCH, 1, 28, 28), torch.zeros(BATCH).long()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.change(cross_entropy(self.model(images), labels))

    def update(self) -> None:
        loss = self.forward(self.images, self.labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def capture(self) -> Callable[[], None]:
        initial = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.update()  # warm-up: what is done only once is not captured
        graph = torch.cuda.CUDAGraph() if self.loss.is_cuda else CpuGraph()
        with torch.cuda.graph(graph) if self.loss.is_cuda else graph:
            self.update()
        self.model.load_state_dict(initial)  # undo the updates; the addresses stay
        return graph.replay


def train(step: Step, run: Callable[[], None]) -> str:
    """Train; return the last loss and the number of operators, on a GPU of launches, per step."""
    (images, labels), _ = embedded_digits()
    for begin in range(0, STEPS * BATCH, BATCH):
        step.images.copy_(images[begin : begin + BATCH])
        step.labels.copy_(labels[begin : begin + BATCH])
        run()
    with profile() as record:
        run()
    names = [event.name for event in record.events() if not event.cpu_children]
    count = sum("Launch" in one for one in names) or sum("aten::" in one for one in names)
    return f"loss {step.loss:.6f}, {count} operators per step"


def main() -> None:
    """Train in three ways; then try what does not fit a graph."""
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    eager, captured, compiled = Step(), Step(), Step()
    compiled.forward = torch.compile(compiled.forward, backend="aot_eager", dynamic=False)
    print("eager:", train(eager, eager.update))
    print("captured:", train(captured, replay := captured.capture()))
    print("compiled:", train(compiled, compiled.update))
    batch = eager.images, eager.labels
    compiled.forward(batch[0][:32], batch[1][:32])
    print(f"with a batch of 32: {utils.counters['stats']['unique_graphs']} graphs compiled")
    captured.images = torch.zeros_like(eager.images)
    replay()
    eager.update()
    assert abs(captured.loss - eager.loss) < 0.01, "the replay has another batch"
    print(f"with another tensor: the replay has the old batch, loss {captured.loss:.6f}")
    breaks = {kind: explain(Step(kind).forward)(*batch).graph_break_count for kind in LOSSES}
    for kind, step in [(kind, Step(kind)) for kind in LOSSES]:
        try:
            step.capture()
            print(f"{kind}: {breaks[kind]} graph breaks; captured")
        except RuntimeError as error:
            print(f"{kind}: {breaks[kind]} graph breaks; fails: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
