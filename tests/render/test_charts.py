"""Curves of charts: thinned and smoothed (pure)."""

import math

import pytest

from paceline.render.charts import smooth, thin


def test_thinning_keeps_ends_spikes_and_gaps():
    xs = list(range(10_000))
    ys = [math.sin(x / 500) for x in xs]
    ys[:3], ys[-3:] = [0.5, 0.0, 1.0], [0.0, 1.0, 0.5]
    ys[1234], ys[8888] = 50.0, -50.0
    ys[5000:5100] = [None] * 100
    few_xs, few_ys = thin(xs, ys, 1000)
    points = dict(zip(few_xs, few_ys, strict=True))
    assert len(points) <= 1002
    assert (points[1234], points[8888]) == (50.0, -50.0)
    assert {0, 9_999} <= points.keys()
    assert None in few_ys
    assert few_xs == sorted(few_xs)
    assert thin([1, 2], [3.0, None]) == ([1, 2], [3.0, None])


def test_smoothing_is_centred_and_skips_gaps():
    line = [float(x) for x in range(50)]
    assert smooth(line, 5) == pytest.approx(line)  # neither late nor bent at the ends
    assert smooth([1.0, None, 3.0], 1) == [1.0, 2.0, 3.0]
    assert smooth([None, None], 1) == [None, None]
