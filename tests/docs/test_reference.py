"""The pages that are made from the code are what the code says."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import paceline
from paceline.config import RunConfig
from paceline.config.help import written_default
from paceline.config.values import field_types, flatten
from paceline.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
MAKERS = ROOT / "scripts" / "docs"
SETTINGS = ROOT / "docs" / "reference" / "settings.md"
API = ROOT / "docs" / "reference" / "api.md"


def python(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=90
    )


def test_pages_made_from_the_code_are_not_stale_and_need_no_torch() -> None:
    done = python("-X", "importtime", "scripts/docs/reference.py", "--check")
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, said) == (0, [])
    assert not re.search(r"\|\s+torch\b", done.stderr)


def test_a_stale_page_is_named_and_made_anew(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in ("docs", "scripts/docs"):
        shutil.copytree(ROOT / name, copy / name)
    for name in ("src", "pyproject.toml"):
        (copy / name).symlink_to(ROOT / name)
    page = copy / "docs" / "reference" / "settings.md"
    page.write_text(page.read_text().replace("Random seed for weights", "Some seed for weights"))
    (copy / "docs" / "guides").mkdir(exist_ok=True)
    (copy / "docs" / "guides" / "a-new-one.md").write_text("# How to be new\n\nIt is\nold. So?\n")
    checked = python("scripts/docs/reference.py", "--check", folder=copy)
    assert checked.returncode == 1
    assert "docs/reference/settings.md is not what the code says" in checked.stderr
    assert "docs/index.md is not what the code says" in checked.stderr
    assert python("scripts/docs/reference.py", folder=copy).returncode == 0
    assert page.read_bytes() == SETTINGS.read_bytes()
    assert (
        "| [How to be new](guides/a-new-one.md) | It is old. So? |\n\n<!-- end -->"
        in (copy / "docs" / "index.md").read_text()
    )


def test_the_examples_in_the_makers_are_right() -> None:
    done = python("-m", "doctest", *map(str, sorted(MAKERS.glob("*.py"))), folder=MAKERS)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def rows_of(heading: str) -> dict[str, list[str]]:
    """Return the table below a heading: help, values and default by setting."""
    section = re.search(
        rf"^## {heading}\n.*?(?=^## |\Z)",
        SETTINGS.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )[0]
    rows = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")
    ]
    return {name.strip("`"): rest for name, *rest in rows} | {
        "": re.findall(r"`([^`]+)`", section.partition("\n\n|")[0])
    }


def test_settings_of_a_recipe_are_those_of_its_class() -> None:
    """They are read from its source; here the class is asked."""
    for recipe in RECIPES:
        module = __import__(f"paceline.recipes.{recipe}", fromlist=["x"])
        kind = getattr(module, f"{recipe.capitalize()}Config")
        rows, usual, here = (
            rows_of(f"Recipe {recipe}"),
            dict(flatten(RunConfig())),
            dict(flatten(kind())),
        )
        others = [f"{name}={here[name]}" for name in usual if here[name] != usual[name]]
        assert rows.pop("") == others
        assert list(rows) == [name for name in field_types(kind) if name not in usual]
        for name, (*_, default) in rows.items():
            value = written_default(here[name]) or "empty"
            assert default.strip("`") == value, f"{recipe}: {name}"


def test_every_setting_of_a_run_is_described() -> None:
    text = (
        SETTINGS.read_text(encoding="utf-8")
        .partition("\n## The run")[2]
        .partition("\n## Recipe")[0]
    )
    assert set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)) == set(field_types(RunConfig))


def public_members(name: str) -> dict[str, object]:
    """Return a public name and, for `Run`, its public methods and properties, as `Name.member`."""
    kind = getattr(paceline, name)
    found = {name: kind}
    if name == "Run":
        members = inspect.getmembers(kind, lambda one: callable(one) or isinstance(one, property))
        found |= {f"Run.{member}": one for member, one in members if not member.startswith("_")}
    return found


def test_every_public_name_and_method_is_described_with_its_arguments_and_an_example() -> None:
    page = API.read_text(encoding="utf-8")
    for name in paceline.__all__:
        for member, found in public_members(name).items():
            text, prop = inspect.getdoc(found) or "", isinstance(found, property)
            heading = f"- `{member.partition('.')[2]}`: " if prop else member
            assert re.search(rf"^(#+ )?{re.escape(heading)}", page, re.MULTILINE), member
            assert text, member
            if prop or name == "RunConfig":  # the settings page describes each setting
                continue
            arguments = [one for one in inspect.signature(found).parameters if one != "self"]
            assert [one for one in arguments if f"- `{one}`: " not in text] == [], member
            assert ">>> " in text, member
