"""`%load_ext paceline`: the cell magic `%%paceline` runs a cell on several ranks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.main import exit_code_of
from paceline.cli.run import Caller, place_from, start
from paceline.errors import STOPPED, EnvironmentUnfit
from paceline.launch.script_folder import script_folder
from paceline.notebook.cell import MAGIC, CellArguments, named_by_run, read_line, write_script
from paceline.notebook.curves import curves_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_INTERRUPTED = 130
_HELP_FLAGS = {"-h", "--help"}


class CellFailed(Exception):
    """Ends a cell whose run did not finish, so that the cells below do not run; the reason is on the screen."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows instead of a traceback, which would be of this file."""
        return [f"{type(self).__name__}: {self}"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the cell magic `%%paceline`; `%load_ext paceline` calls this."""
    shell.magics_manager.register_function(
        run_cell, magic_kind="cell", magic_name=MAGIC.lstrip("%")
    )


def run_cell(line: str, cell: str) -> None:
    """Run a cell as a script on N ranks; raise CellFailed unless it finished."""
    code = exit_code_of(lambda: _run(line, cell))
    if code:
        raise CellFailed(describe_end(code))


def describe_end(code: int) -> str:
    """Return why a cell did not finish.

    >>> describe_end(75), describe_end(1)
    ('stopped after saving a checkpoint (exit code 75); run the cell again to resume', 'exit code 1; the reason is above')
    """
    if code == STOPPED:
        return f"stopped after saving a checkpoint (exit code {code}); run the cell again to resume"
    if code == _INTERRUPTED:
        return "interrupted; all ranks were stopped"
    return f"exit code {code}; the reason is above"


def _run(line: str, cell: str) -> int:
    if not _HELP_FLAGS.isdisjoint(line.split()[:1]):
        from paceline.config.help import verb_help

        print(verb_help(CellArguments, MAGIC, "run the cell as a script on N processes"))
        return 0
    if threading.current_thread() is not threading.main_thread():
        raise EnvironmentUnfit(
            f"{MAGIC} needs the main thread of the kernel, to handle interrupts",
            fix="run the cell in the notebook itself, not in a thread or a subshell",
        )
    return _launch(line, cell, read_line(line))


def _launch(line: str, cell: str, arguments: CellArguments) -> int:
    """Run the ranks with their output below the cell, then show the curves of their run."""
    from paceline.notebook.screen import cell_screen, screen_of  # imports IPython

    place = place_from(arguments)
    program = write_script(cell, line, arguments)
    file = program.argv[1]
    screen = cell_screen(f"{file} starts")
    runs: list[str] = []
    caller = Caller(f"run the cell again: {MAGIC} {line}".rstrip(), str(Path.cwd()), runs.append)
    begun, code = time.monotonic(), 1
    try:
        with script_folder(named_by_run(program, arguments)) as folder:
            words = arguments.settings
            code = start(program, arguments, words, place, screen_of(screen), folder, caller)
    finally:
        if screen is not None:
            state = "finished" if code == 0 else "ended"
            screen.show(f"{file} {state} after {time.monotonic() - begun:.1f} s")
        _show_curves(runs)
    return code


def _show_curves(runs: list[str]) -> None:
    from IPython.display import display

    if runs and runs[-1]:
        for drawing in curves_of(Path(runs[-1])):
            display(drawing, raw=True)
