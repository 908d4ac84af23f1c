"""Planned: the planner's rule for what a run does after a loss or a return.

It counts nodes for `plan.elastic.ways_on`, remembers how long which node was away and what going on
took in each way, and names the nodes of the way that ends the run soonest. What it remembers is of
one leader: a new one begins with what is stated there.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from paceline.config.job import Job, JobSpec
from paceline.elastic.decision import Decision, Option, Situation, placed, plain_rule
from paceline.plan.elastic import Action, Remaining, Replanner, WayOn, ways_on
from paceline.plan.scale import HOUR_S, node_return_hours
from paceline.render.figures import duration_text, plural

# While it waits, the choice is made anew after this part of the mean time until a return.
_LOOK_AGAIN = 0.1


class PlannedRule:
    """A `decision.Choose`: the least expected time to the end of the run, in a person's bounds.

    Args:
        asked: the Job as the person wrote it.
        job: the run's first Job, on all its nodes.
        clock: seconds, of any beginning.
    """

    def __init__(
        self, asked: JobSpec, job: Job, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._asked, self._job, self._clock = asked, job, clock
        self._replanners: dict[int, Replanner] = {}
        self._away: dict[str, float] = {}  # since when
        self._away_s, self._returns = 0.0, 0
        self._last: tuple[Action, int] | None = None  # and the generation that it ended
        self._go_on_s: dict[Action, float] = {}

    def __call__(self, situation: Situation) -> Decision:
        """The decision, with all that was possible and its expected time."""
        self._remember(situation)
        replanner = self._replanner(situation)
        if situation.before is None or not situation.nodes:
            begun = plain_rule(replanner.job_on)(situation)
            replanner.prepare(len(begun.nodes) - 1)  # what is lost first is most often one
            return begun
        now = self._remaining(situation)
        ways = ways_on(now, replanner)
        best, options = ways[0], tuple(_option(situation, way) for way in ways)
        if all(way.job is None for way in ways) and len(situation.nodes) < situation.min_nodes:
            return replace(plain_rule(replanner.job_on)(situation), options=options)
        if best.job is None:
            look_again_s = max(1.0, _LOOK_AGAIN * now.return_s) if best.action == "wait" else None
            said = _sentence(now, ways)
            return Decision(best.action, (), None, said, options, look_again_s)
        if now.lost or best.action == "grow":
            self._last = best.action, situation.before.number
        replanner.prepare(best.nodes - 1, best.nodes + 1)
        return Decision(best.action, options[0].nodes, best.job, _sentence(now, ways), options)

    def job_on(self, num_nodes: int) -> Job | None:
        """The best Job on so many nodes, also fewer than may train; None: there is none."""
        return self._replanner_of(self._job.cluster.devices_per_node).job_on(num_nodes)

    def _replanner(self, situation: Situation) -> Replanner:
        """For the devices that every node has."""
        here = self._job.cluster.devices_per_node
        return self._replanner_of(min((here, *(node.num_devices for node in situation.nodes))))

    def _replanner_of(self, devices: int) -> Replanner:
        if devices not in self._replanners:
            self._replanners[devices] = Replanner(self._asked, self._job, devices)
        return self._replanners[devices]

    def _remember(self, situation: Situation) -> None:
        now, there = self._clock(), {node.name for node in situation.nodes}
        for name in situation.lost_nodes:
            self._away.setdefault(name, now)
        for name in there & set(self._away):
            self._away_s += now - self._away.pop(name)
            self._returns += 1
        if self._last is None or situation.before is None:
            return
        action, ended = self._last
        if situation.before.number > ended and "first_step" in situation.seconds:
            self._go_on_s[action] = situation.seconds["first_step"]
            self._last = None

    def _remaining(self, situation: Situation) -> Remaining:
        assert situation.before is not None
        now, there = self._clock(), {node.name for node in situation.nodes}
        before = {node.name for node in situation.before.active}
        hurt = {loss.node for loss in situation.losses} & before | set(situation.lost_nodes)
        return Remaining(
            active=len(before),
            lost=len(hurt),
            restartable=len(hurt & there),
            spares=len(there - before),
            steps_left=situation.steps_left,
            step_s=situation.step_s,
            waited_s=situation.waited_s,
            go_on_s=self._go_on_s,
            away_s=self._away_s + sum(now - since for since in self._away.values()),
            returns=self._returns,
            assumed_return_s=node_return_hours(self._job.cluster).value * HOUR_S,
        )


def _option(situation: Situation, way: WayOn) -> Option:
    if way.job is None:
        return Option(way.action, (), "", way.expected_s, way.reason)
    there = [node.name for node in situation.nodes]
    _, nodes = placed(situation, there, way.nodes)
    return Option(way.action, nodes, way.job.layout.summary, way.expected_s, way.reason)


def _sentence(now: Remaining, ways: tuple[WayOn, ...]) -> str:
    """What happened, what is done and why, and what else would take how long."""
    happened = f"{plural(now.there, 'node')} can train and {now.active} do"
    if now.lost:
        verb = "has" if now.lost == 1 else "have"
        happened = f"{now.lost} of {plural(now.active, 'node')} {verb} lost processes"
    best, *others = ways
    said = f"{happened}: {best.action}, for {best.reason}"
    expected = [f"{way.action} {duration_text(way.expected_s)}" for way in (best, *others)]
    return f"{said}. Expected to the end of the run: {', '.join(expected)}."
