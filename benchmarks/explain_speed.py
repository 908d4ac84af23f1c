"""How long reading a trace and saying what its device did takes: against HolisticTraceAnalysis.

Both do the same work on the same file, in turns, each in a process of its own: read the trace,
split the device's time into computing, communicating, copying and idling, and give the share of
communication that is overlapped. Counted is the time between importing and the last figure, in
wall-clock and in CPU seconds (which other work on the machine disturbs less), with the largest
memory of the process. Ours reads the whole Account as well. Then a made-up trace of a
gigabyte, which is read by ours alone.

The figures of HolisticTraceAnalysis for the traces it was given are kept in the result: the tests
compare ours with them.

    python -m benchmarks.explain_speed TRACES [--peer PYTHON] [--repeats 5] [--large-gb 1]

TRACES: a folder of traces by torch.profiler. --peer: an interpreter with HolisticTraceAnalysis
(`pip install HolisticTraceAnalysis`), where this one has none.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_TIMED = """
import json, logging, os, sys, time
{imports}
logging.disable(logging.CRITICAL)
path, rank = sys.argv[1], int(sys.argv[2])
wall, cpu = time.perf_counter(), time.process_time()
{work}
used = dict(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)
# Not getrusage: its peak outlives exec, so it would be that of the process that started this one.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
used["peak_bytes"] = int(peak.split()[1]) * 1024
print(json.dumps(used | dict(figures=figures)))
"""
_PEER = _TIMED.format(
    imports="from hta.trace_analysis import TraceAnalysis",
    work="""
peer = TraceAnalysis(trace_files={rank: path}, trace_dir=os.path.dirname(path))
split = peer.get_temporal_breakdown(visualize=False).iloc[0]
overlap = peer.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].iloc[0]
kinds = peer.get_gpu_kernel_breakdown(visualize=False, num_kernels=10)[0]
figures = {name: float(split[f"{name}_time_pctg"]) for name in ("compute", "non_compute", "idle")}
figures["overlap"] = None if overlap != overlap else float(overlap)
figures["kernels"] = dict(zip(kinds["kernel_type"], map(float, kinds["percentage"])))
""",
)
_OURS = _TIMED.format(
    imports="""
from pathlib import Path
from paceline.observe.kineto.read import read_kineto
from paceline.observe.recorded import read_account
from paceline.observe.account import Account
from benchmarks.device_mix import DeviceMix
from paceline.observe.timeline import Timeline
""",
    work="""
mix = DeviceMix.of(read_kineto(path, rank), rank)
figures = {name: 100 * share for name, share in mix.shares().items()}
overlap = mix.overlap()
figures["overlap"] = None if overlap is None else 100 * overlap
figures["kernels"] = {" + ".join(sorted(k)): 100 * v for k, v in mix.busy_shares().items()}
""",
)
_ACCOUNT = _TIMED.format(
    imports="from pathlib import Path\nfrom paceline.observe.account import Account",
    work="account = read_account(Path(path))\nfigures = {'num_steps': len(account.steps)}",
)


def timed(python: str, code: str, path: Path, rank: int) -> dict[str, Any]:
    """Run a reading in a process of its own.

    Returns:
        wall_s, cpu_s, peak_bytes, and the figures that it found.
    """
    answer = subprocess.run(
        [python, "-W", "ignore", "-c", code, str(path), str(rank)],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of repeated runs, their spread, and the figures of the last."""
    medians = {name: median(run[name] for run in runs) for name in ("wall_s", "cpu_s")}
    spread = {f"{name}_all": [round(run[name], 3) for run in runs] for name in ("wall_s", "cpu_s")}
    peak = max(run["peak_bytes"] for run in runs)
    return {**medians, **spread, "peak_bytes": peak, "figures": runs[-1]["figures"]}


def compare(trace: Path, peer: str, repeats: int) -> dict[str, Any]:
    """Read one trace with both, in turns."""
    rank = int(trace.name.split("rank")[-1].split(".")[0]) if "ranks_rank" in trace.name else 0
    ours, theirs, whole = [], [], []
    with tempfile.TemporaryDirectory() as folder:  # the peer reads every file beside it
        path = Path(shutil.copy(trace, folder))
        for _ in range(repeats):
            ours.append(timed(sys.executable, _OURS, path, rank))
            theirs.append(timed(peer, _PEER, path, rank))
            whole.append(timed(sys.executable, _ACCOUNT, path, rank))
    return {"ours": summed(ours), "peer": summed(theirs), "account": summed(whole)}


def large(size_bytes: int) -> dict[str, Any]:
    """Read a made-up trace of a size."""
    from benchmarks.large_trace import write_large_trace

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json"
        num_events = write_large_trace(path, size_bytes)
        size = path.stat().st_size
        run = timed(sys.executable, _ACCOUNT, path, 0)
    return {"bytes": size, "complete_events": num_events, "account": summed([run])}


def page(result: dict[str, Any]) -> str:
    """Render the result for people."""
    from benchmarks.provenance import signature

    rows = [
        "# Reading traces",
        "",
        f"HolisticTraceAnalysis {result['peer_version']}; medians of {result['repeats']} runs in "
        "turns, from after the imports.",
        "",
        "| trace | ours, s (CPU s) | peer, s (CPU s) | ours / peer | whole Account, s (CPU s) "
        "| memory: ours, peer, Account |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, found in result["traces"].items():
        ours, peer, account = found["ours"], found["peer"], found["account"]
        times = (f"{run['wall_s']:.2f} ({run['cpu_s']:.2f})" for run in (ours, peer))
        peaks = " / ".join(f"{run['peak_bytes'] / 1e6:.0f}" for run in (ours, peer, account))
        rows.append(
            f"| {name} | {' | '.join(times)} | {ours['wall_s'] / peer['wall_s']:.2f} "
            f"| {account['wall_s']:.2f} ({account['cpu_s']:.2f}) | {peaks} MB |"
        )
    if big := result["large"]:
        run = big["account"]
        rows += [
            "",
            f"A made-up trace of {big['bytes'] / 1e9:.2f} GB with {big['complete_events']:,} "
            f"complete events: the whole Account in {run['wall_s']:.1f} s "
            f"({run['cpu_s']:.1f} CPU s), at most {run['peak_bytes'] / 1e9:.2f} GB of memory.",
        ]
    return "\n".join([*rows, "", signature(result), ""])


def main() -> None:
    """Run the comparison and keep its result."""
    from benchmarks.provenance import folder_of, keep, parser_of, taken_with

    parser = parser_of(__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--large-gb", type=float, default=1.0)
    wish = parser.parse_args()
    ask = "from importlib.metadata import version; print(version('HolisticTraceAnalysis'))"
    version = subprocess.run([wish.peer, "-c", ask], capture_output=True, text=True, check=True)
    result = taken_with("benchmarks.explain_speed")
    result |= {"peer_version": version.stdout.strip(), "repeats": wish.repeats}
    result["traces"] = {
        trace.name.removesuffix(".json.gz"): compare(trace, wish.peer, wish.repeats)
        for trace in sorted(wish.traces.glob("*.json.gz"))
    }
    result["large"] = large(int(wish.large_gb * 1e9)) if wish.large_gb else None
    keep(folder_of(wish.results, result), "explain_speed", result, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
