"""Containers: the command line of a rank inside one, refused values, and the files that build the image."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.container import Container, srun_options, wrap
from paceline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "containers"
KINDS = ["apptainer", "singularity", "shifter", "pyxis", "docker"]
COMMAND = ["python", "train.py", "name=a b"]


def test_without_a_container_the_command_is_the_command():
    assert wrap(Container(), COMMAND, gpus=True, folders=["no:check"], environment=["A"]) == COMMAND
    assert srun_options(Container()) == []


BIND = "--bind /code:/code --bind /runs:/runs --bind /data:/in:ro --bind /s:/s --pwd /code"
DOCKER = (
    "docker run --rm --init --network host --ipc host --ulimit memlock=-1 --gpus all --user 1000:100 "
    "--mount type=bind,source=/code,target=/code --mount type=bind,source=/runs,target=/runs "
    "--mount type=bind,source=/data,target=/in,readonly "
    "--workdir /code --env SLURM_PROCID --env TOKEN --device=/dev/infiniband p:1"
)
LINES = [
    (
        ("apptainer", "/shared/p.sif", ("/data:/in:ro", "/s"), ("--no-home",)),
        f"apptainer exec --nv {BIND} --no-home /shared/p.sif",
    ),
    (
        ("singularity", "/shared/p.sif", ("/data:/in:ro", "/s"), ("--no-home",)),
        f"singularity exec --nv {BIND} --no-home /shared/p.sif",
    ),
    (  # it mounts only what the profile names
        ("shifter", "docker:me/p:1", ("/data:/in",), ("--module=gpu",)),
        "shifter --image=docker:me/p:1 --volume=/data:/in --workdir=/code --module=gpu",
    ),
    (("pyxis", "registry#me/p:1", ("/data:/in:ro",), ("--no-x",)), ""),
    (  # names of variables, and never their values
        ("docker", "p:1", ("/data:/in:ro",), ("--device=/dev/infiniband",)),
        DOCKER,
    ),
]


@pytest.mark.parametrize(
    ("fields", "line"), LINES, ids=lambda given: given[0] if isinstance(given, tuple) else ""
)
def test_the_command_of_a_rank_in_a_container(fields, line):
    container, where = Container(*fields), {"folders": ["/code", "/runs", "/code"]}
    where["workdir"] = "/code"
    own = {"environment": ["SLURM_PROCID", "TOKEN", "TOKEN"], "user": "1000:100"}
    assert wrap(container, COMMAND, gpus=True, **where, **own) == [*line.split(), *COMMAND]
    bare = wrap(container, COMMAND, gpus=False)
    assert not {"--nv", "--gpus", "--user", "--workdir", "--env"} & set(bare)
    pyxis = (
        "--container-image=registry#me/p:1 --container-mounts=/code:/code,/runs:/runs,/data:/in:ro"
    )
    pyxis += " --container-workdir=/code --no-x"
    expected = pyxis.split() if container.kind == "pyxis" else []
    assert srun_options(container, **where) == expected


def test_a_mount_of_the_profile_wins_over_a_folder_of_the_run():
    container = Container("apptainer", "x", mounts=("/fast/data:/data",))
    words = wrap(container, COMMAND, gpus=False, folders=["/data"])
    assert [word for word in words if ":" in word] == ["/fast/data:/data"]


REFUSED = [
    (("appptainer", "x"), "apptainer"),
    (("podman", "x"), "use one of"),
    (("docker",), "image ="),
    (("none", "x"), "kind ="),
    (("none", "", ("/data",)), "kind ="),
    *((("docker", image), "without spaces") for image in ("a b", "a\nb")),
    (("docker", "--privileged"), "leading -"),
    *((("docker", "x", (mount,)), "begin it with /") for mount in ("data:/in", "/data:in", "")),
    *(
        (("docker", "x", (mount,)), "/host:/inside:ro")
        for mount in ("/data:/in:rw,z", "/a:/b:ro:x")
    ),
    (("docker", "x", ("/a,source=/etc",)), "rename the folder"),
    (("apptainer", "x", ("/a,/etc:/etc",)), "rename the folder"),
    (("shifter", "x", ("/a;/etc:/etc",)), "rename the folder"),
    *((("pyxis", "x", (mount,)), "rename the folder") for mount in ("/$(id)", "/my data")),
    *(
        (("docker", "x", (), options), "--device=/dev/infiniband")
        for options in (("--device", "/dev/infiniband"), ("--",), ("--env=A=\n",))
    ),
]


@pytest.mark.parametrize(("fields", "fix"), REFUSED, ids=str)
def test_a_container_that_cannot_be_is_refused_with_a_fix(fields, fix):
    with pytest.raises(ConfigError) as caught:
        Container(*fields)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("keywords", "fix"),
    [
        ({"environment": ["TOKEN=secret"]}, "without its value"),
        ({"environment": ["A B"]}, "without its value"),
        ({"user": "$(id -u)"}, "UID:GID"),
        ({"user": "root"}, "UID:GID"),
        ({"folders": ["runs"]}, "begin it with /"),
        ({"folders": ["/a:b"]}, "rename the folder"),
        ({"workdir": "here"}, "begin it with /"),
    ],
    ids=str,
)
def test_docker_is_not_told_what_it_would_misread(keywords, fix):
    with pytest.raises(ConfigError) as caught:
        wrap(Container("docker", "x"), COMMAND, gpus=False, **keywords)
    assert fix in caught.value.fix
    assert "secret" not in str(caught.value)


ODD = st.text() | st.sampled_from(
    ["a b", "'", '"', "$(id)", "`id`", ";", "a\nb", "ü", "--rm", "-", "", "\\", "a,b", "a:b"]
)


@given(st.sampled_from(KINDS), st.lists(ODD, min_size=1))
def test_words_of_the_command_are_passed_exactly_or_refused(kind, command):
    container = Container(kind, "image")
    if any("\0" in word for word in command):
        with pytest.raises(ConfigError, match="NUL"):
            wrap(container, command, gpus=True)
    else:
        words = wrap(container, command, gpus=True, folders=["/runs"], environment=["A"])
        before = words[: len(words) - len(command)]
        assert words[len(before) :] == command
        assert (
            before == wrap(container, ["x"], gpus=True, folders=["/runs"], environment=["A"])[:-1]
        )


@given(st.sampled_from(KINDS), ODD.map(lambda word: f"/{word}"))
def test_a_folder_is_carried_as_one_place_or_refused(kind, folder):
    container = Container(kind, "image")
    try:
        words = [
            *srun_options(container, folders=[folder], workdir=folder),
            *wrap(container, ["x"], gpus=False, folders=[folder], workdir=folder),
        ]
    except ConfigError as error:
        assert "rename the folder" in error.fix  # noqa: PT017
        return
    assert folder.isprintable()
    assert not set(folder) & set(',:;"\\')
    assert kind != "pyxis" or not set(folder) & set(" $`")
    carried = {
        "apptainer": f"{folder}:{folder}",
        "singularity": f"{folder}:{folder}",
        "pyxis": f"--container-mounts={folder}:{folder}",
        "docker": f"type=bind,source={folder},target={folder}",
        "shifter": f"--workdir={folder}",
    }
    assert carried[kind] in words


@given(st.sampled_from(KINDS), ODD, ODD, ODD)
def test_no_field_of_a_profile_becomes_another_option(kind, image, mount, option):
    try:
        container = Container(kind, image, (mount,), (option,))
    except ConfigError:
        return
    words = [*srun_options(container), *wrap(container, ["x"], gpus=False)]
    assert all("\n" not in word and "\0" not in word for word in words)
    assert option.startswith("-")
    assert not image.startswith("-")
    if kind in {"apptainer", "singularity", "docker"}:
        assert words[-2:] == [image, "x"]


def instructions(text):
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def test_the_images_copy_what_exists_pin_one_torch_and_hold_no_secret():
    dockerfile = (FOLDER / "Dockerfile").read_text()
    copied = set()
    for name, rest in instructions(dockerfile):
        assert not re.search(r"(?i)password|token|secret", rest)
        if name == "COPY":
            copied |= set(rest.split()[:-1])
        if name == "RUN":
            assert subprocess.run(["bash", "-n", "-c", rest]).returncode == 0, rest
    assert all((ROOT / source).exists() for source in copied)
    assert [rest for name, rest in instructions(dockerfile) if name == "USER"][-1] == "paceline"
    comment, everything, *lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert (comment[:1], everything) == ("#", "*")
    assert {line[1:] for line in lines if line.startswith("!")} == copied
    text = (FOLDER / "paceline.def").read_text()
    sections = dict(re.findall(r"(?ms)^%(\w+)\n(.*?)(?=^%|\Z)", text))
    for line in filter(str.strip, sections["files"].split("\n")):
        source, target = line.split()
        assert ((ROOT / source).exists(), target) == (True, f"/opt/paceline/{source}")
    for name in ("post", "environment", "test", "runscript"):
        assert subprocess.run(["sh", "-n", "-c", sections[name]]).returncode == 0, name
    assert all(f"ARG {argument}" in dockerfile for argument in sections["arguments"].split())
    (pinned,) = re.findall(r"ARG TORCH=(\S+)", dockerfile)
    assert f"torch=={pinned}" in (ROOT / "Makefile").read_text()


def readme_lines(program):
    text = (FOLDER / "README.md").read_text()
    return [
        line[2:] for line in text.splitlines() if line.startswith("$ ") and f"{program} " in line
    ]


@pytest.mark.parametrize("kind", ["apptainer", "docker", "shifter", "pyxis"])
def test_the_lines_of_the_readme_are_those_that_a_job_runs(kind):
    here = "/here"
    image = {
        "apptainer": "paceline.sif",
        "docker": "paceline",
        "shifter": "docker:NAME/paceline:latest",
    }
    container = Container(kind, image.get(kind, f"{here}/paceline.sqsh"))
    ours = [
        *srun_options(container, folders=[here], workdir=here),
        *wrap(container, ["python"], gpus=True, folders=[here], workdir=here, user="1:2"),
    ]
    program = {
        "docker": "docker run",
        "apptainer": "apptainer exec",
        "pyxis": '--container-image="$PWD/paceline.sqsh"',
    }
    lines = readme_lines(program.get(kind, "shifter --image=docker:NAME/paceline:latest"))
    assert lines
    for line in lines:
        words = shlex.split(line.replace('"$(id -u):$(id -g)"', "1:2").replace("$PWD", here))
        words = shlex.split(words[-1]) if "bash" in words else words
        missing = [word for word in ours[:-1] if word not in words]
        assert not missing, line


def test_the_shell_line_for_docker_under_slurm_gives_names_only():
    (line,) = [line for line in readme_lines("docker run") if line.startswith("srun")]
    inner = shlex.split(line)[-1].replace("exec docker", "exec printf '%s\\n' docker")
    env = {
        "PATH": os.environ["PATH"],
        "SLURM_PROCID": "3",
        "PACELINE_SET": "a secret",
        "OTHER": "x",
    }
    said = subprocess.check_output(["bash", "-c", inner], env=env, text=True).split("\n")
    names = {said[at + 1] for at, word in enumerate(said) if word == "--env"}
    assert (names, "secret" in " ".join(said)) == ({"SLURM_PROCID", "PACELINE_SET"}, False)


WAITS = """
import signal, sys, time
heard = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: heard.append(number))
print(*map(ascii, sys.argv[1:]), flush=True)
while len(heard) < 2:
    time.sleep(0.02)
sys.exit(75)
"""


def real_image(kind):
    """Return an image with Python that the user of the tests names, or skip."""
    name = f"PACELINE_{kind.upper()}_IMAGE"
    if not shutil.which(kind) or name not in os.environ:
        pytest.skip(f"needs {kind}, and {name}: an image that has python3")
    return os.environ[name]


@pytest.mark.parametrize("kind", ["apptainer", "docker"])
def test_words_and_signals_get_inside_and_the_exit_code_comes_out(kind, tmp_path):
    words = ["a b", "$(id)", '"', ";", "a\nb", "--rm"]
    options = tuple(os.environ.get(f"PACELINE_{kind.upper()}_OPTIONS", "").split())
    command = wrap(
        Container(kind, real_image(kind), options=options),
        ["python3", "-c", WAITS, *words],
        gpus=False,
        folders=[str(tmp_path)],
        workdir=str(tmp_path),
        user=f"{os.getuid()}:{os.getgid()}",
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().split("\n")[0] == " ".join(map(ascii, words))
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 75
