"""Which numbers does a function of the script read, and is a change of each seen?"""

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import paceline
from paceline.exact.graph_kinds import ScriptValues

SCALE = 1.0


def by_global(batch):
    return batch * SCALE


def twice_by_global(batch):
    return by_global(batch) * 2


@dataclass
class Terms:
    weight: float = 0.5
    unread: int = 0

    def loss(self, batch):
        return self._weighed(batch)

    def _weighed(self, batch):
        return batch * self.weight

    def __call__(self, batch):
        return batch * self.weight


def changed_by(function, change) -> bool:
    values = ScriptValues(function)
    before = values.now()
    assert values.now() == before
    change()
    return values.now() != before


def test_globals_are_followed_through_functions_but_not_for_attributes_of_their_name(monkeypatch):
    def by_attribute(batch):
        return batch.sum() / batch.size()[0]

    for function in (by_global, twice_by_global):
        with monkeypatch.context() as patch:
            assert changed_by(function, lambda: patch.setitem(globals(), "SCALE", 2.0))
    assert not changed_by(by_attribute, lambda: monkeypatch.setitem(globals(), "size", 2))


def test_a_variable_of_an_outer_function_is_read_also_through_a_partial_and_a_list():
    weight = 0.1

    def one(batch, factor):
        return weight * factor * batch

    calls = {"one": [functools.partial(one, factor=3.0)]}

    def loss(batch):
        return calls["one"][0](batch)

    def change():
        nonlocal weight
        weight = 0.2

    assert changed_by(loss, change)


@pytest.mark.parametrize("kind", ["method", "callable", "closure"])
def test_attributes_that_are_read_count_and_others_do_not(kind):
    terms = Terms()
    closure = lambda batch: terms.loss(batch) + 1  # noqa: E731
    function = {"method": terms.loss, "callable": terms, "closure": closure}[kind]
    assert "unread" not in {name for name, _ in ScriptValues(function).now()}
    assert changed_by(function, lambda: setattr(terms, "weight", 0.6))


def test_a_loss_module_has_numbers_and_a_tensor_is_read_where_it_lies():
    criterion, weight = nn.CrossEntropyLoss(label_smoothing=0.1), torch.tensor(0.1)
    table = torch.zeros(3)

    def loss(batch):
        return criterion(*batch) * weight + table

    assert changed_by(loss, lambda: setattr(criterion, "label_smoothing", 0.2))
    assert changed_by(loss, lambda: weight.fill_(0.2))
    assert changed_by(loss, lambda: table.add_(1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own imports
def test_a_trainer_leads_to_the_functions_of_the_script_and_not_to_its_own_counts():
    weight = 0.1

    def loss(outputs, target):
        return weight * (outputs - target).mean()

    def change():
        nonlocal weight
        weight = 0.2

    run = SimpleNamespace(config=SimpleNamespace(compile=True), step=1)
    metrics = {"off": lambda outputs, target: (outputs - target) * weight}
    trainer = paceline.Trainer(run, nn.Linear(1, 1), None, None, loss, metrics=metrics)
    for function in (trainer.batch_loss, trainer.batch_scores):
        weight = 0.1
        assert changed_by(function, change)
        assert not changed_by(function, lambda: setattr(run, "step", run.step + 1))


class Keeping:
    """A loss that keeps its last result and counts its calls."""

    last, calls = None, 0

    def __init__(self):
        self.last, self.calls = None, 0

    def __call__(self, batch):
        self.last = batch.sum()
        self.calls += 1
        return self.last


def test_a_tensor_that_the_loss_keeps_is_a_result_but_a_count_is_read():
    loss = Keeping()
    values = ScriptValues(loss)
    loss.last = torch.zeros(())
    before = dict(values.now())
    loss(torch.ones(3))
    after = dict(values.now())
    assert before["last"] == after["last"] == "Tensor"
    assert (before["calls"], after["calls"]) == (0, 1)


size = 1


def test_a_variable_that_is_not_assigned_yet_is_no_error():
    def loss(batch):
        return batch * later

    assert ScriptValues(loss).now() == (("later", None),)
    later = 1.0
    assert ScriptValues(loss).now() == (("later", later),)
