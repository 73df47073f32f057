"""The worst words of the private dialect stay out of help, messages and documents."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.commands import COMMANDS, load
from paceline.cli.main import actions_help, program_help
from paceline.config import RunConfig
from paceline.config.help import settings_help, verb_help

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "paceline"
WORDS = re.compile(
    r"\b(heed(s|ed)?|walk(s|ed)? apart|go(es)? on from|went on|its kin|mend(s|ed)?"
    r"|(?<!there )is none|(?<!there )is no (interval|time|number|folder|file)"
    r"|pass(es|ed)? over|sign of life|call(s|ed)? the roll|of late|told to stop|own words"
    r"|holds? the others up|means nothing for|whoever|so many|what comes after)\b",
    re.IGNORECASE,
)
ERRORS = {
    "PacelineError",
    "TrainingError",
    "ConfigError",
    "EnvironmentUnfit",
    "DataError",
    "BadCheckpoint",
}


def found_in(text: str) -> list[str]:
    """Return each of the words with the text around it."""
    flat = " ".join(text.split())
    return [flat[max(0, match.start() - 40) : match.end() + 40] for match in WORDS.finditer(flat)]


def helps() -> Iterator[tuple[str, str]]:
    yield "paceline", program_help()
    yield "settings", settings_help(RunConfig, "train.py")
    for name, verb in COMMANDS.items():
        if verb.actions:
            yield name, actions_help(verb, f"paceline {name}")
        for action, command in (verb.actions or {"": verb}).items():
            _, kind = load(command)
            program = f"paceline {name} {action}".rstrip()
            yield program, verb_help(kind, program, command.help)


def test_a_bad_word_is_found() -> None:
    assert found_in("a rank that\nholds the others up") != []
    assert found_in("the run resumes; the straggler is rank 3") == []


@pytest.mark.parametrize(("program", "text"), list(helps()), ids=lambda value: str(value)[:30])
def test_help_is_in_the_words_of_the_field(program: str, text: str) -> None:
    assert found_in(text) == [], program


def messages_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of errors, and of every `fix=`, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        texts = [keyword.value for keyword in node.keywords if keyword.arg == "fix"]
        texts += node.args if name in ERRORS else []
        for text in texts:
            for part in ast.walk(text):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE))
)
def test_errors_are_in_the_words_of_the_field(path: Path) -> None:
    assert [f"{path}:{line}: {text}" for line, text in messages_of(path) if found_in(text)] == []


def documents() -> Iterator[Path]:
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md") if (ROOT / name).exists())
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from sorted((ROOT / "lessons").glob("*.py"))
    yield from sorted((ROOT / "lessons").glob("*.toml"))


@pytest.mark.parametrize(
    "path",
    [path for path in documents() if path != ROOT / "docs" / "notes.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_documents_are_in_the_words_of_the_field(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.name == "CONTRIBUTING.md":  # its style sheet is a table with the words to avoid
        lines = [line for line in lines if not line.startswith("|")]
    assert found_in("\n".join(lines)) == []


def test_the_newest_section_of_the_changelog_is_in_the_words_of_the_field() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert found_in(newest) == []
