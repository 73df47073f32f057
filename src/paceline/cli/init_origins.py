"""What a script of torchrun, Accelerate, Lightning or the Hugging Face Trainer writes, and what replaces it."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Place = Literal["model", "data", "loss", ""]
_BY_ITSELF = "nothing: it saves and resumes by itself"


class Replacement(NamedTuple):
    """A call of another library, and the one that replaces it."""

    there: str
    here: str
    place: Place = ""
    """The marked place of the script at which it is written as a comment; empty: at none."""
    find: str = ""
    """A regular expression for the lines of a script that it replaces; empty: none."""


class Origin(NamedTuple):
    """A library that a script comes from."""

    name: str
    guide: str
    own: tuple[Replacement, ...]

    @property
    def replacements(self) -> tuple[Replacement, ...]:
        """Its own calls, and those that scripts of every library have."""
        return self.own + _EVERYWHERE

    def lines_of(self, script: str) -> list[tuple[int, str, str]]:
        """Return the number and the text of the lines that are replaced, each with what replaces it."""
        found = []
        for number, line in enumerate(script.splitlines(), start=1):
            code = line.partition("#")[0]
            here = [
                each.here for each in self.replacements if each.find and re.search(each.find, code)
            ]
            if here and not code.lstrip().startswith(("import ", "from ")):
                found.append((number, code.strip(), "; ".join(dict.fromkeys(here))))
        return found


_EVERYWHERE = (
    Replacement(
        "scheduler = OneCycleLR(optimizer, ...)",
        "the same, and run.track(scheduler=scheduler)",
        find=r"=\s*[\w.]*(LR|LRScheduler|LROnPlateau|WarmRestarts|get_\w*schedule\w*)\(",
    ),
    Replacement("scheduler.step()", "the same, after run.update", find=r"sched\w*\.step\("),
    Replacement(
        "random_split(data, [0.9, 0.1])",
        "the same, with generator=torch.Generator().manual_seed(0)",
        find=r"random_split\(",
    ),
    Replacement(
        'parser.add_argument("--width")',
        "a field of Config(paceline.RunConfig); config_from_argv(Config)",
        find=r"argparse|ArgumentParser|add_argument\(|parse_args\(",
    ),
)
"""What a script of any library may have."""
_TORCHRUN = Origin(
    "torchrun",
    "paceline help guide from-torchrun",
    (
        Replacement("init_process_group(...)", "with paceline.Run(config) as run", find=r"init_process_group|destroy_process_group"),
        Replacement("DistributedDataParallel(model.to(device))", "run.model(model)", "model", find=r"DistributedDataParallel\(|\bDDP\("),
        Replacement("DataLoader(data, sampler=DistributedSampler(data))", "run.steps(data)", "data", find=r"DistributedSampler\(|DataLoader\(|set_epoch\("),
        Replacement("batch_size=64, per process", "batch.global_size=256, over all ranks", find=r"batch_size\s*="),
        Replacement("loss.backward(); optimizer.step()", "run.update(optimizer, loss, step)", "loss", find=r"\.backward\(|optimizer\w*\.step\(|zero_grad\("),
        Replacement("all_reduce of a metric", "run.evaluate(test, score)", find=r"all_reduce\(|all_gather\w*\(|\.reduce\("),
        Replacement("if rank == 0: print(...)", "run.print(...)", find=r"rank\w*\s*==\s*0|LOCAL_RANK|[\"']RANK[\"']|get_rank\("),
        Replacement("torch.save, torch.load, start epoch", _BY_ITSELF, find=r"torch\.(save|load)\(|load_state_dict\("),
        Replacement("torchrun --nproc-per-node 4 SCRIPT", "paceline run -n 4 SCRIPT"),
    ),
)  # fmt: skip
_ACCELERATE = Origin(
    "Accelerate",
    "paceline help guide from-accelerate",
    (
        Replacement("Accelerator()", "with paceline.Run(config) as run", find=r"Accelerator\("),
        Replacement("accelerator.prepare(model)", "run.model(model)", "model", find=r"\.prepare\("),
        Replacement(
            "accelerator.prepare(loader)", "run.steps(loader)", "data", find=r"DataLoader\("
        ),
        Replacement(
            "batch_size=64, per process",
            "batch.global_size=256, over all ranks",
            find=r"batch_size\s*=",
        ),
        Replacement(
            "accelerator.backward(loss)",
            "run.update(optimizer, loss, step)",
            "loss",
            find=r"\.backward\(|optimizer\w*\.step\(|zero_grad\(",
        ),
        Replacement(
            "gradient_accumulation_steps=4",
            "batch.lanes=4",
            find=r"gradient_accumulation_steps|\.accumulate\(",
        ),
        Replacement(
            "gather_for_metrics(...)",
            "run.evaluate(test, score)",
            find=r"gather_for_metrics\(|\.gather\(",
        ),
        Replacement(
            "register_for_checkpointing(x)", "run.track(x=x)", find=r"register_for_checkpointing\("
        ),
        Replacement(
            "save_state, load_state", _BY_ITSELF, find=r"\.(save|load)_state\(|skip_first_batches\("
        ),
        Replacement("accelerate launch --num_processes 4 SCRIPT", "paceline run -n 4 SCRIPT"),
    ),
)
_LIGHTNING = Origin(
    "Lightning",
    "paceline help guide from-lightning",
    (
        Replacement(
            "LightningModule.__init__, forward",
            "make_model: a plain nn.Module",
            "model",
            find=r"LightningModule",
        ),
        Replacement(
            "train_dataloader, LightningDataModule",
            "make_data",
            "data",
            find=r"def train_dataloader|LightningDataModule|DataLoader\(",
        ),
        Replacement(
            "batch_size=64, per device",
            "batch.global_size=256, over all ranks",
            find=r"batch_size\s*=",
        ),
        Replacement("training_step", "loss_of", "loss", find=r"def training_step"),
        Replacement(
            "validation_step, self.log(sync_dist=True)",
            "score",
            find=r"def (validation|test)_step|self\.log\(",
        ),
        Replacement(
            "configure_optimizers",
            "run.optimizer(...), run.track(scheduler=...)",
            find=r"def configure_optimizers",
        ),
        Replacement(
            "on_train_batch_end of a callback", "the line after run.update", find=r"def on_\w+"
        ),
        Replacement(
            "Trainer(max_epochs=10, precision=...)",
            "epochs=10 precision=...",
            find=r"max_epochs\s*=|precision\s*=",
        ),
        Replacement(
            'ModelCheckpoint, ckpt_path="last"', _BY_ITSELF, find=r"ModelCheckpoint|ckpt_path"
        ),
        Replacement(
            "Trainer(devices=4)", "paceline run -n 4 SCRIPT", find=r"\bTrainer\(|devices\s*="
        ),
    ),
)
_FABRIC = Origin(
    "Fabric",
    "paceline help guide from-lightning",
    (
        Replacement("Fabric(devices=4); fabric.launch()", "with paceline.Run(config) as run", find=r"Fabric\(|\.launch\("),
        Replacement("fabric.setup(model, optimizer)", "run.model(model)", "model", find=r"\.setup(_module|_optimizers)?\("),
        Replacement("fabric.setup_dataloaders(loader)", "run.steps(loader)", "data", find=r"setup_dataloaders\(|DataLoader\("),
        Replacement("batch_size=64, per device", "batch.global_size=256, over all ranks", find=r"batch_size\s*="),
        Replacement("fabric.backward(loss)", "run.update(optimizer, loss, step)", "loss", find=r"\.backward\(|optimizer\w*\.step\(|zero_grad\("),
        Replacement("fabric.no_backward_sync(model)", "batch.lanes=4", find=r"no_backward_sync\("),
        Replacement("fabric.clip_gradients(...)", "run.update(..., clip=1.0)", find=r"clip_gradients\("),
        Replacement("fabric.all_reduce of a metric", "run.evaluate(test, score)", find=r"\.all_(reduce|gather)\("),
        Replacement("fabric.save, fabric.load", _BY_ITSELF, find=r"fabric\.(save|load)\("),
        Replacement("fabric.print, is_global_zero", "run.print, run.is_main", find=r"fabric\.print\(|is_global_zero"),
        Replacement("fabric run --devices 4 SCRIPT", "paceline run -n 4 SCRIPT"),
    ),
)  # fmt: skip
_HUGGING_FACE = Origin(
    "the Hugging Face Trainer",
    "paceline help guide from-hf-trainer",
    (
        Replacement(
            "model=AutoModel.from_pretrained(...)",
            "run.model(make_model())",
            "model",
            find=r"from_pretrained\(",
        ),
        Replacement(
            "train_dataset=, data_collator=",
            "run.steps(data, collate=...)",
            "data",
            find=r"train_dataset\s*=|data_collator\s*=",
        ),
        Replacement(
            "per_device_train_batch_size=64",
            "batch.global_size=256, over all ranks",
            find=r"per_device_\w+_batch_size",
        ),
        Replacement(
            "compute_loss", "loss_of: return model(**batch).loss", "loss", find=r"def compute_loss"
        ),
        Replacement(
            "compute_metrics",
            "run.evaluate(test, score), run.predict(test, function)",
            find=r"compute_metrics",
        ),
        Replacement(
            "gradient_accumulation_steps=4",
            "batch.lanes=4",
            find=r"gradient_accumulation_steps|\.accumulate\(",
        ),
        Replacement(
            'lr_scheduler_type="cosine"',
            "lr.schedule=cosine",
            find=r"lr_scheduler_type|warmup_(steps|ratio)",
        ),
        Replacement(
            "max_grad_norm=1.0, bf16=True",
            "clip_norm=1.0 precision=bf16",
            find=r"max_grad_norm|\b(bf|fp)16\s*=",
        ),
        Replacement(
            "resume_from_checkpoint=True",
            _BY_ITSELF,
            find=r"resume_from_checkpoint|save_(strategy|steps)",
        ),
        Replacement("torchrun --nproc-per-node 4 SCRIPT", "paceline run -n 4 SCRIPT"),
    ),
)

ORIGINS = {
    "torchrun": _TORCHRUN,
    "accelerate": _ACCELERATE,
    "lightning": _LIGHTNING,
    "fabric": _FABRIC,
    "hf": _HUGGING_FACE,
}
