"""Do the MLflow and Weights & Biases loggers do what they say, with the real packages? `python scripts/logger_services.py`.

Both packages are large, so they are no part of the tests: run this where `pip install mlflow-skinny wandb` was done. MLflow writes
to a local store, Weights & Biases runs offline; nothing leaves the machine. A run is told up to step 8, breaks off, goes on from
step 4 and ends at step 12; every step must be there once.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paceline.events import EpochDone, Event, RunEnded, RunStarted, StepDone
from paceline.train.observers.sinks.mlflow import MlflowSink
from paceline.train.observers.sinks.wandb import WandbSink

SETTINGS = {"name": "trial", "lr.base": 0.1, "seed": 3}


def told(first: int, last: int) -> list[Event]:
    """Return what a start of the run tells."""
    steps: list[Event] = [
        StepDone(n, 1, n * 8, 1 / n, 0.1, 64.0) for n in range(first + 2, last + 1, 2)
    ]
    start = RunStarted(1, "cpu", "alone", 32, 8, 4, 0.1, 12, "", first)
    return [
        start,
        *steps,
        EpochDone(1, 1, last, 0.5, 64.0, {"acc": 0.75, "eval_loss": float("nan")}),
    ]


def tell(kind: Any, path: Path) -> None:
    """Tell two starts of a run, the first of which breaks off."""
    for first, last in ((0, 8), (4, 12)):
        sink = kind(path, "trial", SETTINGS, is_new=False)
        for event in [*told(first, last), *([RunEnded(12, 1.0, "d")] if last == 12 else [])]:
            sink(event)
        sink.close(failed=last == 8)


def in_a_thread(kind: Any, path: Path) -> None:
    """Tell it from a thread, as a training does."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(tell, kind, path).result()


def check_mlflow(folder: Path) -> None:
    """Tell MLflow, then ask it."""
    os.environ["MLFLOW_TRACKING_URI"] = (
        os.environ.get("MLFLOW_TRACKING_URI") or f"file://{folder}/mlruns"
    )
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # newer ones ask for a database, unless told
    in_a_thread(MlflowSink, folder / "mlflow.json")
    from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

    client = MlflowClient()
    name = json.loads((folder / "mlflow.json").read_text(encoding="utf-8"))["name"]
    run = client.get_run(name)
    steps = [point.step for point in client.get_metric_history(name, "train/loss")]
    assert steps == [2, 4, 6, 8, 10, 12], steps
    assert [point.step for point in client.get_metric_history(name, "eval/acc")] == [8, 12]
    assert run.data.params == {key: str(value) for key, value in SETTINGS.items()}, run.data.params
    assert run.info.status == "FINISHED", run.info.status
    assert len(client.search_runs([run.info.experiment_id])) == 1
    print(f"mlflow: run {name}, every step once, parameters and status as told")


def records_of(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file of theirs: LevelDB's log, after seven bytes of their own."""
    place, record = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in {1, 4}:  # whole, or the last part
            yield record
            record = b""


def check_wandb(folder: Path) -> None:
    """Tell wandb offline, then read the files that it would send."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    in_a_thread(WandbSink, folder / "wandb.json")
    from wandb.proto import wandb_internal_pb2  # type: ignore[import-not-found, unused-ignore]

    losses: list[int] = []
    for path in sorted(folder.rglob("*.wandb")):
        for data in records_of(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {
                item.key or ".".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            losses += [int(items["step"])] if "train/loss" in items else []
    assert losses == [2, 4, 6, 8, 10, 12], losses
    print("wandb: two offline parts of one run, every step once")


if __name__ == "__main__":
    checks = {"mlflow": check_mlflow, "wandb": check_wandb}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="?", choices=checks, help="default: both")
    with tempfile.TemporaryDirectory() as place:
        which = parser.parse_args().which
        for name in [which] if which else checks:
            checks[name](Path(place))
