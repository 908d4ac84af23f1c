"""Images in files: folders of classes, and tar shards of WebDataset's layout, read by index.

How it works: where each image lies (file, first byte, size) and its class are listed once, so that
shards are read at any place, in the order of (seed, step) like everything else, on any number of
ranks. A shard is a plain tar: members `key.jpg` and `key.cls`, an ASCII number; without numbers a
member's folder is its class. Nothing is ever unpacked.

Training reads a random part of an image, of random area and ratio of sides
(https://arxiv.org/abs/1409.4842, section 6), and mirrors every other one. What is random comes from
`random`, which the feed seeds for each sample of the run. Evaluation reads the middle square.

Not here: shards that are compressed or in a store, which can't be read at any place; the later
images of an animation; orientations in EXIF.
"""

import glob
import hashlib
import io
import math
import os
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.outputs import shown_path
from paceline.train.data.order import Ids

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm")
_MOST_CLASSES = 1 << 20
_TRIES = 10
_LEAST_RATIO, _MOST_RATIO = 3 / 4, 4 / 3
Box = tuple[float, float, float, float]
"""Left, upper, right, lower, in pixels."""


class _Found(NamedTuple):
    """An image in the list."""

    name: str
    """The same wherever the data lies."""
    file: str
    first: int
    size: int
    label: str | int
    """Its folder, or the number of its .cls."""


@dataclass(frozen=True)
class ImageFiles:
    """Where images lie, in columns, as there may be millions."""

    files: NDArray[np.bytes_]
    file: Ids
    """Of each image, its place in `files`."""
    first: Ids
    size: Ids
    labels: Ids
    hashes: NDArray[np.float64]
    """Of names, from 0 to 1."""
    classes: tuple[str, ...]
    """Their names, or the numbers of shards that have these, in the order of labels."""
    key: str
    """Hash of names, sizes and classes."""

    def name(self, index: int) -> str:
        """An image, as a sentence names it."""
        path = shown_path(Path(os.fsdecode(self.files[self.file[index]])))
        return f"{path}, byte {self.first[index]}" if self.first[index] else path

    def read(self, index: int) -> bytes:
        """The file that an image is."""
        with open(self.files[self.file[index]], "rb") as file:  # noqa: PTH123  # bytes
            file.seek(self.first[index])
            return file.read(self.size[index])


@dataclass(frozen=True)
class ImageDataset:
    """Some images of a list: a dataset with `len` and `[index]`."""

    files: ImageFiles
    ids: Ids
    side: int
    """Pixels of a side of what is read."""
    box: Callable[[int, int], Box]
    """Maps width and height of an image to the part of it that is read."""
    flips: bool
    """Whether every other one is mirrored."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """An image, (side, side, 3) of uint8, and its label.

        Raises:
            InputError: it can't be decoded.
        """
        at = int(self.ids[index])
        try:
            pixels = _decoded(self.files.read(at), self.side, self.box)
        except Exception as error:  # whatever a decoder raises on damaged bytes
            raise InputError(
                f"{self.files.name(at)} can't be read as an image ({error}): mend or remove it."
            ) from None
        if self.flips and random.random() < 0.5:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(pixels.copy()), int(self.files.labels[at])


def _decoded(raw: bytes, side: int, box: Callable[[int, int], Box]) -> NDArray[np.uint8]:
    """The part of an image that is read, at its size."""
    from PIL import Image

    with Image.open(io.BytesIO(raw)) as image:
        width, height = image.size
        part = np.array(box(width, height))
        # A JPEG is decoded at an eighth, a quarter or half of its size, where that is enough.
        scale = side / min(part[2] - part[0], part[3] - part[1])
        image.draft("RGB", (math.ceil(width * scale), math.ceil(height * scale)))
        part *= np.tile(np.array(image.size) / (width, height), 2)
        part = np.minimum(part, np.tile(image.size, 2))
        scaled = image.convert("RGB").resize(
            (side, side), Image.Resampling.BILINEAR, box=tuple(part.tolist())
        )
    return np.asarray(scaled)


@dataclass(frozen=True)
class RandomBox:
    """A part of random area and ratio of sides, at a random place."""

    least_area: float
    """Share of the image's; 1: all of it, whatever its ratio."""

    def __call__(self, width: int, height: int) -> Box:
        """The next one."""
        if self.least_area == 1:
            return 0, 0, width, height
        for _ in range(_TRIES):
            area = width * height * random.uniform(self.least_area, 1)
            ratio = math.exp(random.uniform(math.log(_LEAST_RATIO), math.log(_MOST_RATIO)))
            across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
            if across <= width and down <= height:
                left, upper = random.uniform(0, width - across), random.uniform(0, height - down)
                return left, upper, left + across, upper + down
        return MiddleBox(1)(width, height)


@dataclass(frozen=True)
class MiddleBox:
    """The square in the middle."""

    share: float
    """Of the shorter side."""

    def __call__(self, width: int, height: int) -> Box:
        """That of an image."""
        side = min(width, height) * self.share
        left, upper = (width - side) / 2, (height - side) / 2
        return left, upper, left + side, upper + side


# ---- what there is -------------------------------------------------------------------------------


def find_images(
    source: str | Sequence[str], setting: str, classes: tuple[str, ...] = ()
) -> ImageFiles:
    """List the images of a source.

    Args:
        source: folders with a folder of images for each class; shards, or folders of these; globs.
        setting: what names it, for sentences.
        classes: those that there may be; by default all that there are.

    Raises:
        InputError: there are no images, or one has another class, or a shard is damaged.
    """
    names = (source,) if isinstance(source, str) else source
    found = [image for name in names for image in _found_in(name)]
    if not found:
        raise InputError(
            f"{setting} = {source!r} has no images: give a folder with a folder of images for each "
            f"class ({', '.join(_SUFFIXES)}), or shards (*.tar)."
        )
    classes = classes or _classes({image.label for image in found}, setting)
    numbers = {label: at for at, label in enumerate(classes)}
    if strange := next((image for image in found if str(image.label) not in numbers), None):
        raise InputError(
            f"{setting}: {strange.name} in {shown_path(Path(strange.file))} is of class "
            f"{strange.label!r}, which the training images don't have: remove it, or add images of "
            "that class to data.source."
        )
    files = {path: at for at, path in enumerate(dict.fromkeys(image.file for image in found))}
    key = hashlib.sha256()
    for image in found:
        key.update(f"{image.name}\0{image.size}\0{image.label}\n".encode(errors="surrogateescape"))
    hashes = b"".join(
        hashlib.blake2b(image.name.encode(errors="surrogateescape"), digest_size=8).digest()
        for image in found
    )
    return ImageFiles(
        files=np.array([os.fsencode(path) for path in files]),
        file=np.array([files[image.file] for image in found]),
        first=np.array([image.first for image in found]),
        size=np.array([image.size for image in found]),
        labels=np.array([numbers[str(image.label)] for image in found]),
        hashes=np.frombuffer(hashes, "<u8") / 2.0**64,
        classes=classes,
        key=key.hexdigest(),
    )


def _classes(labels: set[str | int], setting: str) -> tuple[str, ...]:
    """Names in their order as torchvision's ImageFolder has them, or all numbers up to the most."""
    names = sorted(label for label in labels if isinstance(label, str))
    numbers = [label for label in labels if isinstance(label, int)]
    if names and numbers:
        raise InputError(
            f"{setting} has classes by number ({numbers[0]}) and by folder ({names[0]}): keep one "
            "kind."
        )
    return tuple(names or map(str, range(max(numbers) + 1)))


def _found_in(name: str) -> Iterator[_Found]:
    path = Path(name).expanduser()
    if path.is_dir() and not any(path.glob("*.tar")):
        yield from _found_in_folder(path)
        return
    shards = sorted(path.glob("*.tar")) if path.is_dir() else [path]
    if not path.exists():  # Path.glob takes no absolute pattern.
        shards = [Path(each) for each in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
    for shard in shards:
        yield from _found_in_folder(shard) if shard.is_dir() else _found_in_shard(shard)


def _found_in_folder(folder: Path) -> Iterator[_Found]:
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        inside = os.path.relpath(top, folder)
        for name in sorted(names) if inside != os.curdir else ():
            if _is_image(name):
                path = f"{top}/{name}"
                label = Path(inside).parts[0]
                yield _Found(f"{inside}/{name}", path, 0, Path(path).stat().st_size, label)


def _found_in_shard(shard: Path) -> Iterator[_Found]:
    """The images of a tar, in the order of their members."""
    images: dict[str, tarfile.TarInfo] = {}
    numbers: dict[str, int] = {}
    try:
        whole = shard.stat().st_size
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                stem, _, suffix = member.name.rpartition(".")
                if not member.isreg() or member.issparse():
                    continue
                if member.offset_data + member.size > whole:
                    raise tarfile.ReadError(f"{member.name} is cut off")
                if suffix == "cls":
                    numbers[stem] = _number(tar, member)
                elif _is_image(member.name):
                    images[stem] = member
    except (OSError, tarfile.TarError, ValueError) as error:
        raise InputError(
            f"{shown_path(shard)} is no whole tar ({error}): make it anew, without compression."
        ) from None
    for stem, member in images.items():
        label = numbers.get(stem) if numbers else Path(member.name).parent.name
        if label is None or label == "":
            what = f"{stem}.cls beside it" if numbers else "folder, nor a .cls"
            raise InputError(
                f"{shown_path(shard)} has {member.name} without a class: there is no {what}."
            )
        yield _Found(member.name, str(shard), member.offset_data, member.size, label)


def _number(tar: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    """The class that a .cls names."""
    file = tar.extractfile(member)
    text = file.read(16).strip() if file is not None else b""
    if not text.isdigit() or int(text) >= _MOST_CLASSES:
        raise ValueError(f"{member.name} holds {text!r}, no number of a class")
    return int(text)


def _is_image(name: str) -> bool:
    base = os.path.basename(name)  # noqa: PTH119  # of millions
    return base.lower().endswith(_SUFFIXES) and not base.startswith(".")
