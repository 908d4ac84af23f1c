"""Derive the measured collectives of the catalogue's devices from aiconfigurator-core's tables.

Run `pip install "paceline[catalogue]"` and then `python tools/derive_collectives.py`; it writes
src/paceline/config/catalogue/collectives.json, which ships with Paceline (the package does not).

What it does: takes the 16-bit rows of the newest NCCL release of each system, and turns their
message sizes from elements into bytes: rows of int8 with twice the message size have the same
latency, and only then do the bus bandwidths reach what the links carry. Nothing is smoothed here.

aiconfigurator-core is Apache-2.0, (c) NVIDIA, https://github.com/ai-dynamo/aiconfigurator.
"""

import argparse
import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet

OUT = Path(__file__).parent.parent / "src/paceline/config/catalogue/collectives.json"
# Folder of a system -> our fabric, see `paceline.config.links`.
SYSTEMS = {
    "a100_sxm": "nvlink3",
    "h100_sxm": "nvlink4-h100",
    "h200_sxm": "nvlink4-h200",
    "b200_sxm": "nvlink5-b200",
    "b300_sxm": "nvlink5-b300",
    "gb200": "nvlink5-gb200",
    "gb300": "nvlink5-gb300",
    "l40s": "pcie4-l40s",
    "rtx_pro_6000_server": "pcie5-rtx-pro-6000",
}
OPS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
# Four and eight L40S reached 5 and 1.2 GB/s of 32: a host whose devices can't reach each other's
# memory across its two sockets. That is a fault of one machine, not a property of the device.
LEFT_OUT = {("l40s", 4), ("l40s", 8)}
ITEM_BYTES = 2


def main() -> None:
    """Write the data file."""
    parser = argparse.ArgumentParser(description="Derive the catalogue's measured collectives.")
    parser.add_argument("--systems", type=Path, help="unpacked .../aiconfigurator_core/systems")
    systems = parser.parse_args().systems or installed_systems()
    fabrics = {fabric: curves_of(systems, system) for system, fabric in SYSTEMS.items()}
    text = json.dumps({"origin": origin(systems), "fabrics": fabrics}, indent=1)
    OUT.write_text(one_list_per_line(text) + "\n")
    print(f"{OUT}: {OUT.stat().st_size} bytes, {len(fabrics)} fabrics")


def installed_systems() -> Path:
    """The folder of tables of the installed package."""
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or found.origin is None:
        raise SystemExit('aiconfigurator-core is missing: pip install "paceline[catalogue]".')
    return Path(found.origin).parent / "systems"


def origin(systems: Path) -> str:
    """Package, version and licence."""
    beside = importlib.metadata.distributions(path=[str(systems.parent.parent)])
    versions = [each.version for each in beside if each.name.startswith("aiconfigurator")]
    return f"aiconfigurator-core {' '.join(versions)} (Apache-2.0), tables comm/nccl/*/nccl_perf"


def curves_of(systems: Path, system: str) -> dict[str, Any]:
    """The curves of one system: source, and by collective and ranks [bytes], [microseconds]."""
    table = newest_table(systems / "data" / system / "comm/nccl")
    rows = [row for row in pyarrow.parquet.read_table(table).to_pylist() if fits(row, system)]
    found: dict[str, Any] = {"source": source(rows, table)}
    for name, op in OPS.items():
        of_op = [row for row in rows if row["op_name"] == name]
        found[op] = {
            str(ranks): curve([row for row in of_op if row["num_gpus"] == ranks])
            for ranks in sorted({row["num_gpus"] for row in of_op})
        }
    return found


def newest_table(folder: Path) -> Path:
    """The table of the newest NCCL release in a folder of releases."""
    tables = folder.glob("*/nccl_perf.parquet")
    return max(tables, key=lambda path: [int(part) for part in path.parent.name.split(".")])


def fits(row: Mapping[str, Any], system: str) -> bool:
    """Whether a row is kept."""
    return row["nccl_dtype"] == "half" and (system, row["num_gpus"]) not in LEFT_OUT


def curve(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Sizes in bytes and latencies in microseconds, by size."""
    by_bytes = {row["message_size"] * ITEM_BYTES: row["latency"] for row in rows}
    return {
        "bytes": sorted(by_bytes),
        "us": [float(f"{by_bytes[size] * 1e3:.4g}") for size in sorted(by_bytes)],
    }


def source(rows: list[dict[str, Any]], table: Path) -> str:
    """Where the rows come from."""
    return f"aiconfigurator-core: {rows[0]['device']}, NCCL {table.parent.name}, 16-bit"


def one_list_per_line(text: str) -> str:
    """JSON with indented objects, but each list of numbers on one line."""
    pieces = text.split("[")
    joined = [pieces[0]]
    for piece in pieces[1:]:
        inside, rest = piece.split("]", 1)
        joined.append(", ".join(inside.replace("\n", " ").replace(",", " ").split()) + "]" + rest)
    return "[".join(joined)


if __name__ == "__main__":
    main()
