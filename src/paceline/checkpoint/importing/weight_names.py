"""Which prefixes wrappers such as DDP, torch.compile and Lightning put before every name."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.errors import ConfigError

WRAPPERS = ("module.", "_orig_mod.")
"""DDP and FSDP put the first before all names, torch.compile the second."""
LIGHTNING = "model."
"""The usual attribute of a LightningModule; in other files it may belong to the model itself."""


def common_prefix(names: Iterable[str], wrappers: tuple[str, ...]) -> str:
    """Return the wrappers' prefixes that all names share, outermost first.

    >>> common_prefix(["module._orig_mod.a", "module._orig_mod.b"], WRAPPERS)
    'module._orig_mod.'
    >>> common_prefix(["model.a", "head"], (*WRAPPERS, LIGHTNING))
    ''
    """
    left, found = list(names), ""
    while left:
        shared = [prefix for prefix in wrappers if all(name.startswith(prefix) for name in left)]
        if not shared:
            break
        found += shared[0]
        left = [name.removeprefix(shared[0]) for name in left]
    return found


def refuse_prefix(prefix: str, names: Iterable[str]) -> None:
    """Raise if no name has the prefix, or if two names become one without it."""
    known = list(names)
    if not any(name.startswith(prefix) for name in known):
        shown = ", ".join(known[:5])
        raise ConfigError(
            f"no weight has the prefix {prefix}: {shown}", fix="choose a prefix of these names"
        )
    if len({name.removeprefix(prefix) for name in known}) < len(known):
        raise ConfigError(
            f"two weights have one name without the prefix {prefix}", fix="use --strip-prefix none"
        )
