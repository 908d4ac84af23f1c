"""A server's record, explained: where its time went, beside what was planned, and what to change.

The time from its first step to its last is split into terms that sum to it. Of a pass the split
into weights, products and attention is the planned one, for no clock sees it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.plan.serving.record import Record, RecordHead, RecordSecond, read_record
from paceline.render.figures import milliseconds, share_text
from paceline.render.table import Bullets, Table, heading

# From what share on a term is worth a sentence. Assumed.
_MUCH, _MOST, _ALMOST_ALL = 0.25, 0.5, 0.8
_PASS = ("weights", "products", "attention", "exchange")


@dataclass(frozen=True)
class ServingTerm:
    """Where time went."""

    name: str
    seconds: float
    planned_s: float | None = None
    """None: not planned."""


@dataclass(frozen=True)
class ServingExplanation:
    """Of a record."""

    record: Record
    terms: tuple[ServingTerm, ...]
    """They sum to the whole."""
    findings: tuple[str, ...]

    @property
    def whole_s(self) -> float:
        """From the first step to the last."""
        return sum(term.seconds for term in self.terms)


def explain_record(record: Record) -> ServingExplanation:
    """The terms and findings of a record."""
    total = record.total
    planned = total.planned.model_dump() if record.head.planned else {}
    of_pass = sum(planned[name] for name in _PASS) if planned else 0.0
    terms = [
        ServingTerm("idle", total.idle_s),
        ServingTerm("between steps", total.gap_s),
        ServingTerm("host", total.host_s, planned.get("host")),
    ]
    if of_pass:
        terms += [
            ServingTerm(name, total.pass_s * planned[name] / of_pass, planned[name])
            for name in _PASS
            if planned[name]
        ]
    else:
        terms.append(ServingTerm("forward passes", total.pass_s))
    return ServingExplanation(record, tuple(terms), tuple(_findings(record.head, total, of_pass)))


def _findings(head: RecordHead, total: RecordSecond, planned_s: float) -> list[str]:
    """What is wrong, each with what to change; the worst for users first."""
    found = []
    busy_s = total.gap_s + total.host_s + total.pass_s
    if not total.steps or not busy_s:
        return ["Nothing was asked for while it recorded."]
    texts = total.running / total.steps
    is_full = texts > _ALMOST_ALL * head.max_sequences
    if total.ttft_s and (queue := total.queue_s / total.ttft_s) > _MOST and total.most_waiting:
        cure = (
            f"raise serve.max_sequences ({head.max_sequences}), or more replicas"
            if is_full
            else "more replicas"
        )
        found.append(
            f"Queue: {share_text(queue)} of the time to the first token is waiting: {cure}."
        )
    if total.preemptions:
        found.append(
            f"Blocks: {total.preemptions:,} times a text gave its blocks back and was computed "
            "anew: raise serve.kv_gb, or lower serve.max_sequences."
        )
    late = (total.gap_s + total.host_s) / busy_s
    if late > _MUCH:
        what = "between steps" if total.gap_s > total.host_s else "choosing tokens"
        found.append(
            f"Host gap: {share_text(late)} of the busy time is the host's, most of it {what}, with "
            f"{texts:.1f} texts a step: more texts at a time share it (serve.max_sequences, fewer "
            "replicas)."
        )
    if planned_s and total.pass_s > (1 + _MUCH) * planned_s:
        found.append(
            f"Passes take {total.pass_s / planned_s:.2f} x what was measured before: something "
            "else has this machine's cores, or measure anew: `paceline bench serve --fresh`."
        )
    if planned_s and total.planned.weights > _MOST * planned_s and not is_full:
        found.append(
            f"Weights: {share_text(total.planned.weights / planned_s)} of a pass is reading them, "
            f"for {texts:.1f} texts: more texts at a time (fewer replicas), fewer bits "
            "(serve.precision) or guesses (serve.speculate)."
        )
    idle = total.idle_s / (total.idle_s + busy_s)
    if idle > _MOST:
        found.append(
            f"Idle: nobody asked for anything {share_text(idle)} of the time: fewer replicas."
        )
    return found


def explain_record_command(path: Path, *, as_json: bool) -> None:
    """Explain the record of a server on the terminal.

    Args:
        path: its file.

    Raises:
        InputError: it is damaged.
    """
    found = explain_record(read_record(path))
    console = Console(highlight=False)
    for part in _parts(found):
        console.print(part)
    if as_json:
        print(json.dumps(_json(found)))


def _parts(found: ServingExplanation) -> list[Any]:
    head, total, whole = found.record.head, found.record.total, found.whole_s or 1.0
    rows = [
        (
            term.name,
            share_text(term.seconds / whole),
            _per_step(term.seconds, total),
            "" if term.planned_s is None else _per_step(term.planned_s, total),
        )
        for term in found.terms
    ]
    first = total.first_tokens or 1
    source = "not measured: paceline bench serve does" if head.planned is None else head.planned
    return [
        f"{head.name}: {whole:,.1f} s, {total.steps:,} steps, {total.prompt_tokens:,} tokens of "
        f"prompts, {total.text_tokens:,} of texts; TTFT {milliseconds(total.ttft_s / first)} ms, "
        f"{milliseconds(total.queue_s / first)} ms of it waiting (means)",
        Table(("", "of the time", "ms a step", "planned, ms"), rows),
        f"planned: {source}",
        heading("what to change"),
        Bullets(found.findings or ("Nothing stands out.",)),
    ]


def _per_step(seconds: float, total: RecordSecond) -> str:
    return milliseconds(seconds / (total.steps or 1))


def _json(found: ServingExplanation) -> dict[str, Any]:
    return {
        "terms": [asdict(term) for term in found.terms],
        "findings": list(found.findings),
        "total": found.record.total.model_dump(),
    }
