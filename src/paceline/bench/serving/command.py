"""The command `paceline bench serve`: what a network's passes take here, and a load as it comes."""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.bench.serving.measure import measure, setup_of
from paceline.bench.serving.online import EndpointLoad, serve_load
from paceline.bench.serving.passes import PassMeter
from paceline.config.errors import InputError
from paceline.config.serving import ServingSettings
from paceline.generate.work import WorkCounter
from paceline.plan.serving.load import KINDS, Range, Served, requests_of
from paceline.plan.serving.measured import MeasuredServing, measured_file
from paceline.plan.serving.simulate import simulate
from paceline.plan.serving.slo import Slo
from paceline.render.figures import amount_text, bytes_text, milliseconds
from paceline.render.table import Table
from paceline.serve.generate_command import described
from paceline.serve.network import open_network

_CONSOLE = Console(highlight=False, soft_wrap=True)
_PARTS = {"median": 0.5, "95 %": 0.95, "99 %": 0.99}


@dataclass(frozen=True)
class LoadOptions:
    """Requests that are sent, as the command line says."""

    rate: float | None
    """A second; None: all at once."""
    num_requests: int
    num_in: Range
    num_out: Range
    url: str | None = None
    """Of an endpoint; None: an engine of this process."""
    slo: Slo | None = None
    seed: int = 0


def bench_serve_command(
    path: Path,
    settings: ServingSettings,
    load: LoadOptions | None,
    source: str,
    *,
    step: int | None = None,
    fresh: bool = False,
) -> dict[str, Any]:
    """Measure passes into a file beside the weights, and send a load where one is asked.

    Args:
        path: a run or a folder of weights.
        load: None: none is sent.
        source: where, when and by which command.
        step: of the run's checkpoint; None: the newest good one.
        fresh: measure anew what is there already.

    Returns:
        what was found, as plain data.

    Raises:
        InputError: no such network, or a load that it can't take.
    """
    if settings.serve.exact:
        raise InputError(
            "serve.exact fills up each pass, so that all take the same: leave it out here."
        )
    network = open_network(path, settings.serve, step)
    if load is not None and load.url is not None:
        endpoint = EndpointLoad(load.url, settings.sampling)
        served = endpoint.serve(_requests(load, network.decoder.model.vocab_size))
        return {"load": _show_load(served, load, endpoint.problems)}
    engine = network.engine(settings.serve)
    start_s = time.time() - psutil.Process().create_time()
    _CONSOLE.print(f"{described(network)}, ready {start_s:.1f} s after the process began")
    meter = PassMeter(engine, engine.most_tokens, settings.sampling)
    setup = setup_of(engine, meter, start_s, source)
    file = measured_file(path, setup.form)
    if fresh:
        file.unlink(missing_ok=True)
    found = _measured(file, setup, meter)
    _show_passes(found)
    _CONSOLE.print(f"{file}: paceline plan --serve {path} reads it", markup=False)
    facts = {"file": str(file), "start_s": found.start_s, "resident_bytes": found.resident_bytes}
    if load is not None:
        requests = _requests(load, network.decoder.model.vocab_size)
        served = serve_load(engine, requests, settings.sampling)
        count = WorkCounter(found.model, found.block_size)
        planned = simulate(requests, found.limits, count, found.costs())
        facts["load"] = _show_load(served, load, planned=planned.served)
    return facts


def _measured(file: Path, setup: MeasuredServing, meter: PassMeter) -> MeasuredServing:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("passes"))
    with Progress(*columns, console=_CONSOLE, transient=True) as progress:
        bar = progress.add_task("", total=setup.num_rounds_left * len(setup.passes))
        return measure(file, setup, meter, lambda: progress.advance(bar))


def _requests(load: LoadOptions, vocab_size: int) -> Any:
    return requests_of(
        load.num_requests, load.rate, load.seed, load.num_in, load.num_out, vocab_size
    )


def _show_passes(found: MeasuredServing) -> None:
    """What was measured: passes of single tokens, of prompts, of both; and the host."""
    costs = found.costs()
    rows = [
        (
            f"{one.work.rows:,}",
            f"{one.work.choices:,}",
            f"{one.work.blocks:,.0f}",
            f"{one.work.keys:,}",
            milliseconds(median(one.seconds)),
            milliseconds(costs.terms(one.work).total - costs.terms(one.work).host),
        )
        for one in found.passes
    ]
    heads = ("tokens", "logits", "blocks", "keys of parts", "measured, ms", "by terms, ms")
    _CONSOLE.print(Table(heads, rows, words=(), title="forward passes"))
    missed = median(map(abs, found.errors()))
    _CONSOLE.print(
        f"terms miss a pass by {missed:.0%} (median); the host takes {costs.host_s * 1e3:.2g} ms a "
        f"step and {costs.text_s * 1e3:.2g} ms a text; {bytes_text(found.resident_bytes)} resident"
    )


def _show_load(
    served: Served, load: LoadOptions, problems: Any = (), planned: Served | None = None
) -> dict[str, Any]:
    """Say what became of a load, and return it as plain data."""
    rows = [
        (
            kind.upper(),
            *(milliseconds(served.percentile(kind, part)) for part in _PARTS.values()),
            *([] if planned is None else [milliseconds(planned.percentile(kind, 0.5))]),
        )
        for kind in KINDS
    ]
    heads = ("ms", *_PARTS, *([] if planned is None else ["median, planned"]))
    rate = "all at once" if load.rate is None else f"{load.rate:g} requests/s"
    title = f"{load.num_requests} requests, {rate}"
    _CONSOLE.print(Table(heads, rows, title=title))
    said = f"{served.tokens_per_s:,.0f} tokens/s"
    said += "" if planned is None else f" ({planned.tokens_per_s:,.0f} planned)"
    said += f", {amount_text(served.num_answered / served.seconds)} requests/s"
    if load.slo is not None:
        said += f", {amount_text(load.slo.goodput(served))} of them within {load.slo}"
    _CONSOLE.print(
        f"{said}; {len(problems)} requests failed{f': {problems[0]}' if problems else ''}"
    )
    facts = {
        kind: {part: served.percentile(kind, share) for part, share in _PARTS.items()}
        for kind in KINDS
    }
    goodput = {} if load.slo is None else {"goodput": load.slo.goodput(served)}
    return {"tokens_per_s": served.tokens_per_s, "failed": len(problems), **facts, **goodput}
