"""The doctor finds the classic mistakes in batch scripts, with their lines, and none in good scripts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.doctor.batch_parser import read_script
from paceline.doctor.launch_commands import launches_of, nodes_of, tasks_of
from paceline.doctor.mistakes import find_mistakes

HEAD = "#!/bin/bash\n#SBATCH --nodes=2 --time=1:00:00 --signal=USR1@120"  # lines 1 and 2
ADDRESS = """nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes%%$'\\n'*}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"""
TORCHRUN = "torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT train.py"
INSIDE = "bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec python train.py'"

GOOD = {
    "an agent a node": f"{HEAD}\n#SBATCH --ntasks-per-node=1\n{ADDRESS}\nsrun {TORCHRUN}",
    "a rank a task": f"{HEAD}\n#SBATCH --ntasks-per-node=4\n{ADDRESS}\nsrun --kill-on-bad-exit=1 {INSIDE}",
    "quotes over lines": f"{HEAD}\n#SBATCH --ntasks-per-node=4\n{ADDRESS}\nsrun -K {INSIDE.replace('; ', chr(10))}",
    "cores passed on": f"{HEAD}\n#SBATCH -c 8\n{ADDRESS}\nexport SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\nsrun {TORCHRUN}",
    "cores given to srun": f"{HEAD}\n#SBATCH -c 8\n{ADDRESS}\nsrun -c $SLURM_CPUS_PER_TASK {TORCHRUN}",
    "continued lines": f"{HEAD}\n{ADDRESS}\nsrun --label \\\n  {TORCHRUN.replace(' --rdzv-id', ' ' + chr(92) + chr(10) + '  --rdzv-id')}",
    "a fixed port where the nodes are ours": f"{HEAD}\n#SBATCH --exclusive\n{ADDRESS}\nexport MASTER_PORT=29500\nsrun {TORCHRUN}",
    "alone": "#!/bin/bash\n#SBATCH --time=60 --signal=USR1@60\nset -e\nsrun torchrun --standalone --nproc-per-node=4 train.py\necho done",
    "the code kept": f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN}\ncode=$?\ndate\nexit $code",
    "a trap that is run": f"{HEAD.replace('USR1', 'B:USR1')}\n{ADDRESS}\ntrap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\nsrun {TORCHRUN} &\nwait",
    "paceline run": "#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=4 -c 4\npaceline run train.py epochs=3",
    "data first": f"{HEAD}\n{ADDRESS}\npython fetch.py || exit 1\nsrun {TORCHRUN}",
    "a container": f"{HEAD}\n{ADDRESS}\nsrun apptainer exec --nv image.sif {TORCHRUN}",
    "ssh": f"{HEAD}\n{ADDRESS}\nfor n in $nodes; do ssh $n {TORCHRUN} & done\nwait",
    "text for another program": f"{HEAD}\n{ADDRESS}\ncat > x.sh <<EOF\nexport RANK=$SLURM_PROCID\nsrun python x.py # don't\nEOF\nsrun {TORCHRUN}",
    "comments": f"{HEAD}\n# export RANK=$SLURM_PROCID\n{ADDRESS} # MASTER_PORT=29500, don't\nsrun {TORCHRUN} # it's all",
    "other things of two or three signs": f"{HEAD}\n{ADDRESS}\nread a <<< word; echo '<<EOF' \"<<EOF\" $((1<<a)) # <<EOF\n((b = a<<a))\nsrun {TORCHRUN}",
    "two texts": f"{HEAD}\n{ADDRESS}\ncat <<A <<-'B B' > x.sh\nexport RANK=$SLURM_PROCID\nA\nsrun python x.py\n\tB B\nsrun {TORCHRUN}",
    "a text in quotes": f'{HEAD}\n{ADDRESS}\nx="$(cat <<EOF\nexport RANK=0\nEOF\n)"\nsrun {TORCHRUN}',
    "a port that torchrun does not use": f"{HEAD}\n{ADDRESS}\nexport MASTER_PORT=29500\nsrun torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:$((20000 + SLURM_JOB_ID % 9999)) train.py",
    "a port that nothing uses": f"{HEAD}\nMASTER_PORT=29500\npaceline run train.py",
    "as many ranks as GPUs": f"{HEAD}\n#SBATCH --gres=gpu:a100:4,lscratch:50\n{ADDRESS}\nsrun {TORCHRUN}",
    "two GPUs for each task": f"{HEAD}\n#SBATCH --gpus-per-node=8 --ntasks-per-node=4\n{ADDRESS}\nsrun -K {INSIDE}",
    "fewer or more nodes": f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN.replace('$SLURM_NNODES', '1:4')}",
    "an srun per node": f"{HEAD}\n{ADDRESS}\nfor n in $nodes; do srun -N 1 -n 1 -w $n {TORCHRUN.replace('$SLURM_NNODES', '2')} & done\nwait",
    "the batch shell's number": f"{HEAD}\n{ADDRESS}\nsrun bash -c \"{TORCHRUN.replace('$SLURM_JOB_ID', '$RANDOM')}\"",
    "another variable of that name": f"{HEAD}\n#SBATCH --export=ALL,NONE_OF_THEM=1\n{ADDRESS}\nsrun {TORCHRUN}",
    "the environment passed on": f"{HEAD}\n#SBATCH --export=NONE\n{ADDRESS}\nexport SLURM_EXPORT_ENV=ALL\nsrun {TORCHRUN}",
    "conda with its hook": f'{HEAD}\n{ADDRESS}\neval "$(conda shell.bash hook)"\nconda activate torch\nsrun {TORCHRUN}',
    "cores for --exact": f"{HEAD}\n#SBATCH -c 8\n{ADDRESS}\nsrun --exact -c 8 {TORCHRUN}",
    "a log beside the script": f"{HEAD}\n#SBATCH --output=%j.log --error=/tmp/%u/%j.err\n{ADDRESS}\nsrun {TORCHRUN}",
    "nothing": "",
    "not a training": "#!/bin/bash\n#SBATCH -N 2\nsrun hostname",
}  # fmt: skip

BAD = {
    "RANK in the batch shell": (
        f"{HEAD}\n#SBATCH --ntasks-per-node=2\n{ADDRESS}\nexport RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS\nsrun -K python train.py",
        {"rank-in-batch-shell": [7]},
    ),
    "RANK exported later": (
        f"{HEAD}\n#SBATCH -n 4\n{ADDRESS}\nRANK=$SLURM_PROCID\nexport RANK\nsrun -K python train.py", {"rank-in-batch-shell": [7]},
    ),
    "RANK for one command": (f"{HEAD}\n#SBATCH -n 4\n{ADDRESS}\nRANK=$SLURM_PROCID srun -K python train.py", {"rank-in-batch-shell": [7]}),
    "RANK for an agent": (f"{HEAD}\n{ADDRESS}\nexport RANK=$SLURM_PROCID\nsrun {TORCHRUN}", {"rank-in-batch-shell": [6]}),
    "double quotes": (f"{HEAD}\n#SBATCH -n 4\n{ADDRESS}\nsrun -K " + INSIDE.replace("'", '"'), {"rank-in-batch-shell": [7]}),
    "the node's number in the batch shell": (
        f"{HEAD}\n{ADDRESS}\nsrun torchrun --nnodes 2 --node-rank=$SLURM_NODEID --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT train.py",
        {"rank-in-batch-shell": [6]},
    ),
    "the node's number in a variable": (
        f"{HEAD}\n{ADDRESS}\nNODE_RANK=$SLURM_NODEID\nsrun torchrun --nnodes 2 --node-rank=$NODE_RANK --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT train.py",
        {"rank-in-batch-shell": [7]},
    ),
    "a world of another size": (f"{HEAD}\n#SBATCH -n 8\n{ADDRESS}\nexport WORLD_SIZE=$SLURM_NNODES\nsrun -K python train.py", {"world-size": [7]}),
    "several agents": (f"{HEAD}\n#SBATCH --ntasks-per-node=4\n{ADDRESS}\nsrun {TORCHRUN}", {"several-agents": [7]}),
    "several agents by srun's own words": (f"{HEAD}\n{ADDRESS}\nsrun -n 8 python -m {TORCHRUN.replace('torchrun', 'torch.distributed.run')}", {"several-agents": [6]}),
    "paceline many times": ("#!/bin/bash\n#SBATCH -N 2\nsrun paceline run train.py", {"several-agents": [3]}),
    "no endpoint": (f"{HEAD}\nsrun torchrun --nnodes=2 --nproc-per-node=4 train.py", {"no-rendezvous": [3]}),
    "standalone on two nodes": (f"{HEAD}\nsrun torchrun --standalone --nproc-per-node 4 train.py", {"no-rendezvous": [3]}),
    "without srun": (f"{HEAD}\n{ADDRESS}\n{TORCHRUN}", {"only-first-node": [6], "signal-not-heard": [2]}),
    "python without srun": ("#!/bin/bash\n#SBATCH -n 4 --signal=B:USR1@60\ntrap 'touch stop' USR1\npython train.py &\nwait", {"only-first-node": [4]}),
    "a port that is not exported": (
        f"{HEAD}\n#SBATCH -n 4\n{ADDRESS.replace('export MASTER_PORT', 'MASTER_PORT')}\nsrun -K {INSIDE}", {"port-not-exported": [6]},
    ),
    "cores lost": (f"{HEAD}\n#SBATCH --cpus-per-task=8\n{ADDRESS}\nsrun {TORCHRUN}", {"cores-lost": [7]}),
    "a fixed port": (f"{HEAD}\n{ADDRESS}\nexport MASTER_PORT=29500\nsrun {TORCHRUN}", {"fixed-port": [6]}),
    "a fixed port unless given": (f"{HEAD}\n{ADDRESS}\nexport MASTER_PORT=${{MASTER_PORT:-12345}}\nsrun {TORCHRUN}", {"fixed-port": [6]}),
    "a fixed endpoint": (f"{HEAD}\nhost=$(hostname)\nsrun torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$host:29400 train.py", {"fixed-port": [4]}),
    "torchrun's own port": (f"{HEAD}\nhost=$(hostname)\nsrun bash -c 'torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr='$host' train.py'", {"fixed-port": [4]}),
    "no signal": (f"#!/bin/bash\n#SBATCH -N 2\n#SBATCH -t 60\n{ADDRESS}\nsrun {TORCHRUN}", {"no-signal": [3]}),
    "a signal for the shell alone": (f"{HEAD.replace('USR1', 'B:USR1')}\n{ADDRESS}\nsrun {TORCHRUN}", {"signal-not-heard": [2]}),
    "a trap that waits": (f"{HEAD.replace('USR1', 'B:USR1')}\n{ADDRESS}\ntrap 'touch stop' USR1\nsrun {TORCHRUN}", {"signal-not-heard": [7]}),
    "options too late": (f"{HEAD}\n{ADDRESS}\n#SBATCH --gres=gpu:4\nsrun {TORCHRUN}", {"late-option": [6]}),
    "after a here-string": (f'{HEAD}\n{ADDRESS}\nread a <<< "word"\nexport RANK=$SLURM_PROCID\nsrun {TORCHRUN}', {"rank-in-batch-shell": [7]}),
    "after a shift": (f"{HEAD}\n{ADDRESS}\na=$((1<<X))\nexport RANK=$SLURM_PROCID\nsrun {TORCHRUN}", {"rank-in-batch-shell": [7]}),
    "a list of nodes as an address": (f"{HEAD}\n{ADDRESS}\nexport MASTER_ADDR=$SLURM_JOB_NODELIST\nsrun {TORCHRUN}", {"wrong-address": [6]}),
    "localhost": (f"{HEAD}\n{ADDRESS}\nexport MASTER_ADDR=localhost\nsrun {TORCHRUN}", {"wrong-address": [6]}),
    "others wait for a rank that failed": (f"{HEAD}\n#SBATCH -n 4\n{ADDRESS}\nsrun {INSIDE}", {"ranks-left-behind": [7]}),
    "a failure that nobody sees": (f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN}\necho done", {"exit-code-lost": [6]}),
    "more nodes than the job has": (f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN.replace('$SLURM_NNODES', '4')}", {"wrong-nnodes": [6]}),
    "fewer nodes than the job has": (f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN.replace('$SLURM_NNODES', '1')}", {"wrong-nnodes": [6]}),
    "more ranks than GPUs": (f"{HEAD}\n#SBATCH --gpus-per-node=2\n{ADDRESS}\nsrun {TORCHRUN}", {"ranks-and-gpus": [7]}),
    "fewer ranks than GPUs": (f"{HEAD}\n#SBATCH -G 16\n{ADDRESS}\nsrun {TORCHRUN}", {"ranks-and-gpus": [7]}),
    "more tasks than GPUs": (f"{HEAD}\n#SBATCH --gres=gpu:2 --ntasks-per-node=4\n{ADDRESS}\nsrun -K {INSIDE}", {"ranks-and-gpus": [7]}),
    "a log folder that is not there": (f"{HEAD}\n#SBATCH --output=no-such-folder/%j.log\n{ADDRESS}\nsrun {TORCHRUN}", {"no-log-folder": [3]}),
    "an ID in each task": (f"{HEAD}\n{ADDRESS}\nsrun bash -c '{TORCHRUN.replace('$SLURM_JOB_ID', '$RANDOM')}'", {"different-in-each-task": [6]}),
    "an address in each task": (
        f"{HEAD}\n#SBATCH -n 4\n{ADDRESS}\nsrun -K bash -c 'export MASTER_ADDR=$(hostname) RANK=$SLURM_PROCID; exec python train.py'",
        {"different-in-each-task": [7]},
    ),
    "an environment that is kept back": (f"{HEAD}\n#SBATCH --export=NONE\n{ADDRESS}\nsrun {TORCHRUN}", {"environment-not-passed": [3]}),
    "an environment that srun keeps back": (f"{HEAD}\n{ADDRESS}\nsrun --export=NONE {TORCHRUN}", {"environment-not-passed": [6]}),
    "conda without its hook": (f"{HEAD}\n{ADDRESS}\nconda activate torch\nsrun {TORCHRUN}", {"conda-without-hook": [6]}),
    "warnings in an address": (
        f"{HEAD}\n{ADDRESS}\nexport MASTER_ADDR=$(srun -N1 -n1 hostname 2>&1 | head -n 1)\nsrun {TORCHRUN}", {"wrong-address": [6]},
    ),
    "one core for --exact": (f"{HEAD}\n#SBATCH -c 8\n{ADDRESS}\nsrun --exact {TORCHRUN}", {"cores-lost": [7]}),
    "DOS line ends": (f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN}".replace("\n", "\r\n"), {"dos-line-ends": [1]}),
    "no interpreter": (f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN}".replace("#!/bin/bash\n", ""), {"no-interpreter": [1]}),
    "the tutorial's": (
        "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks=4\n#SBATCH --gpus-per-task=1\n#SBATCH --cpus-per-task=4\n\n"  # noqa: ISC004
        "nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )\nnodes_array=($nodes)\nhead_node=${nodes_array[0]}\n"
        'head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)\n\necho Node IP: $head_node_ip\nexport LOGLEVEL=INFO\n\n'
        "srun torchrun \\\n--nnodes 4 \\\n--nproc_per_node 1 \\\n--rdzv_id $RANDOM \\\n--rdzv_backend c10d \\\n"
        "--rdzv_endpoint $head_node_ip:29500 \\\n/shared/multinode_torchrun.py 50 10",
        {"wrong-address": [10], "cores-lost": [15], "fixed-port": [15], "no-signal": [15]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_a_good_script_is_left_in_peace(text: str) -> None:
    assert find_mistakes(text) == []


@pytest.mark.parametrize(("text", "expected"), BAD.values(), ids=BAD)
def test_a_mistake_is_named_with_its_line_and_its_fix(
    text: str, expected: dict[str, list[int]]
) -> None:
    found: dict[str, list[int]] = {}
    for one in find_mistakes(text):
        assert one.fix and not one.ok
        found.setdefault(one.check, []).append(one.line)
    assert found == expected


def test_a_text_without_an_end_does_not_hide_the_rest() -> None:
    text = f"{HEAD}\n{ADDRESS}\ncat <<EOF\nexport RANK=$SLURM_PROCID\nsrun {TORCHRUN}"
    assert [(one.check, one.line) for one in find_mistakes(text)] == [
        ("open-text", 6),
        ("rank-in-batch-shell", 7),
    ]


ENDLESS = {
    "nodes that are themselves": "#SBATCH --nodes=$SLURM_NNODES\nsrun python x.py",
    "tasks that are themselves": "#SBATCH --ntasks=$SLURM_NTASKS\nsrun python x.py",
    "each by the other": "#SBATCH --nodes=$SLURM_NTASKS --ntasks-per-node=$SLURM_NNODES\nsrun python x.py",
    "thousands of digits": f"#SBATCH -N {'9' * 5000} --gres=gpu:{'9' * 5000} --gpus-per-task=1\nsrun python x.py",
    "thousands of factors": f"A=$(({'*'.join('A' * 7000)}))\nsrun -n $A python x.py",
    "a product that grows": "A=999999999\nB=$((A*A*A*A))\nC=$((B*B*B*B))\nsrun -n $C python x.py",
}


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_a_number_without_an_end_is_one(text: str) -> None:
    script = read_script(text)
    (launch,) = launches_of(script)
    assert (nodes_of(script, launch), tasks_of(script, launch)) == (1, 1)
    find_mistakes(text)


@pytest.mark.parametrize(
    "script",
    sorted((Path(__file__).parents[1] / "cluster" / "expected").glob("*.sh")),
    ids=lambda file: file.stem,
)
def test_what_paceline_submits_has_no_mistake(script: Path) -> None:
    assert find_mistakes(script.read_text()) == []


@pytest.mark.parametrize("text", [*GOOD.values(), *(text for text, _ in BAD.values())])
def test_these_scripts_are_what_bash_can_read(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "text",
    [
        "'",
        '"',
        "x=(",
        "srun \\",
        "#SBATCH '",
        "<<EOF",
        "srun",
        "srun -n",
        "export",
        "$(",
        "a=$((",
        "bash -c",
        "srun bash -c",
        "\0",
        "é=1 srun python",
    ],
)
def test_what_is_no_script_does_no_harm(text: str) -> None:
    find_mistakes(text)
