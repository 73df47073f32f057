"""Which GPT a run has trained: the model of its newest good checkpoint, as the settings saved with it say."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline.checkpoint.catalog import Catalog, from_newest
from paceline.checkpoint.manifest import Manifest, unreadable
from paceline.checkpoint.restore import read_tensors
from paceline.checkpoint.storage import Storage, manifest_of
from paceline.config.renamed import refuse_old_names
from paceline.config.values import field_types, with_settings
from paceline.errors import ConfigError
from paceline.recipes.gpt_config import GptConfig, design_of
from paceline.recipes.gpt_model import GPT, Design

_MODEL = "model."
_OURS = {"size", "length", "tokens", "positions"}  # settings that every run of the recipe has


class Trained(NamedTuple):
    """A GPT out of a checkpoint."""

    model: GPT
    config: GptConfig
    step: int
    where: str
    passed_over: tuple[str, ...] = ()
    """What is wrong with newer checkpoints, which were not taken."""


def load_newest(catalog: Catalog, see: Callable[[Design], None] = lambda _: None) -> Trained:
    """Return the GPT of the newest good checkpoint; `see` may refuse its design before weights are read."""
    found, passed_over = from_newest(catalog, lambda step: _load(catalog.storage, step, see))
    return found._replace(passed_over=passed_over)


def _load(storage: Storage, step: int, see: Callable[[Design], None]) -> Trained:
    """Build the model of a checkpoint as its settings say; only bytes that were summed become weights."""
    manifest = manifest_of(storage, step)
    config = _settings(manifest, storage.where(step))
    design = design_of(config)
    see(design)
    model = GPT(design)
    missing = dict(model.state_dict())
    for name, value in read_tensors(storage, manifest):
        own = missing.pop(name.removeprefix(_MODEL), None) if name.startswith(_MODEL) else None
        if own is not None and own.shape != value.shape:
            raise unreadable(
                storage.where(step), f"{name} is {list(value.shape)} instead of {list(own.shape)}"
            )
        if own is not None:
            own.copy_(value)
    if missing:
        raise unreadable(storage.where(step), f"it lacks {', '.join(sorted(missing)[:3])}")
    return Trained(model.eval(), config, step, storage.where(step))


def _settings(manifest: Manifest, where: str) -> GptConfig:
    """Return the settings of a run of the recipe; a script's own, and a later version's, are left out."""
    if not manifest.config.keys() >= _OURS:
        raise ConfigError(
            f"{where} is not of the gpt recipe", fix="name a run that `paceline train gpt` has made"
        )
    refuse_old_names(manifest.config, where, fix="start a new run with this version")
    known = field_types(GptConfig)
    return with_settings(
        GptConfig(), {name: value for name, value in manifest.config.items() if name in known}
    )
