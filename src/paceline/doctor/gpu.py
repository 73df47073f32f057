"""Whether the GPUs are all there, whole, and may run at full speed."""

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
_ANSWERS_S = 30.0
_CROWDED = 0.1  # of the memory, that others use
_HOT_C = 85
_SLOWED = {
    0x8: "by the hardware",
    0x20: "by heat (software)",
    0x40: "by heat (hardware)",
    0x80: "by the power brake",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it; what it does not tell is empty."""

    index: str
    name: str
    driver: str
    memory_mb: str
    used_mb: str
    ecc: str
    ecc_errors: str
    power_w: str
    full_power_w: str
    heat_c: str
    slowed: str
    mig: str


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi says: its GPUs, or why it says nothing."""

    gpus: tuple[Gpu, ...] = ()
    failure: str = ""
    devices: int = 0
    """Of GPUs in /dev, whether or not the driver speaks of them."""


def query_driver() -> Driver:
    """Return what the driver says of the GPUs of this machine."""
    devices = len([file for file in Path("/dev").glob("nvidia[0-9]*") if file.name[6:].isdecimal()])
    if not shutil.which("nvidia-smi"):
        return Driver(devices=devices)
    words = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=_ANSWERS_S, check=False
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return Driver(failure=str(error), devices=devices)
    if done.returncode:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        return Driver(failure=said[-1] if said else f"exit code {done.returncode}", devices=devices)
    return Driver(read_gpus(done.stdout), devices=devices)


def read_gpus(said: str) -> tuple[Gpu, ...]:
    """Return the GPUs of nvidia-smi's table.

    >>> read_gpus("0, NVIDIA H200, 580.1, 143771, 0, Enabled, 0, 700.00, 700.00, 39, 0x1, Disabled")[0].name
    'NVIDIA H200'
    """
    rows = [[word.strip() for word in line.split(",")] for line in said.splitlines()]
    return tuple(Gpu(*(_known(word) for word in row)) for row in rows if len(row) == len(_FIELDS))


def _known(word: str) -> str:
    return "" if word.startswith("[") or word == "N/A" else word


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
            "leave this node out of the job (--exclude), and tell the cluster's support",
        )
    if driver.gpus:
        return passed("driver", driver.gpus[0].driver)
    if driver.devices:
        return problem(
            "driver",
            f"{driver.devices} GPUs in /dev, but nvidia-smi knows none",
            "leave this node out of the job, and tell the cluster's support",
        )
    return passed("gpus", "none here: ranks train on the CPU")


def _judge_count(driver: Driver, torch: TorchFacts | None, visible: str | None) -> Finding:
    here = len(driver.gpus)
    names = ", ".join(dict.fromkeys(one.name for one in driver.gpus))
    if torch is None or torch.failure:
        return passed("gpus", f"{here} x {names}; torch did not say what it sees")
    seen = len(torch.gpus)
    if not torch.cuda:
        return problem(
            "gpus",
            f"{here} x {names}, but this torch is built for CPUs",
            "install a torch that is built for CUDA",
        )
    if visible is not None and seen < here:
        wanted = [word for word in visible.split(",") if word.strip()]
        if seen == len(wanted):
            return passed(
                "gpus", f"{seen} of {here} x {names} visible (CUDA_VISIBLE_DEVICES={visible})"
            )
        return problem(
            "gpus",
            f"CUDA_VISIBLE_DEVICES={visible} names {len(wanted)}, and torch sees {seen} of {here}",
            "unset CUDA_VISIBLE_DEVICES, or name GPUs that exist",
        )
    if seen < here:
        return problem(
            "gpus",
            f"the driver has {here}, torch sees {seen}",
            "the driver is too old for this torch, or a GPU is lost: see `nvidia-smi`",
        )
    return passed("gpus", f"{seen} x {names}")


def _judge_memory(gpus: Sequence[Gpu]) -> Finding:
    crowded = [
        one for one in gpus if _number(one.used_mb) > _CROWDED * max(1.0, _number(one.memory_mb))
    ]
    if crowded:
        said = ", ".join(
            f"GPU {one.index}: {human_size(_number(one.used_mb) * 1e6)} of {human_size(_number(one.memory_mb) * 1e6)}"
            for one in crowded
        )
        return problem(
            "gpu memory",
            f"in use by others: {said}",
            "see `nvidia-smi` for the processes, and end yours; or take other GPUs",
        )
    return passed(
        "gpu memory", f"{human_size(min(_number(one.memory_mb) for one in gpus) * 1e6)} each, free"
    )


def _judge_ecc(gpus: Sequence[Gpu]) -> Finding:
    bad = [one for one in gpus if _number(one.ecc_errors) > 0]
    if bad:
        said = ", ".join(f"GPU {one.index}: {one.ecc_errors}" for one in bad)
        return problem(
            "gpu ecc",
            f"memory errors that were not corrected: {said}",
            "leave this node out of the job (--exclude), and tell the cluster's support",
        )
    modes = ", ".join(sorted({one.ecc or "not there" for one in gpus}))
    return passed("gpu ecc", f"{modes.lower()}, no error")


def _judge_power(gpus: Sequence[Gpu]) -> Finding:
    capped = [one for one in gpus if 0 < _number(one.power_w) < _number(one.full_power_w)]
    slowed = {one.index: why for one in gpus if (why := _slowed(one))}
    if slowed:
        said = ", ".join(f"GPU {index} {why}" for index, why in slowed.items())
        return problem(
            "gpu power",
            f"slowed down: {said}",
            "see `nvidia-smi -q -d PERFORMANCE`; leave this node out, and tell the cluster's support",
        )
    if capped:
        said = ", ".join(
            f"GPU {one.index}: {_number(one.power_w):.0f} of {_number(one.full_power_w):.0f} W"
            for one in capped
        )
        return problem(
            "gpu power",
            f"capped: {said}; the slowest GPU sets the pace of all",
            "nvidia-smi --power-limit (root), or take nodes without a cap",
        )
    hottest = max(_number(one.heat_c) for one in gpus)
    said = (
        f"{_number(gpus[0].full_power_w):.0f} W each"
        if _number(gpus[0].full_power_w)
        else "no limit is told"
    )
    return passed("gpu power", f"{said}, at most {hottest:.0f} °C now")


def _slowed(one: Gpu) -> str:
    reasons = 0
    with contextlib.suppress(ValueError):
        reasons = int(one.slowed or "0", 16)
    found = [why for bit, why in _SLOWED.items() if reasons & bit]
    return found[0] if found else f"at {one.heat_c} °C" if _number(one.heat_c) > _HOT_C else ""


def _judge_peers(torch: TorchFacts) -> Finding:
    if torch.no_peer:
        pairs = ", ".join(f"{one}-{other}" for one, other in torch.no_peer[:6] if one < other)
        return problem(
            "gpu peers",
            f"no direct way between GPUs {pairs}: their messages go through the host's memory",
            "see `nvidia-smi topo -m`; in a virtual machine or container, ask for the whole node",
        )
    return passed("gpu peers", f"all {len(torch.gpus)} reach each other directly")


def _number(text: str) -> float:
    """Return a number; 0 where there is none.

    >>> _number("700.00"), _number("")
    (700.0, 0.0)
    """
    try:
        return float(text)
    except ValueError:
        return 0.0
