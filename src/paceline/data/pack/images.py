"""Pack images, in one folder per class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from paceline.data.pack.inputs import PackContext, Prepared
from paceline.data.pack.optional_packages import import_optional
from paceline.data.pack.ragged import make_varying
from paceline.data.pack.request import PackRequest
from paceline.data.shards.shard import Array, Rows
from paceline.errors import ConfigError, DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


@dataclass(frozen=True)
class Images:
    """Image files, with the class index of each."""

    folder: str
    files: Sequence[str]
    labels: Sequence[int]
    size: Sequence[int]
    """Height and width to resize to; 0: store the encoded files."""
    grey: bool

    @property
    def samples(self) -> int:
        """The number of images."""
        return len(self.files)

    def read(self, begin: int, end: int) -> Rows:
        """Return some images, as pixels or encoded files, with their labels."""
        labels = numpy.array(self.labels[begin:end], dtype="<i8")
        paths = [Path(self.folder, name) for name in self.files[begin:end]]
        if not self.size[0]:
            contents = [_content(path) for path in paths]
            return {"image": make_varying(contents, numpy.dtype("u1")), "label": labels}
        height, width = self.size
        channels = () if self.grey else (3,)
        pixels = numpy.empty((len(paths), height, width, *channels), dtype="u1")
        for number, path in enumerate(paths):
            pixels[number] = _pixels(path, (width, height), "L" if self.grey else "RGB")
        return {"image": pixels, "label": labels}

    def tree(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, for a worker process."""
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Images:
        """Rebuild the object from the dict of `tree`."""
        return cls(**tree)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", fix="check its permissions"
        ) from error


def _pixels(path: Path, size: tuple[int, int], mode: str) -> Array:
    """Return an image resized to `size`; its aspect ratio may change."""
    image = import_optional("PIL.Image", "decoding images")
    try:
        with image.open(path) as picture:
            if picture.mode.startswith(("I", "F")):
                raise DataError(
                    f"{path} has more than 8 bits per pixel (mode {picture.mode}), which would be lost",
                    fix="convert it to 8 bits, or pack the encoded files, without --size",
                )
            return numpy.asarray(picture.convert(mode).resize(size, image.Resampling.BILINEAR))
    except (OSError, ValueError, SyntaxError, EOFError, image.DecompressionBombError) as error:
        raise DataError(
            f"{path} cannot be read as an image: {error}",
            fix="remove that file, or create or download it again",
        ) from error


def has_classes(folder: Path) -> bool:
    """Return whether a subfolder contains images."""
    return any(path is not None for inner in _folders(folder) for path in _pictures(inner))


def _folders(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )


def _pictures(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                yield Path(root, name)


def find_images(request: PackRequest) -> list[Path]:
    """Return the images of all classes, sorted by class and name."""
    files: list[Path] = []
    for folder in _folders(Path(request.inputs[0])):
        pictures = list(_pictures(folder))
        if not pictures:
            raise DataError(
                f"{folder} contains no image, but would count as a class",
                fix="add images, or remove that folder",
            )
        files += pictures
    return files


def prepare_images(request: PackRequest, files: Sequence[Path], context: PackContext) -> Prepared:
    """Assign class indices in the order of the class names, which the index stores."""
    if request.grey and not request.size[0]:
        raise ConfigError("--grey needs decoded images", fix="add --size, as in --size 28x28")
    folder = Path(request.inputs[0])
    if request.size[0]:
        import_optional("PIL.Image", "decoding images")
    names = [path.relative_to(folder) for path in files]
    classes = sorted({name.parts[0] for name in names})
    numbers = {name: number for number, name in enumerate(classes)}
    labels = [numbers[name.parts[0]] for name in names]
    images = Images(
        str(folder.absolute()),
        [str(name) for name in names],
        labels,
        list(request.size),
        request.grey,
    )
    return Prepared(
        images, {"classes": classes, "images": "pixels" if request.size[0] else "files"}
    )
