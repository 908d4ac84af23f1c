"""Small devices: the demo's network in 8 and 4 bits, as each format, run by that format's runtime.

    python -m benchmarks.edge RUN

RUN is a finished `paceline train` (the demo). GGUF's figures of speed need llama-cpp-python, and
ExecuTorch is left out where it isn't installed.
"""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown
from paceline.observe.run import Run
from paceline.render.figures import bytes_text
from paceline.serve.edge.command import FORMATS, export_for_edge

_TITLES = (
    "format", "weights", "bytes", "loss", "difference", "logits off", "tokens/s",
    "prompt tokens/s", "resident", "by",
)  # fmt: skip


def main() -> None:
    """Export each, and keep what was found."""
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="directory of the demo's run")
    asked = parser.parse_args()
    forms = [each for each in FORMATS if each != "executorch" or find_spec(each)]
    more = ("executorch", "torchao") if "executorch" in forms else ()
    about = taken_with("benchmarks.edge", "gguf", "onnx", "onnxruntime", *more)
    found = []
    with tempfile.TemporaryDirectory() as kept:
        for form in forms:
            for weights in ("int8", "int4"):
                target = Path(kept) / f"{form}-{weights}"
                found.append(export_for_edge(Run(asked.run), target, form, weights).told())
    page = "# A network on small devices\n\n"
    page += markdown(_TITLES, [_line(each) for each in found], ("format", "weights", "by"))
    page += f"\n{found[0]['held_out_tokens']:,} held-out tokens.\n\n{signature(about)}\n"
    print(page)
    keep(folder_of(asked.results, about), "edge", {"about": about, "files": found}, page)


def _line(found: dict[str, Any]) -> list[str]:
    rates = [found["tokens_per_s"], found["prompt_tokens_per_s"]]
    return [
        found["format"],
        found["weights"],
        bytes_text(found["num_bytes"]),
        f"{found['loss']:.4f}",
        f"{found['loss_difference']:+.4f}",
        f"{found['logit_error']:.2%}",
        *("unknown" if rate is None else f"{rate:,.0f}" for rate in rates),
        bytes_text(found["resident_bytes"]),
        found["runtime"],
    ]


if __name__ == "__main__":
    main()
