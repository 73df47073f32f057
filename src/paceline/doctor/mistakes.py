"""The classic mistakes in batch scripts: each with its line, its effect, and the fix.

Here: ranks and their rendezvous. `job_mistakes` has the file, the resources, the time limit and the exit code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.doctor.batch_parser import MARKED, Script, Variable, read_script
from paceline.doctor.finding import Finding, problem
from paceline.doctor.job_mistakes import JOB_RULES, no_log_folder, unreadable_file
from paceline.doctor.launch_commands import (
    Launch,
    is_whole_node,
    launches_of,
    nodes_of,
    number,
    tasks_of,
    tasks_per_node,
)

_OWN = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID"}
_PER_TASK = re.compile(rf"(?<!{MARKED})\$\{{?(SLURM_PROCID|SLURM_LOCALID|SLURM_NODEID)\b")
_DRAWN_PER_TASK = re.compile(rf"{MARKED}\$[{{(]?(RANDOM|hostname|HOSTNAME|SLURMD_NODENAME)\b")
_RENDEZVOUS = re.compile(
    r"(--rdzv[-_](?:id|endpoint)|--master[-_]addr|MASTER_ADDR|MASTER_PORT)[= ]\S*"
)
_ADDRESS_OF_SRUN = re.compile(r"^\s*(?:export\s+)?(\w+)=\"?[$`]\(?\s*srun\b.*2>&1", re.MULTILINE)
_IP_ADDRESS = re.compile(r"\bhostname\s+(--ip-address|-i)\s*['\"]?\s*[)`]")
_PORT_FIX = "derive it from the job ID: export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"
_FIRST_NODE = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
_ENDPOINT_FIX = (
    "add --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=HOST:PORT; HOST is the first of "
    '`scontrol show hostnames "$SLURM_JOB_NODELIST"`'
)


def find_mistakes(text: str, folders: Sequence[Path] = (Path(),)) -> list[Finding]:
    """Return the mistakes in a batch script, ordered by line.

    `folders` are those from which it may be submitted: folders of logs are looked for there.
    """
    script = read_script(text.replace("\r\n", "\n"))
    unreadable = list(unreadable_file(text))
    findings = [*unreadable, *no_log_folder(script, folders)]
    if any(finding.check in {"syntax-error", "other-language"} for finding in unreadable):
        return sorted(findings, key=lambda finding: finding.line)
    launches = launches_of(script)
    for rule in (*_RULES, *JOB_RULES):
        findings += rule(script, launches)
    return sorted(findings, key=lambda finding: finding.line)


def _rank_in_the_batch_shell(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for launch in launches:
        direct = launch.through and launch.kind in {"python", "other"}
        if not direct or tasks_of(script, launch) < 2:
            continue
        own = launch.command.variables
        variables = [Variable(launch.line, name, own[name], exported=True) for name in own]
        variables += [one for one in script.variables if one.exported and one.name not in own]
        for variable in variables:
            if variable.name in _OWN and not _sets(launch, variable.name):
                yield _same_for_all(variable)
        return


def _sets(launch: Launch, name: str) -> bool:
    """Return whether the script that runs in each task sets a variable anew."""
    return launch.inner is not None and bool(re.search(rf"\b{name}=", launch.inner.text))


def _same_for_all(variable: Variable) -> Finding:
    name = variable.name
    task = f"export {name}=${_OWN[name]}; exec python ..."
    return problem(
        "rank-in-batch-shell",
        f"{name} is set in the batch shell, so all ranks get the same value ({variable.value}) "
        "and wait for each other forever",
        f"set it in each task, in single quotes: srun bash -c '{task}'",
        variable.line,
    )


def _read_too_early(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for launch in launches:
        name = _per_task_variable(script, launch)
        if name and launch.through == "srun" and tasks_of(script, launch) > 1:
            yield problem(
                "rank-in-batch-shell",
                f"the batch shell expands ${name} in this command, where it is 0: "
                "all tasks get the same value",
                "let each task expand it, in single quotes: srun bash -c '... $SLURM_NODEID ...'",
                launch.line,
            )


def _per_task_variable(script: Script, launch: Launch) -> str:
    """Return a variable of a launch whose value differs per task; empty if there is none."""
    if match := _PER_TASK.search(re.sub(r"\$\([^)]*\)|`[^`]*`", "", launch.text)):
        return match[1]
    return ""


def _wrong_world_size(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    size = script.last("WORLD_SIZE")
    value = number(script, size.value or "") if size and size.exported else None
    if not size or not value:
        return
    for launch in launches:
        tasks = tasks_of(script, launch)
        ranks = launch.through == "srun" and launch.kind == "python" and launch.is_complete
        if ranks and launch.trains and value != tasks and not _sets(launch, "WORLD_SIZE"):
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
                "start one agent per node: #SBATCH --ntasks-per-node=1, or srun --nodes=N --ntasks=N; "
                "and --nproc-per-node for the ranks",
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
    if any(variable.name.startswith("PET_") for variable in script.variables):
        return  # torchrun's options as environment variables
    for launch in launches:
        options = launch.options
        nodes = number(script, options.get("nnodes", "").rpartition(":")[2])
        nodes = nodes or nodes_of(script, launch)
        if launch.kind != "agent" or nodes < 2 or not launch.through or not launch.is_complete:
            continue
        standalone = "standalone" in options
        if standalone or not {"rdzv-endpoint", "master-addr", "rdzv-conf"} & options.keys():
            how = "with --standalone" if standalone else "without a rendezvous endpoint"
            effect = "each agent acts as the first, and waits 15 minutes for the others"
            if "nnodes" not in options:
                effect = "each node trains alone, and writes over the files of the others"
            yield problem(
                "no-rendezvous", f"{nodes} nodes {how}: {effect}", _ENDPOINT_FIX, launch.line
            )


def _agents_for_other_nodes(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find a torchrun whose --nnodes is not the number of nodes that it is started on."""
    for launch in launches:
        options, asked = launch.options, launch.asked
        one_of_several = launch.command.background or "nodelist" in asked
        is_known = "nodes" in script.options or "nodes" in asked
        if launch.kind != "agent" or not launch.through or one_of_several or not is_known:
            continue
        wanted, given = number(script, options.get("nnodes", "")), "nnodes" in options
        if not given and launch.is_complete and "rdzv-endpoint" in options:
            wanted = None if script.is_set("PET_NNODES") else 1
        nodes = nodes_of(script, launch)
        if not wanted or wanted == nodes:
            continue
        effect = "the agents wait for others that never start"
        if wanted < nodes:
            effect = "the agents that come late are refused, and their nodes are idle"
        yield problem(
            "wrong-nnodes",
            f"--nnodes={wanted}{'' if given else ' (the default)'}, but the agents start on {nodes} "
            f"nodes: {effect}",
            "use --nnodes=$SLURM_NNODES",
            launch.line,
        )


def _only_the_first_node(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    nodes = nodes_of(script)
    reaching = {"deepspeed", "paceline"}
    if nodes < 2 or any(launch.through or launch.kind in reaching for launch in launches):
        return
    if any(command.words[0] in {"ray", "parallel", "horovodrun"} for command in script.commands):
        return
    for launch in launches:
        if launch.trains and not launch.command.branches:
            yield problem(
                "only-first-node",
                f"the job requests {nodes} nodes, but this runs once, on the first node: "
                "the others are idle",
                "put srun before it",
                launch.line,
            )
            return


def _port_not_exported(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    port = script.last("MASTER_PORT")
    is_read = re.search(r"\$\{?MASTER_PORT\b(?!:?[-=])", script.body)
    everything = any(command.words[:2] == ("set", "-a") for command in script.commands)
    if not port or port.exported or is_read or everything:
        return
    for launch in launches:
        sets = _sets(launch, "MASTER_PORT") or "MASTER_PORT" in launch.command.variables
        if launch.kind == "python" and launch.through and not sets:
            yield problem(
                "port-not-exported",
                "MASTER_PORT is set but not exported: the ranks do not get it",
                "put export before it",
                port.line,
            )
            return


def _fixed_port(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    if is_whole_node(script, launches):
        return
    found: dict[int, str] = {}
    for launch in launches:
        port, default = _port_of(script, launch)
        if re.fullmatch(r"[1-9]\d*", port):
            line = launch.line if default else _line_of(script, rf":?\D*{port}\}}?", launch.line)
            found.setdefault(line, f"port {port}{default}")
    for line, what in found.items():
        says = (
            f"{what} is the same for all jobs: a second job on a node fails or joins the first job"
        )
        yield problem("fixed-port", says, _PORT_FIX, line)


def _line_of(script: Script, value: str, line: int) -> int:
    """Return the line of the variable that has a value, else another line."""
    for variable in reversed(script.variables):
        if variable.line <= line and re.fullmatch(value, (variable.value or "").strip(' "')):
            return variable.line
    return line


def _port_of(script: Script, launch: Launch) -> tuple[str, str]:
    """Return the port on which the first rank or agent listens, and which default it is, if it is one."""
    options = launch.options
    if launch.kind == "python":
        own = launch.command.variables.get("MASTER_PORT", "")
        variable = script.last("MASTER_PORT")
        if variable and variable.exported and not own and not _sets(launch, "MASTER_PORT"):
            own = variable.value or ""
        return script.expand(own).strip(), ""
    if launch.kind != "agent" or "standalone" in options:
        return "", ""
    endpoint = script.expand(options.get("rdzv-endpoint", ""))
    if endpoint:
        # Without its substitutions; what is left of an unknown variable may hold a port.
        plain = re.sub(r"\$\([^()]*(\([^()]*\)[^()]*)*\)|`[^`]*`|\$\{\w+\[\d+\]\}", "", endpoint)
        if match := re.search(r":\"?(\d+)\"?$", plain):
            return match[1], ""
        is_named = ":" not in plain and "$" not in plain
        return ("29400", " (default of c10d)") if is_named else ("", "")
    port = script.expand(options.get("master-port", ""))
    alone = options.get("nnodes", "1") == "1"  # then torchrun chooses a free port
    if not port and not alone and "master-addr" in options and "rdzv-conf" not in options:
        return "29500", " (default of torchrun)"
    return port, ""


def _wrong_address(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    seen: set[int] = set()
    for launch in launches:
        options = launch.options
        address = options.get("rdzv-endpoint", "") or options.get("master-addr", "")
        variable = script.last("MASTER_ADDR")
        if launch.kind != "agent" and variable and variable.exported and launch.through:
            address = "$MASTER_ADDR"
        value = script.expand(address)
        found = _address_mistake(value, several_nodes=nodes_of(script) > 1)
        if found:
            says, pattern = found
            line = _line_of(script, pattern, launch.line)
            if line not in seen:
                yield problem(
                    "wrong-address", says, f"use the name of the first node: {_FIRST_NODE}", line
                )
            seen.add(line)
    for match in _ADDRESS_OF_SRUN.finditer(script.text):
        yield problem(
            "wrong-address",
            f"2>&1 adds the warnings of srun to {match[1]}",
            "remove 2>&1",
            script.text.count("\n", 0, match.start(1)) + 1,
        )


def _address_mistake(value: str, *, several_nodes: bool) -> tuple[str, str] | None:
    """Return what is wrong with an address, and a pattern of the variable that holds it."""
    if match := re.match(r"\"?\$\{?SLURM_(JOB_|STEP_)?NODELIST\}?", value):
        return "a node list such as n[1-4] is not an address", rf"{re.escape(match[0])}.*"
    if not several_nodes:
        return None
    if match := re.match(r"localhost|127\.[\d.]+", value):
        says = f"{match[0]} means a different machine on every node"
        return says, rf"{re.escape(match[0])}.*"
    if _IP_ADDRESS.search(value):
        says = "`hostname --ip-address` may print 127.0.1.1, or several addresses"
        return says, rf"(?s).*{_IP_ADDRESS.pattern}.*"
    return None


def _different_in_each_task(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find an address or a rendezvous ID that every task computes for itself."""
    for launch in launches:
        for place in _RENDEZVOUS.finditer(launch.text):
            several = launch.through and tasks_of(script, launch) > 1
            if several and (found := _DRAWN_PER_TASK.search(place[0])):
                yield problem(
                    "different-in-each-task",
                    f"each task expands {found[1]} in {place[1]} for itself: "
                    "they get different values, and the rendezvous fails",
                    "compute it once in the batch shell, and export it",
                    launch.line,
                )


_RULES = (
    _rank_in_the_batch_shell, _read_too_early, _wrong_world_size, _several_agents, _no_rendezvous, _agents_for_other_nodes,
    _only_the_first_node, _port_not_exported, _fixed_port, _wrong_address, _different_in_each_task,
)  # fmt: skip
