"""Summary: the key figures of a run and where its step time went, from the lines of metrics.jsonl.

Pure functions of plain data (lines as `Run.metrics` returns them, facts as `Run.facts` does),
shared by the terminal and the report so that both say the same. Anything may be missing from a
line or from the facts; numbers that are not finite count as missing.

The first line of a run is left out of medians and means where there are others: it pays for the
allocator's growth, autotuning and compilation, and says nothing about the steps after it.
"""

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.observe.terms import in_order

Lines = Sequence[Mapping[str, Any]]
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class StepTime:
    """Mean time of a step by term."""

    terms_s: Mapping[str, float]
    """Seconds per step, in the order of the vocabulary; terms that took no time are left out."""
    num_steps: int
    """Steps the mean is over."""
    profiled: bool
    """Whether they were profiled: else only what the loop itself times is told apart."""

    @property
    def total_s(self) -> float:
        """Seconds of a mean step."""
        return sum(self.terms_s.values())

    def rows(self) -> list[tuple[str, float, float]]:
        """Term, milliseconds per step, share of the step (0 to 1)."""
        whole = self.total_s or 1.0
        return [(term, s * 1e3, s / whole) for term, s in self.terms_s.items()]


@dataclass(frozen=True)
class Summary:
    """Key figures of a run; None is what the run does not know."""

    unit: str
    """What the run counts: "tokens" or "samples"."""
    step: int
    """Steps done."""
    first_loss: float | None
    loss: float | None
    """Training loss of the last step that has a finite one."""
    eval_loss: float | None
    """Held-out loss of the last evaluation, nats per token for a language model."""
    eval_perplexity: float | None
    unigram_loss: float | None
    """What a model of token frequencies alone reaches on this text."""
    rate: float | None
    """Median tokens (or samples) per second."""
    mfu: float | None
    """Median, 0 to 1; None where the device's peak is unknown."""
    memory_bytes: float | None
    """Highest peak of rank 0."""
    skipped: int
    """Steps skipped for a non-finite loss or gradient."""
    step_time_s: float | None
    """Median time of a step."""
    total_s: float
    """Sum of the times of all steps; evaluations and pauses are not in it."""
    eval_auc: float | None
    """Of the last evaluation of a recommender."""
    eval_best_auc: float | None
    """The best possible one on the same held-out samples, where it is known."""


def number(value: Any) -> float | None:
    """The value as a float where it is a finite number, else None."""
    if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
        return float(value)
    return None


def column(lines: Lines, key: str) -> list[float | None]:
    """One number per line, None where it is missing or not finite."""
    return [number(line.get(key)) for line in lines]


def typical(lines: Lines, key: str) -> float | None:
    """The median of a column, None where no line has it."""
    present = _present(column(lines, key))
    return statistics.median(present) if present else None


def unit_of(lines: Lines, facts: Facts) -> str:
    """What the run counts: "tokens" unless facts or lines say "samples"."""
    if "unit" in facts:
        return str(facts["unit"])
    return "samples" if lines and "samples" in lines[-1] else "tokens"


def summarise(lines: Lines, facts: Facts) -> Summary:
    """The key figures of a run, of which there may be no step yet."""
    unit = unit_of(lines, facts)
    losses = _present(column(lines, "loss"))
    evals = [line for line in lines if number(line.get("eval_loss")) is not None]
    last_eval = evals[-1] if evals else {}
    return Summary(
        unit=unit,
        step=int(lines[-1]["step"]) if lines else 0,
        first_loss=losses[0] if losses else None,
        loss=losses[-1] if losses else None,
        eval_loss=number(last_eval.get("eval_loss")),
        eval_perplexity=number(last_eval.get("eval_perplexity")),
        unigram_loss=number((facts.get("data") or {}).get("unigram_loss")),
        rate=typical(_warm(lines), f"{unit}_per_s"),
        mfu=typical(_warm(lines), "mfu"),
        memory_bytes=max(_present(column(lines, "memory_bytes")), default=None),
        skipped=int(lines[-1].get("skipped") or 0) if lines else 0,
        step_time_s=typical(_warm(lines), "step_time_s"),
        total_s=sum(_present(column(lines, "step_time_s"))),
        eval_auc=number(last_eval.get("eval_auc")),
        eval_best_auc=number(last_eval.get("eval_best_auc")),
    )


def step_time(lines: Lines) -> StepTime:
    """Where the time of a mean step went: over the profiled steps where there are any."""
    profiled = [line for line in lines if line.get("profiled")]
    chosen = profiled or _warm(lines)
    return StepTime(mean_terms(chosen), len(chosen), bool(profiled))


def mean_terms(lines: Lines) -> dict[str, float]:
    """Mean seconds by term over these lines, in the order of the vocabulary, without zeros."""
    sums: dict[str, float] = {}
    for line in lines:
        for term, seconds in (line.get("terms") or {}).items():
            sums[term] = sums.get(term, 0.0) + (number(seconds) or 0.0)
    return {term: sums[term] / len(lines) for term in in_order(sums) if sums[term]}


def unigram_sentence(figures: Summary) -> str | None:
    """What the held-out loss says against token frequencies alone, None where either is unknown."""
    loss, bound = figures.eval_loss, figures.unigram_loss
    if loss is None or bound is None:
        return None
    start = f"a unigram model of this text can't get below {bound:.2f}"
    return f"{start}; reached {loss:.2f}" + ("" if loss < bound else ", not below it yet")


def auc_text(figures: Summary) -> str | None:
    """The AUC beside the best possible one, None where there is none."""
    if figures.eval_auc is None or figures.eval_best_auc is None:
        return None
    share = figures.eval_auc / figures.eval_best_auc
    return f"{figures.eval_auc:.4f} of {figures.eval_best_auc:.4f} possible ({share:.2%})"


def _warm(lines: Lines) -> Lines:
    return lines[1:] or lines


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
