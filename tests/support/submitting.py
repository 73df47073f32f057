"""Submit trainings to the private Slurm of the tests as a user would, and follow them to the end."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support.private_cluster import PrivateCluster
from support.program import Done

PACELINE = (sys.executable, "-m", "paceline")
SCRIPT = Path(__file__).with_name("training.py")
IN_HASTE = Path(__file__).with_name("slow_then_fast.py")
SHORT = ("batch.global_size=16", "epochs=4", "checkpoint.every=end")
_LOOK_S = 0.1


@dataclass(frozen=True)
class Desk:
    """A folder on the cluster's shared disk, from which jobs are submitted."""

    cluster: PrivateCluster
    folder: Path

    @classmethod
    def on(cls, cluster: PrivateCluster, profile: str = "lead_s = 45") -> Desk:
        """Make one, with a cluster profile named `here` and the training scripts."""
        desk = cls(cluster, cluster.work)
        desk.add_profile("here", profile)
        shutil.copy(SCRIPT, desk.folder)
        shutil.copy(IN_HASTE, desk.folder)
        return desk

    def add_profile(self, name: str, text: str) -> None:
        """Write a cluster profile of the user."""
        folder = self.folder / "config" / "paceline" / "clusters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.toml").write_text(text)

    def paceline(
        self, *words: str, env: dict[str, str] | None = None, timeout_s: float = 240
    ) -> Done:
        """Run `paceline` with these arguments on the head node."""
        own = {f"XDG_{kind}_HOME": str(self.folder / kind.lower()) for kind in ("CONFIG", "STATE")}
        return self.cluster.run(
            [*PACELINE, *words], folder=self.folder, env=own | (env or {}), timeout_s=timeout_s
        )

    def submit(self, *words: str, env: dict[str, str] | None = None) -> str:
        """Submit, and return the ID of the (first) job."""
        done = self.paceline("submit", "--cluster", "here", *words, env=env)
        assert done.code == 0, done.err
        found = re.search(r"^submitted job (\d+)", done.out, re.MULTILINE)
        assert found, done.out
        return found[1]

    def log(self, name: str, job: str) -> str:
        """Return the log of a job so far."""
        file = self.folder / "runs" / name / "jobs" / f"{job}.log"
        return file.read_text() if file.exists() else ""

    def await_line(
        self, name: str, job: str, text: str, timeout_s: float = 240, times: int = 1
    ) -> str:
        """Wait until a job's log contains a text `times` times; return the log."""
        limit = time.monotonic() + timeout_s
        while (log := self.log(name, job)).count(text) < times:
            assert time.monotonic() < limit, f"{text!r} did not appear:\n{log}"
            time.sleep(_LOOK_S)
        return log

    def events(self, name: str) -> list[dict]:
        """Return the events of a run."""
        lines = (self.folder / "runs" / name / "events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def digest(text: str) -> str:
    """Return the last digest of weights and optimizer state in a log."""
    found = re.findall(r"weights and optimizer state (\w{16})", text)
    assert found, text
    return found[-1]
