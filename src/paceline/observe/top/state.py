"""State: what is known of a run at this moment, from the newest lines of its metrics.jsonl."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.errors import InputError
from paceline.observe import summary
from paceline.observe.generations import Generations, GenerationsSoFar
from paceline.observe.rank_spread import FIGURES, Figure, mean_figure, slowest_rank
from paceline.observe.run import Run
from paceline.observe.top.follow import FollowedFile
from paceline.render.figures import duration_text

# Steps over which what jumps from step to step is averaged.
RECENT = 20
# A run is silent when no step has ended for so long, or for so many steps' time.
_SILENT_S, _SILENT_STEPS = 30.0, 10


@dataclass(frozen=True)
class RunState:
    """One run, now."""

    name: str
    num_steps: int
    """The last step that the Job asks for."""
    num_ranks: int
    device: str
    unit: str
    """What is counted: "tokens" or "samples"."""
    memory_limit_bytes: float | None
    """Of a device."""
    lines: Sequence[Mapping[str, Any]]
    """The newest steps, oldest first; perhaps none."""
    checkpoint: tuple[int, float] | None
    """Step and unix time of the newest one."""
    stop_asked: bool
    now_s: float
    num_damaged: int = 0
    """Lines of metrics.jsonl that are left out because they hold no step."""
    damage: str | None = None
    """Which lines of events.jsonl are left out, as a sentence."""
    generations: Generations | None = None
    """Of an elastic run."""

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    def last(self, key: str) -> float | None:
        """The newest finite value of a column."""
        values = (summary.number(line.get(key)) for line in reversed(self.lines))
        return next((value for value in values if value is not None), None)

    def typical(self, key: str) -> float | None:
        """The median of a column over the recent steps."""
        return summary.typical(self.recent, key)

    @property
    def recent(self) -> Sequence[Mapping[str, Any]]:
        """The steps that averages are over."""
        return self.lines[-RECENT:]

    @property
    def terms(self) -> summary.StepTime:
        """Where the time of the recent steps went: of those that were profiled last, if any."""
        profiled = [line for line in self.lines if line.get("profiled")]
        newest = [line for line in profiled if line["step"] > profiled[-1]["step"] - RECENT]
        return summary.step_time(newest or self.recent)

    def figure(self, name: str) -> Figure | None:
        """One of FIGURES of each rank over the recent steps."""
        return mean_figure(self.recent, name)

    @property
    def late(self) -> tuple[int, float] | None:
        """The rank that others wait for, and by how many seconds a step."""
        return slowest_rank(self.figure("busy_s"))

    @property
    def step_s(self) -> float | None:
        """Seconds from one step's end to the next, evaluations and pauses included."""
        ends = [line["time"] for line in self.recent if "time" in line]
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else self.last("step_time_s")

    @property
    def remaining_s(self) -> float | None:
        """Until the last step, at the recent pace."""
        return None if self.step_s is None else self.step_s * max(0, self.num_steps - self.step)

    @property
    def silent_s(self) -> float:
        """Since the last step ended; 0 before the first one."""
        return max(0.0, self.now_s - (self.last("time") or self.now_s))

    @property
    def word(self) -> str:
        """What the run does, in a word or two."""
        if self.step >= self.num_steps:
            return "complete"
        if self.stop_asked:
            return "stopping"
        if not self.lines:
            return "starting"
        if self.silent_s > max(_SILENT_S, _SILENT_STEPS * (self.step_s or 0)):
            return f"silent {duration_text(self.silent_s)}"
        return "running"

    def as_json(self) -> dict[str, Any]:
        """The figures that a frame shows."""
        late = self.late
        return {
            "run": self.name,
            "state": self.word,
            "step": self.step,
            "num_steps": self.num_steps,
            "loss": self.last("loss"),
            "eval_loss": self.last("eval_loss"),
            f"{self.unit}_per_s": self.typical(f"{self.unit}_per_s"),
            "mfu": self.typical("mfu"),
            "step_time_s": self.typical("step_time_s"),
            "remaining_s": self.remaining_s,
            "terms": dict(self.terms.terms_s),
            "ranks": {name: self.figure(name) for name in FIGURES},
            "late_rank": None if late is None else {"rank": late[0], "lag_s": late[1]},
            "skipped": self.last("skipped"),
            "checkpoint": None if self.checkpoint is None else self.checkpoint[0],
            "num_damaged_lines": self.num_damaged,
            **({} if self.generations is None else _interruptions(self.generations)),
        }


def _interruptions(found: Generations) -> dict[str, Any]:
    last = found.last_loss
    return {
        "generation": found.newest.number,
        "nodes": list(found.newest.nodes),
        "spares": list(found.newest.spares),
        "lost": dict(found.num_losses),
        "last_lost": None if last is None else last.sentence,
        "goodput": found.goodput,
        "effective_training_time_ratio": found.effective_ratio,
        "steps_recomputed": found.recomputed,
        "run_seconds": dict(found.seconds),
    }


class WatchedRun:
    """A run that is followed."""

    def __init__(self, path: Path) -> None:
        """Find the run.

        Raises:
            InputError: there is none, or its job.toml can't be read.
        """
        self.run = Run(path.absolute())
        if not self.run.exists:
            raise InputError(
                f"{path} is not the directory of a run (it has no job.toml): name one, such as "
                "runs/demo."
            )
        self._job = self.run.job()
        self._follow = FollowedFile(self.run.metrics_file)
        self._generations = GenerationsSoFar(self.run)

    def look(self) -> RunState:
        """What is known now."""
        self._follow.look()
        lines = list(self._follow.lines)
        self._generations.take(lines)
        found = self._generations.look()
        device = self._job.cluster.device
        memory = device.memory_bytes
        return RunState(
            name=self.run.path.name,
            num_steps=self._job.train.steps,
            num_ranks=(found and found.newest.num_ranks) or self._job.layout.num_ranks,
            device=device.name,
            unit=summary.unit_of(lines, self.run.facts()),
            memory_limit_bytes=None if memory is None else memory.value,
            lines=lines,
            checkpoint=self.run.last_checkpoint(),
            stop_asked=self.run.stop_file.exists(),
            now_s=time.time(),
            num_damaged=self._follow.num_damaged,
            damage=(self._generations.damage or "").removeprefix(f"{self.run.path}/") or None,
            generations=found,
        )
