"""Write docs/techniques/compression.md's tables and its plot from the code and from measured rows.

    python docs/make_compression_page.py

The seconds of the codecs are those of benchmarks/results/<device>/codecs.toml, which
`paceline bench --only codecs --ranks 1` wrote; the losses those of compression_loss_after_30.json
and compression_loss_after_0.json of another machine (benchmarks/compression_loss.py). The plot
needs matplotlib (extra `docs`).
"""

import json
from pathlib import Path
from statistics import mean

import numpy as np
from measured import MEASURED, TECHNIQUES, axes_of, filled, save, table

from paceline.config.comm import Codec, codec, coded_bits
from paceline.config.curves import CodecCurve
from paceline.config.job import read_cluster

FORMS = ("fp16", "bf16", "int8", "fp8", "int4", "quinary", "onebit", "topk:0.01", "topk:0.001")
VALUES, RANKS = 20e6, 2
LOSS_FORMS = ("int8", "int4", "quinary")
LOSSES = MEASURED.parent / "amd-epyc-2-cores"
"""As two replicas exchange since they gather both payloads at once."""


def seconds(curve: CodecCurve, values: float = VALUES) -> tuple[float, float]:
    """Of coding so many values and of decoding those of both ranks."""
    return tuple(
        float(spent[-1] * count / curve.values[-1])
        for spent, count in ((curve.encode, values), (curve.decode, RANKS * values))
    )


def sent_bytes(bits: float, num_ranks: int = RANKS) -> float:
    """By one rank for a mean of VALUES values."""
    return 2 * (num_ranks - 1) / num_ranks * VALUES * bits / 8


def break_even(form: Codec, curve: CodecCurve) -> float:
    """Bit/s below which the form pays where nothing is hidden."""
    saved = sent_bytes(32) - sent_bytes(coded_bits(form))
    return 8 * saved / sum(seconds(curve))


def codecs_table(curves: dict[str, CodecCurve]) -> str:
    """What each form sends and takes, and where it pays."""
    lines = [("exact", "32", f"{sent_bytes(32) / 1e6:.1f}", "0", "")]
    for name in FORMS:
        form, curve = codec(name), curves[name]
        bits = coded_bits(form)
        coding = f"{sum(seconds(curve)) * 1e3:.0f}"
        sent, pays = f"{sent_bytes(bits) / 1e6:.3g}", f"{break_even(form, curve) / 1e9:.1f} Gbit/s"
        lines.append((f"`{name}`", f"{bits:.3g}", sent, coding, pays))
    return table(("form", "bits per value", "MB a step", "codec, ms", "pays below"), lines)


def losses_table() -> str:
    """Held-out losses above those of exact sums on the same seed, with and without exact steps."""
    lines = [
        (f"`{form}`", f"{coded_bits(codec(form)):.3g}", _above(form, 30), _above(form, 0))
        for form in LOSS_FORMS
    ]
    titles = ("form", "bits per value", "after 30 exact steps (seeds)", "without (seeds)")
    return table(titles, lines)


def _above(form: str, num_exact: int) -> str:
    file = LOSSES / f"compression_loss_after_{num_exact}.json"
    runs = json.loads(file.read_text())["runs"]
    exact = {run["seed"]: run["eval_loss"] for run in runs if run["form"] == "none"}
    apart = [run["eval_loss"] / exact[run["seed"]] - 1 for run in runs if run["form"] == form]
    if not apart:
        return "not measured"
    return f"{mean(apart):+.2%} ({min(apart):+.2%} – {max(apart):+.2%})"


def plot(curves: dict[str, CodecCurve]) -> None:
    """Exposed seconds of an exchange over the link's bandwidth, one line per form."""
    figure, axes = axes_of(
        "20 M gradients among 2 ranks, codecs on one CPU core",
        "bandwidth of the link, Gbit/s",
        "seconds of an exchange, nothing hidden",
    )
    bandwidth = np.geomspace(2e7, 1e11, 200)
    axes.loglog(bandwidth / 1e9, 8 * sent_bytes(32) / bandwidth, "k", lw=2, label="exact (fp32)")
    for name in ("bf16", "int8", "int4", "quinary", "onebit", "topk:0.01"):
        wire = 8 * sent_bytes(coded_bits(codec(name))) / bandwidth
        axes.loglog(bandwidth / 1e9, wire + sum(seconds(curves[name])), label=name)
    save(figure, "compression")


def measured_codecs() -> dict[str, CodecCurve]:
    """By name."""
    return dict(read_cluster(MEASURED / "codecs.toml").device.codecs)


def pages() -> dict[Path, str]:
    """The page as it should be."""
    page = TECHNIQUES / "compression.md"
    tables = {"codecs": codecs_table(measured_codecs()), "losses": losses_table()}
    return {page: filled(page.read_text(), tables)}


def main() -> None:
    """Renew what stands between the marks, and the plot."""
    for page, text in pages().items():
        page.write_text(text)
    plot(measured_codecs())


if __name__ == "__main__":
    main()
