"""Fine-tune a language model by LoRA with peft; checkpoints hold the adapter only."""

from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import paceline


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    name: str = "lora"


def countdowns(count: int) -> Tensor:
    """Return sequences that count down from a random number, [count, 16]."""
    starts = torch.randint(16, 64, (count, 1), generator=torch.Generator().manual_seed(1))
    return starts - torch.arange(16)


def main(config: Config) -> None:
    """Train the adapter of a model whose other weights stay as they are."""
    sizes = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
    with paceline.Run(config) as run:
        base = LlamaForCausalLM(sizes)  # as a rule: LlamaForCausalLM.from_pretrained(...)
        model = run.model(get_peft_model(base, adapter), saved=lambda name: "lora_" in name)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = run.optimizer(torch.optim.AdamW(trained, lr=0.02))

        def loss(batch: tuple[Tensor]) -> Tensor:
            (ids,) = batch
            found: Tensor = model(input_ids=ids, labels=ids).loss
            return found

        for step in run.steps((countdowns(1024),), epochs=4):
            run.update(optimizer, loss, step)
        held = sum(map(torch.numel, trained))
        run.print(f"a checkpoint holds {held:,} of {model.num_parameters():,} weights")


if __name__ == "__main__":
    main(paceline.config_from_argv(Config))
