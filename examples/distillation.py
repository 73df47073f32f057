"""Distill a frozen teacher into a small student; the teacher is in no checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

import paceline
from paceline.recipes.digits import Digits, embedded_digits


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    name: str = "distillation"


def nearest_mean(digits: Digits) -> nn.Sequential:
    """Return a teacher without training: it compares images with the mean image of each class."""
    images, labels = digits
    means = torch.stack([images[labels == label].mean(0).flatten() for label in range(10)])
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    teacher.load_state_dict({"1.weight": means / 20, "1.bias": -means.square().sum(1) / 40})
    return teacher.requires_grad_(requires_grad=False).eval()


def main(config: Config) -> None:
    train, test = embedded_digits()
    with paceline.Run(config) as run:
        teacher = run.model(nearest_mean(train), name="teacher", saved=lambda _: False)
        layers = nn.Flatten(), nn.Linear(784, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 10)
        student = run.model(nn.Sequential(*layers), name="student")
        optimizer = run.optimizer(torch.optim.AdamW(student.parameters(), lr=5e-3))

        def loss(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            images, labels = batch
            scores, wanted = student(images), log_softmax(teacher(images), 1)
            soft = kl_div(log_softmax(scores, 1), wanted, reduction="batchmean", log_target=True)
            hard = cross_entropy(scores, labels)
            return {"loss": 0.7 * soft + 0.3 * hard, "soft": soft, "hard": hard}

        def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            images, labels = batch
            right = {"teacher": teacher(images), "student": student(images)}
            return {name: (scores.argmax(1) == labels).float() for name, scores in right.items()}

        for step in run.steps(train, epochs=4):
            losses = run.update(optimizer, loss, step)
            if step.ends_epoch:
                run.evaluate(test, score)
                run.log(soft=losses["soft"], hard=losses["hard"])


if __name__ == "__main__":
    main(paceline.config_from_argv(Config))
