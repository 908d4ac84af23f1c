"""Report: one self-contained page about a Run, to look at and to pass on.

It shows what stands in the Run and predicts nothing; `explain.page` adds why the step takes as
long. It is not live: it is written anew when there is more to show. The numbers of a 10,000-step
run take under 0.5 MB.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tomli_w

from paceline.config.files import read_toml
from paceline.observe import interruptions, summary
from paceline.observe.charts import charts
from paceline.observe.generations import Generations, generations_of
from paceline.observe.noise_scale import noise_scales
from paceline.observe.run import Run
from paceline.observe.summary import StepTime, Summary
from paceline.observe.terms import colour
from paceline.render.charts import Chart
from paceline.render.figures import (
    amount_text,
    bytes_text,
    count_text,
    date_text,
    duration_text,
    loss_text,
    plural,
    share_text,
    time_text,
)
from paceline.render.page import Card, Page
from paceline.render.parts import Code, Details, Legend, Pair, Part, Section, Swatch, Whole
from paceline.render.table import Pairs, Table

_MOST_SAMPLES = 40
_MOST_TASKS = 200
TASK_HEADS = ("task", "metric", "value", "±", "examples", "questions", "step")
"""Of `task_rows`; ±: the standard error, examples: before each question."""


def render(
    run: Run, explanation: Sequence[Part] = (), *, verdict: str = "", next_: str | None = None
) -> str:
    """The page as text: complete HTML without references to anything outside it.

    Args:
        run: what it is about.
        explanation: why a step takes as long, where that is known.
        verdict: a sentence that stands before all others.
        next_: what to do now, where an explanation says it.
    """
    lines, facts = run.metrics(), run.facts()
    job = read_toml(run.path / "job.toml", "put back a copy of it") if run.exists else {}
    figures, times = summary.summarise(lines, facts), summary.step_time(lines)
    found = generations_of(run)
    num_steps, drawn = job.get("train", {}).get("steps"), charts(lines, figures)
    small = {
        "rate": f"{figures.unit.capitalize()} a second",
        "memory": "Peak memory of rank 0",
        "lr": "Learning rate",
        "grad_norm": "Gradient norm",
        "noise": "Noise scale of gradients, in samples",
        "latency": "From arrival to training",
        "backlog": "Arrived and not trained on yet",
    }
    curves = [Chart(name, drawn[name], "low", title) for name, title in small.items()]
    page = Page(
        name=job.get("name", run.path.name),
        next=next_ or _next(run, figures, num_steps),
        subtitle=_subtitle(facts),
        lede=" ".join(filter(None, [verdict, _lede(figures, num_steps)])),
        cards=[*_cards(figures, facts, num_steps, found), *_noise_card(lines, job)],
        parts=(
            Section("Loss", Chart("loss", drawn["loss"], "tall"), Chart("parts", drawn["parts"])),
            _step_time(times, Chart("terms", drawn["terms"]), run, bool(explanation)),
            _samples(run),
            _tasks(run),
            interruptions.section(found),
            *explanation,
            Section(
                "Over the run",
                Pair(*curves),
                note="Drag to zoom in, double-click to see everything again.",
            ),
            Section(
                "What was left to Paceline",
                Table(
                    ("setting", "became", "because"),
                    _choices(run.plan(), job),
                    words=(0, 1, 2),
                    codes=(0,),
                ),
                note='Settings the Job had as "auto", what they became and why.',
            ),
            Section("Machine, model and data", Pairs(fact_rows(facts))),
            Section(
                "Job",
                *([Details("Show job.toml", Code(tomli_w.dumps(job)))] if job else []),
                note="The complete input of the run: saved as job.toml and given to "
                "`paceline train`, it runs the same again.",
            ),
        ),
        at=run.path / "report.html",
    )
    return page.html()


def _samples(run: Run) -> Section:
    """What the network made of prompts, the newest first."""
    rows = [
        (str(line["step"]), prompt, text)
        for line in reversed(run.samples())
        for prompt, text in zip(line["prompts"], line["texts"], strict=False)
    ]
    if not rows:
        return Section("")
    table = Table(("step", "prompt", "goes on"), rows[:_MOST_SAMPLES], words=(1, 2), codes=(1, 2))
    return Section("Samples", table, note="The likeliest tokens, by the weights of the step.")


def _tasks(run: Run) -> Section:
    """What tasks of lm-evaluation-harness found, the newest first."""
    rows = [row for line in reversed(run.tasks()) for row in task_rows(line)]
    if not rows:
        return Section("")
    table = Table(TASK_HEADS, rows[:_MOST_TASKS], words=(0, 1), codes=(0, 1))
    return Section("Tasks", table, note="As `paceline evaluate --tasks` found them.")


def task_rows(line: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Of a line of tasks.jsonl, a row for each metric under `TASK_HEADS`."""
    errors = line.get("errors", {})
    return [
        (
            line["task"],
            metric,
            _figure(value),
            _figure(errors.get(metric)),
            str(line.get("shots", "–")),
            str(line.get("questions") or "–"),
            str(line["step"]),
        )
        for metric, value in line["metrics"].items()
    ]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _step_time(times: StepTime, chart: Chart, run: Run, is_explained: bool) -> Section:
    """Where it went; an explanation has a table of the terms, beside the plan's."""
    rows = times.rows()
    if not rows:
        return Section("")
    swatches = [(Swatch(term, colour(term)), ms, share) for term, ms, share in rows]
    whole = Whole([(swatch, share) for swatch, _, share in swatches])
    title, steps = "Where the step time went", plural(times.num_steps, "step")
    if times.profiled:
        steps = plural(times.num_steps, "profiled step")
        note = f"Mean of {steps}. The terms add up to the whole step."
    else:
        note = (
            f"Mean of {steps}, none of them profiled: computation and communication are in "
            f"unattributed. {_RECORDED if run.has_windows else _UNPROFILED}"
        )
    if is_explained:
        legend = Legend([swatch for swatch, _, share in swatches if share >= 0.001])
        return Section(title, whole, legend, chart, note=note)
    table = Table(
        ("term", "ms per step", "share"),
        [(swatch, f"{ms:,.1f}", share_text(share)) for swatch, ms, share in swatches],
        foot=("whole step", f"{1e3 * times.total_s:,.1f}", "100.0%"),
    )
    return Section(title, whole, Pair(chart, table), note=note)


_RECORDED = (
    "Profiled steps are in `trace/`, but their lines were written before they were accounted for; "
    "`paceline explain` reads them."
)
_UNPROFILED = "`observe.profile_every` splits them."


# ---- what the page says in words -----------------------------------------------------------------


def _subtitle(facts: summary.Facts) -> list[str]:
    parts = []
    if num_ranks := summary.number(facts.get("num_ranks")):
        parts.append(plural(int(num_ranks), "rank"))
    if device := facts.get("device"):
        parts.append(str(device))
    if num_params := summary.number(facts.get("num_params")):
        parts.append(f"{count_text(num_params)} parameters")
    if started := summary.number(facts.get("started")):
        parts.append(date_text(started))
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
    movement = f"went from {loss_text(figures.first_loss)} to" if figures.step > 1 else "is"
    steps = _steps_text(figures, num_steps)
    sentence = f"The training loss {movement} {loss_text(figures.loss)} in {steps}."
    if figures.eval_loss is None:
        return sentence
    held_out = f"On held-out data it is {loss_text(figures.eval_loss)}"
    return f"{sentence} {held_out}{_against_unigram(figures)}."


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


def _cards(
    figures: Summary, facts: summary.Facts, num_steps: int | None, found: Generations | None
) -> list[Card]:
    if not figures.step:
        return []
    last = "last finite step" if figures.skipped else "last step"
    cards = [("Training loss", loss_text(figures.loss), last)]
    if figures.eval_loss is not None:
        perplexity = figures.eval_perplexity
        note = "last evaluation" if perplexity is None else f"perplexity {perplexity:.4g}"
        cards.append(("Held-out loss", loss_text(figures.eval_loss), note))
    if figures.eval_auc is not None and figures.eval_best_auc is not None:
        note = f"of {figures.eval_best_auc:.4f} possible"
        cards.append(("Held-out AUC", f"{figures.eval_auc:.4f}", note))
    if figures.unigram_loss is not None:
        cards.append(("Unigram bound", f"{figures.unigram_loss:.2f}", "token frequencies"))
    mfu = ("MFU", "–", "peak unknown")
    if figures.mfu is not None:
        mfu = ("MFU", share_text(figures.mfu), "of the devices' peak")
    cards += [
        (f"{figures.unit.capitalize()} a second", amount_text(figures.rate), "median"),
        ("Step time", time_text(figures.step_time_s), "median"),
        mfu,
        ("Memory", bytes_text(figures.memory_bytes), "peak of rank 0"),
    ]
    if num_ranks := facts.get("num_ranks"):
        cards.append(("Ranks", f"{num_ranks}", str(facts.get("device", ""))))
    steps = _steps_text(figures, num_steps)
    cards.append(("Time in steps", duration_text(figures.total_s), steps))
    if found is not None and found.goodput is not None:
        note = plural(len(found.losses), "interruption")
        cards.append(("Goodput", share_text(found.goodput), note))
    if figures.skipped:
        cards.append(("Skipped steps", f"{figures.skipped:,}", "not finite"))
    return cards


def _noise_card(lines: summary.Lines, job: Mapping[str, Any]) -> list[Card]:
    """The noise scale beside the batch that it is to be compared with."""
    found, batch = noise_scales(lines), job.get("train", {}).get("global_batch")
    note = "samples" if batch is None else f"samples; the batch has {batch:,}"
    return [("Noise scale", amount_text(found[-1][1]), note)] if found else []


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
    "data.num_documents": "Documents",
    "data.padding_share": "Share of padding in samples",
    "data.num_cut": "Texts that are longer than a sample",
    "data.num_filtered_out": "Documents that the filter left out",
    "data.num_duplicates": "Documents left out as duplicates",
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
        return date_text(float(value))
    if key == "peak_flops":
        return f"{value / 1e12:,.4g} TFLOP/s"
    if isinstance(value, float) and abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:,.0f}" if summary.number(value) is not None else str(value)
