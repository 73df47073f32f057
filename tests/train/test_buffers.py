"""Do buffers that forward changes become what the model means, or is the training refused or told?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver
from torch.nn.functional import embedding
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.config.values import with_settings
from paceline.errors import ConfigError, TrainingError
from paceline.exact import forward_writes
from paceline.exact.buffers import MovingBuffers
from paceline.exact.state import state_digest
from paceline.world.world import World
from support.loops import RunIn, fit, squares
from support.processes import in_worlds, on_processes, run_on_processes

SETTINGS = {"batch.global_size": 8, "batch.lanes": 4, "steps": 3}
ROWS = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """Its forward changes one kind of buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind
        self.register_buffer("samples", torch.tensor(0))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("load", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("wave", torch.zeros(4, dtype=torch.complex64))
        self.register_buffer("queue", torch.zeros(1, 4), persistent=False)
        self.observer = {"channel": PerChannelMinMaxObserver}.get(kind, MinMaxObserver)()
        self.norm = nn.BatchNorm1d(4)
        spectral = torch.nn.utils.parametrizations.spectral_norm
        self.spectral = nn.Sequential(
            spectral(nn.Linear(4, 4)), torch.nn.utils.spectral_norm(nn.Linear(4, 4))
        )

    def forward(self, rows: Tensor) -> Tensor:
        if self.kind == "samples":
            self.samples += len(rows)
        elif self.kind == "load":
            self.load += torch.bincount(rows.argmax(1), minlength=4)
        elif self.kind == "mean":
            self.mean.lerp_(rows.mean(0).detach(), 0.1)
        elif self.kind == "wave":
            self.wave.add_(torch.fft.fft(rows.detach()).mean(0))
        elif self.kind == "queue":
            self.queue = torch.cat([self.queue, rows])
        elif self.kind in {"range", "channel"}:
            self.observer(rows)
        elif self.kind == "torch":
            rows = self.spectral(self.norm(rows))
        self.calls += self.kind == "calls"
        return self.linear(rows)


def train(
    folder: Path,
    model: nn.Module,
    rows: Tensor = ROWS,
    buffers: dict[str, str] | None = None,
    **settings: object,
) -> None:
    config = with_settings(paceline.RunConfig(), SETTINGS | {"runs": str(folder)} | settings)
    with RunIn(World(), config) as run:
        run.model(model, buffers=buffers)
        trained = [value for value in model.parameters() if value.requires_grad]
        optimizer = run.optimizer(torch.optim.SGD(trained, lr=0.1))
        for step in run.steps((rows,)):
            run.update(optimizer, squares(model), step)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("samples", "samples"),
        ("load", "load"),
        ("wave", "wave"),
        ("channel", r"observer\.m.._val"),
    ],
)
def test_counters_and_extremes_are_refused_by_name_unless_there_is_one_lane(tmp_path, kind, name):
    with pytest.raises(ConfigError, match=name) as found:
        train(tmp_path / "four", Net(kind))
    assert "batch.lanes=1" in found.value.fix
    train(tmp_path / "one", model := Net(kind), **{"batch.lanes": 1})
    assert int(model.samples) == 24 * (kind == "samples")
    assert int(model.load.sum()) == 24 * (kind == "load")


@pytest.mark.parametrize("kind", ["calls", "torch", "mean"])
def test_counters_of_calls_and_the_buffers_of_torch_are_right_and_others_are_named(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture
) -> None:
    train(tmp_path, model := Net(kind))
    assert int(model.calls) == 3 * (kind == "calls")
    assert int(model.norm.num_batches_tracked) == 3 * (kind == "torch")
    named = [line for line in capsys.readouterr().out.splitlines() if "forward changes" in line]
    assert [line.split(":")[0] for line in named] == ["forward changes mean"] * (kind == "mean")


RULES = {"load": "sum", "inner.*": "mean", "high": "max", "*.seen": "max", "low": "min", "recent": "last"}  # fmt: skip


class Inner(nn.Module):
    """Holds a running mean and a truth value, beside the buffers of its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))


class Ruled(nn.Module):
    """Forward adds, takes extremes, and keeps what it saw last: in place and assigned, whole and not, saved and not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner, self.observer = nn.Linear(4, 4), Inner(), MinMaxObserver()
        self.register_buffer("load", torch.tensor([2**53 + 1, 0, 0, -(2**60) - 1]))
        self.register_buffer("samples", torch.tensor(250, dtype=torch.uint8))  # starts anew at 256
        self.register_buffer("high", torch.full((2,), -1000))
        self.register_buffer("low", torch.tensor([torch.inf, -0.0]), persistent=False)
        self.register_buffer("recent", torch.zeros(4, dtype=torch.float16), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        self.observer(rows)
        self.load += torch.bincount(rows.argmax(1), minlength=4)
        self.samples += len(rows)
        whole = (100 * rows).long()
        self.high = torch.maximum(self.high, torch.stack([whole.max(), -whole.min()]))
        self.low[0].clamp_(max=rows.detach().min())
        self.recent = rows[-1].half()
        self.inner.mean.lerp_(rows.mean(0).detach(), 0.1)
        self.inner.seen |= (rows > 1.5).any(0)
        return self.linear(rows)


def follow_rules(config: paceline.RunConfig, crashes_at: int = -1) -> dict[str, object]:
    rows = torch.randn(21, 4, generator=torch.Generator().manual_seed(2))
    with paceline.Run(config) as run:
        model = run.model(Ruled(), buffers=RULES | {"samples": "sum"})
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps((rows,)):
            run.update(optimizer, squares(model), step)
            if step.index == crashes_at:
                raise RuntimeError("crash")
    return {name: str(value.tolist()) for name, value in model.named_buffers()}


def test_each_buffer_follows_its_rule_on_any_ranks_with_empty_lanes_and_after_a_crash(tmp_path):
    # Each epoch has 8 + 8 + 5 samples. In its last step two of seven lanes have none.
    settings = SETTINGS | {"batch.lanes": 7, "epochs": 2, "steps": 0, "checkpoint.every": "1steps"}
    found = in_worlds(follow_rules, tmp_path, settings, worlds=(1, 2, 3))
    settings["runs"] = str(tmp_path / "crash")
    with pytest.raises(AssertionError, match="crash"):
        run_on_processes(follow_rules, 1, tmp_path, settings, {"crashes_at": 3})
    assert run_on_processes(follow_rules, 2, tmp_path, settings) == [found] * 2
    settings["parallel"] = "fsdp"
    for exact in ("true", "false"):
        settings |= {"exact": exact, "runs": str(tmp_path / exact)}
        sharded = run_on_processes(follow_rules, 3, tmp_path, settings)
        means = {"inner.mean"} if exact == "false" else ()
        assert [each | {name: found[name] for name in means} for each in sharded] == [found] * 3
    # One lane changes its buffers itself: sums, extremes and last values are those of the whole batch.
    settings |= {"parallel": "ddp", "batch.lanes": 1, "runs": str(tmp_path / "one")}
    [whole] = run_on_processes(follow_rules, 1, tmp_path, settings)
    assert {name for name in found if found[name] != whole[name]} == {"inner.mean"}


@pytest.mark.parametrize(
    ("rules", "name", "fix"),
    [
        ({"laod": "sum"}, "laod", "load"),
        ({"load": "add"}, "add", "mean"),
        ({"seen": "sum"}, r"inner\.seen", "max"),
        (["load"], "load", "sum"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused_by_name(tmp_path, rules, name, fix) -> None:
    config = with_settings(paceline.RunConfig(), {"runs": str(tmp_path)})
    with RunIn(World(), config) as run, pytest.raises(ConfigError, match=name) as found:
        run.model(Ruled(), buffers=rules)
    assert fix in found.value.fix


def test_local_sgd_refuses_rules(tmp_path: Path) -> None:
    settings = {"local_sgd.steps": 2, "local_sgd.replicas": 2}
    with pytest.raises(ConfigError, match="local SGD") as found:
        train(tmp_path, nn.BatchNorm1d(4), buffers={"running_mean": "last"}, **settings)
    assert "local_sgd.steps=0" in found.value.fix


class Ticket(nn.Module):
    """Forward keeps a whole number that float64 does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("ticket", torch.tensor(0))

    def forward(self, rows: Tensor) -> Tensor:
        self.ticket += 2**53 + 1
        return self.linear(rows)


@pytest.mark.parametrize("rule", ["sum", "max", "last"])
def test_whole_numbers_that_a_row_cannot_hold_are_refused_before_the_update(tmp_path, rule) -> None:
    model = Ticket()
    before = state_digest(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TrainingError, match="ticket"):
        train(tmp_path, model, buffers={"ticket": rule})
    assert state_digest(model, torch.optim.SGD(model.parameters(), lr=0.1)) == before


class Operations(TorchDispatchMode):
    """Notes the operations of torch; one on a list of tensors is one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def operations(model: nn.Module, rules: dict[str, str]) -> list[str]:
    """Return the operations of the buffers in one lane, which a CUDA graph must be able to record."""
    buffers = MovingBuffers([model], 4, World(), [rules])
    row = torch.zeros(buffers.columns + 1, dtype=torch.float64)
    buffers.begin()
    before = [buffer.clone() for buffer in model.buffers()]
    model(ROWS)
    with Operations() as noted:
        buffers.take(row[1:], row[0], counts=True, is_last=True)
        buffers.examine(ROWS, row[0], counts=True)
        buffers.reset()
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), before, strict=True))
    return noted.names


def test_few_operations_handle_the_buffers_of_any_number_of_layers_and_the_host_reads_none() -> (
    None
):
    norms = [
        operations(nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(layers)]), {})
        for layers in (2, 20)
    ]
    assert len(norms[0]) == len(norms[1]) <= 30
    ruled = operations(Ruled(), RULES | {"samples": "sum"})
    assert not [name for name in (*norms[1], *ruled) if "scalar_dense" in name or "nonzero" in name]


def test_a_queue_of_samples_is_not_taken_for_a_cache(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="queue"):
        train(tmp_path, Net("queue"))


class Rotary(nn.Module):
    """Keeps a table and a mask that become longer, and believes an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.longest = nn.Linear(1, 1), 0
        self.register_buffer("empty", torch.empty(0), persistent=False)
        self.make(2)

    def make(self, length: int) -> None:
        self.longest = length
        angles = torch.outer(torch.arange(length).float(), torch.tensor([1.0, 0.1]))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("mask", torch.ones(length, length).tril().bool(), persistent=False)
        self.register_buffer("empty", angles.sin(), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        if rows.shape[1] > self.longest:
            self.make(rows.shape[1])
        places = self.cos[: rows.shape[1]].sum(1) + self.empty[: rows.shape[1]].sum(1)
        assert places.shape == rows.shape[1:]
        return self.linear((rows * places).sum(1, keepdim=True))


def grow(config: paceline.RunConfig, stops: bool = False) -> str:
    lengths = [2, 3, 5, 4, 9, 2, 7, 3, 12, 4, 6, 11]
    rows = [{"row": torch.arange(float(length))} for length in lengths]

    def pad(samples: list[dict]) -> Tensor:
        rows = [each["row"] for each in samples]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    with paceline.Run(config) as run:
        model = run.model(Rotary())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
        for step in run.steps(rows, collate=pad):
            run.update(optimizer, lambda batch: model(batch).square().mean(), step)
            if stops and step.index == 1:
                raise RuntimeError("crash")
            run.evaluate((torch.ones(2, 14),), lambda batch: {"mean": model(batch[0])[:, 0]})
    return state_digest(model, optimizer)


def test_a_cache_grows_in_training_and_evaluation_with_the_same_bits(tmp_path: Path) -> None:
    settings = SETTINGS | {"batch.global_size": 6, "epochs": 3, "steps": 0}
    settings["checkpoint.every"] = "1steps"
    whole = in_worlds(grow, tmp_path, settings)
    settings["runs"] = str(tmp_path / "crash")
    with pytest.raises(AssertionError, match="crash"):
        run_on_processes(grow, 1, tmp_path, settings, {"stops": True})
    assert run_on_processes(grow, 2, tmp_path, settings) == [whole] * 2


class Momentum(nn.Module):
    """Forward moves a second encoder after the first, or keeps a temperature within limits."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.query, self.key, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(0.01))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "clamp":
                self.temperature.clamp_(0.05, 0.5)
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                if self.how == "assigned":
                    key.data = key.data * 0.99 + query.data * 0.01
                elif self.how == "in place":
                    key.data.lerp_(query.data, 0.01)
        if self.how == "renormalized":  # the rows that the lane looks up
            places = (10 * rows[:, 0]).long() % 4
            rows = rows + embedding(places, self.key.weight, max_norm=0.1)
        return (self.query(self.norm(rows)) - self.key(rows)) / self.temperature


@pytest.mark.parametrize("how", ["assigned", "in place", "clamp", "renormalized"])
def test_a_parameter_that_forward_changes_again_and_again_is_refused_by_name(tmp_path, how):
    def train_on(lanes: int) -> int:
        torch.manual_seed(0)
        train(tmp_path / str(lanes), model := Momentum(how), **{"batch.lanes": lanes})
        return int(model.norm.num_batches_tracked)

    assert train_on(lanes=1) == 3
    if how == "clamp":
        assert train_on(lanes=4) == 3
        return
    with pytest.raises(ConfigError, match=r"key\.weight") as found:
        train_on(lanes=4)
    assert "lerp_" in found.value.fix


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_forward_shrinks_are_refused_unless_there_is_one_lane(tmp_path, kind):
    model, rows = nn.Sequential(kind(8, 4, max_norm=0.5)), torch.arange(8).view(8, 1)
    with pytest.raises(ConfigError, match=r"0 .*max_norm=0\.5") as found:
        train(tmp_path, model, rows, steps=1)
    assert "0.weight.renorm_(2, 0, 0.5)" in found.value.fix
    train(tmp_path, model, rows, steps=1, **{"batch.lanes": 1})


class Remembering(nn.Module):
    """Leaves its output in an attribute; reads it in the next call, or not."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.3)
        self.reads, self.hidden = reads, None

    def forward(self, rows: Tensor) -> Tensor:
        found = self.drop(self.norm(self.linear(rows)))
        if self.reads and self.hidden is not None:
            found = found + self.hidden.mean(0)
        self.hidden = found.detach()
        return found


@on_processes(1, **{"batch.global_size": 12, "batch.lanes": 3, "steps": 4})
def test_a_hidden_state_that_forward_carries_is_named_and_a_cache_is_not(config, world) -> None:
    rows = torch.randn(24, 3, generator=torch.Generator().manual_seed(2))
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_writes.terminal, "error", said.append)
        fit(world, config, Remembering(reads=False), (rows, rows))
        assert said == []
        fit(world, config, Remembering(reads=True), (rows, rows))
    assert len(said) == 1
    assert "hidden" in said[0]
