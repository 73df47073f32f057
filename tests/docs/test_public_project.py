"""The files of a public project: workflow, hooks, citation, licences, release script, and the files that CONTRIBUTING.md names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from paceline.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


@pytest.mark.skipif(not find_spec("check_jsonschema"), reason="needs check-jsonschema")
def test_each_file_follows_its_schema() -> None:
    workflow = ".github/workflows/test.yml"
    for schema, file in (
        ("vendor.github-workflows", workflow),
        ("custom.github-workflows-require-timeout", workflow),
        ("vendor.citation-file-format", "CITATION.cff"),
    ):
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, file]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflow_checks_both_architectures_and_every_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    job = workflow["jobs"]["test"]
    matrix = job["strategy"]["matrix"]
    assert matrix["python"] == PYTHONS
    assert [runner.endswith("-arm") for runner in matrix["runner"]] == [False, True]
    assert job["steps"][-1]["run"] == "scripts/check"
    assert workflow["permissions"] == {"contents": "read"}
    prefix = "Programming Language :: Python :: 3."
    stated = [line for line in PROJECT["classifiers"] if line.startswith(prefix)]
    assert [line.rpartition(" ")[2] for line in stated] == PYTHONS


def test_hooks_before_a_commit_are_the_tools_of_the_check() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repository,) = config["repos"]
    check = (ROOT / "scripts" / "check").read_text()
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        assert re.search(rf"^{hook['name']}\b", check, re.MULTILINE), hook["name"]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == VERSION
    assert " AND ".join(citation["license"]) == PROJECT["license"]


def tree(folder: Path, *, changelog: str) -> Path:
    """Return a committed copy of this tree with another changelog."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / "CHANGELOG.md").write_text(changelog)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True, env=without_git())
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["add", "-A"], [*who, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *command], cwd=folder, check=True, env=without_git())


def without_git() -> dict[str, str]:
    """Return the environment without the variables by which git finds another repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "scripts" / "release"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=without_git())


needs_git = pytest.mark.skipif(
    not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs a git checkout"
)


@needs_git
def test_a_release_holds_both_licences_and_all_data(tmp_path: Path) -> None:
    folder = tree(tmp_path / "tree", changelog=f"# Changelog\n\n## [{VERSION}] - 2026-01-31\n")
    done = release(folder, "--to", str(tmp_path / "dist"))
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "dist").iterdir())
    assert names == [f"paceline-{VERSION}-py3-none-any.whl", f"paceline-{VERSION}.tar.gz"]
    assert re.findall(r"^[0-9a-f]{64}  \S+$", done.stdout, re.MULTILINE)
    info = f"paceline-{VERSION}.dist-info"
    with zipfile.ZipFile(tmp_path / "dist" / names[0]) as wheel:
        metadata = wheel.read(f"{info}/METADATA").decode()
        for licence in ("LICENSE", "LICENSES/CC-BY-4.0.txt", "NOTICE"):
            assert wheel.read(f"{info}/licenses/{licence}") == (ROOT / licence).read_bytes()
    assert "License-Expression: Apache-2.0 AND CC-BY-4.0\n" in metadata
    assert "Author: The Paceline developers\n" in metadata
    assert "\nClassifier: Operating System :: POSIX :: Linux\n" in metadata


@needs_git
def test_a_tree_that_is_not_ready_is_refused(tmp_path: Path) -> None:
    folder = tree(tmp_path / "tree", changelog="# Changelog\n\n## [Unreleased]\n")

    def refused(*parts: str) -> None:
        done = release(folder, "--to", str(tmp_path / "dist"))
        assert done.returncode == 1
        assert [part for part in (*parts, "\n  fix: ") if part not in done.stderr] == []
        assert not (tmp_path / "dist").exists()

    refused("CHANGELOG.md", VERSION)
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{VERSION}] - 2026-01-31\n")
    refused("not committed")
    commit(folder)
    subprocess.run(["git", "tag", f"v{VERSION}"], cwd=folder, check=True, env=without_git())
    refused(f"v{VERSION} is tagged")
    (folder / "src" / "paceline" / "version.py").write_text('VERSION = "1.0rc1"\n')
    refused("1.2.3")


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
QUESTIONS = re.findall(r"^\| ([^|]+\?) \| (.+) \|$", CONTRIBUTING, re.MULTILINE)


def test_files_that_contributors_are_sent_to_exist() -> None:
    assert len(QUESTIONS) == 10
    for question, answer in QUESTIONS:
        files = re.findall(r"`([\w/]+\.(?:py|sh))`", answer)
        assert files, question
        assert [name for name in files if not (ROOT / "src" / "paceline" / name).is_file()] == []
    rooms = "tests|src|scripts|docs|config|world"
    named = re.findall(rf"`((?:{rooms})/[\w/]+\.(?:py|md))`", CONTRIBUTING)
    homes = (ROOT, ROOT / "src" / "paceline")
    missing = [name for name in named if not any((home / name).is_file() for home in homes)]
    assert set(missing) <= {"src/paceline/cli/NAME.py"}
