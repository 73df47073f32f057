"""Sets that lie on the device as a whole, as far as that can be seen without a GPU: the same samples in the same order."""

import numpy
import pytest
import torch

from paceline.data.reading.resident import ResidentSource, cache_on_gpu, copy_to_device
from paceline.data.reading.source import DatasetSource, TensorSource
from support.datasets import make_dataset, open_folder


@pytest.mark.parametrize("piece", [1, 100, 1 << 26])
def test_all_samples_are_there(piece, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.data.reading.resident._PIECE_BYTES", piece)
    source = open_folder(make_dataset(tmp_path, 23, 5))
    order = numpy.random.default_rng(0).permutation(23)
    there = ResidentSource(source, "cpu")
    assert len(there) == 23
    for found, wanted in zip(
        there.gather(order, (0, 0)), source.gather(order, (0, 0)), strict=True
    ):
        assert torch.equal(found, wanted)


class Drawn:
    """A source of somebody's own, whose samples may be others in every epoch."""

    block = window = 0
    bytes_per_sample = 8

    def __len__(self):
        return 3

    def gather(self, samples, key):
        return (torch.rand(len(samples)),)


def test_on_a_cpu_and_for_samples_made_in_python_nothing_is_brought():
    source = TensorSource(torch.zeros(3, 2))
    assert cache_on_gpu(source, "cpu", 4.0) is source
    for made in (DatasetSource([1, 2, 3]), Drawn()):
        assert cache_on_gpu(made, "cuda:0", 4.0) is made


def test_a_set_that_is_too_large_stays_where_it_is():
    source = TensorSource(torch.zeros(1000, 2))
    assert cache_on_gpu(source, "cuda:0", 1e-9) is source


def test_without_a_stream_a_batch_is_copied_as_ever():
    batch = (torch.arange(3), torch.ones(2))
    assert [value.tolist() for value in copy_to_device(None, batch, "cpu")] == [[0, 1, 2], [1, 1]]
