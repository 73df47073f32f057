"""The command line: finds the verb, prints help and errors, returns the exit code."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.cli.commands import COMMANDS, GROUPS, Command, load
from paceline.errors import ConfigError, PacelineError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

EXIT_CODES = (
    "Exit codes: 0 ok, 1 failed or check negative, 2 usage or config error, "
    "3 environment problem, 75 stopped after saving (rerun to resume), 130 interrupted by Ctrl-C before it could save; "
    "137 (SIGKILL, often out of memory), 139 (SIGSEGV) and 143 (SIGTERM): a rank was ended by that signal."
)
EXAMPLES = {
    "paceline train mnist -n 2": "train the mnist recipe on 2 processes",
    "paceline run -n 4 train.py seed=3": "run your script on 4 processes, with a setting",
    "paceline verify train.py": "check that 1, 2, 3 and 4 ranks give identical bits",
}
_VERB_COLUMNS = 12
_HELP_FLAGS = {"-h", "--help"}
_COMPLETE = "--complete"


def main() -> None:
    """Run one verb and exit with its code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP: leave that alone
            signal.signal(number, _exit_cleanly)
    sys.exit(run_verb(sys.argv[1:]))


def _exit_cleanly(number: int, frame: FrameType | None) -> NoReturn:
    """Raise SystemExit, so that temporary folders and child processes are cleaned up."""
    sys.exit(128 + number)


def run_verb(words: Sequence[str]) -> int:
    """Return the exit code of a command line."""
    return exit_code_of(lambda: _dispatch(words))


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command; print its error, and return the exit code."""
    try:
        return command()
    except PacelineError as error:
        from paceline import terminal

        terminal.error(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:
        from paceline.config.parse import silence_standard_output

        silence_standard_output()
        return 1
    except KeyboardInterrupt:
        print("interrupted; all ranks were stopped", file=sys.stderr)
        return 130


def _dispatch(words: Sequence[str]) -> int:
    if not words:
        print(program_help())
        return 2
    first, *others = words
    if first == "--version":
        from paceline.version import VERSION

        print(f"paceline {VERSION}")
        return 0
    if first == _COMPLETE:  # asked at every press of the tab key
        from paceline.cli.complete import print_candidates

        return print_candidates(others)
    if first in _HELP_FLAGS or first == "help":
        return _help([] if first in _HELP_FLAGS else others)
    if first.startswith("-"):
        near = did_you_mean(first, ["--help", "--version"])
        raise ConfigError(f"there is no option {first!r}", fix=near)
    if first not in COMMANDS:
        raise ConfigError(f"there is no verb {first!r}", fix=did_you_mean(first, COMMANDS))
    return _run(COMMANDS[first], f"paceline {first}", others)


def _help(words: Sequence[str]) -> int:
    """Print the help of the program, a guide, or the help of a verb."""
    if not words:
        print(program_help(), flush=True)
        return 0
    if words[0] == "guide":
        from paceline.cli.guides import print_guide

        return print_guide(words[1:])
    return _dispatch([*words, "--help"])


def _run(command: Command, program: str, words: Sequence[str]) -> int:
    """Run a verb; a verb with actions passes the other words on to the action."""
    if command.actions:
        return _run_action(command, program, words)
    from paceline.config.arguments import arguments_of
    from paceline.config.command_line import misplaced_option, read_arguments, split_command

    function, kind = load(command)
    arguments = arguments_of(kind)
    own_help = any("--help" in argument.flags for argument in arguments)
    own_words, _ = split_command(arguments, words)
    if not own_help and not _HELP_FLAGS.isdisjoint(own_words):
        from paceline.config.help import verb_help

        print(verb_help(kind, program, command.help), flush=True)
        return 0
    read: Any = read_arguments(kind, words, program)
    if hint := misplaced_option(kind, words, program):
        from paceline import terminal

        terminal.say(hint, sys.stderr)
    return function(read)


def _run_action(command: Command, program: str, words: Sequence[str]) -> int:
    names = ", ".join(command.actions)
    if not words:
        raise ConfigError(f"{program} needs an action: {names}", fix=f"see `{program} --help`")
    first, *others = words
    if first in _HELP_FLAGS:
        print(actions_help(command, program), flush=True)
        return 0
    if first not in command.actions:
        near = did_you_mean(first, command.actions)
        raise ConfigError(f"{program} has no action {first!r}", fix=near)
    return _run(command.actions[first], f"{program} {first}", others)


def program_help() -> str:
    """Return the verbs in their groups, the exit codes and examples."""
    from paceline.help_layout import section, wrapped

    parts = [
        "usage: paceline VERB [arguments] [options]",
        wrapped("One training script on any number of processes, with the same bits."),
    ]
    for group, names in GROUPS.items():
        rows = [(name, COMMANDS[name].help) for name in names]
        parts.append(section(group, rows, _VERB_COLUMNS))
    parts.append(
        wrapped(
            "`paceline help VERB` shows the arguments of a verb, `paceline help guide` lists the guides."
        )
    )
    parts.append(wrapped(EXIT_CODES))
    parts.append(section("Examples", list(EXAMPLES.items())))
    return "\n\n".join(parts)


def actions_help(command: Command, program: str) -> str:
    """Return the actions of a verb."""
    from paceline.help_layout import section, sentence

    rows = [(name, action.help) for name, action in command.actions.items()]
    parts = [f"usage: {program} ACTION [arguments] [options]", sentence(command.help)]
    parts.append(section("Actions", rows, _VERB_COLUMNS))
    parts.append(f"`{program} ACTION --help` shows the arguments of an action.")
    return "\n\n".join(parts)
