"""Wait for what another process does."""

import time
from collections.abc import Callable


def until(is_so: Callable[[], object], timeout_s: float = 120) -> None:
    """Until a condition holds, or fail."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
