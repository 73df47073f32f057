"""Train a language model: gradient accumulation, clipping, warm-up and cosine decay."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import paceline

EPOCHS, BATCH, LENGTH = 6, 64, 48


def windows() -> TensorDataset:
    """Return overlapping pieces of this file, as bytes."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return TensorDataset(text.unfold(0, LENGTH, 2).contiguous())


def language_model() -> LlamaForCausalLM:
    sizes = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(sizes)


def main(config: paceline.RunConfig) -> None:
    with paceline.Run(config) as run:
        loader = DataLoader(windows(), batch_size=BATCH, shuffle=True)
        model = run.model(language_model())
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
        total = EPOCHS * len(loader)
        scheduler = get_cosine_schedule_with_warmup(optimizer, total // 10, total)
        run.track(scheduler=scheduler)

        for step in run.steps(loader, epochs=EPOCHS):
            run.update(optimizer, lambda ids: model(*ids, labels=ids[0]).loss, step, clip=1.0)
            scheduler.step()

        start = torch.tensor([list(b"import ")], device=run.device)
        ids = model.eval().generate(start, max_new_tokens=20, pad_token_id=0)
        run.print(repr(bytes(ids[0].tolist()).decode(errors="replace")))


if __name__ == "__main__":
    main(paceline.config_from_argv())
