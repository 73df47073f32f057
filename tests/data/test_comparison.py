"""Datasets that differ between the ranks or the starts of a run are refused; the others pass, and stay as they are."""

import contextlib
import io
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from subprocess import PIPE

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline
from paceline.config import RunConfig
from paceline.data.reading.batches import Batches
from paceline.data.reading.comparison import DataFacts, difference, summary_of
from paceline.errors import ConfigError
from paceline.launch.environment import free_port
from paceline.world.world import World
from support.loops import RunIn, sgd
from support.processes import on_processes

NOISE = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


@dataclass
class Pair:
    x: object
    y: object = None


@pytest.mark.parametrize(
    "sample",
    [
        torch.arange(3),
        numpy.float32(2.5),
        [1, 2, 3],
        "text",
        b"bytes",
        {"ids": [1, 2], "mask": None},
        (torch.ones(2, dtype=torch.bfloat16), 3),
        Pair(torch.tensor(1 + 2j)),
        numpy.zeros((4, 4), dtype=numpy.uint8),
        torch.tensor([]),
    ],
    ids=str,
)
def test_samples_of_any_kind_have_a_summary(sample):
    found = summary_of(sample)
    assert found is not None
    assert found == summary_of(sample)
    assert found != summary_of([sample, 1])
    assert json.loads(json.dumps(found)) == list(found)


def test_images_have_a_summary_and_what_has_no_digest_is_left_out():
    pil = pytest.importorskip("PIL.Image")
    black, white = pil.new("RGB", (4, 4)), pil.new("RGB", (4, 4), "white")
    assert summary_of(black) != summary_of(white)
    assert summary_of(object()) is None
    assert summary_of({1, 2}) is None
    assert summary_of([1, object()]) == summary_of([1, lambda: None])


def facts(data, collate=None, *, words=(), world=World()):
    config = paceline.config.config_from_words(RunConfig, ["batch.global_size=8", *words])
    return Batches(data, config, world, collate=collate).read_facts()


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (NOISE[:7], "length"),
        (NOISE.flip(0), "samples"),
        (NOISE * 1.0000001, "rounding"),
        (NOISE * 1.1, "samples"),
        (NOISE.clone(), ""),
    ],
    ids=["length", "order", "rounding", "scale", "copy"],
)
def test_two_datasets_are_compared(other, kind):
    def rows(data):
        return [{"row": row} for row in data]

    assert difference(facts((NOISE,)), facts((other,))) == kind
    assert difference(facts(rows(NOISE)), facts(rows(other))) == kind
    stored = json.loads(json.dumps(facts(rows(other))))
    assert difference(facts(rows(NOISE)), DataFacts.of(stored)) == kind


def test_the_sampler_and_the_collate_function_are_compared():
    def loader(samples):
        sampler = torch.utils.data.SubsetRandomSampler(samples)
        return DataLoader(TensorDataset(NOISE), batch_size=2, sampler=sampler)

    assert difference(facts(loader([0, 1, 2])), facts(loader([3, 4, 5]))) == "order"
    first, other = (
        facts(["ab", "cd"] * 4, lambda texts, ids=ids: torch.tensor([ids[text] for text in texts]))
        for ids in ({"ab": 1, "cd": 0}, {"ab": 0, "cd": 1})
    )
    assert difference(first, other) == "samples"


class Augmented(Dataset):
    """Draws from the global generators, which are seeded by sample."""

    def __len__(self):
        return 8

    def __getitem__(self, sample):
        drawn = torch.randn(8) + numpy.random.rand() + random.random()  # noqa: NPY002
        return drawn + sample


class Moving(Augmented):
    """Has a generator and a counter of its own."""

    def __init__(self):
        self.generator, self.reads = numpy.random.default_rng(0), 0

    def __getitem__(self, sample):
        self.reads += 1
        return torch.from_numpy(self.generator.normal(size=8)).float() + self.reads


def test_what_is_read_for_the_comparison_changes_nothing():
    drawn = torch.get_rng_state()
    for words in ((), ("read.workers=2",)):
        augmented, moving = facts(Augmented(), words=words), facts(dataset := Moving(), words=words)
        assert not augmented.changes
        assert moving.changes
        assert dataset.reads == 0
        assert float(dataset.generator.random()) == numpy.random.default_rng(0).random()
    assert torch.equal(torch.get_rng_state(), drawn)
    assert facts(Augmented()) == facts(Augmented(), words=["read.workers=1"])
    others = moving._replace(samples=[summary_of(1)] * len(moving.samples))
    assert difference(moving, others) == ""


def test_samples_that_cannot_be_read_or_stacked_are_left_to_the_training():
    class Broken(Augmented):
        def __getitem__(self, sample):
            raise OSError("no such file")

    assert facts(Broken()).batch is None
    taken = [{"x": 1.0, "y": 2.0} for _ in range(8)]
    facts(taken, lambda samples: torch.tensor([sample.pop("y") for sample in samples]))
    assert all("y" in sample for sample in taken)


def training(run, data, **more):
    model = run.model(torch.nn.Linear(8, 1))
    optimizer = run.optimizer(sgd()(model.parameters()))
    for step in run.steps(data, epochs=1, **more):
        run.update(optimizer, lambda batch: model(batch[0]).square().mean(), step)


@on_processes(2, resume="never")
def test_a_dataset_that_differs_by_rank_is_refused(world, config):
    own = TensorDataset(NOISE + world.rank), TensorDataset(NOISE[world.rank :])
    with RunIn(world, config) as run:
        for data, words in zip(own, ("other samples", "7 samples.* 8"), strict=True):
            for call in (
                lambda data=data: training(run, data),
                lambda data=data: run.evaluate(data, lambda batch: {"x": batch[0].mean(1)}),
                lambda data=data: run.predict(data, lambda batch: batch[0]),
            ):
                run._parts.models.clear(), run._parts.optimizers.clear()
                with pytest.raises(ConfigError, match=f"rank 1 has another dataset.*{words}"):
                    call()
        # Known to one rank only, and a dataset that has grown.
        known, fresh = TensorDataset(NOISE), TensorDataset(NOISE.clone())
        mean = run.evaluate(known, lambda batch: {"x": batch[0].mean(1)})
        either = (known, fresh)[world.rank]
        assert mean == run.evaluate(either, lambda batch: {"x": batch[0].mean(1)})
        samples = list(range(8))
        run.evaluate(samples, lambda batch: {"x": batch.float()})
        samples += list(range(8 - world.rank))
        with pytest.raises(ConfigError, match="15 samples, rank 0 has 16"):
            run.evaluate(samples, lambda batch: {"x": batch.float()})


@on_processes(2, resume="never")
def test_a_dataset_that_changes_by_itself_is_named_once(world, config):
    with contextlib.redirect_stderr(io.StringIO()) as said, RunIn(world, config) as run:
        for _ in range(2):
            run.evaluate(Moving(), lambda batch: {"x": batch.mean(1)})
        run.evaluate(Augmented(), lambda batch: {"x": batch.mean(1)})
    assert said.getvalue().count("the samples of Moving") == int(world.is_main)


def test_a_run_does_not_resume_on_another_dataset(tmp_path):
    base = RunConfig(name="other", runs=str(tmp_path))

    def start(config, data):
        with paceline.Run(config) as run:
            training(run, data)

    start(base, TensorDataset(NOISE))
    start(base, TensorDataset(NOISE))
    with pytest.raises(ConfigError, match="another dataset.*the checkpoint") as error:
        start(base, TensorDataset(NOISE.flip(0)))
    assert "resume=changed" in error.value.fix
    start(replace(base, resume="changed"), TensorDataset(NOISE.flip(0)))


SCRIPT = """
import numpy, torch, paceline
from torch.utils.data import TensorDataset, random_split

def main(config):
    drawn = torch.randn(8, 8) + torch.from_numpy(numpy.random.rand(8, 8)).float()
    held_out, _ = random_split(TensorDataset(drawn), [4, 4])
    names = {word: float(number) for number, word in enumerate({"one", "two", "three", "four", "five", "six"})}
    words = TensorDataset(torch.tensor([[names[word] for word in sorted(names)]] * 8))
    with paceline.Run(config) as run:
        found = run.evaluate(held_out, lambda batch: {"x": batch[0].mean(1)})
        print("held out", found, flush=True)
        model = run.model(torch.nn.Linear(6, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        next(run.steps(words))

main(paceline.config_from_argv())
"""


@pytest.mark.heavy
def test_ranks_with_other_hash_seeds_and_no_seed_of_their_own(tmp_path):
    """Two processes that share nothing, as torchrun starts them."""
    (tmp_path / "train.py").write_text(SCRIPT)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "PYTHONHASHSEED": str(1 + rank)}
        words = [sys.executable, "train.py"]
        given = {"cwd": tmp_path, "env": os.environ | meeting | own, "text": True}
        ranks.append(subprocess.Popen(words, stdout=PIPE, stderr=PIPE, **given))
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert all(rank.returncode for rank in ranks)
    assert "held out" in outputs[0][0]
    assert "rank 1 has another dataset in run.steps" in outputs[0][1]
    assert "sorted(set(words))" in outputs[0][1]
    assert "PYTHONHASHSEED" in outputs[0][1]
