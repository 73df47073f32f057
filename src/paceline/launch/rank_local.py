"""Main program of one rank of `paceline run`: `python -m paceline.launch.rank_local path|module NAME ...`.

It imports nothing heavy: a script pays only for its own imports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import json
import os
import random
import resource
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from paceline import handover
from paceline.errors import PacelineError, Stopped
from paceline.launch.gc_pause import pause_gc
from paceline.launch.needs_run import end_other_loops
from paceline.launch.rank_dump import dump_on_request, dump_stack_on_signal
from paceline.launch.rank_end import hold_until_exit, leave
from paceline.launch.traceback_text import traceback_text
from paceline.world.parent_death import die_with_parent

_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Timeout waiting",
    "Read timeout",
    "Socket closed",
    "No route to host",
    "Connection timed out",
)
_RECIPES = "paceline.recipes."
_USAGE_CODE = 2  # of argparse and click


def main() -> None:
    """Run the program as `__main__`; report its exception to the launcher."""
    die_with_parent()
    if os.environ.get(handover.LAUNCHER, "") != str(os.getppid()):
        os._exit(1)  # the launcher died before the kernel knew about us
    faulthandler.enable()
    unaware_mark = handover.unaware_mark(Path(os.environ[handover.FAILURE]))
    _prepare_dumps()
    target, code = sys.argv[1:], 0
    try:
        run_target(target)
    except Stopped as stop:
        leave(int(str(stop.code)))
    except SystemExit as stop:
        code = _code_of(stop)
        if isinstance(stop.__context__, Exception) and _hides_exception(stop):
            _report(stop.__context__)
    except Exception as error:  # noqa: BLE001 - any exception of the script is reported
        _report(error)
        leave(getattr(error, "exit_code", 1))
    if not _joined() and not _had_children() and not _names_rank(*target[:2]):
        unaware_mark.touch(mode=0o600)
    leave(code)


def _prepare_dumps() -> None:
    """Prepare the answers to `paceline hang`, if the launcher asks for them: the script does not use Paceline."""
    if dump := os.environ.pop(handover.DUMP, ""):
        dump_stack_on_signal(Path(dump))
        dump_on_request(Path(dump))


def _joined() -> bool:
    """Return whether `torch.distributed` was ever initialized, by `paceline.Run`, by another library or by the script."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    # Its hook for exceptions stays when the process group is destroyed.
    hook = getattr(sys.excepthook, "__module__", "")
    return c10d is not None and (c10d.is_initialized() or hook == c10d.__name__)


def _had_children() -> bool:
    """Return whether this process waited for others: they inherit the variables, and may have joined."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0


def _names_rank(kind: str, what: str) -> bool:
    """Return whether the script, or a module of its own, names the rank or the world size: it may share out the work itself."""
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    for file in {_file_of(kind, what), *modules}:
        if not isinstance(file, str) or not file.endswith(".py") or _is_installed(file):
            continue
        with contextlib.suppress(OSError):
            text = Path(file).read_bytes()
            if b"RANK" in text or b"WORLD_SIZE" in text:
                return True
    return False


def _file_of(kind: str, what: str) -> str | None:
    if kind == "path":
        return what
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec(what)
        return found.origin if found is not None else None
    return None


def _is_installed(file: str) -> bool:
    """Return whether a module belongs to Python, to Paceline or to an installed package."""
    libraries = Path(os.__file__).parent, Path(handover.__file__).parent
    return any(map(Path(file).is_relative_to, libraries)) or bool(
        {"site-packages", "dist-packages"}.intersection(Path(file).parts)
    )


def run_target(argv: Sequence[str]) -> None:
    """Run `path SCRIPT ...` or `module NAME ...` as `__main__`, with the rest as its arguments."""
    kind, what, *arguments = argv
    sys.argv = [what, *arguments]
    frozen = gc.get_freeze_count()
    variables = {}  # until the reducers and files among them are held
    if (
        handover.SEED in os.environ
    ):  # here no line of the script has seeded it yet; its own seed comes later
        random.seed(int(os.environ[handover.SEED]))
    if handover.NEEDS_RUN in os.environ:
        end_other_loops(Path(what).name)
    try:
        if kind == "path":
            sys.path[0] = str(Path(what).resolve().parent)
            variables = runpy.run_path(what, run_name="__main__")
        else:
            if what.startswith(_RECIPES):
                pause_gc()
            variables = runpy.run_module(what, run_name="__main__", alter_sys=True)
    finally:
        if gc.get_freeze_count() > frozen:
            gc.unfreeze()  # what the script has frozen, the next line would not see
        hold_until_exit(gc.get_objects())
        del variables


def _code_of(stop: SystemExit) -> int:
    """Return the exit code of `sys.exit`; a value that is not a number is printed and counts as 1."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def _hides_exception(stop: SystemExit) -> bool:
    """Return whether the script, or a framework around it such as Hydra, exits because of an exception, and does not say why.

    With a text, `sys.exit` says why; with code 2 a parser has refused the arguments.
    """
    return isinstance(stop.code, int) and stop.code not in {0, _USAGE_CODE}


def end_rank(error: Exception) -> NoReturn:
    """End this process from a thread, because the main thread waits in native code."""
    if handover.FAILURE in os.environ:
        _report(error)
    else:
        print(f"error: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _report(error: Exception) -> None:
    """Write the failure file for the launcher."""
    report = {
        "time_s": time.time(),
        "what": type(error).__name__,
        "text": format_error(error),
        "known": isinstance(error, PacelineError),
        "permanent": isinstance(error, PacelineError) and error.comes_again,
        "lost_peer": lost_peer(error),
    }
    file = Path(os.environ[handover.FAILURE])
    partial = file.with_name(f".{file.name}")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(report), encoding="utf-8")
        partial.replace(file)  # atomic: the launcher may read it at any time


def format_error(error: Exception) -> str:
    """Return the problem and fix of an error of ours, else the traceback from the script on."""
    if isinstance(error, PacelineError):
        return f"error: {error}"
    return traceback_text(error.with_traceback(_own_frames(error)))


def lost_peer(error: Exception) -> bool:
    """Return whether an error only says that another rank is gone."""
    return not isinstance(error, PacelineError) and names_lost_peer(str(error))


def names_lost_peer(message: str) -> bool:
    """Return whether a message says that the connection to another rank is gone."""
    return any(text in message for text in _PEER_LOST)


def _own_frames(error: Exception) -> TracebackType | None:
    """Return the traceback from the first frame of the script on."""
    trace = error.__traceback__
    while (
        trace is not None
        and trace.tb_next is not None
        and trace.tb_frame.f_code.co_filename in {__file__, runpy.__file__, "<frozen runpy>"}
    ):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
