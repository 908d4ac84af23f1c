"""Rules about what interruptions cost a run that goes on without lost machines."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from paceline.config.elastic import Elastic
from paceline.config.job import Job
from paceline.explain.finding import Evidence, Finding
from paceline.explain.subject import Subject
from paceline.observe.generations import PHASES, Generations
from paceline.plan.scale import daly_interval_s
from paceline.render.figures import duration_text, listed, plural, share_text

# Classes that took less are left out of the sentence.
_SHOWN_S = 0.05


class _Saving(NamedTuple):
    """What a setting would have saved."""

    seconds: float
    change: str
    sentence: str


class _Costs(NamedTuple):
    """Seconds that interruptions took, and what is needed to say why."""

    found: Generations
    by_class: dict[str, float]
    num_steps: int
    """Kept."""
    step_s: float
    """Mean, on the most nodes."""
    most_nodes: int
    fewest_nodes: int

    @property
    def total_s(self) -> float:
        return sum(self.by_class.values())

    def recomputed_s(self, *sources: str) -> float:
        """Seconds of whole steps that were done again from a state of these sources."""
        return self.step_s * sum(one.recomputed for one in self.found.all if one.source in sources)


def interruptions(subject: Subject) -> Finding | None:
    """Machines were lost: what that took, and what would have taken less."""
    costs = _costs(subject)
    if costs is None or not costs.total_s:
        return None
    found, job = costs.found, subject.job
    savings = (
        [] if job is None else [one for one in _savings(subject, job, costs) if one.seconds > 0]
    )
    # Without a setting that helps, what fewer losses would give.
    gain_s = min(costs.total_s, sum(one.seconds for one in savings) or costs.total_s)
    run_s = found.run_s / costs.num_steps
    taken = (f"{name} {duration_text(s)}" for name, s in costs.by_class.items() if s > _SHOWN_S)
    kinds = (f"{num} {kind.replace('_', ' ')}" for kind, num in found.num_losses.items())
    clock = f"Lost ({listed(list(kinds))}) in all: {listed(list(taken))}."
    return Finding.of(
        subject,
        f"Interruptions took {duration_text(costs.total_s)} of {duration_text(found.run_s)}, and "
        f"goodput is {share_text(found.goodput)}.",
        gain_s / costs.num_steps,
        [
            Evidence("clock", clock),
            *(Evidence("settings", one.sentence) for one in savings),
            *_worst_node(found),
        ],
        changes=[one.change for one in savings],
        advice="Look at the machines that were lost most often: `paceline doctor` checks one.",
        basis="measured",
        of_s=run_s,
    )


def _costs(subject: Subject) -> _Costs | None:
    found = subject.generations
    if found is None or not found.losses:
        return None
    steps = [(len(one.nodes), one.steps) for one in found.all if one.steps is not None]
    if not steps:
        return None
    most = max(nodes for nodes, _ in steps)
    whole = [one for nodes, one in steps if nodes == most]
    step_s = sum(one.seconds for one in whole) / sum(one.num for one in whole)
    by_class = {name: sum(one.recovery_s.get(name, 0.0) for one in found.all) for name in PHASES}
    by_class["recomputed"] = found.seconds.get("recomputed", 0.0)
    fewer = (one.seconds - one.num * step_s for nodes, one in steps if nodes < most)
    by_class["fewer nodes"] = sum(max(0.0, slower_s) for slower_s in fewer)
    return _Costs(
        found,
        by_class,
        sum(one.num for _, one in steps),
        step_s,
        most,
        min(nodes for nodes, _ in steps),
    )


def _savings(subject: Subject, job: Job, costs: _Costs) -> Iterator[_Saving]:
    elastic, by_class = job.elastic, costs.by_class
    short_s = by_class["fewer nodes"] + by_class["waiting"]
    missing = max(1, costs.most_nodes - costs.fewest_nodes)
    spares = elastic.spares + missing
    yield _Saving(
        short_s,
        f"elastic.spares={spares}",
        f"{plural(missing, 'node')} more among the spares would have saved "
        f"{duration_text(short_s)} of waiting and of steps on fewer nodes.",
    )
    if elastic.copy_every != 1:
        again_s = costs.recomputed_s("live", "buddy")
        yield _Saving(
            again_s,
            "elastic.copy_every=1",
            f"A copy in every step would have saved {duration_text(again_s)} of steps done again, "
            "less what it costs.",
        )
    every, suits = job.checkpoint.every, _best_interval(subject, job, costs)
    if suits < every:
        again_s = costs.recomputed_s("disk") * (1 - suits / every)
        yield _Saving(
            again_s,
            f"checkpoint.every={suits}",
            f"A checkpoint every {suits} steps (Daly) would have saved {duration_text(again_s)} of "
            "steps done again from disk.",
        )
    usual_s = Elastic().heartbeat_s
    if elastic.heartbeat_s > usual_s:
        sooner_s = by_class["notice"] * (1 - usual_s / elastic.heartbeat_s)
        yield _Saving(
            sooner_s,
            f"elastic.heartbeat_s={usual_s}",
            f"Heartbeats of {usual_s:g} s would have noticed losses {duration_text(sooner_s)} "
            "sooner.",
        )


def _best_interval(subject: Subject, job: Job, costs: _Costs) -> int:
    """Daly's steps between checkpoints, for what a save blocks here and how often losses came."""
    save_s = subject.mean_s("checkpoint_stall") * job.checkpoint.every
    between_losses_s = costs.found.run_s / len(costs.found.losses)
    return max(1, round(float(daly_interval_s(save_s, between_losses_s)) / costs.step_s))


def _worst_node(found: Generations) -> Iterator[Evidence]:
    lost = Counter(loss.node for loss in found.losses if loss.node is not None)
    for node, times in lost.most_common(1):
        if times > 1:
            yield Evidence(
                "machine", f"{node} was lost {times} times, of {len(found.losses)} losses."
            )
