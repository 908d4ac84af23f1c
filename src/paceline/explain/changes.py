"""Changes: settings for --set that a rule offers, and the Job with them; only what can run."""

from collections.abc import Sequence

from paceline.config.errors import InputError
from paceline.config.feasible_comm import check_comm
from paceline.config.job import Job, change_job


def changed(job: Job, changes: Sequence[str]) -> Job | None:
    """The Job with some settings, None where it couldn't run."""
    try:
        one = change_job(job, changes)
        one.layout.check(one.model, one.cluster, one.train.seq_len, one.train.global_batch)
        check_comm(one.comm, one.layout)
    except InputError:
        return None
    return one


def offered(job: Job | None, *changes: str) -> tuple[str, ...]:
    """The changes, where the Job can run with them; else none."""
    return changes if job is not None and changed(job, changes) is not None else ()
