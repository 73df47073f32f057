"""Ends a script that a verb is to measure, but that trains without `paceline.Run`, at its first step."""

from __future__ import annotations

import sys
from typing import Any

from paceline.errors import ConfigError


def end_other_loops(script: str) -> None:
    """Raise ConfigError in the first `optimizer.step()` of this process, unless the script has imported `paceline.Run` by then."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        handle.remove()
        if "paceline.train.run" not in sys.modules:
            raise ConfigError(
                f"{script} called {type(optimizer).__name__}.step() without `paceline.Run`, which records what is "
                "measured and compared",
                fix="train inside of `with paceline.Run(paceline.config_from_argv()) as run`; `paceline init --from torchrun` "
                "shows which call replaces which; `paceline run` starts the script as it is",
            )

    handle = register_optimizer_step_pre_hook(look)
