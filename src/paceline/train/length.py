"""How many steps a run has, where the Job says it in epochs or tokens.

What runs has steps alone: they are what schedules, checkpoints and a resumed run count by, and they
don't change when the data does.
"""

import math
from fractions import Fraction

from paceline.config.errors import InputError
from paceline.config.job import JobSpec
from paceline.train.data.build import Progress
from paceline.train.families import family_of


def length_in_steps(
    job: JobSpec, progress: Progress | None = None, num_samples: int | None = None
) -> JobSpec:
    """The JobSpec with its length in steps, rounded up; one that has them is returned as it is.

    Args:
        job: its length in steps, epochs or tokens.
        progress: called with the bytes tokenised so far and those of the whole source.
        num_samples: one epoch of a person's own data, None where nobody can tell.

    Raises:
        InputError: an epoch has no length, or the source of text can't be read.
    """
    train = job.train
    if train.tokens is not None:
        samples = Fraction(train.tokens, train.seq_len)
    elif train.epochs is not None:
        # As it is written: 0.1 as a binary fraction would be a little more than a tenth.
        samples = Fraction(str(train.epochs)) * _epoch(job, progress, num_samples)
    else:
        return job
    steps = math.ceil(samples / train.global_batch)
    return job.replace(train=train.replace(steps=steps, epochs=None, tokens=None))


def _epoch(job: JobSpec, progress: Progress | None, num_samples: int | None) -> int:
    """Samples of one epoch."""
    family = family_of(job.model)
    if num_samples is None:
        num_samples = family.num_samples(job.model, job, progress)
    if num_samples is None:
        raise InputError(
            f"train.epochs = {job.train.epochs} needs data of known length, and {family.endless}: "
            "give train.steps instead."
        )
    return num_samples
