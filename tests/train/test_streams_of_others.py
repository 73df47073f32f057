"""Streams of Hugging Face datasets and of WebDataset: the same bits in every world, and through a resume in another one."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline
from support.processes import in_worlds, run_on_processes

SETTINGS = {"batch.global_size": 8, "batch.lanes": 4, "lr.schedule": "constant"}


def rows() -> list[tuple[list[float], int]]:
    draw = numpy.random.default_rng(3)
    return [(draw.normal(size=4).tolist(), int(draw.integers(0, 3))) for _ in range(40)]


def train(config: paceline.RunConfig, stream: paceline.Stream, collate=None) -> list[float]:
    with paceline.Run(config) as run:
        model = run.model(nn.Linear(4, 3))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def loss(batch: dict[str, Tensor]) -> Tensor:
            return cross_entropy(model(batch["x"].float()), batch["label"])

        for step in run.steps(stream, collate=collate):
            run.update(optimizer, loss, step)
        return model.weight.flatten().tolist()


def train_on_json_lines(config: paceline.RunConfig, folder: str) -> list[float]:
    from datasets import load_dataset

    def shard_of(shard: int, shards: int):
        data = load_dataset("json", data_files=f"{folder}/*.jsonl", split="train", streaming=True)
        return data.shuffle(seed=7, buffer_size=8).shard(num_shards=shards, index=shard)

    def collate(samples: list[dict]) -> dict[str, Tensor]:
        return {name: torch.tensor([sample[name] for sample in samples]) for name in ("x", "label")}

    return train(config, paceline.Stream(shard_of), collate)


def train_on_tar_files(config: paceline.RunConfig, folder: str) -> list[float]:
    import webdataset

    def shard_of(shard: int, shards: int):
        files = sorted(map(str, Path(folder).glob("*.tar")))[shard::shards]
        data = webdataset.WebDataset(
            files, shardshuffle=False, empty_check=False, nodesplitter=None
        )
        return data.decode().map(lambda sample: {"x": sample["x.npy"], "label": sample["y.cls"]})

    return train(config, paceline.Stream(shard_of))


def write_json_lines(folder: Path) -> None:
    """Not Parquet: shuffled shards of it sleep for 5 s at their end."""
    for number in range(4):
        lines = [json.dumps({"x": x, "label": label}) for x, label in rows()[number::4]]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))


def write_tar_files(folder: Path) -> None:
    for number in range(4):
        with tarfile.open(folder / f"{number}.tar", "w") as archive:
            for place, (values, label) in enumerate(rows()[number::4]):
                numpy.save(array := io.BytesIO(), numpy.array(values, dtype=numpy.float32))
                contents = {"x.npy": array.getvalue(), "y.cls": str(label).encode()}
                for name, content in contents.items():
                    entry = tarfile.TarInfo(f"{place:04d}.{name}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))


@pytest.mark.heavy  # streams of plain Python are tested in test_run_loop.py and in tests/data
@pytest.mark.parametrize(
    ("package", "write", "function"),
    [
        ("datasets", write_json_lines, train_on_json_lines),
        ("webdataset", write_tar_files, train_on_tar_files),
    ],
)
def test_their_streams_keep_the_bits(package, write, function, tmp_path, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (data := tmp_path / "data").mkdir()
    write(data)
    given = {"folder": str(data)}
    whole = in_worlds(function, tmp_path, SETTINGS | {"steps": 9}, given, worlds=(1, 2, 3))
    broken = SETTINGS | {"runs": str(tmp_path / "broken")}
    run_on_processes(function, 2, tmp_path, broken | {"steps": 4}, given)
    assert run_on_processes(function, 3, tmp_path, broken | {"steps": 9}, given) == [whole] * 3
