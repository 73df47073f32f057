"""What can be known of captured steps without a GPU; the rest is in test_gpu.py."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from paceline.config import RunConfig
from paceline.config.diloco import LocalSgdConfig
from paceline.errors import ConfigError
from paceline.exact.buckets import BucketedSum
from paceline.exact.graph import ChangedState, may_capture
from paceline.exact.graph_kinds import UpdateKinds
from paceline.exact.lanes import UpdateCall
from paceline.exact.row import Layout, Rows
from paceline.exact.strategy import Strategy
from paceline.telemetry.phases import PhaseClock
from paceline.world.world import World
from support.loops import lanes_of
from support.processes import in_worlds, run_on_processes


def _may_capture(world, optimizers, config):
    return may_capture(world, config, Strategy.of(world, config), optimizers)


def test_without_a_gpu_a_step_that_must_be_captured_is_refused():
    optimizers = [torch.optim.AdamW(nn.Linear(6, 1).parameters())]
    with pytest.raises(ConfigError, match="capture=auto"):
        _may_capture(World(), optimizers, RunConfig(capture="true"))
    assert not _may_capture(World(), optimizers, RunConfig(capture="auto"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"parallel": "fsdp"}, "gathers weights"),
        ({"local_sgd": LocalSgdConfig(steps=2, replicas=2)}, "swaps the weights"),
        ({}, "SGD with fused=True"),
    ],
)
def test_what_cannot_be_captured_is_said(settings, reason, capsys):
    optimizers = [torch.optim.SGD(nn.Linear(6, 1).parameters())]
    config = RunConfig(capture="auto", **settings)
    assert not _may_capture(World(device="cuda"), optimizers, config)
    assert reason in capsys.readouterr().err


def lanes_added(config, world) -> list[float]:
    """Take two steps of lanes without DDP, the second as if it had been replayed; return loss and a digest of the gradients."""
    torch.manual_seed(0)
    # A head of other numbers than the rest: its gradients cross the ranks in a bucket of their own.
    model, head = (
        nn.Sequential(nn.Linear(5, 300), nn.Tanh()),
        nn.Linear(300, 1, dtype=torch.float64),
    )
    parameters = [*model.parameters(), *head.parameters()]
    data = torch.randn(50, 5), torch.randn(50, 1)
    add = BucketedSum(parameters, config.batch.lanes, world, PhaseClock(), exact=True)
    found: list[float] = []
    for step in lanes_of(world, config, data):
        add.begin()
        rows = Rows(Layout.of({"loss": 0.0}), len(step.lanes), torch.device("cpu"))
        for row, lane in enumerate(step.lanes):
            value = mse_loss(head(model(lane.batch[0]).double()).float(), lane.batch[1])
            rows.write(row, {"loss": value}, lane)
            if lane is step.lanes[-1]:
                rows.complete()
            add.before_lane(rows, last=False)
            value.backward()
            if lane is not step.lanes[-1]:
                add.after_lane()
        alone = world.size == 1
        total = add.finish() if alone else add.send_results(add.lane_results(), rows)
        found += total.tolist()
        found += [float(value.grad.double().sum()) for value in parameters]
        found += parameters[0].grad.flatten().tolist()
    return found


def test_gradients_that_cross_the_ranks_at_once_have_the_bits_of_one_rank(tmp_path):
    given = {"batch.lanes": 5, "batch.global_size": 25, "epochs": 1}
    in_worlds(lanes_added, tmp_path, given, worlds=(1, 2, 3))


def _call(optimizer, batch=None, loss=mse_loss):
    lane = SimpleNamespace(samples=2, batch=torch.zeros(2) if batch is None else batch)
    step = SimpleNamespace(lanes=[lane], plan=SimpleNamespace(samples=2))
    return UpdateCall(optimizer, loss, step, 0)


def _adamw():
    return torch.optim.AdamW(nn.Linear(2, 1).parameters(), lr=torch.tensor(0.1))


def kinds_before_and_after(change, *, optimizer=None, module=None) -> list[object]:
    """Return the kind of an update before a change by the script, again, and after it."""
    optimizer = optimizer or _adamw()
    kinds = UpdateKinds([module] if module else [])
    found = [kinds.kind_of(_call(optimizer), 1, 0) for _ in range(2)]
    change(optimizer)
    return [*found, kinds.kind_of(_call(optimizer), 1, 0)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2)),
        ({"text": torch.zeros(2)}, {"image": torch.zeros(2)}),
        ([torch.zeros(2)], (torch.zeros(2),)),
    ],
    ids=["dtype", "key", "container"],
)
def test_batches_of_another_form_are_of_another_kind(one, other):
    kinds, optimizer = UpdateKinds([]), _adamw()
    found = [kinds.kind_of(_call(optimizer, batch), 1, 0) for batch in (one, one, other)]
    assert found[0] == found[1] != found[2]


def test_what_the_script_changes_is_another_kind_unless_a_graph_reads_it():
    dropout, optimizer = nn.Dropout(0.2), _adamw()
    betas = torch.tensor(0.9), torch.tensor(0.999)
    optimizer.param_groups[0]["betas"] = betas

    def changed(**options):
        return lambda optimizer: optimizer.param_groups[0].update(options)

    for read in (lambda _: betas[0].fill_(0.8), lambda opt: opt.param_groups[0]["lr"].fill_(0.2)):
        assert len(set(kinds_before_and_after(read, optimizer=optimizer))) == 1
    for change in (
        changed(betas=tuple(value.clone() for value in betas)),
        changed(lr=0.1),
        lambda _: setattr(dropout, "p", 0.4),
    ):
        first, again, after = kinds_before_and_after(change, optimizer=optimizer, module=dropout)
        assert first == again != after


def test_an_option_that_a_scheduler_changes_is_another_kind_and_at_last_an_obstacle():
    kinds, optimizer = UpdateKinds([]), _adamw()
    first = kinds.kind_of(_call(optimizer), 1, 0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
    for step in range(20):
        assert bool(kinds.too_many(_call(optimizer))) == (step > 16)
        assert kinds.kind_of(_call(optimizer), 1, 0) != first
        optimizer.step()
        schedule.step()
    assert "changed betas of AdamW" in kinds.too_many(_call(optimizer))


def test_a_number_that_the_loss_reads_is_part_of_the_kind_and_named_if_it_changes_often():
    optimizer, weight = _adamw(), 1.0

    def loss(batch):
        return weight * batch.sum()

    kinds, found = UpdateKinds([]), []
    for step in range(20):
        # 1, 1, 2, 2, then another in every step
        weight = 1.0 + (step if step >= 4 else step // 2)
        found.append(kinds.kind_of(_call(optimizer, loss=loss), 1, 0))
    assert found[0] == found[1] != found[2] == found[3]
    assert len(set(found)) == 18
    reason = kinds.too_many(_call(optimizer, loss=loss))
    assert "weight" in reason
    assert "17 times" in reason


@pytest.mark.parametrize("fault", ["", "another beta", "another buffer"])
def test_a_replayed_change_is_compared_and_the_eager_one_is_kept(fault):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model(torch.randn(5, 3)).square().sum().backward()
    gradients = [value.grad for value in model.parameters()]
    optimizer.step()

    def eager() -> None:
        for gradient in gradients:
            gradient.mul_(0.5)  # as clipping does
        optimizer.step()

    def replay() -> None:
        group = optimizer.param_groups[0]
        group["betas"] = (0.5, 0.999) if fault == "another beta" else (0.9, 0.999)
        eager()
        group["betas"] = (0.9, 0.999)
        if fault == "another buffer":
            model[1].running_mean.add_(1e-3)

    expected = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    text = ChangedState([model], optimizer, gradients).difference(eager, {"the replay": replay})
    assert ("the replay" in text) == bool(fault)
    assert rate._version == 0  # a write would be taken for one by the script
    twin = torch.optim.AdamW(expected[0].parameters(), lr=0.1)
    twin.load_state_dict(expected[1])
    for value, gradient in zip(expected[0].parameters(), gradients, strict=True):
        value.grad = gradient
    twin.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[0].state_dict()[name]), name


def exchanges_by_length(config, world) -> bool:
    """Send rows of two lengths in turn; return whether each length keeps its exchange."""
    parameters = [nn.Parameter(torch.zeros(3))]
    add = BucketedSum(parameters, 2, world, PhaseClock(), exact=True)
    seen: dict[int, set[int]] = {}
    kept = []
    for length in (0, 2, 0, 2):
        add.begin()
        add.before_lane(Rows(Layout.of({"loss": 0.0}, length), 1, torch.device("cpu")), last=True)
        parameters[0].sum().backward()
        add.finish()
        kept.append(add._buckets[-1].exchange)
        seen.setdefault(length, set()).add(id(kept[-1]))
    return all(len(found) == 1 for found in seen.values())


def test_an_exchange_that_a_graph_may_use_is_kept(tmp_path):
    assert run_on_processes(exchanges_by_length, 2, tmp_path, {}) == [True, True]
