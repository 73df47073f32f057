"""What holds for every test: it leaves no process and no variable behind, and skips with a reason."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.slurm_cluster.requirements import why_no_hosts

collect_ignore = [  # run in environments of their own, which have the packages that they need
    "support/pcluster_schema.py",
    "support/triton_interpreter.py",
]
settings.register_profile("any pace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any pace")
_LONG = ("slow", "slurm", "namespaces")
_START_PROCESSES = {"subprocess"} | {
    f"support.{name}"
    for name in (
        "browser", "checkpoint_trainings", "forkserver", "kernel", "private_cluster", "processes", "program",
        "report_trainings", "s3_server", "shaped_links", "submitting", "terminal", "typed_pages",
    )
}  # fmt: skip
_MOST_RANKS = 4
"""Of a test on a GPU."""
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure(config: pytest.Config) -> None:
    """Test on the CPU, also where there is a GPU, unless `-m gpu` asks for it."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        _choose_gpus()
    # Otherwise torch.compile starts a process per core in each rank, for a few small kernels.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # on ARM, a file in /tmp per process
    state = tempfile.TemporaryDirectory(prefix="paceline-state-")
    config.add_cleanup(state.cleanup)
    os.environ.setdefault("XDG_STATE_HOME", state.name)
    # What is trained in the tests' own process is in no script, as in a worker of xdist: the run is called "run".
    vars(sys.modules["__main__"]).pop("__file__", None)


def _choose_gpus() -> None:
    """Let the ranks of a test share one GPU where there is not one for each; stop if torch sees none of those there are."""
    import torch

    if shutil.which("nvidia-smi") is None:
        return
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    gpus = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    if 1 < gpus < _MOST_RANKS:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    if gpus and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"nvidia-smi lists {gpus} GPU{'s' * (gpus > 1)} and torch {torch.__version__} sees none: "
            "install a build with CUDA; under scripts/with_mps, the MPS server may not have started"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say why."""
    import torch

    no_hosts = why_no_hosts()
    reasons = {
        "browser": ""
        if shutil.which("chromium")
        else "needs Chromium (Debian: apt-get install chromium)",
        "gpu": "" if torch.cuda.is_available() else "needs a CUDA GPU, and `-m gpu`",
        "mpi": ""
        if shutil.which("mpirun")
        else "needs mpirun (Debian: apt-get install openmpi-bin)",
        "root": "" if _may_mount() else "needs root and mount namespaces (`unshare --mount`)",
        "heavy": ""
        if os.environ.get("PACELINE_HEAVY")
        else "takes long; its parts have tests of their own: PACELINE_HEAVY=1 runs it",
        "ipv6": "" if _has_ipv6() else "needs IPv6 on the loopback interface",
        "namespaces": no_hosts,
        "slurm": no_hosts,
    }
    for item in items:
        if _starts_processes(item):
            item.add_marker("processes")
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    slow = Counter(
        item.path for item in items for marker in _LONG if item.get_closest_marker(marker)
    )
    items.sort(
        key=lambda item: -slow[item.path]
    )  # the long files first, so that workers end together


def _starts_processes(item: pytest.Item) -> bool:
    """Return whether the module of a test uses `subprocess` or support code that starts processes."""
    names = vars(getattr(item, "module", None) or object).values()
    modules = {
        getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in names
    }
    return not modules.isdisjoint(_START_PROCESSES)


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def _may_mount() -> bool:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    return (
        subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode
        == 0
    )


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaks variables or child processes."""
    before, children = dict(os.environ), _children()
    yield
    changed = {
        name
        for name in before.keys() ^ os.environ.keys()
        if not name.startswith(("PYTEST_", "TORCHINDUCTOR_"))
    }
    assert not changed, f"the test changed the environment: {changed}"
    left = {
        pid: name
        for pid, name in _children().items()
        if pid not in children and "multiprocessing" not in name
    }
    assert not left, f"the test left processes: {left}"


def _children() -> dict[int, str]:
    found = {}
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            for pid in task.read_text().split():
                with contextlib.suppress(OSError):  # a process that has
                    found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return found


@pytest.fixture(scope="session")
def mnist_folder() -> Path:
    """The folder of the real MNIST, where there is one."""
    folder = Path(os.environ.get("PACELINE_DATA", SHARED_DATA / "mnist"))
    if not folder.is_dir():
        pytest.skip("needs MNIST's IDX files in the folder that PACELINE_DATA names")
    return folder
