"""Jobs on machines that are taken away: how much sooner is the work done, and what does it cost?

How it works: `benchmarks.cluster.trace` draws jobs, with their sizes, lengths and priorities, and
the moments at which a node is preempted or lost: one that is free, or whose job has done a step
since its start.
Each contestant has a Slurm of its own (`benchmarks.slurmlab`: four nodes, accounts by slurmdbd),
all on this machine at the same time, and submits the same jobs: `paceline launch` of a script that
calls `paceline.train`; submitit and TorchX of DistributedDataParallel with checkpoints, at fixed
sizes with requeue. Devices are slept for, so nodes of all contestants have their speed; starts of
processes cost them real time.

What is told: until the last job is done; preemptions after which a job had saved in time; steps
that were done again; device-seconds by `sacct`, as `squeue` showed them, and by Paceline's ledger.

A peer that takes 1.55 times as long as Paceline is given up, with the jobs that it has left.

    pip install submitit torchx
    python -m benchmarks.cluster [--losses 50] [--gap 75] [--away 50 150] [--node-seconds 9500]

Preemptions alone, without the peers: there sacct's entries are right, so the ledger must be equal
to them to the second.

    python -m benchmarks.cluster --lost-share 0 --alone
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cluster.contest import CONTESTANTS, GIVE_UP, LOOK_S, contend
from benchmarks.cluster.trace import draw
from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.slurmlab import why_not
from benchmarks.tables import markdown

WANTED = 1.5
"""A peer takes so many times as long, or more."""
_GIVE_UP = 1.55
_PEERS = ("submitit", "torchx")
OUTCOME = "outcome.json"


def main() -> None:
    """Run the contest, or one contestant of it; exit code 1 where a goal is missed."""
    options = _options()
    if options.contestant is not None:
        _contend(options)
        return
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if problem := why_not():
        console.print(problem)
        sys.exit(2)
    peers = () if options.alone else _PEERS
    missing = [name for name in peers if find_spec(name) is None]
    if missing:
        console.print(f"{', '.join(missing)} is not installed: it can't take part.")
    contestants = ["paceline", *(name for name in peers if name not in missing)]
    about = taken_with("benchmarks.cluster", *contestants[1:])
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        results = _together(contestants, Path(folder), console)
    page, is_reached = _page(results, options)
    text = f"{page}\n{signature(about)}\n"
    data = {"facts": about, "trace": asdict(_trace(options)), "outcomes": results}
    name = "cluster" if options.lost_share else "cluster_preemptions"
    file = keep(folder_of(options.results, about), name, data, text)
    console.print(f"{text}results: {file}")
    sys.exit(0 if is_reached else 1)


def _contend(options: argparse.Namespace) -> None:
    folder = options.into
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{options.contestant}: {text}", flush=True)

    outcome = contend(options.contestant, _trace(options), folder, say)
    (folder / OUTCOME).write_text(json.dumps(asdict(outcome)))
    say(f"over after {time.monotonic() - began:.0f} s")


def _trace(options: argparse.Namespace):
    away_s = options.away[0], options.away[1]
    return draw(
        options.seed, options.losses, options.gap, away_s, options.node_seconds, options.lost_share
    )


def _together(contestants: list[str], folder: Path, console: Console) -> list[dict[str, Any]]:
    """All at the same time, each in a process."""
    running = []
    for name in contestants:
        into = folder / name
        into.mkdir()
        command = [sys.executable, "-m", "benchmarks.cluster", *sys.argv[1:]]
        own = ["--contestant", name, "--into", str(into)]
        running.append(subprocess.Popen([*command, *own]))
    try:
        codes = []
        for name, process in zip(contestants, running, strict=True):
            codes.append(process.wait())
            if name == "paceline" and codes[-1] == 0:
                ended_s = json.loads((folder / name / OUTCOME).read_text())["ended_s"]
                (folder / "new").write_text(f"{_GIVE_UP * ended_s:.1f}")
                (folder / "new").rename(folder / GIVE_UP)
    finally:
        for process in running:
            process.terminate()
    for name, code in zip(contestants, codes, strict=True):
        if code:
            console.print(f"{name} ended with {code}: its figures are missing.")
    files = [folder / name / OUTCOME for name in contestants]
    return [json.loads(file.read_text()) for file in files if file.exists()]


_TITLES = (
    *("", "all done after", "over Paceline", "preempted", "lost"),
    *("steps again", "submitted again", "device-s"),
)


def _when(outcome: dict[str, Any]) -> str:
    ended, left = f"{outcome['ended_s']:.0f} s", outcome["num_left"]
    return f"{left} jobs not, {ended}" if left else ended


def _page(results: list[dict[str, Any]], options: argparse.Namespace) -> tuple[str, bool]:
    by_name = {one["contestant"]: one for one in results}
    ours = by_name.get("paceline")
    if ours is None:
        return "Paceline did not come to an end.\n", False
    lines = []
    for name, one in by_name.items():
        kinds = [hit["kind"] for hit in one["hits"]]
        lines.append(
            (
                name,
                _when(one),
                f"{one['ended_s'] / ours['ended_s']:.2f}",
                str(kinds.count("preempted")),
                str(kinds.count("lost")),
                str(sum(one["steps_again"].values())),
                str(len(one["submitted_again"])),
                str(one["held_device_s"]),
            )
        )
    ratios = [one["ended_s"] / ours["ended_s"] for one in results if one is not ours]
    # Slurm's times are whole seconds: each hold is seen by up to one more or less.
    most_off_s = len(ours["hits"]) + len(_trace(options).jobs)
    is_exact = abs(ours["ledger_device_s"] - ours["seen_device_s"]) <= most_off_s
    if not options.lost_share:
        is_exact &= ours["ledger_device_s"] == ours["held_device_s"]
    has_saved = ours["saved"] >= ours["num_preempted"] and len(ours["hits"]) >= options.losses
    page = (
        f"{len(_trace(options).jobs)} jobs on four nodes, {options.node_seconds:g} node-seconds of "
        f"work, a loss every {options.gap:g} s for {options.away[0]:g} to {options.away[1]:g} s "
        f"until all is done (seed {options.seed}).\n\n"
        f"{markdown(_TITLES, lines, _TITLES[:1])}\n"
        f"Paceline's jobs had saved in time at {min(ours['saved'], ours['num_preempted'])} of "
        f"{ours['num_preempted']} preemptions. Its ledger has {ours['ledger_device_s']} "
        f"device-seconds; {ours['seen_device_s']:.0f} were seen in squeue every {LOOK_S:g} s, and "
        f"sacct has {ours['held_device_s']}."
    )
    if options.lost_share:
        page += (
            " (Slurm 22.05 gives one entry to attempts of a job that went on without a lost node "
            "and was put back later.)"
        )
    page += "\n"
    is_sooner = options.alone or (bool(ratios) and min(ratios) >= WANTED)
    return page, is_sooner and is_exact and has_saved


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--losses", type=int, default=50, help="that Paceline has to meet")
    parser.add_argument("--gap", type=float, default=75.0, help="seconds between losses")
    parser.add_argument(
        "--away", type=float, nargs=2, default=(50.0, 150.0), help="seconds without the node"
    )
    parser.add_argument("--node-seconds", type=float, default=9500.0, help="of work, in all")
    parser.add_argument(
        "--lost-share", type=float, default=0.2, help="of the losses that are lost nodes"
    )
    parser.add_argument("--alone", action="store_true", help="without the peers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not 0 <= options.lost_share <= 1:
        parser.error(f"--lost-share {options.lost_share:g} is no share: give 0 to 1.")
    if options.alone and options.lost_share:
        parser.error("--alone is of preemptions alone: give --lost-share 0, or let the peers run.")
    return options


if __name__ == "__main__":
    main()
