"""A hundred kills at random moments, and a checker of what the run made of them.

How it works: a Job is trained twice on nodes that are plain processes of this host (no privileges).
Once nothing happens to it. Once faults strike at steps that a seed drew: a rank, rank 0, an agent,
the leader's agent, all processes of a node at once (of the leader's, too, which keeps the store),
and a node that is frozen for longer than a heartbeat and wakes up. Some strike while the run still
deals with the one before. A supervisor starts lost agents again after a while, as Slurm would. Then
`benchmarks.elastic.history` looks for a rule that was broken.

    python -m benchmarks.elastic_soak --kills 100 --seed 1
    python -m benchmarks.elastic_soak --seed 2 --set elastic.exact=true --set layout.fsdp=2
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.elastic.agents import Agents
from benchmarks.elastic.history import Rules, evidence_of, faults_of, numbers_of
from benchmarks.elastic.jobs import write_job
from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown
from paceline.config.job import read_job

KINDS = ("rank", "rank 0", "agent", "leader", "node", "leader's node", "frozen node")
HEARTBEAT_S = 2.0
_SAME_STEP = 0.15
"""So many faults strike where the one before did: while the run still deals with it."""
_AWAY_S = (0.2, 6.0)
"""After so long a lost agent is started again."""
_STANDSTILL_S = 180.0
_END_S = 120.0
_MOST_OWN_ENDS = 20
_LOOK_S = 0.02

JOB = """
name = "soak"
[model]
family = "decoder"
vocab_size = 257
hidden_size = 32
ffn_size = 64
num_layers = 4
num_heads = 4
num_kv_heads = 4
max_seq_len = 64
[layout]
precision = "fp32"
[data]
source = "text.txt"
tokenizer = "bytes"
[optim]
lr = 3e-3
warmup_steps = 2
[train]
global_batch = 24
seq_len = 32
eval_every = 50
eval_batches = 1
[checkpoint]
every = 25
[observe]
tensorboard = false
profile_every = 0
"""


@dataclass(frozen=True)
class Strike:
    """A fault that is to happen."""

    step: int
    """After this step's line is written."""
    later_s: float
    kind: str
    pick: float
    """From 0 to 1: which of the ranks, agents or nodes that are there."""
    away_s: float
    """Until a lost agent is started again, or a frozen node wakes up."""


@dataclass
class Struck:
    """A fault that happened."""

    strike: Strike
    node: int | None
    rank: int | None
    time_s: float = field(default_factory=time.time)


def strikes_of(kills: int, steps: int, seed: int, kinds: Sequence[str] = KINDS) -> list[Strike]:
    """The faults of a seed, in order of their steps."""
    draw = random.Random(seed)
    # Not at the very end, where it may not pay to take nodes in again for others to be lost.
    steps_of = sorted(draw.randint(2, max(2, steps * 4 // 5)) for _ in range(kills))
    for number in range(1, kills):
        if draw.random() < _SAME_STEP:
            steps_of[number] = steps_of[number - 1]
    return [
        Strike(
            step,
            draw.uniform(0, 0.5),
            draw.choice(kinds),
            draw.random(),
            draw.uniform(*_AWAY_S),
        )
        for step in sorted(steps_of)
    ]


class Soak:
    """A run that faults strike, and its supervisor."""

    def __init__(
        self, agents: Agents, strikes: Sequence[Strike], say: Callable[[str], None]
    ) -> None:
        self._agents, self._left, self._say = agents, list(strikes), say
        self.struck: list[Struck] = []
        self._back: dict[int, float] = {}
        """Node -> when its agent is started again, by the monotonic clock."""
        self._frozen: dict[int, float] = {}
        self._died: dict[int, int] = {}
        """Node -> the newest step that may have been done when its rank was killed last."""
        self._stood_since = time.monotonic()
        self._step = self._num_own_ends = 0

    def train(self) -> str | None:
        """Until the run ends by itself; a sentence where it doesn't."""
        for node in range(self._agents.num_nodes):
            self._agents.start(node)
        while not self._is_over():
            self._supervise()
            self._strike_if_due()
            if (step := self._agents.step()) != self._step:
                self._step, self._stood_since = step, time.monotonic()
            if self._num_own_ends > _MOST_OWN_ENDS:
                return f"agents ended {self._num_own_ends} times by themselves, after step {step}."
            if time.monotonic() - self._stood_since > _STANDSTILL_S:
                return f"the run stood still after step {self._step} for {_STANDSTILL_S:.0f} s."
            time.sleep(_LOOK_S)
        for node in self._frozen:
            self._agents.send(node, signal.SIGCONT)
        codes = self._agents.wait(_END_S)
        if any(codes[node] != 0 for node in codes if node not in self._back):
            return f"agents ended with {codes}."
        left = len(self._left)
        return f"{left} faults did not happen: let it do more --steps." if left else None

    def _is_over(self) -> bool:
        events = self._agents.events()
        return bool(events) and events[-1]["event"] == "end" and events[-1]["state"] == "finished"

    def _supervise(self) -> None:
        """Start agents again that are lost, and wake up nodes that are frozen."""
        now = time.monotonic()
        for node, wakes_s in list(self._frozen.items()):
            if now > wakes_s:
                del self._frozen[node]
                self._agents.send(node, signal.SIGCONT)
        for node in range(self._agents.num_nodes):
            if self._agents.exit_code(node) is not None and node not in self._back:
                self._num_own_ends += 1  # saved, left out, or not even started
                self._back[node] = now + 0.5
            if now > self._back.get(node, float("inf")):
                del self._back[node]
                self._agents.start(node)

    def _strike_if_due(self) -> None:
        if not self._left or self._step < self._left[0].step:
            return
        strike = self._left[0]
        there = self._there()
        ranks = self._agents.rank_pids()
        # Somebody must be left that has the state: it strikes when lost nodes are back.
        if len(there) < 2 or not ranks:
            return
        rank = _rank_of(strike, ranks)
        node = self._agents.node_of(rank) if rank is not None else None
        # Twice with no new step between them, and a node is left out for good: that is promised.
        # Steps that are done again are not new.
        if node is not None and self._step <= self._died.get(node, -1):
            return
        time.sleep(strike.later_s)
        self._left.pop(0)
        if node is not None:
            self._died[node] = self._agents.step() + 1  # whose line may not be there yet
        self.struck.append(self._strike(strike, there, ranks))
        last = self.struck[-1]
        self._say(
            f"{len(self.struck)}: {strike.kind} after step {self._step} (node {last.node}, rank "
            f"{last.rank})"
        )

    def _there(self) -> list[int]:
        """Of the nodes that train, those that are neither lost nor frozen."""
        training = self._agents.training()
        return [node for node in training if node not in self._back and node not in self._frozen]

    def _strike(self, strike: Strike, there: list[int], ranks: dict[int, int]) -> Struck:
        leader = self._agents.leader()
        if (rank := _rank_of(strike, ranks)) is not None:
            if (pid := ranks.get(rank)) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return Struck(strike, None, rank)
        of_leader = strike.kind in ("leader", "leader's node") and leader in there
        node = leader if of_leader else there[int(strike.pick * len(there))]
        assert node is not None
        back = time.monotonic() + strike.away_s
        if strike.kind == "frozen node":
            self._frozen[node] = max(back, time.monotonic() + 1.5 * HEARTBEAT_S)
            self._agents.send(node, signal.SIGSTOP)
        elif strike.kind in ("agent", "leader"):
            self._back[node] = back
            with suppress(ProcessLookupError):
                os.kill(self._agents.agent(node), signal.SIGKILL)
        else:
            self._back[node] = back
            self._agents.send(node, signal.SIGKILL)
        return Struck(strike, node, None)


def _rank_of(strike: Strike, ranks: dict[int, int]) -> int | None:
    """The rank that it kills; None: it strikes a node."""
    if strike.kind == "rank 0":
        return 0
    return sorted(ranks)[int(strike.pick * len(ranks))] if strike.kind == "rank" else None


def soak(options: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Train undisturbed, then under faults, and check."""
    settings = [
        f"train.steps={options.steps}",
        "elastic.min_nodes=1",
        f"elastic.heartbeat_s={HEARTBEAT_S}",
        f"elastic.copy_every={options.copy_every}",
        "elastic.restarts=1000",  # faults strike where others did: that is no loop of deaths
        *options.set,
    ]
    job = options.job or write_job(JOB, folder, settings)[0]
    spec = read_job(job, settings)

    def agents(name: str) -> Agents:
        (folder / name).mkdir()
        return Agents(options.nodes, options.devices, job, folder / name, settings)

    with agents("undisturbed") as reference:
        problem = Soak(reference, [], say).train()
        if problem:
            raise SoakError(f"undisturbed: {problem}\n{reference.outputs()}")
        say(f"undisturbed: {reference.step()} steps")
    strikes = strikes_of(options.kills, options.steps, options.seed, options.kinds)
    with agents("struck") as struck:
        run = Soak(struck, strikes, say)
        problem = run.train()
        rubbish = [problem] if problem else []
        rubbish += struck.outliving()
        if problem:
            say(struck.outputs())
    evidence = evidence_of(struck.run, struck.notes, reference.run, reference.notes)
    rules = Rules(
        options.steps,
        options.copy_every,
        spec.checkpoint.every,
        0.0 if spec.elastic.exact else 1e-5,
    )
    found = [*faults_of(evidence, rules), *rubbish]
    sources = Counter(e.get("source") for e in evidence.events if e["event"] == "recovered")
    recomputed = [e.get("recomputed", 0) for e in evidence.events if e["event"] == "recovered"]
    return {
        "rules": asdict(rules),
        "settings": settings,
        "nodes": options.nodes,
        "devices": options.devices,
        "struck": [asdict(one) for one in run.struck],
        "kinds": Counter(one.strike.kind for one in run.struck),
        "events": numbers_of(evidence.events),
        "generations": len(evidence.generations),
        "sources": {str(source): count for source, count in sources.items()},
        "recomputed": {"most": max(recomputed, default=0), "sum": sum(recomputed)},
        "broken": found,
    }


class SoakError(Exception):
    """Not even the undisturbed run went to its end."""


def main() -> None:
    """Soak, say which rules were broken, and write the results; exit code 1 where one was."""
    options = _options()
    # As Ctrl-C: what was started is ended on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    about = taken_with("benchmarks.elastic_soak")
    folder = options.keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        checked = soak(options, folder.absolute(), console.print)
    except SoakError as failure:
        sys.exit(str(failure))
    result = {"facts": about, "seed": options.seed, **checked}
    lines = [(kind, str(count)) for kind, count in result["kinds"].items()]
    broken, again = result["broken"], result["recomputed"]["most"]
    verdict = "\n".join(f"- {fault}" for fault in broken) or "No rule was broken."
    page = (
        f"{markdown(('lost', 'times'), lines, ['lost'])}\n{result['generations']} generations; "
        f"states from {result['sources']}; at most {again} steps done again at once."
        f"\n\n{verdict}\n\n{signature(about)}\n"
    )
    console.print(page)
    file = keep(folder_of(options.results, about), f"elastic_soak_{options.seed}", result, page)
    console.print(f"results: {file}; the runs are in {folder}")
    sys.exit(1 if broken else 0)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of the run; default: 40 a kill, and 40")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--devices", type=int, default=1, help="ranks of a node")
    parser.add_argument("--job", type=Path, help="another job.toml")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--copy-every", type=int, default=1, help="at most one less are done again")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND")
    parser.add_argument("--keep", type=Path, help="folder for both runs, a new one")
    options = parser.parse_args()
    options.steps = options.steps or 40 * options.kills + 40
    if options.kills < 0 or options.nodes < 3 or options.steps < 6:
        parser.error("--kills must be at least 0, --nodes 3 and --steps 6")
    return options


if __name__ == "__main__":
    main()
