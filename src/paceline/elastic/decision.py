"""What a run may do after a loss or a return: the question, the answer, and a plain rule.

Whoever starts the agents gives the rule. The planner's weighs the expected time to the end of the
run under each choice; the plain one here never waits for a machine that it can do without.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.config.job import Job
from paceline.elastic.generation import Generation, Node

Action = Literal["start", "replace", "spare", "shrink", "grow", "wait", "stop"]
LossClass = Literal[
    "dead", "vanished", "stopped", "stuck", "wrong_collective", "waiting_for_data", "slow"
]


@dataclass(frozen=True)
class Loss:
    """What was lost."""

    node: str
    rank: int | None
    """In the generation that it was lost from; None: the whole node."""
    cause: LossClass
    sentence: str


@dataclass(frozen=True)
class Situation:
    """What is known when a new generation is made."""

    before: Generation | None
    """None: the run begins."""
    nodes: tuple[Node, ...]
    """Who is there: those of the generation before in its order, then others by name."""
    losses: tuple[Loss, ...]
    min_nodes: int
    max_nodes: int
    """So many train at most."""
    waited_s: float
    """How long the run has waited for nodes, since the loss or since it began."""
    wait_s: float
    """How long it may."""
    step: int = 0
    """Steps done."""
    steps_left: int = 0
    step_s: float | None = None
    """Seconds of a step, lately; None: none was made."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Measured in this run, latest, by what took them: notice, decide, connect, build, restore,
    and first_step: from a loss to the next finished step."""

    @property
    def lost_nodes(self) -> tuple[str, ...]:
        """Of those that trained, who isn't there."""
        there = {node.name for node in self.nodes}
        before = self.before.active if self.before is not None else ()
        return tuple(node.name for node in before if node.name not in there)


@dataclass(frozen=True)
class Option:
    """A choice that was weighed."""

    action: Action
    nodes: tuple[str, ...]
    layout: str
    expected_s: float | None
    """To the end of the run; None: not known."""
    reason: str


@dataclass(frozen=True)
class Decision:
    """What is done."""

    action: Action
    nodes: tuple[str, ...] = ()
    """Names of those that train, in order of rank; others that are there are spares."""
    job: Job | None = None
    """What they run; None for "wait" and "stop"."""
    sentence: str = ""
    """For a person."""
    options: tuple[Option, ...] = ()
    look_again_s: float | None = None
    """For "wait": when to ask again though nothing has changed; None: when the wait is over."""


Choose = Callable[[Situation], Decision]
JobOn = Callable[[int], Job | None]
"""The best Job on so many nodes; None: there is none."""


def plain_rule(job_on: JobOn) -> Choose:
    """Go on with as many nodes as there are, in the places that they had; a spare takes a lost
    one's place. Wait only where there are too few, then stop."""

    def choose(situation: Situation) -> Decision:
        there = [node.name for node in situation.nodes]
        for count in range(min(len(there), situation.max_nodes), situation.min_nodes - 1, -1):
            job = job_on(count)
            if job is not None:
                action, nodes = placed(situation, there, count)
                return Decision(action, nodes, job, _sentence(action, nodes, situation))
        few = f"{len(there)} nodes are here and {situation.min_nodes} are needed"
        left_s = situation.wait_s - situation.waited_s
        if left_s > 0:
            return Decision("wait", sentence=f"{few}: waiting for {left_s:.0f} s at most.")
        return Decision("stop", sentence=f"{few}, and none came within {situation.wait_s:g} s.")

    return choose


def placed(situation: Situation, there: list[str], count: int) -> tuple[Action, tuple[str, ...]]:
    """What it is called to go on with so many of those who are there, and in which order."""
    if situation.before is None:
        return "start", tuple(there[:count])
    before = [node.name for node in situation.before.active]
    fresh = [name for name in there if name not in before]
    places: list[str | None] = [
        name if name in there else (fresh.pop(0) if fresh else None) for name in before
    ]
    size = situation.before.nodes_together
    together = [places[at : at + size] for at in range(0, len(places), size)]
    together.sort(key=lambda group: None in group)  # whole workers stay what they are
    placed = [name for group in together for name in group if name is not None]
    nodes = tuple((placed + fresh)[:count])
    if count != len(before):
        return ("grow" if count > len(before) else "shrink"), nodes
    return ("replace" if set(nodes) == set(before) else "spare"), nodes


def _sentence(action: Action, nodes: tuple[str, ...], situation: Situation) -> str:
    lost = ", ".join(situation.lost_nodes)
    known = {node.name for node in situation.before.active} if situation.before else set()
    new = ", ".join(name for name in nodes if name not in known)
    num = "1 node trains" if len(nodes) == 1 else f"{len(nodes)} nodes train"
    return {
        "start": f"{num}.",
        "replace": f"a lost rank is started again where it was: {num}.",
        "spare": f"{new} takes the place of {lost}: {num}.",
        "shrink": f"{num} without {lost}.",
        "grow": f"{new} comes in: {num}.",
    }[action]
