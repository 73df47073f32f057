"""A trained GPT writes from its run alone: what it learned, the same for the same seed, from a checkpoint that is good."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest
import torch

from paceline.checkpoint.manifest import _CHECKSUM, _end
from paceline.cli.main import run_verb
from paceline.data.vocabulary import Bytes, Characters
from paceline.errors import TrainingError
from paceline.recipes.gpt_model import GPT, Design, Shape
from paceline.recipes.gpt_sample import (
    Sampling,
    _generator,
    _sample,
    decode_stream,
    draw,
    load_generator,
    window_begin,
)
from support.program import Done
from support.tiny_gpt import train, write

ROUND = "abcdefg"  # no divisor of the length: places say nothing of letters


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with runs that know a few letters by heart, and one that is no GPT; their text is gone."""
    folder = tmp_path_factory.mktemp("runs")
    text = write(folder, ROUND * 100)
    words = [f"data_folder={text}", f"runs={folder}/runs", "lr.base=0.03", "steps=30"]
    train(*words, "name=characters", "level=characters", "checkpoint.every=10steps")
    train(*words, "name=tokens", "level=tokens", "train_tokenizer=258", "positions=rotary")
    train(*words, "name=wide", "vocab_size=300", "steps=1")
    text.unlink()
    shutil.copytree(folder / "runs/wide", folder / "runs/toy")
    return folder


@pytest.fixture
def sample(trained, tmp_path, monkeypatch, capsys):
    """Run the verb in this process, in a copy of the folder."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)

    def run(*words):
        capsys.readouterr()
        return Done(run_verb(["sample", *map(str, words)]), *capsys.readouterr())

    return run


@pytest.mark.parametrize("run", ["characters", "tokens"])
def test_it_writes_what_it_learned_further_than_it_looks_back(sample, run):
    done = sample(f"runs/{run}", "--prompt", "abcdef", "--temperature", 0, "--length", 20)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(2 * ROUND + "abcde")
    assert set(done.out) == {*ROUND, "\n"}


def test_the_same_seed_writes_the_same(sample):
    def written(*words):
        done = sample("runs/characters", "--prompt", "ab", "--length", 30, "--json", *words)
        facts = json.loads(done.out)
        assert facts["where"].endswith(f"step-{facts['step']:09d}")
        (text,) = facts["texts"]
        return text

    wild = ("--temperature", 3, "--top-k", 0)
    assert written(*wild, "--seed", 1) == written(*wild, "--seed", 1)
    assert written(*wild, "--seed", 1) != written(*wild, "--seed", 2)
    assert written("--temperature", 3, "--top-k", 1) == written("--temperature", 0)
    assert len(written(*wild, "--step", 10)) == 30


def test_a_damaged_checkpoint_is_skipped_unless_it_was_asked_for(sample, tmp_path):
    part = next((tmp_path / "runs/characters/checkpoints/step-000000030").glob("*.safetensors"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    done = sample("runs/characters", "--prompt", "ab", "--json")
    assert json.loads(done.out)["step"] == 20
    assert "skipped: " in done.err
    asked = sample("runs/characters", "--prompt", "ab", "--step", 30)
    assert (asked.code, asked.out) == (3, "")
    assert "fix: use " in asked.err


def test_tokens_that_stand_for_nothing_are_never_drawn(sample):
    generator = load_generator("runs/wide")
    assert generator.model.design.vocab_size == 300
    choice = Sampling(temperature=50.0, top_k=0)
    drawn = draw(generator.model, [1, 2], generator.vocabulary.size, choice)
    assert max(next(drawn)[0] for _ in range(300)) < 256


def rewrite(path, changes):
    """Replace words of manifests, under a right checksum."""
    for manifest in path.rglob("manifest.json"):
        body = manifest.read_bytes().rpartition(_CHECKSUM)[0]
        for old, new in changes.items():
            body = body.replace(b'"%s"' % old, b'"%s"' % new)
        manifest.write_bytes(body + _end(body))


KNOWN = ["runs/characters", "--prompt", "ab"]
REFUSED = [
    (["runs/nowhere", "--prompt", "x"], "runs/nowhere", "did you mean"),
    (["runs/toy", "--prompt", "x"], "runs/toy", "paceline train gpt"),
    (["runs/old", "--prompt", "ab"], "older version", ""),
    (
        ["runs/characters/checkpoints", "--prompt", "x"],
        "runs/characters/checkpoints",
        "config.toml",
    ),
    (["runs/characters", "--prompt", "x"], "'x'", "remove it"),
    (["runs/characters", "--prompt", "ab\udcff"], "UTF-8", "encoding"),
    (["runs/characters"], "--prompt", "--prompt TEXT"),
    (["runs/characters", "--prompt", ""], "--prompt", "--prompt"),
    ([], "RUN", "paceline sample RUN"),
    ([*KNOWN, "--length", "0"], "at least 1, got 0", "1 or more"),
    ([*KNOWN, "--count", "0"], "at least 1, got 0", "1 or more"),
    ([*KNOWN, "--temperature", "-1"], "got -1.0", "0.8"),
    ([*KNOWN, "--temperature", "nan"], "got nan", "0.8"),
    ([*KNOWN, "--top-k", "-3"], "got -3", "0 for all"),
    ([*KNOWN, "--step", "7"], "step 7", "10, 20, 30"),
]


@pytest.mark.parametrize(("words", "problem", "fix"), REFUSED)
def test_what_cannot_be_written_is_refused(sample, tmp_path, words, problem, fix):
    rewrite(tmp_path / "runs/toy", {b"positions": b"elsewhere"})
    shutil.copytree("runs/characters", "runs/old")
    rewrite(tmp_path / "runs/old", {b"context_length": b"length", b"vocab_size": b"tokens"})
    done = sample(*words)
    assert (done.code, done.out) == (2, "")
    assert problem in done.err
    assert fix in done.err.partition("fix: ")[2]


def first(model, prompt, choice, count=1, tokens=30):
    """Return so many tokens of every text that is drawn."""
    drawn = itertools.islice(draw(model, prompt, 20, choice, count), tokens)
    return [list(text) for text in zip(*drawn, strict=True)]


@torch.no_grad()
def read_anew(model, numbers, choice, tokens=30):
    """Return the tokens that come after numbers, with nothing remembered."""
    numbers, generator = list(numbers), _generator(choice.seed, 0)
    for _ in range(tokens):
        window = numbers[window_begin(len(numbers), model.design.context_length) :]
        numbers.append(_sample(model(torch.tensor([window]))[0, -1].double(), choice, generator))
    return numbers[-tokens:]


@pytest.mark.parametrize("prompt", [1, 7, 8, 31])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_kv_cache_gives_what_the_whole_window_gives(positions, prompt):
    torch.manual_seed(prompt)
    shape = Shape(2, 2, 16)
    model = GPT(Design(shape, vocab_size=20, context_length=8, positions=positions)).eval()
    for value in model.parameters():
        value.data.add_(torch.randn_like(value), alpha=0.2)  # else what was before matters little
    numbers = torch.randint(20, (prompt,)).tolist()
    for choice in (Sampling(temperature=0), Sampling(temperature=3.0, top_k=0, seed=2)):
        assert first(model, numbers, choice) == [read_anew(model, numbers, choice)]
    assert len(set(read_anew(model, numbers, choice))) > 5


@pytest.mark.parametrize("length", [1, 2, 3, 4, 8, 30])
def test_the_window_moves_by_a_quarter_and_never_looks_back_further_than_the_model(length):
    begins = [window_begin(count, length) for count in range(1, 100)]
    seen = [count - begin for count, begin in enumerate(begins, start=1)]
    assert begins == sorted(begins)
    assert all(shown == count for count, shown in enumerate(seen[:length], start=1))
    assert all(length * 3 / 4 <= shown <= length for shown in seen[length:])
    moves = {after - before for before, after in itertools.pairwise(begins)}
    assert moves <= {0, max(1, length // 4)}


def test_texts_written_side_by_side_differ_and_are_those_of_the_seed():
    torch.manual_seed(5)
    model = GPT(Design(Shape(1, 2, 16), vocab_size=20, context_length=6)).eval()
    wild = Sampling(temperature=2.0, top_k=0, seed=3)
    several = first(model, [3], wild, count=3)
    assert len({tuple(text) for text in several}) == 3
    assert several == first(model, [3], wild, count=3)
    assert several[:1] == first(model, [3], wild)
    assert first(model, [3], Sampling(0.0), count=2) == 2 * first(model, [3], Sampling(0.0))


def test_several_texts_are_shown_one_below_the_other(sample):
    words = ["--prompt", "abc", "--temperature", "0", "--length", "4", "--count", "2"]
    done = sample("runs/characters", *words)
    assert (done.code, done.out) == (0, "--- 1 of 2\nabcdefg\n--- 2 of 2\nabcdefg\n")
    assert list(map(len, json.loads(sample("runs/characters", *words, "--json").out)["texts"])) == [
        4,
        4,
    ]


def test_chances_follow_the_scores():
    generator = torch.Generator().manual_seed(0)
    scores = torch.tensor([0.5, 0.1, 0.4], dtype=torch.float64).log()

    def counts(choice):
        drawn = torch.tensor([_sample(scores, choice, generator) for _ in range(500)])
        return (torch.bincount(drawn, minlength=3) / 500).tolist()

    assert counts(Sampling(1.0, 0)) == pytest.approx([0.5, 0.1, 0.4], abs=0.08)
    assert counts(Sampling(1.0, 2)) == pytest.approx([5 / 9, 0, 4 / 9], abs=0.08)
    assert counts(Sampling(0.5, 0)) == pytest.approx([25 / 42, 1 / 42, 16 / 42], abs=0.08)
    assert counts(Sampling(0.0, 0)) == [1, 0, 0]
    with pytest.raises(TrainingError, match="not finite"):
        _sample(torch.tensor([float("nan")]), Sampling(), generator)


@pytest.mark.parametrize(
    ("vocabulary", "prompt", "drawn", "pieces"),
    [
        (Characters("abc"), [0], [1, 2, 0], ["b", "c", "a", ""]),
        (Bytes(), b"x", "é€z".encode(), ["é", "€", "z", ""]),
        (Bytes(), b"x", b"\xffz", ["\ufffdz", ""]),
        (Bytes(), b"x", b"z\xe2\x82", ["z", "\ufffd"]),
    ],
)
def test_characters_are_shown_when_they_are_whole(vocabulary, prompt, drawn, pieces):
    assert list(decode_stream(vocabulary, list(prompt), iter(drawn))) == pieces


def test_what_it_writes_orders_a_terminal_nothing(sample, monkeypatch):
    monkeypatch.setattr(
        "paceline.recipes.gpt_sample.draw", lambda *_: ([byte] for byte in b"a\tb\n\x1b[2Jc" * 100)
    )
    done = sample("runs/wide", "--prompt", "x", "--length", 9)
    assert done.out == "xa\tb\n\ufffd[2Jc\n"
