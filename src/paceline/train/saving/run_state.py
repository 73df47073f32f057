"""Everything a checkpoint of a `Run` holds: models, optimizers, tracked objects, the sums of the meters, the place in a stream.

Also what must be the same before it is saved, on all ranks, and before it is restored, in settings and data.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.staging import DTYPE_NAMES
from paceline.config import RunConfig
from paceline.config.values import flatten
from paceline.data.reading.batches import Batches
from paceline.data.reading.comparison import DataFacts, describe_difference, fix_of
from paceline.data.reading.stream import Stream
from paceline.errors import ConfigError, TrainingError
from paceline.exact.buffers import PREFIX as BUFFER
from paceline.exact.parallel import resharded
from paceline.exact.sharded_tensor import is_sharded
from paceline.exact.state import (
    KERNELS,
    digest_of_all,
    group_names,
    inner_optimizers,
    named_state,
    optimizer_facts,
)
from paceline.exact.step import Updates
from paceline.train.observers.console import say
from paceline.train.observers.meter import Meter
from paceline.train.saving.imported_state import (
    Unbound,
    fitted,
    is_imported,
    missing_kinds,
    names_of_places,
    restore_schedulers,
)
from paceline.train.saving.kept_script import KeptScript
from paceline.train.saving.manifest_values import check_values
from paceline.train.saving.module_values import ModuleValues
from paceline.train.saving.tracked import PREFIX, Tracked, decode, encode
from paceline.version import VERSION
from paceline.world.collectives import all_gather_rows, all_gather_texts
from paceline.world.world import World

_NOT_SAVED = KERNELS | {"params"}
# Settings that may change between two starts of one run.
_FREE = {
    "name", "runs", "resume", "stop_after", "evaluate_steps", "compare_steps", "epochs", "steps", "parallel", "shard_over", "device", "backend",
    "capture", "read.resident_gb", "read.prefetch_steps", "read.workers", "read.cache", "read.cache_gb",
}  # fmt: skip
_FREE_TABLES = {"checkpoint", "log", "timeout", "record", "profile"}
_NAMED = 3  # tensors of which a message says that they differ
SavedNames = Callable[[str], bool]
"""saved(name) -> whether a checkpoint holds this weight."""


class Registered:
    """The models, optimizers and other objects of a run, by name."""

    def __init__(self) -> None:
        self.models: dict[str, nn.Module] = {}
        self.saved: dict[str, SavedNames] = {}
        self.rules: list[Mapping[str, str]] = []
        """The rules for the buffers of each model."""
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.facts: dict[str, str] = {}
        """Classes and options of the optimizers when they were registered: schedulers change some later."""
        self.rates: dict[str, list[float]] = {}
        """The rates of the parameter groups when the optimizers were registered."""
        self.tracked = Tracked()

    def add_model(
        self,
        model: nn.Module,
        name: str,
        saved: SavedNames | None,
        rules: Mapping[str, str] | None = None,
    ) -> None:
        """Add a model under a name of its own."""
        name = name or _next_name("model", self.models)
        _refuse_twice("model", name, model, self.models)
        self.models[name] = model
        self.rules.append(rules or {})
        if saved is not None:
            self.saved[name] = saved

    def add_optimizer(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Add an optimizer; each parameter belongs to one."""
        name = name or _next_name("optimizer", self.optimizers)
        _refuse_twice("optimizer", name, optimizer, self.optimizers)
        taken = {value for other in self.optimizers.values() for value in _parameters(other)}
        shared = sum(value in taken for value in _parameters(optimizer))
        if shared:
            raise ConfigError(
                f"{shared} parameters of this {type(optimizer).__name__} belong to another optimizer of the run",
                fix="give each parameter to one optimizer",
            )
        self.optimizers[name] = optimizer
        self.rates[name] = [float(group["lr"]) for group in optimizer.param_groups]
        for fact, value in optimizer_facts(optimizer).items():
            self.facts[self.fact_name(name, fact)] = value

    def fact_name(self, optimizer: str, fact: str) -> str:
        """Return the name of a fact of an optimizer: that of the first stands alone."""
        return fact if optimizer == next(iter(self.optimizers)) else f"{optimizer}: {fact}"

    @property
    def model(self) -> nn.Module:
        """All models as one: with a single model, that model."""
        if len(self.models) == 1:
            return next(iter(self.models.values()))
        return nn.ModuleDict(self.models)

    @property
    def optimizer(self) -> Any:
        """All optimizers as one, for reading and restoring their state."""
        if len(self.optimizers) == 1:
            return next(iter(self.optimizers.values()))
        return _AllOptimizers(list(self.optimizers.values()))

    def is_saved(self, name: str) -> bool:
        """Return whether a checkpoint holds a tensor, by its name in the state of the models."""
        for model, saved in self.saved.items():
            prefix = "" if len(self.models) == 1 else f"{model}."
            if name.startswith(prefix):
                return saved(name.removeprefix(prefix))
        return True


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for group in optimizer.param_groups for value in group["params"]]


def _next_name(kind: str, taken: Mapping[str, object]) -> str:
    return f"{kind}_{len(taken) + 1}" if taken else kind


def _refuse_twice(kind: str, name: str, item: object, taken: Mapping[str, object]) -> None:
    if name in taken or any(item is other for other in taken.values()):
        raise ConfigError(
            f"the run has a {kind} {name!r} already",
            fix=f"register each {kind} once, under its own name=",
        )


class _AllOptimizers:
    """Several optimizers with one `param_groups` and one `state`."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        self.state = _AllStates(optimizers)
        self.inner = {
            f"{number}:{name}": inner
            for number, each in enumerate(optimizers)
            for name, inner in inner_optimizers(each).items()
            if not any(inner is other for other in optimizers)
        }


class _AllStates:
    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._owner = {value: each for each in optimizers for value in _parameters(each)}

    def __getitem__(self, key: Tensor | str) -> Any:
        owner, own_key = self._find(key)
        return owner.state[own_key]

    def __setitem__(self, key: Tensor | str, value: Any) -> None:
        owner, own_key = self._find(key)
        owner.state[own_key] = value

    def get(self, key: Tensor | str, default: Any) -> Any:
        owner, own_key = self._find(key)
        return owner.state.get(own_key, default)

    def items(self) -> Iterator[tuple[Tensor | str, Any]]:
        for number, each in enumerate(self._optimizers):
            for key, value in each.state.items():
                yield (f"{number}:{key}" if isinstance(key, str) else key), value

    def _find(self, key: Tensor | str) -> tuple[torch.optim.Optimizer, Any]:
        """Return the optimizer of a key, and its own key; before a word stands the number of its optimizer."""
        if isinstance(key, str):
            number, _, word = key.partition(":")
            return self._optimizers[int(number)], word
        return self._owner[key], key


class RunState:
    """Saves and restores a run. Every rank has one."""

    def __init__(
        self,
        world: World,
        config: RunConfig,
        parts: Registered,
        batches: Batches,
        updates: Updates,
        meters: Mapping[str, Meter],
    ) -> None:
        self.world, self.config, self.batches = world, config, batches
        self._parts, self._updates, self._meters = parts, updates, meters
        self._modules = ModuleValues(parts.model)
        self.changes: list[str] = []
        """Sentences about what the script builds otherwise than when the run began."""
        self.rates_before: dict[str, list[float]] = {}
        """The rates with which the script made its optimizers at the first start, if a checkpoint was restored."""
        self.script = KeptScript(world, config)
        """The script that this process runs."""
        self.finished = ""
        """Why the run was ended before its last step; empty while it may continue."""

    @property
    def size_bytes(self) -> int:
        """Bytes of a checkpoint, as far as this rank knows them."""
        tensors = {**self.tensors(), **self.own_tensors()}
        return sum(value.nbytes for value in tensors.values())

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name: the same names on every rank."""
        found = {}
        for name, value in named_state(self._parts.model, self._parts.optimizer):
            kind, _, weight = name.partition(".")
            if kind != "model" or self._parts.is_saved(weight):
                found[name] = value
        found.update(self._updates.unsaved_buffers())
        found.update(self._parts.tracked.state()[1])
        return found

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of the models that a file can hold, whatever the optimizers know."""
        found = {}
        for name, value in resharded(self._parts.model).state_dict().items():
            is_plain = isinstance(value, Tensor) and value.layout == torch.strided
            if is_plain and value.dtype in DTYPE_NAMES:
                found[f"model.{name}"] = value.detach()
        return found

    def is_saved(self, name: str) -> bool:
        """Return whether checkpoints hold a weight, by its name in them."""
        return self._parts.is_saved(name.partition(".")[2])

    @property
    def fits_optimizer(self) -> bool:
        """Whether the models still have every parameter of the optimizers: a script may rebuild a model after the loop."""
        own = set(resharded(self._parts.model).parameters())
        return all(own.issuperset(_parameters(each)) for each in self._parts.optimizers.values())

    def digest(self, others: Mapping[str, str]) -> str:
        """Return one SHA-256 over weights, optimizer state and `others`. Every rank must call this.

        The optimizer state is left out if the script has rebuilt the model after the loop.
        """
        if self.fits_optimizer:
            return digest_of_all(named_state(self._parts.model, self._parts.optimizer), others)
        return digest_of_all(self.weights().items(), others)

    def own_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that only this rank holds."""
        return self._updates.own_state()

    def facts(self) -> dict[str, object]:
        """Return the options of the optimizers and the tracked numbers by name."""
        tracked = self._parts.tracked.state()[0]
        facts = {f"the options of {name}": group for name, group in self._groups().items()}
        return facts | {f"{PREFIX}{name}": state for name, state in tracked.items()}

    def compare_ranks(self, step: int, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Raise if some rank has other tensors, rates or tracked objects than rank 0. Every rank must call this.

        Without `tensors`, everything is compared that a checkpoint holds.
        """
        if not self.config.record.to:  # verify compares more, and says why
            compared = self.tensors() if tensors is None else tensors
            check_replicas(self.world, compared, self.facts() | self._modules.facts(), step)

    def recorded(self) -> dict[str, Tensor]:
        """Return all tensors for `paceline verify`: those of checkpoints, and every buffer."""
        found = self.tensors() | dict(named_state(self._parts.model, self._parts.optimizer))
        for name, value in self._parts.model.named_buffers():
            if f"model.{name}" not in found:
                found[f"{BUFFER}{name}"] = value.detach()
        return found

    def manifest(self, step: int, metrics: Mapping[str, float]) -> Manifest:
        """Return the description of a checkpoint after a step, if all ranks agree on it. Every rank must call this."""
        self.compare_ranks(step)
        tracked, groups = self._parts.tracked.state()[0], self._groups()
        meters = {name: meter.state(self._updates) for name, meter in self._meters.items()}
        values = {
            "meters": meters,
            "numbers": self._updates.numbers(self._parts.model, self._parts.optimizer),
            "optimizer": self._parts.facts,
            "groups": groups,
            "rates": self.rates_before or self._parts.rates,
            "dataset_samples": self.batches.dataset_samples,
            "data": self.batches.facts,
            "world_size": self.world.size,
            "precision": self._updates.precision_state(),
            "tracked": tracked,
            "modules": self._modules.state(),
            "stream": save_stream(self.world, self.batches),
            "finished": self.finished,
            "script": self.script.facts(),
        }
        return self._describe(step, metrics, values)

    def final_manifest(self, step: int) -> Manifest:
        """Return the description of weights that were changed after the last step."""
        return self._describe(step, {}, {"world_size": self.world.size, "changed_after_loop": True})

    def _describe(
        self, step: int, metrics: Mapping[str, float], values: dict[str, Any]
    ) -> Manifest:
        versions = {
            "paceline": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        return Manifest(
            step=step,
            samples=self.batches.plan.seen_after(step),
            files={},
            metrics=dict(metrics),
            values=values,
            config=dict(flatten(self.config)),
            versions=versions,
        )

    def _groups(self) -> dict[str, Any]:
        """Return the options of every parameter group: schedulers and user code change them."""
        found = {}
        for name, optimizer in self._parts.optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                options = {
                    key: _number(value) for key, value in group.items() if key not in _NOT_SAVED
                }
                found[f"{name}.{number}"] = encode(options, {}, f"{name}.param_groups[{number}]")
        return found

    def check(self, manifest: Manifest) -> None:
        """Raise ValueError, TypeError, KeyError or AttributeError for values that a run cannot have saved."""
        check_values(manifest, self.config, self._meters, self._parts.optimizers, self._parts.facts)

    def load(self, manifest: Manifest, tensors: Iterator[tuple[str, Tensor]]) -> list[str]:
        """Restore everything; return a line for each thing that does not match."""
        values = manifest.values
        if is_imported(manifest):
            return self._load_imported(manifest, tensors)
        before, now = values["optimizer"]["optimizer"], self._parts.facts["optimizer"]
        if before != now:
            return [f"the optimizer was {before}, is {now}"]
        tracked: dict[str, Tensor] = {}
        problems = self._load(_taken(tensors, tracked), values["numbers"])
        if not problems:
            problems = self._parts.tracked.restore(values.get("tracked", {}), tracked)
        if problems:
            return problems
        self.rates_before = values.get("rates", {})
        self._restore_groups(values.get("groups", {}), values["optimizer"])
        if text := self._modules.restore(values.get("modules", {})):
            self.changes.append(text)
        self._updates.restore_precision(values.get("precision", {}))
        # Sums over all ranks must be counted once when they are added up over ranks again.
        keeps_sums = self._updates.totals_are_global or self.world.is_main
        for name, meter in self._meters.items():
            meter.restore(values["meters"][name], keep=keeps_sums)
        restore_stream(self.batches, values.get("stream", {}))
        self.finished = values.get("finished", "")
        return []

    def _load_imported(
        self, manifest: Manifest, tensors: Iterator[tuple[str, Tensor]]
    ) -> list[str]:
        """Restore what another program saved; say what is not as in its file."""
        model, optimizers = self._parts.model, list(self._parts.optimizers.values())
        problems = missing_kinds(manifest, optimizers[0]) if len(optimizers) == 1 else []
        try:
            names = names_of_places(manifest, model, optimizers)
        except Unbound as reason:
            return [*problems, str(reason)]

        def renamed(name: str) -> str:
            before, mark, place = name.partition(".#")
            return f"{before}.{names[f'#{place}']}" if mark and f"#{place}" in names else name

        numbers = {renamed(name): kind for name, kind in manifest.values["numbers"].items()}
        named = ((renamed(name), value) for name, value in tensors)
        problems += self._load(fitted(named, model), numbers)
        if problems:
            return problems
        lines = restore_schedulers(manifest, optimizers, self._parts.tracked)
        if self.world.is_main and lines:
            say("\n".join(f"imported: {line}" for line in lines))
        return []

    def _load(self, tensors: Iterator[tuple[str, Tensor]], numbers: Mapping[str, str]) -> list[str]:
        parts = self._parts
        return self._updates.load(parts.model, parts.optimizer, tensors, numbers, parts.is_saved)

    def _restore_groups(self, groups: Mapping[str, Any], facts: Mapping[str, str]) -> None:
        """Restore the options of the parameter groups, but for those that the script has changed: see resume=changed."""
        now = self._parts.facts
        for name, optimizer in self._parts.optimizers.items():
            for number, (which, group) in enumerate(
                zip(group_names(), optimizer.param_groups, strict=False)
            ):
                for key, value in decode(groups.get(f"{name}.{number}", {"dict": []}), {}).items():
                    fact = self._parts.fact_name(name, f"{which}.{key}")
                    if key in _NOT_SAVED or facts.get(fact) != now.get(fact):
                        continue
                    if isinstance(group.get(key), Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = value

    def changed_settings(self, manifest: Manifest) -> list[str]:
        """Return the settings, facts of the optimizers and numbers of samples that would make the rest another training."""
        if is_imported(manifest):
            return []
        now = dict(flatten(self.config)) | dict(self._parts.facts)
        now["dataset_samples"] = self.batches.dataset_samples
        before = dict(manifest.config) | dict(manifest.values["optimizer"])
        before["dataset_samples"] = manifest.values["dataset_samples"]
        changed = []
        for name, value in now.items():
            is_free = name in _FREE or name.partition(".")[0] in _FREE_TABLES
            if not is_free and before.get(name, value) != value:
                changed.append(f"{name} {before[name]} -> {value}")
        return changed

    def compare_data(self, manifest: Manifest) -> tuple[str, str]:
        """Return how the dataset differs from that of a checkpoint, and what to do about it; empty if it does not."""
        own, stored = self.batches.facts, manifest.values.get("data")
        if own is None or stored is None or is_imported(manifest):
            return "", ""
        before = DataFacts.of(stored)
        return describe_difference(own, before, "the checkpoint"), fix_of(own, before)


def check_replicas(
    world: World, tensors: Mapping[str, Tensor], facts: Mapping[str, object], step: int
) -> None:
    """Raise if a tensor or a fact of some rank differs from that of rank 0. Every rank must call this."""
    if world.size == 1:
        return
    sums = {name: checksum(value) for name, value in tensors.items() if not is_sharded(value)}
    sums |= {name: _text_sum(value) for name, value in facts.items()}
    rows = all_gather_rows(world, torch.stack(list(sums.values())))
    differs = rows != rows[0]
    if not differs.any():
        return
    ranks = differs.any(dim=1).nonzero().flatten().tolist()
    names = [name for name, one in zip(sums, differs.any(dim=0).tolist(), strict=True) if one]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise TrainingError(
        f"after step {step} rank {', '.join(map(str, ranks))} has other values than rank 0 in "
        f"{', '.join(names[:_NAMED])}{more}",
        fix="change weights, learning rates and tracked objects on every rank alike, not on one rank only",
    )


def checksum(value: Tensor) -> Tensor:
    """Return a sum of a tensor's bits: equal for equal tensors.

    >>> int(checksum(torch.ones(2))) == int(checksum(torch.tensor([1.0, 1.0])))
    True
    """
    if not value.numel():
        return torch.zeros((), dtype=torch.int64)
    data = value.detach().contiguous().flatten()
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(data.element_size(), torch.uint8)
    bits = data.view(width)
    half = bits[: bits.numel() // 2].sum(dtype=torch.int64)
    return (bits.sum(dtype=torch.int64) + 31 * half).cpu()


def _text_sum(value: object) -> Tensor:
    digest = hashlib.sha256(repr(value).encode()).digest()
    return torch.tensor(int.from_bytes(digest[:7], "big"))


def save_stream(world: World, batches: Batches) -> dict[str, Any]:
    """Return the state of every shard, by lane; empty without a stream that uses it. Every rank must call this."""
    if not isinstance(batches.source, Stream) or not batches.source.use_state:
        return {}
    own: dict[str, Any] = {}
    for lane, state in batches.source.state().items():
        tensors: dict[str, Tensor] = {}
        encoded = encode(state, tensors, f"the stream of lane {lane}")
        if not tensors:  # with tensors in it, a resumed run skips instead
            own[lane] = encoded
    states: dict[str, Any] = {}
    for text in all_gather_texts(world, json.dumps(own)):
        states |= json.loads(text)
    return states


def restore_stream(batches: Batches, states: Mapping[str, Any]) -> None:
    """Let a stream continue from what `save_stream` returned."""
    if isinstance(batches.source, Stream) and batches.source.use_state:
        batches.source.restore({lane: decode(state, {}) for lane, state in states.items()})


def _taken(
    tensors: Iterator[tuple[str, Tensor]], tracked: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Put the tensors of tracked objects aside, and pass the others on."""
    for name, value in tensors:
        if name.startswith(PREFIX):
            tracked[name] = value.clone()
        else:
            yield name, value


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
