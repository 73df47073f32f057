"""Does an evaluation return the same numbers in every world, for values, metric objects, shards and generated text?"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.data.reading.source import as_source
from paceline.data.reading.transform import Transformed
from paceline.data.shards.index import Column, DatasetIndex, ShardFacts
from paceline.errors import ConfigError
from paceline.exact.state import state_digest
from paceline.train.evaluation.evaluation_source import EvaluationSources
from paceline.world.world import World
from support.loops import SHORT, config_in
from support.processes import in_worlds, run_on_processes

GENERATOR = torch.Generator().manual_seed(5)
ROWS = torch.randn(37, 6, generator=GENERATOR)
LABELS = torch.randint(0, 3, (37,), generator=GENERATOR)
DATA = (ROWS, LABELS)


class MeanAndLast:
    """A metric object that is not from torchmetrics, and depends on the order of its batches."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.mean = torch.zeros(())
        self.words: list[str] = []

    def update(self, values: Tensor, words: list[str]) -> None:
        self.mean = 0.9 * self.mean + 0.1 * values.mean()
        self.words += words

    def compute(self) -> dict[str, float]:
        return {"mean": float(self.mean), "words": len(" ".join(self.words)), "list": [1, 2]}


def values(config: paceline.RunConfig) -> dict[str, float]:
    with paceline.Run(config) as run:
        torch.manual_seed(0)
        model = run.model(nn.Linear(6, 3))

        def score(batch: tuple[Tensor, Tensor]) -> dict:
            scores, labels = model(batch[0]), batch[1]
            loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
            words = [f"label {label}" for label in labels.tolist()]
            return {
                "acc": scores.argmax(1) == labels,
                "loss": (loss, len(labels)),
                "own": (scores, words),
                "noise": torch.rand(len(labels), device=labels.device),
            }

        own = MeanAndLast()
        halves = {"first": (ROWS[:20], LABELS[:20]), "all": DATA}
        found = run.evaluate(halves, score, metrics={"own": own})
        assert len(own.words) == 37  # it is left as the last dataset made it
        alone = run.evaluate(halves["first"], score, metrics={"own": own})
        assert found["first/acc"] == alone["acc"]
        # Fewer batches than ranks: some ranks have none.
        return found | run.evaluate({"one": DATA}, score, metrics={"own": own}, batches=1)


def test_all_kinds_of_values_over_several_datasets(tmp_path: Path) -> None:
    found = in_worlds(values, tmp_path, SHORT)
    torch.manual_seed(0)
    scores = nn.Linear(6, 3)(ROWS).detach()
    assert found["all/acc"] == float((scores.argmax(1) == LABELS).double().mean())
    assert found["all/loss"] == pytest.approx(float(nn.functional.cross_entropy(scores, LABELS)))
    names = ("acc", "loss", "noise", "own/mean", "own/words", "own/list/0", "own/list/1")
    assert set(found) == {f"{part}/{name}" for part in ("first", "all", "one") for name in names}


def torchmetrics_objects(config: paceline.RunConfig) -> dict[str, float]:
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

    with paceline.Run(config) as run:
        torch.manual_seed(0)
        model = run.model(nn.Linear(6, 3))
        metrics = {
            "f1": MulticlassF1Score(3),
            "classes": MulticlassF1Score(3, average="none"),
            "auroc": MulticlassAUROC(3),
            "both": MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)]),
            "mean": MeanMetric(),
        }

        def score(batch: tuple[Tensor, Tensor]) -> dict:
            scores = model(batch[0]).softmax(1)
            pairs = dict.fromkeys(("f1", "classes", "auroc", "both"), (scores, batch[1]))
            return pairs | {"mean": scores[:, 0]}

        first = run.evaluate(DATA, score, metrics=metrics)
        assert run.evaluate(DATA, score, metrics=metrics) == first
        return first


@pytest.mark.heavy  # any object with update and compute is tested above
def test_torchmetrics_objects(tmp_path: Path) -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    found = in_worlds(torchmetrics_objects, tmp_path, SHORT)
    torch.manual_seed(0)
    scores = nn.Linear(6, 3)(ROWS).detach().softmax(1)
    assert found["f1"] == float(classification.MulticlassF1Score(3)(scores, LABELS))
    assert found["auroc"] == float(classification.MulticlassAUROC(3)(scores, LABELS))
    assert found["mean"] == pytest.approx(float(scores[:, 0].mean()))
    assert {"classes/0", "classes/2", "both/MulticlassAccuracy"} <= set(found)


def files_in(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
    }


def shards(config: paceline.RunConfig) -> dict[str, str]:
    with paceline.Run(config) as run:
        model = run.model(nn.Linear(6, 3))
        folder = Path(config.runs) / "outputs"

        def outputs(batch: tuple[Tensor, Tensor]) -> dict:
            words = [torch.arange(int(label)) for label in batch[1]]
            return {"row": batch[0], "score": model(batch[0]), "words": words}

        more = torch.cat([ROWS] * 9), torch.cat([LABELS] * 9)
        run.predict(more, outputs, to=folder)
        assert run.predict(DATA, outputs, to=str(folder)) is None  # replaces what was there
        kept = run.predict(DATA, lambda batch: {"score": model(batch[0]), "label": batch[1]})
        assert torch.equal(kept["label"], LABELS)
        read = paceline.open_dataset(folder, config)
        assert len(read) == 37
        for sample, (row, score, words) in enumerate(read[number] for number in range(37)):
            assert torch.equal(row, ROWS[sample])
            assert torch.equal(score, kept["score"][sample])
            assert torch.equal(words, torch.arange(int(LABELS[sample])))
        run.predict((ROWS[:2], LABELS[:2]), outputs, to=folder.with_name("tiny"))
        run.barrier()
        return files_in(folder) | {"tiny": str(files_in(folder.with_name("tiny")))}


def test_predictions_as_shards_have_the_same_bytes_in_every_world(tmp_path: Path) -> None:
    assert len(in_worlds(shards, tmp_path, SHORT)) > 4


class Talker(nn.Module):
    """A small model that generates tokens until it says the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 12), nn.Linear(12, 16)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens).cumsum(1)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return self.head(hidden)

    def generate(self, start: Tensor) -> list[int]:
        tokens = start[None, None]
        while tokens.shape[1] < 30 and (tokens.shape[1] == 1 or tokens[0, -1] > 4):
            newest = self(tokens)[0, -1].argmax()
            tokens = torch.cat([tokens, newest[None, None]], 1)
        return tokens[0].tolist()


def generation(config: paceline.RunConfig) -> list:
    tokens = torch.randint(0, 16, (21, 4), generator=torch.Generator().manual_seed(2))
    with paceline.Run(config) as run:
        model = run.model(Talker())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 0.3, momentum=0.9))
        said: list[int] = []

        def score(batch: tuple[Tensor]) -> dict:
            texts = [model.generate(row[0]) for row in batch[0]]
            said.extend(len(text) for text in texts)
            return {"length": torch.tensor([len(text) for text in texts])}

        def loss(batch: tuple[Tensor]) -> Tensor:
            scores = model(batch[0][:, :-1])
            return nn.functional.cross_entropy(scores.flatten(0, 1), batch[0][:, 1:].flatten())

        found = [run.evaluate((tokens,), score)]
        for step in run.steps((tokens,)):
            run.update(optimizer, loss, step)
            if step.ends_epoch:
                found.append(run.evaluate((tokens,), score))
                lines = run.predict((tokens,), lambda batch: model(batch[0])[:, -1])
        assert len(set(said)) > 1
        found += [lines.sum().item(), state_digest(run._parts.model, run._parts.optimizer)]
        return found


def test_text_of_different_lengths_is_generated_under_fsdp(tmp_path: Path) -> None:
    [alone] = run_on_processes(generation, 1, tmp_path, SHORT | {"runs": str(tmp_path / "1")})
    assert in_worlds(generation, tmp_path, SHORT | {"parallel": "fsdp"}, worlds=[3]) == alone


def layer_by_layer(config: paceline.RunConfig) -> list:
    """Evaluate as if the whole model did not fit: 21 samples are 11 batches, which ranks cannot share evenly."""
    tokens = torch.arange(21 * 4).view(21, 4) % 16
    with paceline.Run(config) as run:
        model = run.model(Talker())
        run._inference._weights._fit = lambda modules: False  # type: ignore[method-assign]
        found = run.evaluate((tokens,), lambda batch: {"mean": model(batch[0])})
        rows = run.predict((tokens,), lambda batch: model(batch[0])[:, -1])
        run.predict((tokens,), lambda batch: model(batch[0]), to=Path(config.runs) / "outputs")
        run.barrier()
        return [found, rows.tolist(), files_in(Path(config.runs) / "outputs")]


def test_a_model_too_large_for_that_is_gathered_in_every_forward(tmp_path: Path) -> None:
    in_worlds(layer_by_layer, tmp_path, SHORT | {"parallel": "fsdp"}, worlds=(2, 3))


def test_the_source_of_a_dataset_is_kept_until_its_tensors_change() -> None:
    sources = EvaluationSources(World(), paceline.RunConfig())
    rows = torch.arange(6.0)
    kept = sources.of((rows,), None, "run.evaluate")
    assert sources.of((rows,), None, "run.evaluate") is kept
    assert sources.of(torch.utils.data.TensorDataset(rows), None, "run.evaluate") is kept
    assert sources.of((rows,), list, "run.evaluate") is not kept
    rows += 1
    changed = sources.of((rows,), None, "run.evaluate")
    assert changed is not kept
    assert changed.read(0, 2)[0].tolist() == [1.0, 2.0]
    for _ in range(20):
        sources.of((torch.zeros(1),), None, "run.evaluate")
    assert len(sources._kept) == 8


def transformed(config: paceline.RunConfig) -> float:
    def double(batch: tuple[Tensor], rng: Any) -> tuple[Tensor]:
        assert len(batch[0]) <= 2  # one lane at a time
        return (2 * batch[0] + 1e-3 * rng.uniform(),)

    data = Transformed(as_source((torch.arange(9.0)[:, None],)), double)
    with paceline.Run(config) as run:
        return run.evaluate(data, lambda batch: {"mean": batch[0]})["mean"]


def test_transforms_of_lanes_are_applied(tmp_path: Path) -> None:
    assert in_worlds(transformed, tmp_path, SHORT) == pytest.approx(8.0, abs=1e-3)


def changing_names() -> Any:
    calls: list[int] = []

    def score(batch: tuple[Tensor, Tensor]) -> dict:
        calls.append(1)
        return {f"part {len(calls)}": batch[1]}

    return score


OWN = {"f1": MeanAndLast()}
WRONG_SCORES = {
    "'x' of run.evaluate is shape []": (DATA, lambda batch: {"x": batch[1].float().mean()}, {}),
    "[2, 6]": (DATA, lambda batch: {"x": batch}, {}),
    "Tensor": (DATA, lambda batch: batch[1], {}),
    "part 2": (DATA, changing_names(), {}),
    "'f1'": (DATA, lambda batch: {"x": batch[1]}, OWN),
    "int": (DATA, lambda batch: {"x": batch[1]}, {"x": 3}),
    "dict": ({"x": ROWS, "y": LABELS}, lambda batch: {}, {}),
}


@pytest.mark.parametrize("named", WRONG_SCORES)
def test_wrong_scores_are_refused_in_a_trial_before_the_loop(named: str, tmp_path: Path) -> None:
    def evaluate() -> None:
        data, score, metrics = WRONG_SCORES[named]
        with paceline.Run(config_in(tmp_path)) as run:
            run.evaluate(data, score, metrics=metrics, batches=2)

    with pytest.raises(ConfigError, match=re.escape(named)):
        evaluate()


WRONG_PREDICTIONS = {
    "[] for 2 samples": (lambda batch: batch[1].sum(), ""),
    "'a'": (lambda batch: {"a": "text"}, ""),
    "'output'": (lambda batch: list(batch[0]), ""),
    "torch.bfloat16": (lambda batch: batch[0].bfloat16(), "out"),
    "s3": (lambda batch: batch[0], "s3://bucket/out"),
    "a dataset that run.predict has not written": (lambda batch: batch[0], "taken"),
}


@pytest.mark.parametrize("named", WRONG_PREDICTIONS)
def test_wrong_predictions_are_refused(named: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    shard = ShardFacts("00000.safetensors", 1, 9, 9, "", "")
    other = DatasetIndex((Column("x", "F32"),), 1, (shard,), {"from": ["mine.csv"]})
    (tmp_path / "taken" / "index.json").write_bytes(other.to_json())
    function, to = WRONG_PREDICTIONS[named]
    where = {"to": to if "://" in to else tmp_path / to} if to else {}

    def predict() -> None:
        with paceline.Run(config_in(tmp_path)) as run:
            run.predict(DATA, function, **where)

    with pytest.raises(ConfigError, match=re.escape(named)):
        predict()


def evaluate_twice(config: paceline.RunConfig) -> None:
    calls: list[int] = []
    with paceline.Run(config) as run:
        model = run.model(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))

        def score(batch: tuple[Tensor, Tensor]) -> dict:
            calls.append(1)
            # From the first batch of a pass to the last: no synchronization.
            torch.cuda.set_sync_debug_mode("error" if len(calls) % 19 else "default")
            scores = model(batch[0])
            return {
                "acc": scores.argmax(1) == batch[1],
                "loss": (nn.functional.cross_entropy(scores, batch[1]) * len(scores), len(scores)),
                "own": (scores, []),
            }

        metrics = {"own": MeanAndLast()}
        first = run.evaluate(DATA, score, metrics=metrics)
        held = torch.cuda.memory_allocated()
        assert run.evaluate(DATA, score, metrics=metrics) == first
        assert torch.cuda.memory_allocated() == held
        [(_, _, source)] = run._inference._sources._kept.values()
        assert type(source._source).__name__ == "ResidentSource"


@pytest.mark.gpu
def test_a_gpu_keeps_the_dataset_and_the_host_does_not_wait_for_it(tmp_path: Path) -> None:
    in_worlds(evaluate_twice, tmp_path, SHORT | {"device": "cuda"}, worlds=[1])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_gpu_returns_the_same_values_in_every_world(backend: str, tmp_path: Path) -> None:
    in_worlds(values, tmp_path, SHORT | {"device": "cuda", "backend": backend}, worlds=(1, 2, 3))


def draw(config: paceline.RunConfig, stop_at: int = -1) -> list[list[float]]:
    """Return what predictions draw: before the loop, twice in every step, with a seed, and after the loop."""
    found = []
    with paceline.Run(config) as run:
        model = run.model(nn.Linear(6, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def predict(**options: Any) -> list[float]:
            return run.predict((ROWS,), lambda batch: torch.rand(len(batch[0])), **options).tolist()

        found.append(predict())
        for step in run.steps((ROWS[:16],), epochs=2):
            run.update(optimizer, lambda batch: model(batch[0]).square().mean(), step)
            found += [predict(), predict(seed=3), predict()]
            if step.index == stop_at:
                raise RuntimeError("crash")
        found.append(predict())
    return found


def test_predictions_draw_other_numbers_in_every_call_on_any_ranks_and_after_a_resume(tmp_path):
    whole = in_worlds(draw, tmp_path, SHORT, worlds=(1, 2))
    assert len(whole) == 14
    seeded = [whole[place] for place in range(2, 13, 3)]
    assert all(each == seeded[0] for each in seeded)
    assert len({tuple(each) for each in whole}) == 14 - 3
    settings = SHORT | {"runs": str(tmp_path / "crash"), "checkpoint.every": "1steps"}
    with pytest.raises(AssertionError, match="crash"):
        run_on_processes(draw, 1, tmp_path, settings, {"stop_at": 2})
    (resumed, _) = run_on_processes(draw, 2, tmp_path, settings)
    assert resumed[0] == whole[0]
    assert resumed[-4:] == whole[-4:]
