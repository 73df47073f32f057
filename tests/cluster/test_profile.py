"""Is a cluster told what it wants to hear, and is what could harm refused?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster.profile import (
    READY,
    ClusterProfile,
    load_profile,
    profile_folder,
    profile_names,
    profile_text,
)
from paceline.errors import ConfigError


def own(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.toml").write_text(text)


def test_the_ready_profiles_are_there(tmp_path: Path) -> None:
    assert {"aws-parallelcluster", "generic", "gres", "perlmutter"} <= {*profile_names(tmp_path)}
    assert load_profile("generic", tmp_path) == ClusterProfile()
    site = load_profile("perlmutter", tmp_path)
    known = (site.gpus_per_node, site.constraint, site.qos, site.account_suffix)
    assert known == (4, "gpu", "regular", "_g")
    assert load_profile("gres", tmp_path).gpu_request == "gres"
    assert load_profile("aws-parallelcluster", tmp_path).options == ("--exclusive",)


def test_an_own_profile_starts_from_another_and_changes_what_differs(tmp_path: Path) -> None:
    own(
        tmp_path,
        "mine",
        'like = "perlmutter"\naccount = "m1"\nmodules = ["python", "nccl"]\n[environment]\nNCCL_DEBUG = "WARN"\n'
        '[container]\nkind = "shifter"\nimage = "docker:me/train:1"\n',
    )
    mine = load_profile("mine", tmp_path)
    assert mine.charged == "m1_g"
    assert mine.modules == ("python", "nccl")
    assert dict(mine.environment) == {"NCCL_SOCKET_IFNAME": "hsn", "NCCL_DEBUG": "WARN"}
    assert mine.container.kind == "shifter"
    own(tmp_path, "perlmutter", 'like = "perlmutter"\naccount = "m2"\n')
    ready = load_profile("perlmutter", Path("/nowhere"))
    assert load_profile("perlmutter", tmp_path) == replace(ready, account="m2")
    assert ClusterProfile(account="m1_g", account_suffix="_g").charged == "m1_g"
    assert ClusterProfile(account_suffix="_g").charged == ""


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ('acount = "x"', "did you mean account?"),
        ('account = "a b"', "letters, digits"),
        ('account = "x\\n#SBATCH --uid=0"', "letters"),
        ('partition = "$(id)"', "letters"),
        ('options = ["exclusive"]', "--exclusive"),
        ('options = ["--wrap=rm -rf"]', "letters"),
        ('options = "--exclusive"', 'options=["a", "b"]'),
        ('interface = "eth0; id"', "ip address"),
        ('venv = "a"\nconda = "b"', "remove one"),
        ("lead_s = 0", "lead_s = 120"),
        ('gpu_request = "gpus"', "gpus-per-node"),
        ('[environment]\nWANDB_API_KEY = "x"', "export WANDB_API_KEY in the shell"),
        ('[environment]\nAWS_SECRET_ACCESS_KEY = "x"', "export"),
        ('[environment]\nHF_TOKEN = "x"', "export"),
        ('[environment]\nRANK = "0"', "each rank detects its own"),
        ('[environment]\nMASTER_PORT = "29500"', "each rank detects its own"),
        ('[environment]\n"A B" = "0"', "letters"),
        ('[container]\nkind = "dockr"', "docker"),
        ('like = "nothing"', "Put your own into"),
        ("account = ", "fix that line"),
    ],
)
def test_a_bad_profile_is_refused_with_a_fix(tmp_path: Path, text: str, fix: str) -> None:
    own(tmp_path, "bad", text)
    with pytest.raises(ConfigError) as caught:
        load_profile("bad", tmp_path)
    assert fix in caught.value.fix


@pytest.mark.parametrize("name", ["../generic", "", "a/b", "generik"])
def test_an_unknown_profile_is_refused_with_those_that_are_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="unknown cluster profile") as caught:
        load_profile(name, tmp_path)
    assert "generic" in caught.value.fix


def test_profiles_that_start_from_each_other_end(tmp_path: Path) -> None:
    own(tmp_path, "a", 'like = "b"')
    own(tmp_path, "b", 'like = "a"')
    with pytest.raises(ConfigError, match="unknown cluster profile"):
        load_profile("a", tmp_path)


def test_the_folder_of_own_profiles_follows_the_environment() -> None:
    assert profile_folder({"XDG_CONFIG_HOME": "/c", "HOME": "/h"}) == Path("/c/paceline/clusters")


@pytest.mark.parametrize("name", sorted(file.stem for file in READY.glob("*.toml")))
def test_what_is_shown_of_a_profile_is_a_profile(tmp_path: Path, name: str) -> None:
    own(tmp_path, "shown", profile_text(load_profile(name, tmp_path)))
    assert load_profile("shown", tmp_path) == load_profile(name, tmp_path)
