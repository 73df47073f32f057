"""Mistakes in batch scripts that leave GPUs or cores unused, or give several ranks the same one."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.batch_parser import Script
from paceline.doctor.finding import Finding, problem
from paceline.doctor.launch_commands import (
    Launch,
    gpus_per_node,
    nodes_of,
    number,
    tasks_per_node,
)


def agents_for_other_nodes(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find a torchrun whose --nnodes is not the number of nodes that it is started on."""
    for launch in launches:
        wanted = number(script, launch.options.get("nnodes", ""))
        nodes = nodes_of(script, launch)
        one_of_several = launch.command.background or "nodelist" in launch.asked
        if launch.kind != "agent" or not launch.through or one_of_several:
            continue
        if not wanted or wanted == nodes:
            continue
        effect = "the agents wait for others that never start"
        if wanted < nodes:
            effect = "the agents that come late are refused, and their nodes are idle"
        yield problem(
            "wrong-nnodes",
            f"--nnodes={wanted}, but the agents start on {nodes} nodes: {effect}",
            "use --nnodes=$SLURM_NNODES",
            launch.line,
        )


def ranks_and_gpus(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find more or fewer ranks per node than GPUs."""
    gpus = gpus_per_node(script)
    for launch in launches:
        if launch.kind == "agent":
            option = "nproc-per-node"
            ranks = number(script, launch.options.get(option, ""))
        elif launch.kind == "python" and launch.through == "srun":
            option, ranks = "ntasks-per-node", tasks_per_node(script, launch)
        else:
            continue
        if not gpus or not ranks or ranks == gpus or (ranks < gpus and option != "nproc-per-node"):
            continue
        effect = f"{ranks - gpus} of these ranks find no GPU, or share one"
        if ranks < gpus:
            effect = f"{gpus - ranks} of these GPUs are idle"
        yield problem(
            "ranks-and-gpus",
            f"{ranks} ranks per node, but the job requests {gpus} GPUs per node: {effect}",
            f"use --{option}={gpus}, or request {ranks} GPUs: --gpus-per-node={ranks}",
            launch.line,
        )


def cores_lost(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find an srun whose tasks get one core, though the job requests several for each."""
    cores = number(script, script.value("cpus-per-task"))
    if script.last("SRUN_CPUS_PER_TASK"):
        return
    for launch in launches:
        if launch.through != "srun" or {"cpus-per-task", "cpus-per-gpu"} & launch.asked.keys():
            continue
        if "exact" in launch.asked:
            says = "srun --exact without -c binds each task to 1 core"
        elif cores and cores > 1:
            says = f"since Slurm 22.05 srun does not inherit --cpus-per-task={cores}: each task gets 1 core"
        else:
            continue
        fix = 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" before it'
        yield problem("cores-lost", says, fix, launch.line)
        return
