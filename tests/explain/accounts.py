"""Hand-built Accounts, Jobs and Subjects: what rules see, without running anything."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.hardware import Cluster
from paceline.config.job import Job
from paceline.config.job_sections import Train
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.explain.subject import Subject
from paceline.observe.account import COLLECTIVE, GAP, KERNEL, SYNC, Account
from paceline.observe.caveats import Caveat, TraceDevice
from paceline.observe.terms import AXES, TERM_ID, TERMS
from paceline.observe.timeline import STEP
from tests.plan.planned import layout as plain_layout

MS = 1_000_000
STEPS = (10, 11, 12, 13)
Terms = Mapping[str, float]

H100 = TraceDevice("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000, is_amd=False)
V100 = TraceDevice("Tesla V100-SXM2-16GB", (7, 0), 16_900_000_000, is_amd=False)

MODEL = Model(
    vocab_size=512,
    hidden_size=256,
    ffn_size=768,
    num_layers=8,
    num_heads=4,
    max_seq_len=256,
)


def account(
    ranks: Sequence[Terms | Sequence[Terms]],
    *,
    collectives: Iterable[Mapping[str, Any]] = (),
    gaps: Iterable[Mapping[str, Any]] = (),
    syncs: Iterable[Mapping[str, Any]] = (),
    kernels: Iterable[Mapping[str, Any]] = (),
    is_device: bool = False,
    caveats: Iterable[str] = (),
    device: TraceDevice | None = None,
) -> Account:
    """An Account of four steps.

    Args:
        ranks: of each rank, milliseconds by term, of every step or of each of the four.
        collectives: rows; times in milliseconds, those left out as in `_row`; without `rank` or
            `step` they happen on all ranks, in all steps.
        gaps: rows, likewise.
        syncs: rows, likewise.
        kernels: rows, likewise, with `total_ms`.
        is_device: whether a device was recorded.
        caveats: kinds of what the trace can't say.
        device: what the trace was recorded on.
    """
    names: dict[str, int] = {}
    steps: list[tuple[int, int, int, int]] = []
    terms_ns = []
    for rank, given in enumerate(ranks):
        for at, step in enumerate(STEPS):
            terms = given if isinstance(given, Mapping) else given[at]
            row = np.zeros(len(TERMS), np.int64)
            for term, ms in terms.items():
                row[TERM_ID[term]] = round(ms * MS)
            begin = step * 10_000 * MS
            steps.append((rank, step, begin, begin + int(row.sum())))
            terms_ns.append(row)

    def table(dtype: Any, rows: Iterable[Mapping[str, Any]]) -> Any:
        return _table(dtype, rows, len(ranks), names)

    return Account(
        is_device=is_device,
        steps=np.array(steps, STEP),
        terms_ns=np.array(terms_ns),
        kernels=table(KERNEL, kernels),
        collectives=table(COLLECTIVE, collectives),
        gaps=table(GAP, gaps),
        syncs=table(SYNC, syncs),
        names=tuple(names),
        caveats=tuple(Caveat(kind, f"The trace has {kind}.") for kind in caveats),
        devices={} if device is None else dict.fromkeys(range(len(ranks)), device),
    )


def job(
    ranks: int = 2,
    *,
    cluster: Cluster | None = None,
    model: Any = MODEL,
    batch: int = 32,
    **more: Any,
) -> Job:
    """A concrete Job over so many CPU ranks, whose speed nobody knows; `more` of its layout."""
    layout: Layout = plain_layout(**{"dp": ranks, "precision": "bf16", "micro_batch": 8, **more})
    device = {
        "name": "a CPU",
        "kind": "cpu",
        "precisions": ("fp64", "fp32", "bf16"),
        "memory_bytes": {"value": 8e9, "origin": "assumed", "source": "a test"},
    }
    known = cluster or Cluster.parse({"device": device, "devices_per_node": ranks, "num_nodes": 1})
    train = Train(steps=40, global_batch=batch, seq_len=128)
    return Job(name="made", model=model, cluster=known, layout=layout, train=train)


def subject(
    made: Account | None, of: Job | None = None, *, step_ms: float | None = None, **more: Any
) -> Subject:
    """A Subject; with `step_ms` it has lines of steady steps as long as that."""
    lines = [] if step_ms is None else [line(step, step_ms) for step in range(1, 21)]
    return Subject(**{"name": "made", "account": made, "job": of, "lines": lines, **more})


def line(step: int, step_ms: float, **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    terms = {"data_wait": 0.0, "checkpoint_stall": 0.0, **more.pop("terms", {})}
    return {"step": step, "step_time_s": step_ms / 1e3, "profiled": False, "terms": terms, **more}


def run_folder(folder: Path, made: Job, lines: Iterable[Mapping[str, Any]] = ()) -> Path:
    """A Run directory without traces."""
    from paceline.config.job import to_toml
    from paceline.observe.run import json_lines

    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(to_toml(made))
    (folder / "metrics.jsonl").write_text(json_lines(dict(each) for each in lines))
    return folder


def _table(
    dtype: Any, rows: Iterable[Mapping[str, Any]], num_ranks: int, names: dict[str, int]
) -> Any:
    table = [
        _row(dtype, {**given, "rank": rank, "step": step}, number, names)
        for given in rows
        for rank in ([given["rank"]] if "rank" in given else range(num_ranks))
        for step in ([given["step"]] if "step" in given else STEPS)
        for number in range(given.get("times", 1))
    ]
    return np.array(table, dtype)


def _row(
    dtype: Any, given: Mapping[str, Any], number: int, names: dict[str, int]
) -> tuple[int, ...]:
    values: dict[str, Any] = {"micro_batch": -1, "group_size": 2, "bytes": -1, "wait_ns": 0}
    begin = given["step"] * 10_000 * MS + round(given.get("at_ms", number) * MS)
    values |= {"start_ns": begin, "count": 1, "line": -1, "term": 0, "axis": -1, "members": -1}
    for key, value in given.items():
        if key.endswith("_ms"):
            values[f"{key.removesuffix('_ms')}_ns"] = round(value * MS)
        elif key == "axis":
            values[key] = AXES.index(value)
        elif key == "term":
            values[key] = TERM_ID[value]
        elif isinstance(value, str):
            values[key] = names.setdefault(value, len(names))
        else:
            values[key] = value
    values.setdefault("group", -1)
    values.setdefault("in_backward", values["micro_batch"] > 0)
    values.setdefault("op", values["name"])
    values.setdefault("exposed_ns", values.get("duration_ns", 0))
    return tuple(int(values[field]) for field in dtype.names)
