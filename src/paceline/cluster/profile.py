"""What a cluster wants to hear: account, partition, modules, container; typed once, in a TOML file of its own."""

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
    """All that is the cluster's and not the job's."""

    account: str = ""
    """Who pays."""
    account_suffix: str = ""
    """What this site appends to the account for GPUs."""
    partition: str = ""
    """Which nodes; empty: the cluster's default."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features that nodes must have."""
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """How GPUs are asked for."""
    gpu_type: str = ""
    """Slurm's name for the GPU model, where there are several."""
    gpus_per_node: int = 0
    """GPUs of a node, unless --gpus-per-node says otherwise."""
    cpus_per_rank: int = 0
    """Cores of a rank; 0: what the cluster gives by itself."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """One task per rank by srun, or one elastic agent per node."""
    modules: tuple[str, ...] = ()
    """Modules to load, in order."""
    venv: str = ""
    """Folder of a virtual environment; empty, and no conda or container: the Python that runs `paceline submit`."""
    conda: str = ""
    """Name or folder of a conda environment."""
    container: Container = field(default_factory=Container)
    """What to run inside."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables for the ranks, as a table [environment]."""
    host_suffix: str = ""
    """What to append to a node's name to get its name on the fast network."""
    interface: str = ""
    """The network interface between nodes; empty: found out."""
    lead_s: int = 120
    """How long before the time limit Slurm says so."""
    requeue: bool = True
    """Whether jobs may go back into the queue; false where the site forbids it, and then --jobs makes a chain."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, one word each, such as --exclusive."""

    def __post_init__(self) -> None:
        """Refuse what could not be written into a batch script as it is."""
        for name in ("account", "account_suffix", "partition", "qos", "constraint", "gpu_type"):
            check_sbatch_word(name, getattr(self, name))
        for option in self.options:
            if not option.startswith("-"):
                raise ConfigError(
                    f"{option!r} is not an option of sbatch",
                    fix="write it as one word: --exclusive, --mem=64G",
                )
            check_sbatch_word("options", option)
            if option.startswith(("--array", "-a")):
                raise ConfigError(
                    "the parts of a job array would all write one run",
                    fix="submit each with a name= of its own",
                )
        for name in ("interface", "host_suffix"):
            if not re.fullmatch(r"[\w.:-]*", getattr(self, name), re.ASCII):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is not a name",
                    fix="see `ip address` on a node",
                )
        if self.venv and self.conda:
            raise ConfigError(
                "a job cannot have both a venv and a conda environment",
                fix="leave one of the two out",
            )
        if not 10 <= self.lead_s <= 65535:
            raise ConfigError(
                f"lead_s={self.lead_s} is not a lead that Slurm takes",
                fix="set it to 10 to 65535 seconds",
            )
        for name, value in self.environment:
            _check_variable(name, value)

    @property
    def charged(self) -> str:
        """The account with this site's suffix."""
        return (
            self.account
            if not self.account or self.account.endswith(self.account_suffix)
            else self.account + self.account_suffix
        )


def check_sbatch_word(name: str, value: str) -> None:
    """Refuse a word that an #SBATCH line could not carry exactly."""
    if not _SBATCH_WORD.fullmatch(value):
        raise ConfigError(
            f"{name}={value!r} has characters that an #SBATCH line cannot carry",
            fix="use letters, digits and . , : + @ % / = [ ] ( ) & | * ! ^ - _ only",
        )


def _check_variable(name: str, value: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(
            f"[environment] {name!r} is not the name of a variable", fix="use letters, digits and _"
        )
    if "\0" in value:
        raise ConfigError(f"[environment] {name} holds a zero byte", fix="leave it out")
    if name in _PER_PROCESS:
        raise ConfigError(
            f"[environment] {name} differs from rank to rank",
            fix="leave it out: each rank finds it out itself",
        )
    if _SECRET.search(name):
        raise ConfigError(
            f"[environment] {name} looks like a secret, and the batch script is a file",
            fix=f"export {name} in the shell from which you submit: Slurm hands the shell's environment to the job",
        )


def load_profile(name: str, folder: Path) -> ClusterProfile:
    """Return the profile of a name: the user's own file, or a ready one. `like = "NAME"` starts from another."""
    settings = _settings(name, folder, ())
    environment = settings.pop("environment", ())
    return replace(with_settings(ClusterProfile(), settings), environment=environment)


def _settings(name: str, folder: Path, seen: tuple[str, ...]) -> dict[str, Any]:
    own, ready = folder / f"{name}.toml", READY / f"{name}.toml"
    file = own if own.is_file() and name not in seen else ready
    if not re.fullmatch(r"[\w.-]+", name) or not file.is_file():
        raise ConfigError(
            f"there is no cluster profile {name!r}",
            fix=f"{did_you_mean(name, profile_names(folder))} Your own go to {folder}/NAME.toml",
        )
    tree = _read(file)
    like = tree.pop("like", "")
    table = tree.pop("environment", {})
    settings = _settings(str(like), folder, (*seen, name)) if like and len(seen) < 8 else {}
    if not isinstance(table, dict) or not all(
        isinstance(value, str | int) for value in table.values()
    ):
        raise ConfigError(
            f"{file}: environment is not a table of texts",
            fix='write [environment], and below it NAME = "value"',
        )
    variables = dict(settings.get("environment", ())) | {
        key: str(value) for key, value in table.items()
    }
    return (
        settings
        | from_toml(tree)
        | ({"environment": tuple(variables.items())} if variables else {})
    )


def profile_text(profile: ClusterProfile) -> str:
    """Return a profile as the TOML file that would say all of it."""
    table = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in profile.environment
    ]
    lines = [
        line
        for line in to_toml(replace(profile, environment=())).splitlines()
        if line != "environment = []"
    ]
    return "\n".join([*lines, *(["", "[environment]", *table] if table else [])]) + "\n"


def profile_names(folder: Path) -> list[str]:
    """Return the names of all profiles, the user's own and the ready ones."""
    return sorted({file.stem for place in (folder, READY) for file in place.glob("*.toml")})


def profile_folder(env: Mapping[str, str]) -> Path:
    """Return the folder of the user's own profiles.

    >>> profile_folder({"HOME": "/home/me"})
    PosixPath('/home/me/.config/paceline/clusters')
    """
    return (
        Path(env.get("XDG_CONFIG_HOME") or f"{env.get('HOME', '~')}/.config").expanduser()
        / "paceline"
        / "clusters"
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {file}: {error.strerror}", fix="permit reading it, or remove it"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} is not TOML: {error}",
            fix="correct that line; `paceline cluster show generic` is an example",
        ) from error
