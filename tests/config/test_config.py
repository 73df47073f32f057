"""Settings: one definition, three ways to give them, and an error with its fix for each mistake."""

import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import handover
from paceline.config import BatchConfig, LrConfig, RunConfig, config_from_words
from paceline.config.help import field_helps
from paceline.config.renamed import RENAMED
from paceline.config.values import field_types, flatten, from_toml, to_toml, with_settings
from paceline.errors import ConfigError


def read(*words, **more):
    return config_from_words(RunConfig, words, **more)


def test_words_flags_and_a_file_say_the_same_thing(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("seed = 3\nexact = false\n[batch]\nlanes = 8\n[lr]\nbase = 1\n")
    expected = RunConfig(seed=3, exact=False, batch=BatchConfig(lanes=8), lr=LrConfig(base=1.0))
    assert read("--config", str(file)) == expected
    assert read("seed=3", "exact=false", "batch.lanes=8", "lr.base=1") == expected
    assert read("--seed", "3", "--no-exact", "--batch.lanes", "8", "--lr.base=1") == expected
    assert read(f"--config={file}", "seed=4", "--batch.lanes", "2") == RunConfig(
        seed=4, exact=False, batch=BatchConfig(lanes=2), lr=LrConfig(base=1.0)
    )


def test_flags_and_words_mix_in_any_order():
    assert read("--no-exact", "seed=3", "--epochs", "2", "batch.lanes=8") == RunConfig(
        seed=3, exact=False, epochs=2, batch=BatchConfig(lanes=8)
    )


def test_settings_of_the_launching_verb_win():
    assert read("seed=3", env={handover.SETTINGS: '{"seed": 9, "record.to": "x"}'}).seed == 9


def test_bare_words_stand_for_the_settings_that_are_named():
    found = read("5", "2", "seed=1", positional=("epochs", "checkpoint.every"))
    assert (found.epochs, found.checkpoint.every, found.seed) == (5, "2", 1)


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (["batch.lane=3"], "no setting 'batch.lane'", "did you mean batch.lanes?"),
        (["sede=3"], "no setting 'sede'", "did you mean seed?"),
        (["--batch.lane", "3"], "there is no flag --batch.lane", "did you mean --batch.lanes?"),
        (["seed=three"], "seed must be a whole number, got 'three'", "for example: seed=4"),
        (["exact=maybe"], "exact must be true or false, got 'maybe'", "for example: exact=true"),
        (["lr.base=fast"], "lr.base must be a number, got 'fast'", "for example: lr.base=0.5"),
        (
            ["lr.rule=linaer"],
            "lr.rule must be one of none, linear, sqrt; got 'linaer'",
            "did you mean linear?",
        ),
        (["--seed", "three"], "seed must be a whole number, got 'three'", "for example: seed=4"),
        (["--seed"], "--seed needs a value", "--help"),
        (["batch.lanes=0"], "batch.lanes must be at least 1, got 0", "1 or more"),
        (["batch.global_size=3"], "smaller than batch.lanes=4", "batch.lanes=3 or less"),
        (["lr.base=-1"], "lr.base must be a number >= 0, got -1.0", "lr.base=0.001"),
        (["epochs=0"], "epochs must be at least 1, got 0", "1 or more"),
        (["name=a/b"], "name='a/b' is not a folder name", "without slashes"),
        (["clip_norm=-1"], "clip_norm must be >= 0, got -1.0", "clip_norm=0"),
        (["compression=fp16"], "exact=true cannot hold", "exact=false"),
        (["7"], "unexpected argument '7'", "key=value"),
        (["--config", "/nowhere.toml"], "cannot read config file", "--config"),
    ],
)
def test_a_mistake_is_named_with_its_fix(words, problem, fix):
    with pytest.raises(ConfigError) as caught:
        read(*words)
    assert problem in caught.value.problem
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed = 'three'", "seed must be a whole number, got 'three'"),
        ("seed = true", "seed must be a whole number, got True"),
        ("seed = 1.5", "seed must be a whole number, got 1.5"),
        ("exact = 1", "exact must be true or false, got 1"),
        ("name = 3", "name must be a text, got 3"),
        ("batch = 3", "no setting 'batch'"),
        ("[batch]\nlane = 3", "no setting 'batch.lane'"),
        ("seed = ", "is not TOML"),
    ],
)
def test_a_mistake_in_a_file_is_named_too(tmp_path, text, problem):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match="(?s)" + problem.replace("'", ".")):
        read("--config", str(tmp_path / "c.toml"))


def test_a_script_can_add_settings_of_its_own():
    @dataclass(frozen=True)
    class Mine(RunConfig):
        width: int = 3
        """Width of the model."""

    assert config_from_words(Mine, ["width=5", "--seed", "2"]).width == 5


def test_help_says_every_setting_in_the_words_of_the_class(capsys):
    with pytest.raises(SystemExit) as left:
        read("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0
    assert "--batch.lanes N Micro-batches per step, on any number of ranks;" in text
    assert "--exact, --no-exact" in text
    assert "SETTING=VALUE" in text


def test_help_into_a_pipe_that_is_closed_ends_quietly():
    read_end, write_end = os.pipe()
    os.close(read_end)
    program = "from paceline.config import config_from_argv; config_from_argv()"
    words = [sys.executable, "-c", program, "--help"]
    done = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")


@given(st.text(), st.integers(), st.floats(allow_nan=False, min_value=0), st.booleans())
def test_any_config_reads_back_from_its_file_the_same(runs, seed, base, exact):
    import tomllib

    if not (base < float("inf")):
        return
    config = RunConfig(
        runs=runs.encode("utf-8", "ignore").decode(), seed=seed, exact=exact, lr=LrConfig(base=base)
    )
    assert with_settings(RunConfig(), from_toml(tomllib.loads(to_toml(config)))) == config


def test_every_field_has_its_help_text_and_a_value_of_its_type():
    names = [name for name, _ in flatten(RunConfig())]
    assert names == list(field_types(RunConfig))
    helps = field_helps(RunConfig)
    assert [name for name in names if not helps.get(name)] == []


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (["local_sgd.steps=4", "local_sgd.replicas=3"], "batch.lanes=4 is not a multiple of local_sgd.replicas=3", "local_sgd.replicas to one of 1, 2, 4"),
        (["local_sgd.steps=4", "parallel=fsdp"], "does not support parallel=fsdp", "local_sgd.steps=0"),
        (["local_sgd.steps=4", "capture=true"], "does not support CUDA graph capture", "capture=false"),
        (["local_sgd.steps=4", "compression=powersgd"], "local SGD sends weight differences", "compression=bf16"),
        (["local_sgd.steps=4", "precision=fp16"], "got fp16", "precision=bf16"),
        (["local_sgd.outer_lr=1"], "local_sgd.outer_lr=1.0 has no effect without local_sgd.steps", "local_sgd.steps=32"),
        (["local_sgd.steps=4", "local_sgd.outer_lr=0"], "must be above 0, got 0.0", "local_sgd.outer_lr=0.7"),
        (["local_sgd.steps=4", "local_sgd.outer_momentum=1"], "must be in [0, 1), got 1.0", "0.9"),
        (["shard_over=2"], "shard_over=2 needs parallel=fsdp, got parallel=ddp", "parallel=fsdp"),
        (["parallel=fsdp", "shard_over=1"], "the whole model on every rank", "shard_over=0"),
        (["parallel=fsdp", "capture=true"], "does not support CUDA graph capture", "capture=false"),
        (["parallel=fsdp", "precision=fp16"], "no gradient scaler", "precision=bf16"),
        (["parallel=fsdp", "compression=bf16"], "works only with parallel=ddp", "compression=none"),
        (["compression=bf16", "exact=false", "capture=auto"], "does not support CUDA graph capture", "capture=false"),
    ],
)  # fmt: skip
def test_settings_that_exclude_each_other_are_refused_with_a_fix(words, problem, fix):
    with pytest.raises(ConfigError) as caught:
        read(*words)
    assert problem in caught.value.problem
    assert fix in caught.value.fix


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_setting_name_is_refused_with_the_new_one(tmp_path, old, new):
    with pytest.raises(ConfigError) as caught:
        read(f"{old}=1")
    assert caught.value.fix == f"use {new}, its new name"
    group, _, leaf = old.partition(".")
    file = tmp_path / "config.toml"
    file.write_text(f"[{group}]\n{leaf} = 1\n")
    with pytest.raises(ConfigError) as caught:
        read("--config", str(file))
    assert caught.value.problem.endswith(
        f"written by an older version of Paceline: {old} is now {new}"
    )
    assert caught.value.fix == "rename it in that file"
    assert new in field_types(RunConfig)


def test_a_field_with_the_name_of_a_setting_and_another_type_is_refused():
    @dataclass(frozen=True)
    class Rate(RunConfig):
        lr: float = 0.1

    @dataclass(frozen=True)
    class Path(RunConfig):
        resume: str = "model.pt"

    @dataclass(frozen=True)
    class Longer(RunConfig):
        epochs: int = 90
        lr: LrConfig = field(default_factory=lambda: LrConfig(base=0.1))

    group = r"Rate.lr has the name of a group of settings of every run \(lr.base, ...\)"
    with pytest.raises(ConfigError, match=group) as refused:
        config_from_words(Rate, ["--lr", "0.5"])
    assert "rename the field, for example own_lr; or use its settings: config.lr.base" in str(
        refused.value
    )
    with pytest.raises(ConfigError, match="Path.resume has the name of a setting of every run"):
        config_from_words(Path, [])
    assert config_from_words(Longer, []).epochs == 90


def test_data_before_the_run_are_drawn_from_seeded_generators_unless_the_script_seeds(monkeypatch):
    import numpy
    import torch

    from paceline.config import config_from_argv

    def drawn(*words):
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        torch.seed()  # as at the start of a process
        numpy.random.set_bit_generator(numpy.random.MT19937())
        config_from_argv()
        return float(torch.rand(1)), float(numpy.random.rand())  # noqa: NPY002

    before = torch.get_rng_state(), numpy.random.get_bit_generator()
    try:
        assert drawn() == drawn() != drawn("seed=1")
        torch.manual_seed(3)
        numpy.random.seed(3)  # noqa: NPY002
        config_from_argv()
        assert torch.initial_seed() == 3
        assert numpy.random.rand() == numpy.random.RandomState(3).rand()  # noqa: NPY002
    finally:
        torch.set_rng_state(before[0])
        numpy.random.set_bit_generator(before[1])
