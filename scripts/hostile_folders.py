"""Run folders that were damaged or forged: what Paceline does with them.

`python scripts/hostile_folders.py [--count 1000] [--first 0] [--seed 0] [--only "FIFO"] [--json]`. Every trial copies a run folder,
damages it in one way, and does one thing with it: resume the training, or read the folder with `watch`, `report`,
`hang`, `ckpt list`, `ckpt check` or `ckpt export`. A training that resumes must end with the weights of a run that was
never interrupted. Every other outcome must be an error with a fix, within 5 seconds. A canary beside the run folder, to
which planted links lead, must stay as it is, and nothing may connect to any host. Exit code 1 if any of this fails.

`scripts/damage.py` does the same for checkpoints that are damaged while they are written.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

import paceline
from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.manifest import FileFacts
from paceline.cli.main import exit_code_of, run_verb
from paceline.config.values import with_settings
from paceline.recipes.toy import FEATURES, ToyConfig, samples

SAVED, STEPS = (4, 8), 12
LIMIT_S, PATIENT_S = 5.0, 20.0
CANARY = b"not yours\n"
READERS = (
    ("watch", "x", "--once"),
    ("watch", "x", "--json"),
    ("report", "x", "--to", "page.html"),
    ("hang", "x"),
    ("ckpt", "list", "runs/x"),
    ("ckpt", "check", "runs/x"),
    ("ckpt", "export", "runs/x", "weights.safetensors"),
)
RESUME = ("resume",)


@dataclass
class Trial:
    """A copy of the run folder, and the dice."""

    home: Path
    dice: random.Random
    target: str = ""
    """What was damaged, for the report."""

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.home / "runs" / "x"

    @property
    def newest(self) -> Path:
        """The newest checkpoint."""
        return self.run / "checkpoints" / f"step-{SAVED[-1]:09d}"

    def any_file(self, pattern: str = "**/*") -> Path:
        """Choose a file of the run folder."""
        files = sorted(path for path in self.run.glob(pattern) if path.is_file())
        chosen = self.dice.choice(files)
        self.target = str(chosen.relative_to(self.run))
        return chosen

    def replaced(self) -> Path:
        """Choose a file and remove it, so that something else can take its place."""
        path = self.any_file()
        path.unlink()
        return path


@dataclass
class Tally:
    """What became of the trials of one kind."""

    trials: int = 0
    resumed: int = 0
    refused: int = 0
    wrong_loads: int = 0
    waits: int = 0
    tracebacks: int = 0
    written_through: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """The number of violations."""
        return self.wrong_loads + self.waits + self.tracebacks + self.written_through


# ----- kinds of damage: to any file of the run folder


def flip_bit(trial: Trial) -> None:
    """Flip a bit of any file."""
    path = trial.any_file()
    content = bytearray(path.read_bytes() or b"\0")
    content[trial.dice.randrange(len(content))] ^= 1 << trial.dice.randrange(8)
    path.write_bytes(content)


def truncate(trial: Trial) -> None:
    """Cut a file at any byte."""
    path = trial.any_file()
    os.truncate(path, trial.dice.randrange(path.stat().st_size + 1))


def lose(trial: Trial) -> None:
    """Remove a file."""
    trial.replaced()


def fill_with_noise(trial: Trial) -> None:
    """Fill a file with random bytes."""
    trial.any_file().write_bytes(trial.dice.randbytes(trial.dice.choice((1, 100, 5000))))


def make_fifo(trial: Trial) -> None:
    """Put a FIFO in the place of a file: who opens it waits."""
    os.mkfifo(trial.replaced())


def make_socket(trial: Trial) -> None:
    """Put a socket in the place of a file."""
    path, here = trial.replaced(), Path.cwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as plug:
            plug.bind(path.name)
    finally:
        os.chdir(here)


def link_device(trial: Trial) -> None:
    """Put a link to a device in the place of a file."""
    trial.replaced().symlink_to(trial.dice.choice(("/dev/zero", "/dev/full", "/dev/tty")))


def link_canary(trial: Trial) -> None:
    """Put a link to a file outside in the place of a file."""
    trial.replaced().symlink_to(trial.home / "canary")


def link_own_copy(trial: Trial) -> None:
    """Move a file out of the folder, and link to it."""
    path = trial.any_file()
    aside = trial.home / "elsewhere"
    path.rename(aside)
    path.symlink_to(aside)


def link_loop(trial: Trial) -> None:
    """Put a link to itself in the place of a file."""
    path = trial.replaced()
    path.symlink_to(path.name)


def link_folder(trial: Trial) -> None:
    """Put a link to a folder outside in the place of a folder."""
    folders = sorted(path for path in trial.run.rglob("*") if path.is_dir())
    chosen = trial.dice.choice(folders)
    trial.target = str(chosen.relative_to(trial.run))
    aside = trial.home / "canaries"
    shutil.rmtree(chosen)
    aside.mkdir()
    chosen.symlink_to(aside)


def make_folder(trial: Trial) -> None:
    """Put a folder in the place of a file."""
    trial.replaced().mkdir()


def grow(trial: Trial) -> None:
    """Make a file larger than any memory."""
    os.truncate(trial.any_file(), 1 << 43)


def nest_deeply(trial: Trial) -> None:
    """Nest JSON more deeply than Python parses."""
    trial.any_file("**/*.json*").write_bytes(b"[" * 200_000)


def long_line(trial: Trial) -> None:
    """Write one line that does not end."""
    trial.any_file("**/*.json*").write_bytes(b'{"event": "' + b"x" * (64 << 20))


STRANGE: tuple[Any, ...] = (
    "text", "9" * 5000, -1, 2**70, 1e308, float("nan"), float("inf"), None, True, [], {}, [[]], {"a": {}}, "\x1b[2J", "\ud800",
)  # fmt: skip


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a tree of JSON."""
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in parts:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from leaves(value, (*path, key))


def with_strange_value(tree: Any, dice: random.Random) -> Any:
    """Return a tree of JSON with a strange value somewhere."""
    places = list(leaves(tree)) if isinstance(tree, dict | list) else []
    if not places:
        return dice.choice(STRANGE)
    *path, last = dice.choice(places)
    inner = tree
    for key in path:
        inner = inner[key]
    kind = kind_of(inner[last])
    inner[last] = dice.choice([value for value in STRANGE if kind_of(value) != kind])
    return tree


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value: a number in the place of another is no damage that anyone could see."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if is_number else type(value).__name__


def wrong_type(trial: Trial) -> None:
    """Put text where a number belongs, and the like, into a line of a file of JSON."""
    path = trial.any_file("**/*[ts]*")
    with contextlib.suppress(ValueError):
        lines = path.read_text().split("\n") if path.suffix == ".jsonl" else [path.read_text()]
        number = trial.dice.randrange(len(lines))
        lines[number] = json.dumps(with_strange_value(json.loads(lines[number]), trial.dice))
        path.write_text("\n".join(lines))


def wrong_setting(trial: Trial) -> None:
    """Change the type of a setting."""
    path = trial.run / "config.toml"
    trial.target = "config.toml"
    lines = path.read_text().split("\n")
    number = trial.dice.randrange(len(lines))
    key = lines[number].partition("=")[0] or "x "
    value = trial.dice.choice(
        ('"text"', "-1", "1e308", "nan", "[]", "{}", "2000-01-01", '"\\u001b[2J"', '"../.."', "=")
    )
    lines[number] = f"{key}= {value}"
    path.write_text("\n".join(lines))


# ----- kinds of damage: to the newest checkpoint, with right checksums


def forge(trial: Trial, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of the newest checkpoint, and give it the right checksum."""
    path = trial.newest / manifests.MANIFEST
    trial.target = str(path.relative_to(trial.run))
    tree = json.loads(path.read_bytes())
    tree.pop("xxh3")
    change(tree)
    body = json.dumps(tree, indent=1).encode().removesuffix(b"\n}")
    path.write_bytes(body + manifests._end(body))  # noqa: SLF001 - a forger knows it, too


def forge_file(trial: Trial, content: bytes) -> None:
    """Replace the tensors of the newest checkpoint, with right checksums."""

    def change(tree: dict[str, Any]) -> None:
        name = next(iter(tree["files"]))
        (trial.newest / name).write_bytes(content)
        tree["files"][name] = vars(FileFacts(len(content), xxhash.xxh3_64_hexdigest(content)))

    forge(trial, change)


def forged_header(trial: Trial) -> None:
    """Claim a header that is not there."""
    length = trial.dice.choice((1 << 40, 1 << 63, 0, 99_999_999))
    forge_file(trial, length.to_bytes(8, "little") + b"{}")


def forged_tensors(trial: Trial) -> None:
    """Change the header of the tensors: shapes, types, offsets, names."""
    path = next(iter(trial.newest.glob("*.safetensors")))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    tree = with_strange_value(json.loads(content[8 : 8 + length]), trial.dice)
    text = json.dumps(tree).encode()
    forge_file(trial, len(text).to_bytes(8, "little") + text + content[8 + length :])


def forged_no_files(trial: Trial) -> None:
    """List no files."""
    forge(trial, lambda tree: tree.update(files={}))


def forged_types(trial: Trial) -> None:
    """Put text where a number belongs, and the like, into the manifest."""
    forge(trial, lambda tree: with_strange_value(tree, trial.dice))


def forged_values(trial: Trial) -> None:
    """Change what the manifest says of the state of the trainer."""
    forge(trial, lambda tree: with_strange_value(tree["values"], trial.dice))


def forged_lost_value(trial: Trial) -> None:
    """Leave out a value of the manifest."""

    def change(tree: dict[str, Any]) -> None:
        inner = tree[trial.dice.choice(("values", "config"))]
        inner.pop(trial.dice.choice(sorted(inner)))

    forge(trial, change)


def forged_size(trial: Trial) -> None:
    """Claim a size that no memory has."""
    size = trial.dice.choice((1 << 40, 1 << 62, 10**30))
    forge(trial, lambda tree: next(iter(tree["files"].values())).update(size_bytes=size))


def forged_name(trial: Trial) -> None:
    """Name files outside of the checkpoint."""
    name = trial.dice.choice(
        ("../../../../canary", "/etc/passwd", "..", ".", "a/b", "manifest.json")
    )
    forge(trial, lambda tree: tree.update(files={name: vars(FileFacts(10, "0" * 16))}))


def other_name(trial: Trial) -> None:
    """Copy the newest checkpoint to names that only look like those of checkpoints."""
    alphabets = ("0000000099", "٠٠٠٠٠٠٠٩٩", "000000099\n", "+00000099", "1" * 4400)
    with contextlib.suppress(OSError):
        for digits in trial.dice.sample(alphabets, 2):
            trial.target = f"step-{digits[:12]!r}"
            shutil.copytree(trial.newest, trial.newest.with_name(f"step-{digits}"))


def other_step(trial: Trial) -> None:
    """Give a checkpoint the name of another step."""
    shutil.copytree(trial.newest, trial.newest.with_name("step-000000011"))


def foreign_address(trial: Trial) -> None:
    """Let the settings name a place elsewhere: reading the folder must not connect to it."""
    path = trial.run / "config.toml"
    address = trial.dice.choice(("s3://bucket/x", "http://127.0.0.1:1/x", "sftp://127.0.0.1/x"))
    text = path.read_text().replace('to = ""', f'to = "{address}"', 1)
    path.write_text(text)
    trial.target = address


KINDS: dict[str, Callable[[Trial], None]] = {
    "flipped bit": flip_bit,
    "truncated": truncate,
    "missing": lose,
    "noise": fill_with_noise,
    "FIFO": make_fifo,
    "socket": make_socket,
    "link to a device": link_device,
    "link to another file": link_canary,
    "link to its own copy": link_own_copy,
    "link to itself": link_loop,
    "link to a folder": link_folder,
    "folder": make_folder,
    "8 TiB": grow,
    "deep nesting": nest_deeply,
    "a line of 64 MiB": long_line,
    "wrong type": wrong_type,
    "wrong setting": wrong_setting,
    "forged header": forged_header,
    "forged tensors": forged_tensors,
    "forged: no files": forged_no_files,
    "forged: wrong types": forged_types,
    "forged: wrong values": forged_values,
    "forged: lost value": forged_lost_value,
    "forged: size": forged_size,
    "forged: file name": forged_name,
    "name of another alphabet": other_name,
    "manifest of another step": other_step,
    "foreign address": foreign_address,
}


# ----- what is done with a folder


def train(weights: Path) -> int:
    """Train the run to its end, and write the digest of the weights; return the exit code."""
    settings = {"name": "x", "steps": STEPS, "checkpoint.every": "4steps", "log.every_steps": 1}
    config = with_settings(ToyConfig(), settings | {"runs": "runs", "log.to": "csv"})

    def command() -> int:
        with paceline.Run(config) as run:
            model = run.model(torch.nn.Linear(FEATURES, 1))
            optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
            loss = torch.nn.functional.mse_loss
            paceline.Trainer(run, model, optimizer, samples(), loss).fit()
        content = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        weights.write_text(hashlib.sha256(content).hexdigest())
        return 0

    return exit_code_of(command)


def act(words: tuple[str, ...], home: Path) -> int:
    """Do one thing with the run folder, in a process of its own."""
    os.chdir(home)
    socket.socket.connect = _refuse  # type: ignore[assignment,method-assign]
    socket.getaddrinfo = _refuse  # type: ignore[assignment]
    return train(home / "digest") if words == RESUME else run_verb(words)


def _refuse(*arguments: object, **named: object) -> Any:
    raise AssertionError(f"it connects to {arguments[1:]}")


def in_a_process(words: tuple[str, ...], home: Path, limit_s: float) -> tuple[int | None, str]:
    """Return the exit code, None if it took too long, and what was printed."""
    printed = home / "printed"
    pid = os.fork()
    if not pid:
        code = 99
        try:
            output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for number in (1, 2):
                os.dup2(output, number)
            code = act(words, home)
        except BaseException:  # noqa: BLE001 - it is counted
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    code = _wait(pid, limit_s)
    return code, printed.read_text(errors="replace")


def _wait(pid: int, limit_s: float) -> int | None:
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def make_template(home: Path) -> str:
    """Train the run once; return the digest of its weights, and leave the folder as an interruption would."""
    home.mkdir()
    (home / "canary").write_bytes(CANARY)
    with (
        contextlib.chdir(home),
        (home / "printed").open("w") as printed,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        assert train(home / "digest") == 0
        for words in READERS:  # so that all children find everything imported
            run_verb(words)
    digest = (home / "digest").read_text()
    for name in ("page.html", "weights.safetensors"):
        (home / name).unlink()
    run = home / "runs" / "x"
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:09d}")
    lines = (run / "events.jsonl").read_text().splitlines()
    (run / "events.jsonl").write_text("\n".join(lines[:-2]) + "\n")
    _add_other_files(run)
    return digest


def _add_other_files(run: Path) -> None:
    """Add the files that only a failure, a profile or a scaling study leaves."""
    sized = {"ranks": 1, "nodes": 1, "samples_per_s": 1.0, "step_s": 0.1}
    files: dict[str, Mapping[str, Any]] = {
        "failure.json": {"first_rank": 0, "message": "no", "traceback": "", "steps": []},
        "hang/verdict.json": {"cause": "stuck", "ranks": [0], "waiting": [], "sentence": "stuck"},
        "profile/verdict.json": {"seconds": {"compute": 1.0}, "step_s": 1.0, "ranks": 1},
        "scaling.json": {"studies": {"strong": {"kind": "strong", "sizes": [sized]}}},
    }
    for name, content in files.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(json.dumps(content))


@contextlib.contextmanager
def copied(template: Path, number: int) -> Iterator[Path]:
    """Yield a copy of the template; nothing of it stays."""
    home = template.with_name(f"trial-{number}")
    shutil.copytree(template, home)
    try:
        yield home
    finally:
        shutil.rmtree(home)


def judge(trial: Trial, words: tuple[str, ...], digest: str, tally: Tally) -> None:
    """Do one thing with a damaged folder, and count what went wrong."""
    before = _outside(trial.home)
    (trial.home / "digest").unlink(missing_ok=True)
    code, printed = in_a_process(words, trial.home, LIMIT_S)
    if code is None:  # was the machine busy?
        code, printed = in_a_process(words, trial.home, PATIENT_S)
    tally.trials += 1
    bad = tally.bad
    tally.waits += code is None
    tally.tracebacks += "Traceback (most recent" in printed or code not in {None, 0, 1, 2, 3}
    tally.written_through += _outside(trial.home) != before
    if words == RESUME and code == 0:
        tally.resumed += 1
        tally.wrong_loads += (trial.home / "digest").read_text() != digest
    tally.refused += code in {1, 2, 3}
    # A damaged checkpoint must not end the training.
    ended = words == RESUME and trial.target.startswith("checkpoints/step-") and code in {1, 2, 3}
    ended &= "is a run with other settings" not in printed
    tally.tracebacks += ended
    if tally.bad > bad and len(tally.examples) < 5:
        last = " | ".join(printed.strip().splitlines()[-3:])[-400:]
        tally.examples.append(f"{' '.join(words)}: {trial.target!r}: code {code}: {last}")


def _outside(home: Path) -> dict[str, bytes]:
    """Return everything beside the run folder to which a planted link may lead."""
    found = {"canary": (home / "canary").read_bytes()}
    if (home / "elsewhere").is_file() and (home / "elsewhere").stat().st_size < 1 << 30:
        found["elsewhere"] = (home / "elsewhere").read_bytes()
    for path in (home / "canaries").rglob("*"):
        found[str(path)] = b""
    return found


def run(names: list[str], numbers: range, seed: int) -> tuple[dict[str, Tally], int]:
    """Deal the trials out over the kinds; return the counts and the number of trials, which Ctrl-C may end early."""
    torch.set_num_threads(1)  # this process forks
    tallies: dict[str, Tally] = defaultdict(Tally)
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        template = Path(name) / "template"
        digest = make_template(template)
        for done, number in enumerate(numbers):
            kind = names[number % len(names)]
            dice = random.Random(f"{seed} {number}")
            try:
                with copied(template, number) as home:
                    trial = Trial(home, dice)
                    KINDS[kind](trial)
                    words = RESUME if dice.random() < 0.4 else dice.choice(READERS)
                    judge(trial, words, digest, tallies[kind])
            except KeyboardInterrupt:
                return tallies, done
    return tallies, len(numbers)


def table(tallies: dict[str, Tally]) -> str:
    """Return the counts of all kinds."""
    columns = [name for name in vars(Tally()) if name != "examples"]
    total = Tally(*(sum(getattr(one, name) for one in tallies.values()) for name in columns))
    lines = ["{:<26}".format("kind") + "".join(f"{name:>16}" for name in columns)]
    for name, one in [*tallies.items(), ("all", total)]:
        lines.append(f"{name:<26}" + "".join(f"{getattr(one, column):>16}" for column in columns))
    for name, one in tallies.items():
        lines += [f"{name}: {example}" for example in one.examples]
    return "\n".join(lines)


def main() -> int:
    """Run all trials; exit with 1 if any went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="trials over all kinds")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first trial: a long run in parts"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=list(KINDS), help="only this kind")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    known = parser.parse_args()
    begun = time.monotonic()
    numbers = range(known.first, known.first + known.count)
    tallies, done = run(known.only or list(KINDS), numbers, known.seed)
    if known.json:
        print(json.dumps({name: vars(one) for name, one in tallies.items()}))
    else:
        taken_s = time.monotonic() - begun
        part = f"{done} trials from {known.first} on, seed {known.seed}, {taken_s:.0f} s"
        print(f"{table(tallies)}\n\n{part}")
    return 1 if any(one.bad for one in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
