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


MISTAKES = {
    # what is typed: what the refusal names, and its fix
    "batch.lane=3": ["'batch.lane'", "batch.lanes?"],
    "epoch=3": ["'epoch'", "epochs?"],
    "sede=3": ["'sede'", "seed?"],
    "--batch.lane 3": ["--batch.lane", "--batch.lanes?"],
    "--batch.lane=3": ["--batch.lane", "--batch.lanes?"],
    "--epoch 3": ["--epoch", "--epochs?"],
    "seed=three": ["seed", "'three'", "seed=4"],
    "seed=1.5": ["seed", "'1.5'", "seed=4"],
    "--seed three": ["seed", "'three'", "seed=4"],
    "--seed": ["--seed", "--help"],
    "exact=maybe": ["exact", "'maybe'", "exact=true"],
    "parallel=dpd": ["parallel", "none, ddp, fsdp", "'dpd'", "ddp?"],
    "lr.base=fast": ["lr.base", "'fast'", "lr.base=0.5"],
    "lr.base=-1": ["lr.base", "-1.0", "lr.base=0.001"],
    "lr.base=nan": ["lr.base", "nan", "lr.base=0.001"],
    "lr.rule=linaer": ["lr.rule", "none, linear, sqrt", "'linaer'", "linear?"],
    "batch.lanes=0": ["batch.lanes", "got 0", "1 or more"],
    "batch.global_size=3 batch.lanes=4": [
        "batch.global_size=3",
        "batch.lanes=4",
        "batch.lanes=3 or less",
    ],
    "epochs=0": ["epochs", "got 0", "epochs=1 or more"],
    "name=a/b": ["name='a/b'", "slashes"],
    "clip_norm=-1": ["clip_norm", "-1.0", "clip_norm=0"],
    "compression=fp16": ["compression=fp16", "exact=false"],
    "7": ["'7'", "key=value"],
    "seven": ["'seven'", "key=value"],
    "--config /nowhere.toml": ["/nowhere.toml", "--config"],
    "local_sgd.steps=4 local_sgd.replicas=3 batch.lanes=4": [
        "batch.lanes=4",
        "local_sgd.replicas=3",
        "1, 2, 4",
    ],
    "local_sgd.steps=4 parallel=fsdp": ["parallel=fsdp", "local_sgd.steps=0"],
    "local_sgd.steps=4 capture=true": ["local SGD", "capture=false"],
    "local_sgd.steps=4 compression=powersgd": ["local SGD", "compression=bf16"],
    "local_sgd.steps=4 precision=fp16": ["fp16", "precision=bf16"],
    "local_sgd.outer_lr=1": ["local_sgd.outer_lr=1.0", "local_sgd.steps=32"],
    "local_sgd.steps=4 local_sgd.outer_lr=0": ["0.0", "local_sgd.outer_lr=0.7"],
    "local_sgd.steps=4 local_sgd.outer_momentum=1": ["[0, 1)", "1.0", "0.9"],
    "shard_over=2": ["shard_over=2", "parallel=ddp", "parallel=fsdp"],
    "parallel=fsdp shard_over=1": ["shard_over=0"],
    "parallel=fsdp capture=true": ["capture=false"],
    "parallel=fsdp precision=fp16": ["precision=bf16"],
    "parallel=fsdp compression=bf16": ["parallel=ddp", "compression=none"],
    "compression=bf16 exact=false capture=auto": ["capture=false"],
}
IN_A_FILE = {
    "seed = 'three'": ["seed", "'three'"],
    "seed = true": ["seed", "True"],
    "seed = 1.5": ["seed", "1.5"],
    "exact = 1": ["exact", "got 1"],
    "name = 3": ["name", "got 3"],
    "batch = 3": ["'batch'"],
    "[batch]\nlane = 3": ["'batch.lane'", "batch.lanes?"],
    "[batch]\nlanes = 'four'": ["batch.lanes", "'four'"],
    "seed = ": ["c.toml", "TOML"],
    'name = "\xff"': ["c.toml", "TOML"],
}


def test_a_mistake_is_named_with_its_fix(tmp_path):
    file = tmp_path / "c.toml"
    cases = [(words.split(), parts) for words, parts in MISTAKES.items()]
    cases += [(["--config", str(file), text], parts) for text, parts in IN_A_FILE.items()]
    for words, parts in cases:
        if words[1:2] == [str(file)]:
            file.write_bytes(words.pop().encode("latin-1"))
        with pytest.raises(ConfigError) as caught:
            read(*words)
        said = f"{caught.value.problem}\n{caught.value.fix}"
        assert [part for part in parts if part not in said] == [], f"{words}: {said}"


def test_a_script_can_add_settings_of_its_own():
    @dataclass(frozen=True)
    class Mine(RunConfig):
        width: int = 3
        """Width of the model."""

    assert config_from_words(Mine, ["width=5", "--seed", "2"]).width == 5


def test_help_of_a_script_ends_it_with_code_0(capsys):
    with pytest.raises(SystemExit) as left:
        read("--help")
    assert left.value.code == 0
    assert capsys.readouterr().out.count("SETTING=VALUE") > 1


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


def test_an_old_setting_name_is_refused_with_the_new_one(tmp_path):
    file = tmp_path / "config.toml"
    for old, new in RENAMED.items():
        group, _, leaf = old.partition(".")
        file.write_text(f"[{group}]\n{leaf} = 1\n")
        for words in ([f"{old}=1"], ["--config", str(file)]):
            with pytest.raises(ConfigError) as caught:
                read(*words)
            assert old in caught.value.problem
            assert new in caught.value.problem + caught.value.fix
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

    with pytest.raises(ConfigError, match=r"(?s)Rate\.lr.*own_lr"):
        config_from_words(Rate, ["--lr", "0.5"])
    with pytest.raises(ConfigError, match=r"Path\.resume"):
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
