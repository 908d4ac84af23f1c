"""Keys: who may ask.

Only hashes are kept, and a key that is given is compared with all of them in constant time. Keys
come from a file or the environment, never from a command line, which other accounts can see.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.files import read_text
from paceline.serve.errors import ApiError

VARIABLE = "PACELINE_API_KEYS"
_KEY = re.compile(r"[!-~]{16,256}")


class Keys:
    """The keys that are known.

    Args:
        keys: none: everybody may ask.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._known = [_hash(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._known)

    def holder(self, authorization: str | None) -> bytes:
        """What tells the holder of a key from the others; empty where there are no keys.

        Args:
            authorization: the header of that name.

        Raises:
            ApiError: no key that is known.
        """
        if not self._known:
            return b""
        scheme, _, given = (authorization or "").partition(" ")
        found = _hash(given.strip() if scheme.lower() == "bearer" else "")
        if sum(hmac.compare_digest(found, known) for known in self._known) == 0:
            raise ApiError(
                401,
                "No API key that this server knows: send one as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found


def read_keys(file: Path | None) -> Keys:
    """The keys of a file, one a line, and those of the environment, with spaces or commas between.

    Raises:
        InputError: the file can't be read or has none, or a key that is too short.
    """
    cure = "give a file with one key a line"
    lines = [] if file is None else read_text(file, cure, 1 << 20).splitlines()
    from_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if file is not None and not from_file:
        raise InputError(f"{file} has no key: {cure}.")
    from_environment = re.split(r"[\s,]+", os.environ.get(VARIABLE, "").strip())
    keys = [*from_file, *filter(None, from_environment)]
    for number, key in enumerate(keys):
        if not _KEY.fullmatch(key):  # which is not to be shown
            raise InputError(
                f"API key {number + 1} of {len(keys)} is not 16 to 256 visible ASCII characters: "
                "make one with `openssl rand -hex 24`."
            )
    return Keys(keys)


def _hash(key: str) -> bytes:
    return hashlib.sha256(b"paceline key " + key.encode(errors="surrogateescape")).digest()
