"""A manifest is what was written, or it is refused."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint import manifest as module
from paceline.checkpoint.manifest import FileFacts, Manifest, NewerFormat
from paceline.errors import BadCheckpoint

SOME = Manifest(
    step=120,
    samples=30720,
    files={
        "part-00001-of-00002.safetensors": FileFacts(4096, "00112233445566ff"),
        "part-00002-of-00002.safetensors": FileFacts(0, "ffeeddccbbaa9988"),
    },
    metrics={"acc": 0.875, "eval_loss": 1e-9},
    values={
        "numbers": {"optimizer.step.weight": "int"},
        "meters": {"in_epoch": [0.1, 3.0]},
        "note": ',\n "xxh3": "',
    },
    config={"seed": 0, "exact": True, "name": "run", "lr.base": 0.1},
    versions={"torch": "2.13.0"},
)

numbers = st.floats(allow_nan=False)
plain = st.none() | st.booleans() | st.integers() | numbers | st.text()
anything = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
names = st.text(st.characters(codec="utf-8", exclude_characters="/\\\0"), min_size=1).filter(
    lambda name: name[0] != "."
)
manifests = st.builds(
    Manifest,
    step=st.integers(0, 10**12),
    samples=st.integers(0, 10**15),
    files=st.dictionaries(
        names,
        st.builds(FileFacts, st.integers(0, 2**50), st.from_regex(r"[0-9a-f]{16}", fullmatch=True)),
        min_size=1,
        max_size=3,
    ),
    metrics=st.dictionaries(st.text(), numbers, max_size=3),
    values=st.dictionaries(st.text(), anything, max_size=3),
    config=st.dictionaries(st.text(), plain, max_size=3),
    versions=st.dictionaries(st.text(), st.text(), max_size=3),
)


def sealed(body: bytes) -> bytes:
    """Return text that ends with the right sum, as a manifest does; what it says may be anything."""
    return body + module._end(body)


def manifest_that_says(**changes) -> bytes:
    tree = {"format": module.FORMAT} | dataclasses.asdict(SOME) | changes
    tree = {name: value for name, value in tree.items() if value != "left out"}
    return sealed(json.dumps(tree).encode()[:-1])


def refused(content: bytes) -> BadCheckpoint:
    with pytest.raises(BadCheckpoint) as caught:
        Manifest.from_json(content, "runs/x/step-000000120")
    assert caught.value.exit_code == 3
    assert "runs/x/step-000000120" in caught.value.problem
    assert caught.value.fix
    return caught.value


@given(manifests)
def test_it_reads_back_the_same(manifest) -> None:
    assert Manifest.from_json(manifest.to_json(), "x") == manifest


def test_a_figure_that_is_not_a_number_survives() -> None:
    manifest = dataclasses.replace(SOME, metrics={"acc": math.nan, "eval_loss": math.inf})
    assert json.loads(SOME.to_json())["format"] == 1  # JSON that any reader takes
    found = Manifest.from_json(manifest.to_json(), "x").metrics
    assert math.isnan(found["acc"])
    assert found["eval_loss"] == math.inf


def test_every_flipped_bit_and_every_truncation_is_refused() -> None:
    content = SOME.to_json()
    for place in range(len(content)):
        refused(content[:place])
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            assert type(refused(bytes(damaged))) is BadCheckpoint, f"byte {place}, bit {bit}"


@given(manifests, st.data(), st.binary(min_size=1, max_size=40))
def test_any_damage_to_any_manifest_is_refused(manifest, data, more) -> None:
    content = bytearray(manifest.to_json())
    place = data.draw(st.integers(0, len(content) - 1))
    for damaged in (content[:place], content + more, more + content):
        refused(bytes(damaged))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    assert type(refused(bytes(content))) is BadCheckpoint


@given(st.binary(max_size=300))
def test_bytes_that_never_were_a_manifest_are_refused(content) -> None:
    refused(content)


OUTSIDE = ["", ".", "..", ".hidden", "../x", "a/../../x", "/etc/passwd", "a/b", "a\\b", "..\\x"]


@pytest.mark.parametrize("name", [*OUTSIDE, "C:\\x", "/", "a\0b"])
def test_a_file_name_that_would_leave_the_folder_is_refused(name) -> None:
    error = refused(manifest_that_says(files={name: {"size_bytes": 1, "xxh3": "0" * 16}}))
    assert repr(name) in error.problem


def test_a_newer_format_is_left_for_a_newer_version(monkeypatch) -> None:
    monkeypatch.setattr(module, "FORMAT", 2)
    content = SOME.to_json()
    monkeypatch.undo()
    error = refused(content)
    assert isinstance(error, NewerFormat)
    assert "format 2" in error.problem
    assert "update paceline" in error.fix
    assert isinstance(refused(sealed(b'{"format": 7, "shards": [1, 2]')), NewerFormat)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "left out"},
        {"format": None},
        {"format": "one"},
        {"step": "left out"},
        {"step": "120"},
        {"step": -1},
        {"samples": "left out"},
        {"samples": None},
        {"files": "left out"},
        {"files": None},
        {"files": ["a"]},
        {"files": {"a": 3}},
        {"files": {"a": {"size_bytes": 3}}},
        {"files": {"a": {"size_bytes": 3, "xxh3": "0", "more": 1}}},
        {"files": {"a": {"size_bytes": "3", "xxh3": "0" * 16}}},
        {"files": {"a": {"size_bytes": -3, "xxh3": "0" * 16}}},
        {"files": {"a": {"size_bytes": 3, "xxh3": 0}}},
        {"values": [1]},
        {"config": 3},
        {"unheard_of": 1},
    ],
    ids=str,
)
def test_one_that_lacks_something_or_has_another_type_is_refused(changes) -> None:
    refused(manifest_that_says(**changes))


NESTED = b'{"format": 1, "values": ' + b"[" * 100_000
BODIES = [b"[1", b'"text"', b"17", b"", b"{", b'{"format": 1', b'{"format": 1, "values": \xff']


@pytest.mark.parametrize("body", [*BODIES, NESTED], ids=range(8))
def test_sealed_text_that_is_no_manifest_is_refused(body) -> None:
    refused(sealed(body))
