"""Small models of the kinds that people train: vision, text, speech, graphs, recommenders."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations


def mlp() -> nn.Module:
    """Return layers with dropout."""
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)
    )


def matrices() -> nn.Module:
    """Return layers that have matrices only, as Muon wants them."""
    shape = {"bias": False}
    return nn.Sequential(nn.Linear(6, 9, **shape), nn.Tanh(), nn.Linear(9, 1, **shape))  # type: ignore[arg-type]


class Blocks(nn.Module):
    """A stack of residual layers, which FSDP shards one by one."""

    def __init__(self, layers: int = 3, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number per row."""
        for block in self.blocks:
            inputs = inputs + self.drop(block(inputs)).relu()
        found: Tensor = self.head(inputs)
        return found


def convolutions(norm: str = "batch") -> nn.Module:
    """Return a convolutional network with a kind of norm."""
    norms = {
        "batch": lambda: nn.BatchNorm2d(8),
        "group": lambda: nn.GroupNorm(2, 8),
        "instance": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        "layer": lambda: nn.LayerNorm([8, 8, 8]),
        "sync": lambda: nn.SyncBatchNorm(8),
        "none": nn.Identity,
    }
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norms[norm](), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), norms[norm](), nn.ReLU(),
        nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32, 5),  # an adaptive pool has no exact gradient on a GPU
    )  # fmt: skip


def spectral() -> nn.Module:
    """Return layers with spectral norm, whose power iteration moves buffers in every forward."""
    normed = parametrizations.spectral_norm
    return nn.Sequential(normed(nn.Linear(6, 12)), nn.ReLU(), normed(nn.Linear(12, 1)))


def weight_normed() -> nn.Module:
    """Return layers with weight norm."""
    normed = parametrizations.weight_norm
    return nn.Sequential(normed(nn.Linear(6, 12)), nn.ReLU(), normed(nn.Linear(12, 1)))


class VisionTransformer(nn.Module):
    """Patches, attention, a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of classes."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], 1)
        found: Tensor = self.head(self.body(tokens)[:, 0])
        return found


class VariationalAutoencoder(nn.Module):
    """Draws its code in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, inputs: Tensor, _: Tensor) -> Tensor:
        """Return the loss."""
        mean, scale = self.encoder(inputs).chunk(2, -1)
        code = mean + scale.exp() * torch.randn_like(mean)
        divergence = 0.5 * (mean.square() + (2 * scale).exp() - 1 - 2 * scale).sum(-1).mean()
        return mse_loss(self.decoder(code), inputs) + 0.01 * divergence


class LanguageModel(nn.Module):
    """A small GPT whose head shares the weights of its embedding."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(30, 16), nn.Embedding(10, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 30, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of every next token."""
        length = tokens.shape[1]
        hidden = self.embed(tokens) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        found: Tensor = self.head(self.norm(hidden))
        return found


class Recurrent(nn.Module):
    """Classifies sentences by an LSTM or a GRU."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8, padding_idx=0)
        self.body = kind(8, 8, 2, batch_first=True, dropout=0.1, bidirectional=True)  # type: ignore[arg-type]
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of classes."""
        found: Tensor = self.head(self.body(self.embed(tokens))[0].mean(1))
        return found


class WordBag(nn.Module):
    """Classifies sentences by the mean of their words."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(30, 8, sparse=sparse), nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of classes."""
        found: Tensor = self.head(self.bag(tokens))
        return found


class Speech(nn.Module):
    """Convolutions and a GRU, for CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.ears = nn.Conv1d(4, 12, 3, padding=1)
        self.body, self.head = nn.GRU(12, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, sound: Tensor) -> Tensor:
        """Return the scores of letters at every moment."""
        heard = self.ears(sound.transpose(1, 2)).relu().transpose(1, 2)
        found: Tensor = self.head(self.body(heard)[0])
        return found


class SpokenDigits(nn.Module):
    """A time-delay network with BatchNorm over sounds of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(3, 8, 5, dilation=2), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of classes, from mean and deviation over time."""
        heard = self.body(images.flatten(2))
        found: Tensor = self.head(torch.cat([heard.mean(-1), heard.std(-1)], -1))
        return found


class MessagePassing(nn.Module):
    """A graph network: the nodes add what their neighbours send."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 6) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, nodes: Tensor, edges: Tensor, owner: Tensor, graphs: int) -> Tensor:
        """Return scores of the classes of graphs."""
        for layer in self.layers:
            received = torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])
            nodes = layer(torch.cat([nodes, received], -1)).relu()
        pooled = nodes.new_zeros(graphs, 6).index_add(0, owner, nodes)
        found: Tensor = self.head(pooled)
        return found


class GraphAttention(nn.Module):
    """Attention over the neighbours of a node, with a softmax by scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score, self.head = nn.Linear(6, 8), nn.Linear(12, 1), nn.Linear(8, 5)

    def forward(self, nodes: Tensor, edges: Tensor, owner: Tensor, graphs: int) -> Tensor:
        """Return scores of the classes of graphs."""
        pairs = torch.cat([nodes[edges[0]], nodes[edges[1]]], -1)
        weight = self.score(pairs).exp()
        total = nodes.new_zeros(len(nodes), 1).scatter_add(0, edges[1, :, None], weight)
        sent = weight / total[edges[1]] * self.value(nodes)[edges[0]]
        hidden = nodes.new_zeros(len(nodes), 8).index_add(0, edges[1], sent).relu()
        found: Tensor = self.head(nodes.new_zeros(graphs, 8).index_add(0, owner, hidden))
        return found


class Factorization(nn.Module):
    """Ratings as products of embeddings of users and items."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.users = nn.Embedding(20, 4, sparse=sparse)
        self.items = nn.Embedding(40, 4, sparse=sparse)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the rating of each user."""
        return (self.users(users) * self.items(items).mean(1)).sum(-1)


class ClickModel(nn.Module):
    """Embedding bags and a small network, as in DLRM."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.users = nn.Embedding(20, 4, sparse=sparse)
        self.items = nn.EmbeddingBag(40, 4, sparse=sparse, mode="sum")
        self.top = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the rating of each user."""
        both = torch.cat([self.users(users), self.items(items)], -1)
        found: Tensor = self.top(both).squeeze(-1)
        return found
