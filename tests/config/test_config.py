"""Settings: one definition, three ways to give them, and an error with its fix for each mistake."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import handover
from paceline.config import BatchConfig, LrConfig, RunConfig, config_from_words
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
        (["--batch.lane", "3"], "no flag --batch.lane", "did you mean --batch.lanes?"),
        (["seed=three"], "seed='three' is not of type int", "a whole number"),
        (["exact=maybe"], "exact='maybe'", "true or false"),
        (["lr.base=fast"], "lr.base='fast'", "a number"),
        (["lr.rule=linaer"], "lr.rule=linaer is not a choice", "did you mean linear?"),
        (["--seed", "three"], "cannot read the flags --seed three", "--help"),
        (["batch.lanes=0"], "batch.lanes=0 is too small", "1 or more"),
        (["batch.global_size=3"], "smaller than batch.lanes=4", "batch.lanes=3 or less"),
        (["lr.base=-1"], "not a learning rate", ">= 0"),
        (["epochs=0"], "epochs=0", "1 or more"),
        (["name=a/b"], "cannot be a folder", "a plain word"),
        (["clip_norm=-1"], "negative", "clip_norm=0"),
        (["compression=fp16"], "exact=true cannot hold", "exact=false"),
        (["7"], "unexpected word '7'", "key=value"),
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
        ("seed = 'three'", "seed='three' is not of type int"),
        ("seed = true", "seed=True is not of type int"),
        ("seed = 1.5", "seed=1.5 is not of type int"),
        ("exact = 1", "exact=1 is not of type bool"),
        ("name = 3", "name=3 is not of type str"),
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
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert left.value.code == 0
    assert "Micro-batches one step is always cut into" in said
    assert "key=value" in said


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
