"""Train a language model: gradient accumulation, clipping, warm-up and cosine decay."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

EPOCHS, BATCH, ACCUMULATE, LENGTH = 6, 16, 4, 48


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


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE)
    set_seed(0)
    loader = DataLoader(windows(), batch_size=BATCH, shuffle=True)
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    total = EPOCHS * len(loader) // ACCUMULATE
    scheduler = get_cosine_schedule_with_warmup(optimizer, total // 10, total)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(EPOCHS):
        for (ids,) in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()).mean()
        accelerator.print(f"epoch {epoch + 1}: loss {mean:.4f}")

    start = torch.tensor([list(b"import ")], device=accelerator.device)
    ids = accelerator.unwrap_model(model).eval().generate(start, max_new_tokens=20, pad_token_id=0)
    accelerator.print(repr(bytes(ids[0].tolist()).decode(errors="replace")))


if __name__ == "__main__":
    main()
