"""Explain: a Run or a trace, put into one record that terminal, page and --json draw."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.config.job import Job
from paceline.explain.finding import Finding
from paceline.explain.out_of_memory import OutOfMemory, out_of_memory
from paceline.explain.rules import SHOWN, findings
from paceline.explain.rules.links import expected_s
from paceline.explain.subject import Subject
from paceline.explain.traffic import Flow
from paceline.explain.unexplained import Unexplained, unexplained
from paceline.explain.waterfall import Waterfall, waterfall
from paceline.observe.caveats import GRAPH_KERNELS_MISSING, NO_KERNELS, Caveat
from paceline.observe.summary import summarise
from paceline.render.figures import mfu_text, time_text

BOUNDS = (GRAPH_KERNELS_MISSING, NO_KERNELS)
"""Kinds of caveats with which terms are bounds: they stand before any figure."""


@dataclass(frozen=True)
class Explanation:
    """Where the time of a step goes, why, and what to change."""

    name: str
    headline: str
    """One sentence."""
    waterfall: Waterfall | None
    """None where a run ended before its first step."""
    flows: tuple[Flow, ...]
    """Collectives by kind and axis, the most exposed first; none where no step was profiled."""
    findings: tuple[Finding, ...]
    """All of them, the largest gain first."""
    unexplained: tuple[Unexplained, ...]
    """Lost terms of a tenth of the step or more without a cause, the largest first."""
    notes: tuple[str, ...]
    """What could not be looked at, and what was fitted to the Run."""
    next_command: str | None
    """What to do now."""
    job: Job | None = None
    """The Run's."""
    out_of_memory: OutOfMemory | None = None
    """Where a rank ran out of it."""
    caveats: tuple[Caveat, ...] = ()
    """What the traces can't say."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        flows = [{**each._asdict(), "bus_bytes_per_s": each.bus_bytes_per_s} for each in self.flows]
        return {
            "name": self.name,
            "headline": self.headline,
            "waterfall": self.waterfall
            and {
                **self.waterfall._asdict(),
                "rows": [row._asdict() for row in self.waterfall.rows],
            },
            "communication": flows,
            "findings": [each.to_json() for each in self.findings],
            "unexplained": [each._asdict() for each in self.unexplained],
            "caveats": [asdict(each) for each in self.caveats],
            "notes": list(self.notes),
            "next": self.next_command,
            "out_of_memory": self.out_of_memory and asdict(self.out_of_memory),
        }


def explain(path: Path) -> Explanation:
    """Explain a Run directory, a trace, or a folder of traces.

    Raises:
        InputError: nothing there is one of these, or a trace is damaged.
    """
    return explain_subject(Subject.of(path))


def explain_subject(subject: Subject) -> Explanation:
    """As `explain`, of what was read already."""
    memory = out_of_memory(subject)
    if memory is not None and subject.account is None and not subject.steady:
        return _of_no_step(subject, memory)
    found = findings(subject)
    left = unexplained(subject, found)
    return Explanation(
        subject.name,
        _headline(subject, found, left),
        waterfall(subject),
        tuple(_flows(subject)),
        tuple(found),
        tuple(left),
        tuple(_notes(subject)),
        _next_command(subject, found),
        subject.job,
        memory,
        () if subject.account is None else subject.account.caveats,
    )


def _of_no_step(subject: Subject, memory: OutOfMemory) -> Explanation:
    """Of a run that ran out of memory before its first step was done."""
    notes = tuple(memory.sentences)
    way = memory.ways[0].changes if memory.ways else ()
    command = _train_command(subject, way) if way else None
    headline = f"{subject.name} ran out of memory before its first step was done"
    return Explanation(
        subject.name, headline, None, (), (), (), notes, command, subject.job, memory
    )


def _flows(subject: Subject) -> Iterator[Flow]:
    """The collectives by kind, beside what the cluster's links should take for them."""
    if subject.account is not None:
        for flow in subject.traffic.flows():
            yield flow._replace(expected_s=expected_s(subject, flow))


def _headline(subject: Subject, found: Sequence[Finding], left: Sequence[Unexplained]) -> str:
    """What bounds all figures, the step, and what costs most of it, with a cause or without."""
    figures = summarise(subject.steady, subject.facts)
    told = [f"a step takes {time_text(subject.step_s)}"]
    if subject.job is not None:
        told = [f"{subject.job.layout.summary}: {told[0]}", mfu_text(figures.mfu)]
    worth = [each for each in found if each.gain >= SHOWN][:1]
    causes = [(each.gain, f"{each.name} costs {each.gain:.0%} of it") for each in worth]
    causes += [(each.share, each.clause) for each in left[:1]]
    told += [text for _, text in sorted(causes, key=lambda each: -each[0])]
    if not causes:
        told.append("nothing found that costs more than 1 % of it")
    told_all = ", ".join(told)
    bounds = _bounds(subject)
    return " ".join([*bounds, told_all[0].upper() + told_all[1:]]) if bounds else told_all


def _bounds(subject: Subject) -> list[str]:
    """Caveats that make all figures bounds."""
    account = subject.account
    return [] if account is None else [each.text for each in account.caveats if each.kind in BOUNDS]


def _notes(subject: Subject) -> list[str]:
    memory = out_of_memory(subject)
    told = [] if subject.damage is None else [subject.damage]
    told += memory.sentences if memory is not None else ()
    if subject.account is not None:
        told += [each.text for each in subject.account.caveats if each.kind not in BOUNDS]
    if subject.account is None:
        told.append(
            "No steps were profiled, so only what the loop times is known: train with --set "
            "observe.profile_every=50 to see the rest."
        )
    elif subject.job is None:
        told.append("A trace alone: no Job to change and no plan to compare with.")
        if not subject.ranks_belong_together and len(subject.account.ranks) > 1:
            told.append(
                "These traces share no collectives that all of their ranks took part in, so they "
                "may be of several jobs: who waits for whom isn't told."
            )
    elif len(subject.account.ranks) < subject.job.layout.num_ranks:
        told.append(
            f"{len(subject.account.ranks)} of {subject.job.layout.num_ranks} ranks were recorded: "
            "who waits for whom can't be told."
        )
    if subject.job is not None and subject.planned is None:
        told += [str(note) for note in subject.plan.get("notes", ())]
    return told + _fitted(subject)


def _fitted(subject: Subject) -> list[str]:
    """What calibration changed, and from which steps."""
    from paceline.config.job import read_cluster
    from paceline.config.stack import CONSTANTS

    file = None if subject.folder is None else subject.folder / "cluster.toml"
    if file is None or not file.exists() or subject.job is None:
        return []
    stack = read_cluster(file).stack
    before = subject.job.cluster.stack
    if stack is None:
        return []
    moved = []
    for name, value in stack.constants.items():
        was = (before.constants if before else {}).get(name, CONSTANTS[name].default)
        if abs(value / was - 1) > 0.1:
            moved.append(f"{name} {was:.3g} -> {value:.3g}")
    changed = f": {', '.join(moved)}" if moved else ", none by more than 10 %"
    return [f"{file} has the planner's constants {stack.origin}{changed}."]


def _next_command(subject: Subject, found: Sequence[Finding]) -> str | None:
    """The command that tries the first change there is."""
    job = subject.job
    if job is None:
        return None
    best = next((each for each in found if each.changes and each.gain >= SHOWN), None)
    if best is None:
        return f"paceline tune {subject.name}"
    return _train_command(subject, best.changes)


def _train_command(subject: Subject, changes: Sequence[str]) -> str:
    assert subject.job is not None
    texts = " ".join(f"--set '{text}'" for text in changes)
    return f"paceline train {subject.name}/job.toml --set name={subject.job.name}-2 {texts}"
