"""A file of tensors is plain safetensors, and one that lies about itself is refused."""

import json

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.staging import DTYPES, split_by_size
from paceline.checkpoint.storage import tensor_spans
from paceline.dtypes import WIDTHS
from paceline.errors import BadCheckpoint
from paceline.tensorfile import Spec, plan_file
from support.checkpoint_contents import bits_of, tensors_of

WORDS = {dtype: word for word, dtype in DTYPES.items()}

specs = st.builds(
    Spec,
    st.text(),
    st.sampled_from(sorted(WIDTHS)),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
).filter(lambda spec: spec.name != "__metadata__")


def file_of(tensors: dict[str, torch.Tensor]) -> bytes:
    """Return the file that a plan describes."""
    image = plan_file(
        Spec(name, WORDS[value.dtype], tuple(value.shape)) for name, value in tensors.items()
    )
    content = bytearray(image.size_bytes)
    content[: len(image.header)] = image.header
    for place in image.places:
        raw = tensors[place.spec.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        content[place.begin : place.end] = raw
    return bytes(content)


def with_header(header: object, data: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (4,), offsets: object = (0, 16)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_plain_safetensors_reads_every_type_and_shape() -> None:
    assert bits_of(safetensors.torch.load(file_of(tensors_of(1)))) == bits_of(tensors_of(1))
    assert safetensors.torch.load(file_of({})) == {}


def test_what_plain_safetensors_writes_is_read() -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bool)}
    content = safetensors.torch.save(tensors, metadata={"from": "elsewhere"})
    places = {place.spec.name: place for place in tensor_spans(content, len(content), "x", "part")}
    assert {name: (place.spec.dtype, place.spec.shape) for name, place in places.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BOOL", (3,)),
    }
    assert content[places["a"].begin : places["a"].end] == tensors["a"].numpy().tobytes()


@given(st.lists(specs, max_size=12, unique_by=lambda spec: spec.name))
def test_tensors_lie_side_by_side_and_aligned(wanted) -> None:
    image = plan_file(wanted)
    assert sorted(place.spec for place in image.places) == sorted(wanted)
    assert len(image.header) % 64 == 0
    end = len(image.header)
    for place in image.places:
        assert place.begin == end
        assert place.begin % WIDTHS[place.spec.dtype] == 0
        end = place.end
    assert image.size_bytes == end
    assert tensor_spans(memoryview(image.header), image.size_bytes, "x", "part") == image.places


LIES = {
    "nothing": b"",
    "a torn length": b"\x10\0\0",
    "no header": bytes(8),
    "a header longer than the file": (10_000).to_bytes(8, "little") + b"{}",
    "a giant header": (2**63).to_bytes(8, "little") + b"{}" + bytes(100),
    "a header that is not JSON": with_header(b"{]"),
    "a header that is not text": with_header(b'{"\xff": 1}'),
    "a header that is a list": with_header([1]),
    "a header that is a number": with_header(17),
    "a header nested too deep to read": with_header(b"[" * 200_000),
    "tensors that overlap": with_header({"a": entry(), "b": entry(offsets=(8, 24))}),
    "tensors in the same place": with_header({"a": entry(), "b": entry()}),
    "a gap between tensors": with_header({"a": entry(), "b": entry(offsets=(20, 36))}),
}
ENTRIES = {
    "nothing": None,
    "no type": {"shape": [4], "data_offsets": [0, 16]},
    "no offsets": {"dtype": "F32", "shape": [4]},
    "an unknown type": entry("F31"),
    "a type that is a list": entry(["F32"]),
    "offsets beyond the end": entry(shape=(40,), offsets=(0, 160)),
    "offsets before the data": entry(offsets=(-16, 0)),
    "offsets the wrong way round": entry(offsets=(16, 0)),
    "three offsets": entry(offsets=(0, 8, 16)),
    "offsets that are words": entry(offsets=("0", "16")),
    "offsets that are fractions": entry(offsets=(0.0, 16.0)),
    "more bytes than the shape has": entry(offsets=(0, 20)),
    "fewer bytes than the shape has": entry(shape=(2**40, 2**40)),
    "a shape that is a number": entry(shape=4),
    "a shape of words": entry(shape=("4",)),
    "a shape of fractions": entry(shape=(4.0,)),
    "a negative shape": entry(shape=(-2, -2)),
}
LIES |= {name: with_header({"a": lie}) for name, lie in ENTRIES.items()}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_a_file_that_lies_about_itself_is_refused(content) -> None:
    with pytest.raises(BadCheckpoint, match="somewhere.*part is not a safetensors file"):
        tensor_spans(memoryview(content), len(content), "somewhere", "part")


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 7))
def test_things_are_dealt_out_evenly_and_each_once(sizes, parts) -> None:
    found = split_by_size(sizes, parts)
    assert len(found) == parts
    assert sorted(number for part in found for number in part) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in part) for part in found]
    assert max(loads) - min(loads) <= max(sizes, default=0)
