"""Print digest and losses of many short trainings, and compare them with those that this machine stored before.

`python scripts/net.py --store` writes .net.json (or another FILE), `python scripts/net.py` compares with it: the exit code
is 1 if a digest or a loss differs, and every difference is named. Run it before and after a change that should not alter
results. `-k WORD ...` selects cases, `-j` how many run at the same time, `--all` takes every line of scripts/model_table.py.
Captured and compiled cases need a GPU. The file is of one machine and one torch: others round differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET, KILL_AT, STOP_AT = "NET_TARGET", "NET_KILL_AT", "NET_STOP_AT"
STEPS = 8
PATIENCE_S = 300
SETTINGS = (
    "name=net", f"steps={STEPS}", "batch.global_size=16", "batch.lanes=4", "checkpoint.every=2steps",
    "log.every_steps=1", "log.progress=lines",
)  # fmt: skip
TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind. " * 200
TINY = ("layers=1", "heads=2", "embedding_dim=32", "context_length=16", "data_folder=../text.txt")
LOCAL_SGD = ("local_sgd.steps=2", "local_sgd.replicas=4")
TRAININGS: dict[str, tuple[str, tuple[str, ...], tuple[int, ...], int]] = {
    "mnist": ("mnist", (), (1, 2, 3, 4), 3),
    "mnist, BatchNorm and clip": ("mnist", ("norm=batch", "clip_norm=0.5"), (2,), 3),
    "mnist, bf16": ("mnist", ("precision=bf16",), (2,), 1),
    "gpt, ddp": ("gpt", TINY, (2,), 3),
    "gpt, fsdp": ("gpt", (*TINY, "parallel=fsdp"), (2,), 3),
    "gpt, local SGD": ("gpt", (*TINY, *LOCAL_SGD), (2,), 1),
    "dcgan": ("examples/dcgan.py", (), (2,), 1),
    "packed_lstm": ("examples/packed_lstm.py", (), (2,), 1),
    "simclr": ("examples/simclr.py", (), (2,), 1),
    "resnet_ema": ("examples/resnet_ema.py", (), (2,), 1),
    "stream": ("examples/stream.py", (), (2,), 1),
    "gpu, mnist, captured": ("mnist", ("capture=true",), (1, 2), 1),
    "gpu, mnist, BatchNorm, captured": ("mnist", ("capture=true", "norm=batch", "clip_norm=0.5"), (1, 2), 1),
    "gpu, mnist, fp32, captured": ("mnist", ("capture=true", "precision=fp32"), (1, 2), 1),
    "gpu, mnist, compiled": ("mnist", ("compile=true", "capture=false"), (1, 2), 1),
    "gpu, gpt, captured": ("gpt", (*TINY, "capture=true", "compile=false"), (1, 2), 1),
    "gpu, gpt, bf16-master, captured": ("gpt", (*TINY, "capture=true", "precision=bf16-master"), (1, 2), 1),
    "gpu, gpt, compiled": ("gpt", (*TINY, "compile=true", "capture=false"), (1, 2), 1),
    "gpu, gpt, fsdp": ("gpt", (*TINY, "parallel=fsdp", "capture=false", "compile=false"), (1, 2), 1),
}  # fmt: skip
"""Recipe or script, settings, numbers of ranks; and how many ranks resume the run of two that was killed and stopped."""
LINES = (
    "vision: CNN with BatchNorm", "text: GPT with tied weights, fsdp", "text: LSTM", "optimizer: Adafactor", "norm: spectral",
    "optimizer: Muon, local SGD", "parameters: experts, ddp", "buffer: moves by assignment", "workers: augmentation, two",
    "recomputation: reentrant with BatchNorm", "sparse: Embedding, Adagrad", "bf16-master: layers, fsdp",
)  # fmt: skip
"""What is trained of scripts/model_table.py without --all."""

Result = dict[str, Any]
"""digest and losses by step; and "failed", where something did."""


def main() -> int:
    """Train the chosen cases; store or compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / ".net.json")
    parser.add_argument("--store", action="store_true", help="write the file instead of comparing")
    parser.add_argument("--all", action="store_true", help="every line of scripts/model_table.py")
    parser.add_argument("-k", nargs="+", default=[], help="only cases that contain all these words")
    parser.add_argument("-j", type=int, default=2, help="cases to train at the same time")
    known = parser.parse_args()
    here, stored = machine(), {"machine": {}, "cases": {}}
    if known.file.is_file():
        stored = json.loads(known.file.read_text(encoding="utf-8"))
    elif not known.store:
        parser.error(f"there is no {known.file}; write it with --store, before the change")
    if not known.store and stored["machine"] != here:
        parser.error(f"{known.file} is of {stored['machine']}, and this machine is {here}")
    begun, found = time.monotonic(), {}
    with tempfile.TemporaryDirectory(prefix="paceline-net-") as folder:
        (Path(folder) / "text.txt").write_text(TEXT, encoding="utf-8")
        every = dict(cases(Path(folder), has_gpu="gpu" in here, with_all=known.all))
        chosen = [name for name in every if all(word in name for word in known.k)]
        with ThreadPoolExecutor(known.j) as pool:
            results = pool.map(lambda name: every[name](), chosen)
            for name, result in zip(chosen, results, strict=True):
                found[name] = result
                losses = [f"{loss:.4f}" for loss in result["losses"].values()]
                print(f"{name:<66} {result['digest'][:16]} {' '.join(losses)}", flush=True)
    wrong = [f"{name}: {result['failed']}" for name, result in found.items() if "failed" in result]
    if not known.store:
        wrong += differences(stored["cases"], found)
    elif not wrong:
        before = stored["cases"] if known.k and stored["machine"] == here else {}
        table = {"machine": here, "cases": before | found}
        known.file.write_text(json.dumps(table, indent=1), encoding="utf-8")
    verdict = f"{len(wrong)} are wrong" if wrong else "stored" if known.store else "all the same"
    print("\n".join([*wrong, f"{len(found)} cases in {time.monotonic() - begun:.0f} s: {verdict}"]))
    return int(bool(wrong) or not found)


def differences(stored: dict[str, Result], found: dict[str, Result]) -> Iterator[str]:
    """Yield a line per case that the file has not, and per digest and first loss that differ from it."""
    for name, now in found.items():
        before = stored.get(name)
        if before is None:
            yield f"{name}: is not in the file; store it from the code before the change"
        elif "failed" not in now:
            was, is_now = before["losses"], now["losses"]
            steps = [step for step in was | is_now if was.get(step) != is_now.get(step)]
            if steps:
                first = f"{was.get(steps[0])!r}, is {is_now.get(steps[0])!r}"
                yield f"{name}: {len(steps)} losses differ; that of step {steps[0]} was {first}"
            if before["digest"] != now["digest"]:
                yield f"{name}: the digest was {before['digest'][:16]}, is {now['digest'][:16]}"


def cases(folder: Path, *, has_gpu: bool, with_all: bool) -> Iterator[tuple[str, partial[Result]]]:
    """Yield every case by name, as a function that trains it below a folder."""
    for name, (target, settings, worlds, resumed_on) in TRAININGS.items():
        on_gpu = name.startswith("gpu, ")
        if on_gpu and not has_gpu:
            continue
        given = ("device=cuda" if on_gpu else "device=cpu", *settings)
        for world in worlds:
            yield f"{name}, {world} ranks", partial(trained, folder, target, given, world)
        label = f"{name}, killed and stopped on 2 ranks, resumed on {resumed_on}"
        yield label, partial(interrupted, folder, target, given, resumed_on)
    from combinations.table import COMBINATIONS

    for name in COMBINATIONS if with_all else LINES:
        yield f"table, {name}", partial(judged, folder, name)


def judged(folder: Path, name: str) -> Result:
    """Train one line of the table in all ways, and once more for its record."""
    from combinations.ranks import RankGroup, preload
    from combinations.verdicts import Judge

    preload()
    home = Path(tempfile.mkdtemp(dir=folder))
    judge, alone = Judge(home / "judge"), RankGroup(1, home)
    try:
        verdict = judge.judge(name)
        if not verdict.is_good:
            return failure(str(verdict))
        [answer] = alone.train(name, home / "alone", -1)
    finally:
        judge.close()
        alone.close()
    record = json.dumps(answer.record, sort_keys=True)
    return {"digest": hashlib.sha256(record.encode()).hexdigest(), "losses": {}}


def trained(folder: Path, target: str, settings: tuple[str, ...], world: int) -> Result:
    """Train without interruption, by the command that a user types."""
    home, words = Path(tempfile.mkdtemp(dir=folder)), ["train", target, "-n", str(world)]
    if "." in target:
        words = ["run", "-n", str(world), str(ROOT / target)]
    return run(home, words, settings, 0, {}) or result_of(home)


def interrupted(folder: Path, target: str, settings: tuple[str, ...], world: int) -> Result:
    """Train on two ranks, one of which is killed and restarted; stop; resume on another number of ranks."""
    home, script = Path(tempfile.mkdtemp(dir=folder)), str(Path(__file__).resolve())
    env = {TARGET: target, KILL_AT: "3", STOP_AT: "5"}
    failed = run(home, ["run", "-n", "2", script], settings, 75, env)
    if not failed:
        words = ["run", "-n", str(world), script]
        failed = run(home, words, settings, 0, {TARGET: target})
    return failed or result_of(home)


def run(
    home: Path, words: list[str], settings: tuple[str, ...], code: int, env: dict[str, str]
) -> Result | None:
    """Run a command in a folder; return what failed, or None if it ended with the expected exit code."""
    command = [sys.executable, "-m", "paceline", *words, *SETTINGS, *settings]
    how = {"cwd": home, "env": os.environ | env, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, timeout=PATIENCE_S, check=False, **how)
    except subprocess.TimeoutExpired:
        return failure(f"it took more than {PATIENCE_S} s")
    if done.returncode == code:
        return None
    return failure(f"exit code {done.returncode} instead of {code}: {done.stderr[-600:]}")


def failure(why: str) -> Result:
    """Return the result of a case that failed."""
    return {"digest": "FAILED", "losses": {}, "failed": why}


def result_of(home: Path) -> Result:
    """Return the digest that the run printed, and the last loss of every step."""
    lines = (home / "runs" / "net" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    losses = {str(each["step"]): each["loss"] for each in events if each["event"] == "StepDone"}
    return {"digest": events[-1]["digest"], "losses": losses}


def train_with_interruptions(target: str) -> None:
    """On a rank: run a recipe or a script, and end the last rank in one step, once, and all ranks in another."""
    import paceline

    kill_at, stop_at = (int(os.environ.get(name, "-1")) for name in (KILL_AT, STOP_AT))
    steps = paceline.Run.steps

    def steps_until(run: paceline.Run, *words: Any, **more: Any) -> Iterator[Any]:
        for step in steps(run, *words, **more):
            is_last = run.world.rank == run.world.size - 1
            if step.index == kill_at and is_last and not Path("killed").exists():
                while not any(Path("runs/net/checkpoints").glob("step-*/manifest.json")):
                    time.sleep(0.02)  # without a checkpoint, the launcher does not restart
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if step.index == stop_at and is_last:
                os.kill(os.getpid(), signal.SIGTERM)
            yield step

    paceline.Run.steps = steps_until  # type: ignore[method-assign]
    if "." in target:
        runpy.run_path(str(ROOT / target), run_name="__main__")
    else:
        runpy.run_module(f"paceline.recipes.{target}", run_name="__main__", alter_sys=True)


def machine() -> dict[str, str]:
    """Return what decides about the rounding: processor, torch, and the GPU, if there is one."""
    import torch

    from paceline.world.machine import cpu_name

    facts = {"cpu": cpu_name(), "torch": torch.__version__}
    return facts | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


if __name__ == "__main__":
    if TARGET in os.environ:
        train_with_interruptions(os.environ[TARGET])
    else:
        sys.exit(main())
