"""Modules come from the file of bytecode exactly if Python would have run the same bytecode; the file is only ever a saving."""

from __future__ import annotations

import importlib
import importlib.resources
import importlib.util
import inspect
import os
import pkgutil
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES, FileFinder, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from paceline.launch import bytecode
from paceline.launch.bytecode import BytecodeFinder, use_bytecode
from paceline.launch.bytecode_file import BytecodeFile
from support.checkpoint_trainings import settings, train
from support.program import paceline

pytestmark = pytest.mark.slow  # together: the file is among the first that begin
MODULES = 60
BEFORE = 1_600_000_000  # a time of last change, in seconds


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(bytecode, "_DELAY_S", 0.0)
    yield
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "many"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def write(path: Path, text: str, time_s: int = BEFORE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time_s, time_s))


def make_package(folder: Path, value: str = "first") -> None:
    (folder / "many-1.0.dist-info").mkdir(parents=True, exist_ok=True)  # it is installed here
    write(folder / "many" / "__init__.py", "")
    write(folder / "many" / "inner" / "__init__.py", f"value = {value!r}\n")
    write(folder / "many" / "inner" / "data.txt", "a resource")
    for number in range(MODULES):
        write(folder / "many" / f"m{number}.py", f"def value():\n    return {value!r}, {number}\n")


def import_all(folder: Path) -> ModuleType:
    """Import the package anew, and return one of its modules."""
    forget()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.import_module("many.inner")
    return [importlib.import_module(f"many.m{number}") for number in range(MODULES)][7]


def use(folder: Path) -> BytecodeFinder:
    """Begin as a rank does, and return its finder."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    use_bytecode({"XDG_CACHE_HOME": str(folder / "cache")})
    return next(one for one in sys.meta_path if isinstance(one, BytecodeFinder))


def file_of(folder: Path) -> Path:
    (file,) = (folder / "cache" / "paceline" / "bytecode").iterdir()
    return file


def first_start(folder: Path) -> BytecodeFinder:
    """Make the package, and import it where no bytecode was kept."""
    make_package(folder)
    finder = use(folder)
    import_all(folder)
    return finder


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with the package, whose bytecode was kept in an earlier start."""
    finder = first_start(tmp_path)
    finder.keep()
    sys.meta_path.remove(finder)
    return tmp_path


def is_from_file(module: ModuleType) -> bool:
    return type(module.__spec__.loader) is not SourceFileLoader


def test_a_submodule_is_loaded_without_opening_its_files(kept: Path) -> None:
    opened: list[str] = []
    watching = [True]

    def hook(event: str, given: tuple[object, ...]) -> None:  # it cannot be removed
        if watching and event == "open" and "many" in str(given[0]):
            opened.append(str(given[0]))

    sys.addaudithook(hook)
    use(kept)
    found = import_all(kept)
    watching.clear()
    assert is_from_file(found)
    assert is_from_file(sys.modules["many.inner"])
    assert not is_from_file(sys.modules["many"])
    assert found.value() == ("first", 7)
    assert [path for path in opened if "m7" in path] == []


def test_it_is_the_module_that_python_would_have_made(kept: Path) -> None:
    plain = import_all(kept)
    facts = {name: getattr(plain, name) for name in ("__file__", "__cached__", "__package__")}
    package = sys.modules["many.inner"].__path__
    use(kept)
    found = import_all(kept)
    assert is_from_file(found)
    assert {name: getattr(found, name) for name in facts} == facts
    assert sys.modules["many.inner"].__path__ == package
    assert found.value.__code__ == plain.value.__code__
    assert found.value.__code__.co_filename == found.__file__


def test_sources_and_resources_are_found(kept: Path) -> None:
    use(kept)
    found = import_all(kept)
    assert inspect.getsource(found.value) == "def value():\n    return 'first', 7\n"
    assert inspect.getmodule(found.value.__code__) is found
    assert pkgutil.get_data("many.inner", "data.txt") == b"a resource"
    assert importlib.resources.files("many.inner").joinpath("data.txt").read_text() == "a resource"
    found.value.__globals__["value"] = None
    assert importlib.reload(found).value() == ("first", 7)


def change(folder: Path) -> None:
    write(folder / "many" / "m7.py", "def value():\n    return 'other', 8\n", BEFORE + 1)


def resize(folder: Path) -> None:
    write(folder / "many" / "m7.py", "def value():\n    return 'a longer one', 9\n")


def replace_by_package(folder: Path) -> None:
    (folder / "many" / "m7.py").unlink()
    write(folder / "many" / "m7" / "__init__.py", "def value():\n    return 'package', 10\n")


@pytest.mark.parametrize(
    ("edit", "value"),
    [(change, ("other", 8)), (resize, ("a longer one", 9)), (replace_by_package, ("package", 10))],
)
def test_a_source_that_has_changed_is_imported(
    kept: Path, edit: Callable[[Path], None], value: tuple[str, int]
) -> None:
    edit(kept)
    use(kept)
    found = import_all(kept)
    assert not is_from_file(found)
    assert found.value() == value
    assert is_from_file(sys.modules["many.m8"])


def add_package(folder: Path) -> None:
    write(folder / "many" / "m7" / "__init__.py", "def value():\n    return 'package', 10\n")


def test_a_package_beside_a_module_is_imported_as_python_does(kept: Path) -> None:
    add_package(kept)
    use(kept)
    assert import_all(kept).value() == ("package", 10)


def test_an_extension_beside_a_module_is_imported_as_python_does(kept: Path) -> None:
    (kept / "many" / f"m7{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    use(kept)
    with pytest.raises(ImportError, match="m7"):
        import_all(kept)


def test_a_source_of_the_same_second_and_size_is_imported(kept: Path) -> None:
    path = kept / "many" / "m7.py"
    path.write_text("def value():\n    return 'later', 7\n")
    os.utime(path, ns=(BEFORE * 10**9, BEFORE * 10**9 + 1))
    shutil.rmtree(path.parent / "__pycache__")
    use(kept)
    assert import_all(kept).value() == ("later", 7)


def test_modules_of_a_script_are_not_kept(tmp_path: Path) -> None:
    make_package(tmp_path)
    (tmp_path / "many-1.0.dist-info").rmdir()
    finder = use(tmp_path)
    import_all(tmp_path)
    finder.keep()
    index = BytecodeFile(finder._path)._index
    assert "re._parser" in index
    assert [name for name in index if name.startswith("many.")] == []


def test_a_module_under_another_name_than_its_file_is_not_kept(tmp_path: Path) -> None:
    make_package(tmp_path)
    finder = use(tmp_path)
    other = import_all(tmp_path)
    spec = importlib.util.spec_from_file_location("many.other", other.__file__)
    assert spec and spec.loader
    sys.modules["many.other"] = importlib.util.module_from_spec(spec)
    finder.keep()
    index = BytecodeFile(file_of(tmp_path))._index
    assert "many.m7" in index
    assert "many.other" not in index


def test_a_hook_for_paths_that_a_program_installs_is_asked(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(kept)
    monkeypatch.setattr(sys, "path_hooks", list(sys.path_hooks))
    sys.path_hooks.insert(0, FileFinder.path_hook((SourceFileLoader, [".py"])))
    assert not is_from_file(import_all(kept))


def test_a_lazy_module_stays_unloaded(tmp_path: Path) -> None:
    finder = first_start(tmp_path)
    write(tmp_path / "many" / "lazy.py", "raise RuntimeError('it was loaded')\n")
    spec = importlib.util.find_spec("many.lazy")
    assert spec and spec.loader
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sys.modules["many.lazy"] = lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    sys.modules["many.none"] = None  # type: ignore[assignment]
    finder.keep()
    assert finder._path.exists()


def test_a_file_that_is_cut_off_while_it_is_used_ends_nothing(kept: Path) -> None:
    file = file_of(kept)
    use(kept)
    with file.open("r+b") as cut:
        cut.truncate(100)
    assert import_all(kept).value() == ("first", 7)


@pytest.mark.parametrize("entry", ["a" * 300, "/proc/1/fd", "\0"])
def test_an_odd_folder_on_the_path_is_no_error(
    entry: str, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(entry)
    use_bytecode({"XDG_CACHE_HOME": str(kept / "cache")})


def test_a_module_that_is_gone_cannot_be_imported(kept: Path) -> None:
    (kept / "many" / "m7.py").unlink()
    use(kept)
    with pytest.raises(ModuleNotFoundError):
        import_all(kept)


def test_a_package_of_the_same_name_elsewhere_is_imported(kept: Path) -> None:
    make_package(kept / "elsewhere", "second")
    use(kept)
    assert import_all(kept / "elsewhere").value() == ("second", 7)


def flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda _: b"something else",
        lambda content: content[:300],
        lambda content: flip(content, 25),
        lambda content: flip(content, 60),
    ],
    ids=["empty", "foreign", "cut off", "length", "index"],
)
def test_a_damaged_file_is_not_used_and_written_again(
    kept: Path, damage: Callable[[bytes], bytes]
) -> None:
    file = file_of(kept)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    finder = use(kept)
    found = import_all(kept)
    assert not is_from_file(found)
    assert found.value() == ("first", 7)
    finder.keep()
    assert file.read_bytes() == whole


def test_a_damaged_module_is_read_from_the_disk(kept: Path) -> None:
    file = file_of(kept)
    place = file.read_bytes().rindex(b"first")  # in the code of the last module
    file.write_bytes(flip(file.read_bytes(), place))
    use(kept)
    assert is_from_file(import_all(kept))
    last = sys.modules[f"many.m{MODULES - 1}"]
    assert not is_from_file(last)
    assert last.value() == ("first", MODULES - 1)


def test_a_link_or_fifo_in_its_place_is_not_followed(kept: Path) -> None:
    file = file_of(kept)
    file.rename(kept / "elsewhere")
    file.symlink_to(kept / "elsewhere")
    use(kept)
    assert not is_from_file(import_all(kept))
    file.unlink()
    os.mkfifo(file)
    use(kept)
    assert not is_from_file(import_all(kept))


def test_a_folder_that_others_can_write_to_is_neither_read_nor_written(kept: Path) -> None:
    file = file_of(kept)
    file.parent.chmod(0o777)
    finder = use(kept)
    assert not is_from_file(import_all(kept))
    file.unlink()
    finder.keep()
    assert list(file.parent.iterdir()) == []


def test_other_packages_have_another_file(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = kept / "site-packages" / "torch-2.99.0.dist-info"
    installed.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(installed.parent))
    finder = use(kept)
    assert finder._path != file_of(kept)
    assert not is_from_file(import_all(kept))


def test_a_few_new_modules_are_not_worth_writing_the_file(kept: Path) -> None:
    make_package(kept, "second")  # time and size are other ones for all
    for number in range(MODULES - 20):
        write(kept / "many" / f"m{number}.py", f"def value():\n    return 'first', {number}\n")
    file = file_of(kept)
    before = file.stat().st_ino
    finder = use(kept)
    import_all(kept)
    finder.keep()
    assert file.stat().st_ino == before


def test_modules_of_other_programs_stay_and_those_that_changed_go(kept: Path) -> None:
    write(kept / "many" / "m3.py", "value = None\n", BEFORE + 1)
    finder = use(kept)
    forget()
    sys.path.insert(0, str(kept))
    for number in range(MODULES):
        write(kept / "many" / "inner" / f"n{number}.py", f"number = {number}\n")
        importlib.import_module(f"many.inner.n{number}")
    finder.keep()
    names = set(BytecodeFile(file_of(kept))._index)
    assert {"many.inner.n7", "many.m7"} <= names
    assert "many.m3" not in names


def test_files_that_were_not_used_for_a_month_are_removed(kept: Path) -> None:
    file = file_of(kept)
    recent, old = (file.with_name(f".{file.name}.{digits}") for digits in ("11", "22"))
    for path, days in ((file, 40), (recent, 20), (old, 40)):
        path.write_bytes(file.read_bytes())
        os.utime(path, (time.time() - days * 86_400,) * 2)
    finder = use(kept)
    for number in range(MODULES):
        write(kept / "many" / "inner" / f"n{number}.py", f"number = {number}\n")
    import_all(kept)
    for number in range(MODULES):
        importlib.import_module(f"many.inner.n{number}")
    finder.keep()
    assert (file.exists(), recent.exists(), old.exists()) == (True, True, False)


def test_bytecode_that_python_may_not_keep_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    finder = first_start(tmp_path)
    finder.keep()
    assert not (tmp_path / "many" / "__pycache__").exists()
    use(tmp_path)
    found = import_all(tmp_path)
    assert is_from_file(found)
    assert found.value() == ("first", 7)
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, BytecodeFinder)]
    plain = import_all(tmp_path)
    assert found.value.__code__ == plain.value.__code__
    assert found.value.__code__.co_filename == plain.__file__


def test_a_source_that_cannot_be_compiled_any_more_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    finder = first_start(tmp_path)
    write(tmp_path / "many" / "m7.py", "def value(:\n")
    (tmp_path / "many" / "m8.py").unlink()
    finder.keep()
    names = set(BytecodeFile(file_of(tmp_path))._index)
    assert "many.m9" in names
    assert not {"many.m7", "many.m8"} & names


def test_nothing_is_read_or_kept_if_the_user_says_so(kept: Path) -> None:
    before = list(sys.meta_path)
    use_bytecode({"XDG_CACHE_HOME": str(kept / "cache"), "PACELINE_BYTECODE": "0"})
    assert sys.meta_path == before


def test_a_run_keeps_what_it_has_imported(tmp_path: Path) -> None:
    finder = use(tmp_path)
    train(settings(tmp_path))
    for thread in threading.enumerate():
        if thread.name == "bytecode":
            thread.join()
    names = set(BytecodeFile(finder._path)._index)
    assert {"torch.optim.adamw", "paceline.train.run_loop"} <= names
    assert sys.meta_path.index(finder) + 1 == sys.meta_path.index(PathFinder)


def test_ranks_of_any_script_import_from_it(kept: Path) -> None:
    (kept / "show.py").write_text("import many.m7\nprint(many.m7.__spec__.loader)\n")
    env = {"XDG_CACHE_HOME": str(kept / "cache"), "PACELINE_BYTECODE": "1"}
    done = paceline("run", "show.py", folder=kept, env=env, cold=True)
    assert (done.code, "launch.bytecode._Loader" in done.out) == (0, True), done
