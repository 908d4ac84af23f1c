"""Synthetic images of textures: any number, nobody's data, learnable by a convolutional network.

A sample is a pure function of (seed, index), so that any rank makes any sample and a run resumes
from one number. A class is a few plane waves, each of its own direction, wavelength and colour; an
image of it has them at random phases, under noise of the same strength. Phases hide the class from
whoever looks at single pixels (the mean image of every class is nothing), so that only filters
learn it.

Not here: photographs, decoding, augmentation. An image of 224 x 224 pixels takes a CPU core a few
milliseconds: less than decoding a JPEG of that size, too much for eight fast GPUs.

Source of the random numbers: Philox, a counter-based generator (Salmon et al., SC 2011).
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.vision import ResNet

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]

_WAVES, _MOST_CYCLES = 3, 8
_CHANNELS = 3
# Of the two keys of Philox, the second tells samples (below) from classes.
_CLASSES = 1 << 62


class ImageBatch(NamedTuple):
    """Samples with their classes."""

    images: Floats
    """(batch, 3, side, side), of mean 0 and variance 2."""
    labels: Indices
    """(batch,)"""


class _Texture(NamedTuple):
    """The waves of a class."""

    cycles: Floats
    """(waves, 2), of an image's height and width."""
    colours: Floats
    """(waves, 3), of sum of squares 2 in each channel."""


def samples(model: ResNet, seed: int, indices: Indices) -> ImageBatch:
    """The samples with these indices."""
    made = [_sample(model, seed, int(index)) for index in indices]
    images, labels = zip(*made, strict=True)
    return ImageBatch(np.stack(images), np.asarray(labels, np.int64))


def _sample(model: ResNet, seed: int, index: int) -> tuple[Floats, int]:
    side, random = model.image_size, _generator(seed, index)
    label = int(random.integers(model.num_classes))
    texture = _texture(seed, label)
    phases = random.random(_WAVES, np.float32)
    at = np.arange(side, dtype=np.float32) / side
    down = (texture.cycles[:, :1] * at + phases[:, None])[:, :, None]  # (waves, side, 1)
    along = (texture.cycles[:, 1:] * at)[:, None, :]  # (waves, 1, side)
    waves = np.cos(np.float32(2 * np.pi) * (down + along))
    image = random.standard_normal((_CHANNELS, side, side), np.float32)
    return image + np.einsum("wc,whv->chv", texture.colours, waves), label


@lru_cache(maxsize=4096)
def _texture(seed: int, label: int) -> _Texture:
    random = _generator(seed, _CLASSES + label)
    cycles = random.uniform(-_MOST_CYCLES, _MOST_CYCLES, (_WAVES, 2)).astype(np.float32)
    colours = random.standard_normal((_WAVES, _CHANNELS), np.float32)
    # Half the square is the mean of a squared cosine: every channel's signal has variance 1.
    return _Texture(cycles, colours * np.sqrt(2 / (colours**2).sum(axis=0)))


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))
