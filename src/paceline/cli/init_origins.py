"""What a script of torchrun, Accelerate, Lightning or the Hugging Face Trainer writes, and what replaces it."""

from __future__ import annotations

from typing import Literal, NamedTuple

Place = Literal["model", "data", "loss", ""]
_BY_ITSELF = "nothing: it saves and resumes by itself"


class Replacement(NamedTuple):
    """A call of another library, and the one that replaces it."""

    there: str
    here: str
    place: Place = ""
    """The marked place of the script at which it is written as a comment; empty: at none."""


class Origin(NamedTuple):
    """A library that a script comes from."""

    name: str
    guide: str
    replacements: tuple[Replacement, ...]


_TORCHRUN = Origin(
    "torchrun",
    "docs/guides/from-torchrun.md",
    (
        Replacement("init_process_group(...)", "with paceline.Run(config) as run"),
        Replacement("DistributedDataParallel(model.to(device))", "run.model(model)", "model"),
        Replacement("DataLoader(data, sampler=DistributedSampler(data))", "run.steps(data)", "data"),
        Replacement("batch_size=64, per process", "batch.global_size=256, over all ranks"),
        Replacement("loss.backward(); optimizer.step()", "run.update(optimizer, loss, step)", "loss"),
        Replacement("all_reduce of a metric", "run.evaluate(test, score)"),
        Replacement("if rank == 0: print(...)", "run.print(...)"),
        Replacement("torch.save, torch.load, start epoch", _BY_ITSELF),
        Replacement("torchrun --nproc-per-node 4 SCRIPT", "paceline run -n 4 SCRIPT"),
    ),
)  # fmt: skip
_ACCELERATE = Origin(
    "Accelerate",
    "docs/guides/from-accelerate.md",
    (
        Replacement("Accelerator()", "with paceline.Run(config) as run"),
        Replacement("accelerator.prepare(model)", "run.model(model)", "model"),
        Replacement("accelerator.prepare(loader)", "run.steps(loader)", "data"),
        Replacement("batch_size=64, per process", "batch.global_size=256, over all ranks"),
        Replacement("accelerator.backward(loss)", "run.update(optimizer, loss, step)", "loss"),
        Replacement("gradient_accumulation_steps=4", "batch.lanes=4"),
        Replacement("gather_for_metrics(...)", "run.evaluate(test, score)"),
        Replacement("register_for_checkpointing(x)", "run.track(x=x)"),
        Replacement("save_state, load_state", _BY_ITSELF),
        Replacement("accelerate launch --num_processes 4 SCRIPT", "paceline run -n 4 SCRIPT"),
    ),
)
_LIGHTNING = Origin(
    "Lightning",
    "docs/guides/from-lightning.md",
    (
        Replacement("LightningModule.__init__, forward", "make_model: a plain nn.Module", "model"),
        Replacement("train_dataloader, LightningDataModule", "make_data", "data"),
        Replacement("batch_size=64, per device", "batch.global_size=256, over all ranks"),
        Replacement("training_step", "loss_of", "loss"),
        Replacement("validation_step, self.log(sync_dist=True)", "score"),
        Replacement("configure_optimizers", "run.optimizer(...), run.track(scheduler=...)"),
        Replacement("on_train_batch_end of a callback", "the line after run.update"),
        Replacement("Trainer(max_epochs=10, precision=...)", "epochs=10 precision=..."),
        Replacement('ModelCheckpoint, ckpt_path="last"', _BY_ITSELF),
        Replacement("Trainer(devices=4)", "paceline run -n 4 SCRIPT"),
    ),
)
_HUGGING_FACE = Origin(
    "the Hugging Face Trainer",
    "docs/guides/own-loop.md, and examples/causal_lm.py",
    (
        Replacement("model=AutoModel.from_pretrained(...)", "run.model(make_model())", "model"),
        Replacement("train_dataset=, data_collator=", "run.steps(data, collate=...)", "data"),
        Replacement("per_device_train_batch_size=64", "batch.global_size=256, over all ranks"),
        Replacement("compute_loss", "loss_of: return model(**batch).loss", "loss"),
        Replacement("compute_metrics", "run.evaluate(test, score), run.predict(test, function)"),
        Replacement("gradient_accumulation_steps=4", "batch.lanes=4"),
        Replacement('lr_scheduler_type="cosine"', "lr.schedule=cosine"),
        Replacement("max_grad_norm=1.0, bf16=True", "clip_norm=1.0 precision=bf16"),
        Replacement("resume_from_checkpoint=True", _BY_ITSELF),
        Replacement("torchrun --nproc-per-node 4 SCRIPT", "paceline run -n 4 SCRIPT"),
    ),
)

ORIGINS = {
    "torchrun": _TORCHRUN,
    "accelerate": _ACCELERATE,
    "lightning": _LIGHTNING,
    "hf": _HUGGING_FACE,
}
