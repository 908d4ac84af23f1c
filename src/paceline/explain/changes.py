"""Changes: settings for --set that a rule offers, and the Job with them; only what can run, and
what changes something."""

from collections.abc import Sequence

from paceline.config.errors import InputError
from paceline.config.feasible import check_layout
from paceline.config.feasible_comm import check_comm
from paceline.config.job import Job, change_job


def changed_job(job: Job, changes: Sequence[str]) -> Job | None:
    """The Job with some settings, None where it couldn't run."""
    try:
        one = change_job(job, changes)
        check_layout(one.layout, one.model, one.cluster, one.train.seq_len, one.train.global_batch)
        check_comm(one.comm, one.layout)
    except InputError:
        return None
    return one


def runnable_changes(job: Job | None, *changes: str) -> tuple[str, ...]:
    """The changes, where the Job can run with them and isn't so already; else none.

    What is to happen every so many steps has to happen within the run.
    """
    other = None if job is None else changed_job(job, changes)
    if job is None or other is None or other == job:
        return ()
    now, then = _intervals(job), _intervals(other)
    is_never = any(a != b and b > other.train.steps for a, b in zip(now, then, strict=True))
    return () if is_never else changes


def _intervals(job: Job) -> tuple[int, int]:
    """What happens every so many steps."""
    return job.train.eval_every, job.checkpoint.every
