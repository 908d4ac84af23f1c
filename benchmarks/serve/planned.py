"""How far the planner's figures for serving are from measured ones.

How it works: settings are drawn (networks of 5 to 60 M parameters with random weights, batch,
tokens of a pass, lengths, all requests at once or at a rate). Of each, passes are measured as
`paceline bench serve` does, in turns with the load itself, so that what disturbs the machine for a
while is seen by both; then the load is simulated with the costs that were found.

    python -m benchmarks.serve.planned
"""

import argparse
import random
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown
from paceline.bench.serving.measure import one_round, setup_of
from paceline.bench.serving.online import serve_load
from paceline.bench.serving.passes import PassMeter
from paceline.config.model import Model
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.generate.work import WorkCounter
from paceline.models.decoder import Decoder
from paceline.plan.serving.load import Range, Served, requests_of
from paceline.plan.serving.simulate import simulate

_GREEDY = Sampling(temperature=0)
_FEWEST, _MOST = 5e6, 60e6  # parameters
_TURNS = 3


@dataclass(frozen=True)
class Drawn:
    """A network, how it is served, and what is asked of it."""

    model: Model
    serving: Serving
    num_in: Range
    num_out: Range
    load: float | None
    """Rate over what the planner says can be served; None: all at once."""


def main() -> None:
    """Draw settings, measure and plan each, and write how they compare."""
    options = _options()
    about = taken_with("benchmarks.serve.planned")
    console, draw, found = Console(highlight=False, soft_wrap=True), random.Random(options.seed), []
    for number in range(options.settings):
        drawn = _draw(draw)
        found.append(_one(drawn, options.requests, number))
        row = found[-1]
        console.print(
            f"{number + 1}: {row['parameters'] / 1e6:.0f} M, load {drawn.load}: "
            f"throughput x {row['throughput']:.2f}, TPOT x {row['tpot']:.2f}, "
            f"TTFT x {row['ttft']:.2f}"
        )
    page = _page(found, about)
    console.print(page)
    result = {"facts": about, "seed": options.seed, "settings": found}
    keep(folder_of(options.results, about), "serve_planned", result, page)


def _draw(draw: random.Random) -> Drawn:
    while True:
        heads = draw.choice((3, 4, 5, 6, 8, 9))
        hidden = 64 * heads
        model = Model(
            vocab_size=draw.choice((2048, 8192, 16384)),
            hidden_size=hidden,
            ffn_size=64 * draw.randint(2 * heads, 4 * heads),
            num_layers=draw.randint(4, 12),
            num_heads=heads,
            num_kv_heads=draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
            max_seq_len=1024,
            tie_embeddings=True,
        )
        if _FEWEST <= model.num_params <= _MOST:
            break
    serving = Serving(
        max_sequences=draw.choice((4, 8, 16, 32)), max_tokens=draw.choice((64, 128, 256, 512))
    )
    lengths = draw.choice(((16, 64), (32, 128), (128, 384)))
    texts = draw.choice(((16, 48), (32, 96), (64, 160)))
    return Drawn(model, serving, lengths, texts, draw.choice((None, None, 0.4, 0.6, 0.8)))


def _one(drawn: Drawn, num_requests: int, seed: int) -> dict[str, Any]:
    model = drawn.model
    decoder = Decoder(model)
    decoder.init_weights(torch.Generator().manual_seed(seed))
    engine = Engine(decoder.eval(), drawn.serving)
    meter = PassMeter(engine, engine.most_tokens, _GREEDY)
    measured = setup_of(engine, meter, 0.0, "benchmarks.serve.planned")
    meter.fill()
    count = WorkCounter(model, measured.block_size)
    measured = one_round(one_round(measured, meter), meter)

    def load(rate: float | None) -> Any:
        return requests_of(num_requests, rate, seed, drawn.num_in, drawn.num_out, model.vocab_size)

    at_once = simulate(load(None), measured.limits, count, measured.costs()).served
    rate = drawn.load and drawn.load * num_requests / at_once.seconds
    requests = load(rate)
    # The CPU's library makes kernels for each number of rows that it meets for the first time: a
    # server that has run for a while has met them all.
    serve_load(engine, requests, _GREEDY)
    runs = []
    for _ in range(_TURNS):
        runs.append(_figures(serve_load(engine, requests, _GREEDY)))
        measured = one_round(measured, meter)
    planned = _figures(simulate(requests, measured.limits, count, measured.costs()).served)
    taken = {name: statistics.median(run[name] for run in runs) for name in planned}
    return {
        "parameters": model.num_params,
        "drawn": asdict(drawn) | {"model": model.model_dump(), "serving": vars(drawn.serving)},
        "rate": rate,
        "planned": planned,
        "measured": runs,
        **{name: planned[name] / taken[name] for name in planned},
    }


def _figures(served: Served) -> dict[str, float]:
    kinds = {kind: served.percentile(kind, 0.5) for kind in ("tpot", "ttft")}
    return {"throughput": served.tokens_per_s, **kinds}


def _page(found: list[dict[str, Any]], about: dict[str, Any]) -> str:
    rows = []
    for name in ("throughput", "tpot", "ttft"):
        ratios = sorted(each[name] for each in found)
        errors = [abs(ratio - 1) for ratio in ratios]
        rows.append(
            (
                name if name == "throughput" else f"{name.upper()}, median of a load",
                f"{statistics.median(errors):.0%}",
                f"{max(errors):.0%}",
                f"{statistics.median(ratios):.2f}",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            )
        )
    heads = ("planned over measured", "error, median", "most", "ratio, median", "least to most")
    text = f"{len(found)} drawn settings.\n\n{markdown(heads, rows, [heads[0]])}"
    return f"{text}\n{signature(about)}\n"


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--settings", type=int, default=20)
    parser.add_argument("--requests", type=int, default=32, help="of a load")
    parser.add_argument("--seed", type=int, default=0, help="of the settings")
    return parser.parse_args()


if __name__ == "__main__":
    main()
