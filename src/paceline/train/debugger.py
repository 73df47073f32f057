"""pdb on one rank of a run: in the terminal of the launcher, while the other ranks wait without a time-out."""

from __future__ import annotations

import contextlib
import os
import pdb  # noqa: T100 - it is what run.breakpoint opens
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

from paceline import handover
from paceline.errors import ConfigError, EnvironmentUnfit, TrainingError
from paceline.world.mailbox import Mailbox
from paceline.world.world import World

_POLL_S = 0.1
_CONTINUE, _QUIT, _NO_TERMINAL = "continue", "quit", "no terminal"


class Debugger:
    """Opens pdb on one rank. Every rank has one; the messages go through the store, so nothing times out."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._mailbox = Mailbox(world, "breakpoint")
        self._count = 0

    def hold(self, rank: int, frame: FrameType) -> None:
        """Return on all ranks when the user continues; raise on all when the user quits. Every rank must call this."""
        self._count += 1
        if self._world.rank == rank:
            answer = _QUIT
            try:
                answer = self._interact(frame)
            finally:
                self._mailbox.post(str(self._count), answer)
        else:
            answer = self._wait()
        if answer == _NO_TERMINAL:
            raise EnvironmentUnfit(
                f"run.breakpoint(rank={rank}): rank {rank} has no terminal to read from",
                fix="start the run in a terminal (paceline run -n 2 SCRIPT), or remove run.breakpoint",
            )
        if answer == _QUIT:
            raise TrainingError(
                f"the user ended the run in the debugger of rank {rank}",
                fix="rerun the same command to resume from the newest checkpoint",
            )

    def _interact(self, frame: FrameType) -> str:
        with contextlib.ExitStack() as stack:
            try:
                keyboard, screen = stack.enter_context(_terminal())
            except OSError:
                return _NO_TERMINAL
            shell = _Pdb(keyboard, screen)
            shell.message(_greeting(self._world, frame))
            shell.reset()
            shell.interaction(frame, None)
            return _QUIT if shell.quitting else _CONTINUE

    def _wait(self) -> str:
        """Return the answer of the user; no collective is pending meanwhile, so none can time out."""
        while (answer := self._mailbox.look(str(self._count))) is None:
            time.sleep(_POLL_S)
        return answer


def check_rank(rank: int, world: World) -> None:
    """Raise unless the world has this rank."""
    if not 0 <= rank < world.size:
        raise ConfigError(
            f"run.breakpoint(rank={rank}), but this run has the ranks 0 to {world.size - 1}",
            fix="pass one of them",
        )


class _Pdb(pdb.Pdb):
    """pdb for looking around: to execute the next line would need the other ranks."""

    def __init__(self, keyboard: TextIO, screen: TextIO) -> None:
        super().__init__(stdin=keyboard, stdout=screen, nosigint=True)

    def do_next(self, arg: str) -> None:
        """Refuse to step."""
        self.message("The other ranks wait, so no line can be executed: type c to continue.")

    do_n = do_step = do_s = do_return = do_r = do_until = do_unt = do_next
    do_jump = do_j = do_run = do_restart = do_next


def _greeting(world: World, frame: FrameType) -> str:
    others = "; the other ranks wait" if world.size > 1 else ""
    where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return (
        f"\nrank {world.rank} of {world.size} is held at {where}{others}.\n"
        "p EXPRESSION prints, w shows the stack, u and d move in it, c continues, q ends the run."
    )


@contextlib.contextmanager
def _terminal() -> Iterator[tuple[TextIO, TextIO]]:
    """Open the terminal of the launcher, or of this process; raise OSError if there is none."""
    descriptor = _open_terminal()
    with (
        open(descriptor, encoding="utf-8", errors="replace") as keyboard,  # noqa: PTH123 - a descriptor
        open(os.dup(descriptor), "w", encoding="utf-8", errors="replace") as screen,  # noqa: PTH123
    ):
        yield keyboard, screen


def _open_terminal() -> int:
    # The launcher's ranks are sessions of their own, without a controlling terminal: they open it by its path.
    path = os.environ.get(handover.KEYBOARD, "")
    if not path:
        path = os.ttyname(0) if os.isatty(0) else "/dev/tty"
    descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY)
    if not os.isatty(descriptor):
        os.close(descriptor)
        raise OSError(f"{path} is not a terminal")
    return descriptor
