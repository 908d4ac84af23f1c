"""Samples that a run leaves out: those read since the state that comes back after a spike.

PaLM's authors did so by hand (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section
5.1). Which they are stands in the Run's left_out.json: a run that is resumed or replayed from any
earlier checkpoint leaves them out at the same place, and has the same losses.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from paceline.config import files
from paceline.config.errors import RunError
from paceline.observe.run import Run
from paceline.train.spikes import Spike
from paceline.train.task import Step, Task

_FILE = "left_out.json"


class _Entry(TypedDict):
    first: int
    count: int
    spike: int
    back_to: int


_ENTRIES = TypeAdapter(list[_Entry])


@dataclass
class LeftOut:
    """Samples that a run leaves out, in the order in which it would have read them."""

    entries: list[_Entry] = field(default_factory=list)
    """By `first`: running number of a sample in the run, which a step begins with."""

    @staticmethod
    def of(run: Run) -> "LeftOut":
        """Those of a Run.

        Raises:
            InputError: left_out.json is damaged.
        """
        file = run.path / _FILE
        if not file.exists():
            return LeftOut()
        return LeftOut(files.read_json(file, _ENTRIES, "put back a copy of it, or start over"))

    def consumed(self, done: int, global_batch: int) -> int:
        """Samples read or left out before the step that follows `done` steps."""
        position = done * global_batch
        for entry in self.entries:
            if entry["first"] <= position:
                position += entry["count"]
        return position

    def steps_from(self, task: Task, done: int, global_batch: int) -> Iterator[Step]:
        """A rank's steps after so many, without what is left out."""
        position = self.consumed(done, global_batch)
        for entry in self.entries:
            if entry["first"] >= position:
                num_steps = (entry["first"] - position) // global_batch
                yield from islice(task.steps_from(position), num_steps)
                position = entry["first"] + entry["count"]
        yield from task.steps_from(position)

    def add(self, spike: Spike, back_to: int, global_batch: int, most: int) -> None:
        """Leave out what was read from step `back_to` on, the spike's samples included.

        Args:
            back_to: steps done in the state that comes back.
            most: spikes after one state that a run takes.

        Raises:
            RunError: there were more.
        """
        if sum(entry["back_to"] == back_to for entry in self.entries) >= most:
            raise RunError(
                f"the loss of step {spike.step} is a spike ({spike.loss:.4g}, {spike.median:.4g} "
                f"is the median before), and {most} times already the state of step {back_to} came "
                "back and samples were left out: lower optim.lr, raise elastic.spike or look at "
                "the data; the run goes on from its last checkpoint when started again."
            )
        first = self.consumed(back_to, global_batch)
        end = self.consumed(spike.step - 1, global_batch) + global_batch
        apart = [one for one in self.entries if not first <= one["first"] < end]
        new = _Entry(first=first, count=end - first, spike=spike.step, back_to=back_to)
        self.entries = sorted([*apart, new], key=lambda entry: entry["first"])

    def write(self, run: Run) -> None:
        """Keep it in a Run, whole or as it was."""
        run.write_json(_FILE, self.entries)
