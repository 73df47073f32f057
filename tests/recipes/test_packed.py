"""The recipes have the same bits from shards as from memory, on one rank and on two."""

import numpy
import pytest
import torch

from paceline.config import RunConfig
from paceline.errors import DataError
from paceline.recipes import corpus, digits
from paceline.world.world import World
from support.datasets import make_dataset
from support.loops import lanes_of
from support.processes import run_on_processes
from support.tiny_gpt import digest, train

LENGTH = 16


def text_sets(folder, text):
    """Pack the rows that the recipe takes from memory."""
    rows = corpus.split_rows(text, LENGTH).numpy()
    held_out = numpy.arange(len(rows)) % 20 == 19
    for part, mine in (("train", rows[~held_out]), ("test", rows[held_out])):
        make_dataset(
            folder / part, len(mine), 30, lambda begin, end, mine=mine: {"tokens": mine[begin:end]}
        )


def gpt_digest(words):
    run = train(f"context_length={LENGTH}", "steps=14", *words)
    return digest(run) if run.events.exists() else ""


def test_a_gpt_is_the_same_from_shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = bytes(numpy.random.default_rng(0).integers(32, 120, 5000, dtype=numpy.uint8))
    (tmp_path / "text").write_bytes(text)
    text_sets(tmp_path / "sets", text)
    shards = ["data=shards", f"data_folder={tmp_path}/sets"]
    memory = gpt_digest(["data_folder=text", "name=memory"])
    assert gpt_digest([*shards, "name=shards"]) == memory
    assert run_on_processes(gpt_digest, 2, tmp_path, {}, {"words": shards})[0] == memory


def test_digits_are_the_same_from_shards(tmp_path):
    generator = numpy.random.default_rng(3)
    images = generator.integers(0, 256, (50, 28, 28), dtype=numpy.uint8)
    labels = generator.integers(0, 10, 50)
    for part in ("train", "test"):
        make_dataset(tmp_path / part, 50, 7, lambda *at: {"image": images[slice(*at)], "label": labels[slice(*at)]})  # fmt: skip
    config = RunConfig()
    memory = digits._pixels(torch.from_numpy(images)), torch.from_numpy(labels)
    wanted = list(lanes_of(World(), config, memory))
    for data in digits.packed_digits(str(tmp_path), config):
        for mine, yours in zip(lanes_of(World(), config, data), wanted, strict=True):
            for one, other in zip(mine.lanes, yours.lanes, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one.batch, other.batch, strict=True))


def test_text_and_sets_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "short").write_bytes(b"ab")
    for read, problem in (
        (lambda: digits.packed_digits("", RunConfig()), "paceline data pack"),
        (lambda: corpus.text_from_shards("", RunConfig()), "paceline data pack"),
        (lambda: corpus.read_text(str(tmp_path / "nothing.txt")), "nothing.txt"),
        (lambda: corpus.text_in_memory(str(tmp_path / "short"), 9), "more text"),
    ):
        with pytest.raises(DataError, match=problem):
            read()
