"""Random data for the table, the same in every process, and losses over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, ctc_loss, mse_loss
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

SHORT = 38
"""Samples of which the last step of an epoch has two, so that two lanes are empty."""
EVEN = 46
"""Samples of which the last step has ten: at least two in every lane, as BatchNorm needs."""


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def images(samples: int = EVEN) -> tuple[Tensor, Tensor]:
    """Return images of 8 x 8 pixels and their classes."""
    g = _generator()
    return torch.randn(samples, 3, 8, 8, generator=g), torch.randint(0, 5, (samples,), generator=g)


def rows(samples: int = SHORT) -> tuple[Tensor, Tensor]:
    """Return rows of six numbers and a target."""
    g = _generator()
    return torch.randn(samples, 6, generator=g), torch.randn(samples, 1, generator=g)


def many_rows() -> tuple[Tensor, Tensor]:
    """Return rows for BatchNorm."""
    return rows(EVEN)


def texts() -> tuple[Tensor, Tensor]:
    """Return sentences of ten tokens and their classes."""
    g = _generator()
    return torch.randint(0, 30, (SHORT, 10), generator=g), torch.randint(
        0, 5, (SHORT,), generator=g
    )


def ratings() -> tuple[Tensor, Tensor, Tensor]:
    """Return users, the three items that each has seen, and a rating."""
    g = _generator()
    users = torch.randint(0, 20, (SHORT,), generator=g)
    return users, torch.randint(0, 40, (SHORT, 3), generator=g), torch.randn(SHORT, generator=g)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images that are flipped and made noisy whenever they are read."""

    def __len__(self) -> int:
        return SHORT

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image, label = (values[number] for values in images(SHORT))
        if float(torch.rand(())) < 0.5:
            image = image.flip(-1)
        return image + 0.1 * torch.randn_like(image), label


def recordings() -> list[dict[str, Tensor]]:
    """Return sounds of different lengths with their letters."""
    g = _generator()
    found = []
    for _ in range(SHORT):
        length = int(torch.randint(12, 20, (), generator=g))
        letters = torch.randint(1, 8, (int(torch.randint(1, 4, (), generator=g)),), generator=g)
        found.append({"sound": torch.randn(length, 4, generator=g), "letters": letters})
    return found


def pad_recordings(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return sounds and letters as rectangles, with their lengths."""
    return {
        "sound": pad_sequence([each["sound"] for each in samples], batch_first=True),
        "letters": pad_sequence([each["letters"] for each in samples], batch_first=True),
        "sounds": torch.tensor([len(each["sound"]) for each in samples]),
        "lengths": torch.tensor([len(each["letters"]) for each in samples]),
    }


def graphs() -> list[dict[str, Tensor]]:
    """Return graphs of different sizes and their classes."""
    g = _generator()
    found = []
    for _ in range(SHORT):
        nodes = int(torch.randint(3, 8, (), generator=g))
        edges = torch.randint(0, nodes, (2, 3 * nodes), generator=g)
        label = torch.randint(0, 5, (), generator=g)
        found.append({"nodes": torch.randn(nodes, 6, generator=g), "edges": edges, "label": label})
    return found


def join_graphs(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return graphs as one graph, with the number of the graph of each node."""
    edges, begin, owner = [], 0, []
    for number, each in enumerate(samples):
        edges.append(each["edges"] + begin)
        begin += len(each["nodes"])
        owner += [number] * len(each["nodes"])
    return {
        "nodes": torch.cat([each["nodes"] for each in samples]),
        "edges": torch.cat(edges, dim=1),
        "owner": torch.tensor(owner),
        "label": torch.stack([each["label"] for each in samples]),
    }


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross entropy of classes."""
    *inputs, target = batch
    return cross_entropy(model(*inputs), target)


def classify_in_train_mode(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross entropy, and leave the model in train mode, as some scripts do."""
    return classify(model.train(), batch)


def regress(model: nn.Module, batch: Any) -> Tensor:
    """Return the squared error."""
    *inputs, target = batch
    return mse_loss(model(*inputs), target)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that the model computes itself."""
    found: Tensor = model(*batch)
    return found


def next_tokens(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Return the summed cross entropy of every next token, and their number."""
    tokens = batch[0]
    scores, target = model(tokens[:, :-1]), tokens[:, 1:]
    return cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def speak(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the CTC loss of recordings."""
    scores = model(batch["sound"]).log_softmax(-1).transpose(0, 1)
    return ctc_loss(scores, batch["letters"], batch["sounds"], batch["lengths"])


def classify_graphs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy of the classes of graphs."""
    scores = model(batch["nodes"], batch["edges"], batch["owner"], len(batch["label"]))
    return cross_entropy(scores, batch["label"])
