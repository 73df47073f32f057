"""Containers: the command line of a rank inside one, refused values, and the files that build the image."""

import fnmatch
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


@pytest.mark.parametrize("kind", ["apptainer", "singularity"])
def test_apptainer_sees_the_folders_and_the_driver(kind):
    container = Container(
        kind, "/shared/p.sif", mounts=("/data:/in:ro", "/scratch"), options=("--no-home",)
    )
    words = wrap(
        container, COMMAND, gpus=True, folders=["/runs/x", "/code", "/runs/x"], workdir="/code"
    )
    expected = f"{kind} exec --nv --bind /runs/x:/runs/x --bind /code:/code --bind /data:/in:ro"
    expected += " --bind /scratch:/scratch --pwd /code --no-home /shared/p.sif"
    assert words == [*expected.split(), *COMMAND]
    assert "--nv" not in wrap(container, COMMAND, gpus=False)


def test_shifter_mounts_only_what_the_profile_names():
    container = Container(
        "shifter", "docker:me/p:1", mounts=("/data:/in",), options=("--module=gpu",)
    )
    words = wrap(container, COMMAND, gpus=True, folders=["/global/runs"], workdir="/global/runs")
    expected = (
        "shifter --image=docker:me/p:1 --volume=/data:/in --workdir=/global/runs --module=gpu"
    )
    assert words == [*expected.split(), *COMMAND]


def test_pyxis_is_a_matter_of_srun():
    container = Container(
        "pyxis", "registry#me/p:1", mounts=("/data:/in:ro",), options=("--no-container-mount-home",)
    )
    assert wrap(container, COMMAND, gpus=True, folders=["/runs"]) == COMMAND
    expected = "--container-image=registry#me/p:1 --container-mounts=/runs:/runs,/data:/in:ro"
    expected += " --container-workdir=/runs --no-container-mount-home"
    assert srun_options(container, folders=["/runs"], workdir="/runs") == expected.split()
    assert srun_options(Container("pyxis", "x")) == ["--container-image=x"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pyxis"])
def test_srun_is_told_nothing_of_the_others(kind):
    assert srun_options(Container(kind, "x"), folders=["/runs"], workdir="/runs") == []


def test_docker_gets_names_of_variables_and_never_their_values():
    container = Container(
        "docker", "p:1", mounts=("/data:/in:ro",), options=("--device=/dev/infiniband",)
    )
    words = wrap(
        container,
        COMMAND,
        gpus=True,
        environment=["SLURM_PROCID", "TOKEN", "TOKEN"],
        folders=["/my runs"],
        workdir="/my runs",
        user="1000:100",
    )
    assert words == [
        *[
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
            "--gpus",
            "all",
            "--user",
            "1000:100",
        ],
        *("--mount", "type=bind,source=/my runs,target=/my runs"),
        *("--mount", "type=bind,source=/data,target=/in,readonly"),
        *(
            "--workdir",
            "/my runs",
            "--env",
            "SLURM_PROCID",
            "--env",
            "TOKEN",
            "--device=/dev/infiniband",
            "p:1",
        ),
        *COMMAND,
    ]
    bare = wrap(container, COMMAND, gpus=False)
    assert not {"--gpus", "--user", "--workdir", "--env"} & set(bare)


def test_a_mount_of_the_profile_wins_over_a_folder_of_the_run():
    container = Container("apptainer", "x", mounts=("/fast/data:/data",))
    words = wrap(container, COMMAND, gpus=False, folders=["/data"])
    assert [words[at + 1] for at, word in enumerate(words) if word == "--bind"] == [
        "/fast/data:/data"
    ]


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"kind": "appptainer", "image": "x"}, "did you mean apptainer?"),
        ({"kind": "podman", "image": "x"}, "use one of"),
        ({"kind": "docker"}, "image ="),
        ({"image": "x"}, "kind ="),
        ({"mounts": ("/data",)}, "kind ="),
        ({"kind": "docker", "image": "a b"}, "without spaces"),
        ({"kind": "docker", "image": "a\nb"}, "without spaces"),
        ({"kind": "docker", "image": "--privileged"}, "leading -"),
        ({"kind": "docker", "image": "x", "mounts": ("data:/in",)}, "begin it with /"),
        ({"kind": "docker", "image": "x", "mounts": ("/data:in",)}, "begin it with /"),
        ({"kind": "docker", "image": "x", "mounts": ("",)}, "begin it with /"),
        ({"kind": "docker", "image": "x", "mounts": ("/data:/in:rw,z",)}, "/host:/inside:ro"),
        ({"kind": "docker", "image": "x", "mounts": ("/a:/b:ro:x",)}, "/host:/inside:ro"),
        ({"kind": "docker", "image": "x", "mounts": ("/a,source=/etc",)}, "rename the folder"),
        ({"kind": "apptainer", "image": "x", "mounts": ("/a,/etc:/etc",)}, "rename the folder"),
        ({"kind": "shifter", "image": "x", "mounts": ("/a;/etc:/etc",)}, "rename the folder"),
        ({"kind": "pyxis", "image": "x", "mounts": ("/$(id)",)}, "rename the folder"),
        ({"kind": "pyxis", "image": "x", "mounts": ("/my data",)}, "rename the folder"),
        (
            {"kind": "docker", "image": "x", "options": ("--device", "/dev/infiniband")},
            "--device=/dev/infiniband",
        ),
        ({"kind": "docker", "image": "x", "options": ("--",)}, "--device=/dev/infiniband"),
        ({"kind": "docker", "image": "x", "options": ("--env=A=\n",)}, "--device=/dev/infiniband"),
    ],
    ids=str,
)
def test_a_container_that_cannot_be_is_refused_with_a_fix(fields, fix):
    with pytest.raises(ConfigError) as caught:
        Container(**fields)
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


def test_the_dockerfile_is_well_formed_and_copies_what_exists():
    found = instructions((FOLDER / "Dockerfile").read_text())
    assert {name for name, _ in found} <= {
        "ARG",
        "FROM",
        "RUN",
        "COPY",
        "ENV",
        "USER",
        "WORKDIR",
        "CMD",
    }
    assert [name for name, _ in found][:2] == ["ARG", "FROM"]
    for name, rest in found:
        if name == "COPY":
            *sources, target = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
            assert len(sources) == 1 or target.endswith("/")
        if name == "RUN":
            assert subprocess.run(["bash", "-n", "-c", rest]).returncode == 0, rest
    assert [rest for name, rest in found if name == "USER"][-1] == "paceline"
    assert not any(re.search(r"(?i)password|token|secret", rest) for name, rest in found)


def test_only_what_is_copied_is_sent_to_docker():
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert lines[0] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for name, rest in instructions((FOLDER / "Dockerfile").read_text())
        if name == "COPY"
        for source in rest.split()[:-1]
    }
    assert kept == copied
    assert not any(fnmatch.fnmatch(".env", pattern) for pattern in kept)


def test_the_apptainer_definition_copies_the_same_and_pins_the_same():
    text = (FOLDER / "paceline.def").read_text()
    sections = dict(re.findall(r"(?ms)^%(\w+)\n(.*?)(?=^%|\Z)", text))
    assert list(sections) == ["arguments", "files", "post", "environment", "test", "runscript"]
    for line in sections["files"].split("\n"):
        if line.strip():
            source, target = line.split()
            assert (ROOT / source).exists()
            assert target == f"/opt/paceline/{source}"
    for name in ("post", "environment", "test", "runscript"):
        assert subprocess.run(["sh", "-n", "-c", sections[name]]).returncode == 0, name
    docker = (FOLDER / "Dockerfile").read_text()
    for argument in sections["arguments"].split():
        assert f"ARG {argument}" in docker


def test_the_image_has_the_torch_that_is_tested():
    (pinned,) = re.findall(r"ARG TORCH=(\S+)", (FOLDER / "Dockerfile").read_text())
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
    said = subprocess.run(
        ["bash", "-c", inner], env=env, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    names = {said[at + 1] for at, word in enumerate(said) if word == "--env"}
    assert names == {"SLURM_PROCID", "PACELINE_SET"}
    assert "secret" not in " ".join(said)


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
