"""Load the GPT of a run: the model of its newest intact checkpoint, built from the settings in its manifest."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline.checkpoint.catalog import Catalog, use_newest
from paceline.checkpoint.manifest import Manifest, damaged
from paceline.checkpoint.restore import read_tensors
from paceline.checkpoint.storage import Storage, read_manifest
from paceline.config.renamed import refuse_old_names
from paceline.config.values import field_types, with_settings
from paceline.errors import ConfigError
from paceline.recipes.gpt_config import GptConfig, design_of
from paceline.recipes.gpt_model import GPT, Design

_MODEL = "model."
_EXPECTED = {"size", "context_length", "vocab_size", "positions"}  # settings of every gpt run
_BEFORE_RENAME = {"size", "length", "tokens", "positions"}


class Trained(NamedTuple):
    """A GPT from a checkpoint."""

    model: GPT
    config: GptConfig
    step: int
    where: str
    passed_over: tuple[str, ...] = ()
    """Problems of newer checkpoints, which were skipped."""


def load_newest(catalog: Catalog, check: Callable[[Design], None] = lambda _: None) -> Trained:
    """Return the GPT of the newest intact checkpoint.

    `check` may refuse its design before weights are read.
    """
    trained, passed_over = use_newest(catalog, lambda step: _load(catalog.storage, step, check))
    return trained._replace(passed_over=passed_over)


def _load(storage: Storage, step: int, check: Callable[[Design], None]) -> Trained:
    """Build the model of a checkpoint and load its weights, whose checksums are verified."""
    manifest = read_manifest(storage, step)
    config = _settings(manifest, storage.where(step))
    design = design_of(config)
    check(design)
    model = GPT(design)
    missing = dict(model.state_dict())
    for name, value in read_tensors(storage, manifest):
        if not name.startswith(_MODEL):
            continue
        weight = missing.pop(name.removeprefix(_MODEL), None)
        if weight is None:
            continue
        if weight.shape != value.shape:
            shapes = f"{list(value.shape)} instead of {list(weight.shape)}"
            raise damaged(storage.where(step), f"{name} is {shapes}")
        weight.copy_(value)
    if missing:
        raise damaged(storage.where(step), f"it has no {', '.join(sorted(missing)[:3])}")
    return Trained(model.eval(), config, step, storage.where(step))


def _settings(manifest: Manifest, where: str) -> GptConfig:
    """Return the settings of a gpt run, without those of its script or of a later version."""
    names = manifest.config.keys()
    if not names >= _EXPECTED and names >= _BEFORE_RENAME:
        raise ConfigError(
            f"{where} was saved by an older version, which called context_length length",
            fix="use the version that trained it, or train again",
        )
    if not names >= _EXPECTED:
        raise ConfigError(
            f"{where} was not saved by the gpt recipe", fix="name a run of `paceline train gpt`"
        )
    refuse_old_names(manifest.config, where, fix="start a new run with this version")
    known = names & field_types(GptConfig).keys()
    return with_settings(GptConfig(), {name: manifest.config[name] for name in known})
