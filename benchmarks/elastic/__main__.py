"""A lost rank and a lost node, in pairs: Paceline, torchft, torchrun and NVRx on four nodes.

How it works: network namespaces of this host play the nodes, each trains with one gloo rank, the
same decoder and batches for all. Contestants take turns, each round begins with the next one. In a
block a rank is killed (`kill -9`) some times at moments and of numbers that a seed drew, the same
for all; then the link of a node is cut, and mended. Every rank stamps the end of its steps by the
clock that the host's processes share, and everything told is computed from these stamps
(`benchmarks.elastic.outages`). Last come blocks without a fault, of each with and without being
ready for one.

It is no measure of scaling: nodes share the host's cores.

    python -m benchmarks.elastic [--rounds 5] [--kills 4] [--peers FOLDER_OF_PACKAGES]
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path

from rich.console import Console

from benchmarks.elastic.contestants import (
    HEARTBEAT_S,
    READY,
    WITHOUT,
    Contest,
    Started,
    is_there,
)
from benchmarks.elastic.jobs import write_job
from benchmarks.elastic.outages import Outage, done_by_all, median_step_s, new_steps, outage_of
from benchmarks.netlab import Laboratory, why_not
from benchmarks.overhead import write_workload
from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import Spread, markdown, terminal_table
from paceline.config.job import read_job, to_raw, to_toml

NUM_NODES = 4
WARM_STEPS = 10
"""Steps of all nodes before the first fault, and before the first that is timed."""
_STEPS_BEFORE = 5
_START_LIMIT_S = 180
_OUTAGE_LIMIT_S = 60
_LOOK_S = 0.02
_SETTLE_S = 1.0
_CUT_NODE = NUM_NODES - 1  # torchrun's meeting and torchft's lighthouse stand on node 0

JOB = """
name = "elastic"
[model]
family = "decoder"
vocab_size = 257
hidden_size = 128
ffn_size = 256
num_layers = 4
num_heads = 4
num_kv_heads = 4
max_seq_len = 64
[layout]
precision = "fp32"
[data]
source = "text.txt"
tokenizer = "bytes"
[train]
steps = 3000
global_batch = 12
seq_len = 64
eval_every = 0
[checkpoint]
every = 20
[observe]
tensorboard = false
profile_every = 0
"""


@dataclass(frozen=True)
class Fault:
    """What was done to a contestant in a round, and what it cost."""

    contestant: str
    round: int
    kind: str
    """rank or node."""
    target: int
    """Rank, or node."""
    outage: Outage


@dataclass(frozen=True)
class Block:
    """A block without a fault."""

    contestant: str
    round: int
    step_s: float
    """Median."""


class BlockError(Exception):
    """A contestant did not train: the text is what its processes wrote last."""


def write_contest(folder: Path, peers: Path | None, settings: Sequence[str]) -> Contest:
    """Write the Job, its text and the samples in the order of training."""
    _, job = write_job(JOB, folder, settings)
    (folder / "job.toml").write_text(to_toml(job))
    write_workload(job, folder)
    return Contest(NUM_NODES, folder, peers, settings)


@contextmanager
def under_way(name: str, contest: Contest, lab: Laboratory, number: int) -> Iterator[Started]:
    """A contestant that trains on all nodes, and has warmed up; ended on the way out."""
    place = contest.folder / f"{number}-{name.replace(' ', '-').replace(',', '')}"
    started = Started(name, contest, lab, place)

    def is_warm() -> bool:
        return done_by_all(started.stamps(), NUM_NODES, WARM_STEPS) is not None

    try:
        _wait(started, is_warm, _START_LIMIT_S, NUM_NODES)
        if not is_warm():
            raise BlockError(f"{name} did not train:\n{started.outputs()[-6000:]}")
        yield started
    finally:
        started.stop()
        shutil.rmtree(place)


def _wait(started: Started, is_true: Callable[[], bool], limit_s: float, nodes: int = 1) -> None:
    """Until it is true, fewer nodes' programs run than stated, or the limit is reached."""
    deadline = time.monotonic() + limit_s
    while not is_true() and started.num_running >= nodes and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def measure_faults(
    name: str, contest: Contest, lab: Laboratory, number: int, kills: int, draw: random.Random
) -> Iterator[Fault]:
    """Kill ranks, then cut a link, in one start of a contestant."""
    with under_way(name, contest, lab, number) as started:
        for _ in range(kills):
            rank = draw.randrange(NUM_NODES)
            outage = _kill(started, rank, draw.random())
            yield Fault(name, number, "rank", rank, outage)
            if outage.whole_again_s is None:
                return  # what a fault costs from here on would be of another run
        yield Fault(name, number, "node", _CUT_NODE, _cut(started, lab, draw.random()))


def _kill(started: Started, rank: int, later: float) -> Outage:
    """Kill a rank with the signal that nobody can catch, and wait until all train again."""
    before = _steps_before(started, later)
    pid = max(stamp for stamp in started.stamps() if stamp.rank == rank).pid
    fault_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return _outage(started, before, fault_s, lambda outage: outage.whole_again_s is not None)


def _cut(started: Started, lab: Laboratory, later: float) -> Outage:
    """Take a node's interface down, and wait until the others go on."""
    before = _steps_before(started, later)
    fault_s = time.monotonic()
    lab.cut(_CUT_NODE)
    return _outage(started, before, fault_s, lambda outage: outage.next_new_step_s is not None)


def _steps_before(started: Started, later: float) -> float:
    """Let a few steps be done, and a part of one more; returns the time from which they are."""
    since_s = time.monotonic()
    _wait(started, lambda: _num_steps(started, since_s) > _STEPS_BEFORE, _OUTAGE_LIMIT_S)
    time.sleep(later * (time.monotonic() - since_s) / _STEPS_BEFORE)
    return since_s


def _num_steps(started: Started, since_s: float) -> int:
    return len(new_steps(one for one in started.stamps() if one.time_s > since_s))


def _outage(
    started: Started, since_s: float, fault_s: float, is_over: Callable[[Outage], bool]
) -> Outage:
    """What the fault cost, once it is over or the limit is reached."""

    def now() -> Outage:
        return outage_of([one for one in started.stamps() if one.time_s > since_s], fault_s)

    _wait(started, lambda: is_over(now()), _OUTAGE_LIMIT_S)
    time.sleep(_SETTLE_S)  # an outage looks at two steps: the second may have had the longer wait
    _wait(started, lambda: is_over(now()), _OUTAGE_LIMIT_S)
    return now()


def measure_step(name: str, contest: Contest, lab: Laboratory, number: int, steps: int) -> Block:
    """Train without a fault."""
    with under_way(name, contest, lab, number) as started:
        first = done_by_all(started.stamps(), NUM_NODES, WARM_STEPS) or 0
        _wait(started, lambda: started.stamps()[-1].step >= first + steps, _START_LIMIT_S)
        stamps = [stamp for stamp in started.stamps() if stamp.step <= first + steps]
        return Block(name, number, median_step_s(stamps, first))


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The names, from another one on in each round."""
    turn = number % len(names)
    return [*names[turn:], *names[:turn]]


def ratios(blocks: Sequence[Block]) -> dict[str, Spread]:
    """Contestant -> its step time over that of the same work without being ready, in a round."""
    of = {(block.contestant, block.round): block.step_s for block in blocks}
    found = {}
    for ready, without in WITHOUT.items():
        pairs = [
            step_s / of[without, number]
            for (name, number), step_s in of.items()
            if name == ready and (without, number) in of
        ]
        if pairs:
            found[ready] = Spread.of(pairs)
    return found


_TITLES = (
    *("", "lost", "faults", "next new step, s", "worst, s", "whole again, s"),
    *("not gone on", "steps computed again", "samples left out"),
)
_READY_TITLES = ("", "step time over the same without")


def rows(faults: Sequence[Fault]) -> list[tuple[str, ...]]:
    """A line for each contestant and kind of fault."""
    lines = []
    for kind in ("rank", "node"):
        for name in READY:
            mine = [one.outage for one in faults if (one.contestant, one.kind) == (name, kind)]
            if not mine:
                continue
            next_s = [one.next_new_step_s for one in mine if one.next_new_step_s is not None]
            whole_s = [one.whole_again_s for one in mine if one.whole_again_s is not None]
            lines.append(
                (
                    name,
                    kind,
                    str(len(mine)),
                    Spread.of(next_s).text(".2f") if next_s else "–",
                    f"{max(next_s):.2f}" if next_s else "–",
                    Spread.of(whole_s).text(".2f") if whole_s and kind == "rank" else "–",
                    str(len(mine) - len(next_s)),
                    Spread.of([one.recomputed for one in mine]).text(".0f"),
                    Spread.of([one.left_out for one in mine]).text(".0f"),
                )
            )
    return lines


def ready_rows(blocks: Sequence[Block]) -> list[tuple[str, ...]]:
    """A line for each contestant."""
    return [(name, spread.text(".3f")) for name, spread in ratios(blocks).items()]


def measure(
    contest: Contest, options: argparse.Namespace, say: Callable[[str], None]
) -> tuple[list[Fault], list[Block]]:
    """All rounds; a contestant that does not train is said and left out of its round."""
    faults: list[Fault] = []
    blocks: list[Block] = []
    ready = [name for name in READY if name in options.only]
    for number in range(options.rounds):
        with Laboratory(NUM_NODES) as lab:
            for name in in_turn(ready, number):
                draw = random.Random(f"{options.seed} {number}")  # the same for all
                try:
                    for fault in measure_faults(name, contest, lab, number, options.kills, draw):
                        faults.append(fault)
                        say(f"{name:<10} {fault.kind} {fault.target}: {fault.outage}")
                except BlockError as failure:
                    say(str(failure))
            pairs = [name for name in ready if name in WITHOUT]
            names = list(dict.fromkeys(each for name in pairs for each in (name, WITHOUT[name])))
            for name in in_turn(names, number):
                try:
                    blocks.append(measure_step(name, contest, lab, number, options.steps))
                    say(f"{name:<22} {blocks[-1].step_s * 1e3:.1f} ms a step")
                except BlockError as failure:
                    say(str(failure))
    return faults, blocks


def main() -> None:
    """Measure, show the tables and write the results."""
    options = _options()
    if problem := why_not():
        sys.exit(problem)
    console = Console(highlight=False)
    about = taken_with("benchmarks.elastic") | {"peers": versions(options.peers)}
    with tempfile.TemporaryDirectory() as place:
        contest = write_contest(Path(place), options.peers, options.set)
        job = to_raw(read_job(contest.folder / "spec.toml", options.set))
        faults, blocks = measure(contest, options, console.print)
    lines, ready_lines = rows(faults), ready_rows(blocks)
    console.print(terminal_table("What a loss costs: median (least – most)", _TITLES, lines, [""]))
    console.print(terminal_table("What being ready costs", _READY_TITLES, ready_lines, [""]))
    result = {
        "facts": about,
        "heartbeat_s": HEARTBEAT_S,
        "num_nodes": NUM_NODES,
        "job": job,
        "faults": [asdict(fault) for fault in faults],
        "blocks": [asdict(block) for block in blocks],
        "step_time_over_not_ready": {k: asdict(v) for k, v in ratios(blocks).items()},
    }
    page = (
        f"{markdown(_TITLES, lines, ['', 'lost'])}\n{markdown(_READY_TITLES, ready_lines, [''])}\n"
        f"Median (least – most). {NUM_NODES} nodes of one gloo rank, heartbeats of "
        f"{HEARTBEAT_S} s; peers {about['peers']}; {signature(about)}\n"
    )
    console.print(f"results: {keep(folder_of(options.results, about), 'elastic', result, page)}")


def versions(peers: Path | None) -> dict[str, str]:
    """Of the peers' packages that are there, by their names in a registry."""
    paths = [*([str(peers)] if peers else []), *sys.path]
    wanted = {"torchft-nightly", "torchft", "nvidia-resiliency-ext", "nvidia_resiliency_ext"}
    return {
        found.metadata["Name"]: found.version
        for found in distributions(path=paths)
        if found.metadata["Name"] in wanted
    }


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each contestant")
    parser.add_argument("--kills", type=int, default=4, help="of ranks in a round")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of a block")
    parser.add_argument("--seed", type=int, default=0, help="of moments and numbers of ranks")
    parser.add_argument("--peers", type=Path, help="folder of the peers' packages (see README.md)")
    parser.add_argument("--only", nargs="+", choices=READY, default=READY, metavar="NAME")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    if options.rounds < 1 or options.kills < 0 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1, --kills at least 0")
    options.peers = options.peers and options.peers.absolute()
    if absent := [name for name in options.only if not is_there(name, options.peers)]:
        print(f"left out, as not installed: {', '.join(absent)}", file=sys.stderr)
        options.only = [name for name in options.only if name not in absent]
    return options


if __name__ == "__main__":
    main()
