"""Whether all GPUs are visible, healthy and able to run at full speed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.finding import Finding, passed, problem
from paceline.doctor.software import TorchFacts
from paceline.units import human_size

_FIELDS = (
    "index", "name", "driver_version", "memory.total", "memory.used", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total",
    "power.limit", "power.default_limit", "temperature.gpu", "clocks_throttle_reasons.active", "mig.mode.current",
)  # fmt: skip
_TIMEOUT_S = 30.0
_MAX_USED = 0.1  # share of the memory in use by other processes
_HOT_C = 85
_THROTTLE_REASONS = {
    0x8: "hardware slowdown",
    0x20: "thermal, software",
    0x40: "thermal, hardware",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Gpu:
    """A line of nvidia-smi, as text; empty where the driver reports nothing."""

    index: str
    name: str
    driver: str
    memory_mb: str
    used_mb: str
    ecc: str
    ecc_errors: str
    power_w: str
    full_power_w: str
    temperature_c: str
    throttle_reasons: str
    mig: str


@dataclass(frozen=True)
class Driver:
    """The output of nvidia-smi: GPUs, or its failure."""

    gpus: tuple[Gpu, ...] = ()
    failure: str = ""
    devices: int = 0
    """GPU device files in /dev, whether nvidia-smi lists them or not."""


def query_driver() -> Driver:
    """Run nvidia-smi and return the GPUs of this machine."""
    devices = len([file for file in Path("/dev").glob("nvidia[0-9]*") if file.name[6:].isdecimal()])
    if not shutil.which("nvidia-smi"):
        return Driver(devices=devices)
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return Driver(failure=str(error), devices=devices)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        failure = lines[-1].strip() if lines else f"exit code {done.returncode}"
        return Driver(failure=failure, devices=devices)
    return Driver(read_gpus(done.stdout), devices=devices)


def read_gpus(table: str) -> tuple[Gpu, ...]:
    """Return the GPUs of nvidia-smi's CSV table.

    >>> line = "0, NVIDIA H200, 580.1, 143771, 0, Enabled, 0, 700.00, 700.00, 39, 0x1, Disabled"
    >>> read_gpus(line)[0].name
    'NVIDIA H200'
    """
    gpus = []
    for line in table.splitlines():
        values = [_known(value.strip()) for value in line.split(",")]
        if len(values) == len(_FIELDS):
            gpus.append(Gpu(*values))
    return tuple(gpus)


def _known(value: str) -> str:
    return "" if value.startswith("[") or value == "N/A" else value


def judge_gpus(driver: Driver, torch: TorchFacts | None, visible: str | None) -> Iterator[Finding]:
    """Judge driver, count, memory, ECC, power and peer access; `visible` is CUDA_VISIBLE_DEVICES."""
    yield _judge_driver(driver)
    if not driver.gpus:
        return
    yield _judge_count(driver, torch, visible)
    yield _judge_memory(driver.gpus)
    yield _judge_ecc(driver.gpus)
    yield _judge_power(driver.gpus)
    if torch and len(torch.gpus) > 1:
        yield _judge_peers(torch)


def _judge_driver(driver: Driver) -> Finding:
    if driver.failure:
        return problem(
            "driver",
            f"nvidia-smi fails: {driver.failure}",
            "exclude this node from the job (--exclude), and report it to the cluster's support",
        )
    if driver.gpus:
        return passed("driver", driver.gpus[0].driver)
    if driver.devices:
        return problem(
            "driver",
            f"{driver.devices} GPUs in /dev, but nvidia-smi lists none",
            "exclude this node from the job (--exclude), and report it to the cluster's support",
        )
    return passed("gpus", "none: ranks train on the CPU")


def _judge_count(driver: Driver, torch: TorchFacts | None, visible: str | None) -> Finding:
    installed = len(driver.gpus)
    names = ", ".join(dict.fromkeys(gpu.name for gpu in driver.gpus))
    if torch is None or torch.failure:
        return passed("gpus", f"{installed} x {names}; torch was not asked which it sees")
    seen = len(torch.gpus)
    if not torch.cuda:
        return problem(
            "gpus",
            f"{installed} x {names}, but this torch is built for CPUs only",
            "install a torch build with CUDA",
        )
    if visible is not None and seen < installed:
        wanted = [index for index in visible.split(",") if index.strip()]
        if seen == len(wanted):
            return passed(
                "gpus", f"{seen} of {installed} x {names} visible (CUDA_VISIBLE_DEVICES={visible})"
            )
        return problem(
            "gpus",
            f"CUDA_VISIBLE_DEVICES={visible} names {len(wanted)} GPUs, torch sees {seen} of {installed}",
            "unset CUDA_VISIBLE_DEVICES, or name GPUs that exist",
        )
    if seen < installed:
        return problem(
            "gpus",
            f"the driver lists {installed} GPUs, torch sees {seen}",
            "update the driver if it is too old for this torch; check `nvidia-smi` for a lost GPU",
        )
    return passed("gpus", f"{seen} x {names}")


def _judge_memory(gpus: Sequence[Gpu]) -> Finding:
    used = []
    for gpu in gpus:
        used_mb, memory_mb = _number(gpu.used_mb), _number(gpu.memory_mb)
        if used_mb > _MAX_USED * max(1.0, memory_mb):
            share = f"{human_size(used_mb * 1e6)} of {human_size(memory_mb * 1e6)}"
            used.append(f"GPU {gpu.index}: {share}")
    if used:
        return problem(
            "gpu memory",
            f"in use by other processes: {', '.join(used)}",
            "see `nvidia-smi` for the processes and end yours, or use other GPUs",
        )
    smallest = min(_number(gpu.memory_mb) for gpu in gpus)
    return passed("gpu memory", f"{human_size(smallest * 1e6)} each, free")


def _judge_ecc(gpus: Sequence[Gpu]) -> Finding:
    bad = [gpu for gpu in gpus if _number(gpu.ecc_errors) > 0]
    if bad:
        errors = ", ".join(f"GPU {gpu.index}: {gpu.ecc_errors}" for gpu in bad)
        return problem(
            "gpu ecc",
            f"uncorrected memory errors: {errors}",
            "exclude this node from the job (--exclude), and report it to the cluster's support",
        )
    modes = ", ".join(sorted({gpu.ecc or "not available" for gpu in gpus}))
    return passed("gpu ecc", f"{modes.lower()}, no errors")


def _judge_power(gpus: Sequence[Gpu]) -> Finding:
    throttled, capped = [], []
    for gpu in gpus:
        power_w, default_w = _number(gpu.power_w), _number(gpu.full_power_w)
        if reason := _throttle_reason(gpu):
            throttled.append(f"GPU {gpu.index} ({reason})")
        if 0 < power_w < default_w:
            capped.append(f"GPU {gpu.index}: {power_w:.0f} of {default_w:.0f} W")
    if throttled:
        return problem(
            "gpu power",
            f"throttled: {', '.join(throttled)}",
            "see `nvidia-smi -q -d PERFORMANCE`; exclude this node, and report it to the "
            "cluster's support",
        )
    if capped:
        return problem(
            "gpu power",
            f"power limit below the default: {', '.join(capped)}; the slowest GPU slows all ranks",
            "raise it with nvidia-smi --power-limit (root), or use nodes without a limit",
        )
    default_w = _number(gpus[0].full_power_w)
    limit = f"limit {default_w:.0f} W each" if default_w else "limit not reported"
    hottest = max(_number(gpu.temperature_c) for gpu in gpus)
    return passed("gpu power", f"{limit}, at most {hottest:.0f} °C now")


def _throttle_reason(gpu: Gpu) -> str:
    bits = 0
    with contextlib.suppress(ValueError):
        bits = int(gpu.throttle_reasons or "0", 16)
    for bit, reason in _THROTTLE_REASONS.items():
        if bits & bit:
            return reason
    return f"{gpu.temperature_c} °C" if _number(gpu.temperature_c) > _HOT_C else ""


def _judge_peers(torch: TorchFacts) -> Finding:
    if torch.no_peer:
        pairs = ", ".join(f"{first}-{second}" for first, second in torch.no_peer if first < second)
        return problem(
            "gpu peers",
            f"no peer-to-peer access between GPUs {pairs}: their messages go through host memory",
            "see `nvidia-smi topo -m`; in a virtual machine or container, request the whole node",
        )
    return passed("gpu peers", f"peer-to-peer access between all {len(torch.gpus)} GPUs")


def _number(text: str) -> float:
    """Return a number; 0 for text that is not one.

    >>> _number("700.00"), _number("")
    (700.0, 0.0)
    """
    try:
        return float(text)
    except ValueError:
        return 0.0
