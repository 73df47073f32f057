"""Classify sentences: dynamic padding, and the F1 score over the whole test dataset."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification

EPOCHS, BATCH, WORDS = 4, 64, 200


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Return random sentences; the first word decides the label."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 24, (count,), generator=draw).tolist()
    ids = [torch.randint(1, WORDS, (length,), generator=draw) for length in lengths]
    return [{"input_ids": row, "label": int(row[0]) % 2} for row in ids]


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def padded_batches(samples: Any, *, shuffle: bool) -> DataLoader[Any]:
    return DataLoader(samples, batch_size=BATCH, shuffle=shuffle, collate_fn=pad)


def f1_score(found: Tensor, labels: Tensor) -> float:
    both = (found * labels).sum()
    return float(2 * both / (found.sum() + labels.sum()))


def text_classifier() -> DistilBertForSequenceClassification:
    sizes = DistilBertConfig(vocab_size=WORDS, dim=32, hidden_dim=64, n_layers=2, n_heads=2)
    return DistilBertForSequenceClassification(sizes)


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    loader = padded_batches(sentences(1024, seed=1), shuffle=True)
    test = sentences(200, seed=2)
    test_loader = padded_batches(test, shuffle=False)
    model = text_classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )

    for epoch in range(EPOCHS):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(**batch).loss)
            optimizer.step()
        model.eval()
        found, labels = [], []
        for batch in test_loader:
            with torch.no_grad():
                guesses = model(**batch).logits.argmax(-1)
            guesses, truth = accelerator.gather_for_metrics((guesses, batch["labels"]))
            found.append(guesses)
            labels.append(truth)
        f1 = f1_score(torch.cat(found), torch.cat(labels))
        accelerator.print(f"epoch {epoch + 1}: f1 {f1:.4f}")


if __name__ == "__main__":
    main()
