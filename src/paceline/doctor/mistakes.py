"""The classic mistakes in batch scripts: each with its line, its effect, and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from paceline.doctor.batch_parser import MARKED, Script, Variable, read_script
from paceline.doctor.environment_mistakes import (
    conda_without_hook,
    different_in_each_task,
    environment_not_passed,
    no_log_folder,
    unreadable_file,
    unsafe_address,
)
from paceline.doctor.exit_mistakes import (
    exit_code_lost,
    no_signal,
    ranks_left_behind,
    signal_not_heard,
)
from paceline.doctor.finding import Finding, problem
from paceline.doctor.launch_commands import (
    Launch,
    launches_of,
    nodes_of,
    number,
    tasks_of,
    tasks_per_node,
)
from paceline.doctor.resource_mistakes import agents_for_other_nodes, cores_lost, ranks_and_gpus

_OWN = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID"}
_PER_TASK = re.compile(rf"(?<!{MARKED})\$\{{?(SLURM_PROCID|SLURM_LOCALID|SLURM_NODEID)\b")
_FIXED = re.compile(r"(?:\$\{MASTER_PORT:?[-=])?(\d+)\}?")
_PORT_FIX = "derive it from the job ID: export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"
_ENDPOINT_FIX = (
    "add --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=HOST:PORT; HOST is the first of "
    '`scontrol show hostnames "$SLURM_JOB_NODELIST"`'
)


def find_mistakes(text: str, folder: Path = Path()) -> list[Finding]:
    """Return the mistakes in a batch script that is submitted in a folder, ordered by line."""
    script = read_script(text)
    launches = launches_of(script)
    findings = [*unreadable_file(script), *no_log_folder(script, folder)]
    for rule in _RULES:
        findings += rule(script, launches)
    return sorted(findings, key=lambda finding: finding.line)


def _rank_in_the_batch_shell(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    variables = list(script.variables)
    hangs = has_agent = False
    for launch in launches:
        has_agent |= launch.kind == "agent"
        direct = launch.through and launch.kind in {"python", "other"}
        hangs |= bool(direct) and tasks_of(script, launch) > 1
        for name, value in launch.command.variables.items():
            variables.append(Variable(launch.line, name, value, exported=True))
    if hangs or has_agent:
        for variable in variables:
            if variable.exported and variable.name in _OWN:
                yield _same_for_all(variable, hangs=hangs)


def _same_for_all(variable: Variable, *, hangs: bool) -> Finding:
    name = variable.name
    says = f"{name} is set in the batch shell, so all ranks get the same value ({variable.value})"
    if hangs:
        says += " and wait for each other forever"
        task = f"export {name}=${_OWN[name]}; exec python ..."
        fix = f"set it in each task, in single quotes: srun bash -c '{task}'"
    else:
        says += "; torchrun overrides it, but other programs in the job read the wrong value"
        fix = f"remove {name}: torchrun sets it for each rank"
    return problem("rank-in-batch-shell", says, fix, variable.line)


def _read_too_early(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for launch in launches:
        name = _per_task_variable(script, launch)
        if name and launch.through == "srun":
            yield problem(
                "rank-in-batch-shell",
                f"the batch shell expands ${name} in this command, where it is 0: "
                "all tasks get the same value",
                "let each task expand it, in single quotes: srun bash -c '... $SLURM_NODEID ...'",
                launch.line,
            )


def _per_task_variable(script: Script, launch: Launch) -> str:
    """Return a variable of a launch whose value differs per task; empty if there is none."""
    if match := _PER_TASK.search(launch.text):
        return match[1]
    for name in sorted(re.findall(r"\$\{?(\w+)", launch.text)):
        variable = script.last(name)
        if variable and _PER_TASK.search(variable.value):
            return str(name)
    return ""


def _wrong_world_size(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    size = script.last("WORLD_SIZE")
    value = number(script, size.value) if size and size.exported else None
    if not size or not value:
        return
    for launch in launches:
        tasks = tasks_of(script, launch)
        if launch.through == "srun" and launch.kind == "python" and value != tasks:
            yield problem(
                "world-size",
                f"WORLD_SIZE is {value}, but srun in line {launch.line} starts {tasks} tasks: "
                "the ranks wait for others that never start",
                "set it in the tasks: srun bash -c 'export WORLD_SIZE=$SLURM_NTASKS; exec python ...'",
                size.line,
            )


def _several_agents(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for launch in launches:
        if launch.through != "srun":
            continue
        per_node, tasks = tasks_per_node(script, launch), tasks_of(script, launch)
        if launch.kind == "agent" and per_node > 1:
            yield problem(
                "several-agents",
                f"srun starts {per_node} torchrun agents per node, and each starts all ranks",
                "start one agent per node: --ntasks-per-node=1, and --nproc-per-node for the ranks",
                launch.line,
            )
        elif tasks > 1 and re.search(r"\bpaceline (run|train)\b", launch.text):
            yield problem(
                "several-agents",
                f"srun starts this {tasks} times, and each would start all ranks",
                "start it once, without srun: it uses all nodes of the job",
                launch.line,
            )


def _no_rendezvous(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for launch in launches:
        options = launch.options
        nodes = number(script, options.get("nnodes", "").rpartition(":")[2])
        nodes = nodes or nodes_of(script, launch)
        if launch.kind != "agent" or nodes < 2 or not launch.through:
            continue
        standalone = "standalone" in options
        if standalone or not {"rdzv-endpoint", "master-addr", "rdzv-conf"} & options.keys():
            how = "with --standalone" if standalone else "without a rendezvous endpoint"
            yield problem(
                "no-rendezvous",
                f"{nodes} nodes {how}: each agent acts as the first, and waits 15 minutes for the "
                "others",
                _ENDPOINT_FIX,
                launch.line,
            )


def _only_the_first_node(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    elsewhere = any(launch.through or launch.kind == "paceline" for launch in launches)
    nodes, tasks = nodes_of(script), tasks_of(script)
    for launch in launches:
        if launch.through or (launch.kind == "python" and elsewhere):
            continue
        is_python = launch.kind == "python"
        if not is_python and launch.kind != "agent":
            continue
        if nodes > 1 or (tasks > 1 and is_python):
            requested = f"{nodes} nodes" if nodes > 1 else f"{tasks} tasks"
            yield problem(
                "only-first-node",
                f"the job requests {requested}, but this runs once, on the first node: "
                "the others are idle",
                "put srun before it",
                launch.line,
            )
            return


def _port_not_exported(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    port = script.last("MASTER_PORT")
    if not port or port.exported or _is_read(port, script):
        return
    for launch in launches:
        if launch.kind == "python" and launch.through and not _sets_port(launch):
            yield problem(
                "port-not-exported",
                "MASTER_PORT is set but not exported: the ranks do not get it",
                "put export before it",
                port.line,
            )
            return


def _is_read(port: Variable, script: Script) -> bool:
    return bool(re.search(rf"\$\{{?{port.name}\b(?!:?[-=])", script.body))


def _sets_port(launch: Launch) -> bool:
    inner = launch.inner and "MASTER_PORT" in launch.inner.text
    return bool(inner) or "MASTER_PORT" in launch.command.variables


def _fixed_port(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    if "exclusive" in script.options:
        return
    port = script.last("MASTER_PORT")
    found = _FIXED.fullmatch(port.value) if port and _is_used(port, script, launches) else None
    if port and found and found[1] != "0":
        yield _fixed(f"port {found[1]}", port.line)
    for launch in launches:
        given = _given_port(launch)
        if re.match(r"[1-9]", given):
            yield _fixed(f"port {given}", launch.line)


def _is_used(port: Variable, script: Script, launches: list[Launch]) -> bool:
    """Return whether ranks listen on this port; torchrun gives its ranks another one."""
    reads_it = any(launch.through and launch.kind in {"python", "other"} for launch in launches)
    return _is_read(port, script) or (port.exported and reads_it)


def _given_port(launch: Launch) -> str:
    endpoint = launch.options.get("rdzv-endpoint", "")
    if match := re.search(r"(?<=:)\d+$", endpoint):
        return match[0]
    if endpoint and ":" not in endpoint and "$" not in endpoint:
        return "29400 (default of c10d)"
    if "master-addr" in launch.options and not endpoint:
        return launch.options.get("master-port", "29500 (default of torchrun)")
    return ""


def _fixed(what: str, line: int) -> Finding:
    says = f"{what} is the same for all jobs: a second job on a node fails or joins the first job"
    return problem("fixed-port", says, _PORT_FIX, line)


def _late_options(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for line in script.late_options:
        yield problem(
            "late-option",
            "#SBATCH after the first command: Slurm ignores it",
            "move it to the top of the script",
            line,
        )


def _open_text(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for line, word in script.open_texts:
        yield problem(
            "open-text",
            f"no line {word} ends this here-document: the shell reads the rest of the script as its "
            "text, and runs none of it",
            f"put {word} at the start of a line of its own",
            line,
        )


def _wrong_address(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    addresses = []
    if variable := script.last("MASTER_ADDR"):
        addresses.append((variable.value, variable.line))
    for launch in launches:
        options = launch.options
        endpoint = options.get("rdzv-endpoint", "") or options.get("master-addr", "")
        addresses.append((endpoint, launch.line))
    for value, line in addresses:
        if re.match(r"\"?\$\{?SLURM_(JOB_|STEP_)?NODELIST\}?", value):
            yield problem(
                "wrong-address",
                "a node list such as n[1-4] is not an address",
                'use its first node: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                line,
            )
        elif nodes_of(script) > 1 and re.match(r"(localhost|127\.)", value):
            yield problem(
                "wrong-address",
                f"{value} means a different machine on every node",
                'use the first node: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                line,
            )


_RULES = (
    _rank_in_the_batch_shell, _read_too_early, _wrong_world_size, _several_agents, _no_rendezvous, _only_the_first_node, _port_not_exported,
    _fixed_port, _late_options, _open_text, _wrong_address, no_signal, signal_not_heard, ranks_left_behind, exit_code_lost,
    agents_for_other_nodes, ranks_and_gpus, cores_lost, different_in_each_task, environment_not_passed, conda_without_hook, unsafe_address,
)  # fmt: skip
