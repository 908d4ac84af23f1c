"""Wait for what another process does."""

import time
from collections.abc import Callable


def until(
    is_so: Callable[[], object],
    timeout_s: float = 500,
    instead: Callable[[], object] = lambda: "it did not happen",
) -> None:
    """Until a condition holds, or fail with what is there instead."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, str(instead())
        time.sleep(0.02)
