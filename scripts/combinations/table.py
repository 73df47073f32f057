"""All combinations of the table, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from combinations import datasets as data
from combinations import models, optimizers, pairs, unusual_models
from combinations.training import Combination
from torch import nn

FSDP = {"parallel": "fsdp"}
LOCAL_SGD = {"local_sgd.steps": 2, "local_sgd.replicas": 4}


def rows(
    name: str, make: Callable[[], nn.Module] = models.Blocks, samples: Any = data.rows, **more: Any
) -> Combination:
    """Return a regression of rows of numbers."""
    return Combination(name, make, samples, data.regress, **more)


def pictures(name: str, make: Callable[[], nn.Module], **more: Any) -> Combination:
    """Return a classification of images."""
    return Combination(name, make, data.images, data.classify, **more)


def all_combinations() -> Iterator[Combination]:
    """Yield every line of the table."""
    yield from _models()
    yield from _optimizers()
    yield from _norms()
    yield from _parameters()
    yield from _buffers()
    yield from _hooks_and_recomputation()
    yield from _sparse()
    yield from _precisions()
    yield from _compiled_and_read()


def _models() -> Iterator[Combination]:
    yield pictures("vision: CNN with BatchNorm", models.convolutions)
    yield pictures("vision: transformer", models.VisionTransformer)
    yield pictures("vision: transformer, fsdp", models.VisionTransformer, settings=FSDP)
    vae = models.VariationalAutoencoder
    yield Combination("vision: VAE, random in evaluation", vae, data.rows, data.own_loss)
    language = partial(Combination, data=data.texts, loss=data.next_tokens)
    yield language("text: GPT with tied weights", models.LanguageModel)
    yield language("text: GPT with tied weights, fsdp", models.LanguageModel, settings=FSDP)
    yield language("text: GPT, local SGD", models.LanguageModel, settings=LOCAL_SGD)
    sentences = partial(Combination, data=data.texts, loss=data.classify)
    yield sentences("text: LSTM", models.Recurrent)
    yield sentences("text: LSTM, fsdp", models.Recurrent, settings=FSDP)
    yield sentences(
        "text: GRU, clipped", lambda: models.Recurrent(nn.GRU), settings={"clip_norm": 0.1}
    )
    yield sentences("text: EmbeddingBag", models.WordBag)
    speech = partial(
        Combination, data=data.recordings, loss=data.speak, collate=data.pad_recordings
    )
    yield speech("speech: GRU and CTC, ragged", models.Speech)
    yield speech("speech: GRU and CTC, ragged, fsdp", models.Speech, settings=FSDP)
    yield pictures("speech: time-delay network", models.SpokenDigits)
    graph = partial(
        Combination, data=data.graphs, loss=data.classify_graphs, collate=data.join_graphs
    )
    yield graph("graphs: message passing", models.MessagePassing)
    yield graph("graphs: attention", models.GraphAttention)
    yield graph("graphs: attention, fsdp", models.GraphAttention, settings=FSDP)
    ratings = partial(Combination, data=data.ratings, loss=data.regress)
    yield ratings("recommender: factorization", models.Factorization)
    yield ratings("recommender: click model", models.ClickModel)
    yield ratings("recommender: click model, local SGD", models.ClickModel, settings=LOCAL_SGD)


def _optimizers() -> Iterator[Combination]:
    for name, make in optimizers.OPTIMIZERS.items():
        yield rows(f"optimizer: {name}", optimizer=make)
        yield rows(f"optimizer: {name}, fsdp", optimizer=make, settings=FSDP)
    for name in ("SGD nesterov", "AdamW", "RMSprop", "Adafactor"):
        yield rows(
            f"optimizer: {name}, local SGD",
            optimizer=optimizers.OPTIMIZERS[name],
            settings=LOCAL_SGD,
        )
    yield rows("optimizer: Muon", models.matrices, optimizer=optimizers.MUON)
    yield rows("optimizer: Muon, fsdp", models.matrices, optimizer=optimizers.MUON, settings=FSDP)
    yield rows(
        "optimizer: Muon, local SGD", models.matrices, optimizer=optimizers.MUON, settings=LOCAL_SGD
    )
    yield rows("optimizer: strings in its state", optimizer=optimizers.WithStrings.over)
    yield rows("optimizer: lists in its state", optimizer=optimizers.WithLists.over)
    yield rows("optimizer: its own subclass with a step count", optimizer=optimizers.Counting.over)
    yield rows("optimizer: options that the loop changes", each_step=optimizers.change_options)
    yield rows(
        "optimizer: groups that the loop adds",
        optimizer=optimizers.without_first,
        each_step=optimizers.add_group,
    )


def _norms() -> Iterator[Combination]:
    for norm in ("group", "layer", "instance"):
        yield pictures(f"norm: {norm}", partial(models.convolutions, norm))
    for strategy, settings in (("fsdp", FSDP), ("local SGD", LOCAL_SGD)):
        yield pictures(f"norm: batch, {strategy}", models.convolutions, settings=settings)
    yield pictures("norm: SyncBatchNorm", partial(models.convolutions, "sync"))
    yield pictures(
        "norm: batch, frozen by eval mode", models.convolutions, setup=unusual_models.frozen_norm
    )
    yield rows("norm: batch in a skipped block", unusual_models.SkippedNorm, data.many_rows)
    one = {"batch.global_size": 4}
    yield rows("norm: batch with lanes of one sample", unusual_models.SkippedNorm, settings=one)
    yield pictures("norm: batch with lanes of one image", models.convolutions, settings=one)
    yield rows("norm: spectral", models.spectral)
    yield rows("norm: spectral, fsdp", models.spectral, settings=FSDP)
    yield rows("norm: weight", models.weight_normed)
    yield rows("norm: weight, fsdp", models.weight_normed, settings=FSDP)


def _parameters() -> Iterator[Combination]:
    for strategy, settings in (("ddp", {}), ("fsdp", FSDP), ("local SGD", LOCAL_SGD)):
        yield rows(
            f"parameters: frozen, {strategy}", before=unusual_models.freeze_first, settings=settings
        )
        yield rows(
            f"parameters: stochastic depth, {strategy}", unusual_models.StochasticDepth,
            settings=settings,
        )  # fmt: skip
        yield rows(f"parameters: experts, {strategy}", unusual_models.Experts, settings=settings)
        yield rows(
            f"parameters: several heads, one never used, {strategy}", unusual_models.Heads,
            settings=settings,
        )  # fmt: skip
    for strategy, settings in (("ddp", {}), ("fsdp", FSDP), ("local SGD", LOCAL_SGD)):
        late = partial(rows, settings=settings)
        yield late(
            f"parameters: frozen in step 4, {strategy}", each_step=unusual_models.freeze_late
        )
        yield late(
            f"parameters: unfrozen in step 4, {strategy}",
            before=unusual_models.freeze_first,
            each_step=unusual_models.unfreeze_late,
        )


def _buffers() -> Iterator[Combination]:
    kinds = {
        "moves in some lanes": (unusual_models.moves_in_some_lanes, 0.0),
        "moves by assignment": (unusual_models.moves_by_assignment, 0.0),
        "moves in evaluation only": (unusual_models.moves_in_evaluation, 0.0),
        "starts at -inf": (unusual_models.keeps_largest, float("-inf")),
    }
    for name, (move, start) in kinds.items():
        yield rows(f"buffer: {name}", partial(unusual_models.Watching, move, start))
    unsaved = partial(
        unusual_models.Watching, unusual_models.moves_in_some_lanes, 0.0, persistent=False
    )
    yield rows("buffer: persistent=False", unsaved)
    yield rows("buffer: persistent=False, fsdp", unsaved, settings=FSDP)
    yield rows("buffer: moves, local SGD", unsaved, settings=LOCAL_SGD)
    late = unusual_models.begin_late
    yield rows("buffer: moves from step 4 on", unusual_models.LateBuffer, each_step=late)
    yield rows("buffer: grows", unusual_models.GrowingBuffer)


def _hooks_and_recomputation() -> Iterator[Combination]:
    hooks = {
        "parameter": unusual_models.parameter_hooks,
        "post-accumulate": unusual_models.accumulated_hooks,
        "forward": unusual_models.forward_hooks,
        "backward": unusual_models.backward_hooks,
    }
    for name, add in hooks.items():
        yield rows(f"hooks: {name}", setup=add)
        yield rows(f"hooks: {name}, fsdp", setup=add, settings=FSDP)
    yield rows("hooks: parameter, before run.model", before=hooks["parameter"])
    yield rows("hooks: parameter, before run.model, fsdp", before=hooks["parameter"], settings=FSDP)
    yield rows("hooks: parameter, local SGD", setup=hooks["parameter"], settings=LOCAL_SGD)
    for kind, reentrant in (("reentrant", True), ("non-reentrant", False)):
        again = partial(unusual_models.Recomputed, reentrant=reentrant)
        yield rows(f"recomputation: {kind}", again)
        yield rows(f"recomputation: {kind}, fsdp", again, settings=FSDP)
        norm = partial(unusual_models.RecomputedNorm, reentrant=reentrant)
        yield rows(f"recomputation: {kind} with BatchNorm", norm, data.many_rows)
    yield rows("evaluation: dropout left on", unusual_models.RandomInEvaluation)
    yield Combination(
        "evaluation: in train mode, with BatchNorm",
        models.convolutions, data.images, data.classify_in_train_mode,
    )  # fmt: skip


def _sparse() -> Iterator[Combination]:
    ratings = partial(Combination, data=data.ratings, loss=data.regress)
    table = partial(models.Factorization, sparse=True)
    yield ratings("sparse: Embedding, SparseAdam", table, optimizer=optimizers.SPARSE_ADAM)
    yield ratings("sparse: Embedding, Adagrad", table, optimizer=optimizers.OPTIMIZERS["Adagrad"])
    yield ratings("sparse: Embedding, SGD", table, optimizer=optimizers.made("SGD", lr=0.05))
    yield ratings("sparse: Embedding, AdamW", table)
    yield ratings(
        "sparse: Embedding, SparseAdam, fsdp",
        table,
        optimizer=optimizers.SPARSE_ADAM,
        settings=FSDP,
    )
    clicks = partial(models.ClickModel, sparse=True)
    sgd = optimizers.OPTIMIZERS["Adagrad"]
    yield ratings("sparse: EmbeddingBag and layers, Adagrad", clicks, optimizer=sgd)
    yield ratings("sparse: EmbeddingBag, local SGD", clicks, optimizer=sgd, settings=LOCAL_SGD)
    yield ratings(
        "dense: Embedding, SparseAdam", models.Factorization, optimizer=optimizers.SPARSE_ADAM
    )


def _precisions() -> Iterator[Combination]:
    for precision in ("bf16", "bf16-master", "fp16"):
        settings = {"precision": precision}
        yield rows(f"{precision}: layers", settings=settings)
        yield pictures(f"{precision}: CNN with BatchNorm", models.convolutions, settings=settings)
        yield rows(f"{precision}: spectral norm", models.spectral, settings=settings)
    for precision in ("bf16", "bf16-master"):
        settings = FSDP | {"precision": precision}
        yield rows(f"{precision}: layers, fsdp", settings=settings)
        yield pictures(
            f"{precision}: transformer, fsdp", models.VisionTransformer, settings=settings
        )
    yield rows("bf16: layers, local SGD", settings=LOCAL_SGD | {"precision": "bf16"})
    yield Combination(
        "bf16-master: LSTM", models.Recurrent, data.texts, data.classify,
        settings={"precision": "bf16-master"},
    )  # fmt: skip
    yield Combination(
        "bf16-master: LSTM, fsdp", models.Recurrent, data.texts, data.classify,
        settings=FSDP | {"precision": "bf16-master"},
    )  # fmt: skip
    yield rows(
        "bf16-master: spectral norm, fsdp",
        models.spectral,
        settings=FSDP | {"precision": "bf16-master"},
    )


def _compiled_and_read() -> Iterator[Combination]:
    compiled = {"compile": True}
    yield rows("compile: layers", models.mlp, settings=compiled)
    yield rows("compile: layers, fsdp", settings=compiled | FSDP)
    yield rows("compile: layers, local SGD", models.mlp, settings=compiled | LOCAL_SGD)
    yield pictures("compile: CNN with BatchNorm", models.convolutions, settings=compiled)
    cnn = partial(models.convolutions, "group")
    workers = {"read.workers": 2}
    read = partial(Combination, model=cnn, data=data.Augmented, loss=data.classify)
    yield read("workers: augmentation, none")
    yield read("workers: augmentation, two", settings=workers)
    yield read("workers: augmentation, two, fsdp", settings=workers | FSDP)


COMBINATIONS = {each.name: each for each in all_combinations()}


def find(name: str) -> Combination:
    """Return a combination by its name."""
    return pairs.line(name) if name.startswith(pairs.PREFIX) else COMBINATIONS[name]
