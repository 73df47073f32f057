"""GPT-2's weights in the layout of Hugging Face: the same scores both ways, and nothing else is taken for them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from recipes.tiny import tiny, train, write
from safetensors.torch import load_file, save_file

from paceline.checkpoint.local import LocalStorage
from paceline.checkpoint.restore import read_tensors
from paceline.errors import ConfigError, DataError
from paceline.recipes.gpt_config import design_of, from_start
from paceline.recipes.gpt_hub import read_hub, write_hub
from paceline.recipes.gpt_model import GPT, Design, Shape

DESIGN = Design(Shape(2, 4, 16), tokens=33, length=8)
PROMPT = torch.randint(33, (3, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A GPT-2 of transformers with random weights of a size that shows in the scores, in eval mode; and its folder."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 16, "vocab_size": 33, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    scatter(model, 2)
    folder = tmp_path_factory.mktemp("hub")
    model.save_pretrained(folder)
    return model.eval(), folder


def scatter(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.2)


def ours(place):
    design, tensors = read_hub(place)
    model = GPT(design)
    model.load_state_dict(tensors)
    return model.eval()


def old_style(model, folder):
    """Write what older versions did: no prefix, masks as buffers, and the head a second time."""
    tensors = {f"{name}": value.clone() for name, value in model.transformer.state_dict().items()}
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool) for layer in range(2)}
    tensors |= {"h.0.attn.masked_bias": torch.tensor(-1e4), "lm_head.weight": tensors["wte.weight"].clone()}
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


def test_our_weights_give_our_scores_there(theirs, tmp_path):
    model = GPT(DESIGN).eval()
    scatter(model, 3)
    write_hub(model.design, model.state_dict(), tmp_path / "out")
    loaded, facts = type(theirs[0]).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(facts.values()), "neither missing nor unexpected"
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(PROMPT).logits, model(PROMPT), rtol=0, atol=1e-5)
    assert {path.name: oct(path.stat().st_mode)[-3:] for path in (tmp_path / "out").iterdir()} == {
        "config.json": "600",
        "model.safetensors": "600",
    }


def test_what_is_written_is_read_with_the_same_bits(tmp_path):
    model = GPT(DESIGN)
    write_hub(model.design, model.state_dict(), tmp_path / "out")
    design, tensors = read_hub(tmp_path / "out")
    assert design == DESIGN
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items())
    assert tensors.keys() == model.state_dict().keys()


def test_half_weights_become_whole(theirs, tmp_path):
    folder = shutil.copytree(theirs[1], tmp_path / "hub")
    tensors = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    found = read_hub(folder)[1]
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert torch.equal(found["embedding.weight"], tensors["transformer.wte.weight"].float())


def said(**changes):
    """Change config.json; None takes an entry out."""

    def change(folder):
        tree = json.loads((folder / "config.json").read_bytes()) | changes
        (folder / "config.json").write_text(json.dumps({name: value for name, value in tree.items() if value != ...}))

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


def only_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def in_parts(folder):
    (folder / "model.safetensors").rename(folder / "model.safetensors.index.json")


REFUSED = [
    (said(model_type="llama"), "type 'llama'", "save_pretrained"),
    (said(model_type=...), "type None", "save_pretrained"),
    (said(activation_function="relu"), "activation_function='relu'", "'gelu_new'"),
    (said(layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06", "1e-05"),
    (said(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True", "False"),
    (said(add_cross_attention=True), "add_cross_attention=True", "False"),
    (said(n_inner=32), "n_inner=32", "64"),
    (said(n_inner=[3]), "n_inner=", "64"),
    (said(n_layer="two"), "n_layer='two'", "save_pretrained"),
    (said(n_head=3), "3 heads", "save_pretrained"),
    (said(n_layer=3), "h.2.ln_1.weight is missing; .* and 8 more", "save_pretrained"),
    (said(n_layer=1), "h.1.attn.c_attn.bias is not in a GPT-2", "save_pretrained"),
    (said(vocab_size=34), r"wte.weight is \[33, 16\] instead of \[34, 16\]", "save_pretrained"),
    (said(tie_word_embeddings=False), "lm_head.weight", "tied head"),
    (held(lm_head__weight=torch.ones(33, 16)), "lm_head.weight", "tied head"),
    (held(transformer__ln_f__bias=None), "ln_f.bias is missing", "save_pretrained"),
    (held(score__weight=torch.ones(2, 16)), "score.weight is not in a GPT-2", "save_pretrained"),
    (held(transformer__h__0__mlp__c_fc__weight=torch.ones(64, 16)), r"c_fc.weight is \[64, 16\] instead of \[16, 64\]", "save_pretrained"),
    (held(transformer__ln_f__bias=torch.ones(16, dtype=torch.int32)), "ln_f.bias .*int32", "save_pretrained"),
    (bytes_of("config.json", b"{"), "config.json is not JSON", "save_pretrained"),
    (bytes_of("config.json", b"[1]"), "type None", "save_pretrained"),
    (bytes_of("model.safetensors", b"\x80\x04K\x01."), "as a safetensors file", "save_pretrained"),
    (lambda folder: (folder / "config.json").unlink(), "cannot read .*config.json", "save_pretrained"),
    (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors", "save_pretrained"),
    (only_pickle, "no model.safetensors", "a pickle is never read"),
    (in_parts, "no model.safetensors", "max_shard_size"),
]  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "hub"
    write_hub(DESIGN, GPT(DESIGN).state_dict(), folder)
    return folder


@pytest.mark.parametrize(("change", "problem", "fix"), REFUSED)
def test_what_is_not_such_a_gpt_2_is_named(change, problem, fix, written, tmp_path):
    change(shutil.copytree(written, tmp_path / "hub"))
    with pytest.raises(DataError, match=problem) as error:
        read_hub(tmp_path / "hub")
    assert fix in error.value.fix


@pytest.mark.parametrize(
    ("design", "problem"),
    [
        ({"positions": "rotary"}, "positions=rotary"),
        ({"activation": "relu2"}, "activation=relu2"),
        ({"norm": "rms"}, "norm=rms"),
        ({"bias": False}, "bias=False"),
    ],
)
def test_a_design_that_gpt_2_has_not_is_not_written(design, problem, tmp_path):
    other = Design(Shape(1, 2, 8), 5, 4, **design)
    with pytest.raises(ConfigError, match=problem):
        write_hub(other, GPT(other).state_dict(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over_and_weights_of_another_model_are_not_written(written, tmp_path):
    with pytest.raises(ConfigError, match="exists"):
        write_hub(DESIGN, GPT(DESIGN).state_dict(), written)
    with pytest.raises(ConfigError, match="norm.bias is missing"):
        write_hub(DESIGN, {}, tmp_path / "other")


def test_a_training_starts_from_such_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    design = Design(Shape(1, 2, 16), tokens=256, length=12)
    model = GPT(design)
    write_hub(design, model.state_dict(), tmp_path / "hub")
    shape = ["layers=0", "heads=0", "width=0", "length=128"]  # as nobody has said them
    run = train(*shape, "start=hub", f"data_folder={write(tmp_path, 'words ' * 60)}", "lr.base=0", "weight_decay=0")
    storage = LocalStorage(run.checkpoints)
    manifest = storage.manifest(storage.steps()[0])
    saved = {name: value.clone() for name, value in read_tensors(storage, manifest) if name.startswith("model.")}
    assert all(torch.equal(saved[f"model.{name}"], value) for name, value in model.state_dict().items())
    kept = {name: manifest.config[name] for name in ("layers", "heads", "width", "length", "tokens")}
    assert kept == {"layers": 1, "heads": 2, "width": 16, "length": 12, "tokens": 256}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["size=124M"], "size=124M"),
        (["layers=2"], "layers=2, not 1"),
        (["tokens=300"], "tokens=300, not 256"),
        (["length=16"], "length=16, not 12"),
        (["norm=rms"], "norm=rms, not layer"),
        (["bias=false"], "bias=False, not True"),
    ],
)
def test_settings_that_contradict_the_weights_are_refused(words, problem, tmp_path):
    design = Design(Shape(1, 2, 16), tokens=256, length=12)
    write_hub(design, GPT(design).state_dict(), tmp_path / "hub")
    settled = ["layers=1", "heads=2", "width=16", "length=12"]  # as the run's own config.toml says them
    assert design_of(from_start(tiny(*settled, f"start={tmp_path}/hub"))[0]) == design
    with pytest.raises(ConfigError, match=problem) as error:
        from_start(tiny(*settled, f"start={tmp_path}/hub", *words))
    assert "leave these settings out" in error.value.fix
