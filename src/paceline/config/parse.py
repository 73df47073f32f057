"""Where the settings of a run come from: its class, a TOML file, the launcher, the command line."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline import handover, terminal
from paceline.config.arguments import HELP_FLAGS, Argument, arguments_of, read_options
from paceline.config.given import remember_given
from paceline.config.redefined import refuse_redefined
from paceline.config.renamed import refuse_old_names
from paceline.config.schema import RunConfig
from paceline.config.values import START_RANKS, from_toml, near_setting, with_settings
from paceline.errors import ConfigError, did_you_mean
from paceline.safe_open import read_text

C = TypeVar("C", bound=RunConfig)


def config_from_argv(kind: type[C] = RunConfig, *, positional: Sequence[str] = ()) -> C:  # type: ignore[assignment]
    """Return the settings on this process's command line; exit with code 2 after a mistake.

    - `kind`: the class of the settings: `RunConfig`, or a frozen dataclass derived from it that adds settings.
    - `positional`: the settings that arguments without a name set, in order.

    In a cell of a notebook it returns the defaults: the command line there is that of the kernel.

    It seeds the global generators of torch and NumPy, if the script has not seeded them: datasets that are made from
    random numbers before `with paceline.Run(config)` are then the same on every rank and in every start.

    Settings are given as `key=value`, as `--key value`, or in a TOML file: `--config run.toml`.

    >>> sys.argv = ["train.py", "batch.lanes=8", "--seed", "3", "5"]
    >>> config = config_from_argv(positional=["epochs"])
    >>> config.batch.lanes, config.seed, config.epochs
    (8, 3, 5)
    """
    try:
        words = [] if _is_notebook_cell() else sys.argv[1:]
        return _with_seeds(config_from_words(kind, words, positional=positional, env=os.environ))
    except ConfigError as error:
        if handover.FAILURE in os.environ or handover.STOP_MARK in os.environ:
            raise  # the launcher, or the first rank, prints it once for all ranks
        terminal.error(f"error: {error}")
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:  # `--help | head`
        silence_standard_output()
        raise SystemExit(1) from None


_LARGEST_OWN_SEED = 1 << 40
"""Without a seed, torch's is 64 random bits; a person gives a smaller one."""


def _with_seeds(config: C) -> C:
    """Return the settings, after seeding the generators of torch and NumPy that the script has not seeded.

    Python's generator does not show whether it was seeded. `paceline run` and `submit` seed it before the script starts.
    """
    digest = hashlib.blake2b(
        f"data before the run, seed {config.seed}".encode(), digest_size=8
    ).digest()
    key = int.from_bytes(digest, "big") | _LARGEST_OWN_SEED  # so that a later call may seed again
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and torch.initial_seed() >= _LARGEST_OWN_SEED:
        torch.default_generator.manual_seed(key)
    # NumPy forgets the random seed of its start when it is seeded.
    if numpy is not None and numpy.random.get_bit_generator().seed_seq is not None:
        numpy.random.seed(key & 0xFFFFFFFF)
    return config


def _is_notebook_cell() -> bool:
    """Return whether this code is a cell in a Jupyter kernel; a script that `%run` runs there has its own arguments."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    is_file = hasattr(sys.modules["__main__"], "__file__")
    return hasattr(get_shell(), "kernel") and not is_file


def silence_standard_output() -> None:
    """Discard further output: Python flushes at exit, and a closed pipe would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def config_from_words(
    kind: type[C],
    words: Sequence[str],
    *,
    positional: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> C:
    """Return settings from `--config FILE`, `key=value`, `--key value` and positional arguments.

    >>> config_from_words(RunConfig, ["batch.lanes=8", "--seed", "3"]).batch.lanes
    8
    """
    refuse_redefined(kind)
    if any(word in HELP_FLAGS for word in words):
        _show_help(kind)
    files, others = _split_config_files(words)
    settings: dict[str, Any] = {}
    for file in files:
        settings |= settings_from_file(file)
    arguments = arguments_of(kind)
    flags, bare = read_options(arguments, others, program_name(), negations=True)
    settings |= _named_settings(bare, positional, arguments)
    settings |= flags
    settings |= _settings_from_env(env or {})
    return remember_given(with_settings(kind(), settings), settings)


def settings_in_words(words: Sequence[str], names: set[str]) -> dict[str, str]:
    """Return some settings as far as a command line sets them, for programs that do not know the script's class.

    >>> settings_in_words(["epochs=3", "--name", "x", "runs=/y"], {"name", "runs"})
    {'name': 'x', 'runs': '/y'}
    >>> settings_in_words(["--name=a", "name=b"], {"name", "runs"})
    {'name': 'b'}
    """
    files, others = _split_config_files(words)
    found: dict[str, str] = {}
    for file in files:
        settings = settings_from_file(file)
        found |= {name: str(settings[name]) for name in names & settings.keys()}
    for word, following in itertools.pairwise([*others, ""]):
        option, equals, value = word.partition("=")
        key = option.removeprefix("--")
        if key in names and (equals or option != key):
            found[key] = value if equals else following
    return found


def seed_in_words(words: Sequence[str]) -> int:
    """Return the seed that a command line sets; 0, the default, if it sets none that can be read.

    >>> seed_in_words(["epochs=3", "seed=7"]), seed_in_words(["--seed", "x"]), seed_in_words([])
    (7, 0, 0)
    """
    with contextlib.suppress(ConfigError, ValueError):  # the script itself reports it
        return int(settings_in_words(words, {"seed"}).get("seed", "0"))
    return 0


def _show_help(kind: type) -> None:
    from paceline.config.help import settings_help

    print(settings_help(kind, program_name()), flush=True)
    raise SystemExit(0)


def program_name() -> str:
    """Return the command that a person types to start this script."""
    path = Path(sys.argv[0])
    is_recipe = path.parent == Path(__file__).parents[1] / "recipes"
    return f"paceline train {path.stem}" if is_recipe else path.name


def _split_config_files(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    files: list[Path] = []
    others: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word == "--config":
            files.append(Path(next(remaining, "")))
        elif word.startswith("--config="):
            files.append(Path(word.removeprefix("--config=")))
        else:
            others.append(word)
    return files, others


def _named_settings(
    words: Sequence[str], positional: Sequence[str], arguments: Sequence[Argument]
) -> dict[str, str]:
    """Return `key=value` words and positional arguments as settings."""
    settings: dict[str, str] = {}
    names = iter(positional)
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            flags = [flag for argument in arguments for flag in argument.flags]
            raise ConfigError(f"there is no flag {name}", fix=_fix_for_flag(name, flags))
        if equals:
            settings[name] = value
        else:
            settings[_next_positional(word, names, positional, arguments)] = word
    return settings


def _fix_for_flag(name: str, flags: Sequence[str]) -> str:
    """Return what to write instead of a flag that does not exist.

    >>> _fix_for_flag("--lr", ["--lr.base", "--lr.rule", "--seed"])
    'did you mean --lr.base? For an argument of your own, add a field to the class of the settings'
    """
    by_setting = {flag.removeprefix("--").replace("-", "_"): flag for flag in flags}
    fix = near_setting(name.removeprefix("--"), by_setting)
    for setting, flag in by_setting.items():
        if fix == f"did you mean {setting}?":
            return f"did you mean {flag}? For an argument of your own, add a field to the class of the settings"
    return fix if fix == START_RANKS else did_you_mean(name, flags)


def _next_positional(
    word: str, names: Iterator[str], positional: Sequence[str], arguments: Sequence[Argument]
) -> str:
    name = next(names, None)
    if name is None:
        if name := next((each.name for each in arguments if each.name == word), None):
            raise ConfigError(
                f"the setting {word} has no value", fix=f"write {word}=VALUE, without spaces"
            )
        accepted = " ".join(f"[{name}]" for name in positional) or "none"
        raise ConfigError(
            f"unexpected argument {word!r}",
            fix=f"give settings as key=value; positional arguments here: {accepted}",
        )
    return name


def _settings_from_env(env: Mapping[str, str]) -> dict[str, Any]:
    fix = f"unset {handover.SETTINGS}"
    try:
        settings = json.loads(env.get(handover.SETTINGS) or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{handover.SETTINGS} is not JSON: {error}", fix=fix) from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{handover.SETTINGS} is not a JSON object", fix=fix)
    return settings


def settings_from_file(path: Path) -> dict[str, Any]:
    """Return the settings of a TOML file by their dotted names."""
    try:
        settings = from_toml(tomllib.loads(read_text(path, links=True)))
    except OSError as error:
        raise ConfigError(
            f"cannot read config file {path}: {error.strerror}",
            fix="check the path given with --config",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not TOML: {error}",
            fix="correct that line; runs/NAME/config.toml is an example",
        ) from error
    refuse_old_names(settings, str(path), fix="rename it in that file")
    return settings
