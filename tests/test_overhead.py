"""The overhead benchmark: its arithmetic, then how it runs programs. Nothing is measured here."""

import sys

import pytest

from benchmarks.overhead import (
    _TITLES,
    CONTENDERS,
    OURS,
    Block,
    BlockError,
    figures,
    largest_disagreement,
    measure,
    rows,
    run_on_terminal,
)
from benchmarks.tables import Spread, markdown


def _block(contender: str, number: int, rate: float, losses: tuple[float, ...] = (8.0, 7.5)):
    return Block(contender, number, rate, 2.0 + number, [2.0 + number, 4.0], list(losses))


def _rounds() -> list[Block]:
    """The machine is half as fast in round 1; Paceline is 2, 4 and 6 % slower than the others."""
    pairs = [(98, 100), (48, 50), (94, 100)]
    return [
        _block(contender, number, ours if contender == OURS else theirs)
        for number, (ours, theirs) in enumerate(pairs)
        for contender in CONTENDERS
    ]


def test_ratios_are_taken_within_a_round():
    of = figures(_rounds())["plain DDP"]["ours_over_this"]
    assert (of.median, of.low, of.high) == pytest.approx((0.96, 0.94, 0.98))


def test_rates_and_first_steps_keep_their_range():
    of = figures(_rounds())[OURS]
    assert of["tokens_per_s"] == Spread(94, 48, 98)
    assert of["first_step_s"] == Spread(3.0, 2.0, 4.0)
    assert of["ours_over_this"] == Spread(1.0, 1.0, 1.0)


def test_the_tables_have_a_row_for_each_contender():
    lines = markdown(_TITLES, rows(figures(_rounds())), [""]).splitlines()
    assert len(lines) == 2 + len(CONTENDERS)
    assert lines[2] == "| Paceline | 94 (48 – 98) |  | 3.0 (2.0 – 4.0) |"
    assert lines[3].startswith("| plain DDP | 100 (50 – 100) | 0.960 (0.940 – 0.980) |")


def test_a_contender_that_computes_something_else_shows():
    blocks = [_block(name, 0, 1.0) for name in CONTENDERS]
    assert largest_disagreement(blocks) == 0
    blocks.append(_block("Fabric", 1, 1.0, (8.0, 7.4)))
    assert largest_disagreement(blocks) == pytest.approx(0.1)


def test_every_contender_is_first_in_its_turn(monkeypatch):
    order = []

    def run(contender, number, _job, _folder):
        order.append(contender)
        return _block(contender, number, 1.0)

    monkeypatch.setattr("benchmarks.overhead.run_block", run)
    measure(None, 4, None, lambda _line: None)
    assert order[::4] == list(CONTENDERS)
    assert all(set(order[first : first + 4]) == set(CONTENDERS) for first in range(0, 16, 4))


def test_a_program_runs_on_a_terminal():
    run_on_terminal([sys.executable, "-c", "import sys; sys.exit(not sys.stdout.isatty())"])


def test_a_program_that_fails_is_told_with_what_it_showed():
    with pytest.raises(BlockError, match=r"code 3:\s+no such device"):
        run_on_terminal([sys.executable, "-c", "print('no such device'); raise SystemExit(3)"])
