"""In which container a rank runs, and with which words it is started there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from paceline.errors import ConfigError, did_you_mean

Kind = Literal["none", "apptainer", "singularity", "shifter", "pyxis", "docker"]

_NOT_IN_A_MOUNT = ',:;"\\'
"""What the kinds use to separate, quote or escape inside a mount; refused for all, so that a profile may change its kind."""

_NOT_IN_PYXIS = " $`"
"""What pyxis cannot carry, either: it writes mounts into a script that a shell runs, separated by spaces."""

_MOUNT_FORMS = "write it as /host:/inside, /host:/inside:ro or /same"


@dataclass(frozen=True)
class Container:
    """An image, what of the host is seen inside, and who runs it."""

    kind: Kind = "none"
    """Who runs the image: apptainer, singularity, shifter, pyxis (enroot, by srun's own options), docker; none: no container."""
    image: str = ""
    """The image, as the kind names it: a .sif file, docker:name:tag, registry#name:tag, name:tag."""
    mounts: tuple[str, ...] = ()
    """What is seen inside beside the run's own folders: /host:/inside, /host:/inside:ro or /same."""
    options: tuple[str, ...] = ()
    """More options of the kind, one word each: --device=/dev/infiniband, --module=gpu; not for secrets."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(
                f"there is no container of kind {self.kind!r}",
                fix=did_you_mean(self.kind, get_args(Kind)),
            )
        if self.kind == "none":
            self._check_nothing_is_lost()
            return
        _check_image(self.kind, self.image)
        for mount in self.mounts:
            _Mount.read(mount, self.kind)
        for option in self.options:
            _check_option(option)

    def _check_nothing_is_lost(self) -> None:
        if self.image or self.mounts or self.options:
            raise ConfigError(
                "a container is described, but its kind is none",
                fix=f"say who runs it: kind = one of {', '.join(get_args(Kind)[1:])}",
            )


class _Mount(NamedTuple):
    source: str
    target: str
    read_only: bool = False

    @classmethod
    def read(cls, text: str, kind: Kind) -> _Mount:
        """Read a mount as a profile writes it."""
        source, *more = text.split(":")
        if more[1:] not in ([], ["ro"]):
            raise ConfigError(f"the mount {text!r} cannot be read", fix=_MOUNT_FORMS)
        return cls(
            _mountable(source, kind), _mountable(more[0] if more else source, kind), bool(more[1:])
        )

    def __str__(self) -> str:
        return f"{self.source}:{self.target}{':ro' if self.read_only else ''}"


def srun_options(
    container: Container, *, folders: Sequence[str] = (), workdir: str = ""
) -> list[str]:
    """Return what srun must be told; only pyxis is a part of srun.

    >>> image = Container("pyxis", "/shared/train.sqsh", mounts=("/data:/data:ro",))
    >>> srun_options(image, folders=["/shared/runs"], workdir="/shared/runs")  # doctest: +NORMALIZE_WHITESPACE
    ['--container-image=/shared/train.sqsh', '--container-mounts=/shared/runs:/shared/runs,/data:/data:ro',
     '--container-workdir=/shared/runs']
    """
    if container.kind != "pyxis":
        return []
    mounts = ",".join(map(str, _mounts(container, folders)))
    return [
        f"--container-image={container.image}",
        *([f"--container-mounts={mounts}"] if mounts else []),
        *([f"--container-workdir={_mountable(workdir, container.kind)}"] if workdir else []),
        *container.options,
    ]


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
    """Return the words that run a command inside the container; each word of the command stays as it is.

    environment: names of the variables that must get inside; folders: seen inside under their own names; user: as
    UID:GID, those of whoever owns the run (empty: the image's own). Only docker asks for names and user.

    >>> wrap(Container("apptainer", "train.sif"), ["python", "a b.py"], gpus=True, folders=["/runs/x"])
    ['apptainer', 'exec', '--nv', '--bind', '/runs/x:/runs/x', 'train.sif', 'python', 'a b.py']
    >>> wrap(Container("shifter", "docker:me/train:1"), ["python", "x.py"], gpus=True, folders=["/runs/x"])
    ['shifter', '--image=docker:me/train:1', 'python', 'x.py']
    >>> docker = wrap(Container("docker", "train:1"), ["python", "x.py"], gpus=True, environment=["SLURM_PROCID"])
    >>> " ".join(docker)  # doctest: +NORMALIZE_WHITESPACE
    'docker run --rm --init --network host --ipc host --ulimit memlock=-1 --gpus all --env SLURM_PROCID
     train:1 python x.py'
    """
    assert command, "there is something to run"
    if any("\0" in word for word in command):
        raise ConfigError(
            "a word of the command contains a NUL", fix="take it out: no program can be given one"
        )
    match container.kind:
        case "none" | "pyxis":
            return list(command)
        case "apptainer" | "singularity":
            inside = _apptainer(container, gpus=gpus, folders=folders, workdir=workdir)
        case "shifter":
            inside = _shifter(container, workdir=workdir)
        case "docker":
            inside = _docker(
                container,
                gpus=gpus,
                environment=environment,
                folders=folders,
                workdir=workdir,
                user=user,
            )
    return [*inside, *command]


def _apptainer(
    container: Container, *, gpus: bool, folders: Sequence[str], workdir: str
) -> list[str]:
    """Network, process ids, shared memory and environment are the host's without a word; signals are passed on."""
    binds = [word for mount in _mounts(container, folders) for word in ("--bind", str(mount))]
    nvidia = ["--nv"] if gpus else []
    where = ["--pwd", _mountable(workdir, container.kind)] if workdir else []
    return [container.kind, "exec", *nvidia, *binds, *where, *container.options, container.image]


def _shifter(container: Container, *, workdir: str) -> list[str]:
    """Shifter shows the site's own file systems inside, and refuses to mount over them: folders are not mounted."""
    volumes = [f"--volume={mount}" for mount in _mounts(container, ())]
    where = [f"--workdir={_mountable(workdir, container.kind)}"] if workdir else []
    return ["shifter", f"--image={container.image}", *volumes, *where, *container.options]


def _docker(
    container: Container,
    *,
    gpus: bool,
    environment: Sequence[str],
    folders: Sequence[str],
    workdir: str,
    user: str,
) -> list[str]:
    """Everything that docker would keep apart is put together again: network, shared memory, user.

    --init: Python as process 1 would have no default action for signals, so a SIGTERM that comes before our handlers
    are there (torch takes seconds to import) would be lost; tried, it was. docker's init is process 1 instead, hands
    every signal on, reaps orphans, and leaves with Python's exit code, 75 included.
    --mount and not --volume: a folder that is missing is an error, not a new one that belongs to root.
    --env NAME without a value: the value comes from the environment of docker itself, and is in no list of processes.
    --gpus all: a rank must see its peers' cards, or NCCL cannot use NVLink between containers.
    """
    mounts = [
        word for mount in _mounts(container, folders) for word in ("--mount", _docker_mount(mount))
    ]
    names = [word for name in _checked_names(environment) for word in ("--env", name)]
    return [
        *(
            "docker",
            "run",
            "--rm",
            "--init",
            "--network",
            "host",
            "--ipc",
            "host",
            "--ulimit",
            "memlock=-1",
        ),
        *(["--gpus", "all"] if gpus else []),
        *(["--user", _checked_user(user)] if user else []),
        *mounts,
        *(["--workdir", _mountable(workdir, container.kind)] if workdir else []),
        *names,
        *container.options,
        container.image,
    ]


def _docker_mount(mount: _Mount) -> str:
    return f"type=bind,source={mount.source},target={mount.target}{',readonly' if mount.read_only else ''}"


def _mounts(container: Container, folders: Sequence[str]) -> list[_Mount]:
    """Return the folders and the mounts, each target once; a mount of the profile wins over a folder."""
    theirs = [_Mount.read(mount, container.kind) for mount in container.mounts]
    ours = [_Mount(_mountable(folder, container.kind), folder) for folder in dict.fromkeys(folders)]
    taken = {mount.target for mount in theirs}
    return [*(mount for mount in ours if mount.target not in taken), *theirs]


def _mountable(path: str, kind: Kind) -> str:
    """Return a path that the kind's own syntax can carry."""
    if not path.startswith("/"):
        raise ConfigError(
            f"{path!r} is not the full path of a folder", fix=f"begin it with /; {_MOUNT_FORMS}"
        )
    refused = _NOT_IN_A_MOUNT + (_NOT_IN_PYXIS if kind == "pyxis" else "")
    bad = sorted({char for char in path if char in refused or not char.isprintable()})
    if bad:
        raise ConfigError(
            f"{kind} cannot mount {path!r}: it contains {' '.join(map(repr, bad))}",
            fix="rename the folder, or reach it by a symbolic link with a plain name",
        )
    return path


def _check_image(kind: str, image: str) -> None:
    if not image:
        raise ConfigError(
            f"container.kind is {kind}, but there is no image", fix="name it: image = ..."
        )
    if image.startswith("-") or any(char.isspace() or not char.isprintable() for char in image):
        raise ConfigError(
            f"{image!r} cannot be the name of an image",
            fix="give a name or a file without spaces and without a leading -",
        )


def _check_option(option: str) -> None:
    if not option.startswith("-") or option in {"-", "--"} or not option.isprintable():
        raise ConfigError(
            f"{option!r} is not an option in one word",
            fix="write an option and its value together: --device=/dev/infiniband",
        )


def _checked_names(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            raise ConfigError(
                f"{name.partition('=')[0]!r} cannot be the name of a variable",
                fix="give the name alone, without its value",
            )
    return list(dict.fromkeys(names))


def _checked_user(user: str) -> str:
    if not re.fullmatch(r"[0-9]+:[0-9]+", user, re.ASCII):
        raise ConfigError(
            f"{user!r} is not a user as docker is told it", fix="give UID:GID, as in 1000:1000"
        )
    return user
