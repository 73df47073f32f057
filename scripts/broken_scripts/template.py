"""A small training that is right, with places where a mistake can be inserted."""

from __future__ import annotations

from typing import NamedTuple

SCRIPT = '''"""The mistake: {name}."""

import dataclasses, os, random, threading, time
from pathlib import Path

import numpy, torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline

{top}


class Data(torch.utils.data.Dataset):
    def __init__(self, samples, seed):
        draw = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(samples, 8, generator=draw)
        self.labels = torch.randint(3, (samples,), generator=draw)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, k):
        x, y = self.inputs[k], self.labels[k]
        {sample}
        return x, y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.register_buffer("scale", torch.ones(()), persistent=False)
        {build}

    def forward(self, x):
        {forward}
        x = nn.functional.dropout(self.norm(self.first(x).relu()), 0.2, self.training)
        return self.last(x * self.scale)


def main(config):
    global world
    {config}
    with paceline.Run(config) as run:
        world = run.world
        train, test = Data(72, 1), Data(40, 2)
        {before}
        model = run.model(Net())
        {model}
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        {optimizer}

        def loss(batch):
            x, y = batch
            {inputs}
            value = cross_entropy(model(x), y)
            {loss}
            return value

        def score(batch):
            x, y = batch
            correct = (model(x).argmax(1) == y).float()
            {score}
            return dict(accuracy=correct)

        for step in run.steps(train, {steps}):
            {step}
            {update}
            {after}
            if step.evaluates:
                run.evaluate(test, score)
                {evaluated}


if __name__ == "__main__":
    main(paceline.config_from_argv())
'''

DEFAULTS = {"steps": "epochs=2", "update": "run.update(optimizer, loss, step)"}
SETTINGS = ("batch.global_size=16", "batch.lanes=4")
"""Arguments of every script: 5 steps per epoch, the last with 8 samples."""


class Broken(NamedTuple):
    """A script with one mistake, and its true cause."""

    name: str
    where: str
    """What differs first: initial state, samples, lanes, loss, gradients, buffers, sum, options, loop, evaluation, resume, steps."""
    why: str
    """What it depends on: chance, rank, world, order, others, local, unsaved."""
    code: dict[str, str]
    """What is inserted, by the place in the template."""

    @property
    def text(self) -> str:
        """The whole script."""
        text = SCRIPT.replace("{name}", self.name)
        for line in SCRIPT.splitlines():
            place = line.strip().strip("{}")
            if line.strip() == f"{{{place}}}":
                indent = line[: len(line) - len(line.lstrip())]
                code = self.code.get(place, DEFAULTS.get(place, ""))
                text = text.replace(line, "\n".join(indent + part for part in code.split("\n")), 1)
        return text.replace("{steps}", self.code.get("steps", DEFAULTS["steps"]))
