"""Metrics buffer: turns the results of steps into the lines of metrics.jsonl, in the order of the
steps.

A result is read late (one step on CUDA, so that the host stays ahead of the device) and a profiled
step's terms are known only when its window ends; the buffer keeps a line until it is complete.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.config.errors import RunError
from paceline.observe.rank_spread import record_of_ranks
from paceline.train.noise_scale import NoiseEstimates
from paceline.train.results import StepResult
from paceline.train.spikes import Spike

NUM_RECENT = 4
"""A line is written a step or two after its step, but for workers that meet in rounds."""

Line = dict[str, Any]
Terms = dict[str, float]


@dataclass
class MetricsBuffer:
    """The steps whose results are still to come, and what those read so far amount to."""

    write: Callable[[Line], None]
    """Takes a complete line."""
    lag: int
    """Steps by which results are read late."""
    most_bad_steps: int
    """Bad steps in a row that end the run."""
    num_recent: int = NUM_RECENT
    """So many lines are kept after they are written."""
    see_spike: Callable[[Spike], None] = lambda _spike: None
    """Is told of each."""
    see_ranks: Callable[[dict[str, list[float]]], None] = lambda _figures: None
    """Takes what all ranks said of themselves in a step."""
    noise: NoiseEstimates | None = None
    """Makes figures of what a step measured of the noise in gradients."""
    on_spike: str = "go_on"
    """`elastic.on_spike`."""
    rolls_back: Spike | None = None
    """One after which an earlier state is to come back."""
    num_skipped: int = 0
    num_bad_in_a_row: int = 0
    stop_wanted: bool = False
    incomplete: int | None = None
    """A step whose line is read and not written: its evaluation is still to be made."""
    recent: list[Line] = field(default_factory=list)
    """The last lines written: where rank 0 is lost before it writes one, another rank does."""
    _unread: deque[tuple[Line, Callable[[], StepResult]]] = field(default_factory=deque)
    _held: list[Line] = field(default_factory=list)
    _terms: dict[int, Terms] = field(default_factory=dict)
    """Of profiled steps whose lines are still to be read."""

    def add(self, line: Line, read: Callable[[], StepResult]) -> None:
        """Take a step's line and the reader of its result; read those that are due.

        Raises:
            RunError: too many bad steps in a row.
        """
        self._unread.append((line, read))
        while len(self._unread) > self.lag:
            self._read_one()

    def release(self, terms_of_step: dict[int, Terms] | None = None) -> None:
        """Write the lines that were read, those of profiled steps with their measured terms.

        A line that is read after its window was accounted for gets its terms when it is written.
        """
        self._terms |= terms_of_step or {}
        complete = [line for line in self._held if line["step"] != self.incomplete]
        for line in complete:
            terms = self._terms.pop(line["step"], None)
            if terms is not None:
                line |= {"terms": terms, "profiled": True, "step_time_s": sum(terms.values())}
            self.recent.append(line)
            self.write(line)
        del self._held[: len(complete)]
        del self.recent[: -self.num_recent]

    def newest(self) -> list[Line]:
        """The last lines that were read, also those that are not written yet."""
        return [*self.recent, *self._held]

    def catch_up(self) -> None:
        """Read everything: when workers that step each for itself have met."""
        while self._unread:
            self._read_one()

    def settle(self) -> None:
        """Read everything and write it: before a checkpoint, and at the end."""
        self.catch_up()
        self.release()

    def write_missing(self, last: Callable[[], int]) -> None:
        """Write the lines after step `last` that another rank was to write, which was lost."""
        if self.recent:
            written = last()
            for line in [line for line in self.recent if line["step"] > written]:
                self.write(line)

    def forget(self) -> None:
        """Forget the steps that are not written yet, and the spike: an earlier state came back."""
        self._unread.clear()
        self._held.clear()
        self._terms.clear()
        self.recent.clear()
        self.rolls_back, self.num_bad_in_a_row = None, 0

    def _read_one(self) -> None:
        line, read = self._unread.popleft()
        result = read()
        self.stop_wanted |= result.stop_wanted
        is_skipped = result.is_bad or (result.spike > 0 and self.on_spike == "skip")
        self.num_skipped += is_skipped
        self.num_bad_in_a_row = self.num_bad_in_a_row + 1 if is_skipped else 0
        line |= {"loss": result.loss, "grad_norm": result.grad_norm, "skipped": self.num_skipped}
        if result.figures:
            line["figures"] = (
                self.noise.among(result.figures, result.grad_norm) if self.noise else result.figures
            )
        if result.comm:
            line["comm"] = result.comm
        if result.ranks:
            self.see_ranks(result.ranks)
            line["ranks"] = {name: record_of_ranks(values) for name, values in result.ranks.items()}
        self._held.append(line)
        if result.spike > 0 and self.rolls_back is None:  # what follows one is undone with it
            spike = Spike(line["step"], result.loss, result.spike)
            self.see_spike(spike)
            self.rolls_back = spike if self.on_spike == "roll_back" else None
        if self.num_bad_in_a_row >= self.most_bad_steps:
            self.release()
            what = "not finite" if result.is_bad else "a spike"
            raise RunError(
                f"loss or gradient was {what} for {self.num_bad_in_a_row} steps in a row (the "
                f"last was step {line['step']}, loss {result.loss}): all of them were skipped. "
                "Lower optim.lr, lengthen optim.warmup_steps or look at the data; the run goes on "
                "from its last checkpoint when started again."
            )


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
