"""The doctor finds the classic mistakes in batch scripts, with their lines, and none in good scripts."""

from __future__ import annotations

import subprocess
from pathlib import Path

from paceline.doctor.batch_parser import read_script
from paceline.doctor.launch_commands import launches_of, nodes_of, tasks_of
from paceline.doctor.mistakes import find_mistakes

HEAD = "#!/bin/bash\n#SBATCH --nodes=2 --time=1:00:00 --signal=USR1@120"  # lines 1 and 2
ADDRESS = """nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes%%$'\\n'*}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"""
TORCHRUN = "torchrun --signals-to-handle=SIGTERM,SIGUSR1 --nnodes=$SLURM_NNODES --nproc-per-node=4 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT train.py"
INSIDE = "bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec python train.py'"

GOOD = {
    "an agent a node": f"{HEAD}\n#SBATCH --ntasks-per-node=1\n{ADDRESS}\nsrun {TORCHRUN}",
    "a rank a task": f"{HEAD}\n#SBATCH --ntasks-per-node=4\n{ADDRESS}\nsrun --kill-on-bad-exit=1 {INSIDE}",
    "quotes over lines": f"{HEAD}\n#SBATCH --ntasks-per-node=4\n{ADDRESS}\nsrun -K {INSIDE.replace('; ', chr(10))}",
    "cores passed on": f"{HEAD}\n#SBATCH -c 8\n{ADDRESS}\nexport SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\nsrun {TORCHRUN}",
    "cores given to srun": f"{HEAD}\n#SBATCH -c 8\n{ADDRESS}\nsrun -c $SLURM_CPUS_PER_TASK {TORCHRUN}",
    "continued lines": f"{HEAD}\n{ADDRESS}\nsrun --label \\\n  {TORCHRUN.replace(' --rdzv-id', ' ' + chr(92) + chr(10) + '  --rdzv-id')}",
    "a fixed port where the nodes are ours": f"{HEAD}\n#SBATCH --exclusive\n{ADDRESS}\nexport MASTER_PORT=29500\nsrun {TORCHRUN}",
    "alone": "#!/bin/bash\n#SBATCH --time=60 --signal=USR1@60\nset -e\nsrun torchrun --signals-to-handle=SIGUSR1 --standalone --nproc-per-node=4 train.py\necho done",
    "the code kept": f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN}\ncode=$?\ndate\nexit $code",
    "a trap that is run": f"{HEAD.replace('USR1', 'B:USR1')}\n{ADDRESS}\ntrap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\nsrun {TORCHRUN} &\nstep=$!\nwait $step",
    "paceline run": "#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=4 -c 4\npaceline run train.py epochs=3",
    "data first": f"{HEAD}\n{ADDRESS}\npython fetch.py || exit 1\nsrun {TORCHRUN}",
    "a container": f"{HEAD}\n{ADDRESS}\nsrun apptainer exec --nv image.sif {TORCHRUN}",
    "ssh": f"{HEAD}\n{ADDRESS}\nfor n in $nodes; do ssh $n {TORCHRUN} & done\nwait -n",
    "text for another program": f"{HEAD}\n{ADDRESS}\ncat > x.sh <<EOF\nexport RANK=$SLURM_PROCID\nsrun python x.py # don't\nEOF\nsrun {TORCHRUN}",
    "comments": f"{HEAD}\n# export RANK=$SLURM_PROCID\n{ADDRESS} # MASTER_PORT=29500, don't\nsrun {TORCHRUN} # it's all",
    "other things of two or three signs": f"{HEAD}\n{ADDRESS}\nread a <<< word; echo '<<EOF' \"<<EOF\" $((1<<a)) # <<EOF\n((b = a<<a))\nsrun {TORCHRUN}",
    "two texts": f"{HEAD}\n{ADDRESS}\ncat <<A <<-'B B' > x.sh\nexport RANK=$SLURM_PROCID\nA\nsrun python x.py\n\tB B\nsrun {TORCHRUN}",
    "a text in quotes": f'{HEAD}\n{ADDRESS}\nx="$(cat <<EOF\nexport RANK=0\nEOF\n)"\nsrun {TORCHRUN}',
    "a port that torchrun does not use": f"{HEAD}\n{ADDRESS}\nexport MASTER_PORT=29500\nsrun torchrun --signals-to-handle=SIGUSR1 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:$((20000 + SLURM_JOB_ID % 9999)) train.py",
    "a port that nothing uses": f"{HEAD}\nMASTER_PORT=29500\npaceline run train.py",
    "as many ranks as GPUs": f"{HEAD}\n#SBATCH --gres=gpu:a100:4,lscratch:50\n{ADDRESS}\nsrun {TORCHRUN}",
    "two GPUs for each task": f"{HEAD}\n#SBATCH --gpus-per-node=8 --ntasks-per-node=4\n{ADDRESS}\nsrun -K {INSIDE}",
    "fewer or more nodes": f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN.replace('$SLURM_NNODES', '1:4')}",
    "an srun per node": f"{HEAD}\n{ADDRESS}\nfor n in $nodes; do srun -N 1 -n 1 -w $n {TORCHRUN.replace('$SLURM_NNODES', '2')} & done\nwait -n",
    "the batch shell's number": f"{HEAD}\n{ADDRESS}\nsrun bash -c \"{TORCHRUN.replace('$SLURM_JOB_ID', '$RANDOM')}\"",
    "another variable of that name": f"{HEAD}\n#SBATCH --export=ALL,NONE_OF_THEM=1\n{ADDRESS}\nsrun {TORCHRUN}",
    "the environment passed on": f"{HEAD}\n#SBATCH --export=NONE\n{ADDRESS}\nexport SLURM_EXPORT_ENV=ALL\nsrun {TORCHRUN}",
    "conda with its hook": f'{HEAD}\n{ADDRESS}\neval "$(conda shell.bash hook)"\nconda activate torch\nsrun {TORCHRUN}',
    "cores for --exact": f"{HEAD}\n#SBATCH -c 8\n{ADDRESS}\nsrun --exact -c 8 {TORCHRUN}",
    "a log beside the script": f"{HEAD}\n#SBATCH --output=%j.log --error=/tmp/%u/%j.err\n{ADDRESS}\nsrun {TORCHRUN}",
    "nothing": "",
    "not a training": "#!/bin/bash\n#SBATCH -N 2\nsrun hostname",
}  # fmt: skip

GOOD |= {
    "torchrun's arguments in an array": f'{HEAD}\n{ADDRESS}\ndeclare -a ARGS=(\n  --nnodes=$SLURM_NNODES  # all of them\n  --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT\n)\nARGS+=(--signals-to-handle=SIGUSR1)\nsrun torchrun "${{ARGS[@]}}" train.py',
    "torchrun's arguments in variables": f'{HEAD}\n{ADDRESS}\nARGS="--nnodes $SLURM_NNODES --signals-to-handle=SIGUSR1"\nARGS="$ARGS --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT"\nCMD="torchrun $ARGS train.py"\nsrun bash -c "$CMD"',
    "torchrun's arguments from elsewhere": f"{HEAD}\n. ./arguments.sh\nsrun torchrun $ARGS train.py",
    "torchrun's arguments in one of two branches": f"{HEAD}\nif [ -n \"$X\" ]; then ARGS='--nnodes 2'; else ARGS='--nnodes 2 --rdzv-endpoint a:1'; fi\nsrun torchrun $ARGS train.py",
    "two branches": f"{HEAD}\n{ADDRESS}\nif [ $SLURM_NNODES -gt 1 ]; then\n  srun {TORCHRUN}\nelse\n  torchrun --standalone train.py\nfi",
    "cores of a plain srun": f"{HEAD}\n#SBATCH --cpus-per-task=8\n{ADDRESS}\nsrun {TORCHRUN}",
    "a function that is called last": f"{HEAD}\n{ADDRESS}\ntrain() {{\n  srun {TORCHRUN}\n}}\nprepare() {{ mkdir -p out; }}\nprepare\ntrain",
    "a port that torchrun ignores": f"{HEAD}\n{ADDRESS.replace('MASTER_PORT', 'OTHER_PORT')}\nexport MASTER_PORT=29500\necho $MASTER_PORT\nsrun {TORCHRUN.replace('MASTER_PORT', 'OTHER_PORT')}",
    "a fixed port on a whole node": f"{HEAD}\n#SBATCH --gres=gpu:8\n{ADDRESS}\nexport MASTER_PORT=29500\nsrun {TORCHRUN.replace('=4', '=8')}",
    "tasks on one node": "#!/bin/bash\n#SBATCH -N 1 -n 4 --signal=B:USR1@60\ntrap 'kill -USR1 $pid' USR1\npython train.py &\npid=$!\nwait $pid",
    "conda after source activate": f"{HEAD}\n{ADDRESS}\nsource activate base\nconda activate torch\nsrun {TORCHRUN}",
    "conda by a module": f"{HEAD}\n{ADDRESS}\nmodule load gcc anaconda3/2023.9\nconda activate torch\nsrun {TORCHRUN}",
    "logs on another machine": f"{HEAD}\n#SBATCH -o /no-such-scratch/me/logs/%j.log\n{ADDRESS}\nsrun {TORCHRUN}",
    "the rank in each task": f'{HEAD}\n#SBATCH -n 4\n{ADDRESS}\nCMD="python -u train.py"\nsrun -K bash -c "RANK=\\$SLURM_PROCID LOCAL_RANK=\\$SLURM_LOCALID $CMD"',
    "arguments of a step in a variable": f"{HEAD}\n#SBATCH -n 4\n{ADDRESS}\nARGS='--wait=60 --kill-on-bad-exit=1'\nsrun $ARGS {INSIDE}",
    "RANK that torchrun sets anew": f"{HEAD}\n{ADDRESS}\nexport RANK=$SLURM_PROCID\nsrun {TORCHRUN}",
    "nodes given to sbatch": f"#!/bin/bash\n#SBATCH --signal=USR1@60\n{ADDRESS}\nsrun {TORCHRUN.replace('$SLURM_NNODES', '2')}",
    "GPUs per node, counted by Slurm": f"{HEAD}\n#SBATCH --gres=gpu:4\n{ADDRESS}\nsrun {TORCHRUN.replace('=4', '=$SLURM_GPUS_ON_NODE')}",
    "several tasks on one GPU": "#!/bin/bash\n#SBATCH --gres=gpu:1 --ntasks-per-node=2 --signal=USR1@60\nsrun -K python main.py",
    "an image that is built": "#!/bin/bash\n#SBATCH -N 2\ndocker build -t deepspeed .",
    "a script in a text": f"{HEAD}\n{ADDRESS}\ncat <<END > job.sh\n#SBATCH -N 3\nsrun python train.py\nEND\nsrun {TORCHRUN}",
    "a pipe whose failure counts": f"{HEAD}\nset -eo pipefail\n{ADDRESS}\nsrun {TORCHRUN} 2>&1 | tee log\necho done",
    "a wrapper that takes the signal": f"{HEAD}\n{ADDRESS}\nsrun ./signals.sh torchrun --nnodes 2 --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT train.py",
    "data and no training": "#!/bin/bash\n#SBATCH -t 60\npython scripts/prepare_data.py\npython -m pip list\necho done",
    "one agent on each node": f"{HEAD}\n#SBATCH --ntasks-per-node=4\n{ADDRESS}\nsrun -N 2 -n 2 {TORCHRUN}",
    "a function of another shell": '#!/bin/bash\nwork() { python train.py; }\nsrun bash -c "$(declare -f work); work"',
    "brackets and cases": f"{HEAD}\n{ADDRESS}\ncase $1 in\n  (a|b) x=1 ;;\n  *) [[ $1 =~ ^(c|d)$ && -n $2 ]] || x=2 ;;\nesac\nfor ((i = 0; i < 2; i++)); do : ; done\nsrun {TORCHRUN} > >(tee log) 2>&1",
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
    "double quotes": (f"{HEAD}\n#SBATCH -n 4\n{ADDRESS}\nsrun -K " + INSIDE.replace("'", '"'), {"rank-in-batch-shell": [7]}),
    "the node's number in the batch shell": (
        f"{HEAD}\n{ADDRESS}\nsrun torchrun --signals-to-handle=SIGUSR1 --nnodes 2 --node-rank=$SLURM_NODEID --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT train.py",
        {"rank-in-batch-shell": [6]},
    ),
    "the node's number in a variable": (
        f"{HEAD}\n{ADDRESS}\nNODE_RANK=$SLURM_NODEID\nsrun torchrun --signals-to-handle=SIGUSR1 --nnodes 2 --node-rank=$NODE_RANK --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT train.py",
        {"rank-in-batch-shell": [7]},
    ),
    "a world of another size": (f"{HEAD}\n#SBATCH -n 8\n{ADDRESS}\nexport WORLD_SIZE=$SLURM_NNODES\nsrun -K python train.py", {"world-size": [7]}),
    "several agents": (f"{HEAD}\n#SBATCH --ntasks-per-node=4\n{ADDRESS}\nsrun {TORCHRUN}", {"several-agents": [7]}),
    "several agents by srun's own words": (f"{HEAD}\n{ADDRESS}\nsrun -n 8 python -m {TORCHRUN.replace('torchrun', 'torch.distributed.run')}", {"several-agents": [6]}),
    "paceline many times": ("#!/bin/bash\n#SBATCH -N 2\nsrun paceline run train.py", {"several-agents": [3]}),
    "no endpoint": (f"{HEAD}\nsrun torchrun --signals-to-handle=SIGUSR1 --nnodes=2 --nproc-per-node=4 train.py", {"no-rendezvous": [3]}),
    "standalone on two nodes": (f"{HEAD}\nsrun torchrun --signals-to-handle=SIGUSR1 --standalone --nproc-per-node 4 train.py", {"no-rendezvous": [3]}),
    "without srun": (f"{HEAD}\n{ADDRESS}\n{TORCHRUN}", {"only-first-node": [6], "signal-not-heard": [2]}),
    "a port that is not exported": (
        f"{HEAD}\n#SBATCH -n 4\n{ADDRESS.replace('export MASTER_PORT', 'MASTER_PORT')}\nsrun -K {INSIDE}", {"port-not-exported": [6]},
    ),
    "a fixed port": (f"{HEAD}\n{ADDRESS}\nexport MASTER_PORT=29500\nsrun {TORCHRUN}", {"fixed-port": [6]}),
    "a fixed port unless given": (f"{HEAD}\n{ADDRESS.replace('MASTER_PORT', 'OTHER')}\nexport MASTER_PORT=${{MASTER_PORT:-12345}}\nsrun {TORCHRUN}", {"fixed-port": [6]}),
    "a fixed endpoint": (f"{HEAD}\nhost=$(hostname)\nsrun torchrun --signals-to-handle=SIGUSR1 --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$host:29400 train.py", {"fixed-port": [4]}),
    "torchrun's own port": (f"{HEAD}\nhost=$(hostname)\nsrun bash -c 'torchrun --signals-to-handle=SIGUSR1 --nnodes=2 --node-rank=$SLURM_NODEID --master-addr='$host' train.py'", {"fixed-port": [4]}),
    "no signal": (f"#!/bin/bash\n#SBATCH -N 2\n#SBATCH -t 60\n{ADDRESS}\nsrun {TORCHRUN}", {"no-signal": [3]}),
    "a signal for the shell alone": (f"{HEAD.replace('USR1', 'B:USR1')}\n{ADDRESS}\nsrun {TORCHRUN}", {"signal-not-heard": [2]}),
    "a trap that waits": (f"{HEAD.replace('USR1', 'B:USR1')}\n{ADDRESS}\ntrap 'touch stop' USR1\nsrun {TORCHRUN}", {"signal-not-heard": [7]}),
    "options too late": (f"{HEAD}\n{ADDRESS}\n#SBATCH --gres=gpu:4\nsrun {TORCHRUN}", {"late-option": [6]}),
    "after a here-string": (f'{HEAD}\n{ADDRESS}\nread a <<< "word"\nexport MASTER_ADDR=localhost\nsrun {TORCHRUN}', {"wrong-address": [7]}),
    "after a shift": (f"{HEAD}\n{ADDRESS}\na=$((1<<X))\nexport MASTER_ADDR=localhost\nsrun {TORCHRUN}", {"wrong-address": [7]}),
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
    "cores bound to one": (f"{HEAD}\n#SBATCH -c 8\n{ADDRESS}\nsrun --cpu-bind=verbose,cores {TORCHRUN}", {"cores-lost": [7]}),
    "a syntax error": ("#!/bin/bash\n#SBATCH -N 2\nif true; then\nsrun torchrun train.py\n", {"syntax-error": [4]}),
    "a syntax error after an open text": ("#!/bin/bash\nif true; then\ncat <<EOF\nfi\n", {"syntax-error": [4]}),
    "an open quote": ('#!/bin/bash\nA="x\nsrun python train.py\n', {"syntax-error": [2]}),
    "a variable that Slurm does not set": (
        f"{HEAD}\n#SBATCH --gres=gpu:4\n{ADDRESS}\nN=$SLURM_GPUS_PER_NODE\nsrun {TORCHRUN.replace('=4', '=$N')}", {"unset-variable": [8]},
    ),
    "a number of GPUs with their type": (
        f"{HEAD}\n#SBATCH --gpus-per-node=a100:4\n{ADDRESS}\nsrun {TORCHRUN.replace('=4', '=$SLURM_GPUS_PER_NODE')}", {"unset-variable": [7]},
    ),
    "a command that the tasks expand": (
        f"{HEAD}\n{ADDRESS}\nexport CMD='torchrun --nnodes 2 train.py'\nsrun bash -c '$CMD'", {"no-rendezvous": [7], "signal-not-heard": [7]},
    ),
    "a command in a variable": (f'{HEAD}\n#SBATCH --ntasks-per-node=4\n{ADDRESS}\nCMD="{TORCHRUN}"\nsrun $CMD', {"several-agents": [8]}),
    "no endpoint, in a variable": (f"{HEAD}\nARGS='--signals-to-handle=SIGUSR1 --nnodes=2'\nsrun torchrun $ARGS train.py", {"no-rendezvous": [4]}),
    "an endpoint without a port": (
        f"{HEAD}\nhead=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\nsrun {TORCHRUN.replace('$MASTER_ADDR:$MASTER_PORT', '$head')}", {"fixed-port": [4]},
    ),
    "an address in an array": (
        f"{HEAD}\n{ADDRESS}\nhead=( $(srun -N1 -n1 hostname --ip-address) )\nsrun {TORCHRUN.replace('$MASTER_ADDR', '${head[0]}')}", {"wrong-address": [6]},
    ),
    "a signal that kills the agent": (f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN.replace('--signals-to-handle=SIGTERM,SIGUSR1 ', '')}", {"signal-not-heard": [6]}),
    "agents that srun cannot reduce": (f"{HEAD}\n#SBATCH --ntasks-per-node=4\n{ADDRESS}\nsrun --ntasks-per-node=1 {TORCHRUN}", {"several-agents": [7]}),
    "agents without a number of nodes": (f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN.replace('--nnodes=$SLURM_NNODES', '')}", {"wrong-nnodes": [6]}),
    "a pipe that hides a failure": (f"{HEAD}\nset -e\n{ADDRESS}\nsrun {TORCHRUN} | tee log", {"exit-code-lost": [7]}),
    "a wait that hides a failure": (f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN} &\nwait", {"exit-code-lost": [7]}),
    "a failure before the last words": (f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN} &\npid=$!\nwait $pid\necho done", {"exit-code-lost": [8]}),
    "an option without #": (f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN} || exit\nSBATCH --requeue", {"late-option": [7]}),
    "another language": ("#!/usr/bin/env python3\n#SBATCH -o no-such-folder/%j.log\nimport torch", {"other-language": [1], "no-log-folder": [2]}),
    "DOS line ends": (f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN}".replace("\n", "\r\n"), {"dos-line-ends": [1]}),
    "no interpreter": (f"{HEAD}\n{ADDRESS}\nsrun {TORCHRUN}".replace("#!/bin/bash\n", ""), {"no-interpreter": [1]}),
    "the tutorial's": (
        "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks=4\n#SBATCH --gpus-per-task=1\n#SBATCH --cpus-per-task=4\n\n"  # noqa: ISC004
        "nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )\nnodes_array=($nodes)\nhead_node=${nodes_array[0]}\n"
        'head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)\n\necho Node IP: $head_node_ip\nexport LOGLEVEL=INFO\n\n'
        "srun torchrun \\\n--nnodes 4 \\\n--nproc_per_node 1 \\\n--rdzv_id $RANDOM \\\n--rdzv_backend c10d \\\n"
        "--rdzv_endpoint $head_node_ip:29500 \\\n/shared/multinode_torchrun.py 50 10",
        {"wrong-address": [10], "fixed-port": [15], "no-signal": [15]},
    ),
}  # fmt: skip


def test_a_good_script_is_left_in_peace() -> None:
    submitted = sorted((Path(__file__).parents[1] / "cluster" / "expected").glob("*.sh"))
    assert submitted
    texts = GOOD | {file.name: file.read_text() for file in submitted}
    wrong = {name: found for name, text in texts.items() if (found := find_mistakes(text))}
    assert wrong == {}


def test_a_mistake_is_named_with_its_line_and_its_fix() -> None:
    for name, (text, expected) in BAD.items():
        found: dict[str, list[int]] = {}
        for one in find_mistakes(text):
            assert one.fix and not one.ok
            found.setdefault(one.check, []).append(one.line)
        assert found == expected, name


def test_a_text_without_an_end_does_not_hide_the_rest() -> None:
    text = f"{HEAD}\n{ADDRESS}\ncat <<EOF\nexport MASTER_ADDR=localhost\nsrun {TORCHRUN}"
    assert [(one.check, one.line) for one in find_mistakes(text)] == [
        ("open-text", 6),
        ("wrong-address", 7),
    ]


ENDLESS = {
    "nodes that are themselves": "#SBATCH --nodes=$SLURM_NNODES\nsrun python x.py",
    "tasks that are themselves": "#SBATCH --ntasks=$SLURM_NTASKS\nsrun python x.py",
    "each by the other": "#SBATCH --nodes=$SLURM_NTASKS --ntasks-per-node=$SLURM_NNODES\nsrun python x.py",
    "thousands of digits": f"#SBATCH -N {'9' * 5000} --gres=gpu:{'9' * 5000} --gpus-per-task=1\nsrun python x.py",
    "thousands of factors": f"A=$(({'*'.join('A' * 7000)}))\nsrun -n $A python x.py",
    "a product that grows": "A=999999999\nB=$((A*A*A*A))\nC=$((B*B*B*B))\nsrun -n $C python x.py",
}


def test_a_number_without_an_end_is_one() -> None:
    for name, text in ENDLESS.items():
        script = read_script(text)
        (launch,) = launches_of(script)
        assert (nodes_of(script, launch), tasks_of(script, launch)) == (1, 1), name
        find_mistakes(text)


def test_the_advice_for_torchrun_does_not_kill_its_agent() -> None:
    (found,) = find_mistakes(f"#!/bin/bash\n#SBATCH -N 2\n{ADDRESS}\nsrun {TORCHRUN}")
    assert found.check == "no-signal"
    assert all(word in found.fix for word in ("paceline submit", "SIGUSR1", "--shutdown-timeout"))


def test_these_scripts_are_what_bash_can_read(tmp_path: Path) -> None:
    unreadable = {"syntax-error", "other-language"}
    bad = [text for text, found in BAD.values() if not unreadable & {*found}]
    for number, text in enumerate([*GOOD.values(), *bad]):
        (tmp_path / f"{number:03d}.sh").write_text(text)
    check = 'for file in *.sh; do bash -n "$file" || exit; done'
    done = subprocess.run(["bash", "-c", check], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


NO_SCRIPTS = [
    "'", '"', "x=(", "srun \\", "#SBATCH '", "<<EOF", "srun", "srun -n", "export", "$(", "a=$((", "bash -c", "srun bash -c", "\0",
    "é=1 srun python",
    "#!/bin/bash\n" + "".join(f"A{i + 1}='$A{i} $A{i}'\n" for i in range(40)) + "srun $A40",
    "#!/bin/bash\n" + "".join(f"cat <<E{i}\n" for i in range(2_000)),
    "#!/bin/bash\n" + "$(" * 20_000,
]  # fmt: skip


def test_what_is_no_script_does_no_harm() -> None:
    for text in NO_SCRIPTS:
        find_mistakes(text)
