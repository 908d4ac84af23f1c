"""Two sites of two ranks each over a slow link, of which one is lost and comes back.

How it works: a site is a namespace of this machine with a core of its own (benchmarks/netlab), and
a node of an elastic run with two ranks that share a replica (fsdp, ZeRO-3). The sites are workers
of DiLoCo: between them they exchange what they changed, in int8, once in EVERY steps, over links of
`--rate` (tc tbf) from the first step on. One site is killed with kill -9, all of it at once. The
other goes on alone, with the whole global batch. Then the lost site is started again: it takes the
state from the other one over that link.

Beside it stand two controls, one before and one after, which meet in no round: sites that compute
alone. Seconds a step are medians over rounds (of the controls: over as many steps), but for
the first round of a generation; a whole run's share is what its steps would have taken without any
exchange, loss and return, over what it took. The loss is held against that of a run of the same
four ranks that agree in every step (their link is not limited: it would only take longer).

The decoder has 0.9 M parameters; its text is a Markov chain (benchmarks/local_updates.py). A
payload of less than 256 KiB passes the link at once; a round's has three times as much each way.
There is no latency, so this says nothing about it, nor about GPUs.

    python -m benchmarks.sites [--rate 20mbit] [--steps 1500]

Needs root. Keeps results/<device>/sites.{json,md}. Ten minutes or so on two quiet cores.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from signal import SIGKILL
from statistics import median
from typing import Any

from benchmarks.elastic.agents import Agents
from benchmarks.elastic.history import Line, read_lines
from benchmarks.elastic.jobs import write_job
from benchmarks.local_updates import VOCAB, markov_rows
from benchmarks.netlab import Laboratory, read_rate, why_not
from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with

EVERY = 75
SITES, RANKS = 2, 2
JOB = """
name = "sites"
[model]
family = "decoder"
vocab_size = 257
hidden_size = 128
ffn_size = 344
num_layers = 4
num_heads = 4
max_seq_len = 64
[layout]
precision = "fp32"
micro_batch = 4
[data]
source = "text.txt"
tokenizer = "bytes"
[train]
global_batch = 16
seq_len = 64
eval_batches = 16
[optim]
lr = 3e-3
warmup_steps = 20
[checkpoint]
every = 0
[observe]
tensorboard = false
[elastic]
min_nodes = 1
"""
LAYOUT = (f"layout.dp={SITES}", f"layout.fsdp={RANKS}", "layout.zero=3")
WORKERS = (
    *("comm.local.method=diloco", "comm.local.outer_lr=0.9", "comm.local.outer_momentum=0.6"),
    *("comm.local.compress=int8", f"comm.local.every={EVERY}"),
)
ALONE = ("comm.local.method=diloco", "comm.local.every=1000000")
_NUM_ROWS, _ROW = 6000, 100
_LIMIT_S = 900.0
_KEPT = ("step", "generation", "time", "loss")


@dataclass(frozen=True)
class Ran:
    """What a run left."""

    lines: list[Line]
    events: list[Line]
    sent_bytes: tuple[int, ...] = ()
    """By each site."""
    struck: float | None = None
    """When a site was killed, by time.time()."""
    returned: float | None = None
    """When it was started again."""


def run(
    folder: Path,
    settings: Sequence[str],
    rate: float | None,
    strike: Callable[[Agents], tuple[float, float]] | None = None,
    *,
    in_networks: bool = True,
) -> Ran:
    """Train once.

    Args:
        folder: of its own.
        settings: SECTION.KEY=VALUE.
        rate: of the sites' links in bits per second; None: as fast as the machine copies.
        strike: takes a site away and brings it back; returns when.
        in_networks: whether each site has a core and a network of its own.
    """
    folder.mkdir()
    job, _ = write_job(JOB, folder, settings)
    (folder / "text.txt").write_text(_text())
    with Laboratory(SITES, rate) if in_networks else nullcontext() as lab:
        variables = {"PACELINE_MEASURE": "off"}
        with Agents(SITES, RANKS, job, folder, LAYOUT, variables, lab) as agents:
            for site in range(SITES):
                agents.start(site)
            when = (None, None) if strike is None else strike(agents)
            codes = agents.wait(_LIMIT_S)
            if set(codes.values()) != {0}:
                sys.exit(f"a run ended with {codes}:\n{agents.outputs()}")
            lines, _ = read_lines(agents.run / "metrics.jsonl")
            sent = () if lab is None else tuple(lab.traffic(h).sent_bytes for h in range(SITES))
            return Ran(lines, agents.events(), sent, *when)


def lose_and_return(at: int, alone: int) -> Callable[[Agents], tuple[float, float]]:
    """Kill the site that doesn't lead in the middle of the round after so many steps; start it
    again so many steps later."""

    def strike(agents: Agents) -> tuple[float, float]:
        _await_step(agents, at - EVERY)
        began = time.monotonic()
        _await_step(agents, at)  # lines are written in rounds
        time.sleep((time.monotonic() - began) / 2)
        lost = next(site for site in range(SITES) if site != agents.leader())
        agents.send(lost, SIGKILL)
        struck = time.time()
        _await_step(agents, at + alone)
        agents.start(lost)
        return struck, time.time()

    return strike


def _await_step(agents: Agents, step: int) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while agents.step() < step:
        if time.monotonic() > deadline or agents.num_running == 0:
            sys.exit(f"step {step} did not come:\n{agents.outputs()}")
        time.sleep(0.05)


def _text() -> str:
    letters = [chr(ord("0") + at) for at in range(VOCAB)]
    rows = markov_rows(_ROW, _NUM_ROWS, 0).tolist()
    return "\n".join("".join(letters[token] for token in row) for row in rows)


def steps_s(lines: Iterable[Line]) -> dict[int, list[float]]:
    """Generation -> mean seconds of a step in each of its rounds but the first."""
    found: dict[int, list[tuple[int, float]]] = {}
    for line in lines:
        if line["step"] % EVERY == 0:
            found.setdefault(line["generation"], []).append((line["step"], line["time"]))
    return {
        generation: [(b - a) / (end - start) for (start, a), (end, b) in pairwise(rounds)]
        for generation, rounds in found.items()
    }


def figures(whole: Ran, struck: Ran, controls: Sequence[Ran]) -> dict[str, Any]:
    """What the page says."""
    assert struck.struck is not None
    assert struck.returned is not None
    control = [s for ran in controls for rounds in steps_s(ran.lines).values() for s in rounds]
    by_generation = steps_s(struck.lines)
    sites = {
        event["generation"]: event["num_active"]
        for event in struck.events
        if event["event"] == "generation"
    }
    together = [s for g, rounds in by_generation.items() if sites[g] == SITES for s in rounds]
    alone = [s for g, rounds in by_generation.items() if sites[g] < SITES for s in rounds]
    first, last = struck.lines[0], struck.lines[-1]
    computing = sum(
        median(alone) if sites[line["generation"]] < SITES else median(control)
        for line in struck.lines[1:]
    )
    returned = [line for line in struck.lines if line["time"] > struck.returned]
    back = next(line for line in returned if sites[line["generation"]] == SITES)
    before = [line["time"] for line in struck.lines if line["step"] < back["step"]][-1]
    after = next(line["time"] for line in struck.lines if line["time"] > struck.struck)
    losses = [ran.lines[-1]["eval_loss"] for ran in (whole, struck)]
    return {
        "control_s": _spread(control),
        "together_s": _spread(together),
        "alone_s": _spread(alone),
        "kept": median(control) / median(together),
        "kept_of_the_run": computing / (last["time"] - first["time"]),
        "until_next_step_s": after - struck.struck,
        "stood_still_for_the_return_s": back["time"] - before,
        "lost_steps": sum(sites[line["generation"]] < SITES for line in struck.lines),
        "loss": losses[1],
        "loss_of_synchronous": losses[0],
        "apart": losses[1] / losses[0] - 1,
        "sent_bytes": struck.sent_bytes,
    }


def _spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    return median(seconds), min(seconds), max(seconds)


def page(found: dict[str, Any], about: dict[str, Any]) -> str:
    """In Markdown."""
    rows = [
        ("held-out loss", f"{found['loss']:.4f}"),
        ("of the run that agrees in every step", f"{found['loss_of_synchronous']:.4f}"),
        ("apart", f"{found['apart']:+.2%}"),
        ("a step of sites that never meet, s", _told(found["control_s"])),
        ("a step of both sites, rounds included, s", _told(found["together_s"])),
        ("of no communication, both sites there", f"{found['kept']:.1%}"),
        ("of no communication, the whole run with loss and return", _percent(found)),
        ("a step of the site that was left (twice the samples), s", _told(found["alone_s"])),
        ("steps with one site", f"{found['lost_steps']}"),
        ("from kill -9 to the next new step, s", f"{found['until_next_step_s']:.1f}"),
        ("last step alone to first step of both, s", _told_return(found)),
        ("MB that the sites sent", " and ".join(f"{n / 1e6:.1f}" for n in found["sent_bytes"])),
    ]
    lines = ["| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in rows)]
    size = (
        f"Two sites of {RANKS} ranks, {about['rate']} each way, {about['steps']} steps, a round "
        f"every {EVERY} in int8. Medians, with the least and most round."
    )
    return "\n".join(lines) + f"\n\n{size}\n\n{signature(about)}\n"


def _percent(found: dict[str, Any]) -> str:
    return f"{found['kept_of_the_run']:.1%}"


def _told_return(found: dict[str, Any]) -> str:
    return f"{found['stood_still_for_the_return_s']:.1f}"


def _told(seconds: Sequence[float]) -> str:
    middle, least, most = seconds
    return f"{middle:.3f} ({least:.3f} – {most:.3f})"


def main() -> None:
    """Run the controls, the run that loses a site, and the one that agrees in every step."""
    parser = parser_of(__doc__)
    parser.add_argument("--rate", default="20mbit", help="of each site's link: 20mbit, 1gbit")
    parser.add_argument("--steps", type=int, default=1500)
    asked = parser.parse_args()
    if problem := why_not():
        sys.exit(problem)
    rate = read_rate(asked.rate)
    about = {
        **taken_with("benchmarks.sites"),
        "rate": asked.rate,
        "steps": asked.steps,
        "settings": (*LAYOUT, *WORKERS),
        "job": JOB,
    }
    short = (*ALONE, f"train.steps={4 * EVERY + 1}")
    steps = f"train.steps={asked.steps}"
    strike = lose_and_return(asked.steps * 3 // 10, asked.steps // 10)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)

        def told(name: str, *how: Any, **more: Any) -> Ran:
            print(f"{name} ...", flush=True)
            return run(folder / name.replace(" ", "-"), *how, **more)

        before = told("control", short, rate)
        struck = told("a site is lost", (*WORKERS, steps), rate, strike)
        after = told("control again", short, rate)
        whole = told("synchronous", (steps,), None, in_networks=False)
    found = figures(whole, struck, (before, after))
    runs = {"synchronous": whole, "struck": struck, "before": before, "after": after}
    kept = {name: [[line[key] for key in _KEPT] for line in r.lines] for name, r in runs.items()}
    text = page(found, about)
    print(text)
    data = {"facts": about, "found": found, "columns": _KEPT, "runs": kept}
    print(f"results: {keep(folder_of(asked.results, about), 'sites', data, text)}")


if __name__ == "__main__":
    main()
