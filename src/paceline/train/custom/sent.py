"""A person's task for ranks that no script can start: it is sent to them.

At a prompt or in a notebook module, loss and data are made by lines that no other process ran, so
their code travels with them (cloudpickle), from this process to those that it starts itself.
"""

from dataclasses import dataclass

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.train.custom.changes import Traits
from paceline.train.custom.task import custom_task
from paceline.train.custom.user_inputs import UserInputs
from paceline.train.task import Task

_CURE = "leave cluster.devices_per_node and the axes of [layout] out, where one device trains"


@dataclass(frozen=True)
class SentTask:
    """Makes the task on a rank."""

    inputs: bytes
    traits: Traits

    @classmethod
    def of(cls, brought: UserInputs, traits: Traits) -> "SentTask":
        """Pack what a person brought.

        Raises:
            InputError: it can't be sent.
        """
        try:
            import cloudpickle
        except ImportError:
            raise InputError(
                "ranks that are started from a prompt or a notebook need cloudpickle: pip install "
                f"'paceline[notebook]', or {_CURE}."
            ) from None
        try:
            return cls(cloudpickle.dumps(brought), traits)
        except Exception as error:  # whatever a person's objects raise
            raise InputError(
                "model, loss and data are sent to the ranks from a prompt or a notebook, and "
                f"something of them can't be ({type(error).__name__}: {error}): change that, or "
                f"{_CURE}."
            ) from None

    def __call__(self, job: Job, ranks: Ranks) -> Task:
        """The task of a rank."""
        import cloudpickle

        return custom_task(job, ranks, cloudpickle.loads(self.inputs), self.traits)
