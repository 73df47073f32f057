"""Main program of a rank with another interpreter: `python -m paceline.launch.rank_foreign PYTHON SCRIPT ...`.

It becomes that interpreter, under the same process id, and still ends with its launcher.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from paceline import handover
from paceline.world.parent_death import die_with_parent


def main() -> None:
    """Replace this process by the interpreter."""
    die_with_parent()
    if os.environ.get(handover.LAUNCHER, "") != str(os.getppid()):
        os._exit(1)  # the launcher died before the kernel knew about us
    become(*sys.argv[1:])


def become(interpreter: str, *words: str) -> NoReturn:
    """Replace this process by another interpreter that runs a script."""
    os.execv(interpreter, [interpreter, "-u", *words])  # noqa: S606 - no shell


if __name__ == "__main__":
    main()
