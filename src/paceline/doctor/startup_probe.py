"""Start a program under watch: which files it opens until its first optimizer step, at which it is ended, or until its own end.

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


class Watch:
    """Counts what is opened, by Python's own audit events; torch is asked to say when the first step is done."""

    def __init__(self, out: Path, begun_s: float) -> None:
        self._out, self._begun_s = out, begun_s
        self._opened: Counter[str] = Counter()
        self._waits = False
        self._written = False

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take note of an event; everything that Python does comes by, so this is short."""
        if event != "open":
            return
        if isinstance(arguments[0], (str, bytes)):
            self._opened[os.fsdecode(arguments[0])] += 1
        if not self._waits:
            self._wait_for_step()

    def _wait_for_step(self) -> None:
        register = getattr(sys.modules.get(_OPTIMIZER), _REGISTER, None)
        if register is not None:
            self._waits = True
            register(lambda *_: self.end(stepped=True))

    def write(self, *, stepped: bool = False, failure: str = "") -> None:
        """Write down what was seen, once."""
        if self._written:
            return
        self._written = True
        seen = {"whole_s": time.monotonic() - self._begun_s, "stepped": stepped, "failure": failure}
        self._out.write_text(json.dumps(seen | {"opened": dict(self._opened)}), encoding="utf-8")

    def end(self, *, stepped: bool) -> NoReturn:
        """Write, and leave at once: the rest of the training is not wanted."""
        self.write(stepped=stepped)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    """Run the target under watch."""
    out, begun, *target = sys.argv[1:]
    watch = Watch(Path(out), float(begun))
    sys.addaudithook(watch.hear)
    signal.signal(signal.SIGTERM, lambda *_: watch.end(stepped=False))
    try:
        _run(target)
    except SystemExit as stop:
        watch.write(failure="" if stop.code in {0, None} else f"it left with exit code {stop.code}")
    except BaseException as error:
        watch.write(failure=f"{type(error).__name__}: {error}")
        raise
    watch.end(stepped=False)


def _run(target: list[str]) -> None:
    if target[0] == "import":
        for name in target[1:]:
            importlib.import_module(name)
        return
    from paceline.launch.rank_local import run_target

    run_target(target)


if __name__ == "__main__":
    main()
