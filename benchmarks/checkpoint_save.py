"""What does a checkpoint of 1.5 GB cost, and how long is the training held for it?

`python benchmarks/checkpoint_save.py` saves the parameters of GPT-2 (124 M) with their AdamW moments, float32 on CPU, by
Paceline and by its peers, and reads them back. Each round runs every contender once, in rotated order, in one process;
ratios are taken within a round, to a durable `torch.save`. A first round warms up and does not count.

Every save is durable when it ends: files, their folder and its name are synced. Before each one the output of the one
before is gone, dirty pages are written (`sync`) and the disk has a second to settle. Three clocks: in all, until the
save is durable; held, until the caller may go on to change its tensors; CPU, user and system of the whole process,
which does nothing else meanwhile. What the kernel's own threads spend on writing dirty pages is in no CPU figure.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

import torch
import torch.distributed.checkpoint as dcp
from ratios import ratios, rotated, spread, table
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from paceline.checkpoint.local_storage import LocalStorage
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.restore import newest_good, read_tensors
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.save import Saver
from paceline.world.world import World

State = dict[str, Tensor]
Finish = Callable[[], None]
Save = Callable[[State, Path], Finish]
"""Returns when the caller may go on; what it returns waits until the save is durable."""

WIDTH, BLOCKS, WORDS, CONTEXT = 768, 12, 50257, 1024
SETTLE_S = 1.0
KEPT = "ours-check"
SAVES = {
    "torch": "`torch.save`, durable",
    "torch-no-crc": "`torch.save`, durable, its CRC-32 off",
    "dcp": "DCP `save`",
    "dcp-async": "DCP `async_save`, new staging memory each time",
    "dcp-async-kept": "DCP `async_save`, a `DefaultStager` kept",
    "safetensors": "safetensors `save_file`, durable",
    "ours": "Paceline",
    "ours-first": "Paceline, first save of a run, its memory prepared",
    KEPT: "Paceline, new checkpoint read back, old one deleted",
}
LOADS = {
    "safetensors": "safetensors `load_file`, nothing checked",
    "ours": "Paceline `read_tensors`, every byte checked",
    "ours-resume": "Paceline `newest_good`, then `read_tensors`",
}
CLOCKS = {"all_s": "in all", "held_s": "held", "cpu_s": "CPU"}


@dataclass(frozen=True)
class Cost:
    """Seconds until the end, until the caller was let go, and of CPU."""

    all_s: float
    held_s: float
    cpu_s: float


Costs = dict[str, list[Cost]]


def shapes_of_gpt2() -> dict[str, tuple[int, ...]]:
    """Return the parameters of GPT-2 by name.

    >>> import math
    >>> len(shapes_of_gpt2()), sum(map(math.prod, shapes_of_gpt2().values()))
    (148, 124439808)
    """
    layers = {
        "ln_1": (WIDTH,), "attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH),
        "ln_2": (WIDTH,), "mlp.c_fc": (WIDTH, 4 * WIDTH), "mlp.c_proj": (4 * WIDTH, WIDTH),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (WORDS, WIDTH),
        "wpe.weight": (CONTEXT, WIDTH),
    }
    for block in range(BLOCKS):
        for name, shape in layers.items():
            shapes |= {f"h.{block}.{name}.weight": shape, f"h.{block}.{name}.bias": shape[-1:]}
    return shapes | {"ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}


def make_state() -> State:
    """Return parameters and moments; random, so that no disk can make them smaller."""
    torch.manual_seed(0)
    state = {}
    for name, shape in shapes_of_gpt2().items():
        state[f"model.{name}"] = torch.randn(shape)
        state[f"optimizer.{name}.exp_avg"] = torch.randn(shape)
        state[f"optimizer.{name}.exp_avg_sq"] = torch.rand(shape)
        state[f"optimizer.{name}.step"] = torch.tensor(1000.0)
    return state


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_by_torch(state: State, folder: Path) -> Finish:
    """Write under a temporary name, sync, rename, sync the name."""
    with (folder / "state.tmp").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    (folder / "state.tmp").replace(folder / "state.pt")
    sync(folder)
    return lambda: None


def save_by_torch_without_crc(state: State, folder: Path) -> Finish:
    """Do the same without the CRC-32 of each tensor, which nothing looks at when it is read."""
    torch.serialization.set_crc32_options(False)
    try:
        return save_by_torch(state, folder)
    finally:
        torch.serialization.set_crc32_options(True)


def save_by_safetensors(state: State, folder: Path) -> Finish:
    """Write under a temporary name, sync, rename, sync the name."""
    save_file(state, folder / "state.tmp")
    sync(folder / "state.tmp")
    (folder / "state.tmp").replace(folder / "state.safetensors")
    sync(folder)
    return lambda: None


def save_by_dcp(state: State, folder: Path) -> Finish:
    """Save in this thread; the writer syncs its files (its default), we the folder."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=True), no_dist=True)
    sync(folder)
    return lambda: None


class SaveByDcpThread:
    """Saves in a thread, from a copy: in new memory, or in that of a stager which is kept from save to save."""

    def __init__(self, *, kept: bool) -> None:
        # all options off: they are for GPUs and for other processes
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options) if kept else None

    def __call__(self, state: State, folder: Path) -> Finish:
        writer = dcp.FileSystemWriter(folder, sync_files=True)
        future = dcp.async_save(
            state, storage_writer=writer, async_stager=self._stager, no_dist=True
        )

        def finish() -> None:
            future.result()
            sync(folder)

        return finish


class SaveByPaceline:
    """Saves as a run does: with one Saver and its staging memory for all saves, or with a new one each time."""

    def __init__(self, *, kept: bool, keep: int = 3) -> None:
        self._kept, self._keep = kept, keep
        self._saver: Saver | None = None
        self._step = 0

    def prepare(self, state: State, folder: Path) -> None:
        """Get the memory ready, as a run does in a thread after its first step."""
        if self._saver is None:
            retention = Retention(self._keep)
            self._saver = Saver(LocalStorage(folder), World(), "benchmark", retention=retention)
            self._saver.prepare(state)
            self._saver.close()

    def __call__(self, state: State, folder: Path) -> Finish:
        self.prepare(state, folder)
        saver = self._saver
        assert saver is not None
        self._saver = saver if self._kept else None
        self._step += 1
        saver.save(state, Manifest(self._step, 0, {}))

        def finish() -> None:
            if self._keep == 1:
                saver.close()  # also until the new one has been read back, and the old one is gone
            else:
                saver.wait()
            saver.finished()  # raises what went wrong

        return finish


def make_saves() -> dict[str, Save]:
    """Return all contenders, as SAVES names them."""
    return {
        "torch": save_by_torch,
        "torch-no-crc": save_by_torch_without_crc,
        "dcp": save_by_dcp,
        "dcp-async": SaveByDcpThread(kept=False),
        "dcp-async-kept": SaveByDcpThread(kept=True),
        "safetensors": save_by_safetensors,
        "ours": SaveByPaceline(kept=True),
        "ours-first": SaveByPaceline(kept=False),
        KEPT: SaveByPaceline(kept=True, keep=1),
    }


def cpu_s() -> float:
    """Return the CPU seconds of all threads so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(begin: Callable[[], Finish]) -> Cost:
    """Run something on a quiet disk."""
    gc.collect()
    os.sync()
    time.sleep(SETTLE_S)
    cpu, begun = cpu_s(), time.perf_counter()
    finish = begin()
    try:
        held = time.perf_counter()
        finish()
    except BaseException:
        finish()  # nothing may be writing when the folder is removed
        raise
    return Cost(time.perf_counter() - begun, held - begun, cpu_s() - cpu)


def measure_saves(state: State, home: Path, rounds: int) -> Costs:
    """Run all contenders round by round; the first round warms up, and does not count."""
    found: Costs = defaultdict(list)
    saves = make_saves()
    for number in range(rounds + 1):
        for name in rotated(list(SAVES), number):
            folder = home / name
            folder.mkdir(exist_ok=True)
            if isinstance(saves[name], SaveByPaceline):
                saves[name].prepare(state, folder)
            found[name].append(measure(lambda name=name, folder=folder: saves[name](state, folder)))
            if name != KEPT:  # where the next save deletes the one before
                shutil.rmtree(folder)
            note(f"round {number}/{rounds}: {name} {found[name][-1]}")
    return {name: costs[1:] for name, costs in found.items()}


def forget(folder: Path) -> None:
    """Drop what the kernel keeps of the files in memory, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_by_safetensors(home: Path) -> Mapping[str, Tensor]:
    """Read without checking; the copies make sure that it is read, not only mapped."""
    found = load_file(home / "safetensors" / "state.safetensors")
    return {name: value.clone() for name, value in found.items()}


def load_by_paceline(home: Path) -> Mapping[str, Tensor]:
    """Read a checkpoint of which the manifest is at hand."""
    storage = LocalStorage(home / "ours")
    return dict(read_tensors(storage, storage.manifest(1)))


def resume_by_paceline(home: Path) -> Mapping[str, Tensor]:
    """Find the newest checkpoint that is good, and read it: what a run does at its start."""
    storage = LocalStorage(home / "ours")
    manifest = newest_good(storage, World(), lambda step, why: sys.exit(f"step {step}: {why}"))
    assert manifest is not None
    return dict(read_tensors(storage, manifest))


def load(name: str, home: Path) -> Cost:
    """Read in a process that has read nothing before, as at the start of a run; see that every bit is there."""
    loads: dict[str, Callable[[Path], Mapping[str, Tensor]]] = {
        "safetensors": load_by_safetensors,
        "ours": load_by_paceline,
        "ours-resume": resume_by_paceline,
    }
    loaded: dict[str, Tensor] = {}
    cost = measure(lambda: lambda: loaded.update(loads[name](home)))
    state = make_state()
    if loaded.keys() != state.keys() or not all(
        torch.equal(loaded[key], state[key]) for key in state
    ):
        raise SystemExit(f"{name} returned something else than was saved")
    return cost


def measure_loads(state: State, home: Path, rounds: int) -> Costs:
    """Save once by each, then read round by round; the first round does not count."""
    for name, save in (("safetensors", save_by_safetensors), ("ours", SaveByPaceline(kept=False))):
        (home / name).mkdir()
        save(state, home / name)()
    found: Costs = defaultdict(list)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for number in range(rounds + 1):
            for name in rotated(list(LOADS), number):
                forget(home)
                found[name].append(pool.submit(load, name, home).result())
                note(f"reading, round {number}/{rounds}: {name} {found[name][-1]}")
    return {name: costs[1:] for name, costs in found.items()}


def report(found: Costs, labels: Mapping[str, str], clocks: Sequence[str]) -> str:
    """Return a table of all contenders against the first one."""
    reference = next(iter(labels))
    head = ["contender"]
    for clock in clocks:
        head += [f"{CLOCKS[clock]}, ratio", f"{CLOCKS[clock]}, s"]
    rows = []
    for name, label in labels.items():
        cells = [label]
        for clock in clocks:
            values = [getattr(cost, clock) for cost in found[name]]
            # the durable save holds its caller to its end, so its time in all is what a stall is compared with
            base = [cost.cpu_s if clock == "cpu_s" else cost.all_s for cost in found[reference]]
            cells += [spread(ratios(values, base), 3), spread(values)]
        rows.append(cells)
    return table(head, rows)


def note(text: str) -> None:
    """Say how far the benchmark is."""
    sys.stderr.write(f"{text}, load {os.getloadavg()[0]:.1f}\n")


def leave(number: int, frame: FrameType | None) -> None:
    """Turn the signal to end into an exception, so that the folder is removed."""
    sys.exit(128 + number)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), help="on the disk to measure, with 3 GB free"
    )
    known = parser.parse_args()
    signal.signal(signal.SIGTERM, leave)
    known.folder.mkdir(exist_ok=True)
    state = make_state()
    size_gb = sum(value.nbytes for value in state.values()) / 1e9
    with tempfile.TemporaryDirectory(dir=known.folder, prefix="checkpoint-save-") as folder:
        saves = measure_saves(state, Path(folder), known.rounds)
        shutil.rmtree(Path(folder, KEPT))
        loads = measure_loads(state, Path(folder), known.rounds)
    print(
        f"{len(state)} tensors, {size_gb:.3f} GB, {torch.get_num_threads()} threads; median (min-max) of {known.rounds} rounds\n"
    )
    print(report(saves, SAVES, ("all_s", "held_s", "cpu_s")))
    print("\nReading it from the disk, each time in a new process\n")
    print(report(loads, LOADS, ("all_s", "cpu_s")))


if __name__ == "__main__":
    main()
