"""One step of a run as the user's loop sees it, and the settings of its loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from paceline.config import RunConfig
from paceline.config.given import is_given, with_values
from paceline.data.reading.batches import RankBatch
from paceline.errors import ConfigError
from paceline.exact.row import StepSums
from paceline.scale.batch import StepPlan
from paceline.train.likely_mistakes import missing_of_step, refuse_iteration


class Step:
    """One optimizer step of a run: this rank's share of its batch."""

    def __init__(self, plan: StepPlan, *, evaluates: bool = False) -> None:
        self._read: RankBatch | None = None
        self._evaluates, self._was_asked = evaluates, False
        self.index = plan.index
        """The number of the step in the run, from 0."""
        self.epoch = plan.epoch
        """The number of the epoch, from 0."""
        self.ends_epoch = plan.ends_epoch
        """Whether this is the last step of its epoch."""
        self.samples = plan.samples
        """Samples of the step over all ranks."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_of_step(name, self)

    def __iter__(self) -> NoReturn:
        raise refuse_iteration(self)

    @property
    def evaluates(self) -> bool:
        """Whether to evaluate after this step: the last of an epoch or of the run, or every `evaluate_steps` steps."""
        self._was_asked = True
        return self._evaluates

    def _refuse_ignored_evaluation(self, config: RunConfig) -> None:
        """Raise if evaluate_steps is set, and the script did not ask in its first step whether to evaluate."""
        if config.evaluate_steps and not self._was_asked:
            raise ConfigError(
                f"evaluate_steps={config.evaluate_steps}, but this training has no evaluation between epochs",
                fix="set evaluate_steps=0; or evaluate in the loop if `step.evaluates`",
            )

    @property
    def _batch(self) -> RankBatch:
        """This rank's samples."""
        if self._read is None:
            raise ConfigError(
                "the samples of the epoch's first step are not read yet in epoch_start",
                fix="use them in step_start, or in the body of the loop",
            )
        return self._read

    @property
    def lanes(self) -> list[Any]:
        """The batches of this rank's lanes, for code that reads them itself."""
        return [lane.batch for lane in self._batch.lanes if lane.samples]


def with_requests_of(first: StepSums, later: StepSums) -> StepSums:
    """Return the first update's loss with the requests of both."""
    return first._replace(save=first.save + later.save, stop=first.stop + later.stop)


def with_length(config: RunConfig, epochs: int, steps: int) -> RunConfig:
    """Return the config with the script's epochs and steps, unless settings say otherwise."""
    is_given_epochs = is_given(config, "epochs")
    if steps and not (is_given_epochs or is_given(config, "steps")):
        config = with_values(config, steps=steps)
    if epochs and not is_given_epochs:
        config = with_values(config, epochs=epochs)
    return config
