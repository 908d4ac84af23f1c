"""Key figures and step-time terms from the lines of a run (pure)."""

import math

import pytest

from paceline.observe import summary
from paceline.observe.terms import TERMS, coarse
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
    assert set(summary.TERM_COLOURS) == set(TERMS)


def test_unknown_terms_come_last_and_are_grey():
    terms = ["novel", "unattributed", "exposed_comm.dp", "matmul"]
    assert summary.in_order(terms) == ["matmul", "exposed_comm.dp", "unattributed", "novel"]
    assert summary.colour("novel") == summary.colour("unattributed")


def test_the_unigram_bound_is_said_to_be_beaten_only_where_it_is():
    def sentence(loss):
        lines = [{"step": 1, "eval_loss": loss}]
        return summary.unigram_sentence(summary.summarise(lines, synthetic.FACTS))

    assert sentence(4.2) == "a unigram model of this text can't get below 6.31; reached 4.20"
    assert sentence(6.4).endswith("reached 6.40, not below it yet")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (summary.bytes_text(812_345_678), "812 MB"),
        (summary.bytes_text(999_900_000), "1 GB"),
        (summary.bytes_text(0), "0 B"),
        (summary.bytes_text(3.2e15), "3.2e+03 TB"),
        (summary.bytes_text(None), "unknown"),
        (summary.rate_text(12_345.6), "12,346"),
        (summary.rate_text(3.14159), "3.14"),
        (summary.mfu_text(0.4312), "MFU 43.1%"),
        (summary.mfu_text(None), "MFU: peak unknown"),
        (summary.loss_text(None), "not finite"),
        (summary.step_time_text(0.41), "410 ms"),
        (summary.step_time_text(0.99999), "1 s"),
        (summary.duration_text(9.96), "10.0 s"),
        (summary.duration_text(59.7), "1 min 00 s"),
        (summary.duration_text(3_725), "1 h 02 min"),
        (summary.duration_text(200_000), "2 d 7 h"),
    ],
)
def test_figures_as_text(text, expected):
    assert text == expected


def test_plans_and_metrics_have_one_term_for_all_other_kernels():
    terms = {
        "matmul": 1.0,
        "other_kernels.norm": 2.0,
        "other_kernels": 3.0,
        "other_kernels.copy": 4.0,
    }
    assert coarse(terms) == {"matmul": 1.0, "other_kernels": 9.0}
