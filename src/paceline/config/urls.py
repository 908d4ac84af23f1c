"""URLs that a person writes into a Job, which is kept: none may hold a secret."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


def is_url(name: str) -> bool:
    """Whether a name is a URL, and no path."""
    return _URL.match(name) is not None


def check_tells_no_secret(url: str) -> None:
    """Check that there is no user, password, query or second URL in a URL.

    Raises:
        ValueError: there is one; the sentence repeats none of it.
    """
    # The Hub's revisions stand behind an @, and nothing else of it does.
    if re.search(r"[?#]|::" if url.startswith("hf://") else r"[@?#]|::", url):
        raise ValueError(
            "a URL with a user, password, query or second URL in it may hold a secret: give a "
            "plain one such as s3://bucket/prefix, and credentials in the environment."
        )


def _check_sources(names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    for name in (names,) if isinstance(names, str) else names:
        if is_url(name):
            check_tells_no_secret(name)
    return names


Names = Annotated[tuple[str, ...], Field(strict=False)]
SourceNames = Annotated[str | Names, AfterValidator(_check_sources)]
"""Files, folders, globs and URLs of these."""
