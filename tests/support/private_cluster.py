"""How a test gets a cluster of its own, and is rid of it afterwards."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.program import Done
from support.slurm_cluster import daemons, packages, requirements
from support.slurm_cluster.errors import ClusterError, NotAvailable
from support.slurm_cluster.place import Place
from support.slurm_cluster.settings import HEAD, Settings

TOOL = (sys.executable, str(Path(__file__).with_name("slurm_cluster")))
_STOPS_WITHIN_S = 240
_LINES_OF_A_LOG = 10


def wanted(settings: Mapping[str, object] | None = None, **options: Any) -> Settings:
    """Return the settings of a cluster; those of slurm.conf are given as a mapping.

    >>> wanted(nodes=3, settings={"KillWait": 5}).words()
    ['--nodes', '3', '--set', 'KillWait=5']
    """
    return Settings(
        **options, set=tuple(f"{key}={value}" for key, value in (settings or {}).items())
    )


@contextlib.contextmanager
def private_cluster(settings: Settings) -> Iterator[PrivateCluster]:
    """Start a cluster in a short folder of its own; stop it in the end, also when this process is killed."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    holder = subprocess.Popen(
        [*TOOL, "--dir", str(folder), "hold", *settings.words()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is for us
    )
    with holder:
        _check_up(holder)
        cluster = PrivateCluster(Place(folder))
        try:
            yield cluster
        finally:
            cluster.show_logs()
            said, _ = holder.communicate(timeout=_STOPS_WITHIN_S)  # ends its standard input
            assert holder.returncode == 0, said
            assert not folder.exists()


@contextlib.contextmanager
def cluster_or_skip(settings: Settings) -> Iterator[PrivateCluster]:
    """Start a cluster, or skip the test with the reason why this machine cannot."""
    if reason := why_not(settings):
        pytest.skip(reason)
    with private_cluster(settings) as cluster:
        yield cluster


@functools.cache
def why_not(settings: Settings) -> str:
    """Return why this machine cannot run such a cluster, after getting what it lacks; nothing if it can."""
    try:
        requirements.check(settings)
        if settings.slurm:
            packages.provide(settings)
    except NotAvailable as error:
        return str(error)
    return ""


def _check_up(holder: subprocess.Popen[str]) -> None:
    assert holder.stdout
    first = holder.stdout.readline()
    if " nodes up in " not in first:
        raise ClusterError(first + holder.stdout.read())


@dataclass(frozen=True)
class PrivateCluster:
    """A cluster that lives as long as the test."""

    place: Place

    @property
    def work(self) -> Path:
        """The folder in which commands run unless they name another; all hosts share it."""
        folder = self.place.folder / "work"
        folder.mkdir(exist_ok=True)
        return folder

    def run(
        self,
        words: Sequence[str],
        node: str = HEAD,
        *,
        timeout_s: float = 240,
        folder: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Done:
        """Run a command on a host, to its end."""
        try:
            done = subprocess.run(
                self._command("run", "--node", node, "--", *words),
                cwd=folder or self.work, env=os.environ | (env or {}), stdin=subprocess.DEVNULL,
                capture_output=True, encoding="utf-8", timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:  # it was killed, and what it had started with it
            said = b"".join(filter(None, (late.stdout, late.stderr))).decode()
            raise AssertionError(f"{words} took more than {timeout_s} s: {said}") from None
        return Done(done.returncode, done.stdout, done.stderr)

    def sbatch(self, *words: str, **how: Any) -> str:
        """Submit a job, and return its id."""
        done = self.run(["sbatch", "--parsable", *words], **how)
        assert done.code == 0, done.err
        return daemons.jobid_in(done.out)

    def submit(self, *words: str, timeout_s: float = 240, **how: Any) -> dict[str, str]:
        """Submit a job, and return its facts at the end."""
        return self.wait(self.sbatch(*words, **how), timeout_s)

    def job(self, jobid: str) -> dict[str, str]:
        """Return what scontrol knows of a job."""
        return daemons.facts_of_job(self.place, jobid)

    def wait(self, jobid: str, timeout_s: float = 240) -> dict[str, str]:
        """Return the facts of a job at its end."""
        return daemons.wait_for_job(self.place, jobid, timeout_s)

    def states(self) -> dict[str, str]:
        """Return what Slurm holds each node for."""
        return daemons.node_states(self.place)

    def power_off(self, node: str) -> None:
        """Pull a node's plug."""
        self._change("power-off", node)

    def power_on(self, node: str) -> None:
        """Boot a node that is off."""
        self._change("power-on", node)

    def slurmd(self, node: str, verb: str) -> None:
        """Start or kill a node's slurmd; its jobs go on."""
        self._change("slurmd", node, verb)

    def link(self, node: str, *words: str) -> None:
        """Change a node's link: down, up, rate 100mbit, clear."""
        self._change("link", node, *words)

    def show_logs(self) -> None:
        """Print what the daemons said last, which pytest shows if the test fails."""
        for log in sorted(self.place.log.glob("slurm*.log")):
            for line in log.read_text(errors="replace").splitlines()[-_LINES_OF_A_LOG:]:
                print(f"{log.name}: {line}")

    def _change(self, *words: str) -> None:
        done = subprocess.run(self._command(*words), capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(done.stderr)

    def _command(self, *words: str) -> list[str]:
        return [*TOOL, "--dir", str(self.place.folder), *words]
