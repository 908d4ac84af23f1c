"""Ranges of files below a folder or a URL; a store that is away is waited for.

How it works: S3 is read by botocore, which a first range needs a third of the time for that s3fs
takes to be imported; everything else by fsspec. Whoever asks gets exactly the bytes asked for. What
is missing or forbidden is said at once; whatever else goes wrong is tried again, at growing
distances, for as long as a Job says.
"""

import gzip
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import msgspec

from paceline.config.errors import InputError
from paceline.observe.stored import trouble_text
from paceline.train.data.stores import store_of

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_CONNECTIONS = 32
_MISSING = (404, 416)
_TRIED_AGAIN = (408, 429)
"""Of the answers that say that the request was wrong: too late, and too many."""
_NEVER = (ImportError, PermissionError, TypeError, AttributeError)


class _Files(Protocol):
    def read(self, name: str, begin: int, end: int) -> bytes:
        """The bytes begin .. end - 1 of a file, or those that there are; raises anything."""


class Ranges:
    """Files below a folder or a URL; several threads may read."""

    def __init__(self, url: str, wait_s: float) -> None:
        """Name it; nothing is opened yet.

        Args:
            url: a folder, or a URL of one.
            wait_s: how long a store is waited for that doesn't answer.
        """
        self.url, self._wait_s = url.rstrip("/"), wait_s

    def read(self, name: str, begin: int, end: int) -> bytes | None:
        """The bytes begin .. end - 1 of a file, fewer where it ends before; None: there is none.

        Raises:
            InputError: it can't be read, or the store stays away.
        """
        began, wait_s = time.monotonic(), _FIRST_WAIT_S
        while True:
            try:
                return self._files.read(name, begin, end)[: end - begin]
            except InputError:
                raise
            except Exception as error:  # stores' clients raise anything
                status = _status(error)
                if isinstance(error, FileNotFoundError | NotADirectoryError) or status in _MISSING:
                    return None
                where, why = f"{self.url}/{name}", trouble_text(error)
                is_wrong = 400 <= status < 500 and status not in _TRIED_AGAIN
                if is_wrong or isinstance(error, _NEVER) or "Credentials" in type(error).__name__:
                    raise InputError(f"{where} can't be read ({why}): see to it.") from None
                left_s = began + self._wait_s - time.monotonic()
                if left_s <= 0:
                    raise InputError(
                        f"{where} was not to be had for {self._wait_s:g} s ({why}): see to its "
                        "store and start again, or raise data.wait_s."
                    ) from None
            time.sleep(min(wait_s, left_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def all_of(self, name: str, size_bytes: int) -> bytes:
        """A whole file.

        Raises:
            InputError: as `read`, or it is missing, or has another size.
        """
        found = self.read(name, 0, size_bytes + 1)
        if found is None or len(found) != size_bytes:
            raise self.damaged(name)
        return found

    def damaged(self, name: str) -> InputError:
        """That a file isn't what was published."""
        return InputError(
            f"{self.url}/{name} is missing or damaged: remove the folder, and publish it again by "
            "paceline tokens JOB --to URL."
        )

    @cached_property
    def _files(self) -> _Files:
        return _S3(self.url) if self.url.startswith(("s3://", "s3a://")) else _Stored(self.url)


class _Stored:
    def __init__(self, url: str) -> None:
        self._store, self._root = store_of(url)

    def read(self, name: str, begin: int, end: int) -> bytes:
        return cast(bytes, self._store.cat_file(f"{self._root}/{name}", begin, end))


class _S3:
    def __init__(self, url: str) -> None:
        self._bucket, _, self._root = url.partition("://")[2].partition("/")
        try:
            from botocore.config import Config
            from botocore.loaders import create_loader
            from botocore.session import Session
        except ImportError:
            raise InputError(
                f'{url} can\'t be reached by what is installed: pip install "paceline[s3]".'
            ) from None
        once = {"total_max_attempts": 1}  # whoever calls tries again
        settings = Config(retries=once, max_pool_connections=_CONNECTIONS, connect_timeout=5)
        session = Session()
        loader: Any = create_loader(session.get_config_variable("data_path"))
        loader.file_loader = _Descriptions()
        loader.list_available_services = lambda _: ["s3"]  # without a look for all the others
        session.register_component("data_loader", loader)
        self._client: Any = session.create_client("s3", config=settings)

    def read(self, name: str, begin: int, end: int) -> bytes:
        key = f"{self._root}/{name}".lstrip("/")
        found = self._client.get_object(
            Bucket=self._bucket, Key=key, Range=f"bytes={begin}-{end - 1}"
        )
        return cast(bytes, found["Body"].read())


class _Descriptions:
    """Those of services, files of JSON that botocore reads first of all: a quarter of the time that
    a client takes to be made, by its own reader."""

    _OPENERS: ClassVar[dict[str, Any]] = {".json": open, ".json.gz": gzip.open}

    def exists(self, path: str) -> bool:
        """Whether there is one, by its path without a suffix."""
        return any(Path(path + suffix).is_file() for suffix in self._OPENERS)

    def load_file(self, path: str) -> Any:
        """What it holds; None: there is none."""
        for suffix, opened in self._OPENERS.items():
            with suppress(FileNotFoundError), opened(path + suffix, "rb") as file:
                return msgspec.json.decode(file.read())
        return None


def _status(error: Exception) -> int:
    """What HTTP says, where the error is an answer of a server."""
    answer: Any = getattr(error, "response", None)
    if isinstance(answer, dict):
        answer = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    found = answer if isinstance(answer, int) else getattr(error, "status", 0)
    return found if isinstance(found, int) else 0
