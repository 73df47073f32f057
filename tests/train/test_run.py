"""Do loops written by hand train the same bits in every world, and through a crash and a resume in another one?"""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, normalize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline
from paceline.exact.state import state_digest
from support.loops import Patience
from support.processes import run_on_processes

SETTINGS = {
    "batch.global_size": 12,
    "batch.lanes": 4,
    "epochs": 2,
    "checkpoint.every": "2steps",
}
SHORT = 38  # samples: the last step of an epoch has two, so that lanes are empty
EVEN = 46  # the last step has ten: lanes of two and three, enough for BatchNorm


def features(samples: int = EVEN) -> Tensor:
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(3))


def ended(run: paceline.Run, *more: Tensor) -> str:
    """Return a digest of all that a checkpoint holds, and of some tensors."""
    digest = state_digest(run._parts.model, run._parts.optimizer)
    tracked = run._parts.tracked.state()
    return f"{digest} {tracked[0]} {[value.tolist() for value in (*tracked[1].values(), *more)]}"


def crash(step: paceline.Step, at: int) -> None:
    if step.index == at:
        raise RuntimeError("crash")


def ragged(config: paceline.RunConfig, at: int = -1) -> str:
    """Dict batches, padded lane by lane; a loss per token; an LSTM that draws from all generators."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (SHORT,), generator=generator).tolist()
    rows = [
        {"ids": torch.randint(0, 20, (length,), generator=generator), "label": length % 3}
        for length in lengths
    ]

    def pad(samples: list[dict]) -> dict:
        ids = nn.utils.rnn.pad_sequence([row["ids"] for row in samples], batch_first=True)
        return {"ids": ids, "labels": torch.tensor([row["label"] for row in samples])}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, ids: Tensor) -> Tensor:
            hidden = nn.functional.dropout(self.lstm(self.embed(ids))[0], 0.2)
            return self.head(hidden) * (1 + random.random() / 9 + numpy.random.rand() / 9)  # noqa: NPY002

    with paceline.Run(config) as run:
        model = run.model(Net())
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

        def loss(batch: dict) -> dict:
            scores, mask = model(batch["ids"]), batch["ids"] > 0
            target = batch["labels"][:, None].expand_as(batch["ids"])
            total = cross_entropy(scores[mask], target[mask], reduction="sum")
            return {"loss": (total, mask.sum()), "tokens": float(mask.sum())}

        for step in run.steps(rows, collate=pad):
            crash(step, at)
            found = run.update(optimizer, loss, step, clip=0.5)
            assert found["tokens"] > 1
        return ended(run)


def gan(config: paceline.RunConfig, at: int = -1) -> str:
    """Two models with BatchNorm, two optimizers, two updates per step that draw different noise."""
    with paceline.Run(config) as run:
        make = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        judge = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1))
        run.model(make, name="generator")
        run.model(judge, name="discriminator")
        g_optimizer = run.optimizer(torch.optim.Adam(make.parameters(), 0.01))
        d_optimizer = run.optimizer(torch.optim.SGD(judge.parameters(), 0.01, momentum=0.9))
        noises: list[float] = []

        def verdict(batch: Tensor, truth: float) -> Tensor:
            scores = judge(batch)
            return binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth))

        def d_loss(batch: Tensor) -> Tensor:
            noise = torch.randn(len(batch[0]), 4, device=batch[0].device)
            noises.append(float(noise[0, 0]))
            return verdict(batch[0], 1.0) + verdict(make(noise).detach(), 0.0)

        def g_loss(batch: Tensor) -> Tensor:
            noise = torch.randn(len(batch[0]), 4, device=batch[0].device)
            noises.append(float(noise[0, 0]))
            return verdict(make(noise), 1.0)

        for step in run.steps((features(),)):
            crash(step, at)
            judge_before = copy.deepcopy(judge.state_dict())
            kept = run.update(g_optimizer, g_loss, step)
            same = [
                key
                for key in judge_before
                if torch.equal(judge_before[key], judge.state_dict()[key])
            ]
            assert "0.weight" in same
            assert "1.running_mean" not in same
            run.log(d=run.update(d_optimizer, d_loss, step), g=kept)
        assert len(set(noises)) == len(noises)
        return ended(run)


def contrastive(config: paceline.RunConfig, at: int = -1) -> str:
    """A loss over all samples of the step, with a temperature that is trained, too."""
    with paceline.Run(config) as run:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
        scale = run.model(model).scale
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))

        def embed(batch: tuple[Tensor]) -> Tensor:
            views = torch.stack([batch[0], batch[0] + 0.1 * torch.randn_like(batch[0])], 1)
            return model(views.flatten(0, 1)).unflatten(0, (-1, 2))

        def nt_xent(rows: Tensor) -> Tensor:
            first, second = normalize(rows[:, 0]), normalize(rows[:, 1])
            return cross_entropy(
                first @ second.T * scale.exp(), torch.arange(len(rows), device=rows.device)
            )

        for step in run.steps((features(),)):
            crash(step, at)
            run.update(optimizer, embed, step, over_batch=nt_xent)
            assert scale.grad is not None
        return ended(run)


class Skipping(nn.Module):
    """A block with BatchNorm that some lanes skip, a layer that is never used, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.block = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU())
        self.never = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("largest", torch.full((6,), -torch.inf))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("table", torch.zeros(5000))
        self.steps = 0

    def forward(self, inputs: Tensor, *, late: bool) -> Tensor:
        hidden = self.first(inputs)
        if float(torch.rand(())) < 0.4:
            hidden = hidden + self.block(hidden)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
            self.largest = torch.maximum(self.largest, inputs.amax(0))
            self.calls += 1
            if late:
                self.table[: len(inputs)] += 1
        return self.last(hidden)


def skipping(config: paceline.RunConfig, at: int = -1) -> str:
    with paceline.Run(config) as run:
        model = run.model(Skipping())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        late = False

        def loss(batch: tuple[Tensor]) -> Tensor:
            return model(batch[0], late=late).square().mean()

        for step in run.steps((features(),)):
            crash(step, at)
            late = step.index > 3
            run.update(optimizer, loss, step)
            assert model.never.weight.grad is None
        assert model.largest.isfinite().all()
        assert model.calls > 0
        return ended(run, model.calls)


def tracking(config: paceline.RunConfig, at: int = -1) -> str:
    """Schedulers, EMA and counters go on where they were."""
    with paceline.Run(config) as run:
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        run.model(model)
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        marks = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        patience = Patience()
        run.track(cycle=cycle, marks=marks, plateau=plateau, ema=ema, patience=patience)

        def loss(batch: tuple[Tensor]) -> Tensor:
            return mse_loss(model(batch[0]), batch[0][:, :1])

        def score(batch: tuple[Tensor]) -> dict:
            return {"error": (ema(batch[0]) - batch[0][:, :1]).square().squeeze(1)}

        data = (features(SHORT),)
        for step in run.steps(data):
            crash(step, at)
            run.update(optimizer, loss, step)
            cycle.step()
            marks.step()
            ema.update_parameters(model)
            if step.ends_epoch:
                patience.best = run.evaluate(data, score)["error"]
                patience.history += (patience.best,)
                plateau.step(1.0)  # the second epoch is not better: the rate is halved
        assert len(patience.history) == 2
        assert plateau.last_epoch == 2
        return ended(run)


TRAININGS = [ragged, gan, contrastive, skipping, tracking]


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "gloo"),
        pytest.param("cuda", "gloo", marks=pytest.mark.gpu),
        pytest.param("cuda", "nccl", marks=pytest.mark.gpu),
    ],
)
def test_one_rank_has_the_bits_of_two_that_crash_and_are_resumed_by_three(
    training: Callable[..., str], device: str, backend: str, tmp_path: Path
) -> None:
    fixed = SETTINGS | {"device": device, "backend": backend}
    alone, both = (fixed | {"runs": str(tmp_path / name)} for name in ("alone", "both"))
    [digest] = run_on_processes(training, 1, tmp_path, alone)
    with pytest.raises(AssertionError, match="RuntimeError: crash"):
        run_on_processes(training, 2, tmp_path, both, {"at": 5})
    assert set(run_on_processes(training, 3, tmp_path, both)) == {digest}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = self.drop(block(inputs)).relu()
        return self.head(inputs)


def blocks(config: paceline.RunConfig, at: int = -1) -> str:
    data = (features(SHORT),)
    with paceline.Run(config) as run:
        model = run.model(Blocks())
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

        def loss(batch: tuple[Tensor]) -> tuple[Tensor, int]:
            error = (model(batch[0]) - batch[0][:, :1]).square()
            return error.sum(), error.numel()

        def score(batch: tuple[Tensor]) -> dict:
            return {"error": (model(batch[0]) - batch[0][:, :1]).square()}

        for step in run.steps(data):
            crash(step, at)
            run.update(optimizer, loss, step, clip=1.0)
            if step.ends_epoch:
                found = run.evaluate(data, score)
        return f"{ended(run)} {found}"


def test_a_sharded_model_has_the_bits_of_ddp_also_through_a_crash(tmp_path: Path) -> None:
    alone = SETTINGS | {"runs": str(tmp_path / "alone")}
    [digest] = run_on_processes(blocks, 1, tmp_path, alone)
    settings = SETTINGS | {"runs": str(tmp_path / "sharded"), "parallel": "fsdp"}
    with pytest.raises(AssertionError, match="RuntimeError: crash"):
        run_on_processes(blocks, 3, tmp_path, settings, {"at": 5})
    assert set(run_on_processes(blocks, 2, tmp_path, settings)) == {digest}


MISTAKEN = """
import torch, paceline
with paceline.Run(paceline.config_from_argv()) as run:
    model = run.model(torch.nn.Linear(4, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    def loss(batch):
        return model(batch[0]).square().mean()
    def fails(batch):
        raise KeyError("target")
    for step in run.steps((torch.randn(64, 4),), steps=300):
        run.update(optimizer, loss if step.index < 299 else fails, step)
        print("x" * 100, flush=True)
"""


def test_one_process_outlives_the_reader_of_its_output_and_prints_the_frames_of_the_script(
    tmp_path: Path,
) -> None:
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    command, pipe = [sys.executable, "mistaken.py"], subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as started:
        for _ in range(20):
            started.stdout.readline()
        started.stdout.close()
        trace = started.stderr.read()
    assert started.returncode == 1
    assert trace.strip().endswith("KeyError: 'target'"), trace
    assert "mistaken.py" in trace
    assert "paceline/train" not in trace
    assert "BrokenPipe" not in trace


def test_an_error_of_ours_ends_plain_python_with_its_message_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    config = paceline.RunConfig(runs=str(tmp_path / "file"))
    with pytest.raises(paceline.PacelineError) as found, paceline.Run(config):
        pass
    assert found.value.__suppress_context__
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(found.type, found.value, found.tb)
    assert ended.value.code == 3
    assert capsys.readouterr().err.startswith("error: cannot write ")
