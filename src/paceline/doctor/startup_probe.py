"""Run a program and count the files it opens, until its first optimizer step or its exit.

It is stopped at that step.
`python -X importtime -m paceline.doctor.startup_probe OUT BEGUN path|module|import WHAT ...`
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

_OPTIMIZER, _REGISTER = "torch.optim.optimizer", "register_optimizer_step_post_hook"


class FileCounter:
    """Counts opened files by Python's audit events; a hook of torch reports the first step."""

    def __init__(self, out: Path, begun_s: float) -> None:
        self._out, self._begun_s = out, begun_s
        self._opened: Counter[str] = Counter()
        self._hooked = False
        self._written = False

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count an opened file; Python calls this for every event, so it is short."""
        if event != "open":
            return
        if isinstance(arguments[0], (str, bytes)):
            self._opened[os.fsdecode(arguments[0])] += 1
        if not self._hooked:
            self._hook_step()

    def _hook_step(self) -> None:
        register = getattr(sys.modules.get(_OPTIMIZER), _REGISTER, None)
        if register is not None:
            self._hooked = True
            register(lambda *_: self.end(stepped=True))

    def write(self, *, stepped: bool = False, failure: str = "") -> None:
        """Write the facts file, once."""
        if self._written:
            return
        self._written = True
        facts = {
            "whole_s": time.monotonic() - self._begun_s,
            "stepped": stepped,
            "failure": failure,
        }
        self._out.write_text(json.dumps(facts | {"opened": dict(self._opened)}), encoding="utf-8")

    def end(self, *, stepped: bool) -> NoReturn:
        """Write the facts and exit at once: the rest of the training is not needed."""
        self.write(stepped=stepped)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    """Run the program with its opened files counted."""
    out, begun, *target = sys.argv[1:]
    counter = FileCounter(Path(out), float(begun))
    sys.addaudithook(counter.on_event)
    signal.signal(signal.SIGTERM, lambda *_: counter.end(stepped=False))
    try:
        _run(target)
    except SystemExit as stop:
        counter.write(failure="" if stop.code in {0, None} else f"exit code {stop.code}")
    except BaseException as error:
        counter.write(failure=f"{type(error).__name__}: {error}")
        raise
    counter.end(stepped=False)


def _run(target: list[str]) -> None:
    if target[0] == "import":
        for name in target[1:]:
            importlib.import_module(name)
        return
    from paceline.launch.rank_local import run_target

    run_target(target)


if __name__ == "__main__":
    main()
