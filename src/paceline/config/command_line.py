"""How the words after a verb become its arguments; after a script, they are the script's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from paceline.config.arguments import (
    Argument,
    arguments_of,
    read_options,
    spellings_of,
    usage_of,
)
from paceline.config.values import typed
from paceline.errors import ConfigError, did_you_mean

A = TypeVar("A")


def read_arguments(kind: type[A], words: Sequence[str], program: str) -> A:
    """Return the arguments of a verb, read from the words after it."""
    arguments = arguments_of(kind)
    before, after = split_command(arguments, words)
    texts, bare = read_options(arguments, before, program)
    by_name = {argument.name: argument for argument in arguments}
    values = {name: _typed(by_name[name], text) for name, text in texts.items()}
    remainder = _remainder(arguments)
    left = _take_positionals(arguments, bare, [] if remainder else after, values)
    for argument in arguments:
        if argument.required and argument.name not in values:
            raise ConfigError(f"{argument.shown} is missing", fix=usage_of(arguments, program))
    if left and (remainder is None or remainder.role == "verbatim"):
        _refuse(left[0], arguments, program)
    if remainder:
        values[remainder.name] = (*left, *after)
    return kind(**values)


def _remainder(arguments: Sequence[Argument]) -> Argument | None:
    return next((each for each in arguments if each.role in {"rest", "verbatim"}), None)


def split_command(
    arguments: Sequence[Argument], words: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the words for the verb, and those for the script: after the script, else after `--`."""
    remainder = _remainder(arguments)
    if remainder and remainder.role == "verbatim":
        return _split_at_script(arguments, words)
    return split_words(words)


def _split_at_script(
    arguments: Sequence[Argument], words: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the words up to the script, and all words after it.

    >>> ranks = Argument("ranks", int, 1, flags=("-n", "--ranks"))
    >>> _split_at_script([ranks], ["-n", "2", "x.py", "-n", "3"])
    (['-n', '2', 'x.py'], ['-n', '3'])
    """
    flags = _options_by_flag(arguments)
    place = 0
    while place < len(words) and _is_flag(words[place]):
        if words[place] == "--":
            return [*words[:place], *words[place + 1 : place + 2]], list(words[place + 2 :])
        option = flags.get(words[place])
        place += 2 if option and option.kind is not bool else 1
    return list(words[: place + 1]), list(words[place + 1 :])


def _options_by_flag(arguments: Sequence[Argument]) -> dict[str, Argument]:
    options = [argument for argument in arguments if argument.role == "option"]
    return {flag: option for option in options for flag in spellings_of(option)}


def misplaced_option(kind: type, words: Sequence[str], program: str) -> str:
    """Return a hint if an argument of the script looks like an option of the verb; else an empty text."""
    arguments = arguments_of(kind)
    before, after = split_command(arguments, words)
    remainder = _remainder(arguments)
    if remainder is None or remainder.role != "verbatim":
        return ""
    flags = _options_by_flag(arguments)
    for place, word in enumerate(split_words(after)[0]):
        if option := flags.get(word.partition("=")[0]):
            has_value = option.kind is not bool and "=" not in word
            typed_words = " ".join(after[place : place + 2] if has_value else [word])
            return (
                f"hint: {typed_words} after {before[-1]} goes to {before[-1]}; if it is meant for "
                f"paceline, type: {program} {typed_words} {before[-1]} ..."
            )
    return ""


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words up to the first `--`, and the words after it, which belong to the script.

    >>> split_words(["run", "x.py", "--", "-n", "--", "3"])
    (['run', 'x.py'], ['-n', '--', '3'])
    """
    split = list(words).index("--") if "--" in words else len(words)
    return list(words[:split]), list(words[split + 1 :])


def _typed(argument: Argument, text: str) -> Any:
    return typed(argument.shown, text, argument.kind)


def _take_positionals(
    arguments: Sequence[Argument],
    bare: Sequence[str],
    after: Sequence[str],
    values: dict[str, Any],
) -> list[str]:
    """Fill the positional arguments in their order; return the words that are left."""
    wanted = [argument for argument in arguments if argument.role == "positional"]
    left: list[str] = []
    queue = [(word, _is_flag(word)) for word in bare] + [(word, False) for word in after]
    for word, is_flag in queue:
        if is_flag or not wanted:
            left.append(word)
        elif wanted[0].many:
            values[wanted[0].name] = (*values.get(wanted[0].name, ()), word)
        else:
            argument = wanted.pop(0)
            values[argument.name] = _typed(argument, word)
    return left


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-"


def _refuse(word: str, arguments: Sequence[Argument], program: str) -> NoReturn:
    if not _is_flag(word):
        raise ConfigError(f"unexpected argument {word!r}", fix=usage_of(arguments, program))
    flags = [flag for argument in arguments for flag in argument.flags]
    name = word.partition("=")[0]
    raise ConfigError(f"there is no option {name}", fix=did_you_mean(name, [*flags, "--help"]))
