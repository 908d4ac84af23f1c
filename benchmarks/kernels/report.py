"""What every kernel needs of a GPU, with no GPU: registers, spills, shared memory.

How it works: each launch that ships is compiled for A100, H100/H200 and B200 by the assembler in
Triton's wheel, and its cubin is read (`ahead`). The table is kept beside this
file. A kernel that spills registers without a stated reason, or asks for more shared memory than
the device has, fails the command.

    python -m benchmarks.kernels.report        (or: make kernels-report)
"""

import csv
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.kernels.ahead import MOST_SHARED, Compilation, Resources, all_kernels, compilations
from benchmarks.kernels.ahead import resources as resources_of
from paceline.kernels import switch

RESOURCES = Path(__file__).with_name("resources.csv")
COLUMNS = (
    *("kernel", "sm", "dtype", "size", "variant", "launch", "registers", "spilled_bytes"),
    *("shared_bytes", "programs_per_sm", "why"),
)


def row(index: tuple[int, int]) -> tuple[str | int, ...]:
    """Compile one launch: which kernel, and which of its compilations."""
    kernel = all_kernels()[index[0]]
    compilation = list(compilations(kernel))[index[1]]
    return (*_named(compilation), *resources_of(compilation), kernel.spills_because)


def _named(of: Compilation) -> tuple[str | int, ...]:
    launch = of.launch
    sizes = [f"{name}={value}" for name, value in launch.blocks.items()]
    words = [*sizes, f"warps={launch.num_warps}", f"stages={launch.num_stages}"]
    variant = " ".join(f"{name}={value}" for name, value in of.variant.items())
    return of.kernel.name, of.capability, of.dtype, of.size, variant, " ".join(words)


def faults(rows: list[tuple[str | int, ...]]) -> list[str]:
    """What may not ship: one sentence each."""
    found = []
    for kernel, capability, dtype, size, variant, _, *figures, why in rows:
        needs = Resources(*(int(figure) for figure in figures))
        which = f"{kernel} ({dtype}, {size}{' ' if variant else ''}{variant}) on sm_{capability}"
        if needs.spilled_bytes and not why:
            found.append(f"{which} spills {needs.spilled_bytes} bytes a thread.")
        if needs.shared_bytes > MOST_SHARED[int(capability)]:
            found.append(f"{which} wants {needs.shared_bytes} bytes of shared memory.")
    return found


def main() -> int:
    """Compile everything, write the table, say what is wrong."""
    console = Console()
    if switch.is_interpreted():
        console.print("TRITON_INTERPRET is set: interpreted functions can't be compiled; unset it.")
        return 2
    jobs = [
        (number, place)
        for number, kernel in enumerate(all_kernels())
        for place, _ in enumerate(compilations(kernel))
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(track(pool.map(row, jobs), "compiling", len(jobs), console=console))
    with RESOURCES.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    wrong = faults(rows)
    for sentence in wrong:
        console.print(sentence, style="red", highlight=False)
    spilling = sum(bool(each[7]) for each in rows)
    console.print(
        f"{len(rows)} launches of {len(all_kernels())} kernels; {spilling} spill; "
        f"table: {RESOURCES}",
        highlight=False,
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
