"""Does a rank report what it uses, at the cost of a few reads, and does the report show it?"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from paceline.report.page.usage_charts import usage_of
from paceline.rundir import RunDir
from paceline.telemetry.heartbeat import Beat, Heartbeat
from paceline.telemetry.rank_times import RankTimes, read_samples
from paceline.telemetry.usage import UsageMeter
from paceline.world.world import World


def test_memory_and_cores_are_those_of_this_process() -> None:
    meter = UsageMeter()
    before = meter.sample()["memory_bytes"]
    block = bytearray(b"x") * 200_000_000
    begun = time.process_time()
    while time.process_time() - begun < 0.05:
        pass
    found = meter.sample()
    assert found["memory_bytes"] - before > 0.9 * len(block)
    assert 0 < found["cpu_cores"] < 64
    assert not {"gpu_bytes", "gpu_busy"} & set(found)


def test_a_gpu_that_cannot_be_read_is_left_out() -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("the driver is gone")

    assert set(UsageMeter(broken).sample()) == set(UsageMeter().sample())
    assert UsageMeter(lambda: {"gpu_busy": 0.123456}).sample()["gpu_busy"] == 0.1235


def test_every_beat_carries_the_usage(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "run")
    usage = UsageMeter(lambda: {"gpu_bytes": 5e9})
    with Heartbeat(folder, World(), every_s=0.0, usage=usage) as heartbeat:
        for step in heartbeat.reading([1, 2, 3, 4]):
            heartbeat.step_done(step, time.perf_counter())
    beat = Beat.parse(folder.beat(0).read_text())
    assert beat.usage["gpu_bytes"] == 5e9
    assert beat.usage["memory_bytes"] > 1e6


def test_the_spread_over_ranks_is_kept_and_drawn(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    kept = RankTimes(path, 2)
    for step in range(1, 1001):
        cores = [{"cpu_cores": n + step / 1000} for n in (0, 1)]
        kept.add([Beat(n, "n", step, 0, 0.1, 0, steps=9, usage=cores[n]) for n in (0, 1)])
    assert len(read_samples(path)) <= 480
    curve = usage_of(path)["cpu_cores"]
    assert (min(curve["low"]), max(curve["high"])) == (0.001, 2.0)
    assert abs(curve["mean"][-1] - 1.5) < 0.01
    with path.open("a") as file:  # hostile or of another version
        bad = ({"cpu_cores": [1, "x", 2]}, {"cpu_cores": [9, 1, 2]}, {"odd": [1, 1, 1]}, 7)
        for step, usage in enumerate(bad, 2000):
            file.write(json.dumps({"step": step, "own_s": [1], "usage": usage}) + "\n")
    assert max(usage_of(path)["cpu_cores"]["mean"]) < 2.0


@pytest.mark.gpu
def test_the_memory_and_utilization_of_a_gpu_are_read() -> None:
    import torch

    from paceline.train.observers.gpu_usage import gpu_usage

    read = gpu_usage("cuda:0")
    before = read()
    held = torch.empty(100_000_000, dtype=torch.uint8, device="cuda:0")
    found = read()
    assert found["gpu_bytes"] - before["gpu_bytes"] >= held.numel()
    assert found["gpu_peak_bytes"] >= held.numel()
    assert 0 <= found["gpu_busy"] <= 1
