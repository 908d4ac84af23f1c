"""Measured: costs that are known come back from the times that they make, and files are checked."""

import json
import random
from dataclasses import replace

import pytest

from paceline.config.errors import InputError
from paceline.config.model import Model
from paceline.generate.work import Work
from paceline.plan.serving.costs import Curve, StepCosts
from paceline.plan.serving.measured import (
    MeasuredHost,
    MeasuredPass,
    MeasuredServing,
    read_measured,
)

MODEL = Model(
    vocab_size=1000, hidden_size=64, ffn_size=128, num_layers=2, num_heads=4, max_seq_len=512
)
HEAD = MODEL.num_embedding_params
BODY = MODEL.num_matmul_params - HEAD
KNOTS = (1, 2, 4, 8, 16, 32, 64)
# Seconds of a parameter by rows: flat where weights are read, then in proportion.
RATES = [1e-9 * max(1, rows / 8) for rows in KNOTS]
KNOWN = StepCosts(
    Curve(KNOTS, [BODY * rate for rate in RATES]),
    Curve(KNOTS, [HEAD * rate for rate in RATES]),
    block_s=2e-6,
    part_s=3e-5,
    key_s=4e-8,
    pair_s=5e-9,
    host_s=1e-4,
    text_s=2e-5,
)
WORKS = [
    *(Work(n, single=n, blocks=n * each) for n in KNOTS for each in (1, 3, 8)),
    *(Work(1, parts=1, in_parts=n, pairs=n * n // 2) for n in KNOTS[1:]),
    *(
        Work(1, parts=1, in_parts=n, keys=n + before, pairs=n * (n + before))
        for n in KNOTS[1:]
        for before in (64, 400)
    ),
    Work(20, single=19, blocks=40, parts=1, in_parts=40, pairs=800),
]


def measured(noise=0.0, seed=0):
    """Times that these costs make, each a little off."""
    draw = random.Random(seed)

    def times(seconds):
        return tuple(seconds * (1 + draw.uniform(-noise, noise)) for _ in range(5))

    without_host = replace(KNOWN, host_s=0.0, text_s=0.0)
    return MeasuredServing(
        model=MODEL,
        form="fp32",
        device="some CPU",
        source="a test",
        block_size=32,
        num_blocks=100,
        max_tokens=64,
        max_sequences=32,
        start_s=2.0,
        resident_bytes=10**8,
        passes=tuple(
            MeasuredPass(**vars(work), seconds=times(without_host.terms(work).total))
            for work in WORKS
        ),
        hosts=tuple(
            MeasuredHost(choices=n, seconds=times(KNOWN.host_s + n * KNOWN.text_s))
            for n in (1, 8, 32)
        ),
    )


def test_known_costs_come_back():
    found = measured().costs()
    assert found.body.seconds == pytest.approx(KNOWN.body.seconds, rel=1e-6)
    assert found.head.seconds == pytest.approx(KNOWN.head.seconds, rel=1e-6)
    for name in ("block_s", "part_s", "key_s", "pair_s", "host_s", "text_s"):
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=1e-5), name
    assert max(map(abs, measured().errors())) < 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_times_that_are_off_by_a_tenth_are_missed_by_less(seed):
    noisy = measured(0.1, seed)
    costs = noisy.costs()
    assert min(costs.body.seconds) >= 0
    assert min(costs.block_s, costs.part_s, costs.key_s, costs.pair_s) >= 0
    for work in WORKS:
        assert costs.terms(work).total == pytest.approx(KNOWN.terms(work).total, rel=0.1)


def test_a_file_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "fp32.json"
    file.write_text(measured().model_dump_json())
    assert read_measured(file) == measured()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: "{", "is not valid JSON"),
        (lambda raw: [], "object"),
        (lambda raw: raw["passes"][0].update(seconds=[0.1, -1]), "greater than 0"),
        (lambda raw: raw["passes"][0].update(single=0, in_parts=0), "has no tokens"),
        (lambda raw: raw["passes"][0].update(seconds=[0.1]), "is not complete"),
        (lambda raw: raw.pop("hosts"), "lacks hosts"),
        (lambda raw: raw.update(passes=[]), "at least 1 item"),
        (lambda raw: raw.update(num_blocks=10**12), "less than or equal to 1000000"),
        (lambda raw: raw["model"].update(num_heads=-1), "num_heads"),
        (lambda raw: raw.update(extra=1), "extra"),
    ],
)
def test_a_damaged_file_is_refused_in_a_sentence(tmp_path, change, said):
    raw = json.loads(measured().model_dump_json())
    changed = change(raw)
    file = tmp_path / "fp32.json"
    text = changed if isinstance(changed, str) else json.dumps([] if changed == [] else raw)
    file.write_text(text)
    with pytest.raises(InputError, match=said) as error:
        read_measured(file)
    assert "paceline bench serve" in str(error.value)
    assert "\n" not in str(error.value)
