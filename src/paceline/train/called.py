"""Called: up to which step a person's own functions were given the lines of metrics.jsonl.

After a loss steps may be done again: their lines are written anew, and nobody is called again. The
lines that are there say it, but for those that are dropped to be written anew: what these said is
kept in the Run first.
"""

from contextlib import suppress
from dataclasses import dataclass

from pydantic import TypeAdapter

from paceline.config import files
from paceline.config.errors import InputError
from paceline.config.frozen import CountOrNone, FrozenConfig
from paceline.observe.run import Run

_FILE = "called.json"


class _Marks(FrozenConfig):
    """What is kept of it."""

    step: CountOrNone
    evaluation: CountOrNone


_MARKS = TypeAdapter(_Marks)


@dataclass
class Called:
    """Of one Run, on its first rank."""

    step: int = 0
    """The last one that was given."""
    evaluation: int = 0
    """The last step that was given with its evaluation."""

    @staticmethod
    def of(run: Run) -> "Called":
        """By whoever was the first rank until now. A file that is damaged says nothing."""
        found, lines = Called(), run.newest_steps()
        if lines:
            found.step = lines[-1]["step"]
            evaluated = [line["step"] for line in lines if "eval_loss" in line]
            found.evaluation = evaluated[-1] if evaluated else lines[0]["step"] - 1
        with suppress(InputError):
            kept = files.read_json(run.path / _FILE, _MARKS, "remove it")
            found.step = max(found.step, kept.step)
            found.evaluation = max(found.evaluation, kept.evaluation)
        return found

    def keep(self, run: Run) -> None:
        """Before lines are dropped that were given; a full disk is no reason to stop."""
        with suppress(OSError):
            run.write_json(_FILE, {"step": self.step, "evaluation": self.evaluation})

    def go_back(self, run: Run, step: int) -> None:
        """An earlier state came back after a spike: what follows it is another run's."""
        self.step, self.evaluation = min(self.step, step), min(self.evaluation, step)
        with suppress(OSError):
            (run.path / _FILE).unlink(missing_ok=True)
