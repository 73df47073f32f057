"""`paceline help guide`: list the guides, or print one. They are installed with the program."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from paceline import terminal
from paceline.errors import ConfigError, EnvironmentUnfit, did_you_mean


def print_guide(words: Sequence[str]) -> int:
    """Print the guide of this name; without a name list all guides."""
    guides = {path.stem: path for path in sorted(_folder().glob("*.md"))}
    if not words:
        rows = []
        for name, path in guides.items():
            title = path.read_text(encoding="utf-8").partition("\n")[0]
            rows.append((name, title.removeprefix("# ")))
        terminal.table(["guide", "subject"], rows)
        print("\npaceline help guide NAME prints one")
        return 0
    if words[0] not in guides:
        raise ConfigError(f"there is no guide {words[0]!r}", fix=did_you_mean(words[0], guides))
    print(guides[words[0]].read_text(encoding="utf-8"), end="")
    return 0


def _folder() -> Path:
    """Return the folder of the guides: in the source tree, or in the installation."""
    beside = Path(__file__).resolve().parents[3] / "docs" / "guides"
    installed = Path(sysconfig.get_path("data")) / "share" / "paceline" / "guides"
    for folder in (beside, installed):
        if any(folder.glob("from-*.md")):
            return folder
    raise EnvironmentUnfit(
        f"there are no guides in {beside} or {installed}",
        fix="reinstall Paceline, or run it from its source tree",
    )
