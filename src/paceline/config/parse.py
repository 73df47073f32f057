"""Where the settings of a run come from: its class, a TOML file, the launcher, the command line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline import handover
from paceline.config.schema import RunConfig
from paceline.config.values import field_types, from_toml, with_settings
from paceline.errors import ConfigError, did_you_mean

C = TypeVar("C", bound=RunConfig)


def config_from_argv(kind: type[C] = RunConfig, *, positional: Sequence[str] = ()) -> C:  # type: ignore[assignment]
    """Read the settings of this process's command line; on a mistake, print it with its fix and exit with 2.

    `positional` names the settings that bare words stand for, in order.
    """
    try:
        return config_from_words(kind, sys.argv[1:], positional=positional, env=os.environ)
    except ConfigError as error:
        if handover.FAILURE in os.environ or handover.STOP_MARK in os.environ:
            raise  # the launcher, or the first rank, says it once for all
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:  # `--help | head`
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # else Python complains again when it flushes
        raise SystemExit(1) from None


def config_from_words(
    kind: type[C],
    words: Sequence[str],
    *,
    positional: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> C:
    """Read settings from `--config FILE`, `key=value`, bare words and `--flags`.

    >>> config_from_words(RunConfig, ["batch.lanes=8", "seed=3"]).batch.lanes
    8
    """
    files, settings, flags = _sort_words(words, positional, field_types(kind))
    from_files: dict[str, Any] = {}
    for file in files:
        from_files |= settings_from_file(file)
    config = with_settings(kind(), from_files | settings)
    if flags:
        config = _with_flags(config, flags)
    return with_settings(config, _settings_from_env(env or {}))


def _sort_words(
    words: Sequence[str], positional: Sequence[str], known: Mapping[str, Any]
) -> tuple[list[Path], dict[str, Any], list[str]]:
    """Split a command line into config files, settings and the flags that are left for tyro."""
    files: list[Path] = []
    settings: dict[str, Any] = {}
    flags: list[str] = []
    bare = iter(positional)
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if word == "--config" or word.startswith("--config="):
            files.append(Path(value or next(rest, "")))
        elif word.startswith("-"):
            flags.append(word)
        elif flags and "=" not in flags[-1] and flags[-1].startswith("-") and name not in known:
            flags.append(word)  # the value of the flag before it
        elif equals:
            settings[name] = value
        else:
            settings[_next_positional(word, bare, positional)] = word
    return files, settings, flags


def _next_positional(word: str, bare: Any, positional: Sequence[str]) -> str:
    name = next(bare, None)
    if name is None:
        expected = " ".join(f"[{name}]" for name in positional) or "none"
        raise ConfigError(
            f"unexpected word {word!r}",
            fix=f"give settings as key=value; bare words here: {expected}",
        )
    return str(name)


def _settings_from_env(env: Mapping[str, str]) -> dict[str, Any]:
    try:
        found = json.loads(env.get(handover.SETTINGS) or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{handover.SETTINGS} is not JSON: {error}", fix=f"unset {handover.SETTINGS}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{handover.SETTINGS} is not a JSON object", fix=f"unset {handover.SETTINGS}"
        )
    return found


def settings_from_file(path: Path) -> dict[str, Any]:
    """Return the dotted settings of a TOML file."""
    try:
        return from_toml(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(
            f"cannot read config file {path}: {error.strerror}",
            fix="check the path given with --config",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not TOML: {error}",
            fix="correct that line; runs/NAME/config.toml is an example",
        ) from error


def _with_flags(config: C, flags: list[str]) -> C:
    """Let tyro read the flags; the class's defaults are the settings found so far."""
    import tyro  # only here: a run started with key=value words need not pay for it

    _check_flags(flags, field_types(type(config)))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found: C = tyro.cli(
                type(config),
                prog=_program(),
                default=config,
                args=flags,
                description=_help_text(type(config)),
            )
    except SystemExit as leave:
        if not leave.code:
            raise
        raise ConfigError(
            f"cannot read the flags {' '.join(flags)}\n{said.getvalue().strip()}", fix="see --help"
        ) from None
    return found


def _program() -> str:
    """Return what a person types to get here."""
    path = Path(sys.argv[0])
    is_recipe = path.parent == Path(__file__).parents[1] / "recipes"
    return f"paceline train {path.stem}" if is_recipe else path.name


def _check_flags(flags: list[str], known: Mapping[str, Any]) -> None:
    names = {f"--{name.replace('_', '-')}" for name in known}
    for flag in flags:
        word = flag.partition("=")[0].replace("_", "-")
        table, dot, leaf = word.rpartition(".")
        plain = f"{table}{dot}{leaf.removeprefix('no-')}" if dot else word.replace("--no-", "--", 1)
        if flag.startswith("--") and word not in {*names, "--help"} and plain not in names:
            raise ConfigError(f"there is no flag {word}", fix=did_you_mean(word, names))


def _help_text(kind: type) -> str:
    return (
        f"{(kind.__doc__ or '').strip()}\n\nEvery flag can also be given as key=value (for instance batch.lanes=8), "
        "or in a TOML file with --config FILE."
    )
