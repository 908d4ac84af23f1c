"""A made-up Run of two ranks, of which every second is known: steps of 2 s, all else as told."""

import json
from pathlib import Path
from typing import Any

from paceline.config.job import to_toml
from paceline.observe.run import Run, json_lines
from tests.elastic.cluster import job_of

BEGAN = 1_763_630_000.0
STEP_S = 2.0
TERMS = {
    "data_wait": 0.25,
    "exposed_comm.dp": 0.125,
    "straggler_wait": 0.125,
    "checkpoint_stall": 0.5,
    "host_gap": 0.25,
    "unattributed": 0.75,
}


def step(number: int, ended: float, **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl.

    Args:
        ended: seconds since BEGAN.
    """
    known = {"step": number, "samples": 2 * number, "loss": 4.0 - number / 100}
    timed = {"time": BEGAN + ended, "step_time_s": STEP_S, "terms": TERMS}
    return {**known, **timed, **more}


def event(name: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"time": BEGAN + at, "event": name, "generation": 0, **fields}


def start(at: float, step: int = 0, devices: int = 2) -> dict[str, Any]:
    return event("start", at, began=BEGAN + at, step=step, num_devices=devices)


def attempt(number: int, *moments: float | None, devices: int = 2, **more: Any) -> dict[str, Any]:
    """A line of attempts.jsonl: when it was submitted, started and ended, since BEGAN."""
    names = ("submitted", "started", "ended")
    known = {
        name: None if moment is None else BEGAN + moment
        for name, moment in zip(names, moments, strict=True)
    }
    told = {"nodes": ["n0"], "num_devices": devices, "exit_code": 0, "state": "COMPLETED"}
    return {"number": number, **known, **told, **more}


def make_run(
    path: Path,
    lines: list[dict[str, Any]],
    events: list[dict[str, Any]],
    attempts: list[dict[str, Any]] | None = None,
    **settings: Any,
) -> Run:
    """Write it."""
    run = Run(path)
    run.path.mkdir(parents=True)
    job = job_of(1, 100, 2)
    run.write("job.toml", to_toml(job.replace(name=path.name, **settings)))
    run.write("metrics.jsonl", json_lines(lines))
    run.write("events.jsonl", json_lines(events))
    facts = {"unit": "samples", "num_ranks": 2, "started": BEGAN, "host": "n0"}
    run.write("facts.json", json.dumps(facts))
    if attempts is not None:
        (run.path / "launch" / "1").mkdir(parents=True)
        run.write("launch/1/attempts.jsonl", json_lines(attempts))
    return run
