"""Faults by kind x where x phase: what the run says of each, how soon, and whether it goes on.

How it works: each cell is a run of a small Job on three nodes of one rank. A hook in its ranks
(`benchmarks.elastic.faults`) breaks the asked rank at the asked phase, once, and notes the moment.
What only somebody outside can do (to an agent, to a link) is done when the rank is there. Then the
cell waits for the verdict in events.jsonl, the next new step, and the run's end. It holds if the
verdict is of the stated class, within the stated time, and all steps stand in metrics.jsonl once.

Nodes are plain processes; for "link cut" they are network namespaces, and for "full disk" the Run
is on a tmpfs of its own: both need root, and are left out with a sentence where they can't be had.

    python -m benchmarks.elastic_faults [--only "kill -9" --phase step] [--list]
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.elastic.agents import Agents
from benchmarks.elastic.faults import FAULT, Asked
from benchmarks.elastic.history import Line, read_lines
from benchmarks.elastic.jobs import write_job
from benchmarks.elastic_soak import HEARTBEAT_S, JOB
from benchmarks.netlab import Laboratory, why_not
from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown

NUM_NODES = 3
STEPS, FAULT_STEP = 40, 22
_EVAL_EVERY, _CHECKPOINT_EVERY = 5, 5
_TMPFS_MIB = 24
_LOOK_S = 0.005
_RUN_LIMIT_S = 240.0
_PHASES = ("start", "step", "collective", "evaluation", "checkpoint", "reshard", "shutdown")

_AT_ONCE_S = 1.0
"""For a verdict about what the kernel tells: a process or a connection that ended."""
_SILENT_S = HEARTBEAT_S + 1.5
"""For one about who is silent."""
FIRST_LIMIT_S = 60.0
_STUCK_S, _FIRST_S = 12.0, FIRST_LIMIT_S + 15
"""For one about a section that takes too long: timed before, and for the first time."""

# Kind -> the classes that are right, and seconds until the verdict in a section that was timed.
_STATED: dict[str, tuple[tuple[str, ...], float]] = {
    "kill -9": (("dead",), _AT_ONCE_S),
    "exit 137": (("dead",), _AT_ONCE_S),
    "exception": (("dead",), _AT_ONCE_S),
    "SIGSTOP": (("stopped", "stuck"), _SILENT_S + 2),
    "endless loop": (("stuck",), _STUCK_S),
    "dead disk": (("stuck", "waiting_for_data"), _STUCK_S),
    "agent kill -9": (("dead", "vanished"), _AT_ONCE_S),
    "agent SIGSTOP": (("vanished",), _SILENT_S),
    "link cut": (("vanished",), _SILENT_S),
    "full disk": ((), 0.0),
}
_OF_RANKS = ("kill -9", "exit 137", "exception", "SIGSTOP", "endless loop", "dead disk")
_OF_NODES = ("agent kill -9", "agent SIGSTOP", "link cut")
_STUCK = ("endless loop", "dead disk")
_UNTIMED = ("start", "reshard", "shutdown", "evaluation", "checkpoint")


@dataclass(frozen=True)
class Cell:
    """A fault, whom it strikes, and when."""

    kind: str
    where: str
    """rank 0, middle rank, agent, leader's agent, or disk."""
    phase: str

    @property
    def classes(self) -> tuple[str, ...]:
        """Of verdicts that are right; none: the run says nothing, or a sentence at its end."""
        return _STATED[self.kind][0]

    @property
    def limit_s(self) -> float:
        """Until the verdict."""
        is_first = self.kind in _STUCK and self.phase in _UNTIMED
        return _FIRST_S if is_first else _STATED[self.kind][1]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    cell: Cell
    verdict: str | None
    verdict_s: float | None
    next_step_s: float | None
    end: str | None
    sentence: str
    problem: str | None
    """None: it holds."""


def cells() -> list[Cell]:
    """All of them."""
    found = [
        Cell(kind, where, phase)
        for kind in _OF_RANKS
        for where in ("rank 0", "middle rank")
        for phase in (*_PHASES, *(["data"] if kind == "dead disk" else []))
    ]
    found += [
        Cell(kind, where, phase)
        for kind in _OF_NODES
        for where in ("agent", "leader's agent")
        for phase in _PHASES
    ]
    found += [Cell("full disk", "disk", phase) for phase in ("step", "evaluation", "checkpoint")]
    return found


def run_cell(cell: Cell, folder: Path) -> Outcome:
    """Train under a cell's fault."""
    settings = [
        *(f"train.steps={STEPS}", f"train.eval_every={_EVAL_EVERY}", "elastic.min_nodes=1"),
        *(f"checkpoint.every={_CHECKPOINT_EVERY}", f"elastic.heartbeat_s={HEARTBEAT_S}"),
        *("elastic.restarts=10", f"elastic.first_limit_s={FIRST_LIMIT_S}"),
    ]
    job, _ = write_job(JOB, folder, settings)
    rank = 0 if cell.where == "rank 0" else 1
    asked = Asked(cell.kind, rank, cell.phase, FAULT_STEP, str(folder))
    with _nodes(cell, job, folder, settings, asked) as (agents, cut):
        for node in range(NUM_NODES):
            agents.start(node)
        if cell.phase == "reshard":
            _make_reshard(agents)
        if not _until(asked.happened.exists, _RUN_LIMIT_S, agents):
            return _outcome(cell, agents, None, f"the phase was not reached:\n{agents.outputs()}")
        struck = _act(cell, agents, asked, cut)
        _until(lambda: _has_ended(agents), _RUN_LIMIT_S, agents)
        if cell.kind == "agent SIGSTOP" and struck is not None:
            agents.send(struck, signal.SIGCONT)
        agents.wait(20 if cell.kind != "link cut" else 5)
        happened_s = float(asked.happened.read_text())
        return _outcome(cell, agents, happened_s, None)


@contextmanager
def _nodes(
    cell: Cell, job: Path, folder: Path, settings: list[str], asked: Asked
) -> Iterator[tuple[Agents, Callable[[int], None]]]:
    """The nodes of a cell, and what cuts the link of one."""

    def no_cut(_node: int) -> None:
        raise AssertionError("there is no link")

    told = {FAULT: asked.text()}
    if cell.kind == "link cut":
        with Laboratory(NUM_NODES) as lab:
            agents = Agents(NUM_NODES, 1, job, folder, settings, told, lab)
            with agents:
                yield agents, lab.cut
    elif cell.kind == "full disk":
        size = f"size={_TMPFS_MIB}m"
        (folder / "runs").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", folder / "runs"], check=True)
        try:
            with Agents(NUM_NODES, 1, job, folder, settings, told) as agents:
                yield agents, no_cut
        finally:
            subprocess.run(["umount", "-l", folder / "runs"], check=False)
    else:
        with Agents(NUM_NODES, 1, job, folder, settings, told) as agents:
            yield agents, no_cut


def _make_reshard(agents: Agents) -> None:
    """Lose the last rank, so that the others make another generation."""
    _until(lambda: agents.step() >= FAULT_STEP // 2, _RUN_LIMIT_S, agents)
    ranks = agents.rank_pids()
    with suppress(ProcessLookupError):
        os.kill(ranks[max(ranks)], signal.SIGKILL)


def _act(cell: Cell, agents: Agents, asked: Asked, cut: Callable[[int], None]) -> int | None:
    """Do what the rank can't do itself, and let it go on; the node that was struck."""
    if cell.kind not in _OF_NODES:
        return None
    leader = agents.leader() or 0
    others = [node for node in range(NUM_NODES) if node != leader]
    node = leader if cell.where == "leader's agent" else others[0]
    if cell.kind == "link cut":
        cut(node)
    else:
        number = signal.SIGKILL if cell.kind == "agent kill -9" else signal.SIGSTOP
        os.kill(agents.agent(node), number)
    asked.acted.touch()
    return node


def _until(is_true: Callable[[], bool], limit_s: float, agents: Agents) -> bool:
    deadline = time.monotonic() + limit_s
    while not (found := is_true()) and time.monotonic() < deadline and agents.num_running:
        time.sleep(_LOOK_S)
    return found or is_true()


def _has_ended(agents: Agents) -> bool:
    events = agents.events()
    return bool(events) and events[-1]["event"] == "end"


def _outcome(cell: Cell, agents: Agents, happened_s: float | None, problem: str | None) -> Outcome:
    events = agents.events()
    if happened_s is None:
        return Outcome(cell, None, None, None, None, "", problem)
    offset_s = time.time() - time.monotonic()  # events have Unix time
    # A verdict about what made the run reshard is none about the fault.
    lost = [one for one in events if one["event"] == "lost" and one["time"] > happened_s + offset_s]
    verdict = lost[0] if lost else None
    verdict_s = None if verdict is None else verdict["time"] - offset_s - happened_s
    ends = [event.get("state") for event in events if event["event"] == "end"]
    steps = [stamp.time_s for stamp in agents.stamps() if stamp.time_s > happened_s]
    gaps = [(b - a, b) for a, b in zip([happened_s, *steps], steps, strict=False)]
    outcome = Outcome(
        cell,
        None if verdict is None else verdict["class"],
        verdict_s,
        max(gaps)[1] - happened_s if gaps else None,
        ends[-1] if ends else None,
        "" if verdict is None else verdict["sentence"],
        None,
    )
    metrics, _ = read_lines(agents.run / "metrics.jsonl")
    return Outcome(**{**vars(outcome), "problem": _problem(outcome, metrics, agents)})


def _problem(outcome: Outcome, metrics: list[Line], agents: Agents) -> str | None:
    """Which of the cell's promises was broken."""
    cell = outcome.cell
    if cell.kind == "full disk":
        text = agents.outputs()
        return "a traceback was shown." if "Traceback" in text else None
    if outcome.end != "finished":
        return f"the run ended as {outcome.end}.\n{agents.outputs()}"
    steps = [line["step"] for line in metrics]
    if steps != list(range(1, STEPS + 1)):
        return f"metrics.jsonl has {len(steps)} lines, {len(set(steps))} steps of {STEPS}."
    if cell.phase == "shutdown" and outcome.verdict is None:
        return None  # nobody was missed: all steps were done and saved
    if outcome.verdict not in cell.classes:
        return f"the verdict is {outcome.verdict}, not {' or '.join(cell.classes)}."
    if outcome.verdict_s is None or outcome.verdict_s > cell.limit_s:
        return f"the verdict took {outcome.verdict_s:.2f} s, more than {cell.limit_s:g}."
    return None


_TITLES = ("fault", "where", "phase", "verdict", "stated within, s", "after, s", "next step, s", "")


def row(outcome: Outcome) -> tuple[str, ...]:
    """A line of the table."""
    cell = outcome.cell

    def seconds(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    return (
        cell.kind,
        cell.where,
        cell.phase,
        outcome.verdict or "–",
        f"{cell.limit_s:g}",
        seconds(outcome.verdict_s),
        seconds(outcome.next_step_s),
        "holds" if outcome.problem is None else outcome.problem.partition("\n")[0],
    )


def why_left_out(cell: Cell) -> str | None:
    """Why a cell can't be tried here."""
    if cell.kind == "link cut":
        return why_not()
    if cell.kind == "full disk" and os.geteuid() != 0:
        return "a small disk is a tmpfs, which needs root: start it as root."
    return None


def main() -> None:
    """Try the cells, show and write the table; exit code 1 where one does not hold."""
    options = _options()
    wanted = [
        cell
        for cell in cells()
        if (not options.only or cell.kind in options.only)
        and (not options.phase or cell.phase in options.phase)
        and (not options.where or cell.where in options.where)
    ]
    if options.list:
        print("\n".join(f"{cell.kind} | {cell.where} | {cell.phase}" for cell in wanted))
        return
    console = Console(highlight=False, soft_wrap=True, markup=False)
    about = taken_with("benchmarks.elastic_faults")
    outcomes, left_out = [], {}
    for number, cell in enumerate(wanted, 1):
        if reason := why_left_out(cell):
            left_out[cell.kind] = reason
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            outcomes.append(run_cell(cell, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        console.print(f"{number}/{len(wanted)} {' | '.join(row(outcomes[-1]))}")
        if outcomes[-1].problem:
            console.print(f"{outcomes[-1].problem}\n{outcomes[-1].sentence}")
    for kind, reason in left_out.items():
        console.print(f"{kind}: left out, {reason}")
    bad = [outcome for outcome in outcomes if outcome.problem is not None]
    table = markdown(_TITLES, [row(one) for one in outcomes], [*_TITLES[:4], ""])
    page = f"{table}\n{len(outcomes) - len(bad)} of {len(outcomes)} hold. {signature(about)}\n"
    result = {"facts": about, "cells": [asdict(one) for one in outcomes], "left_out": left_out}
    file = keep(folder_of(options.results, about), "elastic_faults", result, page)
    console.print(f"results: {file}")
    sys.exit(1 if bad else 0)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(_STATED), metavar="FAULT")
    parser.add_argument("--phase", nargs="+", choices=(*_PHASES, "data"), metavar="PHASE")
    parser.add_argument("--where", nargs="+", metavar="WHERE")
    parser.add_argument("--list", action="store_true", help="say which cells there are")
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
