"""The container of a rank, and the command line that starts a rank inside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from paceline.errors import ConfigError, did_you_mean

Kind = Literal["none", "apptainer", "singularity", "shifter", "pyxis", "docker"]

_NOT_IN_A_MOUNT = ',:;"\\'
"""Separators, quotes and escapes of any kind; refused for all, so that a profile may change its kind."""

_NOT_IN_PYXIS = " $`"
"""Also refused for pyxis, which writes mounts into a shell script, separated by spaces."""

_MOUNT_FORMS = "write it as /host:/inside, /host:/inside:ro or /same"


@dataclass(frozen=True)
class Container:
    """An image, its runtime, and the host folders mounted in it."""

    kind: Kind = "none"
    """The container runtime: apptainer, singularity, shifter, pyxis (enroot, by options of srun), docker; none: no container."""
    image: str = ""
    """The image, in the form of its kind: a .sif file, docker:name:tag, registry#name:tag, name:tag."""
    mounts: tuple[str, ...] = ()
    """Mounts besides the folders of the run: /host:/inside, /host:/inside:ro or /same."""
    options: tuple[str, ...] = ()
    """Further options of the runtime, such as --device=/dev/infiniband or --module=gpu; no secrets."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(
                f"unknown container.kind {self.kind!r}",
                fix=did_you_mean(self.kind, get_args(Kind)),
            )
        if self.kind == "none":
            self._check_empty()
            return
        _check_image(self.kind, self.image)
        for mount in self.mounts:
            _Mount.read(mount, self.kind)
        for option in self.options:
            _check_option(option)

    def _check_empty(self) -> None:
        if self.image or self.mounts or self.options:
            raise ConfigError(
                "container.image, mounts or options are set, but container.kind=none",
                fix=f"set kind = one of {', '.join(get_args(Kind)[1:])}",
            )


class _Mount(NamedTuple):
    source: str
    target: str
    read_only: bool = False

    @classmethod
    def read(cls, text: str, kind: Kind) -> _Mount:
        """Parse a mount of a profile."""
        source, *more = text.split(":")
        if more[1:] not in ([], ["ro"]):
            raise ConfigError(f"cannot parse the mount {text!r}", fix=_MOUNT_FORMS)
        return cls(
            _mountable(source, kind), _mountable(more[0] if more else source, kind), bool(more[1:])
        )

    def __str__(self) -> str:
        return f"{self.source}:{self.target}{':ro' if self.read_only else ''}"


def srun_options(
    container: Container, *, folders: Sequence[str] = (), workdir: str = ""
) -> list[str]:
    """Return the container options of srun; only pyxis has some.

    >>> image = Container("pyxis", "/shared/train.sqsh", mounts=("/data:/data:ro",))
    >>> srun_options(image, folders=["/shared/runs"], workdir="/shared/runs")  # doctest: +NORMALIZE_WHITESPACE
    ['--container-image=/shared/train.sqsh', '--container-mounts=/shared/runs:/shared/runs,/data:/data:ro',
     '--container-workdir=/shared/runs']
    """
    if container.kind != "pyxis":
        return []
    options = [f"--container-image={container.image}"]
    if mounts := ",".join(map(str, _mounts(container, folders))):
        options.append(f"--container-mounts={mounts}")
    if workdir:
        options.append(f"--container-workdir={_mountable(workdir, container.kind)}")
    return [*options, *container.options]


def wrap(
    container: Container,
    command: Sequence[str],
    *,
    gpus: bool,
    environment: Sequence[str] = (),
    folders: Sequence[str] = (),
    workdir: str = "",
    user: str = "",
) -> list[str]:
    """Return the command line that runs a command inside the container, its arguments unchanged.

    environment: names of the variables to pass on; folders: mounted under their own names; user:
    UID:GID of the run's owner (empty: the image's user). Only docker needs variables and user.

    >>> sif = Container("apptainer", "train.sif")
    >>> wrap(sif, ["python", "a b.py"], gpus=True, folders=["/runs/x"])
    ['apptainer', 'exec', '--nv', '--bind', '/runs/x:/runs/x', 'train.sif', 'python', 'a b.py']
    """
    assert command, "the command is empty"
    if any("\0" in word for word in command):
        raise ConfigError(
            "an argument of the command contains a NUL character", fix="remove the NUL character"
        )
    match container.kind:
        case "none" | "pyxis":
            prefix = []
        case "apptainer" | "singularity":
            prefix = _apptainer(container, gpus=gpus, folders=folders, workdir=workdir)
        case "shifter":
            prefix = _shifter(container, workdir=workdir)
        case "docker":
            prefix = _docker(container, environment, folders, workdir, gpus=gpus, user=user)
    return [*prefix, *command]


def _apptainer(
    container: Container, *, gpus: bool, folders: Sequence[str], workdir: str
) -> list[str]:
    """Network, process IDs, shared memory and environment are the host's; signals are passed on."""
    words = [container.kind, "exec"]
    if gpus:
        words.append("--nv")
    for mount in _mounts(container, folders):
        words += ["--bind", str(mount)]
    if workdir:
        words += ["--pwd", _mountable(workdir, container.kind)]
    return [*words, *container.options, container.image]


def _shifter(container: Container, *, workdir: str) -> list[str]:
    """Shifter shows the site's file systems inside and refuses to mount over them: no folders.

    >>> wrap(Container("shifter", "docker:me/train:1"), ["python"], gpus=True, folders=["/runs"])
    ['shifter', '--image=docker:me/train:1', 'python']
    """
    words = ["shifter", f"--image={container.image}"]
    words += [f"--volume={mount}" for mount in _mounts(container, ())]
    if workdir:
        words.append(f"--workdir={_mountable(workdir, container.kind)}")
    return [*words, *container.options]


# --init: Python as process 1 has no default action for signals, so a SIGTERM that arrives before
# our handlers are installed (torch takes seconds to import) would be lost; tests showed it. With
# --init docker's init is process 1: it forwards every signal, reaps orphans, and exits with
# Python's exit code, 75 included.
_DOCKER_RUN = (
    *("docker", "run", "--rm", "--init"),
    *("--network", "host", "--ipc", "host", "--ulimit", "memlock=-1"),
)


def _docker(
    container: Container,
    environment: Sequence[str],
    folders: Sequence[str],
    workdir: str,
    *,
    gpus: bool,
    user: str,
) -> list[str]:
    """Undo docker's isolation of network, shared memory and user.

    --gpus all: a rank must see its peers' GPUs, or NCCL cannot use NVLink between containers.
    --mount and not --volume: a missing folder is an error, not a new folder that root owns.
    --env NAME without a value: the value stays out of the list of processes.

    >>> image = Container("docker", "train:1")
    >>> " ".join(wrap(image, ["python"], gpus=True, environment=["SLURM_PROCID"])[8:])
    '--ulimit memlock=-1 --gpus all --env SLURM_PROCID train:1 python'
    """
    words = list(_DOCKER_RUN)
    if gpus:
        words += ["--gpus", "all"]
    if user:
        words += ["--user", _checked_user(user)]
    for mount in _mounts(container, folders):
        words += ["--mount", _docker_mount(mount)]
    if workdir:
        words += ["--workdir", _mountable(workdir, container.kind)]
    for name in _checked_names(environment):
        words += ["--env", name]
    return [*words, *container.options, container.image]


def _docker_mount(mount: _Mount) -> str:
    text = f"type=bind,source={mount.source},target={mount.target}"
    return f"{text},readonly" if mount.read_only else text


def _mounts(container: Container, folders: Sequence[str]) -> list[_Mount]:
    """Return a mount per folder and the profile's mounts; at one target the profile's wins."""
    kind = container.kind
    of_profile = [_Mount.read(mount, kind) for mount in container.mounts]
    taken = {mount.target for mount in of_profile}
    mounts = []
    for folder in dict.fromkeys(folders):
        source = _mountable(folder, kind)
        if folder not in taken:
            mounts.append(_Mount(source, folder))
    return mounts + of_profile


def _mountable(path: str, kind: Kind) -> str:
    """Return the path if it is absolute and the kind's mount syntax can express it."""
    if not path.startswith("/"):
        raise ConfigError(
            f"{path!r} is not an absolute path", fix=f"begin it with /; {_MOUNT_FORMS}"
        )
    refused = _NOT_IN_A_MOUNT + (_NOT_IN_PYXIS if kind == "pyxis" else "")
    bad = sorted({char for char in path if char in refused or not char.isprintable()})
    if bad:
        raise ConfigError(
            f"{kind} cannot mount {path!r}: it contains {' '.join(map(repr, bad))}",
            fix="rename the folder, or use a symbolic link with a plain name",
        )
    return path


def _check_image(kind: str, image: str) -> None:
    if not image:
        raise ConfigError(
            f"container.kind is {kind}, but container.image is empty", fix="set image = ..."
        )
    if image.startswith("-") or any(char.isspace() or not char.isprintable() for char in image):
        raise ConfigError(
            f"{image!r} is not a valid image name",
            fix="use a name or a file without spaces and without a leading -",
        )


def _check_option(option: str) -> None:
    if not option.startswith("-") or option in {"-", "--"} or not option.isprintable():
        raise ConfigError(
            f"container option {option!r} does not have the form --NAME or --NAME=VALUE",
            fix="join the option and its value: --device=/dev/infiniband",
        )


def _checked_names(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            raise ConfigError(
                f"{name.partition('=')[0]!r} is not a valid variable name",
                fix="pass the name alone, without its value",
            )
    return list(dict.fromkeys(names))


def _checked_user(user: str) -> str:
    if not re.fullmatch(r"[0-9]+:[0-9]+", user, re.ASCII):
        raise ConfigError(
            f"{user!r} is not of the form UID:GID", fix="use UID:GID, such as 1000:1000"
        )
    return user
