"""Classify sentences of different lengths: dict batches, padded lane by lane, and a transformers model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DistilBertConfig, DistilBertForSequenceClassification

import paceline

WORDS, LABELS = 200, 3


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    name: str = "padded-text"


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Return random sentences; the first word decides the label."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 24, (count,), generator=draw).tolist()
    ids = [torch.randint(1, WORDS, (length,), generator=draw) for length in lengths]
    return [{"input_ids": row, "label": int(row[0]) % LABELS} for row in ids]


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch as long as its longest sentence."""
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def main(config: Config) -> None:
    train, test = sentences(1024, seed=1), sentences(200, seed=2)
    sizes = DistilBertConfig(vocab_size=WORDS, dim=32, hidden_dim=64, n_layers=2, n_heads=2)
    sizes.num_labels = LABELS
    with paceline.Run(config) as run:
        model = run.model(DistilBertForSequenceClassification(sizes))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

        def score(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"acc": (model(**batch).logits.argmax(-1) == batch["labels"]).float()}

        for step in run.steps(train, collate=pad, epochs=4):
            run.update(optimizer, lambda batch: model(**batch).loss, step, clip=1.0)
            if step.ends_epoch:
                run.evaluate(test, score, collate=pad)


if __name__ == "__main__":
    main(paceline.config_from_argv(Config))
