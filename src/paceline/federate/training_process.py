"""The process that trains for a client, seen from the client's end.

It stays from round to round, since its start costs more than a round. Forks of the client's end
inherit its pipes: the number of a round goes in, and comes back when what was found is in the
folder. A lost one is started anew, and the fork that waits for it sees the end of its pipe.
"""

import os
import subprocess
import sys
from pathlib import Path

from paceline.federate.rounds import Factor

_GONE = "the process that trains is gone: log.txt says why"
_process: subprocess.Popen[bytes] | None = None


def keep_running(folder: Path) -> None:
    """Start it, unless it runs.

    Args:
        folder: the client's own; its log.txt has what the process says.
    """
    global _process
    if _process is not None and _process.poll() is None:
        return
    end()
    with (folder / "log.txt").open("ab") as log:
        _process = subprocess.Popen(
            [sys.executable, "-m", "paceline.federate.client_training", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0,
        )  # fmt: skip


def end() -> None:
    """End it, if it runs."""
    global _process
    if _process is not None:
        with _process:  # closes its pipes and waits
            _process.kill()
        _process = None


def compute(number: int, num_steps: int = 0, factor: Factor = "all") -> int:
    """Have what a round asks for computed, from what is shared in the client's folder.

    Args:
        number: of the round.
        num_steps: whose change is asked for; 0: a gradient is.
        factor: what such steps train.

    Returns:
        samples of the gradient, or of each step.

    Raises:
        RuntimeError: the process is gone; the client's log.txt says why.
    """
    assert _process is not None
    assert _process.stdin is not None
    assert _process.stdout is not None
    try:
        os.write(_process.stdin.fileno(), f"{number} {num_steps} {factor}\n".encode())
    except BrokenPipeError:
        raise RuntimeError(_GONE) from None
    while line := _process.stdout.readline():
        done, samples = map(int, line.split())
        if done == number:  # an older one is of a round that was given up
            return samples
    raise RuntimeError(_GONE)
