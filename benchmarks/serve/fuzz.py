"""Many drawn requests on drawn engines; every text is compared with the plain network.

How it works: `tests/generate/fuzzed.py` draws and checks rounds of 25 requests. Here they are
counted, and the first promise that isn't kept ends it with exit code 1.

    python -m benchmarks.serve.fuzz --requests 10000 --seed 5
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown
from tests.generate.fuzzed import ViolationError, run_round

_OF_ROUND = 25


def main() -> None:
    """Do as many rounds as are asked for, and write what happened in them."""
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", default="5")
    parser.add_argument("--first", type=int, default=0, help="round to begin with")
    options = parser.parse_args()
    about = taken_with("benchmarks.serve.fuzz")
    console = Console(highlight=False, soft_wrap=True)
    counts: Counter[str] = Counter()
    begun_s, number, told_s = time.perf_counter(), options.first, 0.0
    with tempfile.TemporaryDirectory() as folder:
        while counts["requests, all"] < options.requests:
            try:
                counts += run_round(f"{options.seed}/{number}", _OF_ROUND, Path(folder))
            except ViolationError as violation:
                console.print(f"round {number}: {violation}")
                sys.exit(1)
            number += 1
            if (now_s := time.perf_counter() - begun_s) > told_s + 10:
                told_s = now_s
                console.print(f"{counts['requests, all']} requests in {now_s:.0f} s")
        if left := [each.name for each in Path(folder).iterdir()]:
            console.print(f"left on disk: {left}")
            sys.exit(1)
    rows = [(key, f"{count:,}") for key, count in sorted(counts.items())]
    text = (
        f"Seed {options.seed}: each text is that of its request alone, and no block, file or read "
        "was left.\n\n"
    )
    page = f"{text}{markdown(('what', 'how often'), rows, ['what'])}\n{signature(about)}\n"
    console.print(page)
    result = {"facts": about, "seed": options.seed, "counts": counts}
    keep(folder_of(options.results, about), "serve_fuzz", result, page)


if __name__ == "__main__":
    main()
