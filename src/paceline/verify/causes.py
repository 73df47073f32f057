"""The causes that `paceline verify` can show by experiment, in words, with what to do about each."""

from __future__ import annotations

from dataclasses import dataclass, field

HIDDEN = "hidden"
"""Why a cause was not looked for: runs with exact=false differ by rounding as well."""

_WHAT = {
    "initial state": "the state before the first step",
    "state": "the state at the start of the step",
    "samples": "a sample",
    "lanes": "the number of lanes",
    "loss": "the loss of a lane",
    "gradients": "the gradient of a lane, whose loss is the same,",
    "buffers": "what the forward of a lane writes into buffers",
    "sum": "the gradient that the optimizer gets",
    "options": "an option of an optimizer, such as its learning rate,",
    "update": "what the optimizer makes of the same gradients",
    "loop": "state that the code of the loop changes",
    "evaluation": "a metric of the evaluation",
    "resume": "the training after a resume",
    "steps": "the number of steps",
}
_WHY = {
    "chance": "changes from run to run at the same world size",
    "rank": "depends on the rank",
    "world": "depends on the world size",
    "order": "depends on the lanes that the rank ran before",
    "others": "depends on the lanes that other ranks run at the same time",
    "local": "depends on the other lanes of its rank",
    "workers": "depends on the process that reads it",
    "unsaved": "depends on state that the checkpoint does not hold",
}
_FIX_WHERE = {
    "initial state": "build the model inside `with paceline.Run(config) as run`, without the rank or the world size; "
    "change no weight on one rank only",
    "lanes": "set batch.lanes to a number that does not depend on the world size",
    "sum": "let `run.update` or `run.backward` sum the gradients, and do not scale them by the number of ranks: "
    "the sum is the mean over all samples",
    "options": "set learning rates and other options alike on every rank and for every world size; "
    "lr.rule follows the batch size",
    "loop": "change weights, buffers and optimizer state alike on every rank and for every world size",
    "evaluation": "compute metrics from the samples alone; run.evaluate averages over all ranks itself",
    "steps": "loop over `run.steps`, whose epochs have the same steps at every world size",
}
_FIX_WHY = {
    "chance": "draw random numbers in the loss, from the global generators of torch, NumPy or Python, which Paceline seeds for "
    "each lane; not from os.urandom, the clock, another thread, the order of a set, or an unseeded generator",
    "rank": "use neither the rank nor what is different on each rank (seeds, files, environment variables) "
    "to compute samples and losses",
    "world": "do not compute with the world size: `run.update` averages over all samples of the step",
    "order": "keep no state from lane to lane: count steps instead of calls, draw from the global generators "
    "instead of your own, and register networks with buffers by run.model",
    "others": "call no collective in the loss; "
    "for a loss over all samples of the step use run.update(..., over_batch=...)",
    "local": "compute the loss of a lane from its own batch; "
    "for a loss over all samples of the step use run.update(..., over_batch=...)",
    "workers": "compute a sample from its number and the epoch: let the loop change no dataset, give the dataset a method "
    "set_epoch(epoch), which is called in every process that reads it, and count no calls in it",
    "unsaved": "track what changes in the loop: run.track(scheduler=..., ema=...), or compute it from step.index",
}

_DATA = (
    "create the dataset inside `with paceline.Run(config) as run`, where all generators are seeded, or with a seed of its own: "
    "numpy.random.default_rng(0), random_split(..., generator=torch.Generator().manual_seed(0))"
)
_FIX = {
    (
        "samples",
        "chance",
    ): f"{_DATA}; sort a set. In __getitem__ draw from the global generators of torch, NumPy or Python, which "
    "Paceline seeds for each sample, not from os.urandom, the clock or a generator of the dataset",
    (
        "samples",
        "rank",
    ): f"{_DATA}; use neither the rank nor files or environment variables that differ between ranks",
    (
        "initial state",
        "chance",
    ): "build the model inside `with paceline.Run(config) as run`, where all generators are seeded; take "
    "no number from the clock, the order of a set, or an unseeded generator",
    (
        "samples",
        "unsaved",
    ): "let the loop change no dataset: give it a method set_epoch(epoch), which Paceline calls before every "
    "epoch, and compute a sample from its number and the epoch",
}
"""What to do about a cause for which neither of the tables above is enough."""
_FIX_BODY = (
    "draw random numbers for samples inside of loss(batch), where the generators are seeded for each lane: in the body of the loop "
    "they are seeded for each step, so what is drawn for a lane depends on the lanes before it. Texts and other samples "
    "that the model generates: generate them in loss(batch), or by run.predict"
)


@dataclass(frozen=True)
class Cause:
    """Why two runs differ, and how that was shown."""

    where: str = ""
    """What differs first; empty: not known."""
    why: str = ""
    """What it depends on; empty: not known; HIDDEN: not looked for."""
    names: list[str] = field(default_factory=list)
    """The lanes, tensors, options or metrics that differ."""
    shown_by: list[str] = field(default_factory=list)
    """The experiments, with their results."""
    draws_in_body: bool = False
    """Whether the body of the loop draws random numbers."""

    @property
    def is_known(self) -> bool:
        """Whether an experiment has shown the cause."""
        return bool(self.where and self.why)

    @property
    def text(self) -> str:
        """The cause in one sentence.

        >>> Cause("loss", "rank").text
        'the loss of a lane depends on the rank'
        """
        if self.why == HIDDEN:
            return "not known: exact=false hides causes behind rounding"
        if self.is_known:
            return f"{_WHAT[self.where]} {_WHY[self.why]}"
        return f"not known; {_WHAT[self.where]} differs" if self.where else "not known"

    @property
    def fix(self) -> str:
        """What to do."""
        if self.why == HIDDEN:
            return (
                "run verify with exact=true and compression=none, which finds causes by experiment"
            )
        if not self.is_known:
            return "run verify with fewer steps and a smaller model, and remove parts of the loss until it passes"
        if self.draws_in_body and self.why != "chance":
            return _FIX_BODY
        is_of_samples = self.why == "unsaved" and self.names[:1] and "the samples" in self.names[0]
        if fix := _FIX.get(("samples" if is_of_samples else self.where, self.why)):
            return fix
        if self.why in {"chance", "unsaved"}:
            return _FIX_WHY[self.why]
        return _FIX_WHERE.get(self.where) or _FIX_WHY[self.why]
