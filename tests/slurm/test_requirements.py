"""Where there can be no cluster, is it said why?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.slurm_cluster import packages, requirements
from support.slurm_cluster.errors import NotAvailable
from support.slurm_cluster.settings import Settings


def put_program(folder: Path, name: str, complaint: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho '{complaint}' >&2\nexit 1\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder that holds all programs there are, for root."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return folder


def test_not_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert requirements.why_no_hosts() == "needs root"


def test_no_tools(programs):
    expected = "needs iproute2 and util-linux (Debian: apt-get install iproute2 util-linux)"
    assert requirements.why_no_hosts() == expected


def test_no_namespaces(programs):
    for name in ("ip", "nsenter"):
        put_program(programs, name, "")
    put_program(programs, "unshare", "unshare failed: Operation not permitted")
    reason = "needs namespaces and overlayfs: unshare failed: Operation not permitted"
    assert requirements.why_no_hosts() == reason
    with pytest.raises(NotAvailable, match="Operation not permitted"):
        requirements.check(Settings())


def test_no_apt(programs, tmp_path):
    with pytest.raises(NotAvailable, match="no apt-get and dpkg"):
        packages.provide(Settings(pkg=str(tmp_path / "packages")))


def test_apt_finds_nothing(programs, tmp_path):
    put_program(programs, "dpkg", "")
    put_program(programs, "apt-get", "E: Unable to locate package slurmctld")
    with pytest.raises(
        NotAvailable, match=r"`apt-get update` may help.*Unable to locate package slurmctld"
    ):
        packages.provide(Settings(pkg=str(tmp_path / "packages")))


def test_packages_that_somebody_else_put_there(monkeypatch, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(packages, "shared_packages", lambda: tmp_path / "ours")
    with pytest.raises(NotAvailable, match="belongs to somebody else"):
        packages.provide(Settings(pkg=str(tmp_path / "ours")))
