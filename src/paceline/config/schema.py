"""The settings of a run. The line under a field is its help text, everywhere."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from paceline.config.checks import at_least, has_login
from paceline.config.diloco import LocalSgdConfig, check_local_sgd
from paceline.config.instrumentation import ProfileConfig, RecordConfig
from paceline.config.intervals import Every, seconds_from
from paceline.errors import ConfigError, did_you_mean

_SINKS = ("csv", "mlflow", "tensorboard", "wandb")


@dataclass(frozen=True)
class BatchConfig:
    """What makes one optimizer step."""

    global_size: int = 256
    """Samples that make one optimizer step, over all ranks."""
    lanes: int = 4
    """Micro-batches one step is always cut into; also the largest number of ranks."""

    def __post_init__(self) -> None:
        """Refuse what no world could run."""
        at_least(1, "batch.lanes", self.lanes)
        if self.global_size < self.lanes:
            raise ConfigError(
                f"batch.global_size={self.global_size} is smaller than batch.lanes={self.lanes}",
                fix=f"set batch.lanes={max(1, self.global_size)} or less, or a global batch of at least {self.lanes}",
            )


@dataclass(frozen=True)
class LrConfig:
    """The learning rate, counted in samples so that nothing shifts with the world."""

    base: float = 1e-3
    """Learning rate at the reference batch."""
    rule: Literal["none", "linear", "sqrt"] = "none"
    """How the rate grows with batch.global_size over lr.reference_batch."""
    reference_batch: int = 256
    """The global batch for which lr.base was found."""
    schedule: Literal["constant", "cosine", "one-cycle"] = "constant"
    """How the rate moves over the run."""
    warmup_samples: int = 0
    """Samples over which the rate rises to its peak."""
    final: float = 0.0
    """Share of the peak rate left at the end of cosine and one-cycle."""

    def __post_init__(self) -> None:
        """Refuse rates that no optimizer takes."""
        if not (math.isfinite(self.base) and self.base >= 0):
            raise ConfigError(
                f"lr.base={self.base} is not a learning rate", fix="set lr.base to a number >= 0"
            )
        at_least(1, "lr.reference_batch", self.reference_batch)
        at_least(0, "lr.warmup_samples", self.warmup_samples)


@dataclass(frozen=True)
class ReadConfig:
    """How samples come from files."""

    window: int = 16
    """Blocks (shards, or chunks of HDF5 of about 1 MB) whose samples are mixed; sets of no more are shuffled as a whole."""
    prefetch_steps: int = 8
    """Steps that are read ahead of the training, where samples come from files; up to 16 MB of short ones are read as one."""
    resident_gb: float = 4.0
    """Sets of no more GB are kept on the GPU as a whole, if a quarter of its free memory holds them."""
    workers: int = 0
    """Processes per rank that make samples of a dataset written in Python; 0: the rank itself does."""
    cache: str = ""
    """Folder for shards that come from an address; empty: ~/.cache/paceline/shards."""
    cache_gb: float = 64.0
    """What that folder may hold, in GB."""

    def __post_init__(self) -> None:
        """Refuse what cannot be read with."""
        at_least(1, "read.window", self.window)
        at_least(1, "read.prefetch_steps", self.prefetch_steps)
        at_least(0, "read.workers", self.workers)
        if not 0 < self.cache_gb < math.inf:
            raise ConfigError(
                f"read.cache_gb={self.cache_gb} holds nothing", fix="set it to GB, such as 64"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of the model while it trains."""

    every: str = "auto"
    """How often to save: 500steps, 30s, 10m, 2h, 1epoch, auto (from the cost of a save and mtbf_h), or end (at the end only)."""
    mtbf_h: float = 24.0
    """Mean hours between two failures of the whole job, for auto."""
    keep: int = 3
    """How many of the newest checkpoints are kept."""
    best: str = ""
    """Keep the best by a metric of the evaluation as well: max:acc or min:eval_loss; empty: only the newest."""
    to: str = ""
    """Where checkpoints go: empty for the run's own folder, or an address such as s3://bucket/folder."""

    def __post_init__(self) -> None:
        """Refuse intervals and addresses that cannot be."""
        Every.parse(self.every)
        at_least(1, "checkpoint.keep", self.keep)
        if not (math.isfinite(self.mtbf_h) and self.mtbf_h > 0):
            raise ConfigError(
                f"checkpoint.mtbf_h={self.mtbf_h} is not a time", fix="set it to hours, such as 24"
            )
        if self.best and not re.fullmatch(r"(max|min):.+", self.best):
            raise ConfigError(
                f"checkpoint.best={self.best!r} does not say which way is better",
                fix="give it as max:acc or min:eval_loss",
            )
        if has_login(self.to):
            raise ConfigError(
                "checkpoint.to has a name or password in its address",
                fix="leave it out, and set the storage's own variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )


@dataclass(frozen=True)
class LogConfig:
    """What a run says while it trains."""

    every_steps: int = 20
    """Steps between two step events in events.jsonl."""
    ranks: Literal["main", "all"] = "main"
    """Whether every rank prints a line per epoch, or only rank 0."""
    progress: Literal["auto", "bar", "lines"] = "auto"
    """A progress bar or plain lines; auto: a bar on a terminal."""
    to: str = ""
    """Where figures go besides events.jsonl, with commas between: csv, tensorboard, mlflow, wandb; empty: nowhere else."""

    def __post_init__(self) -> None:
        """Refuse an interval that never comes, and loggers that there are not."""
        at_least(1, "log.every_steps", self.every_steps)
        for name in self.sinks:
            if name not in _SINKS:
                raise ConfigError(
                    f"log.to={self.to}: there is no logger {name!r}", fix=did_you_mean(name, _SINKS)
                )

    @property
    def sinks(self) -> tuple[str, ...]:
        """The loggers that `to` names, each once."""
        return tuple(dict.fromkeys(name.strip() for name in self.to.split(",") if name.strip()))


@dataclass(frozen=True)
class TimeoutConfig:
    """How long a rank waits for its peers."""

    start_s: float = 1800.0
    """Seconds until all ranks must have met and finished the first step."""
    step_s: float = 60.0
    """Seconds a rank waits in a collective after the first step; longer than the longest evaluation."""
    hang_steps: float = 3.0
    """Steps, of the usual length, without a sign of life (and 3 s) after which all ranks say where they are; 0: never."""


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run. The number of processes is not one of them."""

    name: str = "run"
    """Name of the run: its folder under `runs`."""
    runs: str = "runs"
    """Folder that holds the runs."""
    seed: int = 0
    """The one seed of the run."""
    epochs: int = 10
    """Passes over the training set."""
    steps: int = 0
    """Optimizer steps in all, instead of epochs; 0: epochs decide."""
    parallel: Literal["none", "ddp", "fsdp"] = "ddp"
    """How ranks share the work: ddp: each has the whole model; fsdp: a slice of it, and gathers what it needs."""
    shard_over: int = 0
    """With parallel=fsdp: ranks that share one copy of the model, such as those of a node; 0: all of them."""
    exact: bool = True
    """Same bits on any number of ranks; false lets the order of summation go free."""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Fewer bytes per gradient, with exact=false only; with local_sgd.steps, fewer per difference, and exact holds."""
    clip_norm: float = 0.0
    """Largest norm of the whole gradient; 0: no clipping."""
    precision: Literal["fp32", "tf32", "bf16", "bf16-master", "fp16"] = "fp32"
    """Numbers that forward and backward compute with. tf32: shorter products; bf16, fp16: autocast, over fp32 weights; bf16-master: all in bf16, and the optimizer moves fp32 masters of the weights."""
    compile: bool = False
    """Let torch compile the model."""
    capture: Literal["false", "true", "auto"] = "false"
    """Record each step once and replay it as a CUDA graph; auto: where that can be done."""
    threads: int = 1
    """CPU threads per rank. Part of the bits: keep it while you compare."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: a GPU if this rank sees one."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """How ranks talk; auto: nccl if every rank has a GPU of its own, else gloo."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """What makes one optimizer step."""
    local_sgd: LocalSgdConfig = field(default_factory=LocalSgdConfig)
    """Fewer messages: replicas that walk apart for some steps."""
    lr: LrConfig = field(default_factory=LrConfig)
    """The learning rate."""
    read: ReadConfig = field(default_factory=ReadConfig)
    """How samples come from files."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is kept of the model."""
    log: LogConfig = field(default_factory=LogConfig)
    """What a run says."""
    timeout: TimeoutConfig = field(default_factory=TimeoutConfig)
    """How long a rank waits."""
    evaluate_steps: int = 0
    """Steps between two evaluations within an epoch; 0: only at its end."""
    resume: Literal["auto", "changed", "never"] = "auto"
    """Go on from the newest good checkpoint; changed: also with other settings; never: start over, old checkpoints are kept aside."""
    stop_after: str = ""
    """Save and stop so long after the start, to be resumed later: 30m, 2h; empty: never."""
    record: RecordConfig = field(default_factory=RecordConfig)
    """What verify and scale ask for."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """What profile asks for."""

    @property
    def only_looked_at(self) -> bool:
        """Whether some steps are run for the sake of their times: the end of such a run is not saved."""
        return bool(self.record.times or self.profile.to)

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        at_least(1, "epochs", self.epochs)
        at_least(0, "steps", self.steps)
        at_least(0, "evaluate_steps", self.evaluate_steps)
        at_least(1, "threads", self.threads)
        at_least(0, "shard_over", self.shard_over)
        if self.clip_norm < 0:
            raise ConfigError(
                f"clip_norm={self.clip_norm} is negative", fix="set clip_norm=0 for no clipping"
            )
        if not self.name or "/" in self.name or self.name in {".", ".."}:
            raise ConfigError(
                f"name={self.name!r} cannot be a folder",
                fix="set name= to a plain word; runs= names the folder above it",
            )
        if self.stop_after:
            seconds_from(self.stop_after)
        if self.parallel == "fsdp":
            self._check_fsdp()
        elif self.shard_over:
            raise ConfigError(
                f"shard_over={self.shard_over} is for models in slices", fix="add parallel=fsdp"
            )
        if self.local_sgd.steps:
            check_local_sgd(self)
        if self.exact and self.compression != "none" and not self.local_sgd.steps:
            raise ConfigError(
                f"compression={self.compression} rounds gradients, so exact=true cannot hold",
                fix="add exact=false, or set compression=none",
            )
        if self.capture != "false" and self.compression != "none" and not self.local_sgd.steps:
            raise ConfigError(
                f"compression={self.compression} is DDP's, which captured steps do without",
                fix="set capture=false or compression=none",
            )

    def _check_fsdp(self) -> None:
        """Refuse what a model in slices cannot do."""
        if self.shard_over == 1:
            raise ConfigError(
                "shard_over=1 is a whole model on every rank",
                fix="set parallel=ddp, or shard_over=0",
            )
        if self.capture == "true":
            raise ConfigError(
                "parallel=fsdp cannot be captured", fix="set capture=false, or parallel=ddp"
            )
        if self.precision == "fp16":
            raise ConfigError(
                "parallel=fsdp has no scaler for fp16", fix="set precision=bf16, or parallel=ddp"
            )
        if self.compression != "none":
            raise ConfigError(
                f"compression={self.compression} is for gradients of parallel=ddp",
                fix="set compression=none, or parallel=ddp",
            )
