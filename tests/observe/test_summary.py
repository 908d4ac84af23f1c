"""Key figures and step-time terms from the lines of a run (pure)."""

import math

import pytest

from paceline.observe import summary
from paceline.observe.terms import TERM_COLOURS, TERMS, coarse, colour, in_order
from tests.observe import synthetic


def test_the_mean_of_the_profiled_steps_adds_up():
    lines = synthetic.lines(240)
    profiled = [line for line in lines if line["profiled"]]
    times = summary.step_time(lines)
    assert times.profiled
    assert times.num_steps == len(profiled) == 7
    mean_s = sum(line["step_time_s"] for line in profiled) / 7
    assert times.total_s == pytest.approx(mean_s)
    assert sum(share for _, _, share in times.rows()) == pytest.approx(1)
    assert list(times.terms_s)[:2] == ["matmul", "attention"]
    assert list(times.terms_s)[-1] == "unattributed"
    assert "checkpoint_stall" not in times.terms_s  # took no time


def test_without_profiled_steps_all_but_the_first_count():
    lines = synthetic.lines(10, profile_every=0)
    times = summary.step_time(lines)
    assert not times.profiled
    assert times.num_steps == 9
    assert times.total_s == pytest.approx(sum(line["step_time_s"] for line in lines[1:]) / 9)


def test_key_figures():
    lines = synthetic.lines(240)
    lines[-1]["skipped"] = 3
    lines[-1]["loss"] = math.nan
    lines[100]["mfu"] = 0.4
    figures = summary.summarise(lines, synthetic.FACTS)
    assert figures.step == 240
    assert figures.first_loss == lines[0]["loss"]
    assert figures.loss == lines[-2]["loss"]
    assert figures.eval_loss == lines[-1]["eval_loss"]
    assert figures.eval_perplexity == pytest.approx(math.exp(figures.eval_loss))
    assert figures.unigram_loss == 6.31
    assert figures.rate == pytest.approx(9_900, rel=0.02)
    assert figures.mfu == 0.4
    assert figures.memory_bytes == 810_000_000
    assert figures.skipped == 3
    assert figures.total_s == pytest.approx(sum(line["step_time_s"] for line in lines))


def test_anything_may_be_missing():
    for lines in ([], [{"step": 1}], [{"step": 1, "terms": None, "loss": None}]):
        figures = summary.summarise(lines, {})
        assert figures.loss is figures.rate is figures.mfu is figures.memory_bytes is None
        assert summary.step_time(lines).terms_s == {}
        assert summary.unigram_sentence(figures) is None
    assert summary.summarise([{"step": 1, "samples": 8}], {}).unit == "samples"


def test_every_term_of_the_vocabulary_has_a_colour():
    assert set(TERM_COLOURS) == set(TERMS)


def test_unknown_terms_come_last_and_are_grey():
    terms = ["novel", "unattributed", "exposed_comm.dp", "matmul"]
    assert in_order(terms) == ["matmul", "exposed_comm.dp", "unattributed", "novel"]
    assert colour("novel") == colour("unattributed")


def test_the_unigram_bound_is_said_to_be_beaten_only_where_it_is():
    def sentence(loss):
        lines = [{"step": 1, "eval_loss": loss}]
        return summary.unigram_sentence(summary.summarise(lines, synthetic.FACTS))

    assert sentence(4.2) == "a unigram model of this text can't get below 6.31; reached 4.20"
    assert sentence(6.4).endswith("reached 6.40, not below it yet")


def test_plans_and_metrics_have_one_term_for_all_other_kernels():
    terms = {
        "matmul": 1.0,
        "other_kernels.norm": 2.0,
        "other_kernels": 3.0,
        "other_kernels.copy": 4.0,
    }
    assert coarse(terms) == {"matmul": 1.0, "other_kernels": 9.0}
