"""How long the planner takes for whole answers: one node, 1,024 devices, 16,384 devices.

How it works: each case runs in a process of its own, several times. A case counts the layouts of
its whole space, bounds, prices and predicts them (`paceline.plan.search.search`) and works out what
decides (`paceline.plan.search.why`). For one node the time is from the start of the interpreter to
its end, imports included, as a person waits for it after the first time (modules are compiled);
for the others it is that of the search and its reasons.

It is no measure of how right the answers are: see `benchmarks/planner.md`.

    python -m benchmarks.plan_speed [--repeats 3] [--results benchmarks/results]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any, NamedTuple

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with


class Case(NamedTuple):
    """A question to the planner."""

    name: str
    model: str
    num_nodes: int
    global_batch: int
    free: tuple[str, ...]
    limit_s: float
    """What the project promises."""


SEQ_LEN = 8192
CASES = (
    Case("one node, 8B", "dense-8b", 1, 128, (), 1.0),
    Case("1,024 devices, 70B, offload searched", "dense-70b", 128, 1024, ("offload",), 5.0),
    Case("1,024 devices, experts", "experts-235b", 128, 1024, (), 5.0),
    Case("16,384 devices, 70B", "dense-70b", 2048, 4096, (), 15.0),
    Case("16,384 devices, experts", "experts-235b", 2048, 4096, (), 15.0),
)


def shapes(name: str) -> dict[str, Any]:
    """Sizes as published for Llama-3 8B and 70B and for Qwen3-235B-A22B."""
    eight = {
        "vocab_size": 128256, "hidden_size": 4096, "ffn_size": 14336, "num_layers": 32,
        "num_heads": 32, "num_kv_heads": 8, "max_seq_len": SEQ_LEN,
    }  # fmt: skip
    seventy = eight | {"hidden_size": 8192, "ffn_size": 28672, "num_layers": 80, "num_heads": 64}
    experts = {
        "vocab_size": 151936, "hidden_size": 4096, "ffn_size": 12288, "num_layers": 94,
        "num_heads": 64, "num_kv_heads": 4, "head_dim": 128, "max_seq_len": SEQ_LEN,
        "experts": {"num_experts": 128, "experts_per_token": 8, "ffn_size": 1536},
    }  # fmt: skip
    return {"dense-8b": eight, "dense-70b": seventy, "experts-235b": experts}[name]


def answer(case: Case) -> dict[str, Any]:
    """One whole answer, in this process."""
    began = time.perf_counter()
    from paceline.config.hardware import Cluster, device
    from paceline.config.model import Model
    from paceline.config.stack import Stack
    from paceline.plan.points import Setting
    from paceline.plan.search.search import search
    from paceline.plan.search.space import SearchConstraints
    from paceline.plan.search.why import explain, name_of

    imported = time.perf_counter()
    cluster = Cluster(device=device("H100-SXM"), devices_per_node=8, num_nodes=case.num_nodes)
    model = Model.parse(shapes(case.model))
    setting = Setting(model, cluster, SEQ_LEN, case.global_batch, Stack())
    found = search(setting, SearchConstraints(free=case.free))
    sentences = explain(found)
    return {
        "imports_s": imported - began,
        "search_s": time.perf_counter() - imported,
        "processor_s": time.process_time(),
        "points": found.counts.points,
        "priced": found.counts.priced,
        "predicted": len(found.ranked),
        "best": name_of(found.ranked[0].layout) if found.ranked else None,
        "sentences": sentences,
        "imports_torch": "torch" in sys.modules,
    }


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Several answers, each in a new process, after one that isn't counted."""
    _, *answers = [_in_process(case) for _ in range(1 + repeats)]
    key = "process_s" if case.num_nodes == 1 else "search_s"
    times = sorted(each[key] for each in answers)
    return {
        "case": case._asdict(),
        "timed": key,
        "median_s": median(times),
        "least_s": times[0],
        "most_s": times[-1],
        "answers": answers,
    }


def _in_process(case: Case) -> dict[str, Any]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.plan_speed", "--case", case.name]
    keeps = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=keeps)
    whole_s = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{case.name} failed:\n{done.stderr}")
    return {"process_s": whole_s, **json.loads(done.stdout)}


def table(results: list[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    lines = [
        "| question | layouts | priced | median s | least - most | promised | best |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for each in results:
        case, first = each["case"], each["answers"][0]
        lines.append(
            f"| {case['name']} | {first['points']:,} | {first['priced']:,} "
            f"| {each['median_s']:.2f} | {each['least_s']:.2f} - {each['most_s']:.2f} "
            f"| {case['limit_s']:g} | {first['best']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark, show the table and write the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="answers per question")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case = next(case for case in CASES if case.name == options.case)
        print(json.dumps(answer(case)))
        return
    about = taken_with("benchmarks.plan_speed", "numpy")
    results = [measure(case, options.repeats) for case in CASES]
    text = table(results)
    print(text)
    result, page = {"facts": about, "figures": results}, f"{text}\n{signature(about)}\n"
    file = keep(folder_of(options.results, about), "plan_speed", result, page)
    print(f"results: {file}")


if __name__ == "__main__":
    main()
