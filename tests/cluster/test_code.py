"""Does a queued job run the code that was submitted?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.cluster.code_copy import plan_copy
from paceline.errors import ConfigError
from paceline.launch.spec import module, script

FILES = {"train.py": "import part.inner", "part/inner.py": "x = 1", "part/__init__.py": ""}
LEFT_OUT = ["data.bin", ".git/hook.py", "runs/old/code/x.py", "venv/pyvenv.cfg", "venv/lib/y.py"]


def project(folder: Path) -> Path:
    files = FILES | dict.fromkeys(LEFT_OUT, "no") | {"run.toml": "epochs = 3"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "train.py"


def test_the_copy_holds_the_script_and_the_python_files_below_it(tmp_path: Path) -> None:
    copy = plan_copy(script(str(project(tmp_path))), ["epochs=3"], tmp_path / "copies")
    copy.make()
    files = {file for file in copy.folder.rglob("*") if file.is_file()}
    assert {str(file.relative_to(copy.folder / "code")) for file in files} == set(FILES)
    assert copy.words == ("path", str(copy.folder / "code" / "train.py"), "epochs=3")
    modes = {os.stat(file).st_mode & 0o777 for file in copy.folder.rglob("*")}
    assert modes == {0o700, 0o600}


def test_a_later_edit_makes_another_copy_and_leaves_the_first(tmp_path: Path) -> None:
    main = project(tmp_path)
    first = plan_copy(script(str(main)), [], tmp_path / "copies")
    assert plan_copy(script(str(main)), ["b"], tmp_path / "copies").folder == first.folder
    first.make()
    main.write_text("changed")
    second = plan_copy(script(str(main)), [], tmp_path / "copies")
    second.make()
    assert first.folder != second.folder
    assert Path(first.words[1]).read_text() == "import part.inner"
    assert Path(second.words[1]).read_text() == "changed"


@pytest.mark.parametrize("words", [["--config", "run.toml"], ["--config=run.toml"]])
def test_a_settings_file_is_copied_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    main = project(tmp_path)
    monkeypatch.chdir(tmp_path)
    copy = plan_copy(script(str(main)), [*words, "seed=1"], tmp_path / "copies")
    copy.make()
    (tmp_path / "run.toml").write_text("epochs = 99")
    option, _, file = copy.words[2].partition("=")
    assert (option, Path(file).read_text(), copy.words[3]) == ("--config", "epochs = 3", "seed=1")


def test_a_recipe_is_not_copied(tmp_path: Path) -> None:
    copy = plan_copy(module("toy", "paceline.recipes.toy"), ["epochs=1"], tmp_path / "copies")
    copy.make()
    assert copy.words == ("module", "paceline.recipes.toy", "epochs=1")
    assert not (tmp_path / "copies").exists()


def test_a_script_in_a_crowd_is_refused(tmp_path: Path) -> None:
    main = project(tmp_path)
    for number in range(2001):
        (tmp_path / f"m{number}.py").touch()
    with pytest.raises(ConfigError, match="more than 2,00") as caught:
        plan_copy(script(str(main)), [], tmp_path / "copies")
    assert "folder of its own" in caught.value.fix


def test_a_script_that_is_a_link_is_copied_from_where_it_is(tmp_path: Path) -> None:
    main = project(tmp_path / "real")
    (tmp_path / "link.py").symlink_to(main)
    copy = plan_copy(script(str(tmp_path / "link.py")), [], tmp_path / "copies")
    copy.make()
    assert Path(copy.words[1]).read_text() == "import part.inner"
