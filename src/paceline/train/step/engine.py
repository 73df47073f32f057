"""Which engine runs the updates of a training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.config import RunConfig
from paceline.train.step.cuda_graph import CapturedUpdates, may_capture
from paceline.train.step.updates import GetRequests, Updates
from paceline.world.world import World


def make_updates(
    world: World,
    config: RunConfig,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    total_samples: int,
    get_requests: GetRequests,
) -> Updates:
    """Return the engine for these settings."""
    kind = Updates
    if may_capture(world, optimizers, config):
        kind = CapturedUpdates
    elif config.local_sgd.steps:
        from paceline.train.step.local_sgd import ReplicaUpdates

        kind = ReplicaUpdates
    return kind(world, config, models, optimizers, total_samples, get_requests)
