"""Write the tables and plots of docs/techniques/local_updates.md and overlap.md.

    python docs/make_network_pages.py

Measured rows are those of benchmarks/results/<device>/network.json, network_workers.json and
local_updates.json, which benchmarks/network.py and benchmarks/local_updates.py wrote; what they
lack is "not measured yet". The rest are the formulas of the two pages, for the network of
network.py on two hosts. The plots need matplotlib (extra `docs`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from measured import MEASURED, TECHNIQUES, axes_of, filled, save, table

from paceline.config.comm import codec, coded_bits

RANKS, VALUES, STEP_S = 2, 12.2e6, 0.93
"""Hosts, parameters and seconds that a step computes, as in network.json at 200 Mbit/s."""
BACKWARD_S = STEP_S * 2 / 3
"""Backward passes take twice the FLOPs of forward ones."""
RATES = (10e6, 50e6, 200e6, 1e9)
NOT_YET = "not measured yet"


@dataclass(frozen=True)
class Meeting:
    """Workers that meet: how often, in which form, and what they do meanwhile."""

    name: str
    every: int
    compress: str = "none"
    fragments: int = 1
    overlap_steps: int = 0


MEETINGS = (
    Meeting("gradients, exact", 1),
    Meeting("gradients, int4", 1, "int4"),
    Meeting("DiLoCo, exact, every 50", 50),
    Meeting("DiLoCo, int4, every 50", 50, "int4"),
    Meeting("DiLoCo, int4, every 150", 150, "int4"),
    Meeting("streaming, int4, every 20, 2 fragments, 5 steps late", 20, "int4", 2, 5),
)


def round_bytes(meeting: Meeting) -> float:
    """That a rank sends in a round of everything."""
    bits = 32 if meeting.compress == "none" else coded_bits(codec(meeting.compress))
    return 2 * (RANKS - 1) / RANKS * VALUES * bits / 8


def efficiency(meeting: Meeting, bits_per_s: float) -> float:
    """Of computing alone; codecs and outer steps cost nothing, gradients are not hidden."""
    fragment_s = 8 * round_bytes(meeting) / meeting.fragments / bits_per_s
    late_s = max(0.0, fragment_s - meeting.overlap_steps * STEP_S)
    return STEP_S / (STEP_S + meeting.fragments * late_s / meeting.every)


def rate_for(meeting: Meeting, wanted: float) -> float:
    """Bit/s of links on which so much of the throughput is left."""
    fragment_bits = 8 * round_bytes(meeting) / meeting.fragments
    spare_s = meeting.every * STEP_S * (1 / wanted - 1) / meeting.fragments
    return fragment_bits / (spare_s + meeting.overlap_steps * STEP_S)


def _rate(bits_per_s: float) -> str:
    size, unit = (1e9, "Gbit/s") if bits_per_s >= 1e9 else (1e6, "Mbit/s")
    return f"{bits_per_s / size:.3g} {unit}"


def meetings_table() -> str:
    """What each way sends, and the links it needs."""
    titles = ("what travels", "MB a step", *(f"at {_rate(r)}" for r in RATES), "95 % above")
    return table(
        titles,
        [
            (
                each.name,
                f"{round_bytes(each) / each.every / 1e6:.2g}",
                *(f"{efficiency(each, rate):.0%}" for rate in RATES),
                _rate(rate_for(each, 0.95)),
            )
            for each in MEETINGS
        ],
    )


def losses_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Held-out losses beside those of the synchronous replicas on the same seed."""
    peer = {run["seed"]: run["loss"] for run in runs if run["method"] == "synchronous"}
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["method"], []).append(run)
    lines = []
    for method, mine in found.items():
        apart = [run["loss"] / peer[run["seed"]] - 1 for run in mine]
        sent = mean(run["bytes_per_step"] for run in mine)
        loss, spread = mean(run["loss"] for run in mine), f"{min(apart):+.2%} – {max(apart):+.2%}"
        lines.append((method, f"{sent / 1e3:.1f}", f"{loss:.4f}", f"{mean(apart):+.2%} ({spread})"))
    return table(("method", "kB sent a step", "held-out loss", "to synchronous (seeds)"), lines)


def local_times_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Measured steps of workers that meet in rounds."""
    lines = [
        (
            f"{row['way']}, {row['form']}",
            str(cell["num_hosts"]),
            _link(cell),
            f"{row['step_s'][0]:.3f}",
            f"{row['sent_bytes'] / 1e6:.3g}",
            f"{row['efficiency']:.1%}",
        )
        for cell in cells
        for row in cell["rows"]
        if row["way"] in ("diloco", "streaming")
    ]
    titles = ("way", "hosts", "link", "step, s", "MB sent a step", "of computing alone")
    return table(titles, lines) if lines else f"Step times: {NOT_YET}."


def _link(cell: Mapping[str, Any]) -> str:
    return "unshaped" if cell["rate_bits_per_s"] is None else _rate(cell["rate_bits_per_s"])


def overlap_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """What the wire takes, what of it shows, and what the planner said."""
    lines = []
    for cell in cells:
        alone = next(row for row in cell["rows"] if row["way"] == "compute only")
        for row in cell["rows"]:
            if row["way"] == "compute only" or row["predicted_s"] is None or not _link_rate(cell):
                continue
            wire_s = 8 * row["sent_bytes"] / _link_rate(cell)
            exposed_s = row["step_s"][0] - alone["step_s"][0]
            lines.append(
                (
                    f"{row['way']} ({row['form']})" if row["form"] else f"{row['way']} (25 MiB)",
                    str(cell["num_hosts"]),
                    _link(cell),
                    f"{wire_s:.3f}",
                    f"{exposed_s:.3f}",
                    f"{row['step_s'][0]:.3f}",
                    f"{row['predicted_s']:.3f}",
                    f"{row['predicted_s'] / row['step_s'][0] - 1:+.0%}",
                )
            )
    titles = ("gradients as", "hosts", "link", "on the wire, s", "exposed, s", "step, s")
    return table((*titles, "predicted, s", "error"), lines) if lines else NOT_YET


def _link_rate(cell: Mapping[str, Any]) -> float:
    return cell["rate_bits_per_s"] or 0.0


def exposed_s(bits_per_s: float, num_buckets: float, latency_s: float = 1e-3) -> float:
    """Seconds of the exact gradients' exchange that are not beside the backward pass."""
    wire_s = 8 * round_bytes(MEETINGS[0]) / bits_per_s + num_buckets * latency_s
    hidden_s = min(wire_s - wire_s / num_buckets, BACKWARD_S * (1 - 1 / num_buckets))
    return wire_s - hidden_s


def plot_local() -> None:
    """Share of the throughput that is left, over the link's bandwidth."""
    figure, axes = axes_of(
        f"12.2 M parameters on 2 ranks, {STEP_S:g} s a step, nothing else hidden",
        "bandwidth of the link, Mbit/s",
        "throughput over that of computing alone",
    )
    rates = np.geomspace(1e6, 1e10, 300)
    for meeting in MEETINGS:
        axes.semilogx(rates / 1e6, [efficiency(meeting, r) for r in rates], label=meeting.name)
    axes.axhline(0.95, color="k", lw=0.8, ls=":")
    save(figure, "local_updates")


def plot_overlap() -> None:
    """Exposed seconds over the link's bandwidth, a line per number of buckets."""
    figure, axes = axes_of(
        f"49 MB of gradients on 2 ranks beside {BACKWARD_S:.2f} s of backward pass",
        "bandwidth of the link, Gbit/s",
        "exposed seconds of an exchange",
    )
    rates = np.geomspace(5e7, 5e10, 300)
    for count, label in ((1, "one bucket"), (2, "25 MiB"), (12, "4 MiB"), (47, "1 MiB")):
        axes.loglog(rates / 1e9, [exposed_s(rate, count) for rate in rates], label=label)
    axes.axvline(8 * round_bytes(MEETINGS[0]) / BACKWARD_S / 1e9, color="k", lw=0.8, ls=":")
    save(figure, "overlap")


def pages() -> dict[Path, str]:
    """The two pages as they should be."""
    cells, workers = (
        json.loads((MEASURED / f"{name}.json").read_text())["cells"]
        for name in ("network", "network_workers")
    )
    runs = json.loads((MEASURED / "local_updates.json").read_text())["runs"]
    local, overlap = (TECHNIQUES / f"{name}.md" for name in ("local_updates", "overlap"))
    of_local = {
        "meetings": meetings_table(),
        "losses": losses_table(runs),
        "times": local_times_table(workers),
    }
    return {
        local: filled(local.read_text(), of_local),
        overlap: filled(overlap.read_text(), {"steps": overlap_table(cells)}),
    }


def main() -> None:
    """Renew what stands between the marks, and the plots."""
    for page, text in pages().items():
        page.write_text(text)
    plot_local()
    plot_overlap()


if __name__ == "__main__":
    main()
