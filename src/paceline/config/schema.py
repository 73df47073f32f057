"""The settings of a run. The line under a field is its help text, everywhere."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from paceline.config.checks import at_least, refuse_secret
from paceline.config.combinations import check_combinations
from paceline.config.diloco import LocalSgdConfig
from paceline.config.instrumentation import ProfileConfig, RecordConfig
from paceline.config.intervals import Every, seconds_from
from paceline.config.lanes import AUTO_LANES, AutoLanes
from paceline.config.values import flatten
from paceline.errors import ConfigError, did_you_mean
from paceline.main_script import main_script

_SINKS = ("csv", "mlflow", "tensorboard", "wandb")


@dataclass(frozen=True)
class BatchConfig:
    """The global batch of one optimizer step."""

    global_size: int = 256
    """Samples per optimizer step, over all ranks."""
    lanes: int = AUTO_LANES
    """Micro-batches per step, on any number of ranks; also the largest number of ranks. auto: the number saved with the run; a new run takes the number of its ranks, and on CPUs at least 4."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a batch that cannot be split."""
        at_least(1, "batch.global_size", self.global_size)
        if str(self.lanes) == "auto":  # as on the command line
            object.__setattr__(self, "lanes", AUTO_LANES)
        if isinstance(self.lanes, AutoLanes):
            return
        at_least(1, "batch.lanes", self.lanes)
        if self.global_size < self.lanes:
            raise ConfigError(
                f"batch.global_size={self.global_size} is smaller than batch.lanes={self.lanes}",
                fix=f"set batch.lanes={max(1, self.global_size)} or less, or batch.global_size={self.lanes} or more",
            )


@dataclass(frozen=True)
class LrConfig:
    """Learning rate and schedule; warm-up is counted in samples, so it does not depend on the batch."""

    base: float = 1e-3
    """Learning rate for a global batch of lr.reference_batch samples."""
    rule: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate scales with batch.global_size / lr.reference_batch."""
    reference_batch: int = 256
    """Global batch size for which lr.base was tuned."""
    schedule: Literal["constant", "cosine", "one-cycle"] = "constant"
    """Learning-rate schedule over the run."""
    warmup_samples: int = 0
    """Samples of linear warm-up."""
    final: float = 0.0
    """Learning rate at the end of cosine and one-cycle, as a fraction of the peak."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values out of range."""
        if not (math.isfinite(self.base) and self.base >= 0):
            raise ConfigError(
                f"lr.base must be a number >= 0, got {self.base}", fix="for example: lr.base=0.001"
            )
        at_least(1, "lr.reference_batch", self.reference_batch)
        at_least(0, "lr.warmup_samples", self.warmup_samples)


@dataclass(frozen=True)
class ReadConfig:
    """Reading samples from files."""

    window: int = 16
    """Blocks (shards, or HDF5 chunks of about 1 MB) in the shuffle window; smaller datasets are shuffled completely."""
    prefetch_steps: int = 8
    """Steps to prefetch from files; small steps are read together, up to 16 MB at once."""
    resident_gb: float = 4.0
    """Keep datasets up to this size (GB) on the GPU, if they fit in a quarter of its free memory."""
    workers: int = 0
    """Worker processes per rank for a dataset written in Python; 0: load samples in the rank itself."""
    cache: str = ""
    """Folder that caches shards read from a URL; empty: ~/.cache/paceline/shards."""
    cache_gb: float = 64.0
    """Largest size of read.cache in GB."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values out of range."""
        at_least(1, "read.window", self.window)
        at_least(1, "read.prefetch_steps", self.prefetch_steps)
        at_least(0, "read.workers", self.workers)
        if not 0 < self.cache_gb < math.inf:
            raise ConfigError(
                f"read.cache_gb must be above 0, got {self.cache_gb}", fix="set read.cache_gb=64"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: how often, how many, where."""

    every: str = "auto"
    """How often to save: 500steps, 30s, 10m, 2h, 1epoch, auto (from the cost of a save and checkpoint.mtbf_h) or end (only at the end)."""
    mtbf_h: float = 24.0
    """Mean time between failures of the whole job in hours, for checkpoint.every=auto."""
    keep: int = 3
    """Newest checkpoints to keep."""
    best: str = ""
    """Also keep the best checkpoint by an evaluation metric: max:acc or min:eval_loss; empty: only the newest."""
    to: str = ""
    """Where checkpoints are saved: a URL such as s3://bucket/folder; empty: the run's folder."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a bad interval, metric or URL."""
        Every.parse(self.every)
        at_least(1, "checkpoint.keep", self.keep)
        if not (math.isfinite(self.mtbf_h) and self.mtbf_h > 0):
            raise ConfigError(
                f"checkpoint.mtbf_h must be above 0, got {self.mtbf_h}",
                fix="set it to hours: checkpoint.mtbf_h=24",
            )
        if self.best and not re.fullmatch(r"(max|min):.+", self.best):
            raise ConfigError(
                f"checkpoint.best={self.best!r} does not start with max: or min:",
                fix="give it as max:acc or min:eval_loss",
            )
        refuse_secret("checkpoint.to", self.to)


@dataclass(frozen=True)
class LogConfig:
    """Output of a run: events, progress, loggers."""

    every_steps: int = 20
    """Steps between two Step events in events.jsonl."""
    ranks: Literal["main", "all"] = "main"
    """Which ranks print a line per epoch: only rank 0 (main), or all."""
    progress: Literal["auto", "bar", "lines"] = "auto"
    """Show a progress bar or plain lines; auto: a bar on a terminal."""
    to: str = ""
    """Loggers for metrics, separated by commas: csv, tensorboard, mlflow, wandb; empty: only events.jsonl."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a bad interval or an unknown logger."""
        at_least(1, "log.every_steps", self.every_steps)
        for name in self.sinks:
            if name not in _SINKS:
                raise ConfigError(
                    f"log.to={self.to}: there is no logger {name!r}", fix=did_you_mean(name, _SINKS)
                )

    @property
    def sinks(self) -> tuple[str, ...]:
        """The loggers named in `to`, without repeats."""
        return tuple(dict.fromkeys(name.strip() for name in self.to.split(",") if name.strip()))


@dataclass(frozen=True)
class TimeoutConfig:
    """How long ranks wait for each other."""

    start_s: float = 1800.0
    """Seconds for all ranks to start and finish the first step."""
    step_s: float = 60.0
    """Seconds a rank waits in a collective after the first step. Must exceed the longest evaluation."""
    hang_steps: float = 3.0
    """Report a hang after 3 s plus this many typical step times without progress; 0 disables it."""


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run. The number of ranks is not a setting: the launcher sets it."""

    name: str = field(default_factory=lambda: main_script().name)
    """Name of the run, and of its folder under `runs`; default: the script's file name."""
    runs: str = "runs"
    """Folder of all runs."""
    seed: int = 0
    """Random seed for weights, data order and augmentation."""
    epochs: int = 10
    """Epochs to train."""
    steps: int = 0
    """Total optimizer steps; overrides epochs. 0: use epochs."""
    parallel: Literal["none", "ddp", "fsdp"] = "ddp"
    """Parallelism: ddp (every rank holds the whole model), fsdp (every rank holds a shard) or none."""
    shard_over: int = 0
    """With parallel=fsdp: ranks that share one copy of the model, for instance the ranks of a node; 0: all ranks."""
    exact: bool = True
    """Train the same bits on any number of ranks; false: do not fix the order of summation (faster)."""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Compress gradients, which needs exact=false; with local SGD, compress weight differences, which keeps exact=true."""
    clip_norm: float = 0.0
    """Clip the gradient norm at this value; 0 disables it."""
    precision: Literal["fp32", "tf32", "bf16", "bf16-master", "fp16"] = "fp32"
    """Precision of forward and backward: fp32; tf32 (matrix products in TF32); bf16, fp16 (autocast, fp32 weights); bf16-master (bf16 weights, fp32 master weights in the optimizer)."""
    compile: bool = False
    """Compile the model with torch.compile."""
    capture: Literal["false", "true", "auto"] = "false"
    """Capture the step as a CUDA graph and replay it; auto: capture if the model supports it."""
    threads: int = 1
    """CPU threads per rank. Changing it changes the bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto: a GPU if this rank sees one."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Backend of collectives; auto: nccl if every rank has its own GPU, else gloo. Ranks that share a GPU can test nccl."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """The global batch of one optimizer step."""
    local_sgd: LocalSgdConfig = field(default_factory=LocalSgdConfig)
    """Local SGD (DiLoCo): replicas train independently and synchronize every `local_sgd.steps` steps."""
    lr: LrConfig = field(default_factory=LrConfig)
    """Learning rate and schedule."""
    read: ReadConfig = field(default_factory=ReadConfig)
    """Reading samples from files."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    log: LogConfig = field(default_factory=LogConfig)
    """Output of a run."""
    timeout: TimeoutConfig = field(default_factory=TimeoutConfig)
    """How long ranks wait for each other."""
    evaluate_steps: int = 0
    """Steps between two evaluations; 0: evaluate only at the end of an epoch."""
    compare_steps: int = 100
    """Steps between two comparisons of weights, learning rates and tracked objects across ranks, besides those after steps 1, 3, 10 and 30 of a start; 0: only when saving."""
    resume: Literal["auto", "changed", "never"] = "auto"
    """auto: resume from the newest intact checkpoint; changed: also if settings changed; never: start from step 0 (old checkpoints are set aside)."""
    stop_after: str = ""
    """Save and exit after this time (30m, 2h); empty: no limit."""
    record: RecordConfig = field(default_factory=RecordConfig)
    """Data for verify and scale."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Steps for profile."""

    @property
    def only_measures(self) -> bool:
        """Whether the run only measures steps, so that no checkpoint is saved at its end."""
        return bool(self.record.times or self.record.steps or self.profile.to)

    def __post_init__(self) -> None:
        """Raise ConfigError for values out of range, and for settings that exclude each other."""
        for name, kind in _GROUPS.items():
            if not isinstance(getattr(self, name), kind):
                first = next(iter(vars(kind())))
                raise ConfigError(
                    f"RunConfig({name}={getattr(self, name)!r}): {name} is a group of settings ({name}.{first}, ...)",
                    fix=f"give {name}.{first}=... on the command line, or write "
                    f"RunConfig({name}=paceline.config.{kind.__name__}({first}=...))",
                )
        at_least(1, "epochs", self.epochs)
        at_least(0, "steps", self.steps)
        at_least(0, "evaluate_steps", self.evaluate_steps)
        at_least(0, "compare_steps", self.compare_steps)
        at_least(1, "threads", self.threads)
        at_least(0, "shard_over", self.shard_over)
        if self.clip_norm < 0:
            raise ConfigError(
                f"clip_norm must be >= 0, got {self.clip_norm}",
                fix="set clip_norm=0 for no clipping",
            )
        if not self.name or "/" in self.name or self.name in {".", ".."}:
            raise ConfigError(
                f"name={self.name!r} is not a folder name",
                fix="set name= to a name without slashes; runs= sets the folder above it",
            )
        if self.stop_after:
            seconds_from(self.stop_after)
        check_combinations(self)
        for name, value in flatten(self):
            for text in value if isinstance(value, tuple) else (value,):
                refuse_secret(name, text)


_GROUPS = {
    "batch": BatchConfig,
    "local_sgd": LocalSgdConfig,
    "lr": LrConfig,
    "read": ReadConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
    "timeout": TimeoutConfig,
    "record": RecordConfig,
    "profile": ProfileConfig,
}
"""The groups of settings in a RunConfig."""
