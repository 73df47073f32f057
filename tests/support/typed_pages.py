"""Run the commands of a page in order, in a separate folder, and compare their output with the page.

The rules for pages:
- A fenced block with title="NAME" is saved as NAME. The README's script is digits.py for all pages.
- In a ```console block, `$ COMMAND` is run. Adjacent `host0$ COMMAND` and `host1$ COMMAND` are run at the same time, as two
  agents of this machine, in a separate folder.
- A remark follows ` # `. `# ends with code 75` is the expected exit code; `# ends with code 0, or 1`: either of them; otherwise it is 0.
- The lines below a command must be in its output; a number stands for any number, a unit for any unit, and `...` for any text.
- A command in a sentence, a table or another block must be run on some page, unless it only names a verb or has a placeholder
  in CAPITALS: test_commands.py.
- A word of 16 hexadecimal digits is a digest: if a page shows the same one again, the program must print the same one again; another, another.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from paceline.world.address import free_port
from support.program import Done, started

ROOT = Path(__file__).resolve().parents[2]
ON_A_CLUSTER = (
    "srun",
    "salloc",
    "sbatch",
    "paceline submit",
    "paceline watch",
    "paceline jobs",
    "paceline cancel",
)
NOT_HERE = {
    "git": "downloads, and tests download nothing",
    "make": "started these tests",
    "pip": "installs, and tests install nothing",
    "mkdocs": "is tested with the site",
    "paceline lesson 0": "is run in tests/course",
    "paceline doctor --startup": "is run in tests/doctor",
    "paceline doctor --pack": "packs gigabytes; tests/doctor packs less",
}
_PROGRAMS = "paceline|python|torchrun|mpirun|srun|salloc|sbatch|accelerate|pytest|source"
_OBJECT = re.compile(r"\S+\.(?:py|sh)|mnist|gpt|\S+/\S+")
"""The object of a command: a script, a recipe, a folder."""
_BITS = r"[0-9a-f]{16}"
_PARTS = {
    r"\.\.\.|…": r".*",
    rf"\b{_BITS}\b": rf"({_BITS})",
    r"\d[\d,.:]*": r"\d[\d,.:]*",
    r"(?<= )(?:us|ms|s|B|kB|MB|GB)\b": r"(?:us|ms|s|B|kB|MB|GB)",
    r"\s+": r"\s+",
    r".": "",
}
_PATIENCE_S = 200


@dataclass(frozen=True)
class Command:
    """A command, and what the page promises about it."""

    words: str
    host: str = ""
    codes: tuple[int, ...] = (0,)
    shown: tuple[str, ...] = ()

    @property
    def on_a_cluster(self) -> bool:
        """Whether it needs Slurm."""
        return self.words.startswith(ON_A_CLUSTER) and "--print" not in self.words

    def check_end(self, done: Done) -> None:
        """Check that it ended as the page says."""
        assert done.code in self.codes, f"{self.words}: code {done.code}\n{done.out}\n{done.err}"


@dataclass(frozen=True)
class Page:
    """A document, and its parts that can be run."""

    name: str
    text: str

    @property
    def scripts(self) -> dict[str, str]:
        """The files that the page contains, by name."""
        return dict(
            re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', self.text, re.DOTALL | re.MULTILINE)
        )

    @property
    def turns(self) -> list[tuple[Command, ...]]:
        """The commands in order; each item is one command, or one per host."""
        found: list[tuple[Command, ...]] = []
        for block in re.findall(r"^```console\n(.*?)^```$", self.text, re.DOTALL | re.MULTILINE):
            begun: list[tuple[Command, ...]] = []
            for line in block.splitlines():
                _read(line, begun)
            found += begun
        return found

    @property
    def asides(self) -> list[str]:
        """The commands in sentences, tables and blocks that are not run."""
        blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", self.text, re.DOTALL | re.MULTILINE)
        lines = [line for kind, block in blocks if kind == "sh" for line in block.splitlines()]
        prose = re.sub(r"^```.*?^```$", "", self.text, flags=re.DOTALL | re.MULTILINE)
        found = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
        found += [
            re.split(r"\s+#\s+", re.sub(r"^host\d+\$ ", "", line))[0].strip() for line in lines
        ]
        return [words for words in found if re.match(rf"(?:{_PROGRAMS})\b(?!\.)", words)]


def is_whole(words: str) -> bool:
    """Return whether a command can be run as written: it has an object, and no placeholder.

    >>> is_whole("paceline run -n 4"), is_whole("paceline hang RUN"), is_whole("paceline chaos digits.py")
    (False, False, True)
    """
    each = words.split()[1:]
    return any(map(_OBJECT.fullmatch, each)) and not any(
        re.fullmatch(r"[A-Z][A-Z|]+|\[.*", word) for word in each
    )


def page_of(path: Path) -> Page:
    """Return the page of a file."""
    return Page(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))


def readme_script() -> str:
    """Return the script of the README: its first block of Python with a run."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if "paceline.Run(" in block)


def furnish(folder: Path, page: Page) -> Path:
    """Write the files of a page into a folder."""
    folder.mkdir(exist_ok=True)
    for name, text in ({"digits.py": readme_script()} | page.scripts).items():
        (folder / name).write_text(text)
    return folder


def _read(line: str, begun: list[tuple[Command, ...]]) -> None:
    typed = re.match(r"(host\d+)?\$ (.*)", line)
    if not typed:
        if begun and line.strip():
            *before, last = begun[-1]
            begun[-1] = (*before, replace(last, shown=(*last.shown, line)))
        return
    words, _, remark = re.sub(r"\s+#\s+", "\0", typed[2], count=1).partition("\0")
    codes = re.search(r"ends with code (\d+)(?:, or (\d+))?", remark)
    command = Command(
        words.strip(),
        typed[1] or "",
        tuple(int(code) for code in codes.groups() if code) if codes else (0,),
    )
    follows = (
        begun
        and command.host
        and begun[-1][0].host
        and command.host not in {one.host for one in begun[-1]}
    )
    begun.append((*begun.pop(), command) if follows else (command,))


def skip_what_is_not_here(command: Command) -> None:
    """Skip a command that cannot run here, with the reason."""
    for words, reason in NOT_HERE.items():
        if f"{command.words} ".startswith(f"{words} "):
            pytest.skip(f"{words} {reason}")
    program = command.words.split()[0]
    if program == "mpirun" and not shutil.which(program):
        pytest.skip("needs mpirun (Debian: apt-get install openmpi-bin)")


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a reader's shell, with this environment's programs first."""
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return (
        path
        | root
        | {"XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")}
    )


def type_here(turn: tuple[Command, ...], folder: Path, *, cold: bool = False) -> Done:
    """Run commands at the same time and return their joint output; cold: each in a new Python process."""
    place = f"127.0.0.1:{free_port('127.0.0.1')}"
    with contextlib.ExitStack() as stack:
        words = [re.sub(r"host0:\d+", place, command.words) for command in turn]
        waits = [stack.enter_context(_typed(each, folder, cold=cold)) for each in words]
        ended = [wait() for wait in waits]
    for command, done in zip(turn, ended, strict=True):
        command.check_end(done)
    return Done(
        ended[0].code, "".join(done.out for done in ended), "".join(done.err for done in ended)
    )


@contextlib.contextmanager
def _typed(words: str, folder: Path, *, cold: bool) -> Iterator[Callable[[], Done]]:
    program, *rest = shlex.split(words.replace("mpirun", "mpirun --oversubscribe"))
    if program == "paceline" and not cold:
        new = "--python" in rest  # ranks with an interpreter of their own cannot be forked
        with started(*rest, folder=folder, env=environment(folder), cold=new) as running:
            yield lambda: running.wait(_PATIENCE_S)
            assert running.left_over() == []
            assert list(running.temporary.glob("paceline-*")) == []
        return
    pipe, env = subprocess.PIPE, os.environ | environment(folder)
    if program == "torchrun":
        env["TMPDIR"] = str(folder)  # it leaves a folder for logs behind
    with subprocess.Popen(
        [program, *rest], cwd=folder, env=env, stdout=pipe, stderr=pipe, encoding="utf-8"
    ) as process:
        try:
            yield lambda: _end_of(process)
        finally:
            process.kill()


def _end_of(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=_PATIENCE_S)
    return Done(process.returncode, out, err)


def look_at(done: Done, shown: tuple[str, ...], known: MutableMapping[str, str]) -> None:
    """Check that the lines of a page below a command are in its output; `known` are the digests so far."""
    said = (done.out + "\n" + done.err).replace("\r", "\n").splitlines()
    for line in shown:
        if line.strip() in {"...", "…"}:
            continue
        found = next((match for real in said if (match := re.search(pattern_of(line), real))), None)
        assert found, f"the page shows\n  {line}\nand there came\n" + "\n".join(
            f"  {real}" for real in said
        )
        for name, real in zip(re.findall(rf"\b{_BITS}\b", line), found.groups(), strict=True):
            assert known.setdefault(name, real) == real, (
                f"{name} was {known[name]}, and is {real}: {line}"
            )
            assert [*known.values()].count(real) == 1, (
                f"the page has several names for {real}: {line}"
            )


def pattern_of(line: str) -> str:
    r"""Return the pattern of a line of output, in which numbers and units may differ.

    >>> pattern_of("rank 12 ... took 3 ms")
    'rank\\s+\\d[\\d,.:]*\\s+.*\\s+took\\s+\\d[\\d,.:]*\\s+(?:us|ms|s|B|kB|MB|GB)'
    """
    wanted = "|".join(f"({part})" for part in _PARTS)
    return "".join(
        [*_PARTS.values()][found.lastindex - 1] or re.escape(found[0])
        for found in re.finditer(wanted, line.strip())
    )
