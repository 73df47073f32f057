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
    assert (site.gpus_per_node, site.constraint, site.qos, site.account_suffix) == (
        4,
        "gpu",
        "regular",
        "_g",
    )
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


def test_an_own_profile_may_have_the_name_of_a_ready_one_and_start_from_it(tmp_path: Path) -> None:
    own(tmp_path, "perlmutter", 'like = "perlmutter"\naccount = "m2"\n')
    assert load_profile("perlmutter", tmp_path) == replace(
        load_profile("perlmutter", Path("/nowhere")), account="m2"
    )


def test_a_suffix_that_is_there_is_not_added_again() -> None:
    assert ClusterProfile(account="m1_g", account_suffix="_g").charged == "m1_g"
    assert ClusterProfile(account_suffix="_g").charged == ""


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ('acount = "x"', "there is no setting 'acount'", "did you mean account?"),
        (
            'account = "a b"',
            "contains characters that are not allowed in an #SBATCH line",
            "letters, digits",
        ),
        ('account = "x\\n#SBATCH --uid=0"', "not allowed in an #SBATCH line", "letters"),
        ('partition = "$(id)"', "not allowed in an #SBATCH line", "letters"),
        ('options = ["exclusive"]', "is not an option of sbatch", "--exclusive"),
        ('options = ["--wrap=rm -rf"]', "not allowed in an #SBATCH line", "letters"),
        ('options = "--exclusive"', "options must be a list of texts", 'options=["a", "b"]'),
        ('interface = "eth0; id"', "is not a valid network name", "ip address"),
        ('venv = "a"\nconda = "b"', "venv and conda are both set", "remove one"),
        ("lead_s = 0", "between 10 and 65535 seconds, got 0", "lead_s = 120"),
        ('gpu_request = "gpus"', "must be one of", "gpus-per-node"),
        (
            '[environment]\nWANDB_API_KEY = "x"',
            "looks like a secret",
            "export WANDB_API_KEY in the shell",
        ),
        ('[environment]\nAWS_SECRET_ACCESS_KEY = "x"', "looks like a secret", "export"),
        ('[environment]\nHF_TOKEN = "x"', "looks like a secret", "export"),
        ('[environment]\nRANK = "0"', "differs from rank to rank", "each rank detects its own"),
        (
            '[environment]\nMASTER_PORT = "29500"',
            "differs from rank to rank",
            "each rank detects its own",
        ),
        ('[environment]\n"A B" = "0"', "is not a valid variable name", "letters"),
        ('[container]\nkind = "dockr"', "must be one of", "docker"),
        ('like = "nothing"', "unknown cluster profile 'nothing'", "Put your own into"),
        ("account = ", "is not TOML", "fix that line"),
    ],
)
def test_a_bad_profile_is_refused_with_a_fix(
    tmp_path: Path, text: str, problem: str, fix: str
) -> None:
    own(tmp_path, "bad", text)
    with pytest.raises(ConfigError) as caught:
        load_profile("bad", tmp_path)
    assert problem in caught.value.problem
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
