"""Which of the classic mistakes a batch script makes: each with its line, what happens, and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paceline.doctor.batch_parser import MARKED, Script, Variable, read_script
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

_OWN = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID"}
_PER_TASK = re.compile(rf"(?<!{MARKED})\$\{{?(SLURM_PROCID|SLURM_LOCALID|SLURM_NODEID)\b")
_FIXED = re.compile(r"(?:\$\{MASTER_PORT:?[-=])?(\d+)\}?")
_PORT_FIX = "derive it from the job: export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"
_ENDPOINT_FIX = (
    "--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=HOST:PORT, HOST being the first of "
    '`scontrol show hostnames "$SLURM_JOB_NODELIST"`'
)


def find_mistakes(text: str) -> list[Finding]:
    """Return the mistakes of a batch script, in the order of its lines."""
    script = read_script(text)
    launches = launches_of(script)
    found = [one for rule in _RULES for one in rule(script, launches)]
    return sorted(found, key=lambda one: one.line)


def _rank_in_the_batch_shell(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    hangs = any(
        one.through and one.kind in {"python", "other"} and tasks_of(script, one) > 1
        for one in launches
    )
    if not hangs and not any(one.kind == "agent" for one in launches):
        return
    own = [
        Variable(one.line, name, value, exported=True)
        for one in launches
        for name, value in one.command.variables.items()
    ]
    for one in [*script.variables, *own]:
        if one.exported and one.name in _OWN:
            yield _same_for_all(one, hangs=hangs)


def _same_for_all(one: Variable, *, hangs: bool) -> Finding:
    says = f"{one.name} is set in the batch shell, so all ranks get the same one ({one.value})"
    if hangs:
        says += " and wait for each other without a word"
        fix = f"set it in each task: srun bash -c 'export {one.name}=${_OWN[one.name]}; exec python ...', in single quotes"
    else:
        says += "; torchrun puts the right one in its place, and whatever else runs here is misled"
        fix = "leave it out: torchrun tells each rank its own"
    return problem("rank-in-batch-shell", says, fix, one.line)


def _read_too_early(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for one in launches:
        named = {
            name
            for name in re.findall(r"\$\{?(\w+)", one.text)
            if (v := script.last(name)) and _PER_TASK.search(v.value)
        }
        found = _PER_TASK.search(one.text)
        used = f"${found[1]}" if found else next((f"${name}" for name in sorted(named)), "")
        if used and one.through == "srun":
            yield problem(
                "rank-in-batch-shell",
                f"{used} in this command is read by the batch shell, where it is 0 for all tasks: they all say the same of themselves",
                "let each task read it: srun bash -c '... $SLURM_NODEID ...', in single quotes",
                one.line,
            )


def _wrong_world_size(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    size = script.last("WORLD_SIZE")
    said = number(script, size.value) if size else None
    for one in launches:
        tasks = tasks_of(script, one)
        if (
            size
            and size.exported
            and said
            and one.through == "srun"
            and one.kind == "python"
            and said != tasks
        ):
            yield problem(
                "world-size",
                f"WORLD_SIZE is {said}, but srun in line {one.line} starts {tasks} tasks: the ranks wait for others that never come",
                "leave it to the tasks: srun bash -c 'export WORLD_SIZE=$SLURM_NTASKS; exec python ...'",
                size.line,
            )


def _several_agents(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for one in launches:
        each = tasks_per_node(script, one)
        if one.through == "srun" and one.kind == "agent" and each > 1:
            yield problem(
                "several-agents",
                f"srun starts {each} agents on each node, and each of them starts all ranks of the node",
                "one agent a node: --ntasks-per-node=1 (and --nproc-per-node for the ranks)",
                one.line,
            )
        elif (
            one.through == "srun"
            and re.search(r"\bpaceline (run|train)\b", one.text)
            and tasks_of(script, one) > 1
        ):
            yield problem(
                "several-agents",
                f"srun starts this {tasks_of(script, one)} times, and each would start all ranks",
                "start it once, without srun: it uses all nodes of the job",
                one.line,
            )


def _no_rendezvous(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for one in launches:
        nodes = number(script, one.options.get("nnodes", "").rpartition(":")[2]) or nodes_of(
            script, one
        )
        met = {"rdzv-endpoint", "master-addr", "rdzv-conf"} & one.options.keys()
        if one.kind != "agent" or nodes < 2 or not one.through:
            continue
        if "standalone" in one.options or not met:
            how = "--standalone" if "standalone" in one.options else "without a rendezvous endpoint"
            yield problem(
                "no-rendezvous",
                f"{nodes} nodes, {how}: each agent takes itself for the first, and waits 15 minutes for the others",
                _ENDPOINT_FIX,
                one.line,
            )


def _only_the_first_node(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    elsewhere = any(one.through or one.kind == "paceline" for one in launches)
    nodes = nodes_of(script)
    tasks = tasks_of(script)
    for one in launches:
        alone = not one.through and (
            one.kind == "agent" or (one.kind == "python" and not elsewhere)
        )
        if alone and (nodes > 1 or (tasks > 1 and one.kind == "python")):
            what = f"{nodes} nodes" if nodes > 1 else f"{tasks} tasks"
            yield problem(
                "only-first-node",
                f"{what} were asked for, but this runs once, on the first node: the others idle, or are waited for in vain",
                "put srun before it",
                one.line,
            )
            return


def _port_not_used(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    port = script.last("MASTER_PORT")
    if not port or not launches or re.search(r"\$\{?MASTER_PORT\b(?!:?[-=])", script.body):
        return
    read = {"python", "other"} if port.exported else set[str]()
    if not any(
        one.kind in read or (one.inner and "MASTER_PORT" in one.inner.text) for one in launches
    ):
        why = (
            "torchrun tells its ranks a port of its own" if port.exported else "it is not exported"
        )
        yield problem(
            "port-not-used",
            f"MASTER_PORT is set, and nothing uses it: {why}",
            "pass it on: --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT, or leave it out",
            port.line,
        )


def _fixed_port(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    if "exclusive" in script.options:
        return
    port = script.last("MASTER_PORT")
    if port and (found := _FIXED.fullmatch(port.value)) and found[1] != "0":
        yield _fixed(f"port {found[1]}", port.line)
    for one in launches:
        endpoint = one.options.get("rdzv-endpoint", "")
        if found := re.search(r"(?<=:)\d+$", endpoint):
            given = found[0]
        elif endpoint and ":" not in endpoint and "$" not in endpoint:
            given = "29400 (c10d's own)"
        elif "master-addr" in one.options and not endpoint:
            given = one.options.get("master-port", "29500 (torchrun's own)")
        else:
            continue
        if re.match(r"[1-9]", given):
            yield _fixed(f"port {given}", one.line)


def _fixed(what: str, line: int) -> Finding:
    says = f"{what} is the same for all jobs: the second one on a node fails, or joins the first one's ranks"
    return problem("fixed-port", says, _PORT_FIX, line)


def _cores_lost(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    cores = number(script, script.value("cpus-per-task"))
    if not cores or cores < 2 or "SRUN_CPUS_PER_TASK" in {one.name for one in script.variables}:
        return
    for one in launches:
        if (
            one.through == "srun"
            and not {"cpus-per-task", "exact", "cpus-per-gpu"} & one.asked.keys()
        ):
            yield problem(
                "cores-lost",
                f"--cpus-per-task={cores} does not reach srun since Slurm 22.05: each task gets one core",
                'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" before it',
                one.line,
            )
            return


def _late_options(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for line in script.late_options:
        yield problem(
            "late-option",
            "#SBATCH after the first command: Slurm does not read it",
            "move it to the top of the script",
            line,
        )


def _open_text(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for line, word in script.open_texts:
        yield problem(
            "open-text",
            f"no line {word} ends this here-document: the shell takes all that follows for its text, and runs none of it",
            f"write {word} on a line of its own, at its beginning",
            line,
        )


def _wrong_address(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    address = script.last("MASTER_ADDR")
    for one in ([(address.value, address.line)] if address else []) + [
        (
            launch.options.get("rdzv-endpoint", "") or launch.options.get("master-addr", ""),
            launch.line,
        )
        for launch in launches
    ]:
        value, line = one
        if re.match(r"\"?\$\{?SLURM_(JOB_|STEP_)?NODELIST\}?", value):
            yield problem(
                "wrong-address",
                "a node list such as n[1-4] is no address",
                'take its first node: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                line,
            )
        elif nodes_of(script) > 1 and re.match(r"(localhost|127\.)", value):
            yield problem(
                "wrong-address",
                f"{value} is another machine on every node",
                'take the first node: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                line,
            )


_RULES = (
    _rank_in_the_batch_shell, _read_too_early, _wrong_world_size, _several_agents, _no_rendezvous, _only_the_first_node, _port_not_used,
    _fixed_port, _cores_lost, no_signal, signal_not_heard, _late_options, _open_text, _wrong_address, ranks_left_behind, exit_code_lost,
)  # fmt: skip
