"""When a job would start, by Slurm's own estimate."""

import re

from paceline.config.errors import InputError
from paceline.launch.engines.slurm.commands import refused, run

_START = re.compile(r"to start at (\d+)")
# What is so now and may be otherwise later; everything else stays.
_PASSES = ("nodes are busy", "not available", "drained", "held", "policy", "limit")
_NEVER = "node configuration is not available"


def estimate(batch_script: str, *options: str) -> float | None:
    """When a job would start if it were submitted now; Unix time.

    It stands on the time limits of what runs, so it is usually too late.

    Args:
        batch_script: its text.
        options: of sbatch, which count more than those of the script.

    Returns:
        None: Slurm can't tell now.

    Raises:
        InputError: it can never start, or Slurm can't be asked; has Slurm's own words.
    """
    done = run("sbatch", "--test-only", *options, script=batch_script)
    found = _START.search(done.stderr)
    if found:
        return float(found[1])
    words = done.stderr.lower()
    if _NEVER not in words and any(each in words for each in _PASSES):
        return None
    raise refused(done.stderr)


def fits(batch_script: str, num_nodes: int) -> float | None:
    """When it would start with so many nodes; None: never, or nobody can tell."""
    try:
        return estimate(batch_script, f"--nodes={num_nodes}")
    except InputError:
        return None
