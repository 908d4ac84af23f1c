"""Checkpoints of a run below a URL, as whoever reads and tidies up there sees them.

    <url>/<run>/step-<n>/...
    <url>/<run>/step-<n>/manifest.json

The manifest comes last, and what it doesn't name is never read; so a checkpoint there is complete
or absent, whenever the copying ends.

Not here: copying there and back (`train.checkpoint.store`).
"""

from contextlib import suppress

from fsspec.core import url_to_fs

from paceline.config.errors import InputError
from paceline.observe.run import MANIFEST, MOST_MANIFEST_BYTES, STEP_DIRECTORY

_OWN_EXTRA = {"s3": "'paceline[s3]'", "s3a": "'paceline[s3]'"}


class StoredCheckpoints:
    """The checkpoints of one run below a URL.

    Every method may raise what the store's client raises, of any type; see `trouble_text`.

    Args:
        url: of `checkpoint.copy_to`.
        run: the run's name.

    Raises:
        InputError: the URL's kind is unknown, or what reaches it is not installed.
    """

    def __init__(self, url: str, run: str) -> None:
        self.url = f"{url.rstrip('/')}/{run}"
        scheme = url.partition("://")[0]
        options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        try:
            # Listings are always asked for anew: other processes write there too.
            self._files, self._root = url_to_fs(
                self.url, skip_instance_cache=True, use_listings_cache=False, **options
            )
        except ImportError as error:
            needed = _OWN_EXTRA.get(scheme)
            cure = f"needs s3fs: pip install {needed}" if needed else f"can't be reached: {error}"
            raise InputError(f"checkpoint.copy_to = {url} {cure.rstrip('.')}.") from None
        except ValueError as error:
            raise InputError(f"checkpoint.copy_to = {url} can't be used: {error}.") from None

    def steps(self) -> list[int]:
        """The steps of which there is anything, ascending; half copies among them."""
        try:
            names = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        found = (STEP_DIRECTORY.fullmatch(name.rstrip("/").rpartition("/")[2]) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def manifest(self, step: int) -> bytes | None:
        """A step's manifest as it stands there; None: the step is absent, or half a copy."""
        place = f"{self._place(step)}/{MANIFEST}"
        try:
            if self._files.size(place) > MOST_MANIFEST_BYTES:
                return b""  # which is none
            return self._files.cat_file(place)
        except FileNotFoundError:
            return None

    def written(self, step: int) -> float | None:
        """Unix time of a step's manifest; None: the store doesn't say."""
        try:
            return float(self._files.modified(f"{self._place(step)}/{MANIFEST}").timestamp())
        except (NotImplementedError, FileNotFoundError):
            return None

    def remove(self, step: int) -> None:
        """Take a checkpoint away, first its manifest; none is no error."""
        place = self._place(step)
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{place}/{MANIFEST}")
        with suppress(FileNotFoundError):
            self._files.rm(place, recursive=True)

    def _place(self, step: int) -> str:
        return f"{self._root}/step-{step}"


def trouble_text(error: Exception) -> str:
    """What a store's client says, as part of a sentence."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}{': ' if lines[0] else ''}{lines[0][:200].rstrip('.')}"
