"""What does one process measure? How a contender reads, or where it can begin.

Run by data.py as `data_measure.py MODE NAME TASK FOLDER`; TASK is JSON, and what was found is left in FOLDER. CPU time is user and
system time of this process and of all it has started, those that still live included.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from data_contenders import READERS, Reader
from data_task import Task

LATER_EPOCHS = 2
PATIENCE_S = 120.0


class Clocks(NamedTuple):
    """Where the clocks stand."""

    cpu_s: float
    wall_s: float


def clocks() -> Clocks:
    """Read both clocks."""
    wall_s = time.perf_counter()
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Clocks(
        sum(each.ru_utime + each.ru_stime for each in ended) + sum(map(cpu_of, children("self"))),
        wall_s,
    )


def children(process: str) -> Iterator[int]:
    """Yield all living processes that a process has started, and theirs."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for number in path.read_text(encoding="ascii").split():
            yield int(number)
            yield from children(number)


def cpu_of(process: int) -> float:
    """Return the CPU seconds of another process: Linux numbers their clocks so."""
    try:
        return time.clock_gettime(~process << 3 | 2)
    except OSError:  # it has ended meanwhile
        return 0.0


def read(reader: Reader, task: Task, folder: Path, least_s: float) -> dict[str, Any]:
    """Read one epoch, then some more; last of all one that is not measured, in which each record is looked at."""
    await_others(task, folder)
    begin = clocks()
    reader.open()
    records = [read_epoch(reader)]
    first = clocks()
    while len(records) <= LATER_EPOCHS or clocks().wall_s - first.wall_s < least_s:
        records.append(read_epoch(reader))
    end = clocks()
    return {
        "first": {
            "records": records[0],
            "cpu_s": first.cpu_s - begin.cpu_s,
            "wall_s": first.wall_s - begin.wall_s,
        },
        "later": {
            "records": sum(records[1:]),
            "cpu_s": end.cpu_s - first.cpu_s,
            "wall_s": end.wall_s - first.wall_s,
        },
        "labels": checked_labels(reader),
    }


def read_epoch(reader: Reader) -> int:
    """Read an epoch; return how many records came."""
    records = 0
    for _, label in reader.epoch():
        records += len(label)
    return records


def checked_labels(reader: Reader) -> list[int]:
    """Read the first epoch again (ranks may have read on to different ones); return all labels, each found in its image too."""
    found: list[int] = []
    reader.open()
    for image, label in reader.epoch():
        number = (
            image.to(torch.uint8)
            .reshape(len(image), -1)[:, :8]
            .contiguous()
            .view(torch.int64)[:, 0]
        )
        if not torch.equal(number, label):
            raise SystemExit("an image came with the label of another")
        found += label.tolist()
    return found


def await_others(task: Task, folder: Path) -> None:
    """Begin when all ranks are ready."""
    (folder / f"ready-{task.rank}").touch()
    end_s = time.monotonic() + PATIENCE_S
    while not all((folder / f"ready-{rank}").exists() for rank in range(task.world)):
        if time.monotonic() > end_s:
            raise SystemExit("the other rank did not come")
        time.sleep(0.001)


def note_states(reader: Any, places: list[int]) -> dict[str, Any]:
    """Read an epoch; return what a checkpoint would hold at some places, and the labels of the batch that comes next."""
    states: dict[str, Any] = {}
    reader.open()
    for place, batch in enumerate(with_state(reader, places, states)):
        if place in places:
            states[str(place)]["labels"] = batch[1].tolist()
        if place >= max(places):
            break
    return states


def with_state(reader: Any, places: list[int], states: dict[str, Any]) -> Iterator[Any]:
    """Yield the batches of an epoch; note the state before some of them."""
    batches = reader.epoch()
    place = 0
    while True:
        if place in places:
            states[str(place)] = {
                "state": reader.state() if place and hasattr(reader, "state") else None
            }
        try:
            yield next(batches)
        except StopIteration:
            return
        place += 1


def first_batch(reader: Any, place: int, noted: dict[str, Any]) -> dict[str, Any]:
    """Begin somewhere; return after what time the first batch was there, and whether it was the right one."""
    begin = clocks()
    reader.open(place, noted["state"])
    _, label = next(reader.epoch())
    end = clocks()
    return {"ms": (end.wall_s - begin.wall_s) * 1e3, "right": label.tolist() == noted["labels"]}


def main(mode: str, name: str, given: dict[str, Any], folder: Path) -> None:
    """Measure, and leave what was found in the folder."""
    torch.set_num_threads(1)
    extra = {key: given.pop(key) for key in ("least_s", "places", "place", "noted") if key in given}
    task = Task(**given | {"folder": Path(given["folder"])})
    reader = READERS[name](task)
    gc.collect()  # what the imports left behind is not measured, whenever it would be collected
    gc.freeze()
    if mode == "read":
        found = read(reader, task, folder, **extra)
    elif mode == "states":
        found = note_states(reader, **extra)
    else:
        found = first_batch(reader, **extra)
    (folder / f"{mode}-{task.rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4]))
