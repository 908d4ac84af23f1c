"""Many drawn requests on drawn engines; every text is compared with the plain network.

How it works: `tests/generate/fuzzed.py` draws and checks rounds of 25 requests, each a function of
the seed and its number. Here processes with a thread each do rounds in turn; what happened in them
is counted, and the first promise that isn't kept ends it with exit code 1.

    python -m benchmarks.serve.fuzz --requests 10000 --seed 5 --processes 2
"""

import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown
from tests.generate.fuzzed import run_round
from tests.generate.fuzzed_checks import ViolationError

_OF_ROUND = 25


def main() -> None:
    """Do as many rounds as are asked for, and write what happened in them."""
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", default="5")
    parser.add_argument("--first", type=int, default=0, help="round to begin with")
    parser.add_argument("--processes", type=int, default=1, help="that share the rounds")
    options = parser.parse_args()
    about = taken_with("benchmarks.serve.fuzz")
    console = Console(highlight=False, soft_wrap=True)
    counts: Counter[str] = Counter()
    begun_s, told_s = time.perf_counter(), 0.0
    stop = options.first - (-options.requests // _OF_ROUND)
    with tempfile.TemporaryDirectory() as folder:
        # Networks are that small that a second thread of torch's only gets in the way.
        pool = ProcessPoolExecutor(
            options.processes, get_context("spawn"), torch.set_num_threads, (1,)
        )
        do = partial(_do_round, options.seed, folder)
        with pool:
            try:
                for done in pool.map(do, range(options.first, stop)):
                    counts += done
                    if (now_s := time.perf_counter() - begun_s) > told_s + 10:
                        told_s = now_s
                        console.print(f"{counts['requests, all']} requests in {now_s:.0f} s")
            except ViolationError as violation:
                pool.shutdown(cancel_futures=True)
                console.print(str(violation))
                sys.exit(1)
        if left := [each.name for each in Path(folder).iterdir()]:
            console.print(f"left on disk: {left}")
            sys.exit(1)
    seconds = time.perf_counter() - begun_s
    rows = [(key, f"{count:,}") for key, count in sorted(counts.items())]
    text = (
        f"Seed {options.seed}, rounds {options.first} to {stop - 1}: each text is that of its "
        "request alone, and no block, file or read was left. They took "
        f"{seconds / 60:.0f} minutes, in {options.processes} processes.\n\n"
    )
    page = f"{text}{markdown(('what', 'how often'), rows, ['what'])}\n{signature(about)}\n"
    console.print(page)
    result = {"facts": about, "seed": options.seed, "seconds": seconds, "counts": counts}
    keep(folder_of(options.results, about), "serve_fuzz", result, page)


def _do_round(seed: str, folder: str, number: int) -> Counter[str]:
    return run_round(f"{seed}/{number}", _OF_ROUND, Path(folder))


if __name__ == "__main__":
    main()
