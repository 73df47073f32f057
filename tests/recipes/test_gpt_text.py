"""What a GPT reads: bytes, characters or tokens; how many the model then has; and that a run can say what they stand for."""

from __future__ import annotations

import json

import fsspec
import numpy
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from paceline.data.pack import PackRequest, pack
from paceline.data.vocabulary import Bytes, Characters, Tokens, train_tokenizer
from paceline.errors import ConfigError, DataError
from paceline.recipes.corpus import encode_text, make_vocabulary, split_rows, text_in_memory
from paceline.recipes.gpt_config import design_of, load_initial_weights, with_vocabulary
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
    assert (config.level, config.vocab_size) == (level, tokens)
    assert design_of(config).vocab_size == tokens
    numbers = encode_text(config.data_folder, found.vocabulary)
    assert found.vocabulary.decode(list(numbers)) == TEXT
    rows = len(split_rows(numbers, 8))
    assert (len(found.train), len(found.test)) == (rows - rows // 20, rows // 20)
    inputs, targets = found.train.gather(numpy.array([0, 1]), (0, 0))
    read = [*inputs[0].tolist(), *targets[1].tolist()]
    assert read == [*numbers[:8], *numbers[9:17]]


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
    for name in ("vocabulary.json", *found.files):
        assert (run.root / name).stat().st_mode & 0o777 == 0o600


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


def test_ranks_train_one_tokenizer_and_the_same_bits(tmp_path):
    words = [*LEVELS["tokens"][0], f"data_folder={write(tmp_path, TEXT)}"]
    alone, both = (
        run_on_processes(digest_on_ranks, size, tmp_path, {}, {"words": words})[0]
        for size in (1, 2)
    )
    assert len(alone) == 64
    assert alone == both


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
    ("words", "other"),
    [
        (["level=characters"], "level=tokens"),
        (["level=tokens", "tokenizer=tokenizer.json"], "level=characters"),
    ],
)
def test_memory_and_pack_make_the_same_numbers(words, other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate((TEXT, "kurz", TEXT[::-1])):
        write(tmp_path / "texts", text, f"{number}.txt")
    write(tmp_path, train_tokenizer([TEXT], 270), "tokenizer.json")
    config, found = settled("texts", *words)
    request = PackRequest(("texts",), text=config.level, tokenizer=config.tokenizer, length=8)
    for part in ("train", "test"):
        index = pack(request, tmp_path / "sets" / part, workers=1)
    about = found.vocabulary.about()
    assert {name: index.about[name] for name in about} == about
    rows = split_rows(encode_text("texts", found.vocabulary), 8).long()
    assert index.samples == len(rows) == len(found.train) + len(found.test)
    streamed, sets = settled("sets", "data=shards")
    assert (streamed.level, streamed.vocab_size) == (config.level, config.vocab_size)
    assert sets.vocabulary == found.vocabulary
    assert sets.train.gather(numpy.array([2]), (0, 0))[0].tolist() == [rows[2, :-1].tolist()]
    for word, problem in (("context_length=4", " 8 .*context_length=4"), (other, "level=")):
        with pytest.raises(ConfigError, match=problem):
            settled("sets", "data=shards", word)


def test_sets_with_different_vocabularies_are_refused(tmp_path):
    for part, text in (("train", "abcabcabc"), ("test", "abdabdabd")):
        request = PackRequest((str(write(tmp_path, text)),), text="characters", length=4)
        pack(request, tmp_path / part, workers=1)
    with pytest.raises(DataError, match="different vocabularies"):
        settled(tmp_path, "data=shards")


@pytest.mark.parametrize("tokens", [300, 50304])
def test_a_model_may_have_more_tokens_than_the_text(tokens, tmp_path):
    assert settled(write(tmp_path, TEXT), f"vocab_size={tokens}")[0].vocab_size == tokens


REFUSED = [
    ("vocab_size=100", "256.*got 100", "remove vocab_size="),
    ("vocab_size=-1", "vocab_size .*got -1", "0 or more"),
    ("context_length=0", "context_length .*got 0", "1 or more"),
    ("level=words", "level .*'words'", "use one of"),
    ("level=tokens", "level=tokens", "train_tokenizer="),
    ("train_tokenizer=300", "train_tokenizer=300", "level=tokens"),
    ("level=tokens train_tokenizer=100", "train_tokenizer .*got 100", "257 or more"),
    ("level=tokens train_tokenizer=300 tokenizer=x", "tokenizer", "one of them"),
    ("level=tokens train_tokenizer=300 data=shards", "data=shards", "remove it"),
    ("level=tokens tokenizer=nowhere.json", "nowhere.json", "tokenizer.json"),
    ("heads=3", "embedding_dim=16 .*heads=3", "embedding_dim=15"),
    ("heads=16 positions=rotary", "got 1", "even multiple"),
    ("dropout=1", "dropout .*got 1.0", "dropout=0.1"),
    ("windows=overlapping data=shards", "data=shards", ""),
]


@pytest.mark.parametrize(("words", "problem", "fix"), REFUSED)
def test_settings_that_cannot_be_are_refused(words, problem, fix, tmp_path):
    with pytest.raises((ConfigError, DataError), match=problem) as error:
        design_of(settled(write(tmp_path, TEXT), *words.split())[0])
    assert fix in error.value.fix


@pytest.mark.parametrize(
    ("content", "level", "problem"),
    [
        (b"abc\xff", "characters", "text .*byte 3 is 0xff"),
        (b"", "characters", "no text"),
        (None, "bytes", "text: No such file"),
        (None, "characters", "text: No such file"),
        (b"", "bytes", "no text"),
    ],
)
def test_text_that_is_none_is_named(content, level, problem, tmp_path):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(DataError, match=problem):
        settled(tmp_path / "text", f"level={level}")


def test_weights_of_another_vocabulary_want_their_tokenizer():
    config = tiny("init_from=gpt2", "vocab_size=50257")
    with pytest.raises(ConfigError, match="50257.* 256 ") as error:
        with_vocabulary(config, Bytes())
    assert "level=tokens" in error.value.fix
    assert with_vocabulary(config, Tokens(b"", 50257)).vocab_size == 50257


def test_the_tokenizer_beside_the_weights_is_taken(tmp_path):
    design = Design(Shape(1, 2, 16), vocab_size=280, context_length=8)
    write_gpt2(design, GPT(design).state_dict(), tmp_path / "hub")
    write(tmp_path / "hub", train_tokenizer([TEXT], 270), "tokenizer.json")
    words = [f"init_from={tmp_path}/hub", f"data_folder={write(tmp_path, TEXT)}"]
    config, _ = load_initial_weights(tiny(*words, "level=tokens"))
    assert config.tokenizer == f"{tmp_path}/hub/tokenizer.json"
    found = load_text(config, World()).vocabulary
    assert (found.size, with_vocabulary(config, found).vocab_size) == (270, 280)
    own = tiny(*words, "level=tokens", "train_tokenizer=260")
    assert load_initial_weights(own)[0].tokenizer == ""
    with pytest.raises(ConfigError, match="280.* 256 "):
        with_vocabulary(load_initial_weights(tiny(*words))[0], Bytes())


def test_a_tokenizer_is_read_from_an_address_too(tmp_path):
    write(tmp_path, train_tokenizer([TEXT], 270), "tokenizer.json")
    text, tokenizer = str(write(tmp_path, TEXT)), str(tmp_path / "tokenizer.json")
    request = PackRequest((text,), tokenizer=tokenizer, length=8)
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
    with pytest.raises(ConfigError, match="'z' .* 3 "):
        Characters("abc").encode("abz")
    words = Tokenizer(models.WordLevel({"ein": 0, "Satz": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    known = Tokens.of(words.to_str().encode())
    assert (known.size, known.end) == (3, -1)
    assert known.first_unencodable("ein Satz") == ""
    assert known.first_unencodable("ein Wort") == "W"
    assert isinstance(make_vocabulary("", "bytes", "", 0), Bytes)


def test_rows_may_begin_anywhere_and_the_last_tenth_is_held_out(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(100)))
    train, test = text_in_memory(str(tmp_path / "text"), 4, windows="overlapping")
    assert len(train) == 86
    for data, numbers, begins in ((train, [0, 85, 7], [0, 85, 7]), (test, [0, 1], [90, 94])):
        rows = data.source.gather(numpy.array(numbers), (0, 0))[0].tolist()
        assert rows == [[*range(begin, begin + 5)] for begin in begins]
    with pytest.raises(DataError, match="95"):
        text_in_memory(str(tmp_path / "text"), 95, windows="overlapping")


def test_of_a_few_rows_one_is_held_out(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(13)))
    train, test = text_in_memory(str(tmp_path / "text"), 4)
    assert (len(train), len(test)) == (2, 1)
    with pytest.raises(DataError, match="none to hold out"):
        text_in_memory(str(tmp_path / "text"), 12)
