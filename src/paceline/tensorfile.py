"""The safetensors format: plan the layout of a file before its data, so that it can be filled in place."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.dtypes import WIDTHS
from paceline.safe_open import parse_json

_ALIGN = 64  # data begins at a multiple of this, so that elements of any type are aligned
_LONGEST_HEADER = 100_000_000  # the limit of the format
_MOST_DIMENSIONS, _MOST_ELEMENTS = (
    64,
    1 << 60,
)  # torch fails beyond, also for a tensor without elements


class Spec(NamedTuple):
    """Name, type and shape of a tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the tensor."""
        size = WIDTHS[self.dtype]
        for length in self.shape:
            size *= length
        return size


class TensorSpan(NamedTuple):
    """The byte range of a tensor, from the start of the file."""

    spec: Spec
    begin: int
    end: int


class FileLayout(NamedTuple):
    """Header, tensor positions and size of a file."""

    header: bytes
    places: list[TensorSpan]
    size_bytes: int


def plan_file(specs: Iterable[Spec], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """Plan a file of tensors and metadata; wide types come first, so that every tensor is aligned.

    >>> image = plan_file([Spec("b", "U8", (3,)), Spec("a", "F32", (2, 2))])
    >>> [(place.spec.name, place.end - place.begin) for place in image.places], image.size_bytes - len(image.header)
    ([('a', 16), ('b', 3)], 19)
    """
    return plan_in_order(
        sorted(specs, key=lambda spec: -WIDTHS[spec.dtype]), metadata, aligned=0, align=_ALIGN
    )


def plan_in_order(
    ordered: Sequence[Spec], metadata: Mapping[str, str] | None, *, aligned: int, align: int
) -> FileLayout:
    """Plan a file of tensors in this order; tensor number `aligned` begins at a multiple of `align` bytes.

    >>> image = plan_in_order([Spec("b", "U8", (3,)), Spec("a", "F32", (2, 2))], None, aligned=1, align=4096)
    >>> [(place.begin, place.end) for place in image.places]
    [(4093, 4096), (4096, 4112)]
    """
    ends = list(itertools.accumulate(spec.size_bytes for spec in ordered))
    spans = list(zip([0, *ends], ends, strict=False))
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    entries |= {
        spec.name: {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": span}
        for spec, span in zip(ordered, spans, strict=True)
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text) + sum(spec.size_bytes for spec in ordered[:aligned])) % align)
    header = len(text).to_bytes(8, "little") + text
    data = len(header)
    places = [
        TensorSpan(spec, data + begin, data + end)
        for spec, (begin, end) in zip(ordered, spans, strict=True)
    ]
    return FileLayout(header, places, data + (ends[-1] if ends else 0))


def read_places(start: bytes | bytearray | memoryview, size_bytes: int) -> list[TensorSpan]:
    """Return the tensors of a file, from its first bytes, which must include the header.

    Raises ValueError with the reason if this is not a safetensors file.
    """
    try:
        return _read_places(start, size_bytes)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def header_bytes(start: bytes | bytearray | memoryview, size_bytes: int) -> int:
    """Return how many bytes at the start of a file hold its header; 8, its length alone, if that is impossible.

    >>> header_bytes((2).to_bytes(8, "little") + b"{}", 10), header_bytes((1 << 40).to_bytes(8, "little"), 1 << 50)
    (10, 8)
    """
    length = int.from_bytes(start[:8], "little")
    return 8 + length if length <= min(_LONGEST_HEADER, size_bytes - 8) else 8


def _read_places(start: bytes | bytearray | memoryview, size_bytes: int) -> list[TensorSpan]:
    length = int.from_bytes(start[:8], "little")
    if not 2 <= length <= min(_LONGEST_HEADER, size_bytes - 8):
        raise ValueError(f"header of {length} bytes")
    tree = parse_json(bytes(start[8 : 8 + length]))
    tree.pop("__metadata__", None)
    places = [
        _place(name, facts["dtype"], tuple(facts["shape"]), facts["data_offsets"], 8 + length)
        for name, facts in tree.items()
    ]
    end = 8 + length
    for place in sorted(places, key=lambda place: (place.begin, place.end)):
        if place.begin != end:
            raise ValueError(f"{place.spec.name} does not begin at the end of the previous tensor")
        end = place.end
    if end != size_bytes:
        raise ValueError(f"tensors end at byte {end} of {size_bytes}")
    return places


def _place(
    name: str, dtype: str, shape: tuple[int, ...], offsets: Sequence[int], data: int
) -> TensorSpan:
    spec, (begin, end) = Spec(name, dtype, shape), offsets
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"shape or offsets of {name} are not counts")
    if len(shape) > _MOST_DIMENSIONS or math.prod(length or 1 for length in shape) > _MOST_ELEMENTS:
        raise ValueError(f"the shape of {name} is too large")
    if end - begin != spec.size_bytes:
        raise ValueError(f"{end - begin} bytes for {name}")
    return TensorSpan(spec, data + begin, data + end)
