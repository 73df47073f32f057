"""Cluster profiles: account, partition, modules, container and so on, one TOML file per cluster."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.cluster.container import Container
from paceline.config.values import from_toml, to_toml, with_settings
from paceline.errors import ConfigError, did_you_mean
from paceline.safe_open import read_text

READY = Path(__file__).with_name("profiles")
_SBATCH_WORD = re.compile(r"[\w.,:+@%/=\[\]()&|*!^-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SECRET = re.compile(
    r"SECRET|TOKEN|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|_KEY$|^KEY$|_PAT$|AUTH",
    re.IGNORECASE,
)
_PER_PROCESS = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}


@dataclass(frozen=True)
class ClusterProfile:
    """The settings that belong to a cluster rather than to a job."""

    account: str = ""
    """The account to charge."""
    account_suffix: str = ""
    """Suffix that this site appends to the account for GPU jobs."""
    partition: str = ""
    """Partition; empty: the cluster's default."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features that the nodes must have."""
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """The sbatch option that requests GPUs."""
    gpu_type: str = ""
    """Slurm's name of the GPU model, on clusters with several models."""
    gpus_per_node: int = 0
    """GPUs per node, unless --gpus-per-node is given."""
    cpus_per_rank: int = 0
    """CPU cores per rank; 0: the cluster's default."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """One task per rank by srun, or one elastic agent per node."""
    modules: tuple[str, ...] = ()
    """Modules to load, in order."""
    venv: str = ""
    """Folder of a virtual environment; without it, conda or container: the Python that runs `paceline submit`."""
    conda: str = ""
    """Name or folder of a conda environment."""
    container: Container = field(default_factory=Container)
    """The container of the ranks."""
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables of the ranks, from the table [environment]."""
    host_suffix: str = ""
    """Suffix that turns a node's name into its name on the fast network."""
    interface: str = ""
    """The network interface between nodes; empty: detected."""
    lead_s: int = 120
    """Seconds before the time limit at which Slurm sends the warning signal."""
    requeue: bool = True
    """Whether jobs are requeued; false where the site forbids it: --jobs submits a job chain instead."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, such as --exclusive or --mem=64G."""

    def __post_init__(self) -> None:
        """Raise an error for a value that cannot be written into a batch script unchanged."""
        for name in ("account", "account_suffix", "partition", "qos", "constraint", "gpu_type"):
            check_sbatch_word(name, getattr(self, name))
        for option in self.options:
            if not option.startswith("-"):
                raise ConfigError(
                    f"{option!r} is not an option of sbatch",
                    fix="write it as --NAME or --NAME=VALUE: --exclusive, --mem=64G",
                )
            check_sbatch_word("options", option)
            if option.startswith(("--array", "-a")):
                raise ConfigError(
                    "the tasks of a job array (--array) would all write to one run",
                    fix="submit each task as a job with its own name=",
                )
        for name in ("interface", "host_suffix"):
            if not re.fullmatch(r"[\w.:-]*", getattr(self, name), re.ASCII):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is not a valid network name",
                    fix="run `ip address` on a node to see the names",
                )
        if self.venv and self.conda:
            raise ConfigError(
                "venv and conda are both set",
                fix="remove one of the two",
            )
        if not 10 <= self.lead_s <= 65535:
            raise ConfigError(
                f"lead_s must be between 10 and 65535 seconds, got {self.lead_s}",
                fix="set lead_s = 120",
            )
        for name, value in self.environment:
            _check_variable(name, value)

    @property
    def charged(self) -> str:
        """The account to charge, with this site's suffix."""
        if not self.account or self.account.endswith(self.account_suffix):
            return self.account
        return self.account + self.account_suffix


def check_sbatch_word(name: str, value: str) -> None:
    """Raise an error for a value that would need quoting in an #SBATCH line."""
    if not _SBATCH_WORD.fullmatch(value):
        raise ConfigError(
            f"{name}={value!r} contains characters that are not allowed in an #SBATCH line",
            fix="use letters, digits and . , : + @ % / = [ ] ( ) & | * ! ^ - _ only",
        )


def _check_variable(name: str, value: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(
            f"[environment] {name!r} is not a valid variable name", fix="use letters, digits and _"
        )
    if "\0" in value:
        raise ConfigError(f"[environment] {name} contains a zero byte", fix="remove the zero byte")
    if name in _PER_PROCESS:
        raise ConfigError(
            f"[environment] {name} differs from rank to rank",
            fix=f"remove {name}: each rank detects its own value",
        )
    if _SECRET.search(name):
        raise ConfigError(
            f"[environment] {name} looks like a secret, and the batch script is a readable file",
            fix=f"export {name} in the shell where you submit: Slurm passes its environment to the job",
        )


def load_profile(name: str, folder: Path) -> ClusterProfile:
    """Return a profile by name: the user's file, else a built-in one; `like = "NAME"` inherits."""
    settings = _settings(name, folder, ())
    environment = settings.pop("environment", ())
    return replace(with_settings(ClusterProfile(), settings), environment=environment)


def _settings(name: str, folder: Path, seen: tuple[str, ...]) -> dict[str, Any]:
    own, built_in = folder / f"{name}.toml", READY / f"{name}.toml"
    file = own if own.is_file() and name not in seen else built_in
    if not re.fullmatch(r"[\w.-]+", name) or not file.is_file():
        suggestion = did_you_mean(name, profile_names(folder))
        raise ConfigError(
            f"unknown cluster profile {name!r}",
            fix=f"{suggestion} Put your own into {folder}/NAME.toml",
        )
    tree = _read(file)
    like = tree.pop("like", "")
    variables = _variables(file, tree.pop("environment", {}))
    settings = _settings(str(like), folder, (*seen, name)) if like and len(seen) < 8 else {}
    variables = dict(settings.get("environment", ())) | variables
    settings |= from_toml(tree)
    if variables:
        settings["environment"] = tuple(variables.items())
    return settings


def _variables(file: Path, table: object) -> dict[str, str]:
    if isinstance(table, dict) and all(isinstance(value, str | int) for value in table.values()):
        return {name: str(value) for name, value in table.items()}
    raise ConfigError(
        f"{file}: environment must be a table of strings",
        fix='write [environment], and below it NAME = "value"',
    )


def profile_text(profile: ClusterProfile) -> str:
    """Return a profile as a TOML file with all settings."""
    lines = to_toml(replace(profile, environment=())).splitlines()
    lines.remove("environment = []")
    if profile.environment:
        lines += ["", "[environment]"]
    for name, value in profile.environment:
        lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def profile_names(folder: Path) -> list[str]:
    """Return the names of the user's profiles and the built-in ones, sorted."""
    return sorted({file.stem for place in (folder, READY) for file in place.glob("*.toml")})


def profile_folder(env: Mapping[str, str]) -> Path:
    """Return the folder of the user's profiles.

    >>> profile_folder({"HOME": "/home/me"})
    PosixPath('/home/me/.config/paceline/clusters')
    """
    config = env.get("XDG_CONFIG_HOME") or f"{env.get('HOME', '~')}/.config"
    return Path(config).expanduser() / "paceline" / "clusters"


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(file, links=True))
    except OSError as error:
        raise ConfigError(
            f"cannot read {file}: {error.strerror}",
            fix=f"make it readable (`chmod u+r {file}`), or remove it",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} is not TOML: {error}",
            fix="fix that line; `paceline cluster show generic` prints an example",
        ) from error
