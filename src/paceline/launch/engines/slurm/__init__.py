"""Slurm: a batch script for each job, and Slurm's own commands for the rest.

Slurm queues, chooses the nodes, preempts and puts back (--requeue); accounts, QOS and partitions
are the site's. Nothing here runs between two commands: what is known of a job, Slurm knows, or
stands in the job's folder. Tried with 22.05.

What it can't: raise a job above other people's (that is a QOS's to do), and keep more than one job
of a group running all the time under `at_most`: each is put into the lane with the fewest jobs when
it is submitted, and stays there.
"""

from paceline.launch.contract import Engine
from paceline.launch.engines.slurm.engine import SlurmEngine


def engine() -> Engine:
    """The engine."""
    return SlurmEngine()
