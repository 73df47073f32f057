"""Q-learning with a replay buffer: a loop that makes its own data, and checkpoints that hold it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline

GOAL = 7


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    name: str = "replay-buffer"


class Replay:
    """The last 500 moves: cell, action, next cell."""

    def __init__(self) -> None:
        self.rows, self.written = torch.zeros(500, 3, dtype=torch.int64), 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def main(config: Config) -> None:
    replay = Replay()
    with paceline.Run(config) as run:
        model = run.model(nn.Embedding(GOAL + 1, 2))  # the values of going left and right
        optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.05))
        run.track(replay=replay)

        def loss(batch: tuple[Tensor]) -> Tensor:
            rows = replay.rows[: replay.written].to(run.device)
            cells, actions, after = rows[torch.randint(len(rows), batch[0].shape)].unbind(1)
            target = torch.where(after == GOAL, 1.0, 0.9 * model(after).detach().amax(1))
            return mse_loss(model(cells).gather(1, actions[:, None])[:, 0], target)

        for step in run.steps((torch.zeros(10_240),), epochs=1):  # 40 steps
            cell, moves = 0, 0
            while cell != GOAL and moves < 30:  # every rank plays the same episode
                best = int(model.weight[cell].argmax())
                action = best if torch.rand(()) > 0.3 else 1 - best
                after = max(0, cell + 2 * action - 1)
                replay.rows[replay.written % 500] = torch.tensor([cell, action, after])
                cell, moves, replay.written = after, moves + 1, replay.written + 1
            run.update(optimizer, loss, step)


if __name__ == "__main__":
    main(paceline.config_from_argv(Config))
