"""Derives the catalogue's curves of kernels from the tables of aiconfigurator-core (Apache-2.0).

    pip install paceline[catalogue]
    python tools/derive_curves.py                    # writes src/paceline/config/catalogue/*.json
    python tools/derive_curves.py --systems FOLDER   # aiconfigurator_core/systems, unpacked
    python tools/derive_curves.py --check            # errors on rows that a grid leaves out

The tables hold times of single kernels (matrix products, attention) by shape, measured by three
serving frameworks. Kept of them are the times on a grid of shapes, in microseconds with three
digits, so that a file stays below 60 kB:

- bf16: the median over the frameworks, which all call cuBLAS; it evens out power and temperature.
- fp8, fp4: the fastest of them, because each includes a kernel that quantises the input.
- Times are made monotone in every size (mean of the running maximum from below and the running
  minimum from above, in logarithms); a shape that no table has takes the time of the next smaller
  ones, scaled by the work.
- Attention: the fastest of the frameworks (serving reads paged caches, training does not); causal,
  no cached prefix, no window, at most 8 queries to a key. Off the tables' times comes what an
  almost empty call takes in them (16 tokens or fewer).

What no table has is assumed, and the file says so: backward attention and, from Hopper on,
FlashAttention-2 (see `_assume_older_kernels`).
"""

import argparse
import importlib.metadata
import importlib.resources
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as parquet

from paceline.config.catalogue import devices
from paceline.config.curves import MatmulCurve
from paceline.plan.grids import product_grid
from paceline.plan.rates import ATTENTION_BLOCK, wave_quantization

PACKAGE = "aiconfigurator-core"
OUT = Path(devices.__file__).parent
Array = npt.NDArray[Any]


class Source(NamedTuple):
    """A system of the tables and the device of our catalogue that it is."""

    folder: str
    device: str
    processors: int
    """Streaming multiprocessors, by the vendor's datasheet."""
    tile: tuple[int, int] | None
    """Kept to by the kernels, where that predicts rows between the grid's better (--check)."""


SOURCES = (
    Source("a100_sxm", "A100-80", 108, (128, 256)),
    Source("h100_sxm", "H100-SXM", 132, None),
    Source("h200_sxm", "H200", 132, None),
    Source("b200_sxm", "B200", 148, None),
    Source("b300_sxm", "B300", 148, None),
    Source("gb200", "GB200", 148, None),
    Source("gb300", "GB300", 148, None),
    Source("l40s", "L40S", 142, (128, 256)),
    Source("rtx_pro_6000_server", "RTX-PRO-6000", 188, (128, 256)),
)
# Superseded by a later version of the same framework.
SKIPPED = {"sglang/0.5.6.post2", "vllm/0.22.0"}

_M = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768)
_SIDE = (
    *(64, 128, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192),
    *(10240, 12288, 16384, 65536),
)
# Left out of it by --check, beside all rows between its m.
_LEFT_OUT = {2560, 3584, 5120, 7168, 10240}
_MEDIUM = tuple(size for size in _SIDE if size not in _LEFT_OUT)
_COARSE = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
_SEQ = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_HEAD_DIMS = (64, 128, 192, 256)
# An arithmetic, the tables' name of it, how the frameworks' times are joined, sizes of n and k.
ARITHMETIC = (
    ("bf16", "bfloat16", np.nanmedian, _SIDE),
    ("fp8", "fp8", np.nanmin, _MEDIUM),
    ("fp4", "nvfp4", np.nanmin, _COARSE),
)
# Kernels of fused attention, by the backend that they stand for.
FLASH2 = {"flash_attention", "vllm_flash_attn", "vllm_flash_attn_fa2"}
FLASH3 = {"fa3", "vllm_flash_attn_fa3", "trtllm_mha", "vllm_flashinfer_trtllmprefill"}

Table = dict[tuple[int, int, int], float]


def main() -> None:
    """Write the files, or check them."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--systems", type=Path, help="folder of the tables")
    arguments.add_argument("--check", action="store_true", help="print errors on left-out rows")
    given = arguments.parse_args()
    installed = importlib.resources.files
    systems = given.systems or Path(str(installed("aiconfigurator_core") / "systems"))
    if given.check:
        for source in SOURCES:
            _check(systems / "data", source)
        return
    found = {source.device: _derive(systems / "data", source) for source in SOURCES}
    _assume_older_kernels(found)
    _assume_head_sizes(found["A100-80"]["attention"]["flash"], found["L40S"]["attention"]["flash"])
    origin = _origin(systems)
    for name, curves in found.items():
        text = json.dumps({"origin": origin} | curves, separators=(",", ":"))
        (OUT / f"{name}.json").write_text(re.sub(r'([\]}],)"', r'\1\n"', text) + "\n")
        print(f"{name}: {len(text) / 1e3:.1f} kB")


def _origin(systems: Path) -> dict[str, str]:
    """What the files are made from; the package's metadata lie beside its folder."""
    found = importlib.metadata.distributions(name=PACKAGE, path=[str(systems.parents[1])])
    return {
        "package": f"{PACKAGE} {next(iter(found)).version}",
        "licence": "Apache-2.0; Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES",
        "derived_by": "tools/derive_curves.py",
    }


def _derive(data: Path, source: Source) -> dict[str, Any]:
    matmul = {}
    for ours, theirs, join, sides in ARITHMETIC:
        tables = dict(_products(data / source.folder, theirs))
        if not tables:
            continue
        joined = _join(tables, join)
        times, num_filled = _grid(joined, _M, sides, sides)
        matmul[ours] = {
            "m": _M, "n": sides, "k": sides, "us": [_digits(time) for time in times.ravel()],
            "tile": source.tile if ours == "bf16" else None,
            "source": f"measured: tables of {', '.join(tables)}; {join.__name__[3:]} of them; "
            f"{num_filled} of {times.size} shapes filled in from the next smaller one",
        }  # fmt: skip
    return {
        "num_processors": source.processors,
        "matmul": matmul,
        "attention": _attention(data / source.folder, source),
    }


# Matrix products


def _products(folder: Path, dtype: str) -> Iterator[tuple[str, Table]]:
    for path in sorted(folder.glob("gemm/*/*/gemm_perf.parquet")):
        software = "/".join(path.parts[-3:-1])
        if software in SKIPPED:
            continue
        columns = parquet.read_table(path).to_pydict()
        rows = zip(*(columns[c] for c in ("gemm_dtype", "m", "n", "k", "latency")), strict=True)
        table = {(m, n, k): ms * 1e3 for kind, m, n, k, ms in rows if kind == dtype}
        if table:
            kernels = {
                kernel
                for kernel, kind in zip(
                    columns["kernel_source"], columns["gemm_dtype"], strict=True
                )
                if kind == dtype
            }
            yield f"{folder.name}/gemm/{software} ({', '.join(sorted(kernels))})", table


def _join(tables: dict[str, Table], join: Any) -> Table:
    shapes = sorted(set().union(*tables.values()))
    logs = np.log([[table.get(s, np.nan) for table in tables.values()] for s in shapes])
    return dict(zip(shapes, np.exp(join(logs, axis=1)).tolist(), strict=True))


def _grid(
    table: Table, m: tuple[int, ...], n: tuple[int, ...], k: tuple[int, ...]
) -> tuple[Array, int]:
    """Microseconds at every shape, monotone; and how many no table had."""
    shapes = [(a, b, c) for a in m for b in n for c in k]
    times = np.array([table.get(shape, np.nan) for shape in shapes])
    times = times.reshape(len(m), len(n), len(k))
    holes = np.isnan(times)
    for at in zip(*np.nonzero(holes), strict=True):
        times[at] = _from_smaller(times, (m, n, k), at)
    logs = np.log(times)
    rising, falling = logs, np.flip(logs)
    for axis in range(3):
        rising = np.maximum.accumulate(rising, axis=axis)
        falling = np.minimum.accumulate(falling, axis=axis)
    return np.exp((rising + np.flip(falling)) / 2), int(holes.sum())


def _from_smaller(times: Array, axes: tuple[tuple[int, ...], ...], at: Any) -> float:
    """The time of the next smaller shape with a time, scaled by the work."""
    found = []
    for axis, sizes in enumerate(axes):
        if at[axis]:
            below = tuple(i - (a == axis) for a, i in enumerate(at))
            found.append(times[below] * sizes[at[axis]] / sizes[at[axis] - 1])
    return float(np.nanmedian(found))


def _check(data: Path, source: Source) -> None:
    """Print how far rows off a thinned grid are from its curve, without and with tiles."""
    for ours, theirs, join, sides in ARITHMETIC:
        tables = dict(_products(data / source.folder, theirs))
        if not tables:
            continue
        table = _join(tables, join)
        kept = tuple(size for size in sides if size not in _LEFT_OUT)
        axes = (_M, kept, kept)
        rows = np.array([(*shape, time) for shape, time in table.items() if _is_off(shape, axes)])
        times, _ = _grid(table, *axes)
        share = 2 * np.einsum("i,j,k->ijk", *axes) / times
        for tile in (None, (128, 256)):
            curve = MatmulCurve(
                m=axes[0], n=axes[1], k=axes[2], tile=tile, source="",
                share=(share / share.max()).ravel().tolist(),
            )  # fmt: skip
            seconds = product_grid(curve, share.max(), source.processors)(*rows[:, :3].T)
            errors = seconds / rows[:, 3] - 1
            whole = (rows[:, :3] % 64 == 0).all(axis=1)
            print(
                f"{source.device:14s}{ours:6s}tile {tile!s:12s}"
                f"multiples of 64: {_errors(errors[whole])}; others: {_errors(errors[~whole])}"
            )


def _is_off(shape: tuple[int, ...], axes: tuple[tuple[int, ...], ...]) -> bool:
    big = shape[0] >= 256 and min(shape[1:]) >= 64
    return big and not all(size in axis for size, axis in zip(shape, axes, strict=True))


def _errors(errors: Array) -> str:
    sizes = np.abs(errors)
    return (
        f"{len(errors):6d} rows, median {np.median(sizes):5.1%}, p90 {np.quantile(sizes, 0.9):5.1%}"
        f", bias {np.median(errors):+5.1%}"
    )


# Attention


def _attention(folder: Path, source: Source) -> dict[str, Any]:
    peak = _peak(source.device)
    curves = {}
    for backend, kernels in (("flash", FLASH2), ("flash3", FLASH3)):
        rows = {}
        for software, table in _attention_rows(folder, kernels):
            rows[software] = _saturated(table, peak, source.processors)
        if not rows:
            continue
        shares = np.fmax.reduce([*rows.values()])  # (seq, head_dim)
        have = ~np.isnan(shares).all(axis=0)
        shares = np.maximum.accumulate(shares[:, have], axis=0)
        backward = 0.75 if source.device.lstrip("G").startswith("B") else 0.86
        curves[backend] = {
            "seq_len": _SEQ,
            "head_dim": [dim for dim, there in zip(_HEAD_DIMS, have, strict=True) if there],
            "forward": [_digits(share) for share in shares.ravel()],
            "backward": [_digits(share * backward) for share in shares.ravel()],
            "source": f"forward measured: tables of {', '.join(rows)}; backward assumed: "
            f"{backward} of forward's share, after the best rates of both in "
            + (
                "FlashAttention-4 (Zadouri et al. 2026)"
                if backward == 0.75
                else "arXiv:2307.08691 and arXiv:2407.08608"
            ),
        }
    return curves


def _attention_rows(folder: Path, kernels: set[str]) -> Iterator[tuple[str, Array]]:
    """Per table: (rows, (batch x heads, seq, head_dim, microseconds))."""
    for path in sorted(folder.glob("attention/*/*/context_attention_perf.parquet")):
        software = "/".join(path.parts[-3:-1])
        if software in SKIPPED:
            continue
        table = parquet.read_table(path)
        c = {name: np.array(table[name].to_pylist()) for name in table.column_names}
        zero = np.zeros(table.num_rows)
        wanted = (
            np.isin(c["kernel_source"], [*kernels])
            & (c["attn_dtype"] == "bfloat16")
            & (c["kv_cache_dtype"] == "bfloat16")
            & (c.get("window_size", zero) == 0)
            & (c.get("step", zero) == 0)
            & (c["num_heads"] <= 8 * c["num_key_value_heads"])
        )
        if wanted.any():
            rows = np.stack(
                [c["batch_size"] * c["num_heads"], c["isl"], c["head_dim"], c["latency"] * 1e3], 1
            )
            names = sorted(set(c["kernel_source"][wanted]))
            yield f"{folder.name}/attention/{software} ({', '.join(names)})", rows[wanted]


def _saturated(rows: Array, peak: float, processors: int) -> Array:
    """Share of the peak with the device full, by sequence and head size; NaN where not measured."""
    shares = np.full((len(_SEQ), len(_HEAD_DIMS)), np.nan)
    for j, dim in enumerate(_HEAD_DIMS):
        of_dim = rows[rows[:, 2] == dim]
        tiny = of_dim[of_dim[:, 1] <= 16]
        empty_us = tiny[:, 3].min() if len(tiny) else 10.0
        for i, seq in enumerate(_SEQ):
            here = of_dim[of_dim[:, 1] == seq]
            blocks = here[:, 0] * np.ceil(seq / ATTENTION_BLOCK)
            here, blocks = here[blocks >= 2 * processors], blocks[blocks >= 2 * processors]
            if len(here):
                ideal_us = 2 * here[:, 0] * seq**2 * dim / peak * 1e6
                spent_us = np.maximum(here[:, 3] - empty_us, here[:, 3] / 4)
                shares[i, j] = np.median(
                    ideal_us * wave_quantization(blocks, processors) / spent_us
                )
    return shares


def _assume_older_kernels(found: dict[str, dict[str, Any]]) -> None:
    """FlashAttention-2 where only newer kernels were measured.

    arXiv:2407.08608 has its successor 1.5 to 2 times as fast on Hopper, 35 % against 75 % of the
    peak at best; the advantage grows with the sequence. Blackwell runs its instructions at about
    Hopper's rate per processor.
    """
    slower = np.interp(np.log2(_SEQ), [9, 14], [1.3, 1.75])
    for name, curves in found.items():
        if "flash" in curves["attention"]:
            continue
        hopper = name if name in ("H100-SXM", "H200") else "H100-SXM"
        newer = found[hopper]["attention"]["flash3"]
        scale = _peak(hopper) / _peak(name)
        scale *= curves["num_processors"] / found[hopper]["num_processors"]
        older = {}
        for key in ("forward", "backward"):
            shares = np.array(newer[key]).reshape(len(_SEQ), -1) * (scale / slower)[:, None]
            rising = np.maximum.accumulate(shares, axis=0)
            older[key] = [_digits(share) for share in rising.ravel()]
        source = (
            "assumed: Hopper's newer kernels, 1.3 (512 tokens) to 1.75 times (16,384) slower as in "
            "arXiv:2407.08608, at the same rate per processor"
        )
        curves["attention"]["flash"] = newer | older | {"source": source}


def _assume_head_sizes(curve: dict[str, Any], other: dict[str, Any]) -> None:
    """Give a curve of heads of 128 columns the other sizes, in the ratios of another device."""
    at = other["head_dim"].index(128)
    for key in ("forward", "backward"):
        whole = np.array(other[key]).reshape(len(_SEQ), -1)
        ratios = whole / whole[:, at : at + 1]
        shares = np.maximum.accumulate(np.array(curve[key])[:, None] * ratios, axis=0)
        curve[key] = [_digits(share) for share in shares.ravel()]
    curve["head_dim"] = other["head_dim"]
    curve["source"] += "; other head sizes than 128 assumed in the ratios of L40S"


def _peak(name: str) -> float:
    return devices.CATALOGUE[name].peak_flops["bf16"].value


def _digits(value: float) -> float | int:
    rounded = float(f"{value:.3g}")
    return int(rounded) if rounded >= 100 else rounded


if __name__ == "__main__":
    main()
