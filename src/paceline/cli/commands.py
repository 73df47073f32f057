"""Which verbs the program has: their groups, their help lines, and the function behind each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Command(NamedTuple):
    """A verb, or an action of a verb."""

    help: str
    function: str = ""
    """`module:function`, imported when the verb is chosen. Its parameter is the dataclass of its arguments."""
    actions: Mapping[str, Command] = {}


GROUPS = {
    "Train": ("init", "train", "run", "submit"),
    "Follow": ("runs", "watch", "report", "hang", "jobs", "cancel", "rm"),
    "Check": ("verify", "chaos", "doctor"),
    "Measure": ("bench", "scale", "profile"),
    "Data and models": ("data", "ckpt", "sample", "cluster"),
    "Learn": ("lesson", "completion"),
}

_DATA = {
    "pack": Command("pack files into a dataset of shards", "paceline.cli.data_pack:pack_dataset"),
    "check": Command("verify every byte of a dataset", "paceline.cli.data:check"),
    "show": Command(
        "show columns and samples of a dataset, or the layout of an HDF5 file",
        "paceline.cli.data:show",
    ),
    "get": Command(
        "download a public dataset: mnist, fashion-mnist, tinyshakespeare",
        "paceline.data.download:main",
    ),
    "bench": Command("measure how fast a dataset is read", "paceline.data.bench:main"),
}

_CKPT = {
    "list": Command("list the checkpoints of a run", "paceline.cli.ckpt:list_checkpoints"),
    "check": Command("verify every byte of the checkpoints", "paceline.cli.ckpt:check_checkpoints"),
    "export": Command(
        "export the weights to safetensors or Hugging Face", "paceline.cli.ckpt:export_checkpoint"
    ),
    "import": Command(
        "start a run from weights of PyTorch, Hugging Face, Accelerate or Lightning",
        "paceline.cli.ckpt_import:import_checkpoint",
    ),
}

_CLUSTER = {
    "list": Command("list the cluster profiles", "paceline.cli.cluster:list_profiles"),
    "show": Command("print one profile with all its fields", "paceline.cli.cluster:show_profile"),
    "aws": Command(
        "write a configuration for AWS ParallelCluster", "paceline.cli.cluster_aws:write_aws"
    ),
}

COMMANDS = {
    "init": Command(
        "write a training script to start from: model, data and loss are marked",
        "paceline.cli.init:main",
    ),
    "train": Command("train a built-in recipe: toy, mnist, gpt", "paceline.cli.train:main"),
    "run": Command(
        "run a script on N processes; restart it if it crashes", "paceline.cli.run:main"
    ),
    "submit": Command(
        "submit a script to Slurm; it saves and requeues before the time limit",
        "paceline.cli.submit:main",
    ),
    "runs": Command("list the runs of a folder, newest first", "paceline.cli.runs:main"),
    "watch": Command(
        "live view of a run: step, loss, speed, time left, slowest rank", "paceline.cli.watch:main"
    ),
    "jobs": Command("list my submitted runs and their state", "paceline.cli.jobs:main"),
    "cancel": Command(
        "cancel a run's queued and running jobs (running ones save first)",
        "paceline.cli.cancel:main",
    ),
    "report": Command(
        "write an HTML report of a run, or an index page of all runs", "paceline.cli.report:main"
    ),
    "rm": Command("delete runs: asks first, refuses one that still runs", "paceline.cli.rm:main"),
    "hang": Command(
        "show which rank hangs, where, and which ranks wait for it", "paceline.cli.hang:main"
    ),
    "verify": Command(
        "check that 1, 2, 4 ... ranks give identical bits; if not, show where and why",
        "paceline.cli.verify:main",
    ),
    "chaos": Command(
        "kill a training at random, restart it, and check that the bits are the same",
        "paceline.cli.chaos:main",
    ),
    "doctor": Command(
        "check this machine or allocation; lint Slurm scripts", "paceline.cli.doctor:main"
    ),
    "bench": Command(
        "test and time collectives (all-reduce, ...) by message size", "paceline.cli.bench:main"
    ),
    "scale": Command(
        "measure speed-up and efficiency by number of ranks", "paceline.cli.scale:main"
    ),
    "profile": Command(
        "profile some steps on all ranks; name the bottleneck", "paceline.cli.profile:main"
    ),
    "data": Command("pack, check, show, download and time datasets", actions=_DATA),
    "ckpt": Command("list, check, export and import checkpoints", actions=_CKPT),
    "sample": Command("generate text with a trained GPT", "paceline.cli.sample:main"),
    "cluster": Command(
        "list and show cluster profiles; configure a cluster on AWS", actions=_CLUSTER
    ),
    "lesson": Command(
        "the course: lessons and exercises on distributed training", "paceline.cli.lesson:main"
    ),
    "completion": Command(
        "print the script that makes bash, zsh or fish complete commands at the tab key",
        "paceline.cli.completion:main",
    ),
}


def load(command: Command) -> tuple[Callable[[Any], int], type]:
    """Import a command; return its function and the dataclass of its arguments."""
    module, _, name = command.function.partition(":")
    function = getattr(import_module(module), name)
    return function, get_type_hints(function)["arguments"]
