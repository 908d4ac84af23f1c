"""Measure: an engine's costs, round by round, kept in a file from which a later start goes on."""

from collections.abc import Callable
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from paceline.bench.serving.passes import PassMeter
from paceline.config.errors import InputError
from paceline.config.files import read_json
from paceline.generate.engine import Engine
from paceline.machine.discovery import this_machine
from paceline.observe.run import write_atomic
from paceline.plan.serving.measured import MeasuredHost, MeasuredServing, form_of


def setup_of(engine: Engine, meter: PassMeter, start_s: float, source: str) -> MeasuredServing:
    """What is measured, without times."""
    dtype = str(next(engine.decoder.parameters()).dtype)
    return MeasuredServing(
        model=engine.decoder.model,
        form=form_of(dtype, engine.weight_form, engine.key_form),
        device=this_machine().device.name,
        source=source,
        block_size=engine.serving.block_size,
        num_blocks=engine.numbers()["blocks"],
        max_tokens=engine.most_tokens,
        max_sequences=engine.serving.max_sequences,
        start_s=start_s,
        resident_bytes=0,
        passes=tuple(meter.passes()),
        hosts=tuple(MeasuredHost(choices=size) for size in meter.host_sizes),
    )


def measure(
    file: Path, setup: MeasuredServing, meter: PassMeter, advance: Callable[[], None]
) -> MeasuredServing:
    """Measure what the file has not; it is written after each round.

    Args:
        setup: what is measured. A file that holds times of the same is gone on with, one of
            anything else is begun anew.
        advance: called after each pass.
    """
    found = earlier(file, setup) or setup
    if not found.is_whole:
        meter.fill()
    while not found.is_whole:
        found = one_round(found, meter, advance)
        write_atomic(file, found.model_dump_json(indent=1))
    return found


def earlier(file: Path, setup: MeasuredServing) -> MeasuredServing | None:
    """Times of the same that were measured before; None: there are none."""
    try:
        found = read_json(file, TypeAdapter(MeasuredServing), "measure anew")
    except InputError:
        return None
    return found if found.setup == setup.setup else None


def one_round(
    found: MeasuredServing, meter: PassMeter, advance: Callable[[], None] = lambda: None
) -> MeasuredServing:
    """With one more time of each pass, and of each of the host's parts."""
    passes = []
    for shape, one in zip(meter.shapes, found.passes, strict=True):
        passes.append(one.replace(seconds=(*one.seconds, meter.pass_s(shape))))
        advance()
    hosts = [one.replace(seconds=(*one.seconds, meter.host_s(one.choices))) for one in found.hosts]
    memory = max(found.resident_bytes, psutil.Process().memory_info().rss)
    return found.replace(passes=tuple(passes), hosts=tuple(hosts), resident_bytes=memory)
