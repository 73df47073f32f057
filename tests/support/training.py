"""A training that marks its progress in files, so that tests can interrupt it at a chosen moment."""

import os
import time
from pathlib import Path

import torch

import paceline
from paceline.checkpoint import local_storage as local
from paceline.train.run_loop import RunLoop
from paceline.train.stopping import StopRequest

MARKS = Path("marks")


def mark(name: str) -> None:
    MARKS.mkdir(exist_ok=True)
    (MARKS / f"{name}-{os.environ.get('RANK', 0)}").write_text(str(os.getpid()))  # noqa: PLW1508


def dawdle(name: str) -> None:
    """Mark this place; then wait for the time or for the files that the test asks for."""
    mark(name)
    time.sleep(float(os.environ.get(f"SLOW_{name.upper()}", "0")))
    while not all(map(os.path.exists, os.environ.get(f"{name.upper()}_UNTIL", "").split())):
        time.sleep(0.01)


def on_signal(self, number, frame, on_signal=StopRequest._on_signal):
    on_signal(self, number, frame)
    mark("heard")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(20, 1)
        self.drop = torch.nn.Dropout(0.1)
        self.has_trained = False  # before that Trainer only tries its metrics

    def forward(self, features):
        self.has_trained |= self.training
        if self.has_trained:
            dawdle("step" if self.training else "evaluate")
        return self.linear(self.drop(features))


def slow_writer(path, image, write=local._write_durably):
    dawdle("save")
    return write(path, image)


def watched(self, batch, note, complete=RunLoop.complete):
    """Write down which samples were used in every step whose weights were changed."""
    seen = os.open(f"seen-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    lanes = [lane.batch[0].tolist() for lane in batch.lanes if lane.samples]
    ids = [int(row[-1]) for rows in lanes for row in rows]
    os.write(seen, f"{time.time()} {batch.plan.index} {ids}\n".encode())
    os.close(seen)
    return complete(self, batch, note)


def main(config: paceline.RunConfig) -> None:
    local._write_durably, StopRequest._on_signal = slow_writer, on_signal
    dawdle("begin")
    with paceline.Run(config) as run:
        dawdle("join")
        generator = torch.Generator().manual_seed(1)
        features, targets = (
            torch.randn(96, 20, generator=generator),
            torch.randn(96, 1, generator=generator),
        )
        features[:, -1] = torch.arange(96)  # the number of the sample, for `watched`
        model = run.model(Net())
        adamw = torch.optim.AdamW(model.parameters(), lr=paceline.scaled_lr(config))
        optimizer = run.optimizer(adamw)
        if "WATCHED" in os.environ:
            RunLoop.complete = watched
        loss = torch.nn.functional.mse_loss
        held_out = features[:8], targets[:8]
        paceline.Trainer(
            run, model, optimizer, (features, targets), loss, evaluation=held_out
        ).fit()
    print("the script goes on after the training")


if __name__ == "__main__":
    main(paceline.config_from_argv())
