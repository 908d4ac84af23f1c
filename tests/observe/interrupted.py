"""A made-up elastic Run with realistic events: what agents and rank 0 would have written.

Four nodes with a spare train; one node dies, one vanishes, the run waits for nodes, is stopped with
a checkpoint, and is started again an hour later. The clock is simulated, so every second is known:
`Simulated.seconds` holds them by class, worked out beside the code under test.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.observe.run import Run, json_lines
from tests.observe import synthetic

STEP_S, BETWEEN_S = 0.4, 0.01
START_S = 1_763_630_000.0
_LINES = synthetic.lines(600)


@dataclass
class Simulated:
    """A clock, and what was written while it went."""

    now_s: float = START_S
    generation: int = 0
    step: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)

    def pass_(self, name: str, seconds: float) -> None:
        self.now_s += seconds
        self.seconds[name] += seconds

    def tell(self, event: str, **fields: Any) -> None:
        line = {"time": self.now_s, "event": event, "generation": self.generation, **fields}
        self.events.append(line)

    def claim(self, nodes: list[str], num_active: int, reason: str) -> None:
        self.generation += 1
        self.tell(
            "generation",
            nodes=nodes,
            num_active=num_active,
            num_ranks=2 * num_active,
            layout=f"fsdp={2 * num_active}",
            leader=nodes[0],
            reason=reason,
        )

    def recover(
        self,
        source: str,
        again: int,
        lost_s: float | None = None,
        start_s: float = 0.0,
        **told: float,
    ) -> None:
        """Start the ranks that are missing; connect, build, restore; then the first step."""
        phases = {"start": start_s, "connect": 0.05, "build": 0.3, "restore": 0.15}
        for name, seconds in phases.items():
            self.pass_(name, seconds)
        phases["start"] = sum(phases.values())  # the leader's word for all of it
        self.tell(
            "recovered",
            step=self.step,
            source=source,
            recomputed=again,
            bytes=2.4e9,
            seconds={**phases, **told},
        )
        begins = source in ("start", "disk")
        self.train(1, "start" if begins else "between")  # all before the first step is its start
        # Written by another process than the step's line.
        self.tell(
            "first_step",
            step=self.step,
            seconds=None if lost_s is None else self.now_s - lost_s,
        )

    def train(self, num: int, into: str = "between") -> None:
        for _ in range(num):
            self.pass_(into, BETWEEN_S)
            self.pass_("kept", STEP_S)
            self.step += 1
            self.lines.append(self._line())

    def _line(self) -> dict[str, Any]:
        line = _LINES[self.step - 1]
        pace = STEP_S / line["step_time_s"]
        return {
            **line,
            "generation": self.generation,
            "step_time_s": STEP_S,
            "tokens_per_s": line["tokens_per_s"] / pace,
            "terms": {term: seconds * pace for term, seconds in line["terms"].items()},
            "time": self.now_s,
            "between_s": BETWEEN_S,
        }

    def lose(self, lost_s: float, noticed_s: float, back: int, **what: Any) -> float:
        """Work for a while, of which nothing is kept, nor of the last `back` steps.

        Returns:
            Unix time at which it was noticed.
        """
        for _ in range(back):
            self.lines.pop()
            self.step -= 1
            self.seconds["kept"] -= STEP_S
            self.seconds["between"] -= BETWEEN_S
            self.seconds["recomputed"] += STEP_S + BETWEEN_S
        self.pass_("recomputed", lost_s)
        self.pass_("notice", noticed_s)
        self.tell("lost", host=what["node"], place="trainer.py:88", **what)
        return self.now_s

    def decide(self, action: str, seconds: float = 0.02, into: str = "decide") -> None:
        self.tell("decision", action=action, options=[], sentence=f"{action}.")
        self.pass_(into, seconds)


DEAD = "rank 5 on n2 was killed (SIGKILL) in the backward pass of step 61."
VANISHED = "n1 has not answered for 2.0 s: it trained ranks 2 and 3."


def simulated() -> Simulated:
    """Seven generations of two starts."""
    run = Simulated()
    run.tell("admitted", node="n4", check="0.8 s, 97 % of what the others have")
    run.decide("start", 0.0)
    run.claim(["n0", "n1", "n2", "n3", "n4"], 4, "start")
    run.pass_("start", 4.0)
    run.recover("start", 0)
    run.train(59)
    lost = {"node": "n2", "rank": 5, "class": "dead", "sentence": DEAD}
    at_s = run.lose(0.25, 0.03, 0, **lost)
    run.decide("replace")
    run.claim(["n0", "n1", "n2", "n3", "n4"], 4, DEAD)
    run.recover("live", 0, at_s, 0.6, notice=0.03, decide=0.02)
    run.train(99)
    lost = {"node": "n1", "rank": None, "class": "vanished", "sentence": VANISHED}
    at_s = run.lose(0.1, 2.0, 3, **lost)
    run.decide("spare")
    run.claim(["n0", "n4", "n2", "n3"], 4, VANISHED)
    run.recover("buddy", 3, at_s, notice=2.0, decide=0.02)
    run.train(40)
    # A report that nothing follows from: it must not count as time.
    slow = "rank 6 on n3 takes 0.52 s a step where others take 0.40 s."
    run.tell("lost", node="n3", rank=6, host="n3", place=None, sentence=slow, **{"class": "slow"})
    run.train(80)
    sentence = "rank 1 on n0 died: CUDA error: an illegal memory access."
    lost = {"node": "n0", "rank": 1, "class": "dead", "sentence": sentence}
    at_s = run.lose(0.2, 0.02, 0, **lost)
    run.decide("wait", 30.0, "waiting")
    run.decide("shrink", 0.0)
    run.claim(["n4", "n2", "n3"], 3, sentence)
    run.recover("buddy", 0, at_s, notice=0.02)
    run.train(50)
    run.tell("admitted", node="n0", check="0.9 s")
    run.decide("grow", 0.3)
    run.claim(["n4", "n2", "n3", "n0"], 4, "n0 came back.")
    run.recover("live", 0, notice=0.0, decide=0.3)
    run.train(30)
    run.tell("notice", node="n4", within_s=30.0, source="SIGTERM")
    run.pass_("between", 1.5)
    run.tell("saved", step=run.step, kind="disk")
    run.tell("end", state="saved", exit_code=75)
    return run


def started_again(run: Simulated) -> Simulated:
    """An hour later, on two nodes, to the end."""
    run.now_s += 3600
    run.decide("wait", 12.0, "waiting")
    run.claim(["n0", "n2"], 2, "start")
    run.pass_("start", 3.0)
    run.recover("disk", 0)
    run.train(60)
    run.pass_("between", 0.8)
    run.tell("end", state="finished", exit_code=0)
    return run


def write(path: Path, made: Simulated) -> Run:
    """Write a Run directory that holds it."""
    run = synthetic.run(path, made.lines)
    run.write("events.jsonl", json_lines(made.events))
    return run
