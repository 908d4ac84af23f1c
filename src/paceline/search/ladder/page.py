"""Page and tables: a ladder's runs, its laws, and the run that it recommends."""

from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.config.job import Job
from paceline.observe.run import Run
from paceline.render.charts import COLOURS, Chart, Plot, curve, plot
from paceline.render.figures import amount_text, count_text, duration_text, loss_text, plural
from paceline.render.page import Page
from paceline.render.parts import Section
from paceline.render.table import Table
from paceline.search.ladder.advice import Advice, Option, network_text
from paceline.search.ladder.law import Fit, Law, worth
from paceline.search.ladder.rungs import Rungs
from paceline.search.ladder.runs import Climbed, RungRun, measured_step_s

_NUM_CURVE = 40
_FAR = 100.0
_READINGS = 4.0
"""Of a text, of which the last is worth about as much as the first."""


def render(
    rungs: Rungs,
    climbed: Climbed,
    fit: Fit,
    found: Sequence[Option],
    advice: Advice,
    job: Job,
    at: Path,
) -> str:
    """The page as text."""
    return Page(
        name=f"Ladder of {at.parent.name}",
        next=f"`paceline train {at.parent / 'job.toml'}`",
        subtitle=[
            plural(len(climbed.runs), "run"),
            f"up to {count_text(advice.largest)} parameters",
            f"{duration_text(rungs.cost_s)} of device time at most",
        ],
        lede=sentence(advice, job),
        cards=[
            ("Loss", loss_text(advice.loss), f"{advice.loss_low:.4g} to {advice.loss_high:.4g}"),
            ("Parameters", count_text(advice.params), network_text(advice, job)),
            ("Tokens", count_text(advice.tokens), plural(advice.steps, "step")),
            ("Learning rate", f"{advice.lr:.3g}", f"{advice.lr_low:.3g} to {advice.lr_high:.3g}"),
            ("Time", duration_text(advice.train_s), advice.layout),
            ("Price", price_text(advice), plural(advice.devices, "device")),
        ],
        parts=(
            Section(
                "Loss by tokens",
                Chart("law", _law(fit, climbed, advice)),
                note="Points are runs, lines the law at their size; the line that goes on is that "
                "of the recommended size, with the 90 % interval of its run.",
            ),
            *_by_size(found, advice),
            Section(
                "The learning rate",
                Chart("rates", _rates(climbed)),
                note="The smallest network, at the middle length. Under muP its best rate is "
                "that of every width and depth.",
            ),
            Section("The law", law_table(fit, climbed, advice)),
            Section("Every run", runs_table(climbed.runs, fit, climbed.tokens_per_step)),
        ),
        at=at,
    ).html()


def _by_size(found: Sequence[Option], advice: Advice) -> list[Section]:
    """Nothing where --params says the size: there is none to compare it with."""
    if len({one.heads for one in found}) == 1:
        return []
    note = "A larger network sees fewer tokens within the budget. Lines are numbers of devices."
    return [
        Section("Loss by size, for this budget", Chart("sizes", _sizes(found, advice)), note=note)
    ]


def sentence(advice: Advice, job: Job) -> str:
    """The recommendation."""
    price = "" if advice.usd is None else f", the price as {price_text(advice)}"
    return (
        f"Train {network_text(advice, job)}, on {count_text(advice.tokens)} tokens "
        f"({advice.steps:,} steps) at lr {advice.lr:.3g} with {advice.layout}: the loss is "
        f"predicted as {advice.loss:.4g} ({advice.loss_low:.4g} to {advice.loss_high:.4g}), "
        f"the time as {duration_text(advice.train_s)}{price}."
    )


def notes(advice: Advice, climbed: Climbed, law: Law) -> list[str]:
    """What a person should know before believing it."""
    found = []
    if advice.reach > _FAR:
        found.append(
            f"the run is {advice.reach:,.0f} times as large as the largest rung: a larger --share "
            "makes the prediction surer."
        )
    longer = advice.tokens / climbed.longest_tokens
    if longer > _FAR:
        found.append(
            f"the run sees {longer:,.0f} times as many tokens as the longest small run: a larger "
            "--share makes the prediction surer."
        )
    text = law.text_tokens
    if text is not None and advice.tokens > _READINGS * text:
        found.append(
            f"the run reads its text {advice.tokens / text:,.0f} times, which counts as "
            f"{worth(advice.tokens, text) / text:.3g} texts of its length, and a large network may "
            "learn it by heart: more text makes the loss lower."
        )
    if climbed.sweep.is_open:
        found.append(
            "the best learning rate of the sweep is the last that was tried: give an optim.lr "
            "nearer to it, and --out another folder."
        )
    return found


def price_text(advice: Advice) -> str:
    """In USD, where prices are known."""
    return "unknown" if advice.usd is None else f"{amount_text(advice.usd)} USD"


def runs_table(runs: Sequence[RungRun], fit: Fit | None, per_step: int) -> Table:
    """Runs, the law's loss beside the measured one where there is a law."""
    rows = []
    for one in runs:
        law = None if fit is None else float(fit.law.loss(one.rung.params, one.steps * per_step))
        said = f"failed: {one.reason}" if one.loss is None else loss_text(one.loss)
        off = "" if law is None or one.loss is None else f"{one.loss / law - 1:+.2%}"
        rows.append(
            (
                count_text(one.rung.params),
                f"{one.steps:,}",
                count_text(one.steps * per_step),
                f"{one.rate:.3g}",
                said,
                "" if law is None else loss_text(law),
                off,
            )
        )
    heads = ("parameters", "steps", "tokens", "lr", "loss", "law", "off")
    return Table(heads, rows, words=())


def law_table(fit: Fit, climbed: Climbed, advice: Advice) -> Table:
    """The laws in figures."""
    law = fit.law
    rows = [
        ("loss", f"{law.floor:.4g} + {law.a:.4g} / N^{law.alpha:.3g} + {law.b:.4g} / "
         f"D^{law.beta:.3g}, N and D in millions"),
        ("tokens of the text", "no end" if law.text_tokens is None else
         count_text(law.text_tokens)),
        ("runs scatter around it by", f"{fit.noise:.2%}"),
        ("learning rate", f"{climbed.rates.at_one:.3g} x D^{climbed.rates.slope:.3g}"),
        ("size over the largest rung's", f"{advice.reach:,.1f}"),
        ("tokens over the longest small run's", f"{advice.tokens / climbed.longest_tokens:,.1f}"),
        ("measured over predicted seconds of a step",
         "{:.3g} to {:.3g}".format(*advice.slowness)),
    ]  # fmt: skip
    return Table(("law", ""), rows, words=(0, 1))


def comparison(advice: Advice, run: Run) -> Table:
    """What was predicted of a run, beside what it came to."""
    lines = run.metrics()
    steps = len(lines)
    losses = [line["eval_loss"] for line in lines if line.get("eval_loss") is not None]
    seconds = sum(line.get("step_time_s") or 0.0 for line in lines)
    rows = [
        _compared("loss", advice.loss, (advice.loss_low, advice.loss_high),
                  losses[-1] if losses else None, loss_text),
        _compared("step, s", advice.step_s,
                  (advice.train_low_s / advice.steps, advice.train_high_s / advice.steps),
                  measured_step_s(run), "{:.4g}".format),
        _compared("all steps", advice.train_s, (advice.train_low_s, advice.train_high_s),
                  seconds or None, duration_text),
    ]  # fmt: skip
    if advice.usd is not None:
        usd = advice.usd * seconds / advice.train_s
        rows.append(_compared("USD", advice.usd, None, usd or None, amount_text))
    heads = ("", "predicted", "between", "measured", "off")
    return Table(heads, rows, words=(0,), note=f"{steps:,} of {advice.steps:,} steps are done.")


def _compared(
    name: str,
    predicted: float,
    between: tuple[float, float] | None,
    measured: float | None,
    text: Callable[[float], str],
) -> tuple[str, ...]:
    return (
        name,
        text(predicted),
        "" if between is None else f"{text(between[0])} to {text(between[1])}",
        "unknown" if measured is None else text(measured),
        "" if measured is None else f"{measured / predicted - 1:+.2%}",
    )


# ---- charts --------------------------------------------------------------------------------------


def _law(fit: Fit, climbed: Climbed, advice: Advice) -> Plot:
    traces, points = [], fit.points
    shortest = min(one.tokens for one in points)
    longest = max(one.tokens for one in points)
    sizes = sorted({one.params for one in points})
    for colour, size in zip(COLOURS, sizes, strict=False):
        mine = sorted((one for one in points if one.params == size), key=lambda one: one.tokens)
        name = count_text(size)
        traces += [
            curve(name, [one.tokens for one in mine], [one.loss for one in mine], mode="markers",
                  marker={"size": 9, "color": colour}, showlegend=False,
                  hovertemplate=f"{name}<br>%{{x:.3~s}} tokens, loss %{{y:.4~g}}<extra></extra>"),
            _line(fit, name, size, shortest, longest, colour),
        ]  # fmt: skip
    traces.append(
        _line(fit, count_text(advice.multiplied), advice.multiplied, shortest,
              max(longest, advice.tokens), "var(--accent)", dash="dash")
    )  # fmt: skip
    error = {
        "type": "data", "symmetric": False, "color": "var(--accent)",
        "array": [advice.loss_high - advice.loss], "arrayminus": [advice.loss - advice.loss_low],
    }  # fmt: skip
    traces.append(
        curve("the run", [advice.tokens], [advice.loss], mode="markers", error_y=error,
              marker={"size": 11, "symbol": "diamond", "color": "var(--accent)"},
              hovertemplate="%{x:.3~s} tokens, loss %{y:.4~g}<extra></extra>")
    )  # fmt: skip
    x = {"title": "tokens", "type": "log"}
    return plot(traces, x, {"title": "held-out loss", "type": "log"}, showlegend=True)


def _line(
    fit: Fit, name: str, params: float, low: float, high: float, colour: str, dash: str = "solid"
) -> Plot:
    tokens = [low * (high / low) ** (at / (_NUM_CURVE - 1)) for at in range(_NUM_CURVE)]
    losses = [float(each) for each in fit.law.loss(params, tokens)]
    line = {"color": colour, "width": 1.5, "dash": dash}
    return curve(name, tokens, losses, mode="lines", line=line, hoverinfo="skip")


def _sizes(found: Sequence[Option], advice: Advice) -> Plot:
    devices = sorted({one.job.layout.num_ranks for one in found})
    traces = []
    for colour, count in zip(COLOURS, devices, strict=False):
        mine = [one for one in found if one.job.layout.num_ranks == count]
        traces.append(
            curve(
                plural(count, "device"),
                [one.multiplied for one in mine],
                [one.loss for one in mine],
                text=[count_text(one.tokens) for one in mine],
                line={"color": colour},
                hovertemplate="%{x:.3~s} parameters, %{text} tokens<br>loss %{y:.4~g}"
                "<extra></extra>",
            )
        )
    traces.append(
        curve("the run", [advice.multiplied], [advice.loss], mode="markers",
              marker={"size": 11, "symbol": "diamond", "color": "var(--accent)"},
              hoverinfo="skip")
    )  # fmt: skip
    x = {"title": "parameters of blocks and head", "type": "log"}
    return plot(traces, x, "predicted loss", showlegend=True)


def _rates(climbed: Climbed) -> Plot:
    sweep = climbed.sweep
    trace = curve(
        f"{count_text(sweep.tokens)} tokens",
        sweep.rates,
        sweep.losses,
        hovertemplate="lr %{x:.3~g}, loss %{y:.4~g}<extra></extra>",
    )
    x = {"title": "peak learning rate", "type": "log"}
    return plot([trace], x, "held-out loss", showlegend=True)
