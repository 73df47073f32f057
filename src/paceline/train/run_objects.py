"""The objects of a run: models, optimizers, and whatever else has a state."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.exact.parallel import prepare
from paceline.exact.unsupported import refuse_closures, refuse_hooks, refuse_modules
from paceline.train.likely_mistakes import refuse_no_module, refuse_no_optimizer, refuse_other_call
from paceline.train.run_updates import RunUpdates
from paceline.train.saving.run_state import SavedNames
from paceline.train.script_state import ScriptState

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


class RunObjects(RunUpdates):
    """The part of a run that takes the objects that it saves and restores."""

    _script_state: ScriptState

    def model(
        self,
        model: Model,
        *,
        name: str = "",
        saved: SavedNames | None = None,
        wrap: tuple[type[nn.Module], ...] | None = None,
    ) -> Model:
        """Move a model to this rank's device, or shard it there, with the weights of rank 0; return the same object.

        - `model`: any `nn.Module`; copies of it, such as an EMA, must be made before.
        - `name`: the name of this model in checkpoints, if the run has several.
        - `saved`: `saved(name)` tells whether checkpoints hold a weight, for example only those of LoRA adapters.
        - `wrap`: the classes of the modules that parallel=fsdp gathers one at a time; without it, those in every ModuleList.

        It must be called before `run.steps`, and before the optimizer is made.

        >>> with paceline.Run(config) as run:
        ...     model = torch.nn.Linear(4, 1)
        ...     run.model(model) is model
        True
        """
        self._refuse_late("run.model")
        refuse_no_module(model)
        refuse_modules(model, self.config)
        refuse_hooks(model, self.config)
        prepare(model, self.world, self.config, self._strategy, wrap)
        self._parts.add_model(model, name, saved)
        return model

    def optimizer(self, optimizer: Optimizer, *, name: str = "") -> Optimizer:
        """Save and restore an optimizer with the run; return the same object.

        - `optimizer`: any `torch.optim.Optimizer`; a parameter belongs to one optimizer only.
        - `name`: the name of this optimizer in checkpoints, if the run has several.

        It must be called before `run.steps`.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ...     run.optimizer(optimizer) is optimizer
        True
        """
        self._refuse_late("run.optimizer")
        refuse_no_optimizer(optimizer)
        refuse_closures(optimizer)
        self._parts.add_optimizer(optimizer, name)
        return optimizer

    @refuse_other_call("run.track(scheduler=scheduler, ema=ema), with a name for each object")
    def track(self, **objects: Any) -> None:
        """Save and restore other objects with the run: schedulers, an EMA, counters.

        - `objects`: objects with `state_dict` and `load_state_dict`, by the names that they have in checkpoints.

        The states may hold numbers, strings, tensors, lists, tuples and dicts; anything else is refused by name. With a
        tracked scheduler, Paceline leaves the learning rate to it. It must be called before `run.steps`.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
        ...     run.track(scheduler=scheduler)
        """
        self._refuse_late("run.track")
        for name, item in objects.items():
            if isinstance(item, nn.Module):
                item.to(self.world.device)
            self._parts.tracked.add(name, item)

    def untracked(self, *objects: Any) -> None:
        """Accept that checkpoints do not hold the state of these objects, because the script sets it from the step.

        - `objects`: schedulers, copies of models, generators; or an optimizer whose rate a scheduler sets.

        Without this, `run.steps` refuses schedulers that are not tracked.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        ...     run.untracked(scheduler)
        ...     for step in run.steps((torch.randn(512, 4),), epochs=1):
        ...         found = run.update(optimizer, lambda batch: model(batch[0]).square().mean(), step)
        ...         scheduler.last_epoch = step.index
        ...         scheduler.step()
        """
        self._script_state.derive(objects)

    def _refuse_late(self, call: str) -> None:
        if self._loop is not None:
            raise ConfigError(
                f"{call} was called after run.steps: the checkpoint is restored already",
                fix=f"call {call} before the loop over run.steps(...)",
            )
