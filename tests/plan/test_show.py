"""The planner's answer on a terminal: what is said, and that it fits into 80 columns (pure)."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from paceline.plan.answer import describe, show
from paceline.plan.answer.find import answer
from paceline.plan.answer.outlook import outlook
from paceline.plan.search.budget import Purchase, TrainingRun
from paceline.render.figures import bytes_text, time_text
from tests.plan.answers import IMAGES, cramped, eight, job, small_answer


def _printed(print_it, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_it(console)
    return console.file.getvalue()


def _shown(found, width: int = 80, num: int = 5) -> str:
    return _printed(lambda console: show.show(found, console, num), width)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_line_is_cut_or_longer_than_the_terminal(width):
    text = _shown(small_answer(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_long_layouts_are_folded_and_figures_are_whole(width):
    best = small_answer().best
    axes = {"pp": 16, "dp": 128, "fsdp": 16, "zero": 1, "cp": 2, "tp": 8, "ep": 64}
    many = best.layout.replace(schedule="interleaved_zb", recompute="full", **axes)
    one = replace(best, layout=many, tokens_per_s=123_456_789.0)
    table = show.ranking([one], best, 76.8e9, width)
    text = _printed(lambda console: console.print(table), width)
    for word in (*many.summary.split(), *describe.detail_text(many).replace(",", "").split()):
        assert word in text
    for figure in ("123,456,789", bytes_text(one.peak_memory_bytes)):
        assert figure in text


def test_the_fastest_comes_with_every_setting():
    best = small_answer().best
    text = " ".join(_shown(small_answer()).split())
    assert f"the fastest: {best.layout.summary}" in text
    for name, value in describe.all_settings(best.layout):
        assert f"{name} = {value}" in text


def test_what_the_forecast_cannot_tell_apart_is_as_good():
    """Steps within 3 % of the choice's, faster ones too; and the title says why it was chosen."""
    found = small_answer()
    best = found.best
    texts = {
        by: describe.slower_text(replace(best, step_s=(1 + by) * best.step_s), best)
        for by in (0.009, -0.01, 0.05)
    }
    assert texts == {0.009: "as good (+0.9%)", -0.01: "as good (-1.0%)", 0.05: "5.0%"}
    assert describe.slower_text(best, best) == "–"
    faster = replace(best, step_s=0.99 * best.step_s)
    both = replace(found, ranked=(best, faster))
    assert describe.chosen_text(both) == "the simplest of those as good as the fastest"
    text = " ".join(_shown(both).split())
    assert f"the simplest of those as good as the fastest: {best.layout.summary}" in text
    assert "as good (-1.0%)" in text
    assert max(map(len, _shown(both).splitlines())) <= 80


def test_figures_stand_as_they_are():
    found = small_answer()
    text = _shown(found)
    assert f"{time_text(found.best.step_s)}" in text
    assert f"{found.best.tokens_per_s:,.0f} tokens/s" in text
    assert "to spare" in text
    assert "the whole run" in text
    assert "USD a step" in text
    joined = " ".join(text.split())
    assert found.binding.text in joined
    assert found.margin.text in joined


def test_wide_terminals_have_a_column_for_what_is_besides_the_axes():
    assert "  with" in _shown(small_answer(), 120).splitlines()[2]
    assert "with" not in _shown(small_answer(), 80).splitlines()[2]


def test_one_fixed_layout_is_no_ranking():
    text = _shown(answer(small_answer().best_job))
    assert "one layout agrees with what is fixed" in text
    assert "slower" not in text.split("the fastest")[0]


def test_what_does_not_fit_shows_what_fills_the_memory():
    text = _shown(answer(job(on=cramped())))
    assert "nearest to fitting" in text
    assert "too much" in text
    assert "to spare" not in text


def test_images_are_counted_as_images():
    text = _shown(answer(job(IMAGES)))
    assert "images/s" in text
    assert "tokens" not in text
    assert "are exposed" in text


def test_layouts_with_the_same_axes_are_told_apart():
    best = small_answer().best.layout
    other = best.replace(compile=not best.compile)
    assert describe.differing([best]) == ()
    told = describe.differing([best, other])
    assert told == ("compile",)
    assert describe.detail_text(best, told) != describe.detail_text(other, told)


def test_settings_in_words():
    layout = small_answer().best.layout
    assert dict(describe.all_settings(layout.replace(split=(3, 3, 3, 3, 2))))["split"] == "4 x 3, 2"
    some = layout.replace(recompute="full", recompute_layers=1, offload=("optimizer",))
    assert "full recompute of 1 layer, offload of optimizer" in describe.detail_text(some)
    assert describe.goodput_text(1.0) == ">99.9%"
    assert describe.goodput_text(0.93) == "93.0%"


def test_unknown_figures_are_called_unknown():
    silent = job(on=eight(power_watts=None))
    rows = dict(describe.outlook_rows(outlook(silent, small_answer().best, 1e9), "tokens"))
    assert rows["price"].startswith("unknown: give --price")
    assert rows["energy"].startswith("unknown")


def _run(nodes: int, days: float, usd: float) -> TrainingRun:
    cluster = small_answer().job.cluster.replace(num_nodes=nodes)
    return TrainingRun(cluster, small_answer().best, 0.99, days, usd)


def test_purchases_name_the_fastest_and_the_cheapest():
    fast, cheap = _run(4, 0.5, 300.0), _run(1, 2.0, 250.0)
    bought = Purchase((fast, cheap), fast, cheap, "the sentence")
    text = _printed(lambda console: show.show_purchase(bought, console), 80)
    lines = text.splitlines()
    assert lines[1].startswith("4 x 8 A100-80")
    assert lines[1].rstrip().endswith("fastest")
    assert lines[2].rstrip().endswith("cheapest")
    assert "12 h 00 min" in lines[1]
    assert max(map(len, lines)) <= 80
