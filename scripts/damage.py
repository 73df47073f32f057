"""What a run goes on from after its newest checkpoint was damaged: good bytes only, and it says so.

`python scripts/damage.py [--count 500] [--seed 0] [--only "flipped bit"]`. Every trial has a store of its own, with an
older good checkpoint and a newer one that is damaged, or is being written when something goes wrong. Then it is read
as a run reads it when it goes on. What comes out must be the older content or the newer one, bit for bit. The older
one must still be there, unless the newer one is good and only one was to be kept. And there must be a word of it: what
was found to be damaged, why a save failed, or what a launcher says of a rank that was killed; of two writers at once,
that one has saved. Exit code 1 if any of this fails.

The full disk is a small tmpfs in a mount namespace of our own: it needs root, and is left out without it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from paceline import handover
from paceline.checkpoint.local_storage import LocalStorage
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.restore import newest_good, read_tensors
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.save import Saver
from paceline.checkpoint.storage import verify
from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.launch.failure import RankEnd, find_culprit
from paceline.world.collectives import all_gather_texts
from paceline.world.process_group import join
from paceline.world.world import World

OLDER, NEWER = 10, 20
WORLDS = (1, 2, 3)
PAGE = 4096
FORK = multiprocessing.get_context("fork")

Content = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Type, shape and bytes of every tensor."""


@dataclass
class Trial:
    """One store, what may come out of it, and what was said."""

    root: Path
    dice: random.Random
    templates: Path
    save_s: float = 0.0
    keep: int = 3
    newer: list[int] = field(default_factory=lambda: [NEWER])
    """The contents that the newer checkpoint may have; none if only the older one may be taken."""
    must_be_newer: bool = False
    words: list[str] = field(default_factory=list)

    def start_from(self, world_size: int, *steps: int) -> None:
        """Put good checkpoints into the store."""
        for step in steps:
            name = f"step-{step:09d}"
            shutil.copytree(self.templates / str(world_size) / name, self.root / name)

    def newest_files(self) -> list[Path]:
        """Return the files of the newer checkpoint, the manifest among them."""
        return sorted((self.root / f"step-{NEWER:09d}").iterdir())


@dataclass
class Tally:
    """What became of the trials of one case."""

    count: int = 0
    newer: int = 0
    older: int = 0
    bad_bytes: int = 0
    lost: int = 0
    silent: int = 0
    example: str = ""

    @property
    def fine(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.bad_bytes or self.lost or self.silent)


@cache
def tensors_of(seed: int) -> dict[str, Tensor]:
    """Return a state of about 2 MB: many sizes, several types, also a lone number and an empty tensor."""
    generator = torch.Generator().manual_seed(seed)
    found = {
        f"model.{number}": torch.randn(1 + 7919 * number % 60_000, generator=generator)
        for number in range(1, 13)
    }
    found |= {
        f"optimizer.exp_avg.{number}": found[f"model.{number}"].bfloat16()
        for number in range(1, 13)
    }
    return found | {
        "model.count": torch.tensor(seed),
        "model.empty": torch.empty(0, 3),
        "model.mask": found["model.1"] > 0,
    }


def content_of(tensors: dict[str, Tensor]) -> Content:
    """Return the bytes of tensors."""
    return {
        name: (
            str(value.dtype),
            tuple(value.shape),
            value.reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, value in tensors.items()
    }


def save(root: Path, step: int, seed: int, keep: int = 3, world: World | None = None) -> list[str]:
    """Save a checkpoint as a run does; return where it is, or nothing if there was one already."""
    world = world or World()
    token = all_gather_texts(world, secrets.token_hex(4))[0]
    saver = Saver(LocalStorage(root), world, token, retention=Retention(keep))
    saver.save(tensors_of(seed), Manifest(step=step, samples=step, files={}))
    saver.close()
    return [done.where for done in saver.finished()]


def save_as_rank(root: Path, rank: int, size: int, meeting: Path) -> None:
    """Save both checkpoints as one of several ranks."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        handover.MEETING: str(meeting / "meeting"),
    }
    with join(RunConfig()) as world:
        for step in (OLDER, NEWER):
            save(root, step, step, world=world)


def make_templates(folder: Path) -> None:
    """Make the two checkpoints, as worlds of several sizes save them."""
    for size in WORLDS:
        meeting = folder / f"meeting-{size}"
        meeting.mkdir(mode=0o700)
        words = [(folder / str(size), rank, size, meeting) for rank in range(size)]
        ranks = [FORK.Process(target=save_as_rank, args=word) for word in words]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
            assert rank.exitcode == 0, f"a world of {size} could not save"


def flip_a_bit(trial: Trial) -> None:
    """Flip any bit of any file."""
    trial.start_from(trial.dice.choice(WORLDS), OLDER, NEWER)
    path = trial.dice.choice(trial.newest_files())
    content = bytearray(path.read_bytes())
    content[trial.dice.randrange(len(content))] ^= 1 << trial.dice.randrange(8)
    path.write_bytes(content)
    trial.newer = []


def truncate(trial: Trial) -> None:
    """Cut a file at any byte."""
    trial.start_from(trial.dice.choice(WORLDS), OLDER, NEWER)
    path = trial.dice.choice(trial.newest_files())
    os.truncate(path, trial.dice.randrange(path.stat().st_size))
    trial.newer = []


def lose_a_file(trial: Trial) -> None:
    """Remove a file."""
    trial.start_from(trial.dice.choice(WORLDS), OLDER, NEWER)
    trial.dice.choice(trial.newest_files()).unlink()
    trial.newer = []


def write_twice(trial: Trial) -> None:
    """Let two processes write the same step at once, with different contents: exactly one wins."""
    trial.start_from(trial.dice.choice(WORLDS), OLDER)
    go = FORK.Event()
    writers = [Child(trial, seed, go.wait) for seed in (NEWER, NEWER + 1)]
    go.set()
    said = {writer.seed: writer.end() for writer in writers}
    trial.newer = [seed for seed, words in said.items() if words == ["saved"]]
    trial.must_be_newer = len(trial.newer) == 1
    trial.words += [word for words in said.values() for word in words]
    if not trial.must_be_newer:
        trial.newer = []


def kill_while_saving(trial: Trial) -> None:
    """Send SIGKILL at any moment of a save, its deletions included."""
    trial.keep = trial.dice.choice((1, 3))
    trial.start_from(trial.dice.choice(WORLDS), OLDER)
    child = Child(trial, NEWER)
    time.sleep(trial.dice.uniform(0.0, 1.3) * trial.save_s)
    child.process.kill()
    words = child.end()
    trial.must_be_newer = words == ["saved"]
    trial.words += words or [find_culprit([RankEnd(0, -signal.SIGKILL, time.time())]).message]


def fill_the_disk(trial: Trial) -> None:
    """Save to a disk on which the older checkpoint fits and the newer one does not."""
    world_size = trial.dice.choice(WORLDS)
    older = pages(trial.templates / str(world_size) / f"step-{OLDER:09d}")
    newer = pages(trial.templates / "1" / f"step-{NEWER:09d}")
    size = PAGE * (older + trial.dice.randrange(newer))
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(trial.root)],
        check=True,
    )
    trial.start_from(world_size, OLDER)
    trial.newer = []
    try:
        save(trial.root, NEWER, NEWER)
    except PacelineError as error:
        trial.words.append(str(error))


CASES: dict[str, Callable[[Trial], None]] = {
    "flipped bit": flip_a_bit,
    "truncated file": truncate,
    "missing file": lose_a_file,
    "two writers at once": write_twice,
    "killed while saving": kill_while_saving,
    "full disk": fill_the_disk,
}


class Child:
    """A process that saves; it has imported everything already when it begins."""

    def __init__(self, trial: Trial, seed: int, wait: Callable[[], object] = lambda: None) -> None:
        self.seed = seed
        self._pipe, theirs = FORK.Pipe()
        tensors_of(seed)  # so that they are there when it begins
        self.process = FORK.Process(
            target=self._run, args=(trial.root, seed, trial.keep, wait, theirs)
        )
        self.process.start()
        theirs.close()
        self._pipe.recv()

    @staticmethod
    def _run(
        root: Path, seed: int, keep: int, wait: Callable[[], object], pipe: Connection
    ) -> None:
        pipe.send("ready")
        wait()
        try:
            pipe.send("saved" if save(root, NEWER, seed, keep) else "")
        except PacelineError as error:
            pipe.send(str(error))

    def end(self) -> list[str]:
        """Return what it said, if it lived to say it."""
        self.process.join(120)
        words = []
        with suppress(EOFError, OSError), self._pipe:
            while self._pipe.poll():
                words.append(self._pipe.recv())
        return words


def rehearse(folder: Path) -> float:
    """Return how long a child takes to save, here and now: the median of a few."""
    taken = []
    for number in range(9):
        child = Child(Trial(folder / f"rehearsal-{number}", random.Random(), folder), NEWER)
        begun = time.perf_counter()
        assert child.end() == ["saved"]
        taken.append(time.perf_counter() - begun)
    return sorted(taken)[4]


def pages(folder: Path) -> int:
    """Return how many pages of memory a folder's files fill."""
    return sum(-(-path.stat().st_size // PAGE) for path in folder.iterdir())


def judge(trial: Trial, tally: Tally) -> None:
    """Read the store as a run does that goes on, and count what is wrong."""
    storage = LocalStorage(trial.root)
    told: list[str] = []
    step, content = 0, None
    try:
        storage.sweep()
        if found := newest_good(storage, World(), lambda _, why: told.append(why)):
            step, content = found.step, content_of(dict(read_tensors(storage, found)))
    except Exception as error:  # noqa: BLE001 - whatever comes out of here, a run could not go on
        told.append(f"{type(error).__name__}: {error}")
    expected = {
        OLDER: [content_of(tensors_of(OLDER))],
        NEWER: [content_of(tensors_of(seed)) for seed in trial.newer],
    }
    good = content in expected.get(step, [])
    told += trial.words
    tally.count += 1
    tally.newer += good and step == NEWER
    tally.older += good and step == OLDER
    tally.bad_bytes += content is not None and not good
    tally.lost += (
        content is None
        or (trial.must_be_newer and step != NEWER)
        or not _older_is_left(trial, storage, step)
    )
    tally.silent += not any(told)
    tally.example = tally.example or next(
        (" ".join(words.split()) for words in told if words != "saved"), ""
    )


def _older_is_left(trial: Trial, storage: LocalStorage, taken: int) -> bool:
    """Return whether the older checkpoint is whole, or was to be deleted since the newer one is."""
    if taken == NEWER and trial.keep == 1:
        return True
    try:
        manifest = verify(storage, OLDER)
        return content_of(dict(read_tensors(storage, manifest))) == content_of(tensors_of(OLDER))
    except PacelineError:
        return False


@contextmanager
def store_in(folder: Path, number: int) -> Iterator[Path]:
    """Yield a folder for one trial; nothing of it stays."""
    root = folder / f"store-{number}"
    root.mkdir(mode=0o700)
    try:
        yield root
    finally:
        if root.is_mount():
            subprocess.run(["umount", str(root)], check=True)
        shutil.rmtree(root)


def run(names: Sequence[str], count: int, seed: int) -> dict[str, Tally]:
    """Deal the trials out over the cases, and count."""
    torch.set_num_threads(1)  # this process forks
    tallies: dict[str, Tally] = defaultdict(Tally)
    with tempfile.TemporaryDirectory(prefix="damage-") as name:
        folder = Path(name)
        make_templates(folder)
        save_s = rehearse(folder)
        for number in range(count):
            case = names[number % len(names)]
            with store_in(folder, number) as root:
                trial = Trial(root, random.Random(f"{seed} {number}"), folder, save_s)
                CASES[case](trial)
                judge(trial, tallies[case])
    return tallies


def table(tallies: dict[str, Tally]) -> str:
    """Return the figures of all cases."""
    row = "{:<20} {:>6} {:>11} {:>11} {:>10} {:>10} {:>16}".format
    total = Tally(
        *(sum(getattr(one, name) for one in tallies.values()) for name in list(vars(Tally()))[:-1])
    )
    lines = [
        row(
            "case", "trials", "took newer", "took older", "bad bytes", "good lost", "without a word"
        )
    ]
    for name, one in [*tallies.items(), ("all", total)]:
        lines.append(
            row(name, one.count, one.newer, one.older, one.bad_bytes, one.lost, one.silent)
        )
    return "\n".join([*lines, "", *(f"{name}: {one.example}" for name, one in tallies.items())])


def may_mount() -> bool:
    """Return whether we can have a mount namespace of our own."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    return (
        subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode
        == 0
    )


def main() -> int:
    """Run all trials; exit with 1 if any went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=500, help="trials over all cases (default 500)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", action="append", choices=list(CASES), help="only this case; may be given again"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    known = parser.parse_args()
    names = known.only or list(CASES)
    if "full disk" in names and not known.apart:
        if may_mount():
            again = ["unshare", "--mount", sys.executable, *sys.argv, "--apart"]
            os.execvp(again[0], again)  # noqa: S606 - nothing that we mount is seen outside
        names = [name for name in names if name != "full disk"]
        print("full disk: left out, as it needs root and mount namespaces", file=sys.stderr)
    begun = time.monotonic()
    tallies = run(names, known.count, known.seed) if names else {}
    if known.json:
        print(json.dumps({name: vars(one) for name, one in tallies.items()}))
    else:
        print(
            f"{table(tallies)}\n\n{known.count} trials, seed {known.seed}, {time.monotonic() - begun:.0f} s"
        )
    return 0 if all(one.fine for one in tallies.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
