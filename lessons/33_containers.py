"""Lesson 33: What a container changes.

A container shares the kernel of its host, but has its own files, variables, network, shared memory,
host name and user. A training notices each of them: a rank that does not get the variables of its
launcher is rank 0 of 1, and trains alone, without an error. Docker isolates all that you do not open;
Apptainer and Enroot pass variables and network on, and with them also a PYTHONPATH of the host. Here
`unshare` makes a container per rank; where that is not permitted, only the variables are isolated.

    python lessons/33_containers.py

Expect: isolated, both ranks are rank 0 of 1, 100 MB do not fit into 64 MiB of shared memory, port and
data of the launcher are missing, and the checkpoint is lost; opened, all is as without a container.
Then the lines with which a job of `paceline submit` starts its ranks (pyxis is Enroot under Slurm).
Time: about 10 s on 2 cores.
New since lesson 0: `look_inside` and `outcome`; `join` has a timeout; `container` and `launch` with `KINDS`,
`PASSED` and `ISOLATE`; `submit_lines`; `main` compares, with options of Docker in `OPENED_BY`.
"""

import datetime
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.cluster.batch import BatchJob, batch_script
from paceline.cluster.container import Container
from paceline.cluster.profile import ClusterProfile

KINDS = ["no container", "isolated", "opened"]
PASSED = ["PATH", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"]  # fmt: skip
ISOLATE = """mount -t tmpfs -o size=64m shm /dev/shm && mount -t tmpfs none "$0" &&
ip link set lo up && echo box > /proc/sys/kernel/hostname && exec "$@" """
OPENED_BY = {
    "variables": "--env", "rank": "--env", "sum of ranks": "--env", "host name": "--network host", "network": "--network host",
    "launcher's port": "--network host", "100 MB of shm": "--ipc host", "launcher's data": "--mount", "user": "--user",
    "checkpoint of": "--mount", "kernel": "", "Python, torch": "a:1",  # the kernel is the host's; the image has the rest
}  # fmt: skip


def join() -> tuple[int, int]:
    """Join the process group; return rank and world size, which the launcher passes as variables."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    return dist.get_rank(), dist.get_world_size()


def outcome(action: Callable[[], object]) -> str:
    """Return how an action ends: ok, or its error."""
    try:
        action()
    except OSError as error:
        return str(error.strerror)
    return "ok"


def look_inside(file: Path, port: int) -> None:
    """Sum one number per rank, leave a file, and print what this rank sees."""
    variables, host = len(os.environ), os.uname()
    rank, size = join()
    number = torch.tensor([float(rank)])
    dist.all_reduce(number)  # returns when every rank has called it
    dist.destroy_process_group()
    file.write_text("a checkpoint")
    reached = outcome(lambda: socket.create_connection(("127.0.0.1", port), timeout=5).close())
    with tempfile.TemporaryFile(dir="/dev/shm") as shm:  # where data workers put their batches
        fits = outcome(lambda: os.posix_fallocate(shm.fileno(), 0, 10**8))
    values = (
        variables, f"{rank} of {size}", f"{number.item():.0f}", host.nodename,
        " ".join(name for _, name in socket.if_nameindex()), reached, fits, outcome((file.parent / "data").read_bytes), os.getuid(),
        f"user {file.stat().st_uid}", host.release.partition("-")[0], f"{platform.python_version()}, {torch.__version__}",
    )  # fmt: skip
    print(json.dumps(dict(zip(OPENED_BY, map(str, values), strict=True))))


def container(kind: str, folder: Path) -> list[str]:
    """Return the words that start a command in a container; none where that is not permitted."""
    isolated = ["--map-root-user", "--uts", "--ipc", "--net", "sh", "-c", ISOLATE, str(folder)]
    options = {"no container": [], "isolated": isolated, "opened": ["--map-current-user"]}[kind]
    words = ["unshare", "--user", "--mount", *options] if options else []
    done = subprocess.run(["env", *words, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{kind}: only the variables, because this failed here: {done.stderr.strip()}")
    return [] if done.returncode else words


def launch(kind: str, folder: Path) -> list[dict[str, str]]:
    """Start two ranks in containers; return what each of them saw, and whose file it left."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    own |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # as torchrun does: the launcher has the port
    words, files, ranks = container(kind, folder), [folder / f"{kind} {rank}" for rank in "01"], []
    for rank, file in enumerate(files):
        env = os.environ | own | {"RANK": str(rank)}
        if kind != "no container":
            env = {name: env[name] for name in (PASSED if kind == "opened" else ["PATH"])}
        command = [*words, sys.executable, __file__, str(file), str(store.port)]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    seen = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    for one, file in zip(seen, files, strict=True):
        one["checkpoint of"] += f", outside: {file.stat().st_uid if file.exists() else 'lost'}"
    return seen


def submit_lines(kind: str, image: str) -> list[str]:
    """Return the lines by which a job of `paceline submit` starts its ranks, 4 on each of 2 nodes."""
    job = BatchJob(("path", "train.py"), Path("/shared/a"), Path("/shared"), "", 2, 4, 4, "02:00:00", "1000:1000")  # fmt: skip
    script = batch_script(job, ClusterProfile(container=Container(kind, image)))
    return script.partition("command=(\n")[2].partition("\n)")[0].splitlines()


def main() -> None:
    """Sum one number per rank in different containers, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data").touch()
        seen = {kind: launch(kind, Path(folder)) for kind in KINDS}
    assert {one["rank"] for one in seen["isolated"]} == {"0 of 1"}, "isolated ranks are alone"
    print(f"{'':17}" + "".join(f"{kind:28}" for kind in seen) + "docker")
    for row, option in OPENED_BY.items():
        assert option in " ".join(submit_lines("docker", "a:1"))
        cells = [[one[row] for one in ranks] for ranks in seen.values()]
        texts = [", ".join(cell if row == "rank" else dict.fromkeys(cell)) for cell in cells]
        print(f"{row:17}" + "".join(f"{text:28}" for text in texts) + option)
    for kind, image in {"apptainer": "a.sif", "pyxis": "a.sqsh", "docker": "a:1"}.items():
        for line in (f"{kind}:", *submit_lines(kind, image)):
            print(textwrap.fill(line, 110, subsequent_indent="    ", break_on_hyphens=False))


if __name__ == "__main__":
    look_inside(Path(sys.argv[1]), int(sys.argv[2])) if sys.argv[1:] else main()
