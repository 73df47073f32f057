"""GPT-2's weights in the layout of Hugging Face: the same scores both ways, and nothing else is taken for them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.cli.main import run_verb
from paceline.config import config_from_words
from paceline.errors import ConfigError, DataError
from paceline.recipes.gpt_config import GptConfig, design_of, load_initial_weights
from paceline.recipes.gpt_export import write_gpt2
from paceline.recipes.gpt_hf_weights import read_gpt2
from paceline.recipes.gpt_model import GPT, Design, Shape
from paceline.recipes.gpt_sample import load_generator
from support.program import Done
from support.tiny_gpt import tiny, train, write

DESIGN = Design(Shape(2, 4, 16), vocab_size=33, context_length=8)
PROMPT = torch.randint(33, (3, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A GPT-2 of transformers with random weights of a size that shows in the scores, in eval mode; and its folder."""
    model = transformers_gpt2(n_layer=2, n_head=4, n_embd=16, vocab_size=33, n_positions=8)
    folder = tmp_path_factory.mktemp("hub")
    model.save_pretrained(folder)
    return model, folder


def transformers_gpt2(**sizes):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    )
    scatter(model, 2)
    return model.eval()


def scatter(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.2)


def ours(place):
    design, tensors = read_gpt2(place)
    model = GPT(design)
    model.load_state_dict(tensors)
    return model.eval()


def old_style(model, folder):
    """Write what older versions did: no prefix, masks as buffers, and the head a second time."""
    tensors = {name: value.clone() for name, value in model.transformer.state_dict().items()}
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    tensors |= {f"h.{layer}.attn.bias": mask.clone() for layer in range(2)}
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


WAYS = {
    "folder": lambda model, folder: folder,
    "file": lambda model, folder: folder / "model.safetensors",
    "without prefix": lambda model, folder: (model.transformer.save_pretrained(folder), folder)[1],
    "old": old_style,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_their_weights_give_their_scores_here(theirs, way, tmp_path):
    model, folder = theirs
    place = way(model, shutil.copytree(folder, tmp_path / "hub"))
    with torch.no_grad():
        torch.testing.assert_close(ours(place)(PROMPT), model(PROMPT).logits, rtol=0, atol=1e-5)


def test_our_weights_give_our_scores_there_and_are_read_with_the_same_bits(theirs, tmp_path):
    model, out = GPT(DESIGN).eval(), tmp_path / "out"
    scatter(model, 3)
    write_gpt2(model.design, model.state_dict(), out)
    with torch.no_grad():
        logits = loaded(theirs, out)(PROMPT).logits
        torch.testing.assert_close(logits, model(PROMPT), rtol=0, atol=1e-5)
    modes = {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert modes == {"config.json": 0o600, "model.safetensors": 0o600}
    design, tensors = read_gpt2(out)
    assert design == DESIGN
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items())
    assert tensors.keys() == model.state_dict().keys()


def test_half_weights_become_whole(theirs, tmp_path):
    folder = shutil.copytree(theirs[1], tmp_path / "hub")
    whole = load_file(folder / "model.safetensors")
    tensors = {name: value.bfloat16() for name, value in whole.items()}
    save_file(tensors, folder / "model.safetensors")
    found = read_gpt2(folder)[1]
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert torch.equal(found["embedding.weight"], tensors["transformer.wte.weight"].float())


def said(**changes):
    """Change config.json; None takes an entry out."""

    def change(folder):
        tree = json.loads((folder / "config.json").read_bytes()) | changes
        (folder / "config.json").write_text(
            json.dumps({name: value for name, value in tree.items() if value != ...})
        )

    return change


def held(**changes):
    """Change tensors; None takes one out. A dot is written as two underscores."""

    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        for name, value in changes.items():
            full = name.replace("__", ".")
            tensors.pop(full) if value is None else tensors.update({full: value})
        save_file(tensors, folder / "model.safetensors")

    return change


def bytes_of(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def renamed(name):
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


REFUSED = [
    (said(model_type="llama"), "'llama'", "save_pretrained"),
    (said(model_type=...), "model_type None", "save_pretrained"),
    (said(activation_function="relu"), "activation_function='relu'", "'gelu_new'"),
    (said(layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06", "1e-05"),
    (said(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True", "False"),
    (said(add_cross_attention=True), "add_cross_attention=True", "False"),
    (said(n_inner=32), "n_inner=32", "64"),
    (said(n_inner=[3]), "n_inner=", "64"),
    (said(n_layer="two"), "n_layer .*'two'", "save_pretrained"),
    (said(n_head=3), "n_embd=16.*n_head=3", "save_pretrained"),
    (said(n_layer=3), "h.2.ln_1.weight .* 8 ", "save_pretrained"),
    (said(n_layer=1), "h.1.attn.c_attn.bias", "save_pretrained"),
    (said(vocab_size=34), r"wte.weight .*\[33, 16\].*\[34, 16\]", "save_pretrained"),
    (said(tie_word_embeddings=False), "lm_head.weight", "tie_word_embeddings"),
    (held(lm_head__weight=torch.ones(33, 16)), "lm_head.weight", "tie_word_embeddings"),
    (held(transformer__ln_f__bias=None), "ln_f.bias", "save_pretrained"),
    (held(score__weight=torch.ones(2, 16)), "score.weight", "save_pretrained"),
    (held(transformer__h__0__mlp__c_fc__weight=torch.ones(64, 16)), r"\[64, 16\].*\[16, 64\]", "save_pretrained"),
    (held(transformer__ln_f__bias=torch.ones(16, dtype=torch.int32)), "ln_f.bias .*int32", "save_pretrained"),
    (bytes_of("config.json", b"{"), "config.json", "save_pretrained"),
    (bytes_of("config.json", b"[1]"), "model_type None", "save_pretrained"),
    (bytes_of("model.safetensors", b"\x80\x04K\x01."), "safetensors", "save_pretrained"),
    (lambda folder: (folder / "config.json").unlink(), "config.json", "save_pretrained"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors", "save_pretrained"),
    (renamed("pytorch_model.bin"), "model.safetensors", "a pickle is never read"),
    (renamed("model.safetensors.index.json"), "model.safetensors", "max_shard_size"),
]  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "hub"
    write_gpt2(DESIGN, GPT(DESIGN).state_dict(), folder)
    return folder


@pytest.mark.parametrize(("change", "problem", "fix"), REFUSED)
def test_what_is_not_such_a_gpt_2_is_named(change, problem, fix, written, tmp_path):
    change(shutil.copytree(written, tmp_path / "hub"))
    with pytest.raises(DataError, match=f"(?s){problem}") as error:
        read_gpt2(tmp_path / "hub")
    assert fix in error.value.fix


def test_what_is_no_folder_of_weights_is_named(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.bin")
    for name in ("nowhere", "weights.bin"):
        with pytest.raises(DataError, match=name):
            read_gpt2(tmp_path / name)


@pytest.mark.parametrize(
    ("design", "problem"),
    [
        ({"positions": "rotary"}, "positions=rotary"),
        ({"activation": "relu2"}, "activation=relu2"),
        ({"norm": "rms"}, "norm=rms"),
        ({"bias": False}, "bias=false"),
    ],
)
def test_a_design_that_gpt_2_has_not_is_not_written(design, problem, tmp_path):
    other = Design(Shape(1, 2, 8), 5, 4, **design)
    with pytest.raises(ConfigError, match=problem):
        write_gpt2(other, GPT(other).state_dict(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over_and_weights_of_another_model_are_not_written(written, tmp_path):
    with pytest.raises(ConfigError, match="hub"):
        write_gpt2(DESIGN, GPT(DESIGN).state_dict(), written)
    with pytest.raises(ConfigError, match="norm.bias"):
        write_gpt2(DESIGN, {}, tmp_path / "other")


@pytest.fixture(scope="module")
def runs(theirs, tmp_path_factory):
    """Runs that were saved: of tokens, from the weights of transformers without a change, and of a design that GPT-2 has not."""
    folder = tmp_path_factory.mktemp("trained")
    text = write(folder, "words and words again " * 40)
    words = [f"data_folder={text}", f"runs={folder}/runs", "steps=2"]
    train(*words, "name=tokens", "level=tokens", "train_tokenizer=270", "checkpoint.every=1steps")
    train(*words, "name=rotary", "positions=rotary", "bias=false")
    wide = transformers_gpt2(n_layer=1, n_head=2, n_embd=16, vocab_size=256, n_positions=12)
    wide.save_pretrained(folder / "start")
    shape = [
        "layers=0",
        "heads=0",
        "embedding_dim=0",
        "context_length=128",
    ]  # nobody has given them
    words += [*shape, f"init_from={folder}/start", "lr.base=0", "weight_decay=0"]
    train(*words, "name=started")
    return folder, wide


@pytest.fixture
def export(runs, tmp_path, monkeypatch, capsys):
    """Export in this process, in a copy of the folder."""
    shutil.copytree(runs[0] / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)

    def run(name, *words):
        capsys.readouterr()
        code = run_verb(["ckpt", "export", name, "--as", "gpt2", *map(str, words)])
        return Done(code, *capsys.readouterr())

    return run


def loaded(theirs, folder):
    """Return what transformers make of a folder, without a tensor missing or too much."""
    model, facts = type(theirs[0]).from_pretrained(folder, output_loading_info=True)
    assert not any(facts.values()), facts
    return model.eval()


def test_a_run_is_exported_with_its_tokenizer(export, theirs):
    transformers = pytest.importorskip("transformers")
    done = export("runs/tokens", "hub")
    assert (done.code, done.err) == (0, "")
    assert {path.stat().st_mode & 0o777 for path in Path("hub").iterdir()} == {0o600}
    assert Path("hub").stat().st_mode & 0o777 == 0o700
    author, model = load_generator("runs/tokens"), loaded(theirs, "hub")
    tokenizer = transformers.AutoTokenizer.from_pretrained("hub")
    numbers = author.vocabulary.encode("words again").tolist()
    assert tokenizer("words again").input_ids == numbers
    assert tokenizer.decode(numbers) == "words again"
    assert tokenizer.eos_token_id == model.config.eos_token_id == author.vocabulary.end
    with torch.no_grad():
        prompt = torch.tensor([numbers[:8]])
        torch.testing.assert_close(model(prompt).logits, author.model(prompt), rtol=0, atol=1e-5)
    ours, copied = (Path(folder) / "tokenizer.json" for folder in ("runs/tokens", "hub"))
    assert ours.read_bytes() == copied.read_bytes()


def test_their_weights_come_back_out_of_a_run_as_they_were(export, theirs, runs):
    assert export("runs/started", "hub", "--json").code == 0
    again, before = loaded(theirs, "hub").state_dict(), runs[1].state_dict()
    assert all(torch.equal(value, before[name]) for name, value in again.items())
    assert not Path("hub/tokenizer.json").exists()
    kept = config_from_words(GptConfig, ["--config", "runs/started/config.toml"])
    assert (kept.layers, kept.heads, kept.embedding_dim) == (1, 2, 16)
    assert (kept.context_length, kept.vocab_size) == (12, 256)


def test_the_checkpoint_that_is_exported_is_good_or_the_one_asked_for(export):
    assert json.loads(export("runs/tokens", "one", "--json", "--step", 1).out)["step"] == 1
    assert export("runs/tokens/checkpoints/step-000000001", "two").code == 0
    for path in Path("one").iterdir():
        assert (Path("two") / path.name).read_bytes() == path.read_bytes()
    part = next(Path("runs/tokens/checkpoints/step-000000002").glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    facts = json.loads(export("runs/tokens", "three", "--json").out)
    assert (facts["step"], len(facts["passed_over"])) == (1, 1)
    asked = export("runs/tokens", "four", "--step", 2)
    assert (asked.code, asked.out, os.path.lexists("four")) == (3, "", False)


STEP = "runs/tokens/checkpoints/step-000000002"


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        ("runs/rotary hub", "positions=rotary, bias=false", "positions=learned"),
        ("runs/tokens full", "full", "another folder"),
        ("runs/tokens full/file", "full/file", "another folder"),
        ("runs/tokens .", ". exists", "another folder"),
        ("runs/tokens hub --force", "--force", "remove --force"),
        ("runs/tokens no/where", "folder no", "create it first"),
        ("runs/tokens s3://bucket/hub", "folder", "a path on this machine"),
        (f"runs/tokens {STEP}", "checkpoint", "never modified"),
        (f"runs/tokens {STEP}/hub", "checkpoint", "never modified"),
        ("runs/tokens", "OUT", "paceline ckpt export [RUN] OUT"),
        ("runs/tokens hub --as gpt3", "'gpt3'", "gpt2"),
    ],
)
def test_what_cannot_be_exported_is_refused(export, words, problem, fix):
    Path("full").mkdir()
    Path("full/file").touch()
    done = export(*words.split())
    assert (done.code, done.out) == (2, "")
    assert problem in done.err
    assert fix in done.err.partition("fix: ")[2]
    assert not os.path.lexists("hub")


def test_nothing_is_left_of_a_folder_that_cannot_be_written(export, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    done = export("runs/tokens", "hub")
    assert (done.code, sorted(os.listdir("."))) == (3, ["runs"])
    assert "hub: No space left on device" in done.err


def test_settings_that_contradict_the_weights_are_refused(tmp_path):
    design = Design(Shape(1, 2, 16), vocab_size=256, context_length=12)
    write_gpt2(design, GPT(design).state_dict(), tmp_path / "hub")
    # as the run's own config.toml has them
    settled = ["layers=1", "heads=2", "embedding_dim=16", "context_length=12"]
    settled.append(f"init_from={tmp_path}/hub")
    assert design_of(load_initial_weights(tiny(*settled))[0]) == design
    for word, problem in {
        "size=124M": "size=124M",
        "layers=2": "layers=2.* 1",
        "vocab_size=300": "vocab_size=300.* 256",
        "context_length=16": "context_length=16.* 12",
        "norm=rms": "norm=rms.* layer",
        "bias=false": "bias=False.* True",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            load_initial_weights(tiny(*settled, word))
