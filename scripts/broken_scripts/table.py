"""What `paceline verify` says of one broken script."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from broken_scripts.forked_ranks import launch
from broken_scripts.template import SETTINGS, Broken
from paceline.errors import PacelineError
from paceline.launch.spec import script
from paceline.launch.supervisor import launch as start_interpreters
from paceline.verify.compare_worlds import verify
from paceline.verify.verdict import VerifyResult, describe

_OF_A_LANE = {"loss", "gradients"}
"""A norm may remove a change of the forward from the loss, and leave it in the gradients."""


class Answer(NamedTuple):
    """The answer of verify to one script."""

    broken: Broken
    seconds: float
    result: VerifyResult | None
    text: str
    """The answer in words, or the error."""

    @property
    def is_found(self) -> bool:
        """Whether verify reports a difference."""
        return self.result is not None and not self.result.same

    @property
    def named(self) -> str:
        """The cause that verify names; empty if it names none."""
        if self.result is None or self.result.difference is None:
            return ""
        cause = self.result.difference.cause
        return f"{cause.where}: {cause.why}" if cause.is_known else ""

    @property
    def verdict(self) -> str:
        """Whether the cause is right, wrong or unknown, or nothing was found."""
        if not self.is_found:
            return "not found"
        if not self.named:
            return "unknown"
        cause, broken = self.result.difference.cause, self.broken  # type: ignore[union-attr]
        is_there = cause.where == broken.where or {cause.where, broken.where} == _OF_A_LANE
        return "right" if is_there and cause.why == broken.why else "wrong"


def ask_verify(broken: Broken, folder: Path) -> Answer:
    """Write the script into a folder of its own and verify it there."""
    home = folder / broken.name.replace(" ", "-")
    home.mkdir()
    (home / "script.py").write_text(broken.text, encoding="utf-8")
    os.chdir(home)
    # Forked processes share the order of sets, which each interpreter chooses.
    start = start_interpreters if "set(" in broken.text else launch
    begun = time.monotonic()
    try:
        result = verify(script("script.py"), [1, 2], 0, SETTINGS, launch=start)
    except PacelineError as error:
        return Answer(broken, time.monotonic() - begun, None, str(error))
    return Answer(broken, time.monotonic() - begun, result, describe(result))
