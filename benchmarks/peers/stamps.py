"""When each step ended, as every contestant of `benchmarks.elastic` tells it: one line a step.

A rank appends to a file of its own. The clock is CLOCK_MONOTONIC, which all processes of a host
share, so stamps of ranks on several nodes played by one host can be compared.
"""

import os
import time
from pathlib import Path

FOLDER = "ELASTIC_STAMPS"
"""The variable that names the folder of stamps."""
NODE = "ELASTIC_NODE"
"""The variable that names the node, by its number."""


class Stamps:
    """The stamps of this process."""

    def __init__(self) -> None:
        """Open its file; nothing of an earlier process is touched."""
        folder = Path(os.environ[FOLDER])
        folder.mkdir(parents=True, exist_ok=True)
        self._whose = f"{os.environ[NODE]} {os.getpid()}"
        self._file = os.open(
            folder / f"{os.getpid()}.stamps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )

    def step_done(self, step: int, num_samples: int, rank: int) -> None:
        """Stamp a finished step.

        Args:
            step: from 1: optimizer steps that the run has done.
            num_samples: whose gradients it was made of, over all ranks.
            rank: of this process, now.
        """
        line = f"{time.monotonic():.6f} {step} {num_samples} {rank} {self._whose}\n"
        os.write(self._file, line.encode())
