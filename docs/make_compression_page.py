"""Write docs/techniques/compression.md's tables and its plot from the code and from measured rows.

    python docs/make_compression_page.py

The seconds of the codecs are those of benchmarks/results/<device>/codecs.toml, which
`paceline bench --only codecs --ranks 1` wrote. The plot needs matplotlib (extra `docs`).
"""

from pathlib import Path

import numpy as np

from paceline.config.comm import Codec, codec, coded_bits
from paceline.config.curves import CodecCurve
from paceline.config.job import read_cluster

HERE = Path(__file__).parent
PAGE = HERE / "techniques/compression.md"
PLOT = HERE / "techniques/compression.svg"
MEASURED = HERE.parent / "benchmarks/results/intel-r-xeon-r-processor-2-cores/codecs.toml"
FORMS = ("fp16", "bf16", "int8", "fp8", "int4", "quinary", "onebit", "topk:0.01", "topk:0.001")
VALUES, RANKS = 20e6, 2
BEGIN, END = "<!-- made by make_compression_page.py -->", "<!-- end -->"


def seconds(curve: CodecCurve, values: float = VALUES) -> tuple[float, float]:
    """Of coding so many values and of decoding what a mean over RANKS decodes."""
    decoded = values * (2 - 1 / RANKS)
    return tuple(
        float(spent[-1] * count / curve.values[-1])
        for spent, count in ((curve.encode, values), (curve.decode, decoded))
    )


def sent_bytes(bits: float, num_ranks: int = RANKS) -> float:
    """By one rank for a mean of VALUES values."""
    return 2 * (num_ranks - 1) / num_ranks * VALUES * bits / 8


def break_even(form: Codec, curve: CodecCurve) -> float:
    """Bit/s below which the form pays where nothing is hidden."""
    saved = sent_bytes(32) - sent_bytes(coded_bits(form))
    return 8 * saved / sum(seconds(curve))


def table(curves: dict[str, CodecCurve]) -> str:
    """The page's table, as Markdown."""
    lines = [
        "| form | bits per value | MB a step | codec, ms | pays below |",
        "|---|---:|---:|---:|---:|",
        f"| exact | 32 | {sent_bytes(32) / 1e6:.1f} | 0 | |",
    ]
    for name in FORMS:
        form, curve = codec(name), curves[name]
        bits = coded_bits(form)
        lines.append(
            f"| `{name}` | {bits:.3g} | {sent_bytes(bits) / 1e6:.3g} | "
            f"{sum(seconds(curve)) * 1e3:.0f} | {break_even(form, curve) / 1e9:.1f} Gbit/s |"
        )
    return "\n".join(lines)


def plot(curves: dict[str, CodecCurve]) -> None:
    """Exposed seconds of an exchange over the link's bandwidth, one line per form."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "paceline"
    from matplotlib import pyplot as plt

    bandwidth = np.geomspace(2e7, 1e11, 200)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.loglog(bandwidth / 1e9, 8 * sent_bytes(32) / bandwidth, "k", lw=2, label="exact (fp32)")
    for name in ("bf16", "int8", "int4", "quinary", "onebit", "topk:0.01"):
        wire = 8 * sent_bytes(coded_bits(codec(name))) / bandwidth
        axes.loglog(bandwidth / 1e9, wire + sum(seconds(curves[name])), label=name)
    axes.set_xlabel("bandwidth of the link, Gbit/s")
    axes.set_ylabel("seconds of an exchange, nothing hidden")
    axes.set_title("20 M gradients among 2 ranks, codecs on one CPU core")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend()
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    """Renew what stands between the marks, and the plot."""
    curves = dict(read_cluster(MEASURED).known_device.codecs)
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(curves)}\n{END}{after}")
    plot(curves)


if __name__ == "__main__":
    main()
