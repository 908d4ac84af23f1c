"""The size of a job: the one that ends first, costs least, or stays within a budget."""

import random

import pytest

from paceline.config.errors import InputError
from paceline.launch.choose import Aim, Size, choose, table

HOUR, DAY = 3600.0, 86400.0
SMALL = Size("a100", 1, 8, "fsdp 8", wait_s=60.0, run_s=40 * HOUR, usd=400.0)
MIDDLE = Size("a100", 4, 32, "fsdp 32", wait_s=HOUR, run_s=11 * HOUR, usd=440.0)
LARGE = Size("h100", 8, 64, "fsdp 64", wait_s=30 * HOUR, run_s=4 * HOUR, usd=900.0)
SIZES = (SMALL, MIDDLE, LARGE)


def test_waiting_counts():
    assert choose(SIZES, Aim()) == MIDDLE
    free = Size("h100", 8, 64, wait_s=None, run_s=4 * HOUR)
    assert choose((SMALL, MIDDLE, free), Aim()) == free


def test_the_cheapest_and_budgets():
    assert choose(SIZES, Aim(is_cheapest=True)) == SMALL
    assert choose(SIZES, Aim(usd=420.0)) == SMALL
    assert choose(SIZES, Aim(days=1.0, is_cheapest=True)) == MIDDLE
    with pytest.raises(InputError) as caught:
        choose(SIZES, Aim(usd=420.0, days=1.0))
    assert str(caught.value) == (
        "no size stays within 420 USD and 1 days: the fastest, --nodes 4 of a100, ends in 12 h 00 "
        "min for 440 USD, and the cheapest, --nodes 1 of a100, in 1 d 16 h for 400 USD; raise the "
        "budget, or shorten the job."
    )


def test_a_site_that_ends_jobs_early():
    assert choose(SIZES, Aim(is_cheapest=True, most_s=12 * HOUR)) == MIDDLE
    with pytest.raises(InputError) as caught:
        choose(SIZES[:2], Aim(most_s=5.5 * HOUR, steps=1000))
    assert str(caught.value) == (
        "the job takes 11 h 00 min with --nodes 4 of a100, and the site ends jobs after 5 h 30 "
        "min: train at most 500 steps at once (--set train.steps=500), allow more nodes, or a "
        "longer max_hours in the site's file."
    )


def test_what_cannot_run_is_not_chosen_and_says_why():
    refused = Size("a100", 1, 8, refused="it lacks 3 GB a device.")
    assert choose((refused, MIDDLE), Aim()) == MIDDLE
    with pytest.raises(InputError, match="lacks 3 GB"):
        choose((refused,), Aim())


def test_what_is_not_known_is_not_guessed():
    unknown = (Size("", 1, 8), Size("", 2, 16))
    assert choose(unknown, Aim()) == unknown[0]
    with pytest.raises(InputError, match="can't be predicted"):
        choose(unknown, Aim(usd=3.0))
    with pytest.raises(InputError, match="usd_per_device_hour"):
        choose((Size("", 1, 8, run_s=1.0),), Aim(is_cheapest=True))


def test_on_drawn_situations_it_is_never_slower_than_a_fixed_size():
    draw = random.Random(0)
    for _ in range(200):
        sizes = [
            Size("x", n, 8 * n, wait_s=draw.uniform(0, DAY), run_s=draw.uniform(1, DAY) / n**0.9)
            for n in (1, 2, 4, 8)
        ]
        assert choose(sizes, Aim()).end_s == min(size.end_s for size in sizes)


def test_a_size_that_is_refused_says_so_in_a_word():
    refused = Size("", 8, 64, refused="8 nodes are too many for this batch.")
    assert table((MIDDLE, refused), MIDDLE).rows[1][-1] == "refused"


def test_the_table_has_each_size():
    shown = table(SIZES, MIDDLE)
    assert shown.strong == 1
    assert shown.rows[1] == (
        *("a100", "4", "32", "1 h 00 min", "11 h 00 min", "12 h 00 min", "440", "fsdp 32"),
    )
