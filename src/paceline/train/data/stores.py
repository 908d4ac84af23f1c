"""Files in stores that fsspec reaches (S3, GCS, HTTP, the Hugging Face Hub): listed and opened.

How it works: a name is a URL of one file, of all that is below a prefix, or with the wildcards of a
glob. A listing tells each file's size and what the store says of its contents (an ETag, a checksum
or a time), so that nothing is read to learn whether anything changed. Files are read as streams:
nothing is copied to this machine's disk.

An http(s) URL is one file, or, where it ends with "/", what the page there links to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from paceline.config.errors import InputError
from paceline.observe.stored import trouble_text

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
_STAMPS = (
    *("ETag", "etag", "blob_id", "md5Hash", "crc32c"),
    *("LastModified", "Last-Modified", "mtime", "created"),
)
"""What stores call the thing that changes with the contents, the surest first."""


@dataclass(frozen=True)
class StoredFile:
    """A file in a store."""

    url: str
    size_bytes: int
    stamp: str | None
    """Changes with the contents; None: the store says nothing."""

    def __str__(self) -> str:
        return self.url

    def open(self) -> IO[bytes]:
        """Open it for reading; it can be sought where the store serves ranges."""
        files, path = store_of(self.url)
        return cast(IO[bytes], files.open(path, "rb"))


def stored_files(name: str) -> tuple[str, list[StoredFile]]:
    """The files that a URL means, sorted.

    Returns:
        the URL of the folder that they are below, and the files; none where there are none.

    Raises:
        InputError: the kind of store is unknown, what reaches it is not installed, it can't be
            reached, or it doesn't say how large a file is.
    """
    files, path = store_of(name)
    is_web = name.startswith(("http://", "https://"))
    found: dict[str, Any] = {}
    try:
        if "*" in path or "[" in path:
            found = files.glob(path, detail=True)
        elif path.endswith("/") if is_web else files.isdir(path):
            found = files.find(path, detail=True)
        else:
            found = {path: files.info(path)}
        if is_web:  # of what a page links to, it tells neither size nor stamp
            found = {
                each: files.info(each) if info.get("size") is None else info
                for each, info in found.items()
                if info["type"] != "directory" and "?" not in each  # that sorts the page
            }
    except FileNotFoundError as error:
        cause = error.__cause__  # whatever a web server answers instead of the file
        if isinstance(cause, Exception) and (found or getattr(cause, "status", 404) != 404):
            raise InputError(f"{error} can't be read ({trouble_text(cause)}): see to it.") from None
        return name, []
    except Exception as error:  # stores' clients raise anything
        raise InputError(f"{name} can't be listed ({trouble_text(error)}): see to it.") from None
    own = {files.unstrip_protocol(place): info for place, info in found.items()}
    return name.rstrip("/"), [
        _stored(url, info) for url, info in sorted(own.items()) if info.get("type") != "directory"
    ]


def store_of(url: str) -> tuple[AbstractFileSystem, str]:
    """What reaches a URL, and the path there.

    Raises:
        InputError: the kind of store is unknown, or what reaches it is not installed.
    """
    scheme = url.partition("://")[0]
    try:
        # Listings are always asked for anew: other processes write there too.
        return cast(tuple[AbstractFileSystem, str], url_to_fs(url, use_listings_cache=False))
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        cure = f'pip install "paceline[{extra}]"' if extra else str(error).rstrip(".")
        raise InputError(f"{url} can't be reached by what is installed: {cure}.") from None
    except Exception as error:  # stores' clients raise anything
        raise InputError(f"{url} can't be used ({trouble_text(error)}): correct it.") from None


def _stored(url: str, info: Mapping[str, Any]) -> StoredFile:
    size = info.get("size")
    if not isinstance(size, int):
        raise InputError(
            f"{url}: its server doesn't say how large it is: copy the file to a disk or a store."
        )
    stamp = next((str(info[name]) for name in _STAMPS if info.get(name) is not None), None)
    return StoredFile(url, size, stamp)
