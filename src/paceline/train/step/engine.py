"""Which engine runs the updates of a training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.config import RunConfig
from paceline.train.step.cuda_graph import CapturedUpdates, may_capture
from paceline.train.step.updates import GetRequests, Updates
from paceline.train.strategy import Strategy
from paceline.world.world import World


def make_updates(
    world: World,
    config: RunConfig,
    strategy: Strategy,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    total_samples: int,
    get_requests: GetRequests,
) -> Updates:
    """Return the engine for these settings."""
    kind = Updates
    if may_capture(world, config, strategy, optimizers):
        kind = CapturedUpdates
    elif strategy.replicas:
        from paceline.train.step.local_sgd import ReplicaUpdates

        kind = ReplicaUpdates
    return kind(world, config, strategy, models, optimizers, total_samples, get_requests)
