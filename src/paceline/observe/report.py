"""Report: one self-contained page about a Run, to look at and to pass on.

Python decides what is shown: figures as text, and charts as plain plotly figures (dicts). The
template beside this file, report.html, lays them out (see `observe.page`). The numbers of a
10,000-step run take under 0.5 MB; a term has one colour everywhere.

The page shows what stands in the Run and predicts nothing; `explain.page` adds why the step takes
as long. It is not live: it is written anew when there is more to show.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import tomli_w

from paceline.config.files import read_toml
from paceline.observe import summary
from paceline.observe.charts import charts
from paceline.observe.page import Card, render_page
from paceline.observe.run import Run
from paceline.observe.summary import Summary


def render(
    run: Run,
    package: str = "paceline.observe",
    template: str = "report.html",
    *,
    verdict: str = "",
    next_: str | None = None,
    **more: Any,
) -> str:
    """The page as text: complete HTML without references to anything outside it.

    Args:
        run: what it is about.
        package: the room of the template.
        template: one that extends report.html, to show more.
        verdict: a sentence that stands before all others.
        next_: what to do now, where an explanation says it.
        more: what that one asks for besides.
    """
    lines, facts = run.metrics(), run.facts()
    job = read_toml(run.path / "job.toml", "put back a copy of it") if run.exists else {}
    figures, times = summary.summarise(lines, facts), summary.step_time(lines)
    return render_page(
        package,
        template,
        name=job.get("name", run.path.name),
        subtitle=_subtitle(facts, figures),
        next_=next_ or _next(run, figures, _num_steps(job)),
        lede=" ".join(filter(None, [verdict, _lede(figures, _num_steps(job))])),
        cards=_cards(figures, facts, _num_steps(job)),
        times=times if times.terms_s else None,
        has_windows=run.has_windows,
        colour=summary.colour,
        rate_title=f"{figures.unit.capitalize()} a second",
        charts=charts(lines, figures),
        at=run.path / "report.html",
        job_text=tomli_w.dumps(job),
        choices=_choices(run.plan(), job),
        facts=fact_rows(facts),
        **more,
    )


def _num_steps(job: Mapping[str, Any]) -> int | None:
    return job.get("train", {}).get("steps")


# What the page says in words.


def _subtitle(facts: summary.Facts, figures: Summary) -> list[str]:
    parts = []
    if num_ranks := facts.get("num_ranks"):
        parts.append(f"{num_ranks} rank{'s' if num_ranks != 1 else ''}")
    if device := facts.get("device"):
        parts.append(str(device))
    if num_params := summary.number(facts.get("num_params")):
        parts.append(f"{_short(num_params)} parameters")
    if started := summary.number(facts.get("started")):
        parts.append(_utc(started))
    return parts


def _next(run: Run, figures: Summary, num_steps: int | None) -> str:
    if num_steps and figures.step < num_steps:
        return f"`paceline train {run.path}` goes on to step {num_steps:,}."
    return f"`paceline explain {run.path}` says why a step takes as long as it does."


def _lede(figures: Summary, num_steps: int | None) -> str:
    if not figures.step:
        return "No step has finished yet."
    if figures.loss is None or figures.first_loss is None:
        return f"No loss of the {figures.step:,} steps is a finite number."
    sentence = f"{_movement(figures)} in {_steps_text(figures, num_steps)}."
    if figures.eval_loss is None:
        return sentence
    held_out = f"On held-out data it is {summary.loss_text(figures.eval_loss)}"
    return f"{sentence} {held_out}{_against_unigram(figures)}."


def _movement(figures: Summary) -> str:
    last = summary.loss_text(figures.loss)
    if figures.step == 1:
        return f"The training loss is {last}"
    return f"The training loss went from {summary.loss_text(figures.first_loss)} to {last}"


def _steps_text(figures: Summary, num_steps: int | None) -> str:
    of = f" of {num_steps:,}" if num_steps and figures.step < num_steps else ""
    return f"{figures.step:,}{of} step{'' if figures.step == 1 and not of else 's'}"


def _against_unigram(figures: Summary) -> str:
    if figures.eval_loss is None or figures.unigram_loss is None:
        return ""
    bound = f"{figures.unigram_loss:.2f}"
    if figures.eval_loss < figures.unigram_loss:
        return f", where a model of token frequencies alone can't get below {bound}"
    return f", not yet below the {bound} that a model of token frequencies alone reaches"


def _cards(figures: Summary, facts: summary.Facts, num_steps: int | None) -> list[Card]:
    if not figures.step:
        return []
    last = "last finite step" if figures.skipped else "last step"
    cards = [("Training loss", summary.loss_text(figures.loss), last)]
    if figures.eval_loss is not None:
        cards.append(("Held-out loss", summary.loss_text(figures.eval_loss), _eval_note(figures)))
    if figures.eval_auc is not None and figures.eval_best_auc is not None:
        note = f"of {figures.eval_best_auc:.4f} possible"
        cards.append(("Held-out AUC", f"{figures.eval_auc:.4f}", note))
    if figures.unigram_loss is not None:
        cards.append(("Unigram bound", f"{figures.unigram_loss:.2f}", "token frequencies"))
    cards += [
        (f"{figures.unit.capitalize()} a second", summary.rate_text(figures.rate), "median"),
        ("Step time", summary.step_time_text(figures.step_time_s), "median"),
        _mfu_card(figures),
        ("Memory", summary.bytes_text(figures.memory_bytes), "peak of rank 0"),
    ]
    if num_ranks := facts.get("num_ranks"):
        cards.append(("Ranks", f"{num_ranks}", str(facts.get("device", ""))))
    steps = _steps_text(figures, num_steps)
    cards.append(("Time in steps", summary.duration_text(figures.total_s), steps))
    if figures.skipped:
        cards.append(("Skipped steps", f"{figures.skipped:,}", "not finite"))
    return cards


def _eval_note(figures: Summary) -> str:
    perplexity = figures.eval_perplexity
    return "last evaluation" if perplexity is None else f"perplexity {perplexity:.4g}"


def _mfu_card(figures: Summary) -> Card:
    if figures.mfu is None:
        return ("MFU", "–", "peak unknown")
    return ("MFU", f"{figures.mfu:.1%}", "of the devices' peak")


def _choices(plan: Mapping[str, Any], job: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Setting, what it became and why, for each "auto" of the Job."""
    rows = []
    for setting, reason in plan.get("reasons", {}).items():
        value: Any = job
        for key in setting.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        # A whole device stands in full in the Job below; its name says enough here.
        value = value.get("name") if isinstance(value, Mapping) else value
        rows.append((setting, "" if value is None else str(value), reason))
    return rows


_FACT_NAMES = {
    "device": "Device",
    "host": "Host",
    "num_ranks": "Ranks",
    "threads_per_rank": "Threads per rank",
    "peak_flops": "Peak of a device",
    "peak_source": "Source of the peak",
    "num_params": "Parameters",
    "train_flops_per_token": "Training FLOPs per token",
    "data.train_tokens": "Training tokens in the data",
    "data.eval_tokens": "Held-out tokens",
    "data.vocab_size": "Vocabulary",
    "data.unigram_loss": "Loss of a unigram model",
    "started": "Started",
    "paceline": "Paceline",
    "commit": "Commit",
    "torch": "PyTorch",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "python": "Python",
}


def fact_rows(facts: summary.Facts) -> list[tuple[str, str]]:
    """Name and text of every fact, known ones first and in a fixed order."""
    flat = {key: value for key, value in facts.items() if not isinstance(value, Mapping)}
    for section, values in facts.items():
        if isinstance(values, Mapping):
            flat |= {f"{section}.{key}": value for key, value in values.items()}
    flat.pop("unit", None)
    known = [key for key in _FACT_NAMES if key in flat]
    others = [key for key in flat if key not in _FACT_NAMES]
    return [(_FACT_NAMES.get(key, key), _fact_text(key, flat[key])) for key in known + others]


def _fact_text(key: str, value: Any) -> str:
    if value is None:
        return "unknown"
    if key == "started":
        return _utc(float(value))
    if key == "peak_flops":
        return f"{value / 1e12:,.4g} TFLOP/s"
    if isinstance(value, float) and abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:,.0f}" if summary.number(value) is not None else str(value)


def _short(count: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def _utc(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
