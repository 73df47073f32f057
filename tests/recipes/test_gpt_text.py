"""What a GPT reads: bytes, characters or tokens; how many the model then has; and that a run can say what they stand for."""

from __future__ import annotations

import json

import fsspec
import numpy
import pytest
from tokenizers import Tokenizer

from paceline.data.pack import PackRequest, pack
from paceline.data.vocabulary import Bytes, Characters, Tokens, train_tokenizer
from paceline.errors import ConfigError, DataError
from paceline.recipes.corpus import encode_text, make_vocabulary, split_rows, text_in_memory
from paceline.recipes.gpt_config import GptConfig, design_of, load_initial_weights, with_vocabulary
from paceline.recipes.gpt_export import write_gpt2
from paceline.recipes.gpt_model import GPT, Design, Shape
from paceline.recipes.gpt_text import load_text, load_vocabulary
from paceline.world.world import World
from support.processes import run_on_processes
from support.tiny_gpt import digest, tiny, train, write

TEXT = "Grüße an alle, die das lesen: ein Satz über Wörter und Zeichen.\n" * 8
LETTERS = "".join(sorted(set(TEXT)))
LEVELS = {
    "bytes": ([], 256),
    "characters": (["level=characters"], len(LETTERS)),
    "tokens": (["level=tokens", "train_tokenizer=270"], 270),
}


def settled(text, *words):
    """Return the settings after the text was read, and the text."""
    config = tiny(f"data_folder={text}", *words)
    found = load_text(config, World())
    return with_vocabulary(config, found.vocabulary), found


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_reads_the_same_text(level, tmp_path):
    words, tokens = LEVELS[level]
    config, found = settled(write(tmp_path, TEXT), *words)
    assert (config.level, config.vocab_size, design_of(config).vocab_size) == (
        level,
        tokens,
        tokens,
    )
    numbers = encode_text(config.data_folder, found.vocabulary)
    assert found.vocabulary.decode(list(numbers)) == TEXT
    rows = len(split_rows(numbers, 8))
    assert (len(found.train), len(found.test)) == (rows - rows // 20, rows // 20)
    inputs, targets = found.train.gather(numpy.array([0, 1]), (0, 0))
    assert found.vocabulary.decode(
        [*inputs[0].tolist(), *targets[1].tolist()]
    ) == found.vocabulary.decode(list(numbers[:8]) + list(numbers[9:17]))


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_keeps_what_its_numbers_stand_for(level, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train(*LEVELS[level][0], f"data_folder={write(tmp_path, TEXT)}")
    (tmp_path / "text").unlink()
    config = tiny("--config", run.config)
    assert (config.level, config.vocab_size) == (level, LEVELS[level][1])
    found = load_vocabulary(run, config)
    assert found.level == level
    assert found.decode(found.encode("alle Zeichen").tolist()) == "alle Zeichen"
    kept = {"vocabulary.json", *found.files}
    assert {
        path.name: oct(path.stat().st_mode)[-3:] for path in run.root.iterdir() if path.name in kept
    } == dict.fromkeys(kept, "600")


def test_a_run_of_bytes_from_before_is_known_and_others_must_say_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train(f"data_folder={write(tmp_path, TEXT)}")
    run.vocabulary.unlink()
    assert load_vocabulary(run, tiny("vocab_size=256")) == Bytes()
    for words in (["vocab_size=256", "level=characters"], ["vocab_size=80"]):
        with pytest.raises(DataError, match="stores no vocabulary"):
            load_vocabulary(run, tiny(*words))
    run.vocabulary.write_text("{")
    with pytest.raises(DataError, match="cannot read .*vocabulary.json"):
        load_vocabulary(run, tiny("vocab_size=256"))


def digest_on_ranks(words):
    run = train(*words)
    return digest(run) if run.events.exists() else ""


def test_ranks_train_one_tokenizer_and_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*LEVELS["tokens"][0], f"data_folder={write(tmp_path, TEXT)}"]
    alone = digest_on_ranks(words)
    assert len(alone) == 64
    assert run_on_processes(digest_on_ranks, 2, tmp_path, {}, {"words": words})[0] == alone


def test_a_run_does_not_go_on_with_another_vocabulary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["level=characters", f"data_folder={write(tmp_path, TEXT)}"]
    run = train(*words)
    before = run.vocabulary.read_bytes()
    write(tmp_path, TEXT.replace("G", "H"))
    with pytest.raises(ConfigError, match="another vocabulary"):
        train(*words, "steps=4")
    assert run.vocabulary.read_bytes() == before
    train(*words, "steps=4", "resume=changed")
    assert "H" in json.loads(run.vocabulary.read_text())["characters"]


@pytest.mark.parametrize(
    "words", [["level=characters"], ["level=tokens", "tokenizer=tokenizer.json"]]
)
def test_memory_and_pack_make_the_same_numbers(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate((TEXT, "kurz", TEXT[::-1])):
        write(tmp_path / "texts", text, f"{number}.txt")
    write(tmp_path, train_tokenizer([TEXT], 270), "tokenizer.json")
    config, found = settled("texts", *words)
    index = pack(
        PackRequest(("texts",), text=config.level, tokenizer=config.tokenizer, length=8),
        tmp_path / "set",
        workers=1,
    )
    assert {
        name: index.about[name] for name in found.vocabulary.about()
    } == found.vocabulary.about()
    assert (
        index.samples
        == len(split_rows(encode_text("texts", found.vocabulary), 8))
        == len(found.train) + len(found.test)
    )
    for part in ("train", "test"):
        pack(
            PackRequest(("texts",), text=config.level, tokenizer=config.tokenizer, length=8),
            tmp_path / "sets" / part,
            workers=1,
        )
    streamed, sets = settled("sets", "data=shards")
    assert (streamed.level, streamed.vocab_size, sets.vocabulary) == (
        config.level,
        config.vocab_size,
        found.vocabulary,
    )
    rows = split_rows(encode_text("texts", found.vocabulary), 8).long()
    assert sets.train.gather(numpy.array([2]), (0, 0))[0].tolist() == [rows[2, :-1].tolist()]
    with pytest.raises(ConfigError, match="sequences of 8 tokens exceed context_length=4"):
        settled("sets", "data=shards", "context_length=4")
    with pytest.raises(ConfigError, match="level="):
        settled(
            "sets",
            "data=shards",
            "level=characters" if config.level == "tokens" else "level=tokens",
        )


def test_sets_with_different_vocabularies_are_refused(tmp_path):
    for part, text in (("train", "abcabcabc"), ("test", "abdabdabd")):
        pack(
            PackRequest((str(write(tmp_path, text)),), text="characters", length=4),
            tmp_path / part,
            workers=1,
        )
    with pytest.raises(DataError, match="different vocabularies"):
        settled(tmp_path, "data=shards")


@pytest.mark.parametrize("tokens", [300, 50304])
def test_a_model_may_have_more_tokens_than_the_text(tokens, tmp_path):
    assert settled(write(tmp_path, TEXT), f"vocab_size={tokens}")[0].vocab_size == tokens


REFUSED = [
    (["vocab_size=100"], "vocab_size must be at least 256, the bytes of the text, got 100", "remove vocab_size="),
    (["vocab_size=-1"], "vocab_size must be at least 0, got -1", "0 or more"),
    (["context_length=0"], "context_length must be at least 1, got 0", "1 or more"),
    (["level=words"], "level must be one of .*; got 'words'", "use one of"),
    (["level=tokens"], "level=tokens needs a tokenizer", "train_tokenizer="),
    (["train_tokenizer=300"], "train_tokenizer=300 needs level=tokens", "add level=tokens"),
    (["level=tokens", "train_tokenizer=100"], "train_tokenizer must be at least 257 .*, got 100", "257 or more"),
    (["level=tokens", "train_tokenizer=300", "tokenizer=x"], "two tokenizers", "one of them"),
    (["level=tokens", "train_tokenizer=300", "data=shards"], "does not apply to data=shards", "remove it"),
    (["level=tokens", "tokenizer=nowhere.json"], "cannot read nowhere.json as a tokenizer", "tokenizer.json"),
    (["heads=3"], "embedding_dim=16 is not a multiple of heads=3", "set embedding_dim=15"),
    (["heads=16", "positions=rotary"], "needs an even head size, got 1", "even multiple"),
    (["dropout=1"], "dropout must be at least 0 and below 1, got 1.0", "dropout=0.1"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "problem", "fix"), REFUSED)
def test_settings_that_cannot_be_are_refused(words, problem, fix, tmp_path):
    with pytest.raises((ConfigError, DataError), match=problem) as error:
        design_of(settled(write(tmp_path, TEXT), *words)[0])
    assert fix in error.value.fix


@pytest.mark.parametrize(
    ("content", "level", "problem"),
    [
        (b"abc\xff", "characters", "text is not UTF-8 text: byte 3 is 0xff"),
        (b"", "characters", "there is no text"),
        (None, "bytes", "cannot read .*text: No such file"),
        (None, "characters", "cannot read .*text: No such file"),
        (b"", "bytes", "there is no text"),
    ],
)
def test_text_that_is_none_is_named(content, level, problem, tmp_path):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(DataError, match=problem):
        settled(tmp_path / "text", f"level={level}")


def test_weights_of_another_vocabulary_want_their_tokenizer():
    config = tiny("init_from=gpt2", "vocab_size=50257")
    with pytest.raises(ConfigError, match="have 50257 tokens, the text has 256 bytes") as error:
        with_vocabulary(config, Bytes())
    assert "level=tokens" in error.value.fix
    assert (
        with_vocabulary(tiny("init_from=gpt2", "vocab_size=50257"), Tokens(b"", 50257)).vocab_size
        == 50257
    )


def test_the_tokenizer_beside_the_weights_is_taken(tmp_path):
    design = Design(Shape(1, 2, 16), vocab_size=280, context_length=8)
    write_gpt2(design, GPT(design).state_dict(), tmp_path / "hub")
    write(tmp_path / "hub", train_tokenizer([TEXT], 270), "tokenizer.json")
    words = [f"init_from={tmp_path}/hub", f"data_folder={write(tmp_path, TEXT)}"]
    config, _ = load_initial_weights(tiny(*words, "level=tokens"))
    assert config.tokenizer == f"{tmp_path}/hub/tokenizer.json"
    found = load_text(config, World()).vocabulary
    assert (found.size, with_vocabulary(config, found).vocab_size) == (270, 280)
    assert (
        load_initial_weights(tiny(*words, "level=tokens", "train_tokenizer=260"))[0].tokenizer == ""
    )
    with pytest.raises(ConfigError, match="have 280 tokens, the text has 256 bytes"):
        with_vocabulary(load_initial_weights(tiny(*words))[0], Bytes())


def test_a_tokenizer_is_read_from_an_address_too(tmp_path):
    write(tmp_path, train_tokenizer([TEXT], 270), "tokenizer.json")
    request = PackRequest(
        (str(write(tmp_path, TEXT)),), tokenizer=str(tmp_path / "tokenizer.json"), length=8
    )
    pack(request, tmp_path / "set", workers=1)
    files = fsspec.filesystem("memory")
    for part in ("train", "test"):
        files.put(f"{tmp_path}/set/", f"/sets/{part}/", recursive=True)
    config, _found = settled("memory://sets", "data=shards", f"read.cache={tmp_path}/cache")
    assert (config.level, config.vocab_size) == ("tokens", 270)
    files.pipe("/sets/test/tokenizer.json", b"{}")
    with pytest.raises(DataError, match="tokenizer.json has changed since it was written"):
        settled("memory://sets", "data=shards", f"read.cache={tmp_path}/cache")
    files.rm("/sets", recursive=True)


def test_a_vocabulary_says_what_it_lacks():
    with pytest.raises(ConfigError, match="'z' is not in the vocabulary of 3 characters"):
        Characters("abc").encode("abz")
    from tokenizers import models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"ein": 0, "Satz": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    known = Tokens.of(words.to_str().encode())
    assert (
        known.size,
        known.end,
        known.first_unencodable("ein Satz"),
        known.first_unencodable("ein Wort"),
    ) == (
        3,
        -1,
        "",
        "W",
    )
    assert isinstance(make_vocabulary("", "bytes", "", 0), Bytes)


def test_rows_may_begin_anywhere_and_the_last_tenth_is_held_out(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(100)))
    train, test = text_in_memory(str(tmp_path / "text"), 4, windows="overlapping")
    assert len(train) == 86
    assert train.source.gather(numpy.array([0, 85, 7]), (0, 0))[0].tolist() == [
        [*range(5)],
        [*range(85, 90)],
        [*range(7, 12)],
    ]
    assert test.source.gather(numpy.array([0, 1]), (0, 0))[0].tolist() == [
        [*range(90, 95)],
        [*range(94, 99)],
    ]
    with pytest.raises(DataError, match="fewer than one sequence of 95"):
        text_in_memory(str(tmp_path / "text"), 95, windows="overlapping")


def test_of_a_few_rows_one_is_held_out(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(13)))
    train, test = text_in_memory(str(tmp_path / "text"), 4)
    assert (len(train), len(test)) == (2, 1)
    with pytest.raises(DataError, match="none to hold out"):
        text_in_memory(str(tmp_path / "text"), 12)


def test_rows_of_shards_are_what_they_are():
    with pytest.raises(ConfigError, match="does not apply to data=shards"):
        GptConfig(windows="overlapping", data="shards")
