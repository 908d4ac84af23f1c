"""Small images of two classes, as files: stripes across and stripes down, in noise."""

import io
import tarfile
from pathlib import Path

import numpy as np

CLASSES = ("across", "down")


def image_bytes(label: int, number: int, side: int = 40, form: str = "JPEG") -> bytes:
    """An image of (side + 8, side) pixels, another one for each number."""
    from PIL import Image

    random = np.random.default_rng([label, number])
    pixels = random.integers(0, 60, (side, side + 8, 3), np.uint8)
    stripes = (np.arange(side)[:, None], np.arange(side + 8)[None])[label] // 4 % 2
    pixels[np.broadcast_to(stripes, pixels.shape[:2]) == 1] += 150
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, form, quality=95)
    return written.getvalue()


def write_images(folder: Path, count: int) -> Path:
    """`count` images in a folder of each class; does nothing where pillow is missing."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        return folder
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(count // 2):
            (folder / name / f"{number:03}.jpg").write_bytes(image_bytes(label, number))
    return folder


def write_shard(path: Path, numbers: range, *, with_numbers: bool = True) -> Path:
    """A tar of WebDataset's layout, or of folders; the images are those of `write_images`."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            for label, name in enumerate(CLASSES):
                stem = f"{number:03}-{label}" if with_numbers else f"{name}/{number:03}"
                _add(tar, f"{stem}.jpg", image_bytes(label, number))
                if with_numbers:
                    _add(tar, f"{stem}.cls", str(label).encode())
    return path


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
